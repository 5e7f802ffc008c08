"""The Hopper GPU that a kernel is traced for: this machine's, one to compile for, or one that the
interpreter plays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import jax

_chosen: ContextVar[int | None] = ContextVar("hopper_sms", default=None)


def hopper_sms() -> int | None:
    """Streaming multiprocessors of the Hopper GPU that is traced for; None where there is none."""
    return _chosen.get() or _own_sms()


@contextmanager
def tracing_for(sms: int) -> Iterator[None]:
    """Inside, kernels are traced for a Hopper GPU of `sms` multiprocessors, whatever this machine
    has."""
    token = _chosen.set(sms)
    try:
        yield
    finally:
        _chosen.reset(token)


@cache
def _own_sms() -> int | None:
    if jax.default_backend() != "gpu":
        return None
    device = jax.devices()[0]
    return device.core_count if getattr(device, "compute_capability", "") == "9.0" else None
