"""The notebooks in full, headless: `python -m experiments.notebooks`, or `make night`.

Each is run by Jupyter in a kernel of its own, from top to bottom, in an empty folder. What ran
without a fault and without a warning is recorded in experiments/results/night.json under the
SHA-256 of its code; a test fails where a notebook's code is another than the record's. With --write
the outputs take the place of those in the file. Needs the extra `notebooks`.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.command import run_command
from fp8rl_jax.durable import write_durably
from fp8rl_jax.errors import UserError

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "notebooks"
RECORD = ROOT / "experiments" / "results" / "night.json"


@dataclass(frozen=True)
class Arguments:
    """What to run."""

    names: tuple[str, ...] = ()
    """Beginnings of the notebooks' names; by default all."""
    write: bool = False
    """Keep the outputs."""
    timeout: int = 1800
    """Seconds that a cell may take."""


def notebooks() -> list[Path]:
    """List all, in the order of the course."""
    return sorted(FOLDER.glob("*.ipynb"))


def code_cells(path: Path) -> list[dict[str, Any]]:
    """Read a notebook's cells of code."""
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def fingerprint(path: Path) -> str:
    """Compute the SHA-256 of a notebook's code: not of its text or its outputs."""
    code = ["".join(cell["source"]) for cell in code_cells(path)]
    return hashlib.sha256(json.dumps(code).encode()).hexdigest()


def run(path: Path, timeout: int, write: bool) -> str:
    """Run one notebook.

    Returns:
        "ran", or what went wrong, one line.
    """
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout=timeout,
            kernel_name="python3",
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": folder}},
        )
        try:
            client.execute()
        except CellExecutionError as error:
            return f"{error.ename}: {error.evalue}".splitlines()[0]
        except CellTimeoutError:
            return f"a cell took more than {timeout} s"
    said = list(_warnings(notebook.cells))
    if said:
        return f"warned: {said[0]}"
    if write:
        notebook.metadata["language_info"] = {"name": "python"}
        text = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
        write_durably(path, text.encode())
    return "ran"


def _warnings(cells: list[Any]) -> Iterator[str]:
    for cell in cells:
        for output in cell.get("outputs", ()):
            if output.get("name") == "stderr":
                yield output["text"].strip().splitlines()[-1]


def write_verdicts(kind: str, verdicts: dict[str, str], fingerprints: dict[str, str]) -> None:
    """Put verdicts on what `make night` runs into its record; what is gone leaves it.

    Args:
        kind: notebooks or pages.
        verdicts: of some of them, by name.
        fingerprints: of all that there are.
    """
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    kept = record.get(kind, {}) | {
        name: {"code": fingerprints[name], "verdict": verdict} for name, verdict in verdicts.items()
    }
    record[kind] = {name: kept[name] for name in fingerprints if name in kept}
    write_durably(RECORD, (json.dumps(record, indent=1) + "\n").encode())


def main(arguments: Arguments) -> None:
    """Run notebooks one after the other, and record each."""
    chosen = [
        path for path in notebooks() if not arguments.names or path.stem.startswith(arguments.names)
    ]
    if not chosen:
        raise UserError(
            f"names: no notebook begins with {', '.join(arguments.names)}; there are "
            f"{', '.join(path.stem for path in notebooks())}"
        )
    # kernels import this tree, and how long programs compile is no result
    path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ |= {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "FP8RL_COMPILING_AFTER": "3600",
    }
    failed, known = [], {path.stem: fingerprint(path) for path in notebooks()}
    for path in chosen:
        verdict = run(path, arguments.timeout, arguments.write)
        print(f"{path.stem}: {verdict}", flush=True)
        write_verdicts("notebooks", {path.stem: verdict}, known)
        if verdict != "ran":
            failed.append(path.stem)
    if failed:
        raise UserError(f"did not run: {', '.join(failed)}")


if __name__ == "__main__":
    sys.exit(run_command("notebooks", Arguments, main, sys.argv[1:]))
