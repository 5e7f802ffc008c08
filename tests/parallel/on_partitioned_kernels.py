"""Prints how kernels are split over eight devices: differences from one device, and the collectives
that XLA added."""

from __future__ import annotations

import json
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import Blocks, QTensor
from pallas_kernels.attention import KeyBlock
from pallas_kernels.attention import hopper as attention_hopper
from pallas_kernels.attention import reference as attention_reference
from pallas_kernels.decode_attention import hopper as decode_hopper
from pallas_kernels.grouped_matmul import reference as grouped_reference
from pallas_kernels.matmul import reference
from pallas_kernels.partition import partitioned
from pallas_kernels.quantize import quantize_blocks
from pallas_kernels.quantize.api import BLOCKS as QUANTIZED

RULE, BLOCKS = "m k, m b, n k, c b -> m n", {"b": ("k", 128), "c": ("n", 128)}


GROUPED_RULE = "m k, m b, g n k, g c b, g -> m n"
OUTER_RULE = "m n, b n, m k, b k, g -> g n k"


def grouped(x, x_scales, w, w_scales, sizes):
    x, w = QTensor(x, x_scales, Blocks((1, 128))), QTensor(w, w_scales, Blocks((128, 128)))
    return grouped_reference.dot(x.dequantize(), w.dequantize(), sizes)


def outer(dy, dy_scales, x, x_scales, sizes):
    dy, x = (QTensor(*side, Blocks((128, 1))) for side in ((dy, dy_scales), (x, x_scales)))
    return grouped_reference.outer_product(dy.dequantize(), x.dequantize(), sizes)


def kernel(x, x_scales, w, w_scales):
    """Stands for a kernel that XLA cannot look into: what it cannot split in a callback, it
    gathers."""
    x, w = QTensor(x, x_scales, Blocks((1, 128))), QTensor(w, w_scales, Blocks((128, 128)))
    return reference.dot(x.dequantize(), w.dequantize())


def collectives(mesh, specs, operands) -> tuple[float, list[str], list[int]]:
    arrays = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(operands, specs, strict=True)
    ]
    with jax.set_mesh(mesh):
        compiled = (
            jax.jit(lambda *a: partitioned(kernel, RULE, BLOCKS)(*a)).lower(*arrays).compile()
        )
    out = compiled(*arrays)
    difference = float(np.abs(np.asarray(out) - np.asarray(kernel(*operands))).max())
    return difference, _collectives(compiled), list(out.addressable_shards[0].data.shape)


def _collectives(compiled) -> list[str]:
    names = r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
    return sorted(set(re.findall(names, compiled.as_text())))


def experts(mesh) -> dict[str, tuple[float, list[str]]]:
    """Experts' products with the contraction split, and their gradients with the inputs: rows are
    never split."""
    keys = jax.random.split(jax.random.key(1))
    sizes = jnp.asarray([128, 256], jnp.int32)
    # integers and powers of two: their sums are exact in any order, on any processor
    x, w = (
        jnp.round(4 * jax.random.normal(key, shape))
        for key, shape in zip(keys, ((400, 256), (2, 128, 256)), strict=True)
    )

    def quantize(x, block=(1, 128)):
        return jax.tree.leaves(quantize_blocks(x, block, scale="power_of_two"))

    forward = (*quantize(x), *quantize(w, (128, 128)), sizes)
    gradient = (*quantize(x, (128, 1)), *quantize(x[:, ::-1], (128, 1)), sizes)
    last, found = P(None, "tensor"), {}
    for name, product, rule, blocks, specs, operands in (
        (
            "grouped",
            grouped,
            GROUPED_RULE,
            BLOCKS,
            (last, last, P(None, None, "tensor"), P(None, None, "tensor"), P()),
            forward,
        ),
        ("gradient", outer, OUTER_RULE, {}, (last,) * 4 + (P(),), gradient),
    ):
        arrays = [
            jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(operands, specs, strict=True)
        ]
        whole = ("m", "g") if blocks else ("m", "b", "g")
        with jax.set_mesh(mesh):
            call = partial(partitioned, product, rule, blocks, whole)
            compiled = jax.jit(lambda *a, call=call: call()(*a)).lower(*arrays).compile()
        found[name] = (
            float(np.abs(compiled(*arrays) - product(*operands)).max()),
            _collectives(compiled),
        )
    return found


def gradient_of_shards(mesh) -> tuple[float, list[str], list[int]]:
    """dW = dY^T X of rows on data and fsdp, where the weight is on fsdp: each device of fsdp gets
    its part of the sum."""
    dy, x = (
        jnp.round(4 * jax.random.normal(key, (256, n)))
        for key, n in zip(jax.random.split(jax.random.key(4)), (128, 512), strict=True)
    )
    rows, wanted = P(("data", "fsdp")), NamedSharding(mesh, P("tensor", "fsdp"))

    def product(dy, x):
        return dy.T @ x

    placed = [jax.device_put(a, NamedSharding(mesh, rows)) for a in (dy, x)]
    with jax.set_mesh(mesh):
        call = jax.jit(
            lambda *a: partitioned(product, "m n, m k -> n k", {})(*a), out_shardings=wanted
        )
        compiled = call.lower(*placed).compile()
    out = compiled(*placed)
    # integers: exact in any order
    return (
        float(np.abs(out - product(dy, x)).max()),
        _collectives(compiled),
        list(out.addressable_shards[0].data.shape),
    )


