"""rl.selection: which samples teach, built in and as a function of the user's."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import LEARNS, RUN, check_refused, measured, metric_rows, train, write_run

import fp8rl_jax as fp8rl
from fp8rl_jax import rl
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.config.tasks import TaskConfig
from fp8rl_jax.errors import UserError

FILE = Path(__file__).with_name("toy_selection.py")
REWARDS = np.float32([[1, 0, 0, 1], [0, 0, 0, 0], [2, 5, 1, 0]])


def inputs(**changes) -> rl.SelectionInputs:
    usual = {
        "advantages": jnp.asarray(REWARDS - REWARDS.mean(1, keepdims=True)),
        "rewards": jnp.asarray(REWARDS),
        "valid": jnp.ones((3, 4), bool),
        "lengths": jnp.arange(12).reshape(3, 4),
        "stopped": jnp.arange(12).reshape(3, 4) % 3 > 0,
        "key": jax.random.key(0),
    }
    return rl.SelectionInputs(**(usual | changes))


def of_file(name: str, **arguments) -> rl.RLConfig:
    return rl.RLConfig(selection=f"{FILE}:{name}", selection_args=arguments)


def test_built_in_rules_weigh_every_row():
    rows, weights = rl.select(inputs(), rl.RLConfig(selection="informative"))
    np.testing.assert_array_equal(rows, np.arange(12).reshape(3, 4))
    np.testing.assert_array_equal(weights, [[1] * 4, [0] * 4, [1] * 4])
    # what has no reward does not tell a prompt's samples apart
    first = inputs(valid=jnp.asarray(REWARDS != 1))
    _, weights = rl.select(first, rl.RLConfig(selection="informative"))
    np.testing.assert_array_equal(weights[:, 0], [0, 0, 1])
    _, weights = rl.select(inputs(), rl.RLConfig(selection="finished"))
    np.testing.assert_array_equal(weights, np.arange(12).reshape(3, 4) % 3 > 0)


def test_a_function_of_a_file_chooses_rows_and_weights():
    rows, weights = jax.jit(rl.select, static_argnums=1)(
        inputs(), of_file("best_and_worst", weight=0.5)
    )
    assert rows.shape == (3, 2) and np.all(weights == 0.5)
    pairs = {tuple(pair) for pair in rows.tolist()}
    assert pairs <= {(0, 1), (4, 4), (9, 11)} and (9, 11) in pairs
    rl.check_rows(np.asarray(rows), 3, 4, "best_and_worst")
    rows, weights = rl.select(inputs(), of_file("longest_first"))
    np.testing.assert_array_equal(rows, np.arange(12)[::-1, None])
    np.testing.assert_array_equal(weights, np.ones((12, 1)))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_rows", r"must return rows, integers .*; it returned float32 \[3, 4\]"),
        ("other_weights", r"weights must be an array of the rows' shape \[4\], not float32 \[3\]"),
        ("nothing_there", "has no function 'nothing_there'"),
    ],
)
def test_what_is_no_rule_is_one_line(name, message):
    with pytest.raises(UserError, match=message):
        rl.select(inputs(), of_file(name))
    with pytest.raises(UserError, match=r"rl\.selection.*nothing_there|must"):
        rl.check_functions(of_file(name))


def test_rows_that_cannot_be_are_named():
    for name, message in (
        ("across_prompts", "line 1 has samples of several prompts"),
        ("beyond", "row 12 is none of the 12 samples"),
    ):
        rows, _ = rl.select(inputs(), of_file(name))
        with pytest.raises(UserError, match=message):
            rl.check_rows(np.asarray(rows), 3, 4, name)
    faults = RunConfig(rl=of_file("beyond"), task=TaskConfig(max_turns=2)).problems()
    assert any(line.startswith("rl.selection: an episode") for line in faults)
    with pytest.raises(UserError, match=r"rl\.selection: 'best' is none of 'informative', 'finis"):
        rl.RLConfig(selection="best")


def updated(**settings):
    policy, tokenizer = fp8rl.byte_policy(**RUN["model"]["init"])
    usual = {"compute_dtype": "float32", "samples_per_prompt": 4, "max_new_tokens": 6}
    session = fp8rl.Session(policy, tokenizer, learning_rate=1e-2, **(usual | settings))
    rollout = session.rollout(["ab=", "cde=", "f="])
    metrics = session.update(rollout, [0.0, 1.0, 2.0, 0.0, *[1.0] * 4, 1.0, 0.0, 2.0, 1.0])
    surprise = -np.concatenate([np.asarray(x, np.float64) for x in rollout.logprobs]).mean()
    assert metrics["rollout/entropy"] == pytest.approx(surprise, rel=1e-5)
    return metrics, [np.asarray(x) for x in jax.tree.leaves(session.policy)]


def test_an_update_of_chosen_rows_is_that_of_these_rows():
    whole, weights = updated()
    assert "selection/used" not in whole
    # of the second prompt all, of the third two
    assert whole["advantages/frac_zero"] == 0.5

    def every(inputs, config):
        return jnp.arange(12).reshape(3, 4)

    def twice(inputs, config):
        return jnp.concatenate([jnp.arange(12).reshape(3, 4)] * 2)

    for rule in (every, f"{FILE}:longest_first", twice):
        metrics, found = updated(selection=rule)
        assert metrics["selection/used"] == 1
        for name in ("loss", "mismatch/k3", "optim/grad_norm"):
            assert metrics[name] == pytest.approx(whole[name], rel=1e-3, abs=1e-6)
        for one, other in zip(found, weights, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)

    def half(inputs, config):
        rows = every(inputs, config)
        return rows, jnp.full(rows.shape, 0.5)

    metrics, _ = updated(selection=half)
    assert metrics["optim/grad_norm"] == pytest.approx(whole["optim/grad_norm"] / 2, rel=1e-3)
    # a prompt of equal rewards has no advantage: without it the mean is over fewer tokens
    metrics, _ = updated(selection="informative")
    assert metrics["selection/used"] == pytest.approx(2 / 3)
    assert metrics["advantages/frac_zero"] == 0.25
    assert metrics["optim/grad_norm"] > 1.1 * whole["optim/grad_norm"]


def test_a_run_chooses_goes_on_bit_for_bit_and_refuses_what_does_not_divide(tmp_path, capsys):
    chosen = {
        "rl": {"selection": f"{FILE}:best_and_worst"},
        "trainer": {"steps": 3, "updates_per_rollout": 2},
        "checkpoint": {"every": 1},
    }
    run = write_run(tmp_path, LEARNS, chosen)
    assert train(run, tmp_path / "whole") == 0
    used = [row["selection/used"] for row in metric_rows(tmp_path / "whole")]
    assert all(0 < part <= 0.5 for part in used)
    assert train(run, tmp_path / "parts", "--trainer.steps", "2") == 0
    assert train(run, tmp_path / "parts", "--resume") == 0
    assert measured(tmp_path / "parts") == measured(tmp_path / "whole")
    odd = write_run(tmp_path, LEARNS, chosen, {"rl": {"selection": f"{FILE}:odd"}})
    check_refused(odd, tmp_path / "odd", capsys, [], "3 lines of rows do not divide by 2")
