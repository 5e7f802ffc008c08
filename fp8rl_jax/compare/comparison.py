"""The comparison: both sides run layer by layer, and every operation is measured in two ways.

    output    the free run: each side on its own hidden states, so differences pile up as they do in
              a rollout
    own       both sides' operation on side a's input, read from memory, so that each has only its
              own part

The second takes runs of their own on both sides: a compiler that fuses an operation with the one
before it may skip a rounding between them, which belongs to neither. One layer of both sides is in
memory at a time, besides the weights.

The results as plain data, which `--json` writes, the terminal shows and the report draws:

    {"kind": "fp8rl compare", "version": 1, "equal": bool,
     "sides": [two of {"model", "recipe", "phase", "compute_dtype", "backend", "exact", "formats"}],
     "tokens": {"rows", "prompt", "completion", "rows_given", "given"},
     "first": [{"name", "cause", "detail", "where"}, one of each cause that there is],
     "linears": [{"names": [names], "a", "b"}], those that are alike together, and what they are
                quantized in on each side, or null,
     "quantized_on_one_side": {"a": [names], "b": [names]},
     "logprobs": {"tokens", "differing", "mean_abs", "max_abs", "k3", "row", "position", "a", "b",
                  "token", "text"},
     "sharpness": {"a": {"sharpness/0.001": number, ...}, "b": the same},
     "recorded": null or {"key", "a", "b"}, the last two as "logprobs", with what is recorded for a
                 and that side for b,
     "layers": [{"name", "rerouted", "input": difference, "operations": [operation, ...]}, ...],
     "start": operation, "end": [operation, operation],
     "arrived": of each side `side.update_served`, where --start is given,
     "made": {"command", "versions", "devices"}, in the file alone}

    operation     {"name", "cause", "detail", "output": difference, "own": difference,
                   "operands": {name: difference}}
    difference    {"elements", "differing", "relative_error", "snr_db", "max_abs"}

Numbers are rounded to four digits; what is not finite is null.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
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
from fp8rl_jax.compare.linears import Row, formats_text, rows
from fp8rl_jax.compare.side import Phase, Side
from fp8rl_jax.compare.tokens import Parts, Tokens, as_tokens, of_rollout
from fp8rl_jax.config.recipe import ATTENTION_ROLES, Recipe
from fp8rl_jax.models.policy import EXPERT_LINEARS, LINEARS, Policy
from fp8rl_jax.precision import Blocks, QTensor, describe, is_quantized
from fp8rl_jax.rollout.engine import Rollout
from fp8rl_jax.tokenizers.tokenizer import Tokenizer
from pallas_kernels.backend import Backend


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
class FirstDifference:
    """The first operation that differs for one cause, such as "layers.3.q_proj"; where: in the
    prompt, the completion or both."""

    name: str
    cause: str
    detail: str
    where: str


@dataclass(frozen=True)
class Comparison:
    """Everything that was measured.

    Attributes:
        logprobs: `logprob_differences` of the completions' tokens.
        by_side: these log-probabilities, of side a and of side b, float32 [rows, tokens].
        sharpness: of the loss in the last tokens' logits, of side a and of side b
            (rl/sharpness.py), by the names of training's metrics.
        first: of each cause, in the order of `CAUSES`, the operation that is first in the model.
            Where a format differs, the first reduction may well come earlier, and is of no weight
            beside it.
        linears: what each is quantized in on both sides, "" where it is not; those that are alike
            together.
        only_a, only_b: linears and cache operands that this side alone quantizes.
    """

    start: OperationResult
    layers: tuple[LayerResult, ...]
    end: tuple[OperationResult, ...]
    logprobs: dict[str, float | int | None]
    by_side: tuple[np.ndarray, np.ndarray]
    sharpness: tuple[dict[str, float], dict[str, float]]
    first: tuple[FirstDifference, ...]
    linears: tuple[Row, ...]
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
    """Compare two sides of one shape on the same tokens.

    Args:
        progress: called with a line about each layer.
        temperature: of the log-probabilities.
    """
    return _Comparing(a, b, tokens, temperature).run(progress)


def where_sides_part(
    policy: Policy, recipe: Recipe, dtype: DTypeLike, rollout: Rollout, backend: Backend = "auto"
) -> str:
    """Say in which operation a recipe's trainer and rollout first differ on a rollout's tokens.

    Args:
        policy: float32 masters, layers stacked.
        dtype: compute dtype.
    """
    tokens = as_tokens(of_rollout(rollout, most=4), longest=256)
    a, b = (Side.of(policy, recipe, phase, dtype, tokens, backend) for phase in get_args(Phase))
    found = compare(a, b, tokens)
    if found.equal:
        return "each operation by itself gives equal bits, so it is what a program makes of them"
    first = found.first[0]
    return f"{first.name} differs first, {first.cause}: {first.detail}"


class _Comparing:
    """Two sides and the tokens, while they are compared; `first` fills up with each cause."""

    def __init__(self, a: Side, b: Side, tokens: Tokens, temperature: float):
        self.a, self.b, self.tokens, self.temperature = a, b, tokens, temperature
        self.masks = Parts(*(np.asarray(mask) for mask in tokens.masks))
        self.first: dict[str, FirstDifference] = {}

    def run(self, progress: Callable[[str], None]) -> Comparison:
        a, b, tokens = self.a, self.b, self.tokens
        entering = a.embed(tokens), b.embed(tokens)
        start = self.end("embed_tokens", "embed_tokens", entering, entering[1], self.masks)
        layers = []
        count = a.served.config.num_layers
        for i in range(count):
            progress(f"layer {i + 1} of {count}")
            layer, entering = self.layer(i, entering)
            layers.append(layer)
        hidden = a.norm(entering[0]), b.norm(entering[1])
        norm = self.end("norm", "norm", hidden, b.norm(entering[0]), self.masks)
        # of the completions alone: the prompts' part has no columns
        none = np.zeros((len(self.masks.completion), 0), np.float32)
        masks = Parts(none.astype(bool), self.masks.completion)

        def logprobs(side: Side, x: Parts) -> Parts:
            return Parts(none, side.logprobs(x, tokens, self.temperature))

        free = logprobs(a, hidden[0]), logprobs(b, hidden[1])
        head = "embed_tokens" if a.served.lm_head is None else "lm_head"
        last = self.end("logprobs", head, free, logprobs(b, hidden[0]), masks)
        of_a, of_b = (np.asarray(x.completion) for x in free)
        self.name_excess_precision()
        quantized_a, quantized_b = _quantized(a), _quantized(b)
        return Comparison(
            start=start,
            layers=tuple(layers),
            end=(norm, last),
            logprobs=logprob_differences(of_a, of_b, self.masks.completion),
            by_side=(of_a, of_b),
            sharpness=(self.sharpness(a, hidden[0]), self.sharpness(b, hidden[1])),
            first=tuple(self.first[cause] for cause in CAUSES if cause in self.first),
            linears=tuple(rows(_linears(a), _linears(b))),
            only_a=tuple(x for x in quantized_a if x not in quantized_b),
            only_b=tuple(x for x in quantized_b if x not in quantized_a),
        )

    def sharpness(self, side: Side, hidden: Parts) -> dict[str, float]:
        """Of one side on its own hidden states."""
        found = jax.device_get(side.sharpness(hidden, self.tokens, self.temperature))
        return {name: float(value) for name, value in found.items()}

    def name_excess_precision(self) -> None:
        """In the sides' whole programs: no other cause is looked for there."""
        details = [
            f"side {name}: {x['differing']:.0%} of {x['tokens']} log-probabilities change, by up "
            f"to {x['max_abs']:.2g} and a k3 of {x['k3']:.1g}, where XLA must round every 16-bit "
            "result"
            for name, x in (("a", self.a.excess), ("b", self.b.excess))
            if x and x["differing"]
        ]
        if details:
            self.first["excess precision"] = FirstDifference(
                "logprobs", "excess precision", "; ".join(details), "whole program"
            )

    def end(
        self, name: str, tensor: str, free: Sequence[Parts], b_on_a: Parts, masks: Parts
    ) -> OperationResult:
        """An operation outside of the layers, which reads one tensor.

        Args:
            free: results of both sides, each on its own input.
            b_on_a: side b's result on side a's input.
        """
        a, b, b_on_a = jax.device_get((*free, b_on_a))
        own = difference(self.real(a, masks), self.real(b_on_a, masks))
        verdict = judge([self.weights(None, tensor, f"weight of {tensor}")], own)
        return self.result(name, (a, b, a, b_on_a), own, verdict, masks)

    def layer(
        self, i: int, entering: tuple[Parts, Parts]
    ) -> tuple[LayerResult, tuple[Parts, Parts]]:
        """Layer i, and what leaves it on both sides."""
        config, tokens = self.a.served.config, self.tokens
        kept = self.a.run(i, entering[0], tokens), self.b.run(i, entering[1], tokens)
        leaving = _pick(kept[0], "output"), _pick(kept[1], "output")
        free, steps = jax.device_get(kept), tuple(operations(config, i))
        sparse, same_input = i in config.sparse_layers, free
        names = ("input", *(step.output for step in steps))
        if not all(self.equal(_pick(x, name) for x in free) for name in names):
            given = Parts(
                *(
                    {k: v for k, v in part.items() if k.endswith((".in", ".out"))}
                    for part in kept[0]
                )
            )
            routes = _pick(kept[0], "router.ids") if sparse else None
            same_input = jax.device_get(
                [side.run(i, entering[0], tokens, given, routes) for side in (self.a, self.b)]
            )
        same_experts, rerouted = self.masks, None
        if sparse:
            ids = [_pick(x, "router.ids") for x in free]
            same_experts = Parts(
                *(mask & (x == y).all(-1) for mask, x, y in zip(self.masks, *ids, strict=True))
            )
            kept_route, all_tokens = (
                sum(int(x.sum()) for x in masks) for masks in (same_experts, self.masks)
            )
            rerouted = 1.0 - kept_route / all_tokens
        entered = difference(*(self.real(_pick(x, "input")) for x in free))
        results: dict[str, OperationResult] = {}
        for operation in steps:
            outputs = tuple(_pick(x, operation.output) for x in (*free, *same_input))
            own = difference(*map(self.real, outputs[2:]))
            verdict = self.judge(i, operation, free[0], same_input, own)
            if operation.name == "mixture" and results["router"].verdict.cause and verdict.cause:
                verdict = verdict._replace(cause="input", detail="the router's weights differ")
            masks = same_experts if operation.output.startswith("experts.") else self.masks
            results[operation.name] = self.result(
                f"layers.{i}.{operation.name}", outputs, own, verdict, masks
            )
        return LayerResult(f"layers.{i}", entered, tuple(results.values()), rerouted), leaving

    def judge(
        self,
        i: int,
        operation: Operation,
        free_a: Parts,
        same_input: Sequence[Parts],
        own: Difference,
    ) -> Verdict:
        """The verdict on one operation of layer i.

        Args:
            free_a: what side a kept in the free run.
            same_input: what both sides kept on a's inputs.
        """
        pairs = [
            self.weights(i, name, "weight" if operation.product else f"weight of {name}")
            for name in operation.tensors
        ]
        for name, role in operation.operands:
            source = operation.source or f"{name}.out"
            source_a, source_b = self.sources(source, role, free_a, same_input)
            pairs.append(
                (
                    self.operand(self.a, i, name, role, same_input[0], source_a),
                    self.operand(self.b, i, name, role, same_input[1], source_b),
                )
            )
        kinds = self.a.probability, self.b.probability
        if operation.name == "attention" and kinds[0] != kinds[1]:
            pairs.append(_unseen("probability", *kinds))
        for name in operation.tensors:
            if not operation.product and name in LINEARS:
                one, other = (
                    describe(side.formats_of(i, name).activation) for side in (self.a, self.b)
                )
                pairs.append(_unseen(f"input of {name}", one, other))
        return judge(pairs, own)

    def weights(self, i: int | None, name: str, label: str) -> tuple[Operand, Operand]:
        """A tensor of layer i, or one outside of the layers, on both sides."""
        a, b = self.a.tensor(i, name), self.b.tensor(i, name)
        source_a, source_b = a, b
        if isinstance(a, QTensor) or isinstance(b, QTensor):
            assert i is not None
            source_a = source_b = self.a.source_tensor(i, name)
            if self.a.source is not self.b.source:
                source_b = self.b.source_tensor(i, name)
        return _weight(label, self.a.weight_format(i, name, a), a, source_a), _weight(
            label, self.b.weight_format(i, name, b), b, source_b
        )

    def sources(
        self, entry: str, role: str, free_a: Parts, same_input: Sequence[Parts]
    ) -> tuple[np.ndarray, np.ndarray]:
        """An operand of both sides before quantization. Of a product it is side a's for both;
        attention makes its own."""
        if role != "activation":
            a, b = (_flat(self.real(_pick(x, entry))) for x in same_input)
            return a, b
        source = self.real(_pick(free_a, entry))
        if entry == "router.in":  # repeated for each expert that a token uses
            experts = self.a.served.config.experts
            assert experts is not None
            source = np.repeat(source[:, None], experts.per_token, axis=1)
        return source, source

    def operand(
        self, side: Side, i: int, name: str, role: str, kept: Parts, source: np.ndarray
    ) -> Operand:
        """What a product multiplies with a weight, or attention with another operand, of the real
        tokens."""
        attended, fmt = role != "activation", side.formats_of(i, name).roles()[role]
        if f"{name}.operand" not in kept.prompt:
            return Operand(role, str(side.dtype), source, made=attended)
        stored = _pick(kept, f"{name}.operand")
        if attended and fmt.calibrated:
            values = _flat(self.real(stored))
            # one for the tensor, or one for each KV head
            scales = np.asarray(getattr(side.served.kv_scales, role)[i], np.float32).reshape(1, -1)
            block = len(values), values.shape[1] // scales.shape[1]
            fmt_of_heads = Blocks(block, values.dtype.name)
            quantized = QTensor(jnp.asarray(values), jnp.asarray(scales), fmt_of_heads)
        else:
            quantized = jax.tree.map(lambda *parts: self.real(Parts(*parts)), *stored)
        return Operand(role, describe(fmt), source, quantized, attended)

    def result(
        self,
        name: str,
        outputs: tuple[Parts, ...],
        own: Difference,
        verdict: Verdict,
        masks: Parts,
    ) -> OperationResult:
        """Keeps the first operation of each cause. outputs: of the free run, a's and b's, and those
        on a's input."""
        output = difference(*(self.real(x, masks) for x in outputs[:2]))
        cause, detail, differing = verdict.cause, verdict.detail, outputs[2:]
        # from equal values, and by what it is fused with
        if not (self.first or cause or output.equal):
            cause, detail, differing = "reduction", "equal operands, another result", outputs[:2]
        if cause not in ("", "input", *self.first):
            parts = zip(("prompt", "completion"), *differing, masks, strict=True)
            where = [part for part, x, y, mask in parts if not difference(x[mask], y[mask]).equal]
            self.first[cause] = FirstDifference(name, cause, detail, " and ".join(where))
        return OperationResult(
            name.removeprefix("layers.").partition(".")[2] or name, output, own, verdict
        )

    def equal(self, pair: Iterable[Parts]) -> bool:
        """Whether every bit of the real tokens is the same."""
        return difference(*map(self.real, pair)).equal

    def real(self, x: Parts, masks: Parts | None = None) -> np.ndarray:
        """The entries of real tokens, [n, ...]."""
        return np.concatenate(
            [part[mask] for part, mask in zip(x, masks or self.masks, strict=True)]
        )


