"""What `attention` in decode's key order is checked and timed with; the reference computes it in
any order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.api import attention
from pallas_kernels.attention.reference import CHUNK, TokenBlock, Tokens, attend_in_chunks
from pallas_kernels.check.cases import QWEN3_8B, Case, bits_apart
from pallas_kernels.decode_attention.api import KeyValues, decode_attention

E4M3, BF16, F16 = jnp.float8_e4m3fn, jnp.bfloat16, jnp.float16
SCALES = (0.125, 3.0)  # of scores and values


@dataclass(frozen=True)
class Shape:
    """
    Attributes:
        heads, kv_heads, dim: of the model.
        lengths: real tokens of each row.
        tokens: of a row, padding included.
        last_queries: how many of a row's last tokens are queries; 0: all.
        shared: prompt tokens of each row of a shared block; none: no such block.
        shared_slots: of a row of that block.
        dtype: of queries, keys and values.
        window: positions that a token attends to; 0: all.
        chunk: queries of a row that are computed at a time; 0: all.
        by_head: whether each KV head has scales of its own.
    """

    heads: int
    kv_heads: int
    dim: int
    lengths: tuple[int, ...]
    tokens: int
    last_queries: int = 0
    shared: tuple[int, ...] = ()
    shared_slots: int = 0
    dtype: jnp.dtype = E4M3
    window: int = 0
    chunk: int = 0
    by_head: bool = False

    @property
    def scales(self) -> tuple:
        """Of scores and values, [] or [kv_heads]."""
        if not self.by_head:
            return SCALES
        return tuple(np.float32(scale) * np.arange(1, self.kv_heads + 1) for scale in SCALES)

    @property
    def queries(self) -> int:
        return self.last_queries or self.tokens

    @property
    def positions(self) -> np.ndarray:
        """[rows, tokens]: a row's tokens come after its prompt's."""
        rows = len(self.lengths)
        before = (
            np.repeat(self.shared, rows // len(self.shared)) if self.shared else np.zeros(rows, int)
        )
        return (before[:, None] + np.arange(self.tokens)).astype(np.int32)


def arguments(key: jax.Array, shape: Shape):
    """Queries [rows, queries, heads, dim]; keys and values of the own block, and of the shared
    one."""
    keys = iter(jax.random.split(key, 5))
    out = [
        jax.random.normal(next(keys), (len(shape.lengths), shape.queries, shape.heads, shape.dim))
    ]
    for rows, slots in (
        (len(shape.lengths), shape.tokens),
        (len(shape.shared), shape.shared_slots),
    ):
        out += [
            jax.random.normal(next(keys), (rows, shape.kv_heads, slots, shape.dim))
            for _ in range(2)
            if rows
        ]
    return tuple(x.astype(shape.dtype) for x in out)


def prefill(query, *arrays, shape: Shape, backend):
    segments = jnp.asarray(np.arange(shape.tokens) < np.array(shape.lengths)[:, None], jnp.int32)
    tokens = Tokens.of_rows(segments, jnp.asarray(shape.positions))
    queries = jax.tree.map(lambda x: x[:, -shape.queries :], tokens)
    blocks = [TokenBlock(*arrays[:2], queries, tokens)]
    if shape.shared:
        slots = np.arange(shape.shared_slots)
        real = jnp.asarray(slots < np.array(shape.shared)[:, None])
        positions = jnp.broadcast_to(jnp.asarray(slots, jnp.int32), real.shape)
        blocks.insert(
            0, TokenBlock(*arrays[2:], queries.after_block(), Tokens.of_block(real, positions))
        )
    window = jnp.int32(shape.window) if shape.window else None
    scales = (
        [jnp.asarray(scale, jnp.float32) for scale in shape.scales] if shape.by_head else SCALES
    )
    run = partial(attention, key_order="decode" if backend == "hopper" else "any", backend=backend)
    return attend_in_chunks(
        query, blocks, window, *scales, jnp.float32, shape.chunk or shape.queries, run
    )


def expected(query, keys, values, *shared, shape: Shape) -> np.ndarray:
    """Query by query in float64."""
    rows, last_queries = query.shape[:2]
    out, positions = np.zeros(query.shape), shape.positions
    for r, i, h in np.ndindex(rows, last_queries, shape.heads):
        at, head = shape.tokens - last_queries + i, h // (shape.heads // shape.kv_heads)
        others = np.arange(shape.tokens)
        visible = (others <= at) & ((others < shape.lengths[r]) == (at < shape.lengths[r]))
        parts = [(keys[r, head], values[r, head], visible, positions[r])]
        if shared:
            row, slots = r // (rows // len(shape.shared)), np.arange(shape.shared_slots)
            parts.append(
                (shared[0][row, head], shared[1][row, head], slots < shape.shared[row], slots)
            )
        k, v, visible, where = (np.concatenate(part) for part in zip(*parts, strict=True))
        visible &= (positions[r, at] - where < shape.window) | (not shape.window)
        of_scores, of_values = (np.broadcast_to(x, shape.kv_heads)[head] for x in shape.scales)
        score = k[visible].astype(np.float64) @ query[r, i, h].astype(np.float64) * of_scores
        weight = np.exp(score - score.max())
        out[r, i, h] = weight @ v[visible].astype(np.float64) / weight.sum() * of_values
    return out


def case(name: str, shape: Shape) -> Case:
    model = shape.heads * shape.dim
    pairs = shape.queries * (
        shape.tokens - shape.queries / 2 + sum(shape.shared) / max(len(shape.shared), 1)
    )
    return Case(
        name=name,
        arguments=partial(arguments, shape=shape),
        run=partial(prefill, shape=shape),
        expected=partial(expected, shape=shape),
        # weights are rounded to the values' 16 bits, to float16's for e4m3
        tolerance=2.0**-8 if shape.dtype == BF16 else 2.0**-11,
        instruction="QGMMA" if shape.dtype == E4M3 else "HGMMA",
        flops=4.0 * model * len(shape.lengths) * pairs,
        bytes=len(shape.lengths) * 2.0 * shape.queries * model * jnp.dtype(shape.dtype).itemsize,
    )


def as_decoded(name: str, shape: Shape, *tokens: int) -> Case:
    """Some tokens of a prefill by the bits of their decode steps, over caches with slots that
    nothing was written to."""

    def run(query, *arrays, backend):
        prefilled, apart = prefill(query, *arrays, shape=shape, backend=backend), []
        longer = [jnp.pad(x, [(0, 0), (0, 0), (0, 600), (0, 0)], constant_values=1) for x in arrays]
        for token in tokens:
            keys, values, *shared = longer
            caches = [KeyValues(keys, values, jnp.full(len(query), token + 1, jnp.int32))]
            if shape.shared:
                lengths = jnp.asarray(shape.shared, jnp.int32)
                caches.insert(0, KeyValues(shared[0], shared[1], lengths))
            out = decode_attention(
                query[:, token - shape.tokens + shape.queries],
                tuple(caches),
                SCALES[0],
                value_scale=jnp.float32(SCALES[1]),
                window=jnp.int32(shape.window) if shape.window else None,
                out_dtype=jnp.float32,
                backend=backend,
            )
            apart.append(bits_apart(prefilled[:, token - shape.tokens + shape.queries], out))
        return jnp.stack(apart)

    return Case(
        name=name,
        arguments=partial(arguments, shape=shape),
        run=run,
        expected=lambda *_: np.zeros((len(tokens), len(shape.lengths), shape.heads, shape.dim)),
    )


SMALL = (
    case("causal", Shape(4, 2, 128, (70, 33), 70)),
    case("two-chunks", Shape(4, 1, 64, (560,), 560, last_queries=60)),
    case("shared", Shape(4, 2, 64, (40, 1, 17, 40), 40, shared=(70, 3), shared_slots=75)),
    case(
        "window",
        Shape(4, 2, 64, (150, 90), 150, shared=(20,), shared_slots=24, window=50, chunk=40),
    ),
    case("bf16", Shape(4, 2, 128, (70,), 70, dtype=BF16)),
    case("f16-mha-head-dim-96", Shape(2, 2, 96, (40,), 40, dtype=F16)),
    case("scales-by-head", Shape(8, 4, 64, (70,), 70, by_head=True)),
    # a token before the second chunk, which its tile of 32 tokens takes; one in the middle; the
    # last
    as_decoded("as-decoded", Shape(2, 1, 64, (540, 540), 540, last_queries=40), 505, 520, 539),
    as_decoded(
        "as-decoded-shared",
        Shape(4, 2, 64, (70,) * 4, 70, shared=(530, 3), shared_slots=530, chunk=50),
        30,
        69,
    ),
    as_decoded(
        "as-decoded-window",
        Shape(4, 2, 64, (70, 70), 70, shared=(40,), shared_slots=40, window=45),
        2,
        40,
        69,
    ),
    # the tile of each takes steps of 64 keys that it does not attend to: after its own for the
    # first token, before for the second
    as_decoded(
        "as-decoded-bf16",
        Shape(2, 1, 64, (290,), 290, last_queries=64, dtype=BF16, window=200),
        250,
        270,
    ),
)


def _real(name: str, rows: int, **options) -> Case:
    model, tokens = QWEN3_8B, 2048
    return case(
        name,
        Shape(
            model.heads,
            model.kv_heads,
            model.head_dim,
            (tokens,) * rows,
            tokens,
            chunk=CHUNK,
            **options,
        ),
    )


REAL = (
    _real("qwen3-8b-2048", 8),
    _real("qwen3-8b-2048-bf16", 8, dtype=BF16),
    _real("qwen3-8b-2048-shared", 16, shared=(1024, 1024), shared_slots=1024),
    _real("qwen3-8b-2048-window", 8, window=512),
)
