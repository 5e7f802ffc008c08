"""Problems of tiny runs: words to spell backward."""

import random


def backward(words: int, letters: int) -> list[dict[str, str]]:
    """`words` different problems, of `letters` random letters each."""
    draw = random.Random(0)
    drawn = {}
    while len(drawn) < words:
        word = "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=letters))
        drawn[word] = {"prompt": f"{word}=", "answer": word[::-1]}
    return list(drawn.values())
