"""Our recipes and the peers, in turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from experiments.benchmarks.peer import Peer
from experiments.benchmarks.rounds import Plan, Side, Timed, interleave

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
    """Waits for the peers, then runs the rounds.

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
    return Contest(interleave(sides, plan), pairs, about)
