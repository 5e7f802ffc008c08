"""Where the packages are that compile for a GPU without one: see toolchain.txt. This environment,
or a folder of their own."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

VARIABLE = "FP8RL_CUDA_TOOLCHAIN"
FOLDER = Path(__file__).resolve().parents[2] / ".cache" / "cuda"
PACKAGES = Path(__file__).with_name("toolchain.txt")


def missing() -> str:
    """Why nothing can be compiled here; empty where it can."""
    if _folder() is None:
        return (
            f"nothing to compile for Hopper with: make toolchain, or {VARIABLE} naming a "
            f"folder of what {PACKAGES.name} lists"
        )
    return ""


def activate() -> None:
    """Starts this program anew where it does not see the packages yet: JAX looks for them as it is
    imported."""
    folder = _folder()
    if folder is None:
        raise SystemExit(missing())
    assembler = str(folder / "nvidia" / "cu13" / "bin")
    path = os.environ["PATH"].split(os.pathsep)
    if path[0] == assembler:
        return
    os.environ["PATH"] = os.pathsep.join([assembler, *path])  # Mosaic runs the first ptxas on it
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [*filter(None, [os.environ.get("PYTHONPATH")]), str(folder)]
    )
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _folder() -> Path | None:
    named = os.environ.get(VARIABLE)
    for folder in [Path(named)] if named else [FOLDER]:
        if (folder / "jax_plugins" / "xla_cuda13").is_dir():
            return folder
    spec = None if named else importlib.util.find_spec("jax_plugins")
    for place in spec.submodule_search_locations if spec else ():
        if (Path(place) / "xla_cuda13").is_dir():
            return Path(place).parent
    return None
