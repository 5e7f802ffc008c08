"""The bytes that each token stands for, read off a tokenizer's decoder.

A token is often half a word and sometimes half a character, so text can't be looked at token by
token; bytes can. The two decoders in use are byte-level BPE (GPT-2, Llama 3, Qwen), which writes
each byte as a printable stand-in, and SentencePiece's (Llama 2, Mistral, Gemma), which writes a
space as U+2581 and a byte without a token of its own as <0xNN>.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import tokenizers

from fp8rl_jax.errors import UserError

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = sorted(set(range(256)) - set(_PRINTABLE))
BYTE_TO_STAND_IN = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(0x100 + i) for i, byte in enumerate(_OTHERS)
}
"""GPT-2's alphabet: the printable character that stands for each byte in a byte-level
vocabulary."""
_STAND_IN_TO_BYTE = {character: byte for byte, character in BYTE_TO_STAND_IN.items()}


def token_bytes(backend: tokenizers.Tokenizer, path: Path) -> list[bytes]:
    """The bytes of every id from 0 to the largest, as they stand inside a text.

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
