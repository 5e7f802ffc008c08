"""Damaged tokenizers and chat templates: read, or named in one UserError; whatever the library
below raises."""

from __future__ import annotations

import copy
import json
import random

import pytest
from tiny_models import tokenizer_of

from fp8rl_jax.errors import UserError
from fp8rl_jax.tokenizers.byte_tokenizer import ByteTokenizer
from fp8rl_jax.tokenizers.chat_template import ChatTemplate
from fp8rl_jax.tokenizers.tokenizer import load_tokenizer

VALUES = [
    None,
    True,
    -1,
    2**70,
    1.5,
    float("nan"),
    "",
    "x",
    "\ud800",
    [],
    [1],
    {},
    {"type": "BPE"},
    "a" * 1000,
]
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
def directory(tmp_path):
    ByteTokenizer().save(tmp_path)
    return tmp_path


def places(tree, path=()):
    yield path
    items = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for key, value in list(items)[:40]:
        yield from places(value, (*path, key))


def changed(tree, path, value, delete: bool):
    if not path:
        return value
    tree = copy.deepcopy(tree)
    node = tree
    for key in path[:-1]:
        node = node[key]
    if delete:
        del node[path[-1]]
    else:
        node[path[-1]] = value
    return tree


def use(directory) -> None:
    """Reads the tokenizer and does everything with it; a UserError names the directory's files, or
    the text."""
    try:
        tokenizer = tokenizer_of(directory, 264)
        assert tokenizer.decode(tokenizer.encode("héllo <|eos|> ab")) is not None
        tokenizer.decode([0, 258, 263, 5000])
        tokenizer.encode_chat(USER)
    except UserError as error:
        assert str(directory) in str(error)


TOKEN = {"content": "<|eos|>", "lstrip": False, "special": True}
FILES = {
    "tokenizer.json": {},
    "tokenizer_config.json": {
        "chat_template": "{{ messages[0].content }}",
        "added_tokens_decoder": {"258": TOKEN},
        "extra_special_tokens": ["<|eos|>", TOKEN],
        "split_special_tokens": False,
    },
    "special_tokens_map.json": {"eos_token": TOKEN, "additional_special_tokens": [TOKEN]},
    "added_tokens.json": {"<|eos|>": 258, "<|new|>": 259},
    "config.json": {"model_type": "qwen3", "tokenizer_class": "Qwen2Tokenizer"},
}


@pytest.mark.parametrize("name", FILES)
def test_a_tokenizer_file_with_one_damaged_value_is_used_or_refused(directory, name):
    file = directory / name
    sound = (json.loads(file.read_text()) if file.exists() else {}) | FILES[name]
    everywhere, draw = list(places(sound)), random.Random(0)
    for _ in range(150):
        damaged = changed(
            sound, draw.choice(everywhere), draw.choice(VALUES), delete=draw.random() < 0.1
        )
        (directory / name).write_text(json.dumps(damaged))
        use(directory)


def test_a_token_around_the_text_that_is_not_there_is_refused_at_once(directory):
    sound = json.loads((directory / "tokenizer.json").read_text())
    sound["post_processor"]["special_tokens"] = {}
    (directory / "tokenizer.json").write_text(json.dumps(sound))
    with pytest.raises(UserError, match="tokenizer.json: not a tokenizer"):
        load_tokenizer(directory)


def test_a_text_that_the_tokenizer_fails_on_is_named(directory):
    words = {
        "version": "1.0",
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"},
        "added_tokens": [],
    }
    (directory / "tokenizer.json").write_text(json.dumps(words))
    (directory / "tokenizer_config.json").unlink()
    tokenizer = tokenizer_of(directory)
    assert tokenizer.encode("a") == [0]
    with pytest.raises(UserError, match="tokenizer.json: the tokenizer fails on 'b'"):
        tokenizer.encode("b")


@pytest.mark.parametrize(
    "config",
    [
        {"bos_token": "\ud800"},
        {"bos_token": {"content": 5}},
        {"chat_template": [{"name": [], "template": "x"}]},
        {"chat_template": [{"name": "default", "template": 1}]},
    ],
)
def test_damaged_entries_of_tokenizer_config_are_named(directory, config):
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"tokenizer_config.json: {next(iter(config))}"):
        assert tokenizer_of(directory).has_chat_template


@pytest.mark.parametrize(
    "text",
    [
        "{{ 1/0 }}",
        "{% break %}",
        "{{ cycler() }}",
        "{{ '' | truncate(-5) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}",
        "{{ messages.append(1) }}",
        "{{ messages | tojson(indent=messages) }}",
        "{% include 'a' %}",
        "{{ raise_exception() }}",
        "{{ '%c' % 99999999999 }}",
        "(" * 10 + "{{",
    ],
)
def test_whatever_a_template_raises_is_its_own_fault(tmp_path, text):
    with pytest.raises(UserError, match=r"f\.jinja: the chat template"):
        ChatTemplate(text, tmp_path / "f.jinja", {}).render(USER, True)
