"""Tiny Hugging Face directories and GGUF files, generated."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import safetensors.numpy

from fp8rl_jax.models.config import ExpertsConfig, LatentConfig, PolicyConfig
from fp8rl_jax.models.policy import Policy
from fp8rl_jax.models.rope import LinearRopeScaling, YarnRopeScaling
from fp8rl_jax.tokenizers.tokenizer import HFTokenizer, load_tokenizer
from fp8rl_jax.weights.hf_config import config_json
from fp8rl_jax.weights.hf_names import hf_tensors

LLAMA = PolicyConfig(
    architecture="llama",
    vocab_size=272,
    hidden_size=64,
    intermediate_size=96,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    tie_word_embeddings=True,
    eos_token_ids=(258,),
)
QWEN3 = PolicyConfig(
    architecture="qwen3",
    vocab_size=40,
    hidden_size=48,
    intermediate_size=80,
    num_layers=2,
    num_heads=3,
    num_kv_heads=1,
    head_dim=32,
)
MISTRAL = PolicyConfig(
    architecture="mistral",
    vocab_size=40,
    hidden_size=48,
    intermediate_size=80,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    sliding_window=4,
)
QWEN2 = dataclasses.replace(
    MISTRAL, architecture="qwen2", sliding_window=None, tie_word_embeddings=True
)
# layers with experts, without, and with them again; 5 experts are no multiple of anything
MOE = PolicyConfig(
    architecture="qwen3_moe",
    vocab_size=40,
    hidden_size=48,
    intermediate_size=80,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    experts=ExpertsConfig(
        count=5, per_token=2, intermediate_size=24, normalize=True, dense_layers=(1,)
    ),
)
# a pattern of three, cut short: layer 2 of 5 attends fully; nothing has its usual value
GEMMA = PolicyConfig(
    architecture="gemma3_text",
    vocab_size=40,
    hidden_size=48,
    intermediate_size=80,
    num_layers=5,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rope_theta=50000.0,
    rope_scaling=LinearRopeScaling(8.0),
    tie_word_embeddings=True,
    sliding_window=4,
    full_attention_layers=(2,),
    query_pre_attn_scalar=24,
    local_rope_theta=500.0,
)
# 8 experts in 4 groups of which 2 are chosen from; YaRN keeps, blends and stretches what is rotated
GLM = PolicyConfig(
    architecture="glm4_moe",
    vocab_size=40,
    hidden_size=48,
    intermediate_size=80,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    rope_scaling=YarnRopeScaling(
        4.0, original_max_position_embeddings=64, beta_fast=8.0, beta_slow=0.5
    ),
    experts=ExpertsConfig(
        count=8,
        per_token=3,
        intermediate_size=24,
        normalize=True,
        dense_layers=(0,),
        scoring="sigmoid",
        groups=4,
        groups_per_token=2,
        scale=2.5,
        shared=2,
    ),
    partial_rotary_factor=0.5,
    attention_bias=True,
    use_qk_norm=True,
)

# no two widths of latent attention are equal, and its norms have another eps than the others
DEEPSEEK = PolicyConfig(
    architecture="deepseek_v3",
    vocab_size=40,
    hidden_size=48,
    intermediate_size=80,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    head_dim=24,
    rms_norm_eps=1e-3,
    rope_theta=10000.0,
    rope_scaling=YarnRopeScaling(
        4.0,
        original_max_position_embeddings=64,
        beta_fast=8.0,
        beta_slow=0.5,
        mscale=0.7,
        mscale_all_dim=1.0,
    ),
    experts=dataclasses.replace(GLM.experts, shared=1),
    latent=LatentConfig(rank=32, rotary_dim=8, value_dim=20, query_rank=40),
)


def random_tensors(
    config: PolicyConfig, dtype=ml_dtypes.bfloat16, seed: int = 0
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(size=place.shape).astype(dtype)
        for name, place in hf_tensors(config).items()
    }


def policy_arrays(policy: Policy) -> dict[str, np.ndarray]:
    """The arrays of a plain policy, by the paths of `parameter_shapes`."""
    top = {"embed_tokens": policy.embed_tokens, "norm": policy.norm, "lm_head": policy.lm_head}
    layers = {f"layers.{name}": weight for name, weight in policy.stack.tensors().items()}
    return {f"{name}.weight": np.asarray(x.value) for name, x in (top | layers).items() if x}


def write_model(directory: Path, config: PolicyConfig, tensors: dict[str, np.ndarray]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_json(config)))
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")
    return directory


def write_sharded(directory: Path, config: PolicyConfig, tensors: dict[str, np.ndarray]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_json(config)))
    names = list(tensors)
    weight_map = {}
    for shard, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-0000{shard}-of-00002.safetensors"
        safetensors.numpy.save_file({name: tensors[name] for name in part}, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return directory


def byte_level_vocabulary() -> list[str]:
    """GPT-2's 256 printable stand-ins for bytes, printable bytes first."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [chr(b) for b in printable] + [chr(0x100 + i) for i in range(256 - len(printable))]


