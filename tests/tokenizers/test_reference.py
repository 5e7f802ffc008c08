"""What transformers reads out of the same folders, and what it renders (reference.json)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tiny_models import tokenizer_of
from tokenizer_folders import (
    CHATS,
    FOLDERS,
    IDS,
    NAMED,
    PLACES,
    REFERENCE,
    RENDERED,
    TEMPLATES,
    TEXTS,
    write,
)

from fp8rl_jax.errors import UserError
from fp8rl_jax.tokenizers.chat_template import ChatTemplate
from fp8rl_jax.tokenizers.tokenizer import HFTokenizer

EXPECTED = json.loads(REFERENCE.read_text(encoding="utf-8"))


def read(tokenizer: HFTokenizer) -> dict[str, Any]:
    pad = tokenizer.pad_token_id if "pad_token" in tokenizer.special_tokens else None
    return {
        "special": tokenizer.special_tokens,
        "ids": [tokenizer.bos_token_id, *(tokenizer.eos_token_ids or [None]), pad],
        "encoded": [tokenizer.encode(text) for text in TEXTS],
        "plain": tokenizer.encode(TEXTS[0], add_special_tokens=False),
        "decoded": [tokenizer.decode(IDS, skip_special=skip) for skip in (True, False)],
    }


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_read_as_transformers_reads_it(name, tmp_path):
    expected = EXPECTED["folders"]["nothing"] | EXPECTED["folders"][name]
    got = read(tokenizer_of(write(FOLDERS[name], tmp_path)))
    # a class of transformers has a pipeline of its own; tokenizer.json's is used here
    compared = ("special", "ids") if name.startswith(("class", "model ")) else expected
    assert {key: got[key] for key in compared} == {key: expected[key] for key in compared}


@pytest.mark.parametrize("name", PLACES)
def test_the_chat_template_is_found_where_transformers_finds_it(name, tmp_path):
    tokenizer = tokenizer_of(write(PLACES[name], tmp_path))
    assert tokenizer.encode("ab") == [12]  # a plain text asks for no template
    if (expected := EXPECTED["places"][name]) is None:
        with pytest.raises(UserError, match="template"):
            tokenizer.apply_chat_template(CHATS["turns"])
    else:
        assert tokenizer.apply_chat_template(CHATS["turns"]) == expected


SPECIAL = {name: text for name, text in NAMED.items() if text is not None}


@pytest.mark.parametrize("name", RENDERED)
def test_a_template_renders_as_in_transformers(name, tmp_path):
    template, chat, prompt = RENDERED[name]

    def rendered() -> str:
        text = TEMPLATES[template]
        return ChatTemplate(text, tmp_path / "f.jinja", SPECIAL).render(CHATS[chat], prompt)

    if (expected := EXPECTED["rendered"][name]) is None:
        with pytest.raises(UserError, match=r"f\.jinja: the chat template|at least one message"):
            rendered()
    else:
        assert rendered() == expected
