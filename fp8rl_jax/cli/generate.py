"""`fp8rl generate` and `fp8rl logprobs`: a model applied to the lines of a file."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from fp8rl_jax.cli.open_model import OpenModel, open_model
from fp8rl_jax.config.tasks import template_faults
from fp8rl_jax.errors import UserError

if TYPE_CHECKING:
    from fp8rl_jax.rollout.offline import Completion
    from fp8rl_jax.rollout.sampling import Sampling


@dataclass(frozen=True)
class LinesArguments:
    """A model applied to the lines of one file, with an answer for each in another."""

    model: str
    """Hugging Face directory, hub id, .gguf file, a name that `fp8rl fetch` knows, or a run (its
    directory, or the config.toml in it), for what it trained."""
    input: str
    """JSON objects, one a line, each with "tokens", "prompt" or "messages"."""
    output: str
    """File for the answers, one JSON object a line, in the order of the input."""
    recipe: str = "bf16"
    """Precision recipe, built-in or of --recipes."""
    compute_dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """Dtype of everything that the recipe does not quantize; None: float32 on a CPU, bfloat16 on
    other devices."""
    batch_size: int = 16
    """Lines computed at one time."""
    recipes: tuple[str, ...] = ()
    """TOML files whose [recipes.NAME] may be named, a run's config.toml among them; the `formats`
    that they name are imported."""

    def open(self) -> OpenModel:
        """Find the model; see `open_model`."""
        return open_model(self.model, self.recipe, self.recipes, self.compute_dtype)

    def problems(self) -> list[str]:
        """Every value that cannot work, one line each; empty where all is well."""
        return _faults(
            (self.batch_size >= 1, f"--batch-size: {self.batch_size} must be at least 1")
        )


@dataclass(frozen=True)
class LogprobsArguments(LinesArguments):
    """Answer each line with "logprobs", where logprobs[i] = log p(tokens[i+1] | tokens[:i+1])."""

    temperature: float = 1.0
    """Divides the logits before the softmax."""

    def problems(self) -> list[str]:
        """Every value that cannot work, one line each; empty where all is well."""
        cold = f"--temperature: {self.temperature} must be above 0"
        return super().problems() + _faults((self.temperature > 0, cold))


@dataclass(frozen=True)
class GenerateArguments(LinesArguments):
    """Answer each line with "completion_tokens", "policy_logprobs", and "text" where the model has
    a tokenizer."""

    input: str = ""
    """JSON objects, one a line, each with "tokens", or with "messages", "prompt" or "question",
    which are written as training writes its problems, in the chat template of a model that has
    one."""
    output: str = ""
    """File for the answers, one JSON object a line, in the order of the input."""
    batch_size: int = 16
    """Completions computed at one time."""
    prompt_template: str = ""
    """As task.prompt_template; empty: that of a run, where the model is one, else {question}."""
    system_prompt: str = ""
    """As task.system_prompt; empty: that of a run, where the model is one."""
    interactive: bool = False
    """Talk with the model in the terminal, without input and output."""
    max_new_tokens: int | None = None
    """Longest completion, its stop token included; None: 64, and in a conversation 256, or half of
    the model's positions where it has fewer than 512."""
    temperature: float = 0.0
    """Softmax temperature; 0: greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0: all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this; 1: all."""
    min_p: float = 0.0
    """Drop tokens less likely than this times the most likely one; 0: none."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion. The answer's "text" ends before the first, its tokens stay
    whole."""
    include_stop: bool = False
    """Leave the stop string in "text"."""
    bad_words: tuple[str, ...] = ()
    """Texts that no completion may hold, inside of words either: tokens that would complete one are
    not sampled."""
    logit_bias: tuple[str, ...] = ()
    """TOKEN=BIAS, added to the token's logit before the temperature; TOKEN is an id, or a text that
    is a single token."""
    ignore_eos: bool = False
    """Go on past end-of-sequence tokens, up to max_new_tokens."""
    n: int = 1
    """Completions of each line. Above 1 they are listed as "completions", ordered by mean
    log-probability."""
    best: int = 0
    """Of n completions, write this many; 0: all."""
    prompt_logprobs: bool = False
    """Add "prompt_logprobs" of each line's own tokens, as `fp8rl logprobs` numbers them, on the
    rollout's side of the recipe."""
    seed: int = 0
    """Seed of the sampling."""

    def open(self) -> OpenModel:
        """Find the model, and say how prompts are written for it; see `open_model`."""
        model, keys = super().open(), ("prompt_template", "system_prompt")
        given = {key: getattr(self, key) for key in keys if getattr(self, key)}
        if self.system_prompt and not (model.tokenizer and model.tokenizer.has_chat_template):
            raise UserError("--system-prompt: the model has no chat template to write it with")
        return replace(model, task=replace(model.task, **given))

    def biases(self) -> dict[str, float]:
        """Read `logit_bias` as a table.

        Raises ValueError for an entry that is not TOKEN=BIAS.
        """
        pairs = [entry.rpartition("=") for entry in self.logit_bias]
        if not all(equals and math.isfinite(float(value)) for _, equals, value in pairs):
            raise ValueError
        return {token: float(value) for token, _, value in pairs}

    def problems(self) -> list[str]:
        """Every value that cannot work, one line each; empty where all is well."""
        if self.interactive:
            files = _faults(
                (
                    not (self.input or self.output),
                    "--interactive: reads the terminal; leave out --input and --output",
                ),
                (self.n == 1, "--interactive: gives one completion; leave out --n"),
                (
                    not self.include_stop,
                    "--interactive: shows no stop strings; leave out --include-stop",
                ),
                (
                    not self.prompt_logprobs,
                    "--interactive: shows no log-probabilities; leave out --prompt-logprobs",
                ),
            )
        else:
            files = _faults(
                (bool(self.input), "--input: required"), (bool(self.output), "--output: required")
            )
        try:
            well_formed = len(self.biases()) == len(self.logit_bias)
        except ValueError:
            well_formed = False
        return (
            super().problems()
            + files
            + _faults(
                (
                    self.max_new_tokens is None or self.max_new_tokens >= 1,
                    f"--max-new-tokens: {self.max_new_tokens} must be at least 1",
                ),
                (self.temperature >= 0, f"--temperature: {self.temperature} must not be negative"),
                *(
                    (False, f"--prompt-template: {fault}")
                    for fault in template_faults(self.prompt_template)
                ),
                (self.top_k >= 0, f"--top-k: {self.top_k} must not be negative"),
                (0 < self.top_p <= 1, f"--top-p: {self.top_p} must be above 0 and at most 1"),
                (0 <= self.min_p < 1, f"--min-p: {self.min_p} must be at least 0 and below 1"),
                (all(self.stop), "--stop: an empty text would match everywhere"),
                (all(self.bad_words), "--bad-words: an empty text would match everywhere"),
                (
                    well_formed,
                    f"--logit-bias: {' '.join(self.logit_bias)} must be TOKEN=BIAS, each token "
                    "once, such as 42=-5.5",
                ),
                (not self.include_stop or bool(self.stop), "--include-stop: there is no --stop"),
                (self.n >= 1, f"--n: {self.n} must be at least 1"),
                (
                    self.n <= 1 or self.temperature > 0,
                    "--n: greedy completions are all the same; give a --temperature above 0",
                ),
                *(
                    (
                        not (truncates and self.temperature == 0),
                        f"{flag}: greedy completions are of the likeliest tokens; give a "
                        "--temperature above 0, or leave it out",
                    )
                    for flag, truncates in (
                        ("--top-k", self.top_k > 0),
                        ("--top-p", 0 < self.top_p < 1),
                        ("--min-p", 0 < self.min_p < 1),
                    )
                ),
                (
                    0 <= self.best <= self.n,
                    f"--best: {self.best} must be between 0 and --n, {self.n}",
                ),
            )
        )


