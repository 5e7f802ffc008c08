"""The tokens of a comparison, from a file of lines, a text, or the text below.

A file may also hold another engine's log-probabilities of them.
"""

from __future__ import annotations

import logging
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int

from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.errors import UserError, listing
from fp8rl_jax.models.policy import Policy
from fp8rl_jax.parallel import to_host
from fp8rl_jax.rollout.engine import Rollout, pad_prompts
from fp8rl_jax.rollout.offline import Line, calibrate, read_lines
from fp8rl_jax.rollout.sampling import Sampling
from fp8rl_jax.rollout.vllm.engine import VllmEngine
from fp8rl_jax.tokenizers.tokenizer import Tokenizer, end_tokens

_log = logging.getLogger("fp8rl")


class Parts(NamedTuple):
    """Something of the prompts, and the same of their completions."""

    prompt: Any
    completion: Any


class Tokens(NamedTuple):
    """The tokens that both sides run on: right-padded prompts, each with one completion, and how
    many of each are real."""

    prompts: Int[Array, "p s"]
    prompt_lengths: Int[Array, " p"]
    completions: Int[Array, "p t"]
    completion_lengths: Int[Array, " p"]

    @property
    def masks(self) -> Parts:
        """True where a token is real."""

        def mask(tokens: Array, lengths: Array) -> Array:
            return jnp.arange(tokens.shape[1]) < lengths[:, None]

        return Parts(
            mask(self.prompts, self.prompt_lengths),
            mask(self.completions, self.completion_lengths),
        )


TEXT = """Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips did she
sell altogether in April and May? In May she sold 48 / 2 = 24 clips. Together that makes 48 + 24 = 72 clips, so the answer is 72.
A train that leaves at a quarter past nine and travels 180 kilometres at 60 kilometres an hour arrives at a quarter past 12."""
"""What is compared on where nothing else is given."""


class Row(NamedTuple):
    """Token ids of a prompt and its completion; recorded: the log-probability of each token of the
    completion, or nothing."""

    prompt: list[int]
    completion: list[int]
    recorded: list[float] = []


def from_file(
    path: str, vocab_size: int, tokenizer: Tokenizer | None, limit: int, recorded: str = ""
) -> list[Row]:
    """Read a row of every line; see `rollout.offline.read_lines` for how prompts are written.

    A line's "completion_tokens" (ids) or "completion" (text) is its completion, as `fp8rl generate`
    and a run's samples.jsonl have them; without one, or with an empty one, the second half of the
    prompt's tokens is.

    Args:
        recorded: the key under which a line has log-probabilities of its "completion_tokens";
            empty: none are read.

    Raises:
        UserError: what `read_lines` refuses, or one line for each line of the file that is wrong
            here.
    """
    rows, faults = [], []
    for line in read_lines(path, vocab_size, tokenizer, generation=True, limit=limit):
        try:
            completion = _completion(line, vocab_size, tokenizer)
            values = _recorded(line, recorded) if recorded else []
            row = Row(line.tokens, completion, values) if completion else halves(line.tokens)
            rows.append(row)
        except UserError as error:
            faults.append(f"{path}: line {line.number}: {error}")
    if faults:
        raise UserError("\n".join(faults))
    return rows


def from_text(text: str, tokenizer: Tokenizer | None) -> list[Row]:
    """Make one row of a text.

    Raises:
        UserError: there is no tokenizer, or the text gives fewer than two tokens.
    """
    if tokenizer is None:
        raise UserError(
            "the model has no tokenizer: give token ids, --input FILE with lines such as "
            '{"tokens": [1, 2, 3]}'
        )
    return [halves(tokenizer.encode(text))]


