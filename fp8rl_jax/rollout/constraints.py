"""What may be sampled, and where a completion stops: stop strings, bad words, logit bias.

All three speak of the completion alone: a phrase that begins in the prompt is not matched.

A phrase may begin in the middle of one token and end in the middle of another, so its tokens are
not known beforehand; its bytes are. An Aho-Corasick automaton (Aho and Corasick, CACM 1975) reads
the bytes of all phrases at the same time. What a token does to it is a column, one entry for each
state that it may be read in:

    next[state, kind]     where the automaton is after the token
    hits[state, kind]     whether a phrase ends somewhere inside the token
    kinds[token]          the token's column

Most tokens have no more than a few letters in common with any phrase and share a column, so a
vocabulary of 150,000 has some hundreds of kinds. A row of a batch is then one integer, and a decode
step one lookup, which never leaves the device: a stop string ends the row whose token hits, and a
bad word takes the tokens that would hit out of the distribution.

A completion's tokens are kept whole, since they were sampled and have log-probabilities; its text
ends before the stop string. What counts is the stop string that ends first, and of several that end
at the same byte the longest: that is a matter of the text alone, and not of how it falls into
tokens.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int

from fp8rl_jax.errors import UserError
from fp8rl_jax.tokenizers.tokenizer import Tokenizer

_MAX_STATES = 2**15 - 1
_MAX_CELLS = 2**26


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Phrases:
    """The table of one set of phrases; a row starts in state 0. Sides are powers of two, so that
    few shapes are compiled.

    Attributes:
        next: int16 [states, kinds].
        hits: [states, kinds].
        kinds: int32 [vocab].
    """

    next: Int[Array | np.ndarray, "states kinds"]
    hits: Bool[Array | np.ndarray, "states kinds"]
    kinds: Int[Array | np.ndarray, " vocab"]

    def step(
        self, state: Int[Array, " b"], tokens: Int[Array, " b"]
    ) -> tuple[Int[Array, " b"], Bool[Array, " b"]]:
        """Read one token in each row: new states, and whether a phrase ended in it."""
        kinds = self.kinds[tokens]
        return self.next[state, kinds].astype(jnp.int32), self.hits[state, kinds]

    def completing(self, state: Int[Array, " b"]) -> Bool[Array, "b vocab"]:
        """Find the tokens in which a phrase would end."""
        return self.hits[state][:, self.kinds]


def compile_phrases(
    phrases: Sequence[str], token_bytes: Sequence[bytes], vocab_size: int, key: str = "phrases"
) -> Phrases:
    """Compile phrases into an automaton over tokens, as numpy arrays.

    Args:
        phrases: texts; matched as UTF-8 bytes, wherever they fall in the tokens.
        token_bytes: the bytes of every token; b"" for special tokens, which leave the state as it
            is.
        vocab_size: tokens of the model; those that `token_bytes` does not reach have no bytes.
        key: what the phrases are called in messages.

    Raises:
        UserError: a phrase is empty or has a lone surrogate, or they are too long together (32,767
            states, 2^26 cells).
    """
    if empty := [i for i, phrase in enumerate(phrases) if not phrase]:
        raise UserError(f"{key}: entry {empty[0] + 1} is empty; it would match everywhere")
    try:
        encoded = [phrase.encode("utf-8") for phrase in phrases]
    except UnicodeEncodeError as error:
        raise UserError(
            f"{key}: {error.object!r} holds a lone surrogate, which no text has"
        ) from None
    goto, final = _automaton(encoded)
    if len(goto) > _MAX_STATES:
        raise UserError(
            f"{key}: {len(goto)} states, more than {_MAX_STATES}; give fewer or shorter texts"
        )
    pieces = [*token_bytes, *[b""] * (vocab_size - len(token_bytes))]
    next_states, hits, kinds = _columns(goto, final, pieces, key)
    padded = [(0, _power_of_two(side) - side) for side in next_states.shape]
    return Phrases(
        np.pad(next_states, padded).astype(np.int16), np.pad(hits, padded), kinds.astype(np.int32)
    )


def dead_end(table: Phrases, token_bytes: Sequence[bytes]) -> bytes | None:
    """Find a text without any phrase that every token of the vocabulary would complete to one.

    Where bad words leave such a text, a row that came there could sample nothing. None where there
    is none.
    """
    used = np.unique(table.kinds)
    example = {
        int(kind): token
        for token, kind in reversed(list(zip(token_bytes, table.kinds, strict=False)))
    }
    reached, queue = {0: b""}, deque([0])
    while queue:
        state = queue.popleft()
        free = used[~table.hits[state, used]]
        if not len(free):
            return reached[state]
        for kind in free:
            following = int(table.next[state, kind])
            if following not in reached:
                reached[following] = reached[state] + example.get(int(kind), b"")
                queue.append(following)
    return None


def _automaton(phrases: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """(goto [states, 256], final [states]): every byte from every state, failure links already
    followed."""
    children: list[dict[int, int]] = [{}]
    final = [False]
    for phrase in phrases:
        node = 0
        for byte in phrase:
            if byte not in children[node]:
                children[node][byte] = len(children)
                children.append({})
                final.append(False)
            node = children[node][byte]
        final[node] = True
    goto, fail = np.zeros((len(children), 256), np.int32), [0] * len(children)
    queue = deque([0])
    while queue:
        node = queue.popleft()
        goto[node] = goto[fail[node]] if node else 0
        final[node] = final[node] or final[fail[node]]
        for byte, child in children[node].items():
            fail[child] = int(goto[node, byte]) if node else 0
            goto[node, byte] = child
            queue.append(child)
    return goto, np.asarray(final)


def _columns(
    goto: np.ndarray, final: np.ndarray, token_bytes: Sequence[bytes], key: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(next [states, kinds], hits [states, kinds], kinds [tokens]), each distinct column once.

    Tokens are read byte by byte, and a column is computed once for each (column so far, byte):
    tokens share their beginnings.
    """
    states = len(goto)
    columns = [(np.arange(states, dtype=np.int16), np.zeros(states, bool))]
    known = {columns[0][0].tobytes() + columns[0][1].tobytes(): 0}
    after: dict[tuple[int, int], int] = {}
    # bytes that are in no phrase all lead back to state 0: one stands for all of them
    unused = np.flatnonzero(~goto.any(axis=0)).tolist()
    alphabet = bytes(unused[0] if byte in unused else byte for byte in range(256))
    kinds = np.zeros(len(token_bytes), np.int64)
    for row, token in enumerate(token_bytes):
        column = 0
        for byte in token.translate(alphabet):
            following = after.get((column, byte))
            if following is None:
                state, hit = columns[column]
                state = goto[state, byte].astype(np.int16)
                hit = hit | final[state]
                following = known.setdefault(state.tobytes() + hit.tobytes(), len(columns))
                if following == len(columns):
                    columns.append((state, hit))
                    if len(columns) * states > _MAX_CELLS:
                        raise UserError(
                            f"{key}: a table of {states} states x {len(columns)} kinds of tokens "
                            f"is more than {_MAX_CELLS:,} cells; give fewer or shorter texts"
                        )
                after[column, byte] = following
            column = following
        kinds[row] = column
    used, kinds = np.unique(kinds, return_inverse=True)
    next_states, hits = (np.stack([columns[i][part] for i in used], axis=1) for part in (0, 1))
    return next_states, hits, kinds


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


