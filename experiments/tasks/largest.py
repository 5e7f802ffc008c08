"""The largest of three numbers as a chat question."""

from __future__ import annotations

import random


def problems(count: int = 100, digits: int = 2) -> list[dict[str, str]]:
    """Draw questions about three different numbers of so many digits; the same ones every time."""
    draw, numbers = random.Random(0), range(10 ** (digits - 1), 10**digits)
    answers: dict[str, str] = {}
    while len(answers) < count:
        a, b, c = draw.sample(numbers, 3)
        question = f"Which is the largest of {a}, {b} and {c}? Answer with a number only."
        answers[question] = str(max(a, b, c))
    return [{"prompt": question, "answer": answer} for question, answer in answers.items()]
