"""A KV cache in formats that find their scales in each token's head, and probabilities that are
cast: what is written, what is attended with, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from numpy_fp8 import restored
from rollout.tiny import CONFIG, full_logits, log_softmax, make_policy, make_prompts, take
from test_own_formats import restored as of_two_levels
from tiny_models import GLM, LLAMA
from tiny_run import LEARNS, metric_rows, train, write_run
from toy_formats import TwoLevels

from fp8rl_jax.cli.main import main
from fp8rl_jax.config.formats import ELEMENTS, ElementType, TensorFormat, parse_format
from fp8rl_jax.config.recipe import ForwardFormats, Recipe, TrainerFormats, recipe
from fp8rl_jax.config.run import PagedConfig, RolloutConfig, RunConfig
from fp8rl_jax.config.vllm import VllmConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.cache import KVCache, Pages, empty_cache
from fp8rl_jax.models.forms import trainer_policy
from fp8rl_jax.models.forward import forward
from fp8rl_jax.models.policy import init_policy, with_compute
from fp8rl_jax.precision import (
    Compute,
    check_recipe,
    dequantize,
    promises_exact,
    quantize,
    register,
)
from fp8rl_jax.precision.exact import InvariantCompute, OrderFreeCompute
from fp8rl_jax.rollout.calibration import calibrate_on_prompts
from fp8rl_jax.rollout.engine import LocalEngine, PagedEngine
from fp8rl_jax.rollout.sampling import Sampling
from fp8rl_jax.rollout.sync import SyncContext
from pallas_kernels.attention import (
    KeyBlock,
    TokenBlock,
    Tokens,
    attend_in_chunks,
    attention,
    attention_mask,
)
from pallas_kernels.backend import BackendError, tracing_for


@dataclass(frozen=True)
class Coupled(TwoLevels):
    """`TwoLevels` whose outer scale is that of a whole matrix."""

    def quantize(self, x, backend="auto"):
        q = super().quantize(x, backend)
        outer = jnp.broadcast_to(q.outer.max(-2, keepdims=True), q.outer.shape)
        scales = (q.scales.astype(jnp.float32) * (q.outer / outer)).astype(q.scales.dtype)
        return replace(q, scales=scales, outer=outer)


register("coupled", Coupled())


def with_formats(base: str = "bf16", **formats: str) -> Recipe:
    return recipe(base, "mine", **{f"rollout.{role}": name for role, name in formats.items()})


# 24 dimensions of a head: a group of 16 and one of 8. Of GLM's 12 are rotated, in pairs that the
# forward brings half a head apart
RAGGED = replace(LLAMA, head_dim=24, num_layers=2), replace(GLM, head_dim=24, num_layers=2)


def alone(rows: np.ndarray, fmt: TensorFormat) -> np.ndarray:
    """What each row stands for in a format, by itself; in numpy where this test has it."""
    if fmt.element == "two_levels":
        return of_two_levels(rows)
    if fmt.element in ELEMENTS:
        return restored(rows, fmt)
    one = jax.vmap(lambda row: dequantize(quantize(row[None], fmt))[0])
    return np.asarray(one(jnp.asarray(rows, jnp.float32)), np.float64)


@pytest.mark.parametrize(
    ("config", "key", "value", "dtype"),
    [
        (RAGGED[0], "e4m3-1x10-power_of_two", "e5m2-1x16-power_of_two", "bfloat16"),
        (RAGGED[0], "compute", "two_levels", "float32"),
        (RAGGED[1], "e4m3-1x16", "compute", "float32"),
        (RAGGED[0], "nvfp4_rows", "mxfp8", "float32"),
    ],
)
def test_what_is_cached_is_what_each_head_of_a_token_rounds_to(config, key, value, dtype):
    """At once, a token behind others, and in pages; in the order of the checkpoint's dimensions."""
    fmts = {"key": parse_format(key), "value": parse_format(value)}
    policy = jax.tree.map(lambda x: x.astype(dtype), init_policy(config, jax.random.key(0)))
    policy = with_compute(policy, Compute(**fmts))
    half, dim = config.rotary_dim // 2, config.head_dim
    back = np.r_[:half, dim // 2 : dim // 2 + half, half : dim // 2, dim // 2 + half : dim]
    tokens = jnp.asarray(np.random.default_rng(0).integers(1, 40, (2, 5)), jnp.int32)
    seen = jax.jit(partial(forward, observe=lambda q, k, v, real, scales: ((k, v), scales)))
    whole = seen(policy, tokens)
    places = jnp.arange(1, 3, dtype=jnp.int32)[:, None]
    pages = Pages(*empty_cache(config, 3, 8, dtype, True), places, jnp.zeros(2, jnp.int32))
    run = jax.jit(forward)
    own = run(policy, tokens[:, :4], cache=KVCache(completion=pages)).pages
    own = replace(own, own_lengths=jnp.full(2, 4, jnp.int32))
    at = jnp.full((2, 1), 4, jnp.int32)
    own = run(policy, tokens[:, 4:], at, cache=KVCache(completion=own)).pages
    cached = ("key", whole.cache.keys, own.keys), ("value", whole.cache.values, own.values)
    for (name, held, paged), made in zip(cached, whole.observed, strict=True):
        assert held.dtype == paged.dtype == dtype
        made = np.moveaxis(np.asarray(made, np.float64), 2, 3)  # [layers, b, heads, t, dim]
        order = back if name == "key" else np.arange(dim)
        rows, fmt = made[..., order].reshape(-1, dim), fmts[name]
        if fmt.quantized:
            rows = alone(rows, fmt)
        wanted = rows.astype(dtype).reshape(made.shape).astype(np.float32)
        np.testing.assert_allclose(np.asarray(held, np.float32)[..., order], wanted, rtol=1e-6)
        # the first layer reads the same embeddings, and a rounding may flip
        one = np.asarray(paged, np.float32)[0, 1:, :, :5][..., order]
        assert np.isclose(one, wanted[0], rtol=1e-4, atol=1e-6).mean() > 0.98


ENGINES = {
    "static": (LocalEngine, {"unroll": True}),
    "stacked": (LocalEngine, {"unroll": False, "backend": "reference"}),
    "paged": (
        PagedEngine,
        {"unroll": False, "paged": PagedConfig(slots=4, page_size=4, prefill_tokens=8)},
    ),
}
SIMULATED = dict(query="two_levels-1x8", key="two_levels", value="e4m3-1x24", probability="e4m3")


@pytest.mark.parametrize(
    ("engine", "base", "formats"),
    [
        ("static", "bf16", SIMULATED),
        ("paged", "bf16", SIMULATED),
        ("stacked", "fp8-kv", {"probability": "e5m2"}),
    ],
)
def test_engines_sample_from_what_a_full_forward_gives(engine, base, formats):
    """Over a window of 4, with a prompt that two samples share."""
    config = replace(CONFIG, architecture="mistral", sliding_window=4)
    policy = jax.tree.map(
        lambda x: x * 4.0 if x.ndim > 1 and x.shape[-1] > 32 else x,
        init_policy(config, jax.random.key(0)),
    )
    made, options = ENGINES[engine]
    mine, prompts = with_formats(base, **formats), make_prompts()
    found = made(mine, jnp.dtype("float32"), **options)
    scales = calibrate_on_prompts(policy, prompts, mine, jnp.float32)
    found.sync(policy, SyncContext(scales=scales))
    assert (found.scales is None) == (base == "bf16")
    assert set(found.finite) == {"weight"} | ({"kv_scale"} if scales else set())
    out = found.generate(prompts, 2, Sampling(8, temperature=0.8), jax.random.key(1))

    def gap(engine) -> np.ndarray:
        logits = full_logits(engine, out) / 0.8
        return np.abs(take(log_softmax(logits), out.tokens) - out.policy_logprobs)

    plain = LocalEngine(recipe(base), jnp.dtype("float32"), unroll=False)
    plain.sync(policy, SyncContext(scales=scales))
    error, cost = gap(found), gap(plain)
    # a rounding that flips changes the rest of its row
    assert (error < 1e-4).mean() > 0.5 and error.mean() < cost.mean() / 10
    assert cost.mean() > 3e-3


B, N, T, SLOTS, HEADS, KV, DIM = 4, 2, 9, 6, 4, 2, 8


@pytest.mark.parametrize("chunk", [0, 2])
@pytest.mark.parametrize(("element", "step"), [("e4m3", 2.0**-4), ("e5m2", 2.0**-3)])
def test_probabilities_are_cast_times_256(element, step, chunk):
    """Over a block that two rows share and one's own, its largest score in either of them."""
    rng = np.random.default_rng(1)
    shapes = (B, T, HEADS, DIM), (B // N, KV, SLOTS, DIM), (B, KV, T, DIM)
    q, *keys = (rng.normal(size=s).astype(np.float32) for s in shapes)
    values = [rng.normal(size=s).astype(np.float32) for s in shapes[1:]]
    tokens = Tokens.of_rows(jnp.ones((B, T), jnp.int32), jnp.tile(jnp.arange(T), (B, 1)))
    slots = Tokens.of_block(jnp.ones((B // N, SLOTS), bool), None)
    kind = parse_format(element).element_type.dtype

    @partial(jax.jit, static_argnums=0)
    def run(probability, q, keys, values):
        run = partial(attention, probability=probability)
        blocks = [
            TokenBlock(keys[0], values[0], tokens.after_block(), slots),
            TokenBlock(keys[1], values[1], tokens, tokens),
        ]
        if chunk:
            return attend_in_chunks(q, blocks, None, 0.3, 1.5, jnp.float32, chunk, run)
        masks = jnp.ones((B // N, N * T, SLOTS), bool), attention_mask(tokens, tokens)
        whole = [
            KeyBlock(*x, m) for x, m in zip(zip(keys, values, strict=True), masks, strict=True)
        ]
        return run(q, whole, 0.3, 1.5, jnp.float32)

    wanted, cast = np.zeros((2, *q.shape))
    for b, i, h in np.ndindex(B, T, HEADS):
        g = h // (HEADS // KV)
        k, v = (
            np.concatenate([x[0][b // N, g], x[1][b, g, : i + 1]]).astype(np.float64)
            for x in (keys, values)
        )
        scores = k @ q[b, i, h].astype(np.float64) * 0.3
        p = np.exp(scores - scores.max())
        rounded = (p * 256).astype(np.float32).astype(ml_dtypes.finfo(kind).dtype)
        wanted[b, i, h] = p @ v / p.sum() * 1.5
        cast[b, i, h] = rounded.astype(np.float64) @ v / p.sum() / 256 * 1.5
    found = np.asarray(run(jnp.dtype(kind), q, keys, values))
    np.testing.assert_allclose(found, cast, atol=2e-6)
    np.testing.assert_allclose(run(None, q, keys, values), wanted, atol=2e-6)
    # rounding errors are uniform up to half a step at most, and add up as the products do
    assert 0.25 < np.linalg.norm(found - wanted) / np.linalg.norm(wanted) / step < 0.6


@pytest.mark.parametrize("made", [Compute, InvariantCompute, OrderFreeCompute])
def test_both_sides_cast_probabilities_alike(made):
    """A token's output, in exact mode bit for bit wherever its keys lie, and the gradient of
    probabilities that are not cast."""
    rng = np.random.default_rng(2)
    shapes = (1, 1, HEADS, 16), *[(1, KV, SLOTS, 16)] * 2  # which a kernel would take
    q, k, v = (rng.normal(size=s).astype(np.float32) for s in shapes)
    direction = rng.normal(size=q.shape).astype(np.float32)

    def attend(probability, cut, q, k, v):
        parts = [(slice(None), slice(None), part) for part in (slice(0, cut), slice(cut, SLOTS))]
        blocks = [KeyBlock(k[at], v[at], jnp.ones((1, 1, k[at].shape[2]), bool)) for at in parts]
        compute = made("auto", probability=probability)
        return compute.attend(q, blocks, 0.3, 1.0, jnp.float32)

    @jax.jit
    def run(q, k, v):
        def loss(fmt, *x):
            return (attend(fmt, 2, *x) * direction).sum(), attend(fmt, 5, *x)

        both = jax.value_and_grad(loss, (1, 2, 3), has_aux=True)
        cast, plain = (partial(both, parse_format(name)) for name in ("e4m3", "compute"))
        return attend(parse_format("e4m3"), 2, q, k, v), cast(q, k, v), plain(q, k, v)

    one, ((_, other), cast), ((_, plain), uncast) = run(q, k, v)
    wanted = np.zeros(q.shape)
    for h in range(HEADS):
        scores = k[0, h // (HEADS // KV)].astype(np.float64) @ q[0, 0, h].astype(np.float64) * 0.3
        p = np.exp(scores - scores.max())
        rounded = (p * 256).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
        wanted[0, 0, h] = rounded @ v[0, h // (HEADS // KV)] / p.sum() / 256
    for found in (one, other):
        np.testing.assert_allclose(found, wanted, atol=2e-6)
    assert not made.exact or np.array_equal(one, other)
    assert np.abs(plain - wanted).max() > 1e-3
    for found, straight in zip(cast, uncast, strict=True):
        np.testing.assert_allclose(found, straight, rtol=1e-5, atol=1e-6)
        assert np.abs(straight).max() > 1e-2


def test_kernels_do_not_cast_probabilities():
    x = jnp.zeros((1, 2, 2, 64), jnp.bfloat16)
    block = KeyBlock(*(jnp.zeros((1, 2, 2, 64), jnp.bfloat16),) * 2, jnp.ones((1, 1, 2), bool))
    run = partial(attention, x, [block], 1.0, 1.0, jnp.float32, probability=jnp.float8_e4m3fn)
    with tracing_for(132):
        assert "cudnn" not in str(jax.make_jaxpr(run)())
        with pytest.raises(BackendError, match="hopper backend has no probabilities that are cast"):
            run(backend="hopper")


BY_ITSELF = "must treat each token's head by itself"
REFUSED = {
    "a block of rows": (dict(key="e4m3-16x16"), rf"rollout\.key is e4m3-16x16.*{BY_ITSELF}"),
    "a block of its own": (dict(value="two_levels-2x16"), rf"rollout\.value is.*{BY_ITSELF}"),
    "NVFP4 of a tensor": (dict(key="nvfp4"), rf"nvfp4-1x16.*{BY_ITSELF}.*such as nvfp4_rows"),
    "a scale over rows": (dict(key="coupled", value="compute"), rf"coupled.*{BY_ITSELF}"),
    "a scale rule": (dict(key="two_levels-1x16-power_of_two"), r"rollout\.key\.scale is not of"),
    "a calibrated query": (
        dict(query="e4m3", key="two_levels", value="two_levels"),
        r"rollout\.key must have one float32 scale.*, as rollout\.query has",
    ),
    "a calibrated cache": (
        dict(query="two_levels", key="e4m3", value="e4m3"),
        r"rollout\.query must have one float32 scale.*, as rollout\.key has",
    ),
    "half of a calibrated cache": (
        dict(key="two_levels", value="e4m3"),
        r"rollout\.value and key must have the same element",
    ),
    "a query alone": (dict(query="two_levels", value="two_levels"), r"rollout\.query is quantized"),
    "groups of keys": (
        dict(probability="two_levels"),
        r"rollout\.probability cannot be two_levels",
    ),
    "blocks of keys": (dict(probability="e4m3-1x32"), r"rollout\.probability must be an element"),
    "an element without 256": (
        dict(probability="e4m3b11"),
        r"rollout\.probability is e4m3b11, which ends at 30:",
    ),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_attention_cannot_take_is_refused_by_role(case, monkeypatch):
    small = ElementType("e4m3b11", "float8_e4m3b11fnuz", 30.0, 8)
    monkeypatch.setitem(ELEMENTS, "e4m3b11", small)
    formats, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        check_recipe(with_formats(**formats))


@pytest.mark.parametrize("formats", [SIMULATED, {"value": "two_levels"}, {"key": "two_levels-1x5"}])
def test_what_asks_for_more_than_a_simulation_is_refused(formats):
    mine = with_formats(**formats)
    check_recipe(mine)
    assert not mine.quantizes_cache and mine.quantizes_attention
    with pytest.raises(UserError, match="exact cannot be promised: the rollout's"):
        check_recipe(replace(mine, exact=True))
    with pytest.raises(UserError, match="no queries, keys or values of one scale"):
        _ = RunConfig(
            recipe="mine",
            recipes={"mine": mine.table()},
            precision=replace(RunConfig().precision, kv_rule="verl"),
        ).resolved_recipe
    vllm = RolloutConfig(engine="vllm", vllm=VllmConfig(python="p"))
    told = RunConfig(recipe="mine", recipes={"mine": mine.table()}, rollout=vllm).problems()
    assert any("has a KV cache that vLLM does not serve" in line for line in told)


def test_probabilities_are_cast_by_the_reference_alone(monkeypatch):
    mine = with_formats(probability="e4m3")
    check_recipe(mine)
    check_recipe(mine, "reference")
    for backend in ("cpu", "hopper"):
        with pytest.raises(UserError, match=rf'backend = "{backend}" asks for kernels'):
            check_recipe(mine, backend)
    both = replace(mine, trainer=mine.rollout, exact=True)  # a rollout's formats for both sides
    check_recipe(both)
    assert both.trainer == TrainerFormats(probability=parse_format("e4m3"))
    assert both == recipe(mine, **{"trainer.probability": "e4m3", "exact": True})
    made = jax.eval_shape(partial(trainer_policy, recipe=both, dtype=jnp.float32), make_policy())
    assert made.compute.exact and made.compute.probability == parse_format("e4m3")
    assert not promises_exact(both)  # no kernel casts them
    with pytest.raises(UserError, match=r"trainer\.probability is cast by the reference alone"):
        check_recipe(replace(both, rollout=ForwardFormats()), "cpu")
    monkeypatch.setattr("fp8rl_jax.precision.check.selected_backend", lambda backend: "hopper")
    with pytest.raises(UserError, match="exact cannot be promised: probabilities are cast by"):
        check_recipe(both)
    vllm = RolloutConfig(engine="vllm", vllm=VllmConfig(python="p"))
    told = RunConfig(recipe="mine", recipes={"mine": mine.table()}, rollout=vllm).problems()
    assert any("has rollout.probability, and what vLLM's attention" in line for line in told)


def test_a_run_a_plan_doctor_and_a_comparison_know_them(tmp_path, capsys):
    row = {"base": "bf16", "rollout": SIMULATED}
    mine = {"recipe": "mine", "recipes": {"mine": row}, "trainer": {"steps": 1}}
    run = write_run(tmp_path, LEARNS, mine)
    assert train(run, tmp_path / "run") == 0
    (row,) = metric_rows(tmp_path / "run")
    assert 0 < row["mismatch/k3"] < 1e-2
    assert not any(name.startswith(("fp8/kv", "fp8/nonfinite_kv")) for name in row)
    capsys.readouterr()
    model = str(tmp_path / "run" / "model")
    assert main(["plan", run, "--model.path", model]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "(float32; two_levels-1x16 and e4m3-1x24 simulated)" in told
    assert main(["doctor", "--recipes", run, "--recipe", "mine", "--model", model]) == 0
    told = capsys.readouterr().out
    assert "key          two_levels-1x16, simulated: kept in bfloat16" in told
    assert (
        "probability  rollout: e4m3, cast times 256; by the reference backend; trainer: float32"
        in told
        and 'probability = "e4m3"' in told
    )
    words = [
        "--recipe",
        "mine",
        "--b.recipe",
        "bf16",
        "--recipes",
        run,
        "--compute-dtype",
        "float32",
    ]
    assert main(["compare", model, *words]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "key: two_levels 1x16 against float32" in told
    assert "probability: e4m3 against float32" in told
    assert "only a quantizes query, key, value, probability in layer 0" in told
