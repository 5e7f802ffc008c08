"""Part `checks`: whether the kernels are right on this card, and always the same.

How far a result may be from the right one on a GPU: FP8 tensor cores of Hopper keep about 14 bits
of a sum (DeepSeek-V3, arXiv 2412.19437, section 3.3.2; others say up to 22:
github.com/deepseek-ai/DeepGEMM, issues 37 and 50), where the interpreter keeps float32's 24. Each
addend of a 128-block is cut at 2^-13 of the largest one. For normal data the largest is about 12
times the mean, and 128 such cuts are a random walk whose fifth deviation is about 400 * 2^-13
means, or 2^-11 of the block's sum of magnitudes. The kernels add blocks in float32, so a result may
be off by 2^-11 of its own sum of magnitudes, and by the case's tolerance of the largest result,
whatever k is. A block that is missing or was overwritten is further off. In attention a score is
such a sum, and moves its weight by a part of 2^-11 for each unit of its magnitudes, of which the
cases have up to four: 2^-9 of the largest result.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.lib import xla_client

from experiments.benchmarks.gpu.jobs import Job, Setting, arrays_of
from pallas_kernels.check.cases import Case
from pallas_kernels.decode_attention import KeyValues, decode_attention
from pallas_kernels.matmul import blockwise_matmul
from pallas_kernels.quantize import quantize_blocks

RUNS = 3  # of the same input: a race shows as other bits
FIRST = {
    "attention": ("causal",),
    "cache_write": ("decode",),
    "decode_attention": ("pages", "bf16"),
    "grouped_matmul": ("groups-of-any-size", "gradient"),
    "invariant": ("several-tiles", "few-rows", "groups", "sum-70x520", "rows-5-of-140"),
    "matmul": ("several-tiles", "few-rows", "split"),
    "quantize": ("rows", "tokens", "weight", "both", "regrouped", "swiglu", "rms-norm"),
}
"""Of each operation, small cases that every kernel has a part in."""
ROWS_OF = ((4096, 4096), (1024, 4096), (4096, 12288))
ROW_COUNTS = (1, 2, 7, 8, 9, 16, 17, 33, 64, 65, 127, 128, 129, 136, 1000, 4096)
LENGTHS = (1, 63, 64, 65, 511, 513, 1500, 4096)
SHORT_SUM = 2.0**-11
SHORT_SCORE = 2.0**-9
PRODUCTS = ("matmul", "grouped_matmul")


def jobs(setting: Setting) -> list[Job]:
    """List small cases, then what must not depend on the batch, then cases at real shapes."""
    small, real = (
        [
            _job(setting, size, check, name, case)
            for name in setting.operations
            for case in setting.cases(name, size)
        ]
        for size, check in (("small", against_expected), ("real", against_reference))
    )
    shapes, counts = (((256, 640),), (1, 9, 24)) if setting.tiny else (ROWS_OF, ROW_COUNTS)
    same = [
        Job(
            f"rows: matmul {n}x{k}",
            partial(rows, setting, n, k, counts),
            ("pallas_kernels.matmul",),
            "matmul",
            seconds=150.0,
        )
        for n, k in shapes
    ]
    attention = ("pallas_kernels.decode_attention",)
    same.append(
        Job(
            "neighbours: decode_attention",
            partial(neighbours, setting),
            attention,
            "decode_attention",
            seconds=150.0,
        )
    )
    card = [] if setting.tiny else [Job("card", describe, (), "card", first=True)]
    return [*card, *small, *same, *real]


def _job(
    setting: Setting, size: str, check: Callable[..., dict[str, Any]], operation: str, case: Case
) -> Job:
    return Job(
        f"{size}: {operation} {case.name}",
        partial(check, setting, operation, case),
        (f"pallas_kernels.{operation}.cases",),
        operation,
        first=size == "small" and case.name in FIRST[operation],
    )


def against_expected(setting: Setting, operation: str, case: Case) -> dict[str, Any]:
    """A small case against float64."""
    arrays = arrays_of(case, jax.random.key(0))
    got, equal = run_often(setting, case, arrays)
    want, sums = case.expected(*jax.tree.map(np.asarray, arrays)), None
    if sums_of_magnitudes(operation, case):
        sums = case.expected(*jax.tree.map(np.asarray, magnitudes(arrays)))
    return _judged(verdict(operation, case, got, want, sums), equal)


def against_reference(setting: Setting, operation: str, case: Case) -> dict[str, Any]:
    """A real case against plain XLA on the device."""
    arrays = arrays_of(case, jax.random.key(0))
    got, equal = run_often(setting, case, arrays)
    reference = reference_of(operation, case)
    sums = reference(magnitudes(arrays)) if sums_of_magnitudes(operation, case) else None
    return _judged(verdict(operation, case, got, reference(arrays), sums), equal)


def run_often(setting: Setting, case: Case, arrays: tuple) -> tuple[Any, bool]:
    """The result, and whether it was the same bits each time."""
    run = jax.jit(lambda *a: case.run(*a, backend=setting.backend))
    first = jax.block_until_ready(run(*arrays))
    return first, all([bool(same_bits(first, run(*arrays))) for _ in range(RUNS - 1)])


def _judged(judged: dict[str, Any], equal: bool) -> dict[str, Any]:
    judged |= {"runs_equal": equal, "passed": judged["passed"] and equal}
    if not judged["passed"]:
        print(f"  WRONG: {judged}", flush=True)
    return judged


def describe() -> dict[str, Any]:
    """Describe this card for compiling without one, and the assembler that is first on PATH."""
    target = xla_client.get_topology_for_devices(jax.devices()).target_config
    version = subprocess.run(["ptxas", "--version"], capture_output=True, text=True, check=False)
    return {
        "target_config": str(target),
        "ptxas": version.stdout.strip().splitlines()[-1:],
        "passed": True,
    }


# what a case at a real shape must return, by plain XLA on the device, without tensor cores of less
# than float32


def reference_of(operation: str, case: Case) -> Callable[[tuple], Any]:
    """Make a function of the case's arguments that computes what is right.

    XLA's own grouped product takes each row times every group: that one is by group.
    """
    if operation == "grouped_matmul":
        return lambda arrays: _by_group(case, arrays)

    def run(arrays):
        with jax.default_matmul_precision("highest"):
            return jax.jit(lambda *a: case.run(*a, backend="reference"))(*arrays)

    return run


def _by_group(case: Case, arrays: tuple) -> jax.Array:
    out = jax.eval_shape(lambda *a: case.run(*a, backend="reference"), *arrays)
    longest = max(int(np.asarray(arrays[-1]).max()), 1)
    product = _forward if len(arrays[1].shape) == 3 else _gradient
    with jax.default_matmul_precision("highest"):
        return jax.jit(lambda *a: product(*a, longest).astype(out.dtype))(*arrays)


def _forward(x, w, sizes, longest):
    """Of each group: as many rows as the longest has, from its first on, of which its own are
    kept."""
    m, n = len(x.values), w.shape[1]
    x = jnp.pad(x.dequantize(), ((0, longest), (0, 0)))
    starts = jnp.cumsum(sizes) - sizes

    def one(out, g):
        rows = lax.dynamic_slice_in_dim(x, starts[g], longest)
        product = rows @ jax.tree.map(lambda a: a[g], w).dequantize().T
        before = lax.dynamic_slice_in_dim(out, starts[g], longest)
        kept = jnp.where((jnp.arange(longest) < sizes[g])[:, None], product, before)
        return lax.dynamic_update_slice_in_dim(out, kept, starts[g], 0), None

    return lax.scan(one, jnp.zeros((m + longest, n), jnp.float32), jnp.arange(len(sizes)))[0][:m]


def _gradient(dy, x, sizes, longest):
    dy, x = (jnp.pad(side.dequantize(), ((0, longest), (0, 0))) for side in (dy, x))
    starts = jnp.cumsum(sizes) - sizes

    def one(_, g):
        own = (jnp.arange(longest) < sizes[g])[:, None]
        left, right = (lax.dynamic_slice_in_dim(side, starts[g], longest) for side in (dy, x))
        return None, jnp.where(own, left, 0.0).T @ right

    return lax.scan(one, None, jnp.arange(len(sizes)))[1]


# how far a result may be off, and how far it is


def sums_of_magnitudes(operation: str, case: Case) -> bool:
    """Whether the case's bound needs the result of its arguments' magnitudes."""
    return operation in PRODUCTS and case.instruction == "QGMMA"


@jax.jit
def magnitudes(arrays: tuple) -> tuple:
    """The arguments, every float without its sign."""
    return jax.tree.map(
        lambda x: (
            jnp.abs(x.astype(jnp.float32)).astype(x.dtype)
            if jnp.issubdtype(x.dtype, jnp.floating)
            else x
        ),
        arrays,
    )


def verdict(operation: str, case: Case, got: Any, want: Any, sums: Any | None) -> dict[str, Any]:
    """Compare on whichever side the arrays are.

    Args:
        got, want: of the same tree of arrays.
        sums: the right result of the arguments' magnitudes, where `sums_of_magnitudes` asks for it.

    Returns:
        "difference" as a part of the largest magnitude, "of_allowed" (above 1: wrong), "passed".
    """
    extra = SHORT_SCORE if case.instruction == "QGMMA" and operation not in PRODUCTS else 0.0
    leaves = jax.tree.leaves(got)
    sums = jax.tree.leaves(sums) if sums is not None else [None] * len(leaves)
    judged = [
        _leaf(*three, case.tolerance + extra)
        for three in zip(leaves, jax.tree.leaves(want), sums, strict=True)
    ]
    difference, of_allowed = (max(column) for column in zip(*judged, strict=True))
    return {"difference": difference, "of_allowed": of_allowed, "passed": bool(of_allowed <= 1)}


def _leaf(got, want, sums, tolerance: float) -> tuple[float, float]:
    if got.shape != want.shape:
        raise ValueError(f"shape {got.shape}, expected {want.shape}")
    on_device = isinstance(want, jax.Array)
    compare, dtype = (_compare_on_device, jnp.float32) if on_device else (_compare, np.float64)
    xp = jnp if on_device else np
    have, want = xp.asarray(got).astype(dtype), want.astype(dtype)
    sums = xp.zeros(()) if sums is None else sums.astype(dtype)
    return tuple(float(x) for x in compare(have, want, sums, tolerance))


def _compare(have, want, sums, tolerance, xp=np):
    same = (have == want) | (xp.isnan(have) & xp.isnan(want))
    scale = xp.max(xp.where(xp.isfinite(want), xp.abs(want), 0.0), initial=0.0)
    apart = xp.where(same, 0.0, xp.abs(have - want))
    apart = xp.where(xp.isfinite(apart), apart, xp.inf)
    allowed = SHORT_SUM * sums + tolerance * scale
    parts = xp.where(apart == 0, 0.0, apart / xp.maximum(allowed, 1e-37))
    return xp.max(apart, initial=0.0) / xp.where(scale > 0, scale, 1.0), xp.max(parts, initial=0.0)


@jax.jit
def _compare_on_device(have, want, sums, tolerance):
    return _compare(have, want, sums, tolerance, jnp)


@jax.jit
def same_bits(one: Any, other: Any) -> jax.Array:
    """Whether two trees of arrays are equal bit for bit, NaN included."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return jnp.all(jnp.stack([jnp.all(_bits(a) == _bits(b)) for a, b in pairs]))


