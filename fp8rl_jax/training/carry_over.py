"""Partial rollouts of a session (rollout.partial): what stays in progress from one to the next."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Key

from fp8rl_jax.errors import UserError
from fp8rl_jax.parallel import batch_sharding, batch_shards, to_global, to_host
from fp8rl_jax.rollout.engine import PagedEngine, Prompts, Rollout
from fp8rl_jax.rollout.partial import InProgress, advance, as_rollout, begin, divide, join
from fp8rl_jax.rollout.sampling import Sampling
from fp8rl_jax.training.performance import Clock


class CarryOver:
    """Rollouts that leave `extra` prompts in progress.

    Args:
        engine: samples.
        mesh: of the batch.
        sampling: of every rollout.
        extra: prompts that stay in progress.
        width: tokens that prompts are padded to, in every rollout alike.
        pad: token id of the padding.

    Attributes:
        progress: what is carried over; None before the first rollout.
    """

    def __init__(
        self, engine: PagedEngine, mesh: Mesh, sampling: Sampling, extra: int, width: int, pad: int
    ):
        self._engine, self._mesh, self._sampling = engine, mesh, sampling
        self._extra, self._width, self._pad = extra, width, pad
        self.progress: InProgress | None = None

    @property
    def carried(self) -> int:
        """Prompts whose completions are carried over to the next rollout."""
        return 0 if self.progress is None else self._extra

    def rollout(
        self, prompts: Prompts, count: int, samples: int, key: Key[Array, ""], clock: Clock
    ) -> Rollout:
        """Sample until all prompts in progress but `extra` have all their completions.

        Args:
            prompts: new ones.
            count: how many of them are no filling.
            samples: completions of each.
            key: fixes the draws of the new ones.
            clock: takes the time, as "gen".

        Raises:
            UserError: prompts that are filling, too long or too few; other `samples` than those
                that are carried over have.
        """
        parts, sharding = batch_shards(self._mesh), batch_sharding(self._mesh)
        of_one_width = self._of_one_width(prompts, count)
        progress = begin(of_one_width, key, samples, self._sampling, self._pad)
        if self.progress is not None:
            if self.progress.samples != samples:
                raise UserError(
                    f"samples = {samples}: the prompts carried over have {self.progress.samples}"
                )
            progress = join(self.progress, progress, parts)
        enough = len(progress.prompts.lengths) - self._extra
        if enough < 1:
            raise UserError(
                f"prompts: {count} are not enough: rollout.paged.extra_prompts = {self._extra} "
                "stay in progress; give as many more the first time"
            )
        with clock.enter("gen"):
            placed = to_global(progress, sharding)
            rows, metrics = to_host(self._engine.go_on(placed, self._sampling, enough))
        progress = advance(progress, rows, self._engine.version)
        ended, self.progress = divide(progress, enough, parts)
        rollout = as_rollout(ended, self._engine.version, metrics)
        return replace(to_global(replace(rollout, metrics={}), sharding), metrics=rollout.metrics)

    def saved(self, samples: int) -> InProgress:
        """Give what a checkpoint holds: what is carried over, or as many empty prompts."""
        if self.progress is not None:
            return self.progress
        none: Any = np.zeros(self._extra, np.int32)
        tokens: Any = np.full((self._extra, self._width), self._pad, np.int32)
        prompts = Prompts(tokens, none, none)
        return begin(prompts, jax.random.key(0), samples, self._sampling, self._pad)

    def load(self, saved: InProgress) -> None:
        """Go on with what `saved` gave, on the host."""
        self.progress = saved if saved.prompts.lengths.any() else None

    def _of_one_width(self, prompts: Prompts, count: int) -> Prompts:
        """Prompts on the host, as wide as those of every step."""
        tokens, lengths, ids = to_host(prompts)
        if len(lengths) != count:
            raise UserError(
                f"prompts: with rollout.paged.extra_prompts a batch is not filled up, and {count} "
                f"prompts do not divide as the batch does; give {len(lengths)}"
            )
        if lengths.max() > self._width:
            raise UserError(
                f"prompts: one has {lengths.max()} tokens; with rollout.paged.extra_prompts they "
                f"have at most rollout.max_prompt_tokens = {self._width}"
            )
        missing = max(self._width - tokens.shape[1], 0)
        tokens: Any = np.pad(tokens, ((0, 0), (0, missing)), constant_values=self._pad)
        return Prompts(tokens[:, : self._width], lengths, ids)
