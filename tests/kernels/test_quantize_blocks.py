"""quantize_blocks, and what it stands for, against a quantizer written here in numpy and ml_dtypes."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import BackendError, quantize_blocks
from pallas_kernels.quantize import round_blocks
from pallas_kernels.quantize.reference import on_grid

LIMITS = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
# (shape, block): whole blocks, ragged blocks, single rows, columns, batches, blocks larger than the
# array
LAYOUTS = [
    ((256, 256), (128, 128)),
    ((576, 192), (128, 128)),
    ((5, 320), (1, 128)),
    ((130, 7), (128, 1)),
    ((2, 3, 50, 70), (16, 64)),
    ((3, 5), (128, 128)),
]


def blocks_of(shape, block):
    """Every block's index among the scales, and its slice of the array."""
    m, n = shape[-2:]
    for i in range(-(-m // block[0])):
        for j in range(-(-n // block[1])):
            rows, columns = (
                slice(i * block[0], (i + 1) * block[0]),
                slice(j * block[1], (j + 1) * block[1]),
            )
            yield (..., i, j), (..., rows, columns)


def numpy_quantize(x, block, dtype, scale_rule="float32"):
    """The definition, block by block: scale = amax * (1 / max), value = cast(clip(x * (1 /
    scale))), float32 throughout."""
    limit = np.float32(LIMITS[dtype])
    values = np.zeros(x.shape, getattr(ml_dtypes, dtype))
    m, n = x.shape[-2:]
    scales = np.zeros((*x.shape[:-2], -(-m // block[0]), -(-n // block[1])), np.float32)
    for index, part in blocks_of(x.shape, block):
        amax = np.abs(x[part]).max(axis=(-2, -1))
        scale = np.maximum(amax * (1 / limit), np.float32(2.0**-126))
        if scale_rule == "power_of_two":
            mantissa, exponent = np.frexp(scale)
            scale = np.ldexp(
                np.float32(1), np.where(mantissa == 0.5, exponent - 1, exponent)
            ).astype(np.float32)
        scale = np.where(amax == 0, np.float32(1), scale)
        scaled = x[part] * (np.float32(1) / scale)[..., None, None]
        values[part] = np.clip(scaled, -limit, limit).astype(values.dtype)
        scales[index] = scale
    return values, scales


def random_array(shape, seed=0):
    """Normal values times e^normal: several binades in every block."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * np.exp(rng.normal(0, 2, shape))).astype(np.float32)


@pytest.mark.parametrize("rule", ["float32", "power_of_two"])
@pytest.mark.parametrize("dtype", list(LIMITS))
@pytest.mark.parametrize(("shape", "block"), LAYOUTS)
def test_values_and_scales_equal_numpy_bit_for_bit(shape, block, dtype, rule):
    x = random_array(shape)
    q = quantize_blocks(jnp.asarray(x), block, jnp.dtype(dtype), rule)
    values, scales = q.values, q.scales
    expected_values, expected_scales = numpy_quantize(x, block, dtype, rule)
    assert (values.dtype, scales.dtype) == (jnp.dtype(dtype), jnp.float32)
    np.testing.assert_array_equal(np.asarray(scales), expected_scales)
    np.testing.assert_array_equal(np.asarray(values).view(np.uint8), expected_values.view(np.uint8))


def test_compiled_equals_eager():
    x = jnp.asarray(random_array((200, 300), 3))
    quantize = partial(quantize_blocks, block=(128, 128))
    pairs = map(jax.tree.leaves, (quantize(x), jax.jit(quantize)(x)))
    for eager, compiled in zip(*pairs, strict=True):
        np.testing.assert_array_equal(
            np.asarray(eager, np.float32), np.asarray(compiled, np.float32)
        )


@pytest.mark.parametrize(("shape", "block"), LAYOUTS)
def test_dequantize_multiplies_by_the_scale_of_the_block(shape, block):
    q = quantize_blocks(jnp.asarray(random_array(shape, 1)), block)
    values, scales = q.values, q.scales
    back = np.asarray(q.dequantize())
    assert back.dtype == np.float32 and back.shape == shape
    for index, part in blocks_of(shape, block):
        expected = np.asarray(values, np.float32)[part] * np.asarray(scales)[index][..., None, None]
        np.testing.assert_array_equal(back[part], expected)


@pytest.mark.parametrize(
    ("dtype", "mantissa_bits", "smallest"),
    [("float8_e4m3fn", 3, 2.0**-9), ("float8_e5m2", 2, 2.0**-16)],
)
def test_error_is_at_most_half_a_unit_in_the_last_place(dtype, mantissa_bits, smallest):
    x = random_array((100, 130), 2)
    q = quantize_blocks(jnp.asarray(x), (1, 128), jnp.dtype(dtype))
    values, scales = q.values, q.scales
    wide = np.repeat(np.asarray(scales, np.float64), 128, axis=1)[:, :130]
    error = np.abs(np.asarray(values, np.float64) * wide - x)
    bound = np.maximum(np.abs(x) * 2.0 ** -(mantissa_bits + 1), wide * smallest / 2)
    assert (error <= bound * (1 + 1e-6)).all()


@pytest.mark.parametrize("amax", [447.0, 448.0, 449.0, 464.0, 465.0, 480.0, 1e4])
def test_largest_value_never_overflows_to_nan(amax):
    x = jnp.asarray([[amax, -amax, 1.0, 0.0]], jnp.float32)
    for rule in ("float32", "power_of_two"):
        q = quantize_blocks(x, (1, 128), scale=rule)
        values, scales = q.values, q.scales
        wide = np.asarray(values, np.float32)
        assert np.isfinite(wide).all()
        assert wide[0, 0] == -wide[0, 1] and abs(wide[0, 0]) <= 448
        np.testing.assert_allclose(wide[0, 0] * np.asarray(scales)[0, 0], amax, rtol=2.0**-4)
    assert np.asarray(quantize_blocks(x, (1, 128)).values, np.float32)[0, 0] == 448


def test_power_of_two_boundaries():
    """amax 448 has scale exactly 1; the next float32 above needs 2."""
    above = np.nextafter(np.float32(448), np.float32(1e9))
    x = jnp.asarray([[448.0], [above], [464.0], [465.0], [896.0], [224.0]], jnp.float32)
    scales = quantize_blocks(x, (1, 128), scale="power_of_two").scales
    np.testing.assert_array_equal(np.asarray(scales)[:, 0], [1, 2, 2, 2, 2, 0.5])


def test_power_of_two_scale_is_the_smallest_that_fits():
    x = random_array((512, 128), 4) * np.float32(2.0) ** np.random.default_rng(5).integers(
        -60, 60, (512, 1)
    )
    scales = quantize_blocks(jnp.asarray(x), (1, 128), scale="power_of_two").scales
    scales, needed = np.asarray(scales, np.float64)[:, 0], np.abs(x).max(1).astype(np.float64) / 448
    assert (np.frexp(scales)[0] == 0.5).all()
    assert (scales >= needed * (1 - 2.0**-23)).all() and (scales < 2 * needed).all()


def test_zero_blocks_have_scale_one():
    x = np.zeros((4, 256), np.float32)
    x[1, 130] = 3.0
    for rule in ("float32", "power_of_two"):
        q = quantize_blocks(jnp.asarray(x), (1, 128), scale=rule)
        values, scales = q.values, q.scales
        expected = np.ones((4, 2), bool)
        expected[1, 1] = False
        np.testing.assert_array_equal(np.asarray(scales) == 1, expected)
        np.testing.assert_array_equal(np.asarray(values, np.float32) != 0, x != 0)


@pytest.mark.parametrize("rule", ["float32", "power_of_two"])
@pytest.mark.parametrize("tiny", [1e-12, 1e-30, 1.2e-38])
def test_tiny_values_are_not_flushed(tiny, rule):
    """Where amax / 448 would be below the smallest normal float32, the scale stops there and the
    values still are not zero."""
    x = jnp.asarray([[tiny, -tiny, tiny / 2 if tiny > 1e-37 else 0.0]], jnp.float32)
    q = quantize_blocks(x, (1, 128), scale=rule)
    values, scales = q.values, q.scales
    scale = float(scales[0, 0])
    assert scale >= 2.0**-126
    back = np.asarray(values, np.float64)[0] * scale
    np.testing.assert_allclose(back, np.asarray(x, np.float64)[0], rtol=2.0**-4)
    assert (back[:2] != 0).all()


def test_huge_values_stay_finite():
    x = jnp.full((1, 4), jnp.finfo(jnp.float32).max)
    q = quantize_blocks(x)
    values, scales = q.values, q.scales
    np.testing.assert_array_equal(np.asarray(values, np.float32), 448)
    assert np.isfinite(np.asarray(scales)).all()


@pytest.mark.parametrize("rule", ["float32", "power_of_two"])
@pytest.mark.parametrize("fault", [np.nan, np.inf, -np.inf])
def test_a_fault_shows_in_the_scale_of_its_block_only(fault, rule):
    x = random_array((256, 256), 6)
    x[130, 5] = fault
    q = quantize_blocks(jnp.asarray(x), (128, 128), scale=rule)
    np.testing.assert_array_equal(np.isfinite(q.scales), [[True, True], [False, True]])
    assert not np.isfinite(np.asarray(q.dequantize())[130, 5])


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"])
def test_the_grid_is_what_a_cast_leaves(dtype):
    """Of every bfloat16 and 2^20 random bit patterns of float32."""
    bits = np.arange(2**16, dtype=np.uint32) << 16
    random = np.random.default_rng(8).integers(0, 2**32, 2**20, dtype=np.uint32)
    limit = float(jnp.finfo(dtype).max)
    x = np.clip(np.concatenate([bits, random]).view(np.float32), -limit, limit)
    expected = np.asarray(jnp.asarray(x).astype(dtype).astype(jnp.float32))
    got, fault = np.asarray(jax.jit(on_grid, static_argnums=1)(x, dtype)), np.isnan(x)
    # four bits have no NaN to compare with
    assert np.isnan(got[fault]).all() and fault.sum() > 4000
    np.testing.assert_array_equal(got[~fault].view(np.int32), expected[~fault].view(np.int32))


@pytest.mark.parametrize("rule", ["float32", "power_of_two"])
@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
@pytest.mark.parametrize("dtype", list(LIMITS))
@pytest.mark.parametrize(("shape", "block"), LAYOUTS)
def test_rounding_is_quantizing_and_dequantizing(shape, block, dtype, kind, rule):
    x = random_array(shape, 9).reshape(-1)
    x[:10] = [0.0, -0.0, 1e-40, -1e-40, 1e-30, -1e-30, np.nan, np.inf, -np.inf, 3e38]
    for each in (x, np.roll(x, -10), 1e-38 * np.nan_to_num(x, posinf=0, neginf=0)):
        values = jnp.asarray(each.reshape(shape)).astype(kind)
        quantized = quantize_blocks(values, block, jnp.dtype(dtype), rule)
        expected = np.asarray(quantized.dequantize())
        got = np.asarray(
            jax.jit(round_blocks, static_argnums=(1, 2, 3))(values, block, dtype, rule)
        )
        real = ~np.isnan(expected)
        np.testing.assert_array_equal(np.isnan(got), ~real)
        np.testing.assert_array_equal(got[real].view(np.int32), expected[real].view(np.int32))


def test_bfloat16_input_is_widened_exactly():
    x = jnp.asarray(random_array((64, 192), 7)).astype(jnp.bfloat16)
    pairs = map(jax.tree.leaves, (quantize_blocks(x), quantize_blocks(x.astype(jnp.float32))))
    for a, b in zip(*pairs, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_backend_by_name():
    x = jnp.ones((2, 128))
    np.testing.assert_array_equal(
        quantize_blocks(x, backend="reference").scales, quantize_blocks(x).scales
    )
    with pytest.raises(
        BackendError,
        match="quantize_blocks: the hopper backend needs a GPU of compute capability 9.0",
    ):
        quantize_blocks(x, backend="hopper")
    with pytest.raises(BackendError, match="unknown backend 'triton'"):
        quantize_blocks(x, backend="triton")


def test_refuses_vectors_and_empty_blocks(unchecked_shapes):
    with pytest.raises(ValueError, match="at least two axes"):
        quantize_blocks(jnp.ones(128))
    with pytest.raises(ValueError, match="positive block"):
        quantize_blocks(jnp.ones((2, 128)), (0, 128))
