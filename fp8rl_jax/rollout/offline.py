"""Files of JSON lines and a policy: prompts in, completions or log-probabilities out.

Every line of a file is checked before anything is computed, all faults are reported together, and
the answers appear under their name only when the last one is there.

    logprobs    the trainer's side of the recipe: its form and its forward, as it recomputes
                log-probabilities
    complete    the rollout's side: quantized weights and cache, scales calibrated on the prompts,
                as the engine samples

So the two answers to one model and recipe differ by the train-rollout mismatch. Rows are batched
with others of about their length, the widths being powers of two: few programs to compile, at most
half of a batch is padding.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from fp8rl_jax.config.recipe import Recipe
from fp8rl_jax.config.tasks import TaskConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.forms import trainer_policy
from fp8rl_jax.models.forward import forward
from fp8rl_jax.models.logprobs import token_logprobs
from fp8rl_jax.models.policy import Policy
from fp8rl_jax.precision import check_recipe
from fp8rl_jax.rollout.calibration import observe_qkv, scales_from_amax
from fp8rl_jax.rollout.engine import LocalEngine, Prompts, Rollout, pad_prompts
from fp8rl_jax.rollout.sampling import Sampling
from fp8rl_jax.rollout.sync import SyncContext
from fp8rl_jax.rollout.vllm.engine import VllmEngine
from fp8rl_jax.tasks.conversation import (
    ROLES,
    Conversation,
    MessageFault,
    prompt_tokens,
    read_messages,
)
from fp8rl_jax.tasks.dataset import render_prompt
from fp8rl_jax.tokenizers.tokenizer import Tokenizer

_LISTED = 20  # faults shown before the rest is counted


class Line(NamedTuple):
    """number: in its file, from 1; record: the object as read; tokens: its token ids, at least
    one."""

    number: int
    record: dict[str, Any]
    tokens: list[int]


def read_lines(
    path: str | Path,
    vocab_size: int,
    tokenizer: Tokenizer | None,
    generation: bool,
    limit: int,
    reserve: int = 0,
    task: TaskConfig | None = None,
) -> list[Line]:
    """Read objects that hold "tokens" (ids), "messages" (a conversation), "prompt" or "question".

    The first of these is used that is there; a null is not, nor is it a field of a message.

    Args:
        path: JSON lines, UTF-8; blank lines are skipped.
        vocab_size: token ids are below it.
        tokenizer: None for a model of token ids.
        generation: the model is to answer: all but "tokens" are written as training writes its
            problems, chat template included. Else texts and conversations are taken as they stand.
        limit: positions that the model has.
        reserve: positions to leave free behind the tokens.
        task: its prompt_template and system_prompt are used, with `generation`; default: none.

    Raises:
        UserError: the file cannot be read or holds nothing, or one line for each fault, with the
            number of its line.
    """
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    lines, faults = [], []
    task = (task or TaskConfig()) if generation else None
    for number, text in enumerate(raw.split(b"\n"), start=1):
        if not text.strip():
            continue
        try:
            record = _object(text)
            tokens = _tokens(record, vocab_size, tokenizer, task)
            if len(tokens) + reserve > limit:
                behind = f" and {reserve} new ones" if reserve else ""
                raise UserError(
                    f"{len(tokens)} tokens{behind} are more than the model's {limit} positions"
                )
            lines.append(Line(number, record, tokens))
        except UserError as error:
            faults.append(f"{path}: line {number}: {error}")
    if len(faults) > _LISTED:
        faults[_LISTED:] = [f"{path}: {len(faults) - _LISTED} more lines are wrong"]
    if faults:
        raise UserError("\n".join(faults))
    if not lines:
        raise UserError(f"{path}: holds no lines")
    return lines


def check_writable(path: str | Path) -> None:
    """Check before the work that `write_lines` will be able to write.

    An empty file is made beside `path`, and removed.

    Raises:
        UserError: it will not.
    """
    with _partial_file(Path(path)) as file:
        file.touch()


def write_lines(path: str | Path, records: Iterable[dict[str, Any]]) -> None:
    """Write one object a line; the file takes its name when it is complete.

    The text is ASCII, so that lone surrogates and halves of characters cannot break the file.

    Raises:
        UserError: `path` cannot be written.
    """
    with _partial_file(Path(path)) as file:
        lines = (json.dumps(record, allow_nan=False) + "\n" for record in records)
        file.write_text("".join(lines), encoding="ascii")
        os.replace(file, path)


@contextmanager
def _partial_file(path: Path) -> Generator[Path]:
    file = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        if path.is_dir():
            raise UserError(f"{path}: is a directory; give a file")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield file
        finally:
            file.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None


def _object(text: bytes) -> dict[str, Any]:
    def finite(number: str) -> float:
        # 1e999 would be read as infinity, which the answers' file can't hold
        if not math.isfinite(value := float(number)):
            raise ValueError(f"{number} is no finite number")
        return value

    try:
        record = json.loads(text.decode("utf-8-sig"), parse_float=finite, parse_constant=finite)
    except (ValueError, RecursionError) as error:
        raise UserError(f"not valid JSON ({error})") from None
    if not isinstance(record, dict):
        raise UserError('must be a JSON object such as {"tokens": [1, 2]}')
    return record


def _tokens(
    record: dict[str, Any], vocab_size: int, tokenizer: Tokenizer | None, task: TaskConfig | None
) -> list[int]:
    known = ("tokens", "messages", "prompt", *(["question"] if task else []))
    key = next((key for key in known if record.get(key) is not None), None)
    if key is None:
        raise UserError(f"holds neither {' nor '.join(map(json.dumps, known))}")
    value = record[key]
    if key == "tokens":
        if not isinstance(value, list) or not all(type(token) is int for token in value):
            raise UserError('"tokens" must be a list of integers')
        if outside := [token for token in value if not 0 <= token < vocab_size]:
            raise UserError(f"token {outside[0]} is outside the vocabulary of {vocab_size}")
        tokens = value
    elif tokenizer is None:
        raise UserError(f'"{key}" needs a tokenizer, and the model has none; give "tokens"')
    elif task:
        tokens = prompt_tokens(tokenizer, _prompt(record, key, task), task.system_prompt)
    elif key == "messages":
        try:
            messages = read_messages(value, last=ROLES)
        except MessageFault as fault:
            raise UserError(f'"messages" {fault}') from None
        tokens = tokenizer.encode_chat(messages, add_generation_prompt=False)
    elif not isinstance(value, str):
        raise UserError('"prompt" must be a string')
    else:
        tokens = tokenizer.encode(value)
    if not tokens:
        raise UserError(f'"{key}" gives no tokens')
    return tokens


def _prompt(record: dict[str, Any], key: str, task: TaskConfig) -> str:
    """The prompt that training makes of a record's question."""
    question, given = record[key], record.get("metadata", {})
    if key == "messages" or isinstance(question, list):
        try:
            question = Conversation(read_messages(question))
        except MessageFault as fault:
            raise UserError(f'"{key}" {fault}') from None
    elif not isinstance(question, str):
        raise UserError(f'"{key}" must be a string or a list of messages')
    beside = {name: x for name, x in record.items() if name not in (key, "answer", "metadata")}
    metadata = (given if isinstance(given, dict) else {}) | beside
    entry = {"question": question, "answer": record.get("answer"), "metadata": metadata}
    return render_prompt(task.prompt_template, entry)


