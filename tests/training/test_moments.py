"""Adam's moments at rest in bfloat16 and e4m3: against optax in float32, against their bounds, and
through a checkpoint."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from fp8rl_jax.config.formats import parse_format
from fp8rl_jax.config.recipe import PrecisionConfig, Recipe, get_recipe, recipe
from fp8rl_jax.config.rl import RLConfig
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.config.training import CheckpointConfig, OptimizerConfig, SftConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.policy import init_policy
from fp8rl_jax.parallel import policy_shardings
from fp8rl_jax.parallel.mesh import AXES
from fp8rl_jax.precision import QTensor
from fp8rl_jax.training.checkpoint import Checkpoints
from fp8rl_jax.training.kept import load, store
from fp8rl_jax.training.optimizer import AdamW, Numbers
from fp8rl_jax.training.state import (
    apply_gradients,
    decay_mask,
    init_state,
    learning_rate,
    make_optimizer,
)
from fp8rl_jax.training.step import Batch, StepConfig, completion_logprobs
from pallas_kernels.rounding import round_stochastic

FLOAT32, BFLOAT16 = jnp.dtype("float32"), jnp.dtype("bfloat16")
GROUPS = parse_format("e4m3-1x128")
FORMATS = ("float32", "bfloat16", "e4m3-1x128")


def in_format(name: str) -> Recipe:
    """A recipe whose moments rest in a format."""
    return recipe("bf16", "moments", first_moment=name, second_moment=name)


SHAPE = PolicyConfig("qwen3", 61, 48, 80, 2, 4, 2, 16)


def _adam(name, rate=0.0, beta2=0.99, eps=1e-8):
    """Adam behind no clipping, its moments in a format."""
    config = OptimizerConfig(beta2=beta2, eps=eps, max_grad_norm=0.0)
    schedule = learning_rate(replace(config, learning_rate=rate), 1)
    return AdamW(
        Numbers.of(config), schedule, partial(jax.tree.map, lambda _: False), in_format(name)
    )


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.bfloat16])
def test_stochastic_rounding_takes_a_neighbour_and_is_right_on_average(dtype):
    rng = np.random.default_rng(0)
    x = np.float32(
        rng.uniform(0.5, 1.9, 40) * 2.0 ** rng.integers(-11, 8, 40) * rng.choice([-1, 1], 40)
    )
    x = np.concatenate([x, np.float32([0, 448, -448, 2.0**-9])])
    draws = jax.vmap(lambda key: round_stochastic(jnp.asarray(x), dtype, key))(
        jax.random.split(jax.random.key(0), 4096)
    )
    draws = np.asarray(draws, np.float64)
    nearest = np.asarray(jnp.asarray(x).astype(dtype), np.float64)
    low, high = draws.min(0), draws.max(0)
    assert np.all((low <= x) & (x <= high) & ((nearest == low) | (nearest == high)))
    # both are neighbours: nothing of the format lies between them
    middle = np.asarray(jnp.asarray(np.float32((low + high) / 2)).astype(dtype), np.float64)
    assert np.all((middle == low) | (middle == high))
    assert np.all(np.abs(draws.mean(0) - x) <= 5 * (high - low) / 2 / np.sqrt(4096) + 1e-12)
    assert np.all(low[40:] == x[40:]) and np.all(high[40:] == x[40:])


def test_stored_second_moment_keeps_its_bounds():
    """At least half of the value everywhere, 7/8 above 2^-6 / 448 of the group's largest, never 0
    where something is."""
    rng = np.random.default_rng(1)
    nu = np.float32(10.0 ** rng.uniform(-14, -2, (6, 300)))
    nu[0, :128] = 0  # a group without gradients
    nu[1, 3] = 0  # an element without, in a group that has some
    q = store(jnp.asarray(nu), GROUPS, jax.random.key(0), "stochastic", divides=True)
    kept, scales = np.asarray(load(q)), np.asarray(q.scales)
    largest = np.repeat(
        [[nu[r, c : c + 128].max() for c in (0, 128, 256)] for r in range(6)], 128, axis=1
    )[:, :300]
    np.testing.assert_allclose(scales[1], [largest[1, c] / 448 for c in (0, 128, 256)], rtol=1e-6)
    assert np.all(kept[0, :128] == 0) and np.all(kept[largest > 0] > 0)
    assert np.all(kept >= nu * 0.4999)
    normal = nu > largest * 2.0**-6 / 448
    assert normal.sum() > 300 and np.all(kept[normal] >= nu[normal] * 7 / 8 * 0.9999)
    assert np.all(kept <= np.maximum(nu * 9 / 8, nu + largest * 2.0**-9 / 448) * 1.0001)


@pytest.mark.parametrize("name", FORMATS)
def test_second_moment_follows_a_gradient_that_shrinks(name):
    """Rounded to nearest, e4m3 and bfloat16 (beta2 = 0.999) would stand still. Mean of 128 columns
    of one decay, 400 updates."""
    beta2 = 0.99 if name == "e4m3-1x128" else 0.999
    adam, weight = _adam(name, beta2=beta2), {"w": jnp.zeros((1, 128))}
    # one large element holds the scale of the others' group
    sizes = jnp.where(jnp.arange(128) == 0, 4.0, 1.0)

    @jax.jit
    def run(state):
        def step(i, state):
            halved = jnp.where((i < 100) | (jnp.arange(128) == 0), 1.0, 0.5)
            return adam.step(weight, {"w": sizes[None] * halved}, state, jnp.float32(1), i)[1]

        return jax.lax.fori_loop(0, 400, step, state)

    found = np.asarray(load(run(adam.init(weight))[0].nu["w"]))[0, 1:]
    exact = 0.0
    for i in range(400):
        exact = beta2 * exact + (1 - beta2) * (1.0 if i < 100 else 0.25)
    # of the mean of 127; one alone is off by up to 44 %
    bound = {"float32": 1e-5, "bfloat16": 0.02, "e4m3-1x128": 0.12}[name]
    assert abs(found.mean() / exact - 1) < bound


def test_first_update_is_the_sign_of_the_gradient():
    gradient = {"w": jnp.asarray(np.random.default_rng(2).normal(size=(5, 200)), jnp.float32)}
    weight = jax.tree.map(jnp.zeros_like, gradient)
    for name in FORMATS:
        adam = _adam(name, rate=1.0, eps=1e-12)
        after, _, finite = adam.step(
            weight, gradient, adam.init(weight), jnp.float32(1), jnp.int32(0)
        )
        assert finite
        np.testing.assert_allclose(after["w"], -np.sign(gradient["w"]), rtol=1e-5, err_msg=name)


def test_float32_moments_are_those_of_optax():
    policy = init_policy(SHAPE, jax.random.key(0))
    config = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1)
    theirs = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(learning_rate(config, 4), 0.9, 0.99, 1e-8, weight_decay=0.1, mask=decay_mask),
    )
    ours = make_optimizer(config, 4)
    states = [optimizer.init(policy) for optimizer in (ours, theirs)]
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
    policies = [policy, policy]
    for seed in range(3):
        gradients = jax.tree.map(
            lambda x, seed=seed: jax.random.normal(jax.random.key(seed), x.shape), policy
        )
        policies[0], states[0], finite = jax.jit(ours.step)(
            policies[0], gradients, states[0], optax.tree.norm(gradients), jnp.int32(seed)
        )
        updates, states[1] = jax.jit(theirs.update)(gradients, states[1], policies[1])
        policies[1] = optax.apply_updates(policies[1], updates)
        assert finite
        jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-6, atol=2e-8), *policies)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-6, atol=1e-12), *states)


@pytest.mark.parametrize(("name", "tolerance"), [("bfloat16", 0.02), ("e4m3-1x128", 0.15)])
def test_regression_converges_like_float32(name, tolerance):
    """Noisy least squares of 3 x 160 weights on features of sizes from 0.05 to 1: the logarithm of
    the mean excess error."""
    rng = np.random.default_rng(3)
    features = jnp.asarray(rng.normal(size=(2048, 160)) * np.geomspace(0.05, 1, 160), jnp.float32)
    target = features @ jnp.asarray(rng.normal(size=(160, 3)), jnp.float32)

    def excess(w):
        return jnp.mean((features @ w["w"].T - target) ** 2)

    def train(name):
        optimizer = _adam(name, rate=0.02)

        def step(carry, key):
            w, state = carry
            rows = jax.random.randint(key, (64,), 0, 2048)
            gradient = jax.grad(
                lambda w: jnp.mean((features[rows] @ w["w"].T - target[rows]) ** 2)
            )(w)
            w, state, _ = optimizer.step(w, gradient, state, jnp.float32(1), jnp.int32(0))
            return (w, state), excess(w)

        w = {"w": jnp.zeros((3, 160))}
        return jax.jit(
            lambda: jax.lax.scan(
                step, (w, optimizer.init(w)), jax.random.split(jax.random.key(1), 300)
            )[1]
        )()

    exact, found = train("float32"), train(name)
    assert exact[-1] < 0.05 * exact[0]
    curves = np.log([np.asarray(x).reshape(30, 10).mean(1) for x in (exact, found)])
    assert np.abs(curves[0] - curves[1]).max() < tolerance * np.ptp(curves[0])


def _batch():
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 61, (8, 6)).astype(np.int32)
    prompts, lengths = (
        rng.integers(1, 61, (4, 5)).astype(np.int32),
        np.array([3, 5, 2, 4], np.int32),
    )
    batch = Batch(
        prompts,
        lengths,
        tokens,
        np.ones((8, 6), bool),
        np.zeros((8, 6), np.float32),
        np.zeros(8, np.float32),
    )
    return jax.tree.map(jnp.asarray, batch)


@pytest.mark.slow
def test_policy_learns_as_with_float32_moments():
    config, batch = (
        StepConfig(get_recipe("bf16"), RLConfig(), "float32", 1.0, logprob_chunk=64),
        _batch(),
    )
    losses = {}
    for name in ("float32", "e4m3-1x128"):
        optimizer = make_optimizer(OptimizerConfig(learning_rate=3e-3), 40, in_format(name))

        def step(state, _, optimizer=optimizer):
            loss, gradients = jax.value_and_grad(
                lambda p: -jnp.mean(completion_logprobs(p, batch, config)[0])
            )(state.policy)
            state, metrics = apply_gradients(state, gradients, loss, optimizer)
            return state, (loss, metrics["optim/skipped"])

        _, (curve, skipped) = jax.lax.scan(
            step, init_state(init_policy(SHAPE, jax.random.key(0)), optimizer), None, 40
        )
        assert not skipped.any()
        losses[name] = np.asarray(curve)
    assert losses["float32"][-1] < 0.5 * losses["float32"][0]
    assert np.abs(losses["e4m3-1x128"] - losses["float32"]).max() < 0.05 * np.ptp(losses["float32"])


@pytest.mark.parametrize("name", FORMATS)
def test_state_has_the_promised_bytes(name):
    optimizer = make_optimizer(OptimizerConfig(), 4, in_format(name))
    state = jax.eval_shape(
        lambda key: init_state(init_policy(SHAPE, key), optimizer), jax.random.key(0)
    ).optimizer[1][0]
    for moment in (state.mu, state.nu):
        assert (
            moment.norm.value.dtype
            == moment.layers.q_norm.value.dtype
            == (BFLOAT16 if name == "bfloat16" else FLOAT32)
        )
        leaves = jax.tree.leaves(moment.layers.down_proj)  # [2, 48, 80]
        promised = {"float32": 4 * 7680, "bfloat16": 2 * 7680, "e4m3-1x128": 7680 + 4 * 2 * 48}
        assert sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) == promised[name]


def test_packed_moments_are_placed_like_their_weights():
    mesh = AbstractMesh((1, 2, 1, 2), AXES, axis_types=(AxisType.Auto,) * 4)
    shape = PolicyConfig("qwen3", 64, 256, 512, 2, 4, 2, 64)
    policy = jax.eval_shape(lambda key: init_policy(shape, key), jax.random.key(0))
    optimizer = make_optimizer(OptimizerConfig(), 1, in_format("e4m3-1x128"))
    state = policy_shardings(jax.eval_shape(partial(init_state, optimizer=optimizer), policy), mesh)
    for moment in (state.optimizer[1][0].mu, state.optimizer[1][0].nu):
        for name, weight in state.policy.layers.tensors().items():
            packed = moment.layers.tensors()[name].value
            assert getattr(packed, "values", packed).spec == weight.value.spec
        # groups of 128 along a row: a shard of 128 columns holds whole ones
        assert moment.layers.q_proj.value.scales.spec == PartitionSpec(None, "tensor", "fsdp")
        assert moment.layers.down_proj.value.scales.spec == PartitionSpec(None, "fsdp", "tensor")


@pytest.mark.slow
def test_a_skipped_update_leaves_packed_moments_as_they_were():
    policy = init_policy(SHAPE, jax.random.key(0))
    optimizer = make_optimizer(OptimizerConfig(), 4, in_format("e4m3-1x128"))
    apply = jax.jit(partial(apply_gradients, optimizer=optimizer))
    state, _ = apply(init_state(policy, optimizer), policy, jnp.float32(0))
    broken = jax.tree.map(lambda x: x.at[..., 0].set(jnp.nan), policy)
    after, metrics = apply(state, broken, jnp.float32(0))
    assert (
        metrics["optim/skipped"] == 1 and metrics["nonfinite/gradient"] == 1 and after.updates == 2
    )
    jax.tree.map(
        np.testing.assert_array_equal,
        (after.policy, after.optimizer),
        (state.policy, state.optimizer),
    )


@pytest.mark.parametrize("name", FORMATS)
def test_a_tensor_that_would_not_be_finite_stays(name):
    """Of packed moments the layer of a stack; moments and the other tensors move."""
    weight = {"a": jnp.ones((2, 3, 128)).at[1, 0, 0].set(3e38), "b": jnp.ones((4, 128))}
    gradient = jax.tree.map(lambda x: -jnp.ones_like(x), weight)
    adam = _adam(name, rate=3e38)
    after, state, finite = adam.step(
        weight, gradient, adam.init(weight), jnp.float32(1), jnp.int32(0)
    )
    assert not finite
    np.testing.assert_array_equal(after["a"][1], weight["a"][1])
    np.testing.assert_array_equal(after["a"][0] == weight["a"][0], name == "float32")
    assert jnp.isfinite(after["b"]).all() and (after["b"] > 1e38).all()
    assert (load(state[0].mu["a"]) < 0).all()


@pytest.mark.slow
def test_checkpoint_of_packed_moments_resumes_bit_for_bit_and_refuses_other_formats(tmp_path):
    policy = init_policy(SHAPE, jax.random.key(0))
    optimizers = {
        name: make_optimizer(OptimizerConfig(learning_rate=1e-2), 4, in_format(name))
        for name in FORMATS
    }
    apply = jax.jit(partial(apply_gradients, optimizer=optimizers["e4m3-1x128"]))
    state, _ = apply(init_state(policy, optimizers["e4m3-1x128"]), policy, jnp.float32(0))
    checkpoints = Checkpoints(tmp_path / "checkpoints", CheckpointConfig())
    checkpoints.save(1, state)
    step, restored = checkpoints.restore(
        jax.eval_shape(partial(init_state, optimizer=optimizers["e4m3-1x128"]), policy)
    )
    assert step == 1 and isinstance(restored.optimizer[1][0].mu.layers.q_proj.value, QTensor)
    whole, resumed = (
        apply(state, policy, jnp.float32(0))[0],
        apply(restored, policy, jnp.float32(0))[0],
    )
    jax.tree.map(np.testing.assert_array_equal, whole, resumed)
    for name in ("float32", "bfloat16"):
        with pytest.raises(UserError, match=r"checkpoint of step 1 .*optimizer.*first_moment"):
            checkpoints.restore(
                jax.eval_shape(partial(init_state, optimizer=optimizers[name]), policy)
            )
    checkpoints.save(2, init_state(policy, optimizers["bfloat16"]))
    with pytest.raises(UserError, match=r"checkpoint of step 2 .*bfloat16.*float32.*first_moment"):
        checkpoints.restore(
            jax.eval_shape(partial(init_state, optimizer=optimizers["float32"]), policy)
        )
    checkpoints.close()
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} >= {"1", "2"}


def test_formats_are_those_that_the_run_names():
    """The recipe's, or what [precision] says in their place."""
    changes = PrecisionConfig(first_moment="e4m3-1x128", second_moment="bfloat16")
    changed = RunConfig(precision=changes).resolved_recipe
    assert changed == recipe("bf16", first_moment="e4m3-1x128", second_moment="bfloat16")
    state = make_optimizer(OptimizerConfig(), 1, changed).init({"w": jnp.ones((2, 4, 128))})[1][0]
    assert state.mu["w"].values.dtype == jnp.float8_e4m3fn and state.nu["w"].dtype == BFLOAT16
    packed = PrecisionConfig(second_moment="e4m3-1x128")
    for key in ("optimizer", "sft.optimizer"):
        slow = RunConfig(precision=packed, **SLOW[key])
        assert [line for line in slow.problems() if "beta2" in line] == [
            f"{key}.beta2 = 0.999: an e4m3 second moment needs at most 0.99; use "
            'precision.second_moment = "bfloat16"'
        ]
    with pytest.raises(UserError, match=r"beta2 = 0.999: an e4m3 second moment"):
        make_optimizer(OptimizerConfig(beta2=0.999), 1, in_format("e4m3-1x128"))


