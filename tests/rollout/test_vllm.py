"""The vLLM engine against recorded answers of a real vLLM (vllm_replay.py), and against servers
that go wrong."""

from __future__ import annotations

import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event

import jax
import numpy as np
import pytest
from rollout.test_with_vllm import recorded_work, teacher_forced
from rollout.vllm_replay import Answer, Replay, is_push
from rollout.vllm_work import (
    KEY,
    NEW,
    SIZES,
    compared,
    make_engine,
    make_session,
    policy,
    prompts,
    sampling,
    steps,
)
from tiny_models import policy_arrays

import fp8rl_jax as fp8rl
from fp8rl_jax.config.rl import CorrectionConfig
from fp8rl_jax.config.run import RolloutConfig, RunConfig
from fp8rl_jax.config.schema import problems
from fp8rl_jax.config.vllm import VllmConfig
from fp8rl_jax.models.lora import join, merge, split
from fp8rl_jax.parallel import to_host
from fp8rl_jax.rollout.arrival import Arrival
from fp8rl_jax.rollout.constraints import make_constraints
from fp8rl_jax.rollout.sync import SyncContext
from fp8rl_jax.training.keys import rollout_key
from fp8rl_jax.weights.hf_directory import load_policy_arrays
from fp8rl_jax.weights.load import byte_policy

COMPLETIONS = "/v1/completions"


@pytest.fixture
def serve(tmp_path):
    """Makes an engine at a replaying server, whose fault is (path, body) -> an Answer or None."""
    with Replay() as server:

        def made(fault=None, **settings):
            server.fault = fault
            return make_engine(address=server.address, directory=str(tmp_path), **settings)

        yield server, made


def changed(server, change):
    """A fault: completions of more than the probe's one, changed by `change(choices)`."""

    def fault(path, body):
        if path != COMPLETIONS or body["n"] == 1:
            return None
        server.fault = None
        status, text = server.answer("POST", path, body)
        server.fault = fault
        answer = json.loads(text)
        answer["choices"] = change(answer["choices"])
        return Answer(status, json.dumps(answer))

    return fault


def test_a_rollout_is_what_vllm_answered(serve):
    """Tokens with the one that ended them, and log-probabilities that are our trainer's to 1e-3."""
    server, made = serve
    engine = made()
    assert engine.sync(policy()) == 1
    rollout = engine.generate(prompts(), 3, sampling(), KEY)
    ours, theirs = teacher_forced(rollout, policy())
    assert len(theirs) == rollout.mask.sum() and np.abs(ours - theirs).max() < 1e-3
    np.testing.assert_array_equal(rollout.policy_logprobs, rollout.behaviour_logprobs)
    assert rollout.tokens.shape == (6, NEW) and rollout.weight_version == 1
    lengths, ends = np.asarray(rollout.mask.sum(1)), set(sampling().stop_token_ids)
    last = [int(row[n - 1]) in ends for row, n in zip(rollout.tokens, lengths, strict=True)]
    assert last == np.asarray(rollout.stopped).tolist() and 0 < sum(last) < 6
    assert (lengths[~np.asarray(rollout.stopped)] == NEW).all()
    asked = [body for path, body in server.asked if path == COMPLETIONS][-2:]
    assert sorted(body["prompt"] for body in asked) == sorted(
        row[:n].tolist() for row, n in zip(prompts().tokens, prompts().lengths, strict=True)
    )
    assert all(body["n"] == 3 for body in asked) and asked[0]["seed"] != asked[1]["seed"]
    greedy = engine.generate(prompts(), 3, sampling(0.0), KEY)
    assert not greedy.behaviour_logprobs.any() and greedy.policy_logprobs.any()
    np.testing.assert_array_equal(greedy.tokens[0], greedy.tokens[2])


