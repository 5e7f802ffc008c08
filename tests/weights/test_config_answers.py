"""What a config.json means, against transformers: every key of every family absent, null, at its
default and at another value, and facts that two places state (config_answers.py)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from config_answers import FAMILIES, config_of, rows

from fp8rl_jax.errors import UserError
from fp8rl_jax.models.attention import layer_frequencies, rope_frequencies
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.weights.hf_config import config_json, parse_config

ANSWERS = json.loads((Path(__file__).parent / "config_answers.json").read_text())
BASE = {family: facts for family, changes, facts in ANSWERS if not changes}
ACTIVATIONS = {"SiLUActivation": "silu", "GELUTanh": "gelu_pytorch_tanh"}


def facts(config: PolicyConfig) -> dict:
    """What transformers was asked, of ours."""
    full = [i for i in range(config.num_layers) if i in config.full_attention_layers]
    windows = config.windows or (2**31 - 1,) * config.num_layers
    ropes = {"full_attention": rope_frequencies(config)}
    if (of_layers := layer_frequencies(config)) is not None:
        kinds = ["full" if i in full else "sliding" for i in range(config.num_layers)]
        ropes = {f"{kind}_attention": of_layers[kinds.index(kind)] for kind in set(kinds)}
    scaling = config.rope_scaling
    found = {
        "head_dim": config.head_dim,
        "kv_heads": config.num_kv_heads,
        "bias": config.qkv_bias,
        "other_biases": False,
        "qk_norm": config.qk_norm,
        "activation": config.family.activation,
        "eps": config.rms_norm_eps,
        "score_scale": config.score_scale,
        "tied": config.tie_word_embeddings,
        "positions": config.max_position_embeddings,
        "windows": [None if window == 2**31 - 1 else window for window in windows],
        "softcapping": [None, None],
        "causal": True,
        "special": [config.bos_token_id, list(config.eos_token_ids), config.pad_token_id],
        "rope": {
            kind: [
                1.0 if scaling is None or kind == "sliding_attention" else scaling.amplitude,
                np.asarray(frequencies).tolist(),
            ]
            for kind, frequencies in ropes.items()
        },
    }
    if (latent := config.latent) is not None:
        found["latent"] = [
            latent.rank,
            latent.rotary_dim,
            latent.value_dim,
            latent.query_rank,
            latent.interleaved,
        ]
    if (experts := config.experts) is not None:
        found["experts"] = {
            "layers": [i in config.sparse_layers for i in range(config.num_layers)],
            "count": experts.count,
            "per_token": experts.per_token,
            "normalize": experts.normalize,
            "groups": [experts.groups, experts.groups_per_token],
            "scale": experts.scale,
            "shared": experts.shared,
        }
    return found


def differences(ours: dict, theirs: dict) -> list[str]:
    theirs = dict(theirs)
    theirs["activation"] = ACTIVATIONS.get(theirs["activation"], theirs["activation"])
    bos, eos, pad = theirs["special"]
    eos = [] if eos is None else eos if isinstance(eos, list) else [eos]
    theirs["special"] = [bos, eos, pad]
    rope = {kind: ours["rope"].get(kind) for kind in theirs["rope"]}
    wrong = [key for key in theirs if key != "rope" and ours.get(key) != theirs[key]]
    for kind, (amplitude, frequencies) in theirs["rope"].items():
        if rope[kind] is None or not np.allclose(rope[kind][1], frequencies, rtol=1e-5, atol=0):
            wrong.append(f"rope of {kind}")
        elif abs(rope[kind][0] - amplitude) > 1e-9:
            wrong.append(f"amplitude of {kind}")
    return wrong


def parsed(family: str, changes: dict) -> PolicyConfig | str:
    try:
        return parse_config(config_of(family, changes), "config.json")
    except UserError as error:
        return str(error)


def test_the_table_is_of_these_rows():
    assert [row[:2] for row in ANSWERS] == json.loads(json.dumps([*rows()]))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_configuration_is_the_model_of_transformers_or_refused(family):
    wrong, refused, answered = [], [], 0
    for name, changes, found in ANSWERS:
        if name != family or found is None:
            continue
        answered += 1
        ours = parsed(family, changes)
        if isinstance(ours, str):
            refused.append((changes, ours))
            continue
        if different := differences(facts(ours), BASE[family] | found):
            wrong.append((changes, different))
        again = parse_config(json.loads(json.dumps(config_json(ours))), "config.json")
        if again != ours:
            wrong.append((changes, "written and read again it is another"))
    assert wrong == []
    for changes, message in refused:
        assert any(key in message for key in changes), (changes, message)
    # what the library does not compute, and what contradicts itself; of DeepSeek-V3 transformers
    # builds models, too, that fail when they run
    most = 0.22 if family == "deepseek_v3" else 0.15
    assert len(refused) < most * answered, refused
