"""The engine with a real vLLM: `make test-vllm`. FP8RL_VLLM_PYTHON names its interpreter."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout.vllm_replay import ANSWERS, Replay, is_push
from rollout.vllm_work import (
    KEY,
    block_engine,
    blocky,
    compared,
    make_engine,
    make_session,
    policy,
    prompts,
    sampling,
    steps,
)

import fp8rl_jax as fp8rl
from fp8rl_jax.config.recipe import RECIPES
from fp8rl_jax.rollout.calibration import calibrate_on_prompts
from fp8rl_jax.rollout.engine import LocalEngine
from fp8rl_jax.rollout.offline import logprobs
from fp8rl_jax.rollout.sync import SyncContext

PYTHON = os.environ.get("FP8RL_VLLM_PYTHON", "")
CPU = Path("/proc/cpuinfo")


def teacher_forced(rollout, weights, recipe="bf16", dtype="float32"):
    """Our trainer's log-probabilities of a rollout's tokens, and vLLM's."""
    lengths = np.asarray(rollout.prompts.lengths)
    samples = len(rollout.tokens) // len(lengths)
    rows, theirs = [], []
    for b, mask in enumerate(np.asarray(rollout.mask)):
        prompt = rollout.prompts.tokens[b // samples, : lengths[b // samples]]
        rows.append([*prompt.tolist(), *np.asarray(rollout.tokens)[b, mask].tolist()])
        theirs.append(np.asarray(rollout.policy_logprobs)[b, mask])
    ours = logprobs(weights, rows, RECIPES[recipe], jnp.dtype(dtype))
    return (
        np.concatenate([row[-len(x) :] for row, x in zip(ours, theirs, strict=True)]),
        np.concatenate(theirs),
    )


@pytest.fixture(scope="module")
def where():
    """Settings of a vLLM; another file has these tests with another."""
    return {"python": PYTHON}


@pytest.fixture(scope="module")
def engine(where):
    made = make_engine(**where)
    yield made
    made.stop()


def test_log_probabilities_after_each_of_several_pushes(engine):
    """|dlogp| < 1e-3 in float32, against our trainer; the old weights are far from it."""
    for seed in (0, 1, 2, 0):
        engine.sync(policy(seed))
        rollout = engine.generate(prompts(), 3, sampling(), KEY)
        ours, theirs = teacher_forced(rollout, policy(seed))
        assert np.abs(ours - theirs).max() < 1e-3
        other, _ = teacher_forced(rollout, policy(seed + 1))
        assert np.abs(other - theirs).max() > 1e-2
        assert rollout.weight_version == engine.version


def test_a_session_learns_through_vllm(where):
    """Rollout and trainer agree at every step, on the weights of that step."""
    session = make_session(**where)
    try:
        found = steps(session, 4)
    finally:
        session.engine.stop()
    for metrics in found:
        assert metrics["mismatch/k3"] < 1e-8
    assert [metrics["rollout/weight_version"] for metrics in found] == [1, 2, 3, 4]


def test_draws_are_those_of_the_key(engine):
    engine.sync(policy())
    first, again = (engine.generate(prompts(), 3, sampling(), KEY) for _ in range(2))
    np.testing.assert_array_equal(first.tokens, again.tokens)
    other = engine.generate(prompts(), 3, sampling(), jax.random.key(9))
    assert (np.asarray(first.tokens) != np.asarray(other.tokens)).any()
    rows = {tuple(row) for row in np.asarray(first.tokens[:3]).tolist()}
    assert len(rows) == 3  # samples of a prompt differ


def test_a_batch_that_is_more_than_vllm_takes_at_once(engine, where):
    """Prompts are then prefilled one after the other, and whole: vLLM 0.32 ends on a CPU where it
    is at a part of a prompt that has a seed. Draws are the same."""
    engine.sync(policy())
    expected = engine.generate(prompts(), 3, sampling(), KEY)
    small = ("--max-num-batched-tokens=28", "--max-num-seqs=28")
    other = make_engine(arguments=small, restarts=0, **where)
    try:
        other.sync(policy())
        found = other.generate(prompts(), 3, sampling(), KEY)
    finally:
        other.stop()
    np.testing.assert_array_equal(found.tokens, expected.tokens)


def test_the_tied_head_would_be_stale(engine, monkeypatch):
    """What the parity check is there for: without the plugin's repair vLLM 0.32 on a CPU goes on
    with the old output head."""
    engine.sync(policy())
    post = engine._server.post

    def unrepaired(path, body=None, seconds=None):
        if is_push(path, body):
            weights = {"weights_path": body["kwargs"]["path"]}
            body = {"method": "reload_weights", "kwargs": weights}
        return post(path, body, seconds)

    monkeypatch.setattr(engine._server, "post", unrepaired)
    with pytest.raises(fp8rl.UserError, match="it serves other weights, or computes them wrongly"):
        engine.sync(policy(1))
    with pytest.raises(RuntimeError, match="no weights yet"):
        engine.generate(prompts(), 3, sampling(), KEY)
    monkeypatch.undo()
    assert engine.sync(policy(1)) == engine.version


def computing(server: int) -> list[int]:
    """Processes of a server that compute; another one answers."""
    found = subprocess.run(["pgrep", "-g", str(server), "VLLM"], capture_output=True, check=True)
    return [pid for pid in map(int, found.stdout.split()) if pid != server]


def kill_all(server):
    os.killpg(server, signal.SIGKILL)


def stop_all(server):
    os.killpg(server, signal.SIGSTOP)


def kill_engine(server):
    """As where memory ends: the process that computes, not the one that answers."""
    for pid in computing(server):
        os.kill(pid, signal.SIGKILL)


def fails_in_a_batch(server, how) -> None:
    """Have `how` happen to a server that has a batch's requests and has answered none of them."""
    process, answers = server._process.pid, server.answers

    def once_asked(requests):
        until = time.monotonic() + 60
        while len(server._connections) < requests and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.5)  # a connection is there a little before its request
        how(process)

    def asked(bodies):
        for pid in computing(process):  # or it would have answered by then
            os.kill(pid, signal.SIGSTOP)
        Thread(target=once_asked, args=[len(bodies)], daemon=True).start()
        return answers(bodies)

    server.answers = asked


