"""The study of what a training state is kept in: its arms are recipes, its table is its record, and
its record goes on."""

from __future__ import annotations

import json

import pytest

from experiments import fp8_lm
from fp8rl_jax.config.formats import parse_format
from fp8rl_jax.config.recipe import recipe
from fp8rl_jax.precision import check_recipe


def test_every_arm_is_a_recipe_of_its_own():
    made = []
    for name in fp8_lm.ARMS:
        made.append(fp8_lm.of_arm(name))
        check_recipe(made[-1])
    assert len(set(made)) == len(made)
    assert made[0] == recipe("bf16", "fp8-lm") and made[1].second_moment == parse_format(
        "e4m3-power_of_two"
    )


def test_the_table_of_a_record():
    """One that diverged has no difference, and one that is not whole yet no row."""
    losses = {"float32": [1.0, 1.2], "master bfloat16": [1.5, 1.8], "fp8-lm-o2": [None, 1.1]}
    losses["fp8-lm-o1"] = [7.0]
    entries = [
        {"arm": arm, "seed": seed, "loss": x}
        for arm, of in losses.items()
        for seed, x in enumerate(of)
    ]
    found = fp8_lm.rows(entries)
    assert [row[0] for row in found] == ["float32", "fp8-lm-o2", "master bfloat16"]
    assert found[0][1:3] == ["1.100", "baseline"]
    assert found[1][1:3] == ["", "1 of 2 seeds diverged"]
    assert found[2][1:3] == ["1.650", "+0.500 to +0.600"] and found[2][3].startswith("+0.550 (")


@pytest.mark.parametrize(("devices", "whole"), [(8, 1.0), (64, 4.86)])
def test_whole_tensors_are_uneven_where_there_are_many_devices(devices, whole):
    """The embedding alone has 622 million of Qwen3-8B's 8.19 billion parameters."""
    greedy, fsdp = fp8_lm.placement(devices)
    assert greedy == pytest.approx(whole, abs=0.01) and 1 <= fsdp < 1.01


@pytest.mark.slow
def test_what_was_measured_is_kept(tmp_path, capsys):
    words = ["--steps", "1", "--batch-size", "2", "--seeds", "1", "--arms", "float32", "fp8-lm-o2"]
    words += ["--output", str(tmp_path / "record.json")]
    assert fp8_lm.main(words) == 0 and fp8_lm.main(words) == 0
    assert capsys.readouterr().err.count("seed 0") == 2
    entries = json.loads((tmp_path / "record.json").read_text())["entries"]
    assert [entry["arm"] for entry in entries] == ["float32", "fp8-lm-o2"]
    assert fp8_lm.main(["--arms", "float8"]) == 2
    assert "--arms: float8 unknown" in capsys.readouterr().err
