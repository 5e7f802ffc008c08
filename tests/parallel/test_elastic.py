"""A run that goes on on other devices than those of its checkpoint."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parallel.helpers import run_on_devices
from tiny_run import LEARNS, measured, train, write_run

from fp8rl_jax.models.forward import forward
from fp8rl_jax.models.logprobs import token_logprobs
from fp8rl_jax.parallel import mesh_text
from fp8rl_jax.weights.load import load_policy

RUN = {"trainer": {"steps": 2}, "checkpoint": {"every": 1}}
ON_FSDP = "fsdp 4 (4 devices, 1 process)"


@jax.jit
def logprobs(policy):
    tokens = jax.random.randint(jax.random.key(1), (4, 12), 0, 256)
    segments = jnp.ones(tokens.shape, jnp.int32)
    hidden = forward(policy, tokens, segment_ids=segments, keep_cache=False).hidden
    return token_logprobs(hidden[:, :-1], policy, tokens[:, 1:], jnp.float32(1))[0]


@pytest.mark.slow
def test_a_run_goes_on_on_another_mesh_and_on_one_device(tmp_path, caplog):
    """The same prompts, tokens and rewards; what is measured and learned up to the order of
    sums."""
    caplog.set_level(logging.INFO, "fp8rl")
    run_file, script = write_run(tmp_path, LEARNS, RUN), Path(__file__).with_name("elastic_run.py")
    said = run_on_devices(script, 4, run_file, str(tmp_path))["said"]
    shutil.copytree(tmp_path / "first", tmp_path / "alone")
    assert train(run_file, tmp_path / "alone", "--resume") == 0

    there, here = "data 2 x tensor 2 (4 devices, 1 process)", "(1 device, 1 process)"
    for now, lines in ((there, said), (here, caplog.messages)):
        line = f"mesh was '{ON_FSDP}' and is '{now}'"
        assert [each for each in lines if "mesh" in each] == [f"resumed with a change: {line}"]
    assert line in json.loads((tmp_path / "alone/run.json").read_text())["changed"]
    expected = measured(tmp_path / "whole")
    assert expected[1]["optim/grad_norm"] > 0.1
    sampled = (tmp_path / "whole/samples.jsonl").read_text()
    end = logprobs(load_policy(tmp_path / "whole/model"))
    begin = logprobs(load_policy(tmp_path / "first/model"))
    assert np.abs(end - begin).max() > 0.1
    for name in ("moved", "alone"):
        found = measured(tmp_path / name)
        assert found[0] == expected[0] and len(found) == len(expected) == 2
        assert found[1] == pytest.approx(expected[1], rel=1e-4, abs=1e-6)
        assert (tmp_path / name / "samples.jsonl").read_text() == sampled
        np.testing.assert_allclose(
            logprobs(load_policy(tmp_path / name / "model")), end, rtol=0, atol=1e-4
        )


def test_a_mesh_is_named_by_its_axes_devices_and_processes():
    devices = np.array([SimpleNamespace(process_index=i // 2) for i in range(4)])
    mesh = SimpleNamespace(
        shape={"data": 1, "fsdp": 2, "expert": 1, "tensor": 2}, devices=devices, size=4
    )
    assert mesh_text(mesh) == "fsdp 2 x tensor 2 (4 devices, 2 processes)"  # type: ignore[arg-type]
