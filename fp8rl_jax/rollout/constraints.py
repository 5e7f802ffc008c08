"""From the texts of a configuration to the tables of `Sampling`: stop strings, bad words, logit
bias.

All three speak of the completion alone: a phrase that begins in the prompt is not seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32

from fp8rl_jax.errors import UserError
from fp8rl_jax.rollout.phrases import Phrases, compile_phrases, dead_end
from fp8rl_jax.tokenizers.tokenizer import Tokenizer


class Constraints(NamedTuple):
    """Fields of `Sampling`; None where nothing is asked for."""

    stop_strings: Phrases | None
    bad_words: Phrases | None
    logit_bias: Float32[np.ndarray, " vocab"] | None


class Keys(NamedTuple):
    """What the three settings are called where the user gave them."""

    stop_strings: str = "rollout.stop_strings"
    bad_words: str = "rollout.bad_words"
    logit_bias: str = "rollout.logit_bias"


def make_constraints(
    tokenizer: Tokenizer | None,
    vocab_size: int,
    stop_strings: Sequence[str] = (),
    bad_words: Sequence[str] = (),
    logit_bias: Mapping[str, float] | None = None,
    keys: Keys = Keys(),  # noqa: B008
) -> Constraints:
    """Tables for a model.

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
            text, texts that are too long together, bad words that leave nothing to sample, a bias
            of something that is no token.
    """
    for name, wanted in ((keys.stop_strings, stop_strings), (keys.bad_words, bad_words)):
        if wanted and tokenizer is None:
            raise UserError(f"{name}: needs a tokenizer, and the model has none")
    pieces = tokenizer.token_bytes() if stop_strings or bad_words else []
    stop = (
        compile_phrases(stop_strings, pieces, vocab_size, keys.stop_strings)
        if stop_strings
        else None
    )
    bad = compile_phrases(bad_words, pieces, vocab_size, keys.bad_words) if bad_words else None
    if bad is not None and (text := dead_end(bad, pieces)) is not None:
        where = f"after {text.decode('utf-8', 'replace')!r}" if text else "at the start"
        raise UserError(
            f"{keys.bad_words}: {where} every token would complete one, and nothing is left to "
            "sample; give fewer"
        )
    bias = _bias(tokenizer, vocab_size, logit_bias, keys.logit_bias) if logit_bias else None
    return Constraints(stop, bad, bias)


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
