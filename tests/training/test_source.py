"""A run, named by its directory or by its config.toml, is what it has trained."""

from __future__ import annotations

import json
import shutil
import tomllib

import numpy as np
import pytest
from tiny_run import LEARNS, faults, metric_rows, train, write_run

import fp8rl_jax as fp8rl
from fp8rl_jax.cli.main import main
from fp8rl_jax.errors import UserError
from fp8rl_jax.training.source import find_model
from fp8rl_jax.weights.load import load_policy

LEARNT = {"trainer": {"steps": 6}, "evaluation": {"every": 6}}
LORA = {"lora": {"rank": 8}, "recipe": "fp8-rl", "optimizer": {"learning_rate": 1e-1}}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FP8RL_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("more", [{}, pytest.param(LORA, marks=pytest.mark.slow)])
def test_a_run_is_what_it_has_trained(tmp_path, capsys, caplog, more):
    run = tmp_path / "run"
    assert train(write_run(tmp_path, LEARNS, LEARNT, more), run) == 0
    rows = metric_rows(run)
    before, after = ([row[f"eval/{name}"] for name in ("accuracy", "mean_length")] for row in
                     (rows[0], rows[-1]))  # fmt: skip
    assert before != after

    def evaluated(*words: str) -> tuple[list[float], str]:
        capsys.readouterr()
        caplog.clear()
        assert main(["eval", *words]) == 0
        said = capsys.readouterr()
        found = json.loads(said.out)
        return [found["eval/accuracy"], found["eval/mean_length"]], said.err + caplog.text

    settings = str(run / "config.toml")
    for named in (str(run), settings):
        found, said = evaluated(named)
        assert found == after and f"{run}: the trained model of step 6, {run}/model" in said
    assert evaluated(str(tmp_path / "run.toml"))[0] == before
    if more:
        assert evaluated(settings, "--lora.path", "")[0] == before
    else:
        assert evaluated(settings, "--model.path", "")[0] == before
        found = fp8rl.evaluate(settings)
        assert [found["eval/accuracy"], found["eval/mean_length"]] == after
        # of another recipe it is found out anew whether it is exact
        assert tomllib.loads((run / "config.toml").read_text())["precision"]["exact"] is True
        evaluated(str(run), "--recipe", "fp8-rl")
        fp8rl.evaluate(run, recipe="fp8-rl")
    first = load_policy(find_model(run))
    # as a run leaves it that is stopped before its end: of an earlier end there is another model
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(record | {"finished": 4}))
    found, said = evaluated(str(run))
    assert found == after and "the trained model of its checkpoint of step 6" in said
    shutil.rmtree(run / "model")
    second = load_policy(find_model(run))
    np.testing.assert_array_equal(first.layers.q_proj.value, second.layers.q_proj.value)


def test_a_warm_start_cut_short_is_what_it_has_trained(tmp_path):
    """Its optimizer is not that of the reinforcement learning behind it."""
    run, gone = tmp_path / "run", tmp_path / "gone"
    later = {"optimizer": {"name": "sgd", "learning_rate": 0.1}}
    settings = write_run(tmp_path, LEARNS, later, {"sft": {"steps": 1}, "checkpoint": {"every": 1}})
    assert main(["sft", str(settings), "--output", str(run)]) == 0
    (run / "model").rename(gone)
    found, trained = (load_policy(find_model(path)) for path in (run, gone))
    np.testing.assert_array_equal(found.layers.q_proj.value, trained.layers.q_proj.value)


def test_every_command_takes_a_run(tmp_path, capsys):
    run, lines = tmp_path / "run", tmp_path / "in.jsonl"
    once = ["--trainer.steps", "1", "--checkpoint.every", "0", "--evaluation.every", "0"]
    assert train(write_run(tmp_path, LEARNS), run, *once) == 0
    lines.write_text('{"prompt": "abc"}')
    work = ["--input", str(lines), "--output"]
    for words in (
        ["generate", "--model", str(run), *work, str(tmp_path / "g"), "--max-new-tokens", "2"],
        ["logprobs", "--model", str(run / "config.toml"), *work, str(tmp_path / "l")],
        ["export", "--model", str(run), "--output", str(tmp_path / "e")],
        ["doctor", "--model", str(run), "--recipe", "fp8-rl"],
        ["plan", str(run)],
        ["train", str(run), "--resume"],
    ):
        assert main(words) == 0, words
        if words[0] not in ("plan", "train", "doctor"):
            assert f"{run}: the trained model of step 1, {run}/model" in capsys.readouterr().err
    assert (tmp_path / "e" / "config.json").exists()
    policy, _ = fp8rl.load(run, fsdp=1)
    assert policy.config.num_layers == 1
    with pytest.raises(UserError, match="mesh.fdsp: unknown setting"):
        fp8rl.load(run, fdsp=1)
    with pytest.raises(UserError, match="3"):
        fp8rl.load(run, fsdp=3)
    assert tomllib.loads((run / "config.toml").read_text())["model"]["path"] == ""
    capsys.readouterr()
    shutil.rmtree(run / "model")
    shutil.rmtree(run / "checkpoints")
    for words in (["eval", str(run)], ["compare", str(run)]):
        assert main(words) == 2
        (line,) = faults(capsys)
        assert "the run has trained nothing yet" in line
