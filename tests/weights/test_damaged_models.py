"""Model directories and GGUF files with a random fault: one clear line that names the file, or the
weights as they were."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import shutil

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import (
    GEMMA,
    LLAMA,
    MOE,
    QWEN2,
    QWEN3,
    gguf_tensors,
    random_tensors,
    write_gguf,
    write_model,
    write_sharded,
)
from weights.gguf_bytes import whole_file

from fp8rl_jax.errors import UserError
from fp8rl_jax.models.rope import Llama3RopeScaling
from fp8rl_jax.weights.gguf import convert_gguf
from fp8rl_jax.weights.gguf_io import read_gguf
from fp8rl_jax.weights.hf_config import config_json, parse_config
from fp8rl_jax.weights.hf_directory import export_policy, load_policy_arrays

SCALED = dataclasses.replace(
    QWEN3, architecture="llama", rope_scaling=Llama3RopeScaling(8.0, 1.0, 4.0, 64)
)
CONFIGS = {
    "llama": SCALED,
    "qwen2": dataclasses.replace(QWEN2, sliding_window=3, full_attention_layers=(1,)),
    "moe": MOE,
    "gemma3": GEMMA,
}

fuzzed = functools.partial(
    settings,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
NUMBERS = [
    0,
    -1,
    1,
    2,
    3,
    7,
    48,
    2**31 - 1,
    2**63,
    10**12,
    10**400,
    0.5,
    -0.0,
    1e-300,
    1e308,
    float("nan"),
    float("inf"),
]
WORDS = ["", "fp8", "silu", "llama3", "1", "\x00", "é"]
SINGLE = [*NUMBERS, True, False, None, *WORDS]
SCALARS = st.sampled_from(SINGLE)
JUNK = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=3),
    st.dictionaries(
        st.sampled_from(["a", "factor", "rope_type", "quant_method", "rope_theta"]),
        SCALARS,
        max_size=3,
    ),
)


def copied(source, target):
    # new inodes: memory maps of the last example stay whole
    shutil.rmtree(target, ignore_errors=True)
    return shutil.copytree(source, target)


def assert_refused_or_same(directory, expected) -> None:
    try:
        _, arrays = load_policy_arrays(directory)
    except UserError as error:
        assert str(error).startswith(str(directory)) and "\n" not in str(error)
        return
    assert arrays.keys() == expected.keys()
    assert all(arrays[path].tobytes() == expected[path].tobytes() for path in expected)


@pytest.fixture(scope="module", params=CONFIGS)
def plain(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    config = CONFIGS[request.param]
    write_model(directory, config, random_tensors(config))
    (directory / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, 3], "pad_token_id": 0, "temperature": 0.6})
    )
    return directory, load_policy_arrays(directory)[1]


def assert_refused_or_sayable(values) -> None:
    """What is understood can be said again, and is understood as the same."""
    try:
        config = parse_config(values, "config.json")
    except UserError as error:
        assert str(error).startswith("config.json: ") and "\n" not in str(error)
        return
    assert parse_config(json.loads(json.dumps(config_json(config))), "again") == config


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_wrong_value_in_config_json(config):
    values = config_json(config)
    extra = {
        "quantization_config",
        "rope_parameters",
        "num_local_experts",
        "partial_rotary_factor",
        "layer_types",
    }
    extra.add("sliding_window_pattern")
    for key in sorted(values.keys() | extra):
        assert_refused_or_sayable({name: value for name, value in values.items() if name != key})
        for junk in (
            *SINGLE,
            [],
            {},
            [[]],
            [{}],
            *([value] for value in SINGLE),
            {"rope_type": "llama3"},
            {"quant_method": []},
        ):
            assert_refused_or_sayable(values | {key: junk})
    for key, junk in itertools.product(values["rope_scaling"] or (), SINGLE):
        assert_refused_or_sayable(values | {"rope_scaling": values["rope_scaling"] | {key: junk}})


@fuzzed(max_examples=60)
@given(data=st.data())
def test_wrong_values_in_config_json_beside_weights(data, plain, tmp_path):
    directory, expected = copied(plain[0], tmp_path / "m"), plain[1]
    values = json.loads((directory / "config.json").read_text())
    for key in data.draw(
        st.lists(st.sampled_from(sorted(values)), min_size=1, max_size=2, unique=True)
    ):
        values[key] = data.draw(JUNK)
    (directory / "config.json").write_text(json.dumps(values))
    assert_refused_or_same(directory, expected)


@fuzzed(max_examples=40)
@given(data=st.data())
def test_a_wrong_value_in_generation_config_json(data, plain, tmp_path):
    directory, expected = copied(plain[0], tmp_path / "m"), plain[1]
    path = directory / "generation_config.json"
    values = json.loads(path.read_text())
    values[data.draw(st.sampled_from(sorted(values)))] = data.draw(JUNK)
    path.write_text(json.dumps(data.draw(st.one_of(st.just(values), JUNK))))
    assert_refused_or_same(directory, expected)


def test_counts_that_would_fill_the_memory_are_refused_before_they_are_listed(tmp_path):
    assert MOE.experts is not None
    experts = dataclasses.replace(MOE.experts, count=10_000)
    write_model(tmp_path, MOE, random_tensors(MOE))
    (tmp_path / "config.json").write_text(
        json.dumps(config_json(dataclasses.replace(MOE, num_layers=10_000, experts=experts)))
    )
    with pytest.raises(
        UserError, match="too few for the 10000 layers and 99990000 experts of its config"
    ):
        load_policy_arrays(tmp_path)


def test_an_infinite_number_in_a_gguf(tmp_path):
    metadata, tensors = read_gguf(write_gguf(tmp_path / "m.gguf", gguf_tensors()))
    for key in ("llama.rope.freq_base", "llama.attention.layer_norm_rms_epsilon"):
        (tmp_path / "bad.gguf").write_bytes(whole_file(metadata | {key: float("inf")}, tensors))
        with pytest.raises(
            UserError,
            match=r"bad.gguf: (rope_theta|rms_norm_eps) must be positive and finite, got inf",
        ):
            convert_gguf(tmp_path / "bad.gguf", tmp_path / "out")


def damaged_text(data, text: bytes) -> bytes:
    content = bytearray(text)
    at = data.draw(st.integers(0, len(content) - 1))
    kind = data.draw(st.sampled_from(["byte", "byte", "cut", "repeat", "truncate"]))
    if kind == "byte":
        content[at] = data.draw(
            st.one_of(st.sampled_from(b'0123456789"{}[],:-.e\\\x00\xff'), st.integers(0, 255))
        )
    elif kind == "truncate":
        del content[at:]
    else:
        end = at + data.draw(st.integers(1, 8))
        content[at:end] = content[at:end] * (2 if kind == "repeat" else 0)
    return bytes(content)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    directory = write_sharded(tmp_path_factory.mktemp("sharded"), QWEN3, random_tensors(QWEN3))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    return directory, load_policy_arrays(directory)[1]


@fuzzed(max_examples=200)
@given(data=st.data())
def test_damaged_json(data, sharded, tmp_path):
    directory, expected = copied(sharded[0], tmp_path / "m"), sharded[1]
    path = directory / data.draw(
        st.sampled_from(["config.json", "model.safetensors.index.json", "generation_config.json"])
    )
    path.write_bytes(damaged_text(data, path.read_bytes()))
    assert_refused_or_same(directory, expected)


@fuzzed(max_examples=100)
@given(data=st.data())
def test_a_wrong_value_in_the_index(data, sharded, tmp_path):
    directory, expected = copied(sharded[0], tmp_path / "m"), sharded[1]
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    files = [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "config.json",
        "",
        ".",
        "..",
        "/",
        "a\x00b",
    ]
    name = data.draw(st.sampled_from([*sorted(index["weight_map"]), "new"]))
    index["weight_map"][name] = data.draw(st.one_of(st.sampled_from(files), JUNK))
    path.write_text(
        json.dumps(data.draw(st.one_of(st.just(index), st.just({"weight_map": index}), JUNK)))
    )
    assert_refused_or_same(directory, expected)


@pytest.fixture(scope="module")
def block_fp8(tmp_path_factory):
    root = tmp_path_factory.mktemp("fp8")
    source = write_model(root / "in", LLAMA, random_tensors(LLAMA))
    directory = export_policy(root / "m", *load_policy_arrays(source), "fp8-block")
    return directory, load_policy_arrays(directory)[1]


@fuzzed(max_examples=200)
@given(data=st.data())
def test_a_damaged_header_of_a_block_fp8_checkpoint(data, block_fp8, tmp_path):
    directory, expected = copied(block_fp8[0], tmp_path / "m"), block_fp8[1]
    path = directory / "model.safetensors"
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    path.write_bytes(content[:8] + damaged_text(data, content[8:end]) + content[end:])
    assert_refused_or_same(directory, expected)


@pytest.fixture(scope="module")
def intact_gguf(tmp_path_factory):
    root = tmp_path_factory.mktemp("gguf")
    config = dataclasses.replace(LLAMA, num_layers=1)
    path = write_gguf(root / "m.gguf", gguf_tensors(config), config=config)
    return path, load_policy_arrays(convert_gguf(path, root / "out"))[1]


def assert_gguf_refused_or_same(path, content: bytes, expected) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    out = path.parent / "out"
    shutil.rmtree(out, ignore_errors=True)
    try:
        convert_gguf(path, out)
    except UserError as error:
        assert (
            str(error).startswith(f"{path}: ")
            and "\n" not in str(error)
            and str(error).count(str(path)) == 1
        )
        return
    arrays = load_policy_arrays(out)[1]
    assert all(np.array_equal(arrays[name], expected[name]) for name in expected)


@fuzzed(max_examples=100)
@given(data=st.data())
def test_a_wrong_value_in_a_gguf(data, intact_gguf, tmp_path):
    metadata, tensors = read_gguf(intact_gguf[0])
    key = data.draw(
        st.sampled_from(
            [*sorted(metadata), "llama.rope.scaling.type", "llama.attention.key_length"]
        )
    )
    numbers = st.one_of(st.integers(-2, 2**31), st.just(2**62), st.floats(width=32))
    kind = data.draw(st.sampled_from(["junk", "drop", "list"]))
    if kind == "drop":
        metadata.pop(key, None)
    elif kind == "junk":
        metadata[key] = data.draw(
            st.one_of(numbers, st.booleans(), st.sampled_from(["", "é", "qwen2"]))
        )
    elif isinstance(metadata.get(key), list):
        values = list(metadata[key])
        if isinstance(values[0], str):
            values[data.draw(st.integers(0, len(values) - 1))] = data.draw(
                st.sampled_from(["", "a", "a b", "Ġ t", " ", "\n"])
            )
        else:
            values[data.draw(st.integers(0, len(values) - 1))] = data.draw(st.integers(0, 2**40))
        metadata[key] = values[data.draw(st.integers(0, 1)) :]
    else:
        metadata[key] = data.draw(st.lists(st.integers(0, 9), max_size=2))
    assert_gguf_refused_or_same(tmp_path / "m.gguf", whole_file(metadata, tensors), intact_gguf[1])


@fuzzed(max_examples=80)
@given(data=st.data())
def test_a_damaged_header_of_a_gguf(data, intact_gguf, tmp_path):
    content = intact_gguf[0].read_bytes()
    _, tensors = read_gguf(intact_gguf[0])
    # near enough: tensors are aligned
    end = len(content) - sum(tensor.data.size for tensor in tensors.values())
    assert_gguf_refused_or_same(
        tmp_path / "m.gguf", damaged_text(data, content[:end]) + content[end:], intact_gguf[1]
    )
