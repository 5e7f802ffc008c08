"""What a training state keeps in FP8-LM's formats: against the paper's formulas in float64, the
values of Azure/MS-AMP's tests, and in bytes of live arrays."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from training.test_session import PROMPTS, rewards_of, session_of, weights

import fp8rl_jax as fp8rl
from fp8rl_jax.config.formats import parse_format
from fp8rl_jax.config.recipe import get_recipe, recipe
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.config.training import OptimizerConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.policy import init_policy, parameter_count
from fp8rl_jax.parallel.mesh import AXES
from fp8rl_jax.precision import format_of
from fp8rl_jax.training.gradients import (
    check_gradients,
    init_factors,
    kept_gradients,
    next_factors,
    scaled_sum,
)
from fp8rl_jax.training.kept import load, store
from fp8rl_jax.training.plan import memory_plan
from fp8rl_jax.training.state import init_state, kept_masters, make_optimizer

E4M3, FLOAT16 = parse_format("e4m3-power_of_two"), parse_format("float16-power_of_two")
TYPES = {"e4m3": (ml_dtypes.float8_e4m3fn, 448.0), "float16": (np.float16, 65504.0)}


def scaled(x: np.ndarray, element: str, mu: float = 1.0) -> tuple[np.ndarray, float]:
    """By MS-AMP's formula, in float64: codes and the factor that they are scaled by."""
    dtype, largest = TYPES[element]
    amax = np.abs(x).max()
    factor = 2.0 ** np.floor(np.log2(largest / amax)) * mu if amax else 1.0
    return np.float32(np.clip(x * factor, -largest, largest)).astype(dtype).astype(float), factor


@pytest.mark.parametrize(("amax", "factor"), [(0.0, 1.0), (10.0, 32.0), (10000.0, 1 / 32)])
def test_scales_are_those_of_ms_amp(amax, factor):
    """tests/common/tensor/test_meta.py of Azure/MS-AMP, commit 9746ea8."""
    q = format_of(E4M3, (2, 3)).quantize(jnp.full((2, 3), amax))
    assert 1 / float(q.scales[0, 0]) == factor


def test_a_factor_is_halved_where_the_sum_saturates_and_grows_back_in_a_thousand_updates():
    factors = (jnp.float32([0.5, 1.0, 1.9999]), jnp.float32(1.0))
    shares = (jnp.float32([2e-5, 1e-5, 0.0]), jnp.float32(1.0))
    after = next_factors(factors, shares, jnp.bool_(True))
    np.testing.assert_allclose(after[0], [0.25, 2 ** (1 / 1000), 2.0], rtol=1e-6)
    assert after[1] == 0.5
    jax.tree.map(
        np.testing.assert_array_equal, next_factors(factors, shares, jnp.bool_(False)), factors
    )
    grown = jax.lax.fori_loop(
        0,
        1000,
        lambda _, x: next_factors((x,), (jnp.float32(0),), jnp.bool_(True))[0],
        jnp.float32(0.25),
    )
    assert grown == pytest.approx(0.5, rel=1e-4)


def test_a_tensor_is_quantized_with_its_factor():
    rng = np.random.default_rng(0)
    x = np.float32(rng.normal(size=(2, 5, 7)) * [[[1e-4]], [[30.0]]])
    q, share = scaled_sum(jnp.asarray(x), E4M3, jnp.float32([1.0, 2.0]))
    for i, mu in enumerate((1.0, 2.0)):
        codes, factor = scaled(x[i].astype(float), "e4m3", mu)
        np.testing.assert_array_equal(np.float32(q.values[i]), codes)
        np.testing.assert_allclose(load(q)[i], codes / factor, rtol=1e-6)
        assert share[i] == pytest.approx((np.abs(codes) == 448).mean())
    assert share[1] > 0  # the largest is above 224 before its factor of 2


def test_two_updates_are_those_of_the_formulas():
    """AdamW under fp8-lm-o2: first moment in e4m3, second moment and master in float16, each with a
    scale for the matrix, all computed with in float32 and rounded to nearest."""
    rng = np.random.default_rng(1)
    w = np.float32(rng.normal(size=(6, 40)) * 0.02)
    config = OptimizerConfig(learning_rate=1e-3, beta2=0.999, eps=1e-10, max_grad_norm=0.0)
    optimizer = make_optimizer(config, 4, get_recipe("fp8-lm-o2"))
    params = kept_masters({"w": jnp.asarray(w)}, optimizer.recipe)
    state, step = optimizer.init(params), jax.jit(optimizer.step)
    kept = np.divide(*scaled(w.astype(float), "float16"))
    mean = square = np.zeros_like(kept)
    for count in (1, 2):
        g = np.float32(rng.normal(size=w.shape) * 10.0 ** rng.uniform(-4, 0, w.shape))
        given = {"w": jnp.asarray(g)}
        params, state, fits = step(params, given, state, jnp.float32(1), jnp.int32(count - 1))
        mean, square = 0.9 * mean + 0.1 * g, 0.999 * square + 0.001 * g.astype(float) ** 2
        change = mean / (1 - 0.9**count) / (np.sqrt(square / (1 - 0.999**count)) + 1e-10)
        moved = kept - 1e-3 * change
        # what is stored is a rounding of it, half a step off where float32 was at a border
        for stored, exact, element in (
            (state[0].mu, mean, "e4m3"),
            (state[0].nu, square, "float16"),
            (params, moved, "float16"),
        ):
            codes, factor = scaled(exact, element)
            found = np.float64(stored["w"].values)
            assert np.mean(found != codes) < 0.02 and factor == 1 / float(stored["w"].scales[0, 0])
        mean, square, kept = (np.float64(load(x["w"])) for x in (state[0].mu, state[0].nu, params))
        assert fits
    assert state[0].mu["w"].values.dtype == jnp.float8_e4m3fn


