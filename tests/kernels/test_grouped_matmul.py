"""grouped_matmul against a float64 sum, row by row, over the same quantized operands."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    BackendError,
    align_groups,
    blockwise_matmul,
    grouped_matmul,
    grouped_outer_product,
    quantize_blocks,
)
from pallas_kernels.grouped_matmul import hopper
from pallas_kernels.grouped_matmul.reference import dot, tiles_of


def operands(m, n, k, groups, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(m, k)) * np.exp(rng.normal(0, 1, (m, 1)))
    w = rng.normal(size=(groups, n, k)) * np.exp(rng.normal(0, 1, (groups, n, 1)))
    return jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32)


def expand(scales, block, shape):
    for axis, (size, side) in enumerate(zip(shape, block, strict=True), start=-2):
        scales = np.repeat(scales, side, axis=axis).take(range(size), axis=axis)
    return scales


def test_tiles_are_found_without_a_loop():
    """Whose rounds would be launches of their own on a GPU."""
    sizes, program = jnp.asarray([5, 0, 130, 64]), jax.jit(hopper.row_tiles, static_argnums=0)
    assert "while" not in program.lower(200, sizes).as_text()
    tiles = program(200, sizes)
    rows = np.zeros(5, int)
    np.add.at(rows, tiles[0], tiles[3] - tiles[2])
    assert rows.tolist() == [5, 0, 130, 64, 1]


def wide(q):
    """What a quantized tensor stands for, float64."""
    return np.asarray(q.values, np.float64) * expand(
        np.asarray(q.scales, np.float64), q.block, q.shape[-2:]
    )


def float64_product(x, w, sizes):
    """Every row with its group's dequantized weight, and the same of the magnitudes."""
    x, w = wide(x), wide(w)
    total, magnitude = np.zeros((2, len(x), w.shape[1]))
    for row, group in enumerate(np.repeat(np.arange(len(w)), sizes)):
        total[row], magnitude[row] = x[row] @ w[group].T, np.abs(x[row]) @ np.abs(w[group]).T
    return total, magnitude


@pytest.mark.parametrize(
    ("m", "n", "k", "sizes"),
    [
        (9, 40, 192, (4, 0, 5)),
        (7, 131, 130, (0, 0, 7)),
        (5, 64, 48, (1, 1, 1, 2)),
        (8, 24, 200, (3, 0, 2)),
        (4, 8, 16, (0, 0)),
    ],
)
@pytest.mark.parametrize("block", [(128, 128), (32, 64)])
def test_equals_the_float64_sum(m, n, k, sizes, block):
    x, w = operands(m, n, k, len(sizes))
    quantized = quantize_blocks(x, (1, block[1])), quantize_blocks(w, block)
    expected, magnitude = float64_product(*quantized, sizes)
    # sizes at run time
    run = jax.jit(lambda sizes: grouped_matmul(*quantized, sizes, jnp.float32))
    out = run(jnp.asarray(sizes, jnp.int32))
    assert out.dtype == jnp.float32 and out.shape == (m, n)
    assert (
        np.abs(np.asarray(out, np.float64) - expected) <= 2.0**-22 * np.sqrt(k + 8) * magnitude
    ).all()
    assert not np.asarray(out)[sum(sizes) :].any()


def test_one_group_is_blockwise_matmul():
    x, w = operands(6, 100, 200, 1)
    rows, weight = quantize_blocks(x, (1, 128)), quantize_blocks(w, (128, 128))
    grouped = grouped_matmul(rows, weight, jnp.array([6], jnp.int32))
    assert grouped.dtype == jnp.bfloat16
    single = blockwise_matmul(rows, jax.tree.map(lambda z: z[0], weight))
    np.testing.assert_allclose(
        np.asarray(grouped, np.float32), np.asarray(single, np.float32), rtol=2.0**-7
    )


