"""A comparison as plain data: what `--json` writes, the terminal shows and the report draws.

    {"kind": "fp8rl compare", "version": 1, "equal": bool,
     "sides": [{"model", "recipe", "phase", "compute_dtype", "backend", "exact", "formats"},
     ...two], "tokens": {"rows", "prompt", "completion", "rows_given", "given"},
     "first": [{"name", "cause", "detail", "where"}, one of each cause that there is],
     "quantized_on_one_side": {"a": [names], "b": [names]},
     "logprobs": {"tokens", "differing", "mean_abs", "max_abs", "k3", "row", "position", "a", "b",
     "token", "text"}, "recorded": null or {"key", "a": the same as "logprobs", with what is
     recorded for a and side a for b, "b": with side b}, "layers": [{"name", "rerouted", "input":
     difference, "operations": [operation, ...]}, ...], "start": operation, "end": [operation,
     operation], "made": {"command", "versions", "devices"}, in the file alone}

    operation     {"name", "cause", "detail", "output": difference, "own": difference, "operands":
                  {name: difference}}
    difference    {"elements", "differing", "relative_error", "snr_db", "max_abs"}

Numbers are rounded to four digits; what is not finite is null.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Float32

from fp8rl_jax.compare.probe import Tokens
from fp8rl_jax.compare.results import Comparison, OperationResult
from fp8rl_jax.compare.statistics import logprob_differences
from fp8rl_jax.tokenizers.tokenizer import Tokenizer

KIND = "fp8rl compare"


def document(
    found: Comparison,
    sides: list[dict[str, Any]],
    tokens: Tokens,
    tokenizer: Tokenizer | None,
    given: tuple[int, int],
    recorded: tuple[str, Float32[np.ndarray, "p t"]] | None = None,
) -> dict[str, Any]:
    """The comparison in the form that stands above.

    Args:
        sides: what each side is, by the names above.
        tokenizer: gives the text of the token with the largest difference, where there is one.
        given: rows, and tokens of all rows, before some of both were left out.
        recorded: what another engine said of the completions, NaN where it said nothing; and the
            name of that.
    """

    def named(numbers: dict[str, Any]) -> dict[str, Any]:
        token = int(tokens.completions[numbers["row"], numbers["position"]])
        text = None if tokenizer is None else tokenizer.decode([token], skip_special=False)
        return {
            **{name: _rounded(value) for name, value in numbers.items()},
            "token": token,
            "text": text,
        }

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
        "logprobs": named(found.logprobs),
        "recorded": None
        if recorded is None
        else {"key": recorded[0]}
        | {
            side: named(logprob_differences(recorded[1], scored, ~np.isnan(recorded[1])))
            for side, scored in zip("ab", found.scored, strict=True)
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
