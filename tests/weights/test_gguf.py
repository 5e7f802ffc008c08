from __future__ import annotations

import dataclasses
import json

import gguf
import ml_dtypes
import numpy as np
import pytest
from tiny_models import LLAMA, QWEN2, QWEN3, gguf_tensors, tokenizer_of, write_gguf
from weights.gguf_bytes import whole_file

from fp8rl_jax.errors import UserError
from fp8rl_jax.models.rope import LinearRopeScaling, YarnRopeScaling
from fp8rl_jax.weights.gguf import convert_gguf
from fp8rl_jax.weights.gguf_io import read_gguf
from fp8rl_jax.weights.hf_directory import load_policy_arrays

Q = gguf.GGMLQuantizationType
QWENS = {  # biases and an untied head; norms over heads that are wider than hidden / heads
    "qwen2": dataclasses.replace(QWEN2, vocab_size=272, hidden_size=64, tie_word_embeddings=False),
    "qwen3": dataclasses.replace(QWEN3, vocab_size=272, tie_word_embeddings=True),
}
LAYER = {
    "q_proj": "attn_q.weight",
    "k_proj": "attn_k.weight",
    "v_proj": "attn_v.weight",
    "o_proj": "attn_output.weight",
    "gate_proj": "ffn_gate.weight",
    "up_proj": "ffn_up.weight",
    "down_proj": "ffn_down.weight",
    "input_layernorm": "attn_norm.weight",
    "post_attention_layernorm": "ffn_norm.weight",
}
QWEN_LAYER = {
    "qwen2": LAYER | {"q_bias": "attn_q.bias", "k_bias": "attn_k.bias", "v_bias": "attn_v.bias"},
    "qwen3": LAYER | {"q_norm": "attn_q_norm.weight", "k_norm": "attn_k_norm.weight"},
}


def test_every_tensor_reaches_its_place(tmp_path):
    tensors = gguf_tensors()
    file = write_gguf(tmp_path / "m.gguf", tensors, end_of_turn=0)
    config, arrays = load_policy_arrays(convert_gguf(file, tmp_path / "out"))
    assert config.architecture == "llama" and config.tie_word_embeddings
    assert (config.rms_norm_eps, config.rope_theta, config.max_position_embeddings) == (
        1e-5,
        100000.0,
        512,
    )
    assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (1, (2, 0), 2)
    for policy, name in LAYER.items() - {("q_proj", "attn_q.weight"), ("k_proj", "attn_k.weight")}:
        for layer in range(LLAMA.num_layers):
            expected = tensors[f"blk.{layer}.{name}"].astype(ml_dtypes.bfloat16)
            assert arrays[f"layers.{policy}.weight"][layer].tobytes() == expected.tobytes()
    assert (
        arrays["embed_tokens.weight"].tobytes()
        == tensors["token_embd.weight"].astype(ml_dtypes.bfloat16).tobytes()
    )
    assert (
        arrays["norm.weight"].tobytes()
        == tensors["output_norm.weight"].astype(ml_dtypes.bfloat16).tobytes()
    )


@pytest.mark.parametrize("name", QWENS)
def test_qwen_s_tensors_reach_their_places_as_they_are(name, tmp_path):
    config = QWENS[name]
    tensors = gguf_tensors(config)
    path = write_gguf(tmp_path / "m.gguf", tensors, config=config, pre="qwen2")
    read, arrays = load_policy_arrays(convert_gguf(path, tmp_path / "out"))
    special = {"bos_token_id": 1, "eos_token_ids": (2,), "pad_token_id": 2}
    assert read == dataclasses.replace(
        config, rope_theta=1e5, rms_norm_eps=1e-5, max_position_embeddings=512, **special
    )
    layers = {path for path in arrays if path.startswith("layers.")}
    assert layers == {f"layers.{policy}.weight" for policy in QWEN_LAYER[name]}
    assert ("lm_head.weight" in arrays) == (name == "qwen2")
    for policy, stored in QWEN_LAYER[name].items():
        for layer in range(config.num_layers):
            expected = tensors[f"blk.{layer}.{stored}"].astype(ml_dtypes.bfloat16)
            assert arrays[f"layers.{policy}.weight"][layer].tobytes() == expected.tobytes()


