"""Tiny Hugging Face directories and GGUF files, generated."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import safetensors.numpy

from fp8rl_jax.models.config import ExpertsConfig, PolicyConfig
from fp8rl_jax.models.hf_names import hf_tensors

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
QWEN2 = dataclasses.replace(MISTRAL, architecture="qwen2", sliding_window=None, tie_word_embeddings=True)
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
    experts=ExpertsConfig(count=5, per_token=2, intermediate_size=24, normalize=True, dense_layers=(1,)),
)


def random_tensors(config: PolicyConfig, dtype=ml_dtypes.bfloat16, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=place.shape).astype(dtype) for name, place in hf_tensors(config).items()}


def write_model(directory: Path, config: PolicyConfig, tensors: dict[str, np.ndarray]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config.to_hf()))
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")
    return directory


def write_sharded(directory: Path, config: PolicyConfig, tensors: dict[str, np.ndarray]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config.to_hf()))
    names = list(tensors)
    weight_map = {}
    for shard, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-0000{shard}-of-00002.safetensors"
        safetensors.numpy.save_file({name: tensors[name] for name in part}, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def byte_level_vocabulary() -> list[str]:
    """GPT-2's 256 printable stand-ins for bytes, printable bytes first."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [chr(b) for b in printable] + [chr(0x100 + i) for i in range(256 - len(printable))]


GGUF_LAYER = {
    "attn_q": (64, 64),
    "attn_k": (32, 64),
    "attn_v": (32, 64),
    "attn_output": (64, 64),
    "ffn_gate": (96, 64),
    "ffn_up": (96, 64),
    "ffn_down": (64, 96),
    "attn_norm": (64,),
    "ffn_norm": (64,),
}


def gguf_tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"token_embd.weight": (LLAMA.vocab_size, 64), "output_norm.weight": (64,)}
    shapes |= {f"blk.{i}.{name}.weight": shape for i in range(LLAMA.num_layers) for name, shape in GGUF_LAYER.items()}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray],
    types: dict[str, gguf.GGMLQuantizationType] | None = None,
    architecture: str = "llama",
    pre: str = "smollm",
    chat_template: str | None = "{{ messages[0].content }}",
) -> Path:
    """`LLAMA` as a GGUF: `tensors` under GGUF names, float32; `types` gives the block format of some."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(512)
    writer.add_embedding_length(LLAMA.hidden_size)
    writer.add_block_count(LLAMA.num_layers)
    writer.add_feed_forward_length(LLAMA.intermediate_size)
    writer.add_head_count(LLAMA.num_heads)
    writer.add_head_count_kv(LLAMA.num_kv_heads)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(LLAMA.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    learned = ["Ġt", "he", "Ġthe", "57"]
    tokens = control + byte_level_vocabulary() + learned
    tokens += [f"<|reserved_{i}|>" for i in range(LLAMA.vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") and token.endswith("|>") else 1 for token in tokens])
    writer.add_token_merges(["Ġ t", "h e", "Ġt he", "5 7"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    for name, values in tensors.items():
        kind = (types or {}).get(name)
        if kind is None:
            writer.add_tensor(name, values.astype(np.float32))
        else:
            writer.add_tensor(name, gguf.quants.quantize(values.astype(np.float32), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
