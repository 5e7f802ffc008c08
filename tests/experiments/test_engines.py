"""The record of engines in turns, on a tiny policy and our own engines."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from rollout.vllm_work import SIZES

from experiments.engines import Arguments, run, run_config
from fp8rl_jax.weights.load import byte_policy, save_policy


@pytest.fixture
def arguments(tmp_path):
    made, tokenizer = byte_policy(0, **SIZES)
    model = save_policy(made, tmp_path / "model", tokenizer, "float32")
    return Arguments(
        output=str(tmp_path / "record.json"),
        engines=("static", "paged"),
        model=str(model),
        rounds=2,
        prompts=2,
        prompt_tokens=8,
        new_tokens=8,
    )


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["bf16", "fp8-rl"])
def test_a_record_of_engines_in_turns(arguments, recipe, monkeypatch):
    """What an engine samples is scored with the weights of its round, and the first is the others'
    measure."""
    monkeypatch.setattr("experiments.benchmarks.rounds.SETTLE_SECONDS", 0.0)
    run(replace(arguments, recipe=recipe))
    with open(arguments.output) as file:
        record = json.load(file)
    assert {(r["over"], r["under"]) for r in record["ratios"]} == {("paged", "static")}
    assert [r["part"] for r in record["ratios"]] == ["sync", "gen", "seconds"]
    rounds = record["raw"]["rounds"]
    assert len(rounds) == 2 and len(record["raw"]["warmup"]) == 1
    for each in rounds:
        for parts in each["seconds"].values():
            assert parts["seconds"] == pytest.approx(parts["sync"] + parts["gen"])
    for name in ("static", "paged"):
        assert [found["tokens"] for found in record["distances"][name]] == [16, 16]
        largest = max(found["max_abs"] for found in record["distances"][name])
        assert largest < 1e-4 if recipe == "bf16" else 1e-4 < largest < 1
        assert 0 < record["sync_share"][name]["median"] < 1
    assert record["vllm"] is None and "output" not in record["arguments"]


@pytest.mark.parametrize(
    "change, told",
    [
        (dict(engines=("static",)), "at least two"),
        (dict(engines=("static", "static")), "each one once"),
        (dict(engines=("static", "files")), "--vllm-python"),
        (dict(vllm_python="p"), "--vllm-python"),
        (dict(rounds=0), "--rounds"),
        (dict(warmup=0), "--warmup"),
    ],
)
def test_wrong_arguments(arguments, change, told):
    assert arguments.problems() == []
    (problem,) = replace(arguments, **change).problems()
    assert told in problem


def test_the_run_of_a_side(arguments):
    given = replace(arguments, vllm_python="p", engines=("static", "paged", "files", "dlpack"))
    for name in given.engines:
        config = run_config(name, given)
        assert config.problems() == [] and config.precision.exact is False
        assert config.rollout.engine == (name if name in ("static", "paged") else "vllm")
    assert run_config("files", given).rollout.vllm.python == "p"
    assert run_config("dlpack", given).rollout.vllm.transport == "dlpack"
