"""Device time of a program: what it adds to a queue that the device is behind with.

A program that is timed makes several calls on several copies of the inputs, so that no call finds its inputs in the cache.
Before it, the device is given products to compute that take some milliseconds. While it computes them the host queues `short`
programs, once, and `long` ones, another time. Until the last one is done it takes

    T(programs) = products + programs * calls * (time of a call)

so T(long) - T(short) over (long - short) * calls is a call's time without the host's: neither dispatch nor waking up after the
last call is in it, because both are the same in T(long) and T(short), and between two calls the device never waits for the host
as long as the host has queued everything before the products end. Each sample says whether it had ("ahead"). Calls of a program
are made to follow each other, so that XLA neither merges nor overlaps them. The products keep the card at the clocks that it has
when it is busy, for whatever is timed alike.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from experiments.benchmarks.gpu.setting import CACHE_BYTES

METHOD = (__doc__ or "").strip()
TARGET_SECONDS = 0.02  # of what T(long) adds to T(short)
MOST_PROGRAMS = 14  # the host may be 32 programs ahead
MOST_RESULT_BYTES = 12 * 2**30  # of results that are queued at once
MOST_CALLS = 16
AHEAD_SIDE, AHEAD_PRODUCTS = 8192, 5


@dataclass(frozen=True)
class Work:
    """What is timed.

    Attributes:
        run: (*arrays) -> arrays; traceable.
        arguments: key -> arrays; traceable. Normal data: zeros take less power, and so less time.
        options: of the compiler.
    """

    run: Callable[..., Any]
    arguments: Callable[[jax.Array], tuple]
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Prepared:
    """A compiled program of `calls` calls, its inputs, and how many of it are queued."""

    program: Callable[[list[tuple]], Any]
    copies: list[tuple]
    short: int
    long: int
    about: dict[str, Any]

    @property
    def calls(self) -> int:
        return len(self.copies)


def call_seconds(short_seconds: float, long_seconds: float, programs: int, calls: int) -> float:
    """Seconds of one call, if `programs` more programs of so many calls took from `short_seconds` to `long_seconds`.

    Raises:
        RuntimeError: they took no time at all, so something else was timed.
    """
    if long_seconds <= short_seconds:
        raise RuntimeError(f"{programs} more programs took {long_seconds - short_seconds:.2e} s: nothing can be said about one")
    return (long_seconds - short_seconds) / (programs * calls)


def copies_of(input_bytes: int, cache_bytes: int = CACHE_BYTES, most: int = MOST_CALLS) -> int:
    """How many copies of the inputs are used in turn: between two uses of one, four caches' worth of others is read."""
    if input_bytes >= 16 * cache_bytes:
        return 1
    return min(most, 1 + math.ceil(4 * cache_bytes / max(input_bytes, 1)))


def programs_of(program_seconds: float, result_bytes: int) -> int:
    """How many more programs T(long) has than T(short)."""
    fitting = MOST_RESULT_BYTES // max(result_bytes, 1) - 1
    return max(1, min(MOST_PROGRAMS, fitting, math.ceil(TARGET_SECONDS / program_seconds)))


class Clock:
    """Prepares and times work on the first device; on a CPU (`tiny`) by plain wall time, which counts for nothing."""

    def __init__(self, tiny: bool):
        self.tiny = tiny
        self.ahead_seconds = 0.0
        if not tiny:
            self._operand = jax.random.normal(jax.random.key(0), (AHEAD_SIDE, AHEAD_SIDE)).astype(jnp.bfloat16)
            self._products = jax.jit(_products)
            for _ in range(3):
                start = time.perf_counter()
                jax.block_until_ready(self._products(self._operand))
                self.ahead_seconds = time.perf_counter() - start

    def prepare(self, work: Work) -> Prepared:
        """Compiles, runs once, and chooses how often to run."""
        key = jax.random.key(1, impl="rbg")  # fast to compile, and for gigabytes
        shapes = jax.eval_shape(work.arguments, key)
        input_bytes = bytes_of(shapes)
        number = 2 if self.tiny else copies_of(input_bytes)
        make = jax.jit(work.arguments)
        copies = [jax.block_until_ready(make(key)) for key in jax.random.split(key, number)]
        program = jax.jit(partial(repeated, jax.jit(work.run)), compiler_options=work.options or None).lower(copies).compile()
        result_bytes = bytes_of(jax.block_until_ready(program(copies)))
        start = time.perf_counter()
        jax.block_until_ready(program(copies))
        more = 2 if self.tiny else programs_of(time.perf_counter() - start, result_bytes)
        about = {
            "copies": number,
            "input_bytes_of_a_call": input_bytes,
            "rotated_past_cache": number * input_bytes >= 4 * CACHE_BYTES,
            "custom_calls": custom_calls(program.as_text()),
        }
        short = 0 if self.tiny else 1
        return Prepared(program, copies, short, short + more, about)

    def sample(self, prepared: Prepared) -> dict[str, float]:
        """One round's seconds of a call, and whether the host was ahead all the while (1.0) or not (0.0)."""
        short, _ = self._elapsed(prepared, prepared.short)
        long, queued = self._elapsed(prepared, prepared.long)
        seconds = call_seconds(short, long, prepared.long - prepared.short, prepared.calls)
        return {"seconds": seconds, "ahead": float(queued < self.ahead_seconds)}

    def _elapsed(self, prepared: Prepared, programs: int) -> tuple[float, float]:
        """Seconds until all of it is done, and until it is queued."""
        if not programs:
            return 0.0, 0.0
        start = time.perf_counter()
        if not self.tiny:
            self._products(self._operand)
        for _ in range(programs):
            result = prepared.program(prepared.copies)
        queued = time.perf_counter() - start
        jax.block_until_ready(result)
        return time.perf_counter() - start, queued


def repeated(run: Callable[..., Any], copies: list[tuple]) -> list:
    """Calls on each copy; each call's result goes through a barrier together with the next one's inputs."""
    results = [run(*copies[0])]
    for arrays in copies[1:]:
        results[-1], arrays = lax.optimization_barrier((results[-1], arrays))
        results.append(run(*arrays))
    return results


def bytes_of(arrays: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))


def custom_calls(hlo: str) -> list[str]:
    """What a compiled program calls: kernels by their names, libraries by theirs."""
    parts = (line.partition('custom_call_target="')[2].partition('"')[0] for line in hlo.splitlines())
    kinds = ("__triton_gemm" if '"__triton' in line else "" for line in hlo.splitlines())
    return sorted({part for part in (*parts, *kinds) if part})


def _products(x):
    y = x
    for _ in range(AHEAD_PRODUCTS):
        y = (y @ x) * AHEAD_SIDE**-0.5  # keeps the size of its elements
    return y
