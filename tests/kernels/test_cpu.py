"""The CPU kernels: against float64, bit for bit against themselves, and where they cannot run."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import BackendError, KeyValues, decode_attention, native
from pallas_kernels.attention import cpu as attention
from pallas_kernels.backend import resolve
from pallas_kernels.cache_write import scatter
from pallas_kernels.check.cases import cases_of, difference
from pallas_kernels.decode_attention import cpu as decode
from pallas_kernels.matmul import Panels, dot, pack
from pallas_kernels.matmul import cpu as matmul
from pallas_kernels.qtensor import moved
from pallas_kernels.quantize import dequantize, quantize_blocks, round_blocks

COLUMNS = native.constant("fp8rl_columns")
SHAPES = [(1, 1, 1), (3, COLUMNS + 1, 7), (33, 100, 300), (5, COLUMNS, 256), (515, 7, 513)]
SMALL = [case for case in cases_of("decode_attention", "small") if case.tolerance]


def normal(seed: int, *shape: int, dtype=jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def same(a, b) -> bool:
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_float64s_and_has_the_same_bits_in_panels(shape):
    m, n, k = shape
    x, w = normal(0, m, k), normal(1, n, k)
    got = jax.jit(matmul.dot)(x, w)
    x64, w64 = np.asarray(x, np.float64), np.asarray(w, np.float64)
    bound = 2.0**-24 * k**0.5 * (np.abs(x64) @ np.abs(w64).T)
    assert (np.abs(got - x64 @ w64.T) <= bound).all()
    panels = jax.jit(pack)(w)
    assert panels.shape == (n, k) and panels.values.shape[2] == COLUMNS
    assert same(jax.jit(dot)(x, panels), got)


def test_a_product_adds_in_the_order_of_k_with_fused_multiply_add():
    x, w = normal(0, 3, 40), normal(1, 5, 40)
    expected = np.zeros((3, 5), np.float32)
    for k in range(40):  # a product of two float32 is exact in float64, and so is nearly every sum
        step = np.asarray(x, np.float64)[:, k, None] * np.asarray(w, np.float64)[:, k]
        expected = (expected.astype(np.float64) + step).astype(np.float32)
    assert same(matmul.dot(x, w), expected)


@pytest.mark.parametrize("rule", ["float32", "power_of_two"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"])
@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((5, 320), (1, 128)),
        ((130, 7), (1, 16)),
        ((2, 3, 50, 70), (1, 16)),
        ((600, 130), (1, 128)),
        ((300, 130), (128, 1)),
        ((2, 3, 50, 70), (16, 1)),
        ((2, 300, 700), (128, 128)),
    ],
)
def test_quantizing_and_back_has_the_bits_of_the_reference(shape, block, dtype, rule):
    x = np.array(normal(9, *shape)).reshape(-1) * np.float32(2.0) ** (
        np.arange(math.prod(shape)) % 40
    )
    x[:10] = [0.0, -0.0, 1e-40, -1e-40, 1e-30, -1e-30, np.nan, np.inf, -np.inf, 3e38]
    stored = dtype.startswith("float8")

    def made(x, backend):
        options = dict(block=block, dtype=jnp.dtype(dtype), scale=rule, backend=backend)
        q = quantize_blocks(x, **options) if stored else None
        return round_blocks(x, **options), q, q and dequantize(q, backend=backend)

    runs = {backend: jax.jit(partial(made, backend=backend)) for backend in ("reference", "cpu")}
    tiny = 1e-38 * np.nan_to_num(x, posinf=0, neginf=0)
    for each in (x, np.roll(x, -10), tiny, x.astype(jnp.bfloat16)):
        values = jnp.asarray(each.reshape(shape))
        expected, got = (run(values) for run in runs.values())
        for one, other in zip(*map(jax.tree.leaves, (expected, got)), strict=True):
            one, other = np.asarray(one), np.asarray(other)
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            real = ~np.isnan(one.astype(np.float32))
            np.testing.assert_array_equal(np.isnan(other.astype(np.float32)), ~real)
            assert same(one[real], other[real])


@pytest.mark.parametrize("packed", [False, True])
def test_a_row_of_a_product_has_its_bits_in_every_company(packed):
    x, w = normal(0, 40, 300), normal(1, 50, 300)
    right = pack(w) if packed else w
    whole = matmul.dot(x, right)
    for start in range(8):
        for rows in range(1, 12):
            assert same(matmul.dot(x[start : start + rows], right), whole[start : start + rows])


def test_a_product_of_bfloat16_is_that_of_its_float32_values():
    x, w = normal(0, 4, 64, dtype=jnp.bfloat16), normal(1, 9, 64, dtype=jnp.bfloat16)
    expected = matmul.dot(x.astype(jnp.float32), w.astype(jnp.float32))
    assert same(matmul.dot(x, w), expected) and same(matmul.dot(x, pack(w)), expected)


def test_panels_hold_every_number_and_zeros_behind_them():
    w = normal(0, COLUMNS + 3, 5)
    values = np.asarray(pack(w).values)
    flat = np.moveaxis(values, 2, 1).reshape(-1, 5)
    assert same(flat[: len(w)], w) and not flat[len(w) :].any()


def test_a_panel_that_is_not_a_number_stays_visible():
    w = normal(0, 4, 8).at[2, 3].set(jnp.nan)
    out = np.asarray(matmul.dot(normal(1, 2, 8), pack(w)))
    assert np.isnan(out[:, 2]).all() and np.isfinite(np.delete(out, 2, 1)).all()


@pytest.mark.parametrize("small", SMALL, ids=lambda small: small.name)
def test_decode_attention_equals_float64(small):
    arrays = small.arguments(jax.random.key(0))
    got = jax.jit(lambda *a: small.run(*a, backend="cpu"))(*arrays)
    assert difference(got, small.expected(*map(np.asarray, arrays))) < 2e-6


def test_most_small_cases_are_the_kernels_own():
    def served(case) -> bool:
        options = case.arguments.keywords
        keys = [jnp.zeros((1, 1, 1, options["dim"]), options["dtype"])]
        return not attention.lacks(keys, [keys[0].astype(options["value_dtype"])])

    assert sum(map(served, SMALL)) > len(SMALL) / 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_every_number_of_a_cache_is_read_as_it_is(dtype):
    kind = jnp.dtype(dtype)
    if kind.itemsize == 1:
        codes = jnp.arange(256, dtype=jnp.uint8)
        values = jax.lax.bitcast_convert_type(codes, kind)
    else:
        values = normal(0, 256, dtype=kind)
    values = values.reshape(4, 1, 4, 16)
    keys = jnp.zeros_like(values)
    held = KeyValues(keys, values, jnp.ones(4, jnp.int32))
    for slot in range(4):
        table = jnp.arange(4, dtype=jnp.int32)[:, None] * 4 + slot
        held = KeyValues(keys, values, jnp.ones(4, jnp.int32), table, 1)
        out = decode.decode_attention(jnp.ones((4, 1, 16)), (held,), 1.0, 1.0, None, jnp.float32)
        expected = np.asarray(values[:, :, slot].astype(jnp.float32))
        np.testing.assert_array_equal(out, expected)


def placed(rows, gaps: int, seed: int):
    """Keys [b, kv_heads, n, dim] put at random places of longer rows, in their order; their mask."""
    b, kv_heads, n, dim = rows.shape
    out = np.zeros((b, kv_heads, n + gaps, dim), np.float32)
    mask = np.zeros((b, 1, n + gaps), bool)
    for i, random in enumerate(np.random.default_rng(seed).spawn(b)):
        at = np.sort(random.choice(n + gaps, n, replace=False))
        out[i][:, at], mask[i, 0, at] = np.asarray(rows[i]), True
    return out, mask


def test_a_querys_bits_depend_on_its_keys_and_their_order_alone():
    b, kv_heads, group, n, dim = 3, 2, 3, 37, 32
    keys, values = normal(0, b, kv_heads, n, dim), normal(1, b, kv_heads, n, dim)
    query = normal(2, b, 1, kv_heads * group, dim)
    mask = jnp.ones((1, 1, n), bool)
    alone = attention.attend(query, [keys], [values], [mask], 0.2, jnp.float32)
    weights = jax.nn.softmax(
        jnp.einsum("bkgd,bksd->bkgs", query.reshape(b, kv_heads, group, dim), keys) * 0.2
    )
    expected = jnp.einsum("bkgs,bksd->bkgd", weights, values).reshape(query.shape)
    np.testing.assert_allclose(alone, expected, atol=2e-6)

    held = KeyValues(keys, values, jnp.full(b, n, jnp.int32))
    cached = decode_attention(query[:, 0], (held,), 0.2, out_dtype=jnp.float32, backend="cpu")
    assert same(cached, alone[:, 0])

    k, seen = placed(keys, 60, 5)
    v, _ = placed(values, 60, 5)
    for cut in (1, 50, 96):
        parts = [(x[:, :, :cut], x[:, :, cut:]) for x in (k, v)] + [
            (seen[..., :cut], seen[..., cut:])
        ]
        parts = [list(map(jnp.asarray, part)) for part in parts]
        split = attention.attend(query, *parts, 0.2, jnp.float32)
        assert same(split, alone)

    # as one row of many tokens, of which each sees some
    both = [x.transpose(1, 0, 2, 3).reshape(1, kv_heads, b * n, dim) for x in (keys, values)]
    own = (jnp.arange(b)[:, None] == jnp.arange(b * n) // n)[None]
    row = query.reshape(1, b, kv_heads * group, dim)
    packed = attention.attend(row, [both[0]], [both[1]], [own], 0.2, jnp.float32)
    assert same(packed.reshape(query.shape), alone)


def test_queries_that_share_a_row_and_those_without_a_key():
    keys, values, query = normal(0, 2, 1, 4, 16), normal(1, 2, 1, 4, 16), normal(2, 4, 1, 1, 16)
    mask = jnp.array([[[1, 1, 0, 0], [0, 0, 0, 0]], [[0, 0, 0, 1], [1, 1, 1, 1]]], bool)
    out = attention.attend(query, [keys], [values], [mask], 1.0, jnp.float32)
    assert not out[1].any()
    np.testing.assert_array_equal(out[2, 0, 0], values[1, 0, 3])


@pytest.mark.parametrize("place", ["keys", "values"])
def test_what_is_not_a_number_stays_visible(place):
    keys, values = normal(0, 1, 1, 5, 16), normal(1, 1, 1, 5, 16)
    broken = {"keys": keys, "values": values}
    broken[place] = broken[place].at[0, 0, 3].set(jnp.nan)
    for length, seen in ((3, False), (4, True)):
        held = KeyValues(broken["keys"], broken["values"], jnp.full(1, length, jnp.int32))
        out = decode_attention(normal(2, 1, 2, 16), (held,), 1.0, backend="cpu")
        assert bool(jnp.isnan(out).any()) is seen


def test_calls_of_several_threads_do_not_mix():
    work = [(normal(i, 20 + i, 200), normal(50 + i, 90, 200)) for i in range(8)]
    run = jax.jit(matmul.dot)
    alone = [run(*pair) for pair in work]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(10):
            assert all(map(same, pool.map(lambda pair: run(*pair), work), alone))


def test_auto_is_cpu_where_its_kernels_run_and_an_operation_without_one_runs_its_reference():
    for backend in ("auto", "cpu"):
        assert resolve(backend, "dot", ("reference", "cpu")) == "cpu"
    assert resolve("auto", "write_cache") == "reference"
    assert resolve("cpu", "write_cache") == "reference"
    with pytest.raises(BackendError, match="unknown backend 'gpu'; choose auto, reference, cpu or"):
        resolve("gpu", "dot")


PROGRAM = """
import jax.numpy as jnp
from pallas_kernels import BackendError, native
from pallas_kernels.backend import resolve
print(native.why_unavailable())
assert resolve("auto", "dot", ("reference", "cpu")) == "reference"
try:
    resolve("cpu", "dot", ("reference", "cpu"))
