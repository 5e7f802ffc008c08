"""What of a text is its answer: its last number, or the inside of its last tag or box.

An answer is read as a careful reader reads it, or not at all: "" is a reward of 0 that can be seen,
and another number than stands there is a reward for a wrong answer that cannot. So the last number
of a text is where its last digit is, and it is read where it is a number of its own. In "3-4",
"10:30", "2x", "x^2", "(1, 2)" or "version 1.2.3" it is a part of something else, and nothing is
read, not even an earlier number.

Three steps: notation that says the same in LaTeX, Markdown and Unicode becomes one plain notation
(`_SPELLINGS`), one grammar says what a number is (`_NUMBER`), and one says what around it makes it
a part of something else (`_PART`).
"""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from collections.abc import Callable
from decimal import Context, Decimal, DivisionByZero, Inexact, InvalidOperation, localcontext

from fp8rl_jax.config.tasks import Extract


def extract_answer(text: str, how: Extract) -> str:
    r"""Extract the part of a text that is its answer.

    "whole" removes surrounding whitespace. The others give "" where there is none:

    "last_number" gives the last number as decimal digits, without what groups its thousands
    ("so 1,250.5 in all" -> "1250.5", "-$\frac{3}{4}$" -> "-0.75", "2 million" -> "2000000"). A
    percentage is the number before the sign. A fraction that no decimal equals is none.

    "answer_tag" gives the inside of the last <answer></answer> that is not empty, "boxed" that of
    the last \boxed{} or \fbox{}, "after_hashes" the rest of the line after the last "####".
    """
    return _EXTRACTIONS[how](text).strip()


def _answer_tag(text: str) -> str:
    return next((inside for inside in reversed(_TAG.findall(text)) if inside.strip()), "")


_TAG = re.compile(
    r"<answer(?:\s[^<>]*)?(?<!/)>((?:(?!</?answer\b).)*+)</answer\s*>", re.DOTALL | re.IGNORECASE
)


def _boxed(text: str) -> str:
    inside = next((inside for inside in reversed(boxes(text)) if inside.strip()), "")
    inner = boxes(inside)
    if not inner:
        return inside
    # A box alone in a box is the answer; of any others it is not said which one is.
    alone = _BOX.sub("", inside, count=1).strip() == inner[0] + "}"
    return _boxed(inside) if alone and _BOX.match(inside.strip()) else ""


def boxes(text: str) -> list[str]:
    r"""Insides of the outermost boxes, in their order; a box that is not closed has none."""
    insides, end = [], 0
    while opening := _BOX.search(text, end):
        depth, end = 1, opening.end()
        for brace in _BRACE.finditer(text, end):
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if not depth:
                insides.append(text[end : brace.start()])
                end = brace.end()
                break
        else:
            break
    return insides


_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def _after_hashes(text: str) -> str:
    _, hashes, after = text.rpartition("####")
    return after.strip().partition("\n")[0] if hashes else ""


def same_number(text: str, other: str) -> bool:
    """Say whether two extracted numbers have one value; "" has none."""
    return bool(text and other) and Decimal(text) == Decimal(other)


_LETTER = "A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u0370-\u03ff\u0400-\u052f"
"""Of alphabets in which a letter at a number makes a word, a unit or a product of it; Chinese,
Japanese and the like write "42个" for "42 of them"."""
_MONTH = (
    "(?:January|February|March|April|May|June|July|August|September|October|November|December|"
    r"(?:Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept?|Oct|Nov|Dec)\b)"
)
_UNIT = r"(?:[kcm]m|k?g|mg|lbs?|ft|m?L|ml|mins?|hrs?|secs?|mph|km?ph|cents?)"
_DOTTED = r"(?:[\u20ac\u20ab]|R\$|Rp\.?|(?:EUR|Euro|IDR|VND|\u0111\u1ed3ng)\b)"
_LENGTH = r"(?:[kcdm]m|ft|yd|units?|feet|inch(?:es)?|(?:centi|kilo)?met(?:er|re)s?)"
_MIXED = (
    "(?:days?|h(?:ou)?rs?|h|min(?:ute)?s?|feet|ft|pounds?|lbs?|dollars?|years?|weeks?|months?|k?m"
    "|cm|kg|met(?:er|re)s?|degrees?|gallons?|yards?|tablespoons?|tbsp|cups?|tens|cents?)"
)
_PER = (
    "(?:day|week|month|mo|year|yr|hour|hr|h|minute|min|second|sec|person|child|student|unit|item"
    "|each|piece|box|bag|pack|bottle|ticket|book|gallon|gal|lit(?:er|re)|pound|lb|ounce|oz|kg|mile"
    "|mi|km)"
)
_SCALES = {
    "hundred": 2,
    "thousand": 3,
    "lakh": 5,
    "million": 6,
    "crore": 7,
    "billion": 9,
    "trillion": 12,
}

