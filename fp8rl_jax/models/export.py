"""Policy arrays -> Hugging Face directory that transformers, vLLM and SGLang load."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from fp8rl_jax.errors import UserError
from fp8rl_jax.models.block_fp8 import (
    SCALE_SUFFIX,
    is_quantized_linear,
    quantization_config,
    quantize_tensor,
)
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.finite import count_non_finite
from fp8rl_jax.models.hf_names import Location, hf_tensors, parameter_shapes
from fp8rl_jax.models.load import flatten, listing
from fp8rl_jax.models.shards import INDEX_FILE, SHARD_BYTES, is_weights_file, write_checkpoint

FP8_BLOCK = "fp8-block"
_BF16 = np.dtype(ml_dtypes.bfloat16)
EXPORT_DTYPES = {
    "bfloat16": _BF16,
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    FP8_BLOCK: _BF16,
}

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
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Writes the weights, config.json, generation_config.json and the tokenizer's files.

    Everything is written beside its final name first and moved when complete, the weights first: a
    full disk leaves an earlier export in `directory` as it was. Weights of an earlier export are
    replaced, other files are not touched.

    Args:
        directory: made when it isn't there.
        config: the policy's config.
        arrays: nested as `load_policy_arrays` gives them, [L, ...] for layers, any float dtype.
        dtype: "bfloat16" or "float16" (rounded to nearest even), "float32", or "fp8-block": linears
            in e4m3 with a scale for each 128 x 128 block and the rest in bfloat16, as `block_fp8`
            says.
        tokenizer_from: a directory whose tokenizer files, and generation_config.json, are copied
            where they exist.
        shard_bytes: weights beyond this size are split over files of about this size.

    Returns:
        `directory`.

    Raises:
        UserError: arrays that are missing, unexpected or misshapen; a tensor that is not finite,
            before or after the conversion to `dtype`; a dtype that is not exported; a directory
            that cannot be written.
    """
    directory = Path(directory)
    if dtype not in EXPORT_DTYPES:
        raise UserError(f"cannot export dtype {dtype!r}; choose one of {', '.join(EXPORT_DTYPES)}")
    flat = flatten(arrays)
    _check_parameters(directory, config, flat)
    generation = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
        "pad_token_id": config.pad_token_id,
    }
    hf_config = config.to_hf("bfloat16" if dtype == FP8_BLOCK else dtype)
    if dtype == FP8_BLOCK:
        hf_config["quantization_config"] = quantization_config(config)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".export-", dir=directory) as staging_name:
            staging = Path(staging_name)
            weights = write_checkpoint(
                staging, _converted(directory, config, flat, dtype), shard_bytes
            )
            _write_json(staging / "config.json", hf_config)
            _write_json(
                staging / "generation_config.json",
                {k: v for k, v in generation.items() if v is not None},
            )
            if tokenizer_from is not None:
                _copy(Path(tokenizer_from), staging)
            for name in sorted(
                os.listdir(staging),
                key=lambda name: (name not in weights, name == INDEX_FILE, name),
            ):
                os.replace(staging / name, directory / name)
            for name in os.listdir(directory):
                if is_weights_file(name) and name not in weights:
                    os.unlink(directory / name)
    except OSError as error:
        raise UserError(
            f"{directory}: cannot be written ({error.strerror}); choose another place"
        ) from None
    return directory


def _check_parameters(directory: Path, config: PolicyConfig, flat: dict[str, np.ndarray]) -> None:
    shapes = parameter_shapes(config)
    if missing := sorted(shapes.keys() - flat.keys()):
        raise UserError(f"{directory}: not exported; parameters are missing: {listing(missing)}")
    if unexpected := sorted(flat.keys() - shapes.keys()):
        raise UserError(
            f"{directory}: not exported; parameters are unexpected: {listing(unexpected)}"
        )
    for path, shape in shapes.items():
        if flat[path].shape != shape:
            raise UserError(
                f"{directory}: not exported; parameter {path} has shape {list(flat[path].shape)}, "
                f"the config implies {list(shape)}"
            )


def _converted(
    directory: Path, config: PolicyConfig, flat: dict[str, np.ndarray], dtype: str
) -> Iterator[dict[str, np.ndarray]]:
    """The file's tensors, one of the policy's at a time: itself, or its FP8 values and their
    scales."""
    for name, location in hf_tensors(config).items():
        tensor = _rounded(
            directory, name, flat[location.path][location.index], EXPORT_DTYPES[dtype]
        )
        yield _stored(name, location, tensor, dtype)


def _stored(name: str, location: Location, tensor: np.ndarray, dtype: str) -> dict[str, np.ndarray]:
    if dtype != FP8_BLOCK or not is_quantized_linear(location):
        return {name: tensor}
    values, scales = quantize_tensor(tensor)
    return {name: values, name + SCALE_SUFFIX: scales}


def _rounded(directory: Path, name: str, source: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if bad := count_non_finite(source):
        raise UserError(f"{directory}: not exported; tensor {name} holds {bad} non-finite values")
    if source.dtype == dtype:
        return source
    with np.errstate(over="ignore"):  # counted next
        rounded = source.astype(dtype)
    if bad := count_non_finite(rounded):
        raise UserError(
            f"{directory}: not exported; {bad} values of tensor {name} overflow {dtype}"
        )
    return rounded


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _copy(source: Path, target: Path) -> None:
    for name in (*TOKENIZER_FILES, "generation_config.json"):
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
