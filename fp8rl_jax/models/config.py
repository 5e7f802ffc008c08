"""The shape of a policy, read from a Hugging Face `config.json` and written back to one.

Everything that would change the numbers is either represented here or refused by name: a key that
we do not implement (another rope type, attention biases, a sliding window) must never be dropped,
because the model would still run and answer slightly wrong log-probabilities.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from fp8rl_jax.errors import UserError
from fp8rl_jax.models.hf_json import Fields, read_json

_HF_CLASS = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# What transformers assumes when config.json leaves a key out.
_DEFAULT_ROPE_THETA = 10000.0
_DEFAULT_RMS_NORM_EPS = 1e-6
_DEFAULT_MAX_POSITIONS = {"llama": 2048, "qwen3": 32768}
_QWEN3_HEAD_DIM = 128


@dataclasses.dataclass(frozen=True)
class Llama3RopeScaling:
    """Llama 3.1's rescaling of the rotary frequencies, `rope_type: "llama3"` (arXiv:2407.21783, section 3.1).

    Wavelengths above `original_max_position_embeddings / low_freq_factor` are stretched by `factor`, those below
    `original_max_position_embeddings / high_freq_factor` are kept, those between are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        if self.factor < 1 or self.low_freq_factor <= 0 or self.original_max_position_embeddings <= 0:
            raise UserError(f"rope_scaling must have factor >= 1 and positive frequencies and positions, got {self}")
        if self.high_freq_factor <= self.low_freq_factor:
            raise UserError(
                f"rope_scaling.high_freq_factor ({self.high_freq_factor}) must be above "
                f"low_freq_factor ({self.low_freq_factor})"
            )


@dataclasses.dataclass(frozen=True)
class PolicyConfig:
    """A decoder-only transformer with grouped-query attention, rotary positions, RMSNorm and SwiGLU.

    `architecture` is `"llama"` or `"qwen3"`; the second adds RMSNorm over the head dimension of q and k.
    Sizes are counts, `rope_theta` is the base of the rotary wavelengths, `eos_token_ids` may be empty (a model that
    never stops by itself).

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
    rms_norm_eps: float = _DEFAULT_RMS_NORM_EPS
    rope_theta: float = _DEFAULT_ROPE_THETA
    rope_scaling: Llama3RopeScaling | None = None
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 2048
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.architecture not in _HF_CLASS:
            raise UserError(f"unknown architecture {self.architecture!r}; supported: {', '.join(_HF_CLASS)}")
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
        }
        for key, value in sizes.items():
            if not value > 0:
                raise UserError(f"{key} must be positive, got {value}")
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
                raise UserError(f"{key} {token} is outside the vocabulary of {self.vocab_size} tokens")

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
        """Whether q and k are RMS-normalised over head_dim before the rotary embedding (Qwen3)."""
        return self.architecture == "qwen3"

    @classmethod
    def from_directory(cls, directory: str | Path) -> PolicyConfig:
        """Reads `config.json`, and `generation_config.json` where there is one, of a Hugging Face directory.

        Raises:
            UserError: a missing or malformed file, or whatever `from_hf` refuses.
        """
        path = Path(directory) / "config.json"
        if not path.is_file():
            raise UserError(f"{path}: not found; a Hugging Face model directory needs a config.json")
        generation = Path(directory) / "generation_config.json"
        return cls.from_hf(read_json(path), path, read_json(generation) if generation.is_file() else None)

    @classmethod
    def from_hf(
        cls, config: dict[str, Any], source: str | Path, generation_config: dict[str, Any] | None = None
    ) -> PolicyConfig:
        """Reads a parsed config.json, in the spelling of transformers 4 or 5.

        Args:
            config: the parsed config.json.
            source: the file that it came from, for error messages.
            generation_config: the parsed generation_config.json; its end-of-sequence tokens are added to config's.

        Raises:
            UserError: naming `source` and the key that is missing, malformed, or not implemented.
        """
        try:
            return _parse(config, generation_config or {})
        except UserError as error:
            raise UserError(f"{source}: {error}") from None

    def to_hf(self, dtype: str = "bfloat16") -> dict[str, Any]:
        """The dictionary of a config.json that transformers 4 and 5 both read; `dtype` names the weights' dtype."""
        rope_scaling = None
        if self.rope_scaling is not None:
            rope_scaling = {"rope_type": "llama3", **dataclasses.asdict(self.rope_scaling)}
        eos = list(self.eos_token_ids)
        return {
            "architectures": [_HF_CLASS[self.architecture]],
            "model_type": self.architecture,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            **({"mlp_bias": False} if self.architecture == "llama" else {"use_sliding_window": False}),
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": rope_scaling,
            "tie_word_embeddings": self.tie_word_embeddings,
            "max_position_embeddings": self.max_position_embeddings,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos[0] if len(eos) == 1 else (eos or None),
            "pad_token_id": self.pad_token_id,
            "torch_dtype": dtype,
            "use_cache": True,
        }


