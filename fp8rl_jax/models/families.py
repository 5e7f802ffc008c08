"""What tells one family of models from another: a row each.

Everything else asks these fields, and no other file knows a family by name. A family whose layers
have the tensors of models/tensors.py is a row here; one that has others adds them there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Family:
    """One family, by Hugging Face's `model_type`."""

    hf_class: str
    """Of config.json's `architectures`."""
    max_positions: int
    """What transformers assumes where config.json leaves max_position_embeddings out."""
    kv_heads: int | None = None
    """The same of num_key_value_heads; None: num_attention_heads."""
    head_dim: int | None = None
    """The same of head_dim; None: hidden_size / num_attention_heads."""
    tied: bool = False
    """The same of tie_word_embeddings."""
    window: Literal["none", "all", "some"] = "all"
    """Which layers a sliding window is for where there is one: none may have one, all have it, or
    layer_types says which."""
    qk_norm: bool = False
    """q and k are RMS-normalised over head_dim before rope."""
    qkv_bias: bool = False
    """q, k and v have biases."""
    experts: bool = False
    """Layers have a mixture of experts."""
    norm_offset: float = 0.0
    """What is added to the weight of every RMSNorm: Gemma stores the distance from 1."""
    post_norms: bool = False
    """The outputs of attention and feed-forward layer are normalised, too."""
    activation: str = "silu"
    """Of the feed-forward layer, in Hugging Face's name."""
    activation_key: str = "hidden_act"
    """Where config.json has it."""
    scales_embeddings: bool = False
    """Embeddings are multiplied by sqrt(hidden_size), in the compute dtype."""
    query_scalar: bool = False
    """Scores are divided by the root of query_pre_attn_scalar, not of head_dim."""
    local_rope: bool = False
    """Layers with a window have a base of wavelengths of their own (rope_local_base_freq)."""


FAMILIES = {
    "llama": Family("LlamaForCausalLM", 2048, window="none"),
    "mistral": Family("MistralForCausalLM", 131072, kv_heads=8),
    "qwen2": Family("Qwen2ForCausalLM", 32768, kv_heads=32, window="some", qkv_bias=True),
    "qwen3": Family(
        "Qwen3ForCausalLM", 32768, kv_heads=32, head_dim=128, window="some", qk_norm=True
    ),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", 32768, kv_heads=4, qk_norm=True, experts=True),
    # arXiv 2503.19786
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        131072,
        kv_heads=4,
        head_dim=256,
        tied=True,
        window="some",
        qk_norm=True,
        norm_offset=1.0,
        post_norms=True,
        activation="gelu_pytorch_tanh",
        activation_key="hidden_activation",
        scales_embeddings=True,
        query_scalar=True,
        local_rope=True,
    ),
}