def logprobs(arguments: LogprobsArguments) -> None:
    """Answer every line with "tokens" and "logprobs", of the trainer's side of the recipe.

    Its rollout formats play no part.
    """
    from fp8rl_jax.rollout import offline

    model = arguments.open()
    lines = model.read_lines(arguments.input, generation=False)
    offline.check_writable(arguments.output)
    results = offline.logprobs(
        model.load(),
        [line.tokens for line in lines],
        model.recipe,
        model.dtype,
        arguments.temperature,
        arguments.batch_size,
    )
    pairs = zip(lines, results, strict=True)
    answers = (line.record | {"tokens": line.tokens, "logprobs": row} for line, row in pairs)
    offline.write_lines(arguments.output, answers)


def generate(arguments: GenerateArguments) -> None:
    """Answer every line with completions, as the rollout makes them, or talk in the terminal.

    An answer has "tokens" (of the prompt), "completion_tokens", "policy_logprobs", "finish_reason"
    and "text".

    "text" is there where the model has a tokenizer, and "stop_string" where one ended the
    completion. With --n the last four stand in each of "completions", beside "mean_logprob". A
    model without end tokens goes on to --max-new-tokens.
    """
    from fp8rl_jax.rollout import offline

    model = arguments.open()
    sampling = make_sampling(arguments, model)
    if arguments.interactive:
        from fp8rl_jax.cli.chat import talk

        return talk(model, sampling, arguments.stop, arguments.seed)
    lines = model.read_lines(arguments.input, generation=True, reserve=sampling.max_new_tokens)
    offline.check_writable(arguments.output)
    answers = offline.complete(
        model.load(),
        [line.tokens for line in lines],
        model.recipe,
        sampling,
        model.dtype,
        arguments.batch_size,
        arguments.seed,
        arguments.n,
        arguments.prompt_logprobs,
    )
    pieces = model.tokenizer.token_bytes() if model.tokenizer and arguments.stop else []
    records = []
    for line, answer in zip(lines, answers, strict=True):
        record = line.record | {"tokens": line.tokens}
        if answer.prompt_logprobs is not None:
            record["prompt_logprobs"] = answer.prompt_logprobs
        parts = [_record(arguments, model, pieces, completion) for completion in answer.completions]
        if arguments.n == 1:
            record |= parts[0]
        else:
            for part, completion in zip(parts, answer.completions, strict=True):
                part["mean_logprob"] = completion.mean_logprob
            record["completions"] = parts[: arguments.best or arguments.n]
        records.append(record)
    offline.write_lines(arguments.output, records)


