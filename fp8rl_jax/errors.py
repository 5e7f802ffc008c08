"""The one exception that a user is meant to read."""


class UserError(Exception):
    """A fault in what the user gave: one line that names the key, file or tensor and says what to
    do.

    The command line prints the message without a traceback and exits with status 2.
    """
