"""FP8 checkpoints: linears in e4m3 with scales beside them.

A linear `X.weight` [out, in] is stored as e4m3, and its scales beside it in `X.weight_scale_inv` or
`X.weight_scale`. In spite of the first name both multiply: a weight is its stored value times its
scale. How many values share a scale is config.json's to say (`layouts`):

    128 x 128        DeepSeek-V3, Qwen3-FP8, and what is written here
    1 x all columns  a scale for each output channel: compressed-tensors (llm-compressor), FBGEMM
    all x all        a scale for the tensor: AutoFP8, Ministral, ModelOpt, compressed-tensors
    1 x 32           MXFP8 of compressed-tensors and ModelOpt

Scales are float32, bfloat16, float16, or powers of two in E8M0: as such, or as their bytes in
uint8. Scales of activations and of the KV cache belong to the run that measured them and are not
read (`hf_names.is_measured_scale`). The methods are those of transformers
(`integrations/finegrained_fp8.py`), compressed-tensors and vLLM.

What is written is the first form, which vLLM, SGLang and transformers read: embeddings, lm_head,
norms, biases and routers stay bf16, and linears have the bits that the rollout computes with: the
library's one quantizer, on the weight as it is given, which is the master rounded to the compute
dtype (in float32 the master itself). Of bf16 weights, read back and quantized again it has the same
bits once more. The largest element of a block is 448 scales, which rounds to the bf16 weight that
it came from, so that the scale is found again (of float32 weights it may differ in its last bit);
and rounding to bf16 moves a value by at most 2**-9 of itself, while the nearest border between two
e4m3 values is 2**-5 away. Neither holds for scales of another rule (powers of two, bf16 scales as
in Qwen3-FP8, other blocks, or blocks whose largest weight is below 448 * 2**-126): such a
checkpoint is read exactly, but requantizing moves it.

Other readers want sizes that the blocks divide. vLLM and SGLang stack q on k on v, and gate on up,
and refuse a q, k or gate whose rows are no multiple of 128; transformers 5.23 takes rows / scale
rows for the block, which is 128 only then.
"""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np

from fp8rl_jax.errors import UserError
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.tensors import of_kind, parameter_shapes
from fp8rl_jax.weights.hf_names import Stored
from fp8rl_jax.weights.layouts import BLOCK, Block, in_words
from fp8rl_jax.weights.safetensors_io import Checkpoint, count_non_finite, without

SCALE_SUFFIX = "_scale_inv"

_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
_SCALE_DTYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), _E8M0)


def dequantize_tensor(values: np.ndarray, scales: np.ndarray, block: Block) -> np.ndarray:
    """Multiply values by the scales of their blocks.

    Args:
        values: [..., out, in].
        scales: float [..., blocks of out, blocks of in], as `split_scales` gives them.
        block: (rows, columns) that share a scale.

    Returns:
        float32 [..., out, in]; overflow is an infinity.
    """
    full = scales.astype(np.float32)
    for axis, side in ((-2, block[0]), (-1, block[1])):
        size = values.shape[axis]
        if side is not None and 1 < full.shape[axis] < size:
            full = np.repeat(full, side, axis=axis).take(range(size), axis=axis)
    with np.errstate(over="ignore"):
        return values.astype(np.float32) * full


