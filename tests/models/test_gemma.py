"""Gemma 3: against transformers' numbers, its config.json in both spellings, and a rollout that the
trainer follows."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_llama as reference
from test_forward import SMALL_GEMMA, check_logits, logits, policy_and_weights, run
from tiny_models import GEMMA, QWEN3

from fp8rl_jax.config.recipe import RECIPES, Recipe
from fp8rl_jax.config.rl import RLConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.policy import cast, init_policy
from fp8rl_jax.models.rope import LinearRopeScaling
from fp8rl_jax.rollout.calibration import calibrate_on_prompts
from fp8rl_jax.rollout.engine import LocalEngine, pad_prompts
from fp8rl_jax.rollout.sampling import Sampling
from fp8rl_jax.rollout.sync import SyncContext
from fp8rl_jax.training.step import Batch, StepConfig, batch_logprobs
from fp8rl_jax.weights.hf_config import config_json, parse_config

# Logits of Gemma3ForCausalLM in float64 with the weights reference.random_weights(GEMMA), for the
# first 8 tokens of the vocabulary behind tokens 5 and 12 of TOKENS. transformers 4.57.3 and 5.23.0
# with torch 2.13.0 agree on all digits.
HUGGING_FACE = [
    [2.634842, 0.483971, -0.972059, 0.711061, -1.330252, -1.626682, -1.030568, -0.251354],
    [0.526337, -1.692136, -0.055588, 0.387123, -0.59242, 0.214781, 0.896457, -0.811172],
]

# What the same classes saved of GEMMA, less the keys that do not change the model.
SAVED = {
    "model_type": "gemma3_text",
    "attention_bias": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 48,
    "intermediate_size": 80,
    "max_position_embeddings": 2048,
    "num_attention_heads": 4,
    "num_hidden_layers": 5,
    "num_key_value_heads": 2,
    "query_pre_attn_scalar": 24,
    "rms_norm_eps": 1e-06,
    "sliding_window": 4,
    "use_bidirectional_attention": False,
    "vocab_size": 40,
}
TYPES = {
    "layer_types": [
        f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding", "sliding")
    ]
}
LINEAR = {"factor": 8.0, "rope_type": "linear"}
ROPE_4 = {"rope_local_base_freq": 500.0, "rope_scaling": LINEAR, "rope_theta": 50000.0}
KINDS = {
    "full_attention": {"rope_theta": 50000.0, **LINEAR},
    "sliding_attention": {"rope_theta": 500.0, "rope_type": "default"},
}


def parse(**changes) -> PolicyConfig:
    return parse_config(SAVED | TYPES | ROPE_4 | changes, "config.json")


def test_logits_are_those_of_transformers():
    check_logits(GEMMA, HUGGING_FACE, atol=2e-5, of_reference=1e-6)


def test_embeddings_are_scaled_in_the_compute_dtype():
    """sqrt(48) is 6.9282, in bfloat16 6.9375. Layers of zeros leave the embedding as it is, and an
    epsilon of 10^6 makes the last norm a division by 1000."""
    config = dataclasses.replace(SMALL_GEMMA, rms_norm_eps=1e6)
    policy = cast(init_policy(config, jax.random.key(0)), jnp.bfloat16)
    policy.layers = jax.tree.map(jnp.zeros_like, policy.layers)
    hidden = np.asarray(run(policy, np.arange(40, dtype=np.int32)[None]).hidden[0])
    bf16, embedding = hidden.dtype, np.asarray(policy.embed_tokens.value)

    def agreeing(scale):
        scaled = (embedding.astype(np.float32) * np.float32(scale)).astype(bf16).astype(np.float32)
        return (hidden == (scaled / 1000).astype(bf16)).mean()

    assert agreeing(6.9375) > 0.99 and agreeing(48**0.5) < 0.8


def test_fresh_norms_multiply_by_one():
    layers = init_policy(SMALL_GEMMA, jax.random.key(0)).layers
    assert all(not norm.value.any() for norm in (*layers.norms, layers.q_norm))
    assert init_policy(QWEN3, jax.random.key(0)).layers.input_layernorm.value.all()


@pytest.mark.parametrize(
    "spelling",
    [
        TYPES | ROPE_4,
        TYPES | {"rope_parameters": KINDS},
        ROPE_4 | {"sliding_window_pattern": 3, "architectures": ["Gemma3ForCausalLM"]},
        TYPES
        | {
            "rope_parameters": {"sliding_attention": {"rope_theta": 500}},
            "rope_scaling": LINEAR,
            "rope_theta": 50000,
        },
    ],
    ids=["transformers 4", "transformers 5", "first release", "mixed"],
)
def test_every_spelling_is_the_same_model(spelling):
    assert parse_config(SAVED | spelling, "config.json") == GEMMA


def test_defaults_are_those_of_transformers():
    kept = ("model_type", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    config = parse_config(
        {key: SAVED[key] for key in kept} | {"num_hidden_layers": 14}, "config.json"
    )
    assert (
        config.head_dim,
        config.num_kv_heads,
        config.query_pre_attn_scalar,
        config.sliding_window,
    ) == (256, 4, 256, 4096)
    assert (config.rope_theta, config.local_rope_theta, config.rope_scaling) == (1e6, 1e4, None)
    assert config.full_attention_layers == (5, 11) and config.tie_word_embeddings
    assert (config.max_position_embeddings, config.rms_norm_eps) == (131072, 1e-6)


@pytest.mark.parametrize(
    "config",
    [
        GEMMA,
        dataclasses.replace(
            GEMMA, full_attention_layers=(0, 3), rope_scaling=None, tie_word_embeddings=False
        ),
        dataclasses.replace(
            GEMMA, full_attention_layers=(), eos_token_ids=(1, 6), bos_token_id=2, pad_token_id=0
        ),
        dataclasses.replace(
            GEMMA, sliding_window=None, full_attention_layers=(), local_rope_theta=None
        ),
    ],
    ids=["gemma3", "irregular", "windows_only", "no_window"],
)
def test_config_json_round_trips(config):
    assert parse_config(json.loads(json.dumps(config_json(config))), "config.json") == config


def test_what_is_no_gemma_has_none_of_it():
    for changes in ({"query_pre_attn_scalar": 16}, {"local_rope_theta": 500.0}):
        with pytest.raises(UserError, match="query_pre_attn_scalar|rope_local_base_freq"):
            dataclasses.replace(QWEN3, **changes)
    with pytest.raises(UserError, match="query_pre_attn_scalar None"):
        dataclasses.replace(GEMMA, query_pre_attn_scalar=None)
    with pytest.raises(UserError, match="rope_local_base_freq None"):
        dataclasses.replace(GEMMA, local_rope_theta=None)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
        ({"hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"sliding_window": None}, "layer_types holds sliding_attention"),
        ({"sliding_window": 0}, "sliding_window must be positive"),
        (
            {"layer_types": None, "sliding_window_pattern": 0},
            "sliding_window_pattern must be positive",
        ),
        ({"layer_types": ["sliding_attention"]}, "layer_types has 1 entries for 5 layers"),
        ({"layer_types": [["full_attention"]] * 5}, "layer_types"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be positive"),
        ({"query_pre_attn_scalar": 24.0}, "query_pre_attn_scalar must be an integer"),
        ({"rope_local_base_freq": -1.0}, "rope_local_base_freq must be positive"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is missing"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 0.5}},
            "rope_scaling.factor must be at least 1",
        ),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.rope_type 'longrope'"),
        (
            {"rope_parameters": KINDS},
            "rope_scaling and rope_parameters.full_attention are both given",
        ),
        ({"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters.rope_theta"),
        (
            {"rope_parameters": {"full_attention": 3}},
            "rope_parameters.full_attention must be an object",
        ),
        (
            {"rope_parameters": {"sliding_attention": LINEAR}},
            "rope_parameters.sliding_attention.rope_type",
        ),
        (
            {"rope_parameters": {"sliding_attention": {"rope_theta": 1.0}}},
            "rope_local_base_freq 500.0 contradicts",
        ),
    ],
)
def test_refusals_name_the_file_and_the_key(changes, key):
    with pytest.raises(UserError) as error:
        parse(**changes)
    assert (
        str(error.value).startswith("config.json: ")
        and key in str(error.value)
        and "\n" not in str(error.value)
    )


NESTED = ({}, {"rope_type": 3}, {"full_attention": {"factor": "x"}})
RUBBISH = (None, True, -1, 0, 2.5, float("inf"), float("nan"), "x", [], [1], [None], *NESTED)


def test_no_value_of_a_key_does_more_than_a_user_error():
    keys = (
        *SAVED,
        *TYPES,
        *ROPE_4,
        "rope_parameters",
        "sliding_window_pattern",
        "tie_word_embeddings",
    )
    refused = 0
    for key in keys:
        for value in RUBBISH:
            try:
                parse(**{key: value})
            except UserError as error:
                refused += 1
                assert "\n" not in str(error)
    assert refused > len(keys) * len(RUBBISH) / 2


def test_linear_scaling_is_not_for_gemma_alone():
    config = parse_config(config_json(QWEN3) | {"rope_scaling": LINEAR}, "config.json")
    assert (
        config.rope_scaling == LinearRopeScaling(8.0)
        and parse_config(config_json(config), "config.json") == config
    )


PROMPTS = pad_prompts([[3, 9, 27, 1, 30, 8, 21], [5, 8]], [0, 1], 7)


def logprobs_of_full_forwards(engine, rollout) -> np.ndarray:
    """Each completion behind its prompt as one row, no cache, in the rollout's formats."""
    tokens, lengths = np.asarray(rollout.tokens), np.repeat(np.asarray(rollout.prompts.lengths), 2)
    rows = np.zeros((len(tokens), PROMPTS.tokens.shape[1] + tokens.shape[1]), np.int32)
    for row, (start, completion) in enumerate(zip(lengths, tokens, strict=True)):
        rows[row, : start + len(completion)] = [*PROMPTS.tokens[row // 2, :start], *completion]
    found = logits(engine.policy, run(engine.policy, rows).hidden)
    columns = lengths[:, None] - 1 + np.arange(tokens.shape[1])
    table = reference.log_softmax(np.take_along_axis(found, columns[..., None], 1))
    return np.take_along_axis(table, tokens[..., None], -1)[..., 0]


def trainer_logprobs(policy, rollout, recipe: str | Recipe, dtype="float32") -> np.ndarray:
    batch = Batch(
        PROMPTS.tokens,
        PROMPTS.lengths,
        rollout.tokens,
        rollout.mask,
        rollout.policy_logprobs,
        jnp.zeros(4),
    )
    recipe = RECIPES[recipe] if isinstance(recipe, str) else recipe
    config = StepConfig(recipe, RLConfig(), dtype, 1.0)
    return np.asarray(batch_logprobs(policy, batch, config))


def check_followed(config: PolicyConfig, recipe: str) -> None:
    """The rollout equals a full forward in its own formats, and a trainer of the same formats, up to
    flipped roundings, which stay far below what dropping the formats costs (the bounds of
    rollout/test_generate.py and training/test_trained_recipes.py)."""
    policy, _ = policy_and_weights(config)
    engine = LocalEngine(RECIPES[recipe], jnp.float32, unroll=False)
    scales = calibrate_on_prompts(policy, PROMPTS, engine.recipe, jnp.float32)
    engine.sync(policy, SyncContext(scales=scales))
    rollout = engine.generate(PROMPTS, 2, Sampling(8), jax.random.key(2))
    error = np.abs(logprobs_of_full_forwards(engine, rollout) - rollout.policy_logprobs)
    gap = np.abs(trainer_logprobs(policy, rollout, recipe) - rollout.policy_logprobs)
    if recipe == "bf16":
        assert max(gap.max(), error.max()) < 1e-4
        return
    cost = np.abs(trainer_logprobs(policy, rollout, "bf16") - rollout.policy_logprobs)
    assert (
        (error < 1e-4).mean() > 0.8
        and error.max() < cost.max() / 2
        and error.mean() < cost.mean() / 10
    )
    if engine.recipe.trainer == engine.recipe.rollout:
        assert gap.mean() < cost.mean() / 10


@pytest.mark.parametrize(
    "recipe",
    [
        name
        for name, recipe in RECIPES.items()
        if name == "bf16" or recipe.quantizes_linears or recipe.quantizes_attention
    ],
)
def test_the_trainer_follows_the_rollout_under_every_recipe(recipe):
    """A window of 3 within prompts of 7 and completions of 8: prefix and completion cache are both
    cut."""
    check_followed(SMALL_GEMMA, recipe)
