"""Runs Hopper kernels on the GPU that JAX has, and judges what they give: `python -m
pallas_kernels.check.device`.

It prints a line before each case and a JSON line after it, each case run three times: a race shows
as other bits. A kernel may hang or crash, so this is a process of its own, to be killed by whoever
started it. With --interpret the interpreter stands for the GPU, and adds as its tensor cores do
(tensor_cores.py): a rehearsal.

How far a result may be from the right one on a GPU: FP8 tensor cores of Hopper keep 13 fraction
bits of a sum and of each addend. For normal data, which the cases have, the largest of 32 addends
is some 12 times the mean, and the cuts of a block of 128 are a random walk whose fifth deviation is
about 2^-11 of the block's sum of magnitudes (`tensor_cores.errors` finds 2^-12.5). The kernels add
blocks in float32, so a result may be off by 2^-11 of its own sum of magnitudes, and by the case's
tolerance of the largest result, whatever k is. Sums of one sign are further off, up to 2^-8 where
magnitudes are far apart, and always too small: no case has them. A block that is missing or was
overwritten is further off. In attention a score is
such a sum, and moves its weight by a part of 2^-11 for each unit of its magnitudes, of which the
cases have up to four: 2^-9 of the largest result.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import sys
from contextlib import ExitStack
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.backend import Backend, BackendError, hopper_sms, tracing_for
from pallas_kernels.check.cases import OPERATIONS, Case, Shape, bits_apart, cases_of

RUNS = 3  # of the same input
FIRST = {
    "attention": ("causal",),
    "cache_write": ("decode",),
    "decode_attention": ("pages", "bf16"),
    "grouped_matmul": ("groups-of-any-size", "gradient"),
    "invariant": ("several-tiles", "few-rows", "groups", "sum-70x520", "rows-5-of-140"),
    "matmul": ("several-tiles", "few-rows", "split"),
    "quantize": ("rows", "tokens", "weight", "both", "regrouped", "swiglu", "rms-norm"),
}
"""Of each operation, small cases that every kernel has a part in."""
THEN = {
    "attention": ("bf16", "as-decoded", "as-decoded-bf16"),
    "cache_write": ("bfloat16", "bfloat16-head-dim-128", "head-dim-96"),
    "decode_attention": (
        *("ring-wraps", "head-dim-96", "head-dim-96-bf16"),
        *("same-bits", "same-bits-bf16"),
    ),
    "grouped_matmul": (),
    "invariant": ("sums-9-of-150",),
    "matmul": ("one-row", "weight-gradient", "rows-5-of-140", "rows-136-of-264"),
    "quantize": (),
}
"""More for a machine on which nobody has tried them: every head size, and what a row's bits must
not depend on."""
SHORT_SUM = 2.0**-11
SHORT_SCORE = 2.0**-9
PRODUCTS = ("matmul", "grouped_matmul")
MOST_NUMBERS = 2**24
"""Of a weight that numpy multiplies in float64 in little time."""


def first_cases(operation: str) -> list[Case]:
    """List the small cases by which a machine is tried."""
    known = {case.name: case for case in cases_of(operation, "small")}
    found = [known[name] for name in (*FIRST[operation], *THEN[operation])]
    return [*found, _rows_of_a_group()] if operation == "grouped_matmul" else found


def _rows_of_a_group() -> Case:
    """What the first rows of a grouped product differ by from themselves alone: not a bit."""
    cases = import_module("pallas_kernels.grouped_matmul.cases")
    few, sizes, n, k = 7, (7, 130), 136, 260

    def run(x, w, sizes, backend):
        among = cases.grouped_matmul(x, w, sizes, out_dtype=jnp.float32, backend=backend)
        own, alone = jax.tree.map(lambda a: a[:few], x), jnp.asarray((few, 0), jnp.int32)
        alone = cases.grouped_matmul(own, w, alone, out_dtype=jnp.float32, backend=backend)
        return bits_apart(alone, among[:few])

    return Case(
        name=f"rows-{few}-of-{sum(sizes)}",
        arguments=lambda key: cases.forward_arguments(key, sizes, sum(sizes), n, k),
        run=run,
        expected=lambda *_: np.zeros((few, n)),
    )


def cases_of_model(operation: str, model: Shape) -> list[Case]:
    """Make small cases at a model's sizes; none where it has no use for the operation."""
    cases = import_module(f"pallas_kernels.{operation}.cases")
    heads = model.heads, model.kv_heads, model.head_dim
    match operation:
        case "attention":
            return [cases.case("model", cases.Shape(*heads, (70, 33), 70))]
        case "cache_write":
            shape = (5, model.kv_heads, 16, model.head_dim)
            return [cases.case("model", 12, shape, model.heads, query_scale=True)]
        case "decode_attention":
            cache = cases.Cache((70, 600, 65), 64, 64, 10)
            return [
                cases.case("model", *heads, cache),
                cases.case("model-bf16", *heads, cache, dtype=cases.BF16),
                cases.alike("model-same-bits", cache, 1, cases.E4M3, *heads),
            ]
        case "grouped_matmul":
            if not model.experts or model.intermediate * model.hidden > MOST_NUMBERS:
                return []
            return [cases.forward("model", (7, 64), model.intermediate, model.hidden)]
        case "invariant":
            n, k = model.linears["kv"]
            return [cases.same_rows("model-rows", 5, 140, k, cases.invariant.dot, n=n)]
        case "matmul":
            product = [cases.case(24, *model.linears["kv"], "model")]
            small = model.kv_heads * model.head_dim * model.hidden <= MOST_NUMBERS
            return [*(product if small else []), cases.same_rows(5, 140, *model.linears["down"])]
        case "quantize":
            return [
                cases.case("model-rows", (64, model.hidden)),
                cases.rms_norm("model-rms-norm", (64, model.hidden)),
                cases.swiglu("model-swiglu", (64, model.intermediate)),
            ]
    raise ValueError(f"no operation {operation!r}")


