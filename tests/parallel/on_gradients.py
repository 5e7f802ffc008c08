"""Run by test_replicas.py, on 8 devices or in two processes: gradients in few bits of replicas that
each have a part of the batch, against one device and against float64."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from fp8rl_jax.config.formats import parse_format
from fp8rl_jax.config.recipe import get_recipe, recipe
from fp8rl_jax.config.rl import CorrectionConfig, RLConfig
from fp8rl_jax.config.run import MeshConfig
from fp8rl_jax.config.training import OptimizerConfig
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.policy import init_policy
from fp8rl_jax.parallel import (
    batch_sharding,
    initialize,
    make_mesh,
    replicated,
    shard_policy,
    to_global,
    to_host,
)
from fp8rl_jax.parallel.collectives import collectives
from fp8rl_jax.training.gradients import init_factors, scaled_sum, sum_of_codes, weight_gradients
from fp8rl_jax.training.state import make_optimizer, sharded_state
from fp8rl_jax.training.step import Batch, StepConfig, update

SHAPE = PolicyConfig("qwen3", 64, 32, 64, 2, 4, 2, 16)
RL = RLConfig(correction=CorrectionConfig(method="token_tis"))
E4M3 = parse_format("e4m3-power_of_two")


def sent(text: str) -> dict[str, int]:
    """Bytes that a device sends in the collectives of a compiled program, by type."""
    told: dict[str, int] = {}
    for one in collectives(text):
        for array in one.arrays:
            kind = array[0]
            told[kind] = told.get(kind, 0) + replace(one, arrays=(array,)).sent
    return told


def on_replicas(function, mesh, *parts):
    """function(part of each replica) of every replica: arrays [replicas, ...]."""

    def of_one(*parts):
        return jax.tree.map(lambda x: x[None], function(*(x[0] for x in parts)))

    split = PartitionSpec("data")
    run = jax.shard_map(
        of_one, mesh=mesh, in_specs=split, out_specs=split, axis_names={"data"}, check_vma=False
    )
    return to_host(jax.jit(run)(*(to_global(x, batch_sharding(mesh)) for x in parts)))


def numbers(mesh, n: int) -> dict:
    """Sums of codes and of tensors, against their definition."""
    told = {}
    if n == 2:
        given = np.uint8([[0x4A, 0x58], [0x50, 0x5C]]).view(jnp.float8_e4m3fn)
        total = on_replicas(partial(sum_of_codes, n=n), mesh, given)
        told["bytes"] = [row.view(np.uint8).tolist() for row in np.asarray(total)]
    rng = np.random.default_rng(0)
    x = np.float32(rng.normal(size=(n, 3, 5, 7)) * 10.0 ** rng.uniform(-6, 2, (1, 3, 1, 1)))
    mu = np.float32([1.0, 0.5, 2.0])
    q, share = on_replicas(lambda x: scaled_sum(x, E4M3, jnp.asarray(mu), n), mesh, x)
    amax = np.abs(x.astype(np.float64)).max((0, 2, 3))
    scales = 2.0 ** np.ceil(np.log2(amax / 448)) / mu
    to_codes = lambda y: np.float32(np.clip(y, -448, 448)).astype(jnp.float8_e4m3fn)  # noqa: E731
    codes = to_codes(x / scales[:, None, None]).astype(np.float64)
    expected = to_codes(codes.sum(0))
    told["sum"] = bool(
        all(np.array_equal(np.float32(one), np.float32(expected)) for one in q.values)
        and np.array_equal(np.asarray(q.scales)[0, :, 0, 0], np.float32(scales))
    )
    told["share"] = np.allclose(share, (np.abs(np.float32(expected)) == 448).mean((1, 2)))
    told["saturates"] = float(np.asarray(share).max())
    return told


def batch_of(seed: int, prompts: int) -> Batch:
    rng = np.random.default_rng(seed)
    rows = 2 * prompts
    return Batch(
        rng.integers(1, 61, (prompts, 5)).astype(np.int32),
        rng.integers(2, 6, prompts).astype(np.int32),
        rng.integers(1, 61, (rows, 6)).astype(np.int32),
        np.arange(6) < rng.integers(1, 7, (rows, 1)),
        rng.normal(-4, 0.3, (rows, 6)).astype(np.float32),
        rng.normal(size=rows).astype(np.float32),
    )


def made(name: str, micro: int) -> tuple:
    """The optimizer and the step of a format of weight gradients."""
    kept = recipe(get_recipe("bf16"), name, weight_gradient=name)
    config = OptimizerConfig("sgd", learning_rate=1e-1, max_grad_norm=0)
    step = StepConfig(kept, RL, "float32", 1.0, micro, logprob_chunk=8)
    return make_optimizer(config, 4, kept), step


def compiled(name: str, mesh) -> str:
    """The exchange of a policy's gradients, in the program for the devices of a mesh, which need not
    be there."""
    kept = recipe(get_recipe("bf16"), name, weight_gradient=name)

    def exchange(policy, factors, parts):
        total = lambda _, parts: (jax.tree.map(lambda x: x.sum(0), parts), (), ())  # noqa: E731
        return weight_gradients(total, policy, parts, kept, factors)

    def placed(tree, sharding):
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    with jax.set_mesh(mesh):
        policy = jax.eval_shape(lambda: init_policy(SHAPE, jax.random.key(0)))
        factors = jax.eval_shape(lambda: init_factors(policy, kept))
        parts = jax.eval_shape(
            lambda x: jax.tree.map(lambda w: jnp.stack([w] * mesh.size), x), policy
        )
        whole = placed((policy, factors), replicated(mesh))
        parts = placed(parts, batch_sharding(mesh))
        return jax.jit(exchange).lower(*whole, parts).compile().as_text()


def run(name: str, mesh, micro: int) -> tuple:
    """Two updates: the masters and factors after them, metrics and log-probabilities of both."""
    optimizer, step = made(name, micro)
    with jax.set_mesh(mesh):
        policy = shard_policy(to_host(init_policy(SHAPE, jax.random.key(0))), mesh)
        state, found = sharded_state(policy, optimizer, mesh), []
        for seed in range(2):
            batch = to_global(batch_of(seed, 8), batch_sharding(mesh))
            state, logprobs, metrics = update(state, batch, step, optimizer)
            found.append((to_host(metrics), to_host(logprobs)))
        return to_host(state.policy), to_host(state.gradient_factors), found


def far(one, other, before) -> float:
    """Of what two updates changed, the relative distance."""
    move = [
        [np.float64(x) - y for x, y in zip(jax.tree.leaves(t), before, strict=True)]
        for t in (one, other)
    ]
    norm = lambda xs: np.sqrt(sum((x**2).sum() for x in xs))  # noqa: E731
    return float(norm([x - y for x, y in zip(*move, strict=True)]) / norm(move[1]))


def updates(mesh, micro: int = 1) -> dict:
    """Gradients in e4m3 beside float32, on one mesh."""
    before = [np.float64(x) for x in jax.tree.leaves(init_policy(SHAPE, jax.random.key(0)))]
    exact, _, plain = run("float32", mesh, micro)
    found, factors, packed = run("e4m3-power_of_two", mesh, micro)
    (first, logprobs), (second, _) = packed
    return {
        "far": far(found, exact, before),
        "logprobs": float(np.abs(logprobs - plain[0][1]).max()),
        "more_metrics": sorted(set(first) ^ set(plain[0][0])),
        "metrics": max(
            abs(float(first[name]) - float(value))
            for name, value in plain[0][0].items()
            if name != "optim/grad_norm"
        ),
        "norms": [float(of["optim/grad_norm"]) for of in (first, plain[0][0])],
        "scales": [float(of["optim/gradient_scale"]) for of in (first, second)],
        "saturated": [float(of["optim/gradient_saturated"]) for of in (first, second)],
        "factors": [float(min(map(np.min, factors))), float(max(map(np.max, factors)))],
    }


def main() -> None:
    if len(sys.argv) > 1:
        address, count, number = sys.argv[1:4]
        config = MeshConfig(coordinator=address, num_processes=int(count), process_id=int(number))
        initialize(config)
        mesh = make_mesh(config)
        with jax.set_mesh(mesh):
            told = numbers(mesh, 2)
        print(json.dumps(told))
        return
    eight, two = make_mesh(MeshConfig(8)), make_mesh(MeshConfig(2), jax.devices()[:2])
    told = {}
    for name, mesh, n in (("two", two, 2), ("eight", eight, 8)):
        with jax.set_mesh(mesh):
            told[name] = numbers(mesh, n)
    told["updates"] = {str(micro): updates(mesh, micro) for mesh, micro in ((eight, 1), (two, 2))}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
