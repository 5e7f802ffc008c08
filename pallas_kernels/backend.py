"""Which implementation of an operation runs."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.target import hopper_sms

Backend = Literal["auto", "reference", "hopper"]


class BackendError(ValueError):
    """The backend asked for by name cannot serve this call."""


def check_exact(backend: str, operation: str) -> None:
    """Refuses a backend that has no exact form of its products.

    Raises:
        BackendError: only the reference has one.
    """
    if backend != "reference":
        raise BackendError(f"{operation}: the {backend} backend has no exact products; choose reference")


def resolve(backend: Backend, operation: str, available: tuple[str, ...] = ("reference", "hopper")) -> str:
    """The backend that runs: the one named, or under "auto" hopper where there is such a GPU, else the reference.

    Raises:
        BackendError: `backend` is unknown, the operation has no such implementation, or this machine cannot run it.
    """
    if backend == "auto":
        return "hopper" if "hopper" in available and hopper_sms() else "reference"
    if backend not in ("reference", "hopper"):
        raise BackendError(f"{operation}: unknown backend {backend!r}; choose auto, reference or hopper")
    if backend not in available:
        raise BackendError(f"{operation}: no {backend} backend in this version; available: {', '.join(available)}")
    if backend == "hopper" and not hopper_sms():
        device = jax.devices()[0].device_kind
        raise BackendError(f"{operation}: the hopper backend needs a GPU of compute capability 9.0, JAX runs on {device!r}")
    return backend


_FP8 = ("float8_e4m3fn", "float8_e5m2")
# The reference multiplies whatever float32 holds exactly. Hopper's wgmma has the two FP8 formats, in any pair of them (PTX ISA,
# wgmma.mma_async), and none of four or six bits.
MULTIPLIED = {"reference": (*_FP8, "float4_e2m1fn"), "hopper": _FP8}


def check_pair(operation: str, backend: str, left: jnp.dtype, right: jnp.dtype) -> None:
    """Refuses operands that `backend` cannot multiply with each other; values only, their scales are any float32.

    Args:
        operation: for the message.
        backend: "reference" or "hopper", as `resolve` returns it.
        left, right: dtypes of the quantized operands.

    Raises:
        BackendError: naming the pair and what the backend takes.
    """
    pair, taken = (jnp.dtype(left).name, jnp.dtype(right).name), MULTIPLIED[backend]
    if not set(pair) <= set(taken):
        given, known = " by ".join(pair), ", ".join(taken)
        raise BackendError(f"{operation}: the {backend} backend does not multiply {given}; it takes {known}")


def check_block(operation: str, block: tuple[int, int], taken: tuple[tuple[int, int], ...]) -> None:
    """Refuses a block that the Hopper kernel of an operation has no loop for.

    Raises:
        BackendError: naming the block and what it takes.
    """
    if block not in taken:
        known, given = (" or ".join(f"{rows}x{columns}" for rows, columns in blocks) for blocks in (taken, (block,)))
        raise BackendError(f"{operation}: the hopper backend takes blocks of {known}, not {given}; choose reference")
