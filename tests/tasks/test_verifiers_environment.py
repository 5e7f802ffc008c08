"""Environments of the library `verifiers`: the same messages, ends and rewards as in its own
rollouts."""

import asyncio
import json
import signal
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from fp8rl_jax.config.tasks import RewardConfig, TaskConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.tasks import verifiers_environment
from fp8rl_jax.tasks.dataset import load_splits
from fp8rl_jax.tasks.environment import EnvironmentFault
from fp8rl_jax.tasks.episodes import Episode, Sampled, episode_scores
from fp8rl_jax.tasks.sandbox.pool import RewardPool
from fp8rl_jax.tasks.verifiers_environment import (
    build_verifiers_player,
    read_calls,
    signals_kept,
)

HERE = Path(__file__).parent
NAME = "verifiers-examples"
NOTHING = Sampled((1,), (2,), (0.0,), (0.0,), stopped=True, weight_version=1)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def task_of(which="single", limit=8, split="train", eval_split="", **args):
    return TaskConfig(
        kind="verifiers",
        name=NAME,
        args={"which": which, **args},
        max_turns=limit,
        split=split,
        eval_split=eval_split,
        reward=RewardConfig(num_workers=1),
    )


# without the library


def test_without_the_library_a_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(UserError, match="needs verifiers: pip install 'verifiers<0.4'$"):
        load_splits(task_of())


@pytest.mark.parametrize(
    ("version", "names", "said"),
    [
        ("0.4.0", [], r"verifiers 0.4.0 has no load_environment.*pip install 'verifiers<0.4'$"),
        (
            "0.1.12",
            ["load_environment", "Environment"],
            r"needs .* 0.1.14 or later, not 0.1.12: pip",
        ),
    ],
)
def test_a_version_without_these_environments_is_one_line(monkeypatch, version, names, said):
    module = ModuleType("verifiers")
    vars(module).update(dict.fromkeys(names, object))
    for name in ("verifiers", "verifiers.envs", "verifiers.envs.environment"):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(verifiers_environment, "version", lambda _: version)
    with pytest.raises(UserError, match=said) as raised:
        load_splits(task_of())
    assert "\n" not in str(raised.value)


def test_settings_that_do_not_fit():
    assert task_of(eval_split="eval").problems() == task_of(split="eval").problems() == []
    for settings in (
        {"split": "test"},
        {"eval_split": "test"},
        {"split": "eval", "eval_split": "eval"},
    ):
        (fault,) = task_of(**settings).problems()
        assert fault.startswith('task.kind = "verifiers": an environment has no task.subset')
    (fault,) = TaskConfig(kind="verifiers", name="x", eval_path="y").problems()
    assert "belongs to problems that are rows" in fault
    weighed = TaskConfig(kind="verifiers", name="x", reward=RewardConfig(weights={"exact": 1.0}))
    assert "an environment rewards its own steps" in weighed.problems()[0]


ADD = {"name": "add", "arguments": {"a": 1, "b": 2}}


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (CALL, None, [ADD]),
        (f"Well. {CALL} and {CALL}", "Well. ", [ADD, ADD]),
        (CALL.removesuffix("</tool_call>"), None, [ADD]),
        ("4", "4", []),
        ("", "", []),
        (f"{CALL}<tool_call>add(1)</tool_call>", None, None),
        ('<tool_call>{"name": "add"}</tool_call>', None, None),
        ('<tool_call>{"name": 1, "arguments": {}}</tool_call>', None, None),
        ("<tool_call>[]</tool_call>", None, None),
    ],
)
def test_calls_of_tools_are_read_as_vllm_reads_them(text, content, calls):
    assert read_calls(text) == ((text, []) if calls is None else (content, calls))


# with it, or with what stands in for it where it is not installed


@pytest.fixture(scope="module")
def library():
    datasets = pytest.importorskip("datasets", reason="needs the extra [verifiers] or [datasets]")
    datasets.disable_progress_bars()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        if not find_spec("verifiers"):
            patch.syspath_prepend(str(HERE / "standin"))
        kept = set(sys.modules)
        yield import_module("verifiers")
    for name in set(sys.modules) - kept:
        if name.partition(".")[0] in ("verifiers", "verifiers_examples"):
            del sys.modules[name]


