"""Which linears two sides quantize, and in what: those that are alike in one row, and what one side
alone quantizes.

Formats by role do not show a filter of names that is another on one side: a regular expression for
the router, mlp.gate., kept a trainer's mlp.gate_proj in bfloat16 (PrimeIntellect-ai/prime-rl
#2442).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fp8rl_jax.config.recipe import TrainerFormats


class Row(NamedTuple):
    """Linears ("layers.3.q_proj") that each of two sides computes in one way; a and b say in
    which."""

    names: list[str]
    a: str
    b: str


def formats_text(formats: TrainerFormats) -> str:
    """Say what a quantized linear multiplies, such as "e4m3-128x128 weights, e4m3-1x128
    activations"."""
    activation = formats.activation.name if formats.activation.quantized else "compute dtype"
    return f"{formats.weight.name} weights, {activation} activations"


def rows(a: Mapping[str, str], b: Mapping[str, str]) -> list[Row]:
    """Put linears that are alike together.

    Args:
        a, b: what each linear is computed in, of every linear of the model.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for name, text in a.items():
        found.setdefault((text, b[name]), []).append(name)
    return [Row(names, *texts) for texts, names in found.items()]


def rows_text(rows: Sequence[Row], sides: tuple[str, str], layers: int) -> list[str]:
    """Write rows: the linears, and below them what they are on each side, or on both."""
    lines = []
    for names, a, b in rows:
        lines.append(grouped(names, layers))
        lines += [f"  both: {a}"] if a == b else [f"  {sides[0]}: {a}", f"  {sides[1]}: {b}"]
    return lines


def difference_text(
    quantized: Sequence[Sequence[str]], sides: tuple[str, str], linears: Sequence[str], layers: int
) -> list[str]:
    """Say whether two sides quantize the same linears, and which one of them alone.

    Args:
        quantized: the linears that each side quantizes.
        sides: what they are called.
        linears: all of the model's.
        layers: of the model.
    """
    if {*quantized[0]} == {*quantized[1]}:
        if not quantized[0]:
            return [f"neither side quantizes any of {len(linears)} linears"]
        return [f"both sides quantize the same {len(quantized[0])} of {len(linears)} linears"]
    lines = []
    for side, own, other in zip(sides, quantized, reversed(quantized), strict=True):
        if alone := [name for name in own if name not in {*other}]:
            named = "all of them" if len(alone) == len(linears) else grouped(alone, layers)
            lines.append(f"only {side} quantizes {len(alone)} of {len(linears)} linears: {named}")
    return lines


def grouped(names: Sequence[str], layers: int) -> str:
    """Group names of layers' tensors by kind.

    Such as "q_proj in all 30 layers; up_proj in layers 0, 2-5".
    """
    where: dict[str, list[int]] = {}
    for name in names:
        _, i, tensor = name.split(".", 2)
        where.setdefault(tensor, []).append(int(i))
    kinds: dict[tuple[int, ...], list[str]] = {}
    for tensor, numbers in where.items():
        kinds.setdefault(tuple(numbers), []).append(tensor)
    return "; ".join(
        f"{', '.join(tensors)} in {_places(numbers, layers)}" for numbers, tensors in kinds.items()
    )


def _places(numbers: tuple[int, ...], layers: int) -> str:
    if len(numbers) == layers > 1:
        return f"all {layers} layers"
    return f"layer{'s' if len(numbers) > 1 else ''} {ranges(numbers)}"


def ranges(numbers: Sequence[int]) -> str:
    """Write (0, 1, 2, 5) as 0-2, 5."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
