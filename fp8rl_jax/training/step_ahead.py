"""One step ahead (rollout.steps_ahead): the next step's completions are sampled in a thread while
the present step is learned from.

Where there is one process, they are rewarded there, too. Several exchange what rewards they found,
and come to an exchange in one order, which only their main threads keep.

Every step but the first learns from completions of the weights before the last update, whatever
either side takes: what is learned is no function of timing. So completions in hand between two
steps are in a checkpoint, and a run that goes on learns what it would have learned. Their rewards
are computed again, and counters of the paged engine (rollout/*) are not kept. A run's last step
samples nothing ahead, so one that is given more steps later has one that is on policy.

The pipelines of verl, NeMo RL and AReaL (arXiv 2505.24298) are the same idea; here it is never more
than one update.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.logprobs import Support
from fp8rl_jax.models.moe import route_dtype
from fp8rl_jax.parallel import batch_sharding, to_global, to_host
from fp8rl_jax.rollout.sampler import Prompts, Rollout
from fp8rl_jax.training.collect import Collected, Collector
from fp8rl_jax.training.session import Session


class StepAhead:
    """Samples a step while the one before is learned from.

    Args:
        session, collector, config: of the run.

    Raises:
        UserError: vLLM samples for several processes, which tell each other what it answers.
    """

    def __init__(self, session: Session, collector: Collector, config: RunConfig):
        if jax.process_count() > 1 and config.rollout.engine == "vllm":
            raise UserError(
                'rollout.steps_ahead: with rollout.engine = "vllm" it takes one process; set it '
                "to 0, or start one for all devices"
            )
        self._session, self._collector, self._config = session, collector, config
        self._thread = ThreadPoolExecutor(1, "ahead")
        self._begun: Future[Rollout | Collected] | None = None
        self._restored: Rollout | None = None

    def begin(self, step: int) -> None:
        """Begin to sample `step`, with the weights that are served now."""
        sampling = threading.Event()
        self._begun = self._thread.submit(self._sample, step, sampling)
        self._begun.add_done_callback(lambda _: sampling.set())  # where it has failed at once
        sampling.wait()

    def collect(self, step: int) -> Collected:
        """Give what was begun for `step`, or sample it now."""
        found = self._restored if self._begun is None else self._begun.result()
        self._begun = self._restored = None
        if found is None:
            return self._collector.collect(step)
        return found if isinstance(found, Collected) else self._collector.rewarded(step, found)

    def saved(self) -> Rollout:
        """Give what a checkpoint holds: the completions in hand, waited for; or an empty batch."""
        found = self._restored if self._begun is None else self._begun.result()
        rollout = found.experience.rollout if isinstance(found, Collected) else found
        if rollout is None:
            rollout = empty_rollout(self._config, self._session)
        return replace(rollout, weight_version=0, metrics={})

    def load(self, saved: Rollout) -> None:
        """Go on from what `saved` gave, behind the session's own `load_saved`."""
        self._begun = self._restored = None
        if to_host(saved.prompts.lengths).any():
            # the session is at the version before its first sync, which is what sampled
            self._restored = replace(saved, weight_version=self._session.engine.version)

    def close(self) -> None:
        """Wait for what is being sampled, and drop it."""
        self._thread.shutdown(cancel_futures=True)

    def _sample(self, step: int, sampling: threading.Event) -> Rollout | Collected:
        made = self._collector.sampled_ahead(step, sampling)
        return made if jax.process_count() > 1 else self._collector.rewarded(step, made)


def empty_rollout(config: RunConfig, session: Session) -> Rollout:
    """A rollout of a step without a prompt, in the shapes of one with prompts."""
    r, shape = config.rollout, session.shape
    count, rows = r.prompts_per_step, r.prompts_per_step * r.samples_per_prompt
    width, longest = session.encoder.width, r.max_new_tokens
    table: Any = np.zeros((rows, longest), np.int32)
    numbers, flags = table.astype(np.float32), table[:, 0] > 0
    tokens: Any = np.zeros((count, width), np.int32)
    none: Any = tokens[:, 0]
    support = prompt_routes = routes = None
    if size := config.support_size(shape.vocab_size):
        ids: Any = np.zeros((rows, longest, size), np.int32)
        support = Support(ids, table)
    if config.trainer.router_replay and shape.experts is not None:
        sparse, kind = len(shape.sparse_layers), route_dtype(shape.experts)
        prompt_routes: Any = np.zeros((count, width, sparse, shape.experts.per_token), kind)
        routes: Any = np.zeros((rows, longest, sparse, shape.experts.per_token), kind)
    rollout = Rollout(
        Prompts(tokens, none, none),
        table,
        table > 0,
        numbers,
        numbers,
        flags,
        prompt_expert_ids=prompt_routes,
        expert_ids=routes,
        support=support,
    )
    return to_global(rollout, batch_sharding(session.mesh))
