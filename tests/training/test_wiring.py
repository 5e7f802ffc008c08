"""The wiring between the parts of a run: who is given what, in which order, and with which sign.

Finite numbers, and a resumed run that repeats the first, cannot see an error that is made
everywhere alike. So the parts are called with arrays whose results are known in advance. The engine
and the reward pool are stand-ins: they say what they are told to and note what they were asked.
"""

from __future__ import annotations

import json
from collections import defaultdict
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from mutants import LIST, ROOT, unfit

from fp8rl_jax.config import run as run_config
from fp8rl_jax.config.recipe import PrecisionConfig, get_recipe
from fp8rl_jax.config.rl import (
    AdvantageConfig,
    CorrectionConfig,
    DynamicSamplingConfig,
    OverlongConfig,
    RewardKLConfig,
    RLConfig,
)
from fp8rl_jax.config.run import InitConfig, MeshConfig, ModelConfig, RolloutConfig, RunConfig
from fp8rl_jax.config.tasks import RewardConfig, TaskConfig
from fp8rl_jax.config.training import (
    CheckpointConfig,
    EvaluationConfig,
    LossScaleConfig,
    OptimizerConfig,
    SftConfig,
    TrainerConfig,
)
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.cache import KVScales
from fp8rl_jax.models.logprobs import Support
from fp8rl_jax.parallel import make_mesh
from fp8rl_jax.rollout.calibration import calibrate_on_prompts
from fp8rl_jax.rollout.engine import LocalEngine, Rollout, pad_prompts
from fp8rl_jax.rollout.sampling import Sampling, at_temperature
from fp8rl_jax.rollout.sync import NO_CONTEXT
from fp8rl_jax.statistics import wilson_interval
from fp8rl_jax.tasks import distributed
from fp8rl_jax.tasks.dataset import Example
from fp8rl_jax.tasks.episodes import Episode
from fp8rl_jax.tasks.sandbox.pool import ScoreJob
from fp8rl_jax.tasks.scores import Scores
from fp8rl_jax.tokenizers.byte_tokenizer import ByteTokenizer
from fp8rl_jax.training import advantages, sft
from fp8rl_jax.training import learner as learning
from fp8rl_jax.training import session as sessions
from fp8rl_jax.training.batch import Batch
from fp8rl_jax.training.collect import Collected, Collector
from fp8rl_jax.training.evaluation import evaluate, evaluate_held_out
from fp8rl_jax.training.experience import Experience, episode_experience, play
from fp8rl_jax.training.learner import Learner
from fp8rl_jax.training.loop import Loop
from fp8rl_jax.training.performance import Clock
from fp8rl_jax.training.prompts import PromptEncoder
from fp8rl_jax.training.session import Session
from fp8rl_jax.training.setup import build
from fp8rl_jax.training.state import init_state
from fp8rl_jax.training.step import StepConfig, correct, update

EOS = 258
WIDTH = 5
"""Longest completion."""
TASK = TaskConfig(
    kind="jsonl",
    name="problems.jsonl",
    eval_size=6,
    reward=RewardConfig(weights={"exact": 1.0, "length": 0.5}, length_limit=8),
)
CONFIG = RunConfig(
    compute_dtype="float32",
    model=ModelConfig(
        init=InitConfig(32, 48, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16)
    ),
    rollout=RolloutConfig(
        prompts_per_step=2, samples_per_prompt=3, max_prompt_tokens=6, max_new_tokens=WIDTH
    ),
    trainer=TrainerConfig(steps=3),
    evaluation=EvaluationConfig(every=2, examples=5, samples=2, batch_size=6),
    checkpoint=CheckpointConfig(every=2),
)

REFERENCE = PrecisionConfig(backend="reference")


def letters(problem: int, sample: int, call: int) -> str:
    """A completion of one to six letters; six are more than WIDTH."""
    return "abcdefgh"[: 1 + (problem + 2 * sample + call) % 6]


class Engine(LocalEngine):
    """Serves weights like any other, and its completions are those of `say(problem, sample, call)`;
    behind them come zeros, or the first `pad` letters."""

    def __init__(self, say=letters, recipe: str = "bf16"):
        super().__init__(get_recipe(recipe), jnp.float32)
        self.say, self.pad, self.synced, self.asked = say, 0, [], []

    def sync(self, policy, context=NO_CONTEXT):
        self.synced.append((float(jnp.abs(policy.layers.q_proj.value).mean()), context.scales))
        return super().sync(policy, context)

    def generate(self, prompts, samples, sampling, key):
        ids, width = np.asarray(prompts.ids), sampling.max_new_tokens
        said = [
            [*self.say(int(i), s, len(self.asked)).encode(), EOS]
            for i in ids
            for s in range(samples)
        ]
        words = tuple(np.asarray(jax.random.key_data(key)).tolist())
        self.asked.append(
            SimpleNamespace(prompts=prompts, samples=samples, sampling=sampling, key=words)
        )
        mask = np.arange(width) < np.array([len(tokens) for tokens in said])[:, None]
        rubbish = [97 + i % self.pad if self.pad else 0 for i in range(len(said) + width)]
        tokens = np.array(
            [(tokens + rubbish[i:])[:width] for i, tokens in enumerate(said)], np.int32
        )
        policy = np.where(
            mask, -0.5 - 0.1 * np.arange(len(said))[:, None] - 0.01 * np.arange(width), 0.0
        ).astype(np.float32)
        return Rollout(
            prompts,
            jnp.asarray(tokens),
            jnp.asarray(mask),
            jnp.asarray(policy - mask),
            jnp.asarray(policy),
            jnp.asarray([len(tokens) <= width for tokens in said]),
            self.version,
        )


def stepped(loop: Loop, step: int, evaluated: dict[str, float] | None = None) -> dict[str, float]:
    """Makes a step, and gives what it measured."""
    return loop._step(step, loop.collector.collect(step), evaluated or {})