def test_how_it_is_rounded_is_the_recipes():
    """Nearest, or right in the mean; a second moment that is drawn is never 0, one that is not may
    be, which is what breaks."""
    x = jnp.full((4, 4096), 1.001).at[0, 0].set(300.0).at[1].set(1e-4)
    key = jax.random.key(0)
    nearest, drawn = (load(store(x, E4M3, key, how)) for how in ("nearest", "stochastic"))
    assert (nearest[2:] == 1.0).all() and (nearest[1] == 0).all()
    assert drawn[2:].mean() == pytest.approx(1.001, abs=1e-3) and (drawn[2:] > 1).any()
    assert (load(store(x, E4M3, key, "stochastic", divides=True))[1] > 0).all()
    assert (load(store(x, parse_format("bfloat16"), key)) == x.astype(jnp.bfloat16)).all()


@pytest.mark.parametrize(
    ("name", "promised"),
    [("bf16", (4, 4, 4, 4)), ("fp8-lm-o1", (4, 1, 4, 4)), ("fp8-lm-o2", (2, 1, 1, 2))],
)
def test_bytes_a_parameter_in_live_arrays(name, promised):
    """Master, gradient, first and second moment: 6 bytes in place of 16. Norms stay in float32."""
    shape = PolicyConfig("qwen3", 256, 128, 384, 2, 4, 2, 32)
    config, made = RunConfig(recipe=name), get_recipe(name)
    policy = init_policy(shape, jax.random.key(0))
    state = init_state(policy, make_optimizer(OptimizerConfig(), 1, made))
    gradients = jax.jit(partial(kept_gradients, recipe=made))(policy)[0]
    adam = state.optimizer[1][0]

    def live(*trees) -> int:
        return sum(x.nbytes for x in jax.tree.leaves(trees))

    for tree, each in zip((state.policy, gradients, adam.mu, adam.nu), promised, strict=True):
        assert live(tree) / parameter_count(shape) == pytest.approx(each, rel=0.02)
    plan = memory_plan(shape, config)
    (masters,) = (size for key, size in plan.always.items() if key.startswith("masters"))
    assert masters == live(state.policy)
    assert plan.always["optimizer state"] == live(state.optimizer, state.gradient_factors)
    (planned,) = (
        size for key, size in plan.phases["optimizer"].items() if key.startswith("gradients")
    )
    assert planned == live(gradients)


def test_what_several_replicas_cannot_exchange_is_refused():
    def said(name: str, sizes=(2, 1, 1, 1), packing=False, objective="ppo") -> str:
        mesh = AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * 4)
        try:
            check_gradients(recipe("bf16", weight_gradient=name), mesh, packing, objective)
        except UserError as error:
            return str(error)
        return ""

    assert not said("e4m3") and not said("bfloat16") and not said("float32", packing=True)
    assert not said("mxfp8", (1, 2, 1, 1), packing=True)
    assert "mesh.data = 2: replicas add up an element type" in said("mxfp8")
    assert "set mesh.data = 1" in said("e4m3", (2, 2, 1, 1))
    assert "set trainer.packing = false" in said("e4m3", packing=True)
    assert "the effective part of the sample, which rl.objective" in said("e4m3", objective="p3o")
    assert not said("e4m3", (1, 2, 1, 1), objective="p3o")
    assert not said("float32", objective="p3o")
    assert init_factors({"w": jnp.ones((2, 2))}, recipe("bf16", weight_gradient="bfloat16")) is None


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"lora.rank": 2, "name": "sgd"}], ids=["all", "adapters"])
def test_a_session_goes_on_bit_for_bit(tmp_path, settings):
    """Masters, moments and factors in FP8-LM's formats, through a checkpoint, and exact; adapters
    under SGD keep no moments."""
    changed = {"first_moment": "float32", "second_moment": "float32"} if settings else {}
    made = recipe("fp8-lm-o3", "kept", **changed)
    usual = {
        "learning_rate": 1e-2,
        "micro_batch_prompts": 1,
        "remat": "layer",
        "exact": not settings,
    }
    session, last = session_of(made, **usual, **settings), {}
    for step in range(3):
        rollout = session.rollout(PROMPTS)
        last = session.update(rollout, rewards_of(rollout))
        if step == 1:
            session.checkpoint(tmp_path / "checkpoints")
    assert settings or last["mismatch/logprob_abs_diff_max"] == 0
    assert last["optim/gradient_scale"] > 0 and last["optim/gradient_saturated"] < 0.5
    other = session_of(made, **usual, **settings)
    other.restore(tmp_path / "checkpoints")
    rollout = other.rollout(PROMPTS)
    assert other.update(rollout, rewards_of(rollout)) == last
    for one, two in zip(weights(session.state), weights(other.state), strict=True):
        np.testing.assert_array_equal(one, two)
    with pytest.raises(UserError, match="another kind of run"):
        session_of(
            recipe("fp8-lm-o3", "kept", master="bfloat16", **changed), **usual, **settings
        ).restore(tmp_path / "checkpoints")
    assert fp8rl.load(session.save(tmp_path / "out", "float32"))
