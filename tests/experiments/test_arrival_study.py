"""The study of what arrives: each run's masters as other policies serve them, in parts."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tomli_w
from tiny_models import LLAMA
from tiny_run import LEARNS, write_run

from experiments.arrival import SERVED, Arguments, main, of_one_code, run
from experiments.off_grid import GROUP, beside, on_grid
from fp8rl_jax.ablation.record import behaviour_mark
from fp8rl_jax.durable import locked
from fp8rl_jax.models.policy import init_policy


def test_runs_get_the_present_mark_where_the_code_behaved_alike():
    """An arm more, or a last bit, makes another mark of it; another loss makes other code of it."""

    def behaviour(**losses: float) -> dict:
        golden = {arm: {"rounding": "fp8", "loss": [loss]} for arm, loss in losses.items()}
        return {"settings": {"all": {}, "arms": {arm: {} for arm in losses}}, "golden": golden}

    now = behaviour(a=0.5, b=0.6)
    told = {
        "fewer-arms": behaviour(a=0.5),
        "last-bit": behaviour(a=0.500001, b=0.6),
        "other-code": behaviour(a=0.7, b=0.6),
        "unknown": None,
    }
    runs = {mark: {"seed": 0, "behaviour": mark, "served": {}} for mark in (*told, "lost")}
    found = of_one_code(runs, told, now)
    own = behaviour_mark(now)
    assert {name: run["behaviour"] for name, run in found.items()} == {
        "fewer-arms": own,
        "last-bit": own,
        "other-code": "other-code",
        "unknown": "unknown",
        "lost": "lost",
    }
    assert all(run.keys() == {"seed", "behaviour"} for run in found.values())
    assert of_one_code(runs, told, None)["last-bit"]["behaviour"] == "last-bit"


@pytest.mark.slow
def test_the_study_goes_on_from_what_it_has_and_serves_the_masters_in_four_ways(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    evaluated = {"every": 2, "examples": 8, "batch_size": 8, "samples": 2, "temperature": 1.0}
    write_run(
        tmp_path,
        LEARNS,
        {"trainer": {"steps": 2}, "evaluation": evaluated, "checkpoint": {"every": 0}},
    )
    plan = {
        "question": "Does the update arrive?",
        "base": ["run.toml"],
        "output": "out",
        "seeds": [0],
        "baseline": "float32",
        "allow": ["model.dither"],
        "metric": {"margin": 0.1},
        "settings": {"precision.exact": False},
        "arms": {
            "float32": {"recipe": "bf16"},
            "drawn": {
                "recipe": "bf16",
                "compute_dtype": "bfloat16",
                "precision.weight_rounding": "stochastic",
            },
        },
    }
    (tmp_path / "study.toml").write_text(tomli_w.dumps(plan))
    arguments = Arguments("study.toml", "results.json", "ablation.json", arms=("float32",))
    run(arguments)
    first = json.loads((tmp_path / "results.json").read_text())["runs"]
    # in float32 with nothing quantized, the masters are what the run itself serves
    whole = first["float32-0"]
    assert set(whole["served"]) == set(SERVED) and whole["served"]["masters"] == whole["outcome"]
    assert whole["series"]["sync/arrived"]["values"] == [pytest.approx(1.0)] * 2
    assert not (tmp_path / "out" / "float32-0" / "checkpoints").exists()
    assert [
        arm["name"] for arm in json.loads((tmp_path / "ablation.json").read_text())["arms"]
    ] == ["float32"]
    every = Arguments("study.toml", "results.json", "ablation.json")
    with locked(tmp_path / "out" / "locks" / "drawn-0"):  # another command is at it
        run(every)
    assert json.loads((tmp_path / "results.json").read_text())["runs"] == first
    run(every)
    assert "float32-0: started" not in capsys.readouterr().out.split("drawn-0: started")[1]
    both = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert both["float32-0"] == whole and list(both) == ["float32-0", "drawn-0"]
    assert len(json.loads((tmp_path / "ablation.json").read_text())["arms"]) == 2
    assert main(["--ablation", "study.toml", "--arms", "none", "--output", "results.json"]) == 2
    assert "--arms: none: none of the ablation's" in capsys.readouterr().err


def test_a_start_beside_the_4_bit_grid():
    """Linears whose groups of 32 have 15 values, and the same ones moved; norms stay."""

    def few_values(x: jax.Array) -> jax.Array:
        if x.ndim < 3:
            return x
        groups = x.reshape(*x.shape[:-1], -1, GROUP)
        step = jnp.abs(groups).max(-1, keepdims=True) / 7
        return (jnp.round(groups / step) * step).reshape(x.shape)

    plain = init_policy(LLAMA, jax.random.key(0))
    start = jax.tree.map(few_values, plain)
    moved = beside(start, 0.03)
    assert (on_grid(plain), on_grid(start), on_grid(moved)) == (0.0, 1.0, 0.0)
    for one, other in zip(jax.tree.leaves(start), jax.tree.leaves(moved), strict=True):
        wide = one.ndim > 2 or len(one) == LLAMA.vocab_size
        factor = np.std(np.asarray(other / one)[np.asarray(one) != 0])
        assert 0.02 < factor < 0.04 if wide else factor == 0
