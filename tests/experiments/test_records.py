"""Records are written whole, by several commands at a time."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

from experiments.record import changed, read, write
from fp8rl_jax.errors import UserError


def add(path: Path, name: str, times: int) -> None:
    for i in range(times):
        with changed(path) as record:
            record[f"{name}{i}"] = [i, 0.5]


def test_no_entry_of_commands_side_by_side_is_lost(tmp_path):
    path = tmp_path / "folder" / "record.json"
    spawn = multiprocessing.get_context("spawn")
    commands = [spawn.Process(target=add, args=(path, name, 20)) for name in "ab"]
    for each in commands:
        each.start()
    for each in commands:
        each.join(60)
    assert read(path) == {f"{name}{i}": [i, 0.5] for name in "ab" for i in range(20)}


def test_what_is_no_record_is_a_line_and_stays(tmp_path):
    path = tmp_path / "record.json"
    assert read(path) is None
    write(path, {"values": [1.0, 2.0]})
    assert path.read_text() == '{\n "values": [1.0,2.0]\n}\n'
    with pytest.raises(ValueError, match="broken"), changed(path) as record:
        record["more"] = 1
        raise ValueError("broken")
    assert json.loads(path.read_text()) == {"values": [1.0, 2.0]}
    for text, message in (("{", "cannot be read"), ("[]", "holds no record")):
        path.write_text(text)
        with pytest.raises(UserError, match=f"record.json {message}"), changed(path):
            pass
        assert path.read_text() == text
    with pytest.raises(UserError, match="cannot be written"):
        write(Path("/proc/nowhere/record.json"), {})