SLOW = {
    "optimizer": {"optimizer": OptimizerConfig(beta2=0.999)},
    "sft.optimizer": {"sft": SftConfig(optimizer=OptimizerConfig(beta2=0.999))},
}


def test_sgd_is_that_of_optax_and_keeps_no_moments():
    policy = init_policy(SHAPE, jax.random.key(0))
    config = OptimizerConfig("sgd", learning_rate=0.1, schedule="linear", weight_decay=0.1)
    schedule = learning_rate(config, 4)
    theirs = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.add_decayed_weights(0.1, mask=decay_mask),
        optax.sgd(schedule),
    )
    ours = make_optimizer(config, 4)
    states, policies = [optimizer.init(policy) for optimizer in (ours, theirs)], [policy, policy]
    assert sum(x.size for x in jax.tree.leaves(states[0])) == 1
    step = jax.jit(ours.step)
    for seed in range(3):
        gradients = jax.tree.map(
            lambda x, seed=seed: jax.random.normal(jax.random.key(seed), x.shape), policy
        )
        norm = optax.tree.norm(gradients)
        count = jnp.int32(seed)
        policies[0], states[0], finite = step(policies[0], gradients, states[0], norm, count, True)
        updates, states[1] = jax.jit(theirs.update)(gradients, states[1], policies[1])
        policies[1] = optax.apply_updates(policies[1], updates)
        assert finite and states[0].count == seed + 1
        jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-6, atol=2e-8), *policies)
    kept, state, _ = step(policies[0], gradients, states[0], norm, jnp.int32(3), False)
    jax.tree.map(np.testing.assert_array_equal, (kept, state), (policies[0], states[0]))
    wild = jax.tree.map(lambda x: x.at[..., 0].set(jnp.inf), gradients)
    count = jnp.int32(4)
    kept, state, finite = step(policies[0], wild, states[0], jnp.float32(0.5), count, True)
    jax.tree.map(np.testing.assert_array_equal, kept, policies[0])
    assert not finite and state.count == 4


def test_sgd_refuses_what_only_adam_has():
    asked = RunConfig(
        optimizer=OptimizerConfig("sgd", beta1=0.5),
        precision=PrecisionConfig(first_moment="bfloat16"),
    )
    assert [line for line in asked.problems() if "no use" in line] == [
        "optimizer.beta1 has no use where optimizer.name is 'sgd'",
        "recipe 'bf16': first_moment has no use where optimizer.name is 'sgd'; set "
        'precision.first_moment = "float32"',
    ]
    assert not RunConfig(optimizer=OptimizerConfig("sgd")).problems()
