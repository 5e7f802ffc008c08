"""A whole run in two processes against the same run in one, on the same mesh of 4 devices."""

from __future__ import annotations

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from parallel.helpers import run_processes
from rollout.vllm_replay import Replay
from tiny_run import CARRIES, LEARNS, measured, write_run

from fp8rl_jax.weights.load import load_policy

RUN = {
    "trainer": {"steps": 3},
    "evaluation": {"every": 2, "examples": 12, "batch_size": 8},
    "checkpoint": {"every": 1},
}
# fsdp is the axis between the two processes, so neither holds a whole parameter
FLAGS = ("--recipe", "fp8-rl", "--mesh.data", "1", "--mesh.fsdp", "2", "--mesh.tensor", "2")


def damage(checkpoint: Path, process: int) -> None:
    """Cuts off what one process alone wrote."""
    shards = list(checkpoint.glob(f"default/ocdbt.process_{process}/d/*"))
    assert shards
    for path in shards:
        path.write_bytes(path.read_bytes()[:100])


@pytest.mark.slow
def test_two_processes_train_the_curve_of_one_and_resume_it(tmp_path):
    run_file, one, two = (
        write_run(tmp_path, LEARNS, {"task": {"eval_size": 12}}, RUN),
        tmp_path / "one",
        tmp_path / "two",
    )
    script = Path(__file__).with_name("train_run.py")
    run_processes(script, 1, 4, run_file, one, *FLAGS, timeout=600)
    run_processes(script, 2, 2, run_file, two, *FLAGS, "--trainer.steps", "2", timeout=600)
    shutil.copytree(two, alone := tmp_path / "alone")
    # the second process cannot read its part: both must go back to the checkpoint before
    damage(two / "checkpoints" / "2", process=1)
    main, other = run_processes(script, 2, 2, run_file, two, *FLAGS, "--resume", timeout=600)

    assert len(list(two.glob("checkpoint-2-damaged-*"))) == 1
    assert {"metrics.jsonl", "samples.jsonl", "config.toml", "run.json"} <= set(main["written"])
    assert set(other["written"]) <= {"checkpoints"}
    # what two have begun, one goes on with
    run_processes(script, 1, 4, run_file, alone, *FLAGS, "--resume", timeout=600)
    expected, found = measured(one), measured(two)
    assert [row["step"] for row in found] == [row["step"] for row in expected] == [0, 1, 2, 3]
    for rows in (found, measured(alone)):
        for a, b in zip(expected, rows, strict=True):
            assert b == pytest.approx(a, rel=1e-4, abs=1e-6), a["step"]
    assert found[0]["reward/mean"] > 0.1 and found[0]["optim/grad_norm"] > 0.1
    assert found[0]["eval/accuracy"] != found[2]["eval/accuracy"]
    for run in (two, alone):
        assert (run / "samples.jsonl").read_text() == (one / "samples.jsonl").read_text()
    models = [jax.tree.leaves(load_policy(run / "model")) for run in (one, two)]
    for a, b in zip(*models, strict=True):
        # an exported weight is bfloat16: its last bit is 2^-8 of it, and a step of the optimizer
        # 1e-2
        np.testing.assert_allclose(a, b, rtol=2**-7, atol=1e-4)


@pytest.mark.slow
def test_a_session_in_two_processes_is_that_of_one(tmp_path):
    """Each calls it with all prompts and all rewards, and computes its own rows. With the paged
    engine, where the run above has the static one."""
    script = Path(__file__).with_name("session_run.py")
    ((one,), (two, other)) = (
        run_processes(script, count, 4 // count, str(tmp_path / str(count)), timeout=600)
        for count in (1, 2)
    )
    assert two == other and [row["texts"] for row in two["rows"]] == [
        row["texts"] for row in one["rows"]
    ]
    assert two["rows"][0]["rollout/decode_steps"] > 6  # slots were taken by one row after another
    for a, b in zip(one["rows"], two["rows"], strict=True):
        a, b = ({name: x for name, x in row.items() if name != "texts"} for row in (a, b))
        assert b == pytest.approx(a, rel=1e-4, abs=1e-6)
        assert a["rollout/support_mean"] == 200 and 0 < a["entropy"] <= np.log(200)
    assert [x for row in two["logprobs"] for x in row] == pytest.approx(
        [x for row in one["logprobs"] for x in row], abs=1e-4
    )
    for a, b in zip(*(jax.tree.leaves(load_policy(tmp_path / name)) for name in "12"), strict=True):
        np.testing.assert_allclose(a, b, rtol=2**-7, atol=1e-4)


@pytest.mark.slow
def test_rollouts_of_vllm_in_two_processes(tmp_path):
    """The first pushes and asks, both learn from the answers: as one process on as many devices."""
    script, found = Path(__file__).with_name("vllm_run.py"), []
    for count in (1, 2):
        with Replay() as server:
            server.work = "session"
            found += run_processes(
                script, count, 2 // count, server.address, str(tmp_path), timeout=600
            )
            assert server.pushes == 3
    one, two, other = found
    assert two == other and len(one) == 2
    for a, b in zip(one, two, strict=True):
        # sync/* are not defined before the masters have moved
        assert b == pytest.approx(a, rel=1e-4, abs=1e-6, nan_ok=True)
        assert b["mismatch/k3"] < 1e-8


@pytest.mark.slow
def test_completions_are_carried_over_in_two_processes(tmp_path):
    """As in one process on as many devices."""
    run_file, script = write_run(tmp_path, CARRIES, RUN), Path(__file__).with_name("train_run.py")
    flags = (*FLAGS[2:], "--rollout.paged.extra-prompts", "4", "--rollout.paged.slots", "2")
    for count in (1, 2):
        run_processes(
            script, count, 4 // count, run_file, tmp_path / str(count), *flags, timeout=600
        )
    expected, found = measured(tmp_path / "1"), measured(tmp_path / "2")
    assert len(expected) == len(found) == 4
    for a, b in zip(expected, found, strict=True):
        assert {name: b[name] for name in a} == pytest.approx(a, rel=1e-4, abs=1e-6), a["step"]
    assert max(row["rollout/stale_tokens"] for row in found[:3]) > 0
