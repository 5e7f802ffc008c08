"""The session: the loop of a run from Python, its errors, and what it keeps from one call to the
next."""

from __future__ import annotations

import copy
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import monitoring
from parallel.rewards import even_letters
from tiny_run import EVEN_LETTERS, RUN, measured, train, write_run

import fp8rl_jax as fp8rl
from fp8rl_jax.config.files import read_config
from fp8rl_jax.config.recipe import recipe as changed_recipe
from fp8rl_jax.config.rl import CorrectionConfig, RLConfig
from fp8rl_jax.config.run import RolloutConfig, RunConfig
from fp8rl_jax.config.settings import with_settings
from fp8rl_jax.config.tasks import TaskConfig
from fp8rl_jax.config.training import CheckpointConfig, OptimizerConfig, TrainerConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.forms import rollout_policy
from fp8rl_jax.tasks.dataset import load_splits
from fp8rl_jax.training.checkpoint import Checkpoints
from fp8rl_jax.training.plan import memory_plan
from fp8rl_jax.training.setup import build
from fp8rl_jax.weights.hf_directory import load_policy_arrays
from fp8rl_jax.weights.load import load_policy, save_policy

SIZES = RUN["model"]["init"]
PROMPTS = ["ab=", "cde=", "f="]


def session_of(recipe="bf16", **settings) -> fp8rl.Session:
    policy, tokenizer = fp8rl.byte_policy(**SIZES)
    usual = {
        "compute_dtype": "float32",
        "samples_per_prompt": 4,
        "max_new_tokens": 6,
        "learning_rate": 1e-2,
    }
    return fp8rl.Session(policy, tokenizer, recipe, **(usual | settings))


def rewards_of(rollout) -> list[float]:
    return [sum(letter in "aeiou" for letter in text) / 6 for text in rollout.texts]


def weights(policy) -> list[np.ndarray]:
    return [np.array(x) for x in jax.tree.leaves(policy)]


def test_the_face_starts_no_backend_and_is_quick():
    code = (
        "import time; t = time.perf_counter(); import sys, fp8rl_jax; assert 'jax' not in "
        "sys.modules; "
        "print(time.perf_counter() - t); assert {'Session', 'load', 'train', 'rl'} <= "
        "set(dir(fp8rl_jax)); fp8rl_jax.nothing"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert float(done.stdout) < 0.2 and "has no attribute 'nothing'" in done.stderr
    for name in fp8rl.__all__:
        assert getattr(fp8rl, name).__doc__, name


def test_programs_that_a_session_compiles_are_kept(tmp_path):
    """Also where something was compiled before it."""
    code = (
        "import jax, fp8rl_jax as fp8rl; jax.jit(lambda x: x + 1)(1.0); policy, tokenizer = "
        "fp8rl.byte_policy(num_layers=1); "
        "session = fp8rl.Session(policy, tokenizer, max_new_tokens=2); "
        "jax.config.update('jax_persistent_cache_min_compile_time_secs', 0); "
        "session.rollout(['a='])"
    )
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_COMPILATION", "JAX_PERSISTENT"))
    }
    subprocess.run(
        [sys.executable, "-c", code], check=True, env=environ | {"FP8RL_CACHE": str(tmp_path)}
    )
    assert any("generate" in path.name for path in (tmp_path / "jax").glob("*/*"))


def test_a_session_is_the_loop_of_a_run(tmp_path):
    """Prompt by prompt and step by step, on the same problems: the same numbers, to the last
    bit."""
    run_file = write_run(tmp_path, EVEN_LETTERS, {"recipe": "fp8-rl"})
    assert train(run_file, tmp_path / "out") == 0
    rows = measured(tmp_path / "out")
    setup = build(replace(read_config(RunConfig, run_file), output=str(tmp_path / "not written")))
    config, problems = setup.config, setup.train
    policy, tokenizer = fp8rl.byte_policy(**SIZES)
    session = fp8rl.Session(policy, tokenizer, config=config)
    for step, row in enumerate(rows):
        examples = problems.batch(step, config.rollout.prompts_per_step, config.seed)
        rollout = session.rollout(session.encoder.batch(examples))
        metrics = session.update(rollout, [even_letters(text.strip()) for text in rollout.texts])
        for name in (
            "loss",
            "reward/mean",
            "mismatch/k3",
            "optim/grad_norm",
            "fp8/kv_scale_k",
            "completions/mean_length",
        ):
            assert metrics[name] == row[name], (step, name)
    assert not (tmp_path / "not written").exists()