_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d", "-"),
        **dict.fromkeys(map(chr, (0xA0, *range(0x2000, 0x200B), 0x202F, 0x205F, 0x3000)), " "),
        **dict.fromkeys("\0\u200b\u200c\u200d\u200e\u200f\u2060\ufeff\u00ad", ""),
        **dict.fromkeys("\ufe0f\u20e3", ""),  # what makes an emoji of a digit
        **dict.fromkeys("\u2018\u2019\u2032\u02d9", "'"),
        **dict.fromkeys("\u201c\u201d\u2033", '"'),
        **dict.fromkeys("\u2044\u2215\uff0f", "/"),
        **dict.fromkeys("\u22c5\u2219", "\u00b7"),
        **dict.fromkeys("\u3001\uff0c\u066c", ","),
        **dict.fromkeys("\u2192\u21d2\u27f9\u2248\u2243\uff1d", "="),
        **dict(zip("\uff0e\u066b\uff1a\uff05\uff0b\uff08\uff09", "..:%+()", strict=True)),
        "\u2015": "\u2014",
        "\u00ba": "\u00b0",
        # \u00bd is {1/2}, as \frac{1}{2} is below
        **{
            char: "{" + unicodedata.normalize("NFKC", char).replace("\u2044", "/") + "}"
            for char in map(chr, (*range(0xBC, 0xBF), *range(0x2150, 0x215F)))
        },
    }
)
"""Of each character the one of the plain notation: one minus, one space."""


def _digits(found: re.Match[str]) -> str:
    return "".join(str(unicodedata.digit(char, "-")) for char in found[0])


