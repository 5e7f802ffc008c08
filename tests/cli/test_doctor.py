from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import jax.numpy as jnp
import pytest
from offline_models import make_model
from tiny_models import GLM

import fp8rl_jax.precision
from fp8rl_jax.cli import doctor
from fp8rl_jax.cli import main as cli
from fp8rl_jax.cli.load import load_config
from fp8rl_jax.config.correction import CorrectionConfig
from fp8rl_jax.config.recipe import get_recipe
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.tasks.sandbox import seccomp, strict
from fp8rl_jax.weights.hf_config import config_json
from pallas_kernels.backend import tracing_for


def test_doctor_finds_nothing_wrong_in_a_sound_installation(capsys):
    assert cli.main(["doctor"]) == 0
    said = capsys.readouterr().out
    for words in (
        "jax ",
        "flax ",
        "cpu",
        " matmul: auto runs reference",
        "grouped_matmul: auto runs reference",
        "e4m3: casts clamp at 448",
        "all is well",
        "sandbox of rewards",
    ):
        assert words in said
    kinds = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"
    assert said.split("parameters\n")[1].startswith(
        f"  {kinds} in all 3 layers\n"
        "    rollout: e4m3-128x128 weights, e4m3-1x128 activations\n"
        "    trainer: compute dtype\n"
        "  only the rollout quantizes 21 of 21 linears: all of them\n"
        "  never quantized: embeddings, norms, biases, output head\n"
    )


@pytest.mark.parametrize(
    "release, wrong",
    [("release 13.0, V13.0.88", False), ("release 12.9, V12.9.41", True), ("none", True)],
)
def test_the_assembler_of_a_hopper_gpu_is_named(release, wrong, tmp_path, monkeypatch):
    ptxas = tmp_path / "ptxas"
    ptxas.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, {release}'\n")
    ptxas.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    faults = []
    with tracing_for(132):
        lines = doctor._kernels(faults)
    assert lines[-1].startswith(f"ptxas: {ptxas}, ") and bool(faults) == wrong
    assert not wrong or str(ptxas) in faults[0]
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with tracing_for(132):
        doctor._kernels(faults)
    assert "no ptxas on PATH" in faults[-1]
    assert not doctor._kernels([])[-1].startswith("ptxas")


def test_the_layers_of_a_given_model(tmp_path, capsys):
    model = make_model(tmp_path / "model")
    assert cli.main(["doctor", "--model", str(model)]) == 0
    said = capsys.readouterr().out
    assert "14 of 14 linears" in said and "down_proj in all 2 layers\n" in said
    assert cli.main(["doctor", "--model", str(model), "--recipe", "fp8-kv"]) == 0
    said = capsys.readouterr().out
    assert (
        "neither side quantizes any of 14 linears" in said
        and "    both: compute dtype (no linear is quantized)\n" in said
    )


OWN = """
[recipes.mine]
base = "fp8-e2e-kv"
output_gradient = { element = "e5m2" }
rollout.weight = "e4m3-128x128-power_of_two"
excluded = ["*.o_proj", "layers.1.k_proj"]
last_layers_in_compute = 1
"""


