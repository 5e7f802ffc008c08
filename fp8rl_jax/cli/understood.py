"""What `fp8rl doctor --model DIR --data FILE` shows: how a model's files and a task's rows are
understood, on one screen."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fp8rl_jax.compare.linears import ranges
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.config.tasks import TaskConfig

if TYPE_CHECKING:
    from fp8rl_jax.models.config import PolicyConfig
    from fp8rl_jax.tasks.dataset import Example
    from fp8rl_jax.tokenizers.tokenizer import HFTokenizer

_WIDTH = 96
_ANSWERS = 10
_PROMPT_LINES = 6


def model_lines(config: PolicyConfig, directory: Path) -> list[str]:
    """Say what a model's config.json means: layers, windows, rotary positions, how weights are
    stored.

    Raises:
        UserError: weights in a form that is not read.
    """
    from fp8rl_jax.models.policy import parameter_count
    from fp8rl_jax.weights.layouts import read_quantization

    return [
        f"{config.family.hf_class}: {config.num_layers} layers, {parameter_count(config):,} "
        f"parameters, embeddings {'tied' if config.tie_word_embeddings else 'untied'}, "
        f"{config.max_position_embeddings} positions",
        f"windows: {_windows(config)}",
        f"rotary positions: {_rope(config)}",
        *([f"latent attention: {_latent(config)}"] if config.latent else []),
        *([f"experts: {_experts(config)}"] if config.experts else []),
        f"quantization of the files: {read_quantization(directory) or 'none'}",
    ]


def _windows(config: PolicyConfig) -> str:
    if config.windows is None:
        return "none"
    full = config.full_attention_layers
    others = f", but none in layers {ranges(full)}" if full else ""
    return f"{config.sliding_window} tokens{others}"


def _rope(config: PolicyConfig) -> str:
    found = [f"base {config.rope_theta:g}"]
    if config.local_rope_theta is not None:
        found.append(f"{config.local_rope_theta:g} in layers with a window")
    if (scaling := config.rope_scaling) is not None:
        found.append(f"{scaling.rope_type} by {scaling.factor:g}")
        if scaling.amplitude != 1:
            found.append(f"cos and sin times {scaling.amplitude:.4g}")
    if config.rotary_dim != config.head_dim:
        which = "first" if config.latent is None else "last"
        found.append(f"the {which} {config.rotary_dim} of {config.head_dim} dimensions")
    return ", ".join(found)


def _latent(config: PolicyConfig) -> str:
    latents = config.latents
    queries = "" if latents.query_rank is None else f", queries of {latents.query_rank}"
    kept = sum(heads * dim for heads, dim in config.cached)
    return f"keys and values of {latents.rank} numbers{queries}; the cache keeps {kept} a token"


def _experts(config: PolicyConfig) -> str:
    experts = config.mixture
    found = [f"{experts.per_token} of {experts.count} by {experts.scoring}"]
    if experts.groups > 1:
        found.append(f"out of {experts.groups_per_token} of {experts.groups} groups")
    if experts.shared:
        found.append(f"{experts.shared} shared")
    if config.dense_layers:
        found.append(f"layers without: {ranges(config.dense_layers)}")
    return ", ".join(found)


def tokenizer_lines(tokenizer: HFTokenizer, config_ends: Sequence[int]) -> list[str]:
    """Say what the special tokens are, which end a completion, and whether there is a template.

    Args:
        config_ends: end tokens of config.json and generation_config.json.
    """
    from fp8rl_jax.tokenizers.tokenizer import end_tokens

    def named(index: int) -> str:
        return f"{tokenizer.decode([index], skip_special=False)!r} ({index})"

    special = (
        f"{name.removesuffix('_token')} {text!r} ({tokenizer.special_id(name)})"
        for name, text in tokenizer.special_tokens.items()
    )
    ends = [named(index) for index in end_tokens(tokenizer, config_ends)]
    start = tokenizer.encode("")
    return [
        f"{tokenizer.vocab_size} tokens; special: {', '.join(special) or 'none'}",
        f"a text begins with {', '.join(map(named, start)) or 'nothing added'}",
        f"a completion ends with {', '.join(ends) or 'nothing: give rollout.stop_token_ids'}",
        f"chat template: {'yes' if tokenizer.has_chat_template else 'none'}",
    ]


def task_of(data: str) -> RunConfig:
    """The run whose problems are meant: a file of rows, or a run's TOML."""
    from fp8rl_jax.cli.load import load_config

    if data.endswith(".toml"):
        return load_config(RunConfig, [data], "fp8rl doctor")
    return RunConfig(task=TaskConfig(kind="jsonl", name=data, eval_size=0))


def data_lines(run: RunConfig, tokenizer: HFTokenizer | None) -> list[str]:
    """Say which rows are kept, how the first prompt is written, and what is read as answers.

    Raises:
        UserError: rows that cannot be used, each with its place.
    """
    from fp8rl_jax.tasks.dataset import load_splits
    from fp8rl_jax.tasks.verifiers import unread_result
    from fp8rl_jax.training.prompts import PromptEncoder

    task, width = run.task, run.rollout.max_prompt_tokens
    train, held_out = load_splits(task)
    examples = [*held_out.examples, *train.examples]
    lines = [f"rows: {len(examples)} kept, {train.duplicates} dropped, which repeat a prompt"]
    if tokenizer is not None:
        encoder = PromptEncoder(tokenizer, task.system_prompt, width)
        prompts = [encoder.tokens(example) for example in examples]
        lines += _lengths(examples, prompts, width)
        lines += _written(examples[0], tokenizer.decode(prompts[0], skip_special=False))
    lines += ["answers, as they stand and as their last number is read:", *_answers(examples)]
    return lines + ([hint] if (hint := unread_result(task, examples)) else [])


def _lengths(
    examples: Sequence[Example], prompts: Sequence[Sequence[int]], width: int
) -> Iterator[str]:
    from fp8rl_jax.errors import listing

    pairs = zip(examples, prompts, strict=True)
    counts = sorted((len(tokens), example.where) for example, tokens in pairs)
    yield f"tokens of a prompt: {counts[0][0]} to {counts[-1][0]}"
    if long := [where for count, where in counts if count > width]:
        yield (
            f"{len(long)} have more than rollout.max_prompt_tokens = {width} and would be skipped: "
            f"{listing(long)}"
        )


def _written(example: Example, text: str) -> Iterator[str]:
    yield f"the first prompt ({example.where}), as the model sees it:"
    shown = textwrap.wrap(repr(text), _WIDTH - 2, drop_whitespace=False)
    yield from (f"  {line}" for line in shown[:_PROMPT_LINES])
    if len(shown) > _PROMPT_LINES:
        yield f"  ... and {len(shown) - _PROMPT_LINES} lines more"


def _answers(examples: Sequence[Example]) -> Iterator[str]:
    from fp8rl_jax.tasks.extraction import extract_answer

    for example in examples[:_ANSWERS]:
        number = extract_answer(example.answer, "last_number")
        answer = textwrap.shorten(example.answer, 48, placeholder=" ...")
        yield f"  {example.where}: {answer!r} -> {number or 'no number'}"
