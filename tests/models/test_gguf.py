from __future__ import annotations

import json

import gguf
import ml_dtypes
import numpy as np
import pytest
from tiny_models import LLAMA, gguf_tensors, write_gguf

from fp8rl_jax.errors import UserError
from fp8rl_jax.models.gguf import convert_gguf
from fp8rl_jax.models.load import load_policy_arrays
from fp8rl_jax.models.tokenizer import load_tokenizer

Q = gguf.GGMLQuantizationType


def q4_1(rows: np.ndarray) -> np.ndarray:
    """Bytes [rows, blocks * 20] to floats: per 32 values a float16 step, a float16 minimum and 16 bytes, whose low
    nibbles are values 0-15 and whose high nibbles are 16-31."""
    blocks = rows.reshape(rows.shape[0], -1, 20)
    step = blocks[..., 0:2].copy().view(np.float16).astype(np.float32)
    minimum = blocks[..., 2:4].copy().view(np.float16).astype(np.float32)
    nibbles = np.concatenate([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], axis=-1)
    return (nibbles * step + minimum).reshape(rows.shape[0], -1)


def test_every_tensor_reaches_its_place(tmp_path):
    tensors = gguf_tensors()
    directory = convert_gguf(write_gguf(tmp_path / "m.gguf", tensors), tmp_path / "out")
    config, arrays = load_policy_arrays(directory)
    assert config.architecture == "llama" and config.tie_word_embeddings
    assert (config.rms_norm_eps, config.rope_theta, config.max_position_embeddings) == (1e-5, 100000.0, 512)
    assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (1, (2,), 2)
    pairs = {"v_proj": "attn_v", "o_proj": "attn_output", "gate_proj": "ffn_gate", "up_proj": "ffn_up"}
    pairs |= {"down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    for policy, name in pairs.items():
        for layer in range(LLAMA.num_layers):
            expected = tensors[f"blk.{layer}.{name}.weight"].astype(ml_dtypes.bfloat16)
            assert arrays["layers"][policy]["weight"][layer].tobytes() == expected.tobytes()
    assert (
        arrays["embed_tokens"]["weight"].tobytes() == tensors["token_embd.weight"].astype(ml_dtypes.bfloat16).tobytes()
    )
    assert arrays["norm"]["weight"].tobytes() == tensors["output_norm.weight"].astype(ml_dtypes.bfloat16).tobytes()


def test_rotary_rows_return_to_hugging_face_s_order(tmp_path):
    tensors = gguf_tensors()
    _, arrays = load_policy_arrays(convert_gguf(write_gguf(tmp_path / "m.gguf", tensors), tmp_path / "out"))
    half = LLAMA.head_dim // 2
    for policy, name, heads in (("q_proj", "attn_q", 4), ("k_proj", "attn_k", 2)):
        for head in range(heads):
            for i in range(half):
                rows = tensors[f"blk.1.{name}.weight"][head * 2 * half + 2 * i :][:2].astype(ml_dtypes.bfloat16)
                got = arrays["layers"][policy]["weight"][1, head * 2 * half :]
                assert np.array_equal(got[i], rows[0]) and np.array_equal(got[i + half], rows[1])


def test_block_formats_are_dequantized(tmp_path):
    tensors = gguf_tensors()
    types = {
        "blk.0.ffn_up.weight": Q.Q4_1,
        "token_embd.weight": Q.Q8_0,
        "blk.0.attn_v.weight": Q.F16,
        "blk.1.attn_v.weight": Q.BF16,
    }
    _, arrays = load_policy_arrays(convert_gguf(write_gguf(tmp_path / "m.gguf", tensors, types), tmp_path / "out"))
    packed = gguf.quants.quantize(tensors["blk.0.ffn_up.weight"], Q.Q4_1)
    expected = q4_1(packed)
    assert np.abs(expected - tensors["blk.0.ffn_up.weight"]).max() < 0.4
    up = arrays["layers"]["up_proj"]["weight"][0]
    assert up.tobytes() == expected.astype(ml_dtypes.bfloat16).tobytes()
    embedding = arrays["embed_tokens"]["weight"].astype(np.float32)
    assert np.abs(embedding - tensors["token_embd.weight"]).max() < 0.03
    half = tensors["blk.0.attn_v.weight"].astype(np.float16).astype(ml_dtypes.bfloat16)
    assert arrays["layers"]["v_proj"]["weight"][0].tobytes() == half.tobytes()


def test_an_output_tensor_unties_the_head(tmp_path):
    tensors = gguf_tensors()
    tensors["output.weight"] = tensors["token_embd.weight"] + 1
    config, arrays = load_policy_arrays(convert_gguf(write_gguf(tmp_path / "m.gguf", tensors), tmp_path / "out"))
    assert not config.tie_word_embeddings
    head = tensors["output.weight"].astype(ml_dtypes.bfloat16)
    assert arrays["lm_head"]["weight"].tobytes() == head.tobytes()


def test_tokenizer_and_chat_template(tmp_path):
    directory = convert_gguf(write_gguf(tmp_path / "m.gguf", gguf_tensors()), tmp_path / "out")
    tokenizer = load_tokenizer(directory, LLAMA.vocab_size)
    the, t, five, seven = (tokenizer.encode(text) for text in (" the", " t", "5", "7"))
    assert len(the) == len(t) == 1 and the != t
    assert tokenizer.encode(" the57") == the + five + seven  # digits stand alone, though "5 7" is a merge
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


@pytest.mark.parametrize(
    ("edit", "options", "message"),
    [
        (lambda t: t.pop("blk.2.attn_k.weight"), {}, "1 tensors are missing: blk.2.attn_k.weight"),
        (lambda t: t.pop("token_embd.weight"), {}, "tensor token_embd.weight is missing"),
        (lambda t: t.update({"blk.0.attn_q.bias": np.zeros(64)}), {}, "unexpected: blk.0.attn_q.bias"),
        (lambda t: t.update({"rope_freqs.weight": np.ones(8)}), {}, "rope scaling"),
        (lambda t: t.update({"blk.0.attn_v.weight": np.ones((64, 64))}), {}, "blk.0.attn_v.weight has shape [64, 64]"),
        (lambda t: t["output_norm.weight"].fill(np.nan), {}, "tensor model.norm.weight holds 64 non-finite"),
        (lambda t: None, {"pre": "llama-bpe"}, "tokenizer.ggml.pre 'llama-bpe' is not supported"),
        (lambda t: None, {"architecture": "qwen2"}, "general.architecture 'qwen2' is not supported"),
    ],
)
def test_what_is_not_read_is_refused_by_name(edit, options, message, tmp_path):
    tensors = gguf_tensors()
    edit(tensors)
    with pytest.raises(UserError) as error:
        convert_gguf(write_gguf(tmp_path / "m.gguf", tensors, **options), tmp_path / "out")
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("keep", [0, 3, 200, 4000, -100])
def test_a_truncated_file_is_one_line(keep, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", gguf_tensors())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match="m.gguf: not a GGUF file, or a truncated one"):
        convert_gguf(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
