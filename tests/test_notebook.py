"""The course: notebooks were committed with what they printed, name what exists, and run from top
to bottom, here made much smaller; `make night` runs them as they are."""

from __future__ import annotations

import ast
import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib
import pytest

from experiments.notebooks import (
    FOLDER,
    RECORD,
    Arguments,
    code_cells,
    fingerprint,
    main,
    notebooks,
)
from fp8rl_jax.ablation import runner
from fp8rl_jax.ablation.preflight import Preflight
from fp8rl_jax.errors import UserError

NAMES = [path.stem for path in notebooks()]
SIZES = "num_heads=2, num_kv_heads=1, head_dim=16"
TINY = f"hidden_size=32, intermediate_size=48, num_layers=1, {SIZES}"
"""One shape for all, so that they share compiled programs."""
WARM_UP = {
    r"hidden_size=128, intermediate_size=256, num_layers=\d": TINY,
    r"range\((250|300)\)": "range(2)",
    r"words\((32|64)\)": "words(4)",
}
SMALLER: dict[str, dict[str, str]] = {
    "01_quantization_by_eye": {
        r"np.geomspace\(3, 1e6, 18\)": "np.geomspace(3, 1e6, 2)",
        r"\nformats = \([^)]*\)": '\nformats = ("e4m3-1x128", "e2m1-1x32")',
        r"FORMATS = \([^)]*\)": 'FORMATS = ("e4m3-1x128", "nvfp4")',
    },
    "02_grpo_in_25_lines": WARM_UP | {r"range\(15\)": "range(2)", r"words\(256\)": "words(8)"},
    "03_reading_a_mismatch": WARM_UP | {r"words\(24\)": "words(4)", r"step == 225": "step == 1"},
    "04_does_the_update_arrive": {
        r"hidden_size=64, intermediate_size=128, num_layers=2": TINY,
        r"steps=6": "steps=1",
        r"RATES = .*": "RATES = (1e-5,)",
        r"in \(False, True\)": "in (True,)",
        r'    "(nearest|dithered)": .*\n': "",
        r'"abcdefgh"': '"abcd"',
    },
    "05_an_ablation": {r"range\(4000\)": "range(600)"},
    "06_your_own_recipe_and_format": WARM_UP
    | {r"words\(128\)": "words(4)", r'    "fp8-rollout",\n    finer,\n    "w4a16",\n': ""},
    "07_your_own_objective": WARM_UP | {r"range\(12\)": "range(1)", r'    "GRPO": {},\n': ""},
    "08_your_own_environment": {
        r"hidden_size=64, intermediate_size=128, num_layers=2": TINY,
        r"range\(200\)": "range(2)",
        r"range\(64\)": "range(4)",
        r"steps=25": "steps=1",
        r"\b16 \* ": "2 * ",
    },
    "09_devices_and_hosts": {r"steps=2\b": "steps=1"},
}


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.ipynb"


def code_of(name: str) -> str:
    return "\n".join("".join(cell["source"]) for cell in code_cells(path_of(name)))


