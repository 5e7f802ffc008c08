"""Text as rows of tokens of one width, for supervised training on all of it.

Documents are tokenized once, each with its end of sequence behind it, and laid one behind the
other; every `width` tokens are a row. So no slot is empty but in the last row, and each token is in
one row. A token is predicted from those before it of its own document in its row: segment ids keep
attention, positions and loss within a document, and what of a document stands in the next row
begins anew there (Llama 3, arXiv 2407.21783, section 3.2, masks likewise). The first token of a row
is predicted at the end of the row before, so that each token is predicted once but the first of a
document, which nothing is before.

Which rows a step learns from is a function of (seed, step), as problems are
(`fp8rl_jax.tasks.dataset.batch_indices`), so a resumed run goes on where it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from fp8rl_jax.errors import UserError
from fp8rl_jax.tasks.dataset import batch_indices
from fp8rl_jax.tasks.text import Document
from fp8rl_jax.training.prompts import PromptEncoder


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TextRows:
    """Rows of text to learn from, w tokens each and the one behind them.

    Attributes:
        tokens: int32.
        segments: number of each token's document in its row, from 1; 0 where a slot is empty.
    """

    tokens: Int[Array, "b w+1"]
    segments: Int[Array, "b w+1"]

    @property
    def mask(self) -> Bool[Array, "b w"]:
        """Which slots predict the next token: those that it continues."""
        own, following = self.segments[:, :-1], self.segments[:, 1:]
        return (own == following) & (own > 0)

    @property
    def positions(self) -> Int[Array, "b w"]:
        """Position of each token in its part of a document."""
        segments = self.segments[:, :-1]
        slots = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32), segments.shape)
        begins = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
        return slots - jax.lax.cummax(jnp.where(begins, slots, 0), axis=1)


@dataclass(frozen=True)
class Text:
    """Tokens of documents one behind the other, as rows.

    Attributes:
        tokens: int32 [tokens].
        starts: where each document begins, int64 [documents].
        width: tokens of a row.
        end: the token behind the last one, of which nothing is learned.
    """

    tokens: Int[np.ndarray, " t"]
    starts: Int[np.ndarray, " d"]
    width: int
    end: int

    def __len__(self) -> int:
        """Count the rows."""
        return -(-len(self.tokens) // self.width)

    @property
    def documents(self) -> int:
        return len(self.starts)

    def rows(self, indices: Sequence[int] | Int[np.ndarray, " b"]) -> TextRows:
        """Give some rows, as arrays on the host.

        A number of a row beyond the last gives an empty row.
        """
        slots = np.asarray(indices, np.int64)[:, None] * self.width + np.arange(self.width + 1)
        there = slots < len(self.tokens)
        tokens = np.where(there, self.tokens[np.minimum(slots, len(self.tokens) - 1)], self.end)
        number = np.searchsorted(self.starts, slots, side="right")
        segments = np.where(there, number - number[:, :1] + 1, 0)
        on_host: Any = tokens.astype(np.int32), segments.astype(np.int32)
        return TextRows(*on_host)

    def batch(self, step: int, rows_per_step: int, seed: int) -> TextRows:
        """Give the rows of a training step."""
        return self.rows(batch_indices(step, rows_per_step, seed, len(self)))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of tokens, documents and width, kept in a checkpoint."""
        found = hashlib.sha256(f"{self.width} {self.end} {len(self.tokens)}".encode())
        found.update(self.tokens.astype("<i4").tobytes() + self.starts.astype("<i8").tobytes())
        return found.hexdigest()


def tokenized(documents: Sequence[Document], encoder: PromptEncoder, width: int) -> Text:
    """Tokenize documents, with what the tokenizer puts before a text and one end of sequence.

    Args:
        documents: in the order in which they are laid out; none of them empty.
        encoder: of the policy.
        width: tokens of a row.

    Raises:
        UserError: a text that the tokenizer refuses, and where it stands; or no end token is known.
    """
    pieces: list[Any] = []
    for document in documents:
        try:
            tokens = encoder.tokenizer.encode(document.text)
        except UserError as error:
            raise UserError(f"{document.source}: {error}") from None
        tokens += [] if tokens and tokens[-1] == encoder.end else [encoder.end]
        pieces.append(np.asarray(tokens, np.int32))
    lengths = [0, *map(len, pieces)]
    starts = np.cumsum(lengths[:-1]) if pieces else np.zeros(0, np.int64)
    tokens = np.concatenate(pieces) if pieces else np.zeros(0, np.int32)
    return Text(tokens, starts, width, encoder.end)
