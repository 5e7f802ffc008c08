"""The two exceptions that a user is meant to read, and how their messages name many things."""

from collections.abc import Sequence

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


def listing(names: Sequence[str], shown: int = 5) -> str:
    """Name the first few of a list, and count the rest."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
