"""What is kept on disk between runs: converted models, and compiled programs."""

from __future__ import annotations

import hashlib
import os
import platform
from functools import cache
from pathlib import Path

from fp8rl_jax.compiling import COMPILING


def cache_dir() -> Path:
    """`$FP8RL_CACHE`, or `~/.cache/fp8rl`."""
    return Path(os.environ.get("FP8RL_CACHE") or Path.home() / ".cache" / "fp8rl").expanduser()


def program_dir() -> Path:
    """Give the folder of `cache_dir` for compiled programs, one for each kind of CPU: a program of
    another one's instructions ends the process, and machines may share a home."""
    return cache_dir() / "jax" / _cpu_kind()


@cache
def _cpu_kind() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = [platform.processor()]
    # what a kernel calls features has the name flags on x86 and Features on ARM
    kind = next((x for x in lines if x.startswith(("flags", "Features"))), "".join(lines[:1]))
    return f"{platform.machine()}-{hashlib.sha256(kind.encode()).hexdigest()[:8]}"


def keep_compiled_programs() -> None:
    """Keeps compiled programs in `program_dir`, unless JAX has been given a place of its own:
    SmolLM2 compiles for a minute. What takes long to compile is named from here on."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    COMPILING.listen()
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(program_dir()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
        # JAX looks once whether there is a cache, at the first program, which may have been before
        compilation_cache.reset_cache()
