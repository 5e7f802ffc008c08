"""Device time of a program: what it adds to a queue that the device is behind with.

A program that is timed makes several calls on several copies of the inputs, so that no call finds
its inputs in the cache. Before it, the device is given products to compute that take some
milliseconds. While it computes them the host queues `short` programs, once, and `long` ones,
another time. Until the last one is done it takes

    T(programs) = products + programs * calls * (time of a call)

so T(long) - T(short) over (long - short) * calls is a call's time without the host's: neither
dispatch nor waking up after the last call is in it, because both are the same in T(long) and
T(short), and between two calls the device never waits for the host as long as the host has queued
everything before the products end. How long it takes for that is measured once for each program,
and the products are repeated until they take half as long again; each sample says whether that was
enough ("ahead"). Calls of a program are made to follow each other, so that XLA neither merges nor
overlaps them, and a program of short calls makes many: what a call of microseconds adds would else
be less than the jitter of the host's waking up. Where T(long) is no more than T(short) for all
that, both are timed anew, five times and then fifteen, and their medians taken. The products keep
the card at the clocks that it has when it is busy, for whatever is timed alike.
"""

from __future__ import annotations

import math
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from experiments.benchmarks.gpu.jobs import Setting
from experiments.benchmarks.rounds import Side, interleave, ratio, series, spread

METHOD = (__doc__ or "").strip()
CACHE_BYTES = 64 * 2**20  # an H200's second-level cache, rounded up
TARGET_SECONDS = 0.02  # of what T(long) adds to T(short)
MOST_PROGRAMS, MOST_LEADS = 14, 16  # and one more of T(short): the host may be 32 programs ahead
MOST_RESULT_BYTES = 12 * 2**30  # of results that are queued at once
MOST_CALLS = 16
REPEATS = (1, 5, 15)  # of T(short) and T(long) in a sample, until T(long) is more
AHEAD_SIDE, AHEAD_PRODUCTS = 8192, 5  # about 7 ms
AHEAD_MARGIN = 1.5
TRACED_PROGRAMS = 3
PRODUCT = re.compile(r"\b(?:stablehlo|chlo)\.\w*dot\w*\b")


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
    """A compiled program of `calls` calls, its inputs, how many of it are queued, and behind how
    many `leads` of products."""

    program: Callable[[list[tuple]], Any]
    copies: list[tuple]
    calls: int
    short: int
    long: int
    about: dict[str, Any]
    leads: int = 1


def call_seconds(short_seconds: float, long_seconds: float, programs: int, calls: int) -> float:
    """Compute a call's seconds from those of `programs` more programs of so many calls.

    Raises:
        RuntimeError: they took no time at all, so something else was timed.
    """
    if long_seconds <= short_seconds:
        raise RuntimeError(
            f"{programs} more programs took {long_seconds - short_seconds:.2e} s: nothing can be "
            "said about one"
        )
    return (long_seconds - short_seconds) / (programs * calls)


def copies_of(input_bytes: int, cache_bytes: int = CACHE_BYTES, most: int = MOST_CALLS) -> int:
    """Choose how many copies of the inputs are used in turn.

    Between two uses of one, four caches' worth of others is read.
    """
    if input_bytes >= 16 * cache_bytes:
        return 1
    return min(most, 1 + math.ceil(4 * cache_bytes / max(input_bytes, 1)))


