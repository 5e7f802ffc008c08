from __future__ import annotations

import json
import os
import resource
import time

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8rl_jax.errors import UserError
from fp8rl_jax.weights.safetensors_io import (
    DTYPES,
    read_checkpoint,
    read_safetensors,
    write_safetensors,
)


def file_bytes(header, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def sample_tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "w": rng.normal(size=(3, 5)).astype(ml_dtypes.bfloat16),
        "fp8": rng.normal(size=(7,)).astype(ml_dtypes.float8_e4m3fn),
        "scale": rng.normal(size=(2, 1, 2)).astype(np.float32),
        "scalar": np.array(3, np.int64),
        "empty": np.zeros((0, 4), np.float16),
    }


def same(left: np.ndarray, right: np.ndarray) -> bool:
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and left.tobytes() == right.tobytes()
    )


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_reads_what_the_library_writes_in_every_dtype(name, tmp_path):
    dtype = DTYPES[name]
    bits = np.random.default_rng(1).integers(
        0, 2 if name == "BOOL" else 256, 6 * dtype.itemsize, dtype=np.uint8
    )
    values = bits.view(dtype).reshape(2, 3)
    safetensors.numpy.save_file(
        {"before": np.zeros(3, np.uint8), "x": values}, tmp_path / "f.safetensors"
    )
    assert f'"dtype":"{name}"'.encode() in (tmp_path / "f.safetensors").read_bytes()
    read = read_safetensors(tmp_path / "f.safetensors")["x"]
    assert same(read, values) and not read.flags.writeable


def test_tensors_may_lie_at_any_byte(tmp_path):
    data = b"\x01" + np.array([1.5, -2.5], np.float32).tobytes()
    header = {"b": entry("U8", [1], [0, 1]), "x": entry("F32", [2], [1, 9])}
    (tmp_path / "f").write_bytes(file_bytes(header, data))
    assert read_safetensors(tmp_path / "f")["x"].tolist() == [1.5, -2.5]


