"""The shape of a policy: everything that forward, placement and export need to know of a model's
architecture."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from fp8rl_jax.errors import UserError
from fp8rl_jax.models.families import FAMILIES, Family
from fp8rl_jax.models.rope import RopeScaling, YarnRopeScaling

# What transformers assumes when config.json leaves a key out.
DEFAULT_ROPE_THETA = 10000.0
DEFAULT_RMS_NORM_EPS = 1e-6

_UNLIMITED = 2**31 - 1  # a window that no position reaches
_LARGEST_SIZE = 2**31 - 1
_LARGEST_COUNT = 10_000  # of layers and of experts


def check_count(key: str, count: int) -> None:
    """Refuse a number of layers or experts that no model has.

    A damaged one must not become a loop of that length.

    Raises:
        UserError: naming the key.
    """
    if count > _LARGEST_COUNT:
        raise UserError(f"{key} must be at most {_LARGEST_COUNT}, got {count}")


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts in place of the feed-forward layer (arXiv 1701.06538), of which each
    token uses a few.

    Attributes:
        count: experts in a layer.
        per_token: experts that a token uses: those that score highest.
        intermediate_size: feed-forward width of one expert.
        normalize: the weights of a token's experts are divided by their sum (`norm_topk_prob`).
        dense_layers: layers that keep a feed-forward layer of the policy's `intermediate_size`.
        scoring: what makes scores of the router's logits. By "sigmoid" each expert is scored by
            itself, and a bias that takes no part in the weights is added for the choice (arXiv
            2408.15664).
        groups: experts are chosen within the `groups_per_token` of these groups whose two best
            score highest together (arXiv 2412.19437, section 2.1.2).
        scale: the weights are multiplied by it (`routed_scaling_factor`).
        shared: experts that every token uses, beside those that are routed, as one feed-forward
            layer of their width together.
    """

    count: int
    per_token: int
    intermediate_size: int
    normalize: bool
    dense_layers: tuple[int, ...] = ()
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    groups_per_token: int = 1
    scale: float = 1.0
    shared: int = 0

    def __post_init__(self) -> None:
        if self.intermediate_size < 1:
            raise UserError(f"moe_intermediate_size must be positive, got {self.intermediate_size}")
        check_count("num_experts", self.count)
        check_count("n_shared_experts", self.shared)
        if not 1 <= self.per_token <= self.count:
            raise UserError(
                f"num_experts_per_tok ({self.per_token}) must be from 1 to num_experts "
                f"({self.count})"
            )
        if self.groups < 1 or self.count % self.groups:
            raise UserError(
                f"n_group ({self.groups}) must divide the number of experts ({self.count})"
            )
        size = self.count // self.groups
        if not 1 <= self.groups_per_token <= self.groups or (
            self.per_token > self.groups_per_token * size
        ):
            raise UserError(
                f"topk_group ({self.groups_per_token}) must be from 1 to n_group ({self.groups}), "
                f"and its groups of {size} hold num_experts_per_tok ({self.per_token})"
            )
        if self.groups > 1 and size < 2:
            raise UserError(
                f"n_group ({self.groups}): groups are ranked by their two best experts, and each "
                f"has {size} of n_routed_experts ({self.count})"
            )
        if self.shared < 0 or (self.scoring == "sigmoid" and self.shared == 0):
            raise UserError(f"n_shared_experts must be positive, got {self.shared}")
        if not 0 < self.scale < math.inf:
            raise UserError(f"routed_scaling_factor must be positive and finite, got {self.scale}")

    @property
    def shared_size(self) -> int:
        """Feed-forward width of the shared experts together."""
        return self.shared * self.intermediate_size


