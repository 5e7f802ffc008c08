"""The fingerprint of behaviour: what changes it, and what does not."""

from __future__ import annotations

import copy
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax.ablation import behaviour, golden
from fp8rl_jax.ablation.behaviour import differences, fingerprint
from fp8rl_jax.ablation.design import read_design
from fp8rl_jax.config.fingerprint import flat
from fp8rl_jax.config.recipe import PrecisionConfig
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.config.tasks import RewardConfig, TaskConfig
from fp8rl_jax.rollout import engine
from fp8rl_jax.training import serving, session

DEMO = RunConfig(recipe="bf16", compute_dtype="float32", precision=PrecisionConfig(exact=False))
BEFORE = {
    "settings": {
        "all": {"rl.clip_low": 0.2, "gone": 1},
        "arms": {"a": {}, "b": {"recipe": "bf16"}},
    },
    "golden": {
        "a": {"rounding": "float32", "loss": [0.1, 0.2], "k3": [0.0, 0.0]},
        "b": {"rounding": "fp8", "loss": [0.1, 0.2], "k3": [3e-3, 3e-3]},
    },
    "rewards": {"all": {"{answer}": 1.0}, "arms": {"a": {"": 0.0}, "b": {"": 0.1}}},
}


def changed(*path, value) -> dict:
    now = copy.deepcopy(BEFORE)
    *above, last = path
    at = now
    for key in above:
        at = at[key]
    at[last] = value
    return now


def test_a_difference_names_arm_number_and_both_values():
    now = changed("golden", "a", "loss", value=[0.1, 0.21])
    assert differences(BEFORE, BEFORE) == []
    assert differences(BEFORE, now) == [
        "a: loss of step 1 was 0.2 and is 0.21, further apart than another CPU's last bits can make it (0.0003)"
    ]
    # what is rounded to FP8 may be as far apart
    assert differences(BEFORE, changed("golden", "b", "loss", value=[0.1, 0.21])) == []
    assert differences(BEFORE, changed("golden", "b", "loss", value=[0.12, 0.2]))
    assert differences(BEFORE, changed("golden", "b", "loss", value=[0.1, 0.25])) == []
    assert differences(BEFORE, changed("golden", "b", "loss", value=[0.1, 0.27]))
    # where both sides round alike k3 is nothing but last bits
    assert differences(BEFORE, changed("golden", "a", "k3", value=[1e-9, 0.0])) == []
    assert differences(BEFORE, changed("golden", "a", "k3", value=[1e-7, 0.0]))
    (line,) = differences(BEFORE, changed("golden", "a", "loss", value=[float("nan"), 0.2]))
    assert "is nan" in line
    found = differences(BEFORE, changed("rewards", "all", value={"{answer}": 0.5, "new": 1.0}))
    line = "the reward of '{answer}' was 1.0 and is 0.5"
    assert found == [f"a: {line}", f"b: {line}"]
    assert differences(BEFORE, changed("rewards", "arms", "b", "", value=0.0))


def test_a_flipped_rounding_may_do_more_where_roundings_are_larger():
    """The numbers of the last rows were seen on another processor."""

    def lines(rounding, key, x, y, k3=0.0):
        of = [{"rounding": rounding, "k3": [k3], key: [each]} for each in (x, y)]
        arms = {"settings": {"all": {}, "arms": {}}}
        return differences(*(arms | {"golden": {"arm": each}} for each in of))

    assert lines("fp8", "grad_norm", 1.0, 1.05) and not lines("fp4", "grad_norm", 1.0, 1.05)
    assert lines("fp4", "grad_norm", 1.0, 1.15)
    assert not lines("fp8", "grad_norm", 1.0, 1.05, k3=0.03)
    assert lines("fp8", "grad_norm", 1.0, 1.05, k3=0.003)
    assert lines("fp4", "grad_norm", 1.0, 1.15, k3=0.03)
    assert lines("fp4", "k3", 1e-13, 1e-2) and not lines("fp4", "k3", 1e-13, 1.6e-3)
    assert not lines("fp4", "arrived", 0.934, 0.834)
    assert not lines("fp8", "loss", -0.132, -0.108, k3=0.207)


