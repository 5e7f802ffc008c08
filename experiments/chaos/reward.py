"""A reward that random weights earn a part of, and that differs between the samples of a prompt."""


def even_letters(completion: str, **_) -> float:
    """The part of the completion's characters whose code is even."""
    return sum(ord(letter) % 2 == 0 for letter in completion) / max(len(completion), 1)
