from __future__ import annotations

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_llama as reference
from jax.extend.core import jaxprs_in_params
from tiny_models import DEEPSEEK, GEMMA, GLM, LLAMA, MISTRAL, MOE, QWEN2, QWEN3

from fp8rl_jax.config.recipe import PrecisionConfig, get_recipe
from fp8rl_jax.config.training import LoraConfig
from fp8rl_jax.models.attention import rope_frequencies
from fp8rl_jax.models.cache import KVBlock, KVCache, KVScales, empty_block
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.forms import predequantized, quantized_base, rollout_policy, trainer_policy
from fp8rl_jax.models.forward import forward
from fp8rl_jax.models.logprobs import token_logprobs
from fp8rl_jax.models.lora import init_adapters, join
from fp8rl_jax.models.policy import (
    EXPERT_LINEARS,
    LINEARS,
    Policy,
    build_policy,
    init_policy,
    unstack,
    with_compute,
    with_scales,
)
from fp8rl_jax.models.rope import Llama3RopeScaling
from fp8rl_jax.precision import AdaptedWeight, Compute
from fp8rl_jax.precision.exact import InvariantCompute, OrderFreeCompute
from fp8rl_jax.rollout.calibration import observe_qkv
from fp8rl_jax.rollout.sampler import generate
from fp8rl_jax.rollout.sampling import Sampling

SCALED = dataclasses.replace(
    LLAMA, rope_theta=500000.0, rope_scaling=Llama3RopeScaling(8.0, 1.0, 4.0, 64)
)
MIXED_WINDOWS = dataclasses.replace(QWEN2, sliding_window=3, full_attention_layers=(1,))
ALL_SPARSE = dataclasses.replace(
    MOE, num_layers=2, experts=dataclasses.replace(MOE.experts, normalize=False, dense_layers=())
)
SMALL_MOE = dataclasses.replace(
    MOE, num_layers=2, experts=dataclasses.replace(MOE.experts, dense_layers=(0,))
)
SMALL_GEMMA = dataclasses.replace(GEMMA, num_layers=2, sliding_window=3, full_attention_layers=(0,))
CONFIGS = {
    "llama_tied": LLAMA,
    "llama3_rope": SCALED,
    "qwen3_untied": QWEN3,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen2_windows": MIXED_WINDOWS,
    "moe": MOE,
    "moe_all_sparse": ALL_SPARSE,
    "glm4_moe": GLM,
    "gemma3": GEMMA,
    "gemma3_full_attention": dataclasses.replace(
        GEMMA,
        num_layers=2,
        sliding_window=None,
        full_attention_layers=(),
        local_rope_theta=None,
        tie_word_embeddings=False,
    ),
}
TOLERANCE = {"atol": 2e-5, "rtol": 2e-5}  # float32 against float64, logits of order 1

run = jax.jit(forward, static_argnames=("keep_cache", "observe"))


def policy_and_weights(config: PolicyConfig) -> tuple[Policy, dict[str, np.ndarray]]:
    weights = reference.random_weights(config)
    return build_policy(
        config, lambda name, shape, axes: jnp.asarray(weights[f"{name}.weight"], jnp.float32)
    ), weights


def logits(policy: Policy, hidden) -> np.ndarray:
    return np.asarray(hidden, np.float64) @ np.asarray(policy.head, np.float64).T


TOKENS = [5, 17, 3, 39, 0, 22, 8, 31, 14, 2, 27, 11]
"""Of which transformers computed the logits that `check_logits` is given."""


def check_logits(config: PolicyConfig, expected, atol: float, of_reference: float) -> None:
    """Whether the policy's logits of the first 8 tokens of the vocabulary behind tokens 5 and 12 of
    TOKENS are those expected, [2, 8], and the float64 reference's are, each within its bound."""
    policy, weights = policy_and_weights(config)
    ours = logits(policy, run(policy, np.array([TOKENS], np.int32)).hidden)[0]
    np.testing.assert_allclose(ours[[4, 11], :8], expected, atol=atol)
    found = reference.logits(config, weights, TOKENS)[[4, 11], :8]
    np.testing.assert_allclose(found, expected, atol=of_reference)


