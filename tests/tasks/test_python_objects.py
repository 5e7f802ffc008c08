"""Rewards, environments and problems given as Python objects: what works, what a worker may not
get, and what a run says."""

import functools
import importlib
import os
import subprocess
import sys
import textwrap
import threading
import time
import types
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax.cli.load import load_config
from fp8rl_jax.config.files import dump_toml
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.config.tasks import RewardConfig, TaskConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.tasks.dataset import Example, load_splits
from fp8rl_jax.tasks.episodes import Episode
from fp8rl_jax.tasks.python_objects import name_objects
from fp8rl_jax.tasks.sandbox import pickling
from fp8rl_jax.tasks.sandbox.pool import RewardPool

EXAMPLE = Example(
    0, "prompt", "answer", "answer", {"question": "prompt", "answer": "answer", "metadata": {}}
)


def task_of(**reward):
    settings: dict[str, Any] = {"timeout": 0.5, "num_workers": 1, "memory_limit_mib": 512, **reward}
    return TaskConfig(kind="module", name="m:f", reward=RewardConfig(**settings))


def rows(count=20, **extra):
    return [{"prompt": f"Say {i}", "answer": i, "level": i % 2, **extra} for i in range(count)]


class Scale:
    """A reward that is an object."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, completion, **_):
        return self.factor * len(completion)

    def method(self, completion, **_):
        return -self.factor * len(completion)


def local_scale(factor):
    """`Scale` as a notebook has it: a class that cannot be imported."""

    class Local(Scale):
        __call__ = Scale.__call__

    Local.__module__ = "__main__"
    return Local(factor)


def test_closures_lambdas_partials_methods_and_objects_are_rewards():
    table = {"a": 1.0, "bb": 2.0}

    def helper(text):
        return table[text]

    def closure(completion, **_):
        return helper(completion)

    def scaled(factor, completion, **_):
        return factor * len(completion)

    rewards = {
        "closure": closure,
        "short": lambda completion, **_: 3.0 * len(completion),
        "part": functools.partial(scaled, 5.0),
        "method": Scale(7.0).method,
        "thing": local_scale(9.0),
    }
    with RewardPool(task_of(correct="closure"), reward=rewards) as pool:
        scores = pool.score([EXAMPLE] * 2, ["a", "bb"])
    assert {name: values.tolist() for name, values in scores.components.items()} == {
        "closure": [1, 2],
        "short": [3, 6],
        "part": [5, 10],
        "method": [-7, -14],
        "thing": [9, 18],
    }
    assert scores.rewards.tolist() == [11, 22]
    table["a"] = 0.0  # it was copied


def test_a_function_of_a_script_scores_without_the_script_being_run_again(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import sys
        from dataclasses import dataclass
        import jax
        from fp8rl_jax.config.tasks import RewardConfig, TaskConfig
        from fp8rl_jax.tasks.dataset import Example
        from fp8rl_jax.tasks.sandbox.pool import RewardPool
        print("run")

        @dataclass
        class Rule:
            bonus: float

        RULES = [Rule(0.5)]
        seen = []

        def helper(text):
            return len(text) + RULES[0].bonus

        def first(completion, **_):
            seen.append(completion)
            return helper(completion)

        def second(completions, **_):
            return [len(seen) + ("jax" in sys.modules) for _ in completions]

        task = TaskConfig(kind="module", name="m:f", reward=RewardConfig(num_workers=1, correct="first"))
        with RewardPool(task, reward={"first": first, "second": second}) as pool:
            example = Example(0, "p", "a", "a", {})
            print(pool.score([example], ["abc"]).rewards.tolist(), pool.score([example], ["abc"]).rewards.tolist())
        """)
    )
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    # the cell's functions share `seen`
    assert run.stdout == "run\n[3.5] [4.5]\n", run.stderr


