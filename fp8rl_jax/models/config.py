"""The shape of a policy: everything that forward, placement and export need to know of a model's
architecture."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from fp8rl_jax.errors import UserError
from fp8rl_jax.models.experts_config import ExpertsConfig, check_count
from fp8rl_jax.models.hf_json import read_json
from fp8rl_jax.models.rope_scaling import LinearRopeScaling, Llama3RopeScaling

HF_CLASS = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
# some of their layers may have a window, the others none
MIXED_ATTENTION = ("qwen2", "qwen3", "gemma3_text")
# What transformers assumes when config.json leaves a key out.
DEFAULT_ROPE_THETA = 10000.0
DEFAULT_RMS_NORM_EPS = 1e-6

_UNLIMITED = 2**31 - 1  # a window that no position reaches
_LARGEST_SIZE = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class PolicyConfig:
    """A decoder-only transformer with grouped-query attention, rotary positions, RMSNorm and a
    gated feed-forward layer.

    `architecture` is one of `HF_CLASS`. It decides what has no field of its own, which the
    properties below say: biases, norms, the activation. Sizes are counts, `rope_theta` is the base
    of the rotary wavelengths, `eos_token_ids` may be empty (a model that never stops by itself).
    With `sliding_window` a token sees that many keys, its own included, in all but the
    `full_attention_layers`. Gemma 3 (arXiv 2503.19786) alone has the last two fields: attention
    scores are divided by the root of `query_pre_attn_scalar` (elsewhere: of `head_dim`), and the
    layers with a window have `local_rope_theta` as the base of their wavelengths, without
    `rope_scaling`.

    Raises:
        UserError: sizes that do not fit each other, naming the key of config.json.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = DEFAULT_RMS_NORM_EPS
    rope_theta: float = DEFAULT_ROPE_THETA
    rope_scaling: LinearRopeScaling | Llama3RopeScaling | None = None
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 2048
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    sliding_window: int | None = None
    full_attention_layers: tuple[int, ...] = ()
    experts: ExpertsConfig | None = None
    query_pre_attn_scalar: int | None = None
    local_rope_theta: float | None = None

    def __post_init__(self) -> None:
        if self.architecture not in HF_CLASS:
            raise UserError(
                f"unknown architecture {self.architecture!r}; supported: {', '.join(HF_CLASS)}"
            )
        sizes = {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.rms_norm_eps,
            "sliding_window": 1 if self.sliding_window is None else self.sliding_window,
            "query_pre_attn_scalar": 1
            if self.query_pre_attn_scalar is None
            else self.query_pre_attn_scalar,
            "rope_local_base_freq": 1 if self.local_rope_theta is None else self.local_rope_theta,
        }
        for key, value in sizes.items():
            if not 0 < value < math.inf:
                raise UserError(f"{key} must be positive and finite, got {value}")
            if isinstance(value, int) and value > _LARGEST_SIZE:
                raise UserError(f"{key} must be at most {_LARGEST_SIZE}, got {value}")
        check_count("num_hidden_layers", self.num_layers)
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"num_attention_heads ({self.num_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise UserError(f"head_dim must be even for rotary positions, got {self.head_dim}")
        special = [("bos_token_id", self.bos_token_id), ("pad_token_id", self.pad_token_id)]
        special += [("eos_token_id", token) for token in self.eos_token_ids]
        for key, token in special:
            if token is not None and not 0 <= token < self.vocab_size:
                raise UserError(
                    f"{key} {token} is outside the vocabulary of {self.vocab_size} tokens"
                )
        self._check_layers()

    def _check_layers(self) -> None:
        """What Hugging Face's class of the architecture could not hold must not be built either: it
        could not be exported."""
        if (self.experts is not None) != (self.architecture == "qwen3_moe"):
            raise UserError(
                f"num_experts: architecture {self.architecture!r} and experts {self.experts} do "
                "not go together"
            )
        if self.sliding_window is not None and self.architecture == "llama":
            raise UserError(
                f"sliding_window {self.sliding_window}: 'llama' attends fully; 'mistral' has a "
                "window"
            )
        if self.full_attention_layers and (
            self.sliding_window is None or self.architecture not in MIXED_ATTENTION
        ):
            raise UserError(
                f"full_attention_layers are for one of {', '.join(MIXED_ATTENTION)} that has a "
                "sliding_window"
            )
        gemma = self.architecture == "gemma3_text"
        if (self.query_pre_attn_scalar is not None) != gemma:
            raise UserError(
                f"query_pre_attn_scalar {self.query_pre_attn_scalar} does not go with "
                f"{self.architecture!r}"
            )
        if (self.local_rope_theta is not None) != (gemma and self.sliding_window is not None):
            raise UserError(
                f"rope_local_base_freq {self.local_rope_theta}: only a 'gemma3_text' with a "
                "window has one"
            )
        chosen = {
            "layer_types": self.full_attention_layers,
            "mlp_only_layers": self.experts.dense_layers if self.experts else (),
        }
        for key, layers in chosen.items():
            if list(layers) != sorted(set(layers) & set(range(self.num_layers))):
                raise UserError(
                    f"{key}: layers {list(layers)} must be ascending and below num_hidden_layers "
                    f"({self.num_layers})"
                )
            if len(layers) == self.num_layers:
                raise UserError(
                    f"{key}: all layers {list(layers)} are excepted, so none is left with a "
                    "window or experts"
                )

    @property
    def q_size(self) -> int:
        """Output width of q_proj and input width of o_proj: num_heads * head_dim."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Output width of k_proj and of v_proj: num_kv_heads * head_dim."""
        return self.num_kv_heads * self.head_dim

    @property
    def qk_norm(self) -> bool:
        """Whether q and k are RMS-normalised over head_dim before the rotary embedding (Qwen3,
        Gemma 3)."""
        return self.architecture in ("qwen3", "qwen3_moe", "gemma3_text")

    @property
    def qkv_bias(self) -> bool:
        """Whether q, k and v have biases (Qwen2)."""
        return self.architecture == "qwen2"

    @property
    def norm_offset(self) -> float:
        """What is added to the weight of every RMSNorm: Gemma stores the distance from 1."""
        return 1.0 if self.architecture == "gemma3_text" else 0.0

    @property
    def post_norms(self) -> bool:
        """Whether the outputs of attention and feed-forward layer are normalised, too, before they
        join the residual stream."""
        return self.architecture == "gemma3_text"

    @property
    def activation(self) -> str:
        """The feed-forward layer's activation, in Hugging Face's name."""
        return "gelu_pytorch_tanh" if self.architecture == "gemma3_text" else "silu"

    @property
    def embedding_scale(self) -> float | None:
        """What embeddings are multiplied by on their way in, or None (Gemma: sqrt(hidden_size), in
        the compute dtype)."""
        return self.hidden_size**0.5 if self.architecture == "gemma3_text" else None

    @property
    def score_scale(self) -> float:
        """What attention scores are multiplied by."""
        return (self.query_pre_attn_scalar or self.head_dim) ** -0.5

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Layers with one feed-forward layer for all tokens; every layer where there are no
        experts."""
        return tuple(range(self.num_layers)) if self.experts is None else self.experts.dense_layers

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Layers with experts."""
        return tuple(i for i in range(self.num_layers) if i not in self.dense_layers)

    @property
    def windows(self) -> tuple[int, ...] | None:
        """For each layer the number of keys that a token sees, its own included; None where no
        layer has a window."""
        if self.sliding_window is None:
            return None
        return tuple(
            _UNLIMITED if i in self.full_attention_layers else self.sliding_window
            for i in range(self.num_layers)
        )

    @classmethod
    def from_directory(cls, directory: str | Path) -> PolicyConfig:
        """Reads `config.json`, and `generation_config.json` where there is one, of a Hugging Face
        directory.

        Raises:
            UserError: a missing or malformed file, or whatever `from_hf` refuses.
        """
        path = Path(directory) / "config.json"
        if not path.is_file():
            raise UserError(
                f"{path}: not found; a Hugging Face model directory needs a config.json"
            )
        generation = Path(directory) / "generation_config.json"
        return cls.from_hf(
            read_json(path), path, read_json(generation) if generation.is_file() else None
        )

    @classmethod
    def from_hf(
        cls,
        config: dict[str, Any],
        source: str | Path,
        generation_config: dict[str, Any] | None = None,
    ) -> PolicyConfig:
        """Reads a parsed config.json, in the spelling of transformers 4 or 5.

        Args:
            config: the parsed config.json.
            source: the file that it came from, for error messages.
            generation_config: the parsed generation_config.json; its end-of-sequence tokens are
                added to config's.

        Raises:
            UserError: naming `source` and the key that is missing, malformed, or not implemented.
        """
        from fp8rl_jax.models.hf_config import parse  # which makes PolicyConfigs

        try:
            return parse(config, generation_config or {})
        except UserError as error:
            raise UserError(f"{source}: {error}") from None

    def to_hf(self, dtype: str = "bfloat16") -> dict[str, Any]:
        """The dictionary of a config.json that transformers 4 and 5 both read; `dtype` names the
        weights' dtype."""
        from fp8rl_jax.models.hf_config import unparse

        return unparse(self, dtype)
