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
    norm_eps: float = 1e-6
    """The same of rms_norm_eps."""
    rotary_factor: float = 1.0
    """The same of partial_rotary_factor."""
    special_tokens: tuple[int | None, int | None, int | None] = (None, None, None)
    """The same of bos_token_id, eos_token_id and pad_token_id."""
    window: Literal["none", "all", "some"] = "all"
    """Which layers a sliding window is for where there is one: none may have one, all have it, or
    layer_types says which."""
    window_switch: bool = False
    """A sliding window counts only where use_sliding_window is true."""
    window_pattern: int | None = None
    """Every how many layers one attends fully where layer_types is left out; None: those below
    max_window_layers do."""
    qk_norm: bool = False
    """q and k are RMS-normalised over head_dim before rope."""
    qkv_bias: bool = False
    """q, k and v have biases."""
    options: tuple[str, ...] = ()
    """What config.json decides: "attention_bias" and "use_qk_norm" in place of the two above,
    "partial_rotary_factor" where a part of each head may be left as it is."""
    routing: Literal["softmax", "sigmoid"] | None = None
    """Layers have a mixture of experts: chosen by the softmax of the router's logits as Qwen3 has
    it, or by their sigmoid in groups, beside shared experts, as DeepSeek-V3 has it. None: there
    are no experts."""
    normalize_experts: bool = False
    """What transformers assumes where config.json leaves norm_topk_prob out."""
    first_sparse: int = 0
    """The same of first_k_dense_replace."""
    expert_groups: tuple[int, int] = (1, 1)
    """The same of n_group and topk_group."""
    expert_scale: float = 1.0
    """The same of routed_scaling_factor."""
    latent: bool = False
    """Attention is multi-head latent attention (models/latent.py)."""
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
    predicts_ahead: bool = False
    """Checkpoints have layers behind the last, which predict further tokens: they are not read."""
    other_types: tuple[str, ...] = ()
    """Further `model_type`s of models that are of this class."""


FAMILIES = {
    "llama": Family("LlamaForCausalLM", 2048, special_tokens=(1, 2, None), window="none"),
    "mistral": Family("MistralForCausalLM", 131072, kv_heads=8, special_tokens=(1, 2, None)),
    "qwen2": Family(
        "Qwen2ForCausalLM", 32768, kv_heads=32, window="some", window_switch=True, qkv_bias=True
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        32768,
        kv_heads=32,
        head_dim=128,
        window="some",
        window_switch=True,
        qk_norm=True,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        32768,
        kv_heads=4,
        window_switch=True,
        qk_norm=True,
        routing="softmax",
    ),
    # arXiv 2503.19786
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        131072,
        kv_heads=4,
        head_dim=256,
        tied=True,
        special_tokens=(2, 1, 0),
        window="some",
        window_pattern=6,
        qk_norm=True,
        norm_offset=1.0,
        post_norms=True,
        activation="gelu_pytorch_tanh",
        activation_key="hidden_activation",
        scales_embeddings=True,
        query_scalar=True,
        local_rope=True,
    ),
    # arXiv 2508.06471
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        131072,
        kv_heads=8,
        norm_eps=1e-5,
        rotary_factor=0.5,
        window="none",
        options=("attention_bias", "use_qk_norm", "partial_rotary_factor"),
        routing="sigmoid",
        normalize_experts=True,
        first_sparse=1,
        predicts_ahead=True,
    ),
    # arXiv 2412.19437; Moonlight and Kimi K2 (arXiv 2507.20534) are of the same class
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        4096,
        kv_heads=128,
        special_tokens=(0, 1, None),
        window="none",
        routing="sigmoid",
        normalize_experts=True,
        first_sparse=3,
        expert_groups=(8, 4),
        expert_scale=2.5,
        latent=True,
        predicts_ahead=True,
        other_types=("kimi_k2",),
    ),
}