def _bits(x):
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


# what a row or a sequence gets must not depend on what else is computed with it


def rows(setting: Setting, n: int, k: int, counts: Sequence[int]) -> dict[str, Any]:
    """Row i of a product, whichever of `counts` rows are multiplied with it."""

    def make(key):
        keys = jax.random.split(key)
        x = quantize_blocks(
            jax.random.normal(keys[0], (max(counts), k)), (1, 128), backend="reference"
        )
        w = quantize_blocks(jax.random.normal(keys[1], (n, k)), (128, 128), backend="reference")
        return x, w

    x, weight = jax.jit(make)(jax.random.key(0))
    run = jax.jit(
        partial(
            blockwise_matmul,
            out_dtype=jnp.float32,
            batch_invariant=True,
            backend=setting.backend,
        )
    )
    whole = run(x, weight)
    few = {m: jax.tree.map(lambda a, m=m: a[:m], x) for m in counts}
    other = [m for m in counts if not same_bits(run(few[m], weight), whole[:m])]
    # the reference does not promise it
    return {"rows": list(counts), "differ": other, "passed": not other or setting.tiny}


def neighbours(setting: Setting) -> dict[str, Any]:
    """A sequence's attention: alone, in another order, in other pages, and beside shorter ones."""
    judged = {}
    for dtype in (jnp.float8_e4m3fn,) if setting.tiny else (jnp.float8_e4m3fn, jnp.bfloat16):
        judged |= {
            f"{jnp.dtype(dtype).name}, {how}": same
            for how, same in _neighbours(setting, dtype).items()
        }
    return {"lengths": list(LENGTHS), "same": judged, "passed": all(judged.values())}


