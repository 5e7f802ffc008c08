"""Data sets by name or path, through Hugging Face's `datasets`, an extra."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from fp8rl_jax.errors import UserError, listing

_SAVED = ("dataset_dict.json", "state.json")
"""What `save_to_disk` leaves in a folder: of several splits, of one."""


def named_elsewhere(name: str) -> str:
    """Say how a data set is named, where `name` reads like one: owner/name."""
    owner, _, rest = name.partition("/")
    if owner.strip(".~*") and rest and not {"/", "*", "."} & set(rest):
        return '; a data set that Hugging Face\'s `datasets` loads is task.kind = "dataset"'
    return ""


def load_rows(name: str, subset: str, split: str) -> Sequence[Mapping[str, Any]]:
    """Load a split.

    Args:
        name: of a data set on the hub, a folder or a file that `datasets` reads, or a folder that
            `save_to_disk` wrote.
        subset: its configuration; empty: the only one.
        split: its name, or part of it as `datasets` writes it ("train[:1000]").

    Raises:
        UserError: `datasets` is not installed, or whatever it says of this name.
    """
    try:
        datasets: Any = import_module("datasets")
    except ModuleNotFoundError as fault:
        raise UserError(
            f'task.kind = "dataset" needs {fault.name}: pip install datasets, or '
            'name files with task.kind = "jsonl"'
        ) from fault
    path = Path(name).expanduser()
    try:
        if any((path / file).is_file() for file in _SAVED):
            return _of_saved(datasets.load_from_disk(str(path)), name, split)
        if path.is_file():
            return datasets.load_dataset(str(path.parent), data_files=path.name, split=split)
        place = str(path) if path.is_dir() else name
        return datasets.load_dataset(place, subset or None, split=split)
    except UserError:
        raise
    # whatever the library, a file of its or the network raises
    except Exception as fault:
        said = " ".join(str(fault).split())[:300]
        which = f"the data set {name!r}{f', subset {subset!r}' if subset else ''}, split {split!r}"
        raise UserError(f"{which}: {type(fault).__name__}: {said}") from fault


def _of_saved(saved: Any, name: str, split: str) -> Sequence[Mapping[str, Any]]:
    splits = saved if isinstance(saved, Mapping) else {str(saved.split or "train"): saved}
    if split not in splits:
        raise UserError(
            f"the data set {name!r} was saved with {listing(list(splits))}, and has no split "
            f"{split!r}"
        )
    return splits[split]
