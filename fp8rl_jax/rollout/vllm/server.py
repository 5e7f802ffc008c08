"""One vLLM server: the process, where it is ours, and its HTTP routes.

The routes for weights exist in vLLM's development mode alone and ask for no key, so that whoever
reaches the address can replace the model: a server that we start listens on loopback, and one that
is running already belongs on a network that others cannot reach.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import re
import signal
import socket
import subprocess
import time
import urllib.parse
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np

from fp8rl_jax.config.vllm import VllmConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.rollout.vllm.nccl import Group, in_thread

MODEL = "policy"
"""Name under which a server that we start serves the weights."""
PLUGIN = Path(__file__).parent / "plugin"
EXTENSION = "fp8rl_vllm.WeightPush"
"""What vLLM's worker gets of the plugin."""
_SETTINGS = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
_HEALTH = "/health"
_ERROR = re.compile(r"([\w.]*(Error|Exception): |Value error, ).+")
_SHOWN = 4  # of these in a message
_LOOK_SECONDS = 2.0  # between two looks at a server that is to answer


class ServerGone(Exception):
    """The server is not reached, has ended, or gives no answer in time."""


class Server:
    """A vLLM server.

    Args:
        config: where it is, or how it is started.
        arguments: of `vllm serve` behind the model's directory, where we start it.
        log: file of its output, where we start it.
    """

    def __init__(self, config: VllmConfig, arguments: Sequence[str] = (), log: Path | None = None):
        self.config, self.arguments, self.log = config, list(arguments), log
        self.address, self.model = config.address.rstrip("/"), ""
        self._process: subprocess.Popen | None = None
        self._connections: set[http.client.HTTPConnection] = set()
        self._group: Group | None = None
        self._stop: Callable[[], Any] = lambda: None

    @property
    def ours(self) -> bool:
        """Whether it is a process of this run."""
        return not self.config.address

    def start(self, directory: Path | None) -> None:
        """Serve the model of a directory, if the server is ours; then see what answers.

        Raises:
            UserError: it does not start, or what answers is no vLLM server that takes weights.
        """
        try:
            if self.ours:
                assert directory is not None
                self._launch(directory)
            self._look()
        except ServerGone as error:
            self.stop()
            raise UserError(
                f"rollout.vllm.{'python' if self.ours else 'address'}: {error}"
            ) from None

    def stop(self) -> None:
        """End the process, if it is ours."""
        for connection in list(self._connections):  # requests of other threads
            _shut(connection)
        self._leave()
        self._stop()
        self._process = None

    def get(self, path: str, seconds: float | None = None) -> Any:
        """Ask for a route's JSON; raises as `post`."""
        return self._request("GET", path, None, seconds)

    def post(self, path: str, body: Any = None, seconds: float | None = None) -> Any:
        """Send JSON to a route.

        Args:
            seconds: until the answer, or infinity; default: rollout.vllm.request_seconds.

        Raises:
            ServerGone: it does not answer.
            UserError: it refuses, or answers what is no JSON.
        """
        return self._request("POST", path, body, seconds)

    def push(
        self,
        path: Path | None,
        tensors: dict[str, np.ndarray] | None,
        scales: list[list[float]] | None,
        version: str,
    ) -> None:
        """Have weights, and KV scales, served as `version`.

        While they are loaded the version is another one, which stays where this is interrupted.

        Args:
            path: directory of the weights.
            tensors: the weights, sent by NCCL in place of those.

        Raises:
            ServerGone: it does not answer.
            UserError: it refuses them.
        """
        self.post("/pause?mode=abort")
        self.post("/update_weight_version", {"new_version": f"loading {version}"})
        if tensors is not None:
            self._send(tensors)
        told = {"path": None if tensors is not None else str(path), "scales": scales}
        self.post("/collective_rpc", {"method": "fp8rl_push", "kwargs": told})
        self.post("/reset_prefix_cache")
        self.post("/update_weight_version", {"new_version": version})
        self.post("/resume")

    def check_model(self, config: dict[str, Any]) -> None:
        """See that the model which is served has the form of the one that is to be pushed: vLLM
        loads some others without a word.

        Args:
            config: values of its config.json.

        Raises:
            ServerGone: the server does not answer.
            UserError: it serves another model.
        """
        told = {"method": "fp8rl_config", "kwargs": {"keys": list(config)}}
        answer = _field(self.post("/collective_rpc", told), "results", "/collective_rpc")
        served = answer[0] if isinstance(answer, list) and answer else answer
        other = []
        for key, value in config.items():
            found = _field(served, key, "/collective_rpc")
            if found not in (value, None):  # None: that architecture's config leaves it out
                other.append(f"{key} is {found}, not {value}")
        if other:
            raise UserError(
                f"rollout.vllm.address: {self.address} serves another model: {', '.join(other)}"
            )

    def version(self) -> str:
        """Ask which weights are served."""
        return str(_field(self.get("/weight_info"), "weight_version", "/weight_info"))

    def answers(self, bodies: Sequence[Any]) -> list[Any]:
        """Ask for completions, all at once; answers in the order of `bodies`.

        Raises:
            ServerGone: the server ended, or nothing was answered for rollout.vllm.request_seconds.
            UserError: it refuses one.
        """
        pool = ThreadPoolExecutor(max(len(bodies), 1), "fp8rl-vllm")
        try:
            # each waits its turn: how long nothing is answered is seen below
            asked = [pool.submit(self.post, "/v1/completions", body, math.inf) for body in bodies]
            open_, last = set(asked), time.monotonic()
            while open_:
                done, open_ = wait(open_, _LOOK_SECONDS, FIRST_COMPLETED)
                for future in done:
                    future.result()
                if done:
                    last = time.monotonic()
                self._check_alive()
                if time.monotonic() - last > self.config.request_seconds:
                    raise ServerGone(
                        f"no completion in {self.config.request_seconds:g} s "
                        "(rollout.vllm.request_seconds)"
                    )
            return [future.result() for future in asked]
        finally:
            for connection in list(self._connections):
                _shut(connection)
            pool.shutdown(wait=False, cancel_futures=True)

    def _send(self, tensors: dict[str, np.ndarray]) -> None:
        """Broadcast weights to the workers, while a request has them receive."""
        try:
            if self._group is None:
                workers = _field(self.get("/get_world_size"), "world_size", "/get_world_size")
                self._group = Group(
                    workers, lambda id_: self._invite(id_, workers), self.config.request_seconds
                )
            about = {
                "names": list(tensors),
                "dtype_names": [tensor.dtype.name for tensor in tensors.values()],
                "shapes": [list(tensor.shape) for tensor in tensors.values()],
            }
            self.post("/start_weight_update")
            # the group has a limit for each tensor; the request lasts for all of them
            limit = self.config.request_seconds * (2 + len(tensors))
            told = in_thread(self.post, "/update_weights", {"update_info": about}, limit)
            self._group.broadcast(tensors, told)
            self.post("/finish_weight_update", {})
        except TimeoutError as error:
            raise ServerGone(str(error)) from None
        except BaseException:
            self._leave()  # half of a push is behind this group
            raise

    def _invite(self, group_id: str, workers: int) -> None:
        about = {"nccl_unique_id_b64": group_id, "rank_offset": 1, "world_size": 1 + workers}
        self.post("/init_weight_transfer_engine", {"init_info": about | {"packed": False}})

    def _leave(self) -> None:
        if self._group is not None:
            self._group.abort()
        self._group = None

    def _launch(self, directory: Path) -> None:
        assert self.log is not None
        port = _free_port()
        self.address = f"http://127.0.0.1:{port}"
        # a path is meant from here, a bare name from PATH
        python = self.config.python
        command = [
            *(
                os.path.abspath(python) if os.sep in python else python,
                "-m",
                "fp8rl_vllm",
                "serve",
                str(directory),
            ),
            *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL),
            *("--worker-extension-cls", EXTENSION),
            *self.arguments,
            *self.config.arguments,
        ]
        environ = os.environ | _SETTINGS
        environ |= {"PYTHONPATH": str(PLUGIN), "FP8RL_VLLM_PARENT": str(os.getpid())}
        try:
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environ,
                    cwd=self.log.parent,
                    start_new_session=True,
                )
        except OSError as error:
            raise ServerGone(f"{self.config.python} cannot be run ({error.strerror})") from None
        self._stop = weakref.finalize(self, _end, self._process)
        until = time.monotonic() + self.config.start_seconds
        while time.monotonic() < until:
            self._check_alive()
            if self._healthy():
                return
            time.sleep(0.2)
        raise ServerGone(
            f"vLLM is not ready after {self.config.start_seconds:g} s "
            f"(rollout.vllm.start_seconds); see {self.log}"
        )

    def _look(self) -> None:
        """See that a vLLM answers whose weights can be replaced, and what it calls its model."""
        models = _field(self.get("/v1/models"), "data", "/v1/models")
        if not (isinstance(models, list) and models and isinstance(models[0], dict)):
            raise UserError(f"{self.address}/v1/models: names no model")
        self.model = str(_field(models[0], "id", "/v1/models"))
        try:
            self.version()
        except UserError as error:
            raise UserError(
                f"{error}; weights can be pushed to vLLM >= 0.32 alone, started with "
                "VLLM_SERVER_DEV_MODE=1"
            ) from None

    def why_gone(self, error: ServerGone) -> str:
        """Say why the server is gone: its last words where it has ended, else what was seen."""
        if self._process is None:
            return str(error)
        try:
            self._process.wait(_LOOK_SECONDS)  # connections close a little before the end
            self._check_alive()
        except subprocess.TimeoutExpired:
            pass  # it hangs
        except ServerGone as end:
            return str(end)
        return str(error)

    def _healthy(self) -> bool:
        try:
            self.get(_HEALTH, _LOOK_SECONDS)
        except (ServerGone, UserError):
            return False
        return True

    def _check_alive(self) -> None:
        if self._process is not None and (code := self._process.poll()) is not None:
            assert self.log is not None
            raise ServerGone(f"vLLM ended with exit code {code}: {_last_error(self.log)}")

    def _request(self, method: str, path: str, body: Any, seconds: float | None) -> Any:
        place = urllib.parse.urlsplit(self.address)
        secure = place.scheme == "https"
        connect = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        seconds = self.config.request_seconds if seconds is None else seconds
        connection = connect(place.netloc, timeout=None if seconds == math.inf else seconds)
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("VLLM_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        self._connections.add(connection)
        try:
            connection.request(
                method, place.path + path, None if body is None else json.dumps(body), headers
            )
            answer = connection.getresponse()
            status, text = answer.status, answer.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            raise ServerGone(
                f"{self.address}{path} is not answered ({error or type(error).__name__})"
            ) from None
        finally:
            self._connections.discard(connection)
            connection.close()
        if status != 200:
            told = f"{self.address}{path}: vLLM answers {status}: {_message(text)}"
            if status >= 500 and path != _HEALTH and not self._healthy():
                raise ServerGone(told)  # its engine has died, and it follows
            raise UserError(told)
        if not text:
            return None
        try:
            return json.loads(text)
        except ValueError:
            raise UserError(f"{self.address}{path}: answers no JSON: {text[:100]!r}") from None


def _field(answer: Any, name: str, path: str) -> Any:
    if not isinstance(answer, dict) or name not in answer:
        raise UserError(f"{path}: vLLM's answer has no {name!r}: {str(answer)[:100]}")
    return answer[name]


def _message(text: str) -> str:
    """What vLLM says of an error, in one line."""
    try:
        found = json.loads(text)
        error = found.get("error", found.get("detail", found))
        text = str(error.get("message", error)) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        pass  # not vLLM's form: shown as it is
    return " ".join(text.split())[:400]


def _last_error(log: Path) -> str:
    """The last errors of a log, or its last lines, and where it is."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    found = (match[0] for line in lines if (match := _ERROR.search(line)))
    errors = list(dict.fromkeys(x for x in found if "EngineDeadError" not in x))
    return f"{' | '.join((errors or lines)[-_SHOWN:])} ({log})"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _shut(connection: http.client.HTTPConnection) -> None:
    """End a request that another thread waits for."""
    try:
        if connection.sock is not None:
            connection.sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it has ended by itself


def _end(process: subprocess.Popen) -> None:
    """End a server and its workers, which are one process group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(10)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
