"""Whole runs of a tiny policy through the command line: both recipes, resume, faults."""

import json
import re
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest
from tiny_run import EVEN_LETTERS, LEARNS, check_refused, measured, train, write_run

from fp8rl_jax.cli.load import load_config
from fp8rl_jax.cli.main import main
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.statistics import wilson_interval
from fp8rl_jax.training.setup import build
from fp8rl_jax.weights.load import load_policy

ROOT = Path(__file__).parents[2]
EVALUATION = {"evaluation": {"every": 2, "examples": 8, "batch_size": 8}}


@pytest.fixture
def run_file(tmp_path):
    return write_run(tmp_path, EVEN_LETTERS, EVALUATION)


def test_run_and_resume_are_the_same_run(run_file, tmp_path, capsys):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(run_file, whole, "--recipe", "fp8-rl", "--plan.chip", "141e9") == 0
    said = capsys.readouterr().out.splitlines()
    assert said[1] == "model: built-in, random weights of seed 0; 47,808 parameters in 1 layers"
    assert said[2] == (
        "quantized: 7 of 7 linears; rollout weights e4m3, rollout inputs e4m3, KV cache e4m3"
    )
    assert re.fullmatch(r"device: 1 x cpu, \d+\.\d MB needed of 141\.0 GB each", said[3])
    assert said[-2].startswith(f"model: {whole / 'model'}; metrics")
    assert said[-1].startswith(f"next: fp8rl report {whole} ") and f"eval {whole} " in said[-1]
    assert train(run_file, parts, "--recipe", "fp8-rl") == 0
    needed = said[3].removesuffix(" of 141.0 GB each")
    assert f"{needed} each" in capsys.readouterr().out.splitlines()
    # what a run killed in step 3 leaves: the checkpoint of step 2, and lines that came after it
    (parts / "checkpoints" / "4").rename(tmp_path / "gone")
    assert train(run_file, parts, "--recipe", "fp8-rl", "--resume") == 0
    record = json.loads((parts / "run.json").read_text())
    assert len(record["earlier"]) == 1 and record["earlier"][0]["started"] < record["started"]
    assert record["backend"] in ("cpu", "reference")  # what "auto" was
    for one, other in zip(measured(whole), measured(parts), strict=True):
        assert {
            k: (one.get(k), other.get(k))
            for k in one.keys() | other.keys()
            if one.get(k) != other.get(k)
        } == {}
    first, second = load_policy(whole / "model"), load_policy(parts / "model")
    np.testing.assert_array_equal(first.layers.down_proj.value, second.layers.down_proj.value)
    last = measured(whole)[3]
    assert (
        last["mismatch/k3"] > 1e-9
        and np.isfinite(last["fp8/kv_scale_k"])
        and last["optim/skipped_steps"] == 0
    )
    assert {r["step"] for r in measured(whole) if "eval/accuracy" in r} == {0, 2, 4}
    assert (whole / "config.toml").exists() and (whole / "samples.jsonl").read_text().count(
        "\n"
    ) == 16
    capsys.readouterr()
    assert train(run_file, whole) == 2
    assert "holds a run already" in capsys.readouterr().err


def test_a_run_killed_behind_its_last_checkpoint_is_evaluated_when_resumed(run_file, tmp_path):
    out = tmp_path / "run"
    assert train(run_file, out, "--recipe", "fp8-rl") == 0
    whole = measured(out)
    rows = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text("".join(rows[:-1]))
    assert train(run_file, out, "--recipe", "fp8-rl", "--resume") == 0
    assert measured(out) == whole and whole[-1]["step"] == 4


def test_an_output_may_name_recipe_and_seed(run_file, tmp_path, capsys):
    flags = ["--trainer.steps", "1", "--seed", "3", "--dry-run"]
    assert main(["train", run_file, "--output", str(tmp_path / "{recipe}-{seed}"), *flags]) == 0
    config = RunConfig(output="runs/{recipe}-{seed}", seed=3)
    assert config.directory == Path("runs/bf16-3")
    check_refused(
        run_file, tmp_path / "{arm}", capsys, flags, "unknown placeholder {arm}; known: {recipe}"
    )