def make_sampling(arguments: GenerateArguments, model: OpenModel) -> Sampling:
    """Make the sampling that the arguments ask for, with the model's own end tokens.

    Raises:
        UserError: stop strings, bad words or a bias that the model's tokenizer cannot serve.
    """
    from fp8rl_jax.rollout.constraints import Keys, make_constraints
    from fp8rl_jax.rollout.sampling import Sampling

    length = arguments.max_new_tokens
    if length is None:
        positions = model.config.max_position_embeddings
        length = max(1, min(256, positions // 2)) if arguments.interactive else 64
    constraints = make_constraints(
        model.tokenizer,
        model.config.vocab_size,
        arguments.stop,
        arguments.bad_words,
        arguments.biases(),
        Keys("--stop", "--bad-words", "--logit-bias", "generation_config.json's eos_token_id"),
    )
    return Sampling(
        max_new_tokens=length,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        stop_token_ids=() if arguments.ignore_eos else model.stop_token_ids,
        **constraints._asdict(),
    )


def _record(
    arguments: GenerateArguments, model: OpenModel, pieces: list[bytes], completion: Completion
) -> dict[str, Any]:
    from fp8rl_jax.rollout.constraints import text_before_stop

    record = {
        "completion_tokens": completion.tokens,
        "policy_logprobs": completion.policy_logprobs,
        "finish_reason": "stop" if completion.stopped else "length",
    }
    if model.tokenizer is not None:
        raw = b"".join(pieces[token] for token in completion.tokens if token < len(pieces))
        text, stop = text_before_stop(
            model.tokenizer.decode(completion.tokens), raw, arguments.stop, arguments.include_stop
        )
        record |= {"text": text} | ({} if stop is None else {"stop_string": stop})
    return record


def _faults(*checks: tuple[bool, str]) -> list[str]:
    return [message for holds, message in checks if not holds]
