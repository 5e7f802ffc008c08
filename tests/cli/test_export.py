from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from offline_models import make_model
from tiny_models import gguf_tensors, write_gguf

from fp8rl_jax.cli import main as cli
from fp8rl_jax.tokenizers.tokenizer import load_tokenizer
from fp8rl_jax.weights.hf_directory import load_policy_arrays


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), tokenizer=True, eos_token_ids=(258,))


def export(*words) -> int:
    return cli.main(["export", *map(str, words)])


def weights(directory) -> dict[str, np.ndarray]:
    return load_policy_arrays(directory)[1]


def test_every_form_comes_from_every_other_and_the_tokenizer_travels(model, tmp_path, capsys):
    assert export("--model", model, "--output", tmp_path / "bf16") == 0
    # a float32 model: an update that bf16 does not hold is not lost without a word
    assert "values lie between two numbers of this format" in capsys.readouterr().err
    source = tmp_path / "bf16"
    assert export("--model", source, "--output", tmp_path / "fp8", "--format", "fp8-block") == 0
    printed = capsys.readouterr()
    assert (
        "lie between" not in printed.err
        and printed.out == f"{tmp_path}/fp8\n"
        and "q_proj [64, 64], k_proj [32, 64]" in printed.err
    )
    assert (
        export("--model", tmp_path / "fp8", "--output", tmp_path / "full", "--format", "float32")
        == 0
    )
    assert export("--model", tmp_path / "fp8", "--output", tmp_path / "half") == 0
    assert (
        export(
            "--model", tmp_path / "half", "--output", tmp_path / "again", "--format", "fp8-block"
        )
        == 0
    )
    fp8, full, half = (weights(tmp_path / name) for name in ("fp8", "full", "half"))
    for path, values in fp8.items():
        assert full[path].dtype == np.float32 and np.array_equal(
            full[path], values.astype(np.float32)
        )
        assert half[path].tobytes() == values.astype(ml_dtypes.bfloat16).tobytes()
    file = "model.safetensors"
    assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "fp8" / file).read_bytes()
    assert (
        json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"][
            "quant_method"
        ]
        == "fp8"
    )
    assert "quantization_config" not in json.loads((tmp_path / "half" / "config.json").read_text())
    assert load_tokenizer(tmp_path / "again").encode("né") == load_tokenizer(model).encode("né")


def test_a_gguf_is_exported(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FP8RL_CACHE", str(tmp_path / "cache"))
    tensors = gguf_tensors()
    assert (
        export("--model", write_gguf(tmp_path / "m.gguf", tensors), "--output", tmp_path / "out")
        == 0
    )
    assert capsys.readouterr().err == "converting m.gguf to bf16 safetensors\n"
    assert np.array_equal(
        weights(tmp_path / "out")["norm.weight"],
        tensors["output_norm.weight"].astype(ml_dtypes.bfloat16),
    )


def test_a_model_never_overwrites_itself(model, tmp_path, capsys):
    before = (model / "model.safetensors").read_bytes()
    (tmp_path / "link").symlink_to(model)
    for output in (model, tmp_path / "link", model / ".." / model.name):
        assert export("--model", model, "--output", output, "--format", "fp8-block") == 2
        assert "is the model's own directory" in capsys.readouterr().err
    assert (model / "model.safetensors").read_bytes() == before


def test_faults_are_one_line(model, tmp_path, capsys):
    assert export("--model", tmp_path / "none", "--output", tmp_path / "out") == 2
    assert "no such model directory" in capsys.readouterr().err
    assert export("--model", model, "--output", tmp_path / "out", "--format", "int4") == 2
    error = capsys.readouterr().err
    assert "--format" in error and "int4" in error and not (tmp_path / "out").exists()
