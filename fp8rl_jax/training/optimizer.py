"""What moves the weights: SGD, and AdamW whose moments rest in fewer bits than it computes in.

SGD without momentum keeps nothing between updates, and arXiv 2602.07729 finds it as good as AdamW
in reinforcement learning. Its rates are others: Adam moves each weight by the learning rate,
whatever its gradient is, and SGD by the learning rate times a gradient whose norm over all weights
is clipped to 1.

Between updates Adam's moments are what a training state has most of: 8 bytes a parameter in
float32, beside 4 of the weight. So they rest in bfloat16 or in e4m3, and each update unpacks them,
computes in float32, and packs them again, one tensor (and of stacked tensors one layer) after the
other: float32 moments of the whole model never exist.

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

Norms and biases, a small part of all parameters, rest in float32 where matrices rest in e4m3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Key

from fp8rl_jax.config.formats import TensorFormat, parse_format
from fp8rl_jax.config.training import FP8_MAX_BETA2, MOMENTS, OptimizerConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.precision import Blocks, Format, QTensor, format_of
from fp8rl_jax.precision.formats import has
from pallas_kernels.rounding import round_stochastic, rounded

GROUPS = TensorFormat("e4m3", (1, 128))
"""Of "e4m3" in the configuration."""

MomentFormat = jnp.dtype | TensorFormat


class Optimizer(Protocol):
    """What an update needs of an optimizer: a pytree, whose leaves are arguments of the compiled
    program and whose other fields are parts of it."""

    def init(self, params: Any) -> Any:
        """Make the state before the first update, for the tensors that are trained."""
        ...

    def step(
        self,
        params: Any,
        gradients: Any,
        state: Any,
        norm: Float[Array, ""],
        keep: Bool[Array, ""] | bool = True,
    ) -> tuple[Any, Any, Bool[Array, ""]]:
        """Make one update.

        Args:
            params, gradients: float32.
            norm: of all gradients.
            keep: where it is False, everything stays as it is.

        Returns:
            The next params and state, and whether all weights are finite. A tensor that would not
            be (of a stack with moments in fewer bits, that layer) keeps its values.
        """
        ...


def moment_formats(config: OptimizerConfig) -> tuple[MomentFormat, MomentFormat]:
    """Find the formats of the first and of the second moment.

    Raises:
        UserError: a name that is none; a second moment in 8 bits with a beta2 at which roundings
            add up to more than `FP8_MAX_BETA2` allows of e4m3, or in a format that cannot `store`.
    """
    first, second = (
        GROUPS if text == "e4m3" else jnp.dtype(text) if text in MOMENTS else parse_format(text)
        for text in (config.first_moment, config.second_moment)
    )
    if not isinstance(second, TensorFormat):
        return first, second
    made, asked = format_of(second, (1, 1)), f"optimizer.second_moment = {config.second_moment!r}"
    if not isinstance(made, Blocks):
        if not has(second, Format.store):
            raise UserError(f"{asked}: the format has no `store`, for what changes slowly")
        return first, second
    # the deviation that the module's text derives, of 3 bits of mantissa at FP8_MAX_BETA2
    lost = 2.0 ** (3 - int(jnp.finfo(made.dtype).nmant))
    most = math.sqrt(max(1 - lost**2 * (1 - FP8_MAX_BETA2**2), 0.0))
    if config.beta2 > most + 1e-9:
        raise UserError(
            f"optimizer.beta2 = {config.beta2}: an {second.element} second moment needs at most "
            f"{math.floor(100 * most) / 100:g}; use bfloat16"
        )
    return first, second


@partial(
    jax.tree_util.register_dataclass, data_fields=["schedule"], meta_fields=["config", "decayed"]
)
@dataclass(frozen=True)
class AdamW:
    """AdamW (arXiv 1711.05101) behind global-norm clipping, its moments at rest in other formats.

    Its state is that of `optax.chain(clip_by_global_norm, adamw)`, or of `adamw` where nothing is
    clipped; matrices of its moments are QTensors where a format is FP8.

    Attributes:
        config: betas, eps, weight decay, the norm that is clipped to.
        schedule: number of updates before -> learning rate.
        decayed: params -> a tree of bools, the tensors that decay.

    Raises:
        UserError: whatever `moment_formats` refuses.
    """

    config: OptimizerConfig
    schedule: optax.Schedule
    decayed: Callable[[Any], Any]

    def __post_init__(self) -> None:
        moment_formats(self.config)

    def init(self, params: Any) -> Any:
        """Make the state before the first update."""
        leaves, treedef = jax.tree.flatten(params)
        first, second = (
            jax.tree.unflatten(
                treedef,
                [
                    _store(jnp.zeros(x.shape, jnp.float32), fmt, jax.random.key(0), i == 1)
                    for x, fmt in zip(leaves, formats, strict=True)
                ],
            )
            for i, formats in enumerate(self._formats(params))
        )
        return self._state(optax.ScaleByAdamState(jnp.int32(0), first, second), jnp.int32(0))

    def step(
        self,
        params: Any,
        gradients: Any,
        state: Any,
        norm: Float[Array, ""],
        keep: Bool[Array, ""] | bool = True,
    ) -> tuple[Any, Any, Bool[Array, ""]]:
        """Make one update, one tensor after the other and each in its place.

        The draws of stochastic rounding depend on the number of the update and on the place in the
        tree alone.
        """
        config, before = self.config, self._adam(state)
        rate = self.schedule(before.count)
        count = optax.safe_increment(before.count)
        bias1, bias2 = 1 - config.beta1**count, 1 - config.beta2**count

        def one(w, mu, nu, gradient, key, formats, decayed):
            gradient = _clipped(gradient, norm, config.max_grad_norm)
            mean = config.beta1 * _load(mu) + (1 - config.beta1) * gradient
            square = config.beta2 * _load(nu) + (1 - config.beta2) * gradient * gradient
            stored = _store(mean, formats[0], key, False), _store(square, formats[1], key, True)
            moments = jax.tree.map(lambda n, o: jnp.where(keep, n, o), stored, (mu, nu))
            # written before anything else reads the old ones, of which XLA else makes copies
            moments = lax.optimization_barrier(moments)
            mean, square = (
                moment if fmt == new.dtype else new
                for moment, fmt, new in zip(moments, formats, (mean, square), strict=True)
            )
            change = (mean / bias1) / (jnp.sqrt(square / bias2) + config.eps)
            if decayed and config.weight_decay:
                change = change + config.weight_decay * w
            moved, fits = _moved(w, rate, change, keep)
            return (moved, *moments), fits

        key, done = jax.random.fold_in(jax.random.key(0), before.count), []
        leaves, treedef = jax.tree.flatten(params)
        moments = (jax.tree.leaves(m, is_leaf=_is_quantized) for m in (before.mu, before.nu))
        of_tensors = zip(*self._formats(params), strict=True)
        others = jax.tree.leaves(gradients), of_tensors, jax.tree.leaves(self.decayed(params))
        for i, (*tensors, gradient, formats, decayed) in enumerate(
            zip(leaves, *moments, *others, strict=True)
        ):
            change = partial(one, formats=formats, decayed=decayed)
            rests = any(fmt != jnp.dtype("float32") for fmt in formats)
            run = _layer_by_layer if rests and gradient.ndim > 2 else _at_once
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
        return (optax.EmptyState(), adamw) if self.config.max_grad_norm > 0 else adamw

    def _adam(self, state: Any) -> optax.ScaleByAdamState:
        return (state[1] if self.config.max_grad_norm > 0 else state)[0]

    def _formats(self, params: Any) -> list[list[MomentFormat]]:
        """The formats of the first moments, and of the second ones."""
        return [
            [_of(fmt, matrix) for matrix in _matrices(params)]
            for fmt in moment_formats(self.config)
        ]


@partial(
    jax.tree_util.register_dataclass, data_fields=["schedule"], meta_fields=["config", "decayed"]
)
@dataclass(frozen=True)
class SGD:
    """Gradient descent behind global-norm clipping, without momentum; its state is the number of
    updates.

    Attributes:
        config: weight decay, the norm that is clipped to.
        schedule, decayed: as in `AdamW`.
    """

    config: OptimizerConfig
    schedule: optax.Schedule
    decayed: Callable[[Any], Any]

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
        keep: Bool[Array, ""] | bool = True,
    ) -> tuple[Any, optax.ScaleByScheduleState, Bool[Array, ""]]:
        """Make one update."""
        config, rate = self.config, self.schedule(state.count)
        leaves, treedef = jax.tree.flatten(params)
        moved, fits = [], []
        others = jax.tree.leaves(gradients), jax.tree.leaves(self.decayed(params))
        for w, gradient, decayed in zip(leaves, *others, strict=True):
            change = _clipped(gradient, norm, config.max_grad_norm)
            if decayed and config.weight_decay:
                change = change + config.weight_decay * w
            new, fit = _moved(w, rate, change, keep)
            moved.append(new)
            fits.append(fit)
        count = jnp.where(keep, optax.safe_increment(state.count), state.count)
        state = optax.ScaleByScheduleState(count)
        return jax.tree.unflatten(treedef, moved), state, jnp.stack(fits).all()


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {"adamw": AdamW, "sgd": SGD}
"""By optimizer.name, as (config, schedule, decayed)."""


def _clipped(
    gradient: Float[Array, "*axes"], norm: Float[Array, ""], limit: float
) -> Float[Array, "*axes"]:
    """Of gradients with this norm, all of them, the part that is scaled down to `limit`."""
    if limit <= 0:
        return gradient
    return jnp.where(norm < limit, gradient, gradient / norm * limit)


def _moved(
    w: Float[Array, "*axes"],
    rate: ArrayLike,
    change: Float[Array, "*axes"],
    keep: Bool[Array, ""] | bool,
) -> tuple[Float[Array, "*axes"], Bool[Array, ""]]:
    """w - rate * change and whether it is finite; w where it is not."""
    # computed once, for the check and for the weight
    moved = lax.optimization_barrier(w - rate * change)
    # faster than `isfinite(moved).all()`: 0 times what is not finite is NaN
    fits = jnp.isfinite(jnp.sum(moved * 0))
    return jnp.where(keep & fits, moved, w), fits


def _at_once(function: Callable, tensors: tuple, gradient: Array, key: Key[Array, ""]) -> tuple:
    return function(*tensors, gradient, key)


def _layer_by_layer(
    function: Callable, tensors: tuple, gradient: Array, key: Key[Array, ""]
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

    return lax.fori_loop(0, len(gradient), body, (tensors, jnp.bool_(True)))


def _store(
    x: Float[Array, "*axes"], fmt: MomentFormat, key: Key[Array, ""], second: bool
) -> Array | QTensor:
    """A moment in the form that it rests in; the second is not negative and is rounded
    stochastically."""
    if not isinstance(fmt, TensorFormat):
        return round_stochastic(x, fmt, key) if second and fmt != x.dtype else rounded(x, fmt)
    made = format_of(fmt, x.shape)
    return made.store(x, key) if second else made.quantize(x)


def _load(stored: Array | QTensor) -> Float[Array, "*axes"]:
    return stored.dequantize() if isinstance(stored, QTensor) else stored.astype(jnp.float32)


def _is_quantized(x: Any) -> bool:
    return isinstance(x, QTensor)


def _of(fmt: MomentFormat, matrix: bool) -> MomentFormat:
    return jnp.dtype("float32") if isinstance(fmt, TensorFormat) and not matrix else fmt


def _matrices(params: Any) -> list[bool]:
    """For each leaf, whether it is a matrix, or a stack of them: a stack of norms has two axes, but
    is none."""

    def is_weight(node: Any) -> bool:
        return hasattr(node, "axes") and hasattr(node, "weight")

    found = []
    for node in jax.tree.leaves(params, is_leaf=is_weight):
        sides = [axis for axis in node.axes if axis != "layers"] if is_weight(node) else node.shape
        found += [len(sides) >= 2] * len(jax.tree.leaves(node))
    return found
