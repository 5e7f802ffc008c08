"""Prints how kernels are split over eight devices: differences from one device, and the collectives that XLA added."""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.matmul import reference
from pallas_kernels.partition import partitioned
from pallas_kernels.quantize import quantize_blocks

RULE, BLOCKS = "m k, m b, n k, c b -> m n", {"b": ("k", 128), "c": ("n", 128)}


def kernel(*operands):
    """Stands for a kernel that XLA cannot look into: what it cannot split in a callback, it gathers."""
    return reference.matmul(*operands, (128, 128), jnp.float32)


def collectives(mesh, specs, operands) -> tuple[float, list[str], list[int]]:
    arrays = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(operands, specs, strict=True)]
    with jax.set_mesh(mesh):
        compiled = jax.jit(lambda *a: partitioned(kernel, RULE, BLOCKS)(*a)).lower(*arrays).compile()
    out, text = compiled(*arrays), compiled.as_text()
    found = sorted(set(re.findall(r"\b(all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\(", text)))
    difference = float(np.abs(np.asarray(out) - np.asarray(kernel(*operands))).max())
    return difference, found, list(out.addressable_shards[0].data.shape)


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
    print(json.dumps({name: collectives(mesh, specs, operands) for name, specs in layouts.items()}))


if __name__ == "__main__":
    main()
