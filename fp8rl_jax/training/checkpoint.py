"""Checkpoints: the whole training state, written atomically by Orbax, the newest whole one found
again.

Orbax commits a checkpoint by renaming its directory, so a run killed while it saves leaves the
earlier ones whole. A newest checkpoint that cannot be read (a truncated or deleted file) is passed
over with a warning for the one before it; a run never starts anew because of one.

Each process writes and reads the shards of its own devices, in one directory that all of them see.
All call the same methods together, and agree on which checkpoint can be read.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from fp8rl_jax.config.training import CheckpointConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.parallel import is_main_process, shared_faults

_log = logging.getLogger("fp8rl")
_DIGITS = 5  # of the number in front of a name
_ITEM = "default"  # Orbax's name of what a manager saves alone


class Checkpoints:
    """The checkpoints of one run directory.

    Args:
        directory: <run>/checkpoints.
        config: how many are kept.
    """

    def __init__(self, directory: Path, config: CheckpointConfig):
        self.directory = directory.absolute()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=max(config.keep, 2), enable_async_checkpointing=False
        )
        self._manager = ocp.CheckpointManager(self.directory, options=options)

    def steps(self) -> list[int]:
        """List the steps that have a committed checkpoint, oldest first."""
        self._manager.reload()
        return sorted(self._manager.all_steps())

    def save(self, step: int, tree: Any) -> None:
        """Write the arrays of `tree`.

        Raises:
            UserError: the disk is full or not writable; earlier checkpoints are whole.
        """
        try:
            self._manager.save(step, args=ocp.args.StandardSave(_by_name(tree)), force=True)
            self._manager.wait_until_finished()
        except (OSError, ValueError) as error:
            raise UserError(
                f"{self.directory}: checkpoint of step {step} could not be written ({_line(error)})"
            ) from error

    def restore(self, like: Any) -> tuple[int, Any]:
        """Read the newest readable checkpoint: (step, tree shaped and sharded like `like`).

        Raises:
            UserError: there is none, none can be read, or the newest readable one holds other
                arrays than `like`: it was written by a run of another model or with other optimizer
                settings.
        """
        steps = self.steps()
        if not steps:
            raise UserError(
                f"{self.directory}: no checkpoint to resume from; start without --resume"
            )
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, _by_name(like))
        for step in reversed(steps):
            try:
                with shared_faults():
                    difference = self._difference(step, target)
                    named = {} if difference else self._read(step, target)
            except UserError as error:
                _log.warning("%s; trying the one before", error)
                continue
            if difference:
                raise UserError(
                    f"{self.directory}: checkpoint of step {step} is of another kind of run: "
                    f"{difference}; resume with the "
                    "model, compute_dtype, trainer.loss_scale, optimizer.first_moment, "
                    "optimizer.second_moment and rollout.paged.extra_prompts that it was written "
                    "with"
                )
            self._set_aside([later for later in steps if later > step])
            return step, jax.tree.unflatten(jax.tree.structure(like), list(named.values()))
        raise UserError(f"{self.directory}: none of the checkpoints {steps} can be read")

    def _difference(self, step: int, target: dict[str, Any]) -> str:
        """The first array that a checkpoint has otherwise than `target`; "" where it has what is
        wanted."""
        try:
            saved = dict(
                ocp.StandardCheckpointHandler()
                .metadata(self._manager.directory / str(step) / _ITEM)
                .tree
            )
        except Exception as error:  # as in _read
            raise UserError(
                f"{self.directory}: checkpoint of step {step} cannot be read ({_line(error)})"
            ) from error
        kinds = [
            {name[_DIGITS:]: f"{x.dtype}{list(x.shape)}" for name, x in tree.items()}
            for tree in (saved, target)
        ]
        for name in dict.fromkeys([*kinds[1], *kinds[0]]):
            has, wanted = (kind.get(name, "nothing") for kind in kinds)
            if has != wanted:
                return f"it has {has} where this run has {wanted}, in {name.lstrip('.')}"
        return ""

    def _read(self, step: int, target: Any) -> dict[str, Any]:
        # not the manager's restore: it ends in a collective, which a process that met a damaged
        # file would not reach
        handler = ocp.StandardCheckpointHandler()
        try:
            return handler.restore(
                self._manager.directory / str(step) / _ITEM, args=ocp.args.StandardRestore(target)
            )
        except Exception as error:  # a plain one is what Orbax makes of every fault in a shard
            reason = _line(error.__cause__ or error)
            raise UserError(
                f"{self.directory}: checkpoint of step {step} cannot be read ({reason})"
            ) from error

    def _set_aside(self, steps: list[int]) -> None:
        """Moves damaged checkpoints out of the way of the steps that will be saved again; nothing
        is deleted."""
        with shared_faults():
            for step in steps if is_main_process() else ():
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
    return {
        f"{i:0{_DIGITS}d}{jax.tree_util.keystr(path)}".replace("/", "_"): leaf
        for i, (path, leaf) in enumerate(leaves)
    }


def _line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
