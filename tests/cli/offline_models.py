"""Small model directories with random weights, and the ways that tests call a command on a file of
lines."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from fp8rl_jax.cli import main as cli
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.forward import forward
from fp8rl_jax.models.policy import init_policy
from fp8rl_jax.tokenizers.byte_tokenizer import ByteTokenizer
from fp8rl_jax.weights.load import load_policy, save_policy

CONFIG = PolicyConfig(
    architecture="llama",
    vocab_size=264,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    tie_word_embeddings=True,
    max_position_embeddings=128,
)

_WIDTH = 32
_forward = jax.jit(forward)


def make_model(directory: Path, tokenizer: bool = False, **changes) -> Path:
    """Weights five times the usual deviation: log-probabilities that are far from uniform."""
    policy = init_policy(dataclasses.replace(CONFIG, **changes), jax.random.key(0))
    policy = jax.tree.map(lambda x: 5 * x if (x != 1).any() else x, policy)
    return save_policy(policy, directory, ByteTokenizer() if tokenizer else None, dtype="float32")


def call(command: str, model: Path, lines: list, tmp_path: Path, *flags: str) -> list[dict]:
    """The command's answers to `lines`, which are objects or raw text."""
    output = tmp_path / "out.jsonl"
    assert (
        cli.main(
            [
                command,
                "--model",
                str(model),
                "--output",
                str(output),
                *_input(lines, tmp_path),
                *flags,
            ]
        )
        == 0
    )
    return [json.loads(line) for line in output.read_text().splitlines()]


def refusal(command: str, model: Path, lines: list, tmp_path: Path, capsys, *flags: str) -> str:
    """What the command says on standard error when it refuses; it must have written nothing."""
    output = tmp_path / "out.jsonl"
    capsys.readouterr()
    assert (
        cli.main(
            [
                command,
                "--model",
                str(model),
                "--output",
                str(output),
                *_input(lines, tmp_path),
                *flags,
            ]
        )
        == 2
    )
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {"in.jsonl"}
    return capsys.readouterr().err


def full_logits(model: Path, tokens: list[int]) -> np.ndarray:
    """float64 [length, vocab] of a direct forward over one row."""
    policy = load_policy(model)
    # attention is causal; one width compiles once
    padded = jnp.asarray([tokens + [0] * (_WIDTH - len(tokens))], jnp.int32)
    hidden = _forward(policy, padded).hidden[:, : len(tokens)]
    return np.asarray(hidden[0], np.float64) @ np.asarray(policy.head, np.float64).T


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def random_rows(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, length).tolist() for length in lengths]


def _input(lines: list, tmp_path: Path) -> list[str]:
    path = tmp_path / "in.jsonl"
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    return ["--input", str(path)]
