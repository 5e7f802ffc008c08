"""GGUF file -> Hugging Face directory: weights dequantized to bf16, config, and tokenizer.

A GGUF is llama.cpp's single file of metadata, tokenizer and block-quantized tensors. Two things differ from Hugging
Face beyond the names: numbers sit on the grid of their block format (say so beside any quantization error measured on
them), and the rows of q_proj and k_proj are permuted, because llama.cpp rotates neighbouring pairs of a head's
features where Hugging Face rotates its two halves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from fp8rl_jax.errors import UserError
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.export import export_policy
from fp8rl_jax.models.gguf_tokenizer import write_tokenizer
from fp8rl_jax.models.hf_names import Location, hf_tensors, parameter_shapes
from fp8rl_jax.models.load import listing, nest

_LAYER_NAMES = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_TOP_NAMES = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}


def convert_gguf(path: str | Path, directory: str | Path) -> Path:
    """Writes the Hugging Face directory of a GGUF file: weights, config, generation config, tokenizer, chat template.

    Args:
        path: a GGUF of architecture `llama`, in any block format that the gguf package dequantizes.
        directory: where to write; made when it isn't there.

    Returns:
        `directory`.

    Raises:
        UserError: not a GGUF file, another architecture, rope scaling, tokenizer or pre-tokenizer, tensors that are
            missing, unexpected, misshapen or not finite, a directory that cannot be written.
    """
    path, directory = Path(path), Path(directory)
    metadata, tensors = _open(path)
    config = _config(path, metadata, tensors)
    arrays = _policy_arrays(path, config, tensors)
    export_policy(directory, config, nest(arrays))
    write_tokenizer(directory, path, metadata, config.max_position_embeddings)
    return directory


def _open(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The metadata as plain values, and the tensors by name."""
    import gguf

    if not path.is_file():
        raise UserError(f"{path}: no such GGUF file")
    try:
        reader = gguf.GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, IndexError, TypeError, OverflowError) as error:
        raise UserError(f"{path}: not a GGUF file, or a truncated one ({error})") from None
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


def _config(path: Path, metadata: dict[str, Any], tensors: dict[str, Any]) -> PolicyConfig:
    def get(key: str, kind: type = int, default: Any = None) -> Any:
        if not isinstance(value := metadata.get(key, default), kind):
            raise UserError(f"{path}: the metadata lacks {key}, or it is not one {kind.__name__}")
        return value

    if (architecture := get("general.architecture", str)) != "llama":
        raise UserError(f"{path}: general.architecture {architecture!r} is not supported; only 'llama' is")
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in tensors:
        raise UserError(f"{path}: rope scaling ({scaling}) is not read from GGUF; use the Hugging Face directory")
    if "token_embd.weight" not in tensors:
        raise UserError(f"{path}: tensor token_embd.weight is missing")
    hidden, heads = get("llama.embedding_length"), get("llama.attention.head_count")
    head_dim = get("llama.rope.dimension_count", default=hidden // heads)
    if (key_length := get("llama.attention.key_length", default=head_dim)) != head_dim:
        raise UserError(f"{path}: rotary positions over {head_dim} of {key_length} features are not supported")
    eos = metadata.get("tokenizer.ggml.eos_token_id")
    try:
        return PolicyConfig(
            architecture="llama",
            vocab_size=int(tensors["token_embd.weight"].shape[-1]),
            hidden_size=hidden,
            intermediate_size=get("llama.feed_forward_length"),
            num_layers=get("llama.block_count"),
            num_heads=heads,
            num_kv_heads=get("llama.attention.head_count_kv", default=heads),
            head_dim=head_dim,
            rms_norm_eps=_shortest(get("llama.attention.layer_norm_rms_epsilon", float)),
            rope_theta=_shortest(get("llama.rope.freq_base", float, default=10000.0)),
            tie_word_embeddings="output.weight" not in tensors,
            max_position_embeddings=get("llama.context_length"),
            bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
            eos_token_ids=() if eos is None else (eos,),
            pad_token_id=metadata.get("tokenizer.ggml.padding_token_id"),
        )
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _shortest(value: float) -> float:
    """The decimal that was meant: GGUF holds float32, and 1e-5 should not become 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _policy_arrays(path: Path, config: PolicyConfig, tensors: dict[str, Any]) -> dict[str, np.ndarray]:
    expected = {_gguf_name(location): location for location in hf_tensors(config).values()}
    if missing := [name for name in expected if name not in tensors]:
        raise UserError(f"{path}: {len(missing)} tensors are missing: {listing(missing)}")
    if unexpected := [name for name in tensors if name not in expected]:
        raise UserError(f"{path}: {len(unexpected)} tensors are unexpected: {listing(unexpected)}")
    shapes = parameter_shapes(config)
    arrays: dict[str, np.ndarray] = {}
    for name, location in expected.items():
        values = _dequantize(path, tensors[name])
        if values.shape != location.shape:
            raise UserError(
                f"{path}: tensor {name} has shape {list(values.shape)}, the metadata implies {list(location.shape)}"
            )
        if location.path in ("layers.q_proj.weight", "layers.k_proj.weight"):
            values = unpermute(values, config.head_dim)
        if location.path not in arrays:
            arrays[location.path] = np.empty(shapes[location.path], ml_dtypes.bfloat16)
        arrays[location.path][location.index] = values
    return arrays


def unpermute(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows [num_heads * head_dim, in] from llama.cpp's order (2i, 2i + 1 rotate together) to Hugging Face's (i, i +
    head_dim / 2 rotate together)."""
    pairs = weight.reshape(-1, head_dim // 2, 2, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _gguf_name(location: Location) -> str:
    parts = location.path.split(".")
    if location.layer is None:
        return f"{_TOP_NAMES[parts[0]]}.weight"
    return f"blk.{location.layer}.{_LAYER_NAMES[parts[1]]}.weight"


def _dequantize(path: Path, tensor: Any) -> np.ndarray:
    """float32, in numpy's order of dimensions."""
    import gguf

    try:
        return gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        raise UserError(
            f"{path}: tensor {tensor.name} has type {tensor.tensor_type.name}, which cannot be dequantized; "
            f"use a file in Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, a K-quant, F16, BF16 or F32"
        ) from None