@pytest.mark.slow
def test_an_evaluation_between_steps_changes_no_step(tmp_path):
    """Where the rollout calibrates its cache, too: on the steps' training prompts, whatever it is
    asked in between."""
    rows = {}
    flags = [
        "--recipe",
        "fp8-rl",
        "--precision.kv-calibration",
        "rollout",
        "--precision.kv-rule",
        "verl",
    ]
    for every in (0, 1, 2):
        evaluation = {"evaluation": {"every": every, "examples": 8, "batch_size": 8}}
        out = tmp_path / str(every)
        assert train(write_run(tmp_path, LEARNS, evaluation), out, *flags) == 0
        rows[every] = [
            {k: v for k, v in row.items() if not k.startswith("eval/")} for row in measured(out)[:4]
        ]
    assert rows[0] == rows[1] == rows[2]
    assert all(0 < row["fp8/kv_scale_v"] < 1 and row["fp8/quant_snr_db_v"] > 20 for row in rows[0])
    # the step after the checkpoint has its scales again
    (tmp_path / "2" / "checkpoints" / "4").rename(tmp_path / "gone")
    assert train(str(tmp_path / "run.toml"), tmp_path / "2", *flags, "--resume") == 0
    again = [
        {k: v for k, v in row.items() if not k.startswith("eval/")}
        for row in measured(tmp_path / "2")[:4]
    ]
    assert again == rows[0]


def test_damaged_newest_checkpoint_is_passed_over(run_file, tmp_path, caplog, fault):
    out = tmp_path / "run"
    assert train(run_file, out) == 0
    for file in (out / "checkpoints" / "4").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    asked = time.monotonic()
    assert train(run_file, out, "--resume") == 0
    recovered = time.monotonic() - asked
    (said,) = (line for line in caplog.messages if "cannot be read" in line)
    fault("cut checkpoint", said, recovered=recovered, lost=2)
    assert [r["step"] for r in measured(out)] == [0, 1, 2, 3, 4]
    assert (out / "checkpoints" / "4").is_dir() and len(
        list(out.glob("checkpoint-4-damaged-*"))
    ) == 1


def test_several_updates_and_micro_batches(run_file, tmp_path):
    out = tmp_path / "run"
    flags = [
        "--trainer.updates-per-rollout",
        "2",
        "--trainer.micro-batch-prompts",
        "1",
        "--rl.kl-coefficient",
        "0.1",
    ]
    assert train(run_file, out, "--trainer.steps", "2", *flags) == 0
    # the first update of the run starts at the reference, and each later one is farther from it
    first, second = measured(out)[:2]
    assert second["ratio_max"] > 1 and 0 < first["kl"] < second["kl"]


@pytest.mark.slow
def test_dapo_draws_again_until_prompts_teach(tmp_path):
    """Half the rewards of the task itself are equal in a group of two; a resumed run has the rounds
    of the first."""
    run_file = write_run(tmp_path, EVALUATION)
    flags = [
        "--rl.dynamic-sampling.enabled",
        "--rl.dynamic-sampling.max-rounds",
        "4",
        "--rl.overlong.buffer",
        "3",
    ]
    flags += [
        "--rl.overlong.penalty",
        "0.5",
        "--rl.overlong.filter",
        "--rollout.samples-per-prompt",
        "2",
    ]
    flags += [
        "--rl.correction.method",
        "mis",
        "--task.reward.partial-credit",
        "--rl.entropy-coefficient",
        "0.01",
    ]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for out in (whole, parts):
        assert train(run_file, out, *flags) == 0
    (parts / "checkpoints" / "4").rename(tmp_path / "gone")
    assert train(run_file, parts, *flags, "--resume") == 0
    assert measured(whole) == measured(parts)
    steps = [row for row in measured(whole) if "rollout/rounds" in row]
    assert any(row["rollout/rounds"] > 1 for row in steps)
    assert all(row["rollout/teaching_prompts"] == 4 or row["rollout/rounds"] == 4 for row in steps)
    for row in steps:
        # linear from the fourth of six tokens on; what is shorter cannot earn
        least = -0.5 * (row["completions/mean_length"] - 3) / 3
        assert (
            -0.5 <= row["reward/overlong_penalty"] <= least + 1e-6 < 0
            and "correction/reject_frac" in row
        )
    assert (whole / "samples.jsonl").read_text().count("\n") == 16