def test_the_policy_of_the_caller_stays_and_a_snapshot_survives():
    policy, tokenizer = fp8rl.byte_policy(**SIZES)
    before = weights(policy)
    session = session_of(compute_dtype="bfloat16", **{"model.dither": False})
    snapshots = []
    for _ in range(2):
        rollout = session.rollout(PROMPTS)
        snapshots.append((session.state, session.policy))
        session.update(rollout, rewards_of(rollout))
    for old, new in zip(before, weights(policy), strict=True):
        np.testing.assert_array_equal(old, new)
    states = [weights(state.policy) for state, _ in snapshots] + [weights(session.policy)]
    assert all(np.array_equal(a, b) for a, b in zip(before, states[0], strict=True))
    for one, other in zip(states, states[1:], strict=False):
        assert any(not np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_rollout_says_what_was_sampled():
    session = session_of("fp8-rl")
    rollout = session.rollout(PROMPTS)
    assert len(rollout.texts) == 12 == len(rollout.tokens) and rollout.weight_version == 1
    for text, tokens, logprobs in zip(rollout.texts, rollout.tokens, rollout.logprobs, strict=True):
        assert (
            text == session.tokenizer.decode(tokens)
            and len(tokens) == len(logprobs)
            and (logprobs <= 0).all()
        )
    again = session.rollout(PROMPTS)
    assert again.texts != rollout.texts  # another rollout of the same step
    repeated = session_of("fp8-rl")
    assert (
        repeated.rollout(PROMPTS).texts == rollout.texts
        and repeated.rollout(PROMPTS).texts == again.texts
    )
    assert session_of("fp8-rl", seed=1).rollout(PROMPTS).texts != rollout.texts
    metrics = session.update(rollout, rewards_of(rollout))
    assert session.rollout(PROMPTS).weight_version == 2 and session.step == 1
    assert metrics["completions/mean_length"] == np.mean(list(map(len, rollout.tokens)))
    assert metrics["reward/mean"] == pytest.approx(np.mean(rewards_of(rollout)))
    times = session.lap()
    assert (
        times["time/gen"] > 0
        and times["perf/tok_per_s_gpu"] > 0
        and "time/train" not in session.lap()
    )


def test_samples_to_look_at_change_nothing():
    session, plain = session_of("fp8-rl"), session_of("fp8-rl")
    rollout, same = session.rollout(PROMPTS), plain.rollout(PROMPTS)
    greedy = session.sample(["xyz=", "ab="], samples=2)
    assert greedy.texts[:2] == [greedy.texts[0]] * 2 and greedy.prompts == 2
    assert session.sample(PROMPTS, 4, temperature=1.0).texts != rollout.texts
    assert (
        session.sample(PROMPTS, temperature=1.0).texts
        != session.sample(PROMPTS, temperature=1.0, seed=1).texts
    )
    ours, theirs = (
        session.update(rollout, rewards_of(rollout)),
        plain.update(same, rewards_of(same)),
    )
    assert ours == theirs
    with pytest.raises(UserError, match="sampled at temperature 0, and rollout.temperature is 1"):
        session.update(greedy, [0.0] * 4)


@pytest.mark.parametrize("side", ["trainer", "rollout"])
def test_nor_do_samples_before_the_first_rollout(side):
    """Scales of an FP8 cache that were measured on their prompts are gone."""
    metrics = []
    for first in (["zzzzzzzzzz="], None):
        session = session_of("fp8-kv", kv_calibration=side)
        for _ in range(2):
            if first:
                session.sample(first)
            rollout = session.rollout(PROMPTS)
            metrics.append(session.update(rollout, rewards_of(rollout)))
    one, two, plain, other = (
        {name: x for name, x in row.items() if "version" not in name} for row in metrics
    )
    # what the scales before would have cost is measured against those of the samples
    if side == "rollout":
        one, two, plain, other = (
            {n: x for n, x in row.items() if not n.startswith("fp8/")}
            for row in (one, two, plain, other)
        )
    assert (one, two) == (plain, other)


@pytest.mark.parametrize("packing", [False, True])
def test_scales_of_the_update_s_own_forward_are_those_of_the_weights_before_it(packing):
    """On all of its tokens: those of a forward of the trainer's where nothing is learned."""
    found = []
    for calibration, rate in (("update", 1e-2), ("trainer", 1e-30), ("trainer", 1e-2)):
        trainer = TrainerConfig(packing=packing)
        session = session_of(
            "fp8-kv", kv_calibration=calibration, learning_rate=rate, trainer=trainer
        )
        rollout = session.rollout(PROMPTS)
        metrics = session.update(rollout, rewards_of(rollout))
        jax.tree.map(np.testing.assert_array_equal, session.engine.scales, session.scales)
        found.append((np.stack(jax.tree.leaves(session.scales)), metrics))
    (own, metrics), (before, expected), (after, _) = found
    np.testing.assert_allclose(own, before, rtol=1e-5)
    assert np.abs(own / after - 1).max() > 1e-3
    for role in "qkv":
        assert metrics[f"fp8/amax_{role}"] == pytest.approx(expected[f"fp8/amax_{role}"], rel=1e-5)
        assert 20 < metrics[f"fp8/quant_snr_db_{role}"] < 40  # under the scales that were served


@pytest.mark.slow
def test_more_prompts_within_a_bucket_compile_nothing():
    session, compiled = session_of(), []
    for _ in range(2):
        rollout = session.rollout(PROMPTS)  # three fill three
        session.update(rollout, rewards_of(rollout))
    five = [f"{i}=" for i in range(5)]
    for _ in range(2):
        rollout = session.rollout(five)  # as six
        session.update(rollout, rewards_of(rollout))
    monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compiled.append(name))
    for prompts in ([*five, "long enough="], five[:5], PROMPTS):
        rollout = session.rollout(prompts)
        assert len(rollout.texts) == 4 * len(prompts)
        metrics = session.update(rollout, rewards_of(rollout))
        assert metrics["reward/mean"] == pytest.approx(np.mean(rewards_of(rollout)))
    programs = [name for name in compiled if "backend_compile" in name]
    assert not programs


def test_what_fills_a_batch_up_teaches_nothing():
    """Five prompts in a bucket of six: loss, gradient and policy are those of the five alone."""
    five = [f"{i}{i}=" for i in range(5)]
    found = []
    for micro in (0, 5):  # as six, and as five: a multiple of the micro-batch
        session = session_of(micro_batch_prompts=micro, **{"rl.overlong.buffer": 5})
        rollout = session.rollout(five)
        assert rollout.prompts_in_batch == (5 if micro else 6)
        found.append(
            (rollout.texts, session.update(rollout, rewards_of(rollout)), weights(session.policy))
        )
    (texts, filled, one), (others, plain, other) = found
    assert texts == others
    names = (
        "loss",
        "reward/mean",
        "reward/overlong_penalty",
        "mismatch/kl",
        "optim/grad_norm",
        "completions/mean_length",
    )
    for name in (*names, "entropy"):
        assert filled[name] == pytest.approx(plain[name], rel=1e-4, abs=1e-6), name
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4)


