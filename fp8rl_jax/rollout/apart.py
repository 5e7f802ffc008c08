"""An engine of ours on devices of its own (mesh.rollout).

A weight sync quantizes where the masters are, and what is copied to the rollout's devices are the
served weights, in their few bytes. Prompts and completions go by way of the host: next to a model
they are small. While the trainer computes, nothing here waits for it, nor it for anything here.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Key

from fp8rl_jax.models.cache import KVScales
from fp8rl_jax.models.policy import Policy
from fp8rl_jax.parallel import (
    DECODE_RULES,
    batch_sharding,
    moved,
    policy_shardings,
    to_global,
    to_host,
)
from fp8rl_jax.rollout.arrival import Arrival
from fp8rl_jax.rollout.engine import LocalEngine, PagedEngine
from fp8rl_jax.rollout.paged.host import SHARD_RULES
from fp8rl_jax.rollout.sampler import Prompts, Rollout
from fp8rl_jax.rollout.sampling import Sampling
from fp8rl_jax.rollout.sync import NO_CONTEXT, SyncContext


class ApartEngine:
    """A `RolloutEngine`: `engine` on another mesh than the trainer's.

    Args:
        engine: samples. Its policy has no frozen base, whose adapters would be on two meshes.
        mesh: its own.
        trainer: the mesh that prompts come from and rollouts go to.
    """

    def __init__(self, engine: LocalEngine, mesh: Mesh, trainer: Mesh):
        self._engine, self.mesh, self._trainer = engine, mesh, trainer
        self._rules = SHARD_RULES if isinstance(engine, PagedEngine) else DECODE_RULES

    @property
    def version(self) -> int:
        """Number of the last weight sync."""
        return self._engine.version

    @version.setter
    def version(self, version: int) -> None:
        self._engine.version = version

    @property
    def arrival(self) -> Arrival | None:
        """What a session wants to know of its updates; found on the trainer's mesh."""
        return self._engine.arrival

    @arrival.setter
    def arrival(self, arrival: Arrival | None) -> None:
        self._engine.arrival = arrival

    @property
    def finite(self) -> dict[str, Bool[Array, ""]]:
        """As of the engine."""
        return self._engine.finite

    @property
    def metrics(self) -> dict[str, Float[Array, ""]]:
        """As of the engine."""
        return self._engine.metrics

    @property
    def scales(self) -> KVScales | None:
        """KV scales that are served, on the rollout's mesh."""
        return self._engine.scales

    def sync(self, policy: Policy, context: SyncContext = NO_CONTEXT) -> int:
        """Quantize on the trainer's mesh, and serve a copy on the rollout's; arguments as of
        `LocalEngine.sync`."""
        served = self._engine.convert(policy, context)
        served = moved(served, policy_shardings(served, self.mesh, self._rules))
        with jax.set_mesh(self.mesh):
            return self._engine.serve(served)

    def calibrate(self, *prompts: Prompts) -> None:
        """Measure KV scales as `LocalEngine.calibrate`."""
        host = to_host(prompts)  # of the trainer's mesh, as a key is
        with jax.set_mesh(self.mesh):
            self._engine.calibrate(*to_global(host, batch_sharding(self.mesh)))

    def generate(
        self, prompts: Prompts, samples: int, sampling: Sampling, key: Key[Array, ""]
    ) -> Rollout:
        """Sample as `LocalEngine.generate`; the rollout is on the trainer's mesh."""
        asked, bits = to_host((prompts, jax.random.key_data(key)))
        with jax.set_mesh(self.mesh):
            asked = to_global(asked, batch_sharding(self.mesh))
            key = jax.random.wrap_key_data(bits, impl=jax.random.key_impl(key))
            made = self._engine.generate(asked, samples, sampling, key)
            metrics, host = to_host((made.metrics, replace(made, metrics={})))
        there = to_global(host, batch_sharding(self._trainer))
        return replace(there, metrics=metrics)

    def conversations(self, width: int) -> AbstractContextManager[None]:
        """As of the engine."""
        return self._engine.conversations(width)

    def wait(self) -> None:
        """Return when the last sync and calibration are done."""
        self._engine.wait()
