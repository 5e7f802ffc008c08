"""Policy arrays -> Hugging Face directory that transformers and vLLM load."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from fp8rl_jax.errors import UserError
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.finite import count_non_finite
from fp8rl_jax.models.hf_names import hf_tensors, parameter_shapes
from fp8rl_jax.models.load import flatten, listing
from fp8rl_jax.models.safetensors_io import write_safetensors

EXPORT_DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}

# What a tokenizer consists of, in the spellings of transformers 4 and 5.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


def export_policy(
    directory: str | Path,
    config: PolicyConfig,
    arrays: dict[str, Any],
    dtype: str = "bfloat16",
    tokenizer_from: str | Path | None = None,
) -> Path:
    """Writes model.safetensors, config.json, generation_config.json and the tokenizer's files.

    Everything is written beside its final name first and moved when complete, the weights first: a full disk leaves an
    earlier export in `directory` as it was. Other files in the directory are not touched.

    Args:
        directory: made when it isn't there.
        config: the policy's config.
        arrays: nested as `load_policy_arrays` gives them, [L, ...] for layers, any float dtype.
        dtype: "bfloat16" (rounded to nearest even) or "float32".
        tokenizer_from: a directory whose tokenizer files, and generation_config.json, are copied where they exist.

    Returns:
        `directory`.

    Raises:
        UserError: arrays that are missing, unexpected or misshapen; a tensor that is not finite, before or after the
            conversion to `dtype`; a dtype that is not exported; a directory that cannot be written.
    """
    directory = Path(directory)
    if dtype not in EXPORT_DTYPES:
        raise UserError(f"cannot export dtype {dtype!r}; choose one of {', '.join(EXPORT_DTYPES)}")
    tensors = _hf_arrays(directory, config, flatten(arrays), EXPORT_DTYPES[dtype])
    generation = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
        "pad_token_id": config.pad_token_id,
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".export-", dir=directory) as staging_name:
            staging = Path(staging_name)
            write_safetensors(staging / "model.safetensors", tensors)
            _write_json(staging / "config.json", config.to_hf(dtype))
            _write_json(staging / "generation_config.json", {k: v for k, v in generation.items() if v is not None})
            if tokenizer_from is not None:
                _copy(Path(tokenizer_from), staging)
            for name in sorted(os.listdir(staging), key=lambda name: name != "model.safetensors"):
                os.replace(staging / name, directory / name)
    except OSError as error:
        raise UserError(f"{directory}: cannot be written ({error.strerror}); choose another place") from None
    return directory


def _hf_arrays(
    directory: Path, config: PolicyConfig, flat: dict[str, np.ndarray], dtype: np.dtype
) -> dict[str, np.ndarray]:
    shapes = parameter_shapes(config)
    if missing := sorted(shapes.keys() - flat.keys()):
        raise UserError(f"{directory}: not exported; parameters are missing: {listing(missing)}")
    if unexpected := sorted(flat.keys() - shapes.keys()):
        raise UserError(f"{directory}: not exported; parameters are unexpected: {listing(unexpected)}")
    for path, shape in shapes.items():
        if flat[path].shape != shape:
            raise UserError(
                f"{directory}: not exported; parameter {path} has shape {list(flat[path].shape)}, "
                f"the config implies {list(shape)}"
            )
    tensors = {}
    for name, location in hf_tensors(config).items():
        source = flat[location.path][location.index]
        if bad := count_non_finite(source):
            raise UserError(f"{directory}: not exported; tensor {name} holds {bad} non-finite values")
        tensors[name] = _cast(source, dtype)
        if bad := count_non_finite(tensors[name]):
            raise UserError(f"{directory}: not exported; {bad} values of tensor {name} overflow {dtype}")
    return tensors


def _cast(source: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if source.dtype == dtype:
        return source
    with np.errstate(over="ignore"):  # an overflow is reported with the tensor's name by the caller
        return source.astype(dtype)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _copy(source: Path, target: Path) -> None:
    for name in (*TOKENIZER_FILES, "generation_config.json"):
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
