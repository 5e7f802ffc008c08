"""Weights by NCCL: the calls, their order and every byte, with a library in place of NCCL's.

NCCL wants a GPU for each side; what is not seen here is NCCL itself.
"""

from __future__ import annotations

import base64
import json
import subprocess
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from rollout.vllm_replay import Answer, Replay, is_push
from rollout.vllm_work import KEY, make_engine, policy, prompts, sampling

import fp8rl_jax as fp8rl
from fp8rl_jax.rollout.vllm import nccl
from fp8rl_jax.rollout.vllm.engine import server_arguments
from fp8rl_jax.rollout.vllm.server import Server
from fp8rl_jax.weights.load import save_policy
from fp8rl_jax.weights.safetensors_io import read_checkpoint

OK = Answer(200, "{}")
SIZES = {7: np.dtype(np.float32), 9: np.dtype(ml_dtypes.bfloat16)}


@pytest.fixture(scope="session")
def library(tmp_path_factory) -> str:
    made = tmp_path_factory.mktemp("nccl") / "fake_nccl.so"
    source = Path(__file__).with_name("fake_nccl.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(made), str(source)], check=True)
    return str(made)


class Workers:
    """vLLM's routes for NCCL: each returns when the library has seen rank 0's part."""

    def __init__(self, calls: Path):
        self.calls, self.routes, self.about = calls, [], []
        self.refuses = ""

    def __call__(self, path, body):
        self.routes.append(path)
        if path == "/init_weight_transfer_engine":
            self._until(b"sum 1 7\n")
        if path == self.refuses:
            return Answer(500, '{"error": "the worker has other shapes"}')
        if path == "/get_world_size":
            return Answer(200, '{"world_size": 2}')
        if path == "/init_weight_transfer_engine":
            told = body["init_info"]
            assert base64.b64decode(told.pop("nccl_unique_id_b64"))[7] == 21
            assert told == {"rank_offset": 1, "world_size": 3, "packed": False}
            return OK
        if path == "/update_weights":
            self.about.append(body["update_info"])
            self._until(b"broadcast", len(self.about) * len(self.about[0]["names"]))
            return OK
        return OK if path in ("/start_weight_update", "/finish_weight_update") else None

    def _until(self, line: bytes, times: int = 1) -> None:
        end = time.monotonic() + 20
        while self.calls.read_bytes().count(line) < times and time.monotonic() < end:
            time.sleep(0.01)

    def received(self) -> list[dict[str, np.ndarray]]:
        """The tensors of each push, as a worker reads them."""
        data, found = self.calls.read_bytes(), []
        head, _, data = data.partition(b"sum 1 7\n")
        assert head == b"join 3\n"
        for about in self.about:
            tensors = {}
            for name, dtype, shape in zip(*about.values(), strict=True):
                line, _, data = data.partition(b"\n")
                word, count, kind = line.split()
                assert word == b"broadcast" and SIZES[int(kind)].name == dtype
                size = int(count) * SIZES[int(kind)].itemsize
                tensors[name] = np.frombuffer(data[:size], SIZES[int(kind)]).reshape(shape)
                data = data[size:]
            found.append(tensors)
        assert not data
        return found


@pytest.fixture
def workers(library, tmp_path, monkeypatch):
    calls = tmp_path / "calls"
    calls.touch()
    monkeypatch.setenv("FAKE_NCCL", str(calls))
    monkeypatch.setattr(nccl, "LIBRARIES", (library, library))
    return Workers(calls)


def serve(server: Replay, **settings):
    return make_engine(address=server.address, transport="nccl", **settings)


def test_every_push_sends_its_weights(workers, tmp_path):
    """Byte for byte the tensors of an export, in one group for all pushes."""
    with Replay(fault=workers) as server:
        engine = serve(server)
        for seed in (0, 1):
            engine.sync(policy(seed))
        engine.generate(prompts(), 3, sampling(), KEY)
        asked = [body for path, body in server.asked if is_push(path, body)]
    received = workers.received()
    for number, tensors in enumerate(received):
        expected = read_checkpoint(
            save_policy(policy(number), tmp_path / f"export-{number}", None, "float32")
        ).tensors
        assert tensors.keys() == expected.keys()
        assert all(np.array_equal(tensors[name], expected[name]) for name in expected)
    assert [body["kwargs"]["path"] for body in asked] == [None, None]
    update = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
    routes = [path for path in workers.routes if "weight_" in path or "_weights" in path]
    routes = [path for path in routes if path not in ("/weight_info", "/update_weight_version")]
    assert routes == ["/init_weight_transfer_engine", *update, *update]
    assert not list(engine._home().iterdir()) and engine._last.tensors is None  # no copy is kept
    arguments = server_arguments(engine.config, engine.recipe)
    (given,) = [word for word in arguments if word.startswith("{")]
    assert json.loads(given) == {"backend": "nccl"}


def test_a_server_of_ours_that_dies_gets_the_weights_in_a_group_anew(workers, monkeypatch):
    """It is started on a model without weights, and gets those of the last push."""
    servers, files = [], []

    def loads_anew(path, body):
        if is_push(path, body):
            servers[-1].pushes = 1  # the recorded answers are those behind the second push
        return workers(path, body)

    def launch(self, directory):
        files.append({path.name for path in directory.iterdir()})
        workers.calls.write_bytes(b"")
        workers.about = []
        servers.append(Replay(fault=loads_anew if servers else workers).__enter__())
        self.address = servers[-1].address

    monkeypatch.setattr(Server, "_launch", launch)
    engine = make_engine(python="p", transport="nccl")
    for seed in (0, 1):
        engine.sync(policy(seed))
    expected = engine.generate(prompts(), 3, sampling(), KEY)
    servers[0].__exit__()
    again = engine.generate(prompts(), 3, sampling(), KEY)
    servers[1].__exit__()
    np.testing.assert_array_equal(again.policy_logprobs, expected.policy_logprobs)
    assert len(servers) == 2 and engine.restarts == 1
    assert all("config.json" in names and "model.safetensors" not in names for names in files)
    arguments = server_arguments(engine.config, engine.recipe)
    assert arguments[arguments.index("--load-format") + 1] == "dummy"
    (sent,) = workers.received()
    assert np.array_equal(sent["model.embed_tokens.weight"], policy(1).embed_tokens.value)


@pytest.mark.parametrize(
    "route, call", [("/init_weight_transfer_engine", "sum"), ("/update_weights", "broadcast")]
)
def test_workers_that_refuse_are_not_waited_for(workers, tmp_path, monkeypatch, route, call):
    """Rank 0 would hang in NCCL for ever; the group is left, and the next push makes another."""
    with Replay(fault=workers) as server:
        engine = serve(server)
        workers.refuses = route
        monkeypatch.setenv("FAKE_NCCL_STUCK", call)
        with pytest.raises(fp8rl.UserError, match="500: the worker has other shapes"):
            engine.sync(policy())
        with pytest.raises(RuntimeError, match="no weights yet"):
            engine.generate(prompts(), 3, sampling(), KEY)
        monkeypatch.delenv("FAKE_NCCL_STUCK")
        workers.refuses, workers.about = "", []
        assert workers.calls.read_bytes().endswith(b"abort\n")
        workers.calls.write_bytes(b"")
        assert engine.sync(policy()) == 1
    assert len(workers.received()) == 1


def test_a_tensor_that_does_not_get_through_ends_the_run(workers, tmp_path, monkeypatch):
    with Replay(fault=workers) as server:
        engine = serve(server, request_seconds=1.0)
        monkeypatch.setenv("FAKE_NCCL_STUCK", "broadcast")
        with pytest.raises(fp8rl.UserError, match="workers do not answer NCCL for 1 s"):
            engine.sync(policy())


def test_nccls_own_errors(workers, tmp_path, monkeypatch):
    with Replay(fault=workers) as server:
        monkeypatch.setenv("FAKE_NCCL_FAILS", "1")
        with pytest.raises(fp8rl.UserError, match="transport: NCCL: unhandled system error"):
            serve(server).sync(policy())
        monkeypatch.setattr(nccl, "LIBRARIES", ("libno.so", "libno.so"))
        with pytest.raises(fp8rl.UserError, match=r'libno.so: .*else set it to "files"'):
            serve(server).sync(policy())
