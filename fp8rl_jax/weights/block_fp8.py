"""FP8 checkpoints: linears in e4m3 with scales beside them.

A linear `X.weight` [out, in] is stored as e4m3, and its scales beside it in `X.weight_scale_inv` or
`X.weight_scale`. In spite of the first name both multiply: a weight is its stored value times its
scale. How many values share a scale is config.json's `quantization_config` to say, in the words of
whoever wrote the checkpoint (`parse_quantization`); all of them come down to the rows and columns
of a block:

    128 x 128        DeepSeek-V3, Qwen3-FP8, and what is written here
    1 x all columns  a scale for each output channel: compressed-tensors (llm-compressor), FBGEMM
    all x all        a scale for the tensor: AutoFP8, Ministral, ModelOpt, compressed-tensors
    1 x 32           MXFP8 of compressed-tensors

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

import re
from collections.abc import Callable, Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from fp8rl_jax.config.formats import TensorFormat
from fp8rl_jax.errors import UserError
from fp8rl_jax.json_fields import Fields, read_json
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.tensors import of_kind, parameter_shapes
from fp8rl_jax.weights.hf_names import Location, Stored, hf_name
from fp8rl_jax.weights.safetensors_io import Checkpoint, count_non_finite

BLOCK = (128, 128)  # of what is written
_FORMAT = TensorFormat("e4m3", BLOCK)
SCALE_SUFFIX = "_scale_inv"

Block = tuple[int | None, int | None]
"""(rows, columns) that share a scale; None is all of them."""
_WHOLE: Block = (None, None)
_CHANNEL: Block = (1, None)

_E4M3 = np.dtype(_FORMAT.element_type.dtype)
_E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
_SCALE_DTYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), _E8M0)
_KEYS = ("quantization_config", "compression_config")  # the second is compressed-tensors' old one


def read_quantization(directory: str | Path) -> Block | None:
    """Read how a directory's weights are stored, from config.json or ModelOpt's
    hf_quant_config.json.

    Raises:
        UserError: whatever `parse_quantization` refuses, and two files that differ.
    """
    config, beside = Path(directory) / "config.json", Path(directory) / "hf_quant_config.json"
    block = parse_quantization(values := read_json(config))
    if not beside.is_file():
        return block
    quantization = Fields(read_json(beside)).object("quantization").data
    try:
        stated = parse_quantization(
            {"quantization_config": {"quant_method": "modelopt", **quantization}}
        )
    except UserError as error:
        raise UserError(f"{beside}: {error}") from None
    if any(values.get(key) for key in _KEYS) and block != stated:
        raise UserError(
            f"{beside}: contradicts the quantization_config of config.json; keep the one that says "
            "how the weights are stored"
        )
    return stated


def parse_quantization(config: dict[str, Any]) -> Block | None:
    """Read from a config.json's values which weights share a scale.

    Returns:
        The block; None for a plain checkpoint.

    Raises:
        UserError: another method than FP8, naming it, or a key of it that would change the numbers.
    """
    given = [key for key in _KEYS if config.get(key)]
    if not given:
        return None
    if len(given) > 1 and config[given[0]] != config[given[1]]:
        raise UserError(
            f"{given[0]} and {given[1]} differ; keep the one that says how the weights are stored"
        )
    fields = Fields(config).object(given[0])
    method = fields.data.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        raise _not_read(fields, f"quant_method {method!r}")
    return _METHODS[method](fields)


def _not_read(fields: Fields, what: str) -> UserError:
    return UserError(
        f"{fields.prefix}{what} is not read; use the bf16 or float32 checkpoint, or one in FP8 "
        f"(e4m3; quant_method {', '.join(_METHODS)})"
    )


def _one_of(fields: Fields, key: str, default: Any, *others: Any) -> Any:
    """The value of a key that has few; absent or null it is `default`."""
    value = fields.data.get(key)
    if value is not None and value not in (default, *others):
        raise _not_read(fields, f"{key} {value!r}")
    return default if value is None else value


def _block(fields: Fields, key: str) -> Block:
    sizes = fields.integers(key)
    if len(sizes) != 2 or min(sizes) < 1:
        raise UserError(
            f"{fields.prefix}{key} must be two positive sizes, got {fields.data.get(key)!r}"
        )
    return sizes[0], sizes[1]


def _of_fp8(fields: Fields) -> Block:
    _one_of(fields, "fmt", "e4m3")
    _one_of(fields, "expert_dtype", "fp8")
    _one_of(fields, "activation_scheme", "dynamic", "static")
    _one_of(fields, "scale_fmt", "float", "ue8m0")
    if "weight_block_size" not in fields.data:
        return BLOCK  # as transformers has it; a single number is the tensor's anyway
    return (
        _WHOLE if fields.data["weight_block_size"] is None else _block(fields, "weight_block_size")
    )


def _of_modelopt(fields: Fields) -> Block | None:
    if (algorithm := fields.data.get("quant_algo")) is None:
        return None  # of the KV cache alone
    if algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
        return _CHANNEL
    if algorithm != "FP8":
        raise _not_read(fields, f"quant_algo {algorithm!r}")
    return _WHOLE


def _of_compressed_tensors(fields: Fields) -> Block | None:
    _one_of(fields.object("sparsity_config"), "format", "dense")
    if fields.object("transform_config").object("config_groups").data:
        raise _not_read(fields, "transform_config")
    groups, blocks = fields.object("config_groups"), {}
    for name in groups.data:
        group = groups.object(name)
        weights = group.object("weights")
        if not weights.data:
            continue
        container = group if group.data.get("format") is not None else fields
        form = container.data.get("format")
        if form not in ("float-quantized", "naive-quantized", "mxfp8-quantized"):
            raise _not_read(container, f"format {form!r}")
        if weights.data.get("num_bits", 8) != 8 or weights.data.get("type") != "float":
            raise _not_read(
                weights, f"type {weights.data.get('type')!r} in {weights.data.get('num_bits')} bits"
            )
        if not weights.boolean("symmetric", default=True):
            raise _not_read(weights, "symmetric false")
        blocks[name] = _compressed_block(weights)
    if not blocks:
        return None  # activations or the KV cache alone
    first, *others = blocks
    if differing := [name for name in others if blocks[name] != blocks[first]]:
        raise UserError(
            f"{groups.prefix}{first} and {differing[0]} store weights in blocks of "
            f"{in_words(blocks[first])} and of {in_words(blocks[differing[0]])}; only one form "
            "in a checkpoint is read"
        )
    return blocks[first]


def _compressed_block(weights: Fields) -> Block:
    group = weights.integer("group_size", default=None)
    implied = "tensor" if group is None else "channel" if group == -1 else "group"
    strategy = _one_of(weights, "strategy", implied, "tensor", "channel", "group", "block")
    if strategy == "block":
        if old := re.fullmatch(r"(\d+)x(\d+)", str(weights.data.get("block_structure"))):
            weights = Fields({"block_structure": [*map(int, old.groups())]}, weights.prefix)
        return _block(weights, "block_structure")
    if strategy == "group" and (group is None or group < 1):
        raise UserError(f"{weights.prefix}group_size must be positive, got {group}")
    return {"tensor": _WHOLE, "channel": _CHANNEL, "group": (1, group)}[strategy]


_METHODS: dict[str, Callable[[Fields], Block | None]] = {
    "fp8": _of_fp8,
    "fbgemm_fp8": lambda fields: _CHANNEL,
    "compressed-tensors": _of_compressed_tensors,
    "modelopt": _of_modelopt,
}


def in_words(block: Block) -> str:
    """Write a block as "128 x 128", "1 x all"."""
    return " x ".join("all" if side is None else str(side) for side in block)


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
        "weight_block_size": list(BLOCK),
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
    checkpoint: Checkpoint, expected: Mapping[str, Stored], block: Block | None
) -> tuple[Checkpoint, dict[str, np.ndarray]]:
    """Take the scales out of a checkpoint.

    Args:
        checkpoint: of an FP8 model, or of a plain one (`block` None), which is given back as it is.
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
    if block is None:
        return checkpoint, {}
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
    return name + SCALE_SUFFIX, f"{name}_scale", f"{stem}.scale", f"{stem}.qscale_weight"


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


def without(checkpoint: Checkpoint, names: Collection[str]) -> Checkpoint:
    """Leave tensors out of a checkpoint."""
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
        if name in of_kind("linear", "experts") and any(
            size % side for size, side in zip(shape[-2:], BLOCK, strict=True)
        ):
            unaligned.append(f"{name} {list(shape[-2:])}")
    return unaligned


def _name(path: str) -> str:
    return path.removeprefix("layers.").removesuffix(".weight")
