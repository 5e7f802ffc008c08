"""A session that learns from a reward given in the script, alone or joined to another process, with
continuous batching in two slots of each part of the batch. Sampling is truncated, and the trainer,
whose vocabulary is split, replays the supports.

Arguments: coordinator, number of processes, number of this one, directory. Prints its metrics and
texts as JSON.
"""

import json
import sys

import jax

import fp8rl_jax as fp8rl
from fp8rl_jax.config.run import PagedConfig, RolloutConfig, RunConfig

coordinator, processes, process, directory = sys.argv[1:]
if processes != "1":
    jax.distributed.initialize(coordinator, int(processes), int(process))
policy, tokenizer = fp8rl.byte_policy(
    hidden_size=64, intermediate_size=96, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16
)
session = fp8rl.Session(
    policy,
    tokenizer,
    "fp8-rl",
    config=RunConfig(rollout=RolloutConfig(engine="paged", paged=PagedConfig(slots=2))),
    compute_dtype="float32",
    samples_per_prompt=4,
    max_new_tokens=6,
    learning_rate=1e-2,
    fsdp=2,
    tensor=2,
    data=1,
    top_k=200,
    truncated_sampling="replay",
)
rows = []
for _ in range(3):
    rollout = session.rollout(["ab=", "cde=", "f="])  # filled up to four, which two shards divide
    metrics = session.update(
        rollout, [sum(letter in "aeiou" for letter in text) for text in rollout.texts]
    )
    rows.append(metrics | {"texts": rollout.texts})
logprobs = [x.tolist() for x in session.logprobs(["ab="], rollout.tokens[:4])]
session.save(directory)
print(json.dumps({"rows": rows, "logprobs": logprobs}))
