"""The policy update as one compiled program.

A prompt is run once for all its completions: its keys and values are the shared block that the
completions attend to, with gradients flowing through it. In a packed batch it stands in the rows of
its completions instead (training.batch). Micro-batches are whole groups; losses, gradients and
metrics are sums over a denominator of the global batch, so accumulation equals the big batch up to
the order of float32 sums. Under a trainer in FP8 it does not: the weight gradient quantizes dY and
X in groups of 128 tokens, which reach from one row into the next, so other neighbours, and padding
among them, give other scales (experiments/results/gradients has the distances, beside that of
quantization itself). Only prompts and completions as wide as a multiple of 128 begin groups of
their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fp8rl_jax import rl
from fp8rl_jax.config.recipe import Recipe
from fp8rl_jax.config.rl import RLConfig
from fp8rl_jax.config.training import LossScaleConfig
from fp8rl_jax.models.cache import KVScales
from fp8rl_jax.models.forms import trainer_policy
from fp8rl_jax.models.forward import forward, forward_completions
from fp8rl_jax.models.logprobs import token_logprobs
from fp8rl_jax.models.lora import Trained, join, split
from fp8rl_jax.models.policy import Policy, with_scales
from fp8rl_jax.parallel import constrain, split_batch
from fp8rl_jax.precision import QuantizationSums
from fp8rl_jax.rollout.calibration import sampling_observer
from fp8rl_jax.training.batch import Batch, Packing
from fp8rl_jax.training.gradients import weight_gradients
from fp8rl_jax.training.kept import loaded
from fp8rl_jax.training.optimizer import Optimizer
from fp8rl_jax.training.state import TrainState, apply_gradients, float32_masters, scaled_loss
from fp8rl_jax.training.text import TextRows
from pallas_kernels.backend import Backend


@dataclass(frozen=True)
class StepConfig:
    """What the compiled step is specialised to."""

    recipe: Recipe
    rl: RLConfig
    compute_dtype: str
    temperature: float
    micro_batches: int = 1
    remat: bool = False
    logprob_chunk: int = 1024
    attention_chunk: int | None = None
    backend: Backend = "auto"
    loss_scale: LossScaleConfig | None = None
    """Resolved; None: the loss is not scaled."""
    sharpness: bool = False
    """Measure the sharpness of the loss in the last tokens' logits."""


def completion_logprobs(
    policy: Policy,
    batch: Batch,
    config: StepConfig,
    scales: KVScales | None = None,
    observe: Callable[..., Any] | None = None,
) -> tuple[Float[Array, "b t"], Float[Array, "b t"], Any, rl.Metrics]:
    """Compute log-probabilities and entropies of the completions' tokens.

    At the sampling temperature, under the trainer's formats; over each token's support, where the
    batch has it.

    Args:
        policy: float32 masters; put into the trainer's form here, so gradients arrive in float32.
        scales: KV scales that `observe` is called with.
        observe: as `forward` takes it.

    Returns:
        Both, what `observe` made of prompts and completions, and sharpness/* where the
        configuration asks for it.
    """
    policy = _in_form(policy, config)
    policy = with_scales(policy, scales)
    head = partial(
        token_logprobs,
        policy=policy,
        temperature=config.temperature,
        chunk=config.logprob_chunk,
        entropy_gradient=config.rl.entropy_coefficient > 0,
    )
    if batch.packing is not None:
        run = partial(forward, policy, observe=observe)
        logprobs, entropies, observed, hidden = _packed_logprobs(run, head, batch)
        places = batch.packing.places
        sharp = _sharpness(hidden, places, batch.tokens, batch.mask, policy, config)
        return logprobs, entropies, observed, sharp
    prompt, completion, observed = forward_completions(
        policy,
        constrain(batch.prompts, "batch", None),
        batch.lengths,
        constrain(batch.tokens, "batch", None),
        batch.present.astype(jnp.int32),
        batch.prompt_routes,
        batch.routes,
        observe,
    )
    n = batch.tokens.shape[0] // batch.prompts.shape[0]
    last = jnp.take_along_axis(prompt, (batch.lengths - 1)[:, None, None], axis=1)
    hidden = jnp.concatenate([jnp.repeat(last, n, axis=0), completion[:, :-1]], axis=1)
    places = jnp.arange(batch.tokens.size).reshape(batch.tokens.shape)
    sharp = _sharpness(hidden, places, batch.tokens, batch.mask, policy, config)
    return *head(hidden, targets=batch.tokens, support=batch.support), observed, sharp