def test_a_push_hands_over_weights_and_version(serve, tmp_path):
    server, made = serve
    engine = made()
    engine.arrival = Arrival(merged=True)
    for number, seed in enumerate((0, 1), start=1):
        server.asked.clear()
        engine.sync(policy(seed))
        assert [path for path, _ in server.asked if path != "/v1/models"] == [
            *(["/weight_info", "/collective_rpc"] if number == 1 else []),
            "/pause?mode=abort",
            "/update_weight_version",
            "/collective_rpc",
            "/reset_prefix_cache",
            "/update_weight_version",
            "/resume",
            "/weight_info",
            COMPLETIONS,
            "/weight_info",
        ]
        (rpc,) = [body for path, body in server.asked if is_push(path, body)]
        _, arrays = load_policy_arrays(rpc["kwargs"]["path"])
        expected = policy_arrays(policy(seed))
        assert arrays.keys() == expected.keys()
        assert all(np.array_equal(arrays[name], expected[name]) for name in arrays)
        assert server.version.endswith(f":{number}") and rpc["kwargs"]["scales"] is None
        assert len(list(tmp_path.glob("*/weights-*"))) == 1
        assert float(engine.metrics["rollout/vllm_parity"]) < 1e-5
    assert engine.metrics["sync/arrived"] == pytest.approx(1.0)  # float32 is pushed


def test_all_that_was_recorded(serve):
    """Every request of the recorded work is one that was asked of vLLM, byte for byte."""
    server, made = serve
    recorded_work(made())
    pushed = [body["kwargs"] for path, body in server.asked if is_push(path, body)]
    assert len(pushed) == 2


def test_a_session_learns_through_vllm(serve):
    """Two GRPO steps: rollout and trainer agree on the pushed weights, stop strings end rows."""
    server, made = serve
    server.work = "session"
    session = make_session(address=server.address, directory=made().settings.directory)
    rollout = session.rollout(["1+2=", "hello"])
    stopped = rollout.rollout.stopped.tolist()
    ended = [text for text, by_itself in zip(rollout.texts, stopped, strict=True) if by_itself]
    assert any(text.endswith(("e", "st")) for text in ended)
    assert not any("e" in text[:-1] or "st" in text[:-1] for text in rollout.texts)
    session = make_session(address=server.address, directory=made().settings.directory)
    server.pushes = 0
    found = steps(session)
    assert server.pushes == 3 and session.engine.version == 3
    for number, metrics in enumerate(found, start=1):
        assert metrics["mismatch/k3"] < 1e-8 and metrics["rollout/weight_version"] == number
        assert metrics["rollout/vllm_parity"] < 1e-3


def test_what_is_sampled_ahead_is_of_the_weights_before_the_update(serve):
    """A push waits until it is sampled."""
    server, made = serve
    server.work = "session"
    session = make_session(address=server.address, directory=made().settings.directory)
    first, begun = session.rollout(["1+2=", "hello"]), Event()

    given = to_host(first.rollout.prompts), rollout_key(session.config.seed, 0, 0), begun
    with ThreadPoolExecutor(1) as thread:
        second = thread.submit(session.rollout_ahead, *given)
        begun.wait()
        session.update(first, [-float(len(row)) for row in first.tokens])
    assert session.of_rollout(second.result()).tokens == first.tokens
    assert second.result().weight_version == 1
    assert server.pushes == session.engine.version == 2
    pushes = [place for place, each in enumerate(server.asked) if is_push(*each)]
    drawn = [place for place, (_, body) in enumerate(server.asked) if _is_sampled(body)]
    assert len(drawn) == 2 * 2 and pushes[0] < drawn[0] and drawn[-1] < pushes[1]


def _is_sampled(body):
    return isinstance(body, dict) and body.get("max_tokens") == NEW


def test_compare_has_vllm_as_a_side(serve, tmp_path, capsys):
    """Both of our sides beside the log-probabilities of what vLLM sampled."""
    server, _ = serve
    server.work = "compare"
    found = compared(tmp_path, address=server.address, directory=str(tmp_path))
    assert found["recorded"]["key"] == "vllm" and "vllm" in capsys.readouterr().out
    for side in "ab":
        assert 0 < found["recorded"][side]["max_abs"] < 1e-3
        assert found["recorded"][side]["tokens"] == found["logprobs"]["tokens"] > 3


def test_adapters_are_merged_for_a_push(serve):
    server, made = serve
    server.work = "session"
    session = make_session(2, address=server.address, directory=made().settings.directory)
    session.rollout(["1+2=", "hello"])  # adapters that do nothing yet: the recorded weights

    def moved(x):
        return x + 0.1 if x.ndim else x

    adapted = session.weights
    adapted = join(jax.tree.map(moved, split(adapted)[0]), split(adapted)[1])
    server.fault = lambda path, _: Answer(500, "no more") if path == COMPLETIONS else None
    with pytest.raises(fp8rl.UserError, match="no more"):
        session.engine.sync(adapted)
    pushed = [body for path, body in server.asked if is_push(path, body)][-1]
    _, arrays = load_policy_arrays(pushed["kwargs"]["path"])
    expected, base = policy_arrays(merge(adapted)), policy_arrays(policy())
    assert all(np.array_equal(arrays[name], expected[name]) for name in expected)
    assert not np.array_equal(arrays["layers.q_proj.weight"], base["layers.q_proj.weight"])


