"""Linears as a checkpoint stores them, as float32: FP8 by `block_fp8`, and several numbers to a
stored value here, FP6, FP4 and INT4.

A packed linear X [out, in] is several tensors. compressed-tensors keeps X.weight_packed,
X.weight_scale [out, in / group], and

    nvfp4   X.weight_global_scale [1], which a weight is divided by: 2688 / amax
    int4    X.weight_shape [2]

ModelOpt's NVFP4 has X.weight, X.weight_scale and X.weight_scale_2 [], which multiplies. Columns lie
along a row, the first one in the lowest bits; nothing is swizzled:

    nvfp4, mxfp4   two e2m1 in a uint8; scales are e4m3, and E8M0's bytes
    mxfp6          four e2m3 in three uint8; E8M0's bytes
    int4           eight in an int32, each from -8 to 7 and stored plus 8, and zeros behind the last

A weight is its number times its scale times the outer scale, float32; of NVFP4 it is number *
(scale * outer), as `precision.formats` has it, with outer = 1 / global scale. compressed-tensors
computes number * (scale / global scale), and rounds that to bfloat16, as it does INT4 whose scales
are bfloat16.

A tensor of fused experts [E, rows, columns] has the same beside it, with E first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import ml_dtypes
import numpy as np

from fp8rl_jax.config.formats import TensorFormat
from fp8rl_jax.errors import UserError
from fp8rl_jax.weights.block_fp8 import dequantize_tensor, split_scales
from fp8rl_jax.weights.hf_names import Stored
from fp8rl_jax.weights.layouts import LAYOUT_OF, Layout, in_words
from fp8rl_jax.weights.safetensors_io import Checkpoint, count_non_finite, without

E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
_E4M3, _BF16 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.bfloat16)
_UINT8, _F32 = np.dtype(np.uint8), np.dtype(np.float32)
_WORD = np.dtype("<i4")


def _table(mantissa: int) -> np.ndarray:
    """The numbers of e2mY by their codes."""
    half = 1 << mantissa
    sizes = [m / half for m in range(half)]
    sizes += [(1 + m / half) * 2.0**power for power in range(3) for m in range(half)]
    return np.array([*sizes, *(-size for size in sizes)], np.float32)


_E2M1, _E2M3 = _table(1), _table(3)


def _fours(packed: np.ndarray) -> np.ndarray:
    """Take the two codes out of each byte."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def _sixes(packed: np.ndarray) -> np.ndarray:
    """Take the four codes out of each three bytes."""
    first, second, third = np.moveaxis(packed.reshape(*packed.shape[:-1], -1, 3), -1, 0)
    codes = [first, first >> 6 | second << 2, second >> 4 | third << 4, third >> 2]
    return (np.stack(codes, axis=-1) & 63).reshape(*packed.shape[:-1], -1)


def pack_e2m3(x: np.ndarray) -> np.ndarray:
    """Put four numbers of e2m3 into three bytes."""
    x = x.astype(np.float32)
    codes = np.searchsorted(_E2M3[:32], np.abs(x)).astype(np.uint8)
    codes |= np.signbit(x).astype(np.uint8) << 5
    a, b, c, d = np.moveaxis(codes.reshape(*x.shape[:-1], -1, 4), -1, 0)
    packed = np.stack([a | b << 6, b >> 2 | c << 4, c >> 4 | d << 2], axis=-1)
    return packed.reshape(*x.shape[:-1], -1)


def _integers(words: np.ndarray) -> np.ndarray:
    codes = _fours(np.ascontiguousarray(words.astype(_WORD)).view(np.uint8))
    return (codes.astype(np.int8) - 8).astype(np.float32)


def _as_int4(words: np.ndarray, columns: int) -> np.ndarray:
    """Take INT4 out of words of eight, two to a byte as `precision.formats.int4` stores it."""
    packed = np.ascontiguousarray(words.astype(_WORD)).view(np.uint8)
    return packed[..., : columns // 2] ^ 0x88


def pack_integers(values: np.ndarray) -> np.ndarray:
    """Put INT4 as `precision.formats.int4` stores it, two to a byte, into words of eight."""
    padded = np.pad(values ^ 0x88, [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % 4)])
    return np.ascontiguousarray(padded).view(_WORD)


