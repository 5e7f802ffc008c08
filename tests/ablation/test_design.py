"""The file of an ablation: what it makes, and which faults are named before anything runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fp8rl_jax.ablation.design import AblationConfig, judged, read_design
from fp8rl_jax.ablation.preflight import _check, model_of_shape
from fp8rl_jax.config.fingerprint import changes
from fp8rl_jax.config.rl import RLConfig
from fp8rl_jax.config.run import LoraConfig
from fp8rl_jax.config.schema import leaves
from fp8rl_jax.errors import UserError

ROOT = Path(__file__).parents[2]
ARMS = {"bf16": {"recipe": "bf16"}, "fp8": {"recipe": "fp8-rl"}}


def faults(path: str, **arguments) -> list[str]:
    with pytest.raises(UserError) as caught:
        read_design(path, **arguments)
    return [line.removeprefix(f"{path}: ") for line in str(caught.value).splitlines()]


def test_each_arm_becomes_a_whole_configuration(study):
    settings = {"rl": {"clip_high": 0.3}, "optimizer.learning_rate": 1e-4}
    design = read_design(
        study(arms={"bf16": {"recipe": "bf16"}, "fp8": {"recipe": "fp8-rl", **settings}})
    )
    bf16, fp8 = design.arms
    config = design.run_config(fp8, 1)
    assert (config.recipe, config.seed, config.rl.clip_high) == ("fp8-rl", 1, 0.3)
    assert config.directory == Path("out/fp8-1")
    assert fp8.settings == {
        "recipe": "fp8-rl",
        "rl.clip_high": 0.3,
        "optimizer.learning_rate": 1e-4,
    }
    assert bf16.config.rl.clip_high != 0.3 and design.seeds == (0, 1)


def test_runs_of_one_seed_differ_in_what_the_arm_says_alone(study):
    design = read_design(study())
    one, other = (vars(design.run_config(arm, 1)) for arm in design.arms)
    assert {key for key in one if one[key] != other[key]} == {"recipe", "output"}


def test_factors_are_crossed_and_named_by_their_values(study):
    path = study(
        arms=None,
        factors={"recipe": ["bf16", "fp8-rl"], "max_new_tokens": [4, 6]},
        baseline="bf16+max_new_tokens=6",
    )
    design = read_design(path)
    assert [arm.name for arm in design.arms] == [
        f"{recipe}+max_new_tokens={n}" for recipe in ("bf16", "fp8-rl") for n in (4, 6)
    ]
    assert design.arms[2].config.rollout.max_new_tokens == 4
    assert design.arms[2].settings == {"recipe": "fp8-rl", "rollout.max_new_tokens": 4}


def test_own_recipes_and_settings_of_all_arms(study):
    mine = {"base": "fp8-rl", "kv_margin": 1.5}
    path = study(
        recipes={"mine": mine},
        settings={"trainer": {"steps": 3}},
        arms={"bf16": {"recipe": "bf16"}, "mine": {"recipe": "mine"}},
    )
    arms = read_design(path).arms
    assert [arm.config.trainer.steps for arm in arms] == [3, 3]
    assert arms[1].config.resolved_recipe.kv_margin == 1.5


def test_a_start_makes_the_model_of_all_arms(study):
    design = read_design(study(start="shared", settings={"sft": {"from_scratch": True}}))
    assert {design.run_config(arm, 1).model.path for arm in design.arms} == {"out/start/model"}
    assert design.start_config(1).seed == 0
    own = read_design(study(start="per_seed"))
    assert own.run_config(own.arms[0], 1).model.path == "out/start-1/model"
    assert own.start_config(1).seed == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"baseline": "bf61"}, "baseline: 'bf61' is no arm; did you mean bf16?"),
        ({"baseline": ""}, "baseline: name the arm to compare with; the arms are bf16, fp8"),
        ({"output": "runs/{arm}"}, "output = 'runs/{arm}': unknown placeholder {arm}"),
        ({"output": "runs/{"}, "output = 'runs/{':"),
        ({"seeds": 0}, "seeds = 0: give at least 1"),
        ({"seeds": []}, "seeds = []: give at least 1"),
        (
            {"seeds": 1, "metric": {"margin": 0.1, "name": "reward/mean"}},
            "seeds: 'reward/mean' of one seed has no interval; give at least 2",
        ),
        (
            {"seeds": [3], "metric": {"margin": 0.1, "over": "seeds"}},
            "seeds: 'eval/accuracy' of one seed has no interval; give at least 2",
        ),
        ({"judge": "bf17"}, "judge: recipe: unknown name 'bf17'; did you mean"),
        (
            {"metric": {"margin": 0.1, "name": "judged/accuracy"}},
            "metric.name = 'judged/accuracy': name the recipe that judges (judge)",
        ),
        ({"seeds": [3, 3]}, "seeds: 3 is given twice"),
        ({"seeds": "five"}, "seeds: expected a number of seeds or a list of them, got 'five'"),
        ({"seeds": 4, "looks": 3}, "looks = 3: 4 seeds are not that many equal parts"),
        ({"seeds": 2, "looks": 2}, "looks = 2: 2 seeds are not that many equal parts"),
        ({"metric": {}}, "metric.margin: say beforehand"),
        ({"metric": {"margin": 0.0}}, "metric.margin: 0.0 must be a number above 0"),
        ({"metric": {"margin": 0.1, "name": "eval/acuracy"}}, "did you mean eval/accuracy?"),
        (
            {"metric": {"margin": 0.1, "name": "eval/pass_at_k"}},
            "'eval/pass_at_k' needs evaluation.samples above 1",
        ),
        (
            {"metric": {"margin": 0.1, "name": "eval/loss"}},
            "metric.name = 'eval/loss' is not measured on problems; eval/accuracy is",
        ),
        (
            {"settings": {"task.kind": "text", "task.reward.function": ""}},
            "metric.name = 'eval/accuracy' is not measured on text; eval/loss is",
        ),
        (
            {"settings": {"task.kind": "text"}, "start": "shared"},
            'start = "shared": supervised runs have no warm start',
        ),
        (
            {"settings": {"task.kind": "text"}, "command": "sft"},
            'command = "sft": the task has text, and no answers',
        ),
        ({"collapse": {"metric": "reward/mean"}}, "collapse.metric: give collapse.below or"),
        ({"allow": ["tusk"]}, "allow: 'tusk' is nothing that arms share"),
        ({"arms": {"bf16": {"recipe": "bf16"}}}, "arms: there is one; a comparison needs two"),
        ({"arms": None}, "no arms; give [arms.NAME] or [factors]"),
        ({"factors": {"seed": [1]}}, "arms and factors are both given; give one of them"),
        ({"arms": None, "factors": {"recipe": "bf16"}}, "factors.recipe: expected a list"),
        ({"arms": ARMS | {"a/b": {"recipe": "jet-rl"}}}, 'arms."a/b": names a directory'),
        ({"arms": ARMS | {"start": {"recipe": "jet-rl"}}}, "arms.start: names a directory"),
        ({"arms": ARMS | {"same": {"recipe": "bf16"}}}, "arms bf16 and same are the same run"),
        (
            {"arms": ARMS | {"x": {"recipe": "bf17"}}},
            "arms.x: recipe: unknown name 'bf17'; did you mean",
        ),
        ({"arms": ARMS | {"x": {"learning_rat": 1.0}}}, "arms.x.learning_rat: unknown setting"),
        ({"arms": ARMS | {"x": {"seed": 7}}}, "arms.x.seed: the arms share seeds; give `seeds`"),
        ({"settings": {"output": "x"}}, "settings.output: runs are written to OUTPUT/ARM-SEED"),
        (
            {"arms": ARMS | {"x": {"task": {"seed": 1}}}},
            "arms.x: task.seed is 1 and 0 in the baseline, so they differ in data; if that is the "
            'question, allow = ["task.seed"]',
        ),
        (
            {"arms": ARMS | {"x": {"model": {"init": {"num_layers": 2}}}}},
            "they differ in the model they start from",
        ),
        (
            {"arms": ARMS | {"x": {"evaluation": {"examples": 4}}}},
            "they differ in how they are measured",
        ),
        ({"arms": ARMS | {"x": {"rollout.temperature": 0.0}}}, "arms.x: "),
        (
            {"start": "shared", "arms": ARMS | {"x": {"model": {"path": "elsewhere"}}}},
            'arms.x: model.path: start = "shared" makes the model',
        ),
        ({"base": ["none.toml"]}, "no such file"),
    ],
)
def test_faults_are_named_before_anything_runs(study, change, message):
    found = faults(study(**change))
    assert any(message in line for line in found), found


def test_all_faults_are_reported_together(study):
    found = faults(
        study(quesion="", baseline="x", seeds=0, arms=ARMS | {"y": {"recipe": "no", "seed": 1}}),
        output="{no}",
    )
    keys = ("unknown key quesion", "seeds = 0", "output = ", "arms.y.seed", "baseline: 'x'")
    assert [key for key in keys if not any(line.startswith(key) for line in found)] == []


def test_of_a_file_that_cannot_be_read_nothing_else_is_said(tmp_path):
    assert faults(str(tmp_path / "none.toml")) == ["no such file"]
    path = tmp_path / "torn.toml"
    path.write_text("[arms.a\n")
    (fault,) = faults(str(path))
    assert "line 1" in fault


def test_a_study_of_supervised_runs_may_begin_with_another_ones(study):
    path = "runs/before/{arm}-{seed}"
    settings = {"model": {"path": path}, "sft.steps": 7, "evaluation.every": 0}
    design = read_design(study(command="sft", settings=settings, seeds=[4, 5]))
    arm = design.arms[1]
    assert design.run_config(arm, 5).model.path == "runs/before/fp8-5"
    assert model_of_shape(design, arm).path == "runs/before/fp8-4"
    assert (design.command(arm), design.steps(arm), design.evaluates(arm)) == ("sft", 7, True)
    assert design.fingerprint()["command"] == "sft"
    text = read_design(
        study(
            settings={"task.kind": "text", "task.args": {}, "sft.steps": 7},
            metric={"name": "eval/loss", "margin": 0.1},
        )
    )
    assert (text.command(text.arms[0]), text.steps(text.arms[0])) == ("pretrain", 7)
    plain = read_design(study())
    assert (plain.command(plain.arms[0]), plain.steps(plain.arms[0])) == ("train", 2)
    assert "command" not in plain.fingerprint()  # so that older studies go on


def test_arms_may_differ_in_data_where_that_is_the_question(study):
    arms = ARMS | {"x": {"task": {"train_size": 32}}}
    assert "differ in data" in faults(study(arms=arms))[0]
    assert len(read_design(study(arms=arms, allow=["task.train_size"])).arms) == 3
    assert len(read_design(study(arms=arms, allow=["task"])).arms) == 3


def test_a_dictionary_stands_for_a_file(study):
    study()
    plan = {"base": ["run.toml"], "baseline": "bf16", "metric": {"margin": 0.1}, "arms": ARMS}
    design = read_design(plan | {"name": "mine"})
    assert design.directory == Path("runs/mine") and len(design.seeds) == 5


def test_a_fingerprint_names_what_changed_and_nothing_else(study, tmp_path):
    before = read_design(study()).fingerprint()
    assert changes(before, read_design(study(question="Another wording")).fingerprint()) == []
    margin = read_design(study(metric={"margin": 0.2})).fingerprint()
    assert changes(before, margin) == ["metric.margin was 0.1 and is 0.2"]
    # a setting of an earlier version, which did what is done without it
    assert changes(before | {"optimizer.first_moment": "float32"}, before) == []
    assert changes(before | {"optimizer.first_moment": "bfloat16"}, before)
    (tmp_path / "run.toml").write_text(
        (tmp_path / "run.toml").read_text().replace("steps = 2", "steps = 3")
    )
    assert changes(before, read_design(study()).fingerprint()) == [
        "arms.bf16.trainer.steps was 2 and is 3",
        "arms.fp8.trainer.steps was 2 and is 3",
    ]


def test_a_fingerprint_holds_the_functions_that_are_files(study, tmp_path):
    code = tmp_path / "mine.py"
    for key in ("rl.objective", "rl.advantage.estimator", "rl.correction.weights", "rl.selection"):
        code.write_text("def f(*_): return 1\n")
        settings = {key: f"{code}:f"}
        before = read_design(study(settings=settings)).fingerprint()
        code.write_text("def f(*_): return 2\n")
        found = changes(before, read_design(study(settings=settings)).fingerprint())
        assert found == [f"{code} has changed"], key


def test_a_judge_refuses_before_anything_is_run(study):
    """And judges what training alone keeps from being judged."""
    served = {"rollout.engine": "vllm", "rollout.vllm.python": "python"}
    served["compute_dtype"] = "bfloat16"
    for judge, message in (
        ("nvfp4", "recipe 'nvfp4' has formats .* vLLM does not"),
        ("nvfp5", "recipe: unknown name 'nvfp5'"),
    ):
        with pytest.raises(UserError, match=f"^\\S*: judge: .*{message}") as error:
            read_design(study(judge=judge, settings=served))
        assert len(str(error.value).splitlines()) == 1  # once, and not for every arm
    ahead = {"rollout.engine": "paged", "rollout.paged.extra_prompts": 4}
    arms = {"bf16": {"recipe": "fp8-rl"}, "own": {"recipe": "fp8-rl", "precision.kv_rule": "verl"}}
    design = read_design(study(judge="bf16", settings=ahead, arms=arms))
    one, other = (
        judged(replace(arm.config, lora=LoraConfig(4), output="here"), "bf16")
        for arm in design.arms
    )
    assert one == other and (one.lora.rank, one.rl) == (0, RLConfig())
    assert one.rollout.paged.extra_prompts == 0
    assert _check(design.arms[1].config, "bf16").faults == []


def test_a_fingerprint_holds_the_contents_of_data_files(study, tmp_path):
    data = tmp_path / "problems.jsonl"
    data.write_text('{"prompt": "a", "answer": "b"}\n')
    task = {"kind": "jsonl", "name": str(data), "args": {}, "prompt_template": "{question}"}
    settings = {"task": task}
    before = read_design(study(settings=settings)).fingerprint()
    data.write_text('{"prompt": "a", "answer": "c"}\n')
    assert changes(before, read_design(study(settings=settings)).fingerprint()) == [
        f"{data} has changed"
    ]


def test_the_page_of_keys_has_every_key():
    page = (ROOT / "docs" / "ablation.md").read_text()
    assert [key for key, _ in leaves(AblationConfig) if f"`{key}" not in page] == []


@pytest.mark.parametrize(
    "path", sorted((ROOT / "experiments" / "ablations").glob("*.toml")), ids=lambda path: path.stem
)
def test_the_studies_that_come_with_it_are_sound(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    design = read_design(path.relative_to(ROOT))
    assert design.directory == Path("runs/ablation", path.stem)
    for arm in design.arms:
        assert arm.config.resolved_recipe.name == arm.config.recipe
    # a claim of learning needs five seeds
    assert len(design.seeds) >= 5
