"""What a comparison finds: of every operation, of every layer, and first of each cause.

The comparison: both sides run layer by layer, and every operation is measured twice.

    output    the free run: each side on its own hidden states, so differences pile up as they do in
              a rollout
    own       both sides' operation on side a's input, read from memory, so that each has only its
              own part

The second takes runs of their own on both sides: a compiler that fuses an operation with the one
before it may skip a rounding between them, which belongs to neither. One layer of both sides is in
memory at a time, besides the weights.

A comparison as plain data: what `--json` writes, the terminal shows and the report draws.

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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Float32

from fp8rl_jax.compare.causes import (
    CAUSES,
    Difference,
    Operand,
    Operation,
    Verdict,
    difference,
    judge,
    logprob_differences,
    operations,
)
from fp8rl_jax.compare.side import Side
from fp8rl_jax.compare.tokens import Stretches, Tokens
from fp8rl_jax.models.policy import EXPERT_LINEARS, LINEARS
from fp8rl_jax.precision import QTensor, describe, is_quantized
from fp8rl_jax.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class OperationResult:
    """One operation: the free run's difference, its own, and why it has one."""

    name: str
    output: Difference
    own: Difference
    verdict: Verdict


@dataclass(frozen=True)
class LayerResult:
    """input: the hidden states that enter; rerouted: part of the tokens whose experts differ, None
    without experts."""

    name: str
    input: Difference
    operations: tuple[OperationResult, ...]
    rerouted: float | None


@dataclass(frozen=True)
class First:
    """The first operation that differs for one cause, such as "layers.3.q_proj"; where: in the
    prompt, the completion or both."""

    name: str
    cause: str
    detail: str
    where: str


