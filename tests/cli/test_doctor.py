from __future__ import annotations

import jax.numpy as jnp
from offline_models import make_model

import fp8rl_jax.precision
from fp8rl_jax.cli import main as cli


def test_a_sound_installation(capsys):
    assert cli.main(["doctor"]) == 0
    said = capsys.readouterr().out
    for words in (
        "jax ",
        "flax ",
        "cpu",
        " matmul: auto runs reference",
        "grouped_matmul: auto runs reference",
        "e4m3: casts clamp at 448",
        "21 of 21 linears",
        "all is well",
    ):
        assert words in said
    assert "rollout.weight       e4m3, 128x128 blocks" in said and "trainer.weight       compute dtype" in said


def test_the_layers_of_a_given_model(tmp_path, capsys):
    model = make_model(tmp_path / "model")
    assert cli.main(["doctor", "--model", str(model)]) == 0
    said = capsys.readouterr().out
    assert "14 of 14 linears" in said and "layers.1.down_proj" in said
    assert cli.main(["doctor", "--model", str(model), "--recipe", "fp8-kv"]) == 0
    assert "0 of 14 linears" in capsys.readouterr().out


def test_faults_are_listed_and_exit_with_1(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(fp8rl_jax.precision, "quantize_per_tensor", lambda x, scale, fmt: jnp.full_like(x, jnp.nan))
    assert cli.main(["doctor", "--model", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "WRONG: e4m3: " in said and "config.json" in said and "something is wrong" in said


def test_an_unknown_recipe_is_a_fault_of_the_user(capsys):
    assert cli.main(["doctor", "--recipe", "fp9"]) == 2
    assert "unknown name 'fp9'" in capsys.readouterr().err
