"""vLLM in this process, with a stand-in for its `LLM` that gives the recorded answers of a real
one. Behind test_vllm_in_process.py stands the real one."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import jax
import numpy as np
import pytest
from rollout.vllm_replay import Replay
from rollout.vllm_work import KEY, make_engine, policy, prompts, sampling

import fp8rl_jax as fp8rl
from fp8rl_jax.weights.load import save_policy
from fp8rl_jax.weights.safetensors_io import read_checkpoint


class LLM:
    """calls: in order; pushed: weights of each push; stale: later pushes change nothing."""

    def __init__(self, given: argparse.Namespace):
        self.given, self.replay = given, Replay()
        self.calls, self.pushed, self.stale = [], [], False
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=self.shutdown))
        self.files = sorted(path.name for path in Path(given.model).iterdir())

    def shutdown(self):
        self.replay.server_close()

    def update_weight_version(self, version):
        self.calls.append(version.partition(" ")[0] if " " in version else "version")
        self.replay.version = version

    def get_weight_version(self):
        return self.replay.version

    def collective_rpc(self, method, kwargs):
        self.calls.append(method)
        weights = dict(kwargs.pop("weights"))
        self.pushed.append(weights)
        if not self.stale:
            self.replay.answer("POST", "/collective_rpc", {"method": method, "kwargs": kwargs})

    def reset_prefix_cache(self):
        self.calls.append("reset")

    def generate(self, prompts, params, use_tqdm):
        return [self._complete(*each) for each in zip(prompts, params, strict=True)]

    def _complete(self, prompt, params):
        body = params | {"prompt": prompt["prompt_token_ids"], "model": "policy"}
        status, text = self.replay.answer(
            "POST", "/v1/completions", body | {"return_token_ids": True}
        )
        if status != 200:
            raise ValueError(text + "\nand more")
        return SimpleNamespace(outputs=list(map(_output, json.loads(text)["choices"])))


def _output(choice):
    ids, values = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    steps = [{t: SimpleNamespace(logprob=x)} for t, x in zip(ids, values, strict=True)]
    about = {name: choice[name] for name in ("index", "finish_reason", "stop_reason")}
    return SimpleNamespace(token_ids=tuple(ids), logprobs=steps, **about)


@pytest.fixture
def made(monkeypatch):
    """The stand-ins that were made, in the places of vLLM and torch."""
    found = []

    def from_engine_args(given):
        found.append(LLM(given))
        return found[-1]

    def add_cli_args(parser):
        for name in ("model", "dtype", "max-model-len", "logprobs-mode", "generation-config"):
            parser.add_argument(f"--{name}")
        for name in ("load-format", "worker-extension-cls"):
            parser.add_argument(f"--{name}")
        for name in ("enforce-eager", "no-enable-chunked-prefill"):
            parser.add_argument(f"--{name}", action="store_true")
        return parser

    engine_args = SimpleNamespace(add_cli_args=add_cli_args, from_cli_args=lambda given: given)
    for name, holds in {
        "vllm": {"LLM": SimpleNamespace(from_engine_args=from_engine_args), "SamplingParams": dict},
        "vllm.engine.arg_utils": {"EngineArgs": engine_args},
        "vllm.utils.argparse_utils": {"FlexibleArgumentParser": argparse.ArgumentParser},
        "torch": {"from_dlpack": np.from_dlpack},
    }.items():
        module = ModuleType(name)
        vars(module).update(holds)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    for name in ("VLLM_NO_USAGE_STATS", "DO_NOT_TRACK", "VLLM_LOGGING_LEVEL"):
        monkeypatch.setenv(name, "")  # so that what is set is undone
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "")
    return found


@pytest.fixture
def engine(made, tmp_path):
    engine = make_engine(transport="dlpack", directory=str(tmp_path))
    yield engine
    engine.stop()


def test_it_gives_the_rollout_of_a_server(engine, made, tmp_path):
    """The same requests, and from the same answers the same rollout; pushes are those weights."""
    with Replay() as server:
        served = make_engine(address=server.address, directory=str(tmp_path / "served"))
        for seed in (0, 1):
            for each in (served, engine):
                assert each.sync(policy(seed)) == seed + 1
            ours, theirs = (
                each.generate(prompts(), 3, sampling(), KEY) for each in (engine, served)
            )
            for name in ("tokens", "mask", "stopped", "policy_logprobs", "behaviour_logprobs"):
                np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
            assert ours.weight_version == seed + 1 and ours.stopped.any()
    (llm,) = made
    assert llm.calls == 2 * ["loading", "fp8rl_push", "reset", "version"]
    for seed, pushed in enumerate(llm.pushed):
        written = save_policy(policy(seed), tmp_path / f"export-{seed}", None, "float32")
        expected = read_checkpoint(written).tensors
        assert pushed.keys() == expected.keys()
        assert all(np.array_equal(pushed[name], expected[name]) for name in expected)
    assert llm.given.load_format == "dummy" and llm.given.enforce_eager
    assert "config.json" in llm.files and not any("safetensors" in name for name in llm.files)


def test_weights_that_are_not_served_are_found(engine, made):
    engine.sync(policy())
    made[0].stale = True
    with pytest.raises(fp8rl.UserError, match=r"push 2 .*more than rollout.vllm.parity = 0.001"):
        engine.sync(policy(1))
    with pytest.raises(RuntimeError, match="no weights yet; call sync first"):
        engine.generate(prompts(), 3, sampling(), KEY)


def test_another_version_is_refused(engine, made):
    engine.sync(policy())
    made[0].replay.version = "other"
    with pytest.raises(fp8rl.UserError, match="vLLM in this process serves weights 'other'"):
        engine.generate(prompts(), 3, sampling(), KEY)


@pytest.mark.parametrize("fault", [KeyboardInterrupt, ValueError("of\nvLLM")])
def test_what_was_interrupted_is_begun_anew(engine, made, fault):
    """In vLLM there would be requests left, or half a set of weights."""
    engine.sync(policy())

    def fails(*arguments, **keywords):
        raise fault

    told = KeyboardInterrupt if fault is KeyboardInterrupt else fp8rl.UserError
    match = "^rollout.vllm: a (batch|push): ValueError: of vLLM$" if told is not fault else None
    made[0].generate = fails
    with pytest.raises(told, match=match):
        engine.generate(prompts(), 3, sampling(), KEY)
    with pytest.raises(fp8rl.UserError, match="the last batch was interrupted; sync once more"):
        engine.generate(prompts(), 3, sampling(), KEY)
    engine.sync(policy())
    made[1].collective_rpc = fails
    with pytest.raises(told, match=match):
        engine.sync(policy(1))
    with pytest.raises(RuntimeError, match="no weights yet"):
        engine.generate(prompts(), 3, sampling(), KEY)
    assert engine.sync(policy()) == 3 and len(made) == 3
    engine.generate(prompts(), 3, sampling(), KEY)


def test_weights_that_are_not_finite_are_not_served(engine, made):
    broken = jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(np.inf) if x.ndim == 3 else x, policy())
    with pytest.raises(
        fp8rl.UserError, match="weights that are not finite in float32: model.layers"
    ):
        engine.sync(broken)
    with pytest.raises(RuntimeError, match="no weights yet"):
        engine.generate(prompts(), 3, sampling(), KEY)


def test_a_python_without_vllm(engine, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(fp8rl.UserError, match='"dlpack" wants vLLM in the Python of the trainer'):
        engine.sync(policy())


def test_an_argument_that_vllm_does_not_take(made, tmp_path):
    arguments = ("--no-such-argument",)
    engine = make_engine(transport="dlpack", directory=str(tmp_path), arguments=arguments)
    with pytest.raises(fp8rl.UserError, match="LLM does not take them: .*: --no-such-argument"):
        engine.sync(policy())
