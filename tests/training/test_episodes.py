"""Episodes in training: every sampled token is trained on in the context that it was sampled in,
and nothing else is."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_run import check_refused, measured, train, write_run

from fp8rl_jax.cli.main import main
from fp8rl_jax.config.recipe import get_recipe
from fp8rl_jax.config.rl import CorrectionConfig, RLConfig
from fp8rl_jax.config.run import PagedConfig
from fp8rl_jax.config.tasks import RewardConfig, TaskConfig
from fp8rl_jax.config.training import OptimizerConfig
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.logprobs import Support
from fp8rl_jax.models.policy import init_policy
from fp8rl_jax.rollout.engine import LocalEngine, PagedEngine
from fp8rl_jax.rollout.sampling import Sampling
from fp8rl_jax.tasks.dataset import Example, load_splits
from fp8rl_jax.tasks.episodes import Episode, Sampled
from fp8rl_jax.tasks.sandbox.pool import RewardPool
from fp8rl_jax.tokenizers.byte_tokenizer import ByteTokenizer
from fp8rl_jax.training.experience import episode_experience, play
from fp8rl_jax.training.performance import Clock
from fp8rl_jax.training.prompts import PromptEncoder
from fp8rl_jax.training.state import init_state, make_optimizer
from fp8rl_jax.training.step import StepConfig, batch_logprobs, update

ENVIRONMENTS = Path(__file__).parents[1] / "tasks" / "environment_examples.py"
SHAPE = PolicyConfig(
    "llama",
    vocab_size=259,
    hidden_size=48,
    intermediate_size=80,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
)
SAMPLING = Sampling(4, 1.0, stop_token_ids=(258, *range(48, 58)))
RL = RLConfig(correction=CorrectionConfig(method="token_tis"))
CONFIG = StepConfig(get_recipe("bf16"), RL, "float32", temperature=1.0, logprob_chunk=64)
OPTIMIZER = make_optimizer(OptimizerConfig(learning_rate=1e-2), 4)
WIDTH = 40


class ChatBytes(ByteTokenizer):
    """Bytes with a chat template: who speaks, what is said, and an end-of-sequence token."""

    has_chat_template = True

    def encode_chat(self, messages, add_generation_prompt=True):
        said = [[*f"{m['role'][0]}{m['content']}".encode(), 258] for m in messages]
        return sum(said, [257]) + [ord("a")]


def task_of(turns):
    return TaskConfig(
        kind="environment",
        name=f"{ENVIRONMENTS}:Parity",
        args={"turns": turns},
        max_turns=turns,
        train_size=4,
        eval_size=2,
        reward=RewardConfig(num_workers=1, partial_credit=True),
    )


@pytest.fixture(scope="module")
def policy():
    return init_policy(SHAPE, jax.random.key(0))


@pytest.fixture(scope="module")
def player(policy):
    engine = LocalEngine(get_recipe("bf16"), jnp.float32)
    engine.sync(policy)
    task = task_of(3)
    train, _ = load_splits(task)
    with RewardPool(task) as pool:

        def run(tokenizer, examples=slice(None), width=WIDTH, engine=engine, **arguments):
            encoder = PromptEncoder(tokenizer, "", width)
            return play(
                engine,
                encoder,
                pool,
                train.examples[examples],
                2,
                SAMPLING,
                jax.random.key(3),
                Clock(),
                **arguments,
            )

        yield run


@pytest.fixture(scope="module", params=[ByteTokenizer, ChatBytes])
def episodes(request, player):
    return player(request.param())[0]


def experience_of(episodes, multiple=8):
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    width = WIDTH + SAMPLING.max_new_tokens - 1
    return episode_experience(episodes, 1, 1.0, width, 256, sharding, multiple)


def batch_of(episodes):
    """The experience of episodes, their batch with advantages for each token, and the advantages of
    the episodes."""
    found, count = experience_of(episodes), len(episodes)
    advantages = np.random.default_rng(0).normal(size=count).astype(np.float32)
    batch = found.batch(RL)
    own = found.by_row(jnp.asarray(advantages))[:, None]
    return found, replace(batch, advantages=jnp.where(batch.mask, own, 0.0)), advantages


def test_the_trainer_scores_what_was_sampled_as_it_was_sampled(policy, episodes):
    found, batch, _ = batch_of(episodes)
    assert (
        batch.mask.sum()
        == sum(len(turn.tokens) for episode in episodes for turn in episode.turns)
        > 30
    )
    assert (batch.mask <= batch.present).all() and (batch.mask != batch.present).any()
    logprobs = np.asarray(batch_logprobs(policy, batch, CONFIG))
    kept = np.asarray(batch.mask)
    np.testing.assert_allclose(logprobs[kept], found.policy_logprobs[kept], atol=1e-5)
    sums = np.array(
        [sum(sum(turn.policy_logprobs) for turn in episode.turns) for episode in episodes]
    )
    np.testing.assert_allclose(
        found.by_sample(jnp.where(batch.mask, logprobs, 0.0).sum(1)), sums, atol=1e-4
    )


def test_joined_rows_give_the_update_of_each_turn_in_a_row_of_its_own(policy, player):
    episodes, _ = player(ByteTokenizer())
    _, batch, advantages = batch_of(episodes)
    turns = [(index, turn) for index, episode in enumerate(episodes) for turn in episode.turns]
    alone = experience_of([Episode(None, (turn,)) for _, turn in turns], multiple=1)
    single = replace(
        alone.batch(RL),
        advantages=jnp.asarray(advantages[[index for index, _ in turns]]),
        attended=alone.attended,
    )
    joined, _, metrics = update(
        init_state(jax.tree.map(jnp.copy, policy), OPTIMIZER), batch, CONFIG, OPTIMIZER
    )
    apart, _, expected = update(
        init_state(jax.tree.map(jnp.copy, policy), OPTIMIZER), single, CONFIG, OPTIMIZER
    )
    assert metrics["optim/grad_norm"] > 0.01
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    for a, b in zip(
        jax.tree.leaves(joined.optimizer), jax.tree.leaves(apart.optimizer), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)


def test_what_the_environment_says_is_read_and_not_trained_on(policy, player):
    _, batch, _ = batch_of(player(ByteTokenizer())[0])
    plain, logprobs, _ = update(
        init_state(jax.tree.map(jnp.copy, policy), OPTIMIZER), batch, CONFIG, OPTIMIZER
    )
    # whatever an observation's tokens weigh in rewards and corrections, nothing of it arrives
    weighed = replace(
        batch,
        rollout_logprobs=jnp.where(batch.mask, batch.rollout_logprobs, jnp.nan),
        advantages=jnp.where(batch.mask, batch.advantages, 1e6),
    )
    other, _, _ = update(
        init_state(jax.tree.map(jnp.copy, policy), OPTIMIZER), weighed, CONFIG, OPTIMIZER
    )
    jax.tree.map(np.testing.assert_array_equal, plain.policy, other.policy)
    changed = replace(
        batch, tokens=jnp.where(batch.present & ~batch.mask, (batch.tokens + 1) % 256, batch.tokens)
    )
    assert (
        np.abs(
            np.asarray(batch_logprobs(policy, changed, CONFIG) - logprobs)[np.asarray(batch.mask)]
        ).max()
        > 1e-3
    )


def test_an_episode_does_not_depend_on_its_neighbours(player, episodes):
    tokenizer = ChatBytes() if episodes[0].turns[0].prompt[1] == ord("u") else ByteTokenizer()
    alone, scores = player(tokenizer, slice(3, 4), slots=8)
    for one, other in zip(alone, episodes[6:], strict=True):
        assert [turn.tokens for turn in one.turns] == [turn.tokens for turn in other.turns]
    assert episodes[6].turns[0].tokens != episodes[7].turns[0].tokens
    assert [episode.reward for episode in alone] == pytest.approx(scores.rewards.tolist())


@pytest.mark.slow
def test_episodes_are_the_same_with_the_caches_of_earlier_turns(policy, player, episodes):
    """Where turns are joined all of a context is there; a template that begins it anew has some."""
    engine = PagedEngine(get_recipe("bf16"), jnp.float32, paged=PagedConfig(page_size=4))
    engine.sync(policy)
    reused, generate = [], engine.generate
    engine.generate = lambda *given: [rollout := generate(*given), reused.append(rollout)][0]
    tokenizer = ChatBytes() if episodes[0].turns[0].prompt[1] == ord("u") else ByteTokenizer()
    found, _ = player(tokenizer, engine=engine)
    for one, other in zip(found, episodes, strict=True):
        assert [turn.tokens for turn in one.turns] == [turn.tokens for turn in other.turns]
        assert one.reward == other.reward
    reused = [int(rollout.metrics["rollout/reused_tokens"]) for rollout in reused]
    assert reused[0] == 0 and all(tokens > 0 for tokens in reused[1:])


def test_an_episode_without_room_ends_truncated(player):
    episodes, scores = player(ByteTokenizer(), width=13)
    cut = [episode for episode in episodes if episode.truncated]
    assert (
        cut
        and len(cut) < len(episodes)
        and all(episode.done for episode in episodes)
        and not scores.failed.any()
    )
    for episode in cut:
        last = episode.turns[-1]
        assert len(last.prompt) + len(last.tokens) + 1 > 13 >= len(last.prompt)


def test_without_a_chat_template_every_turn_is_joined_in_one_row(player):
    episodes, _ = player(ByteTokenizer())
    found = experience_of(episodes)
    assert found.sample_of_row.tolist() == list(range(8))
    assert all(len(episode.turns) == 3 for episode in episodes)
    rollout, turns = found.rollout, episodes[0].turns
    row = rollout.tokens[0][found.attended[0]]
    assert (rollout.prompts.tokens[0, 0], *row) == (*turns[-1].prompt, *turns[-1].tokens)


def test_empty_rows_stand_evenly_between_the_others(episodes):
    found = experience_of(episodes, multiple=32)
    own = found.sample_of_row >= 0
    assert len(own) == 32 and np.ptp(own.reshape(4, 8).sum(1)) <= 1
    assert not found.attended[~own].any() and (found.rollout.prompts.lengths[~own] == 1).all()


NO_PROBLEM = Example(0, "", "", "", {})


def turn_of(prompt, tokens):
    logprobs = (tuple(-t / scale for t in tokens) for scale in (10, 7))
    ids = np.array([[t, t + 1] for t in tokens], np.int32)
    support = Support(ids, ids[:, 0] + 1)
    return Sampled(tuple(prompt), tuple(tokens), *logprobs, True, 1, support)


@st.composite
def conversations(draw):
    """Turns whose sampled tokens are below 100 and whose observations are 100 and above; some
    rewrite the past."""
    said, heard = (
        st.lists(st.integers(0, 99), min_size=1, max_size=4),
        st.lists(st.integers(100, 199), max_size=4),
    )
    context, turns = draw(heard) + [150], []
    for _ in range(draw(st.integers(1, 5))):
        turns.append(turn_of(context, draw(said)))
        context = context + list(turns[-1].tokens) + draw(heard)
        if draw(st.integers(0, 3)) == 0:
            # Another text for the past, none of it sampled in this form.
            context = [100 + token % 100 for token in context]
    return turns


@settings(deadline=None)
@given(st.lists(conversations(), min_size=1, max_size=4))
def test_exactly_the_sampled_tokens_are_trained_on_each_in_its_own_context(many):
    episodes = [Episode(NO_PROBLEM, tuple(turns)) for turns in many]
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    found = episode_experience(episodes, 1, 1.0, 160, 7, sharding, multiple=1)
    rollout, attended, sampled = jax.tree.map(
        np.asarray, (found.rollout, found.attended, found.rollout.mask)
    )
    assert not (rollout.tokens >= 100)[sampled].any() and not (sampled & ~attended).any()
    assert (
        not rollout.behaviour_logprobs[~sampled].any()
        and not rollout.policy_logprobs[~sampled].any()
    )
    ids, counts = rollout.support
    np.testing.assert_array_equal(counts, np.where(sampled, rollout.tokens + 1, 0))
    np.testing.assert_array_equal(
        ids, np.where(counts, counts - 1, 0)[..., None] + (counts[..., None] > 0) * [0, 1]
    )
    seen = {}
    for r, episode in enumerate(found.sample_of_row):
        context = rollout.prompts.tokens[r, : rollout.prompts.lengths[r]].tolist()
        for token, there, own, logprob in zip(
            rollout.tokens[r],
            attended[r],
            sampled[r],
            rollout.behaviour_logprobs[r],
            strict=True,
        ):
            if own:
                seen.setdefault(episode, []).append((tuple(context), int(token), float(logprob)))
            if there:
                context.append(int(token))
    for episode, turns in enumerate(many):
        expected = [
            (turn.prompt + turn.tokens[:i], token, float(np.float32(-token / 10)))
            for turn in turns
            for i, token in enumerate(turn.tokens)
        ]
        assert seen[episode] == expected


def test_a_row_that_does_not_fit_is_refused():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    episode = Episode(NO_PROBLEM, (turn_of([1, 2], [3, 4, 5]),))
    with pytest.raises(
        ValueError, match="episode 0: a row of 1 . 4 tokens, and there is room for 1 . 3"
    ):
        episode_experience([episode], 1, 1.0, 3, 0, sharding)


RUN = {
    "task": {
        "kind": "environment",
        "name": f"{ENVIRONMENTS}:Parity",
        "args": None,
        "prompt_template": None,
        "max_turns": 2,
        "train_size": 16,
        "eval_size": 4,
        "reward": {"partial_credit": True},
    },
    "rollout": {
        "max_prompt_tokens": 16,
        "max_new_tokens": 4,
        "stop_token_ids": list(range(48, 58)),
    },
    "trainer": {"steps": 3, "updates_per_rollout": 2, "micro_batch_prompts": 1},
    "rl": {
        "reward_kl": {"coefficient": 0.1},
        "dynamic_sampling": {"enabled": True, "max_rounds": 2},
    },
    "evaluation": {"every": 2, "examples": 4, "batch_size": 4},
}


@pytest.fixture
def run_file(tmp_path):
    return write_run(tmp_path, RUN)


@pytest.mark.slow
def test_a_run_of_episodes_and_its_resumption_are_the_same(run_file, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(run_file, whole, "--recipe", "fp8-rl") == 0
    shutil.copytree(whole, parts)
    # what a run killed in step 2 leaves: the checkpoint of step 2, and lines that came after it
    (parts / "checkpoints" / "3").rename(tmp_path / "gone")
    assert train(run_file, parts, "--recipe", "fp8-rl", "--resume") == 0
    assert measured(whole) == measured(parts)
    assert (whole / "samples.jsonl").read_text() == (parts / "samples.jsonl").read_text()
    steps = [row for row in measured(whole) if "loss" in row]
    assert [row["step"] for row in measured(whole) if "eval/accuracy" in row] == [0, 2, 3]
    for row in steps:
        assert (
            row["episodes/turns"] == 2 and row["episodes/rows"] == 1 and row["optim/skipped"] == 0
        )
        assert 0 < row["mismatch/logprob_abs_diff_max"] < 0.1 and row["completions/max_length"] <= 4
    assert abs(steps[0]["reward/kl"]) < 1e-4 < abs(steps[2]["reward/kl"])
    shown = json.loads((whole / "samples.jsonl").read_text().splitlines()[0])
    assert "\nuser: " in shown["completion"] and "\nassistant: " in shown["completion"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rl.overlong.filter"], "rl.overlong"),
        (["--rl.overlong.buffer", "2"], "rl.overlong"),
        (["--trainer.router-replay"], "trainer.router_replay"),
        (["--rl.reward-kl.coefficient", "-1"], "rl.reward_kl.coefficient"),
    ],
)
def test_what_does_not_go_with_episodes_is_one_line(run_file, tmp_path, capsys, flags, message):
    check_refused(run_file, tmp_path / "out", capsys, flags, message)


def test_supervised_training_has_nothing_to_imitate_in_an_environment(run_file, tmp_path, capsys):
    assert main(["sft", run_file, "--output", str(tmp_path / "out")]) == 2
    assert "has no answer to learn from" in capsys.readouterr().err
