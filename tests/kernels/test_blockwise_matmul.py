"""blockwise_matmul against a float64 block-by-block sum over the same quantized operands."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import BackendError, Blocks, QTensor, blockwise_matmul, quantize_blocks
from pallas_kernels.backend import check_pair
from pallas_kernels.matmul import selected_backend


def operands(m, n, k, seed=0, batch=()):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(*batch, m, k)) * np.exp(rng.normal(0, 1, (*batch, m, 1)))
    w = rng.normal(size=(n, k)) * np.exp(rng.normal(0, 1, (n, 1)))
    return jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32)


def float64_product(x, w):
    """sum over blocks b of x_scales[b] * w_scales[n // block[0], b] * (x_b . w_b), and the same of
    the magnitudes."""
    block, arrays = w.block, (x.values, x.scales, w.values, w.scales)
    x, x_scales, w, w_scales = (np.asarray(z, np.float64) for z in arrays)
    total = np.zeros((*x.shape[:-1], w.shape[0]))
    magnitude = np.zeros_like(total)
    for b in range(w_scales.shape[1]):
        part = slice(b * block[1], (b + 1) * block[1])
        scale = x_scales[..., b, None] * np.repeat(w_scales[:, b], block[0])[: w.shape[0]]
        total += scale * (x[..., part] @ w[:, part].T)
        magnitude += scale * (np.abs(x[..., part]) @ np.abs(w[:, part]).T)
    return total, magnitude


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (1, 576, 192),
        (7, 192, 576),
        (5, 1536, 320),
        (3, 131, 130),
        (64, 128, 128),
        (2, 1, 1),
        (33, 100, 1000),
    ],
)
def test_equals_the_float64_sum(m, n, k):
    x, w = operands(m, n, k)
    quantized = quantize_blocks(x, (1, 128)), quantize_blocks(w, (128, 128))
    expected, magnitude = float64_product(*quantized)
    out = blockwise_matmul(*quantized, out_dtype=jnp.float32)
    assert out.dtype == jnp.float32 and out.shape == (m, n)
    # float32 accumulation of k terms: sqrt(k) roundings of 2^-24 each, with room for the scales'
    # own
    assert (
        np.abs(np.asarray(out, np.float64) - expected) <= 2.0**-22 * np.sqrt(k + 8) * magnitude
    ).all()
    rounded = blockwise_matmul(*quantized)
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        np.asarray(rounded, np.float32), np.asarray(out.astype(jnp.bfloat16), np.float32)
    )


@pytest.mark.parametrize("outlier", [1.0, 1000.0])
def test_errors_do_not_grow_with_the_contraction(outlier):
    """Against float64 on the same operands, and on the operands before quantization: e4m3 keeps 4
    bits of each, so a product of normal data is off by about sqrt(2) * 2^-4 / sqrt(12) / 0.7 of its
    size. An outlier spoils one group of its row."""
    rng = np.random.default_rng(5)
    for k in (1, 127, 1000, 4096, 16384):
        x, w = rng.normal(size=(8, k)), rng.normal(size=(16, k))
        x[:, 0] *= outlier
        quantized = (
            quantize_blocks(jnp.asarray(x, jnp.float32)),
            quantize_blocks(jnp.asarray(w, jnp.float32), (128, 128)),
        )
        out = np.asarray(blockwise_matmul(*quantized, out_dtype=jnp.float32), np.float64)
        expected, _ = float64_product(*quantized)
        size = np.linalg.norm(x @ w.T)
        # The CPU's library chooses the order. One by one, an outlier first, all partial sums are of the
        # size of the result, and k roundings of up to 2^-24 each add up to 2^-24 sqrt(k / 3).
        assert np.linalg.norm(out - expected) <= 2.0**-24 * (8 + np.sqrt(k)) * size
        assert np.linalg.norm(out - x @ w.T) <= 0.06 * size


@pytest.mark.parametrize("shape", [(0, 128), (2, 0)])
def test_empty_operands_are_refused(shape):
    rows, k = shape
    blocks = -(-k // 128)
    x, w = jnp.zeros(shape, jnp.float8_e4m3fn), jnp.zeros((128, k), jnp.float8_e4m3fn)
    x = QTensor(x, jnp.ones((rows, blocks)), Blocks((1, 128)))
    w = QTensor(w, jnp.ones((1, blocks)), Blocks((128, 128)))
    with pytest.raises(
        ValueError, match=rf"blockwise_matmul: nothing to multiply in x \({rows}, {k}\)"
    ):
        blockwise_matmul(x, w)


def test_leading_axes_of_the_input():
    x, w = operands(3, 200, 300, batch=(2, 4))
    rows, weight = quantize_blocks(x, (1, 128)), quantize_blocks(w, (128, 128))
    out = blockwise_matmul(rows, weight, jnp.float32)
    expected, magnitude = float64_product(rows, weight)
    assert out.shape == (2, 4, 3, 200)
    assert (np.abs(out - expected) <= 1e-6 * np.sqrt(300) * magnitude).all()
    row = jax.tree.map(lambda z: z[0, 0, 0], rows)
    vector = blockwise_matmul(row, weight, jnp.float32)
    np.testing.assert_allclose(vector, out[0, 0, 0], rtol=1e-4, atol=1e-5 * float(magnitude.max()))


def test_other_blocks_and_dtypes():
    x, w = operands(4, 96, 160, 2)
    quantized = (
        quantize_blocks(x, (1, 64), jnp.float8_e5m2),
        quantize_blocks(w, (32, 64), jnp.float8_e4m3fn, "power_of_two"),
    )
    out = blockwise_matmul(*quantized, jnp.float32)
    expected, magnitude = float64_product(*quantized)
    assert (np.abs(out - expected) <= 1e-6 * np.sqrt(160) * magnitude).all()


def test_a_faulty_block_reaches_its_outputs():
    x, w = operands(2, 256, 256, 3)
    w = w.at[200, 10].set(jnp.nan)
    out = np.asarray(
        blockwise_matmul(quantize_blocks(x), quantize_blocks(w, (128, 128)), jnp.float32)
    )
    assert np.isfinite(out[:, :128]).all() and not np.isfinite(out[:, 128:]).any()


def test_hopper_by_name_is_refused():
    x, w = operands(2, 128, 128)
    with pytest.raises(
        BackendError,
        match="blockwise_matmul: the hopper backend needs a GPU of compute capability 9.0",
    ):
        blockwise_matmul(quantize_blocks(x), quantize_blocks(w, (128, 128)), backend="hopper")
    assert selected_backend("auto") == "reference"


@pytest.mark.parametrize("spoil", ["w_scales", "x_scales", "block"])
def test_scales_that_do_not_belong_to_the_operands(spoil, unchecked_shapes):
    x, w = operands(4, 256, 256)
    x, w = quantize_blocks(x), quantize_blocks(w, (128, 128))
    arguments = {
        "w_scales": (x, replace(w, scales=w.scales[:1])),
        "x_scales": (replace(x, scales=x.scales[:, :1]), w),
        "block": (x, replace(w, format=Blocks((64, 128)))),
    }
    with pytest.raises(ValueError, match="do not fit block"):
        blockwise_matmul(*arguments[spoil])


def test_operands_that_do_not_belong_together(unchecked_shapes):
    """Sizes within one block have scales of equal shapes."""
    x, w = (
        quantize_blocks(operands(4, 8, 16)[0]),
        quantize_blocks(operands(4, 8, 20)[1], (128, 128)),
    )
    with pytest.raises(ValueError, match=r"16 numbers of x \(4, 16\) and 20 of w \(8, 20\)"):
        blockwise_matmul(x, w)
    with pytest.raises(ValueError, match="over=1 is no axis of a product; use -1 or -2"):
        blockwise_matmul(x, w, over=1)


@pytest.mark.parametrize("left", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float4_e2m1fn])
@pytest.mark.parametrize("right", [jnp.float8_e5m2, jnp.float4_e2m1fn])
def test_pairs_of_formats(left, right):
    """The reference takes all of them; Hopper's tensor cores take FP8 with FP8, and what they do
    not is refused by name."""
    x, w = operands(3, 40, 50, 4)
    quantized = quantize_blocks(x, (1, 128), left), quantize_blocks(w, (128, 128), right)
    expected, magnitude = float64_product(*quantized)
    out = blockwise_matmul(*quantized, out_dtype=jnp.float32)
    assert (np.abs(out - expected) <= 1e-6 * np.sqrt(50) * magnitude).all()
    if jnp.float4_e2m1fn in (left, right):
        with pytest.raises(
            BackendError,
            match=r"product: the hopper backend does not multiply float.*; it takes float8",
        ):
            check_pair("product", "hopper", left, right)
    else:
        check_pair("product", "hopper", left, right)


def test_operands_that_no_backend_multiplies():
    ones = jnp.ones((2, 128))
    with pytest.raises(
        BackendError,
        match="blockwise_matmul: the reference backend does not multiply float32 by float8_e4m3fn",
    ):
        plain = QTensor(ones, jnp.ones((2, 1)), Blocks((1, 128)))
        blockwise_matmul(plain, quantize_blocks(ones, (128, 128)))
