"""Safetensors files to and from numpy, FP8 included.

The layout is 8 bytes with the header's length (little-endian), a JSON header
`{"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, ...}`, and the tensors'
bytes, back to back. Reading is ours, because the library has no FP8 for numpy. Every rule of the
format is checked before an array is handed out, so a truncated download or a flipped bit in the
header is an error here and not a strange number later. Writing is ours, because the library wants
all tensors of a file at once; the bytes are those that it writes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from fp8rl_jax.errors import UserError
from fp8rl_jax.json_fields import read_json

DTYPES: dict[str, np.dtype] = {
    name: np.dtype(scalar)
    for name, scalar in {
        "BOOL": np.bool_,
        "U8": np.uint8,
        "I8": np.int8,
        "U16": np.uint16,
        "I16": np.int16,
        "U32": np.uint32,
        "I32": np.int32,
        "U64": np.uint64,
        "I64": np.int64,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F32": np.float32,
        "F64": np.float64,
        "C64": np.complex64,
    }.items()
}

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ORDER = (
    *("U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16"),
    *("F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"),
)
"""Of the tensors in a file that the library writes; those of one dtype come by their names."""
_SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_DIMS = 32


SHARD_BYTES = 5_000_000_000  # what transformers took for years
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
# A value is inf or NaN when all bits of the mask are set: the exponent, or for e4m3fn and e8m0fnu,
# which have no inf, all but the sign.
_NON_FINITE_BITS: dict[np.dtype, tuple[type, int]] = {
    np.dtype(ml_dtypes.bfloat16): (np.uint16, 0x7F80),
    np.dtype(np.float16): (np.uint16, 0x7C00),
    np.dtype(np.float32): (np.uint32, 0x7F800000),
    np.dtype(np.float64): (np.uint64, 0x7FF0000000000000),
    np.dtype(ml_dtypes.float8_e4m3fn): (np.uint8, 0x7F),
    np.dtype(ml_dtypes.float8_e5m2): (np.uint8, 0x7C),
    np.dtype(ml_dtypes.float8_e8m0fnu): (np.uint8, 0xFF),
}
_CHUNK = 1 << 20  # elements; keeps the temporaries in cache


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """The tensors of one or more files, memory-mapped and read-only, and the file of each."""

    tensors: dict[str, np.ndarray]
    files: dict[str, Path]


def without(checkpoint: Checkpoint, names: Collection[str]) -> Checkpoint:
    """Leave tensors out of a checkpoint."""
    return Checkpoint(
        {name: tensor for name, tensor in checkpoint.tensors.items() if name not in names},
        {name: file for name, file in checkpoint.files.items() if name not in names},
    )


def read_checkpoint(directory: str | Path) -> Checkpoint:
    """Open `model.safetensors`, or the shards that `model.safetensors.index.json` lists.

    Raises:
        UserError: no weights in the directory, a malformed file or index, a shard that is missing,
            a tensor that the index and its shard do not agree on.
    """
    directory = Path(directory)
    single, index = directory / _SINGLE_FILE, directory / INDEX_FILE
    if single.exists():
        tensors = read_safetensors(single)
        return Checkpoint(tensors, dict.fromkeys(tensors, single))
    if not index.exists():
        raise UserError(
            f"{directory}: holds neither {_SINGLE_FILE} nor {INDEX_FILE}; only safetensors are read"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index}: weight_map must be an object from tensor names to files")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise UserError(
                f"{index}: weight_map.{name} must be the name of a file beside the index, got "
                f"{shard!r}"
            )
    checkpoint = Checkpoint({}, {})
    for shard in sorted(set(weight_map.values())):
        path = directory / shard
        if not path.exists():
            raise UserError(
                f"{path}: not found, but {INDEX_FILE} lists it; download the missing shard"
            )
        tensors = read_safetensors(path)
        listed = {name for name, file in weight_map.items() if file == shard}
        if absent := sorted(listed - tensors.keys()):
            raise UserError(
                f"{path}: tensor {absent[0]} is absent, but {INDEX_FILE} places it there"
            )
        if extra := sorted(tensors.keys() - listed):
            raise UserError(
                f"{path}: tensor {extra[0]} is not listed for this file in {INDEX_FILE}"
            )
        checkpoint.tensors.update(tensors)
        checkpoint.files.update(dict.fromkeys(tensors, path))
    return checkpoint


class Kind(NamedTuple):
    """What a tensor is, without its values."""

    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its bytes in a file."""
        return math.prod(self.shape) * self.dtype.itemsize


Kinds = dict[str, Kind]


