"""Environments for the tests, good and bad."""

import os
import time


class Guess:
    """Find a number; every answer is too small, too large, or right."""

    def __init__(self, largest=1000, role="user"):
        self.largest, self.role = largest, role

    def reset(self, seed):
        self.number = seed % self.largest
        return f"Guess a number from 0 to {self.largest - 1} (problem {seed})."

    def step(self, text):
        if text == "sleep":
            time.sleep(1000)
        if text == "die":
            os._exit(3)
        guess = int(text)
        hint = "too small" if guess < self.number else "too large"
        return (
            [{"role": self.role, "content": f"{guess} is {hint}"}],
            float(guess == self.number),
            guess == self.number,
        )


class Forgetful(Guess):
    """Its answers depend on more than the texts."""

    def step(self, text):
        return f"process {os.getpid()}, {time.monotonic_ns()}", 0.0, False


class Moody(Guess):
    def reset(self, seed):
        return super().reset(seed) + str(time.monotonic_ns())


class NoPrompt(Guess):
    def reset(self, seed):
        return []


class BadStep(Guess):
    RESULTS = {
        "0": None,
        "1": ("x", 1.0),
        "2": ("x", "1.0", False),
        "3": ("x", float("nan"), True),
        "4": ("x", 1.0, 1),
        "5": ([], 1.0, False),
        "6": ([{"role": "assistant", "content": "x"}], 1.0, False),
        "7": (3, 1.0, False),
    }

    def step(self, text):
        return self.RESULTS[text]


class NoStep:
    def reset(self, seed):
        return "x"


class Parity:
    """Say characters whose codes have the parity that was named last; a turn is rewarded by its
    part of them."""

    def __init__(self, turns=2):
        self.turns = turns

    def reset(self, seed):
        self.seed, self.turn = seed, 0
        return f"{seed % 997}:{self.wanted}"

    @property
    def wanted(self):
        return (self.seed // (self.turn + 1)) % 2

    def step(self, text):
        right = sum(character.isascii() and ord(character) % 2 == self.wanted for character in text)
        self.turn += 1
        return f"{self.wanted}", right / max(len(text), 1) / self.turns, self.turn == self.turns