def test_weights_that_are_not_served_are_found(serve):
    """A server that acknowledges a push and computes with the old weights."""
    server, made = serve

    def stale(path, body):
        if is_push(path, body) and server.pushes:
            return Answer(200, '{"results":[{"tied_head":true,"layers":0}]}')
        return None

    engine = made(stale)
    engine.sync(policy())
    with pytest.raises(fp8rl.UserError, match=r"push 2 .*more than rollout.vllm.parity = 0.001"):
        engine.sync(policy(1))
    with pytest.raises(RuntimeError, match="no weights yet; call sync first"):
        engine.generate(prompts(), 3, sampling(), KEY)


def test_a_server_whose_log_probabilities_leave_the_temperature_out_is_found(serve):
    """One that was started without --logprobs-mode processed_logprobs."""
    server, made = serve

    def raw(path, body):
        if path == COMPLETIONS and body["temperature"] == 0.7:
            return server.answer("POST", path, body | {"temperature": 1.0})

    engine = made(raw)
    warm = replace(engine.config.rollout, temperature=0.7)
    engine.config = replace(engine.config, rollout=warm)
    with pytest.raises(fp8rl.UserError, match="it serves other weights, or computes them wrongly"):
        engine.sync(policy())


def test_another_trainers_push_is_found_before_and_after_a_batch(serve):
    server, made = serve
    engine = made()
    engine.sync(policy())
    server.version = "somebody's:7"
    with pytest.raises(fp8rl.UserError, match="serves weights \"somebody's:7\", not this run's"):
        engine.generate(prompts(), 3, sampling(), KEY)

    def takes_over(path, body):
        if path == COMPLETIONS and body["n"] == 3:
            server.version = "somebody's:8"

    server.pushes = 0
    engine = made(takes_over)
    engine.sync(policy())
    with pytest.raises(fp8rl.UserError, match="somebody's:8"):
        engine.generate(prompts(), 3, sampling(), KEY)


def _first(**fields):
    return lambda choices: [choices[0] | fields, *choices[1:]]


def _first_logprobs(change):
    def changed(choices):
        logprobs = choices[0]["logprobs"]
        values = change(logprobs["token_logprobs"])
        return _first(logprobs=logprobs | {"token_logprobs": values})(choices)

    return changed


def _without_end(choices):
    """The stop token left out, as engines do that strip it."""
    row = next(choice for choice in choices if choice["finish_reason"] == "stop")
    row["token_ids"].pop()
    row["logprobs"]["token_logprobs"].pop()
    return choices


@pytest.mark.parametrize(
    "change, told",
    [
        (_first(logprobs=None), "tokens, and log-probabilities None"),
        (_first_logprobs(lambda values: [None, *values[1:]]), r"log-probabilities \[None"),
        (_first_logprobs(lambda values: values[:-1]), "tokens, and log-probabilities"),
        (_first_logprobs(lambda values: [float("nan"), *values[1:]]), "log-probabilities"),
        (_without_end, "one was left out"),
        (_first(finish_reason="abort"), "finish_reason 'abort' after"),
        (_first(finish_reason=None), "finish_reason None after"),
        (_first(token_ids=[]), "token_ids should be 1 to 12 ids"),
        (_first(token_ids=None), "token_ids should be 1 to 12 ids: None"),
        (_first(token_ids=[10**6]), "token_ids are not those of a vocabulary of"),
        (_first(index=5), "3 completions asked for, 3 answered"),
        (lambda choices: choices[:2], "3 completions asked for, 2 answered"),
        (lambda choices: None, "the answer has no choices"),
    ],
)
def test_answers_that_cannot_be_are_refused(serve, change, told):
    server, made = serve
    engine = made(changed(server, change))
    engine.sync(policy())
    with pytest.raises(fp8rl.UserError, match=f"^rollout.vllm: /v1/completions: .*{told}"):
        engine.generate(prompts(), 3, sampling(), KEY)


