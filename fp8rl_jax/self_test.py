"""Whether the GPU kernels are right on this machine: tried at first use, by processes of their own.

Kernels were checked with other drivers, assemblers and versions of JAX than a user has. So before
JAX takes a Hopper GPU, each operation's first cases run there (pallas_kernels/check/device.py): a
wrong value, other bits the second time, a row whose bits depend on its neighbours, a hang or a
crash is that operation's verdict. Under precision.backend = "auto" an operation without a good
verdict is computed by the next backend, which one line says; "hopper" by name is refused then.

Verdicts are kept in the cache folder, `kernels/KEY.json`: the key is of GPU, driver, JAX, its CUDA
plugin and ptxas, and beside each verdict stands the fingerprint of the sources. Where a run has
several processes, those of process 0 hold for all.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

from fp8rl_jax.caching import cache_dir
from fp8rl_jax.durable import locked, write_durably
from fp8rl_jax.errors import UserError
from fp8rl_jax.parallel import is_first_process, told_by_first
from pallas_kernels.backend import refuse_hopper
from pallas_kernels.check.cases import OPERATIONS, Shape
from pallas_kernels.check.sources import ROOT, fingerprint

_log = logging.getLogger("fp8rl")
SERVES = {
    "attention": (),  # decode's order alone, which exact mode takes; in any order cuDNN attends
    "cache_write": ("write_cache",),
    "decode_attention": ("decode_attention",),
    "grouped_matmul": ("grouped_matmul", "grouped_outer_product"),
    "invariant": ("invariant",),
    "matmul": ("blockwise_matmul",),
    "quantize": (
        *("quantize_blocks", "quantize_both", "regroup"),
        *("quantize_swiglu", "quantize_rms_norm"),
    ),
}
"""Operation -> what `backend.resolve` is asked for where its kernels may run."""
OLDEST_PTXAS = 13
SECONDS = 300.0
"""That an operation's cases may take, their compilations included."""
_ALL_SECONDS = 900.0
_TOGETHER = 8
"""Processes: each holds half a gigabyte of the GPU and one of the host."""
COMMAND = (sys.executable, "-m", "pallas_kernels.check.device")
AGAIN = "`fp8rl doctor --kernels` tries again"
_OF_THE_MOMENT = ("RESOURCE_EXHAUSTED", "OUT_OF_MEMORY", "SIGKILL", "SIGTERM", "SIGHUP", "SIGINT")
"""Of errors and endings that tell of what else goes on in the machine."""
_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")


@dataclass(frozen=True)
class Verdict:
    """
    Attributes:
        why: what was wrong; empty where nothing was.
        cases: that were tried.
        seconds: that they took.
        found: whether the operation was tried at all; else the verdict is not kept.
    """

    why: str
    cases: int = 0
    seconds: float = 0.0
    found: bool = True


class _Known:
    """What this process knows.

    Attributes:
        verdicts: by model (None: cases that do not depend on one), then by operation.
        said: what was said of them.
        trusts: nothing is tried, and no kernel refused.
    """

    def __init__(self) -> None:
        self.verdicts: dict[Shape | None, dict[str, Verdict]] = {}
        self.said = ""
        self.trusts = False


_KNOWN = _Known()


def trust() -> None:
    """Take kernels as they are in this process: one that measures or checks them itself must not
    go around them, nor share its GPU with those that try them."""
    _KNOWN.trusts = True


