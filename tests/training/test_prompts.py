"""What ends a completion, and what is said of rows that do not become prompts."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import fp8rl_jax as fp8rl
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.config.tasks import TaskConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.tasks.dataset import Example, load_splits
from fp8rl_jax.tokenizers.byte_tokenizer import ByteTokenizer
from fp8rl_jax.tokenizers.tokenizer import load_tokenizer
from fp8rl_jax.training.checks import make_sampling
from fp8rl_jax.training.prompts import PromptEncoder
from fp8rl_jax.training.session import Session
from fp8rl_jax.training.setup import _fitting

SIZES = dict.fromkeys(("hidden_size", "intermediate_size", "head_dim"), 32)
SIZES |= dict.fromkeys(("num_layers", "num_heads", "num_kv_heads"), 1)


@pytest.fixture
def directory(tmp_path):
    ByteTokenizer().save(tmp_path)
    return tmp_path


def policy_ending_with(*ends: int):
    policy, _ = fp8rl.byte_policy(**SIZES)
    policy.config = replace(policy.config, eos_token_ids=ends)
    return policy


@pytest.mark.parametrize(
    ("tokenizer_s", "model_s", "given", "expected"),
    [
        ("<|eos|>", (), (), (258,)),
        (None, (258,), (), (258,)),
        (None, (), (10,), (10,)),
        ("<|eos|>", (257, 258), (10, 257), (258, 257, 10)),
        (None, (257, 258), (10,), (257, 258, 10)),
        (None, (), (), None),
    ],
)
def test_completions_and_answers_end_with_one_set_of_tokens(
    directory, tokenizer_s, model_s, given, expected
):
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": tokenizer_s}))
    tokenizer = load_tokenizer(directory)
    config = RunConfig()
    config = replace(config, rollout=replace(config.rollout, stop_token_ids=given))
    policy = policy_ending_with(*model_s)
    if expected is None:
        with pytest.raises(UserError, match=r"rollout\.stop_token_ids: the model names no"):
            make_sampling(config, policy, tokenizer)
        return
    assert make_sampling(config, policy, tokenizer).stop_token_ids == expected
    session = Session(policy, tokenizer, stop_token_ids=given, max_new_tokens=8)
    assert session.sampling.stop_token_ids == expected
    assert session.encoder.target(Example(0, "p", "4", "4", {})) == [ord("4"), expected[0]]


def test_an_answer_without_an_end_token_is_one_line(directory):
    (directory / "tokenizer_config.json").unlink()
    tokenizer = load_tokenizer(directory)
    # stop strings end completions, and no answer to learn from
    session = Session(policy_ending_with(), tokenizer, stop_strings=["."], max_new_tokens=8)
    with pytest.raises(UserError, match=r"^rollout\.stop_token_ids: neither the tokenizer nor"):
        session.supervise(["a"], ["b"])


@pytest.mark.parametrize("stop", [-1, 264])
def test_a_stop_token_that_the_model_lacks_is_one_line(stop):
    with pytest.raises(UserError, match=rf"stop_token_ids: {stop} is outside of .* 264"):
        Session(policy_ending_with(258), ByteTokenizer(), stop_token_ids=(stop,))


def test_a_tokenizer_with_more_tokens_than_the_model_is_one_line(directory):
    data = json.loads((directory / "tokenizer.json").read_text())
    data["model"]["vocab"]["ab"] = 264
    (directory / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(UserError, match="ids up to 264, and the model's vocab_size is 264"):
        Session(policy_ending_with(258), load_tokenizer(directory))


REFUSES = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{{ messages[0].content }}"
)


def encoded(directory, rows, width=8):
    (directory / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = TaskConfig(kind="jsonl", name=f"{directory}/rows.jsonl", eval_size=0)
    encoder = PromptEncoder(load_tokenizer(directory), "", width)
    return _fitting(load_splits(task)[0], encoder, "training")


def test_a_prompt_that_the_template_refuses_is_named_by_its_row(directory):
    (directory / "chat_template.jinja").write_text(REFUSES)
    system = [{"role": "system", "content": "s"}, {"role": "user", "content": "b"}]
    rows = [{"prompt": f"a{i}", "answer": 1} for i in range(5)]
    with pytest.raises(UserError, match=r"rows\.jsonl:4: .*chat_template\.jinja: .*no system role"):
        encoded(directory, [*rows[:3], {"messages": system, "answer": 2}, *rows[3:]])
    session = Session(policy_ending_with(258), load_tokenizer(directory), max_new_tokens=8)
    with pytest.raises(UserError, match=r"^prompts: prompt 1: .*no system role"):
        session.encode(["a", system])


def test_a_prompt_of_which_the_template_leaves_nothing_is_named_by_its_row(directory):
    (directory / "chat_template.jinja").write_text("{{ messages[0].content | trim('b') }}")
    rows = [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}]
    with pytest.raises(UserError, match=r"rows\.jsonl:2: the prompt gives no tokens"):
        encoded(directory, rows)


def test_a_system_prompt_that_nothing_writes_is_told(directory, caplog):
    settings = {"task.system_prompt": "be good", "max_new_tokens": 8}
    Session(policy_ending_with(258), load_tokenizer(directory), **settings)
    assert "task.system_prompt: has no effect" in caplog.text
    (directory / "chat_template.jinja").write_text(REFUSES)
    caplog.clear()
    Session(policy_ending_with(258), load_tokenizer(directory), **settings)
    assert "task.system_prompt" not in caplog.text


def test_prompts_that_are_left_out_are_named_by_their_rows(directory, caplog):
    rows = [{"prompt": "a" * length, "answer": 1} for length in (3, 9, 4, 12)]
    data, dropped = encoded(directory, rows)
    assert (len(data), dropped) == (2, 2)
    (record,) = caplog.records
    said = record.getMessage()
    assert "2 of 4 training prompts have more than rollout.max_prompt_tokens = 8" in said
    assert "rows.jsonl:2 (10 tokens)" in said and "rows.jsonl:4 (13 tokens)" in said