def _neighbours(setting: Setting, dtype: jnp.dtype) -> dict[str, bool]:
    heads, kv_heads, dim, page = (4, 2, 64, 64) if setting.tiny else (32, 8, 128, 64)
    lengths = np.asarray(LENGTHS[:2] if setting.tiny else LENGTHS, np.int32)
    count, table = len(lengths), -(-int(lengths.max()) // page)
    draw = np.random.default_rng(0)
    pages = draw.permutation(count * table).reshape(count, table).astype(np.int32)

    @jax.jit
    def make(key):
        keys = jax.random.split(key)
        query = jax.random.normal(keys[0], (count, heads, dim))
        cache = jax.random.normal(keys[1], (2, count * table, kv_heads, page, dim))
        return query.astype(dtype), *cache.astype(dtype)

    query, keys, values = make(jax.random.key(0))

    @jax.jit
    def run(query, keys, values, lengths, pages):
        cache = KeyValues(keys, values, lengths, pages, page)
        return decode_attention(
            query, (cache,), dim**-0.5, out_dtype=jnp.float32, backend=setting.backend
        )

    whole = run(query, keys, values, lengths, pages)
    order, moved, last = np.arange(count)[::-1].copy(), draw.permutation(count * table), count - 1
    elsewhere = np.argsort(moved)[pages].astype(np.int32)  # page p now lies where `moved` has it
    shorter = np.where(np.arange(count) == last, lengths, 1).astype(np.int32)
    alone = [
        run(query[i : i + 1], keys, values, lengths[i : i + 1], pages[i : i + 1])
        for i in range(count)
    ]
    return {
        "alone": all(bool(same_bits(one[0], whole[i])) for i, one in enumerate(alone)),
        "reversed": bool(
            same_bits(run(query[order], keys, values, lengths[order], pages[order]), whole[order])
        ),
        "other pages": bool(
            same_bits(run(query, keys[moved], values[moved], lengths, elsewhere), whole)
        ),
        "shorter neighbours": bool(
            same_bits(run(query, keys, values, shorter, pages)[last], whole[last])
        ),
    }
