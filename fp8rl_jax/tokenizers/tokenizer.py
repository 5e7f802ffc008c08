"""Text to token ids and back: what the library knows of a tokenizer, and Hugging Face's with its
chat template."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import tokenizers
from tokenizers import models, pre_tokenizers

from fp8rl_jax.errors import UserError
from fp8rl_jax.json_fields import Fields, read_json
from fp8rl_jax.tokenizers.byte_tokenizer import BYTE_TO_STAND_IN, checked
from fp8rl_jax.tokenizers.chat_template import ChatTemplate
from fp8rl_jax.tokenizers.special_tokens import CONFIG_FILE, read_special_tokens

Message = dict[str, Any]
_log = logging.getLogger("fp8rl")
_CLEANS_UP_BPE = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
_CLEAN_UP = (
    *((f" {mark}", mark) for mark in ".?!,"),
    (" ' ", "'"),
    *((f" {short}", short) for short in ("n't", "'m", "'s", "'ve", "'re")),
)
"""What clean_up_tokenization_spaces replaces in a text, in this order."""


@runtime_checkable
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

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be written as text."""
        ...

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


def end_tokens(tokenizer: Tokenizer | None, others: Sequence[int] = ()) -> tuple[int, ...]:
    """Give the tokens that end a completion, the first of which ends a supervised answer.

    Args:
        tokenizer: its own come first.
        others: those of config.json and generation_config.json (`PolicyConfig.eos_token_ids`), and
            those that the user gives.
    """
    own = tokenizer.eos_token_ids if tokenizer else ()
    return tuple(dict.fromkeys((*own, *others)))


