from __future__ import annotations

import json

import numpy as np
import pytest
import tomli_w
from offline_models import call, full_logits, log_softmax, make_model, random_rows, refusal
from tiny_models import tokenizer_of

from fp8rl_jax.rollout.offline import batches
from fp8rl_jax.tasks.dataset import Example
from fp8rl_jax.tokenizers.byte_tokenizer import ByteTokenizer
from fp8rl_jax.training.prompts import PromptEncoder

FLOAT32 = ("--compute-dtype", "float32")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model of token ids: no tokenizer, no end token."""
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def text_model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("text_model"), tokenizer=True, eos_token_ids=(258,))


def test_logprobs_is_the_log_softmax_of_a_direct_forward_in_the_order_of_the_file(model, tmp_path):
    rows = random_rows([5, 20, 1, 9])
    lines = [{"tokens": row, "id": i} for i, row in enumerate(rows)]
    answers = call(
        "logprobs", model, lines, tmp_path, *FLOAT32, "--batch-size", "2", "--temperature", "0.5"
    )
    assert [answer["id"] for answer in answers] == [0, 1, 2, 3]
    for row, answer in zip(rows, answers, strict=True):
        assert answer["tokens"] == row and len(answer["logprobs"]) == len(row) - 1
        expected = log_softmax(full_logits(model, row) / 0.5)[np.arange(len(row) - 1), row[1:]]
        np.testing.assert_allclose(answer["logprobs"], expected, atol=1e-4)


def test_logprobs_takes_the_trainers_side_of_the_recipe(model, tmp_path):
    lines = [{"tokens": row} for row in random_rows([12, 7])]
    assert call("logprobs", model, lines, tmp_path, "--recipe", "fp8-rl") == call(
        "logprobs", model, lines, tmp_path, "--recipe", "bf16"
    )


def test_greedy_generation_is_the_argmax_of_full_forwards(model, tmp_path):
    rows = random_rows([4, 7, 18])
    answers = call(
        "generate",
        model,
        [{"tokens": r} for r in rows],
        tmp_path,
        *FLOAT32,
        "--max-new-tokens",
        "6",
        "--batch-size",
        "2",
    )
    for row, answer in zip(rows, answers, strict=True):
        assert (
            answer["tokens"] == row and answer["finish_reason"] == "length" and "text" not in answer
        )
        tokens, logprobs = list(row), []
        for _ in range(6):
            scores = log_softmax(full_logits(model, tokens)[-1])
            tokens.append(int(scores.argmax()))
            logprobs.append(scores.max())
        assert answer["completion_tokens"] == tokens[len(row) :]
        np.testing.assert_allclose(answer["policy_logprobs"], logprobs, atol=1e-4)


def test_generation_stops_at_an_end_token_unless_ignore_eos(model, tmp_path, tmp_path_factory):
    (row,) = random_rows([6])
    free = call("generate", model, [{"tokens": row}], tmp_path, *FLOAT32, "--max-new-tokens", "8")[
        0
    ]["completion_tokens"]
    end = free[2]
    stopping = make_model(tmp_path_factory.mktemp("stopping"), eos_token_ids=(end,))
    (stopped,) = call(
        "generate", stopping, [{"tokens": row}], tmp_path, *FLOAT32, "--max-new-tokens", "8"
    )
    assert (
        stopped["completion_tokens"] == free[: free.index(end) + 1]
        and stopped["finish_reason"] == "stop"
    )
    (on,) = call(
        "generate",
        stopping,
        [{"tokens": row}],
        tmp_path,
        *FLOAT32,
        "--max-new-tokens",
        "8",
        "--ignore-eos",
    )
    assert on["completion_tokens"] == free and on["finish_reason"] == "length"


def test_prompts_are_encoded_and_completions_decoded(text_model, tmp_path):
    answers = call(
        "generate",
        text_model,
        [{"prompt": "2 + 2 ="}, {"tokens": [1, 2]}],
        tmp_path,
        "--max-new-tokens",
        "3",
    )
    assert answers[0]["tokens"] == ByteTokenizer().encode("2 + 2 =")
    for answer in answers:
        assert answer["text"] == ByteTokenizer().decode(answer["completion_tokens"])
    (scored,) = call("logprobs", text_model, [{"prompt": "ab"}], tmp_path)
    assert (
        scored["prompt"] == "ab"
        and scored["tokens"] == [257, 97, 98]
        and len(scored["logprobs"]) == 2
    )


def test_a_conversation_goes_through_the_chat_template(text_model, tmp_path):
    template = (
        "{% for m in messages %}<{{ m.content }}{{ m.keys() | length - 2 or '' }}>{% endfor %}"
        "{% if add_generation_prompt %}A{% endif %}"
    )
    (text_model / "chat_template.jinja").write_text(template)
    message = {"role": "user", "content": "hi", "name": None, "tool_calls": None}
    line = {"prompt": None, "tokens": None, "messages": [message]}
    (generated,) = call("generate", text_model, [line], tmp_path, "--max-new-tokens", "3")
    (scored,) = call("logprobs", text_model, [line], tmp_path)
    (text_model / "chat_template.jinja").unlink()
    assert bytes(generated["tokens"]) == b"<hi>A" and bytes(scored["tokens"]) == b"<hi>"


def test_a_quantized_rollout_answers_close_to_the_trainer_and_not_the_same(model, tmp_path):
    lines = [{"tokens": row} for row in random_rows([9, 14, 6])]
    flags = ("--max-new-tokens", "6", "--temperature", "1", "--recipe", "fp8-rl", *FLOAT32)
    generated = call("generate", model, lines, tmp_path, *flags)
    joined = [{"tokens": answer["tokens"] + answer["completion_tokens"]} for answer in generated]
    scored = call("logprobs", model, joined, tmp_path, *FLOAT32)
    gaps = [
        np.subtract(s["logprobs"][-6:], g["policy_logprobs"])
        for s, g in zip(scored, generated, strict=True)
    ]
    assert 1e-4 < np.abs(gaps).mean() < 0.3
    assert generated == call("generate", model, lines, tmp_path, *flags)
    assert generated != call("generate", model, lines, tmp_path, *flags, "--seed", "1")


def test_every_wrong_line_is_named_at_once(model, tmp_path, capsys):
    lines = [
        '{"tokens": [1, 2',
        "[1]",
        {},
        {"tokens": [1, 264]},
        "",
        {"tokens": []},
        {"tokens": [True]},
        {"prompt": "x"},
    ]
    said = refusal("logprobs", model, [{"tokens": [1]}, *lines], tmp_path, capsys).splitlines()
    expected = {
        2: "not valid JSON",
        3: "must be a JSON object",
        4: 'neither "tokens" nor',
        5: "token 264 is outside the vocabulary of 264",
        7: "gives no tokens",
        8: "list of integers",
        9: "needs a tokenizer",
    }
    assert len(said) == len(expected)
    for line, (number, words) in zip(said, expected.items(), strict=True):
        assert f"in.jsonl: line {number}: " in line and words in line


def test_prompts_are_written_as_training_writes_them(tmp_path_factory, tmp_path, capsys):
    """In the chat template of a model that has one, with a run's own template and system message."""
    model = make_model(tmp_path_factory.mktemp("run") / "model", tokenizer=True)
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role[0] }}<{{ m.content }}>{% endfor %}A"
    )
    asked = [{"role": "user", "content": "hi"}]
    lines = [{"prompt": "hi"}, {"question": "hi"}, {"messages": asked}, {"prompt": asked}]
    short = ("--max-new-tokens", "1")

    def texts(model, *flags) -> list[str]:
        answers = call("generate", model, lines, tmp_path, *short, *flags)
        return [bytes(answer["tokens"]).decode() for answer in answers]

    encoder = PromptEncoder(tokenizer_of(model), "Be brief.", 64)
    trained = bytes(encoder.tokens(Example(0, "Say hi", "", "", {}))).decode()
    assert trained == "s<Be brief.>u<Say hi>A"
    written = ("--prompt-template", "Say {question}", "--system-prompt", "Be brief.")
    assert texts(model) == ["u<hi>A"] * 4 and texts(model, *written) == [trained] * 4
    task = {"task": {"prompt_template": "Say {question}", "system_prompt": "Be brief."}}
    (model.parent / "config.toml").write_text(tomli_w.dumps(task))
    assert texts(model.parent) == [trained] * 4
    assert texts(model.parent, "--system-prompt", "No.") == ["s<No.>u<Say hi>A"] * 4
    lines = [{"prompt": "hi"}]
    (model / "chat_template.jinja").unlink()
    (refused := tmp_path / "refused").mkdir()
    said = refusal("generate", model, lines, refused, capsys, "--system-prompt", "No.")
    assert "--system-prompt: the model has no chat template to write it with" in said
    (scored,) = call("logprobs", model, lines, tmp_path)  # a text as it stands
    assert scored["tokens"] == ByteTokenizer().encode("hi")


