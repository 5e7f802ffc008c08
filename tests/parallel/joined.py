"""Run by test_distributed.py in one or two processes: the same program on the same mesh of 4
devices."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import xla_bridge
from parallel.policies import make_policy, make_tokens

from fp8rl_jax import self_test
from fp8rl_jax.config.run import MeshConfig
from fp8rl_jax.config.tasks import RewardConfig, TaskConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.forward import forward
from fp8rl_jax.models.policy import Weight, changed_policy
from fp8rl_jax.parallel import (
    batch_sharding,
    check_same,
    constrain,
    distributed,
    gather_text,
    initialize,
    is_main_process,
    least_of,
    make_mesh,
    replicated,
    shard_policy,
    shared_faults,
    to_global,
    to_host,
    told_by_first,
)
from fp8rl_jax.tasks.dataset import Example
from fp8rl_jax.tasks.distributed import play_distributed, score_distributed
from fp8rl_jax.tasks.episodes import Episode
from fp8rl_jax.tasks.sandbox.pool import RewardPool
from fp8rl_jax.weights import hf_directory
from fp8rl_jax.weights.load import load_policy, save_policy
from pallas_kernels.backend import refuse_hopper, resolve, tracing_for

AXES = "vocab", "embed"


def loss(policy, tokens):
    return jnp.mean(forward(policy, constrain(tokens, "batch", None)).hidden[..., :7] ** 2)


def update(policy, tokens):
    value, gradient = jax.value_and_grad(loss)(policy, tokens)
    return value, jax.tree.map(lambda p, g: p - g, policy, gradient)


def refused(text: str) -> str:
    try:
        check_same(text)
    except UserError as error:
        return str(error)
    return ""


def told(fault: str) -> str:
    """What `shared_faults` raises where this process has `fault`; "" is none."""
    try:
        with shared_faults():
            if fault:
                raise UserError(fault)
    except UserError as error:
        return str(error)
    return ""


def trusted(process_id: int) -> dict:
    """What a process takes for wrong where process 0 has found the writing of caches so; and what
    one raises that asks for what nobody tells."""
    find = {"cache_write": self_test.Verdict("found by 0"), "matmul": self_test.Verdict("")}
    self_test.machine = lambda: {"device": f"GPU of {process_id}"}
    self_test._verdicts = lambda *_: find if process_id == 0 else {}
    self_test.confirm("auto")
    found = {"wrong": self_test.refused(), "chosen": "", "late": ""}
    with tracing_for(132):
        found["chosen"] = [resolve("auto", name) for name in ("write_cache", "blockwise_matmul")]
    if process_id:
        distributed._TO_TELL = 0.1
        try:
            told_by_first("nothing", str, 0.2)
        except UserError as error:
            found["late"] = str(error)
    refuse_hopper({})
    self_test.machine = lambda: None
    return found


def scored() -> dict:
    """Four completions of one prompt, by a reward that no two processes agree on; the last one
    hangs."""
    reward = RewardConfig(
        function=f"{Path(__file__).with_name('rewards.py')}:drawn", timeout=1.0, num_workers=1
    )
    with RewardPool(TaskConfig(kind="module", name="m:f", reward=reward)) as pool:
        scores = score_distributed(pool, [Example(0, "p", "a", "a", {})], ["", "", "", "hang"])
    return {
        "rewards": scores.rewards.tolist(),
        "failed": scores.failed.tolist(),
        "correct": scores.correct.tolist(),
        "timeouts": scores.timeouts,
        "errors": scores.errors,
        "first_error": scores.first_error,
    }


def played() -> dict:
    """A turn of five episodes, each process playing its share; the third answer is no number."""
    environment = Path(__file__).parents[1] / "tasks" / "environment_examples.py"
    task = TaskConfig(
        kind="environment",
        name=f"{environment}:Guess",
        max_turns=2,
        reward=RewardConfig(num_workers=1),
    )
    example = Example(
        0,
        "p",
        "",
        "",
        {"question": "Guess a number from 0 to 999 (problem 7).", "metadata": {"seed": 7}},
    )
    with RewardPool(task) as pool:
        scores = play_distributed(pool, [Episode(example)] * 5, ["6", "7", "ß", "8", "7"])
    return {
        "turns": scores.turns,
        "rewards": scores.rewards.tolist(),
        "errors": scores.errors,
        "first_error": scores.first_error,
    }


def exported(policy, placed, mesh) -> dict:
    """An export of a policy that the processes share: the files that this one finds, whether their
    bytes are those of one's own, and what all say where the first tensor is not finite."""
    broken = changed_policy(policy, embed_tokens=Weight(policy.embed_tokens.value * np.nan, AXES))
    with TemporaryDirectory() as name, jax.set_mesh(mesh):
        own = save_policy(policy, Path(name, "own"), dtype="fp8-block")
        shared = save_policy(placed, Path(name, "shared"), dtype="fp8-block")
        found = sorted(file.name for file in shared.iterdir()) if shared.exists() else []
        same = [(own / file).read_bytes() == (shared / file).read_bytes() for file in found]
        try:
            save_policy(shard_policy(broken, mesh), Path(name, "broken"))
            said = ""
        except UserError as error:
            said = str(error).removeprefix(f"{name}/")
    return {"files": found, "same": all(same), "said": said.rpartition(": ")[2]}


