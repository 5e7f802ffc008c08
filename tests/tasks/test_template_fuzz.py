"""Prompt templates and reward specs: a text, or a UserError that names the key."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fp8rl_jax.config.tasks import RewardConfig, TaskConfig, template_faults
from fp8rl_jax.errors import UserError
from fp8rl_jax.tasks.dataset import _render

BOUNDED = settings(max_examples=150, deadline=None, derandomize=True)
ENTRY = {
    "question": "q",
    "answer": "a",
    "metadata": {"k": "v", "n": 1, "l": [1]},
    "source": "f.jsonl:1",
}
PIECES = st.sampled_from(
    [
        "{question}",
        "{answer}",
        "{metadata[k]}",
        "{metadata[n]:d}",
        "{metadata[l][5]}",
        "{metadata[x]}",
        "{question",
        "}",
        "{",
    ]
    + [
        "{0}",
        "{question!r:>5}",
        "{question!x}",
        "{question:{answer}}",
        "{question.upper}",
        "{metadata[n]:c}",
        "{answer:d}",
    ]
)


@BOUNDED
@given(st.lists(PIECES | st.text("{}[]!:.abq=5", max_size=5), max_size=4).map("".join))
@example("{question:99999999999999}")
@example("{metadata[" + "9" * 5000 + "]}")
@example("{metadata[k]:" + "9" * 5000 + "}")
def test_a_random_template_renders_or_is_one_user_error(template):
    task = TaskConfig(prompt_template=template)
    faults = template_faults(template)
    assert [line for line in task.problems() if line.startswith("task.prompt_template: ")] == [
        f"task.prompt_template: {fault}" for fault in faults
    ]
    if faults:
        return
    try:
        assert isinstance(_render(template, ENTRY, "task.prompt_template"), str)
    except UserError as error:
        assert str(error).startswith("task.prompt_template = ") and "f.jsonl:1" in str(error)


@BOUNDED
@given(
    function=st.sampled_from(["", "m:f", ":f", "m:", "a.py:f:g", "m:1f"]) | st.text(max_size=6),
    weights=st.dictionaries(
        st.sampled_from(["exact", "format", "length", "tone", "math_verify"]) | st.text(max_size=4),
        st.floats() | st.integers(-2, 2) | st.none() | st.text(max_size=2),
        max_size=3,
    ),
    functions=st.dictionaries(
        st.just("tone") | st.text(max_size=4), st.just("m:f") | st.text(max_size=4), max_size=2
    ),
    pattern=st.text("()[]{}*+?\\1aP<", max_size=8),
    target=st.integers(-2, 5),
    limit=st.integers(-2, 5),
    kind=st.sampled_from(["reasoning_gym", "module", "jsonl", "environment"]),
)
def test_random_reward_settings_are_sound_or_refused(
    function, weights, functions, pattern, target, limit, kind
):
    reward = RewardConfig(
        function,
        weights,
        functions,
        format_pattern=pattern,
        length_target=target,
        length_limit=limit,
    )
    lines = list(reward.faults(kind))
    assert all("reward" in line for line in lines)
    if not lines:
        assert reward.decides(kind) in reward.components(kind)
        assert all(
            type(weight) in (int, float) and abs(weight) < float("inf")
            for weight in reward.components(kind).values()
        )
        assert limit > target >= 0 or "length" not in weights


@pytest.mark.parametrize(
    "pattern", ["(" * 200 + ")" * 200, "a" * 5000, "(?P<a>x)(?P=b)", "a{99999999999}", "[" * 300]
)
def test_patterns_compile_or_are_named(pattern):
    lines = list(
        RewardConfig(
            weights={"exact": 1, "format": 1}, correct="exact", format_pattern=pattern
        ).faults("jsonl")
    )
    assert all(line.startswith("task.reward.format_pattern = ") for line in lines)
