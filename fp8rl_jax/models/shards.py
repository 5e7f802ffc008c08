"""The weight files of a Hugging Face directory: `model.safetensors`, or shards with an index that
says what lies where."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from fp8rl_jax.models.safetensors_io import INDEX_FILE, SINGLE_FILE, write_safetensors

SHARD_BYTES = 5_000_000_000  # what transformers took for years

_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")

__all__ = ["INDEX_FILE", "SHARD_BYTES", "is_weights_file", "write_checkpoint"]


def is_weights_file(name: str) -> bool:
    """Whether a file of this name is read as weights, or as the list of them."""
    return name in (SINGLE_FILE, INDEX_FILE) or _SHARD.fullmatch(name) is not None


def write_checkpoint(
    directory: Path, groups: Iterable[dict[str, np.ndarray]], shard_bytes: int = SHARD_BYTES
) -> tuple[str, ...]:
    """Writes tensors into an existing, empty directory.

    Args:
        directory: where to write; no more than one shard is held in memory beside what `groups`
            holds itself.
        groups: tensors by name, in groups that stay in one file (a weight and its scale).
        shard_bytes: a new file begins with the group that would make the file larger than this. One
            file in all gets the plain name and no index.

    Returns:
        The names of the files.

    Raises:
        UserError: the disk is full, or a file cannot be written for another reason that the system
            gives.
    """
    parts = [
        _write_part(directory, number, shard)
        for number, shard in enumerate(_shards(groups, shard_bytes))
    ]
    if len(parts) == 1:
        os.replace(directory / "part-0", directory / SINGLE_FILE)
        return (SINGLE_FILE,)
    files = [
        f"model-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)
    ]
    for number, file in enumerate(files):
        os.replace(directory / f"part-{number}", directory / file)
    weight_map = {
        name: file for file, (names, _) in zip(files, parts, strict=True) for name in names
    }
    index = {"metadata": {"total_size": sum(size for _, size in parts)}, "weight_map": weight_map}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return (*files, INDEX_FILE)


def _shards(
    groups: Iterable[dict[str, np.ndarray]], shard_bytes: int
) -> Iterator[dict[str, np.ndarray]]:
    shard: dict[str, np.ndarray] = {}
    filled = 0
    for group in groups:
        size = _nbytes(group)
        if shard and filled + size > shard_bytes:
            yield shard
            shard, filled = {}, 0
        shard.update(group)
        filled += size
    yield shard


def _write_part(
    directory: Path, number: int, shard: dict[str, np.ndarray]
) -> tuple[list[str], int]:
    """Names and bytes of a shard, written under a name that does not yet say how many there are."""
    write_safetensors(directory / f"part-{number}", shard)
    return list(shard), _nbytes(shard)


def _nbytes(tensors: dict[str, np.ndarray]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