def test_a_reward_that_is_none_has_no_part():
    session = session_of(rl=RLConfig(advantage=replace(RLConfig().advantage, estimator="dr_grpo")))
    rollout = session.rollout(PROMPTS)
    rewards = [float(i) for i in range(12)]
    given = [None if i in (0, 5) else reward for i, reward in enumerate(rewards)]
    seen = {}
    update = session.learner.update
    session.learner.update = lambda state, batch, *rest: (
        seen.update(batch=batch) or update(state, batch, *rest)
    )
    metrics = session.update(rollout, given)
    advantages = np.asarray(seen["batch"].advantages)
    np.testing.assert_allclose(advantages[:4], [0, -1, 0, 1], atol=1e-6)
    np.testing.assert_allclose(advantages[4:8] * 3, [-5, 0, 1, 4], atol=1e-5)
    assert metrics["reward/mean"] == pytest.approx(np.mean([x for x in given if x is not None]))


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([0.0] * 11, "rewards: 11 for 12 samples; give one for each of rollout.texts"),
        (
            [0.0] * 11 + [float("nan")],
            "rewards: that of sample 11 is nan; give a finite number, or leave",
        ),
        ([float("-inf")] * 12, "rewards: that of sample 0 is -inf"),
        ([10**400] * 12, "rewards: each must be a number or None"),
        ([None] * 12, "rewards: all 12 are None, which leaves nothing to learn from"),
        (["good"] * 12, "rewards: each must be a number or None"),
        (None, "rewards: expected a list, one for each of rollout.texts, got None"),
        ([0.0] * 7 + [1e30] + [0.0] * 4, "sample 7 is 1e.30, and the squares of 12 rewards"),
    ],
)
def test_wrong_rewards_are_one_line(rewards, message):
    session = session_of()
    with pytest.raises(UserError, match=message):
        session.update(session.rollout(PROMPTS), rewards)


def test_what_is_no_rollout_and_no_policy_is_one_line():
    session = session_of()
    for arguments, message in (
        ([None], "session.update: missing a required argument: 'rewards'"),
        ([None, [0.0]], "rollout: expected what session.rollout gives, got None"),
    ):
        with pytest.raises(UserError, match=message):
            session.update(*arguments)
    for call, message in (
        (lambda: session.score(None), "rollout: expected what session.rollout gives"),
        (lambda: session.rollout(PROMPTS, samples=0), "samples: 0 must be a whole number"),
        (lambda: session.sample(PROMPTS, samples="2"), "samples: '2' must be a whole number"),
        (lambda: session.sample(PROMPTS, temperature="hot"), "temperature: 'hot' must be a number"),
        (lambda: session.supervise(["ab="], "c"), "answers: expected a list of at least one answ"),
        (lambda: session.logprobs(["ab="], None), "completions: expected a list of at least one"),
        (lambda: fp8rl.load(None), "load: expected a model's name or directory, got None"),
        (lambda: session_of(config={"seed": 1}), "config: expected a RunConfig, got {'seed': 1}"),
        (lambda: session_of(engine="paged"), "engine: expected one that samples, got 'paged'"),
        (lambda: fp8rl.train(callbacks=[3]), "callbacks: expected a list of functions"),
        (lambda: fp8rl.train(callbacks=print), "callbacks: expected a list of functions"),
        (lambda: fp8rl.train({"seed": 1}), "config: expected a RunConfig, got {'seed': 1}"),
    ):
        with pytest.raises(UserError, match=message):
            call()
    for copied in (pickle.dumps, copy.deepcopy):
        with pytest.raises(UserError, match="neither pickled nor copied; checkpoint and restore"):
            copied(session)
    policy, tokenizer = fp8rl.byte_policy(**SIZES)
    for given, message in (
        ((tokenizer, policy), "policy and tokenizer are swapped"),
        (("smollm2-135m",), r"the name of one; give Session\(\*fp8rl.load\('smollm2-135m'\)"),
        (((policy, tokenizer),), "got a tuple; give what fp8rl.load returns as two arguments"),
        ((None, tokenizer), "policy: expected a Policy, and got NoneType; fp8rl.load"),
        ((policy,), "tokenizer: expected that of fp8rl.load"),
    ):
        with pytest.raises(UserError, match=message):
            fp8rl.Session(*given)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("ab=", "expected a list of at least one prompt, got 'ab='"),
        ([], "expected a list of at least one prompt"),
        ([[1, 2], []], "prompt 1 has 0 tokens"),
        ([[1, 400]], "prompt 0 has token ids outside of the vocabulary, 0 to 263"),
        ({"prompt": "ab="}, "expected a list of at least one prompt, got {'prompt': 'ab='}"),
        (None, "expected a list of at least one prompt, got None"),
        ([None], "prompt 0 is None; give text, token ids or messages"),
        ([{"prompt": "ab="}], "prompt 0 is {'prompt': 'ab='}; give text, token ids or messages"),
        ([{"role": "user", "content": "hi"}], "these are messages of one conversation; give a"),
        ([[1.5]], r"prompt 0 is \[1.5\], which are no token ids"),
        (["x" * 5000], "prompt 0 has 5001 tokens; from 1 to .* fit"),
        ([[{"role": "user", "text": "hi"}]], "prompt 0 message 0 must have role and content"),
    ],
)
def test_wrong_prompts_are_one_line(prompts, message):
    with pytest.raises(UserError, match=message):
        session_of().rollout(prompts)


