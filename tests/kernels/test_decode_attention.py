"""decode_attention against float64, key by key, and what it refuses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import BackendError, KeyValues, decode_attention
from pallas_kernels.backend import tracing_for
from pallas_kernels.check.cases import cases_of, difference
from pallas_kernels.decode_attention import hopper, reference
from pallas_kernels.decode_attention.cases import Cache, case

# equal bits are the kernel's alone
SMALL = [case for case in cases_of("decode_attention", "small") if case.tolerance]


@pytest.mark.parametrize("small", SMALL, ids=lambda small: small.name)
def test_the_reference_equals_float64(small):
    arrays = small.arguments(jax.random.key(0))
    got = jax.jit(lambda *a: small.run(*a, backend="reference"))(*arrays)
    assert difference(got, small.expected(*map(np.asarray, arrays))) < 2e-6


@pytest.mark.parametrize(
    "small",
    [case for case in SMALL if any(cache.page for cache in case.arguments.keywords["caches"])],
    ids=lambda small: small.name,
)
def test_pages_that_are_taken_a_few_at_a_time_give_the_same(small, monkeypatch):
    monkeypatch.setattr(
        reference, "_BLOCK", 2 * max(c.page for c in small.arguments.keywords["caches"])
    )
    arrays = small.arguments(jax.random.key(0))
    got = jax.jit(lambda *a: small.run(*a, backend="reference"))(*arrays)
    assert difference(got, small.expected(*map(np.asarray, arrays))) < 2e-6


@pytest.mark.parametrize("block", [16, 4096])
@pytest.mark.parametrize("window", [None, 9])
def test_two_tables_of_one_pool_are_attended_to_together(block, window, monkeypatch):
    monkeypatch.setattr(reference, "_BLOCK", block)
    keys, values = jax.random.normal(jax.random.key(0), (2, 9, 2, 8, 32))
    query = jax.random.normal(jax.random.key(1), (3, 4, 32))
    tables = jnp.array([[4], [4], [2]]), jnp.array([[1, 8], [0, 3], [7, 9]])
    lengths = jnp.array([6, 6, 8]), jnp.array([11, 2, 0])
    window = None if window is None else jnp.int32(window)

    def run(pools):
        held = zip(pools, lengths, tables, strict=True)
        caches = tuple(KeyValues(*pool, n, table, 8) for pool, n, table in held)
        return decode_attention(query, caches, 0.2, window=window, out_dtype=jnp.float32)

    alone = run([(keys, values), (keys + 0, values + 0)])
    np.testing.assert_allclose(run([(keys, values)] * 2), alone, atol=1e-6)


def test_scales_and_window_change_without_recompiling():
    small = case("", 4, 2, 32, Cache((40, 7), 48), window=5)
    run = jax.jit(lambda *a: small.run(*a, backend="reference"))
    *arrays, scales, _ = small.arguments(jax.random.key(1))
    for factor, window in ((1.0, 5), (2.0, 9)):
        now = (*arrays, scales * factor, jnp.int32(window))
        assert difference(run(*now), small.expected(*map(np.asarray, now))) < 2e-6
    assert run._cache_size() == 1


def operands(sequences=4, cache_rows=4, slots=64):
    keys = jnp.ones((cache_rows, 2, slots, 64), jnp.bfloat16)
    return jnp.ones((sequences, 4, 64), jnp.bfloat16), keys, jnp.full(sequences, 3, jnp.int32)


def test_a_sequence_without_a_key_has_the_output_zero():
    query, keys, lengths = operands()
    out = decode_attention(query, (KeyValues(keys, keys, lengths.at[1].set(0).at[2].set(-5)),), 1.0)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(out, np.float32)[:, 0, 0], [1, 0, 0, 1])


def test_bad_input_is_one_clear_error():
    query, keys, lengths = operands()
    good, table = KeyValues(keys, keys, lengths), jnp.zeros((4, 2), jnp.int32)
    for caches, scale, message in (
        ((), None, "0 caches"),
        ((good,), jnp.ones(4), r"a scale has the shape \(\) or \(2,\)"),
        ((KeyValues(keys, keys[:, :1], lengths),), None, "do not fit"),
        ((KeyValues(keys[..., :32], keys[..., :32], lengths),), None, "do not fit"),
        ((KeyValues(keys[:3], keys[:3], lengths[:3]),), None, "cannot share 3 rows"),
        ((KeyValues(keys, keys, lengths[:2]),), None, "need `pages`"),
        ((KeyValues(keys, keys, lengths, table),), None, "of size None"),
        ((KeyValues(keys, keys, lengths, table[:2], 64),), None, "do not fit 4 rows"),
        ((KeyValues(keys, keys, lengths, table[:, :0], 64),), None, "do not fit 4 rows"),
        ((KeyValues(keys, keys, lengths.astype(jnp.int16)),), None, "int32"),
    ):
        with pytest.raises(ValueError, match=f"decode_attention: .*{message}"):
            decode_attention(query, caches, 1.0, key_scale=scale)
    with pytest.raises(ValueError, match="window is a scalar"):
        decode_attention(query, (good,), 1.0, window=jnp.ones(2, jnp.int32))
    with pytest.raises(ValueError, match="0 sequences"):
        decode_attention(query[:0], (good,), 1.0)


def test_auto_takes_the_reference_where_hopper_has_no_kernel_and_hopper_by_name_is_refused():
    query, keys, lengths = operands()
    held = KeyValues(keys, keys, lengths)
    with pytest.raises(BackendError, match=r"needs a GPU of compute capability 9\.0"):
        decode_attention(query, (held,), 1.0, backend="hopper")
    wide = query.astype(jnp.float32)
    paged = KeyValues(keys, keys, lengths, jnp.zeros((4, 2), jnp.int32), 32)
    long = KeyValues(*(jnp.zeros((4, 2, 64, 256), jnp.bfloat16),) * 2, lengths)
    with tracing_for(132):
        for call, message in (
            ((wide, (held,)), "query and keys alike"),
            ((query, (paged,)), "pages of 32 slots"),
            ((jnp.ones((4, 4, 256), jnp.bfloat16), (long,)), "head_dim"),
        ):
            with pytest.raises(BackendError, match=f"decode_attention: .*{message}"):
                decode_attention(*call, 1.0, backend="hopper")
            assert jnp.isfinite(decode_attention(*call, 1.0)).all()


def test_the_fold_does_not_depend_on_how_many_chunks_there_could_be():
    rng = np.random.default_rng(0)
    stats = jnp.asarray(np.round(3 * rng.normal(size=(40, 3, 2, 2, 8))), jnp.float32)
    sums = jnp.asarray(rng.normal(size=(40, 3, 2, 64, 8)), jnp.float32)
    taken = (np.arange(40)[:, None] < np.array([5, 0, 2]))[..., None]
    few, many = (jax.jit(hopper.fold)(stats[:n], sums[:n], taken[:n]) for n in (5, 40))
    for one, other in zip(few, many, strict=True):
        np.testing.assert_array_equal(one, other)
    unseen = jax.jit(hopper.fold)(stats.at[5:].set(jnp.nan), sums.at[5:].set(jnp.nan), taken)
    np.testing.assert_array_equal(unseen[2], few[2])