@pytest.mark.parametrize(
    ("recipe", "rounding"),
    [("bf16", "float32"), ("fp8-rl", "fp8"), ("mxfp4", "fp4"), ("w4a16", "fp4")]
    + [("fp8-lm-o1", "fp8")],  # nothing but gradients
)
def test_four_bits_are_told_from_eight_by_their_error(monkeypatch, recipe, rounding):
    monkeypatch.setitem(golden.RUNS, "arm", lambda config: {})
    assert golden.measure("arm", replace(DEMO, recipe=recipe)) == {"rounding": rounding}


def test_other_settings_and_arms_are_named_and_new_ones_are_not():
    now = changed("settings", "all", value={"rl.clip_low": 0.3, "new": 2})
    assert differences(BEFORE, now) == [f"{arm}: rl.clip_low was 0.2 and is 0.3" for arm in "ab"]
    now = changed("settings", "arms", "b", value={"recipe": "jet-rl"})
    assert differences(BEFORE, now) == ["b: recipe was 'bf16' and is 'jet-rl'"]
    golden = BEFORE["golden"]
    assert differences(BEFORE, changed("golden", value={**golden, "c": {}})) == []
    assert differences(BEFORE, changed("golden", value={"a": golden["a"]})) == [
        "b: there is no such arm now"
    ]
    now = changed("golden", "a", value={"fault": "ValueError: no"})
    assert "a: fault was None and is 'ValueError: no'" in differences(BEFORE, now)
    now = changed("golden", "a", value=golden["a"] | {"arrived": [1.0, 1.0]})
    assert differences(BEFORE, now) == ["a: arrived was None and is [1.0, 1.0]"]


def test_settings_have_defaults_and_what_is_computed_alone(study):
    found = behaviour.settings(read_design(study(start="per_seed")))
    assert found["arms"] == {"bf16": {"recipe": "bf16"}, "fp8": {"recipe": "fp8-rl"}}
    keys = set(found["all"]) | {"recipe"}
    assert {"model.dither", "sft.steps", "evaluation.every", "trainer.steps"} <= keys
    rest = set(flat(RunConfig())) - keys
    assert {"seed", "output", "mesh.fsdp", "checkpoint.every", "tracking.samples"} <= rest
    assert not {key for key in rest if key.startswith(("rl.", "optimizer.", "precision."))}


def test_sources_are_the_two_packages(tmp_path, monkeypatch):
    before = behaviour.sources()
    assert before == behaviour.sources()
    package = tmp_path / "fp8rl_jax"
    shutil.copytree(behaviour._PACKAGES[0] / "ablation", package)
    monkeypatch.setattr(behaviour, "_PACKAGES", (package,))
    copied = behaviour.sources()
    (package / "notes.txt").write_text("no source")
    assert copied == behaviour.sources() != before
    with (package / "golden.py").open("a") as file:
        file.write("# another\n")
    assert copied != behaviour.sources()


def test_the_weights_are_the_same_everywhere_and_on_the_grid_of_bfloat16():
    config = golden.golden_config(replace(DEMO, model=replace(DEMO.model, path="/not/there")))
    policy = golden.golden_policy(config)
    for leaf in jax.tree.leaves(policy):
        assert leaf.dtype == jnp.float32 and bool((leaf.astype(jnp.bfloat16) == leaf).all())
    assert config.model.path == ""
    assert policy.embed_tokens.value[0, :3].tolist() == [0.08837890625, 0.02001953125, 0.048828125]


@pytest.mark.parametrize("word", golden.WORDS)
def test_a_word_is_all_that_can_be_drawn(word):
    """Whatever the logits; behind its end the sequence ends."""
    only, rng = golden._only(word, 264), np.random.default_rng(0)
    table, state = jax.tree.map(jnp.asarray, only["bad_words"]), jnp.zeros(8, int)
    drawn: list[int] = []
    while len(drawn) <= len(word):
        adjusted = rng.normal(0, 30, (8, 264)) + only["logit_bias"]
        adjusted = np.where(table.completing(state), -np.inf, adjusted)
        first, second = np.sort(adjusted, 1)[:, :-3:-1].T
        assert (first - second > 200).all()
        (token,) = {*adjusted.argmax(1).tolist()}
        drawn.append(token)
        state, _ = table.step(state, jnp.full(8, token))
    assert drawn == [*word.encode(), 258]


def test_an_arm_that_cannot_be_run_so_says_why():
    found = golden.measure("arm", replace(DEMO, recipe="fp9"))
    assert list(found) == ["fault"]
    assert found["fault"].startswith("UserError: ") and "'fp9'" in found["fault"]


