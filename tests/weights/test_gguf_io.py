"""The GGUF reader against the gguf package's, and the block formats against their layout in
float64."""

from __future__ import annotations

import dataclasses
import struct

import gguf
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import LLAMA, gguf_tensors, write_gguf
from weights.gguf_bytes import described, header, text

from fp8rl_jax.errors import UserError
from fp8rl_jax.weights.gguf import convert_gguf
from fp8rl_jax.weights.gguf_io import BLOCK_FORMATS, StoredTensor, dequantize, read_gguf
from fp8rl_jax.weights.hf_directory import load_policy_arrays

Q = gguf.GGMLQuantizationType
LOW, HIGH = 15, 4  # mask and shift of a byte's two halves


def halves(packed: np.ndarray) -> np.ndarray:
    """[..., n] bytes to [..., 2n] values: the low halves of all bytes, then the high halves."""
    return np.concatenate([packed & LOW, packed >> HIGH], axis=-1)


def half(block: np.ndarray, at: int) -> np.ndarray:
    """The float16 at a byte of each block, as float64 [blocks, 1]."""
    return block[:, at : at + 2].copy().view(np.float16).astype(np.float64)


def bits(packed: np.ndarray, count: int) -> np.ndarray:
    """[blocks, n] bytes to [blocks, count, n]: bit 0 of all bytes, bit 1 of all bytes, ..."""
    return (packed[:, None, :] >> np.arange(count)[:, None]) & 1


def fifth_bit(block: np.ndarray, at: int) -> np.ndarray:
    """A 32-bit number whose bit i belongs to element i."""
    return np.unpackbits(block[:, at : at + 4].copy(), axis=-1, bitorder="little").astype(int)


