"""Where a step's time goes, and how much of the hardware it uses.

Model FLOPs count what the mathematics needs and nothing else: no padding, no recomputation
(rematerialization, chunked logits), real tokens only, each prompt once for its group, as the
trainer runs it. With N matrix parameters outside embedding and head (of experts those that a token
uses), n the width of all heads' queries plus that of what attention gives for them, and c the keys
that a token sees in all layers together:

    forward of a token     2 N + 2 n c      and 2 * hidden * vocab for a token whose log-probability
                                            is wanted
    update                 3 forwards (PaLM's convention, arXiv 2204.02311, appendix B); with a
                           frozen base, which has no
                           gradient of its own, 2 of its matrices and head, and the adapters' few
                           per cent are not counted

MFU divides by the dense bfloat16 peak of the card whatever the recipe, so that FP8 shows as a gain
and not as a new scale.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Generator
from contextlib import contextmanager

import jax
import numpy as np
from jaxtyping import Float, Int

from fp8rl_jax.config.chips import CHIPS
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.policy import matrix_parameters
from fp8rl_jax.parallel import PROGRESS

_OUTSIDE_STEP = ("time/eval", "time/ckpt")


def update_flops(
    config: PolicyConfig,
    prompt_lengths: Int[np.ndarray, " p"],
    completion_lengths: Int[np.ndarray, " b"],
    sampled: int | None = None,
    frozen: bool = False,
) -> float:
    """Count model FLOPs of a forward and backward pass over P prompts and B completions.

    Args:
        config: shape of the policy.
        prompt_lengths, completion_lengths: tokens.
        sampled: tokens whose log-probability is wanted, by default all of the completions.
        frozen: adapters are trained, on a frozen base.
    """
    prompts = np.asarray(prompt_lengths, np.float64)
    completions = np.asarray(completion_lengths, np.float64)
    starts = np.repeat(prompts, len(completions) // len(prompts))
    tokens = prompts.sum() + completions.sum()
    attention = attention_flops(config, prompts).sum()
    attention += (
        attention_flops(config, starts + completions) - attention_flops(config, starts)
    ).sum()
    head = (
        2
        * config.hidden_size
        * config.vocab_size
        * (completions.sum() if sampled is None else sampled)
    )
    matrices = 2 * matrix_parameters(config) * tokens
    return float((2 if frozen else 3) * (matrices + head) + 3 * attention)


def attention_flops(
    config: PolicyConfig, lengths: Float[np.ndarray, " b"] | Int[np.ndarray, " b"]
) -> Float[np.ndarray, " b"]:
    """Count model FLOPs of attention, forward in all layers, over the first tokens of B rows.

    Args:
        config: shape of the policy.
        lengths: of so many tokens.
    """
    windows = config.windows or (np.inf,) * config.num_layers
    rows = np.asarray(lengths, np.float64)
    keys = np.sum([_keys(rows, window) for window in windows], axis=0)
    return 2.0 * (config.q_size + config.attended_size) * keys


def _keys(tokens: np.ndarray, window: float) -> np.ndarray:
    """Keys that the first tokens of a row see together: 1 + 2 + ... up to `window`, which each
    later one sees."""
    ramp = np.minimum(tokens, window)
    return ramp * (ramp + 1) / 2 + (tokens - ramp) * ramp


def peak_flops(device_kind: str) -> float | None:
    """Look up the dense bfloat16 FLOP/s of one device, by jax's name of it.

    None where it is not known (a CPU, an unlisted card).
    """
    words = device_kind.lower().replace("-", " ").split()
    return next((chip.rate for name, chip in CHIPS.items() if name in words), None)


class Clock:
    """Seconds of each phase of a step, by metric name, and the work done in them. A step begins
    when its clock is made."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.seconds: dict[str, float] = {}
        self.tokens = self.flops = 0.0

    @contextmanager
    def enter(self, name: str) -> Generator[None]:
        """Add the time that the block takes to time/<name>."""
        start = time.perf_counter()
        with PROGRESS.enter(name):
            yield
        self.seconds[f"time/{name}"] = (
            self.seconds.get(f"time/{name}", 0.0) + time.perf_counter() - start
        )

    def work(
        self,
        config: PolicyConfig,
        prompt_lengths: np.ndarray,
        completion_lengths: np.ndarray,
        sampled: int | None = None,
        frozen: bool = False,
    ) -> None:
        """Note what the step sampled and trained on; arguments as in `update_flops`."""
        self.tokens = float(np.sum(completion_lengths) if sampled is None else sampled)
        self.flops = update_flops(config, prompt_lengths, completion_lengths, sampled, frozen)

    def metrics(self) -> dict[str, float]:
        """Give time/*, and after a rollout and an update perf/*.

        time/step counts since the clock was made. Of a device of any kind:

        perf/tok_per_s_gpu         completion tokens over the step without evaluation and checkpoint
        perf/tok_per_s_gpu_gen     over generation alone, and _train over the update alone
        perf/tflops_gpu_train      model FLOPs of the update
        perf/mfu_train             as a part of the device's peak, where that is known
        perf/memory_peak_gib       of the fullest device since the start; of this process where
                                   devices do not say
        """
        devices, times = (
            jax.device_count(),
            {"time/step": time.perf_counter() - self.start} | self.seconds,
        )
        if not {"time/gen", "time/train"} <= times.keys():
            return times
        step = times["time/step"] - sum(times.get(name, 0.0) for name in _OUTSIDE_STEP)
        rate = self.flops / devices / times["time/train"]
        metrics = {
            "perf/tok_per_s_gpu": self.tokens / devices / step,
            "perf/tok_per_s_gpu_gen": self.tokens / devices / times["time/gen"],
            "perf/tok_per_s_gpu_train": self.tokens / devices / times["time/train"],
            "perf/tflops_gpu_train": rate / 1e12,
            "perf/memory_peak_gib": _memory_peak() / 2**30,
        }
        peak = peak_flops(jax.local_devices()[0].device_kind)
        return times | metrics | ({} if peak is None else {"perf/mfu_train": rate / peak})


def _memory_peak() -> int:
    stats = [device.memory_stats() for device in jax.local_devices()]
    if all(stats):
        return max(s["peak_bytes_in_use"] for s in stats)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