def test_writer_round_trip_and_the_library_agrees(tmp_path):
    tensors = sample_tensors()
    write_safetensors(tmp_path / "f.safetensors", tensors)
    read = read_safetensors(tmp_path / "f.safetensors")
    assert read.keys() == tensors.keys() and all(
        same(read[name], tensors[name]) for name in tensors
    )
    with safetensors.safe_open(tmp_path / "f.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}
    assert os.listdir(tmp_path) == ["f.safetensors"]


def test_the_writer_has_the_library_s_bytes(tmp_path):
    """In every dtype, and with names that JSON escapes."""
    tensors = {
        f"{letter}{name}": np.zeros((2, 3), dtype)
        for name, dtype in DTYPES.items()
        for letter in 'zaé"\n\x7f\u2028/'
    }
    for some in (tensors | sample_tensors(), {}, {"scalar": np.array(3, np.int64)}):
        write_safetensors(tmp_path / "f", some)
        assert (tmp_path / "f").read_bytes() == safetensors.numpy.save(some, {"format": "pt"})


def test_writer_respects_strides(tmp_path):
    values = np.arange(6, dtype=np.float32).reshape(2, 3).T
    write_safetensors(tmp_path / "f.safetensors", {"x": values})
    assert read_safetensors(tmp_path / "f.safetensors")["x"].tolist() == values.tolist()


def test_full_disk_is_one_line_and_leaves_the_old_file(tmp_path):
    path = tmp_path / "f.safetensors"
    write_safetensors(path, {"x": np.ones(4, np.float32)})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(UserError, match="f.safetensors: cannot be written"):
            write_safetensors(path, {"x": np.zeros(1 << 16, np.float32)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == ["f.safetensors"]
    assert read_safetensors(path)["x"].tolist() == [1.0] * 4


def test_missing_directory_is_one_line(tmp_path):
    with pytest.raises(UserError, match="cannot be written"):
        write_safetensors(tmp_path / "no" / "f.safetensors", {"x": np.ones(4, np.float32)})
    with pytest.raises(UserError, match="cannot be read"):
        read_safetensors(tmp_path / "no.safetensors")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated"),
        (b"\x02\x00\x00", "truncated"),
        (file_bytes({"x": entry()}, bytes(8))[:20], "truncated"),
        ((2**63).to_bytes(8, "little") + b"{}", "truncated"),
        (file_bytes(b" {}"), "does not begin"),
        (file_bytes(b'{"x": }'), "not valid JSON"),
        (file_bytes(b'{"\xff": 1}'), "not valid JSON"),
        (file_bytes(b'{"x":' + b"[" * 100_000), "not valid JSON"),
        (file_bytes(b'{"x":NaN}'), "unexpected number NaN"),
        (
            file_bytes(b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
            "not valid JSON",
        ),
        (
            file_bytes(b'{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,-0]}}'),
            "unexpected number -0",
        ),
        (
            file_bytes(
                b'{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
                b"0",
            ),
            "duplicate name 'x'",
        ),
        (file_bytes({"__metadata__": {"a": 1}}), "__metadata__"),
        (file_bytes({"x": {"dtype": "F32", "shape": [2]}}, bytes(8)), "'x': expected dtype"),
        (file_bytes({"x": entry("F4", [4], [0, 2])}, bytes(2)), "'x': dtype 'F4'"),
        (file_bytes({"x": entry(shape=[True, 2])}, bytes(8)), "'x': shape"),
        (file_bytes({"x": entry("U8", [1] * 33, [0, 1])}, bytes(1)), "'x': shape"),
        (file_bytes({"x": entry("U8", [0, 2**62, 2**62], [0, 0])}), "too large"),
        (file_bytes({"x": entry(offsets=[8, 0])}, bytes(8)), "'x': data_offsets"),
        (file_bytes({"x": entry(shape=[3])}, bytes(8)), "'x' of shape"),
        (file_bytes({"x": entry()}, bytes(7)), "truncated; tensor 'x' ends at byte 8"),
        (file_bytes({"x": entry()}, bytes(9)), "1 bytes after the last tensor"),
        (file_bytes({"x": entry(offsets=[1, 9])}, bytes(9)), "'x' begins at byte 1"),
        (
            file_bytes({"x": entry(), "y": entry(offsets=[4, 12])}, bytes(12)),
            "'y' begins at byte 4",
        ),
    ],
)
def test_malformed_files_are_refused_by_name(content, message, tmp_path, fault):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    asked = time.monotonic()
    with pytest.raises(UserError) as error:
        read_safetensors(path)
    assert str(error.value).startswith(str(path))
    assert message in str(error.value)
    fault("safetensors", str(error.value), status=2, detected=time.monotonic() - asked)


@st.composite
def damaged_files(draw) -> bytes:
    content = bytearray(safetensors.numpy.save(sample_tensors(), {"format": "pt"}))
    header_end = 8 + int.from_bytes(content[:8], "little")
    for _ in range(draw(st.integers(0, 3))):
        content[draw(st.integers(0, header_end - 1))] = draw(
            st.one_of(st.integers(0, 255), st.sampled_from(b'0123456789"{}[],:-'))
        )
    kind = draw(st.sampled_from(["flip", "truncate", "extend", "cut", "repeat"]))
    start, stop = sorted((draw(st.integers(0, len(content))), draw(st.integers(0, len(content)))))
    if kind == "truncate":
        del content[start:]
    elif kind == "extend":
        content += draw(st.binary(min_size=1, max_size=9))
    elif kind == "cut":
        del content[start : min(stop, start + 16)]
    elif kind == "repeat":
        content[start:start] = content[start : min(stop, start + 16)]
    return bytes(content)


@settings(
    max_examples=600, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(content=damaged_files())
def test_damage_is_refused_or_read_as_the_library_reads_it(content, tmp_path):
    path = tmp_path / "f.safetensors"
    path.unlink(missing_ok=True)  # a new inode: memory maps of the last example stay whole
    path.write_bytes(content)
    try:
        tensors = read_safetensors(path)
    except UserError as error:
        assert str(error).startswith(str(path))
        return
    reference = dict(safetensors.deserialize(content))
    assert tensors.keys() == reference.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == DTYPES[reference[name]["dtype"]]
        assert list(tensor.shape) == reference[name]["shape"]
        assert tensor.tobytes() == bytes(reference[name]["data"])


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_intact_files_round_trip(data, tmp_path):
    dtypes = st.sampled_from(sorted(DTYPES))
    shapes = st.lists(st.integers(0, 4), max_size=4)
    names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(
        lambda name: name != "__metadata__"
    )
    tensors = {}
    for name, (dtype, shape) in data.draw(
        st.dictionaries(names, st.tuples(dtypes, shapes), max_size=4)
    ).items():
        bits = data.draw(st.binary(min_size=1, max_size=1)) if dtype != "BOOL" else b"\x01"
        tensors[name] = np.frombuffer(
            bits * (int(np.prod(shape)) * DTYPES[dtype].itemsize), DTYPES[dtype]
        ).reshape(shape)
    path = tmp_path / "f.safetensors"
    path.unlink(missing_ok=True)
    write_safetensors(path, tensors)
    read = read_safetensors(path)
    assert read.keys() == tensors.keys() and all(
        same(read[name], tensors[name]) for name in tensors
    )


def test_checkpoint_of_one_file_and_of_shards(tmp_path):
    tensors = sample_tensors()
    with pytest.raises(UserError, match="holds neither model.safetensors nor"):
        read_checkpoint(tmp_path)
    for file, names in {
        "a.safetensors": ["w", "fp8"],
        "b.safetensors": ["scale", "scalar", "empty"],
    }.items():
        safetensors.numpy.save_file({name: tensors[name] for name in names}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    weight_map = {"w": "a.safetensors", "fp8": "a.safetensors"}
    weight_map |= dict.fromkeys(["scale", "scalar", "empty"], "b.safetensors")
    index.write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = read_checkpoint(tmp_path)
    assert all(same(checkpoint.tensors[name], tensors[name]) for name in tensors)
    assert checkpoint.files["scale"] == tmp_path / "b.safetensors"

    index.write_text(json.dumps({"weight_map": weight_map | {"gone": "a.safetensors"}}))
    with pytest.raises(UserError, match=r"a.safetensors: tensor gone is absent"):
        read_checkpoint(tmp_path)
    index.write_text(
        json.dumps({"weight_map": {k: v for k, v in weight_map.items() if k != "fp8"}})
    )
    with pytest.raises(UserError, match=r"a.safetensors: tensor fp8 is not listed"):
        read_checkpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": weight_map | {"gone": "c.safetensors"}}))
    with pytest.raises(UserError, match=r"c.safetensors: not found"):
        read_checkpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": weight_map | {"up": "../a.safetensors"}}))
    with pytest.raises(UserError, match=r"weight_map.up must be the name of a file"):
        read_checkpoint(tmp_path)
    index.write_text(json.dumps({"weights": {}}))
    with pytest.raises(UserError, match=r"index.json: weight_map"):
        read_checkpoint(tmp_path)

    safetensors.numpy.save_file({"w": tensors["w"]}, tmp_path / "model.safetensors")
    assert list(read_checkpoint(tmp_path).tensors) == ["w"]
