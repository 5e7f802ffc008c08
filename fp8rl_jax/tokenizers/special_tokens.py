"""The special tokens of a Hugging Face directory: which text is the bos, eos, padding or unknown
token, what other tokens a chat template may name, and those that tokenizer.json lacks.

They are read as transformers 5 reads them beside a tokenizer.json:

- tokenizer_config.json names them, and lists tokens by id in added_tokens_decoder;
- where it has no such list, special_tokens_map.json goes before it, and added_tokens.json lists
  tokens;
- a token that is named nowhere is that of the tokenizer's class, and the padding token also that of
  the padding in tokenizer.json.

A null names no token, and nothing else is asked.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from fp8rl_jax.errors import UserError
from fp8rl_jax.json_fields import read_json
from fp8rl_jax.tokenizers.byte_tokenizer import checked

_log = logging.getLogger("fp8rl")
CONFIG_FILE = "tokenizer_config.json"
_MAP_FILE, _ADDED_FILE = "special_tokens_map.json", "added_tokens.json"
_ROLES = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
"""In the order in which transformers adds them, where the last of two forms of a token holds."""
_USED = ("bos_token", "eos_token", "pad_token")
_EXTRA, _FORMER_EXTRA = "extra_special_tokens", "additional_special_tokens"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")

_END_OF_TEXT = "<|endoftext|>"
_OF_CLASS = {
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "Qwen2Tokenizer": dict.fromkeys(("eos_token", "pad_token", "unk_token"), _END_OF_TEXT),
    "GPT2Tokenizer": dict.fromkeys(("bos_token", "eos_token", "unk_token"), _END_OF_TEXT),
    "GemmaTokenizer": {
        f"{role}_token": f"<{role}>" for role in ("bos", "eos", "pad", "unk", "mask")
    },
}
_CLASS_OF_MODEL = {
    "qwen3": "Qwen2Tokenizer",
    "qwen3_moe": "Qwen2Tokenizer",
    "gemma3_text": "GemmaTokenizer",
}
_WHATEVER_CLASS_IS_NAMED = {"qwen2": "Qwen2Tokenizer", "mistral": "PreTrainedTokenizerFast"}


def read_special_tokens(
    directory: Path, config: dict[str, Any], backend: Tokenizer
) -> dict[str, str]:
    """Read the special tokens, and add to `backend` the tokens that it lacks.

    Args:
        directory: where the files lie.
        config: what tokenizer_config.json holds.
        backend: the tokenizer of tokenizer.json.

    Returns:
        The text of each token that there is, by its name: "bos_token", "eos_token", "pad_token",
        "unk_token", and whatever else the files name.

    Raises:
        UserError: a file or a value that is malformed; a bos, eos or padding token that is not in
            the vocabulary; a token that has another id than its file says.
    """
    source = directory / CONFIG_FILE
    named, extra = _named(source, config), _extra(source, config)
    over = _read(directory / _MAP_FILE)
    mapped = _named(directory / _MAP_FILE, over, special=True)
    decoder = "added_tokens_decoder" in config
    _tell_of_two(directory, named, mapped, decoder)
    if decoder:
        listed = _decoder(source, config["added_tokens_decoder"])
    else:
        named |= mapped
        more = _extra(directory / _MAP_FILE, over)
        # under the former name they come too late to be special in added_tokens.json
        early = (*named.values(), *extra, *(more if over.get(_EXTRA) else ()))
        extra += more
        source = directory / _ADDED_FILE
        listed = _encoder(source, _read(source), {token.content for token in early if token})
        listed |= backend.get_added_tokens_decoder()
    known = {token.content for token in (*listed.values(), *extra)}
    for name in _USED:
        token = named.get(name)
        if token and token.content not in known and backend.token_to_id(token.content) is None:
            raise UserError(
                f"{directory}: {name} {token.content!r} is not in the vocabulary of "
                "tokenizer.json; name one that is there, or null for none"
            )
    for name, text in _absent(directory, config, backend).items():
        if text in known or backend.token_to_id(text) is not None:
            named.setdefault(name, AddedToken(text, special=True))
    tokens = {
        name: token for name in {**dict.fromkeys(_ROLES), **named} if (token := named.get(name))
    }
    _add(backend, listed, [*tokens.values()], extra)
    for index, token in listed.items():
        if (given := backend.token_to_id(token.content)) != index:
            raise UserError(
                f"{source}: token {token.content!r} has id {index}, and beside tokenizer.json it "
                f"gets {given}; make the two agree"
            )
    return {name: token.content for name, token in tokens.items()}


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _tell_of_two(
    directory: Path,
    named: dict[str, AddedToken | None],
    mapped: dict[str, AddedToken | None],
    decoder: bool,
) -> None:
    """Warn where two files name different tokens: which is used nobody may expect."""
    for name in _USED:
        texts = [token and token.content for token in (named.get(name), mapped.get(name))]
        if name in named and name in mapped and texts[0] != texts[1]:
            _log.warning(
                "%s: %s is %r in %s and %r in %s; the %s is used, as in transformers",
                directory,
                name,
                texts[0],
                CONFIG_FILE,
                texts[1],
                _MAP_FILE,
                "first" if decoder else "second",
            )


def _add(
    backend: Tokenizer,
    listed: dict[int, AddedToken],
    named: list[AddedToken],
    extra: list[AddedToken],
) -> None:
    """In the order in which ids are given. What is named is special, whatever the list says."""
    texts = {token.content for token in named}
    present = {token.content for token in backend.get_added_tokens_decoder().values()}
    tokens = [listed[index] for index in sorted(listed)]
    present |= {token.content for token in tokens}
    tokens += [token for token in (*named, *extra) if token.content not in present]
    for token in tokens:
        token.special = token.special or token.content in texts
    backend.add_tokens(tokens)


def _named(
    source: Path, values: dict[str, Any], special: bool = False
) -> dict[str, AddedToken | None]:
    """The tokens that a file names; None for a null."""
    extra = values.get(_EXTRA)
    names = {
        name: value
        for name, value in values.items()
        if name in _ROLES or (name.endswith("_token") and isinstance(value, str | dict))
    }
    names |= extra if isinstance(extra, dict) else {}
    return {name: _token(source, name, value, special) for name, value in names.items()}


def _extra(source: Path, values: dict[str, Any]) -> list[AddedToken]:
    """Special tokens without a name."""
    extra = values.get(_EXTRA)
    key = _EXTRA if extra and not isinstance(extra, dict) else _FORMER_EXTRA
    listed = values.get(key) or []
    if not isinstance(listed, list) or None in listed:
        raise UserError(f"{source}: {key} must be a list of tokens, got {listed!r}")
    tokens = [_token(source, key, value, special=True) for value in listed]
    return [token for token in tokens if token]


def _decoder(source: Path, values: Any) -> dict[int, AddedToken]:
    """Tokens by id, from {"7": {"content": "<a>"}}."""
    key = "added_tokens_decoder"
    if not isinstance(values, dict) or not all(map(str.isdecimal, values)):
        raise UserError(f"{source}: {key} must be an object of tokens by id, got {values!r}")
    tokens = {int(index): _token(source, key, value) for index, value in values.items()}
    if None in tokens.values():
        raise UserError(f"{source}: {key} holds a null; leave it out")
    return {index: token for index, token in tokens.items() if token}


def _encoder(source: Path, values: dict[str, Any], special: set[str]) -> dict[int, AddedToken]:
    """The same from {"<a>": 7}, those in `special` being special."""
    if wrong := [text for text, index in values.items() if type(index) is not int]:
        raise UserError(f"{source}: {wrong[0]!r} must have an id, got {values[wrong[0]]!r}")
    return {
        index: AddedToken(text, special=text in special, normalized=text not in special)
        for text, index in values.items()
    }


def _token(source: Path, key: str, value: Any, special: bool = False) -> AddedToken | None:
    """A token is written as its text, or as an object with its text under "content"."""
    if value is None:
        return None
    text, flags = value, {}
    if isinstance(value, dict):
        text, flags = value.get("content"), {x: value[x] for x in _FLAGS if x in value}
    if not isinstance(text, str) or not all(isinstance(flag, bool) for flag in flags.values()):
        raise UserError(
            f"{source}: {key} must be a string or an object with content, got {value!r}"
        )
    try:
        checked(text)
    except UserError as error:
        raise UserError(f"{source}: {key}: {error}") from None
    if special or not isinstance(value, dict):
        flags["special"] = True
    return AddedToken(text, **flags)


def _absent(directory: Path, config: dict[str, Any], backend: Tokenizer) -> dict[str, str]:
    """The tokens that stand for those that no file names."""
    model = _read(directory / "config.json")
    kind = str(model.get("model_type"))
    name = config.get("tokenizer_class") or model.get("tokenizer_class")
    name = _WHATEVER_CLASS_IS_NAMED.get(kind) or name or _CLASS_OF_MODEL.get(kind, "")
    name = str(name).removesuffix("Fast")
    if name == "LlamaTokenizer" and "ByteLevel" in repr((backend.pre_tokenizer, backend.decoder)):
        name = ""  # Llama 3 names the class of Llama 2, and has other tokens
    padding = {"pad_token": backend.padding["pad_token"]} if backend.padding else {}
    return padding | _OF_CLASS.get(name, {})
