"""Run by test_collectives.py on 8 devices: bytes that a run's programs send, and where a model is
loaded."""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from tiny_models import LLAMA, random_tensors, write_model
from tokenizer_folders import tokenizer_json

import fp8rl_jax as fp8rl
from fp8rl_jax.config.run import MeshConfig, RolloutConfig, RunConfig
from fp8rl_jax.config.training import TrainerConfig
from fp8rl_jax.models.policy import parameter_count
from fp8rl_jax.parallel import make_mesh
from fp8rl_jax.parallel.collectives import collectives, sent_over
from fp8rl_jax.training.ahead import lower_rollout, lower_update
from fp8rl_jax.weights.load import load_policy

SHAPE = replace(LLAMA, eos_token_ids=(1,))
UPDATE = ({"fsdp": 8}, {"data": 2, "fsdp": 4})
DECODE = ({"data": 8}, {"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2})


def config_of(sizes: dict[str, int], prompts: int = 16, chunk: int = 64, **rollout) -> RunConfig:
    given = {"decode_layers": "scan"} | rollout
    return RunConfig(
        recipe="bf16",
        compute_dtype="float32",
        mesh=replace(MeshConfig(data=1), **sizes),
        rollout=RolloutConfig(prompts, 2, 8, 24, **given),
        trainer=TrainerConfig(logprob_chunk=chunk, remat="layer"),
    )


def programs(lower, config: RunConfig) -> list:
    mesh = make_mesh(config.mesh)
    return collectives(lower(SHAPE, config, mesh).compile().as_text())


def total(found) -> int:
    """Of all but the embeddings of tokens, whose parts devices exchange: less than the table."""
    return sum(one.sent for one in found if "_take" not in one.where)


def update() -> dict[str, dict[str, int]]:
    told = {}
    for sizes in UPDATE:
        base = total(programs(lower_update, config_of(sizes)))
        told[" ".join(sizes)] = {
            "base": base,
            "batch": total(programs(lower_update, config_of(sizes, 32, 128))),
            "chunks": total(programs(lower_update, config_of(sizes, 16, 16))),
            "weights": 4 * parameter_count(SHAPE),
        }
    return told


def sums() -> dict[str, float]:
    """Sums of hidden states over tensor in a layer of an update; by recipe."""
    shape = replace(SHAPE, num_kv_heads=SHAPE.num_heads, head_dim=64, intermediate_size=256)
    told = {}
    for recipe in ("bf16", "jet-rl"):
        config = replace(config_of({"data": 4, "tensor": 2}), recipe=recipe)
        tokens = (16 * 8 + 32 * 24) / 4
        found = collectives(lower_update(shape, config, make_mesh(config.mesh)).compile().as_text())
        names = dict.fromkeys(("data", "fsdp", "expert", "tensor"), 1) | {"data": 4, "tensor": 2}
        looped = sum(
            one.times * math.prod(sides)
            for one in found
            if one.kind == "all-reduce" and one.axes(names) == ("tensor",)
            if one.times > 1 and "shard_map" not in one.where  # those of the output head
            for dtype, sides in one.arrays
            if dtype == "f32"
        )
        told[recipe] = looped / (shape.num_layers * tokens * shape.hidden_size)
    return told


def decode() -> dict[str, dict[str, int]]:
    """Bytes of one step of the decode loop, of both engines."""
    told = {}
    for sizes in DECODE:
        names = dict.fromkeys(("data", "fsdp", "expert", "tensor"), 1) | sizes
        for engine in ("static", "paged"):
            found = programs(lower_rollout, config_of(sizes, engine=engine))
            steps = [one for one in found if one.loops]
            told[f"{' '.join(sizes)} {engine}"] = sent_over(steps, names)
    return told


def loaded() -> dict[str, float]:
    """The share of a model's bytes that a device holds of it, and the largest difference from one
    that was loaded whole."""
    with tempfile.TemporaryDirectory() as folder:
        directory = write_model(Path(folder) / "model", LLAMA, random_tensors(LLAMA))
        (directory / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
        whole, parts = load_policy(directory), fp8rl.load(directory, data=1, fsdp=4, tensor=2)[0]
    pairs = zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True)
    gaps = [np.abs(np.asarray(x) - np.asarray(y)).max() for x, y in pairs]
    held = [x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(parts)]
    total = sum(x.nbytes for x in jax.tree.leaves(whole))
    return {"share": sum(held) / total, "apart": float(max(gaps))}


def main() -> None:
    print(json.dumps({"update": update(), "sums": sums(), "decode": decode(), "loaded": loaded()}))


if __name__ == "__main__":
    main()
