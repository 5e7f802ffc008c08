"""The queue of an ablation: what is run, what is gone on with, and what is said of what failed."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rich.console import Console
from tiny_run import faults

import fp8rl_jax as fp8rl
from fp8rl_jax.ablation import runner
from fp8rl_jax.ablation.behaviour import settings
from fp8rl_jax.ablation.design import read_design
from fp8rl_jax.ablation.preflight import Preflight
from fp8rl_jax.ablation.record import make_record, run_entry
from fp8rl_jax.cli.main import main
from fp8rl_jax.durable import locked
from fp8rl_jax.errors import UserError
from fp8rl_jax.training.loop import holds_run

FAKE = (sys.executable, str(Path(__file__).with_name("fake_run.py")))
AUTO = {"rollout.decode_layers": "unroll"}


def behaves(**loss: float):
    """Stands for the golden runs: each arm has a loss of 0.5, or the one that is given."""

    def fingerprint(design) -> list[dict]:
        golden = {
            arm.name: {"rounding": "float32", "loss": [loss.get(arm.name, 0.5)]}
            for arm in design.arms
        }
        return [{"settings": settings(design), "golden": golden}]

    return fingerprint


@pytest.fixture
def fake(monkeypatch):
    """Runs that do nothing but write what runs leave; returns what sets their behaviour."""
    monkeypatch.setattr(runner, "_PROCESS", FAKE)
    monkeypatch.setattr(runner, "_POLL_SECONDS", 0.02)
    monkeypatch.setattr(runner, "write_page", lambda record: record.with_suffix(".html").touch())
    monkeypatch.setattr(
        runner,
        "preflight",
        lambda design: {arm.name: Preflight([], AUTO, 1e9, 1e8) for arm in design.arms},
    )
    monkeypatch.setattr(runner, "fingerprint", behaves())

    def behave(**does: str) -> None:
        named = {name.replace("_", "-"): what for name, what in does.items()}
        monkeypatch.setenv("FAKE_RUN", json.dumps(named))

    return behave


def ablate(path: str, **arguments) -> tuple[dict, list[str]]:
    """The record, and the lines that were said."""
    lines: list[str] = []
    done = fp8rl.ablate(path, report=lines.append, **arguments)
    return done.record, lines


def states(record: dict) -> dict[str, str]:
    return {run["directory"]: run["status"] for arm in record["arms"] for run in arm["runs"]}


def starts(name: str) -> list[str]:
    return Path("out", name, "starts.txt").read_text().splitlines()


@pytest.mark.slow
def test_a_study_of_two_arms_and_two_seeds(study, capsys):
    path = study()
    assert main(["ablate", path]) == 0
    said = capsys.readouterr().out
    record = json.loads(Path("out/ablation.json").read_text())
    assert set(states(record).values()) == {"finished"} and record["look"] == [1, 1]
    assert record["resolved"] == {
        "precision.backend": "reference",
        "rollout.decode_layers": "unroll",
        "trainer.loss_scale.mode": "none",
    }
    golden = record["fingerprint"]["golden"]
    assert golden["bf16"]["rounding"] == "float32" and golden["fp8"]["rounding"] == "fp8"
    (comparison,) = record["comparisons"]
    assert (comparison["arm"], comparison["baseline"], comparison["n"]) == ("fp8", "bf16", 2)
    assert comparison["sentence"] in " ".join(said.split()) and "out/ablation.html" in said
    bf16, fp8 = (
        [json.loads(line) for line in Path("out", name, "samples.jsonl").read_text().splitlines()]
        for name in ("bf16-1", "fp8-1")
    )
    assert [row["prompt"] for row in bf16] == [row["prompt"] for row in fp8]
    made = [Path(f"out/{name}/model/config.json").stat().st_mtime for name in states(record)]
    assert main(["ablate", path]) == 0
    assert made == [
        Path(f"out/{name}/model/config.json").stat().st_mtime for name in states(record)
    ]
    assert "started" not in capsys.readouterr().out


def even(completion, **_):
    """Share of bytes that are even."""
    text = completion.encode()
    return sum(byte % 2 == 0 for byte in text) / max(len(text), 1)


@pytest.mark.slow
def test_one_seed_judged_with_a_reward_of_python_s(study, capsys, monkeypatch):
    """The plan's minutes come from first steps; the interval is over problems; the served accuracy
    is another than the judged one's file."""
    task = {"reward": {"function": ""}, "eval_size": 16, "args": {}}
    path = study(
        seeds=1,
        judge="fp8-rollout",
        settings={"task": task | {"prompt_template": "{question}"}, "evaluation.examples": 16},
        metric={"name": "judged/accuracy", "margin": 0.1},
    )
    dataset = [{"prompt": f"{i:03}=", "answer": str(i)} for i in range(80)]
    given = {"reward": even, "dataset": dataset, "eval_dataset": dataset[:16]}
    monkeypatch.setattr(runner, "fingerprint", behaves())
    design = read_design(path, **given)
    timed = runner.Runner(dataclasses.replace(design, arms=design.arms[:1])).timed(2)
    assert timed.keys() == {"bf16"} and 2 < timed["bf16"] < 300
    planner = runner.Runner(design)
    said = planner.plan(planner.check(), timed | {"fp8": 60.0})
    assert "by the first steps of each arm" in said
    assert not Path("out").exists()
    record, _ = ablate(path, **given)
    (run,) = record["arms"][0]["runs"]
    judged = json.loads(Path("out/bf16-0/judged.json").read_text())
    assert judged["recipe"] == "fp8-rollout" and run["outcome"] == judged["judged/accuracy"]
    assert run["by_problem"] == {key: judged[key] for key in ("problems", "samples", "correct")}
    assert len(judged["correct"]) == 16 and run["series"]["eval/accuracy"]["steps"] == [0, 2]
    rewards = run["series"]["reward/mean"]["values"]
    assert all(0.1 < value < 0.9 for value in rewards), "even letters are rewarded in part"
    (comparison,) = record["comparisons"]
    assert (comparison["n"], comparison["problems"]) == (1, 16)
    assert (
        "every run of both is at 0, so that nothing could have been seen"
        in (comparison["sentence"])
    )
    with pytest.raises(UserError, match="<python>:even has changed since its runs began"):
        ablate(path, **given | {"reward": another_even})


