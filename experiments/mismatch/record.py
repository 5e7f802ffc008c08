"""results.json: what all runs left, kept from one call to the next."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from experiments.benchmarks.machine import facts
from experiments.mismatch.runs import settings
from experiments.mismatch.summary import summarize
from experiments.mismatch.variants import RUN_FILES, VARIANTS
from fp8rl_jax.errors import UserError


class Record:
    """The file, read if it is there.

    Raises:
        UserError: it is damaged, or of other run files than those of today.
    """

    def __init__(self, path: Path):
        self.path, self.settings = path, settings()
        self.variants: dict[str, Any] = {}
        if not path.exists():
            return
        try:
            before = json.loads(path.read_text())
            self.variants, settings_before = before["variants"], before["settings"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: not a record of this study ({error}); move it away") from None
        keys = sorted(self.settings | settings_before)
        if changed := [key for key in keys if self.settings.get(key) != settings_before.get(key)]:
            raise UserError(f"{path}: was made with another {', '.join(changed)} in the run files; move it away to start anew")

    def add(self, variant: str, seed: int, run: dict[str, Any]) -> None:
        """Takes a run in, in the place of an earlier one."""
        entry = self.variants.setdefault(variant, {"flags": list(VARIANTS[variant]), "seeds": {}})
        entry["seeds"] = dict(sorted((entry["seeds"] | {str(seed): run}).items(), key=lambda pair: int(pair[0])))

    @property
    def runs(self) -> dict[str, Any]:
        """Variant -> seed -> run, in the order of VARIANTS."""
        return {name: self.variants[name]["seeds"] for name in VARIANTS if name in self.variants}

    def starts(self) -> set[str]:
        """Fingerprints of the policies that runs started from; they should be one."""
        return {run["start"] for runs in self.runs.values() for run in runs.values()}

    def write(self) -> dict[str, Any]:
        """Writes the file and returns the summary in it."""
        summary = summarize(self.runs)
        place = facts()
        content = {
            "command": ["python", "-m", "experiments.mismatch"],
            "versions": place["versions"],
            "machine": place["machine"],
            "run_files": RUN_FILES,
            "settings": self.settings,
            "summary": summary,
            "variants": {name: self.variants[name] for name in self.runs},
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(f"{self.path.name}.partial")
        partial.write_text(_compact(json.dumps(content, indent=1)) + "\n")
        partial.replace(self.path)
        return summary


def _compact(text: str) -> str:
    """Lists of numbers on one line."""
    return re.sub(r"\[[\s\d.,eE+-]*\]", lambda match: re.sub(r"\s+", "", match[0]).replace(",", ", "), text)
