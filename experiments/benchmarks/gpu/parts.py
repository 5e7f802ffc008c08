"""The parts, in order of value, and how long each may take."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module

from experiments.benchmarks.gpu.compare import Job
from experiments.benchmarks.gpu.setting import Setting


@dataclass(frozen=True)
class Part:
    """
    Attributes:
        name: on the command line, and of its file.
        module: in this package; its `jobs(setting, stack)` are what is measured, in order of value.
        seconds: it begins no job after these.
        stall_seconds: a job that takes longer is taken for one that hangs.
        memory: of the card's, what JAX takes at its start; peers of their own process need the rest.
    """

    name: str
    module: str
    seconds: float = 390.0
    stall_seconds: float = 150.0
    memory: float = 0.75

    def jobs(self, setting: Setting, stack: ExitStack) -> list[Job]:
        """What is to be measured; what the jobs hold open is closed with `stack`."""
        make: Callable[[Setting, ExitStack], list[Job]] = import_module(f"experiments.benchmarks.gpu.{self.module}").jobs
        return make(setting, stack)


PARTS = {
    part.name: part
    for part in (
        Part("checks", "checks"),
        Part("copy", "copying"),
        Part("matmul", "products", stall_seconds=330.0),
        Part("grouped", "grouped"),
        Part("attention", "attention", memory=0.9),
        Part("quantize", "quantizers"),
        Part("step", "training", stall_seconds=440.0, memory=0.92),
    )
}
