"""GGUF files put together byte by byte, valid or not."""

from __future__ import annotations

import struct
from typing import Any

from fp8rl_jax.weights.gguf_io import BLOCK_FORMATS, StoredTensor


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def header(
    entries: bytes = b"", tensors: bytes = b"", counts: tuple[int, int] = (0, 0), version: int = 3
) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, counts[1], counts[0]) + entries + tensors


def described(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    """`shape` as in the file: the contiguous axis first."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def whole_file(metadata: dict[str, Any], tensors: dict[str, StoredTensor]) -> bytes:
    """A file of these: Python's integers as 32-bit or, where they need it, 64-bit ones, floats as
    float32."""
    entries = b"".join(
        text(name) + struct.pack("<I", _kind(value)) + _value(value)
        for name, value in metadata.items()
    )
    descriptions, data = b"", b""
    for name, tensor in tensors.items():
        descriptions += described(
            name, tensor.shape[::-1], BLOCK_FORMATS[tensor.kind][0], len(data)
        )
        data += tensor.data.tobytes()
        data += bytes(-len(data) % 32)
    head = header(entries, descriptions, (len(metadata), len(tensors)))
    return head + bytes(-len(head) % 32) + data


def _kind(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return 4 if 0 <= value < 2**32 else 11
    return {bool: 7, float: 6, str: 8, list: 9}[type(value)]


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return text(value)
    if isinstance(value, list):
        kind = max((_kind(item) for item in value), default=4)
        return struct.pack("<IQ", kind, len(value)) + b"".join(
            _scalar(item, kind) for item in value
        )
    return _scalar(value, _kind(value))


def _scalar(value: Any, kind: int) -> bytes:
    return (
        text(value)
        if kind == 8
        else struct.pack({4: "<I", 6: "<f", 7: "<?", 11: "<q"}[kind], value)
    )
