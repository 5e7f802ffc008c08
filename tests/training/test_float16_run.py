"""Whole runs in float16 through the command line: resumed bit for bit, with every form of trainer,
and what is refused."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from tiny_run import EVEN_LETTERS, measured, train, write_run

from fp8rl_jax.config.recipe import RECIPES
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.forward import forward
from fp8rl_jax.models.policy import init_policy
from fp8rl_jax.rollout.engine import LocalEngine
from fp8rl_jax.training.checks import check_range

SEARCH = ["--trainer.loss-scale.initial", "1e13", "--trainer.loss-scale.backoff-factor", "1e-3"]
SEARCH += ["--trainer.loss-scale.growth-interval", "3", "--trainer.abort-after-skips", "1"]
SMALL = PolicyConfig("qwen3", 61, 48, 80, 2, 4, 2, 16)


@pytest.fixture
def run_file(tmp_path):
    return write_run(tmp_path, EVEN_LETTERS, {"compute_dtype": "float16"})


def tensors(directory: Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(directory / "model" / "model.safetensors")


@pytest.mark.slow
def test_a_run_that_finds_its_scale_and_is_resumed_in_between(run_file, tmp_path, capsys):
    """Two updates a step in two packed micro-batches; the first scales are far too large, which
    stops nothing."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    flags = [
        *SEARCH,
        "--trainer.updates-per-rollout",
        "2",
        "--trainer.micro-batch-prompts",
        "1",
        "--trainer.packing",
    ]
    for out in (whole, parts):
        assert train(run_file, out, *flags) == 0
    (parts / "checkpoints" / "4").rename(tmp_path / "gone")
    assert train(run_file, parts, *flags, "--resume") == 0
    assert measured(whole) == measured(parts)
    for name, weight in tensors(whole).items():
        assert weight.dtype == np.float16 and np.array_equal(weight, tensors(parts)[name]), name
    found = measured(whole)[:4]
    assert found[0]["optim/overflow"] > 0 and found[3]["optim/overflow"] == 0
    assert found[3]["optim/loss_scale"] < 1e10 and all(
        row["optim/skipped_steps"] == 0 for row in found
    )
    # bf16's two sides are exact by default, packed and in parts as they are here
    assert all(row["mismatch/k3"] == 0.0 for row in found)
    capsys.readouterr()
    assert train(run_file, parts, "--resume", "--resume-changed", "--compute-dtype", "float32") == 2
    assert (
        "where nothing is wanted" in (said := capsys.readouterr().err)
        and "trainer.loss_scale" in said
    )


FORMS = {
    "fp8 trainer": [
        "--recipe",
        "fp8-e2e-kv",
        "--precision.output-gradient",
        "e5m2",
        "--trainer.loss-scale.mode",
        "static",
    ],
    "adapters": [
        "--recipe",
        "fp8-rl",
        "--lora.rank",
        "4",
        "--lora.base",
        "rollout",
        "--lora.targets",
        "*.q_proj",
        "*.up_proj",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_trainer_learns_without_a_skip(run_file, tmp_path, form):
    out = tmp_path / "out"
    assert train(run_file, out, "--trainer.steps", "1", *FORMS[form]) == 0
    row = measured(out)[0]
    assert (
        all(np.isfinite(value) for value in row.values())
        and row["optim/skipped"] == 0 < row["optim/grad_norm"]
    )
    assert row["optim/loss_scale"] == 65536 and ("optim/overflow" in row) == (form != "fp8 trainer")


def test_weights_that_float16_cannot_hold_are_refused_by_name():
    policy = init_policy(SMALL, jax.random.key(0))
    check_range(policy, jnp.dtype("float16"))
    policy.layers.up_proj.weight.set_value(policy.layers.up_proj.value.at[1, 2, 3].set(-7e4))
    check_range(policy, jnp.dtype("bfloat16"))
    with pytest.raises(
        UserError,
        match=r"compute_dtype: layers\.up_proj has a weight of magnitude 70000, and float16.*65504",
    ):
        check_range(policy, jnp.dtype("float16"))


def test_the_rollout_computes_and_caches_in_float16():
    engine = LocalEngine(RECIPES["bf16"], jnp.float16)
    engine.sync(init_policy(SMALL, jax.random.key(0)))
    assert {x.dtype for x in jax.tree.leaves(engine.policy)} == {jnp.dtype("float16")}
    served = jax.eval_shape(
        lambda policy: forward(policy, jnp.zeros((1, 3), jnp.int32)), engine.policy
    )
    assert {x.dtype for x in (*served.cache.keys, *served.cache.values, served.hidden)} == {
        jnp.dtype("float16")
    }
