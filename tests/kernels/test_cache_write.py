"""write_cache against what the model computes, against numpy, and what it refuses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fp8rl_jax.config.recipe import TensorFormat
from fp8rl_jax.precision import Compute, quantize_per_tensor
from pallas_kernels import BackendError, write_cache
from pallas_kernels.backend import tracing_for
from pallas_kernels.cache_write import move_tokens
from pallas_kernels.cache_write.cases import SMALL
from pallas_kernels.check.cases import difference

E4M3 = jnp.float8_e4m3fn


def inputs(tokens=6, rows=3, kv_heads=2, slots=4, dim=8, dtype=E4M3):
    keys = jax.random.split(jax.random.key(0), 3)
    k, v = (
        jax.random.normal(key, (tokens, kv_heads, dim)).astype(jnp.bfloat16) for key in keys[:2]
    )
    cache = jnp.ones((rows, kv_heads, slots, dim), dtype)
    frequencies = 1e4 ** -jnp.linspace(0.0, 1.0, dim // 2)
    cos, sin = Compute().rope_tables(frequencies, jnp.arange(tokens)[None])
    row, slot = (
        jnp.arange(tokens, dtype=jnp.int32) % rows,
        jnp.arange(tokens, dtype=jnp.int32) // rows,
    )
    return [cache, cache, k, v, cos[0], sin[0], row, slot]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_write_cache_equals_numpy(case):
    arrays = case.arguments(jax.random.key(1))
    got = jax.jit(lambda *a: case.run(*a, backend="reference"))(*arrays)
    assert difference(got, case.expected(*(np.asarray(a) for a in arrays))) <= case.tolerance


def test_a_float32_cache_holds_the_same_fp8_values():
    scales, q = (jnp.float32(0.0061), jnp.float32(0.0007)), inputs()[2]
    narrow = write_cache(*inputs(), scales, q, scales[0])
    wide = write_cache(*inputs(dtype=jnp.float32), scales, q, scales[0], fp8_dtype=E4M3)
    assert [x.dtype for x in wide] == [jnp.float32, jnp.float32, E4M3]
    for one, other in zip(narrow, wide, strict=True):
        assert (np.asarray(one, np.float32) == np.asarray(other, np.float32)).all()


@pytest.mark.parametrize("quantized", [True, False])
def test_write_cache_equals_what_the_model_writes_bit_for_bit(quantized):
    """A decode step: one slot of every row, through the model's rotate, quantizer and
    dynamic_update_slice."""
    dtype, fmt = (E4M3 if quantized else jnp.bfloat16), TensorFormat("e4m3")
    arrays = inputs(tokens=3, dtype=dtype)
    arrays[7] = jnp.full(3, 2, jnp.int32)
    keys, values, k, v, cos, sin = arrays[:6]
    scales = (jnp.float32(0.0061), jnp.float32(0.0007)) if quantized else None
    got = write_cache(*arrays, scales, k, scales and scales[0])
    tables = cos[:, None], sin[:, None]
    turned, v = Compute().rotate(k[:, None], tables), v[:, None]
    query = turned
    if quantized:
        query, v = (
            quantize_per_tensor(turned, scales[0], fmt),
            quantize_per_tensor(v, scales[1], fmt),
        )
    new = jnp.swapaxes(query, 1, 2), jnp.swapaxes(v, 1, 2)
    expected = [
        lax.dynamic_update_slice(old, x, (0, 0, 2, 0))
        for old, x in zip((keys, values), new, strict=True)
    ]
    for have, want in zip(got, (*expected, query[:, 0]), strict=True):
        np.testing.assert_array_equal(np.asarray(have, np.float32), np.asarray(want, np.float32))


@pytest.mark.parametrize(
    ("row", "slot"), [(-1, 0), (3, 0), (0, -1), (0, 4), (-3, 2), (2**31 - 1, 1), (1, -(2**31))]
)
def test_a_token_outside_changes_nothing(row, slot):
    arrays = inputs(tokens=1)
    arrays[6], arrays[7] = jnp.asarray([row], jnp.int32), jnp.asarray([slot], jnp.int32)
    keys, values = write_cache(*arrays, (jnp.float32(1), jnp.float32(1)))
    assert (np.asarray(keys, np.float32) == 1).all() and (np.asarray(values, np.float32) == 1).all()


@pytest.mark.parametrize("dtype", [E4M3, jnp.bfloat16, jnp.float32])
def test_tokens_are_moved_as_they_are_and_read_before_they_are_overwritten(dtype):
    bits = np.random.default_rng(0).integers(0, 256, (3, 2, 4, 8, jnp.dtype(dtype).itemsize))
    cache = bits.astype(np.uint8).view(dtype)[..., 0]
    source, target = np.array([0, 5, 11, 3], np.int32), np.array([5, 0, 12, 10], np.int32)
    moved = np.asarray(jax.jit(move_tokens)(cache, source, target))
    wanted = np.moveaxis(cache, 1, 2).reshape(12, 2, 8).copy()
    wanted[[5, 0, 10]] = wanted[[0, 5, 3]]
    wanted = np.moveaxis(wanted.reshape(3, 4, 2, 8), 2, 1)
    assert moved.dtype == dtype and moved.tobytes() == np.ascontiguousarray(wanted).tobytes()


def test_numbers_beyond_the_range_are_clamped():
    arrays = inputs()
    keys, values = write_cache(*arrays, (jnp.float32(1e-5), jnp.float32(1e-5)))
    assert (
        np.abs(np.asarray(keys, np.float32)).max() == 448
        and np.isfinite(np.asarray(values, np.float32)).all()
    )


def test_a_new_scale_compiles_nothing():
    step = jax.jit(lambda arrays, a, b: write_cache(*arrays, (a, b)))
    for number in (0.5, 0.25, 0.125):
        step(inputs(), jnp.float32(number), jnp.float32(2 * number))
    assert step._cache_size() == 1


def change(at, new):
    arrays = inputs()
    arrays[at] = new
    return arrays


@pytest.mark.parametrize(
    ("arrays", "more", "message"),
    [
        (
            change(1, jnp.ones((3, 2, 5, 8), E4M3)),
            {},
            r"values is float8_e4m3fn\(3, 2, 5, 8\), must be .*\(3, 2, 4, 8\)",
        ),
        (
            change(3, jnp.ones((6, 1, 8), jnp.bfloat16)),
            {},
            r"v is bfloat16\(6, 1, 8\), must be bfloat16\(6, 2, 8\)",
        ),
        (change(4, jnp.ones((6, 8))), {}, r"cos is float32\(6, 8\), must be float32\(6, 4\)"),
        (change(6, jnp.zeros(5, jnp.int32)), {}, r"row is int32\(5,\), must be int32\(6,\)"),
        (
            inputs(),
            {"scales": (jnp.ones(3), jnp.float32(1))},
            r"key scale is float32\(3,\), must be float32\(2,\)",
        ),
        (inputs(), {"scales": None}, "an FP8 cache needs scales"),
        (inputs(dtype=jnp.bfloat16), {}, "no other has them"),
        (
            inputs(dtype=jnp.bfloat16),
            {"fp8_dtype": E4M3},
            "kept in a cache of that dtype or of float32, not of bfloat16",
        ),
        (
            inputs(),
            {"q": jnp.ones((6, 4, 16), jnp.bfloat16)},
            r"q is bfloat16\(6, 4, 16\), must be bfloat16\(6, 4, 8\)",
        ),
        (
            inputs(),
            {"q": jnp.ones((6, 3, 8), jnp.bfloat16)},
            r"q is bfloat16\(6, 3, 8\), must be bfloat16\(6, 2, 8\)",
        ),
        (inputs(tokens=0), {}, "needs tokens"),
    ],
)
def test_what_does_not_belong_together_is_refused(arrays, more, message, unchecked_shapes):
    with pytest.raises(ValueError, match=f"^write_cache: .*{message}"):
        write_cache(*arrays, **{"scales": (jnp.float32(1), jnp.float32(1))} | more)


def test_hopper_by_name_says_what_its_kernel_lacks():
    scales = (jnp.float32(1), jnp.float32(1))
    with pytest.raises(BackendError, match="needs a GPU of compute capability 9.0"):
        write_cache(*inputs(), scales, backend="hopper")
    with (
        tracing_for(2),
        pytest.raises(BackendError, match="has no write of bfloat16 heads of 8 into float8_e4m3fn"),
    ):
        write_cache(*inputs(), scales, backend="hopper")
    with tracing_for(2):
        assert write_cache(*inputs(), scales)[0].shape == (3, 2, 4, 8)
