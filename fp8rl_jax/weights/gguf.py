"""GGUF file -> Hugging Face directory: weights dequantized to bf16, config, and tokenizer.

A GGUF is llama.cpp's single file of metadata, tokenizer and block-quantized tensors. Two things
differ from Hugging Face beyond the names: numbers sit on the grid of their block format (say so
beside any quantization error measured on them), and the rows of a Llama's q_proj and k_proj are
permuted, because llama.cpp rotates neighbouring pairs of a head's features there, where Hugging
Face rotates its two halves. Qwen's are as they were.

A key that is absent has llama.cpp's default (its `llama_model::load_hparams`). What the file states
in two places, or once and by default, must agree.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from fp8rl_jax.errors import UserError, listing
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.rope import LinearRopeScaling, RopeScaling, YarnRopeScaling
from fp8rl_jax.models.tensors import parameter_shapes
from fp8rl_jax.tokenizers.gguf_tokenizer import write_tokenizer
from fp8rl_jax.weights.gguf_io import StoredTensor, dequantize, read_gguf
from fp8rl_jax.weights.hf_directory import export_policy
from fp8rl_jax.weights.hf_names import Location, hf_tensors
from fp8rl_jax.weights.safetensors_io import count_non_finite

_ARCHITECTURES = ("llama", "qwen2", "qwen3")  # the same names as in FAMILIES

_LAYER_NAMES = {
    "q_proj": "attn_q.weight",
    "k_proj": "attn_k.weight",
    "v_proj": "attn_v.weight",
    "o_proj": "attn_output.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "gate_proj": "ffn_gate.weight",
    "up_proj": "ffn_up.weight",
    "down_proj": "ffn_down.weight",
    "input_layernorm": "attn_norm.weight",
    "post_attention_layernorm": "ffn_norm.weight",
}
_TOP_NAMES = {
    "embed_tokens": "token_embd.weight",
    "norm": "output_norm.weight",
    "lm_head": "output.weight",
}


def convert_gguf(path: str | Path, directory: str | Path) -> Path:
    """Write a GGUF file as a Hugging Face directory: weights, configs, tokenizer, chat template.

    Args:
        path: a GGUF of a llama, qwen2 or qwen3, in the formats of `gguf_io.BLOCK_FORMATS`.
        directory: where to write; made when it isn't there.

    Returns:
        `directory`.

    Raises:
        UserError: whatever `read_gguf` refuses; another architecture, rope scaling, tokenizer or
            pre-tokenizer, keys that contradict each other or the tensors, tensors that are missing,
            unexpected, misshapen or not finite, a directory that cannot be written.
    """
    path, directory = Path(path), Path(directory)
    metadata, tensors = read_gguf(path)
    try:
        config = _config(metadata, tensors)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    arrays = _policy_arrays(path, config, tensors)
    export_policy(directory, config, arrays)
    write_tokenizer(directory, path, metadata, config.max_position_embeddings)
    return directory


def _config(metadata: dict[str, Any], tensors: dict[str, StoredTensor]) -> PolicyConfig:
    def get(key: str, kind: type = int, default: Any = None) -> Any:
        if type(value := metadata.get(key, default)) is not kind:
            raise UserError(f"the metadata lacks {key}, or it is not one {kind.__name__}")
        return value

    if (name := get("general.architecture", str)) not in _ARCHITECTURES:
        raise UserError(
            f"general.architecture {name!r} is not supported; supported: "
            f"{', '.join(_ARCHITECTURES)}"
        )
    if (parts := get("split.count", default=1)) > 1:
        raise UserError(
            f"split.count {parts}: this is one of {parts} files; join them with llama.cpp's "
            "llama-gguf-split --merge"
        )
    layers = get(f"{name}.block_count")

    def same_in_all_layers(key: str, default: int | None = None) -> int:
        """A number, or a list of one for each layer that are all alike."""
        value = metadata.get(f"{name}.{key}")
        if not isinstance(value, list):
            return get(f"{name}.{key}", default=default)
        if len(value) != layers or len(set(value)) != 1 or type(value[0]) is not int:
            raise UserError(
                f"{name}.{key}: {len(value)} numbers that differ by layer, or are not one for each "
                f"of {layers} layers, are not supported"
            )
        return value[0]

    hidden, heads = get(f"{name}.embedding_length"), same_in_all_layers("attention.head_count")
    share = hidden // max(heads, 1)
    head_dim = get(f"{name}.attention.key_length", default=share)
    for key, implied in (("rope.dimension_count", head_dim), ("attention.value_length", share)):
        if (size := get(f"{name}.{key}", default=implied)) != head_dim:
            stated = "" if f"{name}.{key}" in metadata else " (absent, so that it is this)"
            raise UserError(
                f"{name}.{key} {size}{stated} is not supported beside {name}.attention.key_length "
                f"{head_dim}"
            )
    bos, pad, *ends = (
        metadata.get(f"tokenizer.ggml.{role}_token_id")
        for role in ("bos", "padding", "eos", "eot", "eom")
    )
    if wrong := [
        token for token in (bos, pad, *ends) if token is not None and type(token) is not int
    ]:
        raise UserError(f"tokenizer.ggml.*_token_id must be a token's number, got {wrong[0]!r}")
    end_tokens = tuple(dict.fromkeys(token for token in ends if token is not None))
    if not end_tokens:
        raise UserError("the metadata lacks tokenizer.ggml.eos_token_id: nothing ends an answer")
    return PolicyConfig(
        architecture=name,
        vocab_size=_vocabulary(name, metadata, tensors),
        hidden_size=hidden,
        intermediate_size=same_in_all_layers("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=same_in_all_layers("attention.head_count_kv", default=heads),
        head_dim=head_dim,
        rms_norm_eps=_shortest(get(f"{name}.attention.layer_norm_rms_epsilon", float)),
        rope_theta=_shortest(get(f"{name}.rope.freq_base", float, default=10000.0)),
        rope_scaling=_rope_scaling(name, metadata, tensors, get(f"{name}.context_length")),
        tie_word_embeddings="output.weight" not in tensors,
        max_position_embeddings=get(f"{name}.context_length"),
        bos_token_id=bos,
        eos_token_ids=end_tokens,
        pad_token_id=pad,
    )


def _vocabulary(name: str, metadata: dict[str, Any], tensors: dict[str, StoredTensor]) -> int:
    """Rows of the embedding, which the tokens and `vocab_size` must agree with."""
    if "token_embd.weight" not in tensors:
        raise UserError("tensor token_embd.weight is missing")
    rows = tensors["token_embd.weight"].shape[0]
    tokens, stated = metadata.get("tokenizer.ggml.tokens"), metadata.get(f"{name}.vocab_size", rows)
    for key, size in (
        ("tokenizer.ggml.tokens", len(tokens) if isinstance(tokens, list) else rows),
        (f"{name}.vocab_size", stated),
    ):
        if size != rows:
            raise UserError(f"{key} is of {size} tokens, and token_embd.weight of {rows}")
    return rows


def _rope_scaling(
    name: str, metadata: dict[str, Any], tensors: dict[str, StoredTensor], context_length: int
) -> RopeScaling | None:
    """How frequencies are rescaled: linearly where no type is named, and by 1 where no factor is.

    llama.cpp's YaRN has the borders, ramp and amplitude of Hugging Face's.
    """

    def refuse(what: str) -> UserError:
        return UserError(
            f"rope scaling ({what}) is not read from GGUF; use the Hugging Face directory"
        )

    def number(key: str, default: float) -> float:
        if type(value := metadata.get(f"{name}.rope.{key}", default)) is not float:
            raise UserError(f"{name}.rope.{key} must be one float, got {value!r}")
        return _shortest(value)

    if "rope_freqs.weight" in tensors:
        raise refuse("tensor rope_freqs.weight")
    kind = metadata.get(f"{name}.rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise refuse(f"{name}.rope.scaling.type {kind!r}")
    fixed = {"scaling.attn_factor": 1.0}
    if kind == "yarn":
        fixed |= {"scaling.yarn_ext_factor": 1.0, "scaling.yarn_attn_factor": 1.0}
        fixed |= {"scaling.yarn_log_multiplier": 0.0}
    for key, value in fixed.items():
        if (stated := number(key, value)) != value:
            raise refuse(f"{name}.rope.{key} {stated}")
    factor = number("scaling.factor", number("scale_linear", 0.0))  # the second is the older name
    if kind == "none" or factor in (0.0, 1.0):
        return None
    if kind == "linear":
        return LinearRopeScaling(factor)
    key = f"{name}.rope.scaling.original_context_length"
    if type(original := metadata.get(key, context_length)) is not int:
        raise UserError(f"{key} must be one int, got {original!r}")
    return YarnRopeScaling(
        factor,
        original or context_length,
        beta_fast=number("scaling.yarn_beta_fast", 32.0),
        beta_slow=number("scaling.yarn_beta_slow", 1.0),
    )


def _shortest(value: float) -> float:
    """The decimal that was meant: GGUF holds float32, and 1e-5 should not become
    9.999999747378752e-06."""
    with np.errstate(over="ignore"):  # an infinity is refused with the key's name
        return float(str(np.float32(value)))


def _policy_arrays(
    path: Path, config: PolicyConfig, tensors: dict[str, StoredTensor]
) -> dict[str, np.ndarray]:
    expected = {_gguf_name(location): location for location in hf_tensors(config).values()}
    if missing := [name for name in expected if name not in tensors]:
        raise UserError(f"{path}: {len(missing)} tensors are missing: {listing(missing)}")
    if unexpected := [name for name in tensors if name not in expected]:
        raise UserError(f"{path}: {len(unexpected)} tensors are unexpected: {listing(unexpected)}")
    shapes = parameter_shapes(config)
    arrays: dict[str, np.ndarray] = {}
    for name, location in expected.items():
        if (shape := tensors[name].shape) != location.shape:
            raise UserError(
                f"{path}: tensor {name} has shape {list(shape)}, the metadata implies "
                f"{list(location.shape)}"
            )
    for name, location in expected.items():
        values = _rounded(path, name, tensors[name])
        if config.architecture == "llama" and location.path in (
            "layers.q_proj.weight",
            "layers.k_proj.weight",
        ):
            values = _unpermute(values, config.head_dim)
        if location.path not in arrays:
            arrays[location.path] = np.empty(shapes[location.path], ml_dtypes.bfloat16)
        arrays[location.path][location.index] = values
    return arrays


def _rounded(path: Path, name: str, tensor: StoredTensor) -> np.ndarray:
    with np.errstate(all="ignore"):  # overflows are counted below
        values = dequantize(tensor).astype(ml_dtypes.bfloat16)
    if bad := count_non_finite(values):
        raise UserError(
            f"{path}: tensor {name} holds {bad} non-finite values of {values.size}; the file is "
            "damaged"
        )
    return values


def _unpermute(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorder rows [num_heads * head_dim, in] from llama.cpp's order to Hugging Face's.

    There features 2i and 2i + 1 of a head rotate together, here i and i + head_dim / 2.
    """
    pairs = weight.reshape(-1, head_dim // 2, 2, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _gguf_name(location: Location) -> str:
    parts = location.path.split(".")
    return (
        _TOP_NAMES[parts[0]]
        if location.layer is None
        else f"blk.{location.layer}.{_LAYER_NAMES[parts[1]]}"
    )
