r"""The reward math_verify: whether two answers say the same, by the package math-verify.

The package reads whatever it is given, and some things as others: 1 1/2 as 1, 1\,000 as 0,
0.\overline{3} as 0, 2024-05-01 as 2018, the vector \langle 1,2 \rangle as 1.2, of equations in
cases the last number, east as the product of its letters and so as seat. So both sides are first
written as it reads them rightly, numbers by the grammar of `extraction`, and what it would read in
part is compared as text. It takes a number with any unit for the number; two usual units that are
not the same are told apart here. A decimal that agrees with an expression in six places counts.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from decimal import Decimal
from functools import lru_cache
from typing import Any

from fp8rl_jax.errors import UserError
from fp8rl_jax.tasks.extraction import boxes, extract_answer, read_number, same_number


def math_verify_reward() -> Callable[[str, str], float]:
    r"""Build (completion, answer) -> 1 where math-verify finds them equal, else 0.

    An answer is read as one expression, with LaTeX marks or without. A completion is read by its
    last <answer></answer> where it has one, by its box where it has one; otherwise as prose with
    expressions in it, or with a last number where there are none. The package's own timeouts are
    off: they ring SIGALRM, which waits until C code returns, and a worker can be killed.

    The function that is returned raises ValueError for an answer in which math-verify reads
    nothing.

    Raises:
        UserError: math-verify is not installed.
    """
    try:
        from math_verify import parse, verify
        from sympy import FiniteSet, Interval, Tuple
    except ModuleNotFoundError as fault:
        raise UserError(
            f"task.reward: math_verify needs {fault.name}: pip install math-verify"
        ) from fault

    def expressions_of(text: str) -> list[Any]:
        found = parse(text, parsing_timeout=None)  # ty: ignore[invalid-argument-type]: documented
        # What it found beside the expressions is the text that they stand in.
        return [each for each in found if isinstance(each, str)] if _PARTLY.search(text) else found

    @lru_cache(maxsize=1024)
    def gold(answer: str) -> list[Any]:
        expressions = expressions_of(as_latex(_boxed_alone(answer) or answer))
        if not expressions:
            raise ValueError(f"math-verify reads no expression in the answer {answer[:80]!r}")
        return expressions

    def score(completion: str, answer: str) -> float:
        expected, number = gold(answer), read_number(answer)
        if tagged := extract_answer(completion, "answer_tag"):
            completion = tagged
        boxed = _boxed_alone(completion) or (
            tagged if len(_PROSE.findall(tagged)) < _SENTENCE else ""
        )
        units = {unit for unit in (_unit(answer), _unit(boxed)) if unit}
        if len(units) > 1:
            return 0.0
        if number and (said := read_number(boxed)):
            return float(same_number(said, number))
        base = _BASE.search(boxed or completion)
        if base and base[1] not in _BASE.findall(answer):
            return 0.0
        given = expressions_of(as_latex(boxed) if boxed else _ascii(_BOLD.sub(r"\1", completion)))
        if number and not given:
            return float(same_number(extract_answer(completion, "last_number"), number))
        if r"\{" in boxed and any(isinstance(each, Interval | Tuple) for each in expected):
            given = [each for each in given if not isinstance(each, FiniteSet)]
        # six digits of the answer, and six decimals at least
        decimals = max(6, 6 - Decimal(number).adjusted()) if number else 6
        return float(verify(expected, given, float_rounding=decimals, timeout_seconds=None))

    # sympy loads parts of itself at the first use, which belongs to the start and not to a sample's
    # time
    gold("$1$")
    return score


def _boxed_alone(text: str) -> str:
    """What the text's box says, with a sign before and a percent sign after it; "" where it has no
    box or several."""
    insides = [inside for inside in boxes(text) if inside.strip()]
    if len(insides) != 1:
        return ""
    (inside,) = insides
    before, _, after = text.partition("{" + inside + "}")
    inside = f"-({inside})" if _MINUS.search(before) else inside
    return f"{inside}\\%" if re.match(r"\s*\\?%", after) else inside


_MINUS = re.compile(r"[-\u2212]\s*\\\w+\s*$")
_PARTLY = re.compile(r"\\begin\s*\{(?!\w?matrix\}|array\})")
_BASE = re.compile(r"\d_\{?(\d+)\}?\s*\$?\s*$")
_MARKED = re.compile(r"(?<!\\)\$[^$]+(?<!\\)\$|\\\(|\\\[|\\boxed")
_CALENDAR = re.compile(r"\d{4}-\d\d-\d\d|\d\d?/\d\d?/\d{2,4}|\d\d?\.\d\d?\.\d{4}|\d\d?:[0-5]\d")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar)\s*\{(\d{1,20})\}")
_FUNCTION = re.compile(r"(?<![A-Za-z\\])(sin|cos|tan|cot|sec|csc|log|ln|exp)(?![A-Za-z])")
_PROSE, _SENTENCE = re.compile(r"(?<![A-Za-z\\])[a-z]{2,}"), 4
_BOLD = re.compile(r"(?<![\w)])\*\*([^*\n]+)\*\*(?![\w(])")
_SYMBOLS = {"pi": r"\pi ", "inf": r"\infty ", "infinity": r"\infty "}
_SYMBOL = re.compile(r"(?<![A-Za-z\\])(?:pi|inf(?:inity)?)(?![A-Za-z])")
_UNICODE = (
    (r"\u221a\s*(?=\{)", r"\\sqrt"),
    (r"(?:\u221a|(?<![A-Za-z\\])sqrt)\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"(?:\u221a|(?<![A-Za-z\\])sqrt)\s*(\d+|[A-Za-z](?![A-Za-z]))", r"\\sqrt{\1}"),
    (
        r"[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207b]+",
        lambda found: f"^{{{unicodedata.normalize('NFKC', found[0]).replace(chr(0x2212), '-')}}}",
    ),
    ("\u221e", r"\\infty "),
    ("\u2208", r"\\in "),
    ("[\u00b7\u22c5]", r"\\cdot "),
)
_WORD = re.compile(
    r"(?<![A-Za-z\\])(?!(?:and|or|sqrt|mod|inf|inf(?:ini)?ty)(?![A-Za-z]))"
    r"[A-Za-z]{3,}(?:[ '-]+[A-Za-z]+)*"
    r"|(?<!.)[A-Za-z]{2}(?!.)"
)
_REWRITINGS = (
    (r"\smallmatrix", r"\matrix"),
    ("{smallmatrix}", "{matrix}"),
    (r"\langle", "("),
    (r"\rangle", ")"),
    (r"\varnothing", r"\emptyset"),
    ("**", "^"),
)


_UNITS = {
    name: unit
    for unit, names in {
        "s": "s sec second",
        "min": "min minute",
        "h": "h hr hour",
        "day": "day",
        "week": "week",
        "month": "month",
        "year": "yr year",
        "mm": "mm millimeter millimetre",
        "cm": "cm centimeter centimetre",
        "m": "m meter metre",
        "km": "km kilometer kilometre",
        "in": "in inch inche",
        "ft": "ft foot feet",
        "yd": "yd yard",
        "mi": "mi mile",
        "mg": "mg milligram",
        "g": "g gram",
        "kg": "kg kilogram",
        "lb": "lb pound",
        "cent": "cent",
        "dollar": "dollar",
    }.items()
    for name in names.split()
}
_UNIT = re.compile(r"\d[\s}]*(?:\\[,;: ]|\\(?:text|mathrm|mbox)\s*\{|[\s~])*([A-Za-z]+)")


def _unit(text: str) -> str:
    """The unit of the text's first quantity, where it is one of the usual."""
    found = _UNIT.search(text)
    word = found[1].lower() if found else ""
    return _UNITS.get(word) or _UNITS.get(word.removesuffix("s"), "")


