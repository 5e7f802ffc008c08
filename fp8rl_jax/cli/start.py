"""What every command that computes does first."""

from __future__ import annotations

import logging
import os
from pathlib import Path


def start_jax() -> None:
    """Log lines to standard error, and compiled programs kept between runs (FP8RL_CACHE or ~/.cache/fp8rl, as models are)."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("fp8rl").setLevel(logging.INFO)
    import jax

    from fp8rl_jax.models.fetch import cache_dir

    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(Path(cache_dir()) / "jax"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
