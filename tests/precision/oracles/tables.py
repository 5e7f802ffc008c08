"""Reading the tables of this folder: a tensor is {"dtype", "shape", "hex"}, its little-endian bytes
in hexadecimal where there are 128 at most, else "zlib", them deflated and in base64."""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np


def load(name: str) -> dict:
    """The table `name` ("mx", "nvfp4", "int4", "checkpoints") with its tensors as numpy arrays."""
    text = (Path(__file__).parent / f"{name}.json").read_text()
    return json.loads(text, object_hook=_tensor)


def _tensor(found: dict) -> np.ndarray | dict:
    if "dtype" not in found or not {"hex", "zlib"} & set(found):
        return found
    if "hex" in found:
        data = bytes.fromhex(found["hex"])
    else:
        data = zlib.decompress(base64.b64decode(found["zlib"]))
    dtype = np.dtype(getattr(ml_dtypes, found["dtype"], found["dtype"]))
    return np.frombuffer(data, dtype).reshape(found["shape"])