_NARROWEST = 16


class Completion(NamedTuple):
    """tokens: sampled ids, the stop token included; policy_logprobs: of each, at the sampling
    temperature (1 for greedy), over the whole vocabulary; stopped: whether a stop token or a stop
    string ended it."""

    tokens: list[int]
    policy_logprobs: list[float]
    stopped: bool

    @property
    def mean_logprob(self) -> float:
        """What completions of a prompt are ranked by."""
        return sum(self.policy_logprobs) / len(self.policy_logprobs)


class Answer(NamedTuple):
    """completions: of one prompt, the likeliest first; prompt_logprobs: of its tokens from the
    second on, if asked for."""

    completions: list[Completion]
    prompt_logprobs: list[float] | None


def logprobs(
    policy: Policy,
    rows: Sequence[list[int]],
    recipe: Recipe,
    dtype: DTypeLike = jnp.float32,
    temperature: float = 1.0,
    batch_size: int = 16,
) -> list[list[float]]:
    """Compute log-probabilities of given tokens on the trainer's side of `recipe`.

    Args:
        policy: layers stacked, any float dtype.
        rows: token ids, at least one each.
        recipe: its trainer formats are used; its rollout formats are not.
        dtype: compute dtype.
        temperature: divides the logits.
        batch_size: rows computed at one time.

    Returns:
        For each row, in order, logprobs[i] = log p(row[i + 1] | row[: i + 1]): one number less than
        tokens.

    Raises:
        UserError: a recipe that cannot be computed, or log-probabilities that are not finite.
    """
    check_recipe(recipe)
    kind, divisor = jnp.dtype(dtype), jnp.float32(temperature)
    served = jax.jit(trainer_policy, static_argnums=(1, 2))(policy, recipe, kind)
    results: list[list[float]] = [[] for _ in rows]
    for batch in batches(rows, batch_size):
        values = np.asarray(_logprobs(served, batch.tokens, batch.lengths, divisor))
        for row, index in enumerate(batch.ids):
            results[index] = values[row, : len(rows[index]) - 1].tolist()
    for index, values in enumerate(results):
        _check_finite(index, values, kind)
    return results