_SPELLINGS: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(pattern), plain)
    for pattern, plain in (
        (r"(?![0-9])\d", _digits),  # of any script
        (r"[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207b]+", lambda found: f"^{_digits(found)}"),
        (r"[\u2080-\u2089]+", lambda found: f"_{_digits(found)}"),
        # what is struck out, what a calculator was told
        (r"~~(?=\S)[^~\n]+(?<=\S)~~", " "),
        (r"<<[^<>\n]*=[^<>\n]*>>", ""),
        # LaTeX: an exclamation mark before the end of a formula is a factorial; spaces, relations
        (r"!(?=\s*(?:\$|\\\)|\\\]))", r"\\factorial "),
        (r"\{,\}", ","),
        (r"(?<!\\)\\!", ""),
        (r"(?<!\\)\\[,;: >]|~", " "),
        (
            r"\\(?:q?quad|displaystyle|left|right|[bB]igg?[lr]?|bf|rm|[lL]arge|LARGE|[hH]uge"
            r"|(?:black)?square|qed|checkmark)(?![A-Za-z])"
            r"|\\(?:begin|end)\{(?:equation|align(?:ed)?|gather(?:ed)?|center|split)\*?\}",
            " ",
        ),
        (r"\{\}", ""),
        (
            r"\\(?:approx|simeq|cong|to|[rR]ightarrow|Longrightarrow|implies|therefore)"
            r"(?![A-Za-z])",
            "=",
        ),
        (r"\\(?:times|cdot)(?![A-Za-z])", "\u00d7"),
        (r"\\[lc]?dots(?![A-Za-z])", "..."),
        (r"[<>]=", "<"),
        (r"(?<![-=])[-=]+>", "="),
        (r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\degree\b", "\u00b0"),
        (r"\\([$%#])", r"\1"),
        # words in a formula, with the exponent of a unit; what only changes how a thing looks
        (r"\\(?:text\w*|math[a-z]+|mbox)\s*\{([^{}\d]*)\}(?:\^\s*\{?-?\d\}?)?", r" \1 "),
        (r"\\(?:text\w*|math[a-z]+|mbox|bm|boldsymbol|underline|emph|boxed|fbox)\s*\{", " {"),
        (r"\^\s*\{\s*([-+]?\d+)\s*\}", r"^\1"),
        (r"\\[dtc]?frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\}", r"{\1/\2}"),
        (r"\\[dtc]?frac\s*(\d)\s*(\d)(?!\d)", r"{\1/\2}"),
        (r"(?<!\\)\\[()\[\]]", " "),
        # tags, rows of a table, bullets, emphasis
        (r"</?[A-Za-z][\w-]*(?:\s+[\w-]+=[^<>]*)?\s*/?>|<\|\w+\|>|\[/?[A-Z]{3,}\]", " "),
        (
            r"(?m)^[ \t]*\|[ \t](?=[^\n|]*\|[^\n]*[ \t]\|[ \t]*$)[^\n]*$",
            lambda found: found[0].strip(" \t|").replace("|", ";"),
        ),
        (r"(?m)(?<![\d)]\n)^[ \t]*(?:\*[ \t]+|[-+\u2022][ \t]+(?=\*\*|__))", ""),
        (r"(\*{2,3})([^*\n]*:)[ \t]*\1", r"\2 "),
        (r"(?<![\w)\]`])(_{1,3}|`+)(?=\S)([^_`\n]*)(?<=\S)\1(?![\w`])", r"\2"),
        (
            r"(?<![\w)\]*`])(\*{1,3})(?=\S)"
            r"((?:[^*`\n]|(?<=\s)\*(?=\s))*)(?<=\S)\1(?![\w*`])",
            r"\2",
        ),
        (r"(?m)(?<=\S)\*{1,3}(?=[.,:;!?)]?(?:\s|$))", ""),
        # in the currencies of countries that write 1.000 for a thousand it is not said which it is
        (rf"({_DOTTED}\s?\d{{1,3}})\.(?=\d{{3}}(?![\d.,]*\d))", r"\1.."),
        (rf"(?<!\.\d\d)(?<=\d)\.(?=\d{{3}}\s?{_DOTTED})", ".."),
        # a sign of money is none of the number; "$5$6" are two
        (r"(?<=\d)\s*\$", " "),
        (r"(?<![A-Za-z])(?:US|CA?|AU?|NZ|HK|S|R)?\$\s*(?=[-\d.])|\$", ""),
        (r"(?<=[\d ])[\u00a2-\u00a5\u20a0-\u20c0]|[\u00a2-\u00a5\u20a0-\u20c0]\s*", ""),
        (r"\b(?:USD|EUR|GBP|JPY|INR|CHF|Rs)\b\.?\s*(?=[-\d.])", ""),
        # what of a formula became two spaces beside a word
        (r"(?<=[^\W\d_])[ \t]{2,}+|(?<![ \t])[ \t]{2,}+(?=[^\W\d_])", " "),
        # square metres
        (
            rf"(\d\s*(?:{_LENGTH}|[kc]?m/s|k?g/c?m)|\d\s+(?:m|in|mi|s))"
            r"\^?[23](?![\w.]*\d)(?!\w)",
            r"\1",
        ),
    )
]
_ENUMERATION = re.compile(r"^[ \t]*\(?\d{1,2}[.)][ \t]+(?=\S)", re.MULTILINE)

_NUMBER = re.compile(
    r"""
    (?P<sign> [-+] [^\S\n]* )?
    (?:
        (?: (?P<whole> \d+) (?: [^\S\n]* (?=\{) | [ ] ) )?       # 1 1/2, {1/2}, 1{1/2}
        \{? (?P<above> -?\d+) [ ]? / [ ]? (?P<below> \d+) \}?
    |
        (?P<digits>
            (?<![(\[]) (?<![(\[]-)                              # (1,234) may be two numbers
            [1-9]\d{0,2} (?P<mark> [,'_ ]) \d{3} (?: (?P=mark) \d{3} )* (?!\d) (?: \.\d+ )?
        |   [1-9]\d{0,2} (?: (?: \.\d{3} ){2,} (?: ,\d+ )? | \.\d{3},\d{1,2} ) (?!\d)
        |   [1-9]\d? (?: ,\d{2} )+ ,\d{3} (?!\d) (?: \.\d+ )?        # lakhs, crores
        |   \d+ (?: \.\d+ )?
        |   \.\d+
        )
        (?: [eE] (?P<exponent> [-+]?\d{1,3})
        |   [ ]? [\u00d7\u00b7*xX] [ ]? 10 [ ]? \^ (?P<of_ten> [-+]?\d{1,3})
        |   [ ]? \^ (?P<power> [-+]?\d{1,3})                       # read of 10 alone
        )?
    )
    (?: [^\S\n]+ (?P<scale> (?i: hundred | thousand | lakh | million | crore | billion | trillion ))
        s?\b )?
    """,
    re.VERBOSE,
)

