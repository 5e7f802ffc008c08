"""A server that gives the recorded answers of a real vLLM, and the work that was recorded.

`vllm_answers.json` holds what vLLM (its version stands there) answered to the requests of `work`;
`make test-vllm` asks it again (test_with_vllm.py), and writes the file anew with
FP8RL_RECORD_VLLM=1. The weight version is kept, pushes are counted; everything else is looked up by
(work, pushes so far, method, path, body).

As a program it takes the place of the interpreter of rollout.vllm.python:
`vllm_replay.py -m fp8rl_vllm serve DIRECTORY --port N ...`.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

ANSWERS = Path(__file__).with_name("vllm_answers.json")


class Answer(NamedTuple):
    status: int
    text: str


Fault = Callable[[str, Any], Answer | None]
"""(path, body) -> what to answer instead; None: nothing special."""


def is_push(path: str, body: Any) -> bool:
    """Whether a request has weights loaded."""
    return path == "/collective_rpc" and body["method"] == "fp8rl_push"


class Replay(ThreadingHTTPServer):
    """Attributes: work: which, of those recorded; version, pushes: of weights; asked: (path, body)
    in order."""

    daemon_threads = True

    def __init__(self, port: int = 0, upstream: str = "", fault: Fault | None = None):
        super().__init__(("127.0.0.1", port), _Handler)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.upstream, self.fault = upstream, fault
        self.work, self.version, self.pushes, self.asked = "engine", "default", 0, []
        self.recorded: dict[str, Answer] = {}
        if not upstream:
            found = json.loads(ANSWERS.read_text())["answers"]
            self.recorded = {key: Answer(*answer) for key, answer in found.items()}

    def __enter__(self) -> Replay:
        Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.shutdown()
        self.server_close()

    def answer(self, method: str, path: str, body: Any) -> Answer:
        self.asked.append((path, body))
        if self.fault is not None and (fault := self.fault(path, body)) is not None:
            return fault
        if is_push(path, body):
            self.pushes += 1
            told = body | {"kwargs": body["kwargs"] | {"path": "PATH"}}
        elif path == "/update_weight_version":
            self.version, told = body["new_version"], "VERSION"
        else:
            told = body
        key = json.dumps([self.work, self.pushes, method, path, told], sort_keys=True)
        if self.upstream:
            self.recorded[key] = _ask(self.upstream, method, path, body)
            if path == "/weight_info":  # this run's own, not the recorded run's
                return self.recorded[key]
        if path == "/weight_info":
            return Answer(200, json.dumps({"weight_version": self.version}))
        if path == "/health":
            return Answer(200, "")
        return self.recorded.get(key) or Answer(500, f"was never asked of vLLM: {key}")


class _Handler(BaseHTTPRequestHandler):
    server: Replay

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def _answer(self, method: str) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status, text = self.server.answer(method, self.path, json.loads(data) if data else None)
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_) -> None:
        """Say nothing."""


def _ask(address: str, method: str, path: str, body: Any) -> Answer:
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=300)
    headers = {"Content-Type": "application/json"}
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    answer = connection.getresponse()
    return Answer(answer.status, answer.read().decode())


def main() -> None:
    """Serve on the port of vLLM's arguments; an argument behind --fault is what goes wrong.

    once: ends in the middle of the first completions that follow the probe's, and not again where
    the file that it names is there; hang: so, but it stops to answer; engine: so, but it answers
    that its engine has died; always: ends every time.
    """
    arguments = sys.argv[1:]
    port = int(arguments[arguments.index("--port") + 1])
    kind, marker = "", Path()
    if "--fault" in arguments:
        kind, marker = arguments[arguments.index("--fault") + 1].split(":")
        marker = Path(marker)

    dead = False

    def fault(path: str, body: Any) -> Answer | None:
        nonlocal dead
        if dead:
            return Answer(503 if path == "/health" else 500, '{"error": "EngineDeadError"}')
        if path != "/v1/completions" or body["n"] == 1 or not kind or marker.exists():
            return None
        if kind != "always":
            marker.touch()
        if kind == "hang":
            time.sleep(600)
        if kind == "engine":
            dead = True
            return fault(path, body)
        sys.stderr.write("RuntimeError: the engine died\n")
        sys.stderr.flush()
        os._exit(7)

    Replay(port, fault=fault).serve_forever()


if __name__ == "__main__":
    main()
