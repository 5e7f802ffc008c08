"""A run whose updates are packed, or cut, has the curve of one whose updates are padded."""

from __future__ import annotations

import pytest
from parallel.test_joined_run import RUN, measured
from training.test_loop import rows

from fp8rl_jax.cli.main import main

FLAGS = {
    "padded": [],
    "packed": ["--trainer.packing", "--trainer.pack-tokens", "40"],
    "cut": ["--trainer.length-buckets"],
}


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.toml"
    # the joined run's reward differs between the samples of a prompt, and a quarter of its bytes end a completion
    wide = RUN.replace("max_new_tokens = 6", "max_new_tokens = 12").replace("max_prompt_tokens = 6", "max_prompt_tokens = 20")
    path.write_text(wide)
    return str(path)


@pytest.mark.slow
def test_packed_and_cut_runs_have_the_curve_of_the_padded_one(run_file, tmp_path):
    shared = ["--trainer.steps", "2", "--trainer.updates-per-rollout", "2", "--trainer.micro-batch-prompts", "1"]
    shared += ["--evaluation.every", "0", "--rl.kl-coefficient", "0.1", "--rl.aggregation", "fixed_length"]
    # Adam divides by the size of a gradient: it must not be that of rounding
    shared += ["--optimizer.eps", "1e-4"]
    for name, flags in FLAGS.items():
        assert main(["train", run_file, "--output", str(tmp_path / name), *shared, *flags]) == 0
    plain = rows(tmp_path / "padded")
    for name in ("packed", "cut"):
        for found, expected in zip(rows(tmp_path / name), plain, strict=True):
            assert found["perf/padding_fraction"] < expected["perf/padding_fraction"] - 0.05
            assert measured(found) == pytest.approx(measured(expected), rel=1e-4, abs=1e-6), name
    assert plain[0]["optim/grad_norm"] > 0.1 and plain[0]["reward/mean"] != plain[1]["reward/mean"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--trainer.pack-tokens", "40"], "trainer.pack_tokens has no use without trainer.packing"),
        (["--trainer.packing", "--trainer.pack-tokens", "31"], "trainer.pack_tokens = 31 does not hold"),
        (["--trainer.packing", "--trainer.length-buckets"], "set one of them"),
        (["--trainer.attention-chunk", "-1"], "trainer.attention_chunk must not be negative"),
    ],
)
def test_faults_are_one_line(run_file, tmp_path, capsys, flags, message):
    assert main(["train", run_file, "--output", str(tmp_path / "out"), *flags]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fp8rl: error:")]
    assert len(errors) == 1 and message in errors[0]
