"""What is to be done: jobs, the parts that they belong to, and whether they run on a card or in
miniature on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import jax

from experiments.benchmarks.rounds import Plan
from pallas_kernels.backend import Backend
from pallas_kernels.check.cases import OPERATIONS, Case, cases_of

REAL_PLAN, TINY_PLAN = Plan(rounds=7, warmup=1), Plan(rounds=2, warmup=1)


@dataclass(frozen=True)
class Setting:
    """
    Attributes:
        tiny: miniature, on whatever device JAX has; nothing that it measures counts.
        torch_python: interpreter of the peers torch and Triton; empty: without them.
        profile: record the kernels of what is timed, too.
        compile_only: a timed job compiles its programs, for the cache, and runs none.
    """

    tiny: bool = False
    torch_python: str = ""
    profile: bool = False
    compile_only: bool = False

    @property
    def backend(self) -> Backend:
        return "reference" if self.tiny else "hopper"

    @property
    def plan(self) -> Plan:
        return TINY_PLAN if self.tiny else REAL_PLAN

    @property
    def operations(self) -> tuple[str, ...]:
        """Those whose cases are checked."""
        return ("grouped_matmul", "quantize") if self.tiny else OPERATIONS

    def cases(self, operation: str, sizes: str) -> tuple[Case, ...]:
        """The cases of an operation; in miniature, its first small one for either size."""
        return cases_of(operation, "small")[:1] if self.tiny else cases_of(operation, sizes)


@dataclass(frozen=True)
class Job:
    """One result of a part.

    Attributes:
        label: unique in its part.
        run: what measures it.
        sources: modules that the result depends on, with all that they import: it is out of date
            when one of them changes.
        operation: whose kernels it runs; jobs of one that has hung twice are left for the next
            command.
        first: one of those that are wanted before the rest of any part.
        seconds: the most that it may take, its compilations included; longer than that, it is taken
            for one that hangs.
    """

    label: str
    run: Callable[[], dict[str, Any]]
    sources: tuple[str, ...]
    operation: str
    first: bool = False
    seconds: float = 90.0


@dataclass(frozen=True)
class Part:
    """
    Attributes:
        name: on the command line, and of its file.
        module: in this package; its `jobs(setting)` are in order of value.
        parallel: its jobs run many at a time, each in a process of its own; else they are timed,
            and nothing else runs.
        ahead: the programs of its jobs are compiled before, many at a time.
    """

    name: str
    module: str
    parallel: bool = False
    ahead: bool = True

    @property
    def predictable(self) -> bool:
        """Whether what its jobs have taken says how long the next one takes."""
        return self.parallel or self.ahead

    def jobs(self, setting: Setting) -> list[Job]:
        """What is to be measured. Making the list runs nothing."""
        return import_module(f"experiments.benchmarks.gpu.{self.module}").jobs(setting)


PARTS = {
    part.name: part
    for part in (
        Part("checks", "checks", parallel=True, ahead=False),
        Part("copy", "copying"),
        Part("matmul", "products"),
        Part("attention", "attention"),
        Part("grouped", "grouped"),
        Part("formats", "formats"),
        Part("decode", "decode", ahead=False),
        Part("step", "training", ahead=False),
        Part("exact", "exact", ahead=False),
        Part("quantize", "quantizers"),
    )
}


def arrays_of(case: Case, key: jax.Array) -> tuple:
    """A case's arguments, made by one program."""
    return jax.jit(case.arguments)(key)
