"""What a run needs of a device's memory, from shapes alone: before weights are read, and on a
machine without the device.

Nothing is guessed about what stays between programs. Weights, moments and rollout weights are the
shapes that the run's own functions give (`jax.eval_shape`), divided as the sharding rules divide
them, to the byte. What a program holds while it runs is an estimate: tests/training/test_plan.py
holds it to what XLA says of the compiled programs.

    always      float32 masters, moments, the frozen base of adapters, rollout weights, the
                reference policy of a KL term
    rollout     KV cache, and weights that reference kernels unpack for the decode loop
    backward    weights in the compute dtype, activations, logits of a chunk, gradients and, of
                several micro-batches, their sums
    optimizer   gradients, and what Adam makes of them
    sync        weights in the compute dtype on their way to their quantized form

The phases follow each other, so a run needs what always stays and the largest phase.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from fp8rl_jax.config.recipe import Recipe
from fp8rl_jax.config.run import MeshConfig, RunConfig
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.forms import rollout_policy
from fp8rl_jax.models.lora import split
from fp8rl_jax.models.policy import Policy, init_policy
from fp8rl_jax.parallel import policy_shardings
from fp8rl_jax.parallel.mesh import AXES
from fp8rl_jax.precision import element_dtype
from fp8rl_jax.training.adapters import adapt
from fp8rl_jax.training.state import make_optimizer
from pallas_kernels.attention import CHUNK, CHUNK_FROM
from pallas_kernels.matmul import selected_backend

PHASES = ("rollout", "backward", "optimizer", "sync")
_SCORE_COPIES = 4.5  # of attention scores, in float32: measured, tests/training/test_plan.py


@dataclass(frozen=True)
class Plan:
    """Bytes of one device.

    Attributes:
        always: what stays between phases, by name.
        phases: what each phase adds, by name.
        devices: of the mesh.
    """

    always: dict[str, int]
    phases: dict[str, dict[str, int]]
    devices: int

    def needs(self, phase: str) -> int:
        """Bytes during one phase."""
        return sum(self.always.values()) + sum(self.phases[phase].values())

    @property
    def peak(self) -> int:
        """Bytes during the phase that needs most."""
        return max(map(self.needs, self.phases))


def memory_plan(
    shape: PolicyConfig, config: RunConfig, sizes: dict[str, int] | None = None
) -> Plan:
    """The plan of a run.

    Args:
        shape: of the policy.
        config: the run's configuration.
        sizes: of the mesh's axes; default: `mesh_sizes`.

    Raises:
        UserError: the recipe, the optimizer or the mesh cannot be, as a run would say.
    """
    sizes = sizes or mesh_sizes(config.mesh)
    mesh = AbstractMesh(
        tuple(sizes[axis] for axis in AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES)
    )
    recipe = config.resolved_recipe()
    dtype, weight = jnp.dtype(config.compute_dtype), recipe.rollout.weight
    policy = jax.eval_shape(lambda key: init_policy(shape, key), jax.random.key(0))
    optimizer = make_optimizer(config.optimizer, 1)
    # an adapter's file has the shapes of a new one
    fresh = replace(config, lora=replace(config.lora, path=""))
    trained, frozen = split(jax.eval_shape(partial(adapt, config=fresh, recipe=recipe), policy))
    moments = jax.eval_shape(optimizer.init, trained)
    served = jax.eval_shape(
        lambda p: rollout_policy(p, recipe, dtype, config.rollout.decode_layers == "unroll")[0],
        policy,
    )
    masters = device_bytes(trained, mesh)
    formats = f"{weight.element}, rest {dtype.name}" if weight.quantized else dtype.name
    always = {
        "masters (float32)": masters,
        "Adam moments": device_bytes(moments, mesh),
        f"rollout weights ({formats})": device_bytes(served, mesh),
    }
    if frozen is not None:
        always["frozen base"] = device_bytes(frozen, mesh)
    if config.rl.kl_coefficient > 0 or config.rl.reward_kl.coefficient > 0:
        # beside the frozen base of adapters, which it shares
        always["KL reference policy"] = masters
    return Plan(
        always,
        {
            "rollout": _rollout(shape, config, recipe, served, mesh),
            "backward": _backward(shape, config, masters, mesh),
            "optimizer": {"gradients (float32)": masters, "scaled gradients (float32)": masters},
            "sync": {f"weights in {dtype.name}": device_bytes(policy, mesh) * dtype.itemsize // 4},
        },
        math.prod(sizes.values()),
    )


def mesh_sizes(config: MeshConfig) -> dict[str, int]:
    """Sizes of the mesh's axes without its devices: a -1 is 1."""
    return {axis: max(getattr(config, axis), 1) for axis in AXES}