@dataclasses.dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (MLA, arXiv 2405.04434, section 2.1): keys and values of all
    heads are made of one latent a token, and of one rotated key that the heads share.

    Attributes:
        rank: numbers of a token's latent (`kv_lora_rank`).
        rotary_dim: of a head's query, and of the key that the heads share (`qk_rope_head_dim`); the
            rest of `PolicyConfig.head_dim` comes first and is not rotated (`qk_nope_head_dim`).
        value_dim: of a head (`v_head_dim`).
        query_rank: numbers that the queries of all heads are made of (`q_lora_rank`); None: they
            are made of the hidden states.
        interleaved: dimensions that turn together are neighbours (`rope_interleave`), not half of
            the rotated ones apart.
    """

    rank: int
    rotary_dim: int
    value_dim: int
    query_rank: int | None = None
    interleaved: bool = True

    def __post_init__(self) -> None:
        sizes = {
            "kv_lora_rank": self.rank,
            "qk_rope_head_dim": self.rotary_dim,
            "v_head_dim": self.value_dim,
            "q_lora_rank": 1 if self.query_rank is None else self.query_rank,
        }
        for key, value in sizes.items():
            if not 0 < value <= _LARGEST_SIZE:
                raise UserError(f"{key} must be from 1 to {_LARGEST_SIZE}, got {value}")
        if self.rotary_dim % 2:
            raise UserError(
                f"qk_rope_head_dim must be even for rotary positions, got {self.rotary_dim}"
            )


@dataclasses.dataclass(frozen=True)
class PolicyConfig:
    """A decoder-only transformer with grouped-query or latent attention, rotary positions, RMSNorm
    and a gated feed-forward layer.

    `architecture` is one of `FAMILIES`. It decides what has no field of its own (`family`): biases,
    norms, the activation. Sizes are counts, `rope_theta` is the base of the rotary wavelengths,
    `eos_token_ids` may be empty (a model that never stops by itself). With `sliding_window` a token
    sees that many keys, its own included, in all but the `full_attention_layers`. Gemma 3 (arXiv
    2503.19786) alone has these two: attention scores are divided by the root of
    `query_pre_attn_scalar` (elsewhere: of `head_dim`), and the layers with a window have
    `local_rope_theta` as the base of their wavelengths, without `rope_scaling`. Where the family
    leaves it open (`Family.options`), `partial_rotary_factor` says which part of a head's
    dimensions, from the first on, is rotated, and `attention_bias` and `use_qk_norm` whether q, k
    and v have biases, q and k norms; None: as the family has it. With `latent` attention `head_dim`
    is that of queries and keys, and every head has keys of its own.

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
    rope_scaling: RopeScaling | None = None
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
    partial_rotary_factor: float = 1.0
    attention_bias: bool | None = None
    use_qk_norm: bool | None = None
    latent: LatentConfig | None = None

    def __post_init__(self) -> None:
        if self.architecture not in FAMILIES:
            raise UserError(
                f"unknown architecture {self.architecture!r}; supported: {', '.join(FAMILIES)}"
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
        if (
            not 0 < self.partial_rotary_factor <= 1
            or not 0 < self.rotary_dim
            or self.rotary_dim % 2
        ):
            raise UserError(
                f"partial_rotary_factor {self.partial_rotary_factor} must rotate an even number of "
                f"the {self.head_dim} dimensions of a head"
            )
        if isinstance(self.rope_scaling, YarnRopeScaling) and self.rope_theta <= 1:
            raise UserError(
                f"rope_theta must be above 1 with rope_type 'yarn', got {self.rope_theta}"
            )
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
        family = self.family
        if (self.experts is not None) != (family.routing is not None):
            raise UserError(
                f"num_experts: architecture {self.architecture!r} and experts {self.experts} do "
                "not go together"
            )
        if (self.latent is not None) != family.latent:
            raise UserError(
                f"kv_lora_rank: architecture {self.architecture!r} and latents {self.latent} do "
                "not go together"
            )
        if self.latent is not None:
            if self.num_kv_heads != self.num_heads:
                raise UserError(
                    f"num_key_value_heads ({self.num_kv_heads}) must be num_attention_heads "
                    f"({self.num_heads}): each head makes its own keys of the latent"
                )
            if self.head_dim <= self.latent.rotary_dim:
                raise UserError(
                    "qk_nope_head_dim must be positive, got "
                    f"{self.head_dim - self.latent.rotary_dim}"
                )
        if self.sliding_window is not None and family.window == "none":
            raise UserError(
                f"sliding_window {self.sliding_window}: {self.architecture!r} attends fully; "
                "'mistral' has a window"
            )
        if self.full_attention_layers and (self.sliding_window is None or family.window != "some"):
            mixed = (name for name, each in FAMILIES.items() if each.window == "some")
            raise UserError(
                f"full_attention_layers are for one of {', '.join(mixed)} that has a sliding_window"
            )
        if (self.query_pre_attn_scalar is not None) != family.query_scalar:
            raise UserError(
                f"query_pre_attn_scalar {self.query_pre_attn_scalar} does not go with "
                f"{self.architecture!r}"
            )
        if (self.local_rope_theta is not None) != (
            family.local_rope and self.sliding_window is not None
        ):
            raise UserError(
                f"rope_local_base_freq {self.local_rope_theta}: only a 'gemma3_text' with a "
                "window has one"
            )
        usual = {"partial_rotary_factor": 1.0, "attention_bias": None, "use_qk_norm": None}
        for key, value in usual.items():
            if (given := getattr(self, key)) != value and key not in family.options:
                raise UserError(f"{key} {given} does not go with {self.architecture!r}")
        if self.experts is not None and self.experts.scoring != family.routing:
            raise UserError(
                f"experts scored by {self.experts.scoring} do not go with {self.architecture!r}"
            )
        if family.routing == "sigmoid" and self.dense_layers != tuple(
            range(len(self.dense_layers))
        ):
            raise UserError(
                f"first_k_dense_replace: layers {list(self.dense_layers)} without experts must be "
                f"the first of a {self.architecture!r}"
            )
        chosen = {
            "layer_types": self.full_attention_layers,
            "first_k_dense_replace" if family.routing == "sigmoid" else "mlp_only_layers": (
                self.experts.dense_layers if self.experts else ()
            ),
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
        """Width of the queries of all heads: num_heads * head_dim."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Output width of k_proj and of v_proj: num_kv_heads * head_dim."""
        return self.num_kv_heads * self.head_dim

    @property
    def attended_size(self) -> int:
        """Input width of o_proj: what attention gives for all heads."""
        return self.num_heads * (self.head_dim if self.latent is None else self.latent.value_dim)

    @property
    def attention_dim(self) -> int:
        """Width of queries, keys and values as attention multiplies them: the larger one."""
        return self.head_dim if self.latent is None else max(self.head_dim, self.latent.value_dim)

    @property
    def cached(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """What a layer's cache keeps of a token: (heads, dim) of its keys and of its values.

        With latent attention they are the rotated key and the latent, each as of a single head.
        """
        if self.latent is None:
            return (self.num_kv_heads, self.head_dim), (self.num_kv_heads, self.head_dim)
        return (1, self.latent.rotary_dim), (1, self.latent.rank)

    @property
    def family(self) -> Family:
        """What the architecture decides."""
        return FAMILIES[self.architecture]

    @property
    def qk_norm(self) -> bool:
        """Whether q and k are RMS-normalised over head_dim before rope."""
        return self.family.qk_norm if self.use_qk_norm is None else self.use_qk_norm

    @property
    def qkv_bias(self) -> bool:
        """Whether q, k and v have biases."""
        return self.family.qkv_bias if self.attention_bias is None else self.attention_bias

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated: the first ones, with latent attention the last."""
        if self.latent is not None:
            return self.latent.rotary_dim
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def mixture(self) -> ExpertsConfig:
        """The experts of a model that has some."""
        assert self.experts is not None
        return self.experts

    @property
    def latents(self) -> LatentConfig:
        """The latents of a model that has some."""
        assert self.latent is not None
        return self.latent

    @property
    def embedding_scale(self) -> float | None:
        """What embeddings are multiplied by, in the compute dtype, or None."""
        return self.hidden_size**0.5 if self.family.scales_embeddings else None

    @property
    def score_scale(self) -> float:
        """What attention scores are multiplied by."""
        scale = (self.query_pre_attn_scalar or self.head_dim) ** -0.5
        if self.latent is None or not isinstance(self.rope_scaling, YarnRopeScaling):
            return scale
        return scale * self.rope_scaling.score_factor

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Layers with one feed-forward layer for all tokens; all where there are no experts."""
        return tuple(range(self.num_layers)) if self.experts is None else self.experts.dense_layers

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Layers with experts."""
        return tuple(i for i in range(self.num_layers) if i not in self.dense_layers)

    @property
    def windows(self) -> tuple[int, ...] | None:
        """Number of keys that a token sees in each layer, its own included.

        None where no layer has a window.
        """
        if self.sliding_window is None:
            return None
        return tuple(
            _UNLIMITED if i in self.full_attention_layers else self.sliding_window
            for i in range(self.num_layers)
        )