def write_checkpoint(
    directory: Path,
    kinds: Iterable[Kinds],
    groups: Iterable[dict[str, np.ndarray]],
    shard_bytes: int = SHARD_BYTES,
) -> tuple[str, ...]:
    """Write tensors into an existing, empty directory, one group after the other.

    Args:
        directory: where to write.
        kinds: of the tensors of each group.
        groups: tensors by name, in groups that stay in one file (a weight and its scale). No more
            than one is held here.
        shard_bytes: a new file begins with the group that would make the file larger than this. One
            file in all gets the plain name and no index.

    Returns:
        The names of the files.

    Raises:
        UserError: the disk is full, or a file cannot be written for another reason that the system
            gives.
    """
    groups, parts = iter(groups), list[Kinds]()
    for number, several in enumerate(_shards(kinds, shard_bytes)):
        parts.append({name: kind for group in several for name, kind in group.items()})
        # under a name that does not yet say how many there are
        _write(directory / f"part-{number}", parts[-1], islice(groups, len(several)))
    if len(parts) == 1:
        os.replace(directory / "part-0", directory / _SINGLE_FILE)
        return (_SINGLE_FILE,)
    files = [
        f"model-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)
    ]
    for number, file in enumerate(files):
        os.replace(directory / f"part-{number}", directory / file)
    weight_map = {name: file for file, part in zip(files, parts, strict=True) for name in part}
    total = sum(_nbytes(part) for part in parts)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return (*files, INDEX_FILE)


