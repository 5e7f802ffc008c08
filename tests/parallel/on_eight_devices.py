"""Run by test_sharding.py on 8 devices: places policies on meshes and compares what they compute
with one device."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import jax.numpy as jnp
import numpy as np
import optax
from parallel.policies import make_policy, make_tokens, quantized

import fp8rl_jax
from fp8rl_jax.config.formats import TensorFormat
from fp8rl_jax.config.run import MeshConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.forward import forward
from fp8rl_jax.models.policy import unstack
from fp8rl_jax.parallel import (
    batch_sharding,
    constrain,
    make_mesh,
    policy_shardings,
    replicated,
    shard_policy,
    to_global,
    to_host,
)
from fp8rl_jax.precision import is_quantized
from fp8rl_jax.tokenizers.byte_tokenizer import ByteTokenizer
from fp8rl_jax.weights import gathered as gathering
from fp8rl_jax.weights.load import load_policy, save_policy

BLOCKS = TensorFormat("e4m3", (128, 128), "float32")


def specs(tree) -> dict[str, list]:
    """{path: [spec, shape on one device]} of placed arrays."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): [
            [*x.sharding.spec],
            [*x.sharding.shard_shape(x.shape)],
        ]
        for path, x in leaves
    }


def hidden(policy, tokens):
    return forward(policy, constrain(tokens, "batch", None)).hidden


def loss(policy, tokens):
    return jnp.mean(forward(policy, constrain(tokens, "batch", None)).hidden[..., :7] ** 2)


def far(a, b) -> float:
    """Largest absolute difference over two trees, in parts of the largest value of the second."""
    pairs = [
        (np.asarray(x), np.asarray(y))
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    ]
    scale = max(np.abs(y).max() for _, y in pairs)
    return float(max(np.abs(x - y).max() for x, y in pairs) / scale)


def mesh_errors() -> dict[str, str]:
    answers = {}
    for sizes in ((3, 1, 1), (-1, -1, 1), (-1, 3, 1), (0, 1, 1), (2, 2, 1)):
        try:
            answers[str(sizes)] = str(make_mesh(MeshConfig(*sizes)).shape)
        except UserError as error:
            answers[str(sizes)] = str(error)
    return answers


def session_errors(policy) -> list[str]:
    """Of sessions made in Python, whose batches have no size before they come."""
    said = []
    for settings in ({"fsdp": 4, "micro_batch_prompts": 1}, {"expert": 4}):
        try:
            fp8rl_jax.Session(policy, ByteTokenizer(), "bf16", **settings)
        except UserError as fault:
            said.append(str(fault))
    return said


def constraints(mesh) -> dict[str, list]:
    """Specs that `constrain` gives, rows that divide and rows that do not."""
    keep = jax.jit(lambda x: constrain(x, "batch", None, "vocab"))
    with jax.set_mesh(mesh):
        return {str(rows): [*keep(jnp.ones((rows, 3, 6))).sharding.spec] for rows in (8, 3)}


def exports(policy, placed, mesh) -> dict:
    """Bytes of exports from shards and from the host; and of one from shards, the most bytes that
    are gathered at once, that all devices together hold beside the policy, and that the host holds.
    """
    gathered, beside, whole = [], [], gathering.to_host

    def seen(weight):
        gathered.append(sum(x.nbytes for x in jax.tree.leaves(weight)))
        beside.append(device_bytes() - before)
        return whole(weight)

    with TemporaryDirectory() as name:
        same = []
        for dtype in ("bfloat16", "fp8-block"):
            own, other = (
                save_policy(each, Path(name, kind), dtype=dtype) / "model.safetensors"
                for each, kind in ((policy, "host"), (placed, "shards"))
            )
            same.append(own.read_bytes() == other.read_bytes())
        linears = [linear for linear in policy.stack.tensors() if linear.endswith("_proj")]
        held = {f"layers.{linear}.weight": BLOCKS for linear in linears}
        codes, parts = (load_policy(own.parent, held=held, mesh=m) for m in (None, mesh))
        before, gathering.to_host = device_bytes(), seen
        tracemalloc.start()
        save_policy(placed, Path(name, "shards"), dtype="float32")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        gathering.to_host = whole
    return {
        "same": same,
        "codes": specs(parts) == specs(shard_policy(to_host(codes), mesh)),
        "same_codes": all(map(np.array_equal, *map(jax.tree.leaves, (codes, parts)))),
        "quantized": all(is_quantized(parts.stack.tensors()[each].value) for each in linears),
        "gathered": max(gathered),
        "beside": max(beside),
        "host": peak,
        "policy": sum(x.nbytes for x in jax.tree.leaves(policy)),
    }