def calls_of(copies: int, input_bytes: int, cache_bytes: int = CACHE_BYTES) -> int:
    """Choose how many calls a program makes.

    Each copy's, and of inputs that are read in microseconds as many rounds as fit.
    """
    return copies * max(1, MOST_CALLS // copies) if input_bytes < 2 * cache_bytes else copies


def leads_of(queued_seconds: float, lead_seconds: float) -> int:
    """How often the products are queued before programs that take the host `queued_seconds`."""
    return max(1, min(MOST_LEADS, math.ceil(AHEAD_MARGIN * queued_seconds / lead_seconds)))


def programs_of(program_seconds: float, result_bytes: int) -> int:
    """How many more programs T(long) has than T(short)."""
    fitting = MOST_RESULT_BYTES // max(result_bytes, 1) - 1
    return max(1, min(MOST_PROGRAMS, fitting, math.ceil(TARGET_SECONDS / program_seconds)))


class Clock:
    """Prepares and times work on the first device; on a CPU (`tiny`) by plain wall time, which
    counts for nothing."""

    def __init__(self, tiny: bool):
        self.tiny = tiny
        self.ahead_seconds = 0.0
        if not tiny:
            self._operand = jax.random.normal(jax.random.key(0), (AHEAD_SIDE, AHEAD_SIDE)).astype(
                jnp.bfloat16
            )
            self._products = jax.jit(_products)
            for _ in range(3):
                start = time.perf_counter()
                jax.block_until_ready(self._products(self._operand))
                self.ahead_seconds = time.perf_counter() - start

    def prepare(self, work: Work) -> Prepared:
        """Compile, run one time, and choose how often to run."""
        number, calls, input_bytes = counts(work, self.tiny)
        make = jax.jit(work.arguments)
        copies = [jax.block_until_ready(make(key)) for key in jax.random.split(_key(), number)]
        program = lowered(work, number, calls).compile()
        result_bytes = bytes_of(jax.block_until_ready(program(copies)))
        start = time.perf_counter()
        jax.block_until_ready(program(copies))
        more = 2 if self.tiny else programs_of(time.perf_counter() - start, result_bytes)
        about = {
            "copies": number,
            "calls": calls,
            "input_bytes_of_a_call": input_bytes,
            "rotated_past_cache": number * input_bytes >= 4 * CACHE_BYTES,
            "custom_calls": custom_calls(program.as_text()),
        }
        short = 0 if self.tiny else 1
        prepared = Prepared(program, copies, calls, short, short + more, about)
        if self.tiny:
            return prepared
        _, queued = self._elapsed(prepared, prepared.long)
        return replace(prepared, leads=leads_of(queued, self.ahead_seconds))

    def sample(self, prepared: Prepared) -> dict[str, float]:
        """Time one round: seconds of a call, and 1.0 where the host was ahead all the while.

        Raises:
            RuntimeError: as `call_seconds`, however often it was timed.
        """
        for repeats in REPEATS:
            pairs = [
                [self._elapsed(prepared, programs) for programs in (prepared.short, prepared.long)]
                for _ in range(repeats)
            ]
            short, long = (median(done for done, _ in side) for side in zip(*pairs, strict=True))
            if long > short:
                break
        seconds = call_seconds(short, long, prepared.long - prepared.short, prepared.calls)
        queued = max(queued for _, (_, queued) in pairs)
        return {"seconds": seconds, "ahead": float(queued < prepared.leads * self.ahead_seconds)}

    def _elapsed(self, prepared: Prepared, programs: int) -> tuple[float, float]:
        """Seconds until all of it is done, and until it is queued."""
        if not programs:
            return 0.0, 0.0
        start = time.perf_counter()
        if not self.tiny:
            for _ in range(prepared.leads):
                self._products(self._operand)
        for _ in range(programs):
            result = prepared.program(prepared.copies)
        queued = time.perf_counter() - start
        jax.block_until_ready(result)
        return time.perf_counter() - start, queued


@cache
def clock(tiny: bool) -> Clock:
    """The process's own."""
    return Clock(tiny)


def counts(work: Work, tiny: bool) -> tuple[int, int, int]:
    """Copies of the inputs, calls of a program, and bytes of one call's inputs."""
    input_bytes = bytes_of(jax.eval_shape(work.arguments, _key()))
    number = 2 if tiny else copies_of(input_bytes)
    return number, number if tiny else calls_of(number, input_bytes), input_bytes


def lowered(work: Work, number: int, calls: int) -> jax.stages.Lowered:
    """Lower the program that is timed.

    From shapes alone, so that it is the same whether or not there are arrays yet.
    """
    shapes = [jax.eval_shape(work.arguments, _key())] * number
    return jax.jit(
        partial(repeated, jax.jit(work.run), calls=calls), compiler_options=work.options or None
    ).lower(shapes)


def compile_ahead(work: Work, tiny: bool) -> bool:
    """Compile what `Clock.prepare` will want, for the cache.

    Returns:
        False where XLA picks a product of its libraries by timing them: that is left to `prepare`,
        for which nothing else runs.
    """
    number, calls, _ = counts(work, tiny)
    jax.jit(work.arguments).lower(_key()).compile()
    program = lowered(work, number, calls)
    alone = PRODUCT.search(program.as_text()) is not None
    if not alone:
        program.compile()
    return not alone


def _key() -> jax.Array:
    return jax.random.key(1, impl="rbg")  # fast to compile, and for gigabytes


def repeated(run: Callable[..., Any], copies: Sequence[tuple], calls: int = 0) -> list:
    """Call on each copy in turn, or `calls` times.

    A call's result goes through a barrier with the next one's inputs.
    """
    results = [run(*copies[0])]
    for call in range(1, calls or len(copies)):
        results[-1], arrays = lax.optimization_barrier((results[-1], copies[call % len(copies)]))
        results.append(run(*arrays))
    return results


def bytes_of(arrays: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))


def custom_calls(hlo: str) -> list[str]:
    """What a compiled program calls: kernels by their names, libraries by theirs."""
    parts = (
        line.partition('custom_call_target="')[2].partition('"')[0] for line in hlo.splitlines()
    )
    kinds = ("__triton_gemm" if '"__triton' in line else "" for line in hlo.splitlines())
    return sorted({part for part in (*parts, *kinds) if part})


