"""Run by test_on_hopper.py: compiles products of formats that no kernel of ours multiplies for a GPU
that is not here, an H200 or a B200, and prints what the compiler leaves of them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial

import jax

from fp8rl_jax.config.formats import parse_format
from fp8rl_jax.precision import quantize
from pallas_kernels import blockwise_matmul
from pallas_kernels.backend import tracing_for
from pallas_kernels.check.compile import TARGET, activate_toolchain, sharding_on

BLACKWELL = (("major: 9", "major: 10"), ("core_count: 132", "core_count: 148"), ("H200", "B200"))
PAIRS = {
    "mxfp8": ("mxfp8", "mxfp8"),
    "nvfp4": ("nvfp4_rows", "nvfp4-16x16"),
    "e4m3": ("e4m3-1x128", "e4m3-128x128"),  # scales that are powers of two
}


def main(gpu: str) -> None:
    activate_toolchain()
    target = TARGET.read_text()
    if gpu == "B200":
        for there, here in BLACKWELL:
            target = target.replace(there, here)
    sharding = sharding_on(target)

    def operands(names):
        def make(key):
            made = jax.random.normal(key, (256, 1024))
            formats = (replace(parse_format(name), scale="power_of_two") for name in names)
            return tuple(quantize(made, fmt) for fmt in formats)

        shapes = jax.eval_shape(make, jax.random.key(0))
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes
        )

    found = {}
    with tracing_for(132):
        for name, pair in PAIRS.items():
            product = jax.jit(partial(blockwise_matmul, backend="reference"))
            text = product.lower(*operands(pair)).compile().as_text()
            found[name] = {"scaled": " scaled-dot(" in text, "float32": "f32[256,1024]" in text}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