def read_safetensors(path: str | Path) -> dict[str, np.ndarray]:
    """Open one safetensors file.

    Returns:
        Read-only arrays over a memory map of the file, by name, in the order of their bytes.

    Raises:
        UserError: naming the file, and the tensor where one is at fault: truncated or over-long
            file, header that is not the format's JSON, unknown dtype, offsets that overlap, leave a
            hole, or do not fit shape and dtype.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > size - 8:
                raise UserError(
                    f"{path}: truncated; the header should end at byte {8 + length}, the file "
                    f"has {size}"
                )
            if length > _MAX_HEADER_BYTES:
                raise UserError(
                    f"{path}: not a safetensors file (its header would have {length} bytes)"
                )
            header = file.read(length)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        specs = _parse_header(header)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    _check_layout(path, specs, data_bytes=size - 8 - length)
    data = np.memmap(path, dtype=np.uint8, mode="r")
    return {
        name: np.ndarray(spec.shape, spec.dtype, buffer=data, offset=8 + length + spec.start)
        for name, spec in specs.items()
    }


def write_safetensors(path: str | Path, tensors: dict[str, np.ndarray]) -> None:
    """Write one file: complete, or not at all and an earlier file of that name untouched.

    Raises:
        UserError: the disk is full, or the file cannot be written for another reason that the
            system gives.
    """
    kinds = {name: Kind(tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    _write(Path(path), kinds, [tensors])


def _write(
    path: Path, kinds: Mapping[str, Kind], groups: Iterable[Mapping[str, np.ndarray]]
) -> None:
    """Write a file of tensors that come in any order."""
    header, starts = _header(kinds)
    try:
        handle, temporary = tempfile.mkstemp(
            prefix=f".{path.name}.", suffix=".tmp", dir=path.parent
        )
        try:
            with open(handle, "wb", buffering=0) as file:
                _write_all(file.fileno(), header, 0)
                for group in groups:
                    for name, tensor in group.items():
                        assert Kind(tensor.dtype, tensor.shape) == kinds[name], name
                        values = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
                        _write_all(file.fileno(), values.data, starts[name])
                os.fsync(handle)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({error}); free some space or choose another place"
        ) from None


def _write_all(handle: int, data: bytes | memoryview, place: int) -> None:
    """Write bytes at a place: the system takes 2 GB at a time."""
    view = memoryview(data)
    while len(view):
        written = os.pwrite(handle, view, place)
        view, place = view[written:], place + written


def _header(kinds: Mapping[str, Kind]) -> tuple[bytes, dict[str, int]]:
    """What a file begins with, and where each tensor begins in it."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, end = {}, 0
    for name in sorted(kinds, key=lambda name: (_ORDER.index(_NAMES[kinds[name].dtype]), name)):
        starts[name], end = end, end + kinds[name].nbytes
        entries[name] = {
            "dtype": _NAMES[kinds[name].dtype],
            "shape": list(kinds[name].shape),
            "data_offsets": [starts[name], end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    return (
        len(text).to_bytes(8, "little") + text,
        {name: begin + start for name, start in starts.items()},
    )


def is_weights_file(name: str) -> bool:
    """Say whether a file of this name is read as weights, or as the list of them."""
    return name in (_SINGLE_FILE, INDEX_FILE) or _SHARD.fullmatch(name) is not None


def count_non_finite(values: np.ndarray) -> int:
    """Count the infinities and NaNs of a float array of any shape.

    Raises:
        TypeError: a dtype that is not a floating-point format known here.
    """
    if values.dtype not in _NON_FINITE_BITS:
        raise TypeError(f"no floating-point format known here: {values.dtype}")
    integer, mask = _NON_FINITE_BITS[values.dtype]
    bits = np.ascontiguousarray(values).reshape(-1).view(integer)
    mask = integer(mask)
    chunks = (bits[start : start + _CHUNK] for start in range(0, bits.size, _CHUNK))
    return sum(int(np.count_nonzero((chunk & mask) == mask)) for chunk in chunks)


@dataclasses.dataclass(frozen=True)
class _Spec:
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def _parse_header(header: bytes) -> dict[str, _Spec]:
    if not header.startswith(b"{"):
        raise UserError("not a safetensors file (the header does not begin with '{')")
    try:
        entries = json.loads(
            header.decode("utf-8"),
            object_pairs_hook=_object_without_duplicates,
            parse_int=_natural,
            parse_float=_natural,
            parse_constant=_natural,
        )
    except (ValueError, RecursionError) as error:
        raise UserError(f"corrupt header, not valid JSON ({error})") from None
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise UserError("corrupt header: __metadata__ must map strings to strings")
    specs = {name: _parse_entry(name, entry) for name, entry in entries.items()}
    return dict(sorted(specs.items(), key=lambda item: (item[1].start, item[1].end)))


def _parse_entry(name: str, entry: Any) -> _Spec:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise UserError(f"tensor {name!r}: expected dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise UserError(
            f"tensor {name!r}: dtype {dtype!r} is not supported; supported: {', '.join(DTYPES)}"
        )
    if not _naturals(shape) or len(shape) > _MAX_DIMS:
        raise UserError(f"tensor {name!r}: shape must be a list of sizes, got {shape!r}")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise UserError(f"tensor {name!r}: data_offsets must be [start, end], got {offsets!r}")
    # numpy bounds the product of the non-zero sizes too.
    if math.prod(size or 1 for size in shape) * DTYPES[dtype].itemsize >= 2**63:
        raise UserError(f"tensor {name!r}: shape {shape} is too large")
    return _Spec(DTYPES[dtype], tuple(shape), *offsets)


def _check_layout(path: Path, specs: dict[str, _Spec], data_bytes: int) -> None:
    """Each tensor's bytes must begin where the last one's ended, and the last must end with the
    file."""
    position = 0
    for name, spec in specs.items():
        expected = math.prod(spec.shape) * spec.dtype.itemsize
        if spec.end - spec.start != expected:
            raise UserError(
                f"{path}: tensor {name!r} of shape {list(spec.shape)} and dtype {spec.dtype} "
                f"needs {expected} bytes, "
                f"its data_offsets give {spec.end - spec.start}"
            )
        if spec.start != position:
            raise UserError(
                f"{path}: tensor {name!r} begins at byte {spec.start} of the data, expected "
                f"{position}"
            )
        if spec.end > data_bytes:
            raise UserError(
                f"{path}: truncated; tensor {name!r} ends at byte {spec.end} of the data, the "
                f"file has {data_bytes}"
            )
        position = spec.end
    if position != data_bytes:
        raise UserError(
            f"{path}: {data_bytes - position} bytes after the last tensor; the file is corrupt"
        )


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(
            f"duplicate name {next(name for name in names if names.count(name) > 1)!r}"
        )
    for name in result:
        # an escaped lone surrogate is no text: UnicodeEncodeError is a ValueError
        name.encode("utf-8")
    return result


def _natural(literal: str) -> int:
    """Parses the only kind of number that a header may hold."""
    if not literal.isdigit():
        raise ValueError(f"unexpected number {literal}")
    return int(literal)


def _naturals(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, int) and value is not True and value is not False for value in values
    )


def _shards(kinds: Iterable[Kinds], shard_bytes: int) -> Iterator[list[Kinds]]:
    shard: list[Kinds] = []
    filled = 0
    for group in kinds:
        size = _nbytes(group)
        if shard and filled + size > shard_bytes:
            yield shard
            shard, filled = [], 0
        shard.append(group)
        filled += size
    yield shard


def _nbytes(kinds: Kinds) -> int:
    return sum(kind.nbytes for kind in kinds.values())
