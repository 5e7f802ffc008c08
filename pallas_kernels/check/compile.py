"""Compiles Hopper kernels to machine code on a machine without a GPU: `python -m
pallas_kernels.check.compile`.

It prints a JSON line for each case: the assembler's target and version, spilled bytes, shared
memory, threads and their registers, the tensor core instructions. What it cannot see: races, hangs,
speed.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

import jax
from jax._src.lib.mlir import ir
from jax.experimental import topologies
from jax.experimental.mosaic.gpu import layout_inference

from pallas_kernels import mosaic
from pallas_kernels.backend import tracing_for
from pallas_kernels.check.cases import Case, parse_cases

TARGET = Path(__file__).with_name("h200.txtpb")
SMS = 132


VARIABLE = "FP8RL_CUDA_TOOLCHAIN"
FOLDER = Path(__file__).resolve().parents[2] / ".cache" / "cuda"
PACKAGES = Path(__file__).with_name("toolchain.txt")


def missing_toolchain() -> str:
    """Say why nothing can be compiled here; empty where it can."""
    if _folder() is None:
        return (
            f"nothing to compile for Hopper with: make toolchain, or {VARIABLE} naming a "
            f"folder of what {PACKAGES.name} lists"
        )
    return ""


def activate_toolchain() -> None:
    """Start this program anew where it does not have the packages on its path yet.

    JAX looks for them when it is imported.
    """
    folder = _folder()
    if folder is None:
        raise SystemExit(missing_toolchain())
    assembler = str(folder / "nvidia" / "cu13" / "bin")
    path = os.environ["PATH"].split(os.pathsep)
    if path[0] == assembler:
        return
    os.environ["PATH"] = os.pathsep.join([assembler, *path])  # Mosaic runs the first ptxas on it
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [*filter(None, [os.environ.get("PYTHONPATH")]), str(folder)]
    )
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _folder() -> Path | None:
    named = os.environ.get(VARIABLE)
    for folder in [Path(named)] if named else [FOLDER]:
        if (folder / "jax_plugins" / "xla_cuda13").is_dir():
            return folder
    spec = None if named else importlib.util.find_spec("jax_plugins")
    places = spec.submodule_search_locations if spec else None
    for place in places or ():
        if (Path(place) / "xla_cuda13").is_dir():
            return Path(place).parent
    return None


class CompilerOutput:
    """What the compiler writes to standard output, kept from the rest of the process.

    The files that it can write instead (MOSAIC_GPU_DUMP_TO) hold the program after every pass, too,
    and take longer than the compilation.
    """

    def __init__(self):
        self.output = os.fdopen(os.dup(1), "w")
        self.file = tempfile.TemporaryFile()
        os.dup2(self.file.fileno(), 1)

    def take(self) -> str:
        """All since the last call."""
        ctypes.CDLL(None).fflush(None)
        size = os.fstat(1).st_size
        text = os.pread(self.file.fileno(), size, 0).decode()
        os.ftruncate(1, 0)
        os.lseek(1, 0, os.SEEK_SET)
        return text


class LayoutInference:
    """Mosaic's inference of layouts, watched for shared memory that it swizzles without being asked
    to: what is written into a part of such memory can go to wrong places (jax 0.11.2), which the
    interpreter, that knows no swizzles, does not show."""

    def __init__(self):
        self.swizzled: set[str] = set()
        self._infer = layout_inference.infer_layout
        layout_inference.infer_layout = self._watched  # ty: ignore[invalid-assignment]

    def take(self) -> list[str]:
        """Types of memory that were seen since the last call."""
        found, self.swizzled = sorted(self.swizzled), set()
        return found

    def _watched(self, module, *args, **options):
        result = self._infer(module, *args, **options)
        module.operation.walk(self._look)
        return result

    def _look(self, operation):
        if operation.name == "mosaic_gpu.slice_smem" and "out_transforms" in operation.attributes:
            swizzled = "swizzle" in str(operation.attributes["out_transforms"])
            users = {use.owner.name for use in operation.results[0].uses}
            if swizzled and "mosaic_gpu.with_transforms" not in users:
                self.swizzled.add(str(operation.results[0].type).split(", #gpu")[0] + ">")
        return ir.WalkResult.ADVANCE


def sharding_on(target: str) -> jax.sharding.NamedSharding:
    """Place arrays on one GPU that is not here, so that what takes them is compiled for it.

    Args:
        target: its description, a GpuTargetConfigProto in text form.

    Raises:
        RuntimeError, NotImplementedError: JAX has no CUDA compiler here.
    """
    topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology="1x1x1")
    mesh = topologies.make_mesh(topology, (1,), ("device",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def compile_case(
    case: Case,
    sharding: jax.sharding.Sharding,
    compiler: CompilerOutput,
    inference: LayoutInference,
) -> dict:
    """Compile all kernels of a case, and report what came of them or what was raised."""
    # disassembled where an instruction is asked for: it takes an eighth of the time
    os.environ["MOSAIC_GPU_DUMP_SASS_CTRL"] = "1" if case.instruction else ""
    shapes = jax.eval_shape(case.arguments, jax.random.key(0))
    shapes = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), shapes
    )
    compiler.take()
    inference.take()
    try:
        with tracing_for(SMS):
            jax.jit(lambda *a: case.run(*a, backend="hopper")).lower(*shapes).compile()
    except Exception as error:  # whatever the compiler objects to is the result
        return {"case": case.name, "raised": f"{type(error).__name__}: {error}"}
    return {
        "case": case.name,
        "kernels": kernels(compiler.take()),
        "swizzled": inference.take(),
    }


def kernels(text: str) -> list[dict]:
    """Parse the compiler's output into one entry a kernel.

    Mosaic names a kernel's resources when it lowers it; then follow PTX, the assembler's words,
    machine code.
    """
    resources = re.findall(r"^Resources\(smem_scratch_bytes=(\d+)", text, re.M)
    parts = re.split(r"^// Generated by LLVM NVPTX Back-End$", text, flags=re.M)[1:]
    return [_kernel(part, int(smem)) for part, smem in zip(parts, resources, strict=True)]


def _kernel(text: str, smem: int) -> dict:
    return {
        "target": re.findall(r"^\.target (\w+)", text, re.M)[0],
        "isa": re.findall(r"^\.version ([\d.]+)", text, re.M)[0],
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", text))),
        "smem": smem,
        "threads": int(re.findall(r"^\.(?:max|req)ntid (\d+)", text, re.M)[0]),
        "registers": int(re.findall(r"Used (\d+) registers", text)[0]),
        "products": dict(Counter(re.findall(r"\b(?:QGMMA|HGMMA|HMMA)[.\w]*", text))),
        "wgmma": sorted(set(re.findall(r"wgmma\.mma_async[.\w]*", text))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.check.compile", description=__doc__.splitlines()[0]
    )
    _, cases = parse_cases(parser, "all")
    activate_toolchain()
    mosaic.name_every_kernel()
    for part in ("PTX", "PTXAS", "RESOURCES"):
        os.environ[f"MOSAIC_GPU_DUMP_{part}"] = "1"
    compiler, inference = CompilerOutput(), LayoutInference()
    sharding = sharding_on(TARGET.read_text())
    for case in cases:
        print(
            json.dumps(compile_case(case, sharding, compiler, inference)),
            file=compiler.output,
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
