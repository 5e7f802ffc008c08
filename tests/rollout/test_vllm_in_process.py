"""The engine with vLLM in this process: `make test-vllm-in-process`. Some tests are those of a
server."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from rollout.test_with_vllm import (  # noqa: F401  (run here, too)
    CPU,
    engine,
    test_a_session_learns_through_vllm,
    test_draws_are_those_of_the_key,
    test_kv_scales_ride_along,
    test_linears_in_block_fp8,
    test_log_probabilities_after_each_of_several_pushes,
)
from rollout.vllm_replay import Replay
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
)

import fp8rl_jax as fp8rl
from fp8rl_jax.weights.load import device_tensors, save_policy
from fp8rl_jax.weights.safetensors_io import read_checkpoint


@pytest.fixture(scope="module")
def where():
    return {"transport": "dlpack"}


def test_it_samples_what_a_server_does(engine, tmp_path):  # noqa: F811
    """The same tokens, ends and log-probabilities as in the recorded answers of one."""
    with Replay() as server:
        served = make_engine(address=server.address, directory=str(tmp_path))
        for each in (served, engine):
            each.sync(policy())
        for temperature in (1.0, 0.0):
            ours, theirs = (
                each.generate(prompts(), 3, sampling(temperature), KEY) for each in (engine, served)
            )
            for name in ("tokens", "mask", "stopped"):
                np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
            difference = np.abs(ours.policy_logprobs - theirs.policy_logprobs).max()
            assert difference < 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "fp8-block"])
def test_tensors_are_handed_over_without_a_copy(dtype):
    import torch

    kinds = {jnp.dtype(name): getattr(torch, name) for name in ("float32", "bfloat16", "float16")}
    kinds[jnp.dtype(jnp.float8_e4m3fn)] = torch.float8_e4m3fn
    seen = set()
    for _, x in device_tensors(policy(), dtype):
        there = torch.from_dlpack(x)
        assert there.data_ptr() == x.unsafe_buffer_pointer() and there.is_contiguous()
        assert there.dtype == kinds[x.dtype] and there.shape == x.shape
        np.testing.assert_array_equal(
            there.to(torch.float32).numpy(), np.asarray(x).astype(np.float32)
        )
        seen.add(x.dtype)
    assert len(seen) == (3 if dtype == "fp8-block" else 1)


def test_nothing_of_ours_is_held_after_a_push(engine, monkeypatch):  # noqa: F811
    """vLLM has copied all into parameters of its own."""
    import torch

    held, ours, hand_over = [], set(), torch.from_dlpack

    def watched(x):
        tensor = hand_over(x)
        held.append(weakref.ref(tensor))
        ours.add(tensor.data_ptr())
        return tensor

    monkeypatch.setattr(torch, "from_dlpack", watched)
    engine.sync(policy())
    gc.collect()
    assert len(held) == len(dict(device_tensors(policy(), "float32")))
    assert all(each() is None for each in held)
    (theirs,) = engine._server._llm.apply_model(
        lambda model: [x.data_ptr() for x in model.parameters()]
    )
    assert not ours & set(theirs)


def test_a_push_that_is_interrupted_is_done_again(engine, monkeypatch):  # noqa: F811
    engine.sync(policy())
    expected = engine.generate(prompts(), 3, sampling(), KEY)

    def interrupted(*arguments):
        tensors = device_tensors(*arguments)
        yield next(tensors)
        yield next(tensors)
        raise KeyboardInterrupt

    monkeypatch.setattr("fp8rl_jax.rollout.vllm.engine.device_tensors", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.sync(policy(1))
    with pytest.raises(RuntimeError, match="no weights yet"):
        engine.generate(prompts(), 3, sampling(), KEY)
    monkeypatch.undo()
    engine.sync(policy())
    again = engine.generate(prompts(), 3, sampling(), KEY)
    np.testing.assert_array_equal(again.tokens, expected.tokens)


def test_a_batch_that_is_interrupted_leaves_no_requests(engine, monkeypatch):  # noqa: F811
    engine.sync(policy())
    expected = engine.generate(prompts(), 3, sampling(), KEY)
    inside = engine._server._llm.llm_engine
    step, calls = inside.step, []

    def interrupted():
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(inside, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts(), 3, sampling(), KEY)
    del inside, step
    with pytest.raises(fp8rl.UserError, match="the last batch was interrupted; sync once more"):
        engine.generate(prompts(), 3, sampling(), KEY)
    engine.sync(policy())
    again = engine.generate(prompts(), 3, sampling(), KEY)
    np.testing.assert_array_equal(again.tokens, expected.tokens)


def test_adapters_are_merged_for_a_push(where):
    session = make_session(2, **where)
    try:
        for _ in range(2):
            rollout = session.rollout(["1+2=", "hello"])
            found = session.update(rollout, [-float(len(row)) for row in rollout.tokens])
        assert found["mismatch/k3"] < 1e-8 and found["rollout/vllm_parity"] < 1e-3
    finally:
        session.engine.stop()


def test_weights_in_bfloat16(where):
    engine = make_engine("bf16", **where)  # noqa: F811
    engine.dtype = jnp.dtype("bfloat16")
    engine.config = replace(engine.config, compute_dtype="bfloat16")
    try:
        engine.sync(policy())
        assert float(engine.metrics["rollout/vllm_parity"]) < 0.05
    finally:
        engine.stop()


@pytest.mark.skipif(
    "amx_tile" in (CPU.read_text().split() if CPU.exists() else ()),
    reason="vLLM packs e4m3 weights for AMX",
)
def test_vllm_serves_the_bits_that_we_train_with(where, tmp_path):
    """e4m3 values and scales in its layers, q on k on v and gate on up, are our quantizer's."""
    served, tokenizer = blocky()
    engine = block_engine(**where)  # noqa: F811
    try:
        engine.sync(served)
        (found,) = engine._server._llm.apply_model(
            lambda model: {name: x.detach().clone() for name, x in model.named_parameters()}
        )
    finally:
        engine.stop()
    path = save_policy(served, tmp_path / "export", tokenizer, "fp8-block")
    expected = read_checkpoint(path).tensors
    parts = {"qkv": "qkv", "gate_up": ("gate", "up"), "o": "o", "down": ("down",)}
    seen = 0
    for name, x in found.items():
        if not name.endswith(("_proj.weight", "_proj.weight_scale_inv")):
            continue
        (stacked,) = (part for part in parts if f".{part}_proj." in name)
        ours = np.concatenate(
            [
                np.asarray(expected[name.replace(f".{stacked}_proj.", f".{each}_proj.")])
                for each in parts[stacked]
            ]
        ).astype(np.float32)
        np.testing.assert_array_equal(x.float().numpy(), ours)
        seen += 1
    assert seen == 2 * 4 * served.config.num_layers


def test_compare_has_it_as_a_side(tmp_path, where):
    found = compared(tmp_path, **where)
    assert all(0 < found["recorded"][side]["max_abs"] < 1e-3 for side in "ab")


def test_what_vllm_refuses_is_one_line(where, tmp_path):
    with pytest.raises(fp8rl.UserError, match="rollout.vllm.arguments: vLLM's LLM does not take"):
        make_engine(arguments=("--no-such-argument",), **where).sync(policy())
    with pytest.raises(fp8rl.UserError, match="^rollout.vllm: vLLM does not start: "):
        make_engine(arguments=("--max-model-len=100000000",), **where).sync(policy())
    engine = make_engine(**where)  # noqa: F811
    try:
        engine.sync(policy())
        with pytest.raises(fp8rl.UserError, match="finish_reason 'length' after .. of 64 tokens"):
            engine.generate(prompts(), 3, sampling(new=64), KEY)
        with pytest.raises(fp8rl.UserError, match="^rollout.vllm: a batch: .* temperature must"):
            engine.generate(prompts(), 3, sampling(-1.0), KEY)
    finally:
        engine.stop()
