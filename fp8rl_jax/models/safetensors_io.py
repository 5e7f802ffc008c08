"""Safetensors files to and from numpy, FP8 included.

The layout is 8 bytes with the header's length (little-endian), a JSON header
`{"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, ...}`, and the tensors'
bytes, back to back. Reading is ours, because the library has no FP8 for numpy. Every rule of the
format is checked before an array is handed out, so a truncated download or a flipped bit in the
header is an error here and not a strange number later.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from fp8rl_jax.errors import UserError
from fp8rl_jax.models.hf_json import read_json

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

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_DIMS = 32


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """The tensors of one or more files, memory-mapped and read-only, and the file that each came
    from."""

    tensors: dict[str, np.ndarray]
    files: dict[str, Path]


def read_checkpoint(directory: str | Path) -> Checkpoint:
    """Opens `model.safetensors`, or the shards that `model.safetensors.index.json` lists.

    Raises:
        UserError: no weights in the directory, a malformed file or index, a shard that is missing,
            a tensor that the index and its shard do not agree on.
    """
    directory = Path(directory)
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.exists():
        tensors = read_safetensors(single)
        return Checkpoint(tensors, dict.fromkeys(tensors, single))
    if not index.exists():
        raise UserError(
            f"{directory}: holds neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors are read"
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


def read_safetensors(path: str | Path) -> dict[str, np.ndarray]:
    """Opens one safetensors file.

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
    """Writes one file: complete under its name, or not at all and an earlier file of that name
    untouched.

    Raises:
        UserError: the disk is full, or the file cannot be written for another reason that the
            system gives.
    """
    path = Path(path)
    # The library writes the memory behind the pointer, whatever the strides say.
    dense = {name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}
    try:
        handle, temporary = tempfile.mkstemp(
            prefix=f".{path.name}.", suffix=".tmp", dir=path.parent
        )
        os.close(handle)
        try:
            safetensors.numpy.save_file(dense, temporary, metadata={"format": "pt"})
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(
            f"{path}: cannot be written ({error}); free some space or choose another place"
        ) from None


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
