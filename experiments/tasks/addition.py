"""Single-digit sums as chat questions: all 100 of them."""

from __future__ import annotations


def problems(largest: int = 9) -> list[dict[str, str]]:
    """Every a + b with 0 <= a, b <= largest, in order."""
    return [
        {"prompt": f"What is {a} + {b}? Answer with a number only.", "answer": str(a + b)}
        for a in range(largest + 1)
        for b in range(largest + 1)
    ]