@pytest.mark.parametrize("how", [kill_all, stop_all, kill_engine])
def test_a_server_that_is_killed_or_hangs_in_a_batch_is_started_again(how, tmp_path):
    engine = make_engine(python=PYTHON, request_seconds=10, directory=str(tmp_path))
    try:
        engine.sync(policy())
        before = engine.generate(prompts(), 3, sampling(), KEY)
        fails_in_a_batch(engine._server, how)
        again = engine.generate(prompts(), 3, sampling(), KEY)
        assert float(again.metrics["rollout/vllm_restarts"]) == 1
        np.testing.assert_array_equal(before.tokens, again.tokens)
    finally:
        engine.stop()
    assert not processes(tmp_path)


def processes(directory: Path) -> list[str]:
    found = subprocess.run(
        ["ps", "-eww", "-o", "pid,args"], capture_output=True, text=True, check=True
    )
    return [line for line in found.stdout.splitlines() if str(directory) in line]


def test_a_server_ends_with_a_trainer_that_is_killed(tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from rollout.vllm_work import *\n"
        "engine = make_engine(python=sys.argv[2], directory=sys.argv[3])\n"
        "engine.sync(policy())\n"
        "print('ready', flush=True)\nimport time; time.sleep(600)\n"
    )
    here = str(Path(__file__).parent.parent)
    trainer = subprocess.Popen(
        [sys.executable, "-c", code, here, PYTHON, str(tmp_path)], stdout=subprocess.PIPE
    )
    assert trainer.stdout.readline() == b"ready\n"
    assert len(processes(tmp_path)) >= 2
    trainer.kill()
    trainer.wait()
    until = time.monotonic() + 20
    while processes(tmp_path) and time.monotonic() < until:
        time.sleep(0.5)
    assert not processes(tmp_path)


