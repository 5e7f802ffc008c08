"""What an update learns from, and how its padding is kept small.

A rollout is as wide as the longest prompt and completion may be, so that one program samples every
batch. The update can be narrower, in two ways that leave loss and metrics as they are:

    trim    columns behind the bucket of the longest prompt and of the longest completion go. Widths
            are powers of two and three quarters of them, and each width met for the first time
            compiles the update once
    pack    completions stand one behind the other in rows of a fixed width, each behind a copy of
            its prompt in the same row; completions of one prompt share the copy. Segment ids say
            which tokens attend to which: a completion to its prompt and to itself, whatever else
            stands in the row

Packing is index arrays and nothing else, made on the host from lengths. The model runs on packed
rows; log-probabilities are then gathered back to [b, t], so that loss, correction and metrics know
nothing of it. Lengths are the same on all processes of a run, and so is what follows from them.
Rows are filled by first fit decreasing (Johnson 1973: at most 11/9 of the fewest rows possible,
plus 6/9), prompts in the order of all that their completions need, rows that have the prompt before
others; their number is rounded up to a bucket, so that few programs are compiled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from fp8rl_jax.config.rl import RLConfig
from fp8rl_jax.config.training import TrainerConfig
from fp8rl_jax.models.logprobs import Support
from fp8rl_jax.parallel import batch_sharding, batch_shards, to_global, to_host

Row = list[tuple[int, list[int]]]
"""A prompt and its completions, for each prompt in a row; completions are numbered through the
whole batch."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Packing:
    """Where each token of P prompts [p, s] and B completions [b, t] stands in R rows of W slots, C
    of them predicted.

    Attributes:
        tokens: index into all prompts, then all completions, flat; p*s + b*t where a slot is empty.
        segments: 1, 2, ... in each row; 0 where a slot is empty.
        prefixes: the prompt's segment for a completion's tokens, -1 elsewhere.
        positions: of each token in its own sequence.
        sources: slots whose hidden state predicts a token: the one before it, or the last of its
            prompt.
        targets: those tokens as an index into all completions, flat; b*t where there is none.
        places: of each completion's token in [r * c]; r*c where there is none.
    """

    tokens: Int[Array, "r w"]
    segments: Int[Array, "r w"]
    prefixes: Int[Array, "r w"]
    positions: Int[Array, "r w"]
    sources: Int[Array, "r c"]
    targets: Int[Array, "r c"]
    places: Int[Array, "b t"]

    def gather(self, prompts: Array, completions: Array, fill: int) -> Array:
        """Bring values a token, [p, s, ...] and [b, t, ...], into rows [r, w, ...].

        `fill` stands where a slot is empty.
        """
        rest = prompts.shape[2:]
        flat = jnp.concatenate([prompts.reshape(-1, *rest), completions.reshape(-1, *rest)])
        return jnp.take(flat, self.tokens, axis=0, mode="fill", fill_value=fill)

    def hidden(self, rows: Array) -> Array:
        """Pick the hidden states that predict `targets`: [r, w, h] -> [r, c, h]."""
        return jnp.take_along_axis(rows, self.sources[..., None], axis=1)

    def predicted(self, completions: Int[Array, "b t *k"]) -> Int[Array, "r c *k"]:
        """Pick the tokens that are predicted, or what is known of them; 0 where there is none."""
        flat = completions.reshape(-1, *completions.shape[2:])
        return jnp.take(flat, self.targets, axis=0, mode="fill", fill_value=0)

    def back(self, values: Array) -> Array:
        """Bring values of predicted tokens [r, c] back to [b, t]; 0 where there is no token."""
        return jnp.take(values.reshape(-1), self.places, mode="fill", fill_value=0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Rollouts to learn from: P prompts, B = P * n completions of T tokens. `mask`: the tokens that
    the policy sampled."""

    prompts: Int[Array, "p s"]
    lengths: Int[Array, " p"]
    tokens: Int[Array, "b t"]
    mask: Bool[Array, "b t"]
    rollout_logprobs: Float[Array, "b t"]
    advantages: Float[Array, " b"]
    old_logprobs: Float[Array, "b t"] | None = None
    reference_logprobs: Float[Array, "b t"] | None = None
    attended: Bool[Array, "b t"] | None = None
    """The tokens that are there, where they are more than `mask`: observations among the sampled
    tokens of an episode."""
    loss_mask: Bool[Array, "b t"] | None = None
    """The tokens in the loss, where they are fewer than `mask`."""
    weights: Float[Array, "b t"] | None = None
    """Importance weights; where they are given, the rollout correction has been made."""
    prompt_routes: Int[Array, "p s sparse k"] | None = None
    routes: Int[Array, "b t sparse k"] | None = None
    """Expert ids to replay, of the prompts and of the completions (Rollout's prompt_expert_ids and
    expert_ids)."""
    support: Support | None = None
    """[b, t, k], over which the trainer's softmax of each sampled token is; None: the vocabulary.
    `rollout_logprobs` are over it, too."""
    packing: Packing | None = None
    """Where the tokens stand in the rows that the model runs on; None: as they are here."""

    @property
    def present(self) -> Bool[Array, "b t"]:
        """The tokens that the model attends to, the first of each row; the sampled ones, `mask`,
        are among them."""
        return self.mask if self.attended is None else self.attended


def bucket(size: int, steps: int) -> int:
    """Round a size up to a bucket: there are `steps` sizes in each doubling."""
    scale = 1
    while size > 2 * steps * scale:
        scale *= 2
    return -(-size // scale) * scale


def first_fit(
    prompts: Int[np.ndarray, " p"], completions: Int[np.ndarray, " b"], width: int
) -> list[Row]:
    """Lay completions out in rows of `width` slots, first fit decreasing.

    A completion without tokens is in none.

    Args:
        prompts: tokens of each prompt.
        completions: tokens of each completion; b / p neighbours belong to one prompt.

    Raises:
        ValueError: a prompt and one of its completions are longer than a row.
    """
    n = len(completions) // len(prompts)
    groups = completions.reshape(len(prompts), n)
    longest = int((prompts + groups.max(axis=1)).max())
    if longest > width:
        raise ValueError(
            f"packing: a sequence of {longest} tokens does not fit in a row of {width}"
        )
    rows: list[Row] = []
    free = np.zeros(len(completions), np.int64)
    needs = np.where(groups.any(axis=1), prompts, 0) + groups.sum(axis=1)
    for prompt in np.argsort(-needs, kind="stable"):
        holders: list[int] = []
        for sample in np.argsort(-groups[prompt], kind="stable"):
            length = groups[prompt, sample]
            if not length:
                break
            completion = int(prompt * n + sample)
            holder = next((row for row in holders if free[row] >= length), None)
            if holder is not None:
                rows[holder][-1][1].append(completion)
                free[holder] -= length
                continue
            fitting = np.flatnonzero(free[: len(rows)] >= prompts[prompt] + length)
            if fitting.size:
                holder = int(fitting[0])
            else:
                holder = len(rows)
                rows.append([])
                free[holder] = width
            rows[holder].append((int(prompt), [completion]))
            holders.append(holder)
            free[holder] -= prompts[prompt] + length
    return rows


def pack(
    prompts: Int[np.ndarray, " p"],
    completions: Int[np.ndarray, " b"],
    sides: tuple[int, int],
    width: int,
    *,
    micro_batches: int = 1,
    devices: int = 1,
) -> Packing:
    """Pack a batch, micro-batch by micro-batch.

    Args:
        prompts, completions: tokens of each, as in `first_fit`.
        sides: s and t of the batch.
        width: slots of a row.
        micro_batches: of neighbouring prompts, packed apart: `split_batch` then splits the packing
            with its batch, and the indices of each are into that one.
        devices: what the rows of a micro-batch have to divide by.
    """
    micro = list(
        zip(np.split(prompts, micro_batches), np.split(completions, micro_batches), strict=True)
    )
    packed = [first_fit(*lengths, width) for lengths in micro]
    rows = devices * bucket(-(-max(1, *map(len, packed)) // devices), 4)
    most = max(
        max(_predictions(lengths[1], of), default=1)
        for lengths, of in zip(micro, packed, strict=True)
    )
    # in eighths of a row, so that few programs are compiled
    eighth = -(-width // 8)
    shape = rows, width, min(-(-most // eighth) * eighth, width)
    filled = [_fill(*lengths, of, sides, shape) for lengths, of in zip(micro, packed, strict=True)]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *filled)


def _predictions(completions, packed: list[Row]) -> list[int]:
    """Completion tokens in each row."""
    return [sum(int(completions[members].sum()) for _, members in row) for row in packed]


def _fill(
    prompts, completions, packed: list[Row], sides: tuple[int, int], shape: tuple[int, int, int]
) -> Packing:
    """The index arrays of one micro-batch."""
    (s, t), (r, w, c) = sides, shape
    b, start = len(completions), len(prompts) * s

    def table(shape: tuple[int, int], fill: int) -> Any:
        return np.full(shape, fill, np.int32)

    tokens, prefixes = table((r, w), start + b * t), table((r, w), -1)
    segments, positions, sources = table((r, w), 0), table((r, w), 0), table((r, c), 0)
    targets, places = table((r, c), b * t), table((b, t), r * c)
    for row, held in enumerate(packed):
        slot = segment = done = 0
        for prompt, members in held:
            count = prompts[prompt]
            segment, head = segment + 1, segment + 1
            here = np.s_[row, slot : slot + count]
            tokens[here], segments[here] = prompt * s + np.arange(count), head
            positions[here] = np.arange(count)
            slot, last = slot + count, slot + count - 1
            for completion in members:
                length = completions[completion]
                segment, index = segment + 1, np.arange(length)
                here, there = np.s_[row, slot : slot + length], np.s_[row, done : done + length]
                tokens[here], segments[here], prefixes[here] = (
                    start + completion * t + index,
                    segment,
                    head,
                )
                positions[here] = count + index
                sources[there], targets[there] = (
                    np.where(index == 0, last, slot + index - 1),
                    completion * t + index,
                )
                places[completion, :length] = row * c + done + index
                slot, done = slot + length, done + length
    return Packing(tokens, segments, prefixes, positions, sources, targets, places)


_OF_PROMPTS = ("prompts", "prompt_routes")


class Narrowed(NamedTuple):
    """A batch to run the model on.

    Attributes:
        batch: trimmed or packed.
        padding: part of the token slots that hold no token, or one more copy of a prompt's.
    """

    batch: Batch
    padding: float


def narrow(
    batch: Batch, config: TrainerConfig, micro_batches: int, mesh: jax.sharding.Mesh
) -> Narrowed:
    """Trim and pack a batch as trainer.length_buckets and trainer.packing say.

    All processes must call it together.

    Args:
        batch: on the mesh.
        micro_batches: of the whole batch, packed apart.
    """
    lengths = to_host((batch.lengths, jnp.sum(batch.present, axis=1)))
    prompts, completions = (np.asarray(x, np.int64) for x in lengths)
    tokens = int(prompts.sum() + completions.sum())
    if config.length_buckets:
        batch = trim(batch, int(prompts.max()), int(completions.max()))
    sides = batch.prompts.shape[1], batch.tokens.shape[1]
    slots = batch.prompts.size + batch.tokens.size
    if config.packing:
        width = config.pack_tokens or sum(sides)
        packing = pack(
            prompts,
            completions,
            sides,
            width,
            micro_batches=micro_batches,
            devices=batch_shards(mesh),
        )
        slots = packing.tokens.size
        batch = replace(batch, packing=to_global(packing, batch_sharding(mesh)))
    return Narrowed(batch, 1.0 - tokens / slots)


def trim(batch: Batch, prompt: int, completion: int) -> Batch:
    """Cut off the columns behind the buckets of the longest prompt and completion."""

    def columns(name: str, values: Any):
        if name == "packing":
            return values
        width = bucket(max(prompt if name in _OF_PROMPTS else completion, 1), 2)
        return jax.tree.map(lambda x: x if x.ndim < 2 else x[:, :width], values)

    return replace(batch, **{name: columns(name, values) for name, values in vars(batch).items()})


def untrim(values: Float[Array, "b trimmed"], width: int) -> Float[Array, "b t"]:
    """Pad values of a trimmed batch to the width that it had, with 0."""
    return jnp.pad(values, ((0, 0), (0, width - values.shape[1])))


def of_width(config: RLConfig, width: int) -> RLConfig:
    """Adapt a configuration to batches that may be trimmed.

    Where it divides by the width of the batch, it divides by `width`.
    """
    if config.aggregation != "fixed_length" or config.fixed_length is not None:
        return config
    return replace(config, fixed_length=width)
