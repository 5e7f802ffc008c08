"""The operations of a layer in the order in which they run, and why one of them differs between two
sides.

Causes, the first that holds:

    format       a weight or an operand has another number format on the other side: one is
                 quantized and one is not, or
                 element format, block, scale rule or compute dtype are not the same
    operand      the weights themselves differ before quantization (two checkpoints); or the same
                 input, quantized alike with
                 the same scales, gave other values
    scale        formats are the same and scales are not
    excess precision
                 a side's whole program gives other log-probabilities where XLA may not keep 16-bit
                 results in float32: its roundings are the compiler's choice (`compare.programs`; of
                 the log-probabilities alone)
    reduction    weights and operands are equal bit for bit and the results are not: another order
                 of sums, another program
    input        only what came in differs

An operation is judged on equal inputs (`compare.probe`), so "input" is never its own cause: it is
what is left when an operation differs in the free run and not by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from fp8rl_jax.compare.statistics import Difference, difference
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.precision import QTensor

Cause = Literal["format", "operand", "scale", "excess precision", "reduction", "input"]
CAUSES: tuple[Cause, ...] = ("format", "operand", "scale", "excess precision", "reduction", "input")


@dataclass(frozen=True)
class Operation:
    """One step of a layer.

    Attributes:
        name: as layer tensors are called, or "attention", "residual" (the sum behind attention),
            "activation", "mixture" (the weighted sum of the experts), "output" (the layer's).
        output: the entry of `Seen` that it leaves.
        tensors: of the layer that it reads, the product's weight first.
        operands: (entry of `Seen`, role in ForwardFormats) of what it multiplies and may quantize.
    """

    name: str
    output: str
    tensors: tuple[str, ...] = ()
    operands: tuple[tuple[str, str], ...] = ()
    product: bool = False


def operations(config: PolicyConfig, layer: int) -> Iterator[Operation]:
    """Those of layer number `layer`."""

    def norm(name: str) -> Operation:
        return Operation(name, f"{name}.out", (name,))

    def product(name: str) -> Operation:
        return Operation(name, f"{name}.out", (name,), ((name, "activation"),), product=True)

    yield norm("input_layernorm")
    yield from map(product, ("q_proj", "k_proj", "v_proj"))
    if config.qk_norm:
        yield from map(norm, ("q_norm", "k_norm"))
    biases = ("q_bias", "k_bias", "v_bias") if config.qkv_bias else ()
    yield Operation(
        "attention", "o_proj.in", biases, (("query", "query"), ("key", "key"), ("value", "value"))
    )
    yield product("o_proj")
    if config.post_norms:
        yield norm("post_attention_layernorm")
    before = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
    yield Operation("residual", f"{before}.in")
    yield norm(before)
    if layer in config.sparse_layers:
        yield Operation("router", "router.out", ("router",))
        yield from map(product, ("experts.gate_proj", "experts.up_proj"))
        yield Operation("activation", "experts.down_proj.in")
        yield product("experts.down_proj")
        yield Operation("mixture", "mixture.out")
    else:
        yield from map(product, ("gate_proj", "up_proj"))
        yield Operation("activation", "down_proj.in")
        yield product("down_proj")
    if config.post_norms:
        yield norm("post_feedforward_layernorm")
    yield Operation("output", "output")


class Operand(NamedTuple):
    """One tensor on one side.

    Attributes:
        name: what details call it.
        format: in words; equal where the sides' formats are.
        source: as it was before quantization.
        quantized: as it is multiplied; None where that is `source`.
        made: by the operation that is judged, from equal values: where `source` differs, its
            arithmetic did it.
    """

    name: str
    format: str
    source: np.ndarray
    quantized: QTensor | None = None
    made: bool = False


class Verdict(NamedTuple):
    """cause and detail are empty where nothing differs; operands: each tensor's difference as it is
    multiplied, by name, and that of its scales, by "<name> scales"."""

    cause: str
    detail: str
    operands: dict[str, Difference]


def judge(pairs: list[tuple[Operand, Operand]], own: Difference | None) -> Verdict:
    """Why an operation that was given equal inputs differs.

    Args:
        pairs: every weight and operand on both sides.
        own: difference of the results; None: only the operands are judged.
    """
    findings: dict[str, list[str]] = {}
    measured: dict[str, Difference] = {}
    for a, b in pairs:
        cause, detail = _compared(a, b, measured)
        findings.setdefault(cause, []).append(detail)
    for cause in CAUSES:
        if cause in findings:
            return Verdict(cause, "; ".join(findings[cause]), measured)
    if own is None or own.equal:
        return Verdict("", "", measured)
    return Verdict("reduction", "equal operands, another result", measured)


def _compared(a: Operand, b: Operand, measured: dict[str, Difference]) -> tuple[str, str]:
    """Cause and detail of one pair, ("", "") where it is equal; notes what is measured."""
    measured[a.name] = difference(_restored(a), _restored(b))
    if a.format != b.format:
        return "format", f"{a.name}: {a.format} against {b.format}"
    if a.source is not b.source and not (sources := difference(a.source, b.source)).equal:
        return (
            "reduction" if a.made else "operand",
            f"{a.name}: {_count(sources)} differ before quantization",
        )
    if a.quantized is None or b.quantized is None:
        return "", ""
    measured[f"{a.name} scales"] = scales = difference(a.quantized.scales, b.quantized.scales)
    if not scales.equal:
        return "scale", f"{a.name}: {_count(scales, 'scales')} differ"
    elements = difference(a.quantized.values, b.quantized.values)
    return (
        ("", "")
        if elements.equal
        else ("operand", f"{a.name}: {_count(elements)} differ under equal scales")
    )


def _count(found: Difference, what: str = "values") -> str:
    return f"{round(found.differing * found.elements):,} of {found.elements:,} {what}"


def _restored(x: Operand) -> np.ndarray:
    """What the operand stands for."""
    if x.quantized is None:
        return x.source
    values, scales = (
        np.asarray(x.quantized.values, np.float32),
        np.asarray(x.quantized.scales, np.float32),
    )
    for axis, side in zip((-2, -1), x.quantized.block, strict=True):
        scales = np.repeat(scales, side, axis) if side > 1 else scales
        scales = np.take(scales, range(values.shape[axis]), axis)
    return values * scales
