"""Stop strings, bad words and logit bias in generate(), against text search and the formulas in
float64."""

from __future__ import annotations

import dataclasses
import string

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout.tiny import (
    VOCAB,
    full_logits,
    hugging_face_mask,
    log_softmax,
    make_engine,
    make_prompts,
    take,
)

from fp8rl_jax.errors import UserError
from fp8rl_jax.rollout.constraints import make_constraints
from fp8rl_jax.rollout.sampler import generate
from fp8rl_jax.rollout.sampling import Sampling, draw
from fp8rl_jax.tokenizers.byte_tokenizer import ByteTokenizer
from fp8rl_jax.tokenizers.tokenizer import load_tokenizer

KEY = jax.random.key(42)
TEMPERATURE = 1.3
PLAIN = Sampling(max_new_tokens=12, temperature=TEMPERATURE)


class Tokens:
    """131 tokens of one to three letters out of a, b, c, and a special one: strings cross their
    borders often."""

    def __init__(self):
        rng = np.random.default_rng(3)
        words = ["".join(rng.choice(list("abc"), n)) for n in rng.integers(1, 4, VOCAB - 1)]
        self.words = ["", *words]

    def token_bytes(self):
        return [word.encode() for word in self.words]

    def encode(self, text, add_special_tokens=True):
        return [self.words.index(text)] if text in self.words else list(range(len(text)))

    def decode(self, ids, skip_special=True):
        return "".join(self.words[i] for i in ids)


TOKENS = Tokens()


def sampling(base=PLAIN, **settings):
    return dataclasses.replace(base, **make_constraints(TOKENS, VOCAB, **settings)._asdict())


@pytest.fixture(scope="module")
def engine():
    return make_engine("bf16")


@pytest.fixture(scope="module")
def rollout(engine):
    return engine.generate(make_prompts(), 2, PLAIN, KEY)


def test_a_stop_string_ends_a_row_with_the_token_that_completes_it(engine, rollout):
    stops = ["bbcb", "caba", "aaa"]
    out = engine.generate(make_prompts(), 2, sampling(stop_strings=stops), KEY)
    crossing = 0
    for b, free in enumerate(np.asarray(rollout.tokens)):
        texts = [TOKENS.decode(free[:n]) for n in range(13)]
        end = next((n for n, text in enumerate(texts) if any(stop in text for stop in stops)), None)
        np.testing.assert_array_equal(out.mask[b], np.arange(12) < (end or 12))
        assert bool(out.stopped[b]) == (end is not None)
        np.testing.assert_array_equal(out.tokens[b, : end or 12], free[: end or 12])
        np.testing.assert_array_equal(
            out.policy_logprobs[b], np.where(out.mask[b], rollout.policy_logprobs[b], 0)
        )
        crossing += end is not None
    assert 2 <= crossing < 6


def test_bad_words_and_a_bias_change_the_behaviour_and_not_the_policy(engine):
    """With top-k and top-p, so that the order counts: bias, ban, temperature, then truncation of
    what is left."""
    bias = {"ab": 3.0, "7": -2.0, "bc": 1.5}
    bad = ["cb", "aaa"]
    truncation = {"top_k": 60, "top_p": 0.9}
    base = dataclasses.replace(PLAIN, **truncation)
    out = engine.generate(make_prompts(), 2, sampling(base, bad_words=bad, logit_bias=bias), KEY)
    logits = full_logits(engine, out)
    added = np.zeros(VOCAB)
    for name, value in bias.items():
        added[int(name) if name.isdigit() else TOKENS.words.index(name)] += value
    offered = (logits + added) / TEMPERATURE
    for b, t in np.ndindex(out.tokens.shape):
        before = TOKENS.decode(np.asarray(out.tokens[b, :t]))
        assert not any(word in before for word in bad)
        banned = [any(word in before + piece for word in bad) for piece in TOKENS.words]
        assert any(banned)
        offered[b, t, banned] = -np.inf
    assert not any(word in TOKENS.decode(row) for row in np.asarray(out.tokens) for word in bad)
    keep = hugging_face_mask(offered, **truncation)
    behaviour = take(log_softmax(np.where(keep, offered, -np.inf)), out.tokens)
    np.testing.assert_allclose(out.behaviour_logprobs, behaviour, atol=1e-4)
    np.testing.assert_allclose(
        out.policy_logprobs, take(log_softmax(logits / TEMPERATURE), out.tokens), atol=1e-4
    )
    assert np.abs(out.behaviour_logprobs - out.policy_logprobs).mean() > 0.1