class Pool:
    """Scores here and now: 1 for the right answer and half a point less for eight letters; "!" has
    no score."""

    def __init__(self, task: TaskConfig = TASK):
        self.task, self.calls = task, []

    def score(self, examples, completions) -> Scores:
        self.calls.append(list(completions))
        job = ScoreJob([()] * len(completions), self.task)
        for row, text in enumerate(completions):
            right = float(text == examples[row * len(examples) // len(completions)].answer)
            job.record(
                row,
                [right, -len(text) / 8],
                f"no score of {text}" if "!" in text else None,
                timed_out=text == "!!",
            )
        return job.scores()

    def play(self, episodes, texts) -> Scores:
        """A turn is rewarded with a tenth for each letter and ends with an x; the observation
        repeats its first letter."""
        self.calls.append(list(texts))
        job = ScoreJob([()] * len(texts), self.task)
        for row, text in enumerate(texts):
            said = [{"role": "user", "content": text[:1].upper()}]
            turn = {"observation": said, "reward": len(text) / 10, "done": text.endswith("x")}
            job.record(row, turn, "no turn" if "!" in text else None)
        return job.scores()


def reward_of(example: Example, text: str) -> float:
    return (text == example.answer) - len(text) / 16


@pytest.fixture
def setup_of(tmp_path):
    """The parts of a run whose engine is `engine`."""

    def make(engine: Engine, **changes):
        problems = [{"prompt": f"{chr(65 + i)}=", "answer": "abcd"[: 1 + i % 4]} for i in range(20)]
        (tmp_path / "problems.jsonl").write_text(
            "".join(json.dumps(problem) + "\n" for problem in problems)
        )
        task = replace(TASK, name=str(tmp_path / "problems.jsonl"))
        config = replace(
            CONFIG, task=task, output=str(tmp_path / "run"), recipe=engine.recipe.name, **changes
        )
        return build(config, engine=engine)

    return make


def test_every_mutant_finds_its_text():
    """`make mutants` changes one line of the library at a time; a line that was rewritten needs its
    mutants rewritten."""
    assert unfit(LIST, ROOT) == []


# from rewards to advantages


@pytest.mark.parametrize("estimator", ["dr_grpo", "reinforce_pp"])
def test_advantages_are_of_the_reward_less_the_divergence_and_the_penalty(estimator):
    rewards, divergence = np.array([1.0, 0, 0, 1, 1, 0.5]), np.array([0.3, -0.2, 0, 1, 0.5, 0.1])
    lengths, valid = np.array([2, 5, 8, 8, 1, 6]), np.array([1, 1, 1, 1, 0, 1], bool)
    config = RLConfig(
        advantage=AdvantageConfig(estimator),
        reward_kl=RewardKLConfig(0.1),
        overlong=OverlongConfig(buffer=4, penalty=2.0),
    )
    penalty = np.array([0, -0.5, -2, -2, 0, -1])
    total = rewards - 0.1 * divergence + penalty
    if estimator == "dr_grpo":
        expected = total - np.repeat([total[:3].mean(), total[[3, 5]].mean()], 3)
    else:
        share = lengths * valid
        deviation = total - (share * total).sum() / share.sum()
        expected = deviation / np.sqrt((share * deviation**2).sum() / (share.sum() - 1))
    arrays = (
        jnp.asarray(rewards, jnp.float32),
        jnp.asarray(valid),
        jnp.asarray(lengths),
        jnp.asarray(divergence, jnp.float32),
    )
    found, metrics = advantages.sample_advantages(*arrays, config=config, samples=3, longest=8)
    np.testing.assert_allclose(found, np.where(valid, expected, 0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(metrics["reward/kl"], divergence.mean(), rtol=1e-6)
    np.testing.assert_allclose(metrics["reward/overlong_penalty"], penalty.mean(), rtol=1e-6)
    _, metrics = advantages.sample_advantages(
        *arrays[:3], None, config=config, samples=3, longest=8
    )
    assert "reward/kl" not in metrics


# from a rollout to a batch


def experience_of() -> Experience:
    """Three prompts, two samples each; samples 3 and 4 of six are cut off at the width."""
    prompts = pad_prompts([[1, 2], [3], [4, 5, 6]], [1, 2, 3], 4)
    engine = Engine(
        lambda problem, sample, _: (
            "abcde" if (problem, sample) in ((2, 1), (3, 0)) else "ab"[: 1 + sample]
        )
    )
    rollout = engine.generate(prompts, 2, Sampling(WIDTH), jax.random.key(0))
    routes = np.arange(6 * WIDTH).reshape(6, WIDTH, 1, 1) % 7
    rollout = replace(
        rollout,
        prompt_expert_ids=jnp.asarray(routes[:3, :4]),
        expert_ids=jnp.asarray(routes),
        weight_version=4,
    )
    return Experience(rollout=rollout, texts=["?"] * 6, samples=2, temperature=1.0)


def test_what_belongs_to_a_prompt_stands_beside_each_of_its_completions():
    found = experience_of()
    assert found.repeated(["x", None, 3]) == ["x", "x", None, None, 3, 3]
    assert len(found.repeated(range(3))) == len(found.texts)
    with pytest.raises(UserError, match="expected 3, one for each prompt, got 6$"):
        found.repeated(["x"] * 6)


def test_a_batch_holds_the_rollout():
    found = experience_of()
    rollout, batch = found.rollout, found.batch(RLConfig())
    for name in ("tokens", "mask"):
        np.testing.assert_array_equal(getattr(batch, name), getattr(rollout, name))
    np.testing.assert_array_equal(batch.prompts, rollout.prompts.tokens)
    np.testing.assert_array_equal(batch.lengths, [2, 1, 3])
    np.testing.assert_array_equal(batch.prompt_routes, rollout.prompt_expert_ids)
    np.testing.assert_array_equal(batch.routes, rollout.expert_ids)
    assert batch.loss_mask is None and batch.attended is None and not np.any(batch.advantages)
    np.testing.assert_array_equal(found.policy_logprobs, rollout.policy_logprobs)
    prompts, completions, sampled = found.work()
    assert (prompts.tolist(), completions.tolist(), sampled) == ([2, 1, 3], [2, 3, 2, 5, 5, 3], 20)
    assert found.metrics() == pytest.approx(
        {
            "completions/mean_length": 20 / 6,
            "completions/max_length": 5,
            "completions/mean_terminated_length": 2.5,
            "completions/clipped_ratio": 1 / 3,
            "rollout/weight_version": 4,
        }
    )


@pytest.mark.parametrize(
    ("truncated", "choice", "name"),
    [
        (False, "refuse", "policy_logprobs"),
        (False, "behaviour", "policy_logprobs"),
        (True, "behaviour", "behaviour_logprobs"),
        (True, "policy", "policy_logprobs"),
    ],
)
def test_ratios_divide_by_the_log_probabilities_that_were_chosen(truncated, choice, name):
    found = replace(experience_of(), truncated=truncated)
    batch = found.batch(RLConfig(correction=CorrectionConfig(truncated_sampling=choice)))
    np.testing.assert_array_equal(batch.rollout_logprobs, getattr(found.rollout, name))


def test_supports_go_with_the_tokens_and_what_is_scored_is_over_them():
    """Whoever replays without supports is told."""
    plain, config = (
        experience_of(),
        RLConfig(correction=CorrectionConfig(truncated_sampling="replay")),
    )
    with pytest.raises(UserError, match="truncated_sampling: .replay. needs the support of each"):
        replace(plain, truncated=True).batch(config)
    assert plain.batch(config).support is None
    ids = jnp.zeros((*plain.rollout.tokens.shape, 2), jnp.int32)
    counts = jnp.asarray(np.where(plain.rollout.mask, [1, 2, 2, 3, 1], 0), jnp.int32)
    rollout = replace(plain.rollout, support=Support(ids, counts))
    found = replace(plain, rollout=rollout, truncated=True)
    batch = found.batch(config)
    assert batch.support is rollout.support
    np.testing.assert_array_equal(batch.rollout_logprobs, rollout.behaviour_logprobs)
    np.testing.assert_array_equal(found.scored_logprobs, rollout.behaviour_logprobs)
    np.testing.assert_array_equal(plain.scored_logprobs, rollout.policy_logprobs)
    kept = np.asarray(counts)[np.asarray(rollout.mask)]
    metrics = found.metrics()
    assert metrics["rollout/support_mean"] == pytest.approx(np.minimum(kept, 2).mean())
    assert metrics["rollout/support_capped"] == pytest.approx((kept == 3).mean())


def test_truncated_and_uninformative_samples_are_left_out_of_the_loss_alone():
    filtered = RLConfig(overlong=OverlongConfig(filter=True))
    mask = np.asarray(experience_of().rollout.mask)
    for informative, config, rows in (
        ((True, True, True), filtered, [0, 1, 2, 5]),
        ((True, False, True), RLConfig(), [0, 1, 4, 5]),
        ((True, False, True), filtered, [0, 1, 5]),
    ):
        batch = experience_of().batch(
            config, collected_of(informative=np.array(informative)).entering
        )
        np.testing.assert_array_equal(batch.loss_mask, mask & np.isin(np.arange(6), rows)[:, None])
        np.testing.assert_array_equal(batch.mask, mask)


def test_what_fills_a_batch_up_is_neither_seen_nor_learned_from():
    """Of three prompts the last is a filling one."""
    found = replace(experience_of(), texts=["?"] * 4)
    whole, rollout = experience_of(), found.rollout
    assert (found.prompts, found.prompts_in_batch, whole.prompts) == (2, 3, 3)
    batch = found.batch(RLConfig())
    np.testing.assert_array_equal(batch.mask[:4], rollout.mask[:4])
    assert not batch.mask[4:].any() and batch.tokens.shape[0] == 6
    part = found.batch(
        RLConfig(overlong=OverlongConfig(filter=True)), np.array([True, False, True, True])
    )
    np.testing.assert_array_equal(
        part.loss_mask, batch.mask & np.array([1, 0, 1, 0, 0, 0], bool)[:, None]
    )
    assert [len(x) for x in found.tokens] == [2, 3, 2, 5] == [len(x) for x in found.logprobs]
    assert found.work()[2] == 12 and found.metrics()["completions/max_length"] == 5
    assert found.metrics()["completions/clipped_ratio"] == 0.25


def collected_of(**changes) -> Collected:
    settings = {
        "experience": None,
        "chosen": SimpleNamespace(rewards=np.zeros(6, np.float32)),
        "informative": np.ones(3, bool),
        "scores": None,
        "examples": [],
        "texts": [],
        "rounds": 1,
    }
    return Collected(**(settings | changes))


def test_shown_samples_belong_to_their_prompts():
    examples = [Example(i, f"p{i}", f"a{i}", "", {}) for i in range(3)]
    texts = [f"t{row}" for row in range(6)]
    scores = SimpleNamespace(rewards=np.arange(6) / 2)
    shown = list(collected_of(examples=examples, texts=texts, scores=scores).shown(3))
    assert [tuple(row.values()) for row in shown] == [
        (f"p{i}", f"t{2 * i}", f"a{i}", float(i)) for i in range(3)
    ]


# from a batch to the next policy


def training_batch(config: RunConfig = CONFIG, seed: int = 0) -> Batch:
    """Random rows whose old log-probabilities are near those of a random policy."""
    rng = np.random.default_rng(seed)
    p, n = config.rollout.prompts_per_step, config.rollout.samples_per_prompt
    uniform = -np.log(264)
    noise = rng.normal(0, 0.1, (2, p * n, WIDTH)).astype(np.float32)
    return Batch(
        jnp.asarray(rng.integers(97, 123, (p, 6)).astype(np.int32)),
        jnp.asarray(rng.integers(2, 7, p).astype(np.int32)),
        jnp.asarray(rng.integers(97, 123, (p * n, WIDTH)).astype(np.int32)),
        jnp.asarray(np.arange(WIDTH) < rng.integers(1, WIDTH + 1, (p * n, 1))),
        jnp.asarray(uniform + noise[0]),
        jnp.asarray(rng.normal(size=p * n).astype(np.float32)),
        old_logprobs=jnp.asarray(uniform + noise[1]),
    )


def half(batch: Batch, part: int) -> Batch:
    """One prompt and its samples."""
    rows = {
        name: value
        for name in batch.__dataclass_fields__
        if (value := getattr(batch, name)) is not None
    }
    n = len(batch.tokens) // len(batch.prompts)
    return replace(
        batch,
        **{
            name: value[part : part + 1]
            if name in ("prompts", "lengths")
            else value[part * n : part * n + n]
            for name, value in rows.items()
        },
    )


def learner_of(setup) -> Learner:
    session = setup.session
    return Learner(setup.config, session.recipe, session.weights, session.mesh)


@pytest.mark.slow
def test_two_updates_are_those_of_the_two_halves(setup_of):
    setup = setup_of(
        Engine(),
        trainer=TrainerConfig(steps=3, updates_per_rollout=2),
        rl=RLConfig(correction=CorrectionConfig("token_tis", batch_normalize=True)),
        optimizer=OptimizerConfig(
            learning_rate=1e-2, warmup_steps=2, schedule="linear", final_ratio=0.0
        ),
    )
    policy, batch = setup.session.policy, training_batch()
    learner = learner_of(setup)

    def start():
        return init_state(jax.tree.map(jnp.copy, policy), learner.optimizer)

    found, logprobs, metrics, _ = learner.update(start(), batch, learner.micro_batches(2), Clock())
    whole, corrections = correct(batch, learner.config.rl)
    state, _, first = update(start(), half(whole, 0), learner.config, learner.optimizer)
    state, _, second = update(state, half(whole, 1), learner.config, learner.optimizer)
    jax.tree.map(np.testing.assert_array_equal, found.policy, state.policy)
    jax.tree.map(np.testing.assert_array_equal, found.optimizer, state.optimizer)
    assert int(found.updates) == 2
    np.testing.assert_array_equal(logprobs, batch.old_logprobs)
    for name in first:
        np.testing.assert_allclose(
            metrics[name], (first[name] + second[name]) / 2, rtol=1e-5, atol=1e-7, err_msg=name
        )
    np.testing.assert_allclose(
        metrics["correction/weight_mean"], corrections["correction/weight_mean"].value, rtol=1e-6
    )
    np.testing.assert_allclose(
        [metrics["optim/lr"], *map(learner.schedule, (1, 4, 6))], [5e-3, 1e-2, 5e-3, 0], atol=1e-8
    )
    tokens = int(batch.lengths.sum() + batch.mask.sum())
    assert metrics["perf/padding_fraction"] == pytest.approx(
        1 - tokens / (batch.prompts.size + batch.tokens.size)
    )


def test_the_reference_is_the_first_policy_and_the_old_one_the_present(setup_of, monkeypatch):
    """Each policy is told by the weight of its last norm; the first has 1."""
    asked = []

    def note(policy, batch, config):
        asked.append((config.micro_batches, batch.routes is None))
        return jnp.full(batch.tokens.shape, policy.norm.value[0])

    monkeypatch.setattr(learning, "batch_logprobs", note)
    batch = replace(
        training_batch(), old_logprobs=None, routes=jnp.zeros((6, WIDTH, 1, 1), jnp.int32)
    )
    two, kl = (
        TrainerConfig(steps=3, updates_per_rollout=2, micro_batch_prompts=1),
        RLConfig(kl_coefficient=0.1),
    )
    whole = RLConfig(correction=CorrectionConfig("token_tis", batch_normalize=True))
    in_reward = RLConfig(reward_kl=RewardKLConfig(0.1))
    for trainer, config, reference, old in (
        (TrainerConfig(), RLConfig(), False, False),
        (TrainerConfig(), kl, True, False),
        (TrainerConfig(), whole, False, True),
        (TrainerConfig(micro_batch_prompts=1), in_reward, True, True),
        (two, kl, True, True),
    ):
        setup = setup_of(Engine(), trainer=trainer, rl=config)
        policy, learner = setup.session.weights, learner_of(setup)
        state = init_state(jax.tree.map(lambda x: 3 * x, policy), learner.optimizer)
        if reference:  # an update is given the policy's own buffers, so the reference has others
            assert learner.reference.norm.value is not policy.norm.value
        found = learner.with_logprobs(state, batch, learner.micro_batches(2), Clock())
        for name, present, value in (
            ("reference_logprobs", reference, 1.0),
            ("old_logprobs", old, 3.0),
        ):
            values = getattr(found, name)
            assert (values is not None) == present and (not present or np.all(values == value)), (
                name
            )
        parts = 2 if trainer.micro_batch_prompts else 1
        assert asked == [(parts, True)] * reference + [(parts, False)] * old
        asked.clear()


def test_one_update_sees_the_whole_batch(setup_of, monkeypatch):
    seen = []

    def note(state, batch, config, optimizer):
        seen.append((batch, config))
        return (
            replace(state, updates=state.updates + 1),
            batch.rollout_logprobs - 1,
            {"loss": jnp.float32(3)},
        )

    monkeypatch.setattr(learning, "update", note)
    settings = RLConfig(aggregation="fixed_length", correction=CorrectionConfig("icepop"))
    schedule = OptimizerConfig(learning_rate=1.0, schedule="linear", final_ratio=0.0)
    trainer = TrainerConfig(
        steps=4,
        micro_batch_prompts=1,
        remat="layer",
        logprob_chunk=7,
        attention_chunk=0,
        loss_scale=LossScaleConfig("static", 8.0),
    )
    rollout = replace(CONFIG.rollout, temperature=0.8)
    setup = setup_of(
        Engine(recipe="fp8-rl"),
        trainer=trainer,
        rl=settings,
        optimizer=schedule,
        rollout=rollout,
        precision=replace(REFERENCE, kv_calibration="trainer"),
    )
    learner, batch = learner_of(setup), replace(training_batch(), old_logprobs=None)
    state = replace(init_state(setup.session.weights, learner.optimizer), updates=jnp.int32(1))
    state, logprobs, metrics, _ = learner.update(state, batch, learner.micro_batches(2), Clock())
    ((given, config),) = seen
    assert (
        int(state.updates) == 2
        and metrics["loss"] == 3
        and metrics["optim/lr"] == pytest.approx(0.75)
    )
    np.testing.assert_array_equal(logprobs, batch.rollout_logprobs - 1)
    np.testing.assert_array_equal(given.tokens, batch.tokens)
    # icepop's, not the recipe's
    assert config.rl.fixed_length == WIDTH and config.rl.correction.value("max_weight") == 5
    assert config == StepConfig(
        setup.session.recipe,
        replace(learner.config.rl, fixed_length=WIDTH),
        "float32",
        0.8,
        micro_batches=2,
        remat=True,
        logprob_chunk=7,
        attention_chunk=0,
        backend="reference",
        loss_scale=trainer.loss_scale,
    )
    plain = learner_of(setup_of(Engine(recipe="fp8-rl")))
    assert plain.config.rl.correction.method == setup.session.recipe.correction != "none"


# a step of the loop


@pytest.fixture
def loop_of(setup_of):
    """A loop at its start, in its mesh."""
    loops = []

    @contextmanager
    def make(engine: Engine, pool: Pool | None = None, **changes):
        setup = setup_of(engine, **changes)
        with jax.set_mesh(setup.session.mesh):
            loops.append(Loop(setup, pool or Pool()))
            loops[-1].open_records()
            yield loops[-1]

    yield make
    for loop in loops:
        loop.checkpoints.close(), loop.tracker.close(), loop.samples.close()


class Trainer:
    """In place of a learner's passes: the trainer's log-probabilities are the rollout policy's less
    a quarter, the old ones are 0.2 above the reference, and an update multiplies the query
    projection by `growth`."""

    growth = 2

    def __init__(self, session: Session):
        self.batches = []
        session.learner.with_logprobs = self.with_logprobs
        session.learner.update = self.update

    def with_logprobs(self, state, batch, parts, clock):
        return replace(
            batch,
            old_logprobs=batch.rollout_logprobs,
            reference_logprobs=batch.rollout_logprobs - 0.2,
        )

    def update(self, state, batch, parts, clock, scales):
        self.batches.append(batch)
        grown = jax.tree_util.tree_map_with_path(
            lambda path, x: self.growth * x if "q_proj" in str(path) else x, state.policy
        )
        with clock.enter("train"):
            # the batch has those of the distribution that was sampled, which are 1 lower (`Engine`)
            return (
                replace(state, policy=grown),
                batch.rollout_logprobs + 0.75,
                {"optim/skipped": jnp.float32(0)},
                None,
            )


IN_REWARD = RLConfig(
    advantage=AdvantageConfig("dr_grpo"),
    reward_kl=RewardKLConfig(0.5),
    overlong=OverlongConfig(buffer=2, penalty=0.5),
    correction=CorrectionConfig(truncated_sampling="behaviour"),
)
TRUNCATED = replace(CONFIG.rollout, top_p=0.9)


def test_an_exact_run_in_which_a_bit_differs_stops(loop_of):
    settings = {"precision": PrecisionConfig(exact=True), "rollout": TRUNCATED, "rl": IN_REWARD}
    with loop_of(Engine(), Pool(), **settings) as loop:
        Trainer(loop.session)
        with pytest.raises(UserError, match="precision.exact: in step 0 a log-probability of the"):
            stepped(loop, 0)
        loop.explain = lambda session, rollout: f"{len(rollout.tokens)} rows, {session is not None}"
        with pytest.raises(UserError, match=r"may differ: \d+ rows, True. With precision.exact"):
            stepped(loop, 0)


def test_a_run_that_is_exact_by_default_goes_on_and_is_marked(loop_of, caplog):
    settings = {"precision": PrecisionConfig(exact=True), "rollout": TRUNCATED, "rl": IN_REWARD}
    with loop_of(Engine(), Pool(), **settings) as loop:
        Trainer(loop.session)
        loop.session.exact_by_default = True
        stepped(loop, 0), stepped(loop, 1)
        record = json.loads((loop.setup.directory / "run.json").read_text())
    assert record["inexact"] == {"step": 0, "difference": pytest.approx(0.25)}
    assert caplog.text.count("precision.exact = auto: in step 0 a log-probability") == 1


def test_a_step_learns_from_what_was_sampled(loop_of):
    engine, pool = Engine(), Pool()
    with loop_of(engine, pool, rl=IN_REWARD, rollout=TRUNCATED) as loop:
        trainer, answers = (
            Trainer(loop.session),
            {example.index: example.answer for example in loop.setup.train.examples},
        )
        engine.say = lambda problem, sample, call: (
            answers[problem] if sample == 1 else letters(problem, sample, call)
        )
        viewed = []
        loop.tracker.show = lambda step, rows: viewed.append((step, rows))
        metrics = stepped(loop, 0)
        stepped(loop, 1, {"eval/accuracy": 0.5})
    batch, asked = trainer.batches[0], engine.asked[0]
    examples = loop.setup.train.batch(0, 2, 0)
    texts = [engine.say(example.index, sample, 0) for example in examples for sample in range(3)]
    assert (
        asked.samples == 3
        and asked.sampling == loop.session.sampling
        and asked.key != engine.asked[1].key
    )
    assert [len(call) for call in pool.calls] == [6, 6]  # each completion is scored, and once
    np.testing.assert_array_equal(batch.prompts, loop.session.encoder.batch(examples).tokens)
    rewards = np.array(
        [reward_of(examples[row // 3], text[:WIDTH]) for row, text in enumerate(texts)]
    )
    lengths = np.array([min(len(text) + 1, WIDTH) for text in texts])
    np.testing.assert_array_equal(batch.mask.sum(1), lengths)
    penalty = -0.5 * np.clip((lengths - 3) / 2, 0, 1)
    total = (rewards - 0.5 * 0.2 * lengths + penalty).reshape(2, 3)
    np.testing.assert_allclose(
        batch.advantages, (total - total.mean(1, keepdims=True)).reshape(-1), rtol=1e-4, atol=1e-6
    )
    expected = {
        "mismatch/kl": 0.25,
        "mismatch/is_mean": np.exp(-0.25),
        "mismatch/is_clip_frac_positive": 0.0,
        "reward/kl": 0.2 * lengths.mean(),
        "reward/overlong_penalty": penalty.mean(),
        "reward/mean": rewards.mean(),
        "reward/accuracy": np.mean(
            [text == examples[row // 3].answer for row, text in enumerate(texts)]
        ),
        "reward/errors": 0,
        "rollout/weight_version": 1,
        "rollout/rounds": 1,
        "rollout/teaching_prompts": 2,
        "rollout/dropped": 0,
        "completions/mean_length": lengths.mean(),
        "fp8/nonfinite_weight": 0,
        "optim/skipped_steps": 0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert penalty.min() < 0 < metrics["reward/accuracy"] < 1 and engine.version == 3
    sizes = np.array([size for size, _ in engine.synced])
    np.testing.assert_allclose(sizes, sizes[0] * np.array([1, 2, 4]), rtol=1e-6)
    shown = [
        json.loads(line)
        for line in (loop.setup.directory / "samples.jsonl").read_text().splitlines()
    ]
    assert {row["step"] for row in shown} == {0, 1} and shown[0]["completion"] == texts[0][:WIDTH]
    ((step, rows),) = viewed  # at an evaluation
    assert step == 1 and [{"step": 1, **row} for row in rows] == [r for r in shown if r["step"]]


def test_every_setting_that_changes_the_distribution_is_looked_at(loop_of, monkeypatch):
    settings = {
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.9,
        "min_p": 0.1,
        "bad_words": ("zz",),
        "logit_bias": {"97": 1.0},
    }
    seen = {}
    monkeypatch.setattr(
        run_config, "check_sampling", lambda correction, **given: seen.update(given) or True
    )
    with loop_of(Engine(), rl=IN_REWARD, rollout=replace(CONFIG.rollout, **settings)) as loop:
        assert loop.config.samples_truncated() and seen == settings


def test_a_failed_reward_is_told_and_has_no_advantage_and_no_part_in_the_mean(loop_of, caplog):
    engine = Engine(lambda problem, sample, _: "!!" if sample == 1 else "abc"[: sample + 1])
    with loop_of(engine, rl=RLConfig(advantage=AdvantageConfig("dr_grpo"))) as loop:
        trainer = Trainer(loop.session)
        metrics = stepped(loop, 0)
        examples = loop.setup.train.batch(0, 2, 0)
    rewards = np.array(
        [[reward_of(example, "a"), reward_of(example, "abc")] for example in examples]
    )
    advantages = np.asarray(trainer.batches[0].advantages).reshape(2, 3)
    np.testing.assert_allclose(
        advantages[:, [0, 2]], rewards - rewards.mean(1, keepdims=True), atol=1e-6
    )
    assert not advantages[:, 1].any() and metrics["reward/mean"] == pytest.approx(rewards.mean())
    assert (metrics["reward/timeouts"], metrics["reward/errors"]) == (
        2,
        0,
    ) and "no score of !!" in caplog.text


def test_prompts_that_teach_nothing_stay_out_of_the_loss(loop_of):
    engine = Engine()
    with loop_of(
        engine, rl=RLConfig(dynamic_sampling=DynamicSamplingConfig(enabled=True, max_rounds=1))
    ) as loop:
        trainer, first = Trainer(loop.session), loop.setup.train.batch(0, 2, 0)[0].index
        engine.say = lambda problem, sample, call: (
            "same" if problem == first else letters(problem, sample, call)
        )
        stepped(loop, 0)
    batch = trainer.batches[0]  # those that teach first
    np.testing.assert_array_equal(batch.loss_mask[:3], batch.mask[:3])
    assert batch.mask[3:].any() and not batch.loss_mask[3:].any()


def test_scales_are_those_of_the_new_weights_on_prompts_and_completions(loop_of):
    engine, ones = Engine(recipe="fp8-kv"), KVScales(*(jnp.ones(1) for _ in range(3)))
    words, others = (
        (lambda _, sample, call, said=said: said[sample])
        for said in (("abc", "def", "ghi"), ("rst", "uvw", "xyz"))
    )
    with loop_of(engine) as loop:
        session, trainer, scales = loop.session, Trainer(loop.session), []
        for engine.say, trainer.growth, engine.pad in (
            (words, 1, 0),
            (others, 1, 0),
            (others, 1, 9),
            (others, 2, 0),
        ):
            session.serving.scales = ones
            session.sync()
            metrics = stepped(loop, 0)
            assert engine.synced[-1][1] is session.scales
            jax.tree.map(np.testing.assert_array_equal, engine.scales, session.scales)
            scales.append(session.scales)
            assert metrics["fp8/kv_scale_k"] == pytest.approx(float(session.scales.key.max()))
            # of the scales served until then; 200 where nothing is lost
            assert metrics["fp8/quant_snr_db_k"] < 60
    first, other, padded, grown = (
        [np.asarray(x) for x in (s.query, s.key, s.value)] for s in scales
    )
    assert any((one != two).any() for one, two in zip(first, other, strict=True))
    np.testing.assert_array_equal(padded, other)
    np.testing.assert_allclose(grown, [2 * other[0], other[1], other[2]], rtol=1e-6)


@pytest.mark.parametrize(("start", "every"), [(0, 2), (1, 2), (0, 0)])
def test_a_run_serves_before_it_samples_and_saves_after_it_wrote(
    loop_of, monkeypatch, start, every
):
    engine, told = Engine(recipe="fp8-kv"), []
    monkeypatch.setattr(Session, "save", lambda *_, **__: told.append("model"))
    with loop_of(engine, checkpoint=CheckpointConfig(every=every)) as loop:
        sync, loop.start, session = engine.sync, start, loop.session

        def step(number, found, before):
            with session.clock.enter("train"), session.clock.enter("gen"):
                told.append(f"step {number}")
            return {"at": number}

        engine.sync = lambda *arguments: (told.append("sync"), sync(*arguments))
        loop._step = step
        loop._evaluate = lambda number: told.append(f"evaluate {number}") or {"evaluated": number}
        loop.tracker.close()
        loop.tracker = SimpleNamespace(
            log=lambda number, found: told.append((number, found)),
            close=lambda: told.append("end"),
            sync=lambda: None,
        )
        loop.checkpoints.close()
        loop.checkpoints = SimpleNamespace(
            save=lambda number, *_: told.append(f"save {number}"), close=lambda: None
        )
        loop.run()
        assert session.scales is not None and engine.synced[0][1] is session.scales
        prompts = session.encoder.batch(loop.setup.train.batch(start, 2, 0))
        first = calibrate_on_prompts(
            session.weights, prompts, engine.recipe, engine.dtype, engine.backend
        )
        jax.tree.map(np.testing.assert_array_equal, session.scales, first)
    expected = ["sync"]
    for number in range(start, 3):
        expected += [f"evaluate {number}", f"step {number}", (number, number, number)]
        expected += [f"save {number + 1}"] * (number == 2 or bool(every) and number % 2 == 1)
    expected += ["evaluate 3", (3, 3, None), "model", "end"]
    rows = [
        (x[0], x[1].get("evaluated"), x[1].get("at")) if isinstance(x, tuple) else x for x in told
    ]
    assert rows == expected


def test_evaluation_is_due_every_so_many_steps_and_draws_the_same(loop_of):
    engine = Engine()
    with loop_of(engine, Pool()) as loop:
        loop.session.sync()
        due = [bool(loop._evaluate(step)) for step in range(4)]
        loop.collector.collect(0)
    assert due == [True, False, True, True]  # and at the end, step 3
    *answered, trained = engine.asked
    assert len(answered) == 6  # three problems, then two
    assert {asked.key for asked in answered} == {answered[0].key} != {trained.key}
    assert {asked.sampling.temperature for asked in answered} == {0.0}
    assert {int(i) for asked in answered for i in asked.prompts.ids} == set(range(5))


# sampling


def collected(setup, steps, pool=None):
    collector = Collector(setup.session, setup.train, pool or Pool(), setup.config)
    return [collector.collect(step) for step in steps]


def test_no_two_steps_draw_alike_and_a_step_is_drawn_again_alike(setup_of):
    engine = Engine()
    setup = setup_of(engine)
    collected(setup, [0, 1, 2, 1])
    other = Engine()
    collected(setup_of(other, seed=1), [0])
    keys = [asked.key for asked in engine.asked]
    assert len({*keys, other.asked[0].key}) == 4 and keys[1] == keys[3]
    ids = [np.asarray(asked.prompts.ids).tolist() for asked in engine.asked]
    assert len({i for drawn in ids[:3] for i in drawn}) == 6 and ids[1] == ids[3]
    assert ids[0] != np.asarray(other.asked[0].prompts.ids).tolist()


def test_dynamic_sampling_keeps_what_teaches_with_its_own_rewards_and_tokens(setup_of):
    """In round 0 one of two prompts informative, in round 1 both; the first of them fills the batch."""

    def say(problem, sample, call):
        return letters(problem, sample, call) if call or problem == first else "same"

    engine, pool = Engine(say), Pool()
    setup = setup_of(
        engine, rl=RLConfig(dynamic_sampling=DynamicSamplingConfig(enabled=True, max_rounds=4))
    )
    problems = [setup.train.batch(round, 2, 0) for round in range(2)]
    first = problems[0][1].index
    (found,) = collected(setup, [0], pool)
    assert (
        found.rounds == 2
        and found.informative.all()
        and not found.chosen.failed.any()
        and len(found.scores.rewards) == 12
    )
    assert engine.asked[0].key != engine.asked[1].key and [len(call) for call in pool.calls] == [
        6,
        6,
    ]
    chosen = [(problems[0][1], 0), (problems[1][0], 1)]
    rollout = found.experience.rollout
    np.testing.assert_array_equal(rollout.prompts.ids, [example.index for example, _ in chosen])
    said = [
        (example, letters(example.index, sample, call)[:WIDTH])
        for example, call in chosen
        for sample in range(3)
    ]
    assert (
        setup.session.encoder.texts(rollout) == found.experience.texts == [text for _, text in said]
    )
    np.testing.assert_allclose(found.chosen.rewards, [reward_of(*pair) for pair in said], rtol=1e-6)
    assert found.examples == problems[0] + problems[1] and found.texts[:3] == ["same"] * 3
    np.testing.assert_array_equal(rollout.policy_logprobs < 0, rollout.mask)
    np.testing.assert_allclose(
        rollout.policy_logprobs[:, 0], [-0.8, -0.9, -1.0, -0.5, -0.6, -0.7], rtol=1e-6
    )


def test_dynamic_sampling_draws_once_where_all_prompts_teach(setup_of):
    setup = setup_of(Engine(), rl=RLConfig(dynamic_sampling=DynamicSamplingConfig(enabled=True)))
    (found,) = collected(setup, [1])
    assert found.rounds == 1 and found.informative.all()


def test_dynamic_sampling_deals_what_teaches_out_to_the_updates(setup_of):
    """Two of four prompts teach, and each of two updates has one of them."""
    engine = Engine(lambda i, sample, call: letters(i, sample, call) if i in teach else "same")
    setup = setup_of(
        engine,
        rollout=replace(CONFIG.rollout, prompts_per_step=4),
        trainer=TrainerConfig(steps=1, updates_per_rollout=2),
        rl=RLConfig(dynamic_sampling=DynamicSamplingConfig(enabled=True, max_rounds=1)),
    )
    ids = [example.index for example in setup.train.batch(0, 4, 0)]
    teach = {ids[1], ids[3]}
    (found,) = collected(setup, [0])
    assert np.asarray(found.experience.rollout.prompts.ids).tolist() == [
        ids[i] for i in (1, 0, 3, 2)
    ]
    assert found.informative.tolist() == [True, False, True, False]


def test_dynamic_sampling_gives_up_after_its_rounds(setup_of):
    # one valid reward informative nothing
    engine = Engine(lambda problem, sample, call: "same!"[: 4 + (sample > 0)])
    setup = setup_of(
        engine, rl=RLConfig(dynamic_sampling=DynamicSamplingConfig(enabled=True, max_rounds=3))
    )
    (found,) = collected(setup, [2])
    assert found.rounds == 3 and not found.informative.any() and not found.entering.any()
    assert found.chosen.failed.tolist() == [False, True, True] * 2
    drawn = [i for asked in engine.asked for i in np.asarray(asked.prompts.ids).tolist()]
    expected = [
        example.index for round in range(6, 9) for example in setup.train.batch(round, 2, 0)
    ]
    assert drawn == expected


# evaluation


def test_accuracy_is_a_mean_and_pass_at_k_a_maximum_over_samples():
    """Five problems in batches of three, two samples each: both right, one, none, none, one."""
    right = {(0, 0), (0, 1), (1, 0), (4, 1)}
    examples = [Example(i, f"{i}=", "yes", "yes", {}) for i in range(5)]
    engine, pool = (
        Engine(lambda problem, sample, _: "yes" if (problem, sample) in right else "n"),
        Pool(),
    )
    key, config = jax.random.key(5), replace(CONFIG.evaluation, temperature=0.7)
    session = SimpleNamespace(
        engine=engine,
        encoder=PromptEncoder(ByteTokenizer(), "", 6),
        sampling=Sampling(WIDTH),
        mesh=make_mesh(MeshConfig()),
    )
    found = evaluate(session, pool, examples, config, key)
    metrics, rows = found.metrics, found.answers
    assert found.row["correct"] == [2, 1, 0, 0, 1] and found.row["samples"] == 2
    low, high = wilson_interval(0.4, 5)
    assert metrics == pytest.approx(
        {
            "eval/accuracy": 0.4,
            "eval/accuracy_low": low,
            "eval/accuracy_high": high,
            "eval/pass_at_k": 0.6,
            "eval/mean_length": (4 * 4 + 6 * 2) / 10,
            "eval/problems": 5.0,
            "eval/failed_rewards": 0.0,
        }
    )
    texts = ["yes" if (i, s) in right else "n" for i in range(5) for s in range(2)]
    assert [row["completion"] for row in rows] == texts and sum(pool.calls, []) == texts
    assert [row["prompt"] for row in rows] == [f"{i}=" for i in range(5) for _ in range(2)]
    assert [row["reward"] for row in rows] == pytest.approx(
        [reward_of(examples[0], text) for text in texts]
    )
    assert [np.asarray(asked.prompts.ids).tolist() for asked in engine.asked] == [
        [0, 1, 2],
        [3, 4, 3],
    ]
    assert all(
        (asked.samples, asked.sampling) == (2, Sampling(WIDTH, 0.7)) for asked in engine.asked
    )
    assert engine.asked[0].key == tuple(np.asarray(jax.random.key_data(key)).tolist())
    single = evaluate(session, pool, examples, replace(config, samples=1), key)
    assert single.problems == found.problems
    once = single.metrics
    assert "eval/pass_at_k" not in once and once["eval/accuracy"] == pytest.approx(0.4)


def test_evaluation_samples_the_policy_itself():
    sampling = Sampling(WIDTH, 0.7, 5, 0.9, 0.1, (EOS,))
    assert at_temperature(sampling, 0.3) == Sampling(WIDTH, 0.3, stop_token_ids=(EOS,))


def test_the_held_out_set_is_answered_by_the_run_s_policy(setup_of):
    engine = Engine(lambda problem, *_: "abcdefgh"[: 1 + problem % 4], recipe="fp8-kv")
    setup = setup_of(engine, evaluation=EvaluationConfig(examples=4, samples=1, batch_size=4))
    pool = Pool()
    metrics = evaluate_held_out(setup, pool).metrics
    said = ["abcdefgh"[: 1 + problem % 4] for problem in range(4)]
    assert pool.calls == [said] and len(engine.synced) == 1 and engine.synced[0][1] is not None
    right = [
        text == example.answer for text, example in zip(said, setup.held_out.examples, strict=False)
    ]
    assert metrics["eval/accuracy"] == pytest.approx(np.mean(right))


# supervised training


def problems_with_answers(count: int = 4) -> list[Example]:
    return [Example(i, f"{i}=", "abcd"[: 1 + i], "abcd"[: 1 + i], {}) for i in range(count)]


def test_demonstrations_end_with_end_of_sequence():
    encoder, examples = PromptEncoder(ByteTokenizer(), "", 6), problems_with_answers()
    assert sft.demonstrations(encoder, examples, 0, CONFIG) == [
        [*b"abcd"[: 1 + row], EOS] for row in range(4)
    ]
    short = sft.demonstrations(encoder, examples, 0, replace(CONFIG, sft=SftConfig(cut_short=1.0)))
    assert short == [[97, EOS], [97, EOS], [97, 98, EOS], [97, 98, 99, EOS]]
    narrow = replace(CONFIG, rollout=replace(CONFIG.rollout, max_new_tokens=4))
    with pytest.raises(UserError, match="max_new_tokens = 4: the answer of problem 3 has 5 tokens"):
        sft.demonstrations(encoder, examples, 0, narrow)
    with pytest.raises(UserError, match="problem 7 has no answer"):
        sft.demonstrations(encoder, [Example(7, "p", "", "", {})], 0, CONFIG)


def test_demonstrations_are_cut_anew_at_each_step():
    encoder, config = (
        PromptEncoder(ByteTokenizer(), "", 6),
        replace(CONFIG, sft=SftConfig(cut_short=0.5)),
    )
    answers = [
        sft.demonstrations(encoder, problems_with_answers(), step, config)
        for step in (0, 1, 2, 3, 0)
    ]
    lengths = [tuple(map(len, some)) for some in answers]
    assert lengths[0] == lengths[4] and len(set(lengths)) > 1


def test_a_supervised_update_is_of_the_mean_over_answer_tokens(setup_of):
    """Of all of them, the end of sequence included; its gradient is that of the same mean."""
    setup = setup_of(Engine(), optimizer=OptimizerConfig(learning_rate=1e-3))
    session, examples = setup.session, problems_with_answers()
    answers = sft.demonstrations(session.encoder, examples, 0, CONFIG)
    before = session.policy
    logprobs = session.logprobs(examples, answers)
    expected = -np.concatenate(logprobs).astype(np.float64).mean()
    metrics = session.supervise(session.encoder.batch(examples), answers)
    assert metrics["loss"] == pytest.approx(expected, rel=1e-5) and metrics["optim/skipped"] == 0
    assert -np.concatenate(session.logprobs(examples, answers)).mean() < expected
    assert np.any(
        np.asarray(ravel_pytree(session.policy)[0]) != np.asarray(ravel_pytree(before)[0])
    )
    for given, message in (
        (answers[:3], "answers: 3 for 4 prompts"),
        ([*answers[:3], list(range(6))], "answer 3 has 6 tokens"),
        ([*answers[:3], []], "completion 3 has no tokens"),
        ([*answers[:3], [264]], "token ids outside of the vocabulary"),
    ):
        with pytest.raises(UserError, match=message):
            session.supervise(examples, given)


def test_supervised_steps_walk_through_the_training_set(setup_of, monkeypatch):
    engine, seen, told = Engine(), [], {}
    trainer = TrainerConfig(
        remat="layer",
        logprob_chunk=9,
        attention_chunk=0,
        loss_scale=LossScaleConfig("static", 8.0),
        sharpness=True,
    )
    rates = OptimizerConfig(learning_rate=3e-4, schedule="linear", final_ratio=0.0)

    def note(state, batch, config, optimizer):
        seen.append(batch)
        expected = StepConfig(
            setup.session.recipe,
            RLConfig(),
            "float32",
            1.0,
            1,
            True,
            9,
            0,
            "reference",
            trainer.loss_scale,
            True,
        )
        assert config == expected and optimizer is setup.session.learner.optimizer
        assert float(setup.session.learner.schedule(3)) == 0  # of three updates
        return replace(state, policy=jax.tree.map(lambda x: x + 1, state.policy)), {
            "loss": jnp.float32(len(seen)),
            "optim/skipped": jnp.float32(0),
        }

    def answer(setup, pool):
        told["norm"] = setup.session.weights.norm.value
        return SimpleNamespace(metrics={"eval/accuracy": 0.5}, row={"correct": [1, 0]})

    monkeypatch.setattr(sessions, "supervised_update", note)
    monkeypatch.setattr(sft, "reward_pool", lambda setup: nullcontext(Pool(setup.config.task)))
    monkeypatch.setattr(sft, "evaluate_held_out", answer)
    monkeypatch.setattr(
        Session,
        "save",
        lambda self, _, dtype, adapters: told.update(saved=self.weights.norm.value, dtype=dtype),
    )
    setup = setup_of(
        engine,
        sft=SftConfig(steps=3, batch_size=4, optimizer=rates),
        trainer=trainer,
        precision=REFERENCE,
        rollout=replace(CONFIG.rollout, temperature=0.5),
    )
    sft.supervise(setup, lambda line: told.update(line=line))
    for step, batch in enumerate(seen):
        examples = setup.train.batch(step, 4, 0)
        np.testing.assert_array_equal(batch.prompts, setup.session.encoder.batch(examples).tokens)
        answers = sft.demonstrations(setup.session.encoder, examples, step, setup.config)
        assert [
            row[kept].tolist()
            for row, kept in zip(np.asarray(batch.tokens), np.asarray(batch.mask), strict=True)
        ] == answers
    assert (
        len(seen) == 3
        and np.all(told["norm"] == 4)
        and np.all(told["saved"] == 4)
        and told["dtype"] == "float32"
    )
    assert "accuracy 0.50" in told["line"]
    rows = [
        json.loads(line) for line in (setup.directory / "metrics.jsonl").read_text().splitlines()
    ]
    assert [(row["step"], row.get("loss")) for row in rows] == [(0, 1.0), (2, 3.0), (3, None)]
    examples = setup.held_out.examples[: setup.config.evaluation.examples]
    targets = [setup.session.encoder.target(example) for example in examples]
    found = setup.session.logprobs(examples, targets, temperature=1.0)
    expected = -np.concatenate(found).mean()  # not at the temperature of samples
    assert rows[-1]["eval/loss"] == pytest.approx(expected, rel=1e-5)
    (right,) = (setup.directory / "evaluations.jsonl").read_text().splitlines()
    assert json.loads(right) == {"step": 3, "correct": [1, 0]}


# between text and tokens


class ChatBytes(ByteTokenizer):
    """Bytes with a chat template."""

    has_chat_template = True

    def encode_chat(self, messages, add_generation_prompt=True):
        return [
            token
            for message in messages
            for token in f"{message['role'][0]}:{message['content']};".encode()
        ]


def test_prompts_and_completions_go_through_the_tokenizer():
    example = Example(3, "ab", "c", "cd", {})
    plain, chat = (
        PromptEncoder(ByteTokenizer(), "be good", 4),
        PromptEncoder(ChatBytes(), "be good", 40),
    )
    assert plain.tokens(example) == [257, *b"ab"] and plain.target(example) == [*b"cd", EOS]
    assert bytes(chat.tokens(example)) == b"s:be good;u:ab;"
    assert plain.fits(replace(example, prompt="abc")) and not plain.fits(
        replace(example, prompt="abcd")
    )
    batch = plain.batch([example, replace(example, index=9, prompt="x")])
    np.testing.assert_array_equal(batch.tokens, [[257, 97, 98, 256], [257, 120, 256, 256]])
    assert batch.lengths.tolist() == [3, 2] and batch.ids.tolist() == [3, 9]
    engine = Engine(lambda problem, *_: "six" if problem == 3 else "sixteen")
    rollout = engine.generate(batch, 1, Sampling(WIDTH), jax.random.key(0))
    assert plain.texts(replace(rollout, tokens=jnp.where(rollout.mask, rollout.tokens, 122))) == [
        "six",
        "sixte",
    ]


# episodes


def test_episodes_go_on_from_what_was_said_and_seen():
    """Three problems, two samples: those of problem 1 end in their first turn, sample 1 of problem
    2 fails in its second."""

    def say(row, _, call):
        problem, sample = divmod(row, 2)
        if problem == 1:
            return "x"
        return "!" if (problem, sample, call) == (2, 1, 1) else f"{'pqr'[call]}{problem}{sample}"

    task = TaskConfig(
        kind="environment", name="m:C", max_turns=3, reward=RewardConfig(partial_credit=True)
    )
    engine, pool, key = Engine(say), Pool(task), jax.random.key(4)
    encoder, sampling = PromptEncoder(ByteTokenizer(), "", 14), Sampling(WIDTH, 0.9)
    examples = [Example(i, f"{i}?", "", "", {}) for i in range(3)]
    clock = Clock()
    episodes, scores = play(engine, encoder, pool, examples, 2, sampling, key, clock)
    assert (
        len({asked.key for asked in engine.asked}) == 3
        and {"time/gen", "time/reward"} <= clock.seconds.keys()
    )
    assert all((asked.samples, asked.sampling) == (1, sampling) for asked in engine.asked)
    assert pool.calls == [
        ["p00", "p01", "x", "x", "p20", "p21"],
        ["q00", "q01", "q20", "!"],
        ["r00", "r01", "r20"],
    ]
    assert [np.asarray(asked.prompts.ids).tolist() for asked in engine.asked] == [
        [0, 1, 2, 3, 4, 5],
        [0, 1, 4, 5, 0, 0],
        [0, 1, 4, 0, 0, 0],
    ]
    assert [asked.prompts.tokens.shape[1] for asked in engine.asked] == [4, 14, 14]
    turn = episodes[4].turns[1]
    assert (turn.prompt, turn.tokens) == ((257, *b"2?", *b"p20", EOS, *b"P"), (*b"q20", EOS))
    np.testing.assert_allclose(
        turn.policy_logprobs, -0.5 - 0.1 * 2 - 0.01 * np.arange(4), rtol=1e-5
    )
    np.testing.assert_allclose(
        turn.behaviour_logprobs, np.array(turn.policy_logprobs) - 1, rtol=1e-5
    )
    assert turn.stopped and [len(episode.turns) for episode in episodes] == [3, 3, 1, 1, 3, 2]
    np.testing.assert_allclose(scores.rewards, [0.9, 0.9, 0.1, 0.1, 0.9, 0], rtol=1e-6)
    assert (
        scores.failed.tolist() == [False] * 5 + [True]
        and scores.errors == 1
        and not scores.correct.any()
    )


def test_an_episode_whose_conversation_has_no_room_ends_and_keeps_its_reward():
    task = TaskConfig(kind="environment", name="m:C", max_turns=3)
    examples = [Example(0, "?", "", "", {}), Example(1, "long?", "", "", {})]
    engine, encoder = Engine(lambda *_: "abc"), PromptEncoder(ByteTokenizer(), "", 12)
    key = jax.random.key(0)
    episodes, scores = play(
        engine, encoder, Pool(task), examples, 1, Sampling(WIDTH), key, Clock(), slots=4
    )
    assert [(len(e.turns), e.truncated, e.done) for e in episodes] == [
        (3, False, True),
        (2, True, True),
    ]
    assert len(episodes[0].turns[2].prompt) == 12  # just as many as there is room for
    np.testing.assert_allclose(scores.rewards, [0.9, 0.6], rtol=1e-6)
    assert [len(asked.prompts.ids) for asked in engine.asked] == [4, 4, 4]


def test_an_episode_without_room_is_scored_where_the_end_alone_is_rewarded():
    class AtTheEnd(Pool):
        def play(self, episodes, texts):
            job = ScoreJob([()] * len(texts), self.task)
            for row, (episode, text) in enumerate(zip(episodes, texts, strict=True)):
                self.calls.append((episode.example.index, text, len(episode.history)))
                said, end = [{"role": "user", "content": "?"}], text is None
                turn = {"observation": said, "reward": 0.5 * end, "done": end}
                job.record(row, turn | ({"metrics": {"ends": 1.0}} if end else {}), None)
            return job.scores()

    task = TaskConfig(kind="verifiers", name="x", max_turns=2)
    examples = [Example(0, "?", "", "", {}), Example(1, "longest?", "", "", {})]
    engine, encoder = Engine(lambda *_: "abc"), PromptEncoder(ByteTokenizer(), "", 12)
    pool = AtTheEnd(task)
    episodes, scores = play(
        engine, encoder, pool, examples, 1, Sampling(WIDTH), jax.random.key(0), Clock()
    )
    assert pool.calls == [(0, "abc", 0), (1, "abc", 0), (1, None, 1), (0, "abc", 1)]
    assert [(e.truncated, e.done, len(e.turns)) for e in episodes] == [
        (False, True, 2),
        (True, True, 1),
    ]
    assert scores.rewards.tolist() == [0, 0.5]
    assert scores.components["ends"].tolist() == [0, 1]


def test_rows_of_episodes_carry_the_log_probabilities_and_advantages_of_their_own():
    """Two episodes of two turns, joined in a row each, and an empty row; the observations between
    the turns are not sampled."""
    task = TaskConfig(kind="environment", name="m:C", max_turns=2)
    engine, encoder = (
        Engine(lambda problem, *_: "ab"[: 1 + problem]),
        PromptEncoder(ByteTokenizer(), "", 12),
    )
    examples = [Example(i, f"{i}?", "", "", {}) for i in range(2)]
    episodes, scores = play(
        engine, encoder, Pool(task), examples, 1, Sampling(WIDTH), jax.random.key(0), Clock()
    )
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    both = episode_experience(episodes, 1, 1.0, 12 + WIDTH - 1, 256, sharding, multiple=3)
    sample_of_row = both.sample_of_row
    own = np.flatnonzero(sample_of_row >= 0)
    sampled = [[turn.policy_logprobs for turn in episode.turns] for episode in episodes]
    lengths = np.array([sum(map(len, turns)) for turns in sampled])
    for truncated, less in ((False, 0), (True, 1)):
        batch = replace(both, truncated=truncated).batch(
            RLConfig(correction=CorrectionConfig(truncated_sampling="behaviour"))
        )
        for row, turns in zip(own, sampled, strict=True):
            expected = np.concatenate(turns) - less
            np.testing.assert_allclose(
                batch.rollout_logprobs[row][batch.mask[row]], expected, rtol=1e-5
            )
    np.testing.assert_array_equal(both.policy_logprobs, both.rollout.policy_logprobs)
    assert batch.loss_mask is None and not batch.mask[sample_of_row < 0].any()
    np.testing.assert_array_equal(batch.mask.sum(1)[own], lengths)
    # behind its only prompt token a row attends to the rest of the prompt and to an observation
    np.testing.assert_array_equal(batch.present.sum(1)[own], lengths + 3)
    np.testing.assert_array_equal(both.by_sample(jnp.asarray(batch.mask).sum(1)), lengths)
    spread = np.asarray(both.by_row(jnp.array([5.0, 7.0])))
    assert spread[own].tolist() == [5, 7] and spread.sum() == 12
    part = both.batch(RLConfig(), np.array([False, True]))
    np.testing.assert_array_equal(
        part.loss_mask, np.asarray(part.mask) & (sample_of_row == 1)[:, None]
    )
    prompts, behind, count = both.work()
    assert (prompts.tolist(), behind.tolist(), count) == (
        [1, 1],
        (lengths + 3).tolist(),
        lengths.sum(),
    )
    metrics = both.metrics()
    assert (metrics["episodes/turns"], metrics["episodes/rows"], metrics["episodes/truncated"]) == (
        2,
        1,
        0,
    )
    assert (
        metrics["completions/mean_length"] == lengths.sum() / 4
        and metrics["completions/clipped_ratio"] == 0
    )


# rewards


def test_scores_are_summed_weighed_and_joined():
    examples = [Example(0, "", "ab", "ab", {}), Example(1, "", "abcd", "abcd", {})]
    one, two = (
        Pool().score(examples, ["ab", "!", "!!", "abcd"]),
        Pool().score(examples, ["!", "ab"]),
    )
    both = Scores.join([one, two])
    np.testing.assert_allclose(both.rewards, [1 - 2 / 16, 0, 0, 1 - 4 / 16, 0, -2 / 16])
    np.testing.assert_allclose(both.components["length"], [-2 / 8, 0, 0, -4 / 8, 0, -2 / 8])
    assert both.correct.tolist() == [True, False, False, True, False, False]
    assert both.failed.tolist() == [False, True, True, False, True, False]
    assert (both.errors, both.timeouts, both.first_error) == (2, 1, "no score of !")
    assert both.seconds == one.seconds + two.seconds
    metrics = both.metrics()
    lengths = np.array([-2, -4, -2]) / 8
    assert metrics["rewards/exact/mean"] == pytest.approx(2 / 3)
    assert metrics["rewards/length/mean"] == pytest.approx(lengths.mean())
    assert metrics["rewards/length/std"] == pytest.approx(lengths.std())
    assert (metrics["reward/errors"], metrics["reward/timeouts"]) == (2, 1)


class Told(Exception):
    """What a process tells the others."""


@pytest.fixture
def in_two_processes(monkeypatch):
    """Two processes, one after the other: each stops where it tells its part, then both are given
    the parts of both."""

    def run(call, task, kind=Pool):
        told, pools, results = defaultdict(dict), [kind(task), kind(task)], {}
        for number in (0, 1, 0, 1, 0):
            process = SimpleNamespace(
                process_index=lambda number=number: number, process_count=lambda: 2
            )
            turns = count()

            def tell(part, number=number, turns=turns):
                parts = told[next(turns)]
                parts.setdefault(number, part)
                if len(parts) < 2:
                    raise Told
                both = [parts[0], parts[1]]
                return both if isinstance(part, str) else jax.tree.map(lambda *x: sum(x), *both)

            monkeypatch.setattr(distributed, "sum_over_processes", tell)
            monkeypatch.setattr(distributed, "gather_text", tell)
            monkeypatch.setattr(distributed, "jax", process)
            with suppress(Told):
                results.setdefault(number, call(pools[number]))
        return [results[0], results[1]], [pool.calls[0] for pool in pools]

    return run


def test_processes_score_each_completion_once_and_know_all_scores(in_two_processes):
    long = 20 * "a"  # right, and its reward is below 0
    examples = [Example(0, "", "ab", "ab", {}), Example(1, "", long, long, {})]
    texts = ["ab", "ab", "!!", long, "!", "ab"]
    (one, two), shares = in_two_processes(
        lambda pool: distributed.score_distributed(pool, examples, texts), TASK
    )
    whole = Pool().score(examples, texts)
    assert shares == [texts[::2], texts[1::2]]
    for found in (one, two):
        np.testing.assert_array_equal(found.rewards, whole.rewards)
        np.testing.assert_array_equal(found.correct, [True, True, False, True, False, False])
        np.testing.assert_array_equal(found.failed, whole.failed)
        assert found.components.keys() == whole.components.keys()
        jax.tree.map(np.testing.assert_array_equal, found.components, whole.components)
        assert (found.errors, found.timeouts) == (1, 1) and 0 <= found.seconds < 60


def test_processes_know_a_metric_that_only_one_of_them_has(in_two_processes):
    class Measured(Pool):
        def score(self, examples, completions):
            self.calls.append(list(completions))
            job = ScoreJob([()] * len(completions), self.task)
            for row, text in enumerate(completions):
                turn = {"observation": [], "reward": 1.0, "done": True, "metrics": {"tries": 2.0}}
                job.record(row, turn, "no turn" if text == "!" else None)
            return job.scores()

    texts, examples = ["a", "!", "b", "!"], [Example(0, "", "", "", {})]
    task = TaskConfig(kind="verifiers", name="x")
    both, _ = in_two_processes(
        lambda pool: distributed.score_distributed(pool, examples, texts), task, Measured
    )
    for found in both:
        assert found.components["tries"].tolist() == [2, 0, 2, 0]
        assert found.components["environment"].tolist() == [1, 0, 1, 0]
        assert (found.errors, found.first_error) == (2, "no turn")


def test_processes_play_each_turn_once_and_know_all_turns(in_two_processes):
    task = TaskConfig(kind="environment", name="m:C", max_turns=2)
    texts, episodes = (
        ["abx", "!", "c", "0123456789", "d"],
        [Episode(Example(i, "", "", "", {})) for i in range(5)],
    )
    (one, two), shares = in_two_processes(
        lambda pool: distributed.play_distributed(pool, episodes, texts), task
    )
    whole = Pool(task).play(episodes, texts)
    assert shares == [texts[::2], texts[1::2]]
    for found in (one, two):
        assert found.turns == whole.turns and found.first_error == "no turn"
        np.testing.assert_allclose(found.rewards, [0.3, 0, 0.1, 1.0, 0.1], rtol=1e-6)
        assert found.correct.tolist() == [False, False, False, True, False]
        assert found.failed.tolist() == [False, True, False, False, False] and (
            found.errors,
            found.timeouts,
        ) == (1, 0)
