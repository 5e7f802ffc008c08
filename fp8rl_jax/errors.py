"""The two exceptions that a user is meant to read, and how their messages name things."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager

RESUMABLE = 75
"""Exit status of a run that ended early through no fault of its settings: `--resume` goes on
(EX_TEMPFAIL of sysexits.h), so a restart policy may start it again."""


class UserError(Exception):
    """A fault in what the user gave: one line that names the key, file or tensor and says what to
    do.

    The command line prints the message without a traceback and exits with status 2.
    """


class Interrupted(Exception):
    """A run that ended before its last step because it was told to, or because another of its
    processes is gone: one line that says why, where it stands, and how to go on.

    The command line prints the message without a traceback and exits with status RESUMABLE.
    """


class _Reader:
    """Who reads what is said in this process."""

    types_flags = False


@contextmanager
def for_the_command_line() -> Generator[None]:
    """Spell switches as flags within it, in all threads."""
    before, _Reader.types_flags = _Reader.types_flags, True
    try:
        yield
    finally:
        _Reader.types_flags = before


def switch(key: str) -> str:
    """Spell a boolean setting that is to be turned on: `--resume` to users of the command,
    `resume=True` from Python."""
    return worded(f"--{key.replace('_', '-')}", f"{key}=True")


def worded(command: str, python: str) -> str:
    """Say the one to users of the command, and the other where Python called."""
    return command if _Reader.types_flags else python


def listing(names: Sequence[str], shown: int = 5) -> str:
    """Name the first few of a list, and count the rest."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
