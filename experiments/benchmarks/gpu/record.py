"""The output folder: one JSON file a part, written after every job, and the cache of compiled
programs beside them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Any

from experiments.benchmarks.gpu.figures import summary
from experiments.benchmarks.gpu.jobs import PARTS, Job
from experiments.benchmarks.gpu.timing import METHOD
from experiments.record import read, write
from fp8rl_jax.errors import UserError
from pallas_kernels.check.sources import fingerprint

MOST_CACHE_BYTES = 40 * 2**20


class Folder:
    """What the folder has of all parts, and what it lacks.

    Args:
        jobs: of each part.
        counts: it is measured on a card.

    Raises:
        UserError: the folder cannot be written, a file in it cannot be read, or was measured in the
            other size.
    """

    def __init__(self, path: Path, jobs: dict[str, Sequence[Job]], counts: bool):
        self.path, self.jobs, self.counts = path, jobs, counts
        self.records: dict[str, dict[str, Any]] = {}
        self._sources = {
            (part, job.label): fingerprint(job.sources) for part in jobs for job in jobs[part]
        }
        self._begun: set[str] = set()
        self._lock = Lock()
        _check_writable(path)
        for part in PARTS:
            if (record := read(self._file(part))) is not None:
                if not {"results", "failed", "outdated", "commands"} <= record.keys():
                    raise UserError(
                        f"--output: {self._file(part)} is no record of this command; give "
                        "another folder"
                    )
                self._same(part, record, "counts", counts)
                self.records[part] = self._current(part, record)

    @property
    def cache(self) -> Path:
        return self.path / "cache"

    def left(self, part: str, first: bool = False) -> list[Job]:
        """The jobs without a result; with `first`, of those that are wanted before all others."""
        record = self.records.get(part, {"results": {}, "failed": {}})
        done = record["results"].keys() | record["failed"].keys()
        return [
            job for job in self.jobs[part] if job.label not in done and (job.first or not first)
        ]

    def check_device(self, device: str) -> None:
        """Refuse a device that is not the folder's.

        Raises:
            UserError: a part was measured on another one.
        """
        for part, record in self.records.items():
            self._same(part, record, "device", device)

    def store(
        self, part: str, job: Job, outcome: dict[str, Any], identity: dict[str, Any], seconds: float
    ) -> None:
        """Write what came of a job.

        Args:
            outcome: "result", or the reason why there is none as "failed".
            identity: what its process says of itself: "device" and "facts".
        """
        with self._lock:
            record = self.records.setdefault(part, self._new(part))
            self._begin(part, record, identity)
            about = {
                "sources": self._sources[part, job.label],
                "command": len(record["commands"]) - 1,
                "wall_seconds": seconds,
            }
            if "result" in outcome:
                record["results"][job.label] = outcome["result"] | about
            else:
                record["failed"][job.label] = {"reason": outcome["failed"]} | about
            self._write(part)

    def note_card(self, parts: Iterable[str], state: dict[str, Any]) -> None:
        """Add clocks, power and temperature of a time in which jobs of the parts were timed."""
        with self._lock:
            for part in self._begun.intersection(parts):
                self.records[part]["commands"][-1]["card"].append(state)
                self._write(part)

    def log(self, title: str, text: str) -> None:
        """Add to `workers.log`, which is for whoever looks for a fault."""
        with self._lock, (self.path / "workers.log").open("a") as file:
            file.write(f"==== {title}\n{text.rstrip()}\n")

    def trim_cache(self, most: int = MOST_CACHE_BYTES) -> None:
        """Delete the oldest programs of a cache that is too large to travel.

        Those are of jobs that were done long before.
        """
        files = sorted(
            (file for file in self.cache.rglob("*") if file.is_file()),
            key=lambda file: file.stat().st_mtime,
        )
        size = sum(file.stat().st_size for file in files)
        for file in files:
            if size <= most:
                return
            size -= file.stat().st_size
            file.unlink()

    def _begin(self, part: str, record: dict[str, Any], identity: dict[str, Any]) -> None:
        if part not in self._begun:
            started = datetime.now(UTC).isoformat(timespec="seconds")
            record["device"] = identity["device"]
            record["commands"].append({"started": started, **identity["facts"], "card": []})
            self._begun.add(part)

    def _write(self, part: str) -> None:
        record = self.records[part]
        record["left"] = [job.label for job in self.left(part)]
        record["complete"] = not record["left"]
        write(self._file(part), record)
        write(self.path / "figures.json", {"figures": summary(self.records)})

    def _current(self, part: str, record: dict[str, Any]) -> dict[str, Any]:
        """The record without the results of sources that have changed since: those are put aside,
        the last of each label."""
        for kind in ("results", "failed"):
            for label, outcome in list(record[kind].items()):
                if outcome["sources"] != self._sources.get((part, label)):
                    record["outdated"][label] = record[kind].pop(label)
        record["left"] = [
            label
            for job in self.jobs[part]
            if (label := job.label) not in {*record["results"], *record["failed"]}
        ]
        return record

    def _new(self, part: str) -> dict[str, Any]:
        return {
            "part": part,
            "device": None,
            "counts": self.counts,
            "complete": False,
            "method": METHOD,
            "commands": [],
            "results": {},
            "failed": {},
            "outdated": {},
            "left": [],
        }

    def _same(self, part: str, record: dict[str, Any], key: str, value: Any) -> None:
        if record.get(key) != value:
            has = f"has {key} {record.get(key)!r}, and this is {value!r}"
            raise UserError(f"--output: {self._file(part)} {has}; give another folder")

    def _file(self, part: str) -> Path:
        return self.path / f"{part}.json"


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"--output: {folder} cannot be written ({error.strerror})") from None
