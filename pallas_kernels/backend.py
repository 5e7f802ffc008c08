"""Which implementation of an operation runs."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from pallas_kernels import native

Backend = Literal["auto", "reference", "cpu", "hopper"]
BACKENDS = get_args(Backend)


class BackendError(ValueError):
    """The backend asked for by name cannot serve this call."""


_QUANTIZERS = ("dequantize", "quantize_blocks", "quantize_both", "regroup", "round_blocks")
_WITH_CPU_KERNELS = ("decode_attention", "dot", "invariant", *_QUANTIZERS)


def resolve(backend: Backend, operation: str, available: tuple[str, ...] = ()) -> str:
    """Choose the backend that runs: the one named, or what "auto" means on this machine.

    That is hopper where there is such a GPU and `refuse_hopper` does not name the operation, cpu
    where the kernels for CPUs run, else the reference, each where the operation has it. One that
    has no kernel for CPUs runs its reference under "cpu", too.

    Args:
        available: implementations of the operation; default: reference and hopper, and cpu of those
            that have a kernel for CPUs.

    Raises:
        BackendError: `backend` is unknown, the operation has no such implementation, or this
            machine cannot run it.
    """
    if not available:
        available = ("reference", "hopper") + ("cpu",) * (operation in _WITH_CPU_KERNELS)
    if backend == "auto":
        if "hopper" in available and hopper_sms() and operation not in _refused:
            return "hopper"
        has_kernel = "cpu" in available and platform() == "cpu"
        return "cpu" if has_kernel and native.is_available() else "reference"
    if backend not in BACKENDS:
        raise BackendError(
            f"{operation}: unknown backend {backend!r}; choose {', '.join(BACKENDS[:-1])} or "
            f"{BACKENDS[-1]}"
        )
    if backend == "cpu":
        if why := native.why_unavailable():
            raise BackendError(f"{operation}: the cpu backend has no kernels here: {why}")
        return "cpu" if "cpu" in available else "reference"
    if backend not in available:
        raise BackendError(
            f"{operation}: no {backend} backend in this version; available: {', '.join(available)}"
        )
    if backend == "hopper" and not hopper_sms():
        device = jax.devices()[0].device_kind
        raise BackendError(
            f"{operation}: the hopper backend needs a GPU of compute capability 9.0, JAX runs on "
            f"{device!r}"
        )
    if backend == "hopper" and operation in _refused:
        raise BackendError(f"{operation}: the hopper backend is refused: {_refused[operation]}")
    return backend


_refused: dict[str, str] = {}


def refuse_hopper(operations: Mapping[str, str]) -> None:
    """Keep operations from their Hopper kernels in this process: "auto" passes on to the next
    backend, and hopper by name raises. What is traced already keeps its kernels.

    Args:
        operations: name, as `resolve` takes it -> why. They replace those of an earlier call.
    """
    _refused.clear()
    _refused.update(operations)


def uses_cpu(backend: Backend, operation: str) -> bool:
    """Whether an operation runs by its kernel for CPUs.

    Raises:
        BackendError: a backend asked for by name cannot run here.
    """
    return backend in ("auto", "cpu") and resolve(backend, operation) == "cpu"


_FP8 = ("float8_e4m3fn", "float8_e5m2")
# The reference multiplies whatever float32 holds exactly. Hopper's wgmma has the two FP8 formats,
# in any pair of them (PTX ISA, wgmma.mma_async), and none of four or six bits.
MULTIPLIED = {"reference": (*_FP8, "float8_e3m4", "float4_e2m1fn"), "hopper": _FP8}


def check_pair(operation: str, backend: str, left: jnp.dtype, right: jnp.dtype) -> None:
    """Refuse operands that `backend` cannot multiply with each other.

    Values only: their scales are any float32.

    Args:
        operation: for the message.
        backend: "reference" or "hopper", as `resolve` returns it.
        left, right: dtypes of the quantized operands.

    Raises:
        BackendError: naming the pair and what the backend takes.
    """
    pair, multiplied = (jnp.dtype(left).name, jnp.dtype(right).name), MULTIPLIED[backend]
    if not set(pair) <= set(multiplied):
        given, known = " by ".join(pair), ", ".join(multiplied)
        raise BackendError(
            f"{operation}: the {backend} backend does not multiply {given}; it takes {known}"
        )


def choose(operation: str, backend: Backend, lacks: str) -> str:
    """Choose the backend of a call that the operation's Hopper kernel may not serve.

    As `resolve`, but under "auto" the reference takes what the kernel does not serve.

    Args:
        lacks: what the kernel has not, for the error; empty where it serves this call.

    Raises:
        BackendError: as `resolve`, and where hopper is asked for by name.
    """
    chosen = resolve(backend, operation)
    if chosen == "hopper" and lacks:
        if backend == "auto":
            return "reference"
        raise BackendError(
            f"{operation}: the hopper backend has no {lacks}; choose auto or reference"
        )
    return chosen


def block_name(block: tuple[int, int]) -> str:
    """A block in an error: 128x128."""
    return f"{block[0]}x{block[1]}"


Platform = Literal["cpu", "gpu", "tpu"]
_traced: ContextVar[tuple[Platform, int | None] | None] = ContextVar("traced", default=None)


def platform() -> str:
    """Name the platform that programs are traced for: "cpu", "gpu" or "tpu"."""
    traced = _traced.get()
    return jax.default_backend() if traced is None else traced[0]


def hopper_sms() -> int | None:
    """Count the multiprocessors of the Hopper GPU that is traced for; None where there is none."""
    traced = _traced.get()
    return _own_sms() if traced is None else traced[1]


@contextmanager
def tracing_for(device: int | Literal["tpu"]) -> Generator[None]:
    """Trace for another device than this machine has: a Hopper GPU of so many multiprocessors, or a
    TPU."""
    token = _traced.set(("tpu", None) if device == "tpu" else ("gpu", device))
    try:
        yield
    finally:
        _traced.reset(token)


@cache
def _own_sms() -> int | None:
    if jax.default_backend() != "gpu":
        return None
    device = jax.devices()[0]
    return device.core_count if getattr(device, "compute_capability", "") == "9.0" else None
