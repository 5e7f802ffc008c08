"""Text to token ids and back: what the library knows of a tokenizer, and Hugging Face's with its
chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from fp8rl_jax.errors import UserError
from fp8rl_jax.json_fields import read_json
from fp8rl_jax.tokenizers.byte_tokenizer import BYTE_TO_STAND_IN, checked
from fp8rl_jax.tokenizers.chat_template import ChatTemplate

Message = dict[str, Any]


class Tokenizer(Protocol):
    """What the rest of the library knows of a tokenizer.

    `eos_token_ids` are the tokenizer's own end tokens; generation stops at these and at
    `PolicyConfig.eos_token_ids`. `pad_token_id` is the padding token, or an end token where the
    tokenizer names none (padding is always masked). `vocab_size` is one more than the largest id.
    """

    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    has_chat_template: bool

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        `add_special_tokens` adds what the model saw around a text in training (mostly a bos or
        nothing). Pass False for a continuation, and for text that a chat template has made.
        """
        ...

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Return the text of token ids; bytes that are no UTF-8 become U+FFFD.

        `skip_special` leaves out bos, eos, padding and the like.
        """
        ...

    def apply_chat_template(
        self, messages: Sequence[Message], add_generation_prompt: bool = True
    ) -> str:
        """Write a conversation as text.

        It ends where the assistant's answer begins if `add_generation_prompt`.
        """
        ...

    def encode_chat(
        self, messages: Sequence[Message], add_generation_prompt: bool = True
    ) -> list[int]:
        """Return `encode(apply_chat_template(messages), add_special_tokens=False)`."""
        ...

    def token_bytes(self) -> list[bytes]:
        """Return the bytes of every id below vocab_size, b"" for special tokens.

        Joined, they are the text of the tokens.
        """
        ...


class HFTokenizer:
    """A `tokenizer.json`, with the special tokens and the chat template that lie beside it."""

    def __init__(self, directory: str | Path):
        """Read tokenizer.json, tokenizer_config.json and chat_template.jinja.

        Raises:
            UserError: a file that is missing or malformed, a special token that is not in the
                vocabulary.
        """
        directory = Path(directory)
        path = directory / "tokenizer.json"
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None
        except UnicodeDecodeError:
            raise UserError(f"{path}: not UTF-8") from None
        try:
            self._backend = tokenizers.Tokenizer.from_str(text)
            self._backend.encode("")  # what surrounds a text may name a token that is not there
        except BaseException as error:
            if not _is_fault(error):
                raise
            raise UserError(
                f"{path}: not a tokenizer that the tokenizers library reads ({error})"
            ) from None
        self._path, self.directory = path, directory
        config_path = directory / "tokenizer_config.json"
        config = read_json(config_path) if config_path.is_file() else {}
        self._special = {
            role: content
            for role in ("bos_token", "eos_token", "pad_token", "unk_token")
            if (content := _content(config_path, role, config.get(role))) is not None
        }
        self._template = ChatTemplate.from_directory(directory, config, self._special)
        eos = self._id("eos_token")
        self.vocab_size = 1 + max(
            self._backend.get_vocab(with_added_tokens=True).values(), default=-1
        )
        self.bos_token_id = self._id("bos_token")
        self.eos_token_ids: tuple[int, ...] = () if eos is None else (eos,)
        pad = self._id("pad_token")
        self.pad_token_id = eos if pad is None else pad
        self.has_chat_template = self._template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        try:
            return self._backend.encode(checked(text), add_special_tokens=add_special_tokens).ids
        except BaseException as error:
            if isinstance(error, UserError) or not _is_fault(error):
                raise
            raise UserError(
                f"{self._path}: the tokenizer fails on {text[:40]!r} ({error})"
            ) from None

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return self._backend.decode([int(token) for token in ids], skip_special_tokens=skip_special)

    def apply_chat_template(
        self, messages: Sequence[Message], add_generation_prompt: bool = True
    ) -> str:
        """See `Tokenizer`.

        Raises:
            UserError: no chat template, malformed messages, or a template that refuses them
                (`raise_exception`).
        """
        if self._template is None:
            raise UserError(
                f"{self._path.parent}: the tokenizer has no chat template; give plain prompts"
            )
        return self._template.render(messages, add_generation_prompt)

    def encode_chat(
        self, messages: Sequence[Message], add_generation_prompt: bool = True
    ) -> list[int]:
        return self.encode(
            self.apply_chat_template(messages, add_generation_prompt), add_special_tokens=False
        )

    def token_bytes(self) -> list[bytes]:
        """See `Tokenizer`.

        Raises:
            UserError: a decoder that is neither byte-level nor SentencePiece's.
        """
        return token_bytes(self._backend, self._path)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Check that every token has a row in an embedding of `vocab_size` rows.

        Raises:
            UserError: naming the largest token that has none.
        """
        if self.vocab_size > vocab_size:
            token = self._backend.id_to_token(self.vocab_size - 1)
            raise UserError(
                f"{self._path}: token {token!r} has id {self.vocab_size - 1}, but the model's "
                "vocab_size is "
                f"{vocab_size}; the tokenizer belongs to another model"
            )

    def _id(self, role: str) -> int | None:
        content = self._special.get(role)
        if content is None:
            return None
        if (token := self._backend.token_to_id(content)) is None:
            raise UserError(
                f"{self._path}: {role} {content!r} of tokenizer_config.json is not in the "
                "vocabulary"
            )
        return token


