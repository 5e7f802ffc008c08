"""Runs `fp8rl train` on the devices that there are, alone or joined to other processes.

Arguments: coordinator, number of processes, number of this one, run file, run directory, then flags
of `fp8rl train`. Prints the names in the run directory that this process wrote to, as JSON, and
exits like `fp8rl train`.
"""

import json
import os
import sys
from pathlib import Path

from fp8rl_jax.cli.main import main

coordinator, processes, process, run_file, output, *flags = sys.argv[1:]
if processes != "1":
    flags += [
        "--mesh.coordinator",
        coordinator,
        "--mesh.num-processes",
        processes,
        "--mesh.process-id",
        process,
    ]
written = set()


def note_writes(event: str, arguments: tuple) -> None:
    if event != "open" or not isinstance(arguments[0], str | os.PathLike):
        return
    name, mode, flags = arguments
    if set(mode or "") & set("wax+") or (mode is None and flags & (os.O_WRONLY | os.O_RDWR)):
        path = Path(name).absolute()
        if path.is_relative_to(output):
            written.add(path.relative_to(output).parts[0].removesuffix(".partial"))


sys.addaudithook(note_writes)
code = main(["train", run_file, "--output", output, *flags])
print(json.dumps({"written": sorted(written)}))
sys.exit(code)
