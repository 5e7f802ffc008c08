"""Formats of their own against what others quantize to (oracles/README.md says who, and how they
differ), against casts of ml_dtypes, and what all of them promise."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fp8rl_jax.config.formats import MINIFLOATS, WITH_OWN_QUANTIZER, parse_format
from fp8rl_jax.config.recipe import RECIPES, LinearPrecision
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.forms import linear_formats
from fp8rl_jax.precision import QuantizedWeight, format_of, is_finite, linear
from fp8rl_jax.precision.formats import BUILT_IN, mantissa_bits
from fp8rl_jax.precision.formats.grids import e2m1_numbers, unpack
from fp8rl_jax.precision.formats.int4 import Int4
from fp8rl_jax.precision.formats.minifloat import Minifloat
from fp8rl_jax.precision.formats.mx import MX, MXFP4
from fp8rl_jax.precision.formats.nvfp4 import NVFP4
from fp8rl_jax.precision.hadamard import hadamard
from fp8rl_jax.precision.quantizer import along_rows
from pallas_kernels.matmul import keeps_quantized
from pallas_kernels.matmul import reference as matmul_reference
from pallas_kernels.matmul.reference import scaled_matmul, scaled_operands

sys.path.insert(0, str(Path(__file__).parent / "oracles"))
from tables import load

MX_TABLE, NVFP4_TABLE, INT4_TABLE = (load(name) for name in ("mx", "nvfp4", "int4"))
NORMAL = 2.0**-126
ONE_OF_A_KIND = [name for name in BUILT_IN if name not in MINIFLOATS or name in ("e3m2", "e2m0")]


def quantized(made, x):
    return jax.jit(made.quantize)(jnp.asarray(x))


def bits_of(scales) -> np.ndarray:
    return np.asarray(scales).view(np.uint8)


def mx(element: str, scale: str) -> MX:
    return MXFP4(scale=scale) if element == "e2m1" else MX(element=element, scale=scale)


def without_denormals(x: np.ndarray) -> np.ndarray:
    """Rows that a CPU, to which a denormal number is 0, can have right."""
    return np.flatnonzero(((x == 0) | (np.abs(x) >= NORMAL)).all(1))


@pytest.mark.parametrize("inputs", ["normal", "edges"])
@pytest.mark.parametrize("element", ["e4m3", "e5m2", "e2m3", "e3m2", "e2m1"])
def test_mx_with_ocps_scales_is_microxcalings(element, inputs):
    x, want = MX_TABLE["inputs"][inputs], MX_TABLE["microxcaling"][element][inputs]
    q = quantized(mx(element, "floor"), x)
    rows = without_denormals(x)
    rows = rows[(want["scale"][rows] > 0).all(1) | (x[rows] == 0).all(1)]
    assert len(rows) > len(x) // 2
    np.testing.assert_array_equal(q.dequantize()[rows], want["dequantized"][rows])
    zero = want["scale"] == 0  # of zeros: 2^-127 there, 1 here
    got = np.where(zero, 0, bits_of(q.scales))
    np.testing.assert_array_equal(got[rows], want["scale"][rows])


@pytest.mark.parametrize("inputs", ["normal", "edges"])
@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_mx_with_scales_rounded_up_is_transformer_engines(element, inputs):
    want = MX_TABLE["transformer_engine"][element][inputs]
    x = MX_TABLE["inputs"][inputs][: len(want["codes"])]
    q = quantized(mx(element, "up"), x)
    rows = without_denormals(x)
    rows = rows[(want["scale"][rows] > 0).all(1)]
    assert len(rows) > len(x) // 2
    np.testing.assert_array_equal(bits_of(q.scales)[rows], want["scale"][rows])
    values = np.asarray(q.values)[rows].astype(np.float32)
    np.testing.assert_array_equal(values, want["codes"][rows].astype(np.float32))


@pytest.mark.parametrize(
    ("made", "table", "of"),
    [
        (NVFP4(), "1x16", "normal"),
        (NVFP4(), "1x16", "bfloat16"),
        (NVFP4(), "1x16", "edges"),
        (NVFP4(outer="row"), "1x16 row by row", "normal"),
        (NVFP4(outer="row"), "1x16 row by row", "edges"),
        (NVFP4((16, 16)), "16x16", "normal"),
        (NVFP4((16, 16)), "16x16", "20 rows"),
        (NVFP4(four_over_six=True), "four over six", "MAE 256 1x16"),
        (NVFP4((16, 16), four_over_six=True), "four over six", "MAE 256 16x16"),
    ],
)
def test_nvfp4_is_transformer_engines(made, table, of):
    want = NVFP4_TABLE[table][of]
    x = NVFP4_TABLE["inputs"][want["input"]]
    x = x[: want.get("first_rows", len(x))]
    q = quantized(made, x)
    rows = without_denormals(x.astype(np.float32))
    rows = rows[np.abs(x[rows].astype(np.float32)).max(1) * 2.0**-9 >= NORMAL]
    assert len(rows) > len(x) // 2
    scales = np.repeat(np.asarray(q.scales), made.block[0], 0)[: len(x)]
    np.testing.assert_array_equal(bits_of(scales)[rows], bits_of(want["scale"])[rows])
    outer, decode = np.asarray(q.outer)[:, 0], want["decode"]
    keep = rows if len(outer) > 1 else [0]
    np.testing.assert_array_equal(outer[keep], decode[keep])
    numbers = [
        np.asarray(e2m1_numbers(unpack(jnp.asarray(codes))))[rows]
        for codes in (q.values, want["codes"])
    ]
    np.testing.assert_array_equal(*numbers)


def test_nvfp4_along_columns_is_that_of_the_transpose():
    want = NVFP4_TABLE["1x16"]["bfloat16"]["transposed"]
    q = quantized(NVFP4().transposed, NVFP4_TABLE["inputs"]["bfloat16"]).T
    np.testing.assert_array_equal(bits_of(q.scales), bits_of(want["scale"]))
    numbers = [e2m1_numbers(unpack(jnp.asarray(codes))) for codes in (q.values, want["codes"])]
    np.testing.assert_array_equal(*map(np.asarray, numbers))


def test_the_transform_is_transformer_engines_and_turns_back():
    table = NVFP4_TABLE["hadamard"]
    x = table["input"]
    got = np.asarray(jax.jit(hadamard)(jnp.asarray(x.T))).T  # along rows here, along columns there
    np.testing.assert_allclose(got, table["output"], rtol=0, atol=1e-6 * np.abs(x).max())
    turn = np.diag(table["signs"]) @ (table["matrix"] * np.array(table["signs"])[:, None]) / 4
    back = (got.reshape(-1, 16) @ turn.T.astype(np.float32)).reshape(x.shape)
    np.testing.assert_allclose(back, x, rtol=0, atol=1e-5 * np.abs(x).max())


@pytest.mark.parametrize("size", [32, 128])
def test_int4_is_slimes_but_for_the_scale_that_is_divided_by(size):
    """There codes are of the float32 scale; here of the one that is stored. -8 is read."""
    weight = INT4_TABLE["weights"]["bfloat16"].astype(np.float32)
    made = Int4((1, size))
    q = quantized(made, weight)
    amax = np.abs(weight.reshape(8, -1, size)).max(-1)
    scales = np.where(amax == 0, 1, amax * np.float32(1 / 7)).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(bits_of(q.scales), bits_of(scales))
    steps = np.repeat(scales.astype(np.float64), size, 1)
    codes = np.clip(np.round(weight / steps), -7, 7)
    np.testing.assert_array_equal(q.dequantize(), (codes * steps).astype(np.float32))
    if size == 32:
        slime = INT4_TABLE["slime"]["bfloat16 32"]
        there = np.where(amax < 7e-5, scales, slime["weight_scale"])  # at least 1e-5
        np.testing.assert_array_equal(bits_of(scales), bits_of(there))
        large = np.repeat(amax >= 7e-5, size, 1)
        apart = np.abs(codes - slime["codes"])[large]
        assert apart.max() <= 1 and 0 < apart.mean() < 0.02
    lowest = jax.tree.map(lambda x: x, q)
    object.__setattr__(lowest, "values", jnp.full_like(q.values, 0x88))
    np.testing.assert_array_equal(lowest.dequantize(), (-8 * steps).astype(np.float32))


CASTS = {
    "e2m1": ("mxfp4", ml_dtypes.float4_e2m1fn),
    "e2m3": ("mxfp6", ml_dtypes.float6_e2m3fn),
    "e3m2": ("mxfp6_e3m2", ml_dtypes.float6_e3m2fn),
}


@pytest.mark.parametrize("element", CASTS)
def test_small_floats_are_those_of_the_specification(element):
    """Every number, every middle between two of them (ties go to even), and what is just beside
    those, in a group whose scale is 1."""
    name, dtype = CASTS[element]
    numbers = np.unique(np.arange(2 ** (2 + int(element[1]) + int(element[3]) - 1), dtype=np.uint8))
    numbers = np.unique(np.abs(numbers.view(dtype).astype(np.float32)))
    largest, middles = numbers.max(), (numbers[1:] + numbers[:-1]) / 2
    beside = [np.nextafter(middles, np.float32(side)) for side in (0, np.inf)]
    x = np.concatenate([numbers, middles, *beside]).astype(np.float32)
    x = np.concatenate([x, -x])
    x = np.concatenate([np.append(part, largest) for part in np.array_split(x, -(-len(x) // 31))])
    groups = np.zeros((-(-len(x) // 32), 32), np.float32)
    for row, part in zip(groups, np.array_split(x, len(groups)), strict=True):
        row[: len(part)], row[-1] = part, largest
    got = quantized(BUILT_IN[name], groups).dequantize()
    np.testing.assert_array_equal(got, groups.astype(dtype).astype(np.float32))
    # the float of any few bits has the same numbers
    exponent, mantissa = MINIFLOATS[element]
    small = Minifloat((1, 32), exponent, mantissa)
    assert small.largest == largest
    assert mantissa_bits(parse_format(name)) == mantissa_bits(parse_format(element)) == mantissa
    np.testing.assert_array_equal(quantized(small, groups).dequantize(), got)


@pytest.mark.parametrize("name", ONE_OF_A_KIND)
def test_what_every_format_promises(name):
    """A shape that no group divides, layers stacked, an error within half a step, drawn roundings
    that are right in the mean, and a number that is none kept visible."""
    fmt, rng = parse_format(name), np.random.default_rng(0)
    assert fmt.block == BUILT_IN[name].block == WITH_OWN_QUANTIZER[name]
    made = format_of(fmt, (19, 86))
    assert made == replace(BUILT_IN[name], block=made.block)
    x = (rng.normal(size=(2, 19, 86)) * np.exp(rng.normal(size=(2, 19, 86)))).astype(np.float32)
    x[0, 3] = 0

    @jax.jit
    def both(x):
        q, salts = made.quantize(x), jnp.arange(50, dtype=jnp.uint32)
        drawn = jax.lax.map(lambda salt: made.quantize_stochastic(x, salt).dequantize(), salts)
        return q, q.dequantize(), made.limit(q), drawn

    q, restored, limit, drawn = both(x)
    assert q.shape == x.shape and bool(is_finite(q)) and not np.asarray(restored[0, 3]).any()
    for layer in range(2):
        alone = quantized(made, x[layer])
        np.testing.assert_array_equal(alone.dequantize(), restored[layer])
    if made.by_row:
        np.testing.assert_array_equal(quantized(made, x[:, 4:5]).dequantize(), restored[:, 4:5])
    mantissa = {"int4": None, "e2m0": 0}.get(name, 3)
    if mantissa:
        assert (np.abs(restored - x) <= np.asarray(limit) / 3).all()
    inside = np.broadcast_to(np.abs(x) <= np.asarray(limit), x.shape)  # what saturates is not
    error = np.where(inside, drawn.mean(0) - x, 0)
    spread = np.asarray(drawn).std(0) / np.sqrt(50)
    nearest = np.where(inside, restored - x, 0)
    assert np.sqrt((error**2).mean()) < 0.4 * np.sqrt((nearest**2).mean())
    assert (np.abs(error) <= 6 * spread + np.asarray(limit) * 0.2).all()
    assert not np.array_equal(drawn[0], drawn[1])
    for bad in (np.nan, np.inf, -np.inf):
        broken = x.copy()
        broken[1, 5, 7] = bad
        assert not bool(is_finite(made.quantize(jnp.asarray(broken)))), bad


def test_rows_of_an_odd_length_are_not_packed():
    for made in (MXFP4(), NVFP4(), Int4()):
        with pytest.raises(UserError, match="rows of 7 numbers cannot be stored two to a byte"):
            made.quantize(jnp.ones((2, 7)))


def test_a_linear_whose_rows_cannot_be_packed_is_named():
    odd = PolicyConfig("qwen3", 64, 32, 49, 2, 2, 1, 16)
    with pytest.raises(
        UserError, match=r"'w4a16': layers\.0\.down_proj: 49 numbers of a row of its"
    ):
        linear_formats(odd, RECIPES["w4a16"], "rollout")
    linear_formats(odd, RECIPES["mxfp8"], "trainer")


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("mxfp8", 8.25),
        ("mxfp4", 4.25),
        ("nvfp4", 4.5),
        ("int4-1x128", 4.125),
        ("nvfp4-16x16", None),
    ],
)
def test_two_codes_are_kept_in_a_byte(name, bits):
    q = quantized(format_of(parse_format(name)), np.ones((64, 512), np.float32))
    outer = 32 if q.outer is not None else 0
    want = 64 * 512 * 4 + 4 * 32 * 8 if bits is None else 64 * 512 * bits
    assert 8 * q.nbytes == want + outer


@pytest.mark.parametrize(
    ("x_name", "w_name"),
    [
        ("mxfp8", "mxfp8"),
        ("mxfp8_e5m2", "mxfp8"),
        ("mxfp4", "mxfp4"),
        ("nvfp4_rows", "nvfp4-16x16"),
        ("e4m3-1x64", "e4m3-32x64"),  # scales that are powers of two
    ],
)
def test_a_gpus_product_of_scaled_operands_is_that_of_what_they_stand_for(x_name, w_name):
    """XLA computes it on a CPU, too, where it is not used."""
    rng = np.random.default_rng(0)
    formats = [replace(parse_format(name), scale="power_of_two") for name in (x_name, w_name)]
    x, w = (
        quantized(format_of(fmt), rng.normal(size=shape).astype(np.float32))
        for fmt, shape in zip(formats, ((2, 9, 96), (40, 96)), strict=True)
    )
    got = jax.jit(partial(scaled_matmul, out_dtype=jnp.float32))(x, w)
    want = np.asarray(x.dequantize(), np.float64) @ np.asarray(w.dequantize(), np.float64).T
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())
    assert scaled_operands(x, w.T.T) is not None and scaled_operands(x, w.T) is None
    ragged = quantized(format_of(formats[1]), np.ones((40, 88), np.float32))
    assert scaled_operands(x, ragged) is None
    if "e4m3" in w_name:  # others are no scales of a device
        assert (
            scaled_operands(x, quantized(format_of(parse_format(w_name)), np.ones((40, 96))))
            is None
        )


@pytest.mark.parametrize(
    ("capability", "has"), [("8.0", False), ("8.9", True), ("10.0", True), ("gfx942", False)]
)
def test_a_gpu_that_has_no_such_product_is_not_asked_for_it(monkeypatch, capability, has):
    """On an A100 it would end the process."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(compute_capability=capability)])
    assert matmul_reference.has_scaled_products.__wrapped__() == has
    monkeypatch.setattr(matmul_reference, "has_scaled_products", lambda: has)
    w = quantized(format_of(parse_format("mxfp8")), np.ones((40, 96), np.float32))
    assert (scaled_operands(w, w) is not None) == keeps_quantized(w, "reference") == has


