"""Kernels for CPUs, in C: compiled for this machine when they are first needed, called through XLA.

`OPERATION/cpu.c` beside an operation's other backends has its kernel, `native.h` here what they
share. The C compiler is the one that `$CC` names, or `cc`; the library is kept in
`$FP8RL_NATIVE_CACHE`, or `~/.cache/pallas_kernels`, under a name made of all that it was made of.
They run under backend="cpu" and, where they can, "auto"; `why_unavailable` says why they cannot.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import jax

_PACKAGE = Path(__file__).parent.parent
_SOURCES = ("matmul/cpu.c", "quantize/cpu.c", "attention/cpu.c")
_HANDLERS = (
    "fp8rl_dot",
    "fp8rl_pack",
    "fp8rl_quantize",
    "fp8rl_dequantize",
    "fp8rl_attend",
    "fp8rl_decode_attention",
)
_FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-std=gnu11")


class _Unavailable(Exception):
    """This machine has no CPU kernels, and why."""


def is_available() -> bool:
    """Whether the kernels run here: JAX on one CPU device, and a C compiler that takes them."""
    return not why_unavailable()


def why_unavailable() -> str:
    """Say what the kernels lack here; empty where they run."""
    if jax.default_backend() != "cpu":
        return f"JAX runs on {jax.devices()[0].device_kind!r}"
    if jax.device_count() > 1:
        return f"they run on one CPU device, and JAX has {jax.device_count()}"
    return _library()[1]


def target(handler: str) -> str:
    """Name a kernel as XLA knows it; a program that is kept on disk finds the very code that it was
    compiled with, or none.

    Raises:
        RuntimeError: the kernels are not available.
    """
    return f"{handler}_{_loaded().digest}"


def constant(name: str) -> int:
    """Read an integer that the library was compiled with.

    Raises:
        RuntimeError: the kernels are not available.
    """
    return getattr(_loaded().code, name)()


class _Library:
    def __init__(self, path: Path, digest: str):
        self.code, self.digest = ctypes.CDLL(str(path)), digest
        for handler in _HANDLERS:
            address = jax.ffi.pycapsule(getattr(self.code, handler))
            jax.ffi.register_ffi_target(f"{handler}_{digest}", address, platform="cpu")


def _loaded() -> _Library:
    library, why = _library()
    if library is None:
        raise RuntimeError(f"the CPU kernels are not available: {why}")
    return library


@cache
def _library() -> tuple[_Library | None, str]:
    try:
        path, digest = _compiled()
        return _Library(path, digest), ""
    except (_Unavailable, OSError) as error:
        return None, str(error)


def _compiled() -> tuple[Path, str]:
    """Compile the kernels, unless that has been done; returns the library and its digest."""
    if platform.machine() not in ("x86_64", "AMD64", "aarch64", "arm64"):
        raise _Unavailable(f"they are for x86-64 and ARM, not {platform.machine()}")
    compiler = shlex.split(os.environ.get("CC") or "cc")
    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True, timeout=60)
        # -march=native means another thing on another machine
        asked = [*compiler, "-march=native", "-E", "-dM", "-x", "c", "/dev/null"]
        machine = subprocess.run(asked, capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _Unavailable(f"no C compiler: {compiler[0]!r} does not run ({error})") from None
    include = jax.ffi.include_dir()
    files = [_PACKAGE / source for source in _SOURCES]
    header = Path(include, "xla/ffi/api/c_api.h")
    read = [_PACKAGE / "native/native.h", header, *files]
    made_of = [version.stdout, machine.stdout, " ".join(_FLAGS).encode()]
    made_of += [path.read_bytes() for path in read]
    digest = hashlib.sha256(b"\0".join(made_of)).hexdigest()[:12]
    folder = _folder()
    path = folder / f"cpu_kernels_{digest}.so"
    if path.exists():
        return path, digest
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch, path.name)
        command = [*compiler, *_FLAGS, "-fPIC", "-shared", "-I", include, *map(str, files)]
        done = subprocess.run(
            [*command, "-o", str(made), "-lm"], capture_output=True, text=True, timeout=600
        )
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
            raise _Unavailable(f"{compiler[0]!r} did not compile them: {lines[0]}")
        os.replace(made, path)
    return path, digest


def _folder() -> Path:
    given = os.environ.get("FP8RL_NATIVE_CACHE")
    return Path(given or Path.home() / ".cache" / "pallas_kernels").expanduser()
