"""What a person must be told while a run goes on: skipped updates, failed rewards, groups that
teach nothing, sides that disagree, updates that do not arrive."""

from __future__ import annotations

import logging

from fp8rl_jax.config.training import TrainerConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.parallel import is_main_process
from fp8rl_jax.rollout.arrival import DEAF
from fp8rl_jax.tasks.scores import Scores

_log = logging.getLogger("fp8rl")


ALARM = 1.05
"""The mean of exp |d log p| above which NeMo RL looks closer. One token far from the rest is enough
for it, so that one step alone says nothing."""


_DEAF_STEPS = 3
"""So many steps in a row, as the first ones move the masters little."""


class Watch:
    """Reads each step's metrics, warns, and stops a run that no longer learns.

    Args:
        trainer: how many faults in a row stop the run; a run of fewer steps stops when rewards
            failed in all of them.
        checkpoints: where the last whole checkpoint lies, for the message.
        compute_dtype: of the run, for the message.
        log: where what rewards print stands, for the message.
    """

    def __init__(
        self,
        trainer: TrainerConfig,
        checkpoints: object,
        compute_dtype: str = "bfloat16",
        log: object = "rewards.log",
    ):
        self._abort_after, self._checkpoints, self._log = (
            trainer.abort_after_skips,
            checkpoints,
            log,
        )
        self._abort_after_failed = min(trainer.abort_after_failed_rewards, trainer.steps)
        self._dtype = compute_dtype
        self._skipped = self._in_a_row = self._failed_in_a_row = 0
        self._warned_constant, self._apart, self._deaf = False, 0, 0

    @property
    def skipping(self) -> bool:
        """Whether the last update was skipped for values that are not finite."""
        return self._in_a_row > 0

    def see(
        self, step: int, metrics: dict[str, float], scores: Scores | None = None
    ) -> dict[str, float]:
        """Take one step's metrics and the scores of all that it sampled, if it sampled anything.

        An update that is skipped while a dynamic loss scale is being found is no fault: it is said,
        not counted, and does not end a row of faults either.

        Returns:
            `optim/skipped_steps`, the number of skipped updates since the run started or was
            resumed.

        Raises:
            UserError: trainer.abort_after_skips updates in a row were skipped, or every reward of
                trainer.abort_after_failed_rewards steps in a row failed.
        """
        overflow = metrics.get("optim/overflow", 0.0)
        skipped = metrics["optim/skipped"] > overflow
        self._skipped += skipped
        if overflow:
            _log.info(
                "step %d: gradients overflow with a loss scale of %g; it is lowered",
                step,
                metrics["optim/loss_scale"],
            )
        if skipped:
            self._in_a_row += 1
            roles = [
                name.removeprefix("nonfinite/")
                for name, v in metrics.items()
                if name.startswith("nonfinite/") and v > 0
            ]
            _log.warning(
                "step %d: update skipped, non-finite %s%s",
                step,
                ", ".join(roles),
                self._advice(roles),
            )
            if self._in_a_row >= self._abort_after:
                raise UserError(
                    f"{self._in_a_row} updates in a row were skipped for non-finite values "
                    "(trainer.abort_after_skips)"
                    f"{self._advice(roles)}; the last checkpoint in {self._checkpoints} is whole"
                )
        elif not overflow:
            self._in_a_row = 0
        if scores is None:
            return {"optim/skipped_steps": float(self._skipped)}
        if scores.failed.any() and is_main_process():
            _log.warning("step %d: %s", step, scores.failure_text())
        self._failed_in_a_row = self._failed_in_a_row + 1 if scores.failed.all() else 0
        if self._failed_in_a_row >= self._abort_after_failed:
            raise UserError(
                f"every reward failed in {self._failed_in_a_row} steps in a row "
                "(trainer.abort_after_failed_rewards): "
                f"{scores.first_error}; what rewards print is in {self._log}"
            )
        if metrics["reward/frac_zero_std"] == 1.0 and not self._warned_constant:
            self._warned_constant = True
            _log.warning(
                "step %d: every group has equal rewards, which teaches nothing where advantages "
                "compare in groups (said once)",
                step,
            )
        apart = metrics.get("mismatch/token_mult_prob_error", 1.0)
        self._apart = self._apart + 1 if apart > ALARM else 0
        if self._apart == 2:
            _log.warning(
                "step %d: rollout and trainer disagree, as in the step before: "
                "mismatch/token_mult_prob_error is %.3g, and above %g in step after step something "
                "other than rounding is likely; `fp8rl compare` shows where (said once, until it "
                "is below)",
                step,
                apart,
                ALARM,
            )
        # not a number before the masters have moved
        arrived = metrics.get("sync/arrived", 1.0)
        self._deaf = self._deaf + 1 if arrived < DEAF else 0
        if self._deaf == _DEAF_STEPS:
            _log.warning(
                "step %d: %.0f %% of the update since the start has reached the policy that is "
                "served (sync/arrived), and %.2g times as much noise (sync/noise): weights move by "
                "less than half a step of %s, and rounding leaves them where they were; %s or a "
                "larger optimizer.learning_rate (said once, until it is above %g)",
                step,
                100 * arrived,
                metrics["sync/noise"],
                *self._deaf_to(),
                DEAF,
            )
        return {"optim/skipped_steps": float(self._skipped)}

    def _deaf_to(self) -> tuple[str, str]:
        """The grid that an update does not leave, and what to do."""
        if self._dtype == "float32":
            return "the format that they are quantized to", (
                "where the checkpoint was quantized in it, use a recipe that has weights in it on "
                "both sides, with model.dither"
            )
        return self._dtype, 'set model.dither = "auto", compute_dtype = "float32"'

    def _advice(self, roles: list[str]) -> str:
        if self._dtype != "float16" or "loss" not in roles:
            return ""
        return (
            ", and float16 holds nothing above 65504: if activations exceed it, set "
            'compute_dtype to "bfloat16"'
        )
