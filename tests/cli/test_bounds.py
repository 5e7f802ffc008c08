"""Numbers out of their range, in every setting of a run: refused in a line that names the key."""

from __future__ import annotations

import math
from typing import get_args

import pytest

from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.config.schema import leaves, validate
from fp8rl_jax.config.settings import with_settings
from fp8rl_jax.config.training import OptimizerConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.training.state import make_optimizer

NUMBERS = {key: kind for key, kind in leaves(RunConfig) if {int, float} & {kind, *get_args(kind)}}
BELOW_ZERO = {"mesh.data", "mesh.fsdp", "mesh.tensor", "mesh.expert", "mesh.process_id"}
"""-1 has a meaning here."""


def refusal(settings: dict) -> str:
    with pytest.raises(UserError) as found:
        validate(with_settings(RunConfig(), settings))
    return str(found.value)


@pytest.mark.parametrize("key", NUMBERS)
def test_every_number_has_a_range(key):
    kind, values = NUMBERS[key], [] if key in BELOW_ZERO else [-2]
    if float in (kind, *get_args(kind)):
        values += [-0.5, math.nan, math.inf, -math.inf]
    for value in values:
        assert key.rpartition(".")[2] in refusal({key: value}), value


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"optimizer.learning_rate": -1e-4},
            "optimizer.learning_rate: -0.0001 must be a number of",
        ),
        (
            {"optimizer.beta1": 1.0},
            "optimizer.beta1: 1.0 must be a number of at least 0 and below 1",
        ),
        ({"sft.optimizer.beta2": 1.5}, "sft.optimizer.beta2: 1.5"),
        ({"optimizer.eps": 0.0}, "optimizer.eps: 0.0 must be a number above 0"),
        (
            {"optimizer.final_ratio": 2.0},
            "optimizer.final_ratio: 2.0 must be a number of at least 0",
        ),
        ({"seed": 2**32}, "seed = 4294967296 must be at least 0 and below 2**32"),
        ({"model.init.num_layers": 0}, "model.init.num_layers: 0 must be a number of at least 1"),
    ],
)
def test_what_is_out_of_range_above(settings, message):
    assert message in refusal(settings)


@pytest.mark.parametrize("rate", [-1.0, math.nan, math.inf])
def test_an_optimizer_of_its_own_is_held_to_the_same(rate):
    with pytest.raises(UserError, match=r"optimizer\.learning_rate: .* must be a number of"):
        make_optimizer(OptimizerConfig(learning_rate=rate), 1)
