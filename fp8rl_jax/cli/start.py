"""What every command that computes does first."""

from __future__ import annotations

import logging


def start_jax() -> None:
    """Log lines to standard error, and compiled programs kept between runs (FP8RL_CACHE or
    ~/.cache/fp8rl, as models are)."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("fp8rl").setLevel(logging.INFO)

    from fp8rl_jax.caching import keep_compiled_programs

    keep_compiled_programs()