def test_gradients_of_the_unquantized_product():
    x, w = operands(7, 5, 6, 3)
    sizes, group = jnp.array([3, 0, 2], jnp.int32), np.array([0, 0, 0, 2, 2])
    mix = np.random.default_rng(1).normal(size=(7, 5)).astype(np.float32)
    dx, dw = jax.grad(lambda x, w: (dot(x, w, sizes) * mix).sum(), argnums=(0, 1))(x, w)
    expected = np.zeros(w.shape)
    for row, g in enumerate(group):
        expected[g] += np.outer(mix[row], x[row])
        np.testing.assert_allclose(dx[row], mix[row] @ np.asarray(w)[g], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dw, expected, rtol=1e-4, atol=1e-5)
    assert not np.asarray(dx)[5:].any()


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [(9, (4, 0, 5)), (7, (0, 0, 7)), (8, (3, 0, 2)), (4, (0, 0)), (40, (17, 1, 16))],
)
def test_aligned_groups_begin_at_blocks_and_keep_their_rows(rows, sizes):
    x = jnp.arange(1.0, rows + 1)[:, None] * jnp.ones((1, 3))
    run = jax.jit(lambda sizes: align_groups((x, 2 * x), sizes, 8))
    (moved, doubled), aligned = run(jnp.asarray(sizes, jnp.int32))
    np.testing.assert_array_equal(aligned, [-(-size // 8) * 8 for size in sizes])
    expected, place, row = np.zeros(moved.shape), 0, 0
    for size in sizes:
        expected[place : place + size] = np.asarray(x)[row : row + size]
        place, row = place + -(-size // 8) * 8, row + size
    np.testing.assert_array_equal(moved, expected)
    np.testing.assert_array_equal(doubled, 2 * expected)


@pytest.mark.parametrize(
    ("m", "n", "k", "sizes"),
    [(300, 24, 130, (128, 0, 100)), (7, 131, 30, (0, 0, 7)), (4, 8, 16, (0, 0))],
)
def test_outer_products_equal_the_float64_sum(m, n, k, sizes):
    x, dy = operands(m, n, k, 1)[0], operands(m, k, n, 1, seed=1)[0]

    @jax.jit
    def run(sizes):
        arrays, aligned = align_groups((dy, x), sizes, 128)
        quantized = [quantize_blocks(array, (128, 1)) for array in arrays]
        return quantized, grouped_outer_product(*quantized, aligned)

    quantized, out = run(jnp.asarray(sizes, jnp.int32))
    left, right = map(wide, quantized)
    start = 0
    for group, size in enumerate(sizes):
        part = slice(start, start + -(-size // 128) * 128)
        bound = 2.0**-22 * np.sqrt(size + 8) * (np.abs(left[part]).T @ np.abs(right[part]))
        assert (
            np.abs(np.asarray(out[group], np.float64) - left[part].T @ right[part]) <= bound
        ).all()
        start = part.stop


def test_wrong_calls_are_refused(unchecked_shapes):
    x, w = operands(4, 8, 16, 2)
    quantized = x, w = quantize_blocks(x, (1, 128)), quantize_blocks(w, (128, 128))
    sizes = jnp.array([2, 2], jnp.int32)
    with pytest.raises(ValueError, match=r"group_sizes \(3,\) must be \(2,\)"):
        grouped_matmul(*quantized, jnp.array([2, 1, 1], jnp.int32))
    with pytest.raises(ValueError, match=r"x_scales \(4, 2\) must be \(4, 1\)"):
        grouped_matmul(replace(x, scales=jnp.ones((4, 2))), w, sizes)
    with pytest.raises(ValueError, match=r"x \(4, 12\) must be \(4, 16\)"):
        grouped_matmul(quantize_blocks(jnp.ones((4, 12))), w, sizes)
    with pytest.raises(ValueError, match="grouped_matmul: over=0 is no axis of a product"):
        grouped_matmul(*quantized, sizes, over=0)
    with pytest.raises(BackendError, match="hopper backend"):
        grouped_matmul(*quantized, sizes, backend="hopper")
    with pytest.raises(ValueError, match=r"dy_scales \(2, 8\) must be \(1, 8\)"):
        dy, x = (quantize_blocks(jnp.ones((4, n)), (128, 1)) for n in (8, 16))
        grouped_outer_product(replace(dy, scales=jnp.ones((2, 8))), x, sizes)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("sizes", [(4, 0, 5), (0, 0), (1, 130, 40), (0, 300, 0, 7)])
def test_an_unquantized_product_and_its_gradients_are_those_of_float64(sizes, dtype):
    m, n, k = sum(sizes) + 3, 24, 40
    x, w = (z.astype(dtype) for z in operands(m, n, k, len(sizes)))
    dy = jax.random.normal(jax.random.key(1), (m, n))
    # sizes at run time
    out, back = jax.vjp(lambda x, w: dot(x, w, jnp.asarray(sizes, jnp.int32)), x, w)
    dx, dw = jax.jit(back)(dy)
    assert (out.dtype, dx.dtype, dw.dtype) == (jnp.float32, dtype, dtype)
    x64, w64, dy64 = (np.asarray(z, np.float64) for z in (x, w, dy))
    expected, expected_dx, expected_dw = np.zeros((m, n)), np.zeros((m, k)), np.zeros(w.shape)
    ends = np.cumsum(sizes)
    for group, (size, end) in enumerate(zip(sizes, ends, strict=True)):
        rows = slice(end - size, end)
        expected[rows] = x64[rows] @ w64[group].T
        expected_dx[rows] = dy64[rows] @ w64[group]
        expected_dw[group] = dy64[rows].T @ x64[rows]
    rounding = 2.0**-8 if dtype == jnp.bfloat16 else 2.0**-20
    for found, want, step in (
        (out, expected, 2.0**-20),
        (dx, expected_dx, rounding),
        (dw, expected_dw, rounding),
    ):
        np.testing.assert_allclose(
            np.asarray(found, np.float64), want, rtol=0, atol=step * max(1, np.abs(want).max())
        )


def test_a_cpu_multiplies_a_row_by_its_own_group_alone():
    """Not by every group's weight: the work does not grow with their number."""

    def multiplied(groups):
        x, w = operands(256, 64, 64, groups)
        sizes = jnp.full(groups, 256 // groups, jnp.int32)
        tiles = tiles_of(256, sizes)
        loop = jax.jit(dot).lower(x, w, sizes).compile().as_text()
        assert " while(" in loop
        return tiles.rows * len(tiles.group)

    assert multiplied(16) <= 2 * multiplied(2)
