"""The study's task: distances of distances, written step by step, so that each needs the last.

    -3-9-1-4=  ->  33961541

A step writes the next digit of the prompt, and how far the last result, 0 at first, is from it:
|0 - 3| = 3, |3 - 9| = 6, |6 - 1| = 5, |5 - 4| = 1. A digit is as far from its place in the prompt
at every step, which makes long completions learnable. (Sums modulo 10 were tried first: in 400
updates a policy of this size learns nothing of their table, and of this one most.)

The warm start learns from demonstrations that slip: with probability `slip` a step takes another
digit than it has just written, and goes on from there. So the policy that reinforcement learning
begins with knows the task, is right in about (1 - slip)^steps of its samples at best, and has the
entropy of the slips at every step: it is not sure of itself, and what there is to learn is not to
slip.
"""

from __future__ import annotations

import random
from typing import Any


def distances(count: int, steps: int, slip: float) -> list[dict[str, Any]]:
    """Draw different problems; the same ones every time.

    Args:
        count: of problems.
        steps: digits of each; its answer has twice as many.
        slip: probability that a step of a demonstration is wrong.

    Raises:
        ValueError: so many different problems take too long to find, or are not there.
    """
    if count > 10**steps // 2:
        raise ValueError(f"count = {count}: there are {10**steps} problems of {steps} steps")
    draw, drawn = random.Random(steps), {}
    while len(drawn) < count:
        digits = [draw.randrange(10) for _ in range(steps)]
        slips = [draw.randrange(1, 10) if draw.random() < slip else 0 for _ in digits]
        text = "".join(f"-{digit}" for digit in digits)
        drawn[text] = {
            "prompt": f"{text}=",
            "answer": _written(digits, [0] * steps),
            "shown": _written(digits, slips),
        }
    return list(drawn.values())


def _written(digits: list[int], slips: list[int]) -> str:
    text, last = "", 0
    for digit, slip in zip(digits, slips, strict=True):
        last = abs(last - (digit + slip) % 10)
        text += f"{digit}{last}"
    return text
