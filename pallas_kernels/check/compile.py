"""Compiles Hopper kernels to machine code on a machine without a GPU: `python -m pallas_kernels.check.compile`.

It prints a JSON line for each case: the assembler's target and version, spilled bytes, shared memory, the tensor core
instructions. What it cannot see: races, hangs, speed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

import jax
from jax.experimental import topologies

from pallas_kernels.check import toolchain
from pallas_kernels.check.cases import Case, parse_cases
from pallas_kernels.target import tracing_for

TARGET = Path(__file__).with_name("h200.txtpb")
SMS = 132


def compile_case(case: Case, sharding: jax.sharding.Sharding, dump: Path) -> dict:
    """What the compiler made of all kernels of a case; or what it raised."""
    shapes = jax.eval_shape(case.arguments, jax.random.key(0))
    shapes = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding) for s in shapes]
    for file in dump.iterdir():
        file.unlink()
    try:
        with tracing_for(SMS):
            jax.jit(lambda *a: case.run(*a, backend="hopper")).lower(*shapes).compile()
    except Exception as error:  # whatever the compiler objects to is the result
        return {"case": case.name, "raised": f"{type(error).__name__}: {error}"}
    return {"case": case.name, "kernels": [_kernel(file) for file in sorted(dump.glob("*.ptx"))]}


def _kernel(ptx: Path) -> dict:
    text, said = ptx.read_text(), ptx.with_suffix(".ptxas").read_text()
    machine = ptx.with_suffix(".sass_ctrl")
    products = re.findall(r"\b(?:QGMMA|HGMMA|HMMA)[.\w]*", machine.read_text()) if machine.exists() else []
    return {
        "kernel": ptx.stem,
        "target": re.search(r"^\.target (\w+)", text, re.M)[1],
        "isa": re.search(r"^\.version ([\d.]+)", text, re.M)[1],
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", said))),
        "smem": int(re.search(r"smem_scratch_bytes=(\d+)", ptx.with_suffix(".resources.txt").read_text())[1]),
        "products": dict(Counter(products)),
        "wgmma": sorted(set(re.findall(r"wgmma\.mma_async[.\w]*", text))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.check.compile", description=__doc__.splitlines()[0])
    _, cases = parse_cases(parser, "all")
    toolchain.activate()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        topology = topologies.get_topology_desc(platform="cuda", target_config=TARGET.read_text(), topology="1x1x1")
        mesh = topologies.make_mesh(topology, (1,), ("device",))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        for case in cases:
            print(json.dumps(compile_case(case, sharding, Path(folder))), flush=True)


if __name__ == "__main__":
    sys.exit(main())
