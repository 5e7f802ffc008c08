"""What is kept of slow checks holds as long as what they depend on, and no longer."""

import json
from datetime import date, timedelta

import kept
import pytest


@pytest.fixture
def checks(tmp_path, monkeypatch):
    """Checks of a little package, and the names that were made anew at a call."""
    code = tmp_path / "fp8rl_jax"
    code.mkdir()
    (tmp_path / "pallas_kernels").mkdir()
    (code / "a.py").write_text('"""One."""\nfrom fp8rl_jax.b import B\n')
    (code / "b.py").write_text("B = 1\n")
    (code / "other.py").write_text("")
    monkeypatch.setattr(kept, "ROOT", tmp_path)
    monkeypatch.setattr(kept, "FILE", tmp_path / "kept.json")
    for name in (kept.ALL, kept.WRITES):
        monkeypatch.delenv(name, raising=False)
    # a day on which neither is due
    days = (date(2026, 1, 1) + timedelta(n) for n in range(kept.EVERY))
    monkeypatch.setattr(kept, "date", Day)
    Day.now = next(
        day
        for day in days
        if not any(kept.is_due("sums", name, {"x": "", "y": ""}, day) for name in ("x", "y"))
    )

    def made(parts=(("x", "1"), ("y", "2"))):
        asked = []

        def make(names):
            asked.extend(names)
            return {name: [f"found {name}"] for name in names}

        kept._kept.cache_clear(), kept._code.cache_clear()
        found = kept.found("sums", dict(parts), ["fp8rl_jax.a"], make)
        assert found == {"x": ["found x"], "y": ["found y"]}
        return asked

    yield made, code
    kept._kept.cache_clear(), kept._code.cache_clear()  # others read the real file


class Day:
    now = date(2026, 1, 1)

    @classmethod
    def today(cls):
        return cls.now


def test_what_holds_is_not_made_again(checks, monkeypatch):
    made, code = checks
    assert made() == ["x", "y"] == made()  # nothing is kept unasked
    monkeypatch.setenv(kept.WRITES, "1")
    assert made() == ["x", "y"] and made() == []
    monkeypatch.delenv(kept.WRITES)
    assert made() == [] and made((("x", "1"), ("y", "3"))) == ["y"]
    monkeypatch.setenv(kept.ALL, "1")
    assert made() == ["x", "y"]
    monkeypatch.setenv(kept.ALL, "")
    seen = set()
    for _ in range(kept.EVERY):
        Day.now += timedelta(1)
        seen |= set(made())
    assert seen == {"x", "y"}


@pytest.mark.parametrize(
    ("file", "text", "counts"),
    [
        ("b.py", "B = 2\n", True),
        ("b.py", "B = 1  # a comment\n", False),
        ("a.py", '"""Another word."""\nfrom fp8rl_jax.b import B\n', False),
        ("other.py", "C = 1\n", False),
        ("recipes.toml", "a = 1\n", True),
    ],
)
def test_code_and_data_count_and_words_do_not(checks, monkeypatch, file, text, counts):
    made, code = checks
    monkeypatch.setenv(kept.WRITES, "1")
    made()
    (code / file).write_text(text)
    assert made() == (["x", "y"] if counts else [])


def test_what_is_kept_is_of_checks_that_passed():
    of = json.loads((kept.Path(__file__).with_name("kept.json")).read_text())
    assert [line for check in of["golden runs"].values() for line in check["found"]] == []
