"""GRPO steps whose rollouts a (replayed) vLLM server answers, in one process or joined to another.

Arguments: coordinator, number of processes, number of this one, address of the server, directory.
Prints its metrics as JSON.
"""

import json
import sys

import jax

coordinator, processes, process, address, directory = sys.argv[1:]
if processes != "1":
    jax.distributed.initialize(coordinator, int(processes), int(process))
from rollout.vllm_work import make_session, steps  # noqa: E402  (it makes arrays)

print(json.dumps(steps(make_session(address=address, directory=directory))))