@pytest.mark.parametrize(
    "line",
    [
        {"messages": "hi"},
        {"messages": [{"role": "user"}]},
        {"prompt": 3},
        {"question": []},
        {"question": [{"role": "assistant", "content": "hi"}]},
    ],
)
def test_lines_that_the_tokenizer_cannot_take_are_named(text_model, tmp_path, capsys, line):
    assert "in.jsonl: line 1: " in refusal("generate", text_model, [line], tmp_path, capsys)


def test_lines_longer_than_the_model_are_refused(model, tmp_path, capsys):
    assert "line 1: 129 tokens are more" in refusal(
        "logprobs", model, [{"tokens": [1] * 129}], tmp_path, capsys
    )
    said = refusal(
        "generate", model, [{"tokens": [1] * 120}], tmp_path, capsys, "--max-new-tokens", "9"
    )
    assert "120 tokens and 9 new ones are more than the model's 128 positions" in said


def test_files_that_cannot_be_used_are_refused_before_the_weights_are_read(model, tmp_path, capsys):
    assert "holds no lines" in refusal("logprobs", model, ["", ""], tmp_path, capsys)
    assert "unknown name 'fp8'" in refusal(
        "logprobs", model, [{"tokens": [1]}], tmp_path, capsys, "--recipe", "fp8"
    )
    (tmp_path / "rows").mkdir()
    rows = tmp_path / "rows" / "run.toml"
    rows.write_text('[recipes.mine]\nbase = "fp8-rl"\nrollout.weight = "e4m3"')
    flags = ("--recipes", str(rows), "--recipe", "mine")
    assert "recipe 'mine': rollout.activation.block must" in refusal(
        "logprobs", model, [{"tokens": [1]}], tmp_path, capsys, *flags
    )
    (tmp_path / "out.jsonl").mkdir()
    assert "is a directory" in refusal("logprobs", model, [{"tokens": [1]}], tmp_path, capsys)


def test_an_earlier_answer_stays_when_a_run_fails(model, tmp_path):
    call("logprobs", model, [{"tokens": [1, 2]}], tmp_path)
    before = (tmp_path / "out.jsonl").read_text()
    broken = tmp_path / "broken"
    broken.mkdir()
    config = json.loads((model / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(AssertionError):
        call("logprobs", broken, [{"tokens": [1, 2]}], tmp_path)
    assert (tmp_path / "out.jsonl").read_text() == before


def test_batches_have_one_height_for_each_width_and_hold_every_row_once():
    rows = random_rows([3, 40, 16, 17, 5, 8, 2])
    seen = {}
    heights = {}
    for batch in batches(rows, 3):
        heights.setdefault(batch.tokens.shape[1], set()).add(batch.tokens.shape[0])
        for tokens, length, index in zip(batch.tokens, batch.lengths, batch.ids, strict=True):
            seen[int(index)] = tokens[:length].tolist()
    assert heights == {16: {3}, 32: {1}, 64: {1}}
    assert seen == dict(enumerate(rows))
