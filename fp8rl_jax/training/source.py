"""Where a policy comes from: the built-in one, a model of files, or what a run has trained.

A run is named by its directory, or by the config.toml in it, wherever a model may be named.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fp8rl_jax import self_test
from fp8rl_jax.caching import cache_dir
from fp8rl_jax.config.files import read_config, run_directory
from fp8rl_jax.config.run import MeshConfig, RunConfig
from fp8rl_jax.config.schema import show
from fp8rl_jax.config.settings import with_settings
from fp8rl_jax.config.training import CheckpointConfig
from fp8rl_jax.errors import UserError, switch
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.policy import Policy, init_policy, to_compute
from fp8rl_jax.parallel import make_mesh
from fp8rl_jax.tokenizers.byte_tokenizer import ByteTokenizer
from fp8rl_jax.tokenizers.tokenizer import Tokenizer
from fp8rl_jax.training.adapters import base_formats
from fp8rl_jax.training.checks import kernel_sizes
from fp8rl_jax.training.record import read_record
from fp8rl_jax.weights import load as files
from fp8rl_jax.weights.hf_config import read_policy_config
from fp8rl_jax.weights.quantized_export import ExportForm
from fp8rl_jax.weights.resolve import resolve_model

_log = logging.getLogger("fp8rl")


def find_model(spec: str | Path, report: Callable[[str], None] = _log.info) -> Path:
    """Find the Hugging Face directory of a model, or of what a run has trained.

    Args:
        spec: as `weights.resolve.resolve_model` takes it; or a run.
        report: called with a line about each long step, and about which weights of a run they are.

    Raises:
        UserError: nothing of the kind exists, it cannot be read, or the run has trained nothing.
    """
    run = run_directory(spec)
    return resolve_model(spec, report) if run is None else _trained(run, report)[0]


def trained_settings(
    run: Path, report: Callable[[str], None] = _log.info
) -> dict[str, dict[str, str | int]]:
    """Give what makes of a run's settings those of its trained policy: tables as TOML has them.

    Adapters stay beside the base, as the run served them.

    Raises:
        UserError: as `find_model`; or its config.toml has faults.
    """
    # whoever reads it is no process of that run
    alone = {"mesh": {"coordinator": "", "num_processes": 0, "process_id": -1}}
    if read_config(RunConfig, run / "config.toml").lora.rank == 0:
        return alone | {"model": {"path": str(run)}}
    return alone | {"lora": {"path": str(_trained(run, report)[1])}}


def load(
    source: str | Path, dtype: jnp.dtype = jnp.float32, **axes: int
) -> tuple[Policy, Tokenizer]:
    """Load a policy and its tokenizer.

    On a Hopper GPU on which nobody has tried the kernels yet, they are tried first, as weights will
    fill its memory.

    Args:
        source: Hugging Face directory, hub id, .gguf file, a name that `fp8rl fetch` knows
            ("smollm2-135m"), or a run directory, for what it trained.
        dtype: of the weights; float32 is what training wants.
        axes: of a mesh, as a Session takes them (fsdp=4, tensor=2): each tensor is read into its
            places there, and no device has to hold a whole model. Default: the default device.

    Raises:
        UserError: nothing is found, a file is damaged, or there is no tokenizer; there is no such
            axis, the devices are more or fewer, or a tensor does not divide by its axes.
    """
    if not isinstance(source, str | Path):
        raise UserError(f"load: expected a model's name or directory, got {show(source)}")
    settings = {f"mesh.{name}": size for name, size in axes.items()}
    config = with_settings(RunConfig(), settings).mesh
    directory = find_model(source)
    self_test.confirm("auto", lambda: kernel_sizes(read_policy_config(directory)))
    return files.load(directory, dtype, mesh=make_mesh(config) if axes else None)


def load_model(config: RunConfig, mesh: Mesh | None = None) -> tuple[Policy, Tokenizer]:
    """Load the policy (float32 masters) that a run begins with, and its tokenizer.

    Args:
        mesh: as of `weights.load.load_policy`.
    """
    if config.model.path:
        directory = find_model(config.model.path)
        held = base_formats(config, read_policy_config(directory))
        return files.load(directory, held=held, mesh=mesh)
    shape = files.byte_policy_config(config.model.init)
    policy: Policy = init_policy(shape, jax.random.key(config.seed))
    return policy, ByteTokenizer()


def model_shape(config: RunConfig) -> PolicyConfig:
    """Find the policy's shape; of its files only config.json is read."""
    if not config.model.path:
        return files.byte_policy_config(config.model.init)
    return read_policy_config(find_model(config.model.path))


