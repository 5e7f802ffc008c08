"""The bytes of tokens against the tokenizers library's own decoding."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from fp8rl_jax.errors import UserError
from fp8rl_jax.tokenizers.byte_tokenizer import BYTE_TO_STAND_IN, ByteTokenizer
from fp8rl_jax.tokenizers.tokenizer import HFTokenizer


def byte_level() -> tokenizers.Tokenizer:
    """Byte-level BPE as in GPT-2, with a few merges, a special token, and an added one with a space
    in it."""
    merges = [("Ġ", "a"), ("a", "b"), ("Ã", "©"), ("Ġa", "b")]
    vocabulary = {
        token: i for i, token in enumerate([*BYTE_TO_STAND_IN.values(), *map("".join, merges)])
    }
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    backend.add_tokens(
        [
            tokenizers.AddedToken("<a tool>", special=False),
            tokenizers.AddedToken("<b>", special=False),
        ]
    )
    return backend


def sentencepiece(strip: bool = True) -> tokenizers.Tokenizer:
    """Llama 2's and Gemma's form: U+2581 for a space, <0xNN> for bytes, and Llama's first space
    taken off."""
    words = [
        "<unk>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁a",
        "a",
        "b",
        "▁ab",
        "é",
        "▁▁",
    ]
    vocabulary = {word: i for i, word in enumerate(words)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>")
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens(["</s>", "<unk>"])
    return backend


def load(backend, directory) -> HFTokenizer:
    backend.save(str(directory / "tokenizer.json"))
    return HFTokenizer(directory)


@pytest.fixture(scope="module", params=["byte_level", "llama", "gemma", "bytes"])
def tokenizer(request, tmp_path_factory):
    if request.param == "bytes":
        return ByteTokenizer()
    backend = (
        byte_level()
        if request.param == "byte_level"
        else sentencepiece(strip=request.param == "llama")
    )
    return load(backend, tmp_path_factory.mktemp(request.param))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2**16), max_size=12))
def test_joined_bytes_are_the_decoded_text(tokenizer, numbers):
    pieces = tokenizer.token_bytes()
    assert len(pieces) == tokenizer.vocab_size
    ids = [number % tokenizer.vocab_size for number in numbers]
    joined = b"".join(pieces[i] for i in ids)
    try:
        text = joined.decode("utf-8")
    except UnicodeDecodeError:
        return  # how many U+FFFD stand for broken bytes is each decoder's own affair
    assert tokenizer.decode(ids) in (text, text.removeprefix(" "))


def test_special_tokens_have_none(tmp_path):
    tokenizer = load(byte_level(), tmp_path)
    pieces = tokenizer.token_bytes()
    special, *added = tokenizer.encode("<|end|><a tool><b>")
    assert pieces[special] == b"" and [pieces[i] for i in added] == [b"<a tool>", b"<b>"]


def test_other_decoders_are_refused(tmp_path):
    backend = byte_level()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(
        UserError,
        match="tokenizer.json: the bytes of tokens are not known for a decoder of type WordPiece",
    ):
        load(backend, tmp_path).token_bytes()
