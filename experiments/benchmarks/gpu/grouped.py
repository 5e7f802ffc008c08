"""Part `grouped`: products of an expert layer, against a dense product of as many operations."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from experiments.benchmarks.gpu.jobs import Job, Setting
from experiments.benchmarks.gpu.timing import Work, compare
from pallas_kernels.check.cases import Case
from pallas_kernels.matmul import blockwise_matmul
from pallas_kernels.quantize import quantize_blocks

OURS, DENSE, RAGGED = "fp8 grouped", "fp8 dense", "XLA bf16, ragged"
FIRST = "8-groups"
MOST_RAGGED_GROUPS = 8  # XLA may take each row times every group


def jobs(setting: Setting) -> list[Job]:
    """The case of the targets first: 8 groups, 4096 rows in all."""
    sources = (__name__, "pallas_kernels.grouped_matmul.cases", "pallas_kernels.matmul")
    cases = sorted(setting.cases("grouped_matmul", "real"), key=lambda case: case.name != FIRST)
    return [
        Job(
            case.name,
            partial(product, setting, case),
            sources,
            "grouped_matmul",
            first=case.name == FIRST,
        )
        for case in cases
    ]


def product(setting: Setting, case: Case) -> dict[str, Any]:
    """Ours, and where it is a forward product its peers."""
    works = {OURS: Work(lambda *a: case.run(*a, backend=setting.backend), case.arguments)}
    x, w, _ = jax.eval_shape(case.arguments, jax.random.key(0))
    if len(w.shape) == 3:
        groups, n, k = w.shape
        rows = max(1, round(case.flops / (2 * n * k)))  # those that belong to a group
        out_dtype = jax.eval_shape(
            lambda *a: case.run(*a, backend="reference"), *_shapes(case)
        ).dtype
        dense = partial(blockwise_matmul, out_dtype=out_dtype, backend=setting.backend)
        works[DENSE] = Work(dense, partial(_dense_arguments, rows, n, k))
        if groups <= MOST_RAGGED_GROUPS:
            works[RAGGED] = Work(
                _ragged, partial(_ragged_arguments, case, x.shape[0], groups, n, k)
            )
    return compare(setting, works, (OURS,), case.flops, case.bytes)


def _shapes(case: Case) -> tuple:
    return jax.eval_shape(case.arguments, jax.random.key(0))


def _dense_arguments(m: int, n: int, k: int, key: jax.Array) -> tuple:
    keys = jax.random.split(key)
    x = quantize_blocks(jax.random.normal(keys[0], (m, k)), (1, 128), backend="reference")
    return x, quantize_blocks(jax.random.normal(keys[1], (n, k)), (128, 128), backend="reference")


def _ragged_arguments(case: Case, m: int, groups: int, n: int, k: int, key: jax.Array) -> tuple:
    keys = jax.random.split(key)
    x, w = (
        jax.random.normal(key, shape).astype(jnp.bfloat16)
        for key, shape in zip(keys, ((m, k), (groups, k, n)), strict=True)
    )
    return x, w, case.arguments(key)[-1]


def _ragged(x, w, sizes):
    return lax.ragged_dot(x, w, sizes, preferred_element_type=jnp.bfloat16)