def text_of(name: str) -> str:
    cells = json.loads(path_of(name).read_text())["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def outputs_of(name: str) -> list[dict]:
    return [output for cell in code_cells(path_of(name)) for output in cell["outputs"]]


def printed_by(name: str) -> str:
    return "".join("".join(output.get("text", ())) for output in outputs_of(name))


def smaller(name: str) -> str:
    """A notebook's code with less to do."""
    code = code_of(name)
    for pattern, small in SMALLER[name].items():
        code, count = re.subn(pattern, small, code)
        assert count, f"{pattern} is not in the notebook any more"
    return code


def run(name: str) -> dict:
    """The names that a notebook leaves, made much smaller."""
    matplotlib.use("agg")
    names: dict = {"__name__": "__main__"}
    exec(compile(smaller(name), f"{name}.ipynb", "exec"), names)
    return names


def unknown_names(code: str) -> list[str]:
    """Names of the two packages that a program uses and that are not there."""
    modules: dict[str, Any] = {}
    missing = []
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                if each.name.split(".")[0] in ("fp8rl_jax", "pallas_kernels"):
                    modules[each.asname or each.name] = importlib.import_module(each.name)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module.split(".")[0] not in ("fp8rl_jax", "pallas_kernels"):
                continue
            home = importlib.import_module(node.module)
            for each in node.names:
                if not hasattr(home, each.name):
                    missing.append(f"{node.module}.{each.name}")
                elif isinstance(getattr(home, each.name), ModuleType | type):
                    modules[each.asname or each.name] = getattr(home, each.name)
    for node in ast.walk(tree):
        chain, at = [], node
        while isinstance(at, ast.Attribute):
            chain.append(at.attr)
            at = at.value
        if not (chain and isinstance(at, ast.Name) and at.id in modules):
            continue
        value = modules[at.id]
        for name in reversed(chain):
            if not hasattr(value, name):
                missing.append(ast.unparse(node))
                break
            value = getattr(value, name)
            if not isinstance(value, ModuleType | type):
                break
    return missing


def test_the_course_is_complete():
    assert [name[:2] for name in NAMES] == [f"0{i}" for i in range(1, 10)]
    assert sorted(SMALLER) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_it_was_committed_with_its_outputs(name):
    found, outputs = code_cells(path_of(name)), outputs_of(name)
    assert [cell["execution_count"] for cell in found] == list(range(1, len(found) + 1))
    assert not [
        output
        for output in outputs
        if output["output_type"] == "error" or output.get("name") == "stderr"
    ]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert all("execution" not in cell["metadata"] for cell in found)
    raw = path_of(name).read_text()
    assert not re.search(r"/(tmp|home|work|root)/", raw) and len(raw) < 300_000


@pytest.mark.parametrize("name", NAMES)
def test_it_opens_with_what_one_will_know_and_ends_with_exercises(name):
    text = text_of(name)
    assert re.match(rf"# {name[:2]}\. ", text) and "\n\nAt the end you " in text.split("\n## ")[0]
    assert "](../docs/" in text.split("\n## ")[0]
    assert "## Exercises" in "\n## " + text.split("\n## ")[-1]
    targets = re.findall(r"\]\(([^)\s#]+)[^)]*\)", text)
    assert [x for x in targets if ":" not in x and not (FOLDER / x).exists()] == []


@pytest.mark.parametrize("name", NAMES)
def test_it_names_what_exists(name):
    assert unknown_names(code_of(name)) == []
    smaller(name)


def test_a_name_that_is_gone_is_seen():
    code = (
        "import fp8rl_jax as fp8rl\nfrom fp8rl_jax import rl\nfrom fp8rl_jax.errors import Gone\n"
    )
    code += "fp8rl.Session.rollout\nfp8rl.Sessio\nrl.LossInputs.of\n"
    assert unknown_names(code) == ["fp8rl_jax.errors.Gone", "fp8rl.Sessio", "rl.LossInputs.of"]


@pytest.mark.parametrize("name", NAMES)
def test_it_ran_in_full_as_it_is(name):
    """Otherwise `make night` is due."""
    assert json.loads(RECORD.read_text())["notebooks"][name] == {
        "code": fingerprint(path_of(name)),
        "verdict": "ran",
    }


def test_what_was_learned_is_what_the_text_says():
    said = r"fp8-rl: accuracy on 256 held-out words ([\d.]+) -> ([\d.]+)"
    before, after = map(float, re.search(said, printed_by("02_grpo_in_25_lines")).groups())
    assert after > before + 0.2
    printed = printed_by("05_an_ablation")
    # its output is of before a level of 95 % was said, too
    verdict = r"fp8-rl - bf16: \S+ \((95 %: )?\S+, \S+\), 5 seeds x 500 problems: no worse"
    assert re.search(verdict, printed)
    assert re.search(r"Seeds finished +5 of 5 +5 of 5", printed)


def test_a_notebook_that_is_not_there_is_one_line():
    with pytest.raises(UserError, match="no notebook begins with 99; there are 01_quantization"):
        main(Arguments(names=("99",)))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name[:2] not in ("05", "09")])
def test_it_runs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names, printed = run(name), capsys.readouterr().out
    if name[:2] == "02":
        assert "bf16: accuracy on 8 held-out words" in printed and "fp8-rl: accuracy" in printed
        assert (tmp_path / "runs" / "notebook" / "config.json").exists()
    if name[:2] == "03":
        assert re.findall(r"^([A-D]):\n   \S", printed, re.M) == [*"ABCD"]
    if name[:2] == "06":
        assert re.search(r"nf4-both +exact True +k3 0\.00e\+00", printed)
    if name[:2] == "08":
        assert names["scores"].rewards.tolist() == [1, 0, 0, 0, 0] and names["scores"].timeouts == 1


def test_the_ablation_runs(tmp_path, monkeypatch, capsys):
    """Its plan, its verdict and its picture; of runs in processes only what they leave."""
    leaves = Path(__file__).with_name("ablation") / "fake_run.py"
    monkeypatch.setattr(runner, "_PROCESS", (sys.executable, str(leaves)))
    monkeypatch.setattr(runner, "_POLL_SECONDS", 0.02)
    monkeypatch.setattr(
        runner,
        "preflight",
        lambda design: {arm.name: Preflight([], {}, 1e9, 1e8) for arm in design.arms},
    )
    monkeypatch.setattr(runner, "fingerprint", lambda design: [{"settings": {}, "golden": {}}])
    monkeypatch.chdir(tmp_path)
    names = run("05_an_ablation")
    printed = capsys.readouterr().out
    assert "fp8-rl - bf16: " in printed and "5 seeds x 1000 problems: " in printed
    assert "metric.margin was 0.02 and is 0.1 since its runs began" in printed
    states = [run["status"] for arm in names["result"].record["arms"] for run in arm["runs"]]
    assert states == ["finished"] * 10 and names["result"].page.exists()
