"""Weight gradients in few bits, from the backward pass to the optimizer and between replicas:
FP8-LM (arXiv 2310.18313, section 2.1).

e4m3 has 18 binades. A gradient of which every replica has a part is quantized with one scale for
all of them, the smallest of their own, and is added up in it; the sum of N parts then needs up to
log2(N) binades more, and what is too large for the format saturates. So each tensor has a factor
mu, found while training:

    part_i   = FP8(mu * g_i / s)      s = max_i s_i: one scale of all replicas' amax (their min_i
                                      1/s_i), through the exchange of one number a tensor
    sum      = FP8(sum_i part_i)      saturated at the format's largest value
    gradient = sum * s / mu           of the whole batch: each part's loss has its denominator
    mu       = mu / 2                 where more than 0.001 % of a sum's values are at the largest
             = min(mu * 2^(1/1000), 2)    elsewhere

mu begins at 1 / sqrt(N), Azure/MS-AMP's factor, whose released code keeps it there; the rule is the
paper's, as the authors' pull request 140 to that repository has it (which knows no upper end).

What travels are the codes: each replica is sent a part of all gradients, adds it up in float32,
rounds it once, and sends it to all. That is a ring all-reduce's traffic at a byte a value. NCCL's
ring in e4m3 rounds at every hop. Tensors that stay in float32, norms and biases, are
added up as they are.

With mesh.data = 1 XLA adds up in float32, whatever the format, and each tensor is quantized then.
Replicas that are sharded themselves (fsdp, tensor, expert) are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float

from fp8rl_jax.config.formats import FLOAT32, TensorFormat
from fp8rl_jax.config.recipe import Recipe
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.lora import Trained
from fp8rl_jax.precision import Blocks, QTensor, format_of
from fp8rl_jax.precision.formats import in_blocks
from fp8rl_jax.training.kept import format_for, leaves, matrices
from pallas_kernels.quantize import expand_scales
from pallas_kernels.rounding import rounded

SATURATED = 1e-5
"""Part of a tensor's values at the format's largest from which mu is halved."""
UPDATES_TO_DOUBLE = 1000
LARGEST_FACTOR = 2.0
REPLICAS = "data"
"""The mesh axis of replicas, of which each has a shard of the batch and all weights."""
Factors = tuple[Float[Array, "..."], ...]
"""mu of each tensor that is scaled automatically, in the order of the tree: of each matrix of a
stack."""


def is_scaled(fmt: TensorFormat) -> bool:
    """Whether gradients in a format are scaled automatically: an element type with scales."""
    return fmt.scale != "none" and in_blocks(fmt)


def check_gradients(
    recipe: Recipe, mesh: Mesh | AbstractMesh, packing: bool, objective: str
) -> None:
    """Refuse what several replicas cannot exchange, or compute of their own part of a batch.

    Args:
        packing: whether completions are packed.
        objective: rl.objective.

    Raises:
        UserError: naming the recipe and what to set.
    """
    fmt, n = recipe.weight_gradient, mesh.shape[REPLICAS]
    if n == 1 or fmt == FLOAT32:
        return
    start = f"recipe {recipe.name!r}: weight_gradient = {fmt.name!r} with mesh.data = {n}: "
    if not in_blocks(fmt):
        raise UserError(
            f"{start}replicas add up an element type, such as e4m3-power_of_two; take one, or "
            "mesh.data = 1"
        )
    if n != mesh.size:
        raise UserError(
            f"{start}replicas that are sharded themselves cannot exchange it, as XLA does not "
            'partition such a program; set mesh.data = 1, or precision.weight_gradient = "float32"'
        )
    if packing:
        raise UserError(
            f"{start}packed rows are of several replicas; set trainer.packing = false, or "
            "trainer.length_buckets"
        )
    if objective == "p3o":
        raise UserError(
            f'{start}the effective part of the sample, which rl.objective "p3o" weighs by, is of '
            'all replicas; set mesh.data = 1, or precision.weight_gradient = "float32"'
        )


def replicas() -> int:
    """Count the replicas of the enclosing `jax.set_mesh`."""
    return jax.sharding.get_abstract_mesh().shape.get(REPLICAS, 1)


def init_factors(trained: Trained, recipe: Recipe) -> Factors | None:
    """Make the factors before the first update; None where nothing is scaled automatically."""
    if not is_scaled(recipe.weight_gradient):
        return None
    pairs = zip(leaves(trained), matrices(trained), strict=True)
    return tuple(jnp.full(x.shape[:-2], replicas() ** -0.5) for x, matrix in pairs if matrix)


def next_factors(factors: Factors, saturated: Factors, finite: Bool[Array, ""]) -> Factors:
    """Compute the factors after an update.

    Args:
        saturated: part of the values of each matrix that are at the largest.
        finite: whether the gradients were; where not, the factors stay.
    """

    def following(mu: Array, share: Array) -> Array:
        grown = jnp.minimum(mu * 2.0 ** (1 / UPDATES_TO_DOUBLE), LARGEST_FACTOR)
        return jnp.where(finite, jnp.where(share > SATURATED, mu / 2, grown), mu)

    return tuple(map(following, factors, saturated))


def weight_gradients(
    compute: Callable[[Trained, Any], tuple[Trained, Any, Any]],
    masters: Trained,
    batch: Any,
    recipe: Recipe,
    factors: Factors | None,
) -> tuple[Any, Factors | None, Any, Any]:
    """Compute gradients, and bring them into the recipe's format, added up over the replicas.

    Args:
        compute: (masters, shard of the batch) -> gradients, float32; arrays that are added up over
            the parts; arrays that are laid side by side.
        masters: float32.
        batch: arrays whose first axis are rows.
        factors: as `init_factors` made them.

    Returns:
        The gradients as they are kept; the saturated part of each matrix; and the other two results
        of `compute`, of the whole batch.
    """
    n, axis = replicas(), REPLICAS
    if n == 1 or recipe.weight_gradient == FLOAT32:  # XLA adds up what is on a mesh
        gradients, sums, rows = compute(masters, batch)
        return *kept_gradients(gradients, recipe, factors, 1), sums, rows

    def of_one(masters: Trained, factors: Factors | None, batch: Any):
        gradients, sums, rows = compute(masters, batch)
        return *kept_gradients(gradients, recipe, factors, n), lax.psum(sums, axis), rows

    whole, split = PartitionSpec(), PartitionSpec(axis)
    run = jax.shard_map(
        of_one,
        in_specs=(whole, whole, split),
        out_specs=(whole, whole, whole, split),
        axis_names={axis},
        check_vma=False,
    )
    return run(masters, factors, batch)


def kept_gradients(
    gradients: Trained, recipe: Recipe, factors: Factors | None = None, n: int = 1
) -> tuple[Any, Factors | None]:
    """Bring gradients into the recipe's format.

    Args:
        gradients: float32; of n replicas (inside `jax.shard_map`), what each has a part of.
        factors: of `init_factors`, which is the default.

    Returns:
        The sum as it is kept, and the saturated part of each matrix.
    """
    factors = init_factors(gradients, recipe) if factors is None else factors
    tensors, treedef = jax.tree.flatten(gradients)
    found, shares, mus = [], [], iter(factors or ())
    for x, matrix in zip(tensors, matrices(gradients), strict=True):
        fmt = format_for(recipe.weight_gradient, matrix)
        if is_scaled(fmt):
            kept, share = scaled_sum(x, fmt, next(mus), n)
            shares.append(share)
        elif fmt == FLOAT32:
            kept = x if n == 1 else lax.psum(x, REPLICAS)
        elif fmt.scale == "none":
            codes = rounded(x, jnp.dtype(fmt.element_type.dtype))
            kept = codes if n == 1 else sum_of_codes(codes, n)
        else:  # of one replica: `check_gradients`
            kept = format_of(fmt, x.shape).quantize(x)
        found.append(kept)
    return jax.tree.unflatten(treedef, found), None if factors is None else tuple(shares)


def scaled_sum(
    x: Float[Array, "*leading m n"], fmt: TensorFormat, mu: Float[Array, "*leading"], n: int = 1
) -> tuple[QTensor, Float[Array, "*leading"]]:
    """Quantize one tensor with its factor, and add it up over the replicas.

    Args:
        x: float32; of several replicas (inside `jax.shard_map`), a part of it.
        n: replicas.

    Returns:
        The sum, and what part of the values of each matrix is at the largest.
    """
    made = format_of(fmt, x.shape)
    assert isinstance(made, Blocks)
    dtype = jnp.dtype(made.dtype)
    limit, scales = float(jnp.finfo(dtype).max), made.quantize(x).scales
    if n > 1:
        scales = lax.pmax(scales, REPLICAS)
    scales = scales / mu[..., None, None]
    steps = x * expand_scales(1.0 / scales, made.block, x.shape[-2:])
    codes = jnp.clip(steps, -limit, limit).astype(dtype)
    if n > 1:
        codes = sum_of_codes(codes, n)
    largest = jnp.abs(codes.astype(jnp.float32)) >= limit
    return QTensor(codes, scales, made), largest.mean((-2, -1), dtype=jnp.float32)


def sum_of_codes(codes: Float[Array, "*axes"], n: int) -> Float[Array, "*axes"]:
    """Add up what n replicas have, in float32, and round the sum to the dtype again.

    Nothing but codes travels. A sum in 8 bits saturates. Inside `jax.shard_map`.
    """
    shape, dtype, axis = codes.shape, codes.dtype, REPLICAS
    side = next((i for i, size in enumerate(shape) if size % n == 0), None)
    if side is None:  # none that divides: as one row, filled up
        flat = jnp.pad(codes.reshape(-1), (0, -codes.size % n))
        return sum_of_codes(flat, n)[: codes.size].reshape(shape)
    word = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[dtype.itemsize]
    # as words, which no compiler widens
    words = lax.bitcast_convert_type(codes, word)
    words = words.reshape(*shape[:side], n, shape[side] // n, *shape[side + 1 :])
    parts = lax.bitcast_convert_type(lax.all_to_all(words, axis, side, 0), dtype)
    total = parts.astype(jnp.float32).sum(0)
    if dtype.itemsize == 1:
        limit = float(jnp.finfo(dtype).max)
        total = jnp.clip(total, -limit, limit).astype(dtype)
    else:
        total = rounded(total, dtype)
    words = lax.all_gather(lax.bitcast_convert_type(total, word), axis, axis=side, tiled=True)
    return lax.bitcast_convert_type(words, dtype)


def metrics(factors: Factors, saturated: Factors) -> dict[str, Float[Array, ""]]:
    """Give `optim/gradient_scale`, the smallest factor in force, and `optim/gradient_saturated`.

    The latter is the largest part of a matrix's values that is at the format's largest.
    """
    return {
        "optim/gradient_scale": jnp.stack([x.min() for x in factors]).min(),
        "optim/gradient_saturated": jnp.stack([x.max() for x in saturated]).max(),
    }
