"""Arguments of the commands that do not take a run's whole configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True)
class LinesArguments:
    """A model applied to the lines of one file, with an answer for each in another."""

    model: str
    """Hugging Face directory, hub id, .gguf file, or a name that `fp8rl fetch` knows."""
    input: str
    """JSON objects, one a line, each with "tokens", "prompt" or "messages"."""
    output: str
    """File for the answers, one JSON object a line, in the order of the input."""
    recipe: str = "bf16"
    """Precision recipe, built-in or of --recipes."""
    compute_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Dtype of everything that the recipe does not quantize."""
    batch_size: int = 16
    """Lines computed at one time."""
    recipes: tuple[str, ...] = ()
    """TOML files whose [recipes.NAME] may be named, a run's config.toml among them."""

    def problems(self) -> list[str]:
        """Every value that cannot work, one line each; empty where all is well."""
        return _faults(
            (self.batch_size >= 1, f"--batch-size: {self.batch_size} must be at least 1")
        )


@dataclass(frozen=True)
class ScoreArguments(LinesArguments):
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
    """JSON objects, one a line, each with "tokens", "prompt" or "messages"."""
    output: str = ""
    """File for the answers, one JSON object a line, in the order of the input."""
    batch_size: int = 16
    """Completions computed at one time."""
    interactive: bool = False
    """Talk with the model in the terminal, without input and output; --max-new-tokens 512 is a good
    length."""
    max_new_tokens: int = 64
    """Longest completion, its stop token included."""
    temperature: float = 0.0
    """Softmax temperature; 0: greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0: all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this; 1: all."""
    min_p: float = 0.0
    """Drop tokens less likely than this times the most likely one; 0: none."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion. The answer's "text" is cut before the first, its tokens stay
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
    """Add "prompt_logprobs" of each line's own tokens, as `fp8rl score` numbers them, on the
    rollout's side of the recipe."""
    seed: int = 0
    """Seed of the sampling."""

    def biases(self) -> dict[str, float]:
        """`logit_bias` as a table; raises ValueError for an entry that is not TOKEN=BIAS."""
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
                    self.max_new_tokens >= 1,
                    f"--max-new-tokens: {self.max_new_tokens} must be at least 1",
                ),
                (self.temperature >= 0, f"--temperature: {self.temperature} must not be negative"),
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
                (
                    0 <= self.best <= self.n,
                    f"--best: {self.best} must be between 0 and --n, {self.n}",
                ),
            )
        )


@dataclass(frozen=True)
class ReportArguments:
    """Write one self-contained HTML page that compares runs side by side, and draws what `fp8rl
    compare` found."""

    directories: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIRECTORY ...")
    ]
    """Run directories, directories with a compare.json, or one directory that holds them."""
    output: str = ""
    """The page; empty: report.html in the first directory given."""

    def problems(self) -> list[str]:
        """Every value that cannot work, one line each; empty where all is well."""
        return _faults((bool(self.directories), "DIRECTORY: give at least one run directory"))


@dataclass(frozen=True)
class ExportArguments:
    """Write a model as a Hugging Face directory that transformers, vLLM and SGLang load; print the
    directory."""

    model: str
    """Hugging Face directory (bf16, fp16, float32 or block-FP8), hub id, .gguf file, or a name that
    `fp8rl fetch` knows."""
    output: str
    """Directory to write; an earlier export in it is replaced."""
    format: Literal["bf16", "fp16", "float32", "fp8-block"] = "bf16"
    """fp8-block: linears in e4m3 with a float32 scale for each 128 x 128 block, as in DeepSeek-V3,
    the rest in bf16."""


@dataclass(frozen=True)
class DoctorArguments:
    """Print devices, versions, kernel backends, and what a recipe quantizes in a model."""

    model: str = ""
    """As in `fp8rl score`; empty: the built-in policy."""
    recipe: str = "fp8-rl"
    """Precision recipe, built-in or of --recipes."""
    recipes: tuple[str, ...] = ()
    """TOML files whose [recipes.NAME] may be named, a run's config.toml among them."""


@dataclass(frozen=True)
class ConfigArguments:
    """Print every key of a run with its type, default and meaning, as Markdown."""


def _faults(*checks: tuple[bool, str]) -> list[str]:
    return [message for holds, message in checks if not holds]
