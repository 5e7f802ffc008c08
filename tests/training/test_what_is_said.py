"""What a run says of itself: its precision and problems at the start, rewards that fail, and the
same faults from Python."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tiny_run import EVEN_LETTERS, check_refused, faults, metric_rows, train, write_run

from fp8rl_jax.cli.load import load_config
from fp8rl_jax.cli.main import main
from fp8rl_jax.config.run import RolloutConfig, RunConfig
from fp8rl_jax.config.tasks import RewardConfig, TaskConfig
from fp8rl_jax.config.training import EvaluationConfig, TrainerConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.training.loop import train as run
from fp8rl_jax.training.setup import build

START = "{}: 64 problems to train on, 8 held out, 0 dropped as too long"
SHORT = ["--trainer.steps", "1", "--checkpoint.every", "0"]
REWARD = """
def always(completion, **_):
    print("seen", repr(completion))
    raise ValueError("no such answer")

calls = 0

def sometimes(completion, **_):
    global calls
    calls += 1
    return 1.0 if calls % 4 else 1 / 0
"""


@pytest.fixture
def run_file(tmp_path):
    return write_run(tmp_path, EVEN_LETTERS)


def failing(tmp_path, which, **changes):
    """A run whose reward fails."""
    (tmp_path / "rewards.py").write_text(REWARD)
    return write_run(
        tmp_path, {"task": {"reward": {"function": f"{tmp_path}/rewards.py:{which}"}}}, changes
    )


@pytest.mark.slow
def test_every_run_says_its_precision_and_its_problems(run_file, tmp_path, capsys):
    assert train(run_file, tmp_path / "out", "--recipe", "fp8-rollout", *SHORT) == 0
    assert capsys.readouterr().out.splitlines()[0] == START.format(
        "fp8-rollout recipe, float32 compute"
    )
    warm = ["--sft.output", str(tmp_path / "warm"), "--sft.steps", "1", "--sft.batch-size", "8"]
    assert main(["sft", run_file, *warm]) == 0
    assert capsys.readouterr().out.splitlines()[0] == START.format(
        "bf16 recipe, float32 compute, exact"
    )
    assert main(["eval", run_file, "--output", str(tmp_path / "eval")]) == 0
    said = capsys.readouterr()
    assert START.format("bf16 recipe, float32 compute, exact") in said.err.splitlines()
    answer = json.loads(said.out)  # alone on standard output
    assert (answer["compute_dtype"], answer["eval/failed_rewards"]) == ("float32", 0)
    assert train(run_file, tmp_path / "dry", "--dry-run") == 0
    assert (
        START.format("bf16 recipe, float32 compute, exact") in capsys.readouterr().out.splitlines()
    )


def test_a_step_that_takes_more_than_there_is_is_warned_about(run_file, tmp_path, caplog):
    assert train(run_file, tmp_path / "out", "--task.train-size", "3", "--dry-run") == 0
    assert (
        "3 problems to train on are fewer than the 4 that a step takes (rollout.prompts_per_step)"
        in caplog.text
    )
    assert "so it meets some of them more than once; raise task.train_size = 3" in caplog.text
    caplog.clear()
    (tmp_path / "five.jsonl").write_text(
        "".join(f'{{"prompt": "{i}", "answer": {i}}}\n' for i in range(5))
    )
    five = {
        "kind": "jsonl",
        "name": f"{tmp_path}/five.jsonl",
        "train_size": 0,
        "eval_size": 2,
        "prompt_template": "{question}",
    }
    of_five = write_run(tmp_path, {"task": {**five, "args": None}})
    assert train(of_five, tmp_path / "out", "--dry-run") == 0
    assert "3 problems to train on are fewer than the 4" in caplog.text
    assert "give more problems, or hold out fewer than 2 (task.eval_size)" in caplog.text
    caplog.clear()
    run_file = write_run(tmp_path, EVEN_LETTERS)
    assert train(run_file, tmp_path / "out", "--task.train-size", "4", "--dry-run") == 0
    assert "fewer than" not in caplog.text
    assert main(["sft", run_file, "--dry-run"]) == 0  # 64 problems, 64 a step
    assert "fewer than" not in caplog.text
    assert main(["sft", run_file, "--dry-run", "--sft.batch-size", "65"]) == 0
    assert "fewer than the 65 that a step takes (sft.batch_size)" in caplog.text


@pytest.mark.parametrize(
    ("check", "message"),
    [("loop.check_same", "process_id=-1"), ("sft.check_batch", "'sft.batch_size'")],
)
def test_supervised_training_begins_with_processes_that_agree_and_batches_that_divide(
    tmp_path, capsys, monkeypatch, check, message
):
    def refuse(*given):
        raise UserError(f"refused: {given}")

    monkeypatch.setattr(f"fp8rl_jax.training.{check}", refuse)
    out = tmp_path / "warm"
    assert main(["sft", write_run(tmp_path, EVEN_LETTERS), "--sft.output", str(out)]) == 2
    (line,) = faults(capsys)
    assert "refused: (" in line and message in line and not out.exists()


def test_answers_that_no_completion_equals_are_warned_about(tmp_path, caplog):
    path = tmp_path / "gsm8k.jsonl"
    path.write_text(
        "".join(f'{{"prompt": "{i}", "answer": "1+{i} is\\n#### {i + 1}"}}\n' for i in range(5))
    )
    task = {"kind": "jsonl", "name": str(path), "train_size": 0, "eval_size": 1, "args": None}
    of_gsm8k = write_run(tmp_path, {"task": {**task, "prompt_template": "{question}"}})
    hint = 'set task.answer_extract = "after_hashes"'
    assert train(of_gsm8k, tmp_path / "out", "--dry-run") == 0
    assert "5 of 5 answers have a line #### RESULT in them" in caplog.text and hint in caplog.text
    caplog.clear()
    assert (
        train(of_gsm8k, tmp_path / "out", "--task.answer-extract", "after_hashes", "--dry-run") == 0
    )
    assert hint not in caplog.text


def test_answers_that_do_not_pass_are_named_and_the_run_goes_on(tmp_path, caplog):
    path = tmp_path / "sums.jsonl"
    rows = [f'{{"prompt": "{i}", "answer": "{i or "none"}"}}\n' for i in range(5)]
    path.write_text("".join(rows))
    task = {"kind": "jsonl", "name": str(path), "train_size": 0, "eval_size": 2, "args": None}
    reward = {"extract": "last_number"}
    run = write_run(tmp_path, {"task": {**task, "reward": reward, "prompt_template": "{question}"}})
    assert main(["eval", run, "--output", str(tmp_path / "eval")]) == 0
    (said,) = [line for line in caplog.messages if line.startswith("exact: ")]
    assert "own answer is not correct" in said and "for 1 of 5 problems: " in said
    assert "sums.jsonl:1 ('none')" in said and "`fp8rl doctor --rewards CONFIG`" in said


@pytest.mark.slow
def test_a_run_with_nothing_held_out(run_file, tmp_path, capsys):
    none = ["--task.eval-size", "0"]
    assert train(run_file, tmp_path / "out", *none, *SHORT) == 0
    assert "64 problems to train on, 0 held out" in capsys.readouterr().out
    assert (
        main(["sft", run_file, *none, "--sft.steps", "1", "--sft.output", str(tmp_path / "warm")])
        == 0
    )
    assert "nothing held out; model in" in capsys.readouterr().out
    assert main(["eval", run_file, *none]) == 2
    assert faults(capsys) == [
        "fp8rl: error: task.eval_size = 0 holds out no problem to evaluate on; raise it"
    ]
    wanted = (
        "evaluation.every = 2 needs held-out problems, and task.eval_size = 0 holds out "
        "none; set evaluation.every = 0"
    )
    check_refused(run_file, tmp_path / "two", capsys, [*none, "--evaluation.every", "2"], wanted)


def test_a_reward_that_always_fails_stops_the_run(tmp_path, capsys, caplog):
    out = tmp_path / "out"
    run_file = failing(
        tmp_path, "always", trainer={"steps": 9}, evaluation={"every": 9, "examples": 8}
    )
    assert train(run_file, out) == 2
    (line,) = faults(capsys)
    assert (
        "every reward failed in 3 steps in a row (trainer.abort_after_failed_rewards): "
        "ValueError: no such answer" in line
    )
    assert f"what rewards print is in {out}/rewards.log" in line
    for step in range(3):
        assert (
            f"step {step}: 16 of 16 rewards failed: ValueError: no such answer (rewards.py:"
            in caplog.text
        )
    assert "evaluation: 8 of 8 rewards failed: ValueError" in caplog.text
    assert [row["step"] for row in metric_rows(out)] == [0, 1, 2]
    assert (out / "rewards.log").read_text().count("seen ") == 8 + 3 * 16
    assert main(["eval", run_file, "--output", str(tmp_path / "eval")]) == 2
    (line,) = faults(capsys)
    assert "every reward failed, so there is no accuracy" in line


def test_a_reward_that_fails_at_times_is_counted_and_the_run_goes_on(tmp_path, capsys, caplog):
    out = tmp_path / "out"
    flags = ["--trainer.abort-after-failed-rewards", "1", "--trainer.steps", "2"]
    assert train(failing(tmp_path, "sometimes"), out, *flags) == 0
    assert (
        "step 0: 4 of 16 rewards failed: ZeroDivisionError: division by zero (rewards.py:"
        in caplog.text
    )
    assert [row["reward/errors"] for row in metric_rows(out)] == [4, 4]
    assert not (out / "rewards.log").exists()


@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        ({"trainer": TrainerConfig(steps=0)}, ["--trainer.steps", "0"]),
        ({"trainer": TrainerConfig(micro_batch_prompts=3)}, ["--trainer.micro-batch-prompts", "3"]),
        ({"rollout": RolloutConfig(prompts_per_step=0)}, ["--rollout.prompts-per-step", "0"]),
        ({"evaluation": EvaluationConfig(batch_size=0)}, ["--evaluation.batch-size", "0"]),
        (
            {"task": TaskConfig(name="", eval_size=-1)},
            ["--task.name", "", "--task.eval-size", "-1"],
        ),
        ({"task": TaskConfig(eval_size=0)}, ["--task.eval-size", "0"]),
        ({"recipe": "fp8-r"}, ["--recipe", "fp8-r"]),
    ],
)
def test_python_and_the_command_line_refuse_the_same_in_the_same_words(changes, flags):
    with pytest.raises(UserError) as from_flags:
        load_config(RunConfig, flags, "fp8rl train")
    with pytest.raises(UserError) as from_python:
        build(replace(RunConfig(), **changes))
    assert str(from_python.value) == str(from_flags.value)


def test_a_run_with_a_reward_and_problems_of_a_notebook(tmp_path, capsys):
    wanted = {"e": 1.0}

    def score(completions, letter):
        return [
            wanted["e"] * text.count(each) for text, each in zip(completions, letter, strict=True)
        ]

    letters = [chr(97 + i % 26) for i in range(72)]
    rows = [{"prompt": f"{i}=", "answer": x, "letter": x} for i, x in enumerate(letters)]
    given = {"dataset": rows, "eval_dataset": rows[:8]}
    config = load_config(
        RunConfig, [write_run(tmp_path), *SHORT, "--output", str(tmp_path / "run")], "fp8rl train"
    )
    config = replace(config, task=TaskConfig(reward=RewardConfig(num_workers=1)))
    setup = build(config, reward=score, **given)
    assert (len(setup.train), len(setup.held_out)) == (64, 8)
    run(setup)
    said = [x for x in capsys.readouterr().out.splitlines() if x.startswith("reward: ")]
    log = tmp_path / "run" / "rewards.log"
    assert said == [
        "reward: runs on copies, in worker processes; your variables do not change, and what it "
        f"prints is in {log}"
    ]
    (row,) = metric_rows(tmp_path / "run")
    assert "rewards/score/mean" in row and row["reward/errors"] == 0
    assert (
        json.loads((tmp_path / "run" / "samples.jsonl").read_text().splitlines()[0])["answer"]
        in "abcdefghijklmnopqrstuvwxyz"
    )
    written = str(tmp_path / "run" / "config.toml")
    assert main(["eval", written]) == 2
    assert (
        'task.kind = "python": the problems of this run (list of 72) were given in Python'
        in faults(capsys)[-1]
    )
    with pytest.raises(
        UserError,
        match="task.reward.function = '<python>:score' was given in Python; give reward= again",
    ):
        build(load_config(RunConfig, [written], "fp8rl train"), **given)
    again = load_config(RunConfig, [written, "--resume", "--trainer.steps", "2"], "fp8rl train")
    setup = build(again, reward=score, **given)
    run(setup)
    assert [row["step"] for row in metric_rows(tmp_path / "run")] == [0, 1]


def test_python_may_not_give_what_no_flag_could():
    with pytest.raises(
        UserError,
        match='^compute_dtype: expected one of "bfloat16", "float16", "float32", got \'fp32\'$',
    ):
        build(RunConfig(compute_dtype="fp32"))