def test_prompts_of_every_kind():
    session = session_of()
    text, ids, chat = (
        session.rollout(["ab="]),
        session.rollout([[257, *b"ab="]]),
        [{"role": "user", "content": "ab"}],
    )
    prompts = [x.rollout.prompts for x in (text, ids, session.rollout([chat]))]
    np.testing.assert_array_equal(prompts[0].tokens, prompts[1].tokens)
    written = np.asarray(prompts[2].tokens)[0, 1 : int(prompts[2].lengths[0])]
    assert bytes(written.tolist()) == b"user: ab\nassistant:"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"learning_rat": 1e-3},
            "learning_rat: unknown setting; did you mean optimizer.learning_rate?",
        ),
        (
            {"learning_rate": "fast"},
            "optimizer.learning_rate: expected a finite number, got 'fast'",
        ),
        (
            {"scale": "float32"},
            "scale: may be precision.scale or precision.rollout.scale or precision.trainer.scale",
        ),
        ({"path": "x"}, "path: may be model.path or lora.path; give the dotted key"),
        ({"wandb": True}, "wandb: is tracking.wandb, which a whole run has .fp8rl.train."),
        ({"resume": True}, "resume: is resume, which a whole run has"),
        ({"logit_bias": {4: "much"}}, "rollout.logit_bias: expected a table, got {4: 'much'}"),
        (
            {"logit_bias": {4: 1.0}},
            "rollout: logit_bias = {'4': 1.0} samples from another distribution",
        ),
        ({"recipe": "fp8"}, "recipe: unknown name 'fp8'"),
        ({"rollout": {"temperature": 1.0}}, "rollout: expected a RolloutConfig"),
        ({"temperature": 0.0}, "rollout.temperature: 0.0 is greedy"),
        ({"clip_low": -1.0}, "rl.clip_low: -1.0 must be a number above 0"),
        ({"updates_per_rollout": 0}, "trainer.updates_per_rollout"),
        ({"model.dither": True}, "model.dither: in float32 compute a side"),
        (
            {"model.dither": True, "compute_dtype": "bfloat16", "lora.rank": 2},
            "model.dither: with lora.rank above 0",
        ),
        ({"weight_rounding": "stochastic"}, "precision.weight_rounding: float32 compute rounds no"),
        (
            {"weight_rounding": "stochastic", "model.dither": True, "compute_dtype": "bfloat16"},
            "model.dither: rounded stochastically",
        ),
        ({"weight_source": "master"}, "precision.weight_source: recipe 'bf16' quantizes no linear"),
        (
            {"recipe": "fp8-rl", "weight_source": "master"},
            "recipe 'fp8-rl': weight_source \"master\" is for weights of one format",
        ),
    ],
)
def test_wrong_settings_are_one_line(settings, message):
    with pytest.raises(UserError, match=message) as found:
        session_of(**settings).rollout(PROMPTS)
    assert len(str(found.value).splitlines()) == 1


def test_settings_by_name_by_key_and_by_table():
    made = with_settings(
        RunConfig(),
        {
            "learning_rate": 1,
            "rollout": RolloutConfig(max_new_tokens=9),
            "samples_per_prompt": 3,
            "seed": 4,
            "rl.correction.method": "icepop",
        },
        "jet-rl",
    )
    assert (made.optimizer.learning_rate, made.seed, made.recipe) == (1.0, 4, "jet-rl")
    assert made.rollout == RolloutConfig(max_new_tokens=9, samples_per_prompt=3)
    run = {"model": Path("smollm2"), "wandb": True, "steps": 7, "logit_bias": {4: 100}}
    made_run = with_settings(RunConfig(), run)
    assert (made_run.model.path, made_run.tracking.wandb) == ("smollm2", True)
    assert (made_run.trainer.steps, made_run.sft) == (7, RunConfig().sft)
    assert made_run.rollout.logit_bias == {"4": 100.0}
    with pytest.raises(UserError, match="every: may be rl.clip_calibration.every or evaluation"):
        with_settings(RunConfig(), {"every": 2})
    assert made.rl.correction == CorrectionConfig("icepop")
    own = changed_recipe("fp8-rl", "mine", kv_margin=1.5)
    session = session_of(own)
    assert (
        session.recipe == own
        and session.config.recipe == "mine"
        and session.config.resolved_recipe == own
    )
    assert session_of(changed_recipe("jet-rl")).config.recipes == {}
    scales = []
    # rewards that teach nothing, so that the weights stay
    for each in (session, session_of("fp8-rl")):
        each.update(each.rollout(PROMPTS), [0.0] * 12)
        scales.append(float(each.scales.key[0]))
    assert scales[0] > 1.2 * scales[1] > 0


def test_logprobs_are_those_that_an_update_measures():
    session = session_of("bf16")
    rollout = session.rollout(PROMPTS)
    found = session.logprobs(PROMPTS, rollout.tokens, batch_size=2)
    for one, other in zip(found, rollout.logprobs, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)
    with pytest.raises(UserError, match="completions: 4 are no multiple of 3 prompts"):
        session.logprobs(PROMPTS, ["a"] * 4)
    with pytest.raises(UserError, match="completion 1 has no tokens"):
        session.logprobs(PROMPTS, ["a", "", "b"])