except BackendError as error:
    print(error)
"""


def where(tmp_path, **variables) -> list[str]:
    environment = os.environ | {"FP8RL_NATIVE_CACHE": str(tmp_path)} | variables
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True
    )
    assert not done.returncode, done.stderr
    return done.stdout.splitlines()


def test_without_a_compiler_the_backend_says_why(tmp_path):
    why, error = where(tmp_path, CC="no-such-compiler")
    assert why.startswith("no C compiler: 'no-such-compiler' does not run")
    assert error == f"dot: the cpu backend has no kernels here: {why}"


def test_a_compiler_that_fails_is_named(tmp_path):
    compiler = tmp_path / "broken"
    compiler.write_text(
        "#!/bin/sh\ncase \"$*\" in *-shared*) echo 'x.c: error: no' >&2; exit 1; esac\n"
    )
    compiler.chmod(0o755)
    why, _ = where(tmp_path, CC=str(compiler))
    assert why == f"{str(compiler)!r} did not compile them: x.c: error: no"


def test_on_several_devices_there_are_none(tmp_path):
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    why, _ = where(tmp_path, XLA_FLAGS=flags)
    assert why == "they run on one CPU device, and JAX has 2"


def test_panels_are_a_tree_of_one_array():
    panels = Panels(jnp.zeros((2, 3, COLUMNS)), 30)
    assert jax.tree.map(lambda x: x, panels).shape == (30, 3)


def test_8_bit_numbers_are_moved_as_their_bits():
    """XLA would convert the whole array to write or read one row of it."""
    codes = normal(0, 6, 8).astype(jnp.float8_e4m3fn)
    new = normal(1, 2, 8).astype(jnp.float8_e4m3fn)
    at = jnp.array([4, 1])

    def write(cache, new):
        return moved(lambda cache, new: cache.at[at].set(new), cache, new)

    def write_tokens(cache, new):
        return scatter(cache.reshape(3, 1, 2, 8), new[:, None], at // 2, at % 2)

    def read(cache):
        return moved(lambda cache: cache[at], cache)

    for run, *arrays in ((write, codes, new), (write_tokens, codes, new), (read, codes)):
        program = jax.jit(run).lower(*arrays).compile()
        assert "u8[" in program.as_text() and "f16[" not in program.as_text()
    assert same(write_tokens(codes, new).reshape(6, 8), write(codes, new))
    assert same(write(codes, new)[at], new) and same(read(codes), codes[at])
    wide = codes.astype(jnp.float32)
    assert same(jax.jit(read)(wide), wide[at])