def against_expected(operation: str, case: Case, backend: Backend = "hopper") -> dict[str, Any]:
    """Run a small case, against its expected values in float64.

    Returns:
        As `verdict`, and "runs_equal": whether it was the same bits each time.
    """
    arrays = jax.jit(case.arguments)(jax.random.key(0))
    got, equal = run_often(case, arrays, backend)
    assert case.expected is not None, "small cases have expected values"
    want, sums = case.expected(*jax.tree.map(np.asarray, arrays)), None
    if sums_of_magnitudes(operation, case):
        sums = case.expected(*jax.tree.map(np.asarray, magnitudes(arrays)))
    return with_bits(verdict(operation, case, got, want, sums), equal)


def run_often(case: Case, arrays: tuple, backend: Backend) -> tuple[Any, bool]:
    """Compute the result, and whether it was the same bits each time."""
    run = jax.jit(lambda *a: case.run(*a, backend=backend))
    first = jax.block_until_ready(run(*arrays))
    return first, all([bool(same_bits(first, run(*arrays))) for _ in range(RUNS - 1)])


def with_bits(judged: dict[str, Any], equal: bool) -> dict[str, Any]:
    """Add to a verdict whether the bits were equal each time, which it takes to pass."""
    return judged | {"runs_equal": equal, "passed": judged["passed"] and equal}


def sums_of_magnitudes(operation: str, case: Case) -> bool:
    """Whether the case's bound needs the result of its arguments' magnitudes."""
    return operation in PRODUCTS and case.instruction == "QGMMA"


@jax.jit
def magnitudes(arrays: tuple) -> tuple:
    """The arguments, every float without its sign."""
    return jax.tree.map(
        lambda x: (
            jnp.abs(x.astype(jnp.float32)).astype(x.dtype)
            if jnp.issubdtype(x.dtype, jnp.floating)
            else x
        ),
        arrays,
    )


