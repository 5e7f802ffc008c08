"""The largest input of every linear, beside those of a float64 forward."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import DEEPSEEK, LLAMA

from fp8rl_jax.compare import inputs
from fp8rl_jax.compare.tokens import Row, as_tokens
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.policy import build_policy, linear_names
from fp8rl_jax.models.tensors import stack_of

sys.path.append(str(Path(__file__).parents[1] / "models"))
import reference_llama  # noqa: E402

ROWS = [Row([5, 12, 3], [7, 1]), Row([2, 9], [30, 4, 11, 8]), Row([1], [6])]


class Seen(np.ndarray):
    """A stack of weights, or a part of one, that notes how large its matrices' other factors are."""

    def __array_finalize__(self, other):
        self.name, self.layer, self.largest = (
            getattr(other, key, None) for key in ("name", "layer", "largest")
        )

    def __getitem__(self, index):
        part = super().__getitem__(index)
        if isinstance(part, Seen) and self.layer is None:
            part.layer = index
        return part

    def __array_ufunc__(self, ufunc, method, *operands, **settings):
        if ufunc is np.matmul:
            key = self.name, self.layer
            self.largest[key] = max(self.largest.get(key, 0), np.abs(operands[0]).max())
        plain = [np.asarray(x) if isinstance(x, Seen) else x for x in operands]
        return getattr(ufunc, method)(*plain, **settings)


def expected(config, weights):
    """{"layers.3.q_proj": largest} of the reference's forward, row by row."""
    largest, watched = {}, dict(weights)
    names = {".".join(name.split(".")[2:]) for name in linear_names(config)}
    for name in names:
        stack = weights[f"layers.{name}.weight"].view(Seen)
        stack.name, stack.layer, stack.largest = name, None, largest
        watched[f"layers.{name}.weight"] = stack
    for row in ROWS:
        reference_llama.logits(config, watched, row.prompt + row.completion)
    return {
        f"layers.{stack_of(config, name)[place]}.{name}": value
        for (name, place), value in largest.items()
    }


@pytest.mark.parametrize("config", [LLAMA, DEEPSEEK], ids=["llama", "deepseek"])
def test_inputs_are_those_of_a_float64_forward(config, monkeypatch):
    """Of queries, latents, experts and shared experts; padding counts for nothing."""
    weights = reference_llama.random_weights(config)
    policy = build_policy(config, lambda name, *_: jnp.asarray(weights[f"{name}.weight"], "f4"))
    monkeypatch.setattr(inputs, "_ROWS", 2)
    found, wanted = inputs.largest_inputs(policy, as_tokens(ROWS, 16)), expected(config, weights)
    assert found.keys() == wanted.keys() == {*linear_names(config)}
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=2e-5), name


def test_broken_weights_are_said():
    config = dataclasses.replace(LLAMA, num_layers=1)
    weights = reference_llama.random_weights(config)
    weights["layers.up_proj.weight"][0, 3] = np.inf
    policy = build_policy(config, lambda name, *_: jnp.asarray(weights[f"{name}.weight"], "f4"))
    with pytest.raises(UserError, match=r"inputs of layers\.0\.down_proj are not finite"):
        inputs.largest_inputs(policy, as_tokens(ROWS[:1], 16))