def test_a_module_that_no_worker_finds_is_sent_with_its_function(tmp_path, monkeypatch):
    (tmp_path / "found.py").write_text("def score(completion, **_): return 2.0")
    monkeypatch.syspath_prepend(tmp_path)
    found = importlib.import_module("found")
    # one was never in a file, the other stands in place of a file of the same name
    for name in ("nowhere", "found"):
        module = types.ModuleType(name)
        exec(
            "FACTOR = 3.0\ndef helper(): return FACTOR\ndef score(completion, **_): return "
            "helper() * len(completion)",
            vars(module),
        )
        monkeypatch.setitem(sys.modules, name, module)
        with RewardPool(task_of(), reward=module.score) as pool:
            assert pool.score([EXAMPLE], ["ab"]).rewards.tolist() == [6]
    monkeypatch.setitem(sys.modules, "found", found)
    with RewardPool(task_of(), reward=found.score) as pool:
        assert pool.score([EXAMPLE], ["ab"]).rewards.tolist() == [2]


@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_AS")
def test_what_goes_wrong_costs_its_own_sample_and_is_logged(tmp_path):
    def reward(completion, **_):
        print("saw", completion)
        if completion == "hang":
            while True:
                time.sleep(1)
        if completion == "die":
            os._exit(3)
        if completion == "allocate":
            return float(len(bytearray(2**30)))
        return float(completion)

    with RewardPool(task_of(), tmp_path / "rewards.log", reward=reward) as pool:
        scores = pool.score([EXAMPLE] * 6, ["1", "hang", "die", "allocate", "x", "0.5"])
    assert scores.rewards.tolist() == [1, 0, 0, 0, 0, 0.5] and (scores.errors, scores.timeouts) == (
        3,
        1,
    )
    assert (tmp_path / "rewards.log").read_text().count("saw hang") == 1


def locked():
    lock = threading.Lock()

    def helper():
        return lock

    return lambda completion, **_: helper()


def written(path):
    file = open(path, "w")  # noqa: SIM115
    return lambda completion, **_: file.write(completion)


def on_device():
    table = {"weights": jnp.arange(3.0)}
    return lambda completion, **_: table["weights"][0]


def defaults():
    ones = jnp.ones(2)

    def reward(completion, scale=ones, **_):
        return scale

    return reward


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            locked,
            r"its variable 'helper.lock' cannot be pickled \(TypeError: cannot pickle '_thread.lock' object\)",
        ),
        (lambda: written(os.devnull), "its variable 'file' cannot be pickled"),
        (
            on_device,
            r"its variable 'table' is or holds an object of JAX's .* numpy.asarray\(table\)",
        ),
        (defaults, r"its variable 'scale' is or holds an object of JAX's"),
        (lambda: functools.partial(defaults(), scale=threading.Lock()), "its variable 'scale'"),
        (lambda: jax.jit(lambda completion: 1.0), "it is or holds an object of JAX's"),
    ],
)
def test_objects_that_cannot_be_pickled_are_named(make, message):
    with pytest.raises(
        UserError, match=f"given in Python, cannot be sent to the reward workers: {message}"
    ) as raised:
        RewardPool(task_of(), reward=make())
    assert "\n" not in str(raised.value)


def test_objects_too_large_for_the_workers_are_named(monkeypatch):
    monkeypatch.setattr(pickling, "LARGEST", 2**20)
    small, large = np.zeros(10), np.zeros(3 * 2**17)

    def reward(completion, **_):
        return small[0] + large[0]

    with pytest.raises(
        UserError,
        match="it has 3 MiB, 3 of them in 'large', and each worker gets a copy, of 1 MiB at most",
    ):
        RewardPool(task_of(), reward=reward)


def test_variables_of_megabytes_reach_every_worker():
    table = np.arange(2**19)  # a socket takes a twentieth of it

    def reward(completion, **_):
        return float(table[int(completion)])

    with RewardPool(task_of(num_workers=2), reward=reward) as pool:
        assert (
            pool.score([EXAMPLE] * 40, [str(2**19 - 1)] * 40).rewards.tolist() == [2**19 - 1] * 40
        )


def no_reward(text):
    return 1.0


