"""Whole runs in float16 through the command line: resumed bit for bit, with every form of trainer, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from fp8rl_jax.cli.main import main
from fp8rl_jax.config.recipe import RECIPES
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.forward import forward
from fp8rl_jax.models.policy import init_policy
from fp8rl_jax.rollout.engine import LocalEngine
from fp8rl_jax.training.setup import check_range

RUN = """
compute_dtype = "float16"
[model.init]
hidden_size = 48
intermediate_size = 80
num_layers = 1
num_heads = 2
num_kv_heads = 1
head_dim = 24
[task]
name = "spell_backward"
args = { min_word_len = 3, max_word_len = 3 }
train_size = 64
eval_size = 8
prompt_template = "{metadata[word]}="
[task.reward]
num_workers = 1
[rollout]
prompts_per_step = 4
samples_per_prompt = 4
max_prompt_tokens = 6
max_new_tokens = 6
[optimizer]
learning_rate = 1e-3
[trainer]
steps = 4
[evaluation]
every = 0
[checkpoint]
every = 2
"""
SEARCH = ["--trainer.loss-scale.initial", "1e13", "--trainer.loss-scale.backoff-factor", "1e-3"]
SEARCH += ["--trainer.loss-scale.growth-interval", "3", "--trainer.abort-after-skips", "1"]
SMALL = PolicyConfig("qwen3", 61, 48, 80, 2, 4, 2, 16)


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    (tmp_path / "reward.py").write_text("def ascii(completion, **_):\n    return sum(c.isascii() for c in completion) / 6\n")
    return [str(path), "--task.reward.function", f"{tmp_path / 'reward.py'}:ascii"]


def rows(directory: Path) -> list[dict]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{name: x for name, x in line.items() if not name.startswith(("time", "perf/"))} for line in lines]


def tensors(directory: Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(directory / "model" / "model.safetensors")


@pytest.mark.slow
def test_a_run_that_finds_its_scale_and_is_resumed_in_between(run_file, tmp_path, capsys):
    """Two updates a step in two packed micro-batches; the first scales are far too large, which stops nothing."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    flags = [*SEARCH, "--trainer.updates-per-rollout", "2", "--trainer.micro-batch-prompts", "1", "--trainer.packing"]
    for out in (whole, parts):
        assert main(["train", *run_file, "--output", str(out), *flags]) == 0
    (parts / "checkpoints" / "4").rename(tmp_path / "gone")
    assert main(["train", *run_file, "--output", str(parts), *flags, "--resume"]) == 0
    assert rows(whole) == rows(parts)
    for name, weight in tensors(whole).items():
        assert weight.dtype == np.float16 and np.array_equal(weight, tensors(parts)[name]), name
    found = rows(whole)[:4]
    assert found[0]["optim/overflow"] > 0 and found[3]["optim/overflow"] == 0
    assert found[3]["optim/loss_scale"] < 1e10 and all(row["optim/skipped_steps"] == 0 for row in found)
    assert all(np.isfinite(row["mismatch/k3"]) and 0 < row["mismatch/k3"] < 1e-6 for row in found)
    capsys.readouterr()
    assert main(["train", *run_file, "--output", str(parts), "--resume", "--compute-dtype", "float32"]) == 2
    assert "this run has nothing" in (said := capsys.readouterr().err) and "trainer.loss_scale" in said


FORMS = {
    "fp8 trainer": ["--recipe", "fp8-e2e-kv", "--precision.output-gradient", "e5m2", "--trainer.loss-scale.mode", "static"],
    "adapters": ["--recipe", "fp8-rl", "--lora.rank", "4", "--lora.base", "rollout", "--lora.targets", "*.q_proj", "*.up_proj"],
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_trainer_learns_without_a_skip(run_file, tmp_path, form):
    out = tmp_path / "out"
    assert main(["train", *run_file, "--output", str(out), "--trainer.steps", "1", *FORMS[form]]) == 0
    row = rows(out)[0]
    assert all(np.isfinite(value) for value in row.values()) and row["optim/skipped"] == 0 < row["optim/grad_norm"]
    assert row["optim/loss_scale"] == 65536 and ("optim/overflow" in row) == (form != "fp8 trainer")


def test_weights_that_float16_cannot_hold_are_refused_by_name():
    policy = init_policy(SMALL, jax.random.key(0))
    check_range(policy, jnp.dtype("float16"))
    policy.layers.up_proj.weight.set_value(policy.layers.up_proj.value.at[1, 2, 3].set(-7e4))
    check_range(policy, jnp.dtype("bfloat16"))
    with pytest.raises(UserError, match=r"compute_dtype: layers\.up_proj has a weight of magnitude 70000, and float16.*65504"):
        check_range(policy, jnp.dtype("float16"))


def test_the_rollout_computes_and_caches_in_float16():
    engine = LocalEngine(RECIPES["bf16"], jnp.float16)
    engine.sync(init_policy(SMALL, jax.random.key(0)))
    assert {x.dtype for x in jax.tree.leaves(engine.policy)} == {jnp.dtype("float16")}
    served = jax.eval_shape(lambda policy: forward(policy, jnp.zeros((1, 3), jnp.int32), phase="prefill"), engine.policy)
    assert {x.dtype for x in (*served.cache.keys, *served.cache.values, served.hidden)} == {jnp.dtype("float16")}