def own_rollout(library, task, row, turns):
    """What the library makes of these assistant's messages; None: the prompt is too long."""
    from verifiers.clients.client import Client
    from verifiers.errors import OverlongPromptError
    from verifiers.types import Response, ResponseMessage

    left = iter(turns)

    class Fixed(Client):
        async def get_response(self, prompt, model, sampling_args, tools=None, **kwargs):
            if (said := next(left)) is None:
                raise OverlongPromptError
            message = ResponseMessage(finish_reason="stop", is_truncated=False, **said)
            return Response(id="", created=0, model="", message=message)

        async def to_native_tool(self, tool): ...
        async def to_native_prompt(self, messages): ...
        async def get_native_response(self, *args, **kwargs): ...
        async def raise_from_native_response(self, response): ...
        async def from_native_response(self, response): ...
        def setup_client(self, config): ...
        async def close(self): ...

    with signals_kept():
        environment = library.load_environment(task.name, **task.args)
    return asyncio.run(environment.run_rollout(row, Fixed(None), "", {}))


def played(task, example, texts):
    """The messages behind the prompt, and the last turn; None: no room."""
    play, history, said = build_verifiers_player(task), [], []
    for text in texts:
        turn = play(example.entry, tuple(history), text)
        assert turn["reward"] == 0 or turn["done"]
        if text is not None:
            said += [("assistant", text, None), *map(shown, turn["observation"])]
            history.append((text, tuple(turn["observation"])))
    return said, turn


def shown(message):
    return message["role"], message["content"] or "", message.get("tool_call_id")


def call(a, b, number):
    arguments = json.dumps({"a": a, "b": b})
    return {"id": f"call_{number}_0", "name": "add", "arguments": arguments}


CASES = [
    ("single", {}, ["0"], [{"content": "0"}]),
    ("single", {}, ["7 or so"], [{"content": "7 or so"}]),
    (
        "guess",
        {},
        ["9", "1", "ANSWER"],
        [{"content": "9"}, {"content": "1"}, {"content": "ANSWER"}],
    ),
    ("guess", {"max_turns": 2}, ["9", "8"], [{"content": "9"}, {"content": "8"}]),
    ("guess", {"limit": 2}, ["9", "8"], [{"content": "9"}, {"content": "8"}, None]),
    ("guess", {}, ["9", "8", None], [{"content": "9"}, {"content": "8"}, None]),
    ("tool", {}, [CALL, "3"], [{"tool_calls": [call(1, 2, 0)]}, {"content": "3"}]),
    (
        "tool",
        {},
        [f"So: {CALL}", CALL.replace("2", '"x"'), CALL],
        [
            {"content": "So: ", "tool_calls": [call(1, 2, 0)]},
            {"tool_calls": [call(1, "x", 1)]},
            {"tool_calls": [call(1, 2, 2)]},
        ],
    ),
    ("tool", {}, ["<tool_call>add(1, 2)"], [{"content": "<tool_call>add(1, 2)"}]),
]


@pytest.mark.parametrize(("which", "args", "texts", "turns"), CASES)
def test_messages_ends_and_rewards_are_the_librarys_own(library, which, args, texts, turns):
    task = task_of(which, **args)
    example = load_splits(task)[0][0]
    row = dict(example.entry["metadata"])
    texts = [text and text.replace("ANSWER", row["answer"]) for text in texts]
    turns = [
        turn and {key: row["answer"] if said == "ANSWER" else said for key, said in turn.items()}
        for turn in turns
    ]
    found = own_rollout(library, task, row, turns)
    said, turn = played(task, example, texts)
    assert turn["done"] and (turn["reward"], turn["metrics"]) == (found["reward"], found["metrics"])
    prompt = example.entry["question"].messages
    if which == "tool":
        assert prompt[0]["role"] == "system" and '"name": "add"' in prompt[0]["content"]
        prompt = prompt[1:]
    assert [*map(shown, prompt)] == [*map(shown, found["prompt"])]
    theirs = [shown({"content": ""} | dict(message)) for message in found["completion"]]
    # a call stands in our text, and beside the library's; a message that nobody answered is in one
    ours, others = ([x for x in messages if x[0] != "assistant"] for messages in (said, theirs))
    assert abs(len(ours) - len(others)) <= 1
    assert all(one == other for one, other in zip(ours, others, strict=False))
    answers = [message for message in theirs if message[0] == "assistant"]
    assert [read_calls(text)[0] for role, text, _ in said if role == "assistant"] == [
        content or None for _, content, _ in answers
    ]