async def later(completion, **_):
    return 1.0


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (
            no_reward,
            r"'<python>:no_reward' takes \(text\), but is called with prompt=, completion=, answer=, metadata=",
        ),
        (later, "is an async function"),
        ("my.py:f", r"reward must be a function, a list of them or \{name: function\}, not str"),
        ([no_reward, "my.py:f"], r"not \[str\]"),
        ([no_reward, no_reward], r"two functions called 'no_reward'; give \{name: function\}"),
        ([], "reward has no function"),
        ({"a": 1.0}, r"not \{'a': float\}"),
        ({}, "reward has no function"),
        ({"exact": no_reward}, "choose another name"),
        ({"a": later, "b": later}, "say which of a, b decides"),
    ],
)
def test_no_reward_is_one_clear_line(reward, message):
    with pytest.raises(UserError, match=message) as raised, RewardPool(task_of(), reward=reward):
        pytest.fail("the pool started")
    assert "\n" not in str(raised.value)


def test_weights_are_of_the_configuration_and_nothing_is_given_twice():
    task, objects = name_objects(
        task_of(weights={"score": 0.25, "exact": 1.0}, correct="exact"), lambda **_: 1.0
    )
    assert (
        "task.reward.functions.reward has no weight; give task.reward.weights.reward"
        in "; ".join(task.problems())
    )
    task, objects = name_objects(
        task_of(weights={"no_reward": 0.25, "exact": 1.0}, correct="exact"), no_reward
    )
    assert task.reward.functions == {"no_reward": "<python>:no_reward"} and objects == {
        "<python>:no_reward": no_reward
    }
    assert task.components == {"no_reward": 0.25, "exact": 1.0} and not task.problems()
    listed, _ = name_objects(task_of(correct="later"), [no_reward, later])
    assert listed.components == {"no_reward": 1.0, "later": 1.0} and not listed.problems()
    for settings in (
        {"function": "m:f"},
        {"weights": {"no_reward": 1.0}, "functions": {"no_reward": "m:f"}},
    ):
        with pytest.raises(UserError, match="are both given"):
            name_objects(task_of(**settings), no_reward)


def test_a_run_file_says_what_was_given_and_asks_for_it_again(tmp_path):
    def score(completion, **_):
        return 1.0

    task, _ = name_objects(TaskConfig(), score, rows())
    assert (task.kind, task.name, task.reward.function) == (
        "python",
        "list of 20",
        "<python>:score",
    )
    several: list[dict[str, Any]] = [
        {"reward": score, "dataset": rows()},
        {"environment": Parity},
    ]
    for objects in several:
        task, _ = name_objects(TaskConfig(reward=RewardConfig(num_workers=1)), **objects)
        (tmp_path / "config.toml").write_text(dump_toml(replace(RunConfig(), task=task)))
        again = load_config(RunConfig, [str(tmp_path / "config.toml")], "fp8rl train").task
        assert again == task == name_objects(again, **objects)[0]
        with pytest.raises(
            UserError,
            match="(task.reward.function = '<python>:score'|task.name = '<python>:Parity') was "
            "given in P",
        ):
            RewardPool(again)
        with pytest.raises(
            UserError,
            match=r"problems of this run \(list of 20\) were given in Python|'<python>:Parity' was given",
        ):
            load_splits(again)


class Stream:
    """Problems without a length."""

    def __iter__(self):
        return ({"question": f"Say {i}", "answer": str(i)} for i in range(10**9))


