"""Adam whose moments rest in fewer bits than they are computed in.

Between updates the moments are what a training state has most of: 8 bytes a parameter in float32,
beside 4 of the weight. So they rest in bfloat16 or in e4m3, and each update unpacks them, computes
in float32, and packs them again, one tensor (and of stacked tensors one layer) after the other:
float32 moments of the whole model never exist.

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

Loss scaling: how gradients survive float16.

float16 has 10 bits of mantissa where bfloat16 has 7, and pays with its range: nothing above 65504,
nothing below 2^-24 = 6e-8. Activations fit. Gradients often do not: that of a mean over a hundred
thousand tokens begins as 1e-5 times an advantage, and what is a thousandth of it is lost. So the
loss is multiplied by a large number before the backward pass, every gradient carries that factor
through float16, and it is divided away once they are in float32 (arXiv 1710.03740, section 3.2),
after micro-batches were added up and before the norm is taken and clipped.

The factor cannot be known beforehand, so it is found while training. Too large a one makes
gradients infinite: that update is skipped and the scale lowered. After a while without overflow it
is raised again. This is the rule of PyTorch's GradScaler:

    a gradient is not finite    scale * backoff_factor, count = 0
    else                        count + 1; at growth_interval: scale * growth_factor where that is
                                finite, count = 0

The scale and its count are part of the training state, so a resumed run goes on with them. bfloat16
and float32 have the range and need none of this. FP8 products inside a float16 trainer have scales
of their own: their groups see scaled gradients, whose factor falls out of amax / 448.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from fp8rl_jax.config.formats import TensorFormat
from fp8rl_jax.config.training import FP8_MAX_BETA2, LossScaleConfig, OptimizerConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.precision import QTensor, dequantize, max_value, quantize
from fp8rl_jax.precision.rounding import round_stochastic
from pallas_kernels.quantize import block_amax, expand_scales
from pallas_kernels.rounding import rounded

GROUPS = TensorFormat("e4m3", (1, 128))
"""Of "e4m3" in the configuration."""

MomentFormat = jnp.dtype | TensorFormat


def moment_formats(config: OptimizerConfig) -> tuple[MomentFormat, MomentFormat]:
    """Find the formats of the first and of the second moment.

    Raises:
        UserError: an FP8 second moment with a beta2 above `FP8_MAX_BETA2`.
    """
    first, second = (
        GROUPS if choice == "e4m3" else jnp.dtype(choice)
        for choice in (config.first_moment, config.second_moment)
    )
    if isinstance(second, TensorFormat) and config.beta2 > FP8_MAX_BETA2:
        raise UserError(
            f"optimizer.beta2 = {config.beta2}: an e4m3 second moment needs at most "
            f"{FP8_MAX_BETA2}; use bfloat16"
        )
    return first, second


@dataclass(frozen=True, eq=False)
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

        Args:
            params, gradients: float32.
            norm: of all gradients.
            keep: where it is False, everything stays as it is.

        Returns:
            The next params and state, and whether all weights are finite. A tensor that would not
            be (of a stack with moments in fewer bits, that layer) keeps its values.
        """
        config, before = self.config, self._adam(state)
        limit, rate = config.max_grad_norm, self.schedule(before.count)
        count = optax.safe_increment(before.count)
        bias1, bias2 = 1 - config.beta1**count, 1 - config.beta2**count

        def one(w, mu, nu, gradient, key, formats, decayed):
            if limit > 0:
                gradient = jnp.where(norm < limit, gradient, gradient / norm * limit)
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
            # computed once, for the check and for the weight
            moved = lax.optimization_barrier(w - rate * change)
            # faster than `isfinite(moved).all()`: 0 times what is not finite is NaN
            fits = jnp.isfinite(jnp.sum(moved * 0))
            return (jnp.where(keep & fits, moved, w), *moments), fits

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
    q = quantize(x, fmt)
    if not second:
        return q
    limit, smallest = max_value(fmt), float(jnp.finfo(q.values.dtype).smallest_subnormal)
    shape = x.shape[-2:]
    scaled = jnp.clip(x * expand_scales(1.0 / q.scales, q.block, shape), 0.0, limit)
    # a block that saw no gradient stays 0
    alive = expand_scales(block_amax(x, q.block), q.block, shape) > 0
    floored = jnp.maximum(scaled, jnp.where(alive, smallest, 0.0))
    return replace(q, values=round_stochastic(floored, q.values.dtype, key))


def _load(stored: Array | QTensor) -> Float[Array, "*axes"]:
    return dequantize(stored) if isinstance(stored, QTensor) else stored.astype(jnp.float32)


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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossScale:
    """scale: what the next loss is multiplied by; count: updates without overflow since it last
    changed."""

    scale: Float[Array, ""]
    count: Int[Array, ""]


def init_scale(config: LossScaleConfig | None) -> LossScale | None:
    """Make the state of a dynamic scale before the first update.

    None where the scale is static, or there is none.
    """
    if config is None or config.mode != "dynamic":
        return None
    return LossScale(jnp.float32(config.initial), jnp.int32(0))


def factor(
    state: LossScale | None, config: LossScaleConfig | None
) -> Float[Array, ""] | float | None:
    """Give what the loss is multiplied by; None where it is not.

    Args:
        state: of a dynamic scale.
        config: resolved (`LossScaleConfig.resolve`).
    """
    if config is None:
        return None
    if config.mode == "static":
        return config.initial
    assert state is not None
    return state.scale


def next_scale(state: LossScale, finite: Bool[Array, ""], config: LossScaleConfig) -> LossScale:
    """Compute the scale after an update whose gradients were finite or not."""
    count = jnp.where(finite, state.count + 1, 0)
    due = count >= config.growth_interval
    grown = state.scale * config.growth_factor
    grown = jnp.where(due & jnp.isfinite(grown), grown, state.scale)
    scale = jnp.where(finite, grown, state.scale * config.backoff_factor)
    return LossScale(scale, jnp.where(due, 0, count))