class _Packing(NamedTuple):
    """How numbers are packed: the dtype that holds them, so many numbers in so many of it, how they
    are taken out, the dtypes of scales, and whether there is an outer scale."""

    dtype: np.dtype
    numbers: int
    words: int
    unpack: Callable[[np.ndarray], np.ndarray]
    scales: tuple[np.dtype, ...]
    outer: bool = False


_PACKINGS = {
    "mxfp6": _Packing(_UINT8, 4, 3, lambda packed: _E2M3[_sixes(packed)], (_UINT8, E8M0)),
    "mxfp4": _Packing(_UINT8, 2, 1, lambda packed: _E2M1[_fours(packed)], (_UINT8, E8M0)),
    "nvfp4": _Packing(_UINT8, 2, 1, lambda packed: _E2M1[_fours(packed)], (_E4M3,), True),
    "int4": _Packing(_WORD, 8, 1, _integers, (_F32, _BF16, np.dtype(np.float16))),
}


class _Names(NamedTuple):
    """What a library calls the parts, behind "weight"."""

    values: str
    outer: str
    divides: bool


_NAMES = {
    "compressed-tensors": _Names("_packed", "_global_scale", divides=True),
    "modelopt": _Names("", "_scale_2", divides=False),
}
_PARTS = ("_packed", "_scale", "_global_scale", "_scale_2", "_shape", "_zero_point", "_g_idx")
_REFUSED = {
    "_zero_point": "with a zero point beside each scale (asymmetric)",
    "_g_idx": "with columns permuted by activations (actorder)",
}


class Codes(NamedTuple):
    """A linear as a format of the library stores it (`QTensor`): what the file holds, unrounded."""

    values: np.ndarray
    scales: np.ndarray
    outer: np.ndarray | None


