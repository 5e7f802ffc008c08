"""What the make_*.py scripts share: foreign code out of a clone at a commit, and tensors as text.
Needs torch; tests read the tables by tables.py alone."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
import tarfile
import types
import zlib
from pathlib import Path

import torch


def checkout(clone: str, commit: str, folder: str, into: str) -> Path:
    """Writes `folder` of a repository (a clone, bare or not) at `commit` under `into`."""
    tar = subprocess.run(
        ["git", "-C", clone, "archive", commit, folder], check=True, capture_output=True
    ).stdout
    tarfile.open(fileobj=io.BytesIO(tar)).extractall(into, filter="data")
    return Path(into)


def stub(name: str, **members: object) -> types.ModuleType:
    """An empty module under `name` that stands for one which the foreign file imports and which
    what is run here doesn't use."""
    module = types.ModuleType(name)
    module.__path__ = []
    module.__dict__.update(members)
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], last, module)
    return module


def tensor(value: torch.Tensor) -> dict[str, object]:
    """A tensor as tables.py reads it."""
    value = value.detach().contiguous()
    data = value.reshape(-1).view(torch.uint8).numpy().tobytes()
    text = (
        {"hex": data.hex()}
        if len(data) <= 128
        else {"zlib": base64.b64encode(zlib.compress(data, 9)).decode()}
    )
    return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), **text}


def write(name: str, table: dict) -> None:
    """Writes `name`.json beside this file, one entry a line."""
    lines = _lines(table, 0)
    (Path(__file__).parent / f"{name}.json").write_text(lines + "\n")


def _lines(value: object, depth: int) -> str:
    nested = isinstance(value, dict) and any(isinstance(item, dict) for item in value.values())
    if not nested:
        return json.dumps(value)
    pad = " " * (depth + 1)
    rows = (f"{pad}{json.dumps(key)}: {_lines(item, depth + 1)}" for key, item in value.items())
    return "{\n" + ",\n".join(rows) + "\n" + " " * depth + "}"
