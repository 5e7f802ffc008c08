"""Rank 0 of an NCCL group whose other ranks are vLLM's workers, without torch.

vLLM's NCCL weight transfer has a rendezvous for trainers such as this one (vllm 0.32,
distributed/weight_transfer/nccl_common.py): rank 0 makes the group's id and sends it over HTTP, all
ranks join at the same time, and each sums one number over the group before anything else. Then a
push is one broadcast a tensor, in the order that its request names them.

NCCL wants a GPU of its own for each rank, so trainer and server are on different ones. The
functions are NCCL's and the CUDA driver's own, by ctypes.
"""

from __future__ import annotations

import base64
import ctypes
import time
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8rl_jax.errors import UserError

LIBRARIES = ("libnccl.so.2", "libcuda.so.1")
_TYPES = {"float32": 7, "float16": 6, "bfloat16": 9, "float8_e4m3fn": 10}  # ncclDataType_t
_SUM = 0  # ncclRedOp_t
_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_LOOK_SECONDS = 0.001


class _Id(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_ubyte * 128),)


class Group:
    """An NCCL group of this process (rank 0) and `workers` of a vLLM server.

    Args:
        workers: ranks 1, 2, ...
        invite: sends the group's id (base64) to the workers, and returns when they have joined;
            called in a thread of its own.
        seconds: until all have joined, until one tensor is sent, and until all are loaded.

    Raises:
        UserError: a library is missing, NCCL reports an error, or the workers refuse.
        TimeoutError: they do not join.
    """

    def __init__(self, workers: int, invite: Callable[[str], Any], seconds: float):
        try:
            self._nccl, self._cuda = map(ctypes.CDLL, LIBRARIES)
        except OSError as error:
            raise UserError(
                f'rollout.vllm.transport: {error}; NCCL needs GPUs, else set it to "files"'
            ) from None
        self._nccl.ncclGetErrorString.restype = ctypes.c_char_p
        self._device, self._seconds = jax.local_devices()[0], seconds
        self._comm = ctypes.c_void_p()
        group_id = _Id()
        self._check(self._nccl.ncclGetUniqueId(ctypes.byref(group_id)))
        told = in_thread(invite, base64.b64encode(bytes(group_id.internal)).decode())
        joined = in_thread(self._join, 1 + workers, group_id)
        try:
            self._until(joined.done, told)
            joined.result()
            self._send(jax.device_put(jnp.zeros(1), self._device), self._sum, told)
            self._until(told.done, told)
        except BaseException:
            self.abort()  # what was sent would wait on the GPU for ever
            raise

    def broadcast(self, tensors: dict[str, np.ndarray], told: Future) -> None:
        """Send tensors to the workers, one after the other, and wait until they have loaded them.

        Args:
            told: of the request that has the workers receive them.

        Raises:
            UserError: NCCL reports an error. What ends `told` with an exception is raised, too.
            TimeoutError: a tensor does not get through, or `told` does not end.
        """
        for tensor in tensors.values():
            self._send(jax.device_put(tensor, self._device), self._broadcast, told)
        self._until(told.done, told)

    def abort(self) -> None:
        """Leave the group, without waiting for the others."""
        if self._comm:
            self._nccl.ncclCommAbort(self._comm)
            self._comm = ctypes.c_void_p()

    def _send(self, x: jax.Array, how: Callable[..., int], told: Future) -> None:
        x.block_until_ready()
        self._enter_context()
        pointer, count = ctypes.c_void_p(x.unsafe_buffer_pointer()), ctypes.c_size_t(x.size)
        self._check(how(pointer, pointer, count, _TYPES[x.dtype.name]))
        # x is held until it is sent, and no longer
        self._until(self._is_sent, told)

    def _sum(self, *operands: Any) -> int:
        return self._nccl.ncclAllReduce(*operands, _SUM, self._comm, None)

    def _broadcast(self, *operands: Any) -> int:
        return self._nccl.ncclBroadcast(*operands, 0, self._comm, None)

    def _is_sent(self) -> bool:
        """Whether the default stream is empty."""
        if (code := self._cuda.cuStreamQuery(None)) not in (0, _NOT_READY):
            raise UserError(f"rollout.vllm.transport: CUDA error {code} while weights were sent")
        return code == 0

    def _join(self, size: int, group_id: _Id) -> None:
        self._enter_context()
        self._check(
            self._nccl.ncclCommInitRank(ctypes.byref(self._comm), size, group_id, ctypes.c_int(0))
        )

    def _enter_context(self) -> None:
        """Make the CUDA context that JAX computes in this thread's own."""
        context, number = ctypes.c_void_p(), self._device.local_hardware_id or 0
        for code in (
            self._cuda.cuInit(0),
            self._cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), number),
            self._cuda.cuCtxSetCurrent(context),
        ):
            if code:
                raise UserError(f"rollout.vllm.transport: CUDA error {code}")

    def _until(self, done: Callable[[], bool], told: Future) -> None:
        """Wait, but not for workers that have refused."""
        end = time.monotonic() + self._seconds
        while True:
            finished = done()
            if told.done():
                told.result()
            if finished:
                return
            if time.monotonic() > end:
                raise TimeoutError(f"vLLM's workers do not answer NCCL for {self._seconds:g} s")
            time.sleep(_LOOK_SECONDS)

    def _check(self, code: int) -> None:
        if code:
            said = self._nccl.ncclGetErrorString(code).decode()
            raise UserError(f"rollout.vllm.transport: NCCL: {said}")


def in_thread(call: Callable[..., Any], *arguments: Any) -> Future:
    """Begin a call that may never return, in a thread that the program's end does not wait for."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(call(*arguments))
        except BaseException as error:  # handed to who asks for the result
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future
