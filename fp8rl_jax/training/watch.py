"""What a person must be told while a run goes on: skipped updates, failed rewards, groups that
teach nothing."""

from __future__ import annotations

import logging

from fp8rl_jax.config.training import TrainerConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.parallel import is_main_process
from fp8rl_jax.tasks.scores import Scores

_log = logging.getLogger("fp8rl")


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
        self._narrow = compute_dtype == "float16"
        self._skipped = self._in_a_row = self._failed_in_a_row = 0
        self._warned_constant = False

    def see(self, step: int, metrics: dict[str, float], scores: Scores) -> dict[str, float]:
        """Takes one step's metrics and the scores of all that it sampled.

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
        return {"optim/skipped_steps": float(self._skipped)}

    def _advice(self, roles: list[str]) -> str:
        if not self._narrow or "loss" not in roles:
            return ""
        return (
            ", and float16 holds nothing above 65504: if activations exceed it, set "
            'compute_dtype to "bfloat16"'
        )
