"""Episodes with environments: what the workers play, and which tokens of an episode are trained
on."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fp8rl_jax.config.tasks import RewardConfig, TaskConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.tasks.conversation import Conversation, chat_messages
from fp8rl_jax.tasks.dataset import Example, load_splits
from fp8rl_jax.tasks.episodes import Episode, Sampled, episode_scores, join_turns
from fp8rl_jax.tasks.sandbox.pool import RewardPool
from fp8rl_jax.tasks.scores import Scores

NO_PROBLEM = Example(0, "", "", "", {})
ENVIRONMENTS = Path(__file__).with_name("environment_examples.py")
NOTHING = Sampled((1,), (2,), (0.0,), (0.0,), stopped=True, weight_version=1)


def task_of(cls="Guess", max_turns=4, **reward):
    settings: dict[str, Any] = {"num_workers": 1, "timeout": 1.0, **reward}
    return TaskConfig(
        kind="environment",
        name=f"{ENVIRONMENTS}:{cls}",
        max_turns=max_turns,
        train_size=8,
        eval_size=4,
        reward=RewardConfig(**settings),
    )


@pytest.fixture(scope="module")
def guessing():
    task = task_of()
    train, _ = load_splits(task)
    with RewardPool(task) as pool:
        yield pool, train


def play(pool, episodes, texts):
    scores = pool.play(episodes, texts)
    after = [
        e.after(NOTHING, text, turn, 4)
        for e, text, turn in zip(episodes, texts, scores.turns, strict=True)
    ]
    return after, scores


def test_problems_are_seeds_held_out_and_repeatable():
    train, held_out = load_splits(task_of())
    assert (len(train), len(held_out)) == (8, 4)
    seeds = [example.entry["metadata"]["seed"] for example in train.examples + held_out.examples]
    assert len(set(seeds)) == 12 and load_splits(task_of())[0] == train
    other, _ = load_splits(replace(task_of(), seed=1))
    assert not {e.prompt for e in other.examples} & {e.prompt for e in train.examples}


def test_an_episode_goes_on_until_it_is_done(guessing):
    pool, train = guessing
    number = train[0].entry["metadata"]["seed"] % 1000
    episodes = [Episode(train[0]), Episode(train[0])]
    episodes, _ = play(pool, episodes, [str(number - 1), str(number)])
    assert [e.done for e in episodes] == [False, True] and episodes[1].reward == 1
    assert chat_messages(episodes[0].prompt) == [
        {"role": "user", "content": train[0].prompt},
        {"role": "assistant", "content": str(number - 1)},
        {"role": "user", "content": f"{number - 1} is too small"},
    ]
    (first,), scores = play(pool, episodes[:1], [str(number)])
    assert first.done and first.reward == 1 and scores.rewards.tolist() == [1]
    whole = episode_scores([first, episodes[1]], [scores], partial_credit=True)
    assert (
        whole.correct.tolist() == [True, True] and whole.metrics()["rewards/environment/mean"] == 1
    )


def test_an_episode_ends_after_max_turns_and_takes_no_more(guessing):
    pool, train = guessing
    episodes = [Episode(train[1])]
    for _ in range(4):
        assert not episodes[0].done
        episodes, _ = play(pool, episodes, ["-1"])
    assert episodes[0].done and not episodes[0].failed and episodes[0].reward == 0
    with pytest.raises(ValueError, match="has ended"):
        episodes[0].after(NOTHING, "", None, 4)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("sleep", "no score after 1 s"),
        ("die", "exited with status 3"),
        ("x", "ValueError: invalid literal"),
    ],
)
def test_a_turn_that_fails_ends_its_episode_alone(guessing, text, error):
    pool, train = guessing
    (first, second), _ = play(pool, [Episode(train[0]), Episode(train[1])], ["-1", "-1"])
    (failed, other), scores = play(pool, [first, second], [text, "-2"])
    assert failed.done and failed.failed and failed.reward == 0 and not other.done
    assert error in scores.first_error
    # The worker may be another one by now: it plays the earlier turns again.
    (other,), scores = play(pool, [other], ["-3"])
    assert scores.failed.tolist() == [False] and len(other.history) == 3
    whole = episode_scores([failed, other], [scores], partial_credit=False)
    assert whole.failed.tolist() == [True, False] and whole.rewards.tolist() == [0, 0]


def test_an_environment_that_depends_on_more_than_seed_and_texts_is_an_error():
    task = task_of("Forgetful")
    train, _ = load_splits(task)
    with RewardPool(task) as pool:
        episodes, scores = play(pool, [Episode(train[0])], ["a"])
        assert scores.errors == 0
        _, scores = play(pool, episodes, ["b"])
    assert scores.first_error.startswith(
        "step gave another observation when turn 1 was played again"
    )
    task = task_of("Moody")
    train, _ = load_splits(task)
    with RewardPool(task) as pool:
        assert pool.play([Episode(train[0])], ["a"]).first_error.startswith(
            "reset gave another prompt than at the start"
        )


def test_a_result_that_breaks_the_protocol_is_an_error_of_its_sample():
    task = task_of("BadStep")
    train, _ = load_splits(task)
    with RewardPool(task) as pool:
        for text in map(str, range(8)):
            scores = pool.play([Episode(train[0])], [text])
            assert (
                scores.errors == 1 and scores.turns == [None] and "\n" not in scores.first_error
            ), text


@pytest.mark.parametrize(
    ("cls", "message"),
    [("NoPrompt", r"reset\(\d+\)"), ("NoStep", "has no method step"), ("Nix", "Nix")],
)
def test_an_environment_that_cannot_be_used_is_one_clear_line(cls, message):
    with pytest.raises(UserError, match=message) as raised:
        load_splits(task_of(cls))
    assert "\n" not in str(raised.value)


def test_one_turn_scores_like_any_reward_and_several_are_refused_there(guessing):
    task = task_of(max_turns=1)
    train, _ = load_splits(task)
    number = train[0].entry["metadata"]["seed"] % 1000
    with RewardPool(task) as pool:
        scores = pool.score([train[0]], [str(number), "-1", "x"])
    assert scores.rewards.tolist() == [1, 0, 0] and scores.correct.tolist() == [True, False, False]
    assert scores.metrics()["rewards/environment/mean"] == 0.5 and scores.errors == 1
    pool, train = guessing
    with pytest.raises(UserError, match="task.max_turns = 4"):
        pool.score([train[0]], ["1"])


def test_settings_that_do_not_fit():
    faults = [
        *TaskConfig(max_turns=2).problems(),
        *TaskConfig(kind="environment", name="Guess").problems(),
    ]
    assert len(faults) == 2 and "task.max_turns" in faults[0] and "module:Class" in faults[1]
    for reward in ({"weights": {"exact": 1.0}}, {"function": "m:f"}, {"extract": "last_number"}):
        assert "an environment rewards its own steps" in task_of(**reward).problems()[0]


def test_a_conversation_is_text_and_messages():
    conversation = Conversation([{"role": "user", "content": "2 + 2?"}])
    assert conversation == "user: 2 + 2?\nassistant:"
    assert chat_messages(conversation, "be brief")[0] == {"role": "system", "content": "be brief"}
    own = Conversation([{"role": "system", "content": "shout"}, {"role": "user", "content": "hi"}])
    assert chat_messages(own, "be brief") == list(own.messages)


def test_metrics_of_last_turns_stand_beside_the_reward():
    turns = [{"metrics": {"tries": 3.0}}, {}, None]
    ends = [
        turn if turn is None else {"observation": [], "reward": 0.5, "done": True, **turn}
        for turn in turns
    ]
    episodes = [Episode(NO_PROBLEM).after(NOTHING, "x", end, 4) for end in ends]
    goes_on = {"observation": [{"role": "user", "content": "?"}], "reward": 0.25, "done": False}
    cut = Episode(NO_PROBLEM).after(NOTHING, "x", goes_on, 4).truncate()
    episodes += [cut.concluded(ends[0]), cut.concluded(None)]
    scores = episode_scores(episodes, [], partial_credit=True)
    assert scores.components["tries"].tolist() == [3, 0, 0, 3, 0]
    assert scores.components["environment"].tolist() == [0.5, 0.5, 0, 0.75, 0]
    assert scores.failed.tolist() == [False, False, True, False, True]
    assert scores.metrics()["rewards/tries/mean"] == 2
    # a part in which no episode has any
    whole = Scores.join([episode_scores(episodes[1:2], [], True), scores])
    assert whole.components["tries"].tolist() == [0, 3, 0, 0, 3, 0]


def sampled(prompt, tokens):
    logprobs = (tuple(-t / scale for t in tokens) for scale in (10, 7))
    return Sampled(tuple(prompt), tuple(tokens), *logprobs, stopped=True, weight_version=1)


def test_turns_share_a_row_and_an_observation_is_never_trained_on():
    turns = [
        sampled([1, 2], [10, 11]),
        sampled([1, 2, 10, 11, 90, 91], [12]),
        sampled([1, 2, 10, 11, 90, 91, 12, 92], [13]),
    ]
    (row,) = join_turns(turns)
    assert row.prompt == (1, 2) and row.tokens == [10, 11, 90, 91, 12, 92, 13]
    assert row.sampled == [True, True, False, False, True, False, True]
    assert row.behaviour_logprobs == [-1.0, -1.1, 0, 0, -1.2, 0, -1.3]


def test_a_chat_template_that_rewrites_the_past_begins_a_new_row():
    # The template drops token 11 from the past, as one that hides earlier reasoning does.
    turns = [
        sampled([1, 2], [10, 11]),
        sampled([1, 2, 10, 90], [12]),
        sampled([1, 2, 10, 90, 12, 91], [13]),
    ]
    first, second = join_turns(turns)
    assert (first.prompt, first.tokens) == ((1, 2), [10, 11])
    assert (second.prompt, second.tokens, second.sampled) == (
        (1, 2, 10, 90),
        [12, 91, 13],
        [True, False, True],
    )


def test_a_turn_without_a_logprob_for_each_token_is_refused():
    with pytest.raises(ValueError, match="one log-probability"):
        join_turns([Sampled((1,), (2, 3), (0.0,), (0.0, 0.0), stopped=True, weight_version=1)])