BIASED = ["--rollout.logit-bias.97", "20", "--rl.correction.truncated-sampling", "behaviour"]
P3O = ["--rl.objective", "p3o", "--rl.correction.mode", "bypass"]


def test_stop_strings_bad_words_and_bias_shape_the_rollout(run_file, tmp_path):
    """A policy near chance writes a and b alone, never bb, up to the first ab; mismatch is still
    measured on the policy."""
    out = tmp_path / "run"
    flags = [
        *BIASED,
        "--rollout.logit-bias.98",
        "20",
        "--rollout.bad-words",
        "bb",
        "--rollout.stop-strings",
        "ab",
        "zz",
    ]
    assert train(run_file, out, "--trainer.steps", "2", *flags) == 0
    texts = [
        json.loads(line)["completion"] for line in (out / "samples.jsonl").read_text().splitlines()
    ]
    assert all(
        set(text) <= {"a", "b"} and "bb" not in text and "ab" not in text[:-1] for text in texts
    )
    assert any(text.endswith("ab") for text in texts) and all(
        text.endswith("ab") or len(text) == 6 for text in texts
    )
    steps = [row for row in measured(out) if "mismatch/k3" in row]
    assert len(steps) == 2 and all(row["mismatch/k3"] < 1e-8 for row in steps)
    assert all(0 <= row["completions/clipped_ratio"] < 1 for row in steps)
    # held-out answers are the policy's own: no bias
    assert measured(out)[0]["eval/mean_length"] == 6


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--rl.overlong.buffer", "7"],
            "rl.overlong.buffer = 7 is more than rollout.max_new_tokens = 6",
        ),
        (["--trainer.micro-batch-prompts", "3"], "trainer.micro_batch_prompts = 3 does not divide"),
        (["--rl.objective", "p3o"], 'rl.objective: "p3o" has the ratio to the policy that sampled'),
        (
            [*P3O, "--trainer.micro-batch-prompts", "2"],
            "trainer.micro_batch_prompts: the effective part",
        ),
        (["--recipe", "fp8-r"], "did you mean 'fp8-rl'"),
        (["--rollout.top-p", "0.9"], "truncated_sampling"),
        (["--rollout.bad-words", "x"], "truncated_sampling"),
        (["--rollout.logit-bias.97", "1"], "truncated_sampling"),
        ([*BIASED, "--rollout.logit-bias.ab", "1"], "rollout.logit_bias: 'ab' is 2 tokens"),
        ([*BIASED, "--rollout.temperature", "0"], "rollout.temperature: 0.0 is greedy"),
        (["--rollout.stop-strings", ""], "rollout.stop_strings: an empty text"),
        (["--model.path", "no-such-directory"], "no-such-directory"),
        (["--mesh.tensor", "3"], "mesh."),
        (["--rollout.max-prompt-tokens", "2"], "rollout.max_prompt_tokens = 2"),
    ],
)
def test_faults_are_one_line(run_file, tmp_path, capsys, fault, flags, message):
    asked = time.monotonic()
    line = check_refused(run_file, tmp_path / "out", capsys, flags, message)
    fault("settings", line, status=2, detected=time.monotonic() - asked)