def read(policy, placed, mesh) -> dict:
    """Bytes of a model's files that this process reads for its devices, of how many, and whether
    what comes of them is `placed`."""
    counted, whole = [], hf_directory.read_range

    def seen(tensor, span):
        values = whole(tensor, span)
        counted.append(values.nbytes)
        return values

    with TemporaryDirectory() as name:
        save_policy(policy, name, dtype="float32")
        hf_directory.read_range = seen
        found = load_policy(name, mesh=mesh)
        hf_directory.read_range = whole
    pairs = [*zip(*map(jax.tree.leaves, (found, placed)), strict=True)]
    return {
        "bytes": sum(counted),
        "placed": all(a.sharding == b.sharding for a, b in pairs),
        "same": all(np.array_equal(to_host(a), to_host(b)) for a, b in pairs),
    }


def main(coordinator: str, num_processes: int, process_id: int) -> None:
    config = MeshConfig(
        1, -1, 2, coordinator=coordinator, num_processes=num_processes, process_id=process_id
    )
    initialize(config)
    trust = trusted(process_id)
    no_device = not xla_bridge.backends_are_initialized()
    mesh = make_mesh(config)
    check_same("the same on every process")
    # fsdp is the axis between the processes, so no process holds a whole parameter
    policy, tokens = to_host(make_policy()), np.asarray(make_tokens(rows=4))
    placed, rows = shard_policy(policy, mesh), to_global(tokens, batch_sharding(mesh))
    key = to_global(jax.random.key(3), replicated(mesh))
    with jax.set_mesh(mesh):
        value, updated = jax.jit(update)(placed, rows)
        specs = (jax.P("fsdp"), jax.P())
        total = jax.jit(
            jax.shard_map(
                lambda x: jax.lax.psum(x.sum(), "fsdp"), in_specs=specs[0], out_specs=specs[1]
            )
        )(rows)
        drawn = jax.jit(jax.random.uniform)(key)
    back, gathered = to_host(placed), to_host(updated)
    print(
        json.dumps(
            {
                "processes": jax.process_count(),
                "devices": [jax.device_count(), jax.local_device_count()],
                "main": is_main_process(),
                "whole": placed.embed_tokens.value.is_fully_addressable,
                "back": all(
                    np.array_equal(a, b)
                    for a, b in zip(*map(jax.tree.leaves, (back, policy)), strict=True)
                ),
                "local": to_host({"x": np.arange(3) + process_id})["x"].tolist(),
                "psum": [int(to_host(total)), int(tokens.sum())],
                "loss": float(to_host(value)),
                "updated": gathered.layers.down_proj.value[:, ::40, ::100].tolist(),
                "drawn": [float(to_host(drawn)), float(jax.random.uniform(jax.random.key(3)))],
                "trusted": {**trust, "no device": no_device},
                "refused": refused(f"process {process_id}"),
                "told": [
                    told(""),
                    told(f"fault {process_id}" if process_id + 1 == num_processes else ""),
                ],
                "scored": scored(),
                "played": played(),
                "least": [
                    least_of("bytes", float(number - process_id), range(num_processes))
                    for number in (5, 3)
                ]
                + [least_of("bytes", 7.0, [process_id])],
                "gathered": gather_text("ß" * process_id),
                "exported": exported(policy, placed, mesh),
                "read": read(policy, placed, mesh),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
