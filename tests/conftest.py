"""What every test shares: JAX on one CPU device, compiled programs kept between runs, shapes
checked at every call."""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# `experiments` is no installed package: it is found as `python -m` finds it
sys.path.insert(0, str(ROOT))

# Set before JAX is imported, and in the environment, so that the processes that tests start have
# them too.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
PROGRAMS = Path(os.environ.get("FP8RL_TEST_CACHE") or Path.home() / ".cache" / "fp8rl" / "tests")
"""Compiled programs, which all clones share."""
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(PROGRAMS))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")

# what is said of compiling depends on how busy the machine is
os.environ.setdefault("FP8RL_COMPILING_AFTER", "600")

import jax  # noqa: E402
import jaxtyping  # noqa: E402
import shape_checks  # noqa: E402

MAPS = Path("/proc/self/maps")
OPTIMIZED = (
    *(
        "kernels/test_quantize",
        "kernels/test_exact",
        "kernels/test_invariant",
        "kernels/test_hopper",
        "precision/test_formats",
        "precision/test_fp4",
        "precision/test_linear",
        "precision/test_roundings",
    ),
    *("training/test_exact.py", "training/test_loss_scale.py::test_float16_gradients"),
    *("compare/test_compare.py::test_an_exact_rollout", "compare/test_compare.py::test_excess"),
    "rollout/test_arrival.py::test_every_number",
)
"""Tests of bits and of roundings: they are compiled as users do, and all others without
optimization."""
HOPPER = (
    "kernels/test_hopper.py",
    "training/test_on_hopper.py",
    "experiments/test_gpu_benchmark.py",
)
"""What only a Hopper GPU runs, checked without one: `make hopper`."""
VLLM = ("rollout/test_with_vllm.py",)
"""What needs an environment with vLLM: `make test-vllm`."""
IN_PROCESS = ("rollout/test_vllm_in_process.py",)
"""What needs an environment with vLLM and this project: `make test-vllm-in-process`."""

# Tracing leaves many small objects that stay; by default the collector walks them over and over.
gc.set_threshold(50_000, 20, 100)

shape_checks.install(["fp8rl_jax", "pallas_kernels"])


def pytest_sessionfinish(session: pytest.Session):
    """Keeps the programs of the newest 2 GB: those of an older code are never asked for again."""
    if hasattr(session.config, "workerinput") or not PROGRAMS.is_dir():
        return
    kept = 0
    with os.scandir(PROGRAMS) as entries:
        sizes = sorted((-e.stat().st_mtime, e.stat().st_size, e.path) for e in entries)
    for _, size, path in sizes:
        kept += size
        if kept > 2e9:
            Path(path).unlink(missing_ok=True)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The pass of `make test` over optimized tests alone imports no file that has none."""
    name = collection_path.relative_to(ROOT / "tests").as_posix()
    if not config.option.markexpr.endswith(" and optimized") or not name.endswith(".py"):
        return None
    files = tuple(prefix.partition("::")[0] for prefix in OPTIMIZED)
    return None if name.startswith(files) else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]):
    for item in items:
        name = f"{item.path.relative_to(ROOT / 'tests').as_posix()}::{item.name}"
        if name.startswith(OPTIMIZED):
            item.add_marker("optimized")
        if name.startswith(HOPPER):
            item.add_marker("hopper")
        if name.startswith(VLLM):
            item.add_marker("vllm")
        if name.startswith(IN_PROCESS):
            item.add_marker("in_process")


def pytest_runtest_teardown():
    """Drops compiled programs where they pile up: each is some ten memory maps, and Linux allows a
    process 65,530."""
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > 40_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(autouse=True)
def log_level():
    """A command sets the library's level for its process, which here has tests after it."""
    logger = logging.getLogger("fp8rl")
    before = logger.level
    yield
    logger.setLevel(before)


@pytest.fixture(autouse=True)
def signals():
    """A test that leaves a handler behind would change what Ctrl-C does in those after it."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.fixture
def unchecked_shapes():
    """Turns the shape checks off, for tests of what a function itself says about a wrong shape."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def fault(request):
    """Tells what an injected fault came to. `python -m experiments.faults` makes a table of it."""
    from experiments.faults import FAULTS, TOLD

    def tell(
        name: str,
        said: str,
        *,
        status: int | None = None,
        detected: float | None = None,
        recovered: float | None = None,
        lost: str | int = "nothing",
    ) -> None:
        """Args:
        name: in FAULTS.
        said: the line that a user reads.
        status: exit status of a process that ended by it.
        detected, recovered: seconds.
        lost: steps that were done again, or what it was.
        """
        assert name in FAULTS
        if path := os.environ.get(TOLD):
            line = {"fault": name, "test": request.node.nodeid.partition("[")[0], "said": said}
            line |= {"status": status, "lost": lost}
            for key, seconds in {"detected": detected, "recovered": recovered}.items():
                line[key] = None if seconds is None else round(seconds, 3)
            with open(path, "a") as file:
                file.write(json.dumps(line) + "\n")

    return tell


@pytest.fixture(scope="session")
def toolchain() -> None:
    """What compiles for Hopper. Without it the test is skipped; with FP8RL_REQUIRE_CUDA_TOOLCHAIN
    set it fails."""
    # not before the hook above is in place
    from pallas_kernels.check.compile import missing_toolchain

    if reason := missing_toolchain():
        if os.environ.get("FP8RL_REQUIRE_CUDA_TOOLCHAIN"):
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of a headless-capable Chromium. Without one the test is skipped; with
    FP8RL_REQUIRE_BROWSER set it fails."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    reason = "no Chromium on PATH; on Debian, as root: apt-get install chromium"
    if os.environ.get("FP8RL_REQUIRE_BROWSER"):
        pytest.fail(reason)
    pytest.skip(reason)