def quantized(x, block=(1, 128)):
    """Values and scales."""
    return tuple(jax.tree.leaves(quantize_blocks(x, block)))


def quantizer(mesh) -> tuple[float, list[str]]:
    """Two results: the rows of the scales are those of the values, and their columns are blocks of
    128."""
    x = jax.random.normal(jax.random.key(2), (16, 64, 512))
    with jax.set_mesh(mesh):
        split = jax.device_put(x, NamedSharding(mesh, P(("data", "fsdp"), None, "tensor")))
        rule = "l m n -> l m n, l m b"
        compiled = (
            jax.jit(lambda x: partitioned(quantized, rule, {"b": ("n", 128)})(x))
            .lower(split)
            .compile()
        )
    pairs = zip(compiled(split), quantized(x), strict=True)
    gathered = re.findall(r"= (\S+?)\{\S* all-gather(?:-start)?\(", compiled.as_text())
    return float(max(np.abs(np.float32(a) - np.float32(b)).max() for a, b in pairs)), gathered


def quantizer_of_few_rows(mesh) -> list[str]:
    """Rows that are no whole blocks of 128 on a device: their groups lie along columns, so nothing
    is gathered."""
    x = jax.device_put(
        jax.random.normal(jax.random.key(3), (64, 512)), NamedSharding(mesh, P(("data", "fsdp")))
    )
    with jax.set_mesh(mesh):
        return _collectives(
            jax.jit(lambda x: partitioned(quantized, "m n -> m n, m b", QUANTIZED)(x))
            .lower(x)
            .compile()
        )


def prefill(mesh) -> tuple[float, list[str], list[int]]:
    """Prefill in decode's key order over a shared and an own block; the reference stands for the
    kernel."""

    def attend(query, caches, limits, *numbers):
        slots = [jnp.arange(cache.keys.shape[2]) for cache in caches]
        masks = [
            (slot >= first[..., None]) & (slot < last[..., None])
            for slot, (first, last) in zip(slots, limits, strict=True)
        ]
        blocks = [
            KeyBlock(cache.keys, cache.values, mask)
            for cache, mask in zip(caches, masks, strict=True)
        ]
        return attention_reference.attend(query[:, None], blocks, *numbers)[:, 0]

    decode_hopper.attend = attend
    keys = jax.random.split(jax.random.key(6), 5)
    shapes = (8, 5, 8, 32), *[(4, 4, 7, 32)] * 2, *[(8, 4, 5, 32)] * 2
    arrays = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]
    masks = jnp.ones((4, 1, 7), bool).at[1, :, 3:].set(False), jnp.tril(jnp.ones((1, 5, 5), bool))

    def run(attention, query, *held):
        return attention(
            query,
            [KeyBlock(*held[:2], masks[0]), KeyBlock(*held[2:], masks[1])],
            0.2,
            1.5,
            jnp.float32,
        )

    split = [P(("data", "fsdp"), None, "tensor"), *[P(("data", "fsdp"), "tensor")] * 4]
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, split, strict=True)
    ]
    with jax.set_mesh(mesh):
        compiled = (
            jax.jit(partial(run, attention_hopper.decode_order_attention)).lower(*placed).compile()
        )
    out = compiled(*placed)
    apart = np.abs(out - run(attention_reference.attend, *arrays)).max()
    return float(apart), _collectives(compiled), list(out.addressable_shards[0].data.shape)


def main() -> None:
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    keys = jax.random.split(jax.random.key(0))
    operands = (
        *quantized(jax.random.normal(keys[0], (64, 512))),
        *quantized(jax.random.normal(keys[1], (768, 512)), (128, 128)),
    )
    rows = P(("data", "fsdp"))
    layouts = {
        "columns": (rows, rows, P("tensor"), P("tensor")),
        "contraction": (
            P(("data", "fsdp"), "tensor"),
            P(("data", "fsdp"), "tensor"),
            P(None, "tensor"),
            P(None, "tensor"),
        ),
        "gathered_weight": (rows, rows, P("tensor", "fsdp"), P("tensor", "fsdp")),
        "broken_blocks": (P(), P(), P(("data", "fsdp", "tensor")), P()),
    }
    found = {name: collectives(mesh, specs, operands) for name, specs in layouts.items()}
    found |= experts(mesh) | {
        "quantizer": quantizer(mesh),
        "few_rows": quantizer_of_few_rows(mesh),
    }
    found["prefill"] = prefill(mesh)
    found["gradient_of_shards"] = gradient_of_shards(mesh)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