def test_draws_follow_the_biased_and_banned_distribution():
    rows = 20_000
    rng = np.random.default_rng(1)
    logits, bias = rng.normal(0, 1.5, VOCAB), rng.normal(0, 1, VOCAB)
    banned = rng.random(VOCAB) < 0.5
    setting = Sampling(temperature=0.8, logit_bias=jnp.asarray(bias, jnp.float32))
    keys = jax.random.split(jax.random.key(1), rows)
    tiled = jnp.tile(jnp.asarray(logits, jnp.float32), (rows, 1))
    tokens, behaviour, policy, _ = jax.jit(draw)(tiled, keys, setting, jnp.tile(banned, (rows, 1)))
    expected = log_softmax(np.where(banned, -np.inf, logits + bias) / 0.8)
    np.testing.assert_allclose(behaviour, expected[tokens], atol=1e-5)
    np.testing.assert_allclose(policy, log_softmax(logits / 0.8)[tokens], atol=1e-5)
    p = np.exp(expected)
    deviation = (np.bincount(tokens, minlength=VOCAB) - rows * p)[~banned] / np.sqrt(
        rows * p * (1 - p)
    )[~banned]
    assert not banned[tokens].any() and np.abs(deviation).max() < 5


def test_greedy_takes_the_best_of_what_is_left(engine):
    base = Sampling(max_new_tokens=12, temperature=0)
    free = engine.generate(make_prompts(), 1, base, KEY)
    out = engine.generate(
        make_prompts(), 1, sampling(base, bad_words=["a"], logit_bias={"5": 2.0}), KEY
    )
    logits = full_logits(engine, out)
    np.testing.assert_allclose(
        out.policy_logprobs, take(log_softmax(logits), out.tokens), atol=1e-4
    )
    logits[..., 5] += 2
    logits[..., ["a" in word for word in TOKENS.words]] = -np.inf
    np.testing.assert_array_equal(out.tokens, logits.argmax(-1))
    np.testing.assert_array_equal(out.behaviour_logprobs, 0)
    assert (free.tokens != out.tokens).any()


def test_other_stop_strings_compile_nothing(engine):
    engine.generate(make_prompts(), 2, sampling(stop_strings=["abcb", "ccac", "bbab"]), KEY)
    before = generate._cache_size()
    engine.generate(make_prompts(), 2, sampling(stop_strings=["bcab", "acac", "aaab"]), KEY)
    assert generate._cache_size() == before
    assert jax.tree.leaves(PLAIN) == []  # and without them the program takes no tables


@pytest.mark.slow
def test_prompt_logprobs_are_those_of_a_full_forward():
    """Of a quantized rollout, at its temperature, up to flipped e4m3 roundings; what is not asked
    for is not there."""
    engine, prompts = make_engine("fp8-rl"), make_prompts()
    out = engine.generate(prompts, 1, PLAIN, KEY, prompt_logprobs=True)
    # the prompts as completions of their own first tokens
    starts = type(prompts)(prompts.tokens, np.ones(3, np.int32), prompts.ids)
    shifted = dataclasses.replace(out, prompts=starts, tokens=prompts.tokens[:, 1:])
    real = np.arange(1, 9) < prompts.lengths[:, None]
    given = np.asarray(out.prompt_logprobs)
    error, cost = (
        np.abs(
            given[:, 1:] - take(log_softmax(full_logits(e, shifted) / TEMPERATURE), shifted.tokens)
        )[real]
        for e in (engine, make_engine("bf16"))
    )
    assert np.median(error) < 0.01 and error.max() < 0.1 and error.mean() < cost.mean() / 10
    assert not given[:, 1:][~real].any() and not given[:, 0].any()
    assert engine.generate(prompts, 1, PLAIN, KEY).prompt_logprobs is None