class Constraints(NamedTuple):
    """Fields of `Sampling`; None where nothing is asked for."""

    stop_strings: Phrases | None
    bad_words: Phrases | None
    logit_bias: Float32[np.ndarray, " vocab"] | None


class Keys(NamedTuple):
    """What the three settings are called where the user gave them, and where end tokens are."""

    stop_strings: str = "rollout.stop_strings"
    bad_words: str = "rollout.bad_words"
    logit_bias: str = "rollout.logit_bias"
    end_tokens: str = "rollout.stop_token_ids"


def make_constraints(
    tokenizer: Tokenizer | None,
    vocab_size: int,
    stop_strings: Sequence[str] = (),
    bad_words: Sequence[str] = (),
    logit_bias: Mapping[str, float] | None = None,
    keys: Keys = Keys(),  # noqa: B008
) -> Constraints:
    """Make the tables of stop strings, bad words and logit bias for a model.

    Args:
        tokenizer: None for a model of token ids, which can have a bias of ids alone.
        vocab_size: width of the model's logits.
        stop_strings: texts that end a completion.
        bad_words: texts that no completion holds, inside of words either.
        logit_bias: {token id or text: what is added to the token's logit}; a text must be a single
            token.
        keys: for messages.

    Raises:
        UserError: no tokenizer where one is needed, tokens whose bytes are not known, an empty
            text, a text with a special token in it, texts that are too long together, bad words
            that leave nothing to sample, a bias of something that is no token.
    """
    stop = bad = None
    if stop_strings or bad_words:
        if tokenizer is None:
            key = keys.stop_strings if stop_strings else keys.bad_words
            raise UserError(f"{key}: needs a tokenizer, and the model has none")
        pieces = tokenizer.token_bytes()
        if stop_strings:
            stop = compile_phrases(stop_strings, pieces, vocab_size, keys.stop_strings)
            _refuse_special(tokenizer, pieces, stop_strings, keys.stop_strings, keys.end_tokens)
        if bad_words:
            bad = compile_phrases(bad_words, pieces, vocab_size, keys.bad_words)
            _refuse_special(tokenizer, pieces, bad_words, keys.bad_words, keys.logit_bias)
            _refuse_dead_end(bad, pieces, keys.bad_words)
    bias = _bias(tokenizer, vocab_size, logit_bias, keys.logit_bias) if logit_bias else None
    return Constraints(stop, bad, bias)