def split_scales(
    checkpoint: Checkpoint, expected: Mapping[str, Stored], block: Block
) -> tuple[Checkpoint, dict[str, np.ndarray]]:
    """Take the scales out of a checkpoint.

    Args:
        checkpoint: of an FP8 model.
        expected: the tensors of the model, by name.
        block: (rows, columns) that share a scale. A single number is the whole tensor's, and one
            for each row is the row's, whatever this says, as transformers has it.

    Returns:
        The checkpoint without its scales, and the scales [..., rows, columns] by the name of the
        tensor that each belongs to, one for each block, or for each row where the blocks of two
        matrices in one tensor begin anew with the second. Matrices that the checkpoint keeps in a
        wider dtype have none.

    Raises:
        UserError: naming file and tensor: an FP8 matrix without a scale or with two, a scale of a
            wrong shape or dtype, one that is not finite, one of a tensor that is not FP8.
    """
    scales: dict[str, np.ndarray] = {}
    taken: set[str] = set()
    for name, stored in expected.items():
        weight = checkpoint.tensors.get(name)
        if weight is None or weight.dtype != _E4M3 or not 2 <= weight.ndim == len(stored.shape):
            continue  # the loader reports what is missing or misshapen
        names = _scale_names(name)
        given = [scale for scale in names if scale in checkpoint.tensors]
        if not given:
            raise UserError(
                f"{checkpoint.files[name]}: tensor {name} is FP8, but its scale {names[0]} or "
                f"{names[1]} is missing"
            )
        if len(given) > 1:
            raise UserError(
                f"{checkpoint.files[name]}: tensor {name} has two scales, {given[0]} and "
                f"{given[1]}; keep the one that it is multiplied by"
            )
        scales[name] = _checked_scale(checkpoint, given[0], weight.shape, block, len(stored.places))
        taken.add(given[0])
    stray = [
        name for name in checkpoint.tensors if name.endswith(_SCALE_ENDS) and name not in taken
    ]
    if stray:
        raise UserError(
            f"{checkpoint.files[stray[0]]}: tensor {stray[0]} is the scale of a tensor that is "
            "not an FP8 linear"
        )
    return without(checkpoint, taken), scales


def _scale_names(name: str) -> tuple[str, ...]:
    """The names that a tensor's scale may have, in transformers' reading; all of them multiply."""
    stem = name.removesuffix(".weight")
    fused = () if stem != name else (f"{name}_weight_scale",)  # ModelOpt's, of fused experts
    names = name + SCALE_SUFFIX, f"{name}_scale", f"{stem}.scale", f"{stem}.qscale_weight"
    return *names, *fused


_SCALE_ENDS = (SCALE_SUFFIX, "_scale", ".scale", ".qscale_weight")


def _checked_scale(
    checkpoint: Checkpoint, name: str, shape: tuple[int, ...], block: Block, matrices: int
) -> np.ndarray:
    """The scale of a tensor of `shape`, which holds so many matrices one below the other."""
    scale, file = checkpoint.tensors[name], checkpoint.files[name]
    if scale.dtype == np.uint8:
        scale = scale.view(_E8M0)
    if scale.dtype not in _SCALE_DTYPES:
        raise UserError(
            f"{file}: tensor {name} has dtype {scale.dtype}; scales must be float32, bfloat16, "
            "float16, or E8M0"
        )
    if bad := count_non_finite(scale):
        raise UserError(
            f"{file}: tensor {name} holds {bad} non-finite scales of {scale.size}; the "
            "checkpoint is damaged"
        )
    *leading, rows, columns = shape
    height = rows // matrices
    down, across = block[0] or height, block[1] or columns
    whole = (-(-rows // down) if block[0] else 1, -(-columns // across))
    apart = (matrices * -(-height // down), whole[1])
    if scale.shape in ((), (1,), (1, 1)) and not leading:
        return scale.reshape(1, 1)
    if scale.shape == (*leading, rows, 1) or (scale.shape == (rows,) and not leading):
        return scale.reshape(*leading, rows, 1)
    if whole[1] == 1 and scale.shape == (*leading, whole[0]):
        return scale[..., None]
    if matrices > 1 and scale.shape == (*leading, *apart):
        parts = np.split(scale, matrices, axis=-2)
        return np.concatenate([np.repeat(x, down, axis=-2)[..., :height, :] for x in parts], -2)
    if scale.shape != (*leading, *whole):
        raise UserError(
            f"{file}: tensor {name} has shape {list(scale.shape)}; a weight {list(shape)} in "
            f"blocks of {in_words(block)} needs {[*leading, *whole]}"
        )
    return scale


def unaligned_linears(config: PolicyConfig) -> list[str]:
    """List the linears with a side that is no multiple of 128, such as "q_proj [576, 576]".

    Other readers may refuse these.
    """
    unaligned = []
    for path, shape in parameter_shapes(config).items():
        name = _name(path)
        if name in of_kind("linear", "experts") and any(
            size % side for size, side in zip(shape[-2:], BLOCK, strict=True)
        ):
            unaligned.append(f"{name} {list(shape[-2:])}")
    return unaligned


def _name(path: str) -> str:
    return path.removeprefix("layers.").removesuffix(".weight")
