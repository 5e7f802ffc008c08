"""What a row or a sequence gets must not depend on what else is computed with it: the same bits, checked across kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.gpu.bounds import same_bits
from experiments.benchmarks.gpu.setting import Setting
from pallas_kernels.decode_attention import KeyValues, decode_attention
from pallas_kernels.matmul import blockwise_matmul
from pallas_kernels.quantize import quantize_blocks

LENGTHS = (1, 63, 64, 65, 511, 513, 1500, 4096)


def rows(setting: Setting, n: int, k: int, counts: Sequence[int]) -> dict[str, Any]:
    """Row i of a product, whichever of `counts` rows are multiplied with it."""

    def make(key):
        keys = jax.random.split(key)
        x = quantize_blocks(jax.random.normal(keys[0], (max(counts), k)), (1, 128), backend="reference")
        w = quantize_blocks(jax.random.normal(keys[1], (n, k)), (128, 128), backend="reference")
        return x, w

    (x, x_scales), weight = jax.jit(make)(jax.random.key(0))
    run = jax.jit(lambda x, scales, w: blockwise_matmul(x, scales, *w, out_dtype=jnp.float32, backend=setting.backend))
    whole = run(x, x_scales, weight)
    other = [m for m in counts if not same_bits(run(x[:m], x_scales[:m], weight), whole[:m])]
    return {"rows": list(counts), "differ": other, "passed": not other or setting.tiny}  # the reference does not promise it


def neighbours(setting: Setting) -> dict[str, Any]:
    """A sequence's attention: alone, in another order, in other pages, and beside shorter ones."""
    found = {}
    for dtype in (jnp.float8_e4m3fn,) if setting.tiny else (jnp.float8_e4m3fn, jnp.bfloat16):
        found |= {f"{jnp.dtype(dtype).name}, {how}": same for how, same in _neighbours(setting, dtype).items()}
    return {"lengths": list(LENGTHS), "same": found, "passed": all(found.values())}


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
        return decode_attention(query, (cache,), dim**-0.5, out_dtype=jnp.float32, backend=setting.backend)

    whole = run(query, keys, values, lengths, pages)
    order, moved, last = np.arange(count)[::-1].copy(), draw.permutation(count * table), count - 1
    elsewhere = np.argsort(moved)[pages].astype(np.int32)  # page p now lies where `moved` has it
    shorter = np.where(np.arange(count) == last, lengths, 1).astype(np.int32)
    alone = [run(query[i : i + 1], keys, values, lengths[i : i + 1], pages[i : i + 1]) for i in range(count)]
    return {
        "alone": all(bool(same_bits(one[0], whole[i])) for i, one in enumerate(alone)),
        "reversed": bool(same_bits(run(query[order], keys, values, lengths[order], pages[order]), whole[order])),
        "other pages": bool(same_bits(run(query, keys[moved], values[moved], lengths, elsewhere), whole)),
        "shorter neighbours": bool(same_bits(run(query, keys, values, shorter, pages)[last], whole[last])),
    }
