"""What a person must be told while a run goes on: skipped updates, failed rewards, groups that
teach nothing, sides that disagree; what is counted of its stability; and, of a session that no run
surrounds, too, updates that do not arrive."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from fp8rl_jax.config.training import TrainerConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.parallel import is_main_process
from fp8rl_jax.rollout.arrival import DEAF, JUMP
from fp8rl_jax.tasks.scores import Scores

_log = logging.getLogger("fp8rl")


ALARM = 1.05
"""The mean of exp |d log p| above which NeMo RL looks closer. One token far from the rest is enough
for it, so that one step alone says nothing."""


_DEAF_STEPS = 3
"""So many steps in a row, as the first ones move the masters little."""


SPIKE = 7.0
"""Standard deviations above the middle of the values before."""
WINDOW, LEAST = 100, 32
"""Values before that a spike is measured against: at most, and at least."""


def middle(values: np.ndarray) -> tuple[float, float]:
    """Find the median, and a standard deviation that a few spikes among them do not move: 1.4826
    times the median absolute deviation, that of normal numbers."""
    median = float(np.median(values))
    return median, 1.4826 * float(np.median(np.abs(values - median)))


class Spikes:
    """Counts the values of a series that stand far above those before them.

    A spike is a value SPIKE standard deviations or more above the median of the last WINDOW ones:
    OLMo 2's spike score (arXiv 2501.00656), with a median in place of its mean over 1,000 steps, so
    that short runs and windows with spikes in them are measured alike, and upward alone. Of normal
    noise 7 in a million values are called spikes by the fewest values that there may be, and 1 in
    100 million by a whole window. Where more than half of a window is one number, it tells no
    spread, and nothing is counted. What is not finite is a skipped update, and no part of it.

    Args:
        logarithms: compare those, of what is positive and varies by factors.
    """

    def __init__(self, logarithms: bool = False):
        self._logarithms, self._before = logarithms, deque[float](maxlen=WINDOW)
        self.count = 0

    def see(self, value: float) -> bool:
        """Take the next value; says whether it is a spike."""
        if self._logarithms:
            value = math.log(value) if value > 0 else math.nan
        if not math.isfinite(value):
            return False
        found = False
        if len(self._before) >= LEAST:
            median, spread = middle(np.asarray(self._before))
            found = spread > 0 and value >= median + SPIKE * spread
        self._before.append(value)
        self.count += found
        return found


class Stability:
    """Counts what FP8 training is compared with 16 bits by (arXiv 2411.08719): spikes of loss and
    gradient norm, and of supervised training whether its loss has diverged.

    It has diverged where its last LEAST values are SPIKE standard deviations or more above the best
    LEAST values in a row before, or above the first one of all: a spike that it has not come back
    from. An update that is not finite counts as one of infinite loss. In reinforcement learning it
    has no level to diverge from: name an accuracy in [collapse] of an ablation.

    Args:
        supervised: whether the loss is one that training lowers.
    """

    def __init__(self, supervised: bool = False):
        self._series = {"loss": Spikes(), "optim/grad_norm": Spikes(logarithms=True)}
        self._supervised = supervised
        self._first, self._best = math.nan, (math.inf, 0.0)
        self._last = deque[float](maxlen=LEAST)

    def see(self, metrics: Mapping[str, float | None]) -> dict[str, float]:
        """Take one step's metrics.

        Args:
            metrics: of the step, or of a row that a run wrote of it, where None is not finite.

        Returns:
            `stability/loss_spikes` and `stability/grad_norm_spikes`, the number of each since the
            run began; of supervised training `stability/diverged`, 1 where it has.
        """
        values = {name: metrics[name] for name in self._series if name in metrics}
        values = {name: math.nan if x is None else float(x) for name, x in values.items()}
        for name, value in values.items():
            self._series[name].see(value)
        found = {
            f"stability/{name.rpartition('/')[2]}_spikes": float(self._series[name].count)
            for name in values
        }
        if not self._supervised:
            return found
        return found | {"stability/diverged": float(self._diverged(values["loss"]))}

    def _diverged(self, loss: float) -> bool:
        loss = loss if math.isfinite(loss) else math.inf
        if math.isnan(self._first):
            self._first = loss
        self._last.append(loss)
        if len(self._last) < LEAST:
            return False
        last = np.asarray(self._last)
        if np.isinf(np.median(last)):
            return True
        median, spread = middle(last)
        best, spread_of_best = self._best
        if median < best:
            self._best = median, spread
        return median > self._first + SPIKE * spread or median > best + SPIKE * spread_of_best


class ArrivalWatch:
    """Says when updates do not arrive at the policy that is served.

    Args:
        compute_dtype: of the session, for the message.
        adapted: whether adapters are what is trained.
    """

    def __init__(self, compute_dtype: str = "bfloat16", adapted: bool = False):
        self._dtype, self._adapted = compute_dtype, adapted
        self._deaf, self._jumped = 0, False

    def see(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take one step's sync/*, where it has any."""
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
        if arrived > JUMP and not self._jumped:
            self._jumped = True
            _log.warning(
                "step %d: the policy that is served has moved by %.2g times the update since the "
                "start (sync/arrived): weights of a bfloat16 checkpoint that lie on the border of "
                "two numbers of the format cross it at once, whatever the learning rate; where "
                'both sides quantize the float32 masters, model.dither = "auto" takes them off it '
                "(said once; it is a smaller part with every update)",
                step,
                arrived,
            )

    def _deaf_to(self) -> tuple[str, str]:
        """The grid that an update does not leave, and what to do."""
        if self._dtype == "float32":
            return "the format that they are quantized to", (
                "where the checkpoint was quantized in it, use a recipe that has weights in it on "
                "both sides, with model.dither"
            )
        if self._adapted:  # merged into a base of 16 bits
            return self._dtype, 'set compute_dtype = "float32"'
        return self._dtype, 'set model.dither = "auto", compute_dtype = "float32"'


class Watch:
    """Reads each step's metrics, warns, and stops a run that no longer learns.

    Args:
        trainer: how many faults in a row stop the run; a run of fewer steps stops when rewards
            failed in all of them.
        checkpoints: where the last whole checkpoint lies, for the message.
        compute_dtype: of the run, for the message.
        log: where what rewards print stands, for the message.
        supervised: whether the loss is one that training lowers.
    """

    def __init__(
        self,
        trainer: TrainerConfig,
        checkpoints: object,
        compute_dtype: str = "bfloat16",
        log: object = "rewards.log",
        supervised: bool = False,
    ):
        self._abort_after, self._checkpoints, self._log = (
            trainer.abort_after_skips,
            checkpoints,
            log,
        )
        self._abort_after_failed = min(trainer.abort_after_failed_rewards, trainer.steps)
        self._dtype = compute_dtype
        self._skipped = self._in_a_row = self._failed_in_a_row = 0
        self._warned_constant, self._apart = False, 0
        self._stability = Stability(supervised)

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
            resumed; and what `Stability` counts.

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
        found = self._stability.see(metrics) | {"optim/skipped_steps": float(self._skipped)}
        if scores is None:
            return found
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
        return found

    def recall(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Count what a run wrote of its steps before it was resumed: of supervised training every
        tenth."""
        for row in rows:
            self._stability.see(row)

    def _advice(self, roles: list[str]) -> str:
        if self._dtype != "float16" or "loss" not in roles:
            return ""
        return (
            ", and float16 holds nothing above 65504: if activations exceed it, set "
            'compute_dtype to "bfloat16"'
        )