def test_replayed_supports_make_the_ratio_of_a_policy_with_itself_1():
    """In exact mode to the bit: paged, packed, in micro-batches, with a reference policy; the plan
    counts the supports that live."""
    settings = {"kl_coefficient": 0.1, "packing": True, "micro_batch_prompts": 1}
    settings |= {"temperature": 0.7, "top_p": 0.8, "truncated_sampling": "replay"}
    settings |= {"rollout.engine": "paged", "rl.correction.method": "token_tis"}
    session = session_of("bf16", **settings, prompts_per_step=4, support_size=24)
    assert session.config.precision.exact is True
    rollout = session.rollout([*PROMPTS, "gh="])
    metrics = session.update(rollout, rewards_of(rollout))
    assert metrics["mismatch/logprob_abs_diff_max"] == metrics["kl"] == 0.0
    assert metrics["correction/ratio_mean"] == 1.0
    # of near to uniform bytes truncation keeps many more than 24, whose entropy is the loss'
    assert metrics["rollout/support_capped"] == 1.0 and metrics["rollout/support_mean"] == 24
    assert 3.0 < metrics["entropy"] < np.log(24)
    # what is sampled to look at is truncated by nothing
    sampled = session.sample(PROMPTS, 2, temperature=0.7)
    logprobs, _ = session.score(sampled)
    np.testing.assert_array_equal(
        np.where(sampled.rollout.mask, logprobs - sampled.policy_logprobs, 0), 0
    )
    shape = session.shape
    planned = memory_plan(shape, session.config).always["supports of 24 tokens (int32)"]
    assert planned == sum(x.nbytes for x in jax.tree.leaves(rollout.rollout.support))
    whole = replace(session.config, rl=RLConfig())
    assert not any("supports" in name for name in memory_plan(shape, whole).always)


def test_a_checkpoint_goes_on_as_if_nothing_had_happened(tmp_path):
    settings = {"updates_per_rollout": 2, "micro_batch_prompts": 1, "kl_coefficient": 0.1}
    session, last = session_of("fp8-rl", **settings), None
    prompts = [*PROMPTS, "g="]
    for step in range(3):
        rollout = session.rollout(prompts)
        last = session.update(rollout, rewards_of(rollout))
        if step == 1:
            session.checkpoint(tmp_path / "checkpoints")
    other = session_of("fp8-rl", **settings)
    other.restore(tmp_path / "checkpoints")
    assert other.step == 2
    rollout = other.rollout(prompts)
    assert other.update(rollout, rewards_of(rollout)) == last
    with pytest.raises(UserError, match="another kind of run"):
        session_of("fp8-rl", first_moment="bfloat16").restore(tmp_path / "checkpoints")


def test_what_is_saved_is_loaded(tmp_path):
    session = session_of()
    rollout = session.rollout(PROMPTS)
    session.update(rollout, rewards_of(rollout))
    policy, tokenizer = fp8rl.load(session.save(tmp_path / "out", "float32"))
    for one, other in zip(weights(policy), weights(session.policy), strict=True):
        np.testing.assert_array_equal(one, other)
    other = fp8rl.Session(policy, tokenizer, compute_dtype="float32", max_new_tokens=6)
    assert other.sample(PROMPTS).texts == session.sample(PROMPTS).texts


@pytest.mark.parametrize("recipe", ["bf16", "jet-rl"])
def test_updates_arrive_and_the_first_policy_is_the_checkpoint(recipe, caplog):
    """By dithered masters, and by stochastic rounding of both sides alike: updates of less than half
    a step, from weights on the grid of bfloat16, as every checkpoint has them; without these it is
    said. Exact mode stays exact."""
    policy, tokenizer = fp8rl.byte_policy(**SIZES)
    policy = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), policy)
    first, arrived = [], []
    for how in (
        {"model.dither": False},
        {},
        {"weight_rounding": "stochastic"},
    ):
        session = fp8rl.Session(
            policy,
            tokenizer,
            recipe,
            samples_per_prompt=4,
            max_new_tokens=6,
            learning_rate=3e-6,
            warmup_steps=0,
            exact=True,
            backend="reference",
            **how,
        )
        caplog.clear()
        for _ in range(3):
            rollout = session.rollout(PROMPTS)
            first.append((rollout.texts, rollout.logprobs))
            metrics = session.update(rollout, rewards_of(rollout))
            assert metrics["mismatch/logprob_abs_diff_max"] == 0.0
        arrived.append(metrics["sync/arrived"])
        said = [line for line in caplog.messages if "has reached the policy that is served" in line]
        assert len(said) == (how == {"model.dither": False})
        assert session.arrival["embed_tokens"]["noise"] > 0
    for dithered in (first[3], first[6]):
        assert first[0][0] == dithered[0]
        for one, other in zip(first[0][1], dithered[1], strict=True):
            np.testing.assert_array_equal(one, other)
    assert arrived[0] < 0.35 and all(0.7 < x < 1.4 for x in arrived[1:])


def test_what_is_saved_is_what_was_trained_or_it_is_said(tmp_path, caplog):
    """The directory of a float32 session is float32; in 16 bits little is left of a small update,
    and adapters merged into a base on that grid fare no better."""
    policy, tokenizer = fp8rl.byte_policy(**SIZES)
    policy = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), policy)
    small = {"samples_per_prompt": 4, "max_new_tokens": 6, "learning_rate": 1e-6}
    for settings in ({"compute_dtype": "float32"}, {"lora.rank": 2}):
        session = fp8rl.Session(policy, tokenizer, warmup_steps=0, **small, **settings)
        rollout = session.rollout(PROMPTS)
        session.update(rollout, rewards_of(rollout))
        caplog.clear()
        session.save(tmp_path / "out", "float32")
        assert not caplog.messages
        session.save(tmp_path / "narrow", "bfloat16")
        (line,) = caplog.messages
        percent = int(line.removeprefix(f"{tmp_path / 'narrow'}: ").split(" %")[0])
        assert percent < 50 and "learned since the start is left in bfloat16" in line
        assert ("adapters beside it" in line) == ("lora.rank" in settings)
    saved = load_policy_arrays(session_of().save(tmp_path / "whole"))[1]
    assert {x.dtype for x in saved.values()} == {np.dtype(np.float32)}