@pytest.mark.parametrize(
    "path, answer, told",
    [
        ("/weight_info", Answer(404, '{"detail":"Not Found"}'), "VLLM_SERVER_DEV_MODE=1"),
        ("/v1/models", Answer(200, "<html>"), "answers no JSON: '<html>'"),
        ("/v1/models", Answer(200, '{"data": []}'), "names no model"),
        ("/v1/models", Answer(401, '{"error":"Unauthorized"}'), "401: Unauthorized"),
        ("/collective_rpc", Answer(500, '{"error":{"message":"no q_proj"}}'), "500: no q_proj"),
        ("/resume", Answer(500, '{"error":"not paused"}'), "/resume: vLLM answers 500: not paused"),
    ],
)
def test_servers_that_are_something_else(serve, path, answer, told):
    server, made = serve
    engine = made(lambda asked, _: answer if asked == path else None)
    with pytest.raises(fp8rl.UserError, match=told):
        engine.sync(policy())
    with pytest.raises(RuntimeError, match="no weights yet"):
        engine.generate(prompts(), 3, sampling(), KEY)
    # what was interrupted is done again
    server.fault, server.pushes = None, 0
    assert engine.sync(policy()) == 1
    engine.generate(prompts(), 3, sampling(), KEY)


@pytest.mark.parametrize(
    "change, told",
    [
        (dict(num_layers=3), "num_hidden_layers is 2, not 3$"),
        (dict(intermediate_size=384), "intermediate_size is 256, not 384$"),
        (dict(hidden_size=256, num_heads=4), "hidden_size is 128, not 256, num_attention_heads"),
    ],
)
def test_another_model_behind_the_address(serve, change, told):
    """Nothing is pushed to it: vLLM loads some models of another form without a word."""
    server, made = serve
    with pytest.raises(fp8rl.UserError, match=f"^rollout.vllm.address: .*another model: {told}"):
        made().sync(byte_policy(0, **SIZES | change)[0])
    assert server.version == "default" and not server.pushes


def test_half_a_push_has_no_version(serve):
    """What a server calls its weights where a push ended before they were loaded."""
    server, made = serve
    engine = made(lambda *asked: Answer(500, "killed") if is_push(*asked) else None)
    with pytest.raises(fp8rl.UserError, match="500: killed"):
        engine.sync(policy())
    assert server.version.startswith("loading ") and server.version != engine._last.version


def test_nobody_at_the_address(tmp_path):
    engine = make_engine(address="http://127.0.0.1:9", directory=str(tmp_path))
    with pytest.raises(fp8rl.UserError, match=r"rollout.vllm.address: .*:9/v1/models is not answ"):
        engine.sync(policy())


def test_a_silent_server_of_others_ends_the_run(serve):
    server, made = serve

    def silent(path, body):
        if path == COMPLETIONS and body["n"] == 3:
            time.sleep(30)

    engine = made(silent, request_seconds=1.0)
    engine.sync(policy())
    began = time.monotonic()
    with pytest.raises(fp8rl.UserError, match="^rollout.vllm: "):
        engine.generate(prompts(), 3, sampling(), KEY)
    assert time.monotonic() - began < 15


def test_a_server_that_answers_one_after_the_other_is_waited_for(serve):
    """Longer than rollout.vllm.request_seconds in all, and never silent for as long."""
    server, made = serve
    turn = threading.Lock()

    def slow(path, body):
        if path == COMPLETIONS and body["n"] == 3:
            with turn:
                time.sleep(2.5)

    engine = made(slow, request_seconds=4.0)
    engine.sync(policy())
    began = time.monotonic()
    assert engine.generate(prompts(), 3, sampling(), KEY).mask.any()
    assert time.monotonic() - began > 4


# servers of ours


