"""A run whose updates are packed, or cut, has the curve of one whose updates are padded."""

from __future__ import annotations

import pytest
from tiny_run import LEARNS, check_refused, column, measured, train, write_run

FLAGS = {
    "padded": [],
    "packed": ["--trainer.packing", "--trainer.pack-tokens", "40"],
    "cut": ["--trainer.length-buckets"],
}


@pytest.fixture
def run_file(tmp_path):
    return write_run(tmp_path, LEARNS, {"rollout": {"max_prompt_tokens": 20, "max_new_tokens": 12}})


@pytest.mark.slow
def test_packed_and_cut_runs_have_the_curve_of_the_padded_one(run_file, tmp_path):
    shared = [
        "--trainer.steps",
        "2",
        "--trainer.updates-per-rollout",
        "2",
        "--trainer.micro-batch-prompts",
        "1",
    ]
    shared += [
        "--evaluation.every",
        "0",
        "--rl.kl-coefficient",
        "0.1",
        "--rl.aggregation",
        "fixed_length",
    ]
    # Adam divides by the size of a gradient: it must not be that of rounding
    shared += ["--optimizer.eps", "1e-4"]
    for name, flags in FLAGS.items():
        assert train(run_file, tmp_path / name, *shared, *flags) == 0
    plain, padding = (
        measured(tmp_path / "padded"),
        column(tmp_path / "padded", "perf/padding_fraction"),
    )
    for name in ("packed", "cut"):
        assert all(column(tmp_path / name, "perf/padding_fraction") < padding - 0.05)
        for found, expected in zip(measured(tmp_path / name), plain, strict=True):
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-6), name
    assert plain[0]["optim/grad_norm"] > 0.1 and plain[0]["reward/mean"] != plain[1]["reward/mean"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--trainer.pack-tokens", "40"], "trainer.pack_tokens has no use without trainer.packing"),
        (
            ["--trainer.packing", "--trainer.pack-tokens", "31"],
            "trainer.pack_tokens = 31 does not hold",
        ),
        (["--trainer.packing", "--trainer.length-buckets"], "set one of them"),
        (["--trainer.attention-chunk", "-1"], "trainer.attention_chunk must not be negative"),
    ],
)
def test_faults_are_one_line(run_file, tmp_path, capsys, flags, message):
    check_refused(run_file, tmp_path / "out", capsys, flags, message)
