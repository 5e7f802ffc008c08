"""The gate before a long run: one rollout, no update, and whether its mismatch is as it should be.

The session's own engine samples and its own trainer scores, so that what a run would do is what is
measured: the mismatch/* metrics of one step (rl/mismatch.py), split by what the trainer was sure of
and by what was likely, and on a few rows the two sides' whole distributions. Where a limit is
missed, causes are looked for, each by a test of its own:

    weights       the engine serves others than the masters give: of an older version, or quantized
                  from float32 masters where the trainer multiplies their bfloat16 (XTuner #2044)
    linears       one side quantizes linears that the other does not, and both quantize some
    temperature   at another temperature the trainer agrees with the rollout
    KV scales     keys, values or queries lie beyond the largest number that their scale can store
    otherwise     the first operation in which the two sides differ (compare/comparison.py)

What to expect (`EXPECTED`) is published values by size and format. Equal log-probabilities of
sampled tokens prove little, as they are the likely ones: so the full vocabulary's KL is beside
them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fp8rl_jax.compare.causes import k3
from fp8rl_jax.compare.comparison import compare
from fp8rl_jax.compare.linears import difference_text
from fp8rl_jax.compare.side import Side
from fp8rl_jax.compare.tokens import Tokens, as_recorded, as_tokens, of_rollout
from fp8rl_jax.config.gate import GateConfig
from fp8rl_jax.config.recipe import Recipe
from fp8rl_jax.models.forms import rollout_policy
from fp8rl_jax.models.lora import has_adapters, merge
from fp8rl_jax.models.policy import Layer, Policy, linear_names, with_scales
from fp8rl_jax.parallel import to_host
from fp8rl_jax.precision import is_quantized, quantized_on
from fp8rl_jax.rl import mismatch_metrics
from fp8rl_jax.rollout.calibration import observe_qkv, qkv_metrics
from fp8rl_jax.rollout.engine import LocalEngine, local_engine
from fp8rl_jax.rollout.sync import SyncContext
from fp8rl_jax.tasks.dataset import Example
from fp8rl_jax.training.experience import Experience
from fp8rl_jax.training.session import Session
from fp8rl_jax.training.tracking import as_json

_metrics = jax.jit(mismatch_metrics)
NUMBERS = ("kl", "k3", "token_mult_prob_error", "pearson", "logprob_abs_diff_max")
"""Of mismatch/*, those that are shown; kl is k1."""
_LONGEST = 512
"""Tokens of a row whose distributions are compared."""
_TEMPERATURES = 2.0 ** (np.arange(-40, 41) / 40)
"""That are tried in place of the rollout's, as factors."""
_SATURATED = 1e-3
"""Part of Q, K or V beyond what a scale stores, from which it is a cause: calibrated scales have
room for all of what they have seen."""
_BETTER = 0.1
"""Part of k3 that is left at another temperature where the temperature is the cause."""


class Bin(NamedTuple):
    """Tokens whose value lies in [low, high): their part of all, their k3, and their part of the
    sum of k3."""

    low: float
    high: float
    tokens: float
    k3: float
    of_sum: float


@dataclass(frozen=True)
class Measured:
    """What one rollout gave.

    Attributes:
        tokens: that were sampled and scored.
        numbers: mismatch/* without the prefix.
        by_entropy: by the entropy of the trainer's distribution, in nats.
        by_probability: by the rollout's probability of the token.
        full_kl: KL(rollout || trainer) over the full vocabulary, nats a token, mean and largest
            over a few rows; None where none were compared.
        faults: the limits that are missed.
        causes: what is found to be wrong, where one is.
    """

    tokens: int
    numbers: dict[str, float]
    by_entropy: tuple[Bin, ...]
    by_probability: tuple[Bin, ...]
    full_kl: tuple[float, float] | None
    faults: tuple[str, ...]
    causes: tuple[str, ...]


EXPECTED = (
    # model, number formats, mismatch, where it stands
    ("dense", "any", "k3 1e-5 to 1e-3", "miles"),
    ("experts", "any", "k3 1e-3 to 1e-1", "miles"),
    ("dense, 1.5B", "bf16 on both", "k3 4e-4 to 5e-4 at most", "NeMo RL, CI"),
    ("dense, 8B", "FP8 rollout", "token_mult_prob_error 1.1, k3 about 7e-3", "NeMo RL, CI"),
    ("dense, 9B", "FP8 on both", "k3 1.4e-3 to 1.8e-3", "NeMo RL"),
    ("experts, 35B-A3B", "FP8 on both", "k3 3e-4 to 3.1e-3", "NeMo RL, XTuner #2044"),
    ("dense, 0.6B", "MXFP8 on both", "token_mult_prob_error 2.0", "NeMo RL, CI"),
    ("experts, 120B", "NVFP4", "token_mult_prob_error 1.15, k3 0.1", "NeMo RL, CI"),
    ("dense, 0.135B", "FP8 rollout", "k3 0.03", "docs/formats.md"),
)
"""What is published as healthy, or refused above."""


def measure(session: Session, examples: Sequence[Example], config: GateConfig) -> Measured:
    """Sample once, score, and look for what is wrong where a limit is missed.

    Args:
        session: nothing of it is trained.
        examples: prompts.
        config: limits of the mismatch, and how many rows are compared.
    """
    rollout = session.rollout(examples)
    train, entropies = session.score(rollout)
    sampled, mask = rollout.scored_logprobs, rollout.rollout.mask
    host = to_host((_metrics(sampled, train, mask), sampled, train, entropies, mask))
    metrics, sampled, train, entropies, mask = host
    numbers = {name.removeprefix("mismatch/"): float(x) for name, x in metrics.items()}
    difference = np.where(mask, train.astype(np.float64) - sampled, 0.0)[mask]
    some = _Rows.of(session, rollout, config.rows) if config.rows else None
    full_kl = None if some is None else some.full_kl
    faults = tuple(
        config.missed(numbers | {"full_kl": math.nan if full_kl is None else full_kl[0]})
    )
    causes = tuple(_causes(session, rollout, some)) if faults else ()
    return Measured(
        int(mask.sum()),
        numbers,
        _bins(difference, entropies[mask], (0.0, 0.1, 1.0, math.inf)),
        _bins(difference, np.exp(sampled[mask]), (0.0, 0.1, 0.9, math.inf)),
        full_kl,
        faults,
        causes,
    )


def _bins(difference: np.ndarray, values: np.ndarray, edges: tuple[float, ...]) -> tuple[Bin, ...]:
    parts, found = k3(difference), []
    for low, high in zip(edges, edges[1:], strict=False):
        inside = (values >= low) & (values < high)
        mean = float(parts[inside].mean()) if inside.any() else 0.0
        share = float(parts[inside].sum() / parts.sum()) if parts.sum() else 0.0
        found.append(Bin(low, high, float(inside.mean()), mean, share))
    return tuple(found)


@dataclass(frozen=True)
class _Rows:
    """Some rows of a rollout on both sides, as the recipe makes them of the present weights.

    Attributes:
        sides: rollout and trainer.
        tokens: of the rows.
        kl: KL(rollout || trainer) of the distributions that predict each token, [p, t].
        sampled: the log-probability that the rollout gave each token, NaN behind a row's end.
        at: the trainer's at `_TEMPERATURES` times that of the rollout, [factors, p, t].
    """

    sides: tuple[Side, Side]
    tokens: Tokens
    kl: np.ndarray
    sampled: np.ndarray
    at: np.ndarray

    @classmethod
    def of(cls, session: Session, rollout: Experience, rows: int) -> _Rows:
        policy, config = session.weights, session.config
        if has_adapters(policy):
            policy = jax.tree.map(jnp.asarray, merge(to_host(policy)))
        found = of_rollout(rollout.rollout, rows)
        tokens = as_tokens(found, _LONGEST)
        dtype, backend = config.compute_dtype, config.precision.backend
        a, b = (
            Side.of(policy, session.recipe, phase, dtype, tokens, backend)
            for phase in ("rollout", "trainer")
        )
        hidden = a.final(tokens), b.final(tokens)
        temperatures = jnp.asarray(config.rollout.temperature * _TEMPERATURES, jnp.float32)
        parts = [
            _distributions(
                (a.served, b.served),
                (hidden[0][row], hidden[1][row]),
                tokens.completions[row],
                config.rollout.temperature,
                temperatures,
            )
            for row in range(len(found))
        ]
        kl, at = (np.stack(part) for part in zip(*map(jax.device_get, parts), strict=True))
        return cls((a, b), tokens, kl, as_recorded(found, _LONGEST), np.moveaxis(at, 1, 0))

    @property
    def full_kl(self) -> tuple[float, float]:
        """Mean and largest."""
        inside = self.kl[np.asarray(self.tokens.masks.completion)].astype(np.float64)
        return float(inside.mean()), float(inside.max())


@jax.jit
def _distributions(
    policies: tuple[Policy, Policy],
    hidden: tuple[Float[Array, "t hidden"], Float[Array, "t hidden"]],
    targets: Int[Array, " t"],
    temperature: float,
    temperatures: Float[Array, " n"],
) -> tuple[Float[Array, " t"], Float[Array, "n t"]]:
    """KL between the two distributions, and the second one's log-probabilities of `targets` at
    several temperatures."""
    one, other = (
        policy.compute.product(x, policy.head).astype(jnp.float32)
        for policy, x in zip(policies, hidden, strict=True)
    )
    p, q = (jax.nn.log_softmax(logits / temperature) for logits in (one, other))
    kl = jnp.sum(jnp.exp(p) * (p - q), axis=-1)

    def at(value: Array) -> Array:
        found = jax.nn.log_softmax(other / value)
        return jnp.take_along_axis(found, targets[:, None], axis=-1)[:, 0]

    return kl, jax.lax.map(at, temperatures)


def _causes(session: Session, rollout: Experience, some: _Rows | None) -> Iterator[str]:
    """Name what is wrong, the surest first; the first operation that differs where nothing is."""
    found = [
        *_other_weights(session),
        *_saturated(session, rollout),
        *_other_linears(session.recipe, session.weights),
        *(_other_temperature(session, some) if some else ()),
    ]
    yield from found
    if not found and some:
        temperature = session.config.rollout.temperature
        for each in compare(*some.sides, some.tokens, temperature=temperature).first[:1]:
            yield f"first difference: {each.name}, {each.cause}: {each.detail}"


def _other_weights(session: Session) -> Iterator[str]:
    """Whether our own engine serves what the masters give."""
    engine, config = session.engine, session.config
    if not isinstance(engine, LocalEngine) or engine.policy is None or engine.transform is not None:
        return

    def apart(wanted: Policy | None) -> list[str]:
        assert wanted is not None
        right = _tensors(wanted)
        return [name for name, x in there.items() if not _equal(x, right[name])]

    there, fresh = _tensors(engine.policy), local_engine(config, session.recipe)
    fresh.sync(session.weights, SyncContext(session.step, None, engine.scales))
    assert isinstance(fresh, LocalEngine)
    if not (other := apart(fresh.policy)):
        return
    line = f"weights: {len(other)} of {len(there)} tensors that are served, {other[0]} the first, "
    plain = session.recipe.weight_source == "compute" and not has_adapters(session.weights)
    if plain and config.compute_dtype != "float32":
        form = partial(
            rollout_policy,
            recipe=replace(session.recipe, weight_source="master"),
            dtype=jnp.dtype(config.compute_dtype),
            unroll=not isinstance(engine.policy.layers, Layer),
            backend=config.precision.backend,
        )
        if not apart(jax.jit(form)(session.weights)[0]):
            yield (
                f"{line}are quantized from the float32 masters; the trainer multiplies their "
                f"{config.compute_dtype}, and that is what the rollout is to quantize"
            )
            return
    yield (
        f"{line}are not those of the present weights: they are stale, or of another model; sync "
        "the engine with the session's own weights"
    )


def _tensors(policy: Policy) -> dict[str, Any]:
    """Every tensor of a policy but its KV scales, on the host, by its path."""
    host = to_host(with_scales(policy, None))
    leaves = jax.tree.leaves_with_path(host, is_leaf=is_quantized)
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}


def _equal(one: Any, other: Any) -> bool:
    """Whether two tensors, quantized or not, have the same bits."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


def _saturated(session: Session, rollout: Experience) -> Iterator[str]:
    """Whether Q, K and V of the trainer's forward on these tokens fit into their scales."""
    scales = session.engine.scales
    if not session.recipe.quantizes_cache or scales is None:
        return
    prompts, config = rollout.rollout.prompts, session.config
    with jax.set_mesh(session.mesh):
        seen = observe_qkv(
            session.weights,
            prompts.tokens,
            prompts.lengths,
            rollout.rollout.tokens,
            rollout.rollout.mask,
            scales,
            recipe=session.recipe,
            dtype=jnp.dtype(config.compute_dtype),
            backend=config.precision.backend,
        )
        metrics = to_host(qkv_metrics(seen))
    parts = {
        name: float(metrics[f"fp8/sat_frac_{role}"])
        for role, name in (("q", "queries"), ("k", "keys"), ("v", "values"))
    }
    beyond = [f"{part:.1%} of the {name}" for name, part in parts.items() if part > _SATURATED]
    if beyond:
        yield (
            f"KV scales: {', '.join(beyond)} lie beyond the largest number that their scales "
            "store; calibrate on the amax of these weights, not on a percentile of elements or on "
            "older weights"
        )


def _other_linears(recipe: Recipe, policy: Policy) -> Iterator[str]:
    """Whether both sides quantize some linears, and not the same ones."""
    linears = linear_names(policy.config)
    rollout = quantized_on(recipe, "rollout", linears)
    trainer = quantized_on(recipe, "trainer", linears)
    if rollout and trainer and rollout != trainer:
        sides, layers = ("the rollout", "the trainer"), policy.config.num_layers
        for line in difference_text((rollout, trainer), sides, linears, layers):
            yield f"linears: {line}; the other side's patterns leave them out"


def _other_temperature(session: Session, some: _Rows) -> Iterator[str]:
    """Whether the trainer at another temperature is much nearer to the rollout."""
    inside = ~np.isnan(some.sampled)
    means = k3(some.at[:, inside].astype(np.float64) - some.sampled[inside]).mean(axis=1)
    best, own = int(np.argmin(means)), len(_TEMPERATURES) // 2
    if best != own and means[best] < _BETTER * means[own]:
        there, temperature = _TEMPERATURES[best], session.config.rollout.temperature
        yield (
            f"temperature: at {there * temperature:.2g} the trainer agrees (k3 {means[best]:.2g}), "
            f"and rollout.temperature is {temperature:g}: the rollout's log-probabilities are of "
            "another one"
        )


def document(found: Measured) -> dict[str, Any]:
    """Turn what was measured into plain data; what is not finite is null."""
    return as_json(
        vars(found)
        | {name: [each._asdict() for each in getattr(found, name)] for name in _TABLES}
        | {"passed": not found.faults}
    )


_TABLES = ("by_entropy", "by_probability")


def summary(found: Measured) -> str:
    """Write what was measured for a terminal."""
    shown = "  ".join(f"{'k1' if n == 'kl' else n} {found.numbers[n]:.3g}" for n in NUMBERS)
    lines = [f"{found.tokens} sampled tokens: {shown}"]
    if found.full_kl:
        mean, largest = found.full_kl
        lines.append(f"KL over the full vocabulary: mean {mean:.3g}, largest {largest:.3g}")
    heads = "entropy of the trainer, nats", "rollout's probability"
    for name, head in zip(_TABLES, heads, strict=True):
        lines.append(f"{head:<30}{'tokens':>8}{'k3':>10}{'of its sum':>12}")
        for low, high, tokens, mean, of_sum in getattr(found, name):
            span = f"from {low:g}" + (f" to {high:g}" if math.isfinite(high) else "")
            lines.append(f"  {span:<28}{tokens:>8.1%}{mean:>10.2g}{of_sum:>12.1%}")
    if not found.faults:
        return "\n".join([*lines, "passed"])
    lines.append("published:")
    lines += [
        f"  {model:<18}{formats:<16}{mismatch} ({source})"
        for model, formats, mismatch, source in EXPECTED
    ]
    causes = found.causes or ("no cause found; fp8rl compare shows the layers",)
    return "\n".join([*lines, *causes, *(f"failed: {fault}" for fault in found.faults)])