def _in_form(policy: Policy, config: StepConfig) -> Policy:
    return trainer_policy(
        policy,
        config.recipe,
        jnp.dtype(config.compute_dtype),
        config.backend,
        config.remat,
        config.attention_chunk,
    )


def _sharpness(
    hidden: Float[Array, "r c hidden"],
    places: Int[Array, "b t"],
    tokens: Int[Array, "b t"],
    mask: Bool[Array, "b t"],
    policy: Policy,
    config: StepConfig,
) -> rl.Metrics:
    """sharpness/* of each row's last token of the mask; nothing unless asked for.

    Args:
        hidden: what predicts the tokens.
        places: where in it, flat, each token has its own.
    """
    if not config.sharpness:
        return {}
    last = jnp.max(jnp.where(mask, jnp.arange(mask.shape[1]), 0), axis=1)[:, None]
    place, target = (jnp.take_along_axis(x, last, axis=1)[:, 0] for x in (places, tokens))
    ends = jnp.take(hidden.reshape(-1, hidden.shape[-1]), place, axis=0, mode="clip")
    ends, head = jax.lax.stop_gradient((ends, policy.head))
    logits = policy.compute.product(ends, head) / config.temperature
    return rl.sharpness_metrics(logits, target, mask.any(axis=1))


def _packed_logprobs(
    run, head, batch: Batch
) -> tuple[Float[Array, "b t"], Float[Array, "b t"], Any, Float[Array, "r c hidden"]]:
    """`completion_logprobs` of a packed batch, 0 where there is no token; and the hidden states
    that predict the tokens."""
    packing: Packing = jax.tree.map(lambda x: constrain(x, "batch", None), batch.packing)
    tokens = packing.gather(batch.prompts, batch.tokens, fill=0)
    routes = None
    if batch.routes is not None and batch.prompt_routes is not None:
        routes = packing.gather(batch.prompt_routes, batch.routes, fill=-1)
    rows = run(
        tokens,
        packing.positions,
        packing.segments,
        prefix_ids=packing.prefixes,
        routes=routes,
        keep_cache=False,
    )
    hidden = packing.hidden(rows.hidden)
    targets, support = jax.tree.map(packing.predicted, (batch.tokens, batch.support))
    logprobs, entropies = head(hidden, targets=targets, support=support)
    return packing.back(logprobs), packing.back(entropies), rows.observed, hidden


@partial(jax.jit, static_argnames="config")
def batch_logprobs(policy: Policy, batch: Batch, config: StepConfig) -> Float[Array, "b t"]:
    """Compute `completion_logprobs` micro-batch by micro-batch, without gradients.

    The old and the reference policy's log-probabilities of an update.
    """
    return _by_micro_batch(policy, batch, config, lambda found: found[0])


@partial(jax.jit, static_argnames="config")
def batch_scores(
    policy: Policy, batch: Batch, config: StepConfig
) -> tuple[Float[Array, "b t"], Float[Array, "b t"]]:
    """Compute the log-probabilities of `batch_logprobs`, and entropies in nats beside them."""
    return _by_micro_batch(policy, batch, config, lambda found: found[:2])


def _by_micro_batch(policy: Policy, batch: Batch, config: StepConfig, take: Callable) -> Any:
    policy = float32_masters(policy)
    parts = jax.lax.map(
        lambda micro: take(completion_logprobs(policy, micro, config)),
        split_batch(batch, config.micro_batches),
    )
    return jax.tree.map(lambda x: x.reshape(batch.tokens.shape), parts)


@partial(jax.jit, static_argnames="config")
def correct(batch: Batch, config: RLConfig) -> tuple[Batch, rl.Metrics]:
    """Compute the rollout correction of a whole batch, from its old log-probabilities.

    `update` calls it where old log-probabilities are given, so that global statistics (a mean
    weight, a rejection that changes the denominator) are those of its batch. Called before a
    rollout is split into the batches of several updates, they are those of the rollout.

    Returns:
        The batch with `weights` and `loss_mask`, and the correction's metrics. In bypass mode,
        without old log-probabilities, and where it has weights already: the batch as it is, and no
        metrics.
    """
    if (
        config.correction.value("mode") == "bypass"
        or batch.old_logprobs is None
        or batch.weights is not None
    ):
        return batch, {}
    mask = batch.mask if batch.loss_mask is None else batch.loss_mask
    log_ratio = batch.old_logprobs - batch.rollout_logprobs
    weights, mask, metrics = rl.correction(log_ratio, mask, config.correction, batch.old_logprobs)
    return replace(batch, weights=weights, loss_mask=mask), metrics


