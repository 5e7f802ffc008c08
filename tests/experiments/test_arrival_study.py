"""The study of what arrives: each run's masters as other policies serve them, in parts."""

from __future__ import annotations

import json

import pytest
import tomli_w
from tiny_run import LEARNS, write_run

from experiments.arrival import SERVED, Arguments, main, run


@pytest.mark.slow
def test_the_study_goes_on_from_what_it_has_and_serves_the_masters_in_four_ways(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    evaluated = {"every": 2, "examples": 8, "batch_size": 8, "samples": 2, "temperature": 1.0}
    write_run(
        tmp_path,
        LEARNS,
        {"trainer": {"steps": 2}, "evaluation": evaluated, "checkpoint": {"every": 0}},
    )
    plan = {
        "question": "Does the update arrive?",
        "base": ["run.toml"],
        "output": "out",
        "seeds": [0],
        "baseline": "float32",
        "allow": ["model.dither"],
        "metric": {"margin": 0.1},
        "settings": {"precision.exact": False},
        "arms": {
            "float32": {"recipe": "bf16"},
            "drawn": {
                "recipe": "bf16",
                "compute_dtype": "bfloat16",
                "precision.weight_rounding": "stochastic",
            },
        },
    }
    (tmp_path / "study.toml").write_text(tomli_w.dumps(plan))
    arguments = Arguments("study.toml", "results.json", "ablation.json", arms=("float32",))
    run(arguments)
    first = json.loads((tmp_path / "results.json").read_text())["runs"]
    # in float32 with nothing quantized, the masters are what the run itself serves
    whole = first["float32-0"]
    assert set(whole["served"]) == set(SERVED) and whole["served"]["masters"] == whole["outcome"]
    assert whole["series"]["sync/arrived"]["values"] == [pytest.approx(1.0)] * 2
    assert not (tmp_path / "out" / "float32-0" / "checkpoints").exists()
    assert [
        arm["name"] for arm in json.loads((tmp_path / "ablation.json").read_text())["arms"]
    ] == ["float32"]
    run(Arguments("study.toml", "results.json", "ablation.json"))
    assert "float32-0: started" not in capsys.readouterr().out.split("drawn-0: started")[1]
    both = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert both["float32-0"] == whole and list(both) == ["float32-0", "drawn-0"]
    assert len(json.loads((tmp_path / "ablation.json").read_text())["arms"]) == 2
    assert main(["--ablation", "study.toml", "--arms", "none", "--output", "results.json"]) == 2
    assert "--arms: none: none of the ablation's" in capsys.readouterr().err
