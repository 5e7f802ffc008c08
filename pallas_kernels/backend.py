"""Which implementation of an operation runs."""

from __future__ import annotations

from typing import Literal

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


def resolve(backend: Backend, operation: str, available: tuple[str, ...]) -> str:
    """The backend that runs: the one named, or under "auto" the first of `available`.

    Raises:
        BackendError: `backend` is unknown, or the operation has no such implementation.
    """
    if backend == "auto":
        return available[0]
    if backend not in ("reference", "hopper"):
        raise BackendError(f"{operation}: unknown backend {backend!r}; choose auto, reference or hopper")
    if backend not in available:
        raise BackendError(f"{operation}: no {backend} backend in this version; available: {', '.join(available)}")
    return backend
