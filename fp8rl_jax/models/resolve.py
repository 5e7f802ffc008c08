"""What `--model` accepts -> a Hugging Face directory on this machine."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from fp8rl_jax.errors import UserError
from fp8rl_jax.models.export import TOKENIZER_FILES
from fp8rl_jax.models.fetch import FETCHABLE, build_once, cache_dir, fetch, sha256
from fp8rl_jax.models.gguf import convert_gguf

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve_model(spec: str | Path, report: Callable[[str], None] = lambda line: None) -> Path:
    """Finds, converts or downloads a model.

    Args:
        spec: in this order, a Hugging Face directory, a `.gguf` file (converted once, into the
            cache, by its content), a name in `FETCHABLE`, or the id of a model on the Hugging Face
            hub ("org/name").
        report: called with a line about each long step.

    Raises:
        UserError: nothing of the kind exists, or it cannot be read or downloaded.
    """
    path = Path(spec).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"{path}: a model directory must hold config.json")
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise UserError(f"{path}: a model is a Hugging Face directory or a .gguf file")
        return _from_gguf(path, report)
    name = str(spec)
    if name in FETCHABLE:
        return fetch(name, report)
    if path.suffix == ".gguf" or not _HUB_ID.fullmatch(name):
        raise UserError(f"{name}: no such model directory or .gguf file")
    if "/" not in name:
        raise UserError(
            f"{name!r} is no directory, and no name that can be fetched ({', '.join(FETCHABLE)}); "
            f"models on the Hugging Face hub are named org/name"
        )
    report(f"looking for {name} on the Hugging Face hub")
    return _from_hub(name)


def _from_gguf(path: Path, report: Callable[[str], None]) -> Path:
    def build(work: Path) -> None:
        report(f"converting {path.name} to bf16 safetensors")
        convert_gguf(path, work)

    return build_once(cache_dir() / "gguf" / sha256(path)[:16], build)


def _from_hub(name: str) -> Path:
    import huggingface_hub

    wanted = [
        "config.json",
        "generation_config.json",
        "*.safetensors",
        "*.safetensors.index.json",
        *TOKENIZER_FILES,
    ]
    try:
        snapshot = Path(
            huggingface_hub.snapshot_download(name, allow_patterns=wanted, ignore_patterns=["*/*"])
        )
    # the transport library, and so its exceptions, differ between versions
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{name}: no such directory, and the Hugging Face hub did not give it ({reason}); "
            "check the name and the "
            f"network, or download the model elsewhere and give its directory"
        ) from None
    if not (snapshot / "config.json").is_file():
        raise UserError(f"{name}: the model on the hub has no config.json")
    return snapshot
