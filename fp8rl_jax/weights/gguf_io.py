"""Reading llama.cpp's GGUF file format: metadata, and tensors in block formats, over a memory map.

The layout is "GGUF", a version, the counts of tensors and of metadata entries, the entries (name,
type, value), the tensors' descriptions (name, sizes with the contiguous axis first, block format,
offset), padding, and the tensors' bytes, each at the next multiple of the alignment; all
little-endian. Reading is ours, because the gguf package trusts the file: a flipped bit in the
length of a list makes it count to 2**63. Here every length is held against the file's, and every
offset against the sum of what comes before it, as llama.cpp does. What the blocks mean is the
package's.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np

from fp8rl_jax.errors import UserError

# Block format -> (its number in the file, elements of a block, bytes of a block)
BLOCK_FORMATS = {
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
    "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24),
    "Q8_0": (8, 32, 34),
    "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
    "BF16": (30, 1, 2),
}
_NAMES = {number: name for name, (number, _, _) in BLOCK_FORMATS.items()}

# type of a value in the file -> its format in the struct module
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _LIST = 8, 9
_VERSIONS = (2, 3)
_MAX_DIMS = 4
_ALIGNMENT_KEY, _DEFAULT_ALIGNMENT = "general.alignment", 32


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor as it lies in the file.

    Attributes:
        kind: a key of `BLOCK_FORMATS`.
        shape: in numpy's order, the contiguous axis last.
        data: uint8 [..., bytes of a row], read-only.
    """

    kind: str
    shape: tuple[int, ...]
    data: np.ndarray


def read_gguf(path: str | Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Open a GGUF file of version 2 or 3.

    Returns:
        The metadata, as Python numbers, strings and lists of these, and the tensors, both by name.

    Raises:
        UserError: naming the file, and the entry or tensor that is at fault: a truncated file, a
            name that comes twice or is no UTF-8, an unknown type, a block format that is not read,
            offsets that do not follow from the sizes.
    """
    path = Path(path)
    try:
        data = np.memmap(path, np.uint8, mode="r") if path.stat().st_size else np.empty(0, np.uint8)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        return _read(data)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def dequantize(tensor: StoredTensor) -> np.ndarray:
    """Dequantize a tensor to float32 of its shape, by the gguf package.

    What float32 cannot hold is an infinity or a NaN.
    """
    import gguf

    with np.errstate(all="ignore"):
        values = gguf.dequantize(
            np.ascontiguousarray(tensor.data), gguf.GGMLQuantizationType[tensor.kind]
        )
    return np.asarray(values, np.float32).reshape(tensor.shape)


def _read(data: np.ndarray) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    cursor = _Cursor(memoryview(data))
    if len(data) < 4 or cursor.take(4) != b"GGUF":
        raise UserError("not a GGUF file, or a truncated one (it does not begin with 'GGUF')")
    if (version := cursor.number("I")) not in _VERSIONS:
        raise UserError(
            f"GGUF version {version} is not read; versions {' and '.join(map(str, _VERSIONS))} are"
        )
    tensor_count, entry_count = cursor.number("Q"), cursor.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(entry_count):
        name = cursor.text("the name of a metadata entry")
        if name in metadata:
            raise UserError(f"metadata {name} comes twice")
        metadata[name] = _value(cursor, name)
    return metadata, _tensors(cursor, data, tensor_count, _alignment(metadata))


def _value(cursor: _Cursor, name: str) -> Any:
    kind = cursor.number("I")
    if kind in _SCALARS:
        return cursor.number(_SCALARS[kind])
    if kind == _STRING:
        return cursor.text(f"metadata {name}")
    if kind != _LIST:
        raise UserError(f"metadata {name} has the unknown type {kind}")
    kind, count = cursor.number("I"), cursor.number("Q")
    if kind in _SCALARS:
        return cursor.numbers(_SCALARS[kind], count)
    if kind != _STRING:
        raise UserError(
            f"metadata {name} is a list of type {kind}; lists of numbers and of strings are read"
        )
    return [cursor.text(f"metadata {name}") for _ in range(count)]


def _alignment(metadata: dict[str, Any]) -> int:
    alignment = metadata.get(_ALIGNMENT_KEY, _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise UserError(f"metadata {_ALIGNMENT_KEY} must be a power of two, got {alignment!r}")
    return alignment


def _tensors(
    cursor: _Cursor, data: np.ndarray, count: int, alignment: int
) -> dict[str, StoredTensor]:
    described: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    position = 0
    for _ in range(count):
        name = cursor.text("the name of a tensor")
        if name in described:
            raise UserError(f"tensor {name} comes twice")
        kind, shape, row_bytes, offset = _description(cursor, name)
        if offset != position:
            raise UserError(
                f"tensor {name} begins at byte {offset} of the data, expected {position}"
            )
        described[name] = (kind, shape, row_bytes, offset)
        position = _aligned(offset + math.prod(shape[:-1]) * row_bytes, alignment)
    start = _aligned(cursor.position, alignment)
    tensors = {}
    for name, (kind, shape, row_bytes, offset) in described.items():
        begin = start + offset
        end = begin + math.prod(shape[:-1]) * row_bytes
        if end > len(data):
            raise UserError(
                f"truncated; tensor {name} ends at byte {end}, the file has {len(data)}"
            )
        tensors[name] = StoredTensor(kind, shape, data[begin:end].reshape(*shape[:-1], row_bytes))
    return tensors


def _description(cursor: _Cursor, name: str) -> tuple[str, tuple[int, ...], int, int]:
    """(block format, shape, bytes of a row, offset)."""
    dims = cursor.number("I")
    if not 1 <= dims <= _MAX_DIMS:
        raise UserError(f"tensor {name} has {dims} dimensions; from 1 to {_MAX_DIMS} are read")
    shape = tuple(reversed(cursor.numbers("Q", dims)))
    number, offset = cursor.number("I"), cursor.number("Q")
    if number not in _NAMES:
        raise UserError(
            f"tensor {name} has type {_type_name(number)}, which is not read; read are "
            f"{', '.join(BLOCK_FORMATS)}"
        )
    kind = _NAMES[number]
    _, elements, size = BLOCK_FORMATS[kind]
    if min(shape) < 1 or shape[-1] % elements:
        raise UserError(
            f"tensor {name} has shape {list(shape)}; a row in {kind} is a positive multiple of "
            f"{elements}"
        )
    return kind, shape, shape[-1] // elements * size, offset


def _type_name(number: int) -> str:
    import gguf

    names = {kind.value: kind.name for kind in gguf.GGMLQuantizationType}
    return names.get(number, str(number))


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


class _Cursor:
    """Reads on from where the last read ended, and never beyond the end."""

    def __init__(self, data: memoryview):
        self._data = data
        self.position = 0

    def take(self, size: int) -> memoryview:
        end = self.position + size
        if end > len(self._data):
            raise UserError(
                f"truncated; {size} bytes from byte {self.position} go beyond the file's "
                f"{len(self._data)}"
            )
        piece = self._data[self.position : end]
        self.position = end
        return piece

    def number(self, letter: str) -> Any:
        return self.numbers(letter, 1)[0]

    def numbers(self, letter: str, count: int) -> list[Any]:
        piece = self.take(struct.calcsize(letter) * count)
        return [value for (value,) in struct.iter_unpack(f"<{letter}", piece)]

    def text(self, what: str) -> str:
        piece = self.take(self.number("Q"))
        try:
            return str(piece, "utf-8")
        except UnicodeDecodeError:
            raise UserError(f"{what} is not UTF-8, at byte {self.position - len(piece)}") from None