def another_even(completion, **_):
    return float(len(completion) % 2 == 0)


another_even.__name__ = "even"


def test_what_is_given_in_python_has_to_be_a_list(study):
    for name in ("dataset", "eval_dataset"):
        with pytest.raises(UserError, match=f" {name} is a generator; give a list"):
            read_design(study(), **{name: (str(i) for i in range(3))})
    rows = [{"prompt": str(i), "answer": i} for i in range(9)]
    path = study(settings={"task": {"args": {}}})
    design = read_design(path, dataset=rows[2:], eval_dataset=rows[:2])
    assert design.objects == {"dataset": rows[2:], "eval_dataset": rows[:2]}
    assert design.base.task.eval_path == "<python>:list of 2"


def test_a_judge_s_metric_comes_from_its_file(study, fake):
    metric = {"name": "judged/accuracy", "margin": 0.1}
    record, _ = ablate(study(judge="bf16", metric=metric))
    assert record["comparisons"][0]["problems"] == 1000
    assert "--judge bf16" in starts("fp8-0")[0]
    assert record["arms"][1]["runs"][0]["judged"] == {"judged/accuracy": 0.8}


def test_a_run_without_its_problems_is_no_outcome(study, fake):
    fake(fp8_0="no problems")
    record, _ = ablate(study())
    run = record["arms"][1]["runs"][0]
    assert run["status"] == "failed" and run["why"] == "no row of step 2 in evaluations.jsonl"
    record, _ = ablate(study(metric={"margin": 0.1, "over": "seeds"}), output="fixed")
    assert set(states(record).values()) == {"finished"}
    assert record["comparisons"][0]["problems"] == 0


def test_different_problems_are_not_paired(study, fake):
    fake(fp8_1="other problems")
    with pytest.raises(
        UserError, match="fp8-1 and bf16-0 were measured on different problems, which cannot"
    ):
        ablate(study())