def _unseen(name: str, a: str, b: str) -> tuple[Operand, Operand]:
    """Formats of what is made and used inside of an operation: there is nothing to look at."""
    nothing = np.zeros(0, np.float32)
    return Operand(name, a, nothing), Operand(name, b, nothing)


def _weight(
    label: str, fmt: str, value: np.ndarray | QTensor, source: np.ndarray | QTensor
) -> Operand:
    assert not isinstance(source, QTensor)
    return Operand(label, fmt, source, value if isinstance(value, QTensor) else None)


def _pick(kept: Parts, name: str) -> Parts:
    return Parts(*(part[name] for part in kept))


def _flat(x: np.ndarray) -> np.ndarray:
    return x.reshape(len(x), -1)


def _linears(side: Side) -> dict[str, str]:
    """What each linear is quantized in on a side, in model order; "" where it is not."""
    return {
        f"layers.{i}.{name}": formats_text(side.formats_of(i, name))
        if is_quantized(tensors[name].value)
        else ""
        for i, tensors in enumerate(layer.tensors() for layer in side.layers)
        for name in (*LINEARS, *EXPERT_LINEARS)
        if name in tensors
    }


def _quantized(side: Side) -> list[str]:
    """Linears that a side quantizes, in model order, and operands of attention."""
    roles = [role for role in ATTENTION_ROLES if side.formats.roles()[role].quantized]
    operands = [f"layers.{i}.{role}" for i in range(len(side.layers)) for role in roles]
    return [*(name for name, text in _linears(side).items() if text), *operands]


