"""Our recipes and the peers in turns, and what of it stands in a JSON file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from experiments.benchmarks.peer import Peer
from experiments.benchmarks.rounds import (
    Plan,
    Side,
    Timed,
    common_parts,
    interleave,
    ratio,
    series,
    spread,
)

if TYPE_CHECKING:
    from experiments.benchmarks.workloads import Shape, Workload

OURS = "fp8rl_jax/"


@dataclass(frozen=True)
class Contest:
    """What came of it.

    Attributes:
        timed: all rounds.
        pairs: (over, under) of the ratios: first recipe over each other one, each peer over each
            recipe. Above 1, `under` is the faster of the two.
        about: settings and versions of each side.
    """

    timed: Timed
    pairs: list[tuple[str, str]]
    about: dict[str, Any]


def contest(
    ours: dict[str, Side], settings: dict[str, str], peers: Sequence[Peer], plan: Plan
) -> Contest:
    """Wait for the peers, then run the rounds.

    Args:
        ours: recipe -> its side.
        settings: how our sides do the work.
        peers: started already, so that they load while ours do.
    """
    sides = {f"{OURS}{recipe}": side for recipe, side in ours.items()}
    first, *others = names = list(sides)
    about: dict[str, Any] = {name: {"settings": settings} for name in names}
    for peer in peers:
        peer.wait_until_ready()
        sides[peer.spec.name], about[peer.spec.name] = peer, peer.about
    pairs = [(first, other) for other in others] + [
        (peer.spec.name, name) for peer in peers for name in names
    ]
    processes = {}
    if peers:
        processes = dict.fromkeys(names, os.getpid()) | {x.spec.name: x.pid for x in peers}
    return Contest(interleave(sides, plan, processes=processes), pairs, about)


def result(benchmark: str, workload: Workload, shape: Shape, contest: Contest) -> dict[str, Any]:
    """One benchmark's entry.

    Returns:
        "ratios", which hold anywhere, and "raw", which holds on this machine only. A workload whose
        times are results of their own has "seconds" beside them, and "tokens_per_second" of the
        rollout where there is one. Beside peers "peak_bytes" of each side's process; all of ours
        are in one.
    """
    rounds = contest.timed.rounds
    seconds = {
        side: {part: spread(series(rounds, side, part)) for part in parts}
        for side, parts in rounds[0].seconds.items()
    }
    entry = {
        "benchmark": benchmark,
        "workload": workload.describe(),
        "shape": asdict(shape),
        "sides": contest.about,
        "ratios": [
            ratio(rounds, *pair, part)
            for pair in contest.pairs
            for part in common_parts(rounds, *pair)
        ],
    }
    if sides := rounds[0].peak_bytes:
        entry["peak_bytes"] = {
            side: spread([each.peak_bytes[side] for each in rounds]) for side in sides
        }
    raw = asdict(contest.timed)
    if not workload.absolute:
        return entry | {"raw": raw | {"seconds": seconds}}
    entry |= {"seconds": seconds, "raw": raw}
    if benchmark == "trained_layer":
        return entry
    rates = {}
    for side, parts in rounds[0].seconds.items():
        part = "gen" if "gen" in parts else "seconds"
        rates[side] = spread([shape.tokens / value for value in series(rounds, side, part)])
    return entry | {"tokens_per_second": rates}
