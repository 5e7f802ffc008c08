"""What moves the weights: SGD, and AdamW whose moments rest in fewer bits than it computes in.

SGD without momentum keeps nothing between updates, and arXiv 2602.07729 finds it as good as AdamW
in reinforcement learning. Its rates are others: Adam moves each weight by the learning rate,
whatever its gradient is, and SGD by the learning rate times a gradient whose norm over all weights
is clipped to 1.

Between updates Adam's moments are what a training state has most of: 8 bytes a parameter in
float32, beside 4 of the master. So masters, gradients and moments rest in the formats of the recipe
(STATE_ROLES), and each update unpacks them, computes in float32, and packs them again, one tensor
(and of stacked tensors one layer) after the other: float32 moments of the whole model never exist.

The first moment is rounded to nearest, as in FP8-LM (arXiv 2310.18313): with beta1 = 0.9 a tenth of
it is new in every update, which is more than half a step of e4m3 (1/16). The second moment needs
more care.

- It is slow. With beta2 = 0.99 an update changes it by a hundredth, less than half a step of e4m3,
  and with 0.999 by less than half a step of bfloat16 (1/256): rounded to nearest it would stand
  still. It is rounded stochastically, whose mean is right.
- The price is noise. One rounding to e4m3 has a relative variance of at most (1/8)^2 / 4 = 1/256,
  and a running mean adds them up to 1/256 / (1 - beta2^2): a deviation of at most 44 % at beta2 =
  0.99 (22 % in the size of an update), and of 140 % at 0.999, which is why e4m3 is refused above
  0.99. In bfloat16 the bounds are 3 % and 9 %.
- It must not become 0, because an update divides by its root. In groups of 128 with a scale each,
  e4m3 holds second moments down to 2^-9 / 448 of the group's largest, which is gradients down to
  1/480 of it; arXiv 2410.19313 (COAT) finds that second moments of such groups need less than that.
  Smaller ones are kept at that floor, which makes an update smaller, never larger. What is stored
  is therefore at least half of the value: a rounding enlarges an update at most 2^0.5 times, and
  (8/7)^0.5 above 2^-6 / 448 of the largest.

FP8-LM keeps it in float16 with one scale for a tensor, to nearest: 2^-24 / 65504 of the largest is
still there, so that little becomes 0, and a change of a hundredth is 20 half steps of 2^-11.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Key

from fp8rl_jax.config.formats import FLOAT32
from fp8rl_jax.config.recipe import Recipe
from fp8rl_jax.config.training import OptimizerConfig
from fp8rl_jax.training.kept import (
    Kept,
    format_for,
    is_float32,
    is_kept,
    leaves,
    load,
    matrices,
    store,
)


class Optimizer(Protocol):
    """What an update needs of an optimizer: a pytree, whose leaves are arguments of the compiled
    program and whose other fields are parts of it.

    Attributes:
        recipe: whose STATE_ROLES say how the state is kept.
    """

    @property
    def recipe(self) -> Recipe: ...

    def init(self, params: Any) -> Any:
        """Make the state before the first update, for the tensors that are trained."""
        ...

    def step(
        self,
        params: Any,
        gradients: Any,
        state: Any,
        norm: Float[Array, ""],
        updates: Int[Array, ""],
        keep: Bool[Array, ""] | bool = True,
    ) -> tuple[Any, Any, Bool[Array, ""]]:
        """Make one update.

        Args:
            params, gradients: as they are kept.
            norm: of all gradients.
            updates: number of those before, for the schedule.
            keep: where it is False, everything stays as it is.

        Returns:
            The next params and state, and whether all weights are finite. A tensor that would not
            be (of a stack with moments in fewer bits, that layer) keeps its values.
        """
        ...


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["beta1", "rest1", "beta2", "rest2", "eps", "decay"],
    meta_fields=["norm", "decays"],
)
@dataclass(frozen=True)
class Numbers:
    """The numbers of an update: float32 arguments of a compiled program, and the last two parts of
    it.

    Attributes:
        beta1, beta2: decays of the moments; rest1, rest2: what they leave of 1, rounded once.
        eps: added to the root of the second moment.
        decay: weight decay.
        norm: that is clipped to; 0: not clipped. As an argument it changes bits of moments in
            bfloat16 on a CPU, where the program without it multiplies less.
        decays: whether there is weight decay.
    """

    beta1: Any
    rest1: Any
    beta2: Any
    rest2: Any
    eps: Any
    decay: Any
    norm: float
    decays: bool

    @classmethod
    def of(cls, config: OptimizerConfig) -> Numbers:
        """Take them of the settings."""
        betas = config.beta1, 1 - config.beta1, config.beta2, 1 - config.beta2
        numbers = map(np.float32, (*betas, config.eps, config.weight_decay))
        return cls(*numbers, norm=config.max_grad_norm, decays=config.weight_decay > 0)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["numbers", "schedule"],
    meta_fields=["decayed", "recipe"],
)
@dataclass(frozen=True)
class AdamW:
    """AdamW (arXiv 1711.05101) behind global-norm clipping, its moments at rest in other formats.

    Its state is that of `optax.chain(clip_by_global_norm, adamw)`, or of `adamw` where nothing is
    clipped; matrices of its moments are QTensors where a format is FP8.

    Attributes:
        numbers: betas, eps, weight decay, the norm that is clipped to.
        schedule: number of updates before -> learning rate.
        decayed: params -> a tree of bools, the tensors that decay.
        recipe: formats of the moments and of the masters.
    """

    numbers: Numbers
    schedule: optax.Schedule
    decayed: Callable[[Any], Any]
    recipe: Recipe

    def init(self, params: Any) -> Any:
        """Make the state before the first update."""
        tensors, treedef = jax.tree.flatten(params, is_leaf=is_kept)
        first, second = (
            jax.tree.unflatten(
                treedef,
                [
                    store(
                        jnp.zeros(x.shape, jnp.float32), format_for(fmt, matrix), jax.random.key(0)
                    )
                    for x, matrix in zip(tensors, matrices(params), strict=True)
                ],
            )
            for fmt in (self.recipe.first_moment, self.recipe.second_moment)
        )
        return self._state(optax.ScaleByAdamState(jnp.int32(0), first, second), jnp.int32(0))

    def step(
        self,
        params: Any,
        gradients: Any,
        state: Any,
        norm: Float[Array, ""],
        updates: Int[Array, ""],
        keep: Bool[Array, ""] | bool = True,
    ) -> tuple[Any, Any, Bool[Array, ""]]:
        """Make one update, one tensor after the other and each in its place.

        The draws of stochastic rounding depend on the number of the update and on the place in the
        tree alone.
        """
        numbers, recipe, before = self.numbers, self.recipe, self._adam(state)
        rate = self.schedule(updates)
        count = optax.safe_increment(before.count)
        bias1, bias2 = 1 - numbers.beta1**count, 1 - numbers.beta2**count

        def one(w, mu, nu, gradient, key, matrix, decayed):
            first, second = (
                format_for(fmt, matrix) for fmt in (recipe.first_moment, recipe.second_moment)
            )
            gradient = _clipped(load(gradient), norm, numbers.norm)
            mean = numbers.beta1 * load(mu) + numbers.rest1 * gradient
            square = numbers.beta2 * load(nu) + numbers.rest2 * gradient * gradient
            rounding = recipe.second_moment_rounding
            stored = store(mean, first, key), store(square, second, key, rounding, divides=True)
            moments = jax.tree.map(lambda n, o: jnp.where(keep, n, o), stored, (mu, nu))
            # written before anything else reads the old ones, of which XLA else makes copies
            moments = lax.optimization_barrier(moments)
            mean, square = (
                moment if fmt == FLOAT32 else new
                for moment, fmt, new in zip(moments, (first, second), (mean, square), strict=True)
            )
            change = (mean / bias1) / (jnp.sqrt(square / bias2) + numbers.eps)
            if decayed and numbers.decays:
                change = change + numbers.decay * load(w)
            moved, fits = _moved(w, rate, change, keep, recipe, matrix, key)
            return (moved, *moments), fits

        key, done = jax.random.fold_in(jax.random.key(0), before.count), []
        masters, treedef = jax.tree.flatten(params, is_leaf=is_kept)
        moments = leaves(before.mu), leaves(before.nu)
        others = leaves(gradients), matrices(params), leaves(self.decayed(params))
        for i, (*tensors, gradient, matrix, decayed) in enumerate(
            zip(masters, *moments, *others, strict=True)
        ):
            change = partial(one, matrix=matrix, decayed=decayed)
            plain = all(map(is_float32, tensors))
            run = _at_once if plain or len(gradient.shape) <= 2 else _layer_by_layer
            done.append(run(change, tuple(tensors), gradient, jax.random.fold_in(key, i)))
        tensors, fits = zip(*done, strict=True)
        params, mu, nu = (jax.tree.unflatten(treedef, x) for x in zip(*tensors, strict=True))
        count = jnp.where(keep, count, before.count)
        state = self._state(optax.ScaleByAdamState(count, mu, nu), count)
        return params, state, jnp.stack(fits).all()

    def _state(self, adam: optax.ScaleByAdamState, count: Int[Array, ""]) -> Any:
        """The state as optax nests it; `count` of the schedule is Adam's."""
        adamw = (
            adam,
            optax.MaskedState(optax.EmptyState()),
            optax.ScaleByScheduleState(count),
        )
        return (optax.EmptyState(), adamw) if self.numbers.norm > 0 else adamw

    def _adam(self, state: Any) -> optax.ScaleByAdamState:
        return (state[1] if self.numbers.norm > 0 else state)[0]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["numbers", "schedule"],
    meta_fields=["decayed", "recipe"],
)
@dataclass(frozen=True)
class SGD:
    """Gradient descent behind global-norm clipping, without momentum; its state is the number of
    updates.

    Attributes:
        numbers: weight decay, the norm that is clipped to.
        schedule, decayed: as in `AdamW`.
        recipe: format of the masters.
    """

    numbers: Numbers
    schedule: optax.Schedule
    decayed: Callable[[Any], Any]
    recipe: Recipe

    def init(self, params: Any) -> optax.ScaleByScheduleState:
        """Make the state before the first update."""
        del params
        return optax.ScaleByScheduleState(jnp.int32(0))

    def step(
        self,
        params: Any,
        gradients: Any,
        state: optax.ScaleByScheduleState,
        norm: Float[Array, ""],
        updates: Int[Array, ""],
        keep: Bool[Array, ""] | bool = True,
    ) -> tuple[Any, optax.ScaleByScheduleState, Bool[Array, ""]]:
        """Make one update."""
        numbers, rate = self.numbers, self.schedule(updates)
        masters, treedef = jax.tree.flatten(params, is_leaf=is_kept)
        key, done = jax.random.fold_in(jax.random.key(0), state.count), []

        def one(w, gradient, key, matrix, decayed):
            change = _clipped(load(gradient), norm, numbers.norm)
            if decayed and numbers.decays:
                change = change + numbers.decay * load(w)
            moved, fits = _moved(w, rate, change, keep, self.recipe, matrix, key)
            return (moved,), fits

        others = leaves(gradients), matrices(params), leaves(self.decayed(params))
        for i, (w, gradient, matrix, decayed) in enumerate(zip(masters, *others, strict=True)):
            change = partial(one, matrix=matrix, decayed=decayed)
            run = _at_once if is_float32(w) or len(gradient.shape) <= 2 else _layer_by_layer
            done.append(run(change, (w,), gradient, jax.random.fold_in(key, i)))
        moved, fits = [tensors for (tensors,), _ in done], [fits for _, fits in done]
        count = jnp.where(keep, optax.safe_increment(state.count), state.count)
        state = optax.ScaleByScheduleState(count)
        return jax.tree.unflatten(treedef, moved), state, jnp.stack(fits).all()


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {"adamw": AdamW, "sgd": SGD}
"""By optimizer.name, as (numbers, schedule, decayed, recipe)."""