def k_scales(block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight 6-bit scales and minima [blocks, 8] out of bytes 4 to 15, one by one as ggml's
    get_scale_min_k4 does."""
    packed = block[:, 4:16].astype(int)
    scale, minimum = np.empty((len(block), 8)), np.empty((len(block), 8))
    for j in range(8):
        if j < 4:
            scale[:, j], minimum[:, j] = packed[:, j] & 63, packed[:, j + 4] & 63
        else:
            scale[:, j] = (packed[:, j + 4] & 15) | (packed[:, j - 4] >> 6 << 4)
            minimum[:, j] = (packed[:, j + 4] >> 4) | (packed[:, j] >> 6 << 4)
    return scale, minimum


def k_values(block: np.ndarray, q: np.ndarray) -> np.ndarray:
    """(d * scale) * q - (dmin * minimum) of eight groups of 32."""
    scale, minimum = k_scales(block)
    step, offset = half(block, 0) * scale, half(block, 2) * minimum
    return (step[..., None] * q.reshape(-1, 8, 32) - offset[..., None]).reshape(len(block), 256)


def q6_k(block: np.ndarray) -> np.ndarray:
    """ql[128], qh[64], scales[16] (int8), d, element by element as ggml's dequantize_row_q6_K
    does."""
    ql, qh = block[:, :128].astype(int), block[:, 128:192].astype(int)
    scales = block[:, 192:208].copy().view(np.int8).astype(np.float64)
    d = half(block, 208)[:, 0]
    out = np.empty((len(block), 256))
    for n in range(2):
        for i in range(32):
            low, next_low, high = ql[:, 64 * n + i], ql[:, 64 * n + 32 + i], qh[:, 32 * n + i]
            four = (low & 15, next_low & 15, low >> 4, next_low >> 4)
            for part, bits4 in enumerate(four):
                q = (bits4 | ((high >> (2 * part)) & 3) << 4) - 32
                out[:, 128 * n + 32 * part + i] = d * scales[:, 8 * n + i // 16 + 2 * part] * q
    return out


def pairs_of_32(packed: np.ndarray) -> np.ndarray:
    return halves(packed.reshape(-1, 4, 32)).reshape(-1, 256)


LAYOUTS = {
    "Q4_0": lambda b: half(b, 0) * (halves(b[:, 2:]).astype(int) - 8),
    "Q4_1": lambda b: half(b, 0) * halves(b[:, 4:]) + half(b, 2),
    "Q5_0": lambda b: half(b, 0) * ((halves(b[:, 6:]) | fifth_bit(b, 2) << 4) - 16),
    "Q5_1": lambda b: half(b, 0) * (halves(b[:, 8:]) | fifth_bit(b, 4) << 4) + half(b, 2),
    "Q8_0": lambda b: half(b, 0) * b[:, 2:].copy().view(np.int8),
    "Q4_K": lambda b: k_values(b, pairs_of_32(b[:, 16:])),
    "Q5_K": lambda b: k_values(
        b, pairs_of_32(b[:, 48:]) | bits(b[:, 16:48], 8).reshape(-1, 256) << 4
    ),
    "Q6_K": q6_k,
    "F32": lambda b: b.copy().view(np.float32).astype(np.float64),
    "F16": lambda b: b.copy().view(np.float16).astype(np.float64),
    "BF16": lambda b: b.copy().view(ml_dtypes.bfloat16).astype(np.float64),
}
FLOAT16_AT = {kind: [0] for kind in ("Q4_0", "Q5_0", "Q8_0")} | {"Q6_K": [208]}
FLOAT16_AT |= {kind: [0, 2] for kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")}


def random_blocks(kind: str, count: int) -> np.ndarray:
    """uint8 [count, bytes of a block]: any bits, and steps between 0.001 and 2."""
    _, _, size = BLOCK_FORMATS[kind]
    rng = np.random.default_rng(7)
    if kind in ("F32", "F16", "BF16"):
        dtype = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}[kind]
        return rng.normal(size=(count, 1)).astype(dtype).view(np.uint8)
    blocks = rng.integers(0, 256, (count, size), np.uint8)
    for at in FLOAT16_AT[kind]:
        blocks[:, at : at + 2] = rng.uniform(1e-3, 2, (count, 1)).astype(np.float16).view(np.uint8)
    return blocks


@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_blocks_mean_what_their_layout_says(kind):
    number, elements, size = BLOCK_FORMATS[kind]
    assert number == Q[kind].value and (elements, size) == gguf.GGML_QUANT_SIZES[Q[kind]]
    blocks = random_blocks(kind, 12)
    expected = LAYOUTS[kind](blocks)
    got = dequantize(StoredTensor(kind, (3, 4 * elements), blocks.reshape(3, 4 * size)))
    assert got.shape == (3, 4 * elements) and got.dtype == np.float32
    # two float32 roundings of terms that are no larger than this
    np.testing.assert_allclose(
        got, expected.reshape(got.shape), rtol=0, atol=2**-22 * np.abs(expected).max()
    )


def test_block_formats_reach_the_policy(tmp_path):
    config = dataclasses.replace(LLAMA, intermediate_size=256)  # K-quants need rows of 256
    kinds = {
        "token_embd.weight": "Q8_0",
        "blk.0.attn_v.weight": "F16",
        "blk.0.ffn_up.weight": "Q4_1",
        "blk.1.ffn_up.weight": "Q4_0",
        "blk.0.ffn_down.weight": "Q4_K",
        "blk.1.ffn_down.weight": "Q6_K",
        "blk.2.ffn_down.weight": "Q5_K",
    }
    tensors, stored = gguf_tensors(config), {}
    for name, kind in kinds.items():
        if kind.endswith("_K"):  # the package quantizes to all but these
            stored[name] = random_blocks(kind, 64)
        else:
            stored[name] = (
                gguf.quants.quantize(tensors[name], Q[kind])
                .view(np.uint8)
                .reshape(len(tensors[name]), -1)
            )
    path = write_gguf(
        tmp_path / "m.gguf",
        tensors | stored,
        {name: Q[kind] for name, kind in kinds.items()},
        config=config,
    )
    _, arrays = load_policy_arrays(convert_gguf(path, tmp_path / "out"))
    layers = {"ffn_up": "up_proj", "ffn_down": "down_proj", "attn_v": "v_proj"}
    for name, kind in kinds.items():
        expected = LAYOUTS[kind](stored[name].reshape(-1, BLOCK_FORMATS[kind][2])).reshape(
            tensors[name].shape
        )
        if not kind.endswith("_K"):
            assert np.abs(expected - tensors[name]).max() < 0.6
        layer, part = name.split(".")[1:3] if name.startswith("blk.") else ("", "")
        got = (
            arrays[f"layers.{layers[part]}.weight"][int(layer)]
            if layer
            else arrays["embed_tokens.weight"]
        )
        np.testing.assert_allclose(
            got.astype(np.float64), expected, rtol=2**-8, atol=2**-22 * np.abs(expected).max()
        )


def test_a_format_that_is_not_read_is_named(tmp_path):
    blocks = np.zeros((3, 84), np.uint8)
    path = write_gguf(tmp_path / "m.gguf", {"blk.0.x": blocks}, {"blk.0.x": Q.Q2_K})
    with pytest.raises(
        UserError,
        match=r"m.gguf: tensor blk.0.x has type Q2_K, which is not read; read are F32, F16",
    ):
        read_gguf(path)


def assert_like_the_package(path, metadata, tensors):
    reader = gguf.GGUFReader(path)
    expected = {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.")
    }
    assert metadata.keys() == expected.keys() and [t.name for t in reader.tensors] == list(tensors)
    for name, value in expected.items():
        if reader.fields[name].types[0] == gguf.GGUFValueType.ARRAY and not metadata[name]:
            continue  # the package has nothing to say of an empty list
        np.testing.assert_array_equal(metadata[name], value, err_msg=name)
    for theirs in reader.tensors:
        ours = tensors[theirs.name]
        assert (
            ours.kind == theirs.tensor_type.name and list(ours.shape) == theirs.shape.tolist()[::-1]
        )
        assert ours.data.tobytes() == theirs.data.tobytes()


def small_file(path) -> bytes:
    """A header of every type of metadata, and three tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    for letter, kind in (("8", 200), ("16", 50000), ("32", 3_000_000_000), ("64", 2**60)):
        getattr(writer, f"add_uint{letter}")(f"u{letter}", kind)
        getattr(writer, f"add_int{letter}")(f"i{letter}", -(kind // 4))
    writer.add_float32("f", 0.1)
    writer.add_float64("d", 0.1)
    writer.add_bool("b", True)
    writer.add_string("s", "naïve")
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("texts", ["", "é", "xyz"])
    writer.add_tensor("a", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("q", random_blocks("Q4_K", 2), raw_dtype=Q.Q4_K)
    writer.add_tensor("c", np.ones((2, 1, 3), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def test_the_reader_agrees_with_the_package(tmp_path):
    small_file(tmp_path / "m.gguf")
    assert_like_the_package(tmp_path / "m.gguf", *read_gguf(tmp_path / "m.gguf"))
    whole = write_gguf(tmp_path / "whole.gguf", gguf_tensors())
    assert_like_the_package(whole, *read_gguf(whole))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"GGML", "not a GGUF file"),
        (header(version=1), "version 1 is not read"),
        (header(version=3 << 24), "version 50331648 is not read"),
        (header(counts=(2**64 - 1, 0)), "truncated; 8 bytes from byte 24"),
        (header(counts=(0, 2**64 - 1)), "truncated; 8 bytes from byte 24"),
        (
            header(text("k") + struct.pack("<I", 99), counts=(1, 0)),
            "metadata k has the unknown type 99",
        ),
        (
            header(text("k") + struct.pack("<IIQ", 9, 4, 2**62), counts=(1, 0)),
            "truncated; 18446744073709551616 bytes",
        ),
        (
            header(text("k") + struct.pack("<IIQ", 9, 8, 2**62), counts=(1, 0)),
            "truncated; 8 bytes from byte",
        ),
        (
            header(text("k") + struct.pack("<IIQ", 9, 9, 1), counts=(1, 0)),
            "metadata k is a list of type 9",
        ),
        (
            header((text("k") + struct.pack("<IB", 0, 1)) * 2, counts=(2, 0)),
            "metadata k comes twice",
        ),
        (
            header(struct.pack("<Q", 1) + b"\xff", counts=(1, 0)),
            "the name of a metadata entry is not UTF-8, at byte 32",
        ),
        (
            header(text("general.alignment") + struct.pack("<II", 4, 24), counts=(1, 0)),
            "must be a power of two, got 24",
        ),
        (
            header(text("general.alignment") + struct.pack("<If", 6, 32), counts=(1, 0)),
            "must be a power of two, got 32.0",
        ),
        (header(tensors=described("t", ()), counts=(0, 1)), "tensor t has 0 dimensions"),
        (
            header(tensors=text("t") + struct.pack("<I", 2**32 - 1), counts=(0, 1)),
            "tensor t has 4294967295 dimensions",
        ),
        (
            header(tensors=described("t", (2**63, 2**63)), counts=(0, 1)),
            "truncated; tensor t ends at byte",
        ),
        (header(tensors=described("t", (0, 4)), counts=(0, 1)), "tensor t has shape [4, 0]"),
        (
            header(tensors=described("t", (33,), 2), counts=(0, 1)),
            "a row in Q4_0 is a positive multiple of 32",
        ),
        (
            header(tensors=described("t", (1,), 999), counts=(0, 1)),
            "tensor t has type 999, which is not read",
        ),
        (
            header(tensors=described("t", (1,), 0, 32), counts=(0, 1)),
            "tensor t begins at byte 32 of the data, expected 0",
        ),
        (header(tensors=described("t", (1,)) * 2, counts=(0, 2)), "tensor t comes twice"),
    ],
)
def test_malformed_files_are_refused_by_name(content, message, tmp_path):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        read_gguf(path)
    assert str(error.value).startswith(f"{path}: ") and message in str(error.value)


@pytest.fixture(scope="module")
def intact(tmp_path_factory) -> bytes:
    return small_file(tmp_path_factory.mktemp("intact") / "m.gguf")


@settings(
    max_examples=500,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_damage_is_refused_or_read_as_the_package_reads_it(data, intact, tmp_path):
    path = tmp_path / "f.gguf"
    path.unlink(missing_ok=True)  # a new inode: memory maps of the last example stay whole
    path.write_bytes(damaged(data, intact))
    try:
        metadata, tensors = read_gguf(path)
    except UserError as error:
        assert str(error).startswith(f"{path}: ") and "\n" not in str(error)
        return
    assert_like_the_package(path, metadata, tensors)


def damaged(data, intact: bytes) -> bytes:
    """Bytes changed, cut out, put in or cut off, mostly in the header."""
    content = bytearray(intact)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        kind = data.draw(st.sampled_from(["byte", "byte", "number", "cut", "repeat", "truncate"]))
        if kind == "byte":
            content[at] = data.draw(st.one_of(st.integers(0, 12), st.integers(0, 255)))
        elif kind == "number":
            content[at : at + 8] = struct.pack(
                "<Q", data.draw(st.sampled_from([0, 2**31, 2**32 - 1, 2**62, 2**64 - 1]))
            )
        elif kind == "cut":
            del content[at : at + data.draw(st.integers(1, 16))]
        elif kind == "repeat":
            content[at:at] = content[at : at + 16]
        else:
            del content[max(at, 1) :]
    return bytes(content)