_PART = re.compile(
    rf"""
    # Another thing touches it. \0 is the number without its sign.
        [{_LETTER}\d_^\\)\]}}] (?: [({{\[] \s* [-+]? [^\S\n]* )? \0 | \. \0
    |   [{_LETTER}\d_^\\)\]}}] [-+] [^\S\n]* \0
    |   \d ['"%\u00b0] \0
    |   [.] [({{\[] \0
    |   \0 (?! {_UNIT} (?![{_LETTER}\d]) ) [{_LETTER}_]
    |   \0 (?: [({{\[\-\u2026\u0300-\u036f] | \.\. )
    # A thousand or a million in another language; \u5343\u514b is kg, \u5343\u7c73 km.
    |   \0 [^\S\n]? (?:
            [\u5341\u767e\u4e07\u842c\u4ebf\u5104\u5146] | \u5343 (?![\u514b\u7c73])
        |   [\ubc31\ucc9c\ub9cc\uc5b5\uc870]
        |   (?i: (?: mil | mille | mio | mrd ) \b
            |   mil+(?:io|on|\u00f3n|i\u00f3|i\u00f5|h\u00f5|iar|yon|yar) | tausend
            |   \u0442\u044b\u0441 | \u043c\u0438\u043b+\u0438 | \u043c\u043b[\u043d\u0440]
            |   tri\u1ec7u | ngh\u00ecn | ng\u00e0n | t\u1ef7 | juta | ribu
            |   \u0932\u093e\u0916 | \u0915\u0930\u094b | \u0939\u091c
            |   \u0645\u0644\u064a | \u0623\u0644\u0641 | \u0622\u0644\u0627\u0641 )
        )

    # Another number is joined: 3 4, 3 and 4, 3:4, 3 x 4, 3 cm by 4 cm, 1, ..., 9; x = 3, y = 4
    |   \d [%\u00b0)\]}}]* (?: [ ]? {_UNIT} \b )? (?:
            [^\S\n]+ [({{\[]?
        |   [^\S\n]* : (?!\s) | [^\S\n]+ : [^\S\n]*
        |   \s* (?: ,? \s* \b (?: and | or | (?:up\s+)? to | through | by | vs | in
                | und | oder | bis | et | ou | y | e | o | \u0438 | \u0438\u043b\u0438
                | (?:out\s+)? of (?:\s+every)? ) \b \.?
            |   [,;/|&\u2014\u2026\u301c\uff5e] | \.\.+ | [xXR]
            |   [\u81f3\u5230\u6216\u548c\u4e0e\u3068\u3084]
            |   (?: ,? \s* with )? (?: \s+ a )? ,? \s* rem(?:ainder)?\b (?: \s+ of )? ) \s* [({{\[]?
        ) [-+]? \0
    |   (?<! [\w)^*/+-] ) (?<! [*/+-][ ] ) [{_LETTER}] \w? (?:_\w)? \s* =
        (?: [^=\n]{{1,30}}? (?: \b (?: and | or ) \b | [,;&] ) \s* | \s* -?[\d./]+ [^\S\n]+ )
        [{_LETTER}] \w? (?:_\w)? \s* = \s* [-+]? \0
    |   [\d,] \s* (?: \.\.+ | \u2026 ) ,? \s* [-+]? \0
    |   \d \s? (?: {_MIXED} | hundred | thousand | million | billion ) \s+ (?:and\s+)? \0
    |   \d \s? {_MIXED} , \s+ (?:and\s+)? \0 \s?
        (?: {_MIXED} | inch(?:es)? | in | oz | ounces? | sec(?:ond)?s? ) \b
    |   \d \s? [\u5e74\u6708\u65e5\u65f6\u6642\u70b9\u5206\ub144\uc6d4] \s? \0       # dates, times
    |   \d (?: \u5c0f\u65f6 | \u6642\u9593 | \uc2dc\uac04
        |   [\u65f6\u70b9\u5206\u5143\u5757\u7c73\u5e74\u5468\u5929\u65a4] ) \s* \0
    |   (?: \u7b2c | (?<!\u767e) \u5206 [\u4e4b\u306e] | \ubd84\uc758 ) \s* \0  # the 5th, fifths
    |   \0 (?: \u756a\u76ee | \ubc88\uc9f8 | [\u4e2a\u500b]?\u534a | \u5272 )  # the 5th, and a half

    # It stands in a tuple, an interval or a matrix.
    |   [(\[{{] \s* [-+]? \0 \s* [,;] | [,;] \s* [-+]? \0 \s* [)\]}}] | & \s* [-+]? \0 | \0 \s* &
    |   \\\\ \s* [-+]? \0 | \\begin \{{\w+\*?\}} (?: \{{\w+\}} )? \s* [-+]? \0

    # An operator, a relation, a command or a function takes it.
    |   [*/^\u00d7\u00b7\u00f7\u00b1\u2213<>\u2264\u2265\u2260\u2261\u2208_|\u221a-\u221c\u2211]
        [^\S\n]* [({{]? [-+]? [^\S\n]* \0
    |   != \s* \0
    |   (?<! [{_LETTER}] ) [xX] [ ]* \0
    |   [-+] [^\S\n]* [-+({{\[] [^\S\n]* [-+]? \0
    |   [\d)\]}}%\u00b0] [^\S\n]* [-+] [^\S\n]* \0
    |   (?<![=:({{]) (?<![=:({{][ ]) [-+] [ \t]+ \0
    |   (?<! [{_LETTER}'] ) [{_LETTER}] [ ]+ [-+] \0
    |   (?: ^ | [\s\d] ) \u2014 \0
    |   \\[A-Za-z]+ \s* (?: \[[^\]]*\] )? \s* (?: [({{] \s* ){{0,2}} [-+]? \0
    |   \}} (?: [^\S\n]* | \{{ ) [-+]? \0
    |   \0 [%\u00b0]? \s* (?! / \s? {_PER} \b )
        (?: [*/^+\u00d7\u00b7\u00f7\u00b1\u2213<>\u2264\u2265\u2260|\u221a\u03c0]
        |   \\ (?!end\b) [A-Za-z] )
    |   \0 \}} (?: [{_LETTER}] | [%\u00b0]? [^\S\n]* (?: [*/^+\u00d7\u00b7\u00f7] | \\ [A-Za-z] ) )
    |   \0 [%\u00b0]? [^\S\n]+ - [^\S\n]* (?: [\d(\\] | [{_LETTER}] (?![{_LETTER}]) )
    |   \0 !+ (?! [!\s"')\]] | $ )
    |   \0 [ ] [b-fknp-rtx-z] \b (?!')

    # A word says that it is another, or none.
    |   \b (?: minus | negative | plus | times | (?:divided|multiplied)[ ]by | over | than | except
        |   instead[ ]of | nearest | rounded(?:[ ]up|[ ]down)?[ ]from | squared | root(?:[ ]of)?
        |   mod | modulo | log | ln | lg | exp | sin | cos | tan | cot | sec | csc | sqrt | base
        |   [Vv]ersion | [Ss]tep | [Cc]hapter | [Ss]ection | [Ff]igure | [Ee]quation | [Mm]ethod
        |   [Pp]art | [Cc]ase | [Qq]uestion | [Pp]roblem | [Ee]xample | Table | Theorem | Lemma
        |   {_MONTH} )
        \b \.? [\s(]* [-+]? \0
    |   (?: [\u8d1f\u8ca0] | \u30de\u30a4\u30ca\u30b9 | \ub9c8\uc774\ub108\uc2a4 | \u4e0d\u662f
        |   \u4e0d\u7b49\u4e8e ) \s* \0
    |   \b (?: menos | moins | meno | nicht | n?est\spas | no\ses | \u043c\u0438\u043d\u0443\u0441
        |   \u043d\u0435 ) \s+ [-+]? \0
    |   \0 \s (?: et\sdemi | y\smedi[oa] | e\smei[oa] | Uhr ) \b
    |   (?: \b (?: [Nn]ot | [Cc]annot | [Nn]ever ) | n't ) \s+ (?: [^\W\d]+ \s+ ){{0,2}} [-+]? \0
    |   \0 \s (?: of \s )? {_MONTH}
    |   \0 \s \(? (?: repeating | recurring | decimal | significant ) \b
    |   \0 \s (?: dozens? | scores? | gross | hal(?:f|ves) | thirds? | quarters | fourths? | fifths?
        |   sixths? | sevenths? | eighths? | ninths? | tenths? | hundredths? | thousandths?
        |   squared | cubed | factorial | choose | over | mod(?:ulo)? | plus | minus | divided
        |   point |   hundred | thousand | lakh | million | crore | billion | trillion
        |   [KMBT] | bn | mn | mil | mln | [ap]\.?m\b | o'clock
        |   and \s (?: a | an | one | two | three | half ) \b (?: [ ] | $ ) ) \b
    """,
    re.VERBOSE | re.MULTILINE,
)
_AROUND = 80


