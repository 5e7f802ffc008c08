"""Tests of a task's rewards, before anything is learned from them: a right answer has to count as
correct, and a wrong, an empty or a constant one must not.

A reward that takes the empty answer teaches silence, and a problem whose own answer does not pass
teaches nothing, and neither is seen in a run: it has rewards like any other.
"""

from __future__ import annotations

from collections.abc import Sequence

from fp8rl_jax.config.tasks import Extract, TaskConfig
from fp8rl_jax.tasks.dataset import Example
from fp8rl_jax.tasks.extraction import extract_answer, same_number
from fp8rl_jax.tasks.sandbox.pool import RewardPool
from fp8rl_jax.tasks.sources import COMPARING_REWARDS

TRIED = 256
"""Problems that are tried where each may cost something; spread over all that there are."""
CONSTANTS = ("0", "1", "42", "A", "yes", "I do not know.")
"""What a policy that gives up says everywhere."""
_FORMS: dict[Extract, str] = {
    "whole": "{}",
    "last_number": "{}",
    "answer_tag": "<answer>{}</answer>",
    "boxed": "\\boxed{{{}}}",
    "after_hashes": "#### {}",
}
_SHOWN = 3


def unread_result(task: TaskConfig, examples: Sequence[Example]) -> str:
    """Say where answers are whole solutions, which no completion will be equal to.

    GSM8K's end in "#### 42", MATH's have it in a box.

    Returns:
        One line with the key that reads the result out of them; empty where all is well, and where
        a function of the user's makes of the answers what it likes.
    """
    deciding, extract = task.deciding_reward, task.reward.extract
    by_value = deciding == "exact" and extract == "last_number"
    if deciding not in COMPARING_REWARDS or task.answer_extract != "whole" or by_value:
        return ""
    marks: dict[Extract, str] = {"after_hashes": "a line #### RESULT", "answer_tag": "a tag"}
    if deciding == "exact":  # math_verify reads boxes
        marks["boxed"] = "a box"
    for how, mark in marks.items():
        if count := sum(bool(extract_answer(example.answer, how)) for example in examples):
            return (
                f"{count} of {len(examples)} answers have {mark} in them, and {deciding} compares "
                "with the whole text, which no completion will be equal to; set "
                f'task.answer_extract = "{how}"'
            )
    return ""


def unverified(pool: RewardPool, examples: Sequence[Example]) -> str:
    """Say which problems' own answers do not count as correct, by the built-in comparisons.

    At most `TRIED` of the problems are tried. Where functions of the user's are among the rewards,
    none is: a call may cost money.

    Returns:
        One line with the count and the first problems; empty where all is well.
    """
    task = pool.task
    if task.deciding_reward not in COMPARING_REWARDS or any(task.reward.specs.values()):
        return ""
    return _OwnAnswers(pool, _spread([e for e in examples if e.answer])).fault


def check_rewards(pool: RewardPool, examples: Sequence[Example]) -> tuple[list[str], list[str]]:
    """Try right, wrong, empty and constant answers on the rewards of a task without turns.

    Args:
        pool: workers that are ready.
        examples: the problems. All of their own answers are tried where the rewards are built in,
            else those of `TRIED` problems; of the other answers as many.

    Returns:
        (what was tried, what is wrong), a line each.
    """
    task = pool.task
    name, answered = task.deciding_reward, [example for example in examples if example.answer]
    own = _OwnAnswers(pool, _spread(answered) if any(task.reward.specs.values()) else answered)
    faults = [fault for fault in (own.fault, unread_result(task, examples)) if fault]
    wrong = set(map(id, own.wrong))
    tried = _spread([example for example in examples if id(example) not in wrong])
    said = [["", _another(tried, row), *CONSTANTS] for row in range(len(tried))]
    scores = pool.score(
        tried, [own.form.format(text) if text else "" for texts in said for text in texts]
    )
    correct = scores.correct.reshape(-1, len(CONSTANTS) + 2)
    whats = ["the empty answer", "another problem's answer", *(f"{text!r}" for text in CONSTANTS)]
    for column, what in enumerate(whats):
        taken = [
            row
            for row, example in enumerate(tried)
            if correct[row, column] and not _same(said[row][column], example.answer)
        ]
        if taken:
            such_as = f", {said[taken[0]][1]!r}," if column == 1 else ""
            named = _named([tried[row] for row in taken], len(tried))
            faults.append(f"{name}: {what}{such_as} is correct for {named}")
    empty = scores.rewards.reshape(correct.shape)[:, 0]
    if own.examples and tried and not correct[:, 0].any() and empty.mean() >= own.earned:
        faults.append(
            f"task.reward: the empty answer earns {empty.mean():.3g} in the mean, and the answers "
            f"that the problems have earn {own.earned:.3g}"
        )
    if scores.failed.any():
        faults.append(
            f"task.reward fails on {int(scores.failed.sum())} of {len(scores.failed)} wrong, empty "
            f"and constant answers, which a policy will give: {scores.first_error}"
        )
    return [
        f"{name}: {len(own.examples)} of {len(examples)} problems tried with their own answers",
        f"{name}: {len(tried)} with a wrong, an empty and {len(CONSTANTS)} constant answers",
    ], faults