def _products(x):
    y = x
    for _ in range(AHEAD_PRODUCTS):
        y = (y @ x) * AHEAD_SIDE**-0.5  # keeps the size of its elements
    return y


def kernels(prepared: Prepared) -> dict[str, float]:
    """Kernel -> microseconds of a call, the longest first.

    Raises:
        LookupError: the trace has no GPU in it: this is none, or its profiler may not be used.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(TRACED_PROGRAMS):
                result = prepared.program(prepared.copies)
            jax.block_until_ready(result)
        (file,) = Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(file)).planes
        gpus = [plane for plane in planes if plane.name.startswith("/device:GPU")]
        if not gpus:
            raise LookupError("no GPU in the profiler's trace")
        events = [
            (e.name, e.duration_ns)
            for line in gpus[0].lines
            if line.name.startswith("Stream")
            for e in line.events
        ]
    return by_name(events, TRACED_PROGRAMS * prepared.calls)


def by_name(events: Iterable[tuple[str, float]], calls: int) -> dict[str, float]:
    """Microseconds of a call for each name, the longest first."""
    total: dict[str, Any] = {}
    for name, nanoseconds in events:
        total[name] = total.get(name, 0.0) + nanoseconds / 1e3 / calls
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def compare(
    setting: Setting,
    works: dict[str, Work],
    ours: Iterable[str],
    flops: float = 0.0,
    moved: float = 0.0,
    peers: dict[str, Side] | None = None,
    absent: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Time all of `works` and `peers`, round by round.

    Args:
        works: name -> what our clock times.
        ours: names of works; ratios are all others' seconds over theirs.
        flops, moved: of the work itself.
        peers: name -> what times itself.
        absent: name -> why it is not there.

    Returns:
        "seconds", "tflops" and "bytes_per_second" of each side as medians and quartiles, "ratios",
        "raw" rounds, and "failed": name -> reason, of what could not be prepared. With
        `compile_only`: "compiled", name -> whether it was.

    Raises:
        RuntimeError: nothing could be timed.
    """
    if setting.compile_only:
        return {
            "compiled": {name: compile_ahead(work, setting.tiny) for name, work in works.items()}
        }
    prepared, failed = prepare(works, setting.tiny)
    sides: dict[str, Side] = {
        name: lambda _, p=p: clock(setting.tiny).sample(p) for name, p in prepared.items()
    }
    sides |= peers or {}
    if not sides:
        raise RuntimeError("; ".join(f"{name}: {reason}" for name, reason in failed.items()))
    timed = interleave(sides, setting.plan, settled=False)
    seconds_of = {name: series(timed.rounds, name, "seconds") for name in sides}

    def rates(work: float) -> dict[str, dict[str, float]]:
        return (
            {
                name: spread([work / value for value in values])
                for name, values in seconds_of.items()
            }
            if work
            else {}
        )

    return {
        "flops": flops,
        "bytes": moved,
        "seconds": {name: spread(values) for name, values in seconds_of.items()},
        "tflops": rates(flops / 1e12),
        "bytes_per_second": rates(moved),
        "ratios": [
            ratio(timed.rounds, over, under)
            for under in ours
            for over in sides
            if under in sides and over != under
        ],
        "host_was_ahead": {name: all(series(timed.rounds, name, "ahead")) for name in prepared},
        "programs": {
            name: one.about | {"queued": [one.leads, one.short, one.long]}
            for name, one in prepared.items()
        },
        "kernels": {name: _kernels(one) for name, one in prepared.items()}
        if setting.profile
        else {},
        "failed": failed | (absent or {}),
        "raw": asdict(timed),
    }


def prepare(works: dict[str, Work], tiny: bool) -> tuple[dict[str, Prepared], dict[str, str]]:
    """Whatever compiles and runs, and why the rest does not: one way's fault is not the others'."""
    prepared, failed = {}, {}
    for name, work in works.items():
        try:
            prepared[name] = clock(tiny).prepare(work)
        except Exception as error:  # whatever the compiler or the device objects to is the result
            failed[name] = reason_of(error)
    return prepared, failed


def _kernels(prepared: Prepared) -> dict[str, Any]:
    """Microseconds of each kernel of a call, or why they are not known."""
    try:
        return {"microseconds": kernels(prepared)}
    except (LookupError, RuntimeError, ValueError) as error:
        return {"failed": reason_of(error)}


def reason_of(error: Exception) -> str:
    """An exception as one line of the record."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:500]


def median_ratio(result: dict[str, Any], over: str, under: str) -> float | None:
    """The median of one of a result's ratios; None where it was not measured."""
    medians = [
        r["median"] for r in result.get("ratios", []) if (r["over"], r["under"]) == (over, under)
    ]
    return medians[0] if medians else None
