import json

import pytest
from report.synthetic import write_run

from fp8rl_jax.errors import UserError
from fp8rl_jax.report.runs import find_runs, flatten, read_runs


def test_a_parent_stands_for_the_runs_right_below_it(tmp_path):
    bf16, fp8 = write_run(tmp_path / "bf16", "bf16"), write_run(tmp_path / "fp8-rl", "fp8-rl")
    (tmp_path / "model").mkdir()
    assert find_runs([tmp_path]) == [bf16, fp8]
    assert find_runs([fp8, tmp_path]) == [fp8, bf16]
    assert [run.name for run in read_runs([bf16, fp8])] == ["bf16", "fp8-rl"]


def test_runs_of_the_same_name_keep_what_tells_them_apart(tmp_path):
    directories = [write_run(tmp_path / seed / "bf16", "bf16") for seed in ("seed0", "seed1")]
    assert [run.name for run in read_runs(directories)] == ["seed0/bf16", "seed1/bf16"]


def test_directories_without_metrics_are_all_named(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError) as fault:
        find_runs([tmp_path / "empty", tmp_path / "missing"])
    empty, missing = str(fault.value).splitlines()
    assert empty.startswith(f"{tmp_path / 'empty'}: no metrics.jsonl")
    assert missing == f"{tmp_path / 'missing'}: no such directory"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: not a JSON object with a whole number"),
        ('{"step": 1.5}', "line 2: not a JSON object with a whole number"),
        ('{"step": 1, "reward/mean": "high"}', 'line 2: reward/mean is "high", not a number'),
    ],
)
def test_damaged_lines_are_named(tmp_path, line, reason):
    run = write_run(tmp_path / "run", "bf16")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[1] = line
    lines[4] = "null"
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError) as fault:
        read_runs([run])
    first, second = str(fault.value).splitlines()
    assert first.startswith(f"{run / 'metrics.jsonl'}: {reason}")
    assert "line 5: not a JSON object" in second


def test_an_incomplete_last_line_is_left_out_and_noted(tmp_path):
    path = write_run(tmp_path / "run", "bf16", steps=5) / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 5, "reward/me')
    (run,) = read_runs([path.parent])
    assert run.series("reward/mean")[0] == [0, 1, 2, 3, 4]
    assert run.notes == ["metrics.jsonl: line 6, the last, is cut off and left out"]


def test_what_is_missing_or_not_finite_is_no_point_of_a_series(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    rows = [
        {"step": 0, "reward/mean": None},
        {"step": 1, "reward/mean": 0.5},
        {"step": 2},
        {"step": 3, "reward/mean": float("nan")},
    ]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (read,) = read_runs([run])
    assert read.series("reward/mean") == ([1], [0.5])
    assert read.notes == ["no samples.jsonl", "no config.toml", "no run.json"]


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("config.toml", "recipe =", "not TOML"),
        ("run.json", "{", "not JSON"),
        ("run.json", "[]", "not a JSON object"),
        ("samples.jsonl", '{"step": 0, "prompt": "p"}\n', "line 1: no completion"),
        ("metrics.jsonl", "", "no step in it yet"),
    ],
)
def test_damaged_files_are_named(tmp_path, file, text, reason):
    run = write_run(tmp_path / "run", "bf16")
    (run / file).write_text(text)
    with pytest.raises(UserError) as fault:
        read_runs([run])
    assert str(fault.value).startswith(f"{run / file}: {reason}")


def test_bytes_that_are_not_utf8_are_named(tmp_path):
    run = write_run(tmp_path / "run", "bf16")
    (run / "samples.jsonl").write_bytes(b'{"step": 0, "prompt": "\xff"}\n')
    with pytest.raises(UserError, match="samples.jsonl: not UTF-8 at byte 23"):
        read_runs([run])


def test_flatten_joins_keys_with_dots():
    assert flatten({"a": {"b": {"c": 1}, "d": [2]}, "e": 3}) == {"a.b.c": 1, "a.d": [2], "e": 3}
