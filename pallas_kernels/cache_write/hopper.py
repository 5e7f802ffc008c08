"""Writing a KV cache on Hopper: one kernel rotates, scales, clamps, casts and scatters, and touches
nothing else of the cache.

A unit of work is some heads of some tokens, of the queries, the keys or the values. Its tokens are
the rows of wgmma's register layout, so a pair of dimensions that rotate as one lies in one thread.
Every token goes to its place by a TMA store of its own, which does not happen for a token whose
place is outside.
"""

from __future__ import annotations

import math
from itertools import count
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic

WARPGROUPS, STRIP = 2, 64


class Part(NamedTuple):
    """The queries, the keys or the values: what is read, whether it is rotated, and which of the
    scales it has."""

    heads: int
    rotated: bool
    scale: int | None
    dtype: jnp.dtype


@mosaic.outlined("scaled", "query_scaled")
def write_cache(keys, values, k, v, cos, sin, row, slot, scales, q=None, *, scaled, query_scaled):
    """`scales` are [3, kv_heads], of keys, values and queries; the flags say whether they are used.
    q is [tokens, kv_heads, queries of each, head_dim]."""
    tokens = len(k)
    parts = [
        Part(k.shape[1], rotated, i if scaled else None, keys.dtype)
        for i, rotated in enumerate((True, False))
    ]
    given = [k, v]
    if q is not None:
        shape, q = q.shape, q.reshape(tokens, -1, q.shape[-1])
        parts.append(
            Part(
                q.shape[1],
                True,
                2 if query_scaled else None,
                keys.dtype if query_scaled else q.dtype,
            )
        )
        given.append(q)
    keys, values = jax.new_ref(keys), jax.new_ref(values)
    given = [_eights(x) for x in (*given, cos, sin)]
    places = [jnp.pad(x, (0, -tokens % 8), constant_values=-1) for x in (row, slot)]
    out = _launch(given, places, scales, (keys, values), parts)
    return jax.freeze(keys), jax.freeze(values), *(x[:tokens].reshape(shape) for x in out)


def _eights(x):
    """x with its tokens in eights, as TMA wants the rows of what it swizzles."""
    return jnp.pad(x, [(0, -len(x) % 8)] + [(0, 0)] * (x.ndim - 1)) if len(x) % 8 else x


