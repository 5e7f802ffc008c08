"""Parts of a model's arrays, from ranges of its files."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from test_fp8_forms import BASE, fuse, write
from tiny_models import MOE, random_tensors, write_model

from fp8rl_jax.errors import UserError
from fp8rl_jax.weights import hf_directory
from fp8rl_jax.weights.hf_directory import open_files


def model(kind, directory):
    """Experts of their own, fused in a layer, or fused and FP8 there."""
    tensors = random_tensors(MOE)
    if kind == "single":
        return write_model(directory, MOE, tensors)
    tensors = fuse(tensors, 2)
    if kind == "fused":
        return write_model(directory, MOE, tensors)
    name = f"{BASE.format(2)}gate_up_proj"
    tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
    tensors[f"{name}_scale_inv"] = np.linspace(0.5, 2, 10, dtype=np.float32).reshape(5, 2, 1)
    return write(directory, MOE, tensors, {"quant_method": "fp8"})


@pytest.mark.parametrize("kind", ["single", "fused", "fp8"])
def test_parts_are_those_of_the_arrays_and_their_bytes_alone_are_read(kind, tmp_path, monkeypatch):
    files, counted, whole = open_files(model(kind, tmp_path)), [], hf_directory.read_range

    def seen(tensor, span):
        counted.append(tensor[tuple(slice(*ends) for ends in span)].size)
        return whole(tensor, span)

    monkeypatch.setattr(hf_directory, "read_range", seen)
    for path, array in files.arrays().items():
        spans = {
            tuple((0, side) for side in array.shape),
            tuple((side // 2, side) for side in array.shape),
            tuple((side // 3, side - side // 3) for side in array.shape),
        }
        counted.clear()
        found = files.parts(path, spans)
        assert found.keys() == spans
        for span, part in found.items():
            expected = array[tuple(slice(*ends) for ends in span)]
            assert part.dtype == array.dtype and part.tobytes() == expected.tobytes(), path
        assert sum(counted) == sum(part.size for part in found.values())


def test_what_is_not_finite_is_counted_in_the_whole_tensor_once_some_of_it_is_read(tmp_path):
    tensors, name = random_tensors(MOE), "model.layers.1.self_attn.q_proj.weight"
    tensors[name][3, :2] = np.inf
    files = open_files(write_model(tmp_path, MOE, tensors))
    rows, columns = tensors[name].shape
    assert files.parts("layers.q_proj.weight", [((0, 4), (4, rows), (0, columns))])
    with pytest.raises(UserError, match=f"{name} holds 2 non-finite values of {rows * columns}"):
        files.parts("layers.q_proj.weight", [((1, 2), (0, 4), (1, 2))])