def update(
    state: TrainState, batch: Batch, config: StepConfig, optimizer: Optimizer
) -> tuple[TrainState, Float[Array, "b t"], dict[str, Array]]:
    """Make one optimizer update on the whole batch.

    The arrays that it replaces are donated, those of a frozen base stay.

    Returns:
        The next state; the trainer's log-probabilities [b, t] before the update; scalar metrics.

    Raises:
        UserError: the correction needs old log-probabilities, and the batch has none.
    """
    trained, frozen = split(state.policy)
    state, logprobs, metrics, _ = update_program(
        replace(state, policy=trained), frozen, batch, config, optimizer
    )
    return replace(state, policy=join(state.policy, frozen)), logprobs, metrics


def observed_update(
    state: TrainState,
    batch: Batch,
    config: StepConfig,
    optimizer: Optimizer,
    scales: KVScales | None,
) -> tuple[TrainState, Float[Array, "b t"], dict[str, Array], QuantizationSums]:
    """Make the update of `update`, and measure Q, K and V in its forward.

    Args:
        scales: those whose effect is measured.

    Returns:
        What `update` returns, and the sums of each micro-batch, as `observe_qkv` gives them.
    """
    trained, frozen = split(state.policy)
    state, *found, seen = update_program(
        replace(state, policy=trained), frozen, batch, config, optimizer, scales, True
    )
    return replace(state, policy=join(state.policy, frozen)), *found, seen


@partial(jax.jit, static_argnames=("config", "observes"), donate_argnames="state")
def update_program(
    state: TrainState,
    frozen: Policy | None,
    batch: Batch,
    config: StepConfig,
    optimizer: Optimizer,
    scales: KVScales | None = None,
    observes: bool = False,
) -> tuple[TrainState, Float[Array, "b t"], dict[str, Array], QuantizationSums | None]:
    observe = sampling_observer(config.recipe) if observes else None
    batch, corrections = correct(batch, config.rl)
    if batch.weights is None:
        rl.refuse_partial(config.rl.correction)
    in_loss = batch.mask if batch.loss_mask is None else batch.loss_mask
    denominator = rl.loss_denominator(in_loss, config.rl)

    def loss_fn(trained: Trained, micro: Batch):
        logprobs, entropy, seen, sharp = completion_logprobs(
            join(trained, frozen), micro, config, scales, observe
        )
        inputs = rl.LossInputs(
            logprobs=logprobs,
            advantages=micro.advantages,
            mask=micro.mask if micro.loss_mask is None else micro.loss_mask,
            denominator=denominator,
            old_logprobs=micro.old_logprobs,
            weights=micro.weights,
            reference_logprobs=micro.reference_logprobs,
            entropy=entropy,
            clip_bounds=state.clip_bounds,
        )
        if micro.weights is None:
            loss, metrics = rl.corrected_policy_loss(inputs, micro.rollout_logprobs, config.rl)
        else:
            loss, metrics = rl.policy_loss(inputs, config.rl)
        found = loss, metrics | sharp, logprobs, seen
        return scaled_loss(loss, state, config.loss_scale), found

    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)

    def compute(masters: Trained, batch: Batch):
        """Gradients; the loss; metrics, log-probabilities and observations of each micro-batch."""
        return _gradients(grad_fn, masters, batch, config.micro_batches)

    gradients, saturated, loss, (stacked, logprobs, seen) = weight_gradients(
        compute, loaded(state.policy), batch, optimizer.recipe, state.gradient_factors
    )
    metrics, logprobs = rl.reduce_metrics(stacked), logprobs.reshape(batch.tokens.shape)
    bounds = {}
    if state.clip_bounds is not None:
        bounds = {
            "clip_ratio/low_bound": state.clip_bounds[0],
            "clip_ratio/high_bound": state.clip_bounds[1],
        }
    state, update_metrics = apply_gradients(
        state, gradients, loss, optimizer, config.loss_scale, saturated, in_loss.any()
    )
    metrics = rl.metric_values(metrics | corrections) | update_metrics | bounds
    return state, logprobs, metrics, seen