class Indexed:
    """Problems with a length and an index that never ends, as data sets of PyTorch may have it."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return {"prompt": f"Say {index}", "answer": index, "level": index % 2}


def test_rows_are_split_like_a_file(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        "".join(f'{{"prompt": "Say {i}", "answer": {i}, "level": {i % 2}}}\n' for i in range(20))
    )
    task = TaskConfig(
        kind="jsonl", name=str(tmp_path / "a.jsonl"), eval_size=4, prompt_template="{question}!"
    )
    expected = load_splits(task)
    given = TaskConfig(eval_size=4, prompt_template="{question}!")
    for dataset in (rows(), tuple(rows()), Indexed()):
        for ours, theirs in zip(load_splits(given, dataset), expected, strict=True):
            assert (
                ours.fingerprint == theirs.fingerprint
                and ours[0].entry["metadata"] == theirs[0].entry["metadata"]
            )
    assert load_splits(replace(given, seed=1), rows())[0].fingerprint != expected[0].fingerprint


def test_held_out_problems_are_an_argument_of_their_own(tmp_path):
    apart = rows()[15:] + [{"prompt": "Say 99", "answer": 99}]
    task, _ = name_objects(TaskConfig(), dataset=rows(), eval_dataset=apart)
    assert (task.kind, task.eval_path) == ("python", "<python>:list of 6")
    train, held_out = load_splits(TaskConfig(), rows(), eval_rows=apart)
    assert sorted(int(e.answer) for e in train) == list(range(15))
    assert sorted(int(e.answer) for e in held_out) == [*range(15, 20), 99]
    assert load_splits(task, rows(), eval_rows=iter(apart))[1].fingerprint == held_out.fingerprint
    (tmp_path / "a.jsonl").write_text(
        '{"prompt": "Say 15", "answer": 15}\n{"prompt": "b", "answer": 1}'
    )
    from_file = TaskConfig(kind="jsonl", name=str(tmp_path / "a.jsonl"))
    assert [e.prompt for e in load_splits(from_file, eval_rows=apart)[0]] == ["b"]
    with pytest.raises(UserError, match="'<python>:list of 6'.*give eval_dataset= again"):
        load_splits(task, rows())
    with pytest.raises(UserError, match="eval_dataset row 1: a dictionary with a prompt"):
        load_splits(TaskConfig(), rows(), eval_rows=[*apart[:1], 7])
    with pytest.raises(UserError, match="eval_dataset is a dict; give one of its values"):
        load_splits(TaskConfig(), rows(), eval_rows={"test": apart})
    with pytest.raises(UserError, match="eval_dataset and task.eval_path .*'held.jsonl' are both"):
        load_splits(TaskConfig(kind="jsonl", eval_path="held.jsonl"), rows(), eval_rows=apart)
    with pytest.raises(UserError, match='those of task.kind = "reasoning_gym" are none'):
        load_splits(TaskConfig(), eval_rows=apart)


def test_prompts_without_an_answer_need_a_reward_that_does_not_compare():
    def score(completion, **_):
        return 1.0

    task, _ = name_objects(TaskConfig(eval_size=1), score)
    train, _ = load_splits(
        task, ["Tell a joke.", "Tell another.", {"prompt": "Sing.", "answer": None}]
    )
    assert {example.answer for example in train.examples} == {""} and {
        example.target for example in train.examples
    } == {""}
    with pytest.raises(
        UserError, match="dataset row 0: it has no answer, which the reward exact compares with"
    ):
        load_splits(TaskConfig(), ["Tell a joke."])


def test_a_stream_is_read_as_far_as_it_is_needed():
    train, held_out = load_splits(TaskConfig(train_size=6, eval_size=2), Stream())
    assert [e.answer for e in held_out.examples + train.examples] == list(map(str, range(8)))
    train, held_out = load_splits(TaskConfig(train_size=9), iter(rows(10)))
    assert (len(train), len(held_out)) == (9, 1)
    with pytest.raises(
        UserError, match="task.train_size: the dataset, a Stream, does not say how long it is"
    ):
        load_splits(TaskConfig(eval_size=2), Stream())


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (
            [*rows(3), {"answer": 1}],
            r"^dataset row 3: give one of prompt, question, problem and messages \(it has none; keys: answer\); task.fields.prompt names another column$",
        ),
        (
            [*rows(3), 7],
            "^dataset row 3: a dictionary with a prompt, or a prompt as text, was expected, not "
            "int$",
        ),
        (
            [{"prompt": "a", "answer": 1, "image": {1}}],
            r"row 0: it must hold plain values only \(Object of type set",
        ),
        ([{"prompt": "a", "answer": float("nan")}], "row 0: it must hold plain values only"),
        ([{"prompt": "a\udc00", "answer": 1}], "row 0: it must hold plain values only"),
        ([{"prompt": "a", "answer": [1]}], "answer must be text or a number, not a list"),
        (
            [{"prompt": "a", "answer": 1}] * 3,
            "^the dataset, a list of 3, has 1 distinct prompts, fewer than",
        ),
        ([], "^the dataset, a list of 0, is an empty data set"),
        ({"train": rows()}, "^dataset is a dict; give one of its values"),
        ({"a", "b"}, "^dataset is a set; give a list, which has an order"),
        ("Say 1", "^dataset is a str; give a list of dictionaries"),
        (7, "^dataset is a int; give a list of dictionaries"),
    ],
)
def test_a_data_set_that_cannot_be_used_is_one_clear_line(dataset, message):
    with pytest.raises(UserError, match=message) as raised:
        load_splits(TaskConfig(eval_size=1), dataset)
    assert "\n" not in str(raised.value)


def test_rows_that_are_damaged_alike_are_one_line():
    with pytest.raises(UserError) as raised:
        load_splits(TaskConfig(), [{"ask": 1}] * 25 + [7])
    one, other = str(raised.value).splitlines()
    assert (
        "keys: ask); task.fields.prompt names another column; 24 more rows alike: dataset row 1,"
        in one
    )
    assert other.startswith("dataset row 25: a dictionary with a prompt")
    with pytest.raises(
        UserError, match=r"does not fit the problem of dataset row \d \(KeyError: 'x'\)"
    ):
        load_splits(TaskConfig(prompt_template="{metadata[x]}"), rows())
    with pytest.raises(
        UserError, match='^task.args: problems of task.kind = "python" take no arguments'
    ):
        load_splits(TaskConfig(args={"min_terms": 2}), rows())


class Parity:
    """An environment: say whether the number is odd."""

    def __init__(self, turns=2):
        self.turns = turns

    def reset(self, seed):
        self.seed = seed
        return f"Is {seed} odd?"

    def step(self, text):
        return "sure?", float(text == str(self.seed % 2)), False


def local_environment():
    texts = {False: "0", True: "1"}

    class Cell(Parity):
        def step(self, text):
            return "sure?", float(text == texts[self.seed % 2 == 1]), False

    return Cell


def test_an_environment_of_a_cell_is_played():
    cell = local_environment()
    task = TaskConfig(
        max_turns=2,
        train_size=4,
        eval_size=1,
        args={"turns": 3},
        reward=RewardConfig(num_workers=1, timeout=2.0),
    )
    train, _ = load_splits(task, environment=cell)
    with RewardPool(task, environment=cell) as pool:
        assert pool.task.name == "<python>:Cell" and pool.task.kind == "environment"
        right = [str(example.entry["metadata"]["seed"] % 2) for example in train.examples]
        scores = pool.play([Episode(example) for example in train.examples], [*right[:3], "x"])
    (turn, *_), observation = scores.turns, [{"role": "user", "content": "sure?"}]
    assert scores.rewards.tolist() == [1, 1, 1, 0]
    assert turn is not None and turn["observation"] == observation


def test_specs_of_main_are_refused_with_what_to_do():
    (fault,) = task_of(function="__main__:score").problems()
    assert (
        "task.reward.function = '__main__:score': the reward workers do not run" in fault
        and "give reward=score" in fault
    )
    (fault,) = TaskConfig(kind="environment", name="__main__:Guess").problems()
    assert "task.name = '__main__:Guess'" in fault and "give environment=Guess" in fault


def test_an_environment_with_a_dataset_or_a_reward_is_refused():
    with pytest.raises(UserError, match="dataset and environment are both given"):
        name_objects(TaskConfig(), dataset=rows(), environment=Parity)
    with pytest.raises(UserError, match="environment must be a class, not Parity"):
        name_objects(TaskConfig(), environment=Parity())  # ty: ignore[invalid-argument-type]
    with pytest.raises(UserError, match="an environment rewards its own steps"):
        RewardPool(TaskConfig(), reward=no_reward, environment=Parity)
