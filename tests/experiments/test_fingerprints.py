"""The committed records are of code that behaves as this does, and other records are compared with
them."""

from __future__ import annotations

import copy
import json

import kept
import pytest

from experiments import behaviour, fingerprints
from experiments.behaviour import measured
from experiments.command import run_command
from experiments.fingerprints import (
    OTHERS,
    RECORDS,
    Arguments,
    run,
    stale,
    unlike,
    with_fingerprints,
)
from fp8rl_jax.config.files import dump_toml
from fp8rl_jax.errors import UserError

GOLDEN = ("fp8rl_jax.ablation.behaviour", "fp8rl_jax.ablation.golden")
KEPT = {path.stem: json.loads(path.read_text()) for path in RECORDS.glob("*.json")}


def test_records_have_fingerprints(monkeypatch):
    monkeypatch.chdir(fingerprints.ROOT)
    assert all("fingerprint" in record for record in KEPT.values())
    assert len(with_fingerprints()) == len(KEPT) + len(OTHERS)


@pytest.mark.slow
def test_the_code_behaves_as_that_of_the_records(monkeypatch):
    """Here a change of behaviour is seen: the record has to be made again, by its command."""
    monkeypatch.chdir(fingerprints.ROOT)
    records = with_fingerprints()
    parts = {
        name: "\0".join(
            [
                json.dumps(before),
                *(dump_toml(arm.config) for arm in design.arms),
                dump_toml(design.base),
            ]
        )
        for name, (design, before, _) in records.items()
    }

    def make(names):
        return dict(zip(names, stale({name: records[name] for name in names}), strict=True))

    found = kept.found("golden runs", parts, GOLDEN, make)
    lines = [line for lines in found.values() for line in lines]
    assert not lines, "\n".join(lines)


def test_a_record_of_other_code_is_named_with_its_command(monkeypatch, tmp_path, capsys):
    golden = {"bf16": {"rounding": "float32", "loss": [0.5]}}
    taken = {"settings": {"all": {"rl.clip_low": 0.2}, "arms": {}}, "golden": golden}
    monkeypatch.setattr(fingerprints, "fingerprint", lambda *designs: [taken] * len(designs))
    monkeypatch.setattr(fingerprints, "RECORDS", tmp_path)
    monkeypatch.setattr(fingerprints, "OTHERS", ())
    monkeypatch.chdir(fingerprints.ROOT)
    record = KEPT["demo"] | {"fingerprint": copy.deepcopy(taken)}
    (tmp_path / "demo.json").write_text(json.dumps(record))
    older = {key: value for key, value in KEPT["recipes"].items() if key != "fingerprint"}
    (tmp_path / "recipes.json").write_text(json.dumps(older))
    run(Arguments())
    assert capsys.readouterr().out == "demo: made by code that behaves as this does\n"
    golden["bf16"]["loss"] = [0.6]
    with pytest.raises(SystemExit, match="1"):
        run(Arguments(("demo",)))
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("demo: bf16: loss of step 0 was 0.5 and is 0.6, ")
    assert "fp8rl ablate experiments/ablations/demo.toml" in line
    assert run_command("fingerprints", Arguments, run, ["--names", "recipes", "other"]) == 2
    assert "--names: other, recipes: no record with a fingerprint" in capsys.readouterr().err


def test_a_record_of_no_ablation_is_of_the_recipes_that_it_measured(monkeypatch, tmp_path, capsys):
    designs = []

    def fingerprint(design):
        designs.append(design)
        golden = {arm.name: {"rounding": "float32", "loss": [loss]} for arm in design.arms}
        return [{"settings": {"all": {}, "arms": {}}, "golden": golden}]

    loss = 0.5
    monkeypatch.setattr(behaviour, "fingerprint", fingerprint)
    monkeypatch.setattr(fingerprints, "fingerprint", fingerprint)
    monkeypatch.setattr(fingerprints, "RECORDS", tmp_path)
    monkeypatch.setattr(fingerprints, "RESULTS", tmp_path)
    monkeypatch.setattr(fingerprints, "OTHERS", ("depth",))
    record = {
        "behaviour": measured(["bf16", "jet-rl"], ["float32"]),
        "made": {"command": ["python", "-m", "experiments.depth"]},
    }
    (design,) = designs
    found = [(arm.config.recipe, arm.config.compute_dtype) for arm in design.arms]
    assert found == [("bf16", "float32"), ("jet-rl", "float32")]
    assert measured(["bf16", "jet-rl"], ["float32"], record) == record["behaviour"]
    (tmp_path / "depth.json").write_text(json.dumps(record))
    run(Arguments())
    assert capsys.readouterr().out == "depth: made by code that behaves as this does\n"
    with pytest.raises(UserError, match="of other recipes or dtypes"):
        measured(["bf16"], ["float32"], record)
    with pytest.raises(UserError, match="of other recipes or dtypes"):
        measured(["bf16", "jet-rl"], ["float32"], {"made": record["made"]})  # older
    loss = 0.6
    with pytest.raises(UserError, match="of other code; name another: bf16-float32: loss of step"):
        measured(["bf16", "jet-rl"], ["float32"], record)
    with pytest.raises(SystemExit, match="1"):
        run(Arguments(("depth",)))
    assert "python -m experiments.depth, and commit what it makes" in capsys.readouterr().out


