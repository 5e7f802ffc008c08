"""Checkpoints: the whole training state, written atomically by Orbax, the newest whole one found
again.

Orbax commits a checkpoint by renaming its directory, so a run killed while it saves leaves the
earlier ones whole; they are removed only when the new one is flushed to the disk. Beside the arrays
stand their checksums, which are computed on the devices, and the settings that they belong to. A
newest checkpoint that cannot be read, or that reads as something else than was saved (a truncated,
deleted or altered file), is passed over with a warning for the one before it and set aside; a run
never starts anew because of one.

The newest checkpoints stay, and with them the last known good one: the newest from which a step has
sampled and learned without a value that is not finite.

Each process writes and reads the shards of its own devices, in one directory that all of them see.
All call the same methods together, and agree on which checkpoint can be read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from fp8rl_jax.config.training import CheckpointConfig
from fp8rl_jax.durable import sync_tree, write_durably
from fp8rl_jax.errors import UserError, switch
from fp8rl_jax.parallel import checksums, gather_text, is_main_process, shared_faults, to_host

_log = logging.getLogger("fp8rl")
_DIGITS = 5  # of the number in front of a name
_ITEM = "default"
_ABOUT = "about"
_GOOD = "last_known_good.json"
_NEWER = (".masters[", ".served[")
"""Parts of the names of arrays that older checkpoints do not have (rollout.arrival.Start): they
stay what `like` has."""
_FORMAT = 1
"""Of what stands beside the arrays and of their names; a later one is not guessed at."""
_SPARE = 1.1
"""Room that must be free, as a multiple of the arrays' bytes."""


