"""The tokenizer inside a GGUF file -> tokenizer.json, tokenizer_config.json and
chat_template.jinja.

A GGUF holds the vocabulary and the merges, but the pre-tokenizer (how text is cut before merging)
only by a name. Each name stands for rules that llama.cpp hard-codes, and a wrong one gives other
tokens without any error, so that a name that isn't known here is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from fp8rl_jax.errors import UserError

_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's token types that are matched before the text is cut


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def _qwen2() -> pre_tokenizers.PreTokenizer:
    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(words), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_PRE_TOKENIZERS = {"smollm": _smollm, "qwen2": _qwen2}
# those whose tokenizer.json normalizes text to NFC first, which llama.cpp leaves out
_COMPOSED = ("qwen2",)


def write_tokenizer(
    directory: Path, source: Path, metadata: dict[str, Any], max_length: int
) -> None:
    """Write the tokenizer files of a GGUF's `tokenizer.*` metadata into an existing directory.

    Args:
        directory: where to write.
        source: the GGUF file, for messages.
        metadata: its metadata as plain values.
        max_length: the model's context, in tokens.

    Raises:
        UserError: another tokenizer model than byte-level BPE ("gpt2"), an unknown pre-tokenizer,
            metadata that is missing or contradicts itself, a full disk.
    """
    try:
        tokenizer, config = _build(metadata), _config(metadata, max_length)
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    try:
        tokenizer.save(str(directory / "tokenizer.json"))
        if "chat_template" in config:
            template = directory / "chat_template.jinja"
            template.write_text(config["chat_template"], encoding="utf-8")
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
    except Exception as error:  # the library raises bare Exception for a full disk
        raise UserError(f"{directory}: the tokenizer cannot be written ({error})") from None


def _build(metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    tokens = _list(metadata, "tokens", str)
    if (model := _get(metadata, "model", str)) != "gpt2":
        raise UserError(
            f"tokenizer.ggml.model {model!r} is not supported; only 'gpt2' (byte-level BPE) is"
        )
    if (pre := str(metadata.get("tokenizer.ggml.pre", "default"))) not in _PRE_TOKENIZERS:
        raise UserError(
            f"tokenizer.ggml.pre {pre!r} is not supported; supported: "
            f"{', '.join(_PRE_TOKENIZERS)}. "
            f"Use the model's Hugging Face directory instead"
        )
    if metadata.get("tokenizer.ggml.add_eos_token", False):
        raise UserError("tokenizer.ggml.add_eos_token is not supported")
    types = _list(metadata, "token_type", int)
    merges = [tuple(merge.split(" ")) for merge in _list(metadata, "merges", str)]
    if (
        len(types) != len(tokens)
        or len(set(tokens)) != len(tokens)
        or not all(len(merge) == 2 for merge in merges)
    ):
        raise UserError("tokenizer.ggml.tokens, token_type and merges do not fit together")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    for merge in merges:
        for part in (*merge, "".join(merge)):
            if part not in vocabulary:
                raise UserError(
                    f"merge {' '.join(merge)!r} needs token {part!r}, which tokens lacks"
                )
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    if pre in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    added = [
        (token, kind)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(
        [
            tokenizers.AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in added
        ]
    )
    if metadata.get("tokenizer.ggml.add_bos_token", False):
        bos = _token(metadata, "bos")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, vocabulary[bos])]
        )
    return tokenizer


def _config(metadata: dict[str, Any], max_length: int) -> dict[str, Any]:
    """What tokenizer_config.json says."""
    roles = (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
    special = {
        f"{role}_token": _token(metadata, key)
        for role, key in roles
        if f"tokenizer.ggml.{key}_token_id" in metadata
    }
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise UserError(f"tokenizer.chat_template must be a string, got {template!r}")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        **({} if template is None else {"chat_template": template}),
    }


def _get(metadata: dict[str, Any], key: str, kind: type) -> Any:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if type(value) is not kind:
        raise UserError(f"the metadata lacks tokenizer.ggml.{key}, or it is not a {kind.__name__}")
    return value


def _list(metadata: dict[str, Any], key: str, kind: type) -> list[Any]:
    values = _get(metadata, key, list)
    if not all(type(value) is kind for value in values):
        raise UserError(f"tokenizer.ggml.{key} must be a list of {kind.__name__}")
    return values


def _token(metadata: dict[str, Any], key: str) -> str:
    """The text of a special token, which the metadata gives by its id."""
    tokens = _list(metadata, "tokens", str)
    index = _get(metadata, f"{key}_token_id", int)
    if not 0 <= index < len(tokens):
        raise UserError(
            f"tokenizer.ggml.{key}_token_id {index} is outside the {len(tokens)} tokens"
        )
    return tokens[index]