def gguf_shapes(config: PolicyConfig) -> dict[str, tuple[int, ...]]:
    """llama.cpp's names of a dense model's tensors, and their shapes."""
    hidden, inner, q, kv = (
        config.hidden_size,
        config.intermediate_size,
        config.q_size,
        config.kv_size,
    )
    layer = {
        "attn_q.weight": (q, hidden),
        "attn_k.weight": (kv, hidden),
        "attn_v.weight": (kv, hidden),
        "attn_output.weight": (hidden, q),
        "ffn_gate.weight": (inner, hidden),
        "ffn_up.weight": (inner, hidden),
        "ffn_down.weight": (hidden, inner),
        "attn_norm.weight": (hidden,),
        "ffn_norm.weight": (hidden,),
    }
    if config.architecture == "qwen2":
        layer |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
    if config.architecture == "qwen3":
        layer |= {
            "attn_q_norm.weight": (config.head_dim,),
            "attn_k_norm.weight": (config.head_dim,),
        }
    shapes = {"token_embd.weight": (config.vocab_size, hidden), "output_norm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        shapes["output.weight"] = (config.vocab_size, hidden)
    return shapes | {
        f"blk.{i}.{name}": shape for i in range(config.num_layers) for name, shape in layer.items()
    }


def gguf_tensors(config: PolicyConfig = LLAMA) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        name: rng.normal(size=shape).astype(np.float32)
        for name, shape in gguf_shapes(config).items()
    }


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray],
    types: dict[str, gguf.GGMLQuantizationType] | None = None,
    architecture: str | None = None,
    pre: str = "smollm",
    chat_template: str | None = "{{ messages[0].content }}",
    config: PolicyConfig = LLAMA,
    merges: tuple[str, ...] = ("Ġ t", "h e", "Ġt he", "5 7"),
    end_of_turn: int | None = None,
) -> Path:
    """`config` as a GGUF: `tensors` under GGUF names, float32; `types` gives the block format of
    some, where uint8 are blocks."""
    writer = gguf.GGUFWriter(path, architecture or config.architecture)
    writer.add_context_length(512)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_rope_freq_base(100000.0)
    if config.architecture == "llama":
        writer.add_rope_dimension_count(config.head_dim)
    if config.architecture == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = control + byte_level_vocabulary() + [merge.replace(" ", "") for merge in merges]
    tokens += [f"<|reserved_{i}|>" for i in range(config.vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(
        [3 if token.startswith("<|") and token.endswith("|>") else 1 for token in tokens]
    )
    writer.add_token_merges(list(merges))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    if end_of_turn is not None:
        writer.add_eot_token_id(end_of_turn)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    for name, values in tensors.items():
        kind = (types or {}).get(name)
        if kind is None:
            writer.add_tensor(name, values.astype(np.float32))
        else:
            blocks = (
                values
                if values.dtype == np.uint8
                else gguf.quants.quantize(values.astype(np.float32), kind)
            )
            writer.add_tensor(name, blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tokenizer_of(directory: Path, vocab_size: int | None = None) -> HFTokenizer:
    """The tokenizer of a directory that has one."""
    tokenizer = load_tokenizer(directory, vocab_size)
    assert tokenizer is not None
    return tokenizer
