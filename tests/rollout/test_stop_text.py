"""Text with stop strings cut off, whole and streamed, against a reader that goes letter by
letter."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fp8rl_jax.rollout.constraints import TextStream, find_stop, text_before_stop

STOPS = st.lists(st.text("ab é", min_size=1, max_size=4), max_size=3)
PIECES = st.lists(
    st.one_of(st.text("ab é", max_size=4).map(str.encode), st.binary(max_size=2)), max_size=12
)


def read(text: str, stops: list[str]) -> tuple[str, str | None]:
    for end in range(len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            stop = max(ended, key=lambda stop: len(stop.encode()))
            return text[: end - len(stop)], stop
    return text, None


@settings(max_examples=300, deadline=None)
@given(PIECES, STOPS)
def test_cut_and_streamed_text_are_those_of_a_slow_reader(pieces, stops):
    raw = b"".join(pieces)
    text = raw.decode("utf-8", "replace")
    shown, stop = read(text, stops)
    assert text_before_stop(text, raw, stops) == (shown, stop)
    assert text_before_stop(text, raw, stops, include=True) == (shown + (stop or ""), stop)
    assert text_before_stop(text.removeprefix(" "), raw, stops)[0] == (
        shown if stop == " " and not shown else shown.removeprefix(" ")
    )
    stream = TextStream(pieces, stops)
    out = [stream.feed([i]) for i in range(len(pieces))]
    assert "".join(out) + stream.finish() == shown


def test_nothing_is_held_back_without_need():
    pieces = [b"x", b"\xc3", b"\xa9", b"E", b"N", b"x", b"END", b"y"]
    stream = TextStream(pieces, ["END"])
    assert [stream.feed([i]) for i in range(8)] == [
        "x",
        "",
        "é",
        "",
        "",
        "ENx",
        "",
        "",
    ] and stream.finish() == ""
    stream = TextStream(pieces)
    assert [stream.feed([i]) for i in (0, 8, 3, 1)] == [
        "x",
        "",
        "E",
        "",
    ] and stream.finish() == "\ufffd"


def test_the_string_that_ends_first_counts_and_then_the_longest():
    assert find_stop(b"..abcd", ["bc", "abcd"]) == (3, "bc")
    assert find_stop(b"..abcd", ["cd", "abcd", "d"]) == (2, "abcd")
    assert find_stop(b"..abcd", ["x"]) is None