def parts_of(made, x) -> np.ndarray:
    return np.asarray(quantized(made, x).dequantize(), np.float64)


def parts(fmt, x, along: bool = False) -> np.ndarray:
    """What a tensor is rounded to, in groups of rows, or along them."""
    return parts_of((along_rows if along else format_of)(fmt, x.shape), x)


@pytest.mark.parametrize("sizes", [None, (20, 0, 9)])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "a scale a row", "a scale a tensor"])
def test_the_products_of_a_linear_and_its_gradients(recipe, sizes):
    """Each operand is quantized along what is summed, X of element types twice for the weight's
    gradient; a weight that is square, or has one scale, is read both ways; with the transform, gradients of weights are sums over transformed tokens."""
    of = parse_format
    precision = {
        "mxfp8": LinearPrecision(*[of("mxfp8")] * 4),
        "nvfp4": LinearPrecision(
            of("nvfp4-16x16"),
            of("nvfp4_rows"),
            of("nvfp4"),
            of("nvfp4_rows"),
            gradient_transform="hadamard",
        ),
        "a scale a row": LinearPrecision(*[of("e4m3-1xall")] * 4),
        "a scale a tensor": LinearPrecision(*[of("e4m3")] * 4),
    }[recipe]
    rng, experts = np.random.default_rng(0), 3 if sizes else 1
    x, dy = (rng.normal(size=(32, n)).astype(np.float32) for n in (48, 40))
    w = rng.normal(size=(experts, 40, 48)).astype(np.float32)

    @jax.jit
    def products(x, w, dy):
        def run(x, w):
            return linear(
                x,
                QuantizedWeight.of(w, w, precision),
                jnp.float32,
                group_sizes=None if sizes is None else jnp.array(sizes, jnp.int32),
            )

        y, back = jax.vjp(run, x, w)
        return y, *back(dy)

    y, dx, dw = products(x, w if sizes else w[0], dy)
    dw = dw if sizes else dw[None]
    begins = np.cumsum([0, *(sizes or (32,))])
    side = {"mxfp8": 32, "nvfp4": 16}.get(recipe, 1)
    laid = np.cumsum([0, *(-(-size // side) * side for size in sizes or (32,))])
    left, right = np.zeros((64, 40), np.float32), np.zeros((64, 48), np.float32)
    xq, dyq = parts(precision.activation, x), parts(precision.output_gradient, dy)
    source = xq if "scale" in recipe else x
    for i in range(experts):
        own = slice(begins[i], begins[i + 1])
        left[laid[i] :][: own.stop - own.start] = dy[own]
        right[laid[i] :][: own.stop - own.start] = source[own]
    if recipe == "nvfp4":
        left, right = (np.asarray(hadamard(jnp.asarray(z))) for z in (left, right))
    left = parts(precision.output_gradient, left, along=True)
    right = parts(precision.activation, right, along=True)
    once = recipe in ("nvfp4", "a scale a tensor")
    for i in range(experts):
        own, aligned = slice(begins[i], begins[i + 1]), slice(laid[i], laid[i + 1])
        wq, turned = (parts(precision.weight, w[i], along) for along in (False, not once))
        for got, want in (
            (y[own], xq[own] @ wq.T),
            (dx[own], dyq[own] @ turned),
            (dw[i], left[aligned].T @ right[aligned]),
        ):
            atol = 3e-6 * max(np.abs(want).max(initial=0), 1.0)
            np.testing.assert_allclose(got, want, rtol=0, atol=atol)


def test_drawn_gradients_are_right_in_the_mean_and_the_same_again():
    """The draws are a hash of the gradient: of the same one they are the same."""
    of = parse_format
    precision = LinearPrecision(
        of("nvfp4-16x16"), of("nvfp4_rows"), of("nvfp4"), gradient_rounding="stochastic"
    )
    rng = np.random.default_rng(0)
    x, w, dy = (
        jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((32, 48), (40, 48), (32, 40))
    )

    @jax.jit
    def run(x, w, dy):
        _, back = jax.vjp(
            lambda x, w: linear(x, QuantizedWeight.of(w, w, precision), jnp.float32), x, w
        )
        return back(dy)

    def gradients(dy):
        return run(x, w, dy)

    first = gradients(dy)
    for one, other in zip(first, gradients(dy), strict=True):
        np.testing.assert_array_equal(one, other)
    # gradients that differ in the last bits are drawn anew
    near = [gradients(dy * (1 + i * 2.0**-20)) for i in range(40)]
    weight = parts_of(format_of(precision.weight), w)
    plain = parts_of(NVFP4(), dy) @ weight
    mean = np.mean([dx for dx, _ in near], 0)
    assert np.sqrt(((mean - dy @ weight) ** 2).mean()) < 0.5 * np.sqrt(
        ((plain - dy @ weight) ** 2).mean()
    )


def test_a_weight_alone_hands_its_gradient_to_the_master():
    precision = LinearPrecision(parse_format("int4-1x128"))
    rng = np.random.default_rng(0)
    x, w, dy = (
        jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((9, 48), (40, 48), (9, 40))
    )
    y, back = jax.vjp(
        lambda x, w: linear(x, QuantizedWeight.of(w, w, precision), jnp.float32), x, w
    )
    wq = parts_of(Int4((1, 128)), w)
    for got, want in zip((y, *back(dy)), (x @ wq.T, dy @ wq, dy.T @ x), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
