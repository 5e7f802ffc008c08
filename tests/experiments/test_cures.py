"""The study of ways to let an update arrive, and what they cost, in a tiny shape."""

from __future__ import annotations

import json
from types import SimpleNamespace

import jax
import pytest
from tiny_models import LLAMA

from experiments import cures, sync_costs
from experiments.behaviour import alike
from experiments.figures import CURES, RESULTS
from fp8rl_jax.models.policy import init_policy


def test_every_cure_but_the_error_carried_over_lets_the_update_arrive(
    tmp_path, monkeypatch, capsys
):
    """Masters begin on the grid, and move by a fraction of its step."""
    policy = init_policy(LLAMA, jax.random.key(0))
    monkeypatch.setattr(cures, "resolve_model", lambda name: name)
    monkeypatch.setattr(cures, "load", lambda name: (policy, None))
    monkeypatch.setattr(cures, "TENSORS", (("up_proj", 0),))
    monkeypatch.setattr(cures, "RATES", (3e-6,))
    monkeypatch.setattr(cures, "STEPS", (4,))
    monkeypatch.setattr(cures, "KEPT", {"in one direction": 1.0})
    assert cures.main(["--output", str(tmp_path / "cures.json")]) == 0
    record = json.loads((tmp_path / "cures.json").read_text())
    assert [*record["grids"]] == [*cures.GRIDS]
    record["fingerprint"]["bfloat16, hashed, arrived"] *= 1.01
    (tmp_path / "cures.json").write_text(json.dumps(record))
    assert cures.main(["--output", str(tmp_path / "cures.json")]) == 2
    assert "the record there is of other code" in capsys.readouterr().err
    # the draws of a cell of relative width 2^-8 to 2^-7, and of one of 2^-4 to 2^-3
    assert all(2**-10 < record["draws"][x] < 2**-8 for x in ("bfloat16", "e4m3 from bfloat16"))
    assert 2**-6 < record["draws"]["e4m3"] < 2**-4
    # one of sixteen numbers, but of those near 0
    assert 0 <= record["borders"]["float32"] < 0.05 < record["borders"]["power_of_two"] < 0.0625
    for grid, of_cures in record["grids"].items():
        found = {name: of["in one direction"]["3e-06"]["4"] for name, of in of_cures.items()}
        assert set(found) == {*cures.CURES} - (set() if grid == "bfloat16" else {"hashed"})
        for name, metrics in found.items():
            if grid == "e4m3 from bfloat16" and name != "dithered":
                continue  # few weights are at a border, or many
            # from the middle of a cell, what is carried reaches its border late, too
            deaf = name in ("nearest", "carried")
            assert metrics["arrived"] < 0.4 if deaf else 0.5 < metrics["arrived"] < 1.5, (
                grid,
                name,
            )
        assert found["dithered"]["flicker"] < 0.7 * found["stochastic"]["flicker"]


def test_the_committed_cures_are_of_this_code():
    kept = json.loads((RESULTS / CURES).read_text())
    assert alike(kept["fingerprint"], cures.fingerprint()), "python -m experiments.cures"


def test_what_measuring_costs_is_over_the_same_round(monkeypatch, tmp_path):
    monkeypatch.setattr(sync_costs, "find_model", lambda name: name)
    monkeypatch.setattr(sync_costs, "read_policy_config", lambda path: LLAMA)
    monkeypatch.setattr(sync_costs, "CASES", (("bf16", "bfloat16"), ("fp8-rollout", "float32")))
    seconds = iter(range(10_000))
    # a sync of each kind takes a second more than the one before it
    clock = SimpleNamespace(perf_counter=lambda: next(seconds) ** 2 / 2)
    monkeypatch.setattr(sync_costs, "time", clock)
    path = tmp_path / "costs.json"
    assert sync_costs.main(["--output", str(path), "--rounds", "1", "--layers", "2"]) == 0
    found = json.loads(path.read_text())["over plain"]
    kinds = {name: [*each] for name, each in found.items()}
    assert kinds == {
        "bf16, bfloat16": ["measured", "stochastic"],
        "fp8-rollout, float32": ["measured"],  # nothing is rounded there but by the format
    }
    plain, measured, stochastic = (number + 0.5 for number in (12, 14, 16))
    assert found["bf16, bfloat16"]["measured"] == pytest.approx([measured / plain] * 3, abs=1e-3)
    assert found["bf16, bfloat16"]["stochastic"] == pytest.approx(
        [stochastic / plain] * 3, abs=1e-3
    )
    assert sync_costs.main(["--rounds", "0"]) == 2
