"""Programs for TPUs: what is asked of the compiler, and what becomes of one that gives up."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from experiments import tpu
from fp8rl_jax.training import ahead


def test_a_compiler_that_gives_up_costs_its_own_program(monkeypatch):
    asked = []

    def child(command, **_):
        asked.append(command[-1])
        if command[-1].endswith("/update"):
            words = (
                "I0000 x.cc:1] fine\nF1129 16:15:56.9 14569 a.cc:11] Check failed: rank == 2\nmore"
            )
            return SimpleNamespace(returncode=-6, stdout="{no\n", stderr=words)
        rows = [
            {"program": "static rollout", "temporary": 7},
            {"program": "paged rollout", "fault": "X: y"},
        ]
        return SimpleNamespace(
            returncode=0, stdout="".join(f"{json.dumps(x)}\n" for x in rows), stderr=""
        )

    monkeypatch.setattr(tpu.subprocess, "run", child)
    assert tpu.of_recipe("tpu-v5e", "bf16") == {
        "update": {"fault": "Check failed: rank == 2"},
        "static rollout": {"temporary": 7},
        "paged rollout": {"fault": "X: y"},
    }
    assert asked == ["tpu-v5e/bf16/update", "tpu-v5e/bf16/static rollout"]


def test_the_programs_are_a_recipe_s_own(monkeypatch):
    """What stands in for the compiler is what `make compile-tpu` has."""
    seen = []

    def compiled(lower, shape, config, sizes, chip):
        seen.append((lower, config.rollout.engine, config.recipe, sizes["data"], chip))
        return ahead.Compiled({}, {}, 5)

    monkeypatch.setattr(tpu, "compile_for", compiled)
    assert tpu.compile_one("tpu-v6e", "jet-rl", "paged rollout") == 5
    assert seen == [(ahead.lower_rollout, "paged", "jet-rl", 4, "tpu-v6e")]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--chips", "b200"], "--chips: b200 is none of tpu-v5e, tpu-v6e"),
        (["--recipes", "no"], "--recipes: no is none of"),
    ],
)
def test_wrong_words_are_a_line(words, line, capsys):
    assert tpu.main(words) == 2
    assert line in capsys.readouterr().err