def random_tokens(config: PolicyConfig, *shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, config.vocab_size, shape, dtype=np.int32)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_logits_equal_the_float64_reference(config):
    policy, weights = policy_and_weights(config)
    tokens = random_tokens(config, 2, 24)
    expected = [reference.logits(config, weights, row.tolist()) for row in tokens]
    for form in (policy, unstack(policy)):
        np.testing.assert_allclose(logits(policy, run(form, tokens).hidden), expected, **TOLERANCE)


def test_the_rope_scaling_changes_the_logits_and_its_frequencies_have_all_three_regimes():
    base = reference.frequencies(dataclasses.replace(SCALED, rope_scaling=None))
    scaled = reference.frequencies(SCALED)
    np.testing.assert_allclose(rope_frequencies(SCALED), scaled, rtol=1e-6)
    ratio = base / scaled
    assert (ratio == 1).any() and (ratio == 8).any() and ((ratio > 1.01) & (ratio < 7.99)).any()


@pytest.mark.parametrize(
    "config", [LLAMA, QWEN3, MISTRAL, GEMMA], ids=["llama", "qwen3", "mistral", "gemma3"]
)
def test_left_and_right_padding_and_packing_leave_a_row_as_it_is(config):
    policy, weights = policy_and_weights(config)
    first, second = random_tokens(config, 7), random_tokens(config, 5, seed=2)
    rows = np.zeros((3, 12), np.int32)
    segments, positions = np.zeros_like(rows), np.zeros_like(rows)
    rows[0, 5:], segments[0, 5:], positions[0, 5:] = first, 1, range(7)  # left padding
    rows[1, :7], segments[1, :7], positions[1, :7] = first, 1, range(7)  # right padding
    # two in one row
    rows[2], segments[2], positions[2] = (
        [*first, *second],
        [1] * 7 + [2] * 5,
        [*range(7), *range(5)],
    )
    got = logits(policy, run(policy, rows, positions, segments).hidden)
    expected = reference.logits(config, weights, first.tolist())
    for found in (got[0, 5:], got[1, :7], got[2, :7]):
        np.testing.assert_allclose(found, expected, **TOLERANCE)
    np.testing.assert_allclose(
        got[2, 7:], reference.logits(config, weights, second.tolist()), **TOLERANCE
    )


def test_only_differences_of_positions_matter():
    policy, weights = policy_and_weights(QWEN3)
    tokens = random_tokens(QWEN3, 1, 9)
    shifted = run(policy, tokens, np.arange(100, 109, dtype=np.int32)[None]).hidden
    np.testing.assert_allclose(
        logits(policy, shifted)[0], reference.logits(QWEN3, weights, tokens[0].tolist()), atol=1e-4
    )


