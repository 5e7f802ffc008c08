"""Runs Hopper kernels on a CPU, in the interpreter of Pallas, and looks for races: `python -m
pallas_kernels.check.interpret`.

It prints a line before each case and a JSON line after it. A kernel that waits for what never comes
hangs, so this is a process of its own, to be killed by whoever started it. What it cannot see:
asynchronous wgmma, swizzles, registers, FP8 accumulators, what a copy writes beyond a row (which
`mosaic.copy_smem_to_gmem` refuses).
"""

from __future__ import annotations

import argparse
import json
import os
import sys

import jax
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.backend import tracing_for
from pallas_kernels.check.cases import Case, difference, parse_cases

SMS = 2  # blocks that are played one after the other
# the interpreter's own program is compiled, which takes longer than to run it
UNOPTIMIZED = (
    "--xla_backend_optimization_level=0 "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)
_product = np.matmul


def interpret(case: Case) -> dict:
    """Run a case in the interpreter: its difference, and whether there was a race."""
    arrays = case.arguments(jax.random.key(0))
    try:
        with (
            tracing_for(SMS),
            plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)),
        ):
            got = jax.block_until_ready(jax.jit(lambda *a: case.run(*a, backend="hopper"))(*arrays))
        races = bool(interpreter.get_races().races_found)
    except Exception as error:  # whatever the interpreter objects to is the result
        return {"case": case.name, "raised": f"{type(error).__name__}: {error}"}
    finally:
        interpreter.reset_gpu_interpret_mode_state()
    assert case.expected is not None, "small cases have expected values"
    expected = case.expected(*jax.tree.map(np.asarray, arrays))
    return {"case": case.name, "difference": difference(got, expected), "races": races}


def in_float64(left: np.ndarray, right: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Multiply in float64: the product that stands for a wgmma.

    In BLAS's float32 product a row's bits depend on its place and on the number of columns, and on
    a GPU not. The sums here are short enough to be exact.
    """
    return _product(left.astype(np.float64), right.astype(np.float64)).astype(dtype)


def prepare() -> None:
    """Set up this process to interpret kernels, before it runs anything."""
    # the threads that play warpgroups wait for each other inside of XLA's pool: with few of them,
    # or where an operation is split over them, they can starve
    os.environ.setdefault("PJRT_NPROC", "16")
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false {UNOPTIMIZED}"
    )
    np.matmul = in_float64  # ty: ignore[invalid-assignment]  # the interpreter's wgmma calls it


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.check.interpret", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--without",
        help="a function of pallas_kernels.mosaic that does nothing: a bug that must be seen",
    )
    arguments, cases = parse_cases(parser, "small")
    prepare()
    if arguments.without:
        setattr(mosaic, arguments.without, lambda *_, **__: None)
    for case in cases:
        print(f"# {case.name}", flush=True)
        print(json.dumps(interpret(case)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
