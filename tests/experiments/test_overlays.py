"""The overlays of published algorithms: each loads over the demo's run file and sets what the table
of config/rl.py says."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from fp8rl_jax.cli.load import load_config
from fp8rl_jax.config import rl
from fp8rl_jax.config.files import dump_toml
from fp8rl_jax.config.recipe import RECIPES
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.report.runs import flatten

ROOT = Path(__file__).parents[2] / "experiments"
DEMO = str(ROOT / "runs" / "demo.toml")
ROWS = {
    name: " ".join(row.split())
    for name, row in re.findall(
        r"^    (\S.*?)  +arXiv \S+ +(.+(?:\n {30,}.+)*)$", rl.__doc__, re.MULTILINE
    )
}
FILES = {
    "GRPO": "grpo",
    "Dr. GRPO": "dr_grpo",
    "DAPO": "dapo",
    "GSPO": "gspo",
    "CISPO": "cispo",
    "RLOO": "rloo",
    "REINFORCE++": "reinforce_pp",
    "MIPU": "mipu",
    "P3O": "p3o",
}
OTHERS = {  # not objectives of their own: what each changes of the demo
    "calibrated_clipping": {"enabled": True, "start_low": 0.6, "start_high": 1.8},
    "fp16": {"compute_dtype": "float16", "mode": "dynamic"},
    "shuffle_r1": {
        "samples_per_prompt": 16,
        "selection": "fp8rl_jax.rl.shuffle:shuffled_pairs",
        "kept": 0.5,
        "draws": 8.0,
    },
    "qerl": {
        "transform": "fp8rl_jax.rollout.noise:on_norms",
        "start": 1e-2,
        "end": 1e-4,
        "stages": 10.0,
        "qerl.base": "w4a16",
        "weight": "nvfp4",
        "rank": 32,
        "lora.base": "rollout",
        "norms": ["input_layernorm", "post_attention_layernorm"],
        "filter": True,
        "schedule": "cosine",
        "weight_decay": 0.1,
        "max_grad_norm": 0.2,
        "learning_rate": 1e-5,
    },
    "topr": {"objective": "experiments/recipes/topr.py:topr", "most": 1.0},
    "nvfp4_experts": {"base": "nvfp4-rl", "quantized": ["*.experts.*"]},
    "my_fp8": {
        "base": "fp8-e2e-kv",
        "scale": "power_of_two",
        "weight": "e4m3-128x128-power_of_two",
        "output_gradient": "e5m2-1x128",
        "first_layers_in_compute": 1,
        "last_layers_in_compute": 1,
        "kv_granularity": "head",
    },
}


def load(*argv: str) -> dict:
    return flatten(tomllib.loads(dump_toml(load_config(RunConfig, [DEMO, *argv], "fp8rl train"))))


def settings_of(row: str) -> dict:
    """{key: value} of `key = value` in a row; a key that stands alone is switched on."""
    given = {
        f"rl.{key}": json.loads(value)
        for key, value in re.findall(r'([a-z_.]+) = ("\w+"|[\d.e-]+)', row)
    }
    return given | {f"rl.{key}": True for key in re.findall(r"[a-z_.]+\.enabled", row)}


def test_every_row_of_the_table_has_its_file():
    assert ROWS.keys() == FILES.keys()
    assert {path.stem for path in (ROOT / "recipes").glob("*.toml")} == {*FILES.values(), *OTHERS}


@pytest.mark.parametrize("name", OTHERS)
def test_other_overlays_change_what_they_are_for(name):
    overlay = [
        str(ROOT / "recipes" / f"{name}.toml"),
        "--recipe",
        "jet-rl",
        "--trainer.updates-per-rollout",
        "4",
    ]
    before, after = load(*overlay[1:]), load(*overlay)
    changed = {key: after[key] for key in after if before.get(key) != after[key]}
    of_layers = [changed.pop(key) for key in list(changed) if ".layers." in key]
    named = {
        next((end for end in OTHERS[name] if f".{key}".endswith(f".{end}")), key): value
        for key, value in changed.items()
    }
    assert named == OTHERS[name]
    assert of_layers == ["compute"] * (name == "my_fp8")


@pytest.mark.parametrize("name", FILES)
def test_a_row_of_the_table_is_a_toml_overlay_as_it_stands(name, tmp_path):
    wanted = settings_of(ROWS[name])
    assert wanted
    file = tmp_path / "row.toml"
    file.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in wanted.items()))
    assert load(str(file)).items() >= wanted.items()


@pytest.mark.parametrize("name", FILES)
def test_an_overlay_sets_its_row_and_nothing_but_the_objective(name):
    overlay = str(ROOT / "recipes" / f"{FILES[name]}.toml")
    before, after = load(), load(overlay)
    assert after.items() >= settings_of(ROWS[name]).items()
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert all(key.startswith("rl.") for key in changed) and (changed or name == "DAPO")


def test_overlays_compose_with_recipes_and_flags_in_both_spellings():
    gspo = str(ROOT / "recipes" / "gspo.toml")
    for recipe in RECIPES:
        config = load(gspo, "--recipe", recipe, "--rl.clip-high", "0.5")
        wanted = {
            "recipe": recipe,
            "rl.ratio": "sequence",
            "rl.clip_low": 3e-4,
            "rl.clip_high": 0.5,
        }
        assert config.items() >= wanted.items()
    spellings = [
        ("--rl.clip_high", "0.3"),
        ("--rl.clip-high", "0.3"),
        ("--rl.clip_high=0.3",),
        ("--rl.clip-high=0.3",),
    ]
    assert {load(*flags)["rl.clip_high"] for flags in spellings} == {0.3}
    assert load("--rl.dynamic_sampling.enabled") == load("--rl.dynamic-sampling.enabled") != load()
    assert load("--task.args.max_word_len", "5") == load("--task.args.max-word-len", "5") != load()
    assert (
        load(gspo, str(ROOT / "recipes" / "cispo.toml"), "--rl.ratio", "token")["rl.objective"]
        == "cispo"
    )


def test_the_demo_as_a_mixture_changes_the_model_and_its_places_only():
    before, after = load(), load(str(ROOT / "runs" / "moe_demo.toml"))
    changed = {key for key in before if before[key] != after[key]}
    assert {key for key in changed if not key.startswith("model.")} == {
        "output",
        "sft.output",
        "trainer.router_replay",
    }
