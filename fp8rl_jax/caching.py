"""What is kept on disk between runs: converted models, and compiled programs."""

from __future__ import annotations

import os
from pathlib import Path

from fp8rl_jax.compiling import COMPILING


def cache_dir() -> Path:
    """`$FP8RL_CACHE`, or `~/.cache/fp8rl`."""
    return Path(os.environ.get("FP8RL_CACHE") or Path.home() / ".cache" / "fp8rl").expanduser()


def keep_compiled_programs() -> None:
    """Keeps compiled programs in `cache_dir`, unless JAX has been given a place of its own: SmolLM2
    compiles for a minute. What takes long to compile is named from here on."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    COMPILING.listen()
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "jax"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
        # JAX looks once whether there is a cache, at the first program, which may have been before
        compilation_cache.reset_cache()