def confirm(backend: str, model: Callable[[], Shape] | None = None) -> None:
    """Let `backend` mean what was found right here, and try what has no verdict yet.

    To be called before anything is traced, and before JAX takes the GPU where that can be: a
    process of its own needs some of its memory. Without a Hopper GPU, and for backends that run no
    such kernel, nothing happens. All processes of a run must call it together.

    Args:
        backend: as precision.backend names it.
        model: gives sizes that are tried, too.

    Raises:
        UserError: hopper is asked for by name and a kernel is wrong, or process 0 says nothing.
    """
    if _KNOWN.trusts or backend not in ("auto", "hopper") or (here := machine()) is None:
        return
    shape = model() if model else None
    if not _KNOWN.verdicts.keys() & {shape, *(_KNOWN.verdicts if shape is None else ())}:
        text = told_by_first(
            f"fp8rl/self_test/{shape}",
            lambda: json.dumps({name: asdict(x) for name, x in _verdicts(here, shape).items()}),
            _ALL_SECONDS,
        )
        _take({shape: {name: Verdict(**found) for name, found in json.loads(text).items()}})
    wrong = refused()
    if wrong and backend == "hopper":
        raise UserError(
            f'precision.backend = "hopper": {_spoken(wrong)}; set it to "auto", which goes around '
            f'that, or to "reference"; {AGAIN}'
        )
    line = f"self-test of GPU kernels on {here['device']}: {_spoken(wrong)}; {_instead(wrong)}"
    if wrong and line != _KNOWN.said and is_first_process():
        _log.warning("%s; %s", line, AGAIN)
    _KNOWN.said = line


def refused() -> dict[str, str]:
    """Operation -> what its self-test found wrong, of this process's backends."""
    return {
        name: verdict.why
        for verdicts in _KNOWN.verdicts.values()
        for name, verdict in verdicts.items()
        if verdict.why
    }


def record() -> dict[str, Any]:
    """Give what a run's record says of its GPU kernels; empty without a Hopper GPU."""
    here, wrong = machine(), refused()
    if here is None or not _KNOWN.verdicts:
        return {}
    right = [name for name in OPERATIONS if name not in wrong]
    return {"kernels": {**here, "right": right, "wrong": wrong}}


def look(anew: bool = False) -> dict[str, Verdict | None] | None:
    """Take the verdicts that are kept, which do not depend on a model, for this process.

    Args:
        anew: forget them, those of models, too, and try every operation.

    Returns:
        Operation -> its verdict, None where there is none; None without a Hopper GPU.
    """
    if (here := machine()) is None:
        return None
    if anew:
        _file(here).unlink(missing_ok=True)
    found = _verdicts(here, None) if anew or assembler()[1] else _kept(here, None)
    _take({None: found})
    return {name: found.get(name) for name in OPERATIONS}


def _take(verdicts: Mapping[Shape | None, Mapping[str, Verdict]]) -> None:
    before = refused()
    _KNOWN.verdicts |= {model: dict(of) for model, of in verdicts.items()}
    wrong = refused()
    if wrong != before:
        refuse_hopper({name: why for kernel, why in wrong.items() for name in SERVES[kernel]})
        jax.clear_caches()  # what was traced before has chosen already


def _spoken(wrong: Mapping[str, str]) -> str:
    """Name what is wrong with which kernels: "decode_attention: case pages ..."."""
    names: dict[str, list[str]] = {}
    for name, why in wrong.items():
        names.setdefault(why, []).append(name)
    return "; ".join(f"{', '.join(of)}: {why}" for why, of in names.items())


def _instead(wrong: Iterable[str]) -> str:
    slower = "plain XLA computes that, and slower; " if any(SERVES[name] for name in wrong) else ""
    return f"{slower}precision.exact is refused"


# this machine


@cache
def machine() -> dict[str, str] | None:
    """Find what verdicts depend on beside sources; None where JAX will have no Hopper GPU.

    The driver is asked, and not JAX, which would take the GPU.
    """
    platforms = jax.config.jax_platforms
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return None
    if (found := _hopper_gpu()) is None:
        return None
    plugin = next(filter(None, map(_version, _PLUGINS)), None)
    if plugin is None:
        return None
    return {
        **found,
        **{name: version(name) for name in ("jax", "jaxlib")},
        "plugin": plugin,
        "ptxas": assembler()[0],
    }


