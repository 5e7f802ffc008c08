"""Model FLOPs against a count token by token, peaks, and the metrics of a step."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from fp8rl_jax.models.config import ExpertsConfig, PolicyConfig
from fp8rl_jax.training import performance
from fp8rl_jax.training.performance import Clock, peak_flops, update_flops

CONFIG = PolicyConfig("llama", 131, 64, 160, 3, 4, 2, 16)
# a token uses 4 experts of 40 in the middle layer: as many parameters as the 160 of the others
EXPERTS = ExpertsConfig(
    count=6, per_token=4, intermediate_size=40, normalize=True, dense_layers=(0, 2)
)
MIXTURE = replace(CONFIG, architecture="qwen3_moe", experts=EXPERTS, sliding_window=5)


def by_hand(
    prompts: list[int], completions: list[int], window: int = 10**6, router: int = 0
) -> float:
    """Every token on its own, as the paper counts."""
    linears = 3 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 160) + router
    total = 0.0
    for length in prompts:
        total += sum(
            2 * linears + 4 * 3 * 64 * min(position + 1, window) for position in range(length)
        )
    for row, length in enumerate(completions):
        start = prompts[row // (len(completions) // len(prompts))]
        keys = [min(start + position + 1, window) for position in range(length)]
        total += sum(2 * linears + 4 * 3 * 64 * seen + 2 * 64 * 131 for seen in keys)
    return 3 * total


@pytest.mark.parametrize(
    ("prompts", "completions"), [([5], [7]), ([3, 9], [4, 0, 1, 8]), ([2], [1, 1, 6])]
)
def test_flops_equal_a_count_token_by_token(prompts, completions):
    lengths = np.asarray(prompts), np.asarray(completions)
    assert update_flops(CONFIG, *lengths) == pytest.approx(by_hand(prompts, completions))
    # without the gradients of the weights: one forward's products less, attention's apart
    products = (
        2 * 3 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 160) * (sum(prompts) + sum(completions))
    )
    products += 2 * 64 * 131 * sum(completions)
    assert update_flops(CONFIG, *lengths, frozen=True) == pytest.approx(
        by_hand(prompts, completions) - products
    )
    assert update_flops(MIXTURE, *lengths) == pytest.approx(
        by_hand(prompts, completions, window=5, router=6 * 64)
    )


def test_peaks_by_jax_device_names():
    assert peak_flops("NVIDIA H200") == peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12 and peak_flops("NVIDIA GB200") == 2500e12
    assert peak_flops("cpu") is None and peak_flops("NVIDIA H2000") is None


def clock() -> Clock:
    made = Clock()
    made.seconds = {
        "time/step": 10.0,
        "time/eval": 3.0,
        "time/ckpt": 1.0,
        "time/gen": 2.0,
        "time/train": 4.0,
    }
    made.work(CONFIG, np.asarray([5]), np.asarray([30, 30]))
    return made


def test_rates_leave_evaluation_and_checkpoints_out(monkeypatch):
    metrics = clock().metrics()
    devices = jax.device_count()
    assert metrics["perf/tok_per_s_gpu"] == 60 / devices / 6
    assert metrics["perf/tok_per_s_gpu_gen"] == 60 / devices / 2
    assert metrics["perf/tok_per_s_gpu_train"] == 60 / devices / 4
    assert metrics["perf/tflops_gpu_train"] == pytest.approx(
        by_hand([5], [30, 30]) / devices / 4 / 1e12
    )
    assert "perf/mfu_train" not in metrics and 0.01 < metrics["perf/memory_peak_gib"] < 100
    monkeypatch.setattr(performance, "peak_flops", lambda kind: 1e9)
    assert clock().metrics()["perf/mfu_train"] == pytest.approx(
        by_hand([5], [30, 30]) / devices / 4 / 1e9
    )


def test_parts_add_up():
    made = Clock()
    for _ in range(2):
        with made.enter("gen"), made.enter("inner"):
            pass
    assert (
        set(made.seconds) == {"time/gen", "time/inner"}
        and made.seconds["time/gen"] >= made.seconds["time/inner"] > 0
    )
