"""How far two arrays are apart, and why an operation differs between two sides.

Numbers of a difference:

    differing         part of the elements whose bits are not the same, both as float32 (which is
                      without loss)
    relative_error    ||a - b|| / ||a||, 0 where nothing differs
    snr_db            20 log10(||a|| / ||a - b||); None where nothing differs
    max_abs           largest |a - b|

Sums are in float64. A number that is not finite is None: JSON has no word for it.

Causes, the first that holds:

    format            a weight or an operand has another number format on the other side: one is
                      quantized and one is not, or element format, block, scale rule or compute
                      dtype are not the same
    operand           the weights themselves differ before quantization (two checkpoints); or the
                      same input, quantized alike with the same scales, gave other values
    scale             formats are the same and scales are not
    excess precision  a side's whole program gives other log-probabilities where XLA may not keep
                      16-bit results in float32: its roundings are the compiler's choice
                      (`compare.probe`; of the log-probabilities alone)
    reduction         weights and operands are equal bit for bit and the results are not: another
                      order of sums, another program
    input             only what came in differs

An operation is judged on equal inputs (`compare.probe`), so "input" is never its own cause: it is
what is left when an operation differs in the free run and not by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fp8rl_jax.models.config import PolicyConfig
from pallas_kernels import QTensor


@dataclass(frozen=True)
class Difference:
    """Of two arrays of one shape; the numbers of the table above."""

    elements: int
    differing: float
    relative_error: float | None
    snr_db: float | None
    max_abs: float | None

    @property
    def equal(self) -> bool:
        """Whether every bit is the same."""
        return self.differing == 0


def difference(a: ArrayLike, b: ArrayLike) -> Difference:
    """Compare two arrays of one shape.

    Of any dtype that float32 holds exactly; integers below 2^24 are such.

    Raises:
        ValueError: the shapes differ.
    """
    if np.shape(a) != np.shape(b):
        raise ValueError(f"difference: shapes {np.shape(a)} and {np.shape(b)}")
    a, b = np.ascontiguousarray(a, np.float32), np.ascontiguousarray(b, np.float32)
    differing = int((a.view(np.uint32) != b.view(np.uint32)).sum())
    if not differing:
        return Difference(a.size, 0.0, 0.0, None, 0.0)
    with np.errstate(invalid="ignore", over="ignore"):
        exact = a.astype(np.float64)
        delta = exact - b
        signal, noise = float(np.linalg.norm(exact.ravel())), float(np.linalg.norm(delta.ravel()))
        largest = float(np.abs(delta).max())
    relative = noise / signal if signal else (math.inf if noise else 0.0)
    snr = None
    if signal > 0 and noise > 0 and math.isfinite(relative):
        snr = 20 * math.log10(signal / noise)
    return Difference(a.size, differing / a.size, _finite(relative), snr, _finite(largest))


def logprob_differences(
    a: np.ndarray, b: np.ndarray, mask: np.ndarray
) -> dict[str, float | int | None]:
    """Compare two sides' log-probabilities of the same tokens.

    Args:
        a, b: float32 [rows, tokens].
        mask: True where a token counts; at least one.

    Returns:
        tokens, differing, mean_abs and max_abs of a - b; the mean of k3, and row and position of
        the largest difference.
    """
    delta = np.where(mask, b.astype(np.float64) - a, 0.0)
    counted = delta[mask]
    row, position = np.unravel_index(np.argmax(np.where(mask, np.abs(delta), -1.0)), mask.shape)
    return {
        "tokens": int(mask.sum()),
        "differing": difference(a[mask], b[mask]).differing,
        "mean_abs": _finite(float(np.abs(counted).mean())),
        "max_abs": _finite(float(np.abs(counted).max())),
        "k3": _finite(float(np.mean(k3(counted)))),
        "row": int(row),
        "position": int(position),
        "a": _finite(float(a[row, position])),
        "b": _finite(float(b[row, position])),
    }


def k3(log_ratio: np.ndarray) -> np.ndarray:
    """Estimate KL(p || q) as `rl.k3` does, on the host and in the precision of log q - log p."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.expm1(log_ratio) - log_ratio


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None


Cause = Literal["format", "operand", "scale", "excess precision", "reduction", "input"]
CAUSES: tuple[Cause, ...] = ("format", "operand", "scale", "excess precision", "reduction", "input")