def _launch(given, places, scales, caches, parts):
    tokens, _, dim = given[0].shape
    heads = sum(part.heads for part in parts)
    # few tokens: the smallest units of which a warpgroup has one at most, for latency; many: large
    # ones
    at_once = WARPGROUPS * mosaic.multiprocessors()
    few = [n for n in (8, 16, 32, STRIP) if -(-tokens // n) * heads <= at_once]
    strip, unit_heads = (
        (few[0], 1) if few else (STRIP, math.gcd(2, *(part.heads for part in parts)))
    )
    strips = -(-tokens // strip)
    units = [strips * part.heads // unit_heads for part in parts]
    out = (
        [jax.ShapeDtypeStruct((tokens, parts[2].heads, dim), parts[2].dtype)]
        if len(parts) == 3
        else []
    )

    def staged_heads(i):
        """Heads that a token has room for. One that goes to its place alone begins at 128 bytes,
        where TMA may read. Memory of one head a token Mosaic swizzles, and writes the second half
        of 256 bytes to wrong places (jax 0.11.2)."""
        size = dim * parts[i].dtype.itemsize
        return next(n for n in count(max(unit_heads, 2)) if n * size % 128 == 0)

    def staging(i):
        return f"{parts[i].dtype.name} of {staged_heads(i)}"  # parts that need the same share it

    def body(*refs):
        inputs, (row, slot, scales, keys, values), (*queries, buffers, loaded) = (
            refs[: len(given)],
            refs[len(given) : len(given) + 5],
            refs[len(given) + 5 :],
        )
        wg = lax.axis_index("wg")
        buffers = {name: ref.at[wg] for name, ref in buffers.items()}
        to = (keys, values, *queries)

        def one(part, first, info):
            unit = info.index[0] - first
            group, at = lax.div(unit, strips), lax.rem(unit, strips) * strip
            _unit(
                part,
                inputs,
                (row, slot, scales),
                to,
                buffers,
                loaded.at[wg],
                (group * unit_heads, unit_heads),
                (at, strip),
            )

        @mosaic.nd_loop((sum(units),), collective_axes=("block", "wg"))
        def _(info):
            for i in range(len(parts)):
                first = sum(units[:i])
                mine = (info.index[0] >= first) & (info.index[0] < first + units[i])
                mosaic.when(mine)(lambda i=i, first=first: one(i, first, info))

        mosaic.wait_smem_to_gmem(0)

    def _unit(i, inputs, small, to, buffers, loaded, heads, tokens_at):
        part, (row, slot, scales), (head, width), (at, size) = parts[i], small, heads, tokens_at
        tokens_of, own = mosaic.ds(at, size), mosaic.ds(0, size)
        for place, name in ((row, "row"), (slot, "slot")):
            mosaic.copy_gmem_to_smem(place.at[tokens_of], buffers[name].at[own], loaded)
        for table, name in zip(inputs[-2:], ("cos", "sin"), strict=True):
            mosaic.copy_gmem_to_smem(table.at[tokens_of], buffers[name].at[own], loaded)
        for h in range(width):
            mosaic.copy_gmem_to_smem(
                inputs[i].at[tokens_of, head + h], buffers["x"].at[h, own], loaded
            )
        mosaic.barrier_wait(loaded)
        mosaic.wait_smem_to_gmem(0, wait_read_only=True)
        staged = buffers[staging(i)]
        for h in range(width):
            _convert(part, buffers, h, staged, scales, head + h)
        mosaic.commit_smem()
        heads_of = mosaic.ds(head, width)
        if i == 2 and width == staged_heads(i):
            mosaic.copy_smem_to_gmem(staged.at[own], to[i].at[tokens_of, heads_of])
            return

        def token(t, _):
            source = staged.at[t, mosaic.ds(0, width)]
            if i == 2:
                mosaic.copy_smem_to_gmem(source, to[i].at[at + t, heads_of])
            else:
                _store_token(source, to[i], buffers["row"][t], heads_of, buffers["slot"][t])

        lax.fori_loop(0, jnp.minimum(size, tokens - at), token, None)
        mosaic.commit_smem()  # the next unit's places are another proxy's write

    def _convert(part, buffers, h, staged, scales, head):
        half, kv_head = dim // 2, lax.div(head, part.heads // parts[0].heads)
        sides = [mosaic.ds(0, half), mosaic.ds(half, half)]
        x = [_strip(buffers["x"].at[h, :, side]) for side in sides]
        if part.rotated:
            cos, sin = _strip(buffers["cos"]), _strip(buffers["sin"])
            x = [x[0] * cos - x[1] * sin, x[1] * cos + x[0] * sin]
        for side, one in zip(sides, x, strict=True):
            one = one.astype(given[0].dtype)
            if part.scale is not None:
                one = mosaic.saturate(
                    one.astype(jnp.float32) / scales[part.scale, kv_head], part.dtype
                )
            staged[:, h, side] = one.astype(part.dtype)

    def _store_token(source, cache, row, heads, slot):
        rows, _, slots, _ = cache.shape
        inside = (row >= 0) & (row < rows) & (slot >= 0) & (slot < slots)
        mosaic.when(inside)(lambda: mosaic.copy_smem_to_gmem(source, cache.at[row, heads, slot]))

    half = dim // 2
    buffers = {
        "x": mosaic.halves((WARPGROUPS, unit_heads, STRIP, dim), given[0].dtype),
        "cos": mosaic.tiled((WARPGROUPS, STRIP, half), jnp.float32),
        "sin": mosaic.tiled((WARPGROUPS, STRIP, half), jnp.float32),
        "row": mosaic.SMEM((WARPGROUPS, STRIP), jnp.int32),
        "slot": mosaic.SMEM((WARPGROUPS, STRIP), jnp.int32),
    }
    for i, part in enumerate(parts):
        buffers[staging(i)] = mosaic.SMEM((WARPGROUPS, STRIP, staged_heads(i), dim), part.dtype)
    scratch = [buffers, mosaic.Barrier(num_arrivals=4 + unit_heads, num_barriers=WARPGROUPS)]
    run = mosaic.launch(
        body,
        out,
        scratch=scratch,
        threads=WARPGROUPS,
        tiles=-(-sum(units) // WARPGROUPS),
        name="write_cache",
    )
    return run(*given, *places, scales, *caches)


def _strip(ref):
    return mosaic.load(ref, layout=mosaic.Layout.WGMMA, optimized=False).astype(jnp.float32)