def _parse(config: dict[str, Any], generation_config: dict[str, Any]) -> PolicyConfig:
    fields, generation = Fields(config), Fields(generation_config)
    architecture = _architecture(config)
    _refuse_unimplemented(fields)
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", default=_QWEN3_HEAD_DIM if architecture == "qwen3" else None)
    if head_dim is None:
        if num_heads < 1 or hidden_size % num_heads:
            raise UserError(f"hidden_size ({hidden_size}) must be a multiple of num_attention_heads ({num_heads})")
        head_dim = hidden_size // num_heads
    rope_theta, rope_scaling = _rope(fields)
    eos_token_ids = fields.token_ids("eos_token_id") + generation.token_ids("eos_token_id")
    return PolicyConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", default=num_heads),
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", default=_DEFAULT_RMS_NORM_EPS),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=fields.boolean("tie_word_embeddings"),
        max_position_embeddings=fields.integer("max_position_embeddings", default=_DEFAULT_MAX_POSITIONS[architecture]),
        bos_token_id=fields.integer("bos_token_id", default=None),
        eos_token_ids=tuple(dict.fromkeys(eos_token_ids)),
        pad_token_id=fields.integer("pad_token_id", default=generation.integer("pad_token_id", default=None)),
    )


def _architecture(config: dict[str, Any]) -> str:
    model_type = config.get("model_type")
    names = config.get("architectures") or [_HF_CLASS.get(str(model_type))]
    if not isinstance(names, list) or len(names) != 1 or names[0] not in _HF_CLASS.values():
        raise UserError(
            f"architectures {names} (model_type {model_type!r}) is not supported; "
            f"supported: {', '.join(_HF_CLASS.values())}"
        )
    return next(architecture for architecture, name in _HF_CLASS.items() if name == names[0])


def _refuse_unimplemented(fields: Fields) -> None:
    config = fields.data
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"hidden_act {config['hidden_act']!r} is not supported; only 'silu' is")
    for key in ("attention_bias", "mlp_bias"):
        if fields.boolean(key):
            raise UserError(f"{key} true is not supported; the model must have no biases")
    if config.get("quantization_config"):
        raise UserError("quantization_config: quantized checkpoints are not read; use the bf16 or float32 one")
    if config.get("sliding_window") is not None and fields.boolean("use_sliding_window", default=True):
        raise UserError(f"sliding_window {config['sliding_window']} is not supported; every layer must attend fully")
    layer_types = config.get("layer_types") or []
    if other := sorted({str(kind) for kind in layer_types} - {"full_attention"}):
        raise UserError(f"layer_types holds {', '.join(other)}; only full_attention is supported")


def _rope(fields: Fields) -> tuple[float, Llama3RopeScaling | None]:
    """Reads either spelling: `rope_theta` beside `rope_scaling`, or `rope_parameters` with both inside."""
    key = "rope_parameters" if fields.data.get("rope_parameters") is not None else "rope_scaling"
    rope = fields.object(key)
    if nested := [name for name, value in rope.data.items() if isinstance(value, dict)]:
        raise UserError(f"{key}.{nested[0]}: rotary positions that differ by kind of layer are not supported")
    outer, inner = fields.number("rope_theta", default=None), rope.number("rope_theta", default=None)
    if outer is not None and inner is not None and outer != inner:
        raise UserError(f"rope_theta {outer} contradicts {key}.rope_theta {inner}")
    theta = next((value for value in (inner, outer) if value is not None), _DEFAULT_ROPE_THETA)
    for part in (fields, rope):
        if (fraction := part.number("partial_rotary_factor", default=1.0)) != 1.0:
            raise UserError(f"{part.prefix}partial_rotary_factor {fraction} is not supported; only 1.0 is")
    kind = rope.data.get("rope_type", rope.data.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UserError(f"{key}.rope_type {kind!r} is not supported; supported: 'default', 'llama3'")
    return theta, Llama3RopeScaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
    )