def test_finished_runs_are_not_run_again(study, fake):
    record, lines = ablate(study(), jobs=2)
    assert set(states(record).values()) == {"finished"}
    assert "bf16-0: finished" in "\n".join(lines) and "(4 of 4" in "\n".join(lines)
    again, lines = ablate(study())
    assert lines == [] and starts("bf16-0") == ["train"]
    assert again["comparisons"] == record["comparisons"]


def test_the_record_pairs_outcomes_by_seed(study, fake):
    done = fp8rl.ablate(study(seeds=[3, 7]), report=lambda line: None)
    record = done.record
    assert record["seeds"] == [3, 7] and record["version"] == 2
    outcomes = {arm["name"]: [run["outcome"] for run in arm["runs"]] for arm in record["arms"]}
    assert outcomes == {"bf16": pytest.approx([0.832, 0.872]), "fp8": pytest.approx([0.83, 0.87])}
    assert done.comparisons["fp8"].difference.mean == pytest.approx(-0.002)
    assert record["resolved"] == AUTO and "decode_layers" not in str(record["arms"])
    said = " ".join(done.table().split())  # long lines are wrapped
    assert done.page.exists() and record["comparisons"][0]["sentence"] in said
    config = Path("out/configs/fp8-7.toml").read_text()
    assert 'decode_layers = "unroll"' in config and "seed = 7" in config


def test_a_run_that_fails_says_why_and_stops_no_other(study, fake):
    fake(fp8_0="fail")
    record, lines = ablate(study())
    assert states(record) == {
        "bf16-0": "finished",
        "bf16-1": "finished",
        "fp8-0": "failed",
        "fp8-1": "finished",
    }
    why = "rollout.top_k: the device has no such thing"
    assert record["arms"][1]["runs"][0]["why"] == why
    assert any(line.startswith(f"fp8-0: failed: {why}") for line in lines)
    assert record["comparisons"][0]["failed"] == 1
    fake()
    assert states(ablate(study())[0])["fp8-0"] == "finished"
    assert len(starts("fp8-0")) == 2 and len(starts("fp8-1")) == 1


def test_a_killed_run_goes_on_from_its_checkpoint(study, fake):
    fake(fp8_1="die")
    record, _ = ablate(study())
    assert states(record)["fp8-1"] == "failed"
    assert "killed by SIGKILL" in record["arms"][1]["runs"][1]["why"]
    assert states(ablate(study())[0])["fp8-1"] == "finished"
    assert starts("fp8-1") == ["train", "train --resume"]


def test_a_run_that_was_killed_before_a_checkpoint_begins_anew(study, fake):
    left = Path("out/bf16-0")
    (left / "checkpoints/1.orbax-checkpoint-tmp").mkdir(parents=True)
    for name in ("metrics.jsonl", "samples.jsonl", "evaluations.jsonl"):
        (left / name).write_text('{"step": 0, "rew')
    fake(bf16_0="fail")
    assert states(ablate(study())[0])["bf16-0"] == "failed" and not holds_run(left)
    fake()
    assert states(ablate(study())[0])["bf16-0"] == "finished"
    assert starts("bf16-0") == ["train", "train"]


def test_a_model_without_the_last_row_is_no_finished_run(study, fake):
    Path("out/bf16-0/model").mkdir(parents=True)
    Path("out/bf16-0/model/config.json").write_text("{}")
    Path("out/bf16-0/metrics.jsonl").write_text('{"step": 0, "eval/accuracy": 0.5}\n{"step": 1}\n')
    answered = {"step": 1, "problems": ["a"], "samples": 1, "correct": [1]}
    Path("out/bf16-0/evaluations.jsonl").write_text(f"{json.dumps(answered)}\n")
    assert states(ablate(study())[0])["bf16-0"] == "finished"
    assert starts("bf16-0") == ["train"]