KIND = "fp8rl compare"


def document(
    comparison: Comparison,
    sides: list[dict[str, Any]],
    tokens: Tokens,
    tokenizer: Tokenizer | None,
    given: tuple[int, int],
    recorded: tuple[str, Float32[np.ndarray, "p t"]] | None = None,
) -> dict[str, Any]:
    """Turn a comparison into plain data, in the form at the top of this file.

    Args:
        sides: what each side is, by the names above.
        tokenizer: gives the text of the token with the largest difference, where there is one.
        given: rows, and tokens of all rows, before some of both were left out.
        recorded: the key of another engine's log-probabilities of the completions, and these, NaN
            where there are none.
    """

    def named(numbers: dict[str, Any]) -> dict[str, Any]:
        token = int(tokens.completions[numbers["row"], numbers["position"]])
        text = None if tokenizer is None else tokenizer.decode([token], skip_special=False)
        return {
            **{name: _rounded(value) for name, value in numbers.items()},
            "token": token,
            "text": text,
        }

    of_recorded: dict[str, Any] | None = None
    if recorded is not None:
        key, values = recorded
        of_recorded = {"key": key}
        for side, logprobs in zip("ab", comparison.by_side, strict=True):
            of_recorded[side] = named(logprob_differences(values, logprobs, ~np.isnan(values)))
    return {
        "kind": KIND,
        "version": 1,
        "equal": comparison.equal,
        "sides": sides,
        "tokens": {
            "rows": len(tokens.prompts),
            "prompt": int(np.sum(tokens.prompt_lengths)),
            "completion": int(np.sum(tokens.completion_lengths)),
            "rows_given": given[0],
            "given": given[1],
        },
        "first": [dataclasses.asdict(first) for first in comparison.first],
        "linears": [
            {"names": row.names, "a": row.a or None, "b": row.b or None}
            for row in comparison.linears
        ],
        "quantized_on_one_side": {"a": list(comparison.only_a), "b": list(comparison.only_b)},
        "logprobs": named(comparison.logprobs),
        "sharpness": {
            side: {name: _rounded(value) for name, value in found.items()}
            for side, found in zip("ab", comparison.sharpness, strict=True)
        },
        "recorded": of_recorded,
        "layers": [
            {
                "name": layer.name,
                "rerouted": _rounded(layer.rerouted),
                "input": _numbers(layer.input),
                "operations": [_operation(operation) for operation in layer.operations],
            }
            for layer in comparison.layers
        ],
        "start": _operation(comparison.start),
        "end": [_operation(operation) for operation in comparison.end],
    }


def _operation(result: OperationResult) -> dict[str, Any]:
    return {
        "name": result.name,
        "cause": result.verdict.cause,
        "detail": result.verdict.detail,
        "output": _numbers(result.output),
        "own": _numbers(result.own),
        "operands": {name: _numbers(x) for name, x in result.verdict.operands.items()},
    }


def _numbers(x: Difference) -> dict[str, Any]:
    return {name: _rounded(value) for name, value in dataclasses.asdict(x).items()}


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value