def device_bytes() -> int:
    """Of all arrays on all devices, a copy counted as often as it is there, and a view not."""
    shards = [shard.data for x in jax.live_arrays() for shard in x.addressable_shards]
    return sum({x.unsafe_buffer_pointer(): x.nbytes for x in shards}.values())


def main() -> None:
    # numpy leaves, as loaded weights are
    policy, tokens = to_host(make_policy()), make_tokens()
    alone = jax.jit(hidden)(policy, tokens)
    gradient = jax.jit(jax.grad(loss))(policy, tokens)
    eight_bit = jax.jit(quantized)(policy)
    eight_bit_alone = jax.jit(hidden)(eight_bit, tokens)

    forward_error = {}
    for sizes in ((2, 2, 2), (1, 2, 4)):
        mesh = make_mesh(MeshConfig(*sizes))
        with jax.set_mesh(mesh):
            out = jax.jit(hidden, out_shardings=batch_sharding(mesh))(
                shard_policy(policy, mesh), to_global(tokens, batch_sharding(mesh))
            )
        forward_error[str(sizes)] = far(out, alone)

    mesh = make_mesh(MeshConfig(2, 2, 2))
    placed, rows = shard_policy(policy, mesh), to_global(tokens, batch_sharding(mesh))
    shardings = policy_shardings(policy, mesh)
    with jax.set_mesh(mesh):
        sharded_gradient = jax.jit(jax.grad(loss), out_shardings=shardings)(placed, rows)
        quantized_shardings = policy_shardings(jax.eval_shape(quantized, policy), mesh)
        synced = jax.jit(quantized, out_shardings=quantized_shardings)(placed)
        eight_bit_out = jax.jit(hidden)(synced, rows)
    with jax.set_mesh(mesh):
        exported = exports(policy, placed, mesh)
    adam = optax.adamw(1e-3)
    moments = policy_shardings(jax.eval_shape(adam.init, policy), mesh)
    key = jax.random.key(3)
    print(
        json.dumps(
            {
                "mesh_errors": mesh_errors(),
                "session_errors": session_errors(policy),
                "exported": exported,
                "left_over": dict(make_mesh(MeshConfig(-1, 2, 2)).shape),
                "constraints": constraints(mesh),
                "placed": specs(placed),
                "unstacked": specs(shard_policy(unstack(policy), mesh)),
                "quantized": specs(shard_policy(to_host(eight_bit), mesh)),
                "synced": specs(synced),
                "moments_like_policy": jax.tree.leaves(moments[0].mu) == jax.tree.leaves(shardings),
                "count": [*moments[0].count.spec],
                "forward_error": forward_error,
                "gradient_error": far(sharded_gradient, gradient),
                "gradient_sharded_like_policy": specs(sharded_gradient) == specs(placed),
                "sync_equal": all(
                    np.array_equal(np.asarray(a), np.asarray(b))
                    for a, b in zip(
                        jax.tree.leaves(synced), jax.tree.leaves(eight_bit), strict=True
                    )
                ),
                "quantized_forward_error": np.abs(eight_bit_out - eight_bit_alone)
                .max(-1)
                .ravel()
                .tolist(),
                "round_trip": bool(np.array_equal(to_host(rows), tokens)),
                "key": bool(
                    jax.random.uniform(to_global(key, replicated(mesh))) == jax.random.uniform(key)
                ),
            }
        )
    )


if __name__ == "__main__":
    main()
