"""Arguments of the commands that do not take a run's whole configuration."""

from __future__ import annotations

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
    """Precision recipe: bf16, fp8-rollout, fp8-kv or fp8-rl."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of everything that the recipe does not quantize."""
    batch_size: int = 16
    """Lines computed at one time."""

    def problems(self) -> list[str]:
        """Every value that cannot work, one line each; empty where all is well."""
        return _faults((self.batch_size >= 1, f"--batch-size: {self.batch_size} must be at least 1"))


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
    """Answer each line with "completion_tokens", "policy_logprobs", and "text" where the model has a tokenizer."""

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
    ignore_eos: bool = False
    """Go on past end-of-sequence tokens, up to max_new_tokens."""
    seed: int = 0
    """Seed of the sampling."""

    def problems(self) -> list[str]:
        """Every value that cannot work, one line each; empty where all is well."""
        return super().problems() + _faults(
            (self.max_new_tokens >= 1, f"--max-new-tokens: {self.max_new_tokens} must be at least 1"),
            (self.temperature >= 0, f"--temperature: {self.temperature} must not be negative"),
            (self.top_k >= 0, f"--top-k: {self.top_k} must not be negative"),
            (0 < self.top_p <= 1, f"--top-p: {self.top_p} must be above 0 and at most 1"),
            (0 <= self.min_p < 1, f"--min-p: {self.min_p} must be at least 0 and below 1"),
        )


@dataclass(frozen=True)
class ReportArguments:
    """Write one self-contained HTML page that compares runs side by side."""

    directories: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIRECTORY ...")]
    """Run directories, or one directory that holds them."""
    output: str = ""
    """The page; empty: report.html in the first directory given."""

    def problems(self) -> list[str]:
        """Every value that cannot work, one line each; empty where all is well."""
        return _faults((bool(self.directories), "DIRECTORY: give at least one run directory"))


@dataclass(frozen=True)
class ExportArguments:
    """Write a model as a Hugging Face directory that transformers, vLLM and SGLang load; print the directory."""

    model: str
    """Hugging Face directory (bf16, float32 or block-FP8), hub id, .gguf file, or a name that `fp8rl fetch` knows."""
    output: str
    """Directory to write; an earlier export in it is replaced."""
    format: Literal["bf16", "float32", "fp8-block"] = "bf16"
    """fp8-block: linears in e4m3 with a float32 scale for each 128 x 128 block, as in DeepSeek-V3, the rest in bf16."""


@dataclass(frozen=True)
class DoctorArguments:
    """Print devices, versions, kernel backends, and what a recipe quantizes in a model."""

    model: str = ""
    """As in `fp8rl score`; empty: the built-in policy."""
    recipe: str = "fp8-rl"
    """Precision recipe."""


@dataclass(frozen=True)
class ConfigArguments:
    """Print every key of a run with its type, default and meaning, as Markdown."""


def _faults(*checks: tuple[bool, str]) -> list[str]:
    return [message for holds, message in checks if not holds]
