"""Text as rows of tokens, and runs on it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_run import faults, measured, metric_rows, write_run

import fp8rl_jax as fp8rl
from fp8rl_jax import rl
from fp8rl_jax.cli.main import main
from fp8rl_jax.config.recipe import get_recipe
from fp8rl_jax.config.rl import RLConfig
from fp8rl_jax.config.training import OptimizerConfig
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.forward import forward
from fp8rl_jax.models.logprobs import token_logprobs
from fp8rl_jax.models.policy import init_policy
from fp8rl_jax.tasks.text import Document
from fp8rl_jax.tokenizers.byte_tokenizer import ByteTokenizer
from fp8rl_jax.training.prompts import PromptEncoder
from fp8rl_jax.training.state import init_state, make_optimizer
from fp8rl_jax.training.step import StepConfig, row_logprobs, supervised_update
from fp8rl_jax.training.text import Text, TextRows, tokenized

BOS, EOS = 257, 258


def text_of(documents: list[str], width: int) -> Text:
    given = [Document(text, f"document {i}") for i, text in enumerate(documents)]
    return tokenized(given, PromptEncoder(ByteTokenizer(), "", 8), width)


def pieces_of(documents: list[str], width: int) -> list[list[list[int]]]:
    """Plainly: rows of (tokens of one document, and the one behind them where it goes on)."""
    stream = [
        (token, number)
        for number, text in enumerate(documents)
        for token in [BOS, *text.encode(), EOS]
    ]
    rows: list[list[list[int]]] = []
    for start in range(0, len(stream), width):
        row: list[list[int]] = []
        last = None
        for place in range(start, min(start + width, len(stream))):
            token, number = stream[place]
            if number != last:
                row.append([])
            row[-1].append(token)
            last = number
        if stream[start + width : start + width + 1] and stream[start + width][1] == last:
            row[-1].append(stream[start + width][0])
        rows.append(row)
    return rows


@settings(deadline=None)
@given(st.lists(st.text("abc", max_size=9), min_size=1, max_size=6), st.integers(2, 12))
def test_rows_hold_each_token_once_in_order(documents, width):
    text, expected = text_of(documents, width), pieces_of(documents, width)
    assert len(text) == len(expected)
    rows = text.rows(range(len(text)))
    real = np.asarray(rows.segments)[:, :-1] > 0
    stream = [token for document in documents for token in [BOS, *document.encode(), EOS]]
    assert rows.tokens[:, :-1][real].tolist() == stream
    for number, row in enumerate(expected):
        segments, found = rows.segments[number], []
        for each in range(1, segments.max() + 1):
            places = np.flatnonzero(segments == each)
            piece = rows.tokens[number, places].tolist()
            # the token behind the row is there to be predicted, and alone of its document it is not
            if places.tolist() != [width]:
                found.append(piece)
        assert found == row
    # each is predicted once, but the first of a document
    # of one shape, so that little is compiled
    wide = np.zeros((34, 14), np.int32)
    wide[: len(text), : width + 1] = rows.segments
    wide = jnp.asarray(wide)
    assert TextRows(wide, wide).mask.sum() == len(stream) - len(documents)
    assert not text.rows([len(text)]).segments.any()


def test_each_epoch_is_every_row_once_in_an_order_of_its_own():
    text = text_of(["a" * 58], 5)
    orders = [
        np.concatenate([text.batch(step, 4, seed).tokens for step in range(first, first + 3)])
        for first, seed in ((0, 0), (3, 0), (0, 1))
    ]
    rows = sorted(text.rows(range(12)).tokens.tolist())
    assert [sorted(order.tolist()) for order in orders] == [rows] * 3
    assert len({order.tobytes() for order in orders}) == 3
    others = [text_of(["a" * 58], 6), text_of(["a" * 57], 5), text_of(["a" * 28, "a" * 28], 5)]
    assert len({each.fingerprint for each in [text, *others]}) == 4
    assert text.fingerprint == text_of(["a" * 58], 5).fingerprint


@pytest.fixture(scope="module")
def policy():
    shape = PolicyConfig(
        "llama", 264, 32, 48, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16
    )
    return init_policy(shape, jax.random.key(0))


CONFIG = StepConfig(get_recipe("bf16"), RLConfig(), "float32", temperature=1.0)


def test_a_token_sees_its_own_document_alone(policy):
    documents, width = ["once", "upon a time", "x"], 12
    text, expected = text_of(documents, width), pieces_of(documents, width)
    rows = jax.tree.map(jnp.asarray, text.rows(range(len(text))))
    config = replace(CONFIG, sharpness=True)
    logprobs, sharp = jax.jit(row_logprobs, static_argnums=2)(policy, rows, config)
    logprobs = np.asarray(logprobs)

    @jax.jit
    def alone(tokens):
        hidden = forward(policy, tokens[:, :-1], keep_cache=False).hidden
        last = rl.sharpness(hidden[:, -1] @ policy.head.T, tokens[:, -1], 0.01)
        return token_logprobs(hidden, policy, tokens[:, 1:])[0][0], last[0]

    count, ends = 0, []
    for number, row in enumerate(expected):
        pieces = [alone(np.array([piece])) for piece in row if len(piece) > 1]
        wanted = [np.asarray(piece) for piece, _ in pieces]
        ends.append(float(pieces[-1][1]))
        found = logprobs[number][np.asarray(rows.mask[number])]
        np.testing.assert_allclose(found, np.concatenate(wanted), atol=2e-6)
        count += len(found)
    # of the last token of a row that is predicted
    assert rl.metric_values(sharp)["sharpness/0.01"] == pytest.approx(np.mean(ends), rel=1e-4)
    assert count == sum(len(document) + 1 for document in documents)
    # "once" and what of "upon a time" is in its row, the rest of it, its end and "x"
    positions = [[*range(6), *range(6)], [*range(7), *range(3), *range(2)]]
    assert np.asarray(rows.positions).tolist() == positions


def test_micro_batches_make_the_update_of_the_whole(policy):
    """Also where they have different numbers of predicted tokens."""
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-2, max_grad_norm=0.0), 1)
    rows = jax.tree.map(jnp.asarray, text_of(["a" * 20, "bcd"], 8).rows(range(4)))
    assert len(set(rows.mask.sum(1).tolist())) > 1
    found = []
    for parts in (1, 2):
        state = init_state(jax.tree.map(jnp.copy, policy), optimizer)
        config = StepConfig(**{**vars(CONFIG), "micro_batches": parts})
        state, metrics = supervised_update(state, rows, config, optimizer)
        found.append((float(metrics["loss"]), jax.tree.leaves(state.optimizer)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-8)


WORDS = ["the cat sat", "on the mat", "and a dog ran", "to the cat", "and the rat sat"]


@pytest.fixture
def run_file(tmp_path):
    rows = [f"{WORDS[i % 5]} {WORDS[i // 5 % 5]} {i}." for i in range(25)]
    (tmp_path / "corpus.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in rows)
    )
    task = {"kind": "text", "name": str(tmp_path / "corpus.jsonl")}
    change = {
        "task": {"args": None, "train_size": None, "eval_size": None, "reward": None, **task},
        "sft": {"steps": 4, "batch_size": 4, "row_tokens": 24},
        "evaluation": {"every": 2, "batch_size": 2},
        "checkpoint": {"every": 2},
    }
    return write_run(tmp_path, change)


def test_a_resumed_run_repeats_the_uninterrupted_one(run_file, tmp_path, capsys):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert main(["pretrain", run_file, "--output", str(whole)]) == 0
    said = capsys.readouterr().out
    assert "documents to train on" in said and "held-out loss" in said
    rows = metric_rows(whole)
    assert [row["step"] for row in rows if "eval/loss" in row] == [0, 2, 4]
    assert rows[-1]["eval/loss"] < rows[0]["eval/loss"]
    assert rows[-1]["eval/perplexity"] == pytest.approx(np.exp(rows[-1]["eval/loss"]))
    # cut off behind its first checkpoint
    shutil.copytree(whole, resumed)
    for name in ("checkpoints/4", "model"):
        shutil.rmtree(resumed / name)
    assert main(["pretrain", run_file, "--output", str(resumed), "--resume"]) == 0
    assert measured(resumed) == measured(whole)
    weights = [directory / "model" / "model.safetensors" for directory in (whole, resumed)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    # and what it made is what an evaluation finds
    capsys.readouterr()
    assert main(["eval", str(whole)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["eval/loss"] == pytest.approx(rows[-1]["eval/loss"], rel=1e-5)
    assert found["eval/tokens"] == rows[-1]["eval/tokens"] > 0
    assert fp8rl.evaluate(whole)["eval/loss"] == found["eval/loss"]
    # of another run, a taken directory, and other text
    flags = ["--output", str(resumed)]
    assert main(["pretrain", run_file, *flags]) == 2
    assert "holds a run already" in faults(capsys)[0]
    shutil.rmtree(resumed / "checkpoints" / "4")
    assert main(["pretrain", run_file, *flags, "--resume", "--sft.optimizer.beta1", "0.5"]) == 2
    assert "sft.optimizer.beta1 was 0.9 and is 0.5" in faults(capsys)[0]
    with (tmp_path / "corpus.jsonl").open("a") as file:
        file.write('{"text": "more"}\n')
    assert main(["pretrain", run_file, *flags, "--resume"]) == 2
    assert "corpus.jsonl has changed" in faults(capsys)[0]


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        ("train", [], 'task.kind = "text" has no problems to earn rewards with'),
        ("pretrain", ["--task.kind", "jsonl"], "task.kind = 'jsonl' has problems"),
        ("pretrain", ["--sft.row-tokens", "99999"], "sft.row_tokens = 99999 exceeds the model's"),
        ("pretrain", ["--sft.micro-batch-rows", "3"], "does not divide sft.batch_size = 4"),
        ("pretrain", ["--task.name", "nowhere.txt"], "there is no such file"),
    ],
)
def test_what_a_run_on_text_refuses(run_file, tmp_path, capsys, command, flags, message):
    assert main([command, run_file, "--output", str(tmp_path / "out"), *flags]) == 2
    (line,) = faults(capsys)
    assert message in line
