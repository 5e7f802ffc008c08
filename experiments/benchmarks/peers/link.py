"""The peer's end of the line protocol: standard library only, for any Python from 3.11 on.

A peer is a process that waits for a line, does one round, and answers with a line. Settings come as
one JSON argument.

    harness -> peer    {"round": 3}                          one a round; end of input: the peer
                                                             ends
    peer -> harness    {"settings": {...}, "versions": {...}}    once, when the model is loaded
    peer -> harness    {"seconds": 1.25, "tokens": 2048, ...}    one a round

Between two rounds the peer sleeps in `read`, so it takes no processor time from whoever is timed
then.
"""

import json
import os
import platform
import sys
from importlib.metadata import version


class Link:
    """Iterating gives the requests, one a round, until the harness closes its end."""

    def __init__(self):
        self.settings = json.loads(sys.argv[1])
        # Libraries print to standard output; that goes to standard error, and the real one is for
        # answers only.
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        sys.stdout = sys.stderr

    def ready(self, packages, settings):
        """Say that rounds may begin: with which versions of `packages`, and with which settings."""
        versions = {
            "python": platform.python_version(),
            **{name: version(name) for name in packages},
        }
        self.answer({"versions": versions, "settings": settings})

    def __iter__(self):
        for line in iter(sys.stdin.readline, ""):
            yield json.loads(line)

    def answer(self, record):
        """Send one line."""
        self._answers.write(json.dumps(record) + "\n")
