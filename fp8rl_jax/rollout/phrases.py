"""Stop strings and bad words as one automaton over tokens, so that decode checks them without
leaving the device.

A phrase may begin in the middle of one token and end in the middle of another, so its tokens are
not known beforehand; its bytes are. An Aho-Corasick automaton (Aho and Corasick, CACM 1975) reads
the bytes of all phrases at once. What a token does to it is a column, one entry for each state that
it may be read in:

    next[state, kind]     where the automaton is after the token
    hits[state, kind]     whether a phrase ends somewhere inside the token
    kinds[token]          the token's column

Most tokens have no more than a few letters in common with any phrase and share a column, so a
vocabulary of 150,000 has some hundreds of kinds. A row of a batch is then one integer, and a decode
step one lookup: a stop string ends the row whose token hits, and a bad word takes the tokens that
would hit out of the distribution.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from fp8rl_jax.errors import UserError

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

    next: Int[Array, "states kinds"]
    hits: Bool[Array, "states kinds"]
    kinds: Int[Array, " vocab"]

    def step(
        self, state: Int[Array, " b"], tokens: Int[Array, " b"]
    ) -> tuple[Int[Array, " b"], Bool[Array, " b"]]:
        """After each row's token: (new states, whether a phrase ended in it)."""
        kinds = self.kinds[tokens]
        return self.next[state, kinds].astype(jnp.int32), self.hits[state, kinds]

    def completing(self, state: Int[Array, " b"]) -> Bool[Array, "b vocab"]:
        """The tokens in which a phrase would end."""
        return self.hits[state][:, self.kinds]


def compile_phrases(
    phrases: Sequence[str], token_bytes: Sequence[bytes], vocab_size: int, key: str = "phrases"
) -> Phrases:
    """The automaton of `phrases`, as numpy arrays.

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
    """A text without any phrase that every token of the vocabulary would complete to one; None
    where there is none.

    Where bad words leave such a text, a row that came there could sample nothing.
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
    strange = np.flatnonzero(~goto.any(axis=0)).tolist()
    alphabet = bytes(strange[0] if byte in strange else byte for byte in range(256))
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
                            "is more than "
                            f"{_MAX_CELLS:,} cells; give fewer or shorter texts"
                        )
                after[column, byte] = following
            column = following
        kinds[row] = column
    used, kinds = np.unique(kinds, return_inverse=True)
    next_states, hits = (np.stack([columns[i][part] for i in used], axis=1) for part in (0, 1))
    return next_states, hits, kinds


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
