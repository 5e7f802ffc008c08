"""A comparison as plain data: what `--json` writes, the terminal shows and the report draws.

    {"kind": "fp8rl compare", "version": 1, "equal": bool,
     "sides": [{"model", "recipe", "phase", "compute_dtype", "backend", "exact", "formats"}, ...two],
     "tokens": {"rows", "prompt", "completion", "rows_given", "given"},
     "first": [{"name", "cause", "detail", "where"}, one of each cause that there is],
     "quantized_on_one_side": {"a": [names], "b": [names]},
     "logprobs": {"tokens", "differing", "mean_abs", "max_abs", "k3", "row", "position", "a", "b", "token", "text"},
     "layers": [{"name", "rerouted", "input": difference, "operations": [operation, ...]}, ...],
     "start": operation, "end": [operation, operation],
     "made": {"command", "versions", "devices"}, in the file alone}

    operation     {"name", "cause", "detail", "output": difference, "own": difference, "operands": {name: difference}}
    difference    {"elements", "differing", "relative_error", "snr_db", "max_abs"}

Numbers are rounded to four digits; what is not finite is null.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from fp8rl_jax.compare.probe import Tokens
from fp8rl_jax.compare.walk import Comparison, OperationResult
from fp8rl_jax.models.tokenizer import Tokenizer

KIND = "fp8rl compare"


def document(
    found: Comparison, sides: list[dict[str, Any]], tokens: Tokens, tokenizer: Tokenizer | None, given: tuple[int, int]
) -> dict[str, Any]:
    """The comparison in the form that stands above.

    Args:
        sides: what each side is, by the names above.
        tokenizer: gives the text of the token with the largest difference, where there is one.
        given: rows, and tokens of all rows, before some of both were left out.
    """
    worst = int(tokens.completions[found.logprobs["row"], found.logprobs["position"]])
    return {
        "kind": KIND,
        "version": 1,
        "equal": found.equal,
        "sides": sides,
        "tokens": {
            "rows": len(tokens.prompts),
            "prompt": int(np.sum(tokens.prompt_lengths)),
            "completion": int(np.sum(tokens.completion_lengths)),
            "rows_given": given[0],
            "given": given[1],
        },
        "first": [dataclasses.asdict(first) for first in found.first],
        "quantized_on_one_side": {"a": list(found.only_a), "b": list(found.only_b)},
        "logprobs": {
            **{name: _rounded(value) for name, value in found.logprobs.items()},
            "token": worst,
            "text": None if tokenizer is None else tokenizer.decode([worst], skip_special=False),
        },
        "layers": [
            {
                "name": layer.name,
                "rerouted": _rounded(layer.rerouted),
                "input": _numbers(layer.input),
                "operations": [_operation(operation) for operation in layer.operations],
            }
            for layer in found.layers
        ],
        "start": _operation(found.start),
        "end": [_operation(operation) for operation in found.end],
    }


def _operation(result: OperationResult) -> dict[str, Any]:
    return {
        "name": result.name,
        "cause": result.verdict.cause,
        "detail": result.verdict.detail,
        "output": _numbers(result.output),
        "own": _numbers(result.own),
        "operands": {name: _numbers(found) for name, found in result.verdict.operands.items()},
    }


def _numbers(found: Any) -> dict[str, Any]:
    return {name: _rounded(value) for name, value in dataclasses.asdict(found).items()}


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value
