"""Part `matmul`: blockwise products against bfloat16, per-tensor FP8, and, where asked for, the
same by torch and by Triton."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from experiments.benchmarks.gpu.jobs import Job, Setting
from experiments.benchmarks.gpu.timing import Work, compare, reason_of
from experiments.benchmarks.peer import Peer, PeerSpec
from experiments.benchmarks.rounds import Side
from fp8rl_jax.errors import UserError
from pallas_kernels.check.cases import Case
from pallas_kernels.matmul import blockwise_matmul
from pallas_kernels.quantize import quantize_blocks

OURS, WITH_QUANTIZATION, BF16, PER_TENSOR = (
    "fp8",
    "fp8, x quantized in it",
    "XLA bf16",
    "cuBLASLt fp8, per tensor",
)
# XLA's own Triton products would be tried first (what compiles to which: per-tensor scales as
# scalars, see FP8 rewriting in XLA)
CUBLASLT = {"xla_gpu_enable_triton_gemm": False}
MANY_ROWS = (
    (4096, 7168, 16384),
    (4096, 4096, 4096),
    (4096, 12288, 4096),
    (4096, 4096, 12288),
    (4096, 1024, 4096),
)
FIRST = (*MANY_ROWS, *((m, 24576, 4096) for m in (1, 128, 16, 64)))
WAYS = {
    "torch": "torch._scaled_mm, 1x128 and 128x128 scales",
    "triton": "Triton, 1x128 and 128x128 scales",
}
SPEC = ("torch", "--torch-python", "torch_products.py")
PEER_SECONDS = 150.0  # that loading, or one shape's tuning, may take


def jobs(setting: Setting) -> list[Job]:
    """Every real case of the operation, those first that the targets are about."""
    ranked = sorted(
        (_rank(case), place, case) for place, case in enumerate(setting.cases("matmul", "real"))
    )
    limit = 90.0 + (2 * PEER_SECONDS if setting.torch_python else 0.0)
    sources = (__name__, "pallas_kernels.matmul.cases", "pallas_kernels.quantize")
    return [
        Job(
            case.name,
            partial(product, setting, case),
            sources,
            "matmul",
            first=rank < len(FIRST),
            seconds=limit,
        )
        for rank, _, case in ranked
    ]


def _rank(case: Case) -> int:
    sizes = shape_of(case)
    if sizes in FIRST and activations(case):
        return FIRST.index(sizes)
    return len(FIRST) + (sizes[0] > 128)


def shape_of(case: Case) -> tuple[int, int, int]:
    """(m, n, k)."""
    x, w = jax.eval_shape(case.arguments, jax.random.key(0))
    return x.shape[0], *w.shape


def activations(case: Case) -> bool:
    """Whether it is a forward product: e4m3 by a weight in 128x128 blocks."""
    x, w = jax.eval_shape(case.arguments, jax.random.key(0))
    return x.values.dtype == w.values.dtype == jnp.float8_e4m3fn and w.block == (128, 128)


def product(setting: Setting, case: Case) -> dict[str, Any]:
    m, n, k = shape_of(case)
    out_dtype = jax.eval_shape(lambda *a: case.run(*a, backend="reference"), *_shapes(case)).dtype
    works = {OURS: Work(partial(_ours, case, setting), case.arguments)}
    works[BF16] = Work(partial(dot, out_dtype), partial(bf16_operands, m, n, k))
    peers, absent = {}, {}
    if activations(case):
        works[WITH_QUANTIZATION] = Work(
            partial(_quantized_first, setting, out_dtype), partial(_unquantized, case, m, k)
        )
        works[PER_TENSOR] = Work(
            partial(per_tensor, out_dtype),
            partial(_scaled, m, n, k),
            {} if setting.tiny else CUBLASLT,
        )
        if setting.torch_python and not setting.compile_only:
            peers, absent = torch_peer(setting.torch_python).sides(m, n, k)
    result = compare(
        setting, works, (OURS, WITH_QUANTIZATION), case.flops, case.bytes, peers, absent
    )
    return result | {"shape": [m, n, k], "forward": activations(case), "weight_bytes": n * k}


def _shapes(case: Case) -> tuple:
    return jax.eval_shape(case.arguments, jax.random.key(0))


def _ours(case: Case, setting: Setting, *arrays):
    return case.run(*arrays, backend=setting.backend)


def _quantized_first(setting: Setting, out_dtype, x, w):
    x = quantize_blocks(x, (1, 128), backend="reference" if setting.tiny else "auto")
    return blockwise_matmul(x, w, out_dtype, backend=setting.backend)


def _unquantized(case: Case, m: int, k: int, key: jax.Array) -> tuple:
    """Activations in bfloat16; the weight is quantized once for many products, and stays so."""
    return jax.random.normal(jax.random.fold_in(key, 1), (m, k)).astype(
        jnp.bfloat16
    ), *case.arguments(key)[1:]


def bf16_operands(m: int, n: int, k: int, key: jax.Array) -> tuple:
    keys = jax.random.split(key)
    return tuple(
        jax.random.normal(key, shape).astype(jnp.bfloat16)
        for key, shape in zip(keys, ((m, k), (n, k)), strict=True)
    )


def dot(out_dtype, x, w):
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=out_dtype)


def _scaled(m: int, n: int, k: int, key: jax.Array) -> tuple:
    """e4m3 with a scale a tensor."""
    x, w = (side.astype(jnp.float32) for side in bf16_operands(m, n, k, key))
    scales = [jnp.max(jnp.abs(side)) / 448 for side in (x, w)]
    return *(
        jnp.clip(s / c, -448, 448).astype(jnp.float8_e4m3fn)
        for s, c in zip((x, w), scales, strict=True)
    ), *scales


def per_tensor(out_dtype, x, w, x_scale, w_scale):
    """Write what XLA turns into one FP8 product: convert, scale by scalars, multiply."""
    x, w = (
        side.astype(out_dtype) * scale.astype(out_dtype)
        for side, scale in ((x, x_scale), (w, w_scale))
    )
    return dot(out_dtype, x, w)


class TorchPeer:
    """The peer, started when it is first asked for; it ends with this process."""

    def __init__(self, python: str):
        self._python = python
        self._peer: Peer | None = None
        self._fault = ""

    def sides(self, m: int, n: int, k: int) -> tuple[dict[str, Side], dict[str, str]]:
        """Name -> what times it, and name -> why it cannot be timed, at a shape."""
        sides, absent = {}, {}
        for way, name in WAYS.items():
            try:
                answer = self._ask({"prepare": way, "m": m, "n": n, "k": k})
            except UserError as error:
                self._close(reason_of(error))
                answer = {"failed": self._fault}
            if "failed" in answer:
                absent[name] = answer["failed"]
            else:
                sides[name] = partial(self._round, way)
        return sides, absent

    def _round(self, way: str, number: int) -> dict[str, float]:
        return {"seconds": self._ask({"time": way})["seconds"]}

    def _ask(self, request: dict) -> dict:
        if self._fault:
            return {"failed": self._fault}
        if self._peer is None:
            name, option, script = SPEC
            self._peer = Peer(
                PeerSpec(name, option, self._python, script),
                {},
                threads=4,
                tokens=0,
                timeout=PEER_SECONDS,
            )
            self._peer.wait_until_ready()
        return self._peer.answer(request)

    def _close(self, fault: str) -> None:
        self._fault = fault
        if self._peer is not None:
            self._peer.close()
            self._peer = None


@cache
def torch_peer(python: str) -> TorchPeer:
    """The process's own."""
    return TorchPeer(python)