def _gradients(
    grad_fn: Callable, trained: Trained, batch: Any, micro_batches: int
) -> tuple[Any, Array, list]:
    """Gradients and loss, summed over `micro_batches`, and what else each gives, stacked.

    Args:
        grad_fn: (trained, micro-batch) -> ((what is differentiated, (loss, ...)), gradients).
    """
    if micro_batches == 1:
        (_, (loss, *found)), gradients = grad_fn(trained, batch)
        return gradients, loss, jax.tree.map(lambda x: x[None], found)

    def accumulate(carry, micro):
        (_, (loss, *found)), gradients = grad_fn(trained, micro)
        return jax.tree.map(jnp.add, carry, (loss, gradients)), found

    zeros = (jnp.float32(0), jax.tree.map(jnp.zeros_like, trained))
    (loss, gradients), found = jax.lax.scan(accumulate, zeros, split_batch(batch, micro_batches))
    return gradients, loss, found


def row_logprobs(
    policy: Policy, rows: TextRows, config: StepConfig
) -> tuple[Float[Array, "b w"], rl.Metrics]:
    """Compute log-probabilities of the tokens of text that `rows.mask` says are predicted.

    Under the trainer's formats. Gives sharpness/* of each row's last one beside them where the
    configuration asks for it.

    Args:
        policy: masters, as in `completion_logprobs`.
        rows: on the mesh.
        config: its formats and its temperature are used.
    """
    policy = _in_form(policy, config)
    tokens = constrain(rows.tokens, "batch", None)
    segments = constrain(rows.segments, "batch", None)[:, :-1]
    hidden = forward(policy, tokens[:, :-1], rows.positions, segments, keep_cache=False).hidden
    chunk, targets = config.logprob_chunk, tokens[:, 1:]
    places = jnp.arange(targets.size).reshape(targets.shape)
    sharp = _sharpness(hidden, places, targets, rows.mask, policy, config)
    return token_logprobs(hidden, policy, targets, config.temperature, chunk)[0], sharp


@partial(jax.jit, static_argnames="config")
def text_loss(
    policy: Policy, rows: TextRows, config: StepConfig
) -> tuple[Float[Array, " b"], Float[Array, " b"]]:
    """Sum the negative log-likelihood of the predicted tokens of each row, and count them."""
    logprobs, _ = row_logprobs(policy, rows, config)
    return -jnp.sum(logprobs, axis=1, where=rows.mask), rows.mask.sum(1).astype(jnp.float32)


def supervised_update(
    state: TrainState, batch: Batch | TextRows, config: StepConfig, optimizer: Optimizer
) -> tuple[TrainState, dict[str, Array]]:
    """Make one update on the mean negative log-likelihood of the completions' tokens, or of text.

    Donates as `update` does.

    Args:
        batch: its tokens and mask are used, and its prompts.
        config: its temperature, formats, loss scale and number of micro-batches are used.

    Returns:
        The next state; `loss`, the metrics of `apply_gradients`, and sharpness/* on request.
    """
    trained, frozen = split(state.policy)
    state, metrics = _supervised_update(
        replace(state, policy=trained), frozen, batch, config, optimizer
    )
    return replace(state, policy=join(state.policy, frozen)), metrics


@partial(jax.jit, static_argnames="config", donate_argnames="state")
def _supervised_update(
    state: TrainState,
    frozen: Policy | None,
    batch: Batch | TextRows,
    config: StepConfig,
    optimizer: Optimizer,
) -> tuple[TrainState, dict[str, Array]]:
    count = batch.mask.sum()

    def loss_fn(trained: Trained, micro: Batch | TextRows):
        policy = join(trained, frozen)
        if isinstance(micro, TextRows):
            logprobs, sharp = row_logprobs(policy, micro, config)
        else:
            logprobs, _, _, sharp = completion_logprobs(policy, micro, config)
        loss = -jnp.sum(jnp.where(micro.mask, logprobs, 0.0)) / count
        return scaled_loss(loss, state, config.loss_scale), (loss, sharp)

    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)

    def compute(masters: Trained, batch: Batch | TextRows):
        return _gradients(grad_fn, masters, batch, config.micro_batches)

    gradients, saturated, loss, (sharp,) = weight_gradients(
        compute, loaded(state.policy), batch, optimizer.recipe, state.gradient_factors
    )
    state, metrics = apply_gradients(
        state, gradients, loss, optimizer, config.loss_scale, saturated
    )
    return state, {"loss": loss, **metrics, **rl.metric_values(rl.reduce_metrics(sharp))}
