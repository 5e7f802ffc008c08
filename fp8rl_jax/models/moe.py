"""Mixture of experts: the router, dispatch by sorting, and experts spread over the mesh.

Each token goes to the experts that the router puts first, and its output is the sum of theirs,
weighted by their scores. Rows are sorted by expert, multiplied group by group, and put
back: there is no capacity, so no token is ever dropped, and an expert without tokens is an empty
group.

Scores are the softmax of the router's logits, or the sigmoid of each. In the latter case a bias
for each expert, which balances their load and is not trained here, is added for the choice alone,
and experts are chosen within the groups that score highest (DeepSeek-V3, arXiv 2412.19437, section
2.1.2).

The router computes in float32 and is never quantized. Its choice is discrete: where two experts
score alike, a difference in the last bits between rollout and trainer sends a token through other
weights. So the ids are returned, and can be replayed: the trainer then takes the rollout's ids and
weighs them with its own scores (R3, arXiv 2510.11370).

On a mesh every device sorts its own rows. The expert axis splits the rows, too: its devices gather
each other's, each runs the experts that it holds, and the partial sums are scattered back. Where
the width of the experts is split, each device has its part of all rows' sums, and these are added
once a token, behind the weighted sum over its experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from fp8rl_jax.models.config import ExpertsConfig
from fp8rl_jax.models.policy import FeedForward, Layer
from fp8rl_jax.models.shards import shards_of_experts, split_of_experts
from fp8rl_jax.parallel import DEFAULT_RULES, by_shards, left_to_xla, splitting_axes
from fp8rl_jax.precision import Compute, as_weight
from pallas_kernels.rounding import rounded


def route_dtype(config: ExpertsConfig) -> jnp.dtype:
    """Find the smallest dtype that holds the expert ids and -1."""
    return jnp.dtype(jnp.int8 if config.count <= 128 else jnp.int16)


Probe = Callable[[str, Any, Array], Any]
"""Called as probe(name, rows, order) with the operand ("experts.up_proj.operand") and the result
(".out") of each product of the experts, and with the input of the last (".in"); row i belongs to
entry order[i] of the ids, flattened. What it returns is used in place of the rows. Not on a
mesh."""


def mixture(
    x: Float[Array, "b t hidden"],
    layer: Layer,
    config: ExpertsConfig,
    compute: Compute,
    routes: Int[Array, "b t k"] | None = None,
    probe: Probe = lambda name, rows, order: rows,
) -> tuple[Float[Array, "b t hidden"], Int[Array, "b t k"]]:
    """Compute the output of a layer's experts, and the ids of those that each token used.

    Args:
        layer: its router and experts.
        routes: expert ids to replay; a token with a -1 among them is routed anew.
    """
    bias = None if layer.router_bias is None else layer.router_bias.value
    ids, weights = choose(x, layer.router.value, config, compute, routes, bias)
    run = partial(_run, compute=compute, probe=probe)
    assert layer.experts is not None
    out = _on_mesh(run, x, ids, weights, layer.experts, compute.exact)
    return out, ids.astype(route_dtype(config))


def choose(
    x: Float[Array, "*b hidden"],
    router: Float[Array, "experts hidden"],
    config: ExpertsConfig,
    compute: Compute,
    routes: Int[Array, "*b k"] | None = None,
    bias: Float[Array, " experts"] | None = None,
) -> tuple[Int[Array, "*b k"], Float[Array, "*b k"]]:
    """Choose expert ids, best first, and their weights, float32.

    Args:
        routes: see `mixture`.
        bias: added to the scores for the choice alone.
    """
    scores = compute.routing(x, router, config.scoring)

    def best(ranked: Array, bias: Array | None) -> Array:
        if bias is not None:
            ranked = in_best_groups(ranked + bias.astype(jnp.float32), config)
        return lax.top_k(ranked, config.per_token)[1]

    # left to itself XLA gathers the scores of all rows
    rows = ("batch", *[None] * (scores.ndim - 1))
    ids = by_shards(best, lax.stop_gradient((scores, bias)), (rows, None), rows)
    if routes is not None:
        replayed = (routes >= 0).all(axis=-1, keepdims=True)
        ids = jnp.where(replayed, routes.astype(ids.dtype), ids)
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if config.normalize:
        # sigmoids of one token may all underflow
        weights = compute.normalize(jnp.maximum(weights, jnp.finfo(jnp.float32).tiny))
    return ids, weights if config.scale == 1 else compute.scale(weights, config.scale)


def in_best_groups(
    scores: Float[Array, "*b experts"], config: ExpertsConfig
) -> Float[Array, "*b experts"]:
    """Leave the scores of the best groups, and -inf elsewhere.

    A group scores the sum of its two best experts.
    """
    if config.groups_per_token == config.groups:
        return scores
    grouped = scores.reshape(*scores.shape[:-1], config.groups, -1)
    best = lax.top_k(lax.top_k(grouped, 2)[0].sum(-1), config.groups_per_token)[1]
    kept = (best[..., None] == jnp.arange(config.groups)).any(axis=-2)
    return jnp.where(kept[..., None], grouped, -jnp.inf).reshape(scores.shape)


def _run(
    x, ids, weights, experts: FeedForward, first=0, dtype=None, *, compute: Compute, probe: Probe
):
    """Sum over the experts that are here, ids first ... first + count - 1, weighted: float32 [b, t,
    hidden]. Each one's output is rounded to `dtype`, default x's."""
    gate, up, down = (
        as_weight(w.value) for w in (experts.gate_proj, experts.up_proj, experts.down_proj)
    )
    count, k = gate.shape[0], ids.shape[-1]
    local = ids.reshape(-1) - first
    # those of other devices are sorted behind ours
    local = jnp.where((local >= 0) & (local < count), local, count)
    order = jnp.argsort(local)
    sizes = jnp.zeros(count, jnp.int32).at[local].add(1, mode="drop")
    rows = x.reshape(-1, x.shape[-1])

    def sorted_input(weight):
        return jax.tree.map(lambda leaf: leaf[order // k], weight.prepare(rows, compute))

    def product(name, inputs, weight, dtype=x.dtype):
        inputs = probe(f"experts.{name}.operand", inputs, order)
        out = weight.multiply(inputs, dtype, compute, sizes)
        return probe(f"experts.{name}.out", out, order)

    inputs = sorted_input(gate)
    gates = product("gate_proj", inputs, gate)
    if jax.tree.structure(up) != jax.tree.structure(gate):  # weights of one kind share their input
        inputs = sorted_input(up)
    inner = compute.gated(gates, product("up_proj", inputs, up), "silu")
    inner = probe("experts.down_proj.in", inner, order)
    out = product("down_proj", down.prepare(inner, compute), down, dtype or x.dtype)
    out = jnp.zeros_like(out).at[order].set(out, unique_indices=True).reshape(*ids.shape, -1)
    return compute.combine(weights, out)


def _on_mesh(run, x, ids, weights, experts: FeedForward, exact: bool):
    """`run` on each device's rows and experts, and its part of their width; without a mesh, or on
    one device, just `run`."""
    auto, mesh = left_to_xla(), jax.sharding.get_abstract_mesh()
    holders = tuple(axis for axis in DEFAULT_RULES.mesh_axes("experts") if axis in auto)
    # sums of exact mode have an order of their own, which XLA keeps
    wide = () if exact or not auto else split_of_experts(experts, auto, mesh)
    # an odd batch, of an evaluation: every device runs all rows
    splitters = splitting_axes(x.shape[0])
    if not holders and not splitters and not wide:
        return rounded(run(x, ids, weights, experts), x.dtype)
    gathered = tuple(a for a in holders if a in splitters)

    def on_device(x, ids, weights, experts):
        dtype, first = x.dtype, 0
        if holders:
            first = lax.axis_index(holders) * experts.gate_proj.value.shape[0]
        if gathered:
            x, ids, weights = (lax.all_gather(z, gathered, tiled=True) for z in (x, ids, weights))
        parts = run(x, ids, weights, experts, first, jnp.float32 if wide else dtype)
        return _added(parts, dtype, gathered, (*wide, *(() if gathered else holders)))

    rows = PartitionSpec(splitters or None)
    return jax.shard_map(
        on_device,
        in_specs=(rows, rows, rows, shards_of_experts(experts, holders, wide, mesh)),
        out_specs=rows,
        axis_names={*holders, *splitters, *wide},
        check_vma=False,
    )(x, ids, weights, experts)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _added(parts, dtype, scattered: tuple[str, ...], whole: tuple[str, ...]):
    """Inside of a `jax.shard_map`, add up the devices' float32 parts and round the sums once to
    `dtype`; those of the axes `scattered` each have their rows of them."""
    if scattered:
        parts = lax.psum_scatter(parts, scattered, tiled=True)
    return rounded(lax.psum(parts, whole) if whole else parts, dtype)


def _added_forward(parts, dtype, scattered, whole):
    return _added(parts, dtype, scattered, whole), None


def _added_backward(dtype, scattered, whole, _, cotangent):
    # `whole` devices have an equal part of one cotangent: JAX would send it to add it up again
    cotangent = cotangent * lax.psum(1, whole)
    if scattered:
        cotangent = lax.all_gather(cotangent, scattered, tiled=True)
    return (cotangent.astype(jnp.float32),)


_added.defvjp(_added_forward, _added_backward)