class Checkpoints:
    """The checkpoints of one run directory.

    Args:
        directory: <run>/checkpoints.
        config: how many are kept.

    Raises:
        UserError: the directory cannot be made or written.
    """

    def __init__(self, directory: Path, config: CheckpointConfig):
        self.directory = directory.absolute()
        self._keep = max(config.keep, 2)
        # nothing is removed by the manager: what is behind, and known to be good, it cannot know
        options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
        try:
            self._manager = ocp.CheckpointManager(self.directory, options=options)
        except OSError as error:
            raise UserError(
                f"{self.directory}: cannot be written ({_line(error)}); choose another output"
            ) from error

    def steps(self) -> list[int]:
        """List the steps that have a committed checkpoint, oldest first."""
        self._manager.reload()
        return sorted(self._manager.all_steps())

    def agreed(self) -> list[int]:
        """Give `steps`, which all processes have to see alike; they call it together.

        Raises:
            UserError: on all of them: one sees others than process 0.
        """
        steps = self.steps()
        seen = gather_text(json.dumps(steps))
        for process, other in enumerate(seen):
            if other != seen[0]:
                raise UserError(
                    f"{self.directory}: process 0 sees the checkpoints of steps {seen[0]}, and "
                    f"process {process} those of {other}: give all processes one output, on a file "
                    "system that they share; if they do, wait until its caches agree, and start "
                    "again"
                )
        return steps

    @property
    def known_good(self) -> int | None:
        """The newest checkpoint from which a step went well; None where there is none yet."""
        try:
            return int(json.loads((self.directory / _GOOD).read_text())["step"])
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def mark_good(self) -> None:
        """Note that a step went well that follows the newest checkpoint."""
        newest = max(self._manager.all_steps(), default=None)
        if is_main_process() and newest is not None and newest != self.known_good:
            try:
                write_durably(self.directory / _GOOD, json.dumps({"step": newest}) + "\n")
            except OSError as error:
                raise UserError(f"{self.directory}: cannot be written ({_line(error)})") from error

    def check_space(self, tree: Any) -> None:
        """Check that one more checkpoint fits.

        Raises:
            UserError: it does not.
        """
        needed = int(_SPARE * sum(leaf.nbytes for leaf in jax.tree.leaves(tree)))
        if (free := shutil.disk_usage(self.directory).free) < needed:
            raise UserError(
                f"{self.directory}: a checkpoint needs {_size(needed)}, and {_size(free)} are "
                "free; free some space, or choose another output"
            )

    def save(self, step: int, tree: Any, settings: Mapping[str, Any] | None = None) -> None:
        """Write the arrays of `tree`; then remove what is neither new nor the last known good.

        Args:
            settings: what they belong to, as plain JSON; `restore` gives them to its `agree`.

        Raises:
            UserError: the disk is full or not writable; earlier checkpoints are whole.
        """
        sums = to_host(checksums(_by_name(tree)))
        about = {
            "checksums": dict(zip(_by_name(tree), sums.tolist(), strict=True)),
            "settings": dict(settings or {}),
            "format": _FORMAT,
        }
        items = ocp.args.Composite(
            **{
                _ITEM: ocp.args.StandardSave(_by_name(tree)),
                _ABOUT: ocp.args.JsonSave(about | {"sha256": _digest(about)}),
            }
        )
        with shared_faults():
            if is_main_process():
                self.check_space(tree)
        with self._written(step):
            self._manager.save(step, args=items, force=True)
            self._manager.wait_until_finished()
        with shared_faults(), self._written(step):
            if is_main_process():
                sync_tree(self.directory / str(step))
                self._remove_old()
        self._manager.reload()

    def restore(
        self,
        like: Any,
        agree: Callable[[int, dict[str, Any]], None] | None = None,
        set_aside: bool = True,
    ) -> tuple[int, Any]:
        """Read the newest readable checkpoint: (step, tree shaped and sharded like `like`).

        Args:
            agree: called with a checkpoint's step and settings before it is read; what it raises
                ends the search.
            set_aside: move damaged checkpoints that are newer out of the way of steps to come.

        Raises:
            UserError: as `agreed`; there is none, none can be read, or the newest readable one
                holds other arrays than `like`: it was written by a run of another model or with
                other optimizer settings.
        """
        steps = self.agreed()
        if not steps:
            raise UserError(
                f"{self.directory}: no checkpoint to resume from; start without {switch('resume')}"
            )
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, _by_name(like))
        for step in reversed(steps):
            try:
                with shared_faults():
                    about = self._about(step)
            except UserError as error:
                _log.warning("%s; trying the one before", error)
                continue
            if (written := about.get("format", 1)) > _FORMAT:
                raise UserError(
                    f"{self.directory}: checkpoint of step {step} was written by a later version "
                    f"of fp8rl_jax (format {written}, here {_FORMAT}); resume with that version"
                )
            if agree is not None:
                # before the arrays: if they have other shapes, another setting is why
                agree(step, about.get("settings", {}))
            try:
                with shared_faults():
                    kinds = self._kinds(step)
                    newer = {
                        name: x
                        for name, x in _by_name(like).items()
                        if name[_DIGITS:] not in kinds and any(part in name for part in _NEWER)
                    }
                    wanted = {name: x for name, x in target.items() if name not in newer}
                    difference = _difference(kinds, wanted)
                    named = {} if difference else self._read(step, wanted)
                if not difference:
                    self._verify(step, named, about)
            except UserError as error:
                _log.warning("%s; trying the one before", error)
                continue
            if difference:
                raise UserError(
                    f"{self.directory}: checkpoint of step {step} is of another kind of run: "
                    f"{difference}; resume with the "
                    "model, compute_dtype, recipe (master, weight_gradient, first_moment, "
                    "second_moment), trainer.loss_scale and rollout.paged.extra_prompts that it "
                    "was written with"
                )
            if set_aside:
                self._set_aside([later for later in steps if later > step])
            leaves = [(named | newer)[name] for name in target]
            return step, jax.tree.unflatten(jax.tree.structure(like), leaves)
        raise UserError(f"{self.directory}: none of the checkpoints {steps} can be read")

    def _about(self, step: int) -> dict[str, Any]:
        """Checksums and settings; nothing where a checkpoint is older than these."""
        path = self._manager.directory / str(step) / _ABOUT / "metadata"
        try:
            if not path.parent.exists() and (self._manager.directory / str(step) / _ITEM).is_dir():
                _log.warning("%s: checkpoint of step %d has no checksums", self.directory, step)
                return {}
            about = json.loads(path.read_text())
            if about.pop("sha256") != _digest(about):
                raise ValueError("its checksums are damaged")
            return about
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise self._damaged(step, error) from error

    def _verify(self, step: int, named: dict[str, Any], about: dict[str, Any]) -> None:
        """Compare what was read with the checksums of what was saved."""
        if not about:
            return
        found = to_host(checksums(named)).tolist()
        for name, sums in zip(named, found, strict=True):
            if sums != about["checksums"].get(name):
                reason = f"{name[_DIGITS:].lstrip('.')} is not what was saved: its checksum differs"
                raise self._damaged(step, ValueError(reason))

    def _remove_old(self) -> None:
        kept = {*self.steps()[-self._keep :], self.known_good}
        for step in self.steps():
            if step not in kept:
                # under another name first: a kill leaves no half of one
                going = self.directory / f".removed-{step}-{time.time_ns()}"
                (self.directory / str(step)).rename(going)
                shutil.rmtree(going)

    @contextlib.contextmanager
    def _written(self, step: int) -> Generator[None]:
        """Turns what Orbax and the operating system raise into a line."""
        try:
            yield
        except (OSError, ValueError) as error:
            raise UserError(
                f"{self.directory}: checkpoint of step {step} could not be written "
                f"({_line(error)}); earlier ones are whole"
            ) from error

    def _damaged(self, step: int, error: BaseException) -> UserError:
        return UserError(
            f"{self.directory}: checkpoint of step {step} cannot be read ({_line(error)})"
        )

    def _kinds(self, step: int) -> dict[str, str]:
        """Dtype and shape of each array of a checkpoint, by name."""
        try:
            saved = dict(
                ocp.StandardCheckpointHandler()
                .metadata(self._manager.directory / str(step) / _ITEM)
                .tree
            )
        except Exception as error:  # as in _read
            raise self._damaged(step, error) from error
        return _kinds(saved)

    def _read(self, step: int, target: Any) -> dict[str, Any]:
        # not the manager's restore: it ends in a collective, which a process that met a damaged
        # file would not reach
        handler = ocp.StandardCheckpointHandler()
        try:
            return handler.restore(
                self._manager.directory / str(step) / _ITEM, args=ocp.args.StandardRestore(target)
            )
        except Exception as error:  # a plain one is what Orbax makes of every fault in a shard
            raise self._damaged(step, error.__cause__ or error) from error

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


def difference(tree: Any, like: Any) -> str:
    """Say the first array that a tree has otherwise than another; "" where they are alike."""
    return _difference(_kinds(_by_name(tree)), _by_name(like))


def _by_name(tree: Any) -> dict[str, Any]:
    """Leaves under names that sort as the tree's order."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        f"{i:0{_DIGITS}d}{jax.tree_util.keystr(path)}".replace("/", "_"): leaf
        for i, (path, leaf) in enumerate(leaves)
    }


def _kinds(tree: Mapping[str, Any]) -> dict[str, str]:
    return {name[_DIGITS:]: f"{x.dtype}{list(x.shape)}" for name, x in tree.items()}


def _difference(has: dict[str, str], target: Mapping[str, Any]) -> str:
    """The first array that a checkpoint has otherwise than `target`; "" where it has what is
    wanted."""
    wanted = _kinds(target)
    for name in dict.fromkeys([*wanted, *has]):
        if (one := has.get(name, "nothing")) != (other := wanted.get(name, "nothing")):
            return f"it has {one} where {other} is wanted, in {name.lstrip('.')}"
    return ""


def _line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__


def _digest(about: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
