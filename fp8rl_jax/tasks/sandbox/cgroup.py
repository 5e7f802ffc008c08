"""A control group for a worker, in which the kernel itself bounds the memory of its whole tree.

Made where that is this user's right. Of cgroup v2 (docs.kernel.org, "Control Group v2"): where the
memory controller is there for groups below that of the trainer, or may be put there because systemd
delegated it (`Delegate=yes`, which it marks with an attribute); a group that hands controllers on
holds no process, so all that are in it move into one below it first. Of v1: where its memory
hierarchy may be written. Elsewhere there is no group, and the supervisor looks at the memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
_NAME = "fp8rl-reward-"
_LEAF = "fp8rl-run"
"""Where the processes of a delegated group move to."""
_FILES = {
    1: (
        "memory.usage_in_bytes",
        "memory.limit_in_bytes",
        "memory.memsw.limit_in_bytes",
        "memory.oom_control",
    ),
    2: ("memory.current", "memory.max", "memory.swap.max", "memory.events"),
}
"""By version: what is held, its bound, swap's (in v1 that of both together), what was killed."""


@dataclass(frozen=True)
class Group:
    """A group of one worker's, for as long as its supervisor lives."""

    path: Path
    version: int

    def take(self, process: int) -> bool:
        """Put a process in, with all that it starts from now on; says whether that is allowed."""
        with suppress(OSError):
            (self.path / "cgroup.procs").write_text(str(process))
            return True
        return False

    def allow(self, more: int) -> None:
        """Bound the group to so many bytes beyond what it holds now. Swap counts, too."""
        held, bound, swap, _ = _FILES[self.version]
        most = int((self.path / held).read_text()) + more
        (self.path / bound).write_text(str(most))
        if (self.path / swap).exists():  # a kernel may not count it
            (self.path / swap).write_text("0" if self.version == 2 else str(most))

    def has_killed(self) -> bool:
        """Say whether the kernel has killed a process of the group for its memory."""
        try:
            lines = (self.path / _FILES[self.version][-1]).read_text().splitlines()
        except OSError:
            return False
        return any(row[0] == "oom_kill" and int(row[1]) > 0 for row in map(str.split, lines))

    def remove(self, seconds: float = 1.0) -> None:
        """Take the group away when its processes have ended; what cannot be is left, and empty."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                return self.path.rmdir()
            except FileNotFoundError:
                return None
            except OSError:  # a process that has ended is there until it is reaped
                time.sleep(0.01)


def make(root: Path = _ROOT) -> Group | None:
    """Make a group for what this process is about to start.

    Args:
        root: of the file system; another one in tests.

    Returns:
        None where this machine, or this user's rights, have none.
    """
    for base, version in _bases(root):
        try:
            _sweep(base, root)
            group = Group(base / f"{_NAME}{os.getpid()}", version)
            group.path.mkdir()
        except OSError:
            continue
        return group
    return None


def available(root: Path = _ROOT) -> str:
    """Name the version that `make` would use; empty where it makes none."""
    group = make(root)
    if group is None:
        return ""
    group.remove()
    return f"cgroup v{group.version}"


def _bases(root: Path) -> Iterator[tuple[Path, int]]:
    """Yield the groups that one may be made below, and the version of each."""
    for options, mounted in _mounts(root):
        if "cgroup2" in options:
            own = mounted / _own(root, "")
            base = own.parent if own.name == _LEAF else own
            if _hands_down(base):
                yield base, 2
        elif "memory" in options:
            own = mounted / _own(root, "memory")
            # in a container the path may be one of the machine around it
            yield own if own.is_dir() else mounted, 1


def _hands_down(base: Path) -> bool:
    """Say whether groups below one of v2 have memory bounds; a delegated one is set up."""

    def listed(file: str) -> list[str]:
        with suppress(OSError):
            return (base / file).read_text().split()
        return []

    if "memory" in listed("cgroup.subtree_control"):
        return True
    if "memory" not in listed("cgroup.controllers"):
        return False
    with suppress(OSError):
        if os.getxattr(base, "user.delegate") == b"1":
            (base / _LEAF).mkdir(exist_ok=True)
            for process in listed("cgroup.procs"):
                with suppress(ProcessLookupError):
                    (base / _LEAF / "cgroup.procs").write_text(process)
            (base / "cgroup.subtree_control").write_text("+memory")
            return True
    return False


def _mounts(root: Path) -> Iterator[tuple[list[str], Path]]:
    with suppress(OSError):
        for line in (root / "proc/self/mounts").read_text().splitlines():
            _, place, kind, options, *_ = line.split()
            if kind in ("cgroup", "cgroup2"):
                yield [kind, *options.split(",")], root / place.lstrip("/")


def _own(root: Path, controller: str) -> str:
    """Find the path of this process's group, without the leading slash."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path.lstrip("/")
    return ""


def _sweep(base: Path, root: Path) -> None:
    """Take away what supervisors that were killed have left."""
    for path in base.glob(f"{_NAME}*"):
        if not (root / "proc" / path.name.removeprefix(_NAME)).exists():
            with suppress(OSError):
                path.rmdir()
