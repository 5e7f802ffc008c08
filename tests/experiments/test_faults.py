"""The table of faults: of what was injected, by tests that there are, for every row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments import faults

RECORD = faults.ROOT / "experiments/results/faults.json"


def test_the_page_is_the_table_of_the_record():
    page = (faults.ROOT / "docs/faults.md").read_text()
    assert page == faults.page(faults.read(RECORD)), "python -m experiments.faults --render"


def test_every_row_has_a_fault_every_fault_a_test_and_the_record_is_of_them():
    assert list(faults.ROWS) == [f"F{i}" for i in range(1, 19)]
    assert {row for row, _ in faults.FAULTS.values()} == faults.ROWS.keys()
    found = faults.tests()
    assert found.keys() == faults.FAULTS.keys()
    told = json.loads(RECORD.read_text())["injected"]
    assert {(line["fault"], line["test"]) for line in told} == {
        (name, test) for name, tests in found.items() for test in tests
    }


def test_a_line_names_no_place_user_or_process():
    text = f"/tmp/base/test_x0/run/m.jsonl and {faults.ROOT}/docs/a.md:\n at 127.0.0.1:99"
    expected = "run/m.jsonl and docs/a.md: at 127.0.0.1"
    assert faults.cleaned(text, Path("/tmp/base")) == expected
    assert str(faults.ROOT) not in RECORD.read_text() and "pytest-of" not in RECORD.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rendr"], "--rendr: unknown flag; did you mean --render?"),
        (["--render", "--output", "{tmp}/none.json"], "none.json is no record ("),
        (["--render", "--output", "{tmp}/other.json"], "other.json is of other faults ("),
        (["--render", "--output", "{tmp}/list.json"], "list.json is of other faults ("),
        (["--page", "{tmp}"], "--page: {tmp} is a folder"),
        (["--output", "{tmp}/no/x.json"], "is in a folder that does not exist"),
    ],
)
def test_wrong_words_are_one_line_and_nothing_is_injected(
    tmp_path, capsys, monkeypatch, words, message
):
    (tmp_path / "other.json").write_text('{"injected": [{"fault": "rain"}]}')
    (tmp_path / "list.json").write_text("[]")
    monkeypatch.setattr(faults, "injected", lambda: pytest.fail("injected"))
    assert faults.main([word.format(tmp=tmp_path) for word in words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("faults: error: ") and message.format(tmp=tmp_path) in line
