"""Where a stop string lies in a completion, and its text without it, whole or as it grows.

A completion's tokens are kept whole, since they were sampled and have log-probabilities; its text
is cut. What counts is the stop string that ends first, and of several that end together the
longest: that is a matter of the text alone, and not of how it falls into tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


def find_stop(text: bytes, stops: Sequence[str]) -> tuple[int, str] | None:
    """(where it begins, the stop string), or None where the text holds none."""
    found = [
        (start + len(stop.encode()), start, stop)
        for stop in stops
        if (start := text.find(stop.encode())) >= 0
    ]
    if not found:
        return None
    _, start, stop = min(found)
    return start, stop


def cut_text(
    text: str, raw: bytes, stops: Sequence[str], include: bool = False
) -> tuple[str, str | None]:
    """A completion's text up to its stop string, and the stop string; the whole text and None where
    there is none.

    Args:
        text: as the tokenizer decodes the tokens.
        raw: the bytes of the tokens, special ones left out.
        stops: what ends a completion.
        include: leave the stop string in the text.
    """
    found = find_stop(raw, stops)
    if found is None:
        return text, None
    start, stop = found
    rest = raw[start + len(stop.encode()) * include :].decode("utf-8", "replace")
    return text[: max(len(text) - len(rest), 0)], stop


class TextStream:
    """The text of a completion that is still growing, in pieces that can be printed.

    A character is held back until its last byte is there, and whatever may become a stop string
    until it is one or not.

    Args:
        token_bytes: of every token.
        stops: what ends a completion; it is not part of the text.
    """

    def __init__(self, token_bytes: Sequence[bytes], stops: Sequence[str] = ()):
        self._token_bytes, self._stops = token_bytes, stops
        self._waiting = b""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._ended = False

    def feed(self, tokens: Sequence[int]) -> str:
        """What `tokens` add; ids that the tokenizer lacks add nothing."""
        if self._ended:
            return ""
        known = len(self._token_bytes)
        self._waiting += b"".join(self._token_bytes[token] for token in tokens if token < known)
        if found := find_stop(self._waiting, self._stops):
            self._ended = True
            return self._decoder.decode(self._waiting[: found[0]], final=True)
        held = max((_overlap(self._waiting, stop.encode()) for stop in self._stops), default=0)
        ready = self._waiting[: len(self._waiting) - held]
        self._waiting = self._waiting[len(ready) :]
        return self._decoder.decode(ready)

    def finish(self) -> str:
        """What was held back, once there is nothing to come."""
        if self._ended:
            return ""
        self._ended = True
        return self._decoder.decode(self._waiting, final=True)


def _overlap(text: bytes, stop: bytes) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    return next(
        (
            size
            for size in range(min(len(text), len(stop) - 1), 0, -1)
            if text.endswith(stop[:size])
        ),
        0,
    )