def _clipped(
    gradient: Float[Array, "*axes"], norm: Float[Array, ""], limit: float
) -> Float[Array, "*axes"]:
    """Of gradients with this norm, all of them, the part that is scaled down to `limit`."""
    if limit <= 0:
        return gradient
    return jnp.where(norm < limit, gradient, gradient / norm * limit)


def _moved(
    w: Kept,
    rate: ArrayLike,
    change: Float[Array, "*axes"],
    keep: Bool[Array, ""] | bool,
    recipe: Recipe,
    matrix: bool,
    key: Key[Array, ""],
) -> tuple[Kept, Bool[Array, ""]]:
    """w - rate * change as it is kept, and whether it is finite; w where it is not."""
    # computed once, for the check and for the weight
    moved = lax.optimization_barrier(load(w) - rate * change)
    new = store(
        moved,
        format_for(recipe.master, matrix),
        jax.random.fold_in(key, 1),
        recipe.master_rounding,
    )
    # faster than `isfinite(moved).all()`: 0 times what is not finite is NaN
    fits = jnp.isfinite(jnp.sum(load(new) * 0))
    return jax.tree.map(lambda n, o: jnp.where(keep & fits, n, o), new, w), fits


def _at_once(function: Callable, tensors: tuple, gradient: Kept, key: Key[Array, ""]) -> tuple:
    return function(*tensors, gradient, key)


def _layer_by_layer(
    function: Callable, tensors: tuple, gradient: Kept, key: Key[Array, ""]
) -> tuple:
    """function(*tensors, gradient, key) on a layer of these stacks at a time, in their place, so
    that one layer at most is unpacked."""

    def body(layer, carry):
        stacks, fits = carry

        def picked(x):
            return lax.dynamic_index_in_dim(x, layer, keepdims=False)

        # what is read is out of the stacks before they are written, or XLA copies all of them
        old, own = lax.optimization_barrier(jax.tree.map(picked, (stacks, gradient)))
        new, fit = function(*old, own, jax.random.fold_in(key, layer))
        written = jax.tree.map(
            lambda x, y: lax.dynamic_update_index_in_dim(x, y, layer, 0),
            stacks,
            lax.optimization_barrier(new),
        )
        return written, fits & fit

    return lax.fori_loop(0, gradient.shape[0], body, (tensors, jnp.bool_(True)))