@pytest.mark.parametrize("settings", [{"compute_dtype": "float32"}, {"lora.rank": 2}])
def test_a_save_in_the_checkpoint_s_own_few_bits_says_what_it_loses(settings, tmp_path, caplog):
    """A base on the grid of what is saved: adapters that are merged into it are rounded away."""
    policy, tokenizer = fp8rl.byte_policy(**SIZES)
    base = load_policy(save_policy(policy, tmp_path / "base", dtype="fp8-block"))
    small = {"samples_per_prompt": 4, "max_new_tokens": 6, "learning_rate": 1e-6}
    session = fp8rl.Session(base, tokenizer, warmup_steps=0, **small, **settings)
    for changed in (False, True):
        caplog.clear()
        session.save(tmp_path / "out", "fp8-block")
        lines = [line for line in caplog.messages if "was learned since the start" in line]
        assert len(lines) == changed
        rollout = session.rollout(PROMPTS)
        session.update(rollout, rewards_of(rollout))
    assert int(lines[0].removeprefix(f"{tmp_path / 'out'}: ").split(" %")[0]) < 10


def test_what_the_rollout_serves_is_saved_in_its_own_form(tmp_path, caplog):
    recipe = changed_recipe("nvfp4-rollout", "ends", last_layers_in_compute=1)
    policy, tokenizer = fp8rl.byte_policy(**SIZES | {"num_layers": 2})
    session = fp8rl.Session(policy, tokenizer, recipe, compute_dtype="bfloat16")
    synced = jax.jit(rollout_policy, static_argnums=(1, 2, 3))
    served, _ = synced(session.policy, session.recipe, jnp.dtype("bfloat16"), True)
    read = load_policy_arrays(session.save(tmp_path / "out", "rollout"))[1]
    first, last = served.layers
    for name in ("k_proj", "down_proj"):
        values, weight = read[f"layers.{name}.weight"], first.tensors()[name].value
        assert np.array_equal(values[0], np.asarray(weight.quantized.dequantize()).squeeze())
        kept = np.asarray(last.tensors()[name].value, np.float32)
        assert np.array_equal(values[1], kept.squeeze())
    assert "written for weights alone" in caplog.text
    with pytest.raises(UserError, match="serves a base and adapters beside it; name a format"):
        session_of(**{"lora.rank": 2}).save(tmp_path / "adapted", "rollout")


def test_a_checkpoint_from_before_arrivals_goes_on(tmp_path, monkeypatch):
    session = session_of()
    rollout = session.rollout(PROMPTS)
    session.update(rollout, rewards_of(rollout))
    whole = session.saved()
    monkeypatch.setattr(session, "saved", lambda: whole[:-1])
    session.checkpoint(tmp_path / "checkpoints")
    other = session_of(**{"rl.correction.method": "token_tis"})  # for a rollout of older weights
    other.restore(tmp_path / "checkpoints")
    assert other.step == 1
    metrics = other.update(rollout, rewards_of(rollout))
    assert "sync/arrived" not in metrics  # this sync is the start
    rollout = other.rollout(PROMPTS)
    assert other.update(rollout, rewards_of(rollout))["sync/arrived"] == pytest.approx(1.0)


def test_a_warm_start_and_then_rewards():
    session = session_of(learning_rate=1e-4)
    session.sample(PROMPTS)  # what is served after the warm start is not what is served now
    session.restart(OptimizerConfig(learning_rate=1e-2), 30)
    losses = [session.supervise(PROMPTS, ["no", "yes", "no"])["loss"] for _ in range(30)]
    assert losses[-1] < losses[0] / 4
    assert session.sample(PROMPTS).texts == ["no", "yes", "no"]
    version = session.engine.version
    session.supervise(PROMPTS, ["no", "yes", "no"])
    session.sample(PROMPTS)
    assert session.engine.version == version + 1
    session.restart()
    assert session.step == 0 and int(session.state.updates) == 0
    rollout = session.rollout(PROMPTS)
    metrics = session.update(rollout, rewards_of(rollout))
    assert metrics["optim/lr"] == pytest.approx(1e-4) and session.step == 1
    session.restart()
    assert session.step == 0