def test_a_row_of_ones_own_is_printed_in_full_and_reads_back(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text(f"seed = 3\n{OWN}")
    assert cli.main(["doctor", "--recipes", str(file), "--recipe", "mine"]) == 0
    said = capsys.readouterr().out
    wanted = get_recipe("mine", rows=tomllib.loads(OWN)["recipes"])
    printed = said.split("recipe mine, in full\n")[1].split("\nlinears\n")[0]
    (tmp_path / "printed.toml").write_text('recipe = "mine"\n' + printed)
    config = load_config(RunConfig, [str(tmp_path / "printed.toml")], "fp8rl train")
    assert config.resolved_recipe == wanted
    assert config.rl.correction == CorrectionConfig(method="nemo_is").filled()
    assert said.split("parameters\n")[1].startswith(
        "  q_proj, v_proj, gate_proj, up_proj, down_proj in layers 0-1; k_proj in layer 0\n"
        "    rollout: e4m3-128x128-power_of_two weights, e4m3-1x128 activations\n"
        "    trainer: e4m3-128x128 weights, e4m3-1x128 activations; output gradients: e5m2-1x128\n"
        "  o_proj in layers 0-1\n"
        "    both: compute dtype (excluded: *.o_proj)\n"
        "  k_proj in layer 1\n"
        "    both: compute dtype (excluded: layers.1.k_proj)\n"
        "  q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj in layer 2\n"
        "    both: compute dtype (last_layers_in_compute = 1)\n"
        "  both sides quantize the same 11 of 21 linears\n"
    )


BY_LAYER = """
[recipes.mine]
base = "fp8-e2e-kv"
kv_granularity = "head"
layers."*.down_proj".output_gradient = "compute"
layers."layers.0.*" = { rollout.weight = "compute", trainer.weight = "compute" }
"""


def test_formats_by_layer_and_scales_by_head_are_printed(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text(BY_LAYER)
    assert cli.main(["doctor", "--recipes", str(file), "--recipe", "mine"]) == 0
    said = capsys.readouterr().out
    quantized = "e4m3-128x128 weights, e4m3-1x128 activations"
    others = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj"
    for line in (
        'kv_granularity = "head"',
        f"  {others}, down_proj in layer 0\n"
        "    both: compute dtype (in the compute dtype by recipe.layers)\n",
        f"  {others} in layers 1-2\n"
        f"    rollout: {quantized}\n    trainer: {quantized}; output gradients: e4m3-1x128\n",
        "  down_proj in layers 1-2\n"
        f"    rollout: {quantized}\n    trainer: {quantized}; output gradients: compute\n",
        "  both sides quantize the same 14 of 21 linears\n",
    ):
        assert line in said, line
    printed = said.split("recipe mine, in full\n")[1].split("\nlinears\n")[0]
    (tmp_path / "printed.toml").write_text('recipe = "mine"\n' + printed)
    config = load_config(RunConfig, [str(tmp_path / "printed.toml")], "fp8rl train")
    assert config.resolved_recipe == get_recipe("mine", rows=tomllib.loads(BY_LAYER)["recipes"])


def test_a_linear_that_one_side_leaves_out_is_named(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text(
        '[recipes.mine]\nbase = "fp8-e2e"\n'
        'layers."*.gate_proj" = { trainer.weight = "compute" }\n'
        'layers."layers.1.o_proj" = { rollout.weight = "compute" }\n'
    )
    assert cli.main(["doctor", "--recipes", str(file), "--recipe", "mine"]) == 0
    said = capsys.readouterr().out
    for line in (
        "  gate_proj in all 3 layers\n"
        "    rollout: e4m3-128x128 weights, e4m3-1x128 activations\n"
        "    trainer: compute dtype\n",
        "  only the rollout quantizes 3 of 21 linears: gate_proj in all 3 layers\n"
        "  only the trainer quantizes 1 of 21 linears: o_proj in layer 1\n",
    ):
        assert line in said, line


def test_routed_experts_alone_are_quantized_on_both_sides(tmp_path, capsys):
    """NVFP4 as NeMo RL and miles have it, of a model whose first layer is dense and whose others
    have shared experts."""
    (tmp_path / "config.json").write_text(json.dumps(config_json(GLM)))
    file = Path(__file__).parents[2] / "experiments" / "recipes" / "nvfp4_experts.toml"
    words = ["--recipes", str(file), "--recipe", "nvfp4-experts", "--model", str(tmp_path)]
    assert cli.main(["doctor", *words]) == 0
    said = capsys.readouterr().out
    formats, others = (
        "nvfp4-1x16 weights, nvfp4_rows-1x16 activations",
        "in no pattern of quantized",
    )
    assert said.split("parameters\n")[1].startswith(
        "  q_proj, k_proj, v_proj, o_proj in all 3 layers; gate_proj, up_proj, down_proj in layer "
        "0; shared_experts.gate_proj, shared_experts.up_proj, shared_experts.down_proj in layers "
        "1-2\n"
        f"    both: compute dtype ({others})\n"
        "  experts.gate_proj, experts.up_proj, experts.down_proj in layers 1-2\n"
        f"    rollout: {formats}\n"
        f"    trainer: {formats}; output gradients: compute\n"
        "  both sides quantize the same 6 of 27 linears\n"
    )


def test_files_without_recipes_are_named(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text("seed = 3")
    assert cli.main(["doctor", "--recipes", str(file), str(tmp_path / "none.toml")]) == 2
    told = capsys.readouterr().err
    assert f"{file}: has no [recipes.NAME]" in told and "none.toml: no such file" in told


def test_faults_are_listed_and_exit_with_1(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(
        fp8rl_jax.precision, "quantize_per_tensor", lambda x, scale, fmt: jnp.full_like(x, jnp.nan)
    )
    assert cli.main(["doctor", "--model", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "WRONG: e4m3: " in said and "config.json" in said and "something is wrong" in said


def test_an_unknown_recipe_is_a_fault_of_the_user(capsys):
    assert cli.main(["doctor", "--recipe", "fp9"]) == 2
    assert "unknown name 'fp9'" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="Landlock and seccomp are Linux's")
def test_doctor_says_how_rewards_can_be_contained(monkeypatch):
    for abi, line, possible in (
        (7, "Landlock: ABI 7 (files, TCP, signals)", "possible"),
        (4, "Landlock: ABI 4 (files, TCP)", "possible"),
        (2, "Landlock: ABI 2 (nothing)", "not possible, needs Landlock of ABI 3 (Linux 6.2; "),
        (0, "Landlock: none, or switched off", "not possible, needs Landlock of ABI 3 "),
    ):
        monkeypatch.setattr(strict, "landlock_abi", lambda abi=abi: abi)
        said = doctor._sandbox()
        assert said[0] == line and "task.reward.sandbox = process: possible" in said
        assert said[-1].startswith(f"task.reward.sandbox = strict: {possible}")
    monkeypatch.setattr(seccomp, "is_available", lambda gate=False: False)
    assert {"seccomp filters: missing", "forks of a reward: counted afterwards"} < set(
        doctor._sandbox()
    )


def test_a_runs_rewards_are_tried(tmp_path, capsys):
    problems, run = tmp_path / "problems.jsonl", tmp_path / "run.toml"
    problems.write_text('{"prompt": "a", "answer": "4"}\n{"prompt": "b", "answer": "none"}\n')
    run.write_text(
        f'[task]\nkind = "jsonl"\nname = "{problems}"\n[task.reward]\nextract = "last_number"\n'
    )
    assert cli.main(["doctor", "--rewards", str(run)]) == 1
    said = capsys.readouterr().out
    assert "\nrewards\n  exact: 2 of 2 problems tried with their own answers\n" in said
    assert "WRONG: exact: the problem's own answer is not correct" in said
    assert "for 1 of 2 problems: " in said and "problems.jsonl:2 ('none')\n" in said
    problems.write_text('{"prompt": "a", "answer": "4"}\n{"prompt": "b"}\n')
    assert cli.main(["doctor", "--rewards", str(run)]) == 1
    assert "problems.jsonl:2: it has no answer" in capsys.readouterr().out


def test_one_screen_says_how_a_model_and_its_data_are_understood(tmp_path, capsys):
    model = make_model(tmp_path / "model", tokenizer=True, sliding_window=4, architecture="mistral")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        '{"prompt": "5 + 7 =", "answer": "5 + 7 = 12\\n#### 12"}\n'
        '{"prompt": "1,000 + 234 =", "answer": "#### 1,234"}\n'
        '{"prompt": "5 + 7 =", "answer": "#### 13"}\n'
    )
    assert cli.main(["doctor", "--model", str(model), "--data", str(rows)]) == 0
    said = capsys.readouterr().out
    for words in (
        "MistralForCausalLM: 2 layers",
        "windows: 4 tokens\n",
        "rotary positions: base 10000\n",
        "quantization of the files: none\n",
        "special: ",
        "a completion ends with ",
        "rows: 2 kept, 1 dropped",
        "tokens of a prompt: ",
        f"the first prompt ({rows}:1)",
        f"{rows}:1: '5 + 7 = 12 #### 12' -> 12\n",
        f"{rows}:2: '#### 1,234' -> 1234\n",
        'set task.answer_extract = "after_hashes"',
        "all is well",
    ):
        assert words in said, said
    assert len(said.splitlines()) < 24 and "jax " not in said
    rows.write_text('{"prompt": 3}\n')
    assert cli.main(["doctor", "--model", str(model), "--data", str(rows)]) == 1
    assert f"WRONG: {rows}:1: " in capsys.readouterr().out
