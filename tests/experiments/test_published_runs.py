"""Run files of published setups: each is read, its model has as many parameters as the published
one, its memory fits the devices that it names, and its data has the columns that it asks for."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fp8rl_jax.cli.load import load_config
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.config.unused import unused_settings
from fp8rl_jax.models.policy import parameter_count
from fp8rl_jax.tasks.dataset import load_splits
from fp8rl_jax.training.checks import check_mesh
from fp8rl_jax.training.plan import abstract_mesh, mesh_sizes, report
from fp8rl_jax.weights.hf_config import read_policy_config

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "experiments/runs/published").glob("*.toml"))
PARAMETERS = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-32b": 32_762_123_264,
    "qwen2.5-7b": 7_615_616_512,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-405b": 405_853_388_800,
}
"""As the indices of the published checkpoints count them."""
GSM8K = [{"question": f"{i} + 1?", "answer": f"So #### {i + 1}"} for i in range(9)]
ROWS = {
    "openai/gsm8k": GSM8K,
    "open-r1/DAPO-Math-17k-Processed": [
        {
            "prompt": f"{i} + 1?",
            "solution": f"{i + 1}",
            "reward_model": {"ground_truth": f"{i + 1}"},
        }
        for i in range(9)
    ],
    "HuggingFaceH4/aime_2024": [
        {"problem": f"{i} + 2?", "solution": "So.", "answer": f"{i + 2}"} for i in range(3)
    ],
    "nvidia/OpenMathInstruct-2": [
        {"problem": f"{i} + 1?", "generated_solution": "So.", "expected_answer": f"{i + 1}"}
        for i in range(300)
    ],
    "DigitalLearningGmbH/MATH-lighteval": [
        {"problem": f"{i} + 1?", "solution": f"\\boxed{{{i + 1}}}", "level": "Level 1"}
        for i in range(9)
    ],
    "zwhe99/DeepMath-103K": [
        {"question": f"{i} + 1?", "final_answer": f"{i + 1}", "r1_solution_1": "So."}
        for i in range(300)
    ],
}
"""Rows with the columns that the sets have."""


@pytest.fixture
def library(monkeypatch):
    def load_dataset(name, subset, split):
        rows = ROWS[name]
        return rows[-3:] if split == "test" else rows

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))


def load(file: Path) -> RunConfig:
    return load_config(RunConfig, [str(file)], "fp8rl train")


@pytest.mark.parametrize("shape", PARAMETERS)
def test_a_shape_has_the_parameters_of_its_model(shape):
    config = read_policy_config(ROOT / "experiments/shapes" / shape)
    assert parameter_count(config) == PARAMETERS[shape]


def test_every_shape_is_counted():
    assert {path.name for path in (ROOT / "experiments/shapes").iterdir()} == set(PARAMETERS)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_published_setup_fits_and_its_data_is_read(file, library, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load(file)
    shape = read_policy_config(config.model.path)
    sizes = mesh_sizes(config.mesh, config.plan.devices)
    check_mesh(config, shape, abstract_mesh(sizes))
    text, fits = report(shape, config, sizes)
    assert fits and "FITS" in text
    # with one update a rollout the ratio that is clipped is 1
    assert all("every ratio is 1" in line for line in unused_settings(config))
    heading = file.read_text().split("\n\n")[0]
    assert f"fp8rl train {file.relative_to(ROOT)} --model.path DIR" in heading
    assert any(source in heading for source in ("arXiv 2601", "NeMo RL", "verl's example"))
    train, held_out = load_splits(config.task)
    for example in (*train, *held_out):
        question = example.entry["question"]
        total = sum(map(int, question.removesuffix("?").split(" + ")))
        assert example.answer in (str(total), f"\\boxed{{{total}}}")
        assert question in example.prompt and "{" not in example.prompt.replace("\\boxed{}", "")


def test_a_setup_that_is_published_names_what_is_not():
    stated = [file for file in FILES if "not published" in file.read_text()]
    assert {file.stem.split("_")[0] for file in stated} == {"fp8", "nemo", "jet"}
