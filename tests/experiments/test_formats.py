"""The study of number formats: bits, errors and mismatch are what they are said to be, on numbers
and a policy that are small; and its record is one that this code makes."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout.tiny import CONFIG, WIDTH, make_policy, make_prompts

from experiments.formats import mismatch, page, rows
from experiments.formats.__main__ import Arguments, Record, main, run, same
from experiments.formats.attention import AttentionRow
from experiments.formats.errors import INPUTS, errors, relative, tensors_of
from experiments.formats.exact import differences
from experiments.formats.rows import ROWS, Row, bits, fingerprint
from experiments.formats.sums import alike
from fp8rl_jax.compare.probe import at_once
from fp8rl_jax.compare.tokens import Tokens
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.forms import trainer_policy

BY_NAME = {row.name: row for row in ROWS}
TOY = str(Path(__file__).parents[1] / "precision" / "toy_formats.py")


@pytest.mark.parametrize(
    ("name", "nominal", "stored"),
    [
        ("bfloat16", 16, 16),
        ("e4m3-128x128", 8 + 32 / 128**2, 8 + 32 / 128**2),
        ("e4m3", 8, 8),
        ("e4m3-1x32", 9, 9),
        ("mxfp8", 8.25, 8.25),
        ("mxfp6", 6.25, 8.25),  # a byte each
        ("mxfp4", 4.25, 4.25),
        ("nvfp4", 4.5, 4.5),
        ("int4-1x128", 4.125, 4.125),
        ("e4m2", 7.25, 16.25),  # kept in bfloat16
    ],
)
def test_bits_with_scales(name, nominal, stored):
    assert bits(name) == pytest.approx({"nominal": nominal, "stored": stored}, abs=1e-3)
    assert name in BY_NAME


def test_a_relative_error_is_of_a_matrix_or_of_the_middle_token():
    x = np.float32([[[3, 4], [0, 0], [30, 40], [6, 8]]])
    rounded = lambda x: x * jnp.float32([[1.5], [1], [1], [1.1]])  # noqa: E731
    assert relative(rounded, x, whole=False) == pytest.approx([0.1], rel=1e-5)  # of 0.5, 0, 0.1
    assert relative(rounded, x, whole=True) == pytest.approx(
        [np.hypot(2.5, 1) / np.sqrt(25 + 2500 + 100)], rel=1e-5
    )


def test_an_interval_of_the_median():
    assert page.median([2.0] * 10) == (2.0, 2.0, 2.0)
    middle, low, high = page.median([1, 1, 2, 2, 3, 3, 4, 4, 50, 60])
    assert middle == 3 and 1 < low < 3 < high < 60


def test_rows_of_a_module_and_what_is_refused(tmp_path, capsys):
    (row,) = rows.chosen(["two_levels"], [TOY])
    assert row == Row("two_levels", "two_levels", "two_levels")
    assert 4.5 < bits(row.name)["nominal"] < 4.6 and 0.05 < fingerprint(row)["weight"] < 0.15
    for words, said in (
        (["--rows", "e4m9"], "--rows: e4m9 unknown (known: bfloat16, "),
        (["--parts", "speed"], "--parts: speed unknown"),
        (["--flows", "up"], "--flows: up unknown"),
        (["--batches", "0"], "--batches: 0 must be at least 1"),
        (["--module", str(tmp_path / "none.py")], "none.py is no Python file"),
        (["--module", __file__], "registers no format"),
    ):
        assert main([*words, "--output", str(tmp_path)]) == 2
        assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_record_goes_on_and_is_of_one_code(tmp_path):
    path, row = tmp_path / "mismatch.json", BY_NAME["e4m3-1xall"]
    record = Record(path, {"prompts": 4})
    record.describe(row)
    record.add(row=row.name, flow="both", batch=0, k3=[0.5])
    again = Record(path, {"prompts": 4})
    again.describe(row)
    assert again.has(row=row.name, flow="both", batch=0) and not again.has(row=row.name, batch=1)
    with pytest.raises(UserError, match="was measured with"):
        Record(path, {"prompts": 5})
    kept = json.loads(path.read_text())
    kept["rows"][row.name]["fingerprint"]["weight"] *= 1.01
    path.write_text(json.dumps(kept))
    with pytest.raises(UserError, match="has e4m3-1xall of other code"):
        Record(path, {"prompts": 4}).describe(row)


def test_the_committed_records_are_of_this_code():
    now, of_no_row = {}, set()
    for path in page.RECORDS.glob("*.json"):
        for name, known in json.loads(path.read_text())["rows"].items():
            if name not in BY_NAME:
                of_no_row.add(name)
                continue
            if name not in now:
                row = BY_NAME[name]
                now[name] = {"activation": row.activation, "gradient": row.gradient}
                now[name] |= {"bits": bits(name), "fingerprint": fingerprint(row)}
            assert same(known, now[name]), f"{path.name}, {name}: python -m experiments.formats"
    assert now.keys() == BY_NAME.keys() and of_no_row == {"two_levels"}


@pytest.fixture
def batch(monkeypatch):
    monkeypatch.setattr(mismatch, "SETS", ("one", "two"))
    given = make_prompts(lengths=[4, 9, 7, 5], ids=range(4))
    return mismatch.Batch(make_policy(), given, seed=0, new=3)


@pytest.mark.slow
def test_flows_of_a_row(batch):
    """The unified flow is the trainer's program on the trainer's own form, to the bit; weights and
    activations make less than both, and the tokens of BASE are its own."""
    row = BY_NAME[mismatch.BASE]
    found = dict(batch.measure(row, mismatch.FLOWS))
    assert found.keys() == set(mismatch.FLOWS)
    assert {of["tokens"] for of in found.values()} == {12}
    medians = {flow: np.median(of["k3"]) for flow, of in found.items()}
    assert medians["unified"] < min(medians["weights"], medians["activations"]) < medians["both"]
    cast = AttentionRow("e5m2")
    found = dict(batch.measure(cast, cast.flows))
    assert 0 <= np.median(found["unified"]["k3"]) < np.median(found["both"]["k3"]) < 0.05
    side = mismatch.served(batch.policy, row)
    rollout = batch.sampled(side)
    np.testing.assert_array_equal(rollout.tokens, batch.base.tokens)
    tokens = Tokens(batch.given.tokens, batch.given.lengths, rollout.tokens, rollout.mask.sum(1))
    own = trainer_policy(batch.policy, row.unified, jnp.dtype("float32"), "reference")
    np.testing.assert_array_equal(batch.scored(side, rollout), jax.jit(at_once)(own, tokens))


def test_sums_that_are_exact_have_no_order():
    """Of numbers of few bits under powers of two."""
    drawn = np.random.default_rng(0).normal(size=(1, 20, 96)).astype(np.float32)
    tensors = {
        "activation": dict.fromkeys(INPUTS.values(), drawn),
        "weight": dict.fromkeys(INPUTS, drawn[:, ::-1]),
    }
    found = {name: alike(BY_NAME[name], tensors) for name in ("mxfp4", "mxfp6", "e2m1", "bfloat16")}
    assert found["mxfp4"] == found["mxfp6"] == 1 and 0 < found["e2m1"] < found["bfloat16"] < 1


@pytest.mark.slow
def test_errors_by_kind_and_exact_mode():
    policy, given = make_policy(), make_prompts(lengths=[4, 9, 7, 5], ids=range(4))
    real = np.arange(WIDTH) < np.asarray(given.lengths)[:, None]
    tensors = tensors_of(policy, np.where(real, given.tokens, -1), real)
    assert tensors["gradient"]["k_proj"].shape == (1, 25, 64)
    assert tensors["activation"]["down_proj"].shape == (1, 25, CONFIG.intermediate_size)
    fine, coarse = (errors(BY_NAME[name], tensors) for name in ("mxfp8", "mxfp4"))
    for role, kinds in fine.items():
        for kind, error in kinds.items():
            assert 0.01 < error < 0.05 < coarse[role][kind] < 0.2
    assert errors(BY_NAME["int4-1x32"], tensors).keys() == {"weight"}
    for row in (BY_NAME["mxfp8"], AttentionRow("e4m3")):
        assert differences(policy, row, given, 3) == {"largest": 0.0, "tokens": 12}


@pytest.mark.slow
def test_a_row_of_a_module_is_trained_and_goes_on(tmp_path, capsys):
    words = {"steps": 2, "batch_size": 4, "seeds": 2, "output": str(tmp_path)}
    arguments = Arguments(parts=("learning",), rows=("two_levels",), module=(TOY,), **words)
    run(arguments)
    entries = json.loads((tmp_path / "learning.json").read_text())["entries"]
    assert [(entry["row"], entry["seed"]) for entry in entries] == [
        *(("compute", 0), ("compute", 1), ("two_levels", 0), ("two_levels", 1))
    ]
    assert all(4 < entry["loss"] < 7 for entry in entries)
    assert entries[0]["loss"] == entries[0]["unquantized"] != entries[2]["loss"]
    capsys.readouterr()
    run(arguments)
    assert capsys.readouterr().err.count("learning, seed") == 0


def test_the_page_of_a_record(tmp_path):
    """A row of bfloat16 and one of mxfp8, each flow in its column, and only what was measured."""
    described = {
        name: {"activation": BY_NAME[name].activation, "gradient": BY_NAME[name].gradient}
        | {"bits": bits(name), "fingerprint": {}}
        for name in ("bfloat16", "mxfp8")
    }
    entries = [
        {"row": name, "flow": flow, "batch": 0, "k3": [value] * 10}
        for name, flow, value in (
            *(("bfloat16", "both", 1e-3), ("mxfp8", "both", 0.04)),
            *(("mxfp8", "weights", 0.02), ("mxfp8", "unified", 0.01)),
        )
    ]
    settings = {"model": "m", "prompts": 4, "new_tokens": 16}
    record = {"settings": settings, "rows": described, "entries": entries}
    (tmp_path / "mismatch.json").write_text(json.dumps(record))
    first, *rest = page.tables(page.Records(tmp_path))
    assert [each.heading for each in rest] == ["Beside fake quantization in torch"]
    again = {"row": "mxfp8", "flow": "both", "batch": 1, "k3": [0.05] * 10}
    (tmp_path / "mismatch.json").write_text(json.dumps(record | {"entries": [*entries, again]}))
    *_, other = page.tables(page.Records(tmp_path))
    cells = ["0.04 (0.04 to 0.04)", "0.05 (0.05 to 0.05)", "0.04 / 0.05"]
    assert other.rows == [["`mxfp8`", *cells]]
    assert "Here 0 of 1 are" in " ".join(other.about.split())
    assert first.rows[0][:3] == ["`bfloat16`", "the same", "16.00"]
    assert first.rows[1][:3] == ["`mxfp8`", "the same", "8.25"]
    cells = ["0.04 (0.04 to 0.04)", "0.04", "0.02 (0.02 to 0.02)", "0.01 (0.01 to 0.01)"]
    assert first.rows[1][5:] == cells