class HFTokenizer:
    """A `tokenizer.json`, with the special tokens and the chat template that lie beside it.

    Truncation and padding that tokenizer.json may hold are left out, as in transformers: a text is
    encoded as a whole, and alone. `special_tokens` holds the text of each special token by its
    name, such as "bos_token".
    """

    def __init__(self, directory: str | Path, vocab_size: int | None = None):
        """Read tokenizer.json and what lies beside it, all but the chat template.

        Args:
            directory: where the files lie.
            vocab_size: rows of the model's embedding, where they are known.

        Raises:
            UserError: a file that is missing or malformed, a special token that is not in the
                vocabulary, or one outside of the model's.
        """
        directory = Path(directory)
        path = directory / "tokenizer.json"
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None
        except UnicodeDecodeError:
            raise UserError(f"{path}: not UTF-8") from None
        self._path, self.directory = path, directory
        config_path = directory / CONFIG_FILE
        self._config = config = read_json(config_path) if config_path.is_file() else {}
        try:
            self._backend = backend = tokenizers.Tokenizer.from_str(text)
            self.special_tokens = read_special_tokens(directory, config, backend)
            backend.no_truncation()
            backend.no_padding()
            backend.encode("")  # what surrounds a text may name a token that is not there
        except BaseException as error:
            if isinstance(error, UserError) or not _is_fault(error):
                raise
            raise UserError(
                f"{path}: not a tokenizer that the tokenizers library reads ({error})"
            ) from None
        if getattr(backend.model, "dropout", None):
            raise UserError(
                f"{path}: model.dropout = {backend.model.dropout} encodes a text at random; set it "
                "to null"
            )
        fields = Fields(config, f"{config_path}: ")
        backend.encode_special_tokens = fields.boolean("split_special_tokens")
        self._cleans_up = fields.boolean("clean_up_tokenization_spaces") and (
            not isinstance(backend.model, models.BPE) or fields.boolean(_CLEANS_UP_BPE)
        )
        self.vocab_size = self._checked_size(vocab_size)
        self.bos_token_id, eos = self.special_id("bos_token"), self.special_id("eos_token")
        self.eos_token_ids: tuple[int, ...] = () if eos is None else (eos,)
        pad = self.special_id("pad_token")
        # padding is always masked, so that a model may lack it
        self.pad_token_id = eos if pad is None or pad >= self.vocab_size else pad
        self._tell_unused(fields)

    @cached_property
    def _template(self) -> ChatTemplate | None:
        return ChatTemplate.from_directory(self.directory, self._config, self.special_tokens)

    @property
    def has_chat_template(self) -> bool:
        """See `Tokenizer`.

        Raises:
            UserError: whatever `ChatTemplate.from_directory` refuses.
        """
        return self._template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """See `Tokenizer`.

        Raises:
            UserError: a text that the tokenizer fails on, or with a token that the model lacks.
        """
        try:
            ids = self._backend.encode(checked(text), add_special_tokens=add_special_tokens).ids
        except BaseException as error:
            if isinstance(error, UserError) or not _is_fault(error):
                raise
            raise UserError(
                f"{self._path}: the tokenizer fails on {text[:40]!r} ({error})"
            ) from None
        if (largest := max(ids, default=-1)) >= self.vocab_size:
            token = self._backend.id_to_token(largest)
            raise UserError(
                f"{self._path}: the text has the token {token!r}, whose id {largest} is outside of "
                f"the model's vocabulary of {self.vocab_size}"
            )
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        text = self._backend.decode([int(token) for token in ids], skip_special_tokens=skip_special)
        for before, after in _CLEAN_UP if self._cleans_up else ():
            text = text.replace(before, after)
        return text

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
            UserError: a decoder that is neither byte-level nor SentencePiece's, or text that is
                changed after it is joined.
        """
        if self._cleans_up:
            raise UserError(
                f"{self.directory / CONFIG_FILE}: with clean_up_tokenization_spaces the text of "
                "tokens is not their bytes, which stop strings, bad words and streaming need; set "
                "it to false"
            )
        return token_bytes(self._backend, self._path)[: self.vocab_size]

    def _checked_size(self, vocab_size: int | None) -> int:
        """One more than the largest id, of those that the model has.

        Tokens that were added may be outside (Gemma 3's <image_soft_token> is); others may not.
        """
        whole = self._backend.get_vocab(with_added_tokens=True)
        size = 1 + max(whole.values(), default=-1)
        if vocab_size is None or size <= vocab_size:
            return size
        needed = self._backend.get_vocab(with_added_tokens=False)
        needed |= {
            text: whole[text]
            for name, text in self.special_tokens.items()
            if name in ("bos_token", "eos_token")
        }
        token = max(needed, key=lambda text: needed[text], default="")
        if needed.get(token, -1) >= vocab_size:
            raise UserError(
                f"{self._path}: token {token!r} has id {needed[token]}, but the model's "
                f"vocab_size is {vocab_size}; the tokenizer belongs to another model"
            )
        return vocab_size

    def special_id(self, name: str) -> int | None:
        """Return the id of a special token ("bos_token"), None where there is none."""
        text = self.special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)

    def _tell_unused(self, fields: Fields) -> None:
        """Warn of settings that say otherwise than is done: transformers 5 goes by tokenizer.json,
        and cleans nothing up behind BPE."""
        added = self._backend.encode("").ids
        first = added[:1] == [self.bos_token_id]
        does = {
            "add_bos_token": first,
            # one token may be both
            "add_eos_token": any(token in added[first:] for token in self.eos_token_ids),
            "clean_up_tokenization_spaces": self._cleans_up,
        }
        if isinstance(self._backend.pre_tokenizer, pre_tokenizers.ByteLevel):
            does["add_prefix_space"] = self._backend.pre_tokenizer.add_prefix_space
        for key, value in does.items():
            if fields.boolean(key, value) != value:
                _log.warning(
                    "%s%s = %s has no effect beside this tokenizer.json",
                    fields.prefix,
                    key,
                    json.dumps(not value),
                )


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
    return HFTokenizer(directory, vocab_size)


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
    # a file may say of a token that it is special and another that it is not: decoding tells
    kept, whole = (partial(backend.decode, skip_special_tokens=skip) for skip in (True, False))
    special = {
        index for index in backend.get_added_tokens_decoder() if kept([index]) != whole([index])
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