def _refuse_special(
    tokenizer: Tokenizer, pieces: Sequence[bytes], phrases: Sequence[str], key: str, instead: str
) -> None:
    """A special token is not a part of the text, so that a phrase with one would never be found."""
    for phrase in phrases:
        for token in tokenizer.encode(phrase, add_special_tokens=False):
            special = "" if pieces[token] else tokenizer.decode([token], skip_special=False)
            if special and special in phrase:
                raise UserError(
                    f"{key}: {phrase!r} has the special token {special!r} in it, which is left out "
                    f"of a text; give its id, {token}, in {instead}"
                )


def _refuse_dead_end(table: Phrases, pieces: Sequence[bytes], key: str) -> None:
    if (text := dead_end(table, pieces)) is not None:
        where = f"after {text.decode('utf-8', 'replace')!r}" if text else "at the start"
        raise UserError(
            f"{key}: {where} every token would complete one, and nothing is left to "
            "sample; give fewer"
        )


def _bias(
    tokenizer: Tokenizer | None, vocab_size: int, logit_bias: Mapping[str, float], key: str
) -> Float32[np.ndarray, " vocab"]:
    table, named = np.zeros(vocab_size, np.float32), {}
    for name, value in logit_bias.items():
        token = _token(tokenizer, vocab_size, name, key)
        if token in named:
            raise UserError(
                f"{key}: {named[token]!r} and {name!r} are the same token, {token}; give one of "
                "them"
            )
        named[token], table[token] = name, value
    return table


def _token(tokenizer: Tokenizer | None, vocab_size: int, name: str, key: str) -> int:
    if name.isascii() and name.isdigit():
        if len(name) > 9 or int(name) >= vocab_size:
            raise UserError(f"{key}: token {name} is outside the vocabulary of {vocab_size}")
        return int(name)
    if tokenizer is None:
        raise UserError(
            f"{key}: {name!r} needs a tokenizer, and the model has none; give a token id"
        )
    try:
        ids = tokenizer.encode(name, add_special_tokens=False)
    except UserError as error:
        raise UserError(f"{key}: {error}") from None
    if len(ids) != 1:
        raise UserError(
            f"{key}: {name!r} is {len(ids)} tokens, {ids}; a bias is given to one, by its text "
            "or its id"
        )
    return ids[0]


def find_stop(text: bytes, stops: Sequence[str]) -> tuple[int, str] | None:
    """Find where the first stop string begins, and which it is; None where there is none."""
    ends = [
        (start + len(stop.encode()), start, stop)
        for stop in stops
        if (start := text.find(stop.encode())) >= 0
    ]
    return min(ends)[1:] if ends else None


def text_before_stop(
    text: str, raw: bytes, stops: Sequence[str], include: bool = False
) -> tuple[str, str | None]:
    """Drop a completion's text from its stop string on, and name the stop string.

    The whole text and None where there is none.

    Args:
        text: as the tokenizer decodes the tokens.
        raw: the bytes of the tokens, special ones left out.
        stops: what ends a completion.
        include: leave the stop string in the text.
    """
    match = find_stop(raw, stops)
    if match is None:
        return text, None
    start, stop = match
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
        """Add tokens and return what they add to the text; unknown ids add nothing."""
        if self._ended:
            return ""
        known = len(self._token_bytes)
        self._waiting += b"".join(self._token_bytes[token] for token in tokens if token < known)
        if match := find_stop(self._waiting, self._stops):
            self._ended = True
            return self._decoder.decode(self._waiting[: match[0]], final=True)
        held = max((_overlap(self._waiting, stop.encode()) for stop in self._stops), default=0)
        ready = self._waiting[: len(self._waiting) - held]
        self._waiting = self._waiting[len(ready) :]
        return self._decoder.decode(ready)

    def finish(self) -> str:
        """Return what was held back, when nothing more will come."""
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
