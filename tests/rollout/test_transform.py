"""rollout.transform: what a function of the user's does to the served policy at a weight sync."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout.tiny import make_engine, make_policy, make_prompts
from rollout.toy_transform import noisy_norms
from tiny_run import LEARNS, check_refused, measured, metric_rows, train, write_run

from fp8rl_jax.cli.main import main
from fp8rl_jax.config.recipe import PrecisionConfig
from fp8rl_jax.config.run import RolloutConfig, RunConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.functions import register
from fp8rl_jax.rollout.noise import level
from fp8rl_jax.rollout.sampling import Sampling
from fp8rl_jax.rollout.sync import SyncContext, transformed

FILE = Path(__file__).with_name("toy_transform.py")
NOISE = "fp8rl_jax.rollout.noise:on_norms"
NOISY = {
    "rollout": {
        "transform": f"{FILE}:noisy_norms",
        "transform_args": {"sigma": 0.05, "decay": 0.5},
    },
    "trainer": {"steps": 3},
}


@pytest.mark.parametrize("recipe", ["bf16", "fp8-rl"])
@pytest.mark.parametrize("unroll", [True, False])
def test_the_served_copy_is_changed_and_the_masters_are_not(recipe, unroll):
    engine, policy = make_engine(recipe, unroll), make_policy()
    plain = engine.policy
    engine.transform = register(noisy_norms), {"sigma": 0.1}
    key = jax.random.key(3)
    engine.sync(policy, SyncContext(2, key, engine.scales))
    one = plain.layers[0] if unroll else plain.layers
    other = engine.policy.layers[0] if unroll else engine.policy.layers
    for name, tensor in one.tensors().items():
        pairs = zip(*map(jax.tree.leaves, (tensor, other.tensors()[name])), strict=True)
        apart = [float(jnp.abs(jnp.float32(a) - jnp.float32(b)).max()) for a, b in pairs]
        assert (max(apart) > 0.01) == ("layernorm" in name), name
    again = make_engine(recipe, unroll)
    again.transform = engine.transform
    again.sync(policy, SyncContext(jnp.int32(2), key, engine.scales))
    jax.tree.map(np.testing.assert_array_equal, again.policy, engine.policy)
    prompts, sampling = make_prompts(), Sampling(4)
    rollout = engine.generate(prompts, 2, sampling, key)
    assert jnp.isfinite(rollout.policy_logprobs).all()


def test_noise_falls_by_stages_and_is_on_the_norms_alone():
    # sigma_trend of NVlabs/QeRL at e8c6e79 for 1e-2, 1e-4 and 10 stages, and get_sigma_by_step: the
    # first tenth of the steps has none, and the last stage goes on behind the end
    wanted = [0.0] + [1e-2 * 10 ** (-i / 4) for i in range(9)]
    steps = [0, 9, 10, 19, 20, 50, 89, 90, 99, 100, 200]
    stages = [0, 0, 1, 1, 2, 5, 8, 9, 9, 9, 9]
    found = [float(level(step, 100, 1e-2, 1e-4, 10)) for step in steps]
    np.testing.assert_allclose(found, [wanted[stage] for stage in stages], rtol=1e-6)
    assert float(level(5, 0, 1e-2, 1e-4, 10)) == 0
    policy, key = make_engine("fp8-rl").policy, jax.random.key(3)
    arguments = {"start": 0.1, "end": 1e-3, "stages": 10}

    def served(step, key):
        return transformed(policy, SyncContext(step, key, None, 100), NOISE, arguments)

    jax.tree.map(np.testing.assert_array_equal, served(9, key), policy)
    other = served(10, key)
    changed = []
    for (path, one), two in zip(
        jax.tree.leaves_with_path(policy), jax.tree.leaves(other), strict=True
    ):
        if "layernorm" in (name := jax.tree_util.keystr(path)) or ".norm" in name:
            changed.append(np.asarray(two - one))
        else:
            np.testing.assert_array_equal(one, two)
    draws = np.stack(changed)
    assert len(draws) == 2 * policy.config.num_layers + 1
    assert draws.std() == pytest.approx(0.1, rel=0.1)
    assert np.abs(np.corrcoef(draws) - np.eye(len(draws))).max() < 0.4  # each has its own
    jax.tree.map(np.testing.assert_array_equal, served(10, key), other)
    for wrong, message in (
        ({"start": 0.0}, "start = 0 must be above 0"),
        ({"stages": 2}, "stages = 2 must be a whole number, at least 3"),
    ):
        with pytest.raises(UserError, match=rf"rollout\.transform_args: {message}"):
            transformed(policy, SyncContext(10, key, None, 100), NOISE, wrong)


def test_a_run_serves_it_says_so_and_goes_on_bit_for_bit(tmp_path, capsys):
    run = write_run(tmp_path, LEARNS, NOISY, {"checkpoint": {"every": 1}})
    assert train(run, tmp_path / "whole") == 0
    rows = metric_rows(tmp_path / "whole")
    assert rows[0]["sync/arrived"] > 0.1 and rows[0]["sync/noise"] > 0.1
    assert train(run, tmp_path / "parts", "--trainer.steps", "1") == 0
    assert train(run, tmp_path / "parts", "--resume") == 0
    assert measured(tmp_path / "parts") == measured(tmp_path / "whole")
    plain = write_run(tmp_path, LEARNS, {"trainer": {"steps": 1}})
    assert train(plain, tmp_path / "plain", "--precision.exact", "false") == 0
    # the trainer has no noise
    assert rows[0]["mismatch/k3"] > 1e3 * metric_rows(tmp_path / "plain")[0]["mismatch/k3"] >= 0
    # what else is asked of such a run goes by its files, and says so where that is another policy
    capsys.readouterr()
    noisy, other = str(tmp_path / "whole"), str(tmp_path / "plain")
    assert main(["plan", run]) == main(["doctor", "--model", noisy]) == 0
    assert "transform" not in capsys.readouterr().err
    words = ["--max-tokens", "4", "--compute-dtype", "float32"]
    assert main(["compare", noisy, other, *words]) == 0
    assert capsys.readouterr().err.count("it is left out here") == 1
    assert main(["export", "--model", noisy, "--format", "rollout", "--output", other]) == 2
    assert "rollout.transform" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("broken", {}, "ValueError: out of noise"),
        ("nothing", {"sigma": 1.0}, r"cannot be called with \(policy, context, sigma=\.\.\.\)"),
        ("no_policy", {}, "must return the policy that it was given .*; it returned another int"),
        ("other_dtype", {}, r"must return the policy .*; .* is float16\[.*\], not float32\["),
        ("missing", {}, "has no function 'missing'"),
    ],
)
def test_a_function_that_cannot_be_is_one_line(name, arguments, message):
    policy = make_policy()
    with pytest.raises(UserError, match=message):
        transformed(policy, SyncContext(), f"{FILE}:{name}", arguments)


def test_faults_of_the_settings(tmp_path, capsys):
    with pytest.raises(UserError, match=r"rollout\.transform: 'noise' is no module:function"):
        RolloutConfig(transform="noise")
    with pytest.raises(UserError, match=r"rollout\.transform_args: .* takes no arguments"):
        RolloutConfig(transform_args={"sigma": 1.0})
    exact = RunConfig(
        rollout=RolloutConfig(transform=f"{FILE}:nothing"), precision=PrecisionConfig(exact=True)
    )
    assert any(line.startswith("rollout.transform: ") for line in exact.problems())
    run = write_run(tmp_path, {"rollout": {"transform": f"{FILE}:broken"}})
    # once more in the same place: a run that failed at its start has left nothing there
    for _ in range(2):
        check_refused(run, tmp_path / "run", capsys, [], "out of noise")
    # before anything is written
    flags = ["--rollout.transform", f"{FILE}:missing"]
    check_refused(run, tmp_path / "other", capsys, flags, "has no function 'missing'")
    assert not (tmp_path / "other").exists()
