"""Files that survive: whole at any moment, on the disk once they are said to be, and written by one
process at a time.

A file is written beside its place, flushed to the disk, and renamed over it; then the directory is
flushed, because a rename is an entry of its own. Whoever reads it sees the old text or the new one,
after a kill and after a loss of power.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Generator
from pathlib import Path


def write_durably(path: Path, text: str | bytes) -> None:
    """Replace a file's text.

    Raises:
        OSError: the disk is full or not writable; the file is as it was.
    """
    data = text.encode() if isinstance(text, str) else text
    partial = path.with_name(f"{path.name}.partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        while data:
            data = data[os.write(descriptor, data) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(partial, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush one file or directory entry list to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    """Flush everything in a directory, and its own entry, to the disk."""
    for folder, _, files in os.walk(directory, topdown=False):
        for file in files:
            sync(Path(folder, file))
        sync(Path(folder))
    sync(directory.parent)


@contextlib.contextmanager
def locked(path: Path, wait: bool = False) -> Generator[int | None]:
    """Hold a lock file, as long as a process that has inherited it lives.

    Args:
        wait: until no other process holds it.

    Yields:
        Its descriptor; None where another process holds it.

    Raises:
        OSError: the file cannot be made, or its file system has no locks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield None
        else:
            yield descriptor
    finally:
        os.close(descriptor)