def device_bytes(tree: Any, mesh: AbstractMesh) -> int:
    """Bytes that one device holds of a tree of shapes, placed by the sharding rules."""
    leaves = zip(jax.tree.leaves(tree), jax.tree.leaves(policy_shardings(tree, mesh)), strict=True)
    return sum(
        math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize for x, sharding in leaves
    )


def _rollout(
    shape: PolicyConfig, config: RunConfig, recipe: Recipe, served: Policy, mesh: AbstractMesh
) -> dict[str, int]:
    r, dtype = config.rollout, jnp.dtype(config.compute_dtype)
    prompts = math.ceil(r.prompts_per_step / _batch_parts(mesh))
    rows, tensor = prompts * r.samples_per_prompt, mesh.shape["tensor"]
    key, weight = recipe.rollout.key, recipe.rollout.weight
    kept, bits = (
        (key.element_type.dtype, key.element_type.bits)
        if key.quantized
        else (dtype.name, 8 * dtype.itemsize)
    )
    slots = prompts * r.max_prompt_tokens + rows * r.max_new_tokens
    found = {
        f"KV cache ({kept})": 2 * shape.num_layers * slots * shape.kv_size * bits // 8 // tensor
    }
    if weight.quantized and selected_backend(config.precision.backend) == "reference":
        quantized = [x for x in jax.tree.leaves(served) if x.dtype == element_dtype(weight)]
        values = sum(x.size for x in quantized) // (
            mesh.shape["fsdp"] * mesh.shape["expert"] * tensor
        )
        found["rollout weights unpacked to float32 (reference kernels)"] = 4 * values
    tokens = prompts * r.max_prompt_tokens
    part = _queries(r.max_prompt_tokens, r.max_prompt_tokens, None) / r.max_prompt_tokens
    prefill = _layer_activations(shape, tokens, r.max_prompt_tokens, dtype.itemsize, part) // tensor
    found["activations of one layer, logits"] = prefill + 3 * 4 * rows * shape.vocab_size // tensor
    return found


def _backward(
    shape: PolicyConfig, config: RunConfig, masters: int, mesh: AbstractMesh
) -> dict[str, int]:
    r, t, width = config.rollout, config.trainer, jnp.dtype(config.compute_dtype).itemsize
    part = r.prompts_per_step // t.updates_per_rollout
    per_micro = t.micro_batch_prompts or part
    prompts, tensor = math.ceil(per_micro / _batch_parts(mesh)), mesh.shape["tensor"]
    rows = prompts * r.samples_per_prompt
    tokens = prompts * r.max_prompt_tokens + rows * r.max_new_tokens
    keys = r.max_prompt_tokens + r.max_new_tokens
    queries = _queries(r.max_new_tokens, keys, t.attention_chunk)
    layer = _layer_activations(shape, tokens, keys, width, queries / r.max_new_tokens)
    inputs = shape.num_layers * tokens * shape.hidden_size * width
    chunk = rows * max(1, min(t.logprob_chunk // rows, r.max_new_tokens // 2))
    found = {
        "activations of a micro-batch": inputs + layer // tensor
        if t.remat == "layer"
        else shape.num_layers * layer // tensor,
        "logits of a chunk (float32)": 3 * 4 * chunk * shape.vocab_size // tensor,
    }
    if width < 4:
        found["weights in the compute dtype"] = masters * width // 4
    if per_micro == part:
        return found | {"gradients (float32)": masters}
    # added up in float32 while they are read, so those of one micro-batch stay in the compute dtype
    sums = {"sums of gradients, before and after (float32)": 2 * masters}
    return found | {"gradients of a micro-batch": masters * width // 4} | sums


def _queries(tokens: int, keys: int, chunk: int | None) -> int:
    """Queries of a row whose attention scores exist at one time, as models.layer chooses."""
    if chunk is None:
        chunk = CHUNK if tokens * keys >= CHUNK_FROM else 0
    return min(chunk or tokens, tokens)


def _layer_activations(shape: PolicyConfig, tokens: int, keys: int, width: int, part: float) -> int:
    """Bytes that one layer leaves for its backward pass: what enters and leaves its products,
    norms, rope and softmax.

    Norms, rope and softmax work in float32 whatever the compute dtype; attention scores are held
    for a `part` of the queries.
    """
    feed_forward = shape.intermediate_size
    if shape.experts is not None:
        feed_forward = max(
            feed_forward if shape.dense_layers else 0,
            shape.experts.per_token * shape.experts.intermediate_size,
        )
    computed = 6 * shape.hidden_size + 3 * shape.q_size + 4 * shape.kv_size + 4 * feed_forward
    wide = 4 * shape.hidden_size + 2 * shape.q_size + 2 * shape.kv_size
    wide += int(_SCORE_COPIES * shape.num_heads * keys * part)
    return tokens * (width * computed + 4 * wide)


def _batch_parts(mesh: AbstractMesh) -> int:
    return mesh.shape["data"] * mesh.shape["fsdp"] * mesh.shape["expert"]
