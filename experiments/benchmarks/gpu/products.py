"""Part `matmul`: blockwise products against bfloat16, per-tensor FP8, and the same by torch and by Triton."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from experiments.benchmarks.gpu.compare import Job, compare
from experiments.benchmarks.gpu.setting import Setting
from experiments.benchmarks.gpu.timing import Clock, Work
from experiments.benchmarks.gpu.torch_peer import TorchPeer
from pallas_kernels.check.cases import Case
from pallas_kernels.matmul import blockwise_matmul
from pallas_kernels.quantize import quantize_blocks

OURS, WITH_QUANTIZATION, BF16, PER_TENSOR = "fp8", "fp8, x quantized in it", "XLA bf16", "cuBLASLt fp8, per tensor"
# XLA's own Triton products would be tried first (what compiles to which: per-tensor scales as scalars, see FP8 rewriting in XLA)
CUBLASLT = {"xla_gpu_enable_triton_gemm": False}
FIRST = ((4096, 7168, 16384), (4096, 4096, 4096), (4096, 12288, 4096), (4096, 4096, 12288), (4096, 1024, 4096))


def jobs(setting: Setting, stack: ExitStack) -> list[Job]:
    """Every real case of the operation, those first that the targets are about."""
    clock, peer = Clock(setting.tiny), stack.enter_context(TorchPeer(setting.torch_python))
    cases = sorted(setting.cases("matmul", "real"), key=_rank)
    return [(case.name, partial(product, setting, clock, peer, case)) for case in cases]


def _rank(case: Case) -> int:
    sizes = shape_of(case)
    if sizes in FIRST and activations(case):
        return FIRST.index(sizes)
    return len(FIRST) + (sizes[0] > 128)


def shape_of(case: Case) -> tuple[int, int, int]:
    """(m, n, k)."""
    x, _, w, _ = jax.eval_shape(case.arguments, jax.random.key(0))
    return len(x), *w.shape


def activations(case: Case) -> bool:
    """Whether it is a forward product: e4m3 by a weight in 128x128 blocks."""
    x, _, w, w_scales = jax.eval_shape(case.arguments, jax.random.key(0))
    return x.dtype == w.dtype == jnp.float8_e4m3fn and len(w_scales) == -(-len(w) // 128)


def product(setting: Setting, clock: Clock, peer: TorchPeer, case: Case) -> dict[str, Any]:
    m, n, k = shape_of(case)
    out_dtype = jax.eval_shape(lambda *a: case.run(*a, backend="reference"), *_shapes(case)).dtype
    works = {OURS: Work(partial(_ours, case, setting), case.arguments)}
    works[BF16] = Work(partial(dot, out_dtype), partial(wide, m, n, k))
    peers, absent = {}, {}
    if activations(case):
        works[WITH_QUANTIZATION] = Work(partial(_quantized_first, setting, out_dtype), partial(_unquantized, case, m, k))
        works[PER_TENSOR] = Work(partial(per_tensor, out_dtype), partial(_scaled, m, n, k), {} if setting.tiny else CUBLASLT)
        peers, absent = peer.sides(m, n, k)
    found = compare(setting, clock, works, (OURS, WITH_QUANTIZATION), case.flops, case.bytes, peers, absent)
    return found | {"shape": [m, n, k], "forward": activations(case), "weight_bytes": n * k}


def _shapes(case: Case) -> tuple:
    return jax.eval_shape(case.arguments, jax.random.key(0))


def _ours(case: Case, setting: Setting, *arrays):
    return case.run(*arrays, backend=setting.backend)


def _quantized_first(setting: Setting, out_dtype, x, w, w_scales):
    values, scales = quantize_blocks(x, (1, 128), backend="reference" if setting.tiny else "auto")
    return blockwise_matmul(values, scales, w, w_scales, out_dtype=out_dtype, backend=setting.backend)


def _unquantized(case: Case, m: int, k: int, key: jax.Array) -> tuple:
    """Activations in bfloat16; the weight is quantized once for many products, and stays so."""
    return jax.random.normal(jax.random.fold_in(key, 1), (m, k)).astype(jnp.bfloat16), *case.arguments(key)[2:]


def wide(m: int, n: int, k: int, key: jax.Array) -> tuple:
    keys = jax.random.split(key)
    return tuple(jax.random.normal(key, shape).astype(jnp.bfloat16) for key, shape in zip(keys, ((m, k), (n, k)), strict=True))


def dot(out_dtype, x, w):
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=out_dtype)


def _scaled(m: int, n: int, k: int, key: jax.Array) -> tuple:
    """e4m3 with a scale a tensor."""
    x, w = (side.astype(jnp.float32) for side in wide(m, n, k, key))
    scales = [jnp.max(jnp.abs(side)) / 448 for side in (x, w)]
    return *(jnp.clip(s / c, -448, 448).astype(jnp.float8_e4m3fn) for s, c in zip((x, w), scales, strict=True)), *scales


def per_tensor(out_dtype, x, w, x_scale, w_scale):
    """The pattern that XLA turns into one FP8 product: convert, scale, multiply, where scales are scalars."""
    x, w = (side.astype(out_dtype) * scale.astype(out_dtype) for side, scale in ((x, x_scale), (w, w_scale)))
    return dot(out_dtype, x, w)
