"""torch's and Triton's blockwise products, timed in a process of another interpreter on the same card."""

from __future__ import annotations

from functools import partial

from experiments.benchmarks.gpu.compare import reason_of
from experiments.benchmarks.peer import Peer, PeerSpec
from experiments.benchmarks.rounds import Side
from fp8rl_jax.errors import UserError

WAYS = {"torch": "torch._scaled_mm, 1x128 and 128x128 scales", "triton": "Triton, 1x128 and 128x128 scales"}
SPEC = ("torch", "--torch-python", "torch_products.py")
SECONDS = 150.0  # that loading, or one shape's tuning, may take


class TorchPeer:
    """The peer, started when it is first asked for; as a context manager it is ended on leaving."""

    def __init__(self, python: str):
        self._python = python
        self._peer: Peer | None = None
        self._fault = ""

    def sides(self, m: int, n: int, k: int) -> tuple[dict[str, Side], dict[str, str]]:
        """Name -> what times it, and name -> why it cannot be timed, at a shape."""
        sides, absent = {}, {}
        for way, name in WAYS.items():
            try:
                answer = self._ask({"prepare": way, "m": m, "n": n, "k": k})
            except UserError as error:
                self._close(reason_of(error))
                answer = {"failed": self._fault}
            if "failed" in answer:
                absent[name] = answer["failed"]
            else:
                sides[name] = partial(self._round, way)
        return sides, absent

    def _round(self, way: str, number: int) -> dict[str, float]:
        return {"seconds": self._ask({"time": way})["seconds"]}

    def _ask(self, request: dict) -> dict:
        if self._fault:
            return {"failed": self._fault}
        if self._peer is None:
            name, option, script = SPEC
            self._peer = Peer(PeerSpec(name, option, self._python, script), {}, threads=4, tokens=0, timeout=SECONDS)
            self._peer.wait_until_ready()
        return self._peer.ask(request)

    def _close(self, fault: str) -> None:
        self._fault = fault
        if self._peer is not None:
            self._peer.close()
            self._peer = None

    def __enter__(self) -> TorchPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self._close("closed")
