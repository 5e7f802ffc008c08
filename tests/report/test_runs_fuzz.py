"""Damaged run directories: read, or refused with a line that names the file; nothing else."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8rl_jax.errors import UserError
from fp8rl_jax.report.page import write_report
from fp8rl_jax.report.runs import read_runs

GOOD = '{"step": 0, "loss": 1}\n'
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(st.characters(), max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=4,
)
ROWS = st.fixed_dictionaries(
    {"step": st.integers(0, 9) | VALUES}, optional={"loss": VALUES, "reward/mean": VALUES}
)
LINES = (
    st.text(max_size=12)
    | (ROWS | VALUES).map(json.dumps)
    | ROWS.map(json.dumps).map(lambda line: line[:-2])
)
DEEP = "[" * 100_000
LONG = "9" * 5000


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(LINES, max_size=4),
    st.sampled_from(["metrics.jsonl", "samples.jsonl", "run.json", "config.toml"]),
)
def test_any_lines_in_any_file(tmp_path, lines, name):
    files = {"metrics.jsonl": GOOD, "samples.jsonl": "", "run.json": "{}", "config.toml": ""}
    files[name] = "\n".join(lines)
    for file, text in files.items():
        (tmp_path / file).write_text(text, encoding="utf-8", errors="replace", newline="")
    try:
        (run,) = read_runs([tmp_path])
    except UserError as error:
        assert all(str(tmp_path / name) in line for line in str(error).split("\n"))
    else:
        assert all(isinstance(value, int | float) for row in run.metrics for value in row.values())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("metrics.jsonl", GOOD + '{"step": 1, "loss": 1' + "0" * 400 + "}\n"),
        ("metrics.jsonl", GOOD + '{"step": 1, "loss": ' + LONG + "}\n"),
        ("metrics.jsonl", DEEP + "\n" + GOOD),
        ("samples.jsonl", DEEP),
        ("samples.jsonl", '{"step": 0, "prompt": "\\ud800", "completion": ""}\n'),
        ("run.json", DEEP),
        ("run.json", '{"a": "\\udc00"}'),
        ("config.toml", "a = " + DEEP),
        ("config.toml", "a = " + LONG),
        ("config.toml", "a." * 3000 + "b = 1"),
    ],
)
def test_damage_that_caused_tracebacks_is_refused(tmp_path, name, text):
    (tmp_path / "metrics.jsonl").write_text(GOOD)
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=name):
        write_report([tmp_path], tmp_path / "report.html")