def test_tools_stand_in_the_system_message_as_qwen_writes_them(library):
    task = task_of("tool", system_prompt="Use tools.")
    system = load_splits(task)[0][0].entry["question"].messages[0]
    before, rest = system["content"].split("\n<tools>\n")
    signature, after = rest.split("\n</tools>\n\n")
    assert before.startswith(
        "Use tools.\n\n# Tools\n\nYou may call one or more functions to assist"
    )
    assert after.endswith(
        'XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
        "</tool_call>"
    )
    tool = json.loads(signature)
    assert (tool["type"], tool["function"]["name"]) == ("function", "add")
    assert tool["function"]["parameters"]["required"] == ["a", "b"]


def test_rows_with_one_prompt_are_problems_of_their_own(library):
    train, held_out = load_splits(task_of("guess"))
    assert len({example.prompt for example in train.examples + held_out.examples}) == 1
    assert sorted(int(e.answer) for e in train.examples + held_out.examples) == [*range(8)]
    train, held_out = load_splits(task_of(eval_split="eval"))
    assert sorted(int(e.answer) for e in held_out.examples) == [24, 26, 28, 30]
    assert len(train) == 12 and len(load_splits(task_of(split="eval"))[0]) == 3


@pytest.mark.parametrize(
    ("which", "texts", "said"),
    [
        ("forgetful", ["a", "b"], "asks with another observation 1 than before"),
        ("fickle", ["a"], "asks with another prompt or tools than before"),
        ("rewriting", ["a"], "rewrites the conversation"),
        ("calling", ["a"], r"calls the client itself \(chat\)"),
        ("guess", ["give up", "a"], "verifiers: .*no sandbox"),
    ],
)
def test_an_environment_that_cannot_be_played_is_one_line(library, which, texts, said):
    task = task_of(which)
    example = load_splits(task)[0][0]
    with pytest.raises(EnvironmentFault, match=said) as raised:
        played(task, example, texts)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("which", "said"),
    [
        ("no prompt", "its data set has neither a column prompt nor a column question$"),
        ("null", "row 1: prompt: must be a list of messages$"),
        ("image", "row 0: prompt: message 0 has a content part of type 'image_url'"),
        ("only eval", 'no data set for training; task.split = "eval"'),
        ("empty", "is an empty data set"),
        ("together", "rewards the completions of a prompt together"),
        ("group", "is a group of environments with tools"),
        ("none", "is a NotOne, and no Environment of verifiers"),
        ("nix", "KeyError: 'nix'"),
    ],
)
def test_an_environment_that_cannot_be_used_is_one_line(library, which, said):
    with pytest.raises(UserError, match=said) as raised:
        load_splits(task_of(which))
    assert "\n" not in str(raised.value)


def test_an_unknown_name_wrong_arguments_and_a_split_that_is_not_there_are_one_line(library):
    for task, said in (
        (
            TaskConfig(kind="verifiers", name="owner/nix-nix"),
            "No module named 'nix_nix'.*prime env",
        ),
        (task_of("calling", nix=1), "TypeError: .*unexpected keyword argument 'nix'"),
        (task_of("guess", eval_split="eval"), "no data set for evaluation; take task.eval_split"),
    ):
        with pytest.raises(UserError, match=said) as raised:
            load_splits(task)
        assert "\n" not in str(raised.value)


def test_the_trainer_keeps_its_signals(library):
    kept = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    load_splits(task_of("guess"))
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == kept


def test_workers_play_it(library):
    task = task_of("guess")
    train, _ = load_splits(task)
    example = train[0]
    with RewardPool(task) as pool:
        episodes = [Episode(example), Episode(example)]
        answers, scores = [["9", example.answer], [example.answer, "-"]], []
        for turn in range(2):
            live = [i for i, episode in enumerate(episodes) if not episode.done]
            scores.append(pool.play([episodes[i] for i in live], [answers[i][turn] for i in live]))
            for i, result in zip(live, scores[-1].turns, strict=True):
                episodes[i] = episodes[i].after(NOTHING, answers[i][turn], result, 8)
        cut = Episode(example).after(NOTHING, "9", pool.play([Episode(example)], ["9"]).turns[0], 8)
        (end,) = pool.play([cut.truncate()], [None]).turns
    whole = episode_scores([*episodes, cut.truncate().concluded(end)], scores, partial_credit=True)
    assert not whole.failed.any() and whole.rewards.tolist() == [0.75, 0.875, -0.125]
    assert whole.components["tries"].tolist() == [2, 1, 1]
    assert whole.components["num_turns"].tolist() == [2, 1, 1]
    assert whole.metrics()["rewards/found/mean"] == pytest.approx(2 / 3)