@pytest.fixture
def interpreter(tmp_path) -> str:
    """What stands for a Python with vLLM: starts the replaying server."""
    path = tmp_path / "python"
    replay = Path(__file__).with_name("vllm_replay.py")
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {replay} "$@"\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("kind", ["once", "hang", "engine"])
def test_a_server_that_ends_or_hangs_is_started_again(interpreter, tmp_path, caplog, fault, kind):
    """In the middle of a batch, which is asked for anew, on the same weights."""
    with Replay() as server:
        sound = make_engine(address=server.address, directory=str(tmp_path))
        sound.sync(policy())
        expected = sound.generate(prompts(), 3, sampling(), KEY)
    arguments = ("--fault", f"{kind}:{tmp_path / 'done'}")
    engine = make_engine(python=interpreter, arguments=arguments, request_seconds=3.0)
    try:
        engine.sync(policy())
        asked = time.monotonic()
        rollout = engine.generate(prompts(), 3, sampling(), KEY)
        recovered, process = time.monotonic() - asked, engine._server._process
        assert process.poll() is None
    finally:
        engine.stop()
    assert process.poll() is not None
    assert float(rollout.metrics["rollout/vllm_restarts"]) == 1 == engine.restarts
    (said,) = (line for line in caplog.messages if "starting it again" in line)
    fault("server", said, recovered=recovered)
    for name in ("tokens", "mask", "policy_logprobs", "stopped"):
        np.testing.assert_array_equal(getattr(rollout, name), getattr(expected, name))


def test_a_server_that_ends_every_time_ends_the_run(interpreter, tmp_path):
    arguments = ("--fault", f"always:{tmp_path / 'done'}")
    engine = make_engine(python=interpreter, arguments=arguments, restarts=2)
    engine.sync(policy())
    told = r"exit code 7: RuntimeError: the engine died .* after 2 restarts \(rollout.vllm.restarts"
    with pytest.raises(fp8rl.UserError, match=told):
        engine.generate(prompts(), 3, sampling(), KEY)


@pytest.mark.parametrize(
    "script, told",
    [
        ("", "cannot be run"),
        ("#!/bin/sh\necho ModuleNotFoundError: vllm >&2\nexit 1\n", "exit code 1: ModuleNotFound"),
        ("#!/bin/sh\nsleep 60\n", r"not ready after 1 s \(rollout.vllm.start_seconds\)"),
    ],
)
def test_a_python_that_has_no_vllm(tmp_path, script, told):
    path = tmp_path / "python"
    if script:
        path.write_text(script)
        path.chmod(0o755)
    engine = make_engine(python=str(path), start_seconds=1.0)
    with pytest.raises(fp8rl.UserError, match=f"^rollout.vllm.python: .*{told}"):
        engine.sync(policy())


# settings


@pytest.mark.parametrize(
    "change, told",
    [
        (dict(vllm=VllmConfig()), "rollout.vllm: give python"),
        (dict(vllm=VllmConfig(address="there:80", directory="d")), "is no http://host:port"),
        (dict(vllm=VllmConfig(address="http://there:80")), "rollout.vllm.directory"),
        (
            dict(vllm=VllmConfig(python="p", transport="dlpack")),
            "leave rollout.vllm.python and add",
        ),
        (
            dict(vllm=VllmConfig(transport="dlpack", arguments=("--tensor_parallel_size=2",))),
            "rollout.vllm.arguments: --tensor-parallel-size: in this process",
        ),
        (dict(vllm=VllmConfig(python="p", parity=0.0)), "rollout.vllm.parity"),
        (dict(vllm=VllmConfig(python="p", restarts=-1)), "rollout.vllm.restarts"),
        (
            dict(vllm=VllmConfig(python="p", arguments=("--kv_cache_dtype=fp8_per_token_head",))),
            "rollout.vllm.arguments: --kv-cache-dtype: follow",
        ),
        (dict(top_k=5), "rollout.top_k, top_p, min_p, bad_words, logit_bias"),
        (dict(top_p=0.9), "rollout.top_k, top_p, min_p, bad_words, logit_bias"),
        (dict(min_p=0.1), "rollout.top_k, top_p, min_p, bad_words, logit_bias"),
        (dict(bad_words=("x",)), "rollout.top_k, top_p, min_p, bad_words, logit_bias"),
        (dict(logit_bias={"x": 1.0}), "rollout.top_k, top_p, min_p, bad_words, logit_bias"),
        (dict(top_p=0.9, replay=True), '"replay" with rollout.engine = "vllm" is not read'),
        (dict(recipe="infir2"), "recipe 'infir2' has formats of linears"),
        (dict(recipe="fp8-rl", compute_dtype="float32"), "beside bfloat16"),
        (dict(kv_granularity="head"), "has a KV cache that vLLM does not serve"),
        (dict(exact=True), "precision.exact: of vLLM no bits are promised"),
    ],
)
def test_settings_that_vllm_cannot_serve(change, told):
    config = RunConfig(rollout=RolloutConfig(engine="vllm", vllm=VllmConfig(python="p")))
    assert config.problems() == []
    if granularity := change.pop("kv_granularity", ""):
        rows = {"mine": {"base": "fp8-kv", "kv_granularity": granularity}}
        config = replace(config, recipes=rows, recipe="mine")
    if "exact" in change:
        config = replace(config, precision=replace(config.precision, exact=change.pop("exact")))
    if change.pop("replay", False):
        replayed = CorrectionConfig(truncated_sampling="replay")
        config = replace(config, rl=replace(config.rl, correction=replayed))
    of_run = {key: change.pop(key) for key in ("recipe", "compute_dtype") if key in change}
    config = replace(config, **of_run, rollout=replace(config.rollout, **change))
    assert any(told in problem for problem in problems(config))


