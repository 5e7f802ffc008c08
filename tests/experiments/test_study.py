"""The study of dose and response: its formats and task, and its runs, which are made in parts."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tomli_w
from tiny_run import LEARNS, metric_rows, train, write_run

from experiments.study import __main__ as study
from experiments.study.noise import noise
from experiments.study.plan import read_plan
from experiments.study.task import distances
from fp8rl_jax.ablation import runner
from fp8rl_jax.ablation.design import judged
from fp8rl_jax.ablation.record import JUDGED, run_entry
from fp8rl_jax.ablation.runner import Runner
from fp8rl_jax.config.files import read_config
from fp8rl_jax.config.formats import parse_format
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.forms import rollout_policy
from fp8rl_jax.models.policy import init_policy
from fp8rl_jax.precision import format_of
from fp8rl_jax.rollout.sync import SyncContext

FOLDER = Path(study.__file__).parent
DOSES = [str(FOLDER / "dose.py")]
RunConfig(formats=tuple(DOSES))  # as a run does


def moved(dose: str, x: np.ndarray, block: str = "-128x128") -> np.ndarray:
    """What a format makes of a matrix."""
    made = format_of(parse_format(f"{dose}{block}"), x.shape)
    return np.asarray(made.quantize(jnp.asarray(x)).dequantize())


@pytest.mark.parametrize("block", ["-128x128", "-1x128"])
def test_a_dose_multiplies_the_error_of_e4m3(block):
    x = np.random.default_rng(0).normal(size=(130, 200)).astype(np.float32)
    rounded = moved("e4m3", x, block)
    np.testing.assert_array_equal(moved("e4m3_x0", x, block), x)
    np.testing.assert_array_equal(moved("e4m3_x1", x, block), rounded)
    for name, dose in (("e4m3_x0p5", 0.5), ("e4m3_x4", 4)):
        error = moved(name, x, block) - x
        np.testing.assert_allclose(error, dose * (rounded - x), atol=2e-6)
    x[3, 5] = np.nan
    made = format_of(parse_format("e4m3_x2-1x128"), x.shape)
    scales = made.quantize(jnp.asarray(x)).scales
    assert not np.isfinite(scales[3, 0]) and np.isfinite(scales).sum() == scales.size - 1


def test_noise_is_as_large_as_it_says_and_new_at_every_sync():
    policy = init_policy(PolicyConfig("qwen3", 64, 64, 96, 2, 2, 1, 32), jax.random.key(0))
    served = rollout_policy(policy, RunConfig().resolved_recipe, jnp.float32, False)[0]
    one, two = (noise(served, SyncContext(key=jax.random.key(i)), relative=0.1) for i in range(2))
    of = [np.asarray(jax.tree.leaves(x.layers.down_proj)[0]) for x in (served, one, two)]
    size = np.std(of[1] - of[0]) / np.sqrt(np.mean(of[0] ** 2))
    assert 0.09 < size < 0.11 and np.abs(of[1] - of[2]).max() > 0
    assert all(map(np.array_equal, jax.tree.leaves(one.norm), jax.tree.leaves(served.norm)))


def test_a_judge_has_nothing_of_a_rollouts_error():
    arguments = {"transform": str(FOLDER / "noise.py:noise"), "transform_args": {"relative": 0.1}}
    config = read_config(RunConfig, {"rollout": arguments, "recipe": "fp8-rl", "output": "here"})
    found = judged(config, "bf16")
    assert (found.recipe, found.rollout.transform, found.model.path) == ("bf16", "", "here/model")
    assert found.resolved_recipe == RunConfig().resolved_recipe


def test_every_step_of_the_task_needs_the_one_before():
    problems = distances(300, 7, 0.15)
    assert len({row["prompt"] for row in problems}) == 300 and problems == distances(300, 7, 0.15)
    slips = []
    for row in problems:
        digits = [int(x) for x in row["prompt"][1:-1:2]]
        answer, shown = ([0, *map(int, row[key][1::2])] for key in ("answer", "shown"))
        assert row["answer"][::2] == row["shown"][::2] == row["prompt"][1:-1:2]
        assert answer[1:] == [abs(answer[i] - x) for i, x in enumerate(digits)]
        slips += [shown[i + 1] != abs(shown[i] - x) for i, x in enumerate(digits)]
    assert 0.1 < np.mean(slips) < 0.17  # another digit may be as far away
    with pytest.raises(ValueError, match="count = 600: there are 1000 problems of 3 steps"):
        distances(600, 3, 0.1)


def test_without_a_dose_a_run_is_the_unquantized_one(tmp_path):
    """The negative control: bit for bit where the trainer is, and within roundings where its
    gradients are those of another program."""
    recipes = {
        "x0": {"rollout": {"weight": "e4m3_x0-128x128", "activation": "e4m3_x0"}},
        "both": {
            side: {"weight": "e4m3_x0-128x128", "activation": "e4m3_x0"}
            for side in ("rollout", "trainer")
        }
        | {"saved_activation": "e4m3_x0"},
    }
    settings = {
        "formats": DOSES,
        "recipes": recipes,
        "precision": {"exact": False, "backend": "reference"},
        "trainer": {"steps": 2},
    }
    run, rows = write_run(tmp_path, LEARNS, settings), {}
    for name, flags in {
        "bf16": ("--recipe", "bf16"),
        "none": ("--recipe", "x0"),
        "both": ("--recipe", "both"),
    }.items():
        assert train(run, tmp_path / name, *flags) == 0
        rows[name] = metric_rows(tmp_path / name)
    for name in ("reward/mean", "loss", "optim/grad_norm", "mismatch/k3", "rollout/entropy"):
        of = {arm: [row[name] for row in each] for arm, each in rows.items()}
        assert of["none"] == of["bf16"], name
        assert of["both"] == pytest.approx(of["bf16"], rel=1e-4, abs=1e-6), name


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """Writes a small study, with changes; runs are made up."""
    monkeypatch.chdir(tmp_path)
    evaluated = {"every": 2, "examples": 8, "batch_size": 8, "temperature": 1.0}
    write_run(
        tmp_path, LEARNS, {"formats": DOSES, "evaluation": evaluated, "trainer": {"steps": 2}}
    )
    done = []

    def run_one(runner: Runner, name: str) -> None:
        directory = runner.design.directory / name
        (directory / "model").mkdir(parents=True)
        (directory / "model" / "config.json").write_text("{}")
        right = [int(i < (3 if "none" in name else 6)) for i in range(8)]
        judged = {"judged/accuracy": sum(right) / 8, "problems": [*range(8)], "samples": 1}
        (directory / JUDGED).write_text(json.dumps(judged | {"correct": right}))
        row = {"reward/mean": 0.5, "mismatch/k3": 0.01 if "none" in name else 1e-8}
        rows = [row | {"step": 0}, row | {"step": 1}, {"step": 2, "eval/accuracy": 0.5}]
        (directory / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
        done.append(f"{runner.design.name}/{name}")

    monkeypatch.setattr(Runner, "run_one", run_one)

    def write(**changes) -> list[str]:
        recipe = {"rollout": {"weight": "e4m3_x4-128x128", "activation": "e4m3_x4"}}
        table = {
            "question": "Does a dose hurt?",
            "base": ["run.toml"],
            "output": "out",
            "seeds": 2,
            "baseline": "bf16",
            "judge": "bf16",
            "pilot": ["6/none-4"],
            "metric": {"name": "judged/accuracy", "margin": 0.05},
            "settings": {"precision.exact": False},
            "lengths": {"6": {}, "9": {"rollout.max_new_tokens": 9}},
            "recipes": {"x4": recipe},
            "arms": {"bf16": {"recipe": "bf16"}, "none-4": {"recipe": "x4"}},
            "questions": {
                "hurt": {"ask": "Does it hurt?", "arms": ["none-4"]},
                "longer": {"ask": "More when longer?", "arms": ["none-4"], "longer": True},
            },
        }
        Path("study.toml").write_text(tomli_w.dumps(table | changes))
        return done

    return write


WORDS = ["--plan", "study.toml", "--output", "results", "--docs", "docs"]


def test_cells_are_run_once_and_the_page_is_of_the_record(plan, capsys):
    done = plan()
    assert study.main([*WORDS, "--pilot"]) == 0 and done == ["6/none-4-0"]
    assert study.main([*WORDS, "--page"]) == 0
    assert "not run yet (0 of 2 seeds)" in Path("docs/study.md").read_text()
    assert not Path("docs/study.svg").exists()
    assert study.main([*WORDS, "--hours", "1e-9"]) == 0 and len(done) == 1
    assert "8 runs are left; the same command goes on" in capsys.readouterr().err
    done.clear()
    # the pilot's run is finished on disk, and made up once more
    for old in Path("out").glob("*/none-4-0"):
        old.rename(old.with_name("pilot"))
    assert study.main(WORDS) == 0
    assert done == [
        f"{n}/{arm}-{seed}" for seed in (0, 1) for n in (6, 9) for arm in ("bf16", "none-4")
    ]
    record = json.loads(Path("results/runs.json").read_text())
    run = record["runs"]["9/none-4-1"]
    assert (run["status"], run["outcome"], run["series"]["mismatch/k3"]["values"]) == (
        "finished", 3 / 8, [0.01, 0.01],
    )  # fmt: skip
    text = Path("docs/study.md").read_text()
    assert "8 of 8 runs are there" in text and "![" in text and Path("docs/study.svg").exists()
    assert "6 tokens: none-4 - bf16: -0.375" in text
    assert "none-4 - bf16, 9 tokens - 6 tokens: 0.000" in text
    # a cell more: what is there stays
    done.clear()
    arms = {"bf16": {"recipe": "bf16"}, "none-4": {"recipe": "x4"}}
    tis = {"recipe": "x4", "rl.correction.method": "token_tis", "lengths": ["9"]}
    plan(arms=arms | {"tis-4": tis})
    assert study.main(WORDS) == 0 and done == ["9/tis-4-0", "9/tis-4-1"]
    # another start, or another rule, is another run
    plan(collapse={"below": 0.2})
    assert study.main(WORDS) == 2
    assert "6/bf16-0: its settings are others than when it was run" in capsys.readouterr().err


def test_commands_with_other_seeds_share_a_record(plan, capsys, monkeypatch):
    done = plan(lengths={"6": {}}, questions={}, pilot=[])
    run_one = Runner.run_one

    def beside(runner: Runner, name: str) -> None:
        if name == "bf16-1":
            assert study.main([*WORDS, "--seeds", "0"]) == 0  # while this one runs
        run_one(runner, name)

    monkeypatch.setattr(Runner, "run_one", beside)
    assert study.main([*WORDS, "--seeds", "1"]) == 0
    assert sorted(done) == [f"6/{arm}-{seed}" for arm in ("bf16", "none-4") for seed in (0, 1)]
    runs = json.loads(Path("results/runs.json").read_text())["runs"]
    assert sorted(runs) == sorted(done)
    assert study.main([*WORDS, "--seeds", "7"]) == 2
    assert "--seeds: 7 is none of 0, 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qestion": "?"}, "study.toml: unknown key qestion; did you mean question?"),
        ({"lengths": {}}, "no lengths; give [lengths.NAME]"),
        ({"pilot": ["6/none-8"]}, "pilot: '6/none-8' is no cell; a cell is LENGTH/ARM"),
        ({"questions": {"a": {"asks": "?"}}}, "questions.a: unknown key asks; known: against"),
        ({"questions": {"a": {"arms": ["tis"]}}}, "questions.a: 6/tis is no cell"),
        (
            {"arms": {"bf16": {}, "x": {"recipe": "x4", "lengths": ["7"]}}},
            "arms.x.lengths: '7' is none of 6, 9",
        ),
        ({"recipes": {"x4": {"rollout": {"weight": "e4m3_x7"}}}}, "unknown element 'e4m3_x7'"),
    ],
)
def test_a_fault_of_the_file_is_said_in_a_line(plan, capsys, changes, message):
    plan(**changes)
    assert study.main(WORDS) == 2
    assert any(message in line for line in capsys.readouterr().err.splitlines())


def test_a_file_of_formats_that_is_none_is_named():
    with pytest.raises(UserError, match=r"formats: 'none\.py' does not import: .*no file"):
        RunConfig(formats=("none.py",))


def test_the_registered_study_can_be_read(monkeypatch):
    monkeypatch.chdir(FOLDER.parents[1])
    registered = read_plan(FOLDER / "study.toml")
    assert set(registered.file.pilot) <= registered.cells.keys() and registered.questions
    for design in registered.designs.values():
        assert {arm.config.compute_dtype for arm in design.arms} == {"float32"}
        assert run_entry(design, design.arms[0], 0)["status"] in ("missing", "finished")


@pytest.mark.slow
def test_a_cell_is_a_run_with_its_warm_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    evaluated = {"every": 2, "examples": 8, "batch_size": 8, "temperature": 1.0}
    settings = {"formats": DOSES, "evaluation": evaluated, "trainer": {"steps": 2}}
    settings |= {"precision": {"exact": False, "backend": "reference"}}
    write_run(
        tmp_path, LEARNS, settings, {"sft": {"steps": 2, "batch_size": 4, "from_scratch": True}}
    )
    monkeypatch.setattr(runner, "fingerprint", lambda *_: [{"settings": {}, "golden": {}}])
    table = {
        "base": ["run.toml"],
        "output": "out",
        "seeds": [3],
        "baseline": "bf16",
        "judge": "bf16",
        "start": "per_seed",
        "metric": {"name": "judged/accuracy", "margin": 0.05},
        "lengths": {"6": {}},
        "recipes": {"x4": {"rollout": {"weight": "e4m3_x4-128x128", "activation": "e4m3_x4"}}},
        "arms": {"bf16": {"recipe": "bf16"}, "none-4": {"recipe": "x4"}},
        "pilot": ["6/none-4"],
    }
    Path("study.toml").write_text(tomli_w.dumps(table))
    assert study.main([*WORDS, "--pilot"]) == 0
    run = json.loads(Path("results/pilot.json").read_text())["runs"]["6/none-4-3"]
    assert run["status"] == "finished" and run["outcome"] == run["judged"]["judged/accuracy"]
    assert all(0 < k3 < 1 for k3 in run["series"]["mismatch/k3"]["values"])
    assert len(run["by_problem"]["correct"]) == 8 and run["cpu_seconds"] > 0
    assert {"reward/mean", "rollout/entropy", "optim/grad_norm"} <= run["series"].keys()
    (directory,) = Path("out").glob("6-*")
    assert (directory / "start-3" / "model").exists() and not (directory / "bf16-3").exists()
    assert not (directory / "none-4-3" / "checkpoints").exists()