def _ascii(text: str) -> str:
    """Write roots, exponents and infinity in LaTeX, where math-verify reads no Unicode."""
    for written, plain in _UNICODE:
        text = re.sub(written, plain, text)
    return text


def as_latex(answer: str) -> str:
    r"""Write an answer as math-verify reads it: "x+1" as "$x+1$", "1e3" as "$1000$".

    Words become text ("east" -> r"$\text{east}$"), as dates and times do. What has marks of LaTeX
    stays as it is, unless all of it is a number.
    """
    answer = answer.strip()
    if number := read_number(answer):
        return f"${number}$"
    for written, plain in _REWRITINGS:
        answer = answer.replace(written, plain)
    answer = _REPEATING.sub(_repeating, re.sub(r"(?<=\d)\\[,;: ](?=\d{3}(?!\d))", "", answer))
    if _MARKED.search(answer):
        return _ascii(answer)
    answer = re.sub(r"(?<!\\)\$", "", answer)
    if _CALENDAR.fullmatch(answer):
        return rf"$\text{{{answer}}}$"
    answer = _FUNCTION.sub(r"\\\1 ", answer)
    if "\\" not in answer:
        answer = _WORD.sub(r"\\text{\g<0>}", answer)
    return f"${_ascii(_SYMBOL.sub(lambda found: _SYMBOLS[found[0]], answer))}$"


def _repeating(decimal: re.Match[str]) -> str:
    r"""Write 0.1\overline{6} as the fraction that it is."""
    whole, once, again = decimal.groups()
    nines = 10 ** len(again) - 1
    below = nines * 10 ** len(once)
    return rf"\frac{{{int((whole + once) or '0') * nines + int(again)}}}{{{below}}}"
