"""notebooks/grpo.ipynb runs from top to bottom, and was committed with what it printed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import matplotlib
import pytest

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "grpo.ipynb"
SMALLER = {
    r"hidden_size=256, intermediate_size=576, num_layers=2": "hidden_size=32, "
    "intermediate_size=48, num_layers=1, num_heads=2, "
    "num_kv_heads=1, head_dim=16",
    r"range\(300\)": "range(3)",
    r"range\(20\)": "range(2)",
    r"words\(256\)": "words(8)",
    r"words\((64|32)\)": "words(4)",
}


def cells() -> list[dict]:
    return [
        cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"
    ]


@pytest.mark.slow
def test_it_runs(tmp_path, monkeypatch, capsys):
    code = "\n".join("".join(cell["source"]) for cell in cells())
    for pattern, small in SMALLER.items():
        code, count = re.subn(pattern, small, code)
        assert count, f"{pattern} is not in the notebook any more"
    matplotlib.use("agg")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, NOTEBOOK.name, "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert "bf16: accuracy on 8 held-out words" in printed and "fp8-rl: accuracy" in printed
    assert (tmp_path / "runs" / "notebook" / "config.json").exists()


def test_it_was_committed_with_its_outputs():
    found = cells()
    assert [cell["execution_count"] for cell in found] == list(range(1, len(found) + 1))
    outputs = [output for cell in found for output in cell["outputs"]]
    assert not [
        output
        for output in outputs
        if output["output_type"] == "error" or output.get("name") == "stderr"
    ]
    texts = "".join("".join(output.get("text", ())) for output in outputs)
    before, after = map(
        float,
        re.search(r"fp8-rl: accuracy on 256 held-out words ([\d.]+) -> ([\d.]+)", texts).groups(),
    )
    assert after > before + 0.2
    assert any("image/png" in output.get("data", {}) for output in outputs)
