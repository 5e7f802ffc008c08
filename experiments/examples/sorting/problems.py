"""Digits to sort as rows, in columns of their own names, and a reward that reads one of them."""

from __future__ import annotations

import random
from typing import Any


def digits(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """`count` rows: "digits" such as 3172>, "sorted" 1237, and how many differ, "different"."""
    texts = [f"{number:04}" for number in random.Random(seed).sample(range(10_000), count)]
    return [
        {"digits": f"{text}>", "sorted": "".join(sorted(text)), "different": len(set(text))}
        for text in texts
    ]


def in_order(completion: str, answer: str, different: int) -> float:
    """Return 1 where all is right, else 0.1 for each digit in its place; none where all digits are
    the same, which is no sorting."""
    if completion == answer:
        return 1.0
    return 0.1 * (different > 1) * sum(map(str.__eq__, completion, answer))
