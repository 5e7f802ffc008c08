"""Prints how kernels are split over eight devices: differences from one device, and the collectives that XLA added."""

from __future__ import annotations

import json
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.grouped_matmul import reference as grouped_reference
from pallas_kernels.matmul import reference
from pallas_kernels.partition import partitioned
from pallas_kernels.quantize import quantize_blocks

RULE, BLOCKS = "m k, m b, n k, c b -> m n", {"b": ("k", 128), "c": ("n", 128)}


GROUPED_RULE = "m k, m b, g n k, g c b, g -> m n"
OUTER_RULE = "m n, b n, m k, b k, g -> g n k"


def grouped(*operands):
    return grouped_reference.matmul(*operands, (128, 128), jnp.float32)


def outer(*operands):
    return grouped_reference.outer_products(*operands, 128)


def kernel(*operands):
    """Stands for a kernel that XLA cannot look into: what it cannot split in a callback, it gathers."""
    return reference.matmul(*operands, (128, 128), jnp.float32)


def collectives(mesh, specs, operands) -> tuple[float, list[str], list[int]]:
    arrays = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(operands, specs, strict=True)]
    with jax.set_mesh(mesh):
        compiled = jax.jit(lambda *a: partitioned(kernel, RULE, BLOCKS)(*a)).lower(*arrays).compile()
    out = compiled(*arrays)
    difference = float(np.abs(np.asarray(out) - np.asarray(kernel(*operands))).max())
    return difference, _collectives(compiled), list(out.addressable_shards[0].data.shape)


def _collectives(compiled) -> list[str]:
    names = r"\b(all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\("
    return sorted(set(re.findall(names, compiled.as_text())))


def experts(mesh) -> dict[str, tuple[float, list[str]]]:
    """Experts' products with the contraction split, and their gradients with the inputs: rows are never split."""
    keys = jax.random.split(jax.random.key(1))
    sizes = jnp.asarray([128, 256], jnp.int32)
    x, w = jax.random.normal(keys[0], (400, 256)), jax.random.normal(keys[1], (2, 128, 256))
    forward = (*quantize_blocks(x), *quantize_blocks(w, (128, 128)), sizes)
    gradient = (*quantize_blocks(x, (128, 1)), *quantize_blocks(x[:, ::-1], (128, 1)), sizes)
    last, found = P(None, "tensor"), {}
    for name, product, rule, blocks, specs, operands in (
        ("grouped", grouped, GROUPED_RULE, BLOCKS, (last, last, P(None, None, "tensor"), P(None, None, "tensor"), P()), forward),
        ("gradient", outer, OUTER_RULE, {}, (last,) * 4 + (P(),), gradient),
    ):
        arrays = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(operands, specs, strict=True)]
        whole = ("m", "g") if blocks else ("m", "b", "g")
        with jax.set_mesh(mesh):
            call = partial(partitioned, product, rule, blocks, whole)
            compiled = jax.jit(lambda *a, call=call: call()(*a)).lower(*arrays).compile()
        found[name] = float(np.abs(compiled(*arrays) - product(*operands)).max()), _collectives(compiled)
    return found


def quantizer(mesh) -> tuple[float, list[str]]:
    """Two results: the rows of the scales are those of the values, and their columns are blocks of 128."""
    x = jax.random.normal(jax.random.key(2), (16, 64, 512))
    with jax.set_mesh(mesh):
        split = jax.device_put(x, NamedSharding(mesh, P(("data", "fsdp"), None, "tensor")))
        rule = "l m n -> l m n, l m b"
        compiled = jax.jit(lambda x: partitioned(quantize_blocks, rule, {"b": ("n", 128)})(x)).lower(split).compile()
    pairs = zip(compiled(split), quantize_blocks(x), strict=True)
    gathered = re.findall(r"= (\S+?)\{\S* all-gather(?:-start)?\(", compiled.as_text())
    return float(max(np.abs(np.float32(a) - np.float32(b)).max() for a, b in pairs)), gathered


def main() -> None:
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    keys = jax.random.split(jax.random.key(0))
    operands = (
        *quantize_blocks(jax.random.normal(keys[0], (64, 512))),
        *quantize_blocks(jax.random.normal(keys[1], (768, 512)), (128, 128)),
    )
    rows = P(("data", "fsdp"))
    layouts = {
        "columns": (rows, rows, P("tensor"), P("tensor")),
        "contraction": (P(("data", "fsdp"), "tensor"), P(("data", "fsdp"), "tensor"), P(None, "tensor"), P(None, "tensor")),
        "gathered_weight": (rows, rows, P("tensor", "fsdp"), P("tensor", "fsdp")),
        "broken_blocks": (P(), P(), P(("data", "fsdp", "tensor")), P()),
    }
    found = {name: collectives(mesh, specs, operands) for name, specs in layouts.items()}
    print(json.dumps(found | experts(mesh) | {"quantizer": quantizer(mesh)}))


if __name__ == "__main__":
    main()
