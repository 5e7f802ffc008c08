"""Part `copy`: the bytes a second that a plain copy reads and writes on this card; a sum's, which
only reads, beside it."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from experiments.benchmarks.gpu.jobs import Job, Setting
from experiments.benchmarks.gpu.timing import Work, compare

LABEL = "8 GiB"
COPIED_BYTES = 8 * 2**30  # read and written together


def jobs(setting: Setting) -> list[Job]:
    return [Job(LABEL, partial(copy, setting), (__name__,), "copy", first=True)]


def copy(setting: Setting) -> dict[str, Any]:
    moved = 2**20 if setting.tiny else COPIED_BYTES

    def words(arrays):
        def make(key):
            draws = (jax.random.normal(k, (moved // 8,)) for k in jax.random.split(key, arrays))
            return tuple(jax.lax.bitcast_convert_type(draw, jnp.uint32) for draw in draws)

        return make

    works = {
        # by one more, so that a kernel reads and writes: a bare copy would be the copy engine's, or
        # nothing
        "copy": Work(lambda x: x + jnp.uint32(1), words(1)),
        "read": Work(lambda x, y: (jnp.max(x), jnp.max(y)), words(2)),
    }
    return compare(setting, works, (), moved=float(moved))