def test_lost_runs_are_outcomes(study, fake):
    fake(fp8_0="nan", fp8_1="low", bf16_1="no metric")
    record, _ = ablate(study(collapse={"below": 0.3}))
    runs = {run["directory"]: run for arm in record["arms"] for run in arm["runs"]}
    assert (runs["fp8-0"]["status"], runs["fp8-0"]["why"]) == (
        "failed",
        "eval/accuracy is not finite at the end",
    )
    assert (runs["fp8-1"]["status"], runs["fp8-1"]["outcome"]) == ("collapsed", 0.1)
    assert runs["fp8-1"]["why"] == "eval/accuracy ended at 0.1, below 0.3"
    assert runs["bf16-1"]["why"] == "no eval/accuracy in metrics.jsonl"
    assert record["comparisons"][0]["collapsed"] == 1


def test_a_metric_that_no_run_has_ends_the_study_at_the_first(study, fake):
    path = study(metric={"margin": 0.1, "name": "reward/meen"})
    with pytest.raises(
        UserError, match="bf16-0 has not measured 'reward/meen'; did you mean reward"
    ):
        ablate(path)
    assert not Path("out/fp8-1").exists()


def test_a_terminal_shows_a_table_of_what_runs(study, fake, monkeypatch):
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=100, color_system=None)
    monkeypatch.setattr(runner, "Console", lambda **_: terminal)
    fp8rl.ablate(study())
    said = screen.getvalue()
    assert all(head in said for head in ("arm", "seed", "step", "reward", "mismatch k3", "left"))
    assert "/2" in said and "bf16-0: finished" in said and "of 4 done" in said


def test_without_a_terminal_each_run_at_work_has_a_line_a_minute(study, fake, monkeypatch):
    """A minute here is every look; what compiles is in the run's log, and steps in its rows."""
    monkeypatch.setattr(runner, "_LINE_SECONDS", 0.0)
    fake(bf16_0="slow", fp8_0="slow")
    path = study(start="shared", settings={"trainer": {"steps": 4}})
    _, lines = ablate(path, jobs=2)
    said = [line.removeprefix("bf16-0: ") for line in lines if line.startswith("bf16-0: ")]
    assert said[0] == "started" and said[-1].startswith("finished")
    assert "no step yet" in said and "no step yet, compiling the rollout ..." in said
    assert "step 1 of 4" in said
    assert any(re.fullmatch(r"step [23] of 4, about \d+ s left", line) for line in said)
    assert any(line.startswith("fp8-0: step") for line in lines)


