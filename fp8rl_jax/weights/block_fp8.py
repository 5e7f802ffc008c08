"""Block-FP8 checkpoints, in the form of DeepSeek-V3 and Qwen3-FP8 that vLLM, SGLang and
transformers read.

A linear `X.weight` [out, in] is stored as e4m3, with one scale for each 128 x 128 block beside it
in `X.weight_scale_inv` [ceil(out / 128), ceil(in / 128)]. In spite of its name the scale
multiplies: a weight is its stored value times the scale of its block. `quantization_config` in
config.json says so. Embeddings, lm_head, norms, biases and routers stay bf16.

What is written has the bits that the rollout computes with: the library's one quantizer, on the
weight as it is given, which is the master rounded to the compute dtype (in float32 the master
itself). Of bf16 weights, read back and quantized again it has the same bits once more. The largest
element of a block is 448 scales, which rounds to the bf16 weight that it came from, so that the
scale is found again (of float32 weights it may differ in its last bit); and rounding to bf16 moves
a value by at most 2**-9 of itself, while the nearest border between two e4m3 values is 2**-5 away.
Neither holds for scales of another rule
(powers of two, bf16 scales as in Qwen3-FP8, or blocks whose largest weight is below 448 * 2**-126):
such a checkpoint is read exactly, but requantizing moves it.

Other readers want sizes that the blocks divide. vLLM and SGLang stack q on k on v, and gate on up,
and refuse a q, k or gate whose rows are no multiple of 128; transformers 5.23 takes rows / scale
rows for the block, which is 128 only then.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from fp8rl_jax.config.formats import TensorFormat
from fp8rl_jax.errors import UserError
from fp8rl_jax.json_fields import Fields
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.tensors import of_kind, parameter_shapes
from fp8rl_jax.weights.hf_names import Location, hf_name
from fp8rl_jax.weights.safetensors_io import Checkpoint, count_non_finite

_BLOCK = 128
_FORMAT = TensorFormat("e4m3", (_BLOCK, _BLOCK))
SCALE_SUFFIX = "_scale_inv"

_E4M3 = np.dtype(_FORMAT.element_type.dtype)
_SCALE_DTYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))


def parse_quantization(config: dict[str, Any]) -> tuple[int, int] | None:
    """Read the (rows, columns) that share a scale from config.json's `quantization_config`.

    None for a plain checkpoint.

    Raises:
        UserError: another method than block-FP8, or a key of it that would change the numbers.
    """
    if not config.get("quantization_config"):
        return None
    fields = Fields(config).object("quantization_config")
    stored = {
        key: fields.data.get(key, default)
        for key, default in (("quant_method", None), ("fmt", "e4m3"))
    }
    if stored != {"quant_method": "fp8", "fmt": "e4m3"}:
        raise UserError(
            f"quantization_config of quant_method {stored['quant_method']!r} and fmt "
            f"{stored['fmt']!r} is not read; "
            f"use the bf16 or float32 checkpoint, or one of 'fp8' in 'e4m3' blocks"
        )
    if (scheme := fields.data.get("activation_scheme", "dynamic")) != "dynamic":
        raise UserError(
            f"quantization_config.activation_scheme {scheme!r} is not read; only 'dynamic' is"
        )
    block = fields.integers("weight_block_size")
    if len(block) != 2 or min(block) < 1:
        raise UserError(
            "quantization_config.weight_block_size must be two positive sizes, got "
            f"{fields.data.get('weight_block_size')!r}; "
            f"FP8 with one scale for each tensor is not read"
        )
    return block[0], block[1]


def quantization_config(config: PolicyConfig) -> dict[str, Any]:
    """Return the `quantization_config` of an export.

    Routers are linears too: they are named one by one, as Qwen3-FP8 does.
    """
    routers = [
        hf_name("layers.router.weight", layer).removesuffix(".weight")
        for layer in config.sparse_layers
    ]
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": _FORMAT.element,
        "weight_block_size": [_BLOCK, _BLOCK],
        "modules_to_not_convert": ["lm_head", *routers],
    }


def is_quantized_linear(location: Location) -> bool:
    """Say whether a tensor is one of the linears that block-FP8 checkpoints quantize."""
    return location.layer is not None and _name(location.path) in of_kind("linear", "experts")


def quantize_tensor(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantize a weight to e4m3 with a scale for each block, as the rollout does.

    Takes a finite weight [out, in] of any float dtype; returns e4m3 values [out, in] and float32
    scales [ceil(out / 128), ceil(in / 128)], the bits that `precision.quantize` gives the rollout.
    """
    q = quantizer()(weight)
    return np.asarray(q.values), np.asarray(q.scales)


