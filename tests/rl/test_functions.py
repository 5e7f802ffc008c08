"""Objectives, advantage estimators and importance weights that are functions: built in, in a file,
or in Python."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import pickle
import re
import sys
import textwrap
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax import functions, rl
from fp8rl_jax.cli.load import load_config
from fp8rl_jax.cli.main import main
from fp8rl_jax.config.correction import WEIGHTS
from fp8rl_jax.config.files import dump_toml
from fp8rl_jax.config.rl import ESTIMATORS, OBJECTIVES, ClipCalibrationConfig
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.rl import advantages, objectives
from fp8rl_jax.rl.correction import BUILT_IN_WEIGHTS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "objectives.md"
NONE = rl.CorrectionConfig("none")


def make_inputs(batch, config):
    mask = jnp.asarray(batch["mask"])
    arrays = {name: jnp.asarray(batch[name]) for name in ("logprobs", "advantages")}
    denominator = rl.loss_denominator(mask, config)
    return rl.LossInputs(
        **arrays, mask=mask, denominator=denominator, old_logprobs=jnp.asarray(batch["old"])
    )


@partial(jax.jit, static_argnames="config")
def loss_and_grads(inputs, config):
    def loss(logprobs):
        return rl.policy_loss(dataclasses.replace(inputs, logprobs=logprobs), config)

    return jax.value_and_grad(loss, has_aux=True)(inputs.logprobs)


def equal(first, second) -> bool:
    return all(
        jax.tree.leaves(jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), first, second))
    )


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_built_in_objective_named_as_a_users_is_the_same(make_batch, name):
    own, users = (
        rl.LossConfig(objective=name),
        rl.LossConfig(objective=f"fp8rl_jax.rl.objectives:{name}"),
    )
    inputs = make_inputs(make_batch(1, spread=0.5), own)
    assert equal(loss_and_grads(inputs, own), loss_and_grads(inputs, users))


def test_built_in_estimators_and_weights_named_as_a_users_are_the_same(make_batch):
    batch, rewards = make_batch(2), jnp.asarray(np.random.default_rng(0).normal(size=8))
    valid, lengths = jnp.arange(8) != 3, jnp.arange(8) + 1
    for name in ESTIMATORS:
        configs = [
            rl.AdvantageConfig(estimator=spec) for spec in (name, f"fp8rl_jax.rl.advantages:{name}")
        ]
        found = [rl.group_advantages(rewards, 4, config, valid, lengths) for config in configs]
        assert equal(*found) and found[0].any()
    for name in BUILT_IN_WEIGHTS:
        log_ratio, mask = (
            jnp.asarray(batch["logprobs"] - batch["rollout"]),
            jnp.asarray(batch["mask"]),
        )
        configs = [
            rl.CorrectionConfig("none", weights=spec)
            for spec in (name, f"fp8rl_jax.rl.correction:{name}")
        ]
        assert equal(*(rl.importance_weights(log_ratio, mask, config) for config in configs))


def test_the_configuration_names_what_is_built_in():
    assert tuple(objectives.BUILT_IN) == OBJECTIVES and tuple(advantages.BUILT_IN) == ESTIMATORS
    assert ("none", *BUILT_IN_WEIGHTS) == WEIGHTS


def test_the_overlay_is_the_formula_of_its_docstring(make_batch):
    demo, overlay = (
        ROOT / "experiments" / "runs" / "demo.toml",
        ROOT / "experiments" / "recipes" / "topr.toml",
    )
    config = load_config(
        RunConfig, [str(demo), str(overlay), "--rl.objective-args.most", "0.9"], "fp8rl train"
    ).rl
    config = dataclasses.replace(config, objective=str(ROOT / config.objective))
    rl.check_functions(config)
    batch = make_batch(3, spread=0.5)
    (loss, metrics), grads = loss_and_grads(make_inputs(batch, config), config)
    mask, advantage = (
        batch["mask"],
        batch["advantages"][:, None].astype(np.float64) + np.zeros(batch["mask"].shape),
    )
    ratio = np.exp(batch["logprobs"].astype(np.float64) - batch["old"])
    weight = np.where(advantage < 0, np.minimum(ratio, 0.9), 1.0)
    np.testing.assert_allclose(
        loss, (-weight * advantage * batch["logprobs"])[mask].mean(), rtol=1e-5
    )
    np.testing.assert_allclose(
        grads, np.where(mask, -weight * advantage, 0) / mask.sum(), rtol=1e-5, atol=1e-8
    )
    tapered = ((advantage < 0) & (ratio > 0.9))[mask].mean()
    np.testing.assert_allclose(rl.metric_values(metrics)["objective/tapered"], tapered, rtol=1e-6)


def test_a_function_defined_again_is_compiled_again(make_batch):
    def cell(factor):
        def objective(inputs, config):
            return -factor * inputs.advantages * inputs.logprobs

        return rl.LossConfig(objective=objective)

    first, second = cell(1.0), cell(2.0)
    assert first != second and re.fullmatch(r".*:.*cell\.<locals>\.objective#\d+", first.objective)
    inputs = make_inputs(make_batch(), first)
    (once, _), (twice, _) = (loss_and_grads(inputs, config)[0] for config in (first, second))
    assert once != 0 and twice == 2 * once
    assert dataclasses.replace(first, clip_low=0.1).objective == first.objective


def test_a_function_that_can_be_imported_has_its_name_and_others_a_number(tmp_path, monkeypatch):
    assert functions.register(objectives.clip) == "fp8rl_jax.rl.objectives:clip"
    sign = partial(objectives.clip)
    spec = functions.register(sign)
    assert spec.startswith("<python>:partial#") and functions.register(sign) == spec
    assert functions.load_function(spec, "key") is sign
    for cell in ({"__name__": "__main__"}, {}):
        exec("def objective(inputs, config): return inputs.logprobs", cell)
        config = rl.RLConfig(objective=cell["objective"])
        assert re.fullmatch(r"<python>:objective#\d+", config.objective)
        rl.check_functions(config)
    (tmp_path / "reloaded.py").write_text("def f():\n    return 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("reloaded")
    assert functions.register(module.f) == "reloaded:f"
    (tmp_path / "reloaded.py").write_text("def f():\n    return 22\n")
    importlib.invalidate_caches()
    importlib.reload(module)
    assert re.fullmatch(r"<python>:f#\d+", functions.register(module.f))
    with pytest.raises(
        UserError,
        match="rl.objective = 'reloaded:f': reloaded.py was edited after this process loaded it",
    ):
        rl.check_functions(rl.RLConfig(objective="reloaded:f"))


def test_a_function_of_another_process_is_one_clear_line():
    for config in (rl.RLConfig(objective="<python>:f#999"), _weights("<python>:<lambda>#998")):
        with pytest.raises(
            UserError,
            match=r"^rl\.(objective|correction\.weights) = .* was given in Python, in a process that is gone; put it into a file",
        ):
            rl.check_functions(config)


def test_arguments_are_hashed_and_never_change():
    config = rl.LossConfig(objective="m:f", objective_args={"alpha": 1, "beta": 0.5})
    assert (
        config.objective_args == {"alpha": 1.0, "beta": 0.5}
        and type(config.objective_args["alpha"]) is float
    )
    assert hash(config) == hash(
        rl.LossConfig(objective="m:f", objective_args={"beta": 0.5, "alpha": 1.0})
    )
    assert config != dataclasses.replace(config, objective_args={"alpha": 2.0})
    for change in (
        lambda a: a.update(alpha=2.0),
        lambda a: a.pop("alpha"),
        lambda a: a.__setitem__("alpha", 2.0),
    ):
        with pytest.raises(TypeError, match="dataclasses.replace"):
            change(config.objective_args)
    for other in (
        copy.deepcopy(config),
        pickle.loads(pickle.dumps(config)),
        rl.LossConfig(**dataclasses.asdict(config)),
    ):
        assert other == config and hash(other) == hash(config)


def test_a_configuration_with_functions_is_written_and_read_back(tmp_path):
    flags = [
        "--rl.objective",
        "m:f",
        "--rl.objective-args.alpha",
        "2",
        "--rl.advantage.estimator",
        "dir/x.py:g",
    ]
    flags += [
        "--rl.correction.weights",
        "m:w",
        "--rl.correction.weights-args.low",
        "0.5",
        "--rl.clip-high",
        "0.3",
    ]
    config = load_config(RunConfig, flags, "fp8rl train")
    assert config.rl.objective_args == {"alpha": 2.0} and config.rl.correction.weights_args == {
        "low": 0.5
    }
    file = tmp_path / "config.toml"
    file.write_text(dump_toml(config))
    assert load_config(RunConfig, [str(file)], "fp8rl train") == config


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (
            lambda: rl.LossConfig(objective="ppo"),
            r"rl.objective: 'ppo' is none of 'clip', 'cispo', 'reinforce', 'p3o', and no mod",
        ),
        (
            lambda: rl.LossConfig(objective_args={"a": 1.0}),
            r"rl.objective_args: clip takes no arguments",
        ),
        (
            lambda: rl.LossConfig(objective="m:f", objective_args={"a": "x"}),
            r"rl.objective_args: a = 'x' must be",
        ),
        (
            lambda: rl.LossConfig(objective="m:f", objective_args={"a-b": 1.0}),
            r"rl.objective_args: a-b = 1.0 must be",
        ),
        (
            lambda: rl.LossConfig(objective="m:f", objective_args=3),
            r"rl.objective_args: 3 must be a table",
        ),
        (lambda: rl.LossConfig(objective=5), r"rl.objective: 5 is none of"),
        (
            lambda: rl.AdvantageConfig(estimator_args={"a": 1.0}),
            r"rl.advantage.estimator_args: grpo takes no arguments",
        ),
        (lambda: rl.CorrectionConfig(weights="both"), r"rl.correction.weights: 'both' is none of"),
        (
            lambda: rl.CorrectionConfig(weights_args={"a": 1.0}),
            r"rl.correction.weights_args: what is built in takes no",
        ),
        (
            lambda: rl.CorrectionConfig("verl_bypass_ppo_clip", weights="m:f"),
            r"rl.correction.weights: mode .bypass. with",
        ),
        (
            lambda: rl.RLConfig(
                objective="m:f", correction=rl.CorrectionConfig("verl_bypass_pg_is")
            ),
            r"rl.correction.bypass_loss: .reinforce. takes the place of rl.objective = .m:f.",
        ),
        (
            lambda: rl.RLConfig(
                objective="m:f", clip_calibration=ClipCalibrationConfig(enabled=True)
            ),
            r"rl.clip_calibration: it calibrates rl.objective .clip.",
        ),
    ],
)
def test_what_a_configuration_refuses(make, line):
    with pytest.raises(UserError, match=f"^{line}"):
        make()


def test_a_users_objective_may_read_what_only_clip_has():
    config = rl.LossConfig(objective="m:f", dual_clip=3.0, ratio="sequence")
    assert (config.dual_clip, config.ratio) == (3.0, "sequence")


def _objective(function, **arguments):
    return rl.RLConfig(objective=function, objective_args=arguments, correction=NONE)


def _estimator(function):
    return rl.RLConfig(advantage=rl.AdvantageConfig(estimator=function))


def _weights(function):
    return rl.RLConfig(correction=rl.CorrectionConfig(weights=function))


def _loops(inputs, config):
    return jax.lax.while_loop(lambda x: x.sum() < 0, lambda x: x + 1, inputs.logprobs)


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (
            _objective("no_such_module:f"),
            r"rl.objective = 'no_such_module:f' does not import: ModuleNotFoundError",
        ),
        (_objective("math:tau"), r"rl.objective = 'math:tau': .* has no function 'tau'"),
        (_objective(lambda i, c: 0 * i.logprobs), r"rl.objective = .* are all 0, so that nothing"),
        (
            _objective(lambda i, c: -i.advantages * i.old_logprobs),
            r"rl.objective = .*: the derivatives of its losses by inputs.logprobs, and .* are all 0",
        ),
        (
            _objective(lambda i, c: jnp.round(i.ratio) * i.advantages),
            r"rl.objective = .* are all 0, so that nothing could be learned",
        ),
        (
            _objective(lambda i, c: i.advantages * jnp.sqrt(i.logprobs)),
            r"rl.objective = .* are not finite",
        ),
        (
            _estimator(lambda i, c: 0 * i.rewards),
            r"rl.advantage.estimator = .*: its advantages of rewards that differ are all 0, so",
        ),
        (_weights(lambda i, c: 0 * i.log_ratio), r"rl.correction.weights = .* weights are all 0"),
        (
            _objective(lambda inputs: 0),
            r"rl.objective = .* cannot be called with \(inputs, config\): too many positional",
        ),
        (
            _objective(lambda inputs, config, a=1: 0, b=2.0),
            r"rl.objective = .* \(inputs, config, b=...\): got an unexpected",
        ),
        (
            _objective(lambda i, c: i.logprobs.sum(1)),
            r"rl.objective = .* floating-point numbers \[B, T\], here \[8, 9\], and "
            r"returned float32 \[8\]",
        ),
        (_objective(lambda i, c: i.mask), r"rl.objective = .* returned bool \[8, 9\]"),
        (_objective(lambda i, c: None), r"rl.objective = .* returned NoneType"),
        (
            _objective(lambda i, c: (i.logprobs, [])),
            r"rl.objective = .* metrics as a dictionary, and returned list",
        ),
        (
            _objective(lambda i, c: (i.logprobs, {"loss": i.mask})),
            r"rl.objective = .*'loss' must begin with objective/ or",
        ),
        (
            _objective(lambda i, c: (i.logprobs, {"objective/x": 1.0})),
            r"rl.objective = .* return objective/x of each token",
        ),
        (
            _objective(lambda i, c: i.logprobs if i.ratio.max() > 1 else i.ratio),
            r"rl.objective = .*Tracer.*test_functions.py",
        ),
        (_objective(_loops), r"rl.objective = .*Reverse-mode differentiation"),
        (
            _estimator(lambda i, c: i.rewards.T),
            r"rl.advantage.estimator = .* \[P, n\], here \[2, 4\], and .* \[4, 2\]",
        ),
        (_estimator(lambda i, c: i.missing), r"rl.advantage.estimator = .*AttributeError"),
        (
            _weights(lambda i, c: i.log_ratio[0]),
            r"rl.correction.weights = .* \[B, T\], here \[8, 9\], and .* \[9\]",
        ),
    ],
)
def test_a_function_that_does_not_fit_is_one_line_before_anything_is_computed(config, line):
    with pytest.raises(UserError, match=f"^{line}") as raised:
        rl.check_functions(config)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 500


def test_all_functions_that_do_not_fit_are_reported_in_one_error():
    config = dataclasses.replace(
        _objective("a_module:f"), advantage=rl.AdvantageConfig(estimator="b_module:f")
    )
    with pytest.raises(UserError) as raised:
        rl.check_functions(config, samples_per_prompt=2)
    assert [line.split(" ")[0] for line in str(raised.value).splitlines()] == [
        "rl.objective",
        "rl.advantage.estimator",
    ]


def test_what_is_not_valid_has_no_advantage_and_bounds_act_on_any_weights():
    config = rl.AdvantageConfig(estimator=lambda inputs, config: inputs.rewards + 1)
    found = rl.group_advantages(jnp.array([jnp.nan, 2.0]), 1, config, jnp.array([False, True]))
    np.testing.assert_array_equal(found, [0.0, 3.0])
    config = rl.CorrectionConfig(
        "none", weights=lambda inputs, config: inputs.log_ratio, bounds="mask", min_weight=0.5
    )
    found, outside = rl.importance_weights(
        jnp.array([[0.1, 1.0, 7.0]]), jnp.ones((1, 3), bool), config
    )
    np.testing.assert_array_equal(found, [[0.0, 1.0, 0.0]])
    np.testing.assert_array_equal(outside, [[True, False, True]])


def test_the_command_line_names_the_key(tmp_path, capsys):
    flags = [
        "--output",
        str(tmp_path),
        "--task.kind",
        "jsonl",
        "--task.name",
        "none.jsonl",
        "--rl.objective",
        "no_such_module:f",
    ]
    assert main(["train", *flags, "--dry-run"]) == 2
    assert (
        "rl.objective = 'no_such_module:f' does not import: ModuleNotFoundError"
        in capsys.readouterr().err
    )


def test_the_examples_of_docs_objectives_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("losses", "advantages", "correction", "selection", "noise"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    notebook: dict = {}
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert [language for language, _ in blocks] == ["python", "toml", "python"] * 5
    for language, text in blocks:
        if named := re.match(r"# (\w+\.(?:py|toml))\n", text):
            (tmp_path / named[1]).write_text(text)
        else:
            exec(compile(text, "a block of docs/objectives.md", "exec"), notebook)
        if language == "toml":
            config = load_config(RunConfig, [named[1]], "fp8rl train")
            rl.check_functions(config.rl)
            assert config != RunConfig()


def test_the_example_of_the_rl_docstring_runs(make_batch):
    batch, n = make_batch(5), 4
    mask = jnp.asarray(batch["mask"])
    names = {
        "rl": rl,
        "jax": jax,
        "n": n,
        "tokens": None,
        "mask": mask,
        "model_logprobs": lambda params, _: params,
    }
    names |= {"rewards": jnp.arange(8.0) % 3, "params": jnp.asarray(batch["logprobs"])}
    names |= {
        "rollout_logprobs": jnp.asarray(batch["rollout"]),
        "train_logprobs": jnp.asarray(batch["logprobs"]),
    }
    names |= {"old_logprobs": jnp.asarray(batch["old"]), "logprobs": jnp.asarray(batch["logprobs"])}
    parts = re.findall(r"(?:^    .*\n|^\n)+", inspect.getdoc(rl) + "\n", re.MULTILINE)
    code = [textwrap.dedent(part) for part in parts if part.strip()]
    assert len(code) == 2
    for block in code:
        exec(compile(block, "an example of fp8rl_jax/rl/__init__.py", "exec"), names)
    numbers = names["numbers"]
    assert (
        numbers["correction/weight_mean"] > 0
        and numbers["mismatch/k3"] > 0
        and names["gradients"].any()
    )
    assert all(np.ndim(value) == 0 for value in numbers.values())


def test_recipe_as_correction_outside_of_a_run_says_what_to_do(make_batch):
    config = rl.RLConfig()
    batch = make_batch()
    inputs = dataclasses.replace(make_inputs(batch, config), old_logprobs=None)
    with pytest.raises(
        UserError, match=r'^rl.correction.method: "recipe" .* CorrectionConfig\("token_tis"\)'
    ):
        rl.corrected_policy_loss(inputs, jnp.asarray(batch["rollout"]), config)
