"""A process that runs jobs, one after the other, as it is asked: `python -m
experiments.benchmarks.gpu.worker SETTING WORDS`.

It speaks the line protocol of `peers/link.py`. The first line that it writes says where it runs, or
{"fault": ..}. A request is {"part": .., "label": .., "compile_only": ..}; its answer {"result": ..,
"usable": ..} or {"failed": .., "usable": ..}, where `usable` says whether the device still
computes.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from experiments.benchmarks import machine
from experiments.benchmarks.gpu.jobs import PARTS, Job, Setting
from experiments.benchmarks.gpu.timing import reason_of
from fp8rl_jax import self_test
from pallas_kernels.backend import hopper_sms


def serve(
    setting: Setting,
    words: list[str],
    requests: Iterable[dict[str, Any]],
    answer: Callable[[dict[str, Any]], None],
) -> None:
    """Answer all requests.

    Args:
        words: of the command that started this, for the record.
    """
    if not setting.tiny and hopper_sms() is None:
        device = jax.devices()[0].device_kind
        return answer(
            {
                "fault": f"no Hopper GPU: JAX runs on {device!r}; its CUDA plugin or its driver "
                "is missing"
            }
        )
    answer(
        {
            "device": jax.devices()[0].device_kind,
            "facts": machine.facts("experiments.benchmarks.gpu", words),
        }
    )
    for request in requests:
        own = replace(setting, compile_only=request["compile_only"])
        try:
            outcome = {"result": jobs_of(request["part"], own)[request["label"]].run()}
        # whatever a kernel, a compiler or a peer objects to is the result
        except Exception as error:
            outcome = {"failed": reason_of(error)}
            traceback.print_exc()
        gc.collect()  # device memory of this job, before the next one's
        answer(outcome | {"usable": usable()})


@cache
def jobs_of(part: str, setting: Setting) -> dict[str, Job]:
    return {job.label: job for job in PARTS[part].jobs(setting)}


def usable() -> bool:
    """Tell whether the device still computes.

    After an illegal access it does not, for as long as the process lives.
    """
    try:
        return int(jax.block_until_ready(jnp.arange(8, dtype=jnp.int32) + 1).sum()) == 36
    # a lost device raises whatever its driver and XLA make of it; each of that means no
    except Exception:
        return False


def main() -> None:
    self_test.trust()  # the part "checks" is their judge here
    setting, words = Setting(**json.loads(sys.argv[1])), json.loads(sys.argv[2])
    # libraries print to standard output; that goes to standard error, and the real one is for
    # answers only
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    requests = (json.loads(line) for line in iter(sys.stdin.readline, ""))
    serve(setting, words, requests, lambda outcome: print(json.dumps(outcome), file=answers))


if __name__ == "__main__":
    main()
