"""Hugging Face directory -> policy arrays: every tensor accounted for, of the right shape, and
finite."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from fp8rl_jax.errors import UserError
from fp8rl_jax.models.block_fp8 import dequantize_tensor, parse_quantization, split_scales
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.finite import count_non_finite
from fp8rl_jax.models.hf_json import read_json
from fp8rl_jax.models.hf_names import Location, hf_name, hf_tensors, is_ignored, parameter_shapes
from fp8rl_jax.models.safetensors_io import Checkpoint, read_checkpoint

_WEIGHT_DTYPES = tuple(
    np.dtype(scalar) for scalar in (ml_dtypes.bfloat16, np.float16, np.float32, np.float64)
)
_LISTED = 5  # tensors named in a message before the rest is counted


def load_policy_arrays(directory: str | Path) -> tuple[PolicyConfig, dict[str, Any]]:
    """Reads the weights of a Hugging Face directory.

    Returns:
        The config, and a nested dict `{"embed_tokens": {"weight": [V, D]}, "layers": {"q_proj":
        {"weight": [L, out, in]}, ...}, "norm": {"weight": [D]}, "lm_head": {"weight": [V, D]}}` of
        arrays in the file's dtype. The linears of a block-FP8 checkpoint are float32, each value
        times the scale of its block. There is no "lm_head" when the embeddings are tied, whether or
        not the file repeats them.

    Raises:
        UserError: whatever `PolicyConfig.from_directory`, `read_checkpoint` and
            `block_fp8.split_scales` refuse; tensors that are missing, unexpected, misshapen, not
            finite or of a dtype that weights don't have; a tied lm_head that differs.
    """
    directory = Path(directory)
    config = PolicyConfig.from_directory(directory)
    block = parse_quantization(read_json(directory / "config.json"))
    checkpoint = read_checkpoint(directory)
    check_tensor_count(directory, config, len(checkpoint.tensors))
    expected = hf_tensors(config)
    checkpoint, scales = split_scales(checkpoint, expected, block)
    _check_names(directory, config, checkpoint, expected)
    dtypes = _check_shapes_and_dtypes(checkpoint, expected, scales)
    shapes = parameter_shapes(config)
    arrays: dict[str, np.ndarray] = {}
    for name, location in expected.items():
        tensor = checkpoint.tensors[name]
        _check_finite(checkpoint, name, tensor)
        if name in scales:
            tensor = dequantize_tensor(tensor, scales[name], block)
            _check_finite(checkpoint, name, tensor)
        if location.path not in arrays:
            arrays[location.path] = np.empty(shapes[location.path], dtypes[location.path])
        arrays[location.path][location.index] = tensor
    _check_tied_head(config, checkpoint)
    return config, nest(arrays)


def check_tensor_count(source: str | Path, config: PolicyConfig, count: int) -> None:
    """Refuses a config whose tensors would be far too many to list, let alone to hold.

    Raises:
        UserError: the file holds fewer tensors than the config has layers and experts.
    """
    experts = 0 if config.experts is None else config.experts.count * len(config.sparse_layers)
    if count < config.num_layers + experts:
        raise UserError(
            f"{source}: holds {count} tensors, too few for the {config.num_layers} layers and "
            f"{experts} experts of its config"
        )


def nest(flat: dict[str, Any]) -> dict[str, Any]:
    """Turns `{"layers.q_proj.weight": x}` into `{"layers": {"q_proj": {"weight": x}}}`."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, leaf = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The inverse of `nest`; a None leaf (a tied lm_head) is left out."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        elif value is not None:
            flat[f"{prefix}{key}"] = value
    return flat


def listing(names: list[str]) -> str:
    """The first few names of a list and the count of the rest."""
    shown = ", ".join(names[:_LISTED])
    return shown if len(names) <= _LISTED else f"{shown} and {len(names) - _LISTED} more"


def _check_names(
    directory: Path, config: PolicyConfig, checkpoint: Checkpoint, expected: dict[str, Location]
) -> None:
    head = hf_name("lm_head.weight")
    missing = [name for name in expected if name not in checkpoint.tensors]
    allowed = {head} if config.tie_word_embeddings else set()
    unexpected = [
        name
        for name in checkpoint.tensors
        if name not in expected and name not in allowed and not is_ignored(name)
    ]
    faults = []
    if missing:
        faults.append(f"{len(missing)} tensors are missing: {listing(missing)}")
    if unexpected:
        faults.append(f"{len(unexpected)} tensors are unexpected: {listing(unexpected)}")
    if missing == [head]:
        faults.append("if the embeddings are tied, config.json must say tie_word_embeddings: true")
    elif faults:
        faults.append("check that config.json describes these weights")
    if faults:
        raise UserError(f"{directory}: {'; '.join(faults)}")


def _check_shapes_and_dtypes(
    checkpoint: Checkpoint, expected: dict[str, Location], scales: Collection[str]
) -> dict[str, np.dtype]:
    """The dtype of each parameter once it is read. Beside FP8 layers, which become float32, others
    may be narrower."""
    widened = {expected[name].path for name in scales}
    dtypes: dict[str, np.dtype] = {}
    faults: dict[str, str] = {}
    for name, location in expected.items():
        tensor = checkpoint.tensors[name]
        dtype = tensor.dtype
        if name in scales or (
            location.path in widened and dtype in _WEIGHT_DTYPES and dtype.itemsize < 4
        ):
            dtype = np.dtype(np.float32)
        if tensor.shape != location.shape:
            faults[name] = (
                f"has shape {list(tensor.shape)}, config.json implies {list(location.shape)}"
            )
        elif dtype not in _WEIGHT_DTYPES:
            faults[name] = (
                f"has dtype {dtype}, and no scale belongs to it; use a bf16, float16, float32 or "
                "block-FP8 checkpoint"
            )
        elif dtypes.setdefault(location.path, dtype) != dtype:
            faults[name] = f"has dtype {dtype}, earlier layers have {dtypes[location.path]}"
    if faults:
        file = checkpoint.files[next(iter(faults))]
        raise UserError(
            f"{file}: tensor {listing([f'{name} {fault}' for name, fault in faults.items()])}"
        )
    return dtypes


def _check_finite(checkpoint: Checkpoint, name: str, tensor: np.ndarray) -> None:
    if bad := count_non_finite(tensor):
        raise UserError(
            f"{checkpoint.files[name]}: tensor {name} holds {bad} non-finite values of "
            f"{tensor.size}; the checkpoint is damaged"
        )


def _check_tied_head(config: PolicyConfig, checkpoint: Checkpoint) -> None:
    head, embedding = hf_name("lm_head.weight"), hf_name("embed_tokens.weight")
    if not config.tie_word_embeddings or head not in checkpoint.tensors:
        return
    if not np.array_equal(checkpoint.tensors[head], checkpoint.tensors[embedding]):
        raise UserError(
            f"{checkpoint.files[head]}: tensor {head} differs from {embedding}, "
            f"but config.json says tie_word_embeddings: true; set it to false or drop the tensor"
        )