@cache
def quantizer() -> Any:
    """Return what makes a QTensor of a weight, compiled as a weight sync is, once for each
    shape."""
    import jax

    from fp8rl_jax.precision import quantize

    return jax.jit(lambda weight: quantize(weight, _FORMAT))


def dequantize_tensor(values: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Multiply values by the scales of their blocks: float32 [out, in]; overflow is an infinity."""
    full = scales.astype(np.float32)
    for axis, (size, side) in enumerate(zip(values.shape, block, strict=True)):
        full = np.repeat(full, side, axis=axis) if full.shape[axis] > 1 else full
        full = full[(slice(None),) * axis + (slice(size),)]
    with np.errstate(over="ignore"):
        return values.astype(np.float32) * full


def split_scales(
    checkpoint: Checkpoint, expected: dict[str, Location], block: tuple[int, int] | None
) -> tuple[Checkpoint, dict[str, np.ndarray]]:
    """Take the scales out of a checkpoint.

    Args:
        checkpoint: of a block-FP8 model, or of a plain one (`block` None), which is given back as
            it is.
        expected: the tensors of the model, by name.
        block: (rows, columns) that share a scale.

    Returns:
        The checkpoint without its scales, and the scales by the name of the tensor that each
        belongs to. Linears that the checkpoint keeps in a wider dtype have none.

    Raises:
        UserError: naming file and tensor: an FP8 linear without a scale, a scale of a wrong shape
            or dtype, one that is not finite, one of a tensor that is not FP8.
    """
    if block is None:
        return checkpoint, {}
    scales: dict[str, np.ndarray] = {}
    for name, location in expected.items():
        weight = checkpoint.tensors.get(name)
        if (
            not is_quantized_linear(location)
            or weight is None
            or weight.dtype != _E4M3
            or weight.shape != location.shape
        ):
            continue  # the loader reports what is missing or misshapen
        scale_name = name + SCALE_SUFFIX
        if scale_name not in checkpoint.tensors:
            raise UserError(
                f"{checkpoint.files[name]}: tensor {name} is FP8, but its scale {scale_name} is "
                "missing"
            )
        scales[name] = _checked_scale(checkpoint, scale_name, weight.shape, block)
    taken = {name + SCALE_SUFFIX for name in scales}
    stray = [
        name for name in checkpoint.tensors if name.endswith(SCALE_SUFFIX) and name not in taken
    ]
    if stray:
        raise UserError(
            f"{checkpoint.files[stray[0]]}: tensor {stray[0]} is the scale of a tensor that is "
            "not an FP8 linear"
        )
    return _without(checkpoint, taken), scales


def _checked_scale(
    checkpoint: Checkpoint, name: str, shape: tuple[int, ...], block: tuple[int, int]
) -> np.ndarray:
    scale, file = checkpoint.tensors[name], checkpoint.files[name]
    blocks = tuple(-(-size // side) for size, side in zip(shape, block, strict=True))
    if scale.shape != blocks:
        raise UserError(
            f"{file}: tensor {name} has shape {list(scale.shape)}; a weight {list(shape)} in "
            f"blocks of {list(block)} "
            f"needs {list(blocks)}"
        )
    if scale.dtype not in _SCALE_DTYPES:
        raise UserError(
            f"{file}: tensor {name} has dtype {scale.dtype}; scales must be float32 or bfloat16"
        )
    if bad := count_non_finite(scale):
        raise UserError(
            f"{file}: tensor {name} holds {bad} non-finite scales of {scale.size}; the "
            "checkpoint is damaged"
        )
    return scale


def _without(checkpoint: Checkpoint, names: Collection[str]) -> Checkpoint:
    return Checkpoint(
        {name: tensor for name, tensor in checkpoint.tensors.items() if name not in names},
        {name: file for name, file in checkpoint.files.items() if name not in names},
    )


def unaligned_linears(config: PolicyConfig) -> list[str]:
    """List the linears with a side that is no multiple of 128, such as "q_proj [576, 576]".

    Other readers may refuse these.
    """
    unaligned = []
    for path, shape in parameter_shapes(config).items():
        name = _name(path)
        if name in of_kind("linear", "experts") and any(size % _BLOCK for size in shape[-2:]):
            unaligned.append(f"{name} {list(shape[-2:])}")
    return unaligned


def _name(path: str) -> str:
    return path.removeprefix("layers.").removesuffix(".weight")
