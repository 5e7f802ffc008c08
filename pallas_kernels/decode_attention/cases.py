"""What `decode_attention` is checked and timed with."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.check.cases import DENSE, QWEN3_30B_A3B, Case, bits_apart
from pallas_kernels.decode_attention.api import KeyValues, decode_attention
from pallas_kernels.decode_attention.hopper import CHUNK

E4M3, BF16, F16 = jnp.float8_e4m3fn, jnp.bfloat16, jnp.float16
SCALES = (0.5, 0.25, 3.0)  # of e4m3 queries, keys and values


class Cache(NamedTuple):
    """Lengths of its rows; pages of `page` slots in cache rows of `slots`, `table` of them a row;
    page 0: rows as they lie."""

    lengths: tuple[int, ...]
    slots: int
    page: int = 0
    table: int = 1
    wrong: tuple[tuple[int, int, int], ...] = ()  # (row, entry, page number) put into the table


def arguments(
    key: jax.Array,
    heads: int,
    kv_heads: int,
    dim: int,
    caches: tuple[Cache, ...],
    dtype,
    value_dtype,
    window,
    by_head=False,
):
    keys = iter(jax.random.split(key, 1 + 3 * len(caches)))
    sequences = max(len(cache.lengths) for cache in caches)
    out = [jax.random.normal(next(keys), (sequences, heads, dim)).astype(dtype)]
    for cache in caches:
        rows, per_row = len(cache.lengths), -(-cache.slots // cache.page) if cache.page else 1
        count = -(-rows * cache.table // per_row) if cache.page else rows
        for kind in (dtype, value_dtype):
            out.append(
                jax.random.normal(next(keys), (count, kv_heads, cache.slots, dim)).astype(kind)
            )
        out.append(jnp.asarray(cache.lengths, jnp.int32))
        order = jax.random.permutation(next(keys), count * per_row)[: rows * cache.table].reshape(
            rows, cache.table
        )
        for row, entry, page in cache.wrong:
            order = order.at[row, entry].set(page)
        out.append(order.astype(jnp.int32))
    scales = jnp.asarray(SCALES, jnp.float32)
    if by_head:  # [3, kv_heads]
        scales = scales[:, None] * (1 + jnp.arange(kv_heads, dtype=jnp.float32))
    return *out, scales, jnp.int32(window)


def expected(query, *rest, caches: tuple[Cache, ...], dtype, value_dtype, windowed) -> np.ndarray:
    """Sequence by sequence and key by key in float64."""
    *arrays, (query_scale, key_scale, value_scale), window = rest
    if dtype != E4M3:
        query_scale = key_scale = 1.0
    value_scale = value_scale if value_dtype == E4M3 else 1.0
    sequences, heads, dim = query.shape
    out = np.zeros(query.shape)
    for s in range(sequences):
        rows = [
            _held(cache, *arrays[4 * i : 4 * i + 4], s, sequences) for i, cache in enumerate(caches)
        ]
        keys, values, real = (np.concatenate(parts) for parts in zip(*rows, strict=True))
        if windowed:
            real &= len(real) - 1 - np.arange(len(real)) < window
        for h in range(heads):
            k, v = (x[real, h // (heads // keys.shape[1])] for x in (keys, values))
            of_q, of_k, of_v = (
                np.broadcast_to(x, keys.shape[1])[h // (heads // keys.shape[1])]
                for x in (query_scale, key_scale, value_scale)
            )
            score = k @ query[s, h].astype(np.float64) * dim**-0.5 * of_q * of_k
            weight = np.exp(score - score.max(initial=-1e30))
            out[s, h] = weight @ v / max(weight.sum(), 1e-300) * of_v
    return out


def _held(cache: Cache, keys, values, lengths, pages, sequence, sequences):
    """[length, kv_heads, dim] of a sequence's keys and values, and which are real."""
    row = sequence // (sequences // len(lengths))
    page, slots = cache.page or cache.slots, keys.shape[2]
    per_row, table = -(-slots // page), pages[row] if cache.page else [row]
    entries, real = [], []
    for i in range(min(max(lengths[row], 0), page * len(table))):
        number, slot = table[i // page], table[i // page] % per_row * page + i % page
        real.append(0 <= number < len(keys) * per_row and slot < slots)
        at = (number // per_row, slot) if real[-1] else (0, 0)
        entries.append([x[at[0], :, at[1]].astype(np.float64) for x in (keys, values)])
    entries = np.asarray(entries).reshape(-1, 2, *keys.shape[1::2])
    return entries[:, 0], entries[:, 1], np.asarray(real, bool)


def case(
    name: str,
    heads: int,
    kv_heads: int,
    dim: int,
    *caches: Cache,
    dtype=E4M3,
    value_dtype=None,
    window=0,
    by_head=False,
) -> Case:
    value_dtype = value_dtype or dtype
    options = {"caches": caches, "dtype": dtype, "value_dtype": value_dtype}

    def run(query, *rest, backend):
        *arrays, scales, last = rest
        held = []
        for i, cache in enumerate(caches):
            keys, values, lengths, pages = arrays[4 * i : 4 * i + 4]
            held.append(
                KeyValues(keys, values, lengths, pages, cache.page)
                if cache.page
                else KeyValues(keys, values, lengths)
            )
        query_scale, key_scale = scales[:2] if dtype == E4M3 else (None, None)
        return decode_attention(
            query,
            tuple(held),
            dim**-0.5,
            query_scale,
            key_scale,
            value_scale=scales[2] if value_dtype == E4M3 else None,
            window=last if window else None,
            out_dtype=jnp.float32,
            backend=backend,
        )

    sequences = max(len(cache.lengths) for cache in caches)
    held = sum(sum(cache.lengths) for cache in caches)
    return Case(
        name=name,
        arguments=partial(
            arguments,
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            window=window,
            by_head=by_head,
            **options,
        ),
        run=run,
        expected=partial(expected, windowed=bool(window), **options),
        # weights are rounded to the values' 16 bits, to float16's for e4m3
        tolerance=2.0**-8 if value_dtype == BF16 else 2.0**-11,
        instruction="QGMMA" if dtype == E4M3 else "HGMMA",
        flops=4.0
        * dim
        * heads
        * sum(sum(cache.lengths) * sequences // len(cache.lengths) for cache in caches),
        bytes=held * kv_heads * dim * (jnp.dtype(dtype).itemsize + jnp.dtype(value_dtype).itemsize),
    )


def alike(
    name: str, cache: Cache, row: int, dtype, heads: int = 4, kv_heads: int = 2, dim: int = 64
) -> Case:
    """The bits of a row's output: alone, in another row, in other pages, with a wider table, beside
    neighbours of one key."""
    own, others = slice(row, row + 1), np.arange(len(cache.lengths)) != row

    def run(query, keys, values, lengths, pages, *_, backend):
        def attend(query, keys, values, lengths, pages):
            held = KeyValues(keys, values, lengths, pages, cache.page)
            return decode_attention(
                query, (held,), dim**-0.5, out_dtype=jnp.float32, backend=backend
            )

        want = attend(query, keys, values, lengths, pages)[row]
        moved = np.random.default_rng(0).permutation(len(keys))
        wider = jnp.pad(pages, [(0, 0), (0, CHUNK // cache.page)], constant_values=-1)
        variants = (
            attend(query[own], keys, values, lengths[own], pages[own])[0],
            attend(query[::-1], keys, values, lengths[::-1], pages[::-1])[len(query) - 1 - row],
            attend(
                query,
                keys[moved],
                values[moved],
                lengths,
                jnp.asarray(np.argsort(moved), jnp.int32)[pages],
            )[row],
            attend(query, keys, values, lengths, wider)[row],
            attend(query, keys, values, jnp.where(others, 1, lengths), pages)[row],
        )
        return jnp.stack([bits_apart(want, one) for one in variants])

    return Case(
        name=name,
        arguments=lambda key: arguments(key, heads, kv_heads, dim, (cache,), dtype, dtype, 0),
        run=run,
        expected=lambda *_: np.zeros((5, heads, dim)),
    )


SMALL = (
    case("pages", 8, 2, 128, Cache((0, 1, 64, 65), 64, 64, 2)),
    case("chunks", 4, 1, 128, Cache((1100,), 256, 128, 9)),
    case("ring-wraps", 4, 2, 64, Cache((900, 130), 1000)),
    case("two-caches", 4, 2, 128, Cache((70, 3), 72), Cache((5, 0, 66, 1), 128, 64, 2)),
    case("many-share", 24, 2, 64, Cache((130,), 192), Cache((3, 70, 0, 9, 1, 1, 5, 2), 80)),
    case("window", 4, 2, 64, Cache((700, 600), 704), Cache((5, 80, 1, 66), 128), window=70),
    case("window-in-chunk", 2, 2, 64, Cache((1300, 5), 128, 128, 11), window=600),
    case("bf16", 4, 2, 128, Cache((300, 65), 128, 128, 3), dtype=BF16),
    case("f16-mha", 3, 3, 64, Cache((200, 1), 201), dtype=F16),
    case("head-dim-96", 4, 2, 96, Cache((200, 63), 64, 64, 4)),
    case("head-dim-96-bf16", 4, 2, 96, Cache((200, 63), 64, 64, 4), dtype=BF16),
    case("narrow-values", 4, 2, 64, Cache((130,), 136), dtype=BF16, value_dtype=E4M3),
    case(
        "wrong-pages",
        4,
        2,
        64,
        Cache((200, 9999), 100, 64, 4, ((0, 1, -7), (0, 2, 10**6), (1, 0, 4))),
    ),
    case("scales-by-head", 8, 4, 64, Cache((200, 63), 208), by_head=True),
    alike("same-bits", Cache((70, 600, 65), 64, 64, 10), 1, E4M3),
    alike("same-bits-bf16", Cache((600, 65), 64, 64, 10), 0, BF16),
)


def _real(model, sequences: int, length: int, page: int = 64, **options) -> Case:
    cache = Cache((length,) * sequences, page, page, -(-length // page))
    kind = "bf16" if options else "e4m3"
    name = f"{model.name}-{kind}-{sequences}x{length}" + (f"-page{page}" if page != 64 else "")
    return case(name, model.heads, model.kv_heads, model.head_dim, cache, **options)


QWEN3_8B = DENSE[0]
REAL = (
    *(
        _real(model, 64, 4096, **options)
        for model in (*DENSE, QWEN3_30B_A3B)
        for options in ({}, {"dtype": BF16})
    ),
    _real(QWEN3_8B, 1, 32768),
    _real(QWEN3_8B, 256, 1024, 256),
    case("qwen3-8b-samples", 32, 8, 128, Cache((1024,) * 16, 1024), Cache((1024,) * 128, 1024)),
    case(
        "qwen3-8b-samples-bf16",
        32,
        8,
        128,
        Cache((1024,) * 16, 1024),
        Cache((1024,) * 128, 1024),
        dtype=BF16,
    ),
    case("window-4096", 32, 8, 128, Cache((16384,) * 16, 64, 64, 256), window=4096),
    case("ragged-rows", 4, 2, 64, Cache((9, 7, 3), 9), Cache((8,) * 12, 8)),
    case("head-dim-64", 32, 8, 64, Cache((4096,) * 64, 64, 64, 64)),
    case("head-dim-96-real", 32, 32, 96, Cache((4096,) * 16, 64, 64, 64)),
    case("head-dim-96-bf16-real", 32, 32, 96, Cache((4096,) * 16, 64, 64, 64), dtype=BF16),
)