def _version(package: str) -> str | None:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return None


def _hopper_gpu() -> dict[str, str] | None:
    """The first GPU that is visible, and its driver, where it is Hopper's (CUDA driver API)."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    device = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0):
        return None
    capability = []
    for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, .._MINOR
        cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
        capability.append(number.value)
    if capability != [9, 0]:
        return None
    cuda.cuDeviceGetName(name, 256, device)
    cuda.cuDriverGetVersion(ctypes.byref(number))
    module = Path("/sys/module/nvidia/version")
    driver = module.read_text().strip() if module.exists() else "unknown"
    return {"device": name.value.decode(), "driver": f"{driver}, CUDA {number.value}"}


def assembler() -> tuple[str, str]:
    """Find the ptxas that Mosaic assembles kernels with, the first one on PATH.

    Returns:
        What it is, and what is wrong with it, empty where nothing is.
    """
    path = shutil.which("ptxas")
    if path is None:
        missing = "no ptxas on PATH, which assembles the kernels: install CUDA 13's toolkit"
        return "none on PATH", missing
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    release = re.search(r"release (\d+)\.(\d+)(, V[\d.]+)?", said)
    known = f"{path}, {release[0] if release else 'release unknown'}"
    if release is None or int(release[1]) < OLDEST_PTXAS:
        return known, (
            f"{known}, is the first ptxas on PATH; the kernels were checked with {OLDEST_PTXAS}.0 "
            "and newer ones, put such a one first"
        )
    return known, ""


# verdicts, kept and found


def _verdicts(here: Mapping[str, str], model: Shape | None) -> dict[str, Verdict]:
    """Every operation's verdict: of the first cases, and of those of a model."""
    if why := assembler()[1]:
        return dict.fromkeys(OPERATIONS, Verdict(why, found=False))
    kept = {each: _kept(here, each) for each in dict.fromkeys((None, model))}
    wanted = [(name, each) for each, of in kept.items() for name in OPERATIONS if name not in of]
    if wanted:
        found = _try(here, wanted)
        _keep(here, found)
        for (name, each), verdict in found.items():
            kept[each][name] = verdict
    return {
        name: next((of[name] for of in kept.values() if of[name].why), kept[None][name])
        for name in OPERATIONS
    }


def _try(
    here: Mapping[str, str], wanted: Iterable[tuple[str, Shape | None]]
) -> dict[tuple[str, Shape | None], Verdict]:
    """Run operations' cases, many at a time."""
    wanted = list(wanted)
    names = ", ".join(dict.fromkeys(name for name, _ in wanted))
    _log.info("self-test of GPU kernels on %s, once for what is new: %s", here["device"], names)
    began = time.monotonic()
    with ThreadPoolExecutor(min(len(wanted), os.cpu_count() or 1, _TOGETHER)) as pool:
        verdicts = pool.map(lambda each: _run(*each, began + _ALL_SECONDS), wanted)
        found = dict(zip(wanted, verdicts, strict=True))
    right = sum(not verdict.why for verdict in found.values())
    seconds = time.monotonic() - began
    _log.info("self-test: %d of %d right, after %.0f s", right, len(found), seconds)
    return found