def load_tokenizer(directory: str | Path, vocab_size: int | None = None) -> HFTokenizer | None:
    """Load the tokenizer of a Hugging Face directory; None where the directory holds none.

    Args:
        directory: holds tokenizer.json.
        vocab_size: rows of the model's embedding; every token id must be below it.

    Raises:
        UserError: a malformed tokenizer, a tokenizer in a format other than tokenizer.json, a token
            outside the model's vocabulary.
    """
    directory = Path(directory)
    if not (directory / "tokenizer.json").exists():
        for other in ("tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json"):
            if (directory / other).exists():
                raise UserError(
                    f"{directory / other}: only tokenizer.json is read; convert the tokenizer to it"
                )
        return None
    tokenizer = HFTokenizer(directory)
    if vocab_size is not None:
        tokenizer.check_vocabulary(vocab_size)
    return tokenizer


def _content(path: Path, role: str, value: Any) -> str | None:
    """A special token is written as its text, or as an object with its text under "content"."""
    content = value.get("content") if isinstance(value, dict) else value
    if content is not None and not isinstance(content, str):
        raise UserError(f"{path}: {role} must be a string or an object with content, got {value!r}")
    try:
        return content if content is None else checked(content)
    except UserError as error:
        raise UserError(f"{path}: {role}: {error}") from None


def _is_fault(error: BaseException) -> bool:
    """Whether the tokenizers library raised it: a bare Exception, or where its Rust panics, a
    BaseException without a module."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


_STAND_IN_TO_BYTE = {character: byte for byte, character in BYTE_TO_STAND_IN.items()}


def token_bytes(backend: tokenizers.Tokenizer, path: Path) -> list[bytes]:
    """Return the bytes of every id from 0 to the largest, as they stand inside a text.

    A decoder may also take a space off the beginning of the whole text; that is not a token's.

    Args:
        backend: the tokenizer.
        path: where it came from, for messages.

    Returns:
        b"" for special tokens, which text leaves out, and for ids without a token.

    Raises:
        UserError: a decoder of another kind, whose bytes are not known.
    """
    decoder = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    steps = _steps(decoder)
    if unknown := [step["type"] for step in steps if not _is_known(step)] or (
        [] if steps else ["none"]
    ):
        raise UserError(
            f"{path}: the bytes of tokens are not known for a decoder of type {unknown[0]}; "
            "stop strings, bad words and streaming need byte-level BPE or SentencePiece"
        )
    special = {
        index for index, token in backend.get_added_tokens_decoder().items() if token.special
    }
    vocabulary = backend.get_vocab(with_added_tokens=True)
    pieces = [b""] * (1 + max(vocabulary.values(), default=-1))
    for text, index in vocabulary.items():
        if index not in special:
            pieces[index] = _bytes_of(text, steps)
    return pieces


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _is_known(step: dict[str, Any]) -> bool:
    if step["type"] == "Replace":
        return "String" in step["pattern"]
    if step["type"] == "Strip":
        return step["stop"] == 0
    return step["type"] in ("ByteLevel", "Metaspace", "ByteFallback", "Fuse")


def _bytes_of(text: str, steps: list[dict[str, Any]]) -> bytes:
    for step in steps:
        if step["type"] == "Replace":
            text = text.replace(step["pattern"]["String"], step["content"])
        elif step["type"] == "Metaspace":
            text = text.replace(step["replacement"], " ")
        elif step["type"] == "ByteFallback" and re.fullmatch("<0x[0-9A-Fa-f]{2}>", text):
            return bytes([int(text[3:5], 16)])
        elif step["type"] == "ByteLevel" and all(
            character in _STAND_IN_TO_BYTE for character in text
        ):
            return bytes(_STAND_IN_TO_BYTE[character] for character in text)
    return text.encode("utf-8")