def test_rotary_rows_return_to_hugging_face_s_order(tmp_path):
    tensors = gguf_tensors()
    _, arrays = load_policy_arrays(
        convert_gguf(write_gguf(tmp_path / "m.gguf", tensors), tmp_path / "out")
    )
    half = LLAMA.head_dim // 2
    for policy, name, heads in (("q_proj", "attn_q", 4), ("k_proj", "attn_k", 2)):
        for head in range(heads):
            for i in range(half):
                rows = tensors[f"blk.1.{name}.weight"][head * 2 * half + 2 * i :][:2].astype(
                    ml_dtypes.bfloat16
                )
                got = arrays[f"layers.{policy}.weight"][1, head * 2 * half :]
                assert np.array_equal(got[i], rows[0]) and np.array_equal(got[i + half], rows[1])


def test_an_output_tensor_unties_the_head(tmp_path):
    tensors = gguf_tensors()
    tensors["output.weight"] = tensors["token_embd.weight"] + 1
    config, arrays = load_policy_arrays(
        convert_gguf(write_gguf(tmp_path / "m.gguf", tensors), tmp_path / "out")
    )
    assert not config.tie_word_embeddings
    head = tensors["output.weight"].astype(ml_dtypes.bfloat16)
    assert arrays["lm_head.weight"].tobytes() == head.tobytes()


def test_tokenizer_and_chat_template(tmp_path):
    directory = convert_gguf(write_gguf(tmp_path / "m.gguf", gguf_tensors()), tmp_path / "out")
    tokenizer = tokenizer_of(directory, LLAMA.vocab_size)
    the, t, five, seven = (tokenizer.encode(text) for text in (" the", " t", "5", "7"))
    assert len(the) == len(t) == 1 and the != t
    # digits stand alone, though "5 7" is a merge
    assert tokenizer.encode(" the57") == the + five + seven
    assert tokenizer.encode("<|im_end|> the") == [2, *the]
    text = "naïve 日本語 🙂\n\t 57"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([1, *the, 2]) == " the"
    assert tokenizer.decode([1, *the, 2], skip_special=False) == "<|im_start|> the<|im_end|>"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "hi"
    assert (directory / "chat_template.jinja").read_text() == "{{ messages[0].content }}"
    config = json.loads((directory / "tokenizer_config.json").read_text())
    assert config["chat_template"] == "{{ messages[0].content }}"
    assert (config["bos_token"], config["eos_token"], config["unk_token"]) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
    )


def test_qwen2_s_pre_tokenizer_gives_transformers_ids(tmp_path):
    """Those of transformers 5.23's Qwen2Tokenizer, same vocabulary and merges; some merges cross
    what GPT-2 cuts."""
    config = QWENS["qwen3"]
    merges = ("Ġ t", "h e", "Ġt he", "5 7", ". Ċ", "! a", "' S", "Ċ Ċ", "s S")
    path = write_gguf(
        tmp_path / "m.gguf", gguf_tensors(config), config=config, pre="qwen2", merges=merges
    )
    tokenizer = tokenizer_of(convert_gguf(path, tmp_path / "out"), config.vocab_size)
    expected = {
        "the the57 5": [86, 260, 261, 23, 25, 223, 23],
        "it'S 's don't": [75, 86, 265, 223, 9, 85, 223, 70, 81, 80, 9, 86],
        "wait.\n\n\nthe! a!a": [89, 67, 75, 86, 263, 266, 86, 260, 3, 223, 67, 264],
        "e\u0301t\u00e9 日本": [130, 105, 86, 130, 105, 223, 165, 248, 101, 165, 253, 108],
        "a  b   \n\n c\t": [67, 223, 223, 68, 223, 223, 223, 266, 223, 69, 200],
        "x.\n.\n\n  the": [90, 263, 263, 201, 223, 261],
        "\u0661\u0662 🙂<|im_end|> the": [152, 97, 152, 98, 223, 175, 256, 250, 227, 2, 261],
    }
    assert {text: tokenizer.encode(text) for text in expected} == expected