def halves(tokens: list[int]) -> Row:
    """Take the first half as prompt, the second as completion.

    Raises UserError for fewer than two tokens.
    """
    if len(tokens) < 2:
        raise UserError("needs at least two tokens, one of a prompt and one that follows")
    return Row(tokens[: len(tokens) // 2], tokens[len(tokens) // 2 :])


def of_rollout(rollout: Rollout, most: int) -> list[Row]:
    """List up to `most` rows of a rollout, of as many prompts as there are; recorded are the
    rollout's own log-probabilities."""
    lengths = np.asarray(rollout.prompts.lengths)
    samples = len(rollout.tokens) // len(lengths)
    order = np.arange(len(rollout.tokens)).reshape(-1, samples).T.reshape(-1)
    host = rollout.prompts.tokens, rollout.tokens, rollout.policy_logprobs, rollout.mask
    prompts, tokens, logprobs, mask = map(np.asarray, host)
    rows = (
        Row(
            prompts[i // samples, : lengths[i // samples]].tolist(),
            tokens[i, mask[i]].tolist(),
            logprobs[i, mask[i]].tolist(),
        )
        for i in order[:most]
    )
    return [row for row in rows if row.completion]


def from_vllm(
    config: RunConfig, policy: Policy, tokenizer: Tokenizer, rows: list[Row]
) -> list[Row]:
    """Have a vLLM server complete the rows' prompts, and record its log-probabilities.

    Args:
        config: recipe, compute dtype, and of `rollout` vllm, max_prompt_tokens, max_new_tokens and
            temperature; longer prompts are truncated.
        policy: any float dtype.

    Raises:
        UserError: `config.problems()`, or what `VllmEngine` says.
    """
    if faults := config.problems():
        raise UserError("\n".join(faults))
    recipe, rollout = config.resolved_recipe, config.rollout
    engine = VllmEngine(config, recipe, tokenizer)
    given = [row.prompt[: rollout.max_prompt_tokens] for row in rows]
    if cut := [
        f"{number} ({len(row.prompt)} tokens)"
        for number, row in enumerate(rows, start=1)
        if len(row.prompt) > rollout.max_prompt_tokens
    ]:
        _log.warning(
            "%d of %d prompts have more than %d tokens and are cut to their first ones "
            "(--max-tokens): %s",
            len(cut),
            len(rows),
            rollout.max_prompt_tokens,
            listing(cut),
        )
    prompts = pad_prompts(given, list(range(len(given))), rollout.max_prompt_tokens)
    stops = end_tokens(tokenizer, policy.config.eos_token_ids)
    sampling = Sampling(rollout.max_new_tokens, rollout.temperature, stop_token_ids=stops)
    try:
        calibrate(engine, jax.tree.map(lambda x: x.astype(jnp.float32), policy), [prompts])
        rollout = to_host(engine.generate(prompts, 1, sampling, jax.random.key(config.seed)))
    finally:
        engine.stop()
    return [
        Row(prompt, tokens[mask].tolist(), logprobs[mask].tolist())
        for prompt, tokens, mask, logprobs in zip(
            given, rollout.tokens, rollout.mask, rollout.policy_logprobs, strict=True
        )
    ]


def as_tokens(rows: list[Row], longest: int) -> Tokens:
    """Pad rows into arrays, each row truncated to its first `longest` tokens.

    One whose prompt is longer becomes two halves of it.
    """
    rows = [_truncated(row, longest) for row in rows]
    prompts, completions = (row.prompt for row in rows), (row.completion for row in rows)
    return Tokens(*_padded(list(prompts)), *_padded(list(completions)))


def as_recorded(rows: list[Row], longest: int) -> Float32[np.ndarray, "p t"]:
    """Pad what is recorded of the completions that `as_tokens` makes of these rows.

    NaN where nothing is recorded.

    Raises:
        UserError: nothing is left of it.
    """
    rows = [_truncated(row, longest) for row in rows]
    table = np.full((len(rows), max(len(row.completion) for row in rows)), np.nan, np.float32)
    for values, row in zip(table, rows, strict=True):
        values[: len(row.recorded)] = row.recorded
    if np.isnan(table).all():
        raise UserError(
            "--max-tokens: cuts off every token that has a recorded log-probability; raise it"
        )
    return table


def _truncated(row: Row, longest: int) -> Row:
    tokens, prompt = (row.prompt + row.completion)[:longest], len(row.prompt)
    if prompt >= len(tokens):
        return halves(tokens)
    return Row(tokens[:prompt], tokens[prompt:], row.recorded[: len(tokens) - prompt])


def _completion(line: Line, vocab_size: int, tokenizer: Tokenizer | None) -> list[int]:
    if "completion_tokens" in line.record:
        return _ids(line.record["completion_tokens"], vocab_size)
    text = line.record.get("completion", "")
    if not isinstance(text, str):
        raise UserError('"completion" must be a string')
    if not text:
        return []
    if tokenizer is None:
        raise UserError(
            '"completion" needs a tokenizer, and the model has none; give "completion_tokens"'
        )
    return tokenizer.encode(text, add_special_tokens=False)


def _ids(value: Any, vocab_size: int) -> list[int]:
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise UserError('"completion_tokens" must be a list of integers')
    if outside := [token for token in value if not 0 <= token < vocab_size]:
        raise UserError(f"token {outside[0]} is outside the vocabulary of {vocab_size}")
    return value


def _recorded(line: Line, key: str) -> list[float]:
    tokens, values = line.record.get("completion_tokens"), line.record.get(key)
    if not tokens or values is None:
        raise UserError(f'has no "{key if tokens else "completion_tokens"}"; --recorded needs both')
    if not isinstance(values, list) or not all(
        type(value) in (int, float) and math.isfinite(value) for value in values
    ):
        raise UserError(f'"{key}" must be a list of finite numbers')
    if len(values) != len(tokens):
        raise UserError(f'"{key}" has {len(values)} numbers for {len(tokens)} "completion_tokens"')
    return values


def _padded(rows: list[list[int]]) -> tuple[Int[Array, "p s"], Int[Array, " p"]]:
    table = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for row, tokens in zip(table, rows, strict=True):
        row[: len(tokens)] = tokens
    return jnp.asarray(table), jnp.asarray([len(tokens) for tokens in rows], jnp.int32)
