"""The notebooks run from top to bottom, and were committed with what they printed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import matplotlib
import pytest

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
TINY = {
    "grpo": "hidden_size=32, intermediate_size=48, num_layers=1, num_heads=2, num_kv_heads=1, "
    "head_dim=16",
    "ablation": '"hidden_size": 32, "intermediate_size": 48, "num_layers": 1, "num_heads": 2, '
    '"num_kv_heads": 1, "head_dim": 16',
}
SMALLER = {
    "grpo": {
        r"hidden_size=256, intermediate_size=576, num_layers=2": TINY["grpo"],
        r"range\(300\)": "range(3)",
        r"range\(20\)": "range(2)",
        r"words\(256\)": "words(8)",
        r"words\((64|32)\)": "words(4)",
    },
    "ablation": {
        r'"hidden_size": 256, "intermediate_size": 576, "num_layers": 2': TINY["ablation"],
        r"range\(4000\)": "range(100)",
        r'"seeds": 5': '"seeds": 2',
        r'"steps": 300, "batch_size": 64': '"steps": 3, "batch_size": 8',
        r'"trainer.steps": 20': '"trainer.steps": 2',
        r'"prompts_per_step": 32, "samples_per_prompt": 8': '"prompts_per_step": 4, '
        '"samples_per_prompt": 4',
        r"\b500\b": "16",
    },
}


def cells(name: str) -> list[dict]:
    notebook = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(name: str) -> dict:
    """The names that a notebook leaves, made much smaller."""
    code = "\n".join("".join(cell["source"]) for cell in cells(name))
    for pattern, small in SMALLER[name].items():
        code, count = re.subn(pattern, small, code)
        assert count, f"{pattern} is not in the notebook any more"
    matplotlib.use("agg")
    names: dict = {"__name__": "__main__"}
    exec(compile(code, f"{name}.ipynb", "exec"), names)
    return names


@pytest.mark.slow
def test_grpo_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run("grpo")
    printed = capsys.readouterr().out
    assert "bf16: accuracy on 8 held-out words" in printed and "fp8-rl: accuracy" in printed
    assert (tmp_path / "runs" / "notebook" / "config.json").exists()


@pytest.mark.slow
def test_ablation_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = run("ablation")
    printed = capsys.readouterr().out
    assert "fp8-rl - bf16: " in printed and "2 seeds x 16 problems: " in printed
    assert "metric.margin was 0.02 and is 0.1 since its runs began" in printed
    states = [run["status"] for arm in names["result"].record["arms"] for run in arm["runs"]]
    assert states == ["finished"] * 4 and names["result"].page.exists()


@pytest.mark.parametrize("name", SMALLER)
def test_it_was_committed_with_its_outputs(name):
    found = cells(name)
    assert [cell["execution_count"] for cell in found] == list(range(1, len(found) + 1))
    outputs = [output for cell in found for output in cell["outputs"]]
    assert not [
        output
        for output in outputs
        if output["output_type"] == "error" or output.get("name") == "stderr"
    ]
    texts = "".join("".join(output.get("text", ())) for output in outputs)
    if name == "grpo":
        said = r"fp8-rl: accuracy on 256 held-out words ([\d.]+) -> ([\d.]+)"
        before, after = map(float, re.search(said, texts).groups())
        assert after > before + 0.2
    else:
        assert re.search(r"fp8-rl - bf16: \S+ \(\S+, \S+\), 5 seeds x 500 problems: \w+", texts)
        assert re.search(r"Seeds finished +5 of 5 +5 of 5", texts)
    assert any("image/png" in output.get("data", {}) for output in outputs)