@pytest.mark.parametrize(
    ("edit", "options", "message"),
    [
        (lambda t: t.pop("blk.2.attn_k.weight"), {}, "1 tensors are missing: blk.2.attn_k.weight"),
        (lambda t: t.pop("token_embd.weight"), {}, "tensor token_embd.weight is missing"),
        (
            lambda t: t.update({"blk.0.attn_q.bias": np.zeros(64)}),
            {},
            "unexpected: blk.0.attn_q.bias",
        ),
        (lambda t: t.update({"rope_freqs.weight": np.ones(8)}), {}, "rope scaling"),
        (
            lambda t: t.update({"blk.0.attn_v.weight": np.ones((64, 64))}),
            {},
            "blk.0.attn_v.weight has shape [64, 64]",
        ),
        (
            lambda t: t["output_norm.weight"].fill(np.nan),
            {},
            "tensor output_norm.weight holds 64 non-finite",
        ),
        (
            lambda t: t["blk.0.ffn_up.weight"].fill(3.4e38),
            {},
            "m.gguf: tensor blk.0.ffn_up.weight holds 6144 non-finite values",
        ),
        (lambda t: None, {"pre": "llama-bpe"}, "tokenizer.ggml.pre 'llama-bpe' is not supported"),
        (
            lambda t: None,
            {"architecture": "gemma"},
            "general.architecture 'gemma' is not supported",
        ),
    ],
)
def test_what_is_not_read_is_refused_by_name(edit, options, message, tmp_path):
    tensors = gguf_tensors()
    edit(tensors)
    with pytest.raises(UserError) as error:
        convert_gguf(write_gguf(tmp_path / "m.gguf", tensors, **options), tmp_path / "out")
    assert message in str(error.value) and "\n" not in str(error.value)