def complete(
    policy: Policy,
    rows: Sequence[list[int]],
    recipe: Recipe,
    sampling: Sampling,
    dtype: DTypeLike = jnp.float32,
    batch_size: int = 16,
    seed: int = 0,
    samples: int = 1,
    prompt_logprobs: bool = False,
) -> list[Answer]:
    """Sample completions of each prompt on the rollout's side of `recipe`.

    A quantized cache is calibrated on all prompts before the first token, by the side that the
    recipe names, so a row's answer depends on the file's other rows through those scales alone. A
    row's randomness comes from `seed`, its index and the number of the sample.

    Args:
        policy: layers stacked; float32 or `dtype`.
        rows: prompts, at least one token each.
        recipe: its rollout formats are used.
        sampling: length, temperature, truncation, stop tokens, texts to stop at and to avoid.
        dtype: compute dtype.
        batch_size: completions computed at one time, and at least those of one prompt.
        samples: completions of each prompt, which share its prefill.
        prompt_logprobs: give those of the prompts' tokens too.

    Raises:
        UserError: a recipe that cannot be computed, or weights, scales or log-probabilities that
            are not finite.
    """
    # scanned layers compile in a fraction of the time of unrolled ones, and each width is a program
    # of its own
    engine = LocalEngine(recipe, jnp.dtype(dtype), unroll=False)
    prompts = max(batch_size // samples, 1)
    calibrate(engine, policy, list(batches(rows, prompts)))
    answers: dict[int, Answer] = {}
    key = jax.random.key(seed)
    for batch in batches(rows, prompts):
        out = jax.device_get(
            engine.generate(batch, samples, sampling, key, prompt_logprobs=prompt_logprobs)
        )
        for row, index in enumerate(batch.ids):
            completions = [_completion(out, row * samples + sample) for sample in range(samples)]
            of_prompt = None
            if prompt_logprobs:
                of_prompt = out.prompt_logprobs[row, 1 : len(rows[index])].tolist()
            for values in (of_prompt or [], *(x.policy_logprobs for x in completions)):
                _check_finite(int(index), values, engine.dtype)
            # a stable sort: equal completions stay in the order of sampling
            completions.sort(key=lambda completion: -completion.mean_logprob)
            answers[int(index)] = Answer(completions, of_prompt)
    return [answers[index] for index in range(len(rows))]


def calibrate(engine: LocalEngine | VllmEngine, policy: Policy, prompts: Sequence[Prompts]) -> None:
    """Give the engine its weights, with KV scales measured on all of `prompts`.

    Scales are measured where the recipe quantizes the cache, by the trainer's forward or by the
    rollout's, as it says.

    Raises:
        UserError: weights or scales that are not finite after quantization.
    """
    recipe, scales = engine.recipe, None
    if recipe.quantizes_cache and recipe.kv_calibration != "rollout":
        observe = partial(
            observe_qkv, policy, recipe=recipe, dtype=engine.dtype, backend=engine.backend
        )
        scales = scales_from_amax(
            jnp.concatenate([observe(batch.tokens, batch.lengths).amax for batch in prompts]),
            recipe,
        )
    engine.sync(policy, SyncContext(scales=scales))
    if recipe.quantizes_cache and scales is None:
        engine.calibrate(*prompts)
    if bad := [role for role, finite in engine.finite.items() if not finite]:
        raise UserError(
            f"recipe {recipe.name!r}: {', '.join(bad)} not finite after quantization; the model "
            f"overflows {engine.dtype}"
        )


def _completion(out: Rollout, row: int) -> Completion:
    count = int(out.mask[row].sum())
    return Completion(
        out.tokens[row, :count].tolist(),
        out.policy_logprobs[row, :count].tolist(),
        bool(out.stopped[row]),
    )


def batches(rows: Sequence[list[int]], batch_size: int) -> Iterator[Prompts]:
    """Make batches of equal height: rows of about one length, padded to a power of two.

    Rows are padded on the right; `ids` are indices into `rows`.

    The last batch of a width repeats its last row, so that each width is one program.
    """
    by_width: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        by_width.setdefault(max(_NARROWEST, 1 << (len(row) - 1).bit_length()), []).append(index)
    for width, indices in sorted(by_width.items()):
        height = min(batch_size, len(indices))
        for start in range(0, len(indices), height):
            chosen = indices[start : start + height]
            chosen += chosen[-1:] * (height - len(chosen))
            yield pad_prompts([rows[i] for i in chosen], chosen, width)


@jax.jit
def _logprobs(
    policy: Policy,
    tokens: Int[Array, "b t"],
    lengths: Int[Array, " b"],
    temperature: Float[Array, ""],
) -> Float[Array, "b t-1"]:
    segments = (jnp.arange(tokens.shape[1]) < lengths[:, None]).astype(jnp.int32)
    hidden = forward(policy, tokens, segment_ids=segments, keep_cache=False).hidden
    return token_logprobs(hidden[:, :-1], policy, tokens[:, 1:], temperature)[0]


def _check_finite(index: int, logprobs: list[float], dtype: jnp.dtype) -> None:
    if not np.isfinite(logprobs).all():
        raise UserError(
            f"row {index + 1}: the log-probabilities are not finite in {jnp.dtype(dtype)}; the "
            "weights are broken or overflow it"
        )