def test_a_stream_shows_what_generate_returns(engine, rollout):
    """Plain and with everything on; the rows' tokens appear one by one and never change."""
    full = sampling(
        dataclasses.replace(PLAIN, stop_token_ids=(7,)),
        stop_strings=["abcb"],
        bad_words=["cb"],
        logit_bias={"3": 1},
    )
    for setting in (PLAIN, full):
        whole = engine.generate(make_prompts(), 1, setting, KEY)
        seen = list(engine.stream(make_prompts(), setting, KEY))
        lengths = [out.mask.sum(1) for out in seen]
        assert len(seen) == int(np.sum(whole.mask, 1).max())
        for n, out in enumerate(seen, start=1):
            np.testing.assert_array_equal(lengths[n - 1], np.minimum(np.sum(whole.mask, 1), n))
            np.testing.assert_array_equal(out.tokens[out.mask], np.asarray(whole.tokens)[out.mask])
        for field in ("tokens", "mask", "stopped"):
            np.testing.assert_array_equal(getattr(seen[-1], field), getattr(whole, field))
        np.testing.assert_allclose(seen[-1].behaviour_logprobs, whole.behaviour_logprobs, atol=1e-5)
    chunks = [int(out.mask[0].sum()) for out in engine.stream(make_prompts(), PLAIN, KEY, every=5)]
    assert chunks == [1, 6, 11, 12]


BYTES = ByteTokenizer()


def test_a_bias_names_tokens_by_text_or_id():
    table = make_constraints(BYTES, 264, logit_bias={"65": 1.5, "b": -2.0, "7": 3.0}).logit_bias
    assert {i: float(table[i]) for i in np.flatnonzero(table)} == {65: 1.5, 98: -2.0, 7: 3.0}
    assert make_constraints(None, 264, logit_bias={"65": 1.5}).logit_bias[65] == 1.5


@pytest.mark.parametrize(
    ("tokenizer", "settings", "message"),
    [
        (None, {"stop_strings": ["a"]}, "rollout.stop_strings: needs a tokenizer"),
        (None, {"bad_words": ["a"]}, "rollout.bad_words: needs a tokenizer"),
        (None, {"logit_bias": {"a": 1.0}}, "rollout.logit_bias: 'a' needs a tokenizer"),
        (BYTES, {"stop_strings": ["a", ""]}, "rollout.stop_strings: entry 2 is empty"),
        (BYTES, {"logit_bias": {"264": 1.0}}, "token 264 is outside the vocabulary of 264"),
        (BYTES, {"logit_bias": {"9" * 5000: 1.0}}, "outside the vocabulary of 264"),
        (BYTES, {"logit_bias": {"ab": 1.0}}, r"'ab' is 2 tokens, \[97, 98\]"),
        (BYTES, {"logit_bias": {"": 1.0}}, "'' is 0 tokens"),
        (
            BYTES,
            {"logit_bias": {"\ud800": 1.0}},
            "rollout.logit_bias: the text holds a lone surrogate",
        ),
        (BYTES, {"logit_bias": {"97": 1.0, "a": 2.0}}, "'97' and 'a' are the same token, 97"),
    ],
)
def test_constraints_that_cannot_be_are_refused(tokenizer, settings, message):
    with pytest.raises(UserError, match=message):
        make_constraints(tokenizer, 264, **settings)


@pytest.mark.parametrize(
    ("setting", "instead"),
    [("stop_strings", "rollout.stop_token_ids"), ("bad_words", "rollout.logit_bias")],
)
def test_a_special_token_is_no_part_of_a_text(setting, instead, tmp_path):
    BYTES.save(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    message = rf"rollout\.{setting}: 'a<\|eos\|>' .* its id, 258, in {instead}"
    with pytest.raises(UserError, match=message):
        make_constraints(tokenizer, 264, **{setting: ["b", "a<|eos|>"]})
    make_constraints(BYTES, 264, **{setting: ["a<|eos|>"]})  # plain bytes there


def test_bad_words_that_leave_nothing_are_refused():
    """No special token, no other byte: after an a, b and a both complete a bad word."""

    class Letters:
        def token_bytes(self):
            return [b"a", b"b"]

        def encode(self, text, add_special_tokens=True):
            return ["ab".index(letter) for letter in text]

    with pytest.raises(
        UserError, match="rollout.bad_words: after 'a' every token would complete one"
    ):
        make_constraints(Letters(), 2, bad_words=["ab", "aa"])
    with pytest.raises(UserError, match="rollout.bad_words: at the start every token"):
        make_constraints(Letters(), 2, bad_words=["a", "b"])
    assert make_constraints(Letters(), 3, bad_words=["a", "b"]).bad_words is not None
    assert make_constraints(BYTES, 264, bad_words=list(string.ascii_letters)).bad_words is not None
