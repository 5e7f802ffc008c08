"""Part `checks`: whether the kernels are right on this card, and always the same. How far a result
may be from the right one, and how it is judged, says `pallas_kernels.check.device`."""

from __future__ import annotations

import itertools
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
from pallas_kernels import Blocks, QTensor, invariant
from pallas_kernels.backend import Backend
from pallas_kernels.check import device, tensor_cores
from pallas_kernels.check.cases import Case
from pallas_kernels.check.device import (
    FIRST,
    magnitudes,
    run_often,
    same_bits,
    sums_of_magnitudes,
    verdict,
    with_bits,
)
from pallas_kernels.decode_attention import KeyValues, decode_attention
from pallas_kernels.matmul import blockwise_matmul
from pallas_kernels.quantize import quantize_blocks

ROWS_OF = ((4096, 4096), (1024, 4096), (4096, 12288))
ROW_COUNTS = (1, 2, 7, 8, 9, 16, 17, 33, 64, 65, 127, 128, 129, 136, 1000, 4096)
SUMS = {"float8_e4m3fn": ("matmul", 128), "bfloat16": ("invariant", 64)}
"""Operations, and how many products tensor cores add before their kernels go on in float32."""
LENGTHS = (1, 63, 64, 65, 511, 513, 1500, 4096)


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
    sums = [
        Job(
            f"tensor cores: {dtype}",
            partial(tensor_core_sums, setting, dtype),
            (f"pallas_kernels.{operation}", "pallas_kernels.check.tensor_cores"),
            operation,
            first=True,
        )
        for dtype, (operation, _) in SUMS.items()
    ]
    return [*card, *sums, *small, *same, *real]


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
    return _told(device.against_expected(operation, case, setting.backend))


def against_reference(setting: Setting, operation: str, case: Case) -> dict[str, Any]:
    """A real case against plain XLA on the device."""
    arrays = arrays_of(case, jax.random.key(0))
    got, equal = run_often(case, arrays, setting.backend)
    reference = reference_of(operation, case)
    sums = reference(magnitudes(arrays)) if sums_of_magnitudes(operation, case) else None
    return _told(with_bits(verdict(operation, case, got, reference(arrays), sums), equal))


def _told(judged: dict[str, Any]) -> dict[str, Any]:
    if not judged["passed"]:
        print(f"  WRONG: {judged}", flush=True)
    return judged


def tensor_core_sums(setting: Setting, dtype: str) -> dict[str, Any]:
    """Hold sums of one block that this card makes against the published model of them, bit for bit.

    Returns:
        "sums", for each kind of data and number of rows (few and many have kernels of their own):
        the share of "equal" ones and the largest "difference", a part of the sum of magnitudes. A
        card that adds otherwise is not wrong: bounds that are derived from the model are doubtful
        then.
    """
    found = {}
    _, k = SUMS[dtype]
    for (name, draw), rows in itertools.product(tensor_cores.DATA.items(), (8, 64, 256)):
        x, w = (draw(np.random.RandomState(i), (n, k)) for i, n in enumerate((rows, 128)))
        if dtype == "float8_e4m3fn":
            x, w = (a * 448 / np.abs(a).max(1, keepdims=True) for a in (x, w))
        x, w = x.astype(dtype), w.astype(dtype)
        got = np.asarray(_sums_of_a_block(setting.backend, x, w))
        want = tensor_cores.accumulate(np.zeros_like(got), x, w.T)
        magnitudes = np.abs(x.astype(np.float64)) @ np.abs(w.astype(np.float64)).T
        found[f"{name}, {rows} rows"] = {
            "equal": float(np.mean(got.view(np.uint32) == want.view(np.uint32))),
            "difference": float(np.max(np.abs(got - want) / magnitudes)),
        }
    return {"sums": found, "passed": True}


def _sums_of_a_block(backend: Backend, x: np.ndarray, w: np.ndarray) -> jax.Array:
    """x @ w.T, of which tensor cores add all."""
    if x.dtype == jnp.bfloat16:
        return jax.jit(partial(invariant.dot, backend=backend))(x, w)
    ones = [jnp.ones((len(a) // rows, 1)) for a, rows in ((x, 1), (w, 128))]
    formats = Blocks((1, 128)), Blocks((128, 128))
    sides = (QTensor(jnp.asarray(a), *rest) for a, *rest in zip((x, w), ones, formats, strict=True))
    return jax.jit(partial(blockwise_matmul, out_dtype=jnp.float32, backend=backend))(*sides)


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
