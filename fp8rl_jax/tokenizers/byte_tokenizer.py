"""A byte-level tokenizer without files, for the built-in policy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from fp8rl_jax.errors import UserError

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = sorted(set(range(256)) - set(_PRINTABLE))
BYTE_TO_STAND_IN = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(0x100 + i) for i, byte in enumerate(_OTHERS)
}
"""GPT-2's alphabet: the printable character that stands for each byte in a byte-level
vocabulary."""

_BOS = 257


class ByteTokenizer:
    """UTF-8 bytes as ids 0-255, then <|pad|> 256, <|bos|> 257 and <|eos|> 258.

    It has no file and no chat template. The text of a special token is just bytes: no input can
    produce one.
    """

    pad_token_id: int | None = 256
    bos_token_id: int | None = _BOS
    eos_token_ids: tuple[int, ...] = (258,)
    vocab_size: int = 259
    has_chat_template: bool = False

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the bytes of `text`, after a bos if `add_special_tokens`."""
        return [_BOS] * add_special_tokens + list(checked(text).encode("utf-8"))

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        names = {} if skip_special else {256: b"<|pad|>", 257: b"<|bos|>", 258: b"<|eos|>"}
        pieces = (bytes([token]) if token < 256 else names.get(int(token), b"") for token in ids)
        return b"".join(pieces).decode("utf-8", errors="replace")

    def apply_chat_template(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """Raise UserError, since bytes have no chat template."""
        raise UserError("the byte-level tokenizer has no chat template; give plain prompts")

    def encode_chat(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Raise UserError, since bytes have no chat template."""
        return self.encode(
            self.apply_chat_template(messages, add_generation_prompt), add_special_tokens=False
        )

    def token_bytes(self) -> list[bytes]:
        return [bytes([byte]) for byte in range(256)] + [b""] * 3

    def save(self, directory: str | Path) -> None:
        """Write a tokenizer.json that gives the same ids in `HFTokenizer` and in transformers.

        There the text of a special token does stand for it.

        Raises:
            UserError: the directory cannot be written.
        """
        names = ["<|pad|>", "<|bos|>", "<|eos|>"]
        # Byte-level BPE without merges: a printable stand-in for each byte.
        backend = tokenizers.Tokenizer(
            models.BPE({stand_in: byte for byte, stand_in in BYTE_TO_STAND_IN.items()}, [])
        )
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(
            [tokenizers.AddedToken(name, normalized=False) for name in names]
        )
        backend.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A",
            pair="<|bos|> $A $B",
            special_tokens=[("<|bos|>", self.bos_token_id)],
        )
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
        }
        config |= {f"{name[2:-2]}_token": name for name in names}
        try:
            backend.save(str(Path(directory) / "tokenizer.json"))
            (Path(directory) / "tokenizer_config.json").write_text(
                json.dumps(config, indent=2) + "\n", encoding="utf-8"
            )
        except Exception as error:  # the library raises bare Exception for a full disk
            raise UserError(f"{directory}: the tokenizer cannot be written ({error})") from None


def checked(text: str) -> str:
    """Return `text`, where it can be encoded.

    Raises:
        UserError: a lone surrogate, and where it stands.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"the text holds a lone surrogate, \\u{ord(text[error.start]):x}, at {error.start}"
        ) from None
    return text