class _OwnAnswers:
    """What the rewards make of the problems' own answers, each in every form that may be wanted.

    Attributes:
        form: the one in which most answers are correct.
        earned: mean reward in that form.
        wrong: examples whose own answer is correct in no form.
        fault: a line about them; empty where there are none.
    """

    def __init__(self, pool: RewardPool, examples: Sequence[Example]):
        forms, self.examples = _forms(pool.task), examples
        scores = pool.score(
            examples, [form.format(example.answer) for example in examples for form in forms]
        )
        right = scores.correct.reshape(-1, len(forms))
        best = int(right.sum(axis=0).argmax())
        self.form = forms[best]
        self.earned = float(scores.rewards.reshape(right.shape)[:, best].sum()) / (len(right) or 1)
        self.wrong = [e for e, any_form in zip(examples, right.any(1), strict=True) if not any_form]
        self.fault = ""
        if self.wrong:
            name = pool.task.deciding_reward
            most = f"; its highest score is {scores.components[name].max():g}"
            because = f" ({scores.first_error})" if scores.first_error else ""
            self.fault = (
                f"{name}: the problem's own answer is not correct, so that no completion will be, "
                f"for {_named(self.wrong, len(examples))}{because}{'' if right.any() else most}"
            )


def _forms(task: TaskConfig) -> list[str]:
    """Forms in which the reward that decides may want an answer."""
    if task.deciding_reward == "math_verify":
        return [_FORMS["boxed"]]
    own = _FORMS[task.reward.extract]
    is_function = task.deciding_reward in task.reward.functions or task.reward.function
    # A function may extract by itself; which form it wants is found by trying.
    others = _FORMS.values() if is_function and task.reward.extract == "whole" else ()
    return list(dict.fromkeys([own, *others]))


def _named(examples: Sequence[Example], tried: int) -> str:
    rows = ", ".join(
        f"{example.entry.get('source', repr(example.prompt[:40]))} ({example.answer[:40]!r})"
        for example in examples[:_SHOWN]
    )
    more = ", ..." if len(examples) > _SHOWN else ""
    return f"{len(examples)} of {tried} problems: {rows}{more}"


def _another(examples: Sequence[Example], row: int) -> str:
    """The answer of the next problem that has another one; else one that nothing asks for."""
    own = examples[row].answer
    following = (*examples[row + 1 :], *examples[:row])
    return next(
        (each.answer for each in following if each.answer and not _same(each.answer, own)), "-98765"
    )


def _same(text: str, answer: str) -> bool:
    numbers = [extract_answer(each, "last_number") for each in (text, answer)]
    return text.strip().casefold() == answer.strip().casefold() or same_number(*numbers)


def _spread(examples: Sequence[Example]) -> list[Example]:
    step = max(len(examples) / TRIED, 1)
    return [examples[int(i * step)] for i in range(min(len(examples), TRIED))]
