"""What a session serves: its weights as of the last sync, and KV scales measured for them.

A sync is due when weights have changed, and so are new KV scales where the cache is in a calibrated
format. Who measures them is the recipe's kv_calibration: the trainer, on an update's tokens or on
prompts before the first one; or the rollout itself, on the prompts that come next.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from fp8rl_jax.config.recipe import Recipe
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.cache import KVScales
from fp8rl_jax.models.policy import Policy
from fp8rl_jax.parallel import to_host
from fp8rl_jax.precision import QuantizationSums
from fp8rl_jax.rollout.arrival import Arrival
from fp8rl_jax.rollout.calibration import calibrate_on_prompts, calibrated, observe_qkv
from fp8rl_jax.rollout.engine import Prompts, RolloutEngine
from fp8rl_jax.rollout.sync import SyncContext
from fp8rl_jax.rollout.vllm.engine import VllmEngine
from fp8rl_jax.training.batch import Batch
from fp8rl_jax.training.keys import sync_key
from fp8rl_jax.training.performance import Clock


class Serving:
    """An engine and what it serves.

    Attributes:
        engine: who samples.
        in_use: held while the engine samples or is synced.
        scales: KV scales of the present weights where the trainer calibrates an FP8 cache, else
            None.
        due: whether the present weights are not served yet.
        uncalibrated: whether they are, and the rollout has to calibrate its cache first.
    """

    def __init__(self, engine: RolloutEngine, config: RunConfig, recipe: Recipe):
        self.engine, self._config, self._recipe = engine, config, recipe
        self.in_use = threading.RLock()
        self.scales: KVScales | None = None
        self.due, self.uncalibrated = True, False
        self._moved, self._first_version = True, 0
        """Whether no sync has served the present weights yet; the first version that did."""
        self.begin()

    def begin(self) -> None:
        """Make the next sync the start of what arrives."""
        self.engine.arrival, self.due = Arrival(isinstance(self.engine, VllmEngine)), True

    def changed(self) -> None:
        """Other weights are there, of which nothing is served or measured yet."""
        self.due = self._moved = True
        if self.calibrates("trainer"):
            self.scales = None

    def calibrates(self, side: Literal["trainer", "rollout"]) -> bool:
        """Whether there is an FP8 cache, and this side measures its scales."""
        rollout = self._recipe.kv_calibration == "rollout"
        return self._recipe.quantizes_cache and rollout == (side == "rollout")

    def sync(self, weights: Policy, step: int, prompts: Prompts | None, clock: Clock) -> None:
        """Serve weights, calibrated on prompts where that is due; without prompts the next call
        does it."""
        if self.calibrates("trainer") and self.scales is None:
            if prompts is None:
                self.due = True
                return
            dtype, backend = jnp.dtype(self._config.compute_dtype), self._config.precision.backend
            self.scales = calibrate_on_prompts(weights, prompts, self._recipe, dtype, backend)
        # one that is interrupted leaves nothing to serve: the next rollout makes another
        self.due = True
        # waits for what is sampled ahead
        with self.in_use, clock.enter("sync"):
            key = sync_key(self._config.seed, step)
            context = SyncContext(step, key, self.scales, self._config.trainer.steps)
            self.engine.sync(weights, context)
            self.engine.wait()
        if self._moved:
            self._moved, self._first_version = False, self.engine.version
        self.due, self.uncalibrated = False, self.calibrates("rollout")
        if self.uncalibrated and prompts is not None:
            self.calibrate(prompts, clock)

    def check_finite(self) -> None:
        """Raise UserError where what is served is not finite."""
        finite = to_host(self.engine.finite)
        if not all(finite.values()):
            bad = ", ".join(role for role, is_finite in finite.items() if not is_finite)
            raise UserError(
                f"recipe {self._recipe.name!r}: {bad} not finite after quantization; the model "
                f"overflows {self._config.compute_dtype}"
            )

    def calibrate(self, prompts: Prompts, clock: Clock) -> None:
        """Have the rollout measure the scales of its cache."""
        with clock.enter("calibrate"):
            self.engine.calibrate(prompts)
            self.engine.wait()
        self.uncalibrated = False

    def measure(
        self,
        weights: Policy,
        batch: Batch,
        micro_batches: int,
        seen: QuantizationSums | None,
        served: KVScales | None,
        clock: Clock,
    ) -> dict[str, jax.Array]:
        """Have the trainer measure the scales of an update's weights, where it calibrates.

        Args:
            weights: new ones.
            batch, micro_batches: that they were learned on, and in how many.
            seen: Q, K and V of the update's own forward; None: one under the new weights is made.
            served: scales whose effect is measured.

        Returns:
            fp8/*.
        """
        with clock.enter("calibrate"):
            if seen is None:
                seen = observe_qkv(
                    weights,
                    batch.prompts,
                    batch.lengths,
                    batch.tokens,
                    batch.present,
                    served,
                    recipe=self._recipe,
                    dtype=jnp.dtype(self._config.compute_dtype),
                    micro_batches=micro_batches,
                    backend=self._config.precision.backend,
                )
            self.scales, metrics = jax.block_until_ready(calibrated(seen, self._recipe))
        return metrics

    def saved(self, shape: tuple[int, ...]) -> KVScales:
        """Give what a checkpoint holds: scales of this shape, zeros where there are none."""
        scales = self.scales or KVScales(*(jnp.zeros(shape) for _ in range(3)))
        return jax.tree.map(np.asarray, scales)

    def load(self, scales: KVScales, version: int) -> None:
        """Go on with what `saved` gave, at a version of the weights."""
        # of a recipe without an FP8 cache they are zeros, which are no scales
        measured = self.calibrates("trainer") and bool(np.any(to_host(scales.key)))
        self.scales = scales if measured else None
        self.engine.version = version

    @contextmanager
    def aside(self) -> Generator[None]:
        """A block that samples apart from training: scales that its prompts give are not what
        training goes on with."""
        before = self.due, self.uncalibrated, self.scales
        try:
            yield
        except BaseException:
            if self._recipe.quantizes_cache:
                self.due, self.scales = True, before[2]
            raise
        if self._recipe.quantizes_cache:
            self.due, self.uncalibrated, self.scales = before

    def behind(self, version: int) -> int:
        """Versions between the weights that sampled and the present ones; 0: these did.

        Raises:
            UserError: there are some, and nothing corrects for them.
        """
        if not self._moved and version >= self._first_version:
            return 0
        correction = self._config.rl.correction.resolve(self._recipe.correction)
        if correction.value("weights") == "none" and not correction.value("reject"):
            raise UserError(
                f"rollout: version {version} of the weights sampled it, and they have changed "
                "since; sample again, set trainer.updates_per_rollout for several updates on one "
                'rollout, or correct for older weights: rl.correction.method, as in "token_tis"'
            )
        return max(self.engine.version + self._moved - version, 1)

    def metrics(self) -> dict[str, jax.Array | float]:
        """Compute fp8/kv_scale_* and fp8/nonfinite_* of what is served."""
        scales, finite = to_host((self.engine.scales, self.engine.finite))
        found = {f"fp8/nonfinite_{role}": 1.0 - ok for role, ok in finite.items()}
        if scales is not None:
            roles = "query", "key", "value"
            found |= {f"fp8/kv_scale_{role[0]}": getattr(scales, role).max() for role in roles}
        return found
