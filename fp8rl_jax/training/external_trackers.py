"""TensorBoard and Weights & Biases, from the extra [trackers]."""

from __future__ import annotations

import importlib
import math
import secrets
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from fp8rl_jax.config.training import TrackingConfig
from fp8rl_jax.errors import UserError


class TensorBoardTracker:
    """Event files; on resume the later steps of earlier files are marked as superseded."""

    def __init__(self, directory: Path, start_step: int = 0) -> None:
        module = _import("tensorboardX", "tracking.tensorboard")
        self._writer = module.SummaryWriter(str(directory), purge_step=start_step or None)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """A Weights & Biases run. Its id is kept in the run directory, so that a resumed run goes on in
    the same charts."""

    def __init__(
        self, directory: Path, config: TrackingConfig, settings: Mapping[str, Any]
    ) -> None:
        wandb = _import("wandb", "tracking.wandb")
        id_file = directory / "wandb_id"
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(4))
        try:
            self._run = wandb.init(
                project=config.wandb_project,
                name=config.wandb_name or directory.name,
                id=id_file.read_text(),
                resume="allow",
                mode=config.wandb_mode,
                dir=str(directory),
                config=dict(settings),
            )
        except wandb.errors.Error as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f'tracking.wandb: {reason} (or set tracking.wandb_mode = "offline")'
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        self._run.log(finite, step=step)

    def close(self) -> None:
        self._run.finish()


def _import(package: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise UserError(
            f"{key}: the package {package} is missing; pip install 'fp8rl_jax[trackers]'"
        ) from None
