"""DeepSeek-V3: against transformers' numbers, and latent attention through the cache."""

from __future__ import annotations

import dataclasses

import numpy as np
import reference_llama as reference
from test_forward import policy_and_weights, run
from tiny_models import DEEPSEEK

from fp8rl_jax.weights.hf_config import config_json, parse_config

# Logits in float64 (the router's in float32) with the weights reference.random_weights(config), for
# the first 8 tokens of the vocabulary behind tokens 5 and 12: transformers 5.24.0, torch 2.13.0.
TOKENS = [5, 17, 3, 39, 0, 22, 8, 31, 14, 2, 27, 11]
DEEPSEEK_V3 = [
    [1.158228, 0.713654, 0.248754, 0.641259, 0.58842, -2.358548, 2.138775, -0.034799],
    [-1.023544, 1.600037, -0.961892, -0.730399, -0.702182, -0.288311, 0.236553, 1.291201],
]
WITHOUT_QUERY_LATENTS = [
    [1.792277, -0.325186, -0.260005, 0.428404, 1.671957, 0.51587, 0.58063, -0.433429],
    [1.209693, -0.244089, -0.484023, -0.15136, -0.490741, 0.100792, -0.94009, -1.094861],
]
PLAIN = dataclasses.replace(
    DEEPSEEK,
    rope_scaling=None,
    latent=dataclasses.replace(DEEPSEEK.latent, query_rank=None, interleaved=False, value_dim=28),
)


def test_logits_are_those_of_transformers():
    for config, expected in ((DEEPSEEK, DEEPSEEK_V3), (PLAIN, WITHOUT_QUERY_LATENTS)):
        policy, weights = policy_and_weights(config)
        hidden = run(policy, np.array([TOKENS], np.int32)).hidden[0]
        ours = np.asarray(hidden, np.float64) @ np.asarray(policy.head, np.float64).T
        np.testing.assert_allclose(ours[[4, 11], :8], expected, atol=3e-5)
        found = reference.logits(config, weights, TOKENS)[[4, 11], :8]
        np.testing.assert_allclose(found, expected, atol=2e-6)
        assert parse_config(config_json(config), "config.json") == config
