"""How a part is run: on the card with real shapes, or in miniature on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from experiments.benchmarks.rounds import Plan
from pallas_kernels.backend import Backend
from pallas_kernels.check.cases import OPERATIONS, Case, cases_of

REAL_PLAN, TINY_PLAN = Plan(rounds=7, warmup=1), Plan(rounds=2, warmup=1)
CACHE_BYTES = 64 * 2**20  # an H200's second-level cache, rounded up


@dataclass(frozen=True)
class Setting:
    """
    Attributes:
        tiny: miniature, on whatever device JAX has; nothing that it measures counts.
        torch_python: interpreter of the peers torch and Triton.
        profile: record the kernels of what is timed, too.
    """

    tiny: bool = False
    torch_python: str = "python3"
    profile: bool = False

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


def arrays_of(case: Case, key: jax.Array) -> tuple:
    """A case's arguments, made by one program."""
    return jax.jit(case.arguments)(key)
