"""Stop strings, bad words, bias, prompt log-probabilities and n-best of `fp8rl generate`."""

from __future__ import annotations

import numpy as np
import pytest
from offline_models import call, full_logits, log_softmax, make_model, random_rows, refusal

from fp8rl_jax.tokenizers.byte_tokenizer import ByteTokenizer

FLAGS = ("--compute-dtype", "float32", "--max-new-tokens", "12")
SAMPLED = (*FLAGS, "--temperature", "1")
LINES = [{"prompt": "2 + 2 ="}, {"prompt": "hello"}, {"prompt": "b"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), tokenizer=True, eos_token_ids=(258,))


@pytest.fixture(scope="module")
def free(model, tmp_path_factory):
    """Completions that nothing ends but their length; the first begins with four printable
    letters."""
    answers = call("generate", model, LINES, tmp_path_factory.mktemp("free"), *SAMPLED)
    assert all(0x20 <= token < 0x7F for token in answers[0]["completion_tokens"][:4])
    return answers


def test_a_stop_string_ends_the_completion_and_its_text(model, free, tmp_path):
    tokens = free[0]["completion_tokens"]
    stop = bytes(tokens[1:4]).decode()
    answers = call("generate", model, LINES, tmp_path, *SAMPLED, "--stop", "never", stop)
    kept = call(
        "generate", model, LINES, tmp_path, *SAMPLED, "--stop", "never", stop, "--include-stop"
    )
    assert answers[1:] == free[1:] and kept[1:] == free[1:]
    assert (
        answers[0]["finish_reason"] == "stop"
        and answers[0]["stop_string"] == stop
        and "stop_string" not in answers[1]
    )
    assert answers[0]["completion_tokens"] == tokens[:4] and len(answers[0]["policy_logprobs"]) == 4
    assert answers[0]["text"] == chr(tokens[0]) and kept[0] == answers[0] | {
        "text": chr(tokens[0]) + stop
    }


def test_bad_words_and_bias_steer_a_greedy_completion(model, tmp_path):
    (plain,) = call("generate", model, LINES[1:2], tmp_path, *FLAGS)
    liked = max(set(plain["completion_tokens"]), key=plain["completion_tokens"].count)
    (banned,) = call("generate", model, LINES[1:2], tmp_path, *FLAGS, "--bad-words", chr(liked))
    assert liked not in banned["completion_tokens"] and liked < 0x80
    (biased,) = call(
        "generate", model, LINES[1:2], tmp_path, *FLAGS, "--logit-bias", "Z=100", f"{liked}=-100"
    )
    assert biased["text"] == "Z" * 12
    logits = full_logits(model, biased["tokens"] + biased["completion_tokens"])[
        len(biased["tokens"]) - 1 : -1
    ]
    np.testing.assert_allclose(
        biased["policy_logprobs"], log_softmax(logits)[:, ord("Z")], atol=1e-4
    )


def test_prompt_logprobs_are_those_of_the_command_logprobs(model, tmp_path):
    lines = [{"tokens": row} for row in random_rows([5, 20, 1, 9])]
    answers = call(
        "generate", model, lines, tmp_path, *FLAGS, "--temperature", "0.5", "--prompt-logprobs"
    )
    rows = call(
        "logprobs", model, lines, tmp_path, "--compute-dtype", "float32", "--temperature", "0.5"
    )
    for answer, row in zip(answers, rows, strict=True):
        assert len(answer["prompt_logprobs"]) == len(answer["tokens"]) - 1
        np.testing.assert_allclose(answer["prompt_logprobs"], row["logprobs"], atol=1e-5)


def test_the_best_of_n_by_mean_logprob(model, free, tmp_path):
    flags = (*SAMPLED, "--n", "4", "--stop", bytes(free[0]["completion_tokens"][1:4]).decode())
    answers = call("generate", model, LINES, tmp_path, *flags)
    best = call("generate", model, LINES, tmp_path, *flags, "--best", "2", "--batch-size", "4")
    for answer, alone, some in zip(answers, free, best, strict=True):
        completions = answer["completions"]
        assert len(completions) == 4 and set(answer) == {"prompt", "tokens", "completions"}
        means = [np.mean(completion["policy_logprobs"]) for completion in completions]
        np.testing.assert_allclose(
            [completion["mean_logprob"] for completion in completions], means
        )
        assert (
            means == sorted(means, reverse=True)
            and len({tuple(c["completion_tokens"]) for c in completions}) == 4
        )
        # the first sample is what one completion is
        assert any(
            alone["completion_tokens"][: len(c["completion_tokens"])] == c["completion_tokens"]
            for c in completions
        )
        assert [c["completion_tokens"] for c in some["completions"]] == [
            c["completion_tokens"] for c in completions[:2]
        ]
    assert {c["finish_reason"] for c in answers[0]["completions"]} == {"stop", "length"}
    assert all("text" in c for c in answers[0]["completions"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--logit-bias", "ab=1"), "--logit-bias: 'ab' is 2 tokens"),
        (("--logit-bias", "264=1"), "--logit-bias: token 264 is outside the vocabulary of 264"),
        (("--bad-words", "x" * 40000), "--bad-words: 40001 states"),
        (("--stop", ""), "--stop: an empty text"),
    ],
)
def test_what_cannot_be_is_refused_before_the_weights_are_read(
    model, tmp_path, capsys, flags, message
):
    assert message in refusal("generate", model, LINES, tmp_path, capsys, *flags)


def test_a_model_without_tokenizer_has_no_stop_strings(tmp_path, tmp_path_factory, capsys):
    bare = make_model(tmp_path_factory.mktemp("bare"))
    assert "--stop: needs a tokenizer" in refusal(
        "generate", bare, [{"tokens": [1]}], tmp_path, capsys, "--stop", "x"
    )
    answer = call("generate", bare, [{"tokens": [1]}], tmp_path, *FLAGS, "--logit-bias", "9=100")[0]
    assert (
        answer["completion_tokens"] == [9] * 12
        and "text" not in answer
        and ByteTokenizer().decode([9]) == "\t"
    )
