"""Rewards for runs of several processes."""

import random
import time


def even_letters(completion: str, **_) -> float:
    """The part of the completion's characters whose code is even: random weights earn a part of it
    already."""
    return sum(ord(letter) % 2 == 0 for letter in completion) / max(len(completion), 1)


def drawn(completion: str, **_) -> float:
    """Another number in every process and at every call, and no answer to "hang"."""
    while completion == "hang":
        time.sleep(1)
    return random.SystemRandom().random()
