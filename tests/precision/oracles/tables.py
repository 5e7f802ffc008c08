"""Reading the tables of this folder: a tensor is {"dtype", "shape", "hex"}, its little-endian bytes
in hexadecimal where an element is one byte, else "base64"."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import ml_dtypes
import numpy as np


def load(name: str) -> dict:
    """The table `name` ("mx", "nvfp4", "int4", "checkpoints") with its tensors as numpy arrays."""
    text = (Path(__file__).parent / f"{name}.json").read_text()
    return json.loads(text, object_hook=_tensor)


def _tensor(found: dict) -> np.ndarray | dict:
    if "dtype" not in found or not {"hex", "base64"} & set(found):
        return found
    data = bytes.fromhex(found["hex"]) if "hex" in found else base64.b64decode(found["base64"])
    dtype = np.dtype(getattr(ml_dtypes, found["dtype"], found["dtype"]))
    return np.frombuffer(data, dtype).reshape(found["shape"])