@pytest.mark.slow
def test_a_run_whose_first_and_last_layers_stay_in_the_compute_dtype(tmp_path, capsys):
    run_file, out = (
        write_run(tmp_path, LEARNS, {"model": {"init": {"num_layers": 3}}}),
        tmp_path / "out",
    )
    flags = [
        "--recipe",
        "fp8-e2e",
        "--precision.first-layers-in-compute",
        "1",
        "--precision.last-layers-in-compute",
        "1",
    ]
    flags += ["--trainer.steps", "2", "--rollout.decode-layers", "scan"]
    assert train(run_file, out, *flags, "--dry-run") == 0
    assert "quantized linears: 7 of 21" in capsys.readouterr().out
    assert train(run_file, out, *flags) == 0
    before = build(load_config(RunConfig, [run_file], "fp8rl train")).session.weights.layers
    after = load_policy(out / "model").layers
    for name in ("q_proj", "down_proj"):
        moved = np.abs(
            np.asarray(getattr(after, name).value) - np.asarray(getattr(before, name).value)
        )
        assert (moved.max((1, 2)) > 1e-3).all()  # in every layer
    assert all(
        row["mismatch/k3"] < 1e-6 and row["optim/skipped_steps"] == 0 for row in measured(out)[:2]
    )


def test_the_example_of_a_recipe_of_ones_own_is_a_run(tmp_path, capsys):
    """Its row is where the configuration says it is, and is what the model becomes."""
    example = tomllib.loads((ROOT / "experiments" / "recipes" / "my_fp8.toml").read_text())
    run_file = write_run(tmp_path, {"model": {"init": {"num_layers": 3}}}, example)
    flags = ["--trainer.steps", "1", "--dry-run", "--plan.chip", "h100"]
    assert train(run_file, tmp_path / "out", *flags) == 0
    printed = capsys.readouterr().out
    assert "quantized linears: 7 of 21" in printed and "KV cache (float8_e4m3fn)" in printed
    assert '[recipes.my-fp8]\nbase = "fp8-e2e-kv"\n' in printed


def test_a_run_says_that_its_sides_quantize_unlike(run_file, tmp_path, caplog):
    flags = ["--recipe", "fp8-e2e", "--dry-run"]
    assert train(run_file, tmp_path / "out", *flags) == 0 and "quantize alike" not in caplog.text
    assert (
        train(run_file, tmp_path / "out", *flags, "--precision.rollout.scale", "power_of_two") == 0
    )
    (line,) = [record.message for record in caplog.records if "quantize alike" in record.message]
    assert (
        "weight: e4m3 128x128 power_of_two scales in the rollout, e4m3 128x128 float32 scales in "
        "the trainer; " in line
    )


def test_dry_run_writes_nothing(run_file, tmp_path, capsys):
    assert train(run_file, tmp_path / "out", "--recipe", "fp8-rl", "--dry-run") == 0
    printed = capsys.readouterr().out
    assert "quantized linears: 7 of 7" in printed and "KV cache" in printed
    assert not (tmp_path / "out").exists()


def test_warm_start_then_eval(run_file, tmp_path, capsys):
    out = tmp_path / "warm"
    assert (
        main(
            ["sft", run_file, "--sft.steps", "3", "--sft.batch-size", "8", "--sft.output", str(out)]
        )
        == 0
    )
    assert "Supervised warm start" in capsys.readouterr().out
    losses = [row["loss"] for row in measured(out) if "loss" in row]
    # from chance among 264 tokens
    assert losses[0] == pytest.approx(np.log(264), rel=0.02) and losses[1] < losses[0]
    assert main(["eval", run_file, "--model.path", str(out / "model"), "--recipe", "fp8-kv"]) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    interval = wilson_interval(answer["eval/accuracy"], answer["examples"])
    assert (answer["eval/accuracy_low"], answer["eval/accuracy_high"]) == pytest.approx(
        interval
    ) and answer["examples"] == 8