def test_an_arm_is_asked_how_it_reads_answers():
    """Not to be seen in its numbers: a golden run's rewards are given."""
    task = TaskConfig(
        kind="module",
        name="experiments/tasks/addition.py:problems",
        reward=RewardConfig(extract="last_number"),
    )
    found = golden.rewards(task)
    assert (found["The answer is {answer}."], found["0 + {answer}"], found[""]) == (1.0, 0.0, 0.0)
    first = golden.rewards(replace(task, reward=RewardConfig(extract="whole")))
    assert found != first and first.keys() == found.keys() == {*golden.COMPLETIONS}
    missing = golden.rewards(replace(task, name="experiments/tasks/none.py:problems"))
    assert list(missing) == ["fault"] and "none.py" in missing["fault"]


@pytest.fixture(scope="module")
def measured() -> dict[str, dict]:
    """Golden runs of the code as it is."""
    return {name: golden.run_arm(replace(DEMO, recipe=name)) for name in ("bf16", "fp8-rl")}


def rounded_first(monkeypatch):
    """Masters are rounded to bfloat16 before they are served, whatever the compute dtype."""
    convert = engine._rollout_policy

    def changed(policy, **how):
        rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), policy)
        return convert(rounded, **how)

    monkeypatch.setattr(engine, "_rollout_policy", changed)


def wider_scales(monkeypatch):
    """KV scales have a margin of a tenth."""
    calibrated = serving.calibrated

    def changed(seen, recipe):
        scales, metrics = calibrated(seen, recipe)
        return jax.tree.map(lambda x: 1.1 * x, scales), metrics

    monkeypatch.setattr(serving, "calibrated", changed)


def larger_advantages(monkeypatch):
    advantages = session.sample_advantages

    def changed(*arguments, **how):
        found, metrics = advantages(*arguments, **how)
        return 1.1 * found, metrics

    monkeypatch.setattr(session, "sample_advantages", changed)


def hotter(monkeypatch):
    """The rollout's log-probabilities are of another temperature than the trainer's."""
    served = session.Session.rollout

    def changed(self, *arguments, **how):
        own, self.sampling = self.sampling, replace(self.sampling, temperature=1.05)
        found = replace(served(self, *arguments, **how), temperature=1.0)
        self.sampling = own
        return found

    monkeypatch.setattr(session.Session, "rollout", changed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutant", "recipe", "numbers"),
    [
        (rounded_first, "bf16", {"arrived", "noise", "changed", "preferred"}),
        (rounded_first, "fp8-rl", {"arrived"}),
        (wider_scales, "fp8-rl", {"kv_scale_q", "kv_scale_k", "kv_scale_v"}),
        (larger_advantages, "bf16", {"loss", "grad_norm"}),
        (larger_advantages, "fp8-rl", {"grad_norm"}),
        (hotter, "bf16", {"logprob", "k3"}),
        (hotter, "fp8-rl", {"logprob"}),
    ],
)
def test_code_that_behaves_otherwise_has_another_fingerprint(
    measured, monkeypatch, mutant, recipe, numbers
):
    mutant(monkeypatch)
    found = golden.run_arm(replace(DEMO, recipe=recipe))
    rounding = {"rounding": "float32" if recipe == "bf16" else "fp8"}
    before, now = (
        {"settings": {"all": {}, "arms": {}}, "golden": {"arm": rounding | each}}
        for each in (measured[recipe], found)
    )
    lines = differences(before, now)
    assert numbers <= {line.split()[1] for line in lines}, lines


@pytest.mark.slow
def test_another_compiler_has_the_same_fingerprint(study, monkeypatch):
    """Optimized or not, sums have another order. A warm start's numbers are among them."""
    design = read_design(study(start="shared"))
    (unoptimized,) = fingerprint(design)
    assert unoptimized["golden"].keys() == {"bf16", "fp8", "start"}
    assert all("fault" not in each for each in unoptimized["golden"].values())
    monkeypatch.setattr(behaviour, "_COMPILER", "--xla_cpu_parallel_codegen_split_count=1")
    (optimized,) = fingerprint(design)
    assert optimized["golden"] != unoptimized["golden"]
    assert differences(unoptimized, optimized) == []