@pytest.mark.skipif(
    not {"avx512f", "amx_tile"} & set(CPU.read_text().split() if CPU.exists() else ()),
    reason="vLLM's FP8 cache on a CPU asks for AVX-512 or AMX",
)
def test_kv_scales_ride_along(where, tmp_path):
    """An FP8 cache (vLLM's for CPUs has one): as far from the trainer as our own, and every push
    brings its own scales."""
    recipe, weights = (
        RECIPES["fp8-kv"],
        jax.tree.map(lambda x: 4 * x if x.ndim > 2 else x, policy()),
    )
    good = calibrate_on_prompts(weights, prompts(), recipe, jnp.float32)
    own = LocalEngine(recipe, jnp.float32)
    own.sync(weights, SyncContext(scales=good))
    engine = make_engine("fp8-kv", directory=str(tmp_path), **where)
    engine.settings = replace(engine.settings, parity=100.0)  # one push is far off
    found = []
    try:
        for served, scale in ((own, 1.0), (engine, 1.0), (engine, 1 / 8), (engine, 1.0)):
            scales = jax.tree.map(lambda x, by=scale: x * by, good)
            served.sync(weights, SyncContext(scales=scales))
            rollout = served.generate(prompts(), 3, sampling(), KEY)
            ours, theirs = teacher_forced(rollout, weights)
            found.append(np.abs(ours - theirs).mean())
    finally:
        engine.stop()
    ours, first, saturated, again = found
    assert 0.5 < first / ours < 2 and first == again and saturated > 10 * first


@pytest.mark.parametrize("quantize", ["ours", "vllm"])
def test_linears_in_block_fp8(where, quantize):
    """An export in block FP8, or one that vLLM quantizes, is opened and scored: as our trainer does
    that quantizes alike. Had scales got to other blocks, it would be another policy."""
    engine = block_engine(quantize=quantize, **where)
    try:
        for seed in (0, 1):
            weights, _ = blocky(seed)
            engine.sync(weights)
            rollout = engine.generate(prompts(), 3, sampling(), KEY)
            ours, theirs = teacher_forced(rollout, weights, "jet-rl", "bfloat16")
            assert np.abs(ours - theirs).mean() < 0.05
            other, _ = teacher_forced(rollout, blocky(seed + 1)[0], "jet-rl", "bfloat16")
            assert np.abs(other - theirs).mean() > 0.15
    finally:
        engine.stop()


def test_recorded_answers_are_vllms(tmp_path):
    """The answers that `make test` goes by are still those of vLLM; text of errors aside."""
    served = make_engine(python=PYTHON)
    try:
        served.sync(policy())
        upstream = served._server
        with Replay(upstream=upstream.address) as recorder:
            at = dict(address=recorder.address, directory=str(tmp_path))
            recorded_work(make_engine(**at))
            recorder.work, recorder.pushes = "session", 0
            steps(make_session(**at))
            recorder.work, recorder.pushes = "compare", 0
            compared(tmp_path, **at)
            version = upstream.get("/version")
    finally:
        served.stop()
    found = {key: list(answer) for key, answer in recorder.recorded.items()}
    if os.environ.get("FP8RL_RECORD_VLLM"):
        ANSWERS.write_text(json.dumps({"vllm": version, "answers": found}, indent=1) + "\n")
    kept = json.loads(ANSWERS.read_text())["answers"]
    assert kept.keys() == found.keys()
    for key, (status, text) in kept.items():
        assert found[key][0] == status, key
        if status == 200:
            both = json.loads(text or "null"), json.loads(found[key][1] or "null")
            assert not list(differences(*both)), key


# the fingerprint is a hash of the server's settings, the path of its model among them
OF_A_RUN = {"created", "id", "root", "weight_version", "new_version", "system_fingerprint"}


def differences(one, other, place="answer") -> Iterator[str]:
    """Where two answers are not the same: times, ids and paths aside, and log-probabilities to
    1e-3, which is what is promised of float32 on any processor."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for key in one.keys() - OF_A_RUN:
            yield from differences(one[key], other[key], f"{place}.{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for i, both in enumerate(zip(one, other, strict=True)):
            yield from differences(*both, f"{place}[{i}]")
    elif isinstance(one, float) and isinstance(other, float):
        if not abs(one - other) < 1e-3:
            yield f"{place}: {one} and {other}"
    elif one != other:
        yield f"{place}: {one!r} and {other!r}"


def recorded_work(engine) -> None:
    engine.sync(policy())
    engine.generate(prompts(), 3, sampling(), KEY)
    engine.generate(prompts(), 3, sampling(0.0), KEY)
    engine.sync(policy(1))
    engine.generate(prompts(), 3, sampling(), KEY)
    with pytest.raises(fp8rl.UserError, match="vLLM answers 400"):
        engine.generate(prompts(), 3, sampling(new=64), KEY)
