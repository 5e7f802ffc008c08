"""Checkpoints: the whole training state, written atomically by Orbax, the newest whole one found again.

Orbax commits a checkpoint by renaming its directory, so a run killed while it saves leaves the earlier ones whole. A newest
checkpoint that cannot be read (a truncated or deleted file) is passed over with a warning for the one before it; a run never
starts anew because of one.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from fp8rl_jax.config.run import CheckpointConfig
from fp8rl_jax.errors import UserError

_log = logging.getLogger("fp8rl")


class Checkpoints:
    """The checkpoints of one run directory.

    Args:
        directory: <run>/checkpoints.
        config: how many are kept.
    """

    def __init__(self, directory: Path, config: CheckpointConfig):
        self.directory = directory.absolute()
        options = ocp.CheckpointManagerOptions(max_to_keep=max(config.keep, 2), enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(self.directory, options=options)

    def steps(self) -> list[int]:
        """Steps that have a committed checkpoint, oldest first."""
        return sorted(self._manager.all_steps(read=True))

    def save(self, step: int, tree: Any) -> None:
        """Writes the arrays of `tree`.

        Raises:
            UserError: the disk is full or not writable; earlier checkpoints are whole.
        """
        try:
            self._manager.save(step, args=ocp.args.StandardSave(_by_name(tree)), force=True)
            self._manager.wait_until_finished()
        except (OSError, ValueError) as error:
            raise UserError(f"{self.directory}: checkpoint of step {step} could not be written ({_line(error)})") from error

    def restore(self, like: Any) -> tuple[int, Any]:
        """The newest readable checkpoint, as (step, tree shaped, typed and sharded like `like`).

        Raises:
            UserError: there is none, or none can be read.
        """
        steps = self.steps()
        if not steps:
            raise UserError(f"{self.directory}: no checkpoint to resume from; start without --resume")
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, _by_name(like))
        damaged = []
        for step in reversed(steps):
            try:
                named = self._manager.restore(step, args=ocp.args.StandardRestore(target))
            except (OSError, ValueError, KeyError) as error:
                _log.warning(
                    "%s: checkpoint of step %d cannot be read (%s); trying the one before", self.directory, step, _line(error)
                )
                damaged.append(step)
                continue
            self._set_aside(damaged)
            return step, jax.tree.unflatten(jax.tree.structure(like), list(named.values()))
        raise UserError(f"{self.directory}: none of the checkpoints {steps} can be read")

    def _set_aside(self, steps: list[int]) -> None:
        """Moves damaged checkpoints out of the way of the steps that will be saved again; nothing is deleted."""
        for step in steps if jax.process_index() == 0 else ():
            kept = self.directory.with_name(f"checkpoint-{step}-damaged-{time.time_ns()}")
            (self.directory / str(step)).rename(kept)
            _log.warning("damaged checkpoint of step %d kept in %s", step, kept)
        if steps:
            self._manager.reload()

    def close(self) -> None:
        self._manager.close()


def _by_name(tree: Any) -> dict[str, Any]:
    """Leaves under names that sort as the tree's order."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {f"{i:05d}{jax.tree_util.keystr(path)}".replace("/", "_"): leaf for i, (path, leaf) in enumerate(leaves)}


def _line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