@dataclass(frozen=True)
class Comparison:
    """All that was found.

    Attributes:
        logprobs: `logprob_differences` of the completions' tokens.
        scored: these log-probabilities, of side a and of side b, float32 [rows, tokens].
        first: of each cause, in the order of `CAUSES`, where it is met first. Where a format
            differs, the first reduction may well come earlier, and is of no weight beside it.
        only_a, only_b: linears and cache operands that this side alone quantizes.
    """

    start: OperationResult
    layers: tuple[LayerResult, ...]
    end: tuple[OperationResult, ...]
    logprobs: dict[str, float | int | None]
    scored: tuple[np.ndarray, np.ndarray]
    first: tuple[First, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether no bit of anything differs."""
        return not self.first


def compare(
    a: Side,
    b: Side,
    tokens: Tokens,
    progress: Callable[[str], None] = lambda line: None,
    temperature: float = 1.0,
) -> Comparison:
    """Compares two sides of one shape on the same tokens.

    Args:
        progress: called with a line about each layer.
        temperature: of the log-probabilities.
    """
    return _Walk(a, b, tokens, temperature).run(progress)


_INPUTS = {
    "k_proj": "q_proj.in",
    "v_proj": "q_proj.in",
    "up_proj": "gate_proj.in",
    "experts.gate_proj": "router.in",
    "experts.up_proj": "router.in",
}
"""Where the input of a product is, when it is not under its own name."""


class _Walk:
    def __init__(self, a: Side, b: Side, tokens: Tokens, temperature: float):
        self.a, self.b, self.tokens, self.temperature = a, b, tokens, temperature
        self.masks = Stretches(*(np.asarray(mask) for mask in tokens.masks))
        self.first: dict[str, First] = {}

    def run(self, progress: Callable[[str], None]) -> Comparison:
        a, b, tokens = self.a, self.b, self.tokens
        xs = a.embed(tokens), b.embed(tokens)
        start = self.end("embed_tokens", "embed_tokens", xs, xs[1], self.masks)
        layers = []
        count = a.served.config.num_layers
        for i in range(count):
            progress(f"layer {i + 1} of {count}")
            layer, xs = self.layer(i, xs)
            layers.append(layer)
        hidden = a.norm(xs[0]), b.norm(xs[1])
        norm = self.end("norm", "norm", hidden, b.norm(xs[0]), self.masks)
        # of the completions alone: the prompts' part has no columns
        none = np.zeros((len(self.masks.completion), 0), np.float32)
        masks = Stretches(none.astype(bool), self.masks.completion)
        runs = (a, hidden[0]), (b, hidden[1]), (b, hidden[0])
        scored = [Stretches(none, side.logprobs(x, tokens, self.temperature)) for side, x in runs]
        head = "embed_tokens" if a.served.lm_head is None else "lm_head"
        last = self.end("logprobs", head, scored[:2], scored[2], masks)
        said = tuple(np.asarray(x.completion) for x in scored[:2])
        logprobs = logprob_differences(*said, self.masks.completion)
        self.look_for_excess_precision()
        quantized = [_quantized(side) for side in (a, b)]
        first = tuple(self.first[cause] for cause in CAUSES if cause in self.first)
        alone = (tuple(x for x in quantized[j] if x not in quantized[1 - j]) for j in (0, 1))
        return Comparison(start, tuple(layers), (norm, last), logprobs, said, first, *alone)

    def look_for_excess_precision(self) -> None:
        """In the sides' whole programs: no other cause is looked for there."""
        found = {name: side.excess for name, side in zip("ab", (self.a, self.b), strict=True)}
        details = [
            f"side {name}: {x['differing']:.0%} of {x['tokens']} log-probabilities change, by up "
            f"to {x['max_abs']:.2g} and "
            f"a k3 of {x['k3']:.1g}, where XLA must round every 16-bit result"
            for name, x in found.items()
            if x and x["differing"]
        ]
        if details:
            self.first["excess precision"] = First(
                "logprobs", "excess precision", "; ".join(details), "whole program"
            )

    def end(
        self, name: str, tensor: str, free: Sequence[Stretches], own: Stretches, masks: Stretches
    ) -> OperationResult:
        """An operation outside of the layers, which reads one tensor."""
        a, b, own = jax.device_get((*free, own))
        alone = difference(self.real(a, masks), self.real(own, masks))
        verdict = judge([self.weights(None, tensor, f"weight of {tensor}")], alone)
        return self.result(name, (a, b, a, own), alone, verdict, masks)

    def layer(
        self, i: int, xs: tuple[Stretches, Stretches]
    ) -> tuple[LayerResult, tuple[Stretches, Stretches]]:
        """Layer i, and what leaves it on both sides."""
        config, tokens = self.a.served.config, self.tokens
        seen = self.a.run(i, xs[0], tokens), self.b.run(i, xs[1], tokens)
        after = tuple(_pick(x, "output") for x in seen)
        free, steps, sparse = (
            jax.device_get(seen),
            tuple(operations(config, i)),
            i in config.sparse_layers,
        )
        if all(
            self.equal(_pick(x, name) for x in free)
            for name in ("input", *(step.output for step in steps))
        ):
            alike = free
        else:
            given = Stretches(
                *(
                    {k: v for k, v in part.items() if k.endswith((".in", ".out"))}
                    for part in seen[0]
                )
            )
            routes = _pick(seen[0], "router.ids") if sparse else None
            alike = jax.device_get(
                [side.run(i, xs[0], tokens, given, routes) for side in (self.a, self.b)]
            )
        same, rerouted = self.masks, None
        if sparse:
            ids = [_pick(x, "router.ids") for x in free]
            same = Stretches(
                *(mask & (x == y).all(-1) for mask, x, y in zip(self.masks, *ids, strict=True))
            )
            rerouted = 1.0 - sum(int(x.sum()) for x in same) / sum(int(x.sum()) for x in self.masks)
        entered = difference(*(self.real(_pick(x, "input")) for x in free))
        results: dict[str, OperationResult] = {}
        for operation in steps:
            results_of = tuple(_pick(x, operation.output) for x in (*free, *alike))
            alone = difference(*map(self.real, results_of[2:]))
            verdict = self.judge(i, operation, free[0], alike, alone)
            if operation.name == "mixture" and results["router"].verdict.cause and verdict.cause:
                verdict = verdict._replace(cause="input", detail="the router's weights differ")
            masks = same if operation.output.startswith("experts.") else self.masks
            results[operation.name] = self.result(
                f"layers.{i}.{operation.name}", results_of, alone, verdict, masks
            )
        return LayerResult(f"layers.{i}", entered, tuple(results.values()), rerouted), after

    def judge(
        self,
        i: int,
        operation: Operation,
        given: Stretches,
        alike: Sequence[Stretches],
        own: Difference,
    ) -> Verdict:
        """The verdict on one operation of layer i; given: what side a saw; alike: what both saw
        with a's inputs."""
        labels = [
            "weight" if operation.product else f"weight of {name}" for name in operation.tensors
        ]
        pairs = [
            self.weights(i, name, label)
            for name, label in zip(operation.tensors, labels, strict=True)
        ]
        for name, role in operation.operands:
            sources = self.sources(name, role, given, alike)
            both = zip((self.a, self.b), alike, sources, strict=True)
            pairs.append(
                tuple(
                    self.operand(side, i, name, role, seen, source) for side, seen, source in both
                )
            )
        return judge(pairs, own)

    def weights(self, i: int | None, name: str, label: str) -> tuple[Operand, Operand]:
        """A tensor of layer i, or one outside of the layers, on both sides."""
        sides = (self.a, self.b)
        values = [side.tensor(i, name) for side in sides]
        quantized = [value if isinstance(value, QTensor) else None for value in values]
        if any(quantized):
            first = self.a.source_tensor(i, name)
            sources = [
                first,
                first if self.a.source is self.b.source else self.b.source_tensor(i, name),
            ]
        else:
            sources = values
        formats = [side.weight_format(value) for side, value in zip(sides, values, strict=True)]
        return tuple(
            Operand(label, *rest) for rest in zip(formats, sources, quantized, strict=True)
        )

    def sources(
        self, name: str, role: str, given: Stretches, alike: Sequence[Stretches]
    ) -> tuple[np.ndarray, np.ndarray]:
        """An operand of both sides before quantization. Of a product it is side a's for both;
        attention makes its own."""
        if role != "activation":
            return tuple(_flat(self.real(_pick(x, f"{name}.out"))) for x in alike)
        source = self.real(_pick(given, _INPUTS.get(name, f"{name}.in")))
        if _INPUTS.get(name) == "router.in":  # once for each expert that a token uses
            source = np.repeat(source[:, None], self.a.served.config.experts.per_token, axis=1)
        return source, source

    def operand(
        self, side: Side, i: int, name: str, role: str, seen: Stretches, source: np.ndarray
    ) -> Operand:
        """What a product multiplies with a weight, or attention with another operand, of the real
        tokens."""
        attended, fmt = role != "activation", getattr(side.formats, role)
        if f"{name}.operand" not in seen.prompt:
            return Operand(role, str(side.dtype), source, made=attended)
        stored = _pick(seen, f"{name}.operand")
        if attended:
            values = _flat(self.real(stored))
            scales, block = (
                np.asarray(getattr(side.scales, role)[i], np.float32).reshape(1, 1),
                values.shape,
            )
        else:
            values, scales = (
                self.real(Stretches(*(getattr(x, part) for x in stored)))
                for part in ("values", "scales")
            )
            block = stored.prompt.block
        return Operand(role, describe(fmt), source, QTensor(values, scales, block), attended)

    def result(
        self,
        name: str,
        results: tuple[Stretches, ...],
        alone: Difference,
        verdict: Verdict,
        masks: Stretches,
    ) -> OperationResult:
        """Keeps the first operation of each cause. results: of the free run, a's and b's, and those
        on a's input."""
        output, cause, detail, shown = (
            difference(*(self.real(x, masks) for x in results[:2])),
            *verdict[:2],
            results[2:],
        )
        # from equal values, and by what it is fused with
        if not (self.first or cause or output.equal):
            cause, detail, shown = "reduction", "equal operands, another result", results[:2]
        if cause not in ("", "input", *self.first):
            parts = zip(("prompt", "completion"), *shown, masks, strict=True)
            where = [part for part, x, y, mask in parts if not difference(x[mask], y[mask]).equal]
            self.first[cause] = First(name, cause, detail, " and ".join(where))
        return OperationResult(
            name.removeprefix("layers.").partition(".")[2] or name, output, alone, verdict
        )

    def equal(self, pair: Iterable[Stretches]) -> bool:
        """Whether every bit of the real tokens is the same."""
        return difference(*map(self.real, pair)).equal

    def real(self, x: Stretches, masks: Stretches | None = None) -> np.ndarray:
        """The entries of real tokens, [n, ...]."""
        return np.concatenate(
            [part[mask] for part, mask in zip(x, masks or self.masks, strict=True)]
        )


def _pick(seen: Stretches, name: str) -> Stretches:
    return Stretches(*(part[name] for part in seen))


def _flat(x: np.ndarray) -> np.ndarray:
    return x.reshape(len(x), -1)


def _quantized(side: Side) -> list[str]:
    """Linears and cache operands that a side quantizes, in model order."""
    names = []
    for i, layer in enumerate(side.served.layers):
        tensors = layer.tensors()
        linears = (name for name in (*LINEARS, *EXPERT_LINEARS) if name in tensors)
        names += [f"layers.{i}.{name}" for name in linears if is_quantized(tensors[name].value)]
        names += [
            f"layers.{i}.{role}"
            for role in ("query", "key", "value")
            if getattr(side.formats, role).quantized
        ]
    return names


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