def test_a_notebook_gets_plain_lines(study, fake, monkeypatch, capsys):
    """Jupyter says that it shows colours."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    fp8rl.ablate(study())
    said = capsys.readouterr().out
    assert "bf16-0: finished" in said and "\x1b" not in said


def test_a_changed_file_is_named_and_refused(study, fake, tmp_path):
    ablate(study())
    before = Path("out/ablation.json").read_text()
    path = study(metric={"margin": 0.5})
    with pytest.raises(UserError, match=r"metric.margin was 0.1 and is 0.5 since its runs began"):
        ablate(path)
    run_file = tmp_path / "run.toml"
    run_file.write_text(
        run_file.read_text().replace("learning_rate = 0.001", "learning_rate = 0.1")
    )
    with pytest.raises(UserError, match=r"arms.fp8.optimizer.learning_rate was 0.001 and is 0.1"):
        ablate(study())
    assert Path("out/ablation.json").read_text() == before
    assert set(states(ablate(study(), output="elsewhere")[0]).values()) == {"finished"}


def test_the_record_has_the_fingerprint_of_the_code_that_ran(study, fake, monkeypatch):
    path = study()
    record, _ = ablate(path)
    assert record["fingerprint"] == behaves()(read_design(path))[0]
    assert record["fingerprint"]["settings"]["arms"]["fp8"] == {"recipe": "fp8-rl"}
    assert record["fingerprint"]["settings"]["all"]["rl.clip_low"] == 0.2  # a default
    # other code, and nothing left to run: the record stays that of the code that ran
    monkeypatch.setattr(runner, "sources", lambda: "others")
    monkeypatch.setattr(runner, "fingerprint", behaves(fp8=0.6))
    assert ablate(path)[0]["fingerprint"] == record["fingerprint"]
    # a run that is in the record of runs made elsewhere, whose code is not known
    design = read_design(path)
    elsewhere = run_entry(design, design.arms[0], 0) | {"behaviour": None}
    assert "fingerprint" not in make_record(design, {}, {"bf16-0": elsewhere})


def test_code_that_behaves_otherwise_does_not_go_on(study, fake, monkeypatch):
    fake(fp8_1="fail")
    path = study()
    ablate(path)
    fake()
    monkeypatch.setattr(runner, "sources", lambda: "others")
    monkeypatch.setattr(runner, "fingerprint", behaves(fp8=0.6))
    with pytest.raises(UserError, match="choose another output") as error:
        ablate(path)
    line, _ = str(error.value).splitlines()
    assert line.startswith(f"{path}: fp8: loss of step 0 was 0.5 and is 0.6, further apart than")
    assert line.endswith("since its runs began")
    # last bits, and from then on these sources are known to behave as the first did
    monkeypatch.setattr(runner, "fingerprint", behaves(fp8=0.5 + 1e-6))
    assert set(states(ablate(path)[0]).values()) == {"finished"}
    assert json.loads(Path("out/design.json").read_text())["sources"] == "others"


def test_an_output_that_cannot_be_made_is_named(study, fake):
    Path("taken").write_text("")
    with pytest.raises(UserError, match="^taken/here: cannot be written .*choose another output$"):
        ablate(study(output="taken/here"))


def test_who_waits_for_a_lock_gets_it(tmp_path):
    def second() -> bool:
        with locked(tmp_path / "lock", wait=True) as lock:
            return lock is not None

    with ThreadPoolExecutor(1) as pool:
        with locked(tmp_path / "lock"):
            waiting = pool.submit(second)
            with pytest.raises(TimeoutError):
                waiting.result(0.2)
        assert waiting.result(10)


def test_runs_older_than_fingerprints_go_on_without_one(study, fake, monkeypatch):
    fake(fp8_1="fail")
    path = study()
    ablate(path)
    kept = json.loads(Path("out/design.json").read_text())
    Path("out/design.json").write_text(
        json.dumps({key: kept[key] for key in ("fingerprint", "resolved")})
    )
    fake()
    record, _ = ablate(path)
    assert set(states(record).values()) == {"finished"} and "fingerprint" not in record


def test_an_arm_without_a_golden_run_is_run_and_said(study, fake, monkeypatch, caplog):
    why = "UserError: rollout.engine: there is none"

    def fingerprint(design):
        (found,) = behaves()(design)
        return [found | {"golden": found["golden"] | {"fp8": {"fault": why}}}]

    monkeypatch.setattr(runner, "fingerprint", fingerprint)
    record, _ = ablate(study())
    assert caplog.messages == [f"fp8 has no golden run: {why}"]
    assert set(states(record).values()) == {"finished"}


def test_a_warm_start_is_made_once_and_first(study, fake):
    path = study(start="shared")
    record, lines = ablate(path, jobs=3)
    assert set(states(record).values()) == {"finished"}
    assert lines[0] == "start: started" and lines[1].startswith("start: finished")
    assert starts("start") == ["sft"]
    ablate(study(start="per_seed"), output="other")
    assert Path("other/start-1/model/config.json").exists()


def test_supervised_runs_are_compared_by_their_held_out_loss(study, fake):
    """Lower is better; one that was killed goes on, and none runs twice."""
    fake(bf16_0="die")
    path = study(
        settings={"task": {"kind": "text", "args": {}}, "sft.steps": 3},
        metric={"name": "eval/loss", "better": "lower", "margin": 0.1},
    )
    record, _ = ablate(path)
    assert states(record)["bf16-0"] == "failed"
    record, _ = ablate(path)
    assert set(states(record).values()) == {"finished"}
    assert starts("bf16-0") == ["pretrain", "pretrain --resume"] and starts("fp8-0") == ["pretrain"]
    (comparison,) = record["comparisons"]
    assert comparison["difference"]["mean"] == pytest.approx(0.002)
    assert [run["outcome"] for run in record["arms"][0]["runs"]] == pytest.approx([1.198, 1.188])
    assert record["arms"][0]["runs"][0]["series"]["eval/loss"]["steps"] == [3]
    assert "share text, its order and initial weights" in record["methods"]
    fake()
    answers = study(command="sft", settings={"sft.steps": 3})
    record, _ = ablate(answers, output="answers")
    assert set(states(record).values()) == {"finished"}
    assert Path("answers/bf16-0/starts.txt").read_text() == "sft\n"


def test_runs_whose_warm_start_failed_are_not_started(study, fake):
    fake(start_1="fail")
    record, _ = ablate(study(start="per_seed"))
    assert states(record)["bf16-0"] == "finished" and states(record)["bf16-1"] == "failed"
    assert record["arms"][0]["runs"][1]["why"] == "its warm start start-1 failed"
    assert not Path("out/bf16-1").exists()


def test_looks_end_a_study_that_has_its_answer(study, fake):
    record, lines = ablate(study(seeds=8, looks=2, metric={"margin": 0.5}))
    assert record["look"] == [1, 2] and record["comparisons"][0]["n"] == 4
    assert list(states(record).values()).count("missing") == 8
    assert lines[-1] == "look 1 of 2 tells; the other seeds are not run"
    metric = {"margin": 1e-6, "name": "reward/mean"}
    record, _ = ablate(study(seeds=8, looks=2, metric=metric), output="close")
    assert record["look"] == [2, 2] and "missing" not in states(record).values()


def test_seeds_may_be_raised_and_not_lowered(study, fake):
    record, _ = ablate(study())
    assert record["methods"].count("number of seeds and looks were fixed beforehand") == 1
    record, lines = ablate(study(seeds=3))
    assert set(states(record).values()) == {"finished"} and len(states(record)) == 6
    assert "seeds raised from 2 to 3, which the record says" in lines
    assert "number of seeds was raised from 2 to 3 while" in record["methods"]
    assert sum(line.endswith("started") or " started" in line for line in lines) == 2
    assert len(starts("bf16-0")) == 1
    for changed in ({"seeds": 2}, {"seeds": [0, 1, 3]}, {"seeds": 4, "looks": 2}):
        with pytest.raises(UserError, match=r"seeds was .* since its runs began"):
            ablate(study(**changed))


def test_the_last_run_of_a_look_makes_the_verdict(study, fake):
    design = read_design(study())
    one = runner.Runner(design, report=lambda line: None)
    one.run_one("bf16-0")
    record = one.collect().record
    assert record["comparisons"] == [] and record["look"] == [0, 1]
    assert states(record)["fp8-0"] == "missing"


def test_the_plan_writes_nothing_and_counts_what_is_left(study, fake, capsys):
    path = study()
    assert main(["ablate", path, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "fp8: recipe = 'fp8-rl'; 2 runs, 0 of them finished" in said
    assert "4 of 4 runs to do, 1 at a time, into out" in said
    assert "disk: about 8.4 GB for all runs (1 GB a checkpoint)" in said
    assert "earlier runs" not in said and not Path("out").exists()
    assert main(["ablate", path, "--run", "fp8-1"]) == 0
    capsys.readouterr()
    assert main(["ablate", path, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "3 of 4 runs to do" in said and "as earlier runs took" in said


def test_elements_of_a_job_array_and_their_record(study, fake, capsys):
    path = study(start="shared")
    assert main(["ablate", path, "--slurm", "--gpus", "2", "--time", "1-12:00:00"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("sbatch --dependency=afterok:$(sbatch --parsable out/start.sbatch) ")
    script = Path("out/runs.sbatch").read_text()
    assert "\n#SBATCH --gpus=2\n#SBATCH --time=1-12:00:00\n" in script
    assert "#SBATCH --output=out/logs/slurm" in script and Path("out/logs").is_dir()
    assert "#SBATCH --array=0-3\n" in script and "runs=(bf16-0 fp8-0 bf16-1 fp8-1)" in script
    assert subprocess.run(["bash", "-n", "out/runs.sbatch"], check=False).returncode == 0
    assert main(["ablate", path, "--run", "fp8-0"]) == 2
    assert faults(capsys) == [
        "fp8rl: error: --run: fp8-0 starts from start, which is not there yet"
    ]
    for name in ("start", "bf16-0", "fp8-0", "bf16-1", "fp8-1"):
        assert main(["ablate", path, "--run", name]) == 0
    assert not Path("out/ablation.json").exists()
    assert main(["ablate", path, "--collect"]) == 0
    assert "fp8 - bf16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--jobs", "0"], "--jobs: 0 must be at least 1"),
        (["--timed-steps", "3"], "--timed-steps: 3; give at least 2, and --dry-run with it"),
        (["--collect", "--slurm"], "--collect and --slurm: give one of them"),
        (["--time", "4:00:00"], "--gpus and --time are of a job array; give --slurm with them"),
        (["--slurm", "--time", "4h"], "--time: '4h' is no time of sbatch's; give 4:00:00, or 2-0"),
        (["--run", "bf17-0"], "--run: 'bf17-0' is none of bf16-0, fp8-0, bf16-1, fp8-1"),
        (["--collect"], "out: no run of this ablation is there yet"),
        (["--output", "x/{arm}"], "output = 'x/{arm}': unknown placeholder {arm}"),
    ],
)
def test_wrong_flags_are_one_line(study, fake, capsys, flags, message):
    assert main(["ablate", study(), *flags]) == 2
    (line,) = faults(capsys)
    assert message in line


def test_two_processes_do_not_run_one_ablation(study, fake):
    path = study()
    with locked(Path("out/logs/ablation.lock")), pytest.raises(UserError, match="another process"):
        ablate(path)


def test_a_run_of_another_process_is_left_to_it(study, fake):
    with locked(Path("out/logs/fp8-0.lock")):
        record, lines = ablate(study())
    assert states(record)["fp8-0"] == "running" and record["comparisons"] == []
    assert "fp8-0: another process is running it" in lines


# a job in the background of a shell inherits an ignored SIGINT
PROGRAM = """
import signal
import sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from fp8rl_jax.ablation import runner
from fp8rl_jax.ablation.preflight import Preflight
from fp8rl_jax.cli.main import main
runner._PROCESS, runner._POLL_SECONDS = {fake!r}, 0.02
runner.write_page = lambda record: None
runner.preflight = lambda design: {{arm.name: Preflight([], {{}}, 1.0, 1.0) for arm in design.arms}}
runner.fingerprint = lambda design: [{{"settings": {{"all": {{}}, "arms": {{}}}}, "golden": {{}}}}]
sys.exit(main(["ablate", {path!r}, "--jobs", "2"]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_ablation_ends_its_runs_and_goes_on(study, fake, monkeypatch, number):
    fake(bf16_0="hang", fp8_0="hang")
    path = study()
    program = PROGRAM.format(fake=FAKE, path=path)
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while not all(Path(f"out/{name}-0/checkpoints/1").exists() for name in ("bf16", "fp8")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, number)
    said, _ = process.communicate(timeout=30)
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert f"stopped; go on with: fp8rl ablate {path}" in said
    # no run outlives the queue: its lock is free
    while not all(_is_free(f"out/logs/{name}-0.lock") for name in ("bf16", "fp8")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    fake()
    record, _ = ablate(path)
    assert set(states(record).values()) == {"finished"}
    assert starts("bf16-0") == ["train", "train --resume"] and starts("bf16-1") == ["train"]


def _is_free(path: str) -> bool:
    with locked(Path(path)) as lock:
        return lock is not None


def test_jobs_share_the_devices(study, fake, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    design = read_design(study())

    def visible(jobs: int) -> list[str | None]:
        one = runner.Runner(design, jobs)
        return [one._environment(slot).get("CUDA_VISIBLE_DEVICES") for slot in range(jobs)]

    assert visible(1) == [None]
    assert visible(2) == ["4,5", "6,7"]
    assert visible(5) == ["4", "5", "6", "7", "4"]
    crowded = runner.Runner(design, 8)._environment(0)
    assert crowded["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.45"


def test_arms_that_the_devices_refuse_are_named_before_anything_runs(study, capsys):
    arms = {"bf16": {"recipe": "bf16"}, "x": {"recipe": "fp8-rl", "precision.exact": True}}
    path = study(arms=arms)
    assert main(["ablate", path]) == 2
    assert all("arms.x: " in line for line in faults(capsys))
    assert not Path("out/configs").exists()