def test_a_record_is_made_anew_with_its_fingerprint_or_stays(monkeypatch, tmp_path):
    def fingerprint(design):
        return [{"golden": {arm.name: arm.config.recipe for arm in design.arms}}]

    monkeypatch.setattr(behaviour, "fingerprint", fingerprint)
    monkeypatch.setattr(fingerprints, "RESULTS", tmp_path)
    monkeypatch.setattr(fingerprints, "ROOT", tmp_path)
    (tmp_path / "maker.py").write_text(
        "import json, sys\n"
        "print('a table')\n"
        "json.dump({'made': {'command': ['python', '-m', 'maker', *sys.argv[1:]]}, 'k3': 2},"
        " open(sys.argv[1], 'w'))\n"
        "sys.exit(int(sys.argv[2]))\n"
    )
    name = "exact/identity"
    path = tmp_path / f"{name}.json"
    path.parent.mkdir()
    path.with_suffix(".txt").write_text("an older one")
    for status in "10":
        command = ["python", "-m", "maker", str(path), status]
        before = json.dumps({"made": {"command": command}, "k3": 1})
        path.write_text(before)
        found = run_command("fingerprints", Arguments, run, ["--names", name, "--anew"])
        if status == "1":
            assert found == 2 and path.read_text() == before
            assert path.with_suffix(".txt").read_text() == "an older one"
    record = json.loads(path.read_text())
    assert found == 0 and record["k3"] == 2 and record["made"]["command"] == command
    arms = fingerprints.ARMS[name]
    golden = {arm: settings["recipe"] for arm, settings in arms.items()}
    assert record["behaviour"] == {"arms": arms, "fingerprint": {"golden": golden}}
    assert path.with_suffix(".txt").read_text() == "a table\n"
    assert Arguments(("demo",), anew=True).problems() and Arguments(anew=True).problems()


def changed(arm: str, less: float = 0.0, verdict: str = "") -> dict:
    """The demo's record with other outcomes of an arm, or another verdict on it."""
    record = copy.deepcopy(KEPT["demo"])
    for each in record["arms"]:
        for made in each["runs"] if each["name"] == arm else []:
            made["outcome"] -= less
    for row in record["comparisons"]:
        if row["arm"] == arm and verdict:
            row["verdict"] = verdict
    return record


def test_verdicts_and_outcomes_are_held_against_the_committed_ones():
    kept = KEPT["demo"]
    assert [*unlike(kept, kept)] == [*unlike(kept, changed("jet-rl", 0.0005))] == []
    assert [*unlike(kept, changed("jet-rl", verdict="worse"))] == [
        "jet-rl is 'worse', and 'no worse' in the committed record"
    ]
    (line,) = unlike(kept, changed("bf16", 0.03))
    there = fingerprints.outcomes(kept["arms"][0]["runs"])
    assert line.startswith(f"bf16 has eval/accuracy {there.mean - 0.03:.3f} (")
    assert line.endswith(
        f"and {there.mean:.3f} ({there.low:.3f} to {there.high:.3f}) in the committed record"
    )
    assert len([*unlike(kept, changed("fp8-rl", 0.03, "can't tell"))]) == 2
    fewer = copy.deepcopy(kept)
    del fewer["arms"][-1]
    assert [*unlike(kept, fewer)] == ["jet-rl: of one of the records only"]


def test_the_command_ends_with_a_status(tmp_path, capsys):
    path = tmp_path / "ablation.json"
    path.write_text(json.dumps(KEPT["demo"]))
    against = Arguments(("demo",), str(path))
    run(against)
    (line,) = capsys.readouterr().out.splitlines()
    assert line == "demo: agrees with the committed record in verdicts and outcomes"
    path.write_text(json.dumps(changed("fp8-rl", verdict="worse")))
    with pytest.raises(SystemExit, match="1"):
        run(against)
    assert capsys.readouterr().out.startswith("demo: fp8-rl is 'worse'")
    assert run_command("fingerprints", Arguments, run, ["--against", str(path)]) == 2
    assert "--against: name the one record" in capsys.readouterr().err
    assert run_command("fingerprints", Arguments, run, ["--names", "demo", "--against", "no"]) == 2
    assert "no: is no record" in capsys.readouterr().err