def _run(operation: str, model: Shape | None, until: float) -> Verdict:
    """Run an operation's cases in a process of its own."""
    began = time.monotonic()
    seconds = min(SECONDS, until - began)
    if seconds <= 0:
        return Verdict(f"not tried within {_ALL_SECONDS:g} s", found=False)
    words = [operation, "--seconds", str(seconds + 30)]
    words += ["--model", json.dumps(asdict(model))] if model else []
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "JAX_PLATFORMS": "cuda",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "CUDA_VISIBLE_DEVICES": (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0],
    }
    try:
        done = subprocess.run(
            [*COMMAND, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            env=environment,
        )
        output, ending = done.stdout, _ending(done.returncode, done.stderr.decode(errors="replace"))
    except subprocess.TimeoutExpired as late:
        output, ending = late.stdout or b"", f"has not ended after {seconds:g} s"
    return _judged(output.decode(errors="replace"), ending, time.monotonic() - began)


def _ending(code: int, said: str) -> str:
    """How a process ended, empty where it ended well."""
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return f"ended with status {code}: {lines[-1][:300] if lines else 'no word'}" if code else ""


def _judged(output: str, ending: str, seconds: float) -> Verdict:
    """The verdict on what a process of `pallas_kernels.check.device` printed."""
    lines = output.splitlines()
    begun = [line.removeprefix("# ") for line in lines if line.startswith("# ")]
    results = [json.loads(line) for line in lines if line.startswith('{"case"') and line[-1] == "}"]
    whys = [f"case {result['case']} {why}" for result in results if (why := _fault(result))]
    if ending and not whys:
        where = f"case {begun[-1]}" if len(begun) > len(results) else "the self-test"
        whys = [f"{where} {ending}"]
    why, tried = whys[0] if whys else "", round(seconds, 1)
    # where nothing of a kernel has run, or something else was in the way, nothing was found
    other = not begun or any(sign in why for sign in _OF_THE_MOMENT)
    return Verdict(why, len(results), tried, found=not (why and other))


def _fault(result: Mapping[str, Any]) -> str:
    if "unserved" in result:
        return ""
    if "raised" in result:
        return f"raised {' '.join(result['raised'].split())[:300]}"
    if not result["runs_equal"]:
        return f"gave other bits when it ran again (difference {result['difference']:.2g})"
    if result["passed"]:
        return ""
    allowed = result["of_allowed"]
    times = f"{allowed:.2g} times what is allowed" if allowed < 1e9 else "and none is allowed"
    return f"is off by {result['difference']:.2g} of the largest value, {times}"


@cache
def _fingerprint(operation: str) -> str:
    return fingerprint([f"pallas_kernels.{operation}.cases", "pallas_kernels.check.device"])


def _file(here: Mapping[str, str]) -> Path:
    key = hashlib.sha256(json.dumps(here, sort_keys=True).encode()).hexdigest()[:16]
    return cache_dir() / "kernels" / f"{key}.json"


def _entry(operation: str, model: Shape | None) -> str:
    return f"{operation} {model}" if model else operation


def _read(here: Mapping[str, str]) -> dict[str, Any]:
    """The entries of a file; none where it is not there, or damaged, and then it is made anew."""
    try:
        entries = json.loads(_file(here).read_text())["verdicts"]
        return {
            name: entry
            for name, entry in entries.items()
            if isinstance(entry["fingerprint"] + Verdict(**entry["verdict"]).why, str)
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _kept(here: Mapping[str, str], model: Shape | None) -> dict[str, Verdict]:
    """The verdicts that hold for the sources as they are."""
    entries = _read(here)
    return {
        name: Verdict(**entry["verdict"])
        for name in OPERATIONS
        if (entry := entries.get(_entry(name, model)))
        and entry["fingerprint"] == _fingerprint(name)
    }


def _keep(here: Mapping[str, str], found: Mapping[tuple[str, Shape | None], Verdict]) -> None:
    new = {
        _entry(name, model): {"fingerprint": _fingerprint(name), "verdict": asdict(verdict)}
        for (name, model), verdict in found.items()
        if verdict.found
    }
    file = _file(here)
    try:
        with locked(file.with_suffix(".lock")) as held:
            if held is not None:  # else another process is writing what it has found itself
                text = json.dumps({"machine": dict(here), "verdicts": _read(here) | new}, indent=1)
                write_durably(file, text + "\n")
    except OSError as error:
        _log.warning(
            "%s: verdicts on GPU kernels cannot be kept (%s), so each start tries them again; name "
            "a folder in FP8RL_CACHE",
            *(file, error.strerror),
        )
