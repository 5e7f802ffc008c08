"""The rewards that come with the library, and what of a completion they look at."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from functools import lru_cache
from typing import Any, Literal

from fp8rl_jax.errors import UserError

# A minus after a digit, a letter or a bracket is an operator: the last number of "7-5" is 5, that
# of "= -5" is -5.
NUMBER = re.compile(r"(?:(?<![\w)\].])[-\u2212])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")
LATEX = re.compile(r"\$|\\\(|\\\[|\\boxed|\\begin")
SCIENTIFIC = re.compile(r"[-+]?\d+(\.\d+)?[eE][-+]?\d{1,2}")


def extract_answer(completion: str, how: Literal["whole", "last_number", "answer_tag"]) -> str:
    """The part of a completion that is scored.

    "whole" removes surrounding whitespace. "last_number" gives the last decimal number without its
    thousands separators ("so 1,250.5 in all" -> "1250.5"), "answer_tag" the inside of the last
    <answer></answer>; both "" where there is none.
    """
    if how == "whole":
        return completion.strip()
    if how == "answer_tag":
        head, closing, _ = completion.rpartition("</answer>")
        _, opening, inside = head.rpartition("<answer>")
        return inside.strip() if closing and opening else ""
    numbers = NUMBER.findall(completion)
    return numbers[-1].replace(",", "").replace("\u2212", "-") if numbers else ""


def exact_match(completion: str, answer: str) -> float:
    """1 where the extracted completion is the answer, letter for letter; else 0."""
    return float(completion == answer.strip())


def format_reward(pattern: str) -> Callable[[str], float]:
    """1 where `pattern` matches the whole completion without surrounding whitespace, else 0; "."
    matches line breaks."""
    compiled = re.compile(pattern, re.DOTALL)
    return lambda completion: float(compiled.fullmatch(completion.strip()) is not None)


def length_reward(target: int, limit: int) -> Callable[[str], float]:
    """0 up to `target` characters, -1 from `limit` on, a straight line between: DAPO's soft
    overlong punishment (arXiv 2503.14476, equation 13) in characters."""
    return lambda completion: -min(max(len(completion) - target, 0) / (limit - target), 1.0)


def math_verify_reward() -> Callable[[str, str], float]:
    """(completion, answer) -> 1 where math-verify finds them mathematically equal, else 0.

    An answer without LaTeX marks is read as one LaTeX expression; a completion as prose with
    expressions in it. The package's own timeouts are off: they ring SIGALRM, which waits until C
    code returns, and a worker can be killed.

    Raises:
        UserError: math-verify is not installed.
    """
    try:
        from math_verify import parse, verify
    except ModuleNotFoundError as fault:
        raise UserError(
            f"task.reward: math_verify needs {fault.name}: pip install 'fp8rl-jax[envs]'"
        ) from fault

    @lru_cache(maxsize=1024)
    def gold(answer: str) -> list[Any]:
        expressions = parse(as_latex(answer), parsing_timeout=None)
        if not expressions:
            raise ValueError(f"math-verify reads no expression in the answer {answer[:80]!r}")
        return expressions

    def score(completion: str, answer: str) -> float:
        return float(
            verify(gold(answer), parse(completion, parsing_timeout=None), timeout_seconds=None)
        )

    # sympy loads parts of itself at the first use, which belongs to the start and not to a sample's
    # time
    gold("$1$")
    return score


def as_latex(answer: str) -> str:
    """A right answer as math-verify reads it: "x+1" -> "$x+1$", "1e3" -> "$1000$"; LaTeX stays as
    it is."""
    answer = answer.strip()
    if SCIENTIFIC.fullmatch(answer):
        answer = format(Decimal(answer), "f")
    return answer if LATEX.search(answer) else f"${answer}$"