@pytest.mark.parametrize("recipe", ["fp8-rollout", "fp8-rl", "jet-rl", "fp8-e2e-kv"])
def test_fp8_recipes_are_served_in_bfloat16(recipe):
    rollout = RolloutConfig(engine="vllm", vllm=VllmConfig(python="p"))
    assert RunConfig(recipe=recipe, rollout=rollout).problems() == []


@pytest.mark.parametrize(
    "change",
    [
        dict(top_k=3),
        dict(top_p=0.5),
        dict(min_p=0.1),
        dict(bad_words=("x",)),
        dict(logit_bias={"x": 1.0}),
    ],
    ids=lambda change: next(iter(change)),
)
def test_sampling_of_another_distribution_is_refused(serve, change):
    """Also where a session's sampling was changed behind its configuration."""
    _, made = serve
    engine = made()
    engine.sync(policy())
    given = {"stop_strings": (), "bad_words": (), "logit_bias": {}} | change
    tables = make_constraints(
        engine.tokenizer,
        policy().config.vocab_size,
        *(given.pop(name) for name in ("stop_strings", "bad_words", "logit_bias")),
    )
    other = replace(sampling(), **given, **tables._asdict())
    with pytest.raises(fp8rl.UserError, match="vLLM gives the log-probability of the distribution"):
        engine.generate(prompts(), 3, other, KEY)


def test_kv_scales_go_with_the_weights(serve):
    """One (query, key, value) a layer; without scales an FP8 cache is not served."""
    from fp8rl_jax.models.cache import KVScales

    server, made = serve
    engine = made(recipe="fp8-kv")
    with pytest.raises(ValueError, match="needs the KV scales that the trainer calibrated"):
        engine.sync(policy())
    given = KVScales(*(jax.numpy.array([1.0, 2.0]) * by for by in (1, 10, 100)))

    def loads(path, body):
        if is_push(path, body):
            server.pushes += 1
            return Answer(200, '{"results":[{"tied_head":true,"layers":2}]}')

    server.fault = loads
    engine.sync(policy(), SyncContext(scales=given))
    (rpc,) = [body for path, body in server.asked if is_push(path, body)]
    assert rpc["kwargs"]["scales"] == [[1.0, 10.0, 100.0], [2.0, 20.0, 200.0]]
    assert engine.scales is given


def test_block_fp8_of_odd_sides_is_refused(tmp_path):
    """vLLM stacks q on k on v, and has no scale for half a block."""
    settings = VllmConfig(python="p", directory=str(tmp_path))
    config = RunConfig(recipe="jet-rl", rollout=RolloutConfig(engine="vllm", vllm=settings))
    from fp8rl_jax.rollout.vllm.engine import VllmEngine, server_arguments

    odd, tokenizer = byte_policy(0, **SIZES | {"intermediate_size": 192})
    engine = VllmEngine(config, config.resolved_recipe, tokenizer)
    with pytest.raises(fp8rl.UserError, match=r'128 divides.*rollout.vllm.quantize = "vllm"'):
        engine.sync(odd)
    by_vllm = replace(config.rollout, vllm=replace(settings, quantize="vllm"))
    arguments = server_arguments(replace(config, rollout=by_vllm), config.resolved_recipe)
    assert "fp8_per_block" in arguments
    assert "fp8_per_block" not in server_arguments(config, config.resolved_recipe)