def _plain(text: str) -> str:
    text = text.translate(_CHARACTERS)
    for pattern, plain in _SPELLINGS:
        text = pattern.sub(plain, text)
    return text


def read_number(text: str) -> str:
    """Read a text that is one number, with a sign of money or a unit in words; else "".

    The number is written as `extract_answer` does. A percentage is none.
    """
    plain = _plain(text).strip(" {}").rstrip(".")
    number = _NUMBER.match(plain)
    if not number or not _QUANTITY.fullmatch(plain, number.end()):
        return ""
    around = f"{number['sign'] or ''}\0{plain[number.end() :]}"
    return "" if _PART.search(around) else _value(number)


_QUANTITY = re.compile(
    r"(?:\s*(?!and\b|or\b|if\b|when\b|mod\b|sin\b|cos\b|tan\b|log\b|ln\b)[A-Za-z]{2,}){0,3}"
    r"|\s+[gmsL]|\s*\u00b0[CF]?"
)


def _last_number(text: str) -> str:
    text = _plain(text)
    if len(_ENUMERATION.findall(text)) > 1:
        text = _ENUMERATION.sub("", text)
    numbers = deque(_NUMBER.finditer(text), maxlen=1)
    if not numbers:
        return ""
    (number,) = numbers
    sign, start = number["sign"] or "", number.start()
    around = f"{text[max(0, start - _AROUND) : start]}{sign}\0{text[number.end() :][:_AROUND]}"
    return "" if _PART.search(around) else _value(number)