def rollout_export(
    spec: str | Path, shape: PolicyConfig, arrays: Mapping[str, np.ndarray]
) -> tuple[str | ExportForm, dict[str, np.ndarray]]:
    """Give what a run's rollout computes with: the form of its weights, and what is quantized.

    Args:
        spec: names a run.
        shape: of its policy.
        arrays: of what it has trained, as `load_policy_arrays` gives them.

    Returns:
        The form for `export_policy`, and the arrays as the rollout quantizes them: rounded to the
        compute dtype, or the masters where the recipe says so.

    Raises:
        UserError: no run, a run of adapters or with a rollout.transform, masters that the run's
            files do not have, or whatever `rollout_form` refuses.
    """
    if (run := run_directory(spec)) is None:
        raise UserError(f"--format rollout: {spec} is no run; name the format that is wanted")
    config = read_config(RunConfig, run / "config.toml")
    recipe, dtype = config.resolved_recipe, jnp.dtype(config.compute_dtype)
    if config.lora.rank:
        raise UserError(
            f"--format rollout: {run} serves a base and adapters beside it; name a format, which "
            "quantizes both as one"
        )
    if name := config.rollout.transform:
        raise UserError(
            f"--format rollout: {run} serves what rollout.transform = {name!r} makes of its "
            "weights, with the draws of each step, and its files have the weights before it; name "
            "the format that they are to be quantized to"
        )
    if recipe.weight_source == "master":
        if any(array.dtype.itemsize < 4 for array in arrays.values()):
            raise UserError(
                f"--format rollout: the recipe quantizes float32 masters, and {run} has kept its "
                f"model in {dtype}; name the format to quantize that"
            )
        return files.rollout_form(recipe, shape, dtype.name), dict(arrays)
    rounded = {
        path: np.asarray(_to_compute(array, dtype, recipe.weight_rounding))
        for path, array in arrays.items()
        if not path.startswith("layers.router")
    }
    return files.rollout_form(recipe, shape, dtype.name), {**arrays, **rounded}


_to_compute = jax.jit(to_compute, static_argnums=(1, 2))


def _trained(run: Path, report: Callable[[str], None]) -> tuple[Path, Path]:
    """What a run has trained: its model, adapters merged, and where adapters are, if there are
    any."""
    steps = checkpoint_steps(run)
    record = read_record(run)
    # a resumed run keeps the records of its earlier starts
    finished = max(each.get("finished", 0) for each in (record, *record.get("earlier", ())))
    if (run / "model" / "config.json").is_file() and max(steps, default=0) <= finished:
        at = f" of step {finished}" if finished else ""
        report(f"{run}: the trained model{at}, {run / 'model'}")
        return run / "model", run / "adapter"
    if not steps:
        raise UserError(
            f"{run}: the run has trained nothing yet: it has neither a model nor a checkpoint; "
            f"let it go on ({switch('resume')}), or name the model that it starts from"
        )
    return _from_checkpoint(run, max(steps), report)


def checkpoint_steps(run: Path) -> list[int]:
    """List the steps of a run's checkpoints; one that was not written to its end is none."""
    directory = run / "checkpoints"
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal())


def _from_checkpoint(run: Path, newest: int, report: Callable[[str], None]) -> tuple[Path, Path]:
    """The newest whole checkpoint of a run as a model, float32, made once in the cache."""
    # orbax and the engines are for this case alone
    from fp8rl_jax.training.checkpoint import Checkpoints
    from fp8rl_jax.training.session import Session
    from fp8rl_jax.training.step_ahead import empty_rollout

    if jax.process_count() > 1:
        raise UserError(
            f"{run}: the run is not at its end and has no model; make one of its checkpoint in "
            f"one process first: fp8rl export --model {run} --output DIR --format float32"
        )
    made = (run / "checkpoints" / str(newest)).stat().st_mtime_ns
    name = hashlib.sha256(f"{run.resolve()} {newest} {made}".encode()).hexdigest()[:16]
    target = cache_dir() / "checkpoints" / name
    report(f"{run}: the trained model of its checkpoint of step {newest}, {target}")
    if target.exists():
        return target, target / "adapter"
    # who samples, and on how many devices, is all the same to weights
    config = read_config(RunConfig, run / "config.toml")
    engine, ahead = config.rollout.engine, config.rollout.steps_ahead
    engine = "static" if engine == "vllm" else engine
    config = replace(
        config,
        mesh=MeshConfig(),
        rollout=replace(config.rollout, engine=engine, steps_ahead=0),
        trainer=replace(config.trainer, micro_batch_prompts=0),
    )
    session = Session(*load_model(config), config=config)
    if read_record(run).get("supervised"):
        session.restart(config.sft.optimizer, config.sft.steps)
    in_hand = (empty_rollout(config, session),) if ahead else ()
    checkpoints = Checkpoints(run / "checkpoints", CheckpointConfig())
    try:
        step, saved = checkpoints.restore((*session.saved(), *in_hand), set_aside=False)
    finally:
        checkpoints.close()
    saved = saved[: len(saved) - len(in_hand)]
    if step != newest:
        raise UserError(
            f"{run}: checkpoint of step {newest} is damaged; training with {switch('resume')} goes "
            f"on from that of step {step}"
        )
    session.load_saved(step, saved)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=target.parent) as staging:
            session.save(Path(staging) / name, "float32")
            os.rename(Path(staging) / name, target)
    except OSError as error:
        raise UserError(
            f"{target}: cannot be written ({error.strerror}); free some space, or set FP8RL_CACHE "
            "to another place"
        ) from None
    return target, target / "adapter"


__all__ = [
    "find_model",
    "load",
    "load_model",
    "model_shape",
    "rollout_export",
    "trained_settings",
]