@dataclass(frozen=True)
class Operation:
    """One step of a layer.

    Attributes:
        name: as layer tensors are called, or "attention", "residual" (the sum behind attention),
            "activation", "mixture" (the weighted sum of the experts), "output" (the layer's).
        output: the entry of `probe.Values` that it leaves.
        tensors: of the layer that it reads, the product's weight first.
        operands: (entry of `probe.Values`, role in TrainerFormats) of what it multiplies and may
            quantize.
        product: whether it is the product with its first tensor.
        source: the entry of `probe.Values` that a product multiplies.
    """

    name: str
    output: str
    tensors: tuple[str, ...] = ()
    operands: tuple[tuple[str, str], ...] = ()
    product: bool = False
    source: str = ""


def operations(config: PolicyConfig, layer: int) -> Iterator[Operation]:
    """List the operations of one layer, in the order in which they run."""

    def norm(name: str) -> Operation:
        return Operation(name, f"{name}.out", (name,))

    def products(*names: str, source: str = "") -> Iterator[Operation]:
        """Those of one input, which is kept under the first one's name."""
        source = source or f"{names[0]}.in"
        for name in names:
            operands = ((name, "activation"),)
            yield Operation(name, f"{name}.out", (name,), operands, product=True, source=source)

    yield norm("input_layernorm")
    inner = ("q_bias", "k_bias", "v_bias") if config.qkv_bias else ()
    if config.latent is None:
        yield from products("q_proj", "k_proj", "v_proj")
    elif config.latent.query_rank is None:
        yield from products("q_proj", "kv_a_proj_with_mqa")
    else:
        yield from products("q_a_proj", "kv_a_proj_with_mqa")
        yield norm("q_a_layernorm")
        yield from products("q_b_proj")
    if config.latent is not None:
        yield norm("kv_a_layernorm")
        inner = ("kv_b_proj",)
    if config.qk_norm:
        yield from map(norm, ("q_norm", "k_norm"))
    yield Operation(
        "attention", "o_proj.in", inner, (("query", "query"), ("key", "key"), ("value", "value"))
    )
    yield from products("o_proj")
    if config.family.post_norms:
        yield norm("post_attention_layernorm")
    before = "pre_feedforward_layernorm" if config.family.post_norms else "post_attention_layernorm"
    yield Operation("residual", f"{before}.in")
    yield norm(before)
    if layer in config.sparse_layers:
        yield Operation("router", "router.out", ("router",))
        yield from products("experts.gate_proj", "experts.up_proj", source="router.in")
        yield Operation("activation", "experts.down_proj.in")
        yield from products("experts.down_proj")
        yield Operation("mixture", "mixture.out")
        if config.mixture.shared:
            yield from products("shared_experts.gate_proj", "shared_experts.up_proj")
            yield Operation("shared_experts.activation", "shared_experts.down_proj.in")
            yield from products("shared_experts.down_proj")
    else:
        yield from products("gate_proj", "up_proj")
        yield Operation("activation", "down_proj.in")
        yield from products("down_proj")
    if config.family.post_norms:
        yield norm("post_feedforward_layernorm")
    yield Operation("output", "output")


class Operand(NamedTuple):
    """One tensor on one side.

    Attributes:
        name: what details call it.
        format: in words; equal where the sides' formats are.
        source: as it was before quantization.
        quantized: as it is multiplied, on the host; None where that is `source`.
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
    """Name the cause why an operation that was given equal inputs differs.

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
        cause = "reduction" if a.made else "operand"
        return cause, f"{a.name}: {_count(sources)} differ before quantization"
    if a.quantized is None or b.quantized is None:
        return "", ""
    measured[f"{a.name} scales"] = scales = difference(_scales(a.quantized), _scales(b.quantized))
    if not scales.equal:
        return "scale", f"{a.name}: {_count(scales, 'scales')} differ"
    elements = difference(a.quantized.values, b.quantized.values)
    if elements.equal:
        return "", ""
    return "operand", f"{a.name}: {_count(elements)} differ under equal scales"


def _count(of: Difference, what: str = "values") -> str:
    return f"{round(of.differing * of.elements):,} of {of.elements:,} {what}"


def _restored(x: Operand) -> np.ndarray:
    """What the operand means."""
    if x.quantized is None:
        return x.source
    return np.asarray(x.quantized.dequantize()).reshape(x.source.shape)


def _scales(q: QTensor) -> np.ndarray:
    """All of its scales; of two levels in one row."""
    if q.outer is None:
        return np.asarray(q.scales)
    return np.concatenate([np.ravel(x).astype(np.float32) for x in (q.scales, q.outer)])