def with_keys(directory, changes, config=LLAMA):
    """A GGUF with some keys changed, and taken out where they are None."""
    path = write_gguf(
        directory / "m.gguf",
        gguf_tensors(config),
        config=config,
        pre="smollm" if config is LLAMA else "qwen2",
    )
    metadata, tensors = read_gguf(path)
    metadata |= changes
    kept = {key: value for key, value in metadata.items() if value is not None}
    stored = {name: dataclasses.replace(t, data=t.data.copy()) for name, t in tensors.items()}
    path.write_bytes(whole_file(kept, stored))
    return path


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"llama.rope.freq_base": None}, {"rope_theta": 10000.0}),
        (
            {"llama.rope.dimension_count": None, "llama.attention.head_count_kv": 2},
            {"head_dim": 16},
        ),
        ({"llama.attention.head_count_kv": [2, 2, 2], "llama.feed_forward_length": [96] * 3}, {}),
        ({"llama.attention.key_length": 16, "llama.attention.value_length": 16}, {"head_dim": 16}),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, {}),
        ({"llama.rope.scaling.type": "linear"}, {}),
        ({"llama.rope.scaling.factor": 1.0, "llama.rope.scale_linear": 0.0}, {}),
        ({"llama.rope.scaling.factor": 2.5}, {"rope_scaling": LinearRopeScaling(2.5)}),
        ({"llama.rope.scale_linear": 2.0}, {"rope_scaling": LinearRopeScaling(2.0)}),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0},
            {"rope_scaling": YarnRopeScaling(4.0, 512)},
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 128,
                "llama.rope.scaling.yarn_beta_fast": 16.0,
            },
            {"rope_scaling": YarnRopeScaling(4.0, 128, beta_fast=16.0)},
        ),
        ({"llama.vocab_size": 272}, {"vocab_size": 272}),
        ({"tokenizer.ggml.eot_token_id": 0}, {"eos_token_ids": (2, 0)}),
        (
            {"tokenizer.ggml.eot_token_id": 2, "tokenizer.ggml.eom_token_id": 1},
            {"eos_token_ids": (2, 1)},
        ),
        ({"tokenizer.ggml.bos_token_id": None}, {"bos_token_id": None}),
        ({"split.count": 1}, {}),
    ],
)
def test_a_key_that_is_absent_or_stands_twice_is_read_as_llama_cpp_does(
    changes, expected, tmp_path
):
    path = with_keys(tmp_path, changes)
    read, _ = load_policy_arrays(convert_gguf(path, tmp_path / "out"))
    assert {key: getattr(read, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (LLAMA, {"llama.rope.scaling.factor": 0.5}, "factor must be at least 1, got 0.5"),
        (LLAMA, {"llama.rope.scale_linear": 2}, "llama.rope.scale_linear must be one float, got 2"),
        (LLAMA, {"llama.rope.scaling.type": "longrope"}, "(llama.rope.scaling.type 'longrope') is"),
        (
            LLAMA,
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_log_multiplier": 0.1},
            "(llama.rope.scaling.yarn_log_multiplier 0.1) is not read",
        ),
        (
            LLAMA,
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 2.0,
                "llama.rope.scaling.original_context_length": "128",
            },
            "llama.rope.scaling.original_context_length must be one int, got '128'",
        ),
        (
            LLAMA,
            {"llama.rope.scaling.type": "none", "llama.rope.scaling.attn_factor": 0.5},
            "(llama.rope.scaling.attn_factor 0.5) is not read",
        ),
        (
            LLAMA,
            {"llama.attention.value_length": 8},
            "llama.attention.value_length 8 is not supported beside llama.attention.key_length 16",
        ),
        (
            QWENS["qwen3"],  # 48 features, 3 heads, keys of 32
            {"qwen3.attention.value_length": None},
            "value_length 16 (absent, so that it is this) is not supported beside qwen3.attention.key",
        ),
        (
            LLAMA,
            {"llama.rope.dimension_count": 8},
            "llama.rope.dimension_count 8 is not supported beside",
        ),
        (
            LLAMA,
            {"llama.attention.head_count_kv": [2, 2, 1]},
            "llama.attention.head_count_kv: 3 numbers that differ by layer",
        ),
        (
            LLAMA,
            {"llama.attention.layer_norm_rms_epsilon": None},
            "lacks llama.attention.layer_norm",
        ),
        (LLAMA, {"llama.vocab_size": 300}, "llama.vocab_size is of 300 tokens, and token_embd"),
        (
            LLAMA,
            {"tokenizer.ggml.tokens": ["a"]},
            "tokenizer.ggml.tokens is of 1 tokens, and token",
        ),
        (LLAMA, {"tokenizer.ggml.eot_token_id": "2"}, "must be a token's number, got '2'"),
        (LLAMA, {"tokenizer.ggml.eos_token_id": None}, "lacks tokenizer.ggml.eos_token_id"),
        (LLAMA, {"split.count": 3}, "split.count 3: this is one of 3 files"),
    ],
)
def test_keys_that_contradict_are_both_named(config, changes, message, tmp_path):
    path = with_keys(tmp_path, changes, config)
    with pytest.raises(UserError) as error:
        convert_gguf(path, tmp_path / "out")
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("keep", [0, 3, 200, 4000, -100])
def test_a_truncated_file_is_one_line(keep, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", gguf_tensors())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(
        UserError, match=r"m.gguf: (not a GGUF file, or a truncated one|truncated; )"
    ):
        convert_gguf(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