def _value(number: re.Match[str]) -> str:
    """Write what `_NUMBER` matched in decimal digits; "" where no decimal is equal to it."""
    minus = "-" if "-" in (number["sign"] or "") else ""
    digits = _without_groups(number["digits"] or "")
    if number["power"]:
        if digits != "10":
            return ""
        digits = "1"
    power = int(number["exponent"] or number["of_ten"] or number["power"] or 0)
    power += _SCALES.get((number["scale"] or "").lower(), 0)
    if digits and not power:
        return minus + digits
    try:
        with localcontext(Context(prec=2000, traps=[Inexact, DivisionByZero, InvalidOperation])):
            value = Decimal(digits or number["above"]) / Decimal(number["below"] or 1)
            if number["whole"]:
                if not 0 < value < 1:
                    return ""
                value += Decimal(number["whole"])
            value = value.scaleb(power)
    except (Inexact, DivisionByZero, InvalidOperation):
        return ""
    return format(value.copy_negate() if minus else value, "f")


def _without_groups(digits: str) -> str:
    if digits.count(".") > 1 or 0 < digits.find(".") < digits.find(","):  # 1.234.567,89
        digits = digits.replace(".", "").replace(",", ".")
    digits = re.sub("[,'_ ]", "", digits)
    return f"0{digits}" if digits.startswith(".") else digits


_EXTRACTIONS: dict[Extract, Callable[[str], str]] = {
    "whole": str,
    "last_number": _last_number,
    "answer_tag": _answer_tag,
    "boxed": _boxed,
    "after_hashes": _after_hashes,
}