def test_a_session_syncs_again_where_a_sync_was_interrupted(monkeypatch):
    session, other = session_of("fp8-rl"), session_of("fp8-rl")
    rollouts = [each.rollout(PROMPTS) for each in (session, other)]

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(session.engine, "sync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            session.update(rollouts[0], rewards_of(rollouts[0]))
    other.update(rollouts[1], rewards_of(rollouts[1]))
    texts = [each.rollout(PROMPTS).texts for each in (session, other)]
    assert texts[0] == texts[1] and session.engine.version == other.engine.version


def test_ctrl_c_in_an_update_leaves_a_whole_session(monkeypatch, request):
    """Wherever it comes: the update has been made, or not begun, and the session goes on as another
    does that was not interrupted."""
    # which a shell's background jobs ignore
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    settings = {"updates_per_rollout": 2, "kl_coefficient": 0.1}
    prompts = [*PROMPTS, "g="]
    session, other = session_of("fp8-rl", **settings), session_of("fp8-rl", **settings)
    learner = session.learner
    places = [
        (learner, "with_logprobs", False),  # before anything is given away
        (learner, "_one", True),  # between two updates
        (session, "_take", True),  # the new buffers are here, and not yet the session's
        (session.serving, "sync", True),
    ]
    for owner, name, made in places:
        rollout, same = session.rollout(prompts), other.rollout(prompts)
        assert rollout.texts == same.texts
        function = getattr(owner, name)

        def interrupted(*args, _function=function, **kwargs):
            found = _function(*args, **kwargs)
            signal.raise_signal(signal.SIGINT)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                session.update(rollout, rewards_of(rollout))
        if made:
            other.update(same, rewards_of(same))
        assert session.step == other.step and signal.getsignal(signal.SIGINT) is not interrupted
        for one, two in zip(weights(session.policy), weights(other.policy), strict=True):
            np.testing.assert_array_equal(one, two)
    with monkeypatch.context() as patch:
        patch.setattr(session, "_take", lambda state: 1 / 0)
        rollout = session.rollout(prompts)
        with pytest.raises(ZeroDivisionError):
            session.update(rollout, rewards_of(rollout))
    with pytest.raises(UserError, match="its state was lost in an update that failed"):
        session.rollout(prompts)


def test_threads_take_turns():
    session, other = session_of(), session_of()

    def step(each, found):
        found.append(each.supervise(PROMPTS, ["a", "bc", "d"])["loss"])
        assert each.state is not None and each.policy is not None

    together, apart = [], []
    threads = [threading.Thread(target=step, args=(session, together)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in threads:
        step(other, apart)
    assert sorted(together) == sorted(apart) and len(set(apart)) == 4


def test_a_rollout_of_older_weights_is_said_as_such():
    session = session_of()
    rollout = session.rollout(PROMPTS)
    session.sync()  # serves the same weights
    assert "mismatch/k3" in session.update(rollout, rewards_of(rollout))
    for _ in range(2):
        with pytest.raises(UserError, match="rollout: version 1 of the weights sampled it, and th"):
            session.update(rollout, rewards_of(rollout))
        session.supervise(["ab="], ["c"])
    session = session_of(**{"rl.correction.method": "token_tis"})
    rollout = session.rollout(PROMPTS)
    session.update(rollout, rewards_of(rollout))
    metrics = session.update(rollout, rewards_of(rollout))
    assert not [name for name in metrics if name.startswith("mismatch/")]
    assert metrics["off_policy/k3"] > 1e-4
    assert metrics["rollout/oldest_token"] == metrics["rollout/stale_tokens"] == 1.0
    rollout = session.rollout(PROMPTS)
    metrics = session.update(rollout, rewards_of(rollout))
    assert metrics["mismatch/k3"] < 1e-9 and "rollout/stale_tokens" not in metrics


def test_sessions_take_turns_on_one_state():
    policy, tokenizer = fp8rl.byte_policy(**SIZES)
    settings = {
        "compute_dtype": "float32",
        "samples_per_prompt": 4,
        "max_new_tokens": 6,
        "learning_rate": 1e-2,
    }
    one = fp8rl.Session(policy, tokenizer, "bf16", **settings)
    other = fp8rl.Session(policy, tokenizer, "fp8-rl", **settings)
    rollout = one.rollout(PROMPTS)
    one.update(rollout, rewards_of(rollout))
    other.load(one.release())
    with pytest.raises(UserError, match="its state was released"):
        one.rollout(PROMPTS)
    rollout = other.rollout(PROMPTS)
    other.update(rollout, rewards_of(rollout))
    one.load(other.release())
    rollout = one.rollout(PROMPTS)
    assert (
        one.update(rollout, rewards_of(rollout))["mismatch/k3"] < 1e-9
        and int(one.state.updates) == 3
    )


def test_a_state_that_is_loaded_is_compared_with_the_policy_that_the_session_began_with():
    first, second = (session_of("bf16", kl_coefficient=0.1, learning_rate=1e-2) for _ in range(2))
    begun = jax.tree.map(np.asarray, second.weights)
    rollout = first.rollout(PROMPTS)
    first.update(rollout, rewards_of(rollout))
    second.load(first.release())
    jax.tree.map(np.testing.assert_array_equal, second.learner.reference, begun)


OTHERS = {
    "a policy": (lambda: fp8rl.byte_policy(**SIZES)[0], "expected what release or state gives"),
    "a path": (lambda: "out/model", "expected what release or state gives, and got str"),
    "another width": ({"sizes": {"hidden_size": 32}}, "has float32.264, 32. where float32.264, 64"),
    "more layers": ({"sizes": {"num_layers": 2}}, "has float32.2, 64, 96. where float32.1, 64, 96"),
    "another base": ({"sizes": {"rope_theta": 5e5}}, "its model has another rope_theta"),
    "adapters": ({"lora.rank": 2}, "it has nothing where float32"),
    "sgd": ({"optimizer.name": "sgd"}, "it has nothing where int32.. is wanted, in optimizer"),
    "moments": ({"first_moment": "bfloat16"}, "has bfloat16.264, 64. where float32.264, 64"),
    "a loss scale": ({"compute_dtype": "float16"}, "where nothing is wanted, in loss_scale"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_state_of_another_kind_is_one_line(name):
    made, message = OTHERS[name]
    if isinstance(made, dict):
        sizes = SIZES | made.get("sizes", {})
        settings = {"compute_dtype": "float32"} | {k: v for k, v in made.items() if k != "sizes"}
        state = fp8rl.Session(*fp8rl.byte_policy(**sizes), max_new_tokens=6, **settings).state
    else:
        state = made()
    session = session_of()
    with pytest.raises(UserError, match=f"state: .*{message}") as found:
        session.load(state)
    assert len(str(found.value).splitlines()) == 1
    session.sample(PROMPTS)  # as it was


def test_a_checkpoint_of_another_kind_is_one_line(tmp_path, monkeypatch):
    session = session_of()
    state = session.state
    session.load(state)
    session.supervise(["ab="], ["c"])
    with pytest.raises(UserError, match="its arrays are another session's own"):
        session_of().load(state)
    checkpoints, model = tmp_path / "checkpoints", session.save(tmp_path / "model")
    session.checkpoint(checkpoints)
    for other, place, message in (
        (session_of("fp8-rl"), checkpoints, "step 0 is of recipe 'bf16', and the session of 'fp8-"),
        (session_of(**{"lora.rank": 2}), checkpoints, "it has nothing where float32.1, 2, 96. is"),
        (session, model, "is a model, which fp8rl.load opens"),
        (session, tmp_path / "nothing", "is not there; restore takes what checkpoint has written"),
    ):
        with pytest.raises(UserError, match=message):
            other.restore(place)
    assert not (tmp_path / "nothing").exists()
    with monkeypatch.context() as patch:
        patch.setattr("fp8rl_jax.training.checkpoint._FORMAT", 2)
        session.checkpoint(tmp_path / "later")
    with pytest.raises(UserError, match="written by a later version of fp8rl_jax .format 2, here"):
        session.restore(tmp_path / "later")
    of_a_run = Checkpoints(tmp_path / "ahead", CheckpointConfig())
    in_hand = jnp.zeros(3)
    of_a_run.save(1, (*session.saved(), in_hand), {"recipe": "bf16", "rollout.steps_ahead": 1})
    of_a_run.close()
    with pytest.raises(UserError, match="of a run with rollout.steps_ahead, and has completions"):
        session.restore(tmp_path / "ahead")


def test_episodes_with_an_environment_of_a_notebook():
    class Echo:
        """Two turns; each is rewarded by its part of vowels."""

        def reset(self, seed):
            self.turn = 0
            return f"{seed % 10}:"

        def step(self, text):
            self.turn += 1
            return "?", sum(letter in "aeiou" for letter in text) / 6, self.turn == 2

    session = session_of("fp8-rl", stop_token_ids=tuple(range(64)), max_prompt_tokens=24)
    task = TaskConfig(kind="environment", max_turns=2, train_size=3, eval_size=0)
    problems, _ = load_splits(task, environment=Echo)
    with fp8rl.RewardPool(task, environment=Echo) as pool:
        rollout, scores = session.play(problems.examples, pool)
        metrics = session.update(rollout, scores)
    assert len(rollout.texts) == 12 == len(scores.rewards) and metrics["episodes/turns"] == 2
    assert (
        metrics["reward/mean"] == pytest.approx(scores.rewards.mean())
        and metrics["optim/grad_norm"] > 0
    )
    assert [len(x) for x in rollout.tokens] == [len(x) for x in rollout.logprobs] and 0 < metrics[
        "mismatch/k3"
    ] < 1e-3


def test_an_objective_and_a_reward_of_a_notebook(tmp_path):
    """`fp8rl.train` with everything given in Python, and what it returns."""

    def vowels(completion, **_):
        return sum(letter in "aeiou" for letter in completion) / 6

    def plain(inputs, config):
        return -inputs.advantages * jnp.where(inputs.mask, inputs.logprobs, 0.0)

    # what the file says of its own problems goes out
    own = {"task.prompt_template": "{question}", "task.args": {}, "task.train_size": 0}
    seen = []

    def until_two(step, metrics):
        seen.append((step, metrics.get("reward/mean")))
        return step == 1

    train = partial(
        fp8rl.train,
        write_run(tmp_path),
        reward=vowels,
        dataset=[f"{i}=" for i in range(20)],
        objective=plain,
        steps=3,
        output=str(tmp_path / "out"),
        stop_token_ids=tuple(range(64)),
        **{"evaluation.every": 3, "task.eval_size": 4},
        **own,
    )
    ended = train(callbacks=[until_two])
    assert list(ended.metrics["step"]) == [0, 1] and (ended.model / "config.json").exists()
    assert seen == list(enumerate(ended.metrics["reward/mean"]))
    # it is as a run that was killed: it goes on, and is whole then
    run = train(resume=True, callbacks=[lambda step, _: seen.append(step)])
    assert seen[2:] == [2, 3] and train(resume=True).metrics["step"].tolist() == [0, 1, 2, 3]
    assert run.directory == tmp_path / "out" and list(run.metrics["step"]) == [0, 1, 2, 3]
    rows = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    np.testing.assert_array_equal(
        run.metrics["reward/mean"][:3], [row["reward/mean"] for row in rows[:3]]
    )
    assert np.isnan(run.metrics["reward/mean"][3]) and np.isfinite(run.metrics["eval/accuracy"][3])
    figure = run.plot()
    assert [axes.get_title() for axes in figure.axes][:2] == ["reward/mean", "mismatch/k3"]
    (axes,) = run.plot("reward/mean").axes
    assert axes.get_title() == "reward/mean" and len(axes.lines[0].get_xdata()) == 3
    with pytest.raises(UserError, match="reward/men: not measured; did you mean reward/mean"):
        run.plot("reward/men")
    with pytest.raises(UserError, match="nothing: not measured; there are .* and [0-9]+ more"):
        run.plot(["nothing"])
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="no step is recorded yet"):
        fp8rl.Run(tmp_path).plot()
    policy, _ = fp8rl.load(run.model)
    assert policy.config.num_layers == 1
    found = fp8rl.evaluate(
        write_run(tmp_path),
        reward=vowels,
        dataset=[f"{i}=" for i in range(20)],
        output=str(tmp_path / "eval"),
        **{"model.path": str(run.model), "task.eval_size": 4},
        **own,
    )
    assert found["eval/problems"] == 4
