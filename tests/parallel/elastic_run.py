"""Run by test_elastic.py on 4 devices: a run of two steps; and one that is stopped behind the first
and goes on on another mesh.

Arguments: run file, directory. Prints what the start on the other mesh has said, as JSON.
"""

import json
import logging
import shutil
import sys
from pathlib import Path

from fp8rl_jax.cli.main import main

run_file, directory = sys.argv[1], Path(sys.argv[2])
said: list[str] = []


class Kept(logging.Handler):
    """Keeps what is logged."""

    def emit(self, record: logging.LogRecord) -> None:
        said.append(record.getMessage())


def go(name: str, *flags: str) -> None:
    assert main(["train", run_file, "--output", str(directory / name), *flags]) == 0


FSDP = ("--mesh.data", "1", "--mesh.fsdp", "4")
go("first", *FSDP, "--trainer.steps", "1")
go("whole", *FSDP)
shutil.copytree(directory / "first", directory / "moved")
logging.getLogger("fp8rl").addHandler(Kept())
go("moved", "--mesh.data", "2", "--mesh.tensor", "2", "--resume")
print(json.dumps({"said": said}))