@dataclass(frozen=True)
class StoredLinear:
    """A linear, or fused experts, as a checkpoint has it.

    Attributes:
        values: e4m3, or packed.
        scales: [..., blocks of rows, blocks of columns].
        outer: float32 [..., 1, 1], the scale of the scales, or None.
        shape: of the weight.
        layout: of the checkpoint.
    """

    values: np.ndarray
    scales: np.ndarray
    outer: np.ndarray | None
    shape: tuple[int, ...]
    layout: Layout

    def dequantize(self) -> np.ndarray:
        """Compute the weight, float32; overflow is an infinity."""
        numbers, scales = self.values, self.scales.astype(np.float32)
        if packing := _PACKINGS.get(self.layout.name):
            numbers = packing.unpack(numbers)[..., : self.shape[-1]]
        with np.errstate(over="ignore"):
            scales = scales if self.outer is None else scales * self.outer
        return dequantize_tensor(numbers, scales, self.layout.block)

    def codes(self, fmt: TensorFormat, matrices: int = 1) -> Codes | None:
        """Give what is stored in the form of a format, so that it stands for the same numbers.

        Args:
            matrices: that lie one below the other.

        Returns:
            None where the format has another element or other blocks, two matrices share one, or it
            has no form for these scales: those of INT4 are bfloat16, those of "power_of_two" no
            others, and a step below the normal numbers of float32 is 0 to a CPU.
        """
        name, block = self.layout.name, fmt.block
        if LAYOUT_OF.get(fmt.element) != name or block is None or block != self.layout.block:
            return None
        *_, rows, columns = self.shape
        if matrices > 1 and rows // matrices % block[0]:
            return None
        if self.scales.shape[-2:] != (-(-rows // block[0]), -(-columns // block[1])):
            return None
        values, scales = self.values, self.scales
        steps = scales.astype(np.float32)
        if fmt.scale == "power_of_two" and (np.frexp(steps)[0] != 0.5).any():
            return None
        if self.outer is not None:
            steps = steps * self.outer
        if ((steps != 0) & (np.abs(steps) < np.finfo(np.float32).tiny)).any():
            return None
        if name == "e4m3":
            scales = steps
        elif name == "mxfp6":
            values = _PACKINGS[name].unpack(values).astype(_E4M3)
        elif name == "int4":
            scales = steps.astype(_BF16)
            if columns % 2 or (scales.astype(np.float32) != steps).any():
                return None
            values = _as_int4(values, columns)
        return Codes(values, scales, self.outer)


def take_linears(
    checkpoint: Checkpoint, expected: Mapping[str, Stored], layout: Layout | None
) -> tuple[Checkpoint, dict[str, StoredLinear]]:
    """Put the parts of each quantized linear together.

    Args:
        checkpoint: with linears in `layout`, or in a wider dtype; plain where it is None.
        expected: the tensors of the model, by name.
        layout: as `read_quantization` gives it.

    Returns:
        The checkpoint with a linear's values under the name of its weight, and without what lies
        beside them; and the quantized linears by these names.

    Raises:
        UserError: naming file and tensor: a part that is missing, misshapen or of a wrong dtype, a
            scale that is not finite, a global scale that is not positive, columns that the groups
            do not divide, zero points, ordered columns, a part of no linear.
    """
    if layout is None:
        return checkpoint, {}
    if layout.name in _PACKINGS:
        return _take_packed(checkpoint, expected, layout)
    checkpoint, scales = split_scales(checkpoint, expected, layout.block)
    values = checkpoint.tensors
    return checkpoint, {
        name: StoredLinear(values[name], scale, None, values[name].shape, layout)
        for name, scale in scales.items()
    }


def _take_packed(
    checkpoint: Checkpoint, expected: Mapping[str, Stored], layout: Layout
) -> tuple[Checkpoint, dict[str, StoredLinear]]:
    for name in checkpoint.tensors:
        for part, what in _REFUSED.items():
            if name.endswith(f"weight{part}"):
                raise UserError(
                    f"{checkpoint.files[name]}: tensor {name}: {layout.name} {what} is not read; "
                    "use a checkpoint that is symmetric and in the weights' own order, or in bf16"
                )
    linears, taken = {}, set()
    whole, files = dict(checkpoint.tensors), dict(checkpoint.files)
    for name, stored in expected.items():
        parts = _Parts(checkpoint, name, stored.shape, layout)
        place = parts.find(_NAMES[layout.library].values)
        if place is None or (place == name and checkpoint.tensors[name].dtype != _UINT8):
            continue  # in a wider dtype, or missing, which the loader reports
        if place != name and name in checkpoint.tensors:
            raise parts.refuse(
                place, f"is {layout.name}, and {name} is there, too; keep the one that is meant"
            )
        linears[name] = parts.linear(place)
        taken |= parts.taken
        whole[name], files[name] = checkpoint.tensors[place], checkpoint.files[place]
    left = without(Checkpoint(whole, files), taken - linears.keys())
    ends = tuple(f"weight{part}" for part in _PARTS)
    if stray := [name for name in left.tensors if name.endswith(ends)]:
        raise UserError(
            f"{left.files[stray[0]]}: tensor {stray[0]} belongs to no linear of the model that is "
            f"{layout.name}; check that config.json describes these weights"
        )
    return left, linears


@dataclass
class _Parts:
    """The tensors of one packed linear.

    Attributes:
        checkpoint: that holds them.
        name, shape: of the weight.
        layout: of the checkpoint.
        taken: names of those that were found.
    """

    checkpoint: Checkpoint
    name: str
    shape: tuple[int, ...]
    layout: Layout
    taken: set[str] = field(default_factory=set)

    def linear(self, place: str) -> StoredLinear:
        """Put it together from what is at `place`, its values, and what lies beside."""
        packing, group = _PACKINGS[self.layout.name], self.layout.block[1]
        *leading, rows, columns = self.shape
        if group is not None and columns % group:
            raise self.refuse(
                place,
                f"is {self.layout.name} of {columns} columns, which groups of {group} do not "
                "divide; no library stores this: use the bf16 checkpoint",
            )
        words = -(-columns // packing.numbers) * packing.words
        values = self.take(place, (packing.dtype,), (*leading, rows, words))
        scales = self.scales(place, packing.scales)
        outer = self.outer(place) if packing.outer else None
        if self.layout.name == "int4" and (stated := self.find("_shape")) is not None:
            self.taken.add(stated)
            sides = self.checkpoint.tensors[stated]
            if sides.dtype.kind != "i" or sides.tolist() != [*self.shape]:
                raise self.refuse(
                    stated,
                    f"says {sides.tolist()}, and config.json implies {[*self.shape]} of this int4 "
                    "weight; check that it describes these weights",
                )
        return StoredLinear(values, scales, outer, self.shape, self.layout)

    def scales(self, values: str, dtypes: tuple[np.dtype, ...]) -> np.ndarray:
        """[..., rows or 1, groups or 1]."""
        *leading, rows, columns = self.shape
        down, group = self.layout.block
        groups = columns // group if group else 1
        whole = (*leading, rows if down else 1, groups)
        flat = [whole[:-1]] if groups == 1 else []
        shapes = [whole, *flat] if down else [whole, *flat, whole[:-2]]
        found = self.take(part := self.needed(values, "_scale"), dtypes, *shapes)
        if self.layout.name.startswith("mx"):
            found = found.view(E8M0)
        if bad := count_non_finite(found):
            raise self.refuse(
                part,
                f"holds {bad} non-finite scales of {found.size}; the {self.layout.name} "
                "checkpoint is damaged, get it again",
            )
        return found.reshape(whole)

    def outer(self, values: str) -> np.ndarray:
        """[..., 1, 1], what multiplies."""
        names, leading = _NAMES[self.layout.library], self.shape[:-2]
        shapes = [(*leading, *(1,) * ones) for ones in (1, 0, 2)]
        found = self.take(part := self.needed(values, names.outer), (_F32,), *shapes)
        with np.errstate(all="ignore"):
            outer = 1 / found if names.divides else found
        if not (np.isfinite(found) & np.isfinite(outer) & (outer > 0)).all():
            raise self.refuse(
                part,
                f"must be positive and finite, and holds {found.reshape(-1)[:3].tolist()}; the "
                f"{self.layout.name} checkpoint is damaged, get it again",
            )
        return np.asarray(outer, np.float32).reshape(*leading, 1, 1)

    def find(self, part: str) -> str | None:
        """The name of a part, where it is there."""
        return next((x for x in self.names(part) if x in self.checkpoint.tensors), None)

    def names(self, part: str) -> tuple[str, ...]:
        """What a part may be called, which beside fused experts differs."""
        if self.name.endswith(".weight"):
            return (self.name + part,)
        return tuple(f"{self.name}{between}{part}" for between in ("", ".weight", "_weight"))

    def needed(self, values: str, part: str) -> str:
        if (found := self.find(part)) is not None:
            return found
        raise self.refuse(
            values,
            f"is {self.layout.name}, but {self.names(part)[0]} is missing; get the whole "
            "checkpoint",
        )

    def take(self, part: str, dtypes: tuple[np.dtype, ...], *shapes: tuple[int, ...]) -> np.ndarray:
        tensor, layout = self.checkpoint.tensors[part], self.layout
        self.taken.add(part)
        if tensor.dtype not in dtypes:
            raise self.refuse(
                part,
                f"has dtype {tensor.dtype}; of {layout.name} it is "
                f"{' or '.join(map(str, dtypes))}: check that config.json describes these weights",
            )
        if tensor.shape not in shapes:
            raise self.refuse(
                part,
                f"has shape {[*tensor.shape]}; a weight {[*self.shape]} in {layout.name}, a scale "
                f"for {in_words(layout.block)}, needs {[*shapes[0]]}: check that config.json "
                "describes these weights",
            )
        return tensor

    def refuse(self, part: str, what: str) -> UserError:
        return UserError(f"{self.checkpoint.files[part]}: tensor {part} {what}")