@pytest.mark.parametrize("stacked", [True, False], ids=["scan", "unroll"])
@pytest.mark.parametrize(
    "config",
    [LLAMA, QWEN3, MIXED_WINDOWS, MOE, GEMMA],
    ids=["llama", "qwen3", "qwen2_windows", "moe", "gemma3"],
)
def test_cached_decode_equals_the_full_forward(config, stacked):
    """Two ragged prompts, two samples each, their completions fed token by token."""
    policy, weights = policy_and_weights(config)
    served = policy if stacked else unstack(policy)
    lengths, steps, n = np.array([6, 3], np.int32), 5, 2
    prompts, completions = random_tokens(config, 2, 6), random_tokens(config, 4, steps, seed=3)
    segments = (np.arange(6) < lengths[:, None]).astype(np.int32)
    prefix = run(served, prompts, segment_ids=segments).cache
    completion_cache = empty_block(config, 4, steps, jnp.float32, stacked)
    starts = np.repeat(lengths, n)
    hidden = []
    for t in range(steps):
        cache = KVCache(prefix, completion_cache, jnp.int32(t))
        result = run(served, completions[:, t : t + 1], (starts + t)[:, None], cache=cache)
        completion_cache = KVBlock(result.cache.keys, result.cache.values, result.cache.mask)
        hidden.append(result.hidden)
    got = logits(policy, np.concatenate(hidden, axis=1))
    for row, completion in enumerate(completions):
        prompt = prompts[row // n, : lengths[row // n]]
        expected = reference.logits(config, weights, [*prompt.tolist(), *completion.tolist()])
        np.testing.assert_allclose(got[row], expected[len(prompt) :], **TOLERANCE)


@pytest.fixture(scope="module")
def group():
    """Two ragged prompts, three completions each, and where each completion's tokens are real."""
    lengths, widths = np.array([4, 7], np.int32), np.array([5, 2, 4, 1, 5, 3], np.int32)
    prompts, completions = random_tokens(QWEN3, 2, 7), random_tokens(QWEN3, 6, 5, seed=4)
    return lengths, widths, prompts, completions


def prefix_cache_logprobs(policy: Policy, group, remat: bool):
    """The trainer's layout: prompts once, completions against their block. The last prompt token
    predicts the first of each."""
    lengths, widths, prompts, completions = group
    n = len(completions) // len(prompts)
    inside = (jnp.arange(prompts.shape[1]) < lengths[:, None]).astype(jnp.int32)
    policy = with_compute(policy, Compute(remat=remat))
    first = forward(policy, jnp.asarray(prompts), segment_ids=inside)
    positions = jnp.repeat(lengths, n)[:, None] + jnp.arange(completions.shape[1])
    real = (jnp.arange(completions.shape[1]) < widths[:, None]).astype(jnp.int32)
    second = forward(
        policy,
        jnp.asarray(completions),
        positions,
        real,
        KVCache(first.cache),
        keep_cache=False,
    )
    last = jnp.take_along_axis(first.hidden, (lengths - 1)[:, None, None], axis=1)
    hidden = jnp.concatenate([jnp.repeat(last, n, axis=0), second.hidden[:, :-1]], axis=1)
    return jnp.where(real > 0, token_logprobs(hidden, policy, jnp.asarray(completions))[0], 0.0)


def plain_logprobs(policy: Policy, group):
    """Each completion behind its own copy of the prompt, right-padded."""
    lengths, widths, prompts, completions = group
    n, (b, t) = len(completions) // len(prompts), completions.shape
    rows = np.zeros((b, prompts.shape[1] + t), np.int32)
    starts = np.repeat(lengths, n)
    for row in range(b):
        rows[row, : starts[row] + t] = [*prompts[row // n, : starts[row]], *completions[row]]
    segments = (np.arange(rows.shape[1]) < (starts + widths)[:, None]).astype(np.int32)
    hidden = forward(
        policy, jnp.asarray(rows), segment_ids=jnp.asarray(segments), keep_cache=False
    ).hidden
    columns = starts[:, None] - 1 + np.arange(t)
    picked = jnp.take_along_axis(hidden, columns[..., None], axis=1)
    return jnp.where(
        np.arange(t) < widths[:, None],
        token_logprobs(picked, policy, jnp.asarray(completions))[0],
        0.0,
    )


def weighted_gradients(layout, policy: Policy):
    """Gradients of a weighted sum of the log-probabilities, and the log-probabilities."""

    def weighted(policy):
        values = layout(policy)
        return (values * np.random.default_rng(5).normal(size=values.shape)).sum(), values

    return jax.jit(jax.grad(weighted, has_aux=True))(policy)


@pytest.mark.parametrize(
    ("config", "remat"),
    [
        (QWEN3, False),
        (MIXED_WINDOWS, False),
        pytest.param(SMALL_MOE, True, marks=pytest.mark.slow),
        (SMALL_GEMMA, True),
    ],
    ids=["qwen3", "windows", "moe_remat", "gemma3_remat"],
)
def test_the_prefix_cache_layout_has_the_values_and_gradients_of_the_plain_one(
    group, config, remat
):
    policy, _ = policy_and_weights(config)
    gradients, values = weighted_gradients(partial(plain_logprobs, group=group), policy)
    layout = partial(prefix_cache_logprobs, group=group, remat=remat)
    cached_gradients, cached_values = weighted_gradients(layout, policy)
    assert (np.asarray(values) != 0).sum() == group[1].sum()
    np.testing.assert_allclose(cached_values, values, atol=1e-5)
    for got, expected in zip(
        jax.tree.leaves(cached_gradients), jax.tree.leaves(gradients), strict=True
    ):
        scale = np.abs(expected).max()
        assert scale > 0
        np.testing.assert_allclose(got, expected, atol=2e-5 * scale)


LAYER = ("layers.q_proj", "layers.k_norm", "layers.down_proj")
FOUR_NORMS = tuple(
    f"layers.{name}_layernorm" for name in ("post_attention", "pre_feedforward", "post_feedforward")
)
LATENTS = tuple(
    f"layers.{name}"
    for name in ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm")
) + ("layers.kv_b_proj", "layers.o_proj")
ONE_SPARSE = dataclasses.replace(DEEPSEEK.mixture, dense_layers=())
EXPERTS = (
    "layers.router",
    "layers.experts.gate_proj",
    "layers.experts.down_proj",
    "layers.up_proj",
)


@pytest.mark.parametrize(
    ("config", "paths"),
    [
        (dataclasses.replace(QWEN3, num_layers=1), ("embed_tokens", *LAYER, "norm")),
        (
            dataclasses.replace(QWEN2, num_layers=1, sliding_window=2),
            ("layers.q_bias", "layers.v_bias", "layers.k_proj"),
        ),
        (SMALL_MOE, EXPERTS),
        (SMALL_GEMMA, ("embed_tokens", *LAYER, *FOUR_NORMS, "norm")),
        (dataclasses.replace(DEEPSEEK, num_layers=1, experts=ONE_SPARSE), LATENTS),
    ],
    ids=["qwen3", "qwen2_window", "moe", "gemma3", "deepseek_v3"],
)
def test_gradients_equal_finite_differences_of_the_reference(config, paths):
    policy, weights = policy_and_weights(config)
    tokens = random_tokens(config, 6)

    def loss(policy):
        hidden = forward(policy, jnp.asarray(tokens[None, :-1])).hidden
        return token_logprobs(hidden, policy, jnp.asarray(tokens[None, 1:]))[0].sum()

    def reference_loss(weights):
        scores = reference.log_softmax(reference.logits(config, weights, tokens[:-1].tolist()))
        return scores[np.arange(5), tokens[1:]].sum()

    gradients = jax.jit(jax.grad(loss))(policy)
    rng = np.random.default_rng(6)
    for path in paths:
        node = gradients
        for name in path.split("."):
            node = getattr(node, name)
        direction = rng.normal(size=weights[f"{path}.weight"].shape)
        step, centre = 1e-5, weights[f"{path}.weight"]
        up, down = (
            reference_loss(weights | {f"{path}.weight": centre + s * direction})
            for s in (step, -step)
        )
        slope = (up - down) / (2 * step)
        assert (np.asarray(node.value, np.float64) * direction).sum() == pytest.approx(
            slope, rel=1e-4, abs=1e-4
        ), path


def amax_of(q, k, v, real, scales):
    return jnp.stack([jnp.abs(jnp.where(real, x, 0.0)).max() for x in (q, k, v)]), scales


def test_observers_can_leave_padding_out():
    policy, _ = policy_and_weights(LLAMA)
    tokens = random_tokens(LLAMA, 1, 8)
    padded = np.concatenate([tokens, random_tokens(LLAMA, 1, 8, seed=9)], axis=1)
    segments = (np.arange(16) < 8).astype(np.int32)[None]
    plain = run(policy, tokens, observe=amax_of).observed
    np.testing.assert_allclose(
        run(policy, padded, segment_ids=segments, observe=amax_of).observed, plain, rtol=1e-5
    )
    assert plain.shape == (LLAMA.num_layers, 3) and (np.asarray(plain) > 0).all()


def test_a_quantized_cache_needs_scales():
    policy = served(policy_and_weights(LLAMA)[0], get_recipe("fp8-kv"))
    with pytest.raises(ValueError, match="FP8 cache, and no scales"):
        jax.eval_shape(forward, policy, jnp.zeros((1, 4), jnp.int32))


MASTERS = jax.eval_shape(lambda: init_policy(SMALL_MOE, jax.random.key(0)))
JET, LINEARS_ONLY, BF16 = map(get_recipe, ("jet-rl", "fp8-rollout", "bf16"))
LAST_PLAIN = get_recipe("jet-rl", PrecisionConfig(excluded=("layers.1.*",)))
NO_DOWN = get_recipe("jet-rl", PrecisionConfig(excluded=("*.down_proj",)))


def trained(policy, recipe):
    return jax.eval_shape(partial(trainer_policy, recipe=recipe, dtype=jnp.float32), policy)


def served(policy, recipe, unroll=False):
    convert = partial(rollout_policy, recipe=recipe, dtype=jnp.float32, unroll=unroll)
    return jax.eval_shape(convert, policy)[0]


def at_rest(policy):
    """A base of adapters in the rollout's formats."""
    return jax.eval_shape(partial(quantized_base, recipe=LINEARS_ONLY, dtype=jnp.float32), policy)


def adapted(policy):
    return join(
        jax.eval_shape(partial(init_adapters, SMALL_MOE, LoraConfig(rank=2)), jax.random.key(0)),
        policy,
    )


def unquantized(policy, arithmetic=InvariantCompute):
    """As an exact sampler multiplies it."""
    return jax.eval_shape(predequantized, with_compute(policy, arithmetic()))


def kinds(policy) -> dict[str, set[str]]:
    """Types of each linear's weight over the layers; of one with an adapter, of its base."""
    found: dict[str, set[str]] = {}
    for layer in [policy.layers] if policy.stacked else policy.layers:
        for name, weight in layer.tensors().items():
            if name in (*LINEARS, *EXPERT_LINEARS):
                found.setdefault(name, set())
                for part in getattr(weight, "parts", [weight]):
                    value = part.value
                    value = value.base if isinstance(value, AdaptedWeight) else value
                    found[name].add(type(value).__name__)
    return found


ALL = {
    "q_proj": {"QuantizedWeight"},
    "down_proj": {"QuantizedWeight"},
    "experts.down_proj": {"QuantizedWeight"},
}
ARRAY = {"ShapeDtypeStruct"}


# in exact weights, of which the shapes alone are made
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64")
@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (lambda: trained(MASTERS, JET), ALL),
        (
            lambda: trained(MASTERS, NO_DOWN),
            ALL | {"down_proj": ARRAY, "experts.down_proj": ARRAY, "up_proj": {"QuantizedWeight"}},
        ),
        (
            lambda: trained(MASTERS, LAST_PLAIN),
            {
                "q_proj": {"QuantizedWeight"} | ARRAY,
                "down_proj": {"QuantizedWeight"},
                "experts.up_proj": ARRAY,
            },
        ),
        (lambda: served(MASTERS, JET), ALL),
        (
            lambda: served(MASTERS, LAST_PLAIN, True),
            {
                "q_proj": {"QuantizedWeight"} | ARRAY,
                "down_proj": {"QuantizedWeight"},
                "experts.up_proj": ARRAY,
            },
        ),
        (lambda: trained(MASTERS, LINEARS_ONLY), {"q_proj": ARRAY, "experts.up_proj": ARRAY}),
        (lambda: trained(adapted(at_rest(MASTERS)), LINEARS_ONLY), {"q_proj": {"QTensor"}}),
        (lambda: trained(adapted(at_rest(MASTERS)), JET), ALL),
        (lambda: adapted(served(at_rest(MASTERS), BF16)), {"q_proj": {"QTensor"}}),
        (lambda: adapted(served(at_rest(MASTERS), LINEARS_ONLY)), ALL),
        (
            lambda: unquantized(adapted(served(MASTERS, LINEARS_ONLY))),
            {"q_proj": {"PredequantizedWeight"}},
        ),
        (
            lambda: unquantized(served(MASTERS, LINEARS_ONLY, True)),
            {"q_proj": {"PredequantizedWeight"}, "experts.up_proj": {"PredequantizedWeight"}},
        ),
        (lambda: unquantized(MASTERS), {"q_proj": ARRAY, "experts.up_proj": ARRAY}),
        (
            lambda: unquantized(MASTERS, OrderFreeCompute),
            {"q_proj": {"Integers"}, "experts.up_proj": {"Integers"}},
        ),
    ],
)
def test_each_linear_has_the_type_that_the_recipe_gives_it_and_a_forward_runs(policy, expected):
    """A base at rest in FP8 stays quantized under every recipe."""
    policy = policy()
    found = kinds(policy)
    assert {name: found[name] for name in expected} == expected
    jax.eval_shape(forward, policy, jnp.zeros((1, 4), jnp.int32))


@pytest.mark.slow
def test_a_served_policy_is_calibrated_with_the_rollouts_linears():
    """Its Q, K and V are those of the rollout's own prefill, whose linears quantize their inputs;
    attention is not quantized."""
    recipe, policy = get_recipe("fp8-rl"), policy_and_weights(LLAMA)[0]
    tokens = random_tokens(LLAMA, 2, 8)
    for unroll in (False, True):
        convert = partial(rollout_policy, recipe=recipe, dtype=jnp.float32, unroll=unroll)
        served_policy = jax.jit(convert)(policy)[0]
        seen = observe_qkv(
            served_policy, tokens, jnp.full(2, 8), recipe=recipe, dtype=jnp.float32
        ).amax[0]
        unquantized_cache = with_compute(served_policy, Compute())
        expected = run(unquantized_cache, tokens, observe=amax_of).observed
        np.testing.assert_allclose(seen, expected, rtol=1e-6)
        plain = run(policy, tokens, observe=amax_of).observed
        assert np.abs(np.asarray(seen) / np.asarray(plain) - 1).max() > 1e-3


@pytest.mark.parametrize("recipe", ["jet-rl", "mxfp8"])
def test_no_loop_over_layers_converts_a_stack_of_8_bit_numbers(recipe):
    """XLA has no instruction for them on a CPU: each layer would convert the codes of all."""
    masters = jax.eval_shape(lambda: init_policy(LLAMA, jax.random.key(0)))
    tokens = jnp.asarray(random_tokens(LLAMA, 2, 8))

    def loss(masters):
        policy = trainer_policy(masters, get_recipe(recipe), jnp.dtype("float32"))
        return forward(policy, tokens).hidden.sum()

    program = jax.jit(jax.grad(loss)).lower(masters).compile().as_text()
    layers = LLAMA.num_layers
    assert re.search(rf"u8\[{layers},", program), "codes are stacked"
    assert not re.findall(rf"f16\[{layers},.*", program)


def products(jaxpr):
    """Every product of float32 numbers, and what precision it asks for."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("dot_general", "ragged_dot_general"):
            if all(x.aval.dtype == jnp.float32 for x in equation.invars[:2]):
                yield equation.params["precision"], equation
        for inner in jaxprs_in_params(equation.params):
            yield from products(inner)


def highest(precision) -> bool:
    return precision == (jax.lax.Precision.HIGHEST,) * 2 or precision == jax.lax.Precision.HIGHEST


@pytest.mark.parametrize("recipe", ["bf16", "fp8-rl", "jet-rl"])
@pytest.mark.parametrize("config", [SMALL_MOE, MIXED_WINDOWS])
def test_float32_is_float32_on_every_device(config, recipe):
    """Left to it, a GPU multiplies in TF32 and a TPU in bfloat16. In 16 bits, where FP8 is
    dequantized to float32 for it, that is left to the device; so are weight gradients of dequantized
    numbers."""
    masters = jax.eval_shape(lambda: init_policy(config, jax.random.key(0)))
    tokens = jnp.asarray(random_tokens(config, 2, 8))
    prompts = jnp.asarray(tokens[:, :4]), jnp.array([4, 3]), jnp.arange(2), jax.random.key(0)

    def traced(dtype: str):
        def loss(masters):
            policy = trainer_policy(masters, get_recipe(recipe), jnp.dtype(dtype), "reference")
            found = forward(policy, tokens)
            return token_logprobs(found.hidden[:, :-1], policy, tokens[:, 1:])[0].sum()

        def sample(masters):
            form = get_recipe(recipe), jnp.dtype(dtype), False, "reference"
            policy = rollout_policy(masters, *form)[0]
            if recipe == "fp8-rl":
                scales = KVScales(*(jnp.ones(config.num_layers) for _ in range(3)))
                policy = with_scales(policy, scales)
            return generate(policy, *prompts, samples=2, sampling=Sampling(max_new_tokens=2))

        return [jax.make_jaxpr(f)(masters).jaxpr for f in (jax.grad(loss), sample)]

    for jaxpr, trained in zip(traced("float32"), (recipe == "jet-rl", False), strict=True):
        found = [*products(jaxpr)]
        left = [equation for precision, equation in found if not highest(precision)]
        assert len(left) < len(found)
        over_tokens = (((0,), (0,)), ((), ()))
        for equation in left:
            contracted = equation.params.get("dimension_numbers", over_tokens)
            assert trained and contracted == over_tokens, equation
    for jaxpr in traced("bfloat16"):
        asked = [equation for precision, equation in products(jaxpr) if highest(precision)]
        # a router's scores, and the experts' sums with them
        assert bool(asked) == (config.experts is not None)
