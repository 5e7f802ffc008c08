"""Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE, Gemma 3, GLM-4-MoE and DeepSeek-V3 in float64 numpy, one
row, one head and one token's expert at a time: what the batched, cached, scanned and sorted forward
must equal."""

from __future__ import annotations

import math

import numpy as np

from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.rope import LinearRopeScaling, Llama3RopeScaling, YarnRopeScaling
from fp8rl_jax.models.tensors import parameter_shapes


def random_weights(config: PolicyConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights by dotted path, float64 of float32 values, deviations that keep every part of the
    network in play."""
    rng = np.random.default_rng(seed)
    weights = {}
    norm_mean = 0.0 if config.architecture == "gemma3_text" else 1.0
    for path, shape in parameter_shapes(config).items():
        norm = "norm" in path
        values = rng.normal(norm_mean if norm else 0.0, 0.3 if norm else shape[-1] ** -0.5, shape)
        weights[path] = values.astype(np.float32).astype(np.float64)
    return weights


def logits(
    config: PolicyConfig, weights: dict[str, np.ndarray], tokens: list[int], routes=None
) -> np.ndarray:
    """[length, vocab] of one row without padding; `routes` [length, layers with experts, k]
    replaces the router's choice."""
    gemma = config.architecture == "gemma3_text"
    positions = list(range(len(tokens)))
    x = weights["embed_tokens.weight"][tokens] * (math.sqrt(config.hidden_size) if gemma else 1)
    weights = {path: 1 + w if gemma and "norm" in path else w for path, w in weights.items()}
    sparse = 0
    for i in range(config.num_layers):
        layer = _layer(config, weights, i)
        attention = _attention if config.latent is None else _latent_attention
        attended = attention(
            config, layer, _rms_norm(x, layer["input_layernorm"], config.rms_norm_eps), positions, i
        )
        if gemma:
            x = x + _rms_norm(attended, layer["post_attention_layernorm"], config.rms_norm_eps)
            h = _rms_norm(x, layer["pre_feedforward_layernorm"], config.rms_norm_eps)
            h = (_gelu(h @ layer["gate_proj"].T) * (h @ layer["up_proj"].T)) @ layer["down_proj"].T
            x = x + _rms_norm(h, layer["post_feedforward_layernorm"], config.rms_norm_eps)
            continue
        x = x + attended
        h = _rms_norm(x, layer["post_attention_layernorm"], config.rms_norm_eps)
        if "router" in layer:
            x = x + _experts(config, layer, h, None if routes is None else routes[:, sparse])
            sparse += 1
        else:
            x = x + _swiglu(h, layer["gate_proj"], layer["up_proj"], layer["down_proj"])
    head = weights["embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
    return _rms_norm(x, weights["norm.weight"], config.rms_norm_eps) @ head.T


def log_softmax(x: np.ndarray) -> np.ndarray:
    shifted = x - x.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def frequencies(config: PolicyConfig, windowed: bool = False) -> np.ndarray:
    """Rotary frequencies of layers with or without a window; Llama 3's rule as its case
    distinction, by wavelength."""
    local = windowed and config.architecture == "gemma3_text"
    theta, scaling = (
        (config.local_rope_theta, None) if local else (config.rope_theta, config.rope_scaling)
    )
    turned = int(config.head_dim * config.partial_rotary_factor)
    turned = turned if config.latent is None else config.latent.rotary_dim
    base = [theta ** (-2 * i / turned) for i in range(turned // 2)]
    if isinstance(scaling, LinearRopeScaling):
        return np.array([f / scaling.factor for f in base])
    if isinstance(scaling, YarnRopeScaling):
        return np.array([_yarn(i, f, turned, theta, scaling) for i, f in enumerate(base)])
    return np.array([_llama3(f, scaling) if scaling else f for f in base])


def _llama3(frequency: float, scaling: Llama3RopeScaling) -> float:
    wavelength = 2 * math.pi / frequency
    longest = scaling.original_max_position_embeddings / scaling.low_freq_factor
    shortest = scaling.original_max_position_embeddings / scaling.high_freq_factor
    if wavelength < shortest:
        return frequency
    if wavelength > longest:
        return frequency / scaling.factor
    smooth = scaling.original_max_position_embeddings / wavelength - scaling.low_freq_factor
    smooth /= scaling.high_freq_factor - scaling.low_freq_factor
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def _yarn(i: int, frequency: float, dim: int, theta: float, scaling: YarnRopeScaling) -> float:
    """The paper's ramp over the pairs of dimensions, between those that turn beta_fast and
    beta_slow times."""

    def pair(turns: float) -> float:
        wavelength = scaling.original_max_position_embeddings / turns
        return dim / 2 * math.log(wavelength / (2 * math.pi), theta)

    first = max(math.floor(pair(scaling.beta_fast)), 0)
    last = min(math.ceil(pair(scaling.beta_slow)), dim - 1)
    ramp = min(max((i - first) / (last - first), 0), 1)
    return frequency * (1 - ramp) + frequency / scaling.factor * ramp


def _layer(config, weights, i):
    """Layer i's tensors by name: a tensor that some layers lack is stacked over the others."""
    dense = [
        config.experts is None or j in config.experts.dense_layers for j in range(config.num_layers)
    ]
    alike = dense[:i].count(dense[i])
    layer = {}
    for path, stack in weights.items():
        if not path.startswith("layers."):
            continue
        name = path.removeprefix("layers.").removesuffix(".weight")
        if name in ("gate_proj", "up_proj", "down_proj"):
            if dense[i]:
                layer[name] = stack[alike]
        elif name.startswith(("router", "experts.", "shared_experts.")):
            if not dense[i]:
                layer[name] = stack[alike]
        else:
            layer[name] = stack[i]
    return layer


def _swiglu(x, gate, up, down):
    g = x @ gate.T
    return (g / (1 + np.exp(-g)) * (x @ up.T)) @ down.T


def _gelu(x):
    """The normal distribution's function by its tanh formula (arXiv 1606.08415)."""
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _experts(config, layer, x, routes):
    out = np.zeros_like(x)
    for row, token in enumerate(x):
        logits = token @ layer["router"].T
        sigmoid = config.experts.scoring == "sigmoid"
        scores = 1 / (1 + np.exp(-logits)) if sigmoid else np.exp(log_softmax(logits))
        ranked = scores
        if sigmoid:
            ranked = _best_groups(scores + layer["router_bias"], config.experts)
        chosen = np.argsort(-ranked)[: config.experts.per_token]
        if routes is not None and (routes[row] >= 0).all():
            chosen = routes[row]
        total = scores[chosen].sum() if config.experts.normalize else 1.0
        for expert in chosen:
            parts = (layer[f"experts.{name}_proj"][expert] for name in ("gate", "up", "down"))
            out[row] += config.experts.scale * scores[expert] / total * _swiglu(token, *parts)
    if config.experts.shared:
        out += _swiglu(
            x, *(layer[f"shared_experts.{name}_proj"] for name in ("gate", "up", "down"))
        )
    return out


def _best_groups(scores, experts):
    size = experts.count // experts.groups
    groups = [scores[start : start + size] for start in range(0, experts.count, size)]
    best = sorted(range(len(groups)), key=lambda i: -sum(sorted(groups[i])[-2:]))
    for i in best[experts.groups_per_token :]:
        groups[i] = np.full(size, -np.inf)
    return np.concatenate(groups)


def _rms_norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def _rotate(x, positions, frequencies, amplitude):
    """Pairs (i, i + half) as complex numbers, turned by position * frequency; what is behind them
    stays."""
    half = len(frequencies)
    turned = (x[:, :half] + 1j * x[:, half : 2 * half]) * amplitude
    turned = turned * np.exp(1j * np.outer(positions, frequencies))
    return np.concatenate([turned.real, turned.imag, x[:, 2 * half :]], axis=-1)


def _attention(config, layer, x, positions, i):
    t, d = len(x), config.head_dim
    out = np.zeros((t, config.num_heads * d))
    windowed = bool(config.sliding_window) and i not in config.full_attention_layers
    turns = frequencies(config, windowed)
    amplitude = 1.0
    if isinstance(config.rope_scaling, YarnRopeScaling):
        amplitude = 0.1 * math.log(config.rope_scaling.factor) + 1
    variance = config.query_pre_attn_scalar if config.architecture == "gemma3_text" else d
    for head in range(config.num_heads):
        kv = head // (config.num_heads // config.num_kv_heads)
        rows, kv_rows = slice(head * d, (head + 1) * d), slice(kv * d, (kv + 1) * d)
        q = x @ layer["q_proj"][rows].T + (layer["q_bias"][rows] if "q_bias" in layer else 0)
        k = x @ layer["k_proj"][kv_rows].T + (layer["k_bias"][kv_rows] if "k_bias" in layer else 0)
        v = x @ layer["v_proj"][kv_rows].T + (layer["v_bias"][kv_rows] if "v_bias" in layer else 0)
        if "q_norm" in layer:
            q = _rms_norm(q, layer["q_norm"], config.rms_norm_eps)
            k = _rms_norm(k, layer["k_norm"], config.rms_norm_eps)
        q, k = (_rotate(z, positions, turns, amplitude) for z in (q, k))
        scores = q @ k.T / math.sqrt(variance)
        scores[np.triu_indices(t, 1)] = -np.inf
        if windowed:
            scores[np.tril_indices(t, -config.sliding_window)] = -np.inf
        out[:, head * d : (head + 1) * d] = np.exp(log_softmax(scores)) @ v
    return out @ layer["o_proj"].T


def _latent_attention(config, layer, x, positions, i):
    """As it is written in arXiv 2405.04434, equations 37 to 47, a head at a time."""
    latent, scaling, t = config.latent, config.rope_scaling, len(x)
    turns, still = frequencies(config), config.head_dim - latent.rotary_dim
    amplitude, factor = 1.0, 1.0
    if isinstance(scaling, YarnRopeScaling):
        of_all = 0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1
        amplitude = (0.1 * scaling.mscale * math.log(scaling.factor) + 1) / of_all
        factor = of_all**2

    def rotated(z):
        """Neighbours as complex numbers."""
        if not latent.interleaved:
            return _rotate(z, positions, turns, amplitude)
        turned = (z[:, ::2] + 1j * z[:, 1::2]) * amplitude
        turned = turned * np.exp(1j * np.outer(positions, turns))
        return np.stack([turned.real, turned.imag], axis=-1).reshape(z.shape)

    inner, queries = x, layer.get("q_proj")
    if latent.query_rank is not None:
        inner, queries = x @ layer["q_a_proj"].T, layer["q_b_proj"]
        inner = _rms_norm(inner, layer["q_a_layernorm"], 1e-6)
    made = x @ layer["kv_a_proj_with_mqa"].T
    compressed = _rms_norm(made[:, : latent.rank], layer["kv_a_layernorm"], 1e-6)
    shared = rotated(made[:, latent.rank :])
    out = []
    for head in range(config.num_heads):
        q = inner @ queries.reshape(config.num_heads, config.head_dim, -1)[head].T
        up = layer["kv_b_proj"].reshape(config.num_heads, still + latent.value_dim, -1)[head]
        k, v = compressed @ up[:still].T, compressed @ up[still:].T
        scores = q[:, :still] @ k.T + rotated(q[:, still:]) @ shared.T
        scores = scores * factor / math.sqrt(config.head_dim)
        scores[np.triu_indices(t, 1)] = -np.inf
        out.append(np.exp(log_softmax(scores)) @ v)
    return np.concatenate(out, axis=-1) @ layer["o_proj"].T