def verdict(operation: str, case: Case, got: Any, want: Any, sums: Any | None) -> dict[str, Any]:
    """Compare on whichever side the arrays are.

    Args:
        got, want: of the same tree of arrays.
        sums: the right result of the arguments' magnitudes, where `sums_of_magnitudes` asks for it.

    Returns:
        "difference" as a part of the largest magnitude, "of_allowed" (above 1: wrong), "passed".
    """
    extra = SHORT_SCORE if case.instruction == "QGMMA" and operation not in PRODUCTS else 0.0
    leaves = jax.tree.leaves(got)
    sums = jax.tree.leaves(sums) if sums is not None else [None] * len(leaves)
    judged = [
        _leaf(*three, case.tolerance + extra)
        for three in zip(leaves, jax.tree.leaves(want), sums, strict=True)
    ]
    difference, of_allowed = (max(column) for column in zip(*judged, strict=True))
    return {"difference": difference, "of_allowed": of_allowed, "passed": bool(of_allowed <= 1)}


def _leaf(got, want, sums, tolerance: float) -> tuple[float, float]:
    if got.shape != want.shape:
        raise ValueError(f"shape {got.shape}, expected {want.shape}")
    on_device = isinstance(want, jax.Array)
    compare, dtype = (_compare_on_device, jnp.float32) if on_device else (_compare, np.float64)
    xp = jnp if on_device else np
    have, want = xp.asarray(got).astype(dtype), want.astype(dtype)
    sums = xp.zeros(()) if sums is None else sums.astype(dtype)
    difference, of_allowed = compare(have, want, sums, tolerance)
    return float(difference), float(of_allowed)


def _compare(have, want, sums, tolerance, xp=np):
    same = (have == want) | (xp.isnan(have) & xp.isnan(want))
    scale = xp.max(xp.where(xp.isfinite(want), xp.abs(want), 0.0), initial=0.0)
    apart = xp.where(same, 0.0, xp.abs(have - want))
    apart = xp.where(xp.isfinite(apart), apart, xp.inf)
    allowed = SHORT_SUM * sums + tolerance * scale
    parts = xp.where(apart == 0, 0.0, apart / xp.maximum(allowed, 1e-37))
    return xp.max(apart, initial=0.0) / xp.where(scale > 0, scale, 1.0), xp.max(parts, initial=0.0)


@jax.jit
def _compare_on_device(have, want, sums, tolerance):
    return _compare(have, want, sums, tolerance, jnp)


@jax.jit
def same_bits(one: Any, other: Any) -> jax.Array:
    """Whether two trees of arrays are equal bit for bit, NaN included."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return jnp.all(jnp.stack([jnp.all(_bits(a) == _bits(b)) for a, b in pairs]))


def _bits(x):
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.check.device", description=__doc__.splitlines()[0]
    )
    parser.add_argument("operation", choices=OPERATIONS)
    parser.add_argument("--model", help="small cases at these sizes instead: a Shape, as JSON")
    parser.add_argument("--seconds", type=float, help="ends by itself after so long")
    parser.add_argument("--interpret", action="store_true", help="without a GPU")
    arguments = parser.parse_args()
    if arguments.seconds:  # whoever started it may be gone
        faulthandler.dump_traceback_later(arguments.seconds, exit=True)
    with ExitStack() as stack:
        if arguments.interpret:
            from jax.experimental.pallas import mosaic_gpu as plgpu

            from pallas_kernels.check import interpret, tensor_cores

            jax.config.update("jax_platforms", "cpu")
            interpret.prepare()
            tensor_cores.replace_products(interpret.in_float64)
            stack.enter_context(tracing_for(interpret.SMS))
            stack.enter_context(plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()))
        elif hopper_sms() is None:
            sys.exit(f"no Hopper GPU: JAX runs on {jax.devices()[0].device_kind!r}")
        model = Shape(**json.loads(arguments.model)) if arguments.model else None
        operation = arguments.operation
        cases = cases_of_model(operation, model) if model else first_cases(operation)
        for case in cases:
            print(f"# {case.name}", flush=True)
            found = _found(operation, case, of_model=model is not None)
            print(json.dumps({"case": case.name} | found), flush=True)
            if "raised" in found:  # a GPU may be lost to this process then
                break


def _found(operation: str, case: Case, of_model: bool) -> dict[str, Any]:
    try:
        return against_expected(operation, case)
    except BackendError as error:
        # "auto" takes the reference for sizes that the kernel does not serve
        return {"unserved" if of_model else "raised": str(error)}
    except Exception as error:  # whatever a kernel, a compiler or a driver objects to is the result
        return {"raised": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main()
