"""What a person must be told while a run goes on: skipped updates, failed rewards, groups that teach nothing."""

from __future__ import annotations

import logging

from fp8rl_jax.errors import UserError

_log = logging.getLogger("fp8rl")


class Watch:
    """Reads each step's metrics, warns, and stops a run that no longer learns.

    Args:
        abort_after: updates in a row that may be skipped for non-finite values before the run stops.
        checkpoints: where the last whole checkpoint lies, for the message.
        compute_dtype: of the run, for the message.
    """

    def __init__(self, abort_after: int, checkpoints: object, compute_dtype: str = "bfloat16"):
        self._abort_after, self._checkpoints = abort_after, checkpoints
        self._narrow = compute_dtype == "float16"
        self._skipped = self._in_a_row = 0
        self._warned_constant = False

    def see(self, step: int, metrics: dict[str, float], first_error: str | None) -> dict[str, float]:
        """Takes one step's metrics and the first reward error, if any.

        An update that is skipped while a dynamic loss scale is being found is no fault: it is said, not counted, and does not end
        a row of faults either.

        Returns:
            `optim/skipped_steps`, the number of skipped updates since the run started or was resumed.

        Raises:
            UserError: `abort_after` updates in a row were skipped.
        """
        overflow = metrics.get("optim/overflow", 0.0)
        skipped = metrics["optim/skipped"] > overflow
        self._skipped += skipped
        if overflow:
            _log.info("step %d: gradients overflow with a loss scale of %g; it is lowered", step, metrics["optim/loss_scale"])
        if skipped:
            self._in_a_row += 1
            roles = [name.removeprefix("nonfinite/") for name, v in metrics.items() if name.startswith("nonfinite/") and v > 0]
            _log.warning("step %d: update skipped, non-finite %s%s", step, ", ".join(roles), self._advice(roles))
            if self._in_a_row >= self._abort_after:
                raise UserError(
                    f"{self._in_a_row} updates in a row were skipped for non-finite values (trainer.abort_after_skips)"
                    f"{self._advice(roles)}; the last checkpoint in {self._checkpoints} is whole"
                )
        elif not overflow:
            self._in_a_row = 0
        if first_error:
            _log.warning("step %d: a reward failed: %s", step, first_error)
        if metrics["reward/frac_zero_std"] == 1.0 and not self._warned_constant:
            self._warned_constant = True
            _log.warning("step %d: every group has equal rewards, so this step teaches nothing (said once)", step)
        return {"optim/skipped_steps": float(self._skipped)}

    def _advice(self, roles: list[str]) -> str:
        if not self._narrow or "loss" not in roles:
            return ""
        return ', and float16 holds nothing above 65504: if activations exceed it, set compute_dtype to "bfloat16"'
