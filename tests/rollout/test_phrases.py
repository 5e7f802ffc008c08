"""The automaton over tokens against str.find on the decoded text."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8rl_jax.errors import UserError
from fp8rl_jax.rollout.constraints import Phrases, compile_phrases, dead_end

VOCAB = [b"", b"a", b"b", b"ab", b"ba", b"aab", b"\xc3", b"\xa9", b"\xc3\xa9a", b"bb", b"x", b"axb"]
PHRASES = st.lists(st.text("abéx", min_size=1, max_size=5), min_size=1, max_size=4)


def table_of(phrases, vocab=VOCAB, key="phrases"):
    return compile_phrases(phrases, vocab, len(vocab), key)


def first_hit(phrases: list[str], tokens: list[int]) -> int | None:
    """Index of the token in which the first phrase ends, read off the text so far."""
    text = b""
    for i, token in enumerate(tokens):
        before = len(text)
        text += VOCAB[token]
        for phrase in phrases:
            needle = phrase.encode()
            start = max(before - len(needle) + 1, 0)
            if needle in text[start:]:
                return i
    return None


@settings(max_examples=200, deadline=None)
@given(PHRASES, st.lists(st.integers(0, len(VOCAB) - 1), max_size=12))
def test_the_first_hit_is_that_of_a_text_search(phrases, tokens):
    table = table_of(phrases)
    state, found = 0, None
    for i, token in enumerate(tokens):
        if table.hits[state, table.kinds[token]]:
            found = i
            break
        state = table.next[state, table.kinds[token]]
    assert found == first_hit(phrases, tokens)


def test_phrases_step_a_batch_and_name_completing_tokens():
    table = table_of(["abb"])
    step = jax.jit(Phrases.step)
    state, hit = step(table, jnp.zeros(3, jnp.int32), jnp.asarray([1, 3, 0]))
    assert not hit.any() and state[2] == 0
    assert step(table, state, jnp.asarray([9, 2, 9]))[1].tolist() == [True, True, False]
    completing = np.asarray(jax.jit(Phrases.completing)(table, state))
    assert [np.flatnonzero(row).tolist() for row in completing] == [[9], [2, 4, 9], []]


def test_tokens_beyond_the_tokenizer_have_no_bytes():
    table = compile_phrases(["a"], [b"a", b"b"], 4)
    assert table.hits[0, table.kinds].tolist() == [True, False, False, False]


@settings(max_examples=100, deadline=None)
@given(PHRASES, st.lists(st.sampled_from([t for t in VOCAB if t]), min_size=1, max_size=4))
def test_a_dead_end_is_a_text_that_every_token_completes(phrases, vocab):
    """Against all texts of up to six tokens that are free of phrases."""
    needles = [phrase.encode() for phrase in phrases]
    found = dead_end(table_of(phrases, vocab), vocab)

    def dead(text):
        return all(any(needle in text + token for needle in needles) for token in vocab)

    if found is not None:
        assert dead(found) and not any(needle in found for needle in needles)
        return
    texts = {b""}
    for _ in range(6):
        assert not any(dead(text) for text in texts)
        texts = {text + token for text in texts for token in vocab}
        texts = set(
            sorted(text for text in texts if not any(needle in text for needle in needles))[:50]
        )


def test_a_large_vocabulary_takes_a_small_table():
    """Every phrase in full would be 300 states x 150,000 tokens."""
    rng = np.random.default_rng(0)
    letters = np.frombuffer(b"etaoinshrdlucmfw yp", np.uint8)
    vocab = [rng.choice(letters, rng.integers(1, 9)).tobytes() for _ in range(150_000)]
    phrases = [rng.choice(letters, 12).tobytes().decode() for _ in range(25)]
    started = time.process_time()
    table = table_of(phrases, vocab)
    assert table.next.shape[0] == 512 and table.next.nbytes + table.hits.nbytes < 2**23
    assert time.process_time() - started < 20


def test_empty_and_endless_phrases_are_refused():
    with pytest.raises(UserError, match="rollout.stop_strings: entry 2 is empty"):
        table_of(["a", ""], key="rollout.stop_strings")
    with pytest.raises(UserError, match="rollout.stop_strings: 40001 states"):
        table_of(["a" * 40000], key="rollout.stop_strings")
    with pytest.raises(UserError, match="rollout.stop_strings: .*lone surrogate"):
        table_of(["\ud800"], key="rollout.stop_strings")
    with pytest.raises(
        UserError, match="rollout.bad_words: a table of 30001 states x 2237 kinds of tokens is more"
    ):
        table_of(["a" * 30000], [b"a" * n for n in range(1, 3000)], key="rollout.bad_words")
