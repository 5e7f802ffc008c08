from __future__ import annotations

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from offline_models import make_model
from tiny_models import gguf_tensors, write_gguf

from fp8rl_jax.cli import main as cli
from fp8rl_jax.cli.understood import model_lines
from fp8rl_jax.compare.inputs import largest_inputs
from fp8rl_jax.compare.tokens import as_tokens, from_file
from fp8rl_jax.tokenizers.tokenizer import load_tokenizer
from fp8rl_jax.weights.hf_config import read_policy_config
from fp8rl_jax.weights.hf_directory import load_policy_arrays
from fp8rl_jax.weights.load import load_policy
from fp8rl_jax.weights.quantized_export import export_form, quantized_tensors
from fp8rl_jax.weights.safetensors_io import read_checkpoint


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
    assert (
        "of the values of the model lie between two numbers of bfloat16" in capsys.readouterr().err
    )
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


def test_calibrated_on_lines_an_export_quantizes_activations(model, tmp_path, capsys):
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"prompt": "two and two", "completion": " is 4"}\n{"tokens": [3, 4, 5]}\n')
    words = ("--model", model, "--calibrate", lines, "--output")
    assert export(*words, tmp_path / "out", "--format", "nvfp4", "--max-tokens", "8") == 0
    said = capsys.readouterr().err
    assert "--calibrate: the inputs of 14 linears on 2 lines" in said
    assert "activations in 16 bits" not in said
    policy, size = load_policy(model), 264
    rows = from_file(str(lines), size, load_tokenizer(model, size), 128)
    inputs = largest_inputs(policy, as_tokens(rows, 8))
    written = read_checkpoint(tmp_path / "out").tensors
    for place, ours in (("self_attn.k", "k"), ("self_attn.q", "q"), ("mlp.down", "down")):
        scale = written[f"model.layers.1.{place}_proj.input_global_scale"]
        np.testing.assert_array_equal(
            scale, np.float32(2688) / np.float32(inputs[f"layers.1.{ours}_proj"])
        )
    assert inputs["layers.1.k_proj"] == inputs["layers.1.q_proj"] != inputs["layers.1.down_proj"]
    capsys.readouterr()
    for form in ("mxfp8", "bf16"):
        assert export(*words, tmp_path / "no", "--format", form) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert f"--calibrate: of --format {form} no scale of activations" in error
    assert export(*words, tmp_path / "no", "--format", "nvfp4", "--max-tokens", "1") == 2
    assert "--max-tokens: 1 must be at least 2" in capsys.readouterr().err


def test_a_run_is_exported_as_its_rollout_served_it(model, tmp_path, capsys):
    """The linears of its recipe in their format, of what is trained rounded to the compute dtype."""
    run = tmp_path / "run"
    shutil.copytree(model, run / "model")
    (run / "run.json").write_text("{}")
    settings = 'recipe = "ours"\n[recipes.ours]\nbase = "mxfp8-rollout"\nquantized = ["*.k_proj"]\n'
    (run / "config.toml").write_text(settings)
    words = ["--model", run, "--format", "rollout", "--output"]
    assert export(*words, tmp_path / "out") == 0, capsys.readouterr().err
    names = read_checkpoint(tmp_path / "out").tensors
    scaled = {name for name in names if name.endswith("_scale")}
    assert scaled == {f"model.layers.{i}.self_attn.k_proj.weight_scale" for i in range(2)}
    rounded = weights(model)["layers.k_proj.weight"].astype(ml_dtypes.bfloat16)
    made = export_form("mxfp8")
    ours = [quantized_tensors("w", x, made)["w"] for x in rounded]
    for i in range(2):
        values = names[f"model.layers.{i}.self_attn.k_proj.weight"]
        assert values.tobytes() == ours[i].tobytes()
    said = model_lines(read_policy_config(tmp_path / "out"), tmp_path / "out")
    assert said[-1] == "quantization of the files: mxfp8, a scale for 1 x 32"
    for more, message in (
        ("[lora]\nrank = 2\n", "serves a base and adapters beside it"),
        (
            '[rollout]\ntransform = "noise.py:on_norms"\n',
            "serves what rollout.transform = 'noise.py:on_norms' makes of its weights",
        ),
        ('[recipes.ours.rollout]\nweight = "e3m2"\n', "'e3m2-1x128' cannot be exported"),
    ):
        (run / "config.toml").write_text(settings + more)
        assert export(*words, tmp_path / "other") == 2
        assert message in capsys.readouterr().err
    words[1] = model
    assert export(*words, tmp_path / "other") == 2
    assert "is no run; name the format" in capsys.readouterr().err


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
    assert export("--model", model, "--output", tmp_path / "out", "--format", "int5") == 2
    error = capsys.readouterr().err
    assert "--format: 'int5' cannot be exported" in error and "int4" in error
    assert not (tmp_path / "out").exists()
