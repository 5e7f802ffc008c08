"""What only a process with the devices can say of an ablation's arms, before anything runs:
`python -m fp8rl_jax.ablation.preflight`, JSON in and out.

A process of its own, so that the one that waits for the runs holds no device and no memory of one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8rl_jax.config.files import dump_toml, read_config
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.errors import UserError

if TYPE_CHECKING:
    from fp8rl_jax.ablation.design import Arm, Design


@dataclass(frozen=True)
class Preflight:
    """What was found out of one arm."""

    faults: list[str]
    """Why its runs cannot work."""
    resolved: dict[str, Any]
    """Settings that were `auto`, by dotted key, as they are on these devices."""
    checkpoint_bytes: float
    """Of one checkpoint, about; 0: not known (adapters)."""
    model_bytes: float
    """Of the trained model."""


def preflight(design: Design) -> dict[str, Preflight]:
    """Ask a process with the devices about every arm.

    Raises:
        UserError: a line for each fault, naming its arm; or the process could not start.
    """
    texts = {
        arm.name: dump_toml(replace(arm.config, output="unused", model=model_of_shape(design, arm)))
        for arm in design.arms
    }
    asked = subprocess.run(
        [sys.executable, "-m", "fp8rl_jax.ablation.preflight"],
        input=json.dumps({"arms": texts, "judge": design.file.judge}),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    )
    if asked.returncode:
        raise UserError(f"the arms could not be checked: {last_line(asked.stderr)}")
    answers = json.loads(asked.stdout.splitlines()[-1])
    checks = {name: Preflight(**answer) for name, answer in answers.items()}
    faults = [f"arms.{name}: {fault}" for name, each in checks.items() for fault in each.faults]
    if faults:
        raise UserError("\n".join(f"{design.source}: {fault}" for fault in dict.fromkeys(faults)))
    return checks


def last_line(text: str) -> str:
    """Give the last line of what a process said that has something in it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("fp8rl: error: ")]
    return (errors or lines or ["it said nothing"])[-1].removeprefix("fp8rl: error: ")


def model_of_shape(design: Design, arm: Arm) -> Any:
    """Give the model as far as its shape goes: that of a warm start has not been trained yet."""
    scratch = design.file.start != "none" and arm.config.sft.from_scratch
    model = design.model(arm, design.seeds[0])
    return replace(model, path="") if scratch else model


def _check(config: RunConfig, judge: str) -> Preflight:
    import jax

    from fp8rl_jax import self_test
    from fp8rl_jax.ablation.design import judged
    from fp8rl_jax.models.policy import init_policy, linear_names, parameter_count
    from fp8rl_jax.parallel import make_mesh
    from fp8rl_jax.precision import check_recipe, quantized_layers
    from fp8rl_jax.rl import check_functions
    from fp8rl_jax.rollout.engine import decode_layers
    from fp8rl_jax.training.checks import check_mesh, kernel_sizes, with_exact_decided
    from fp8rl_jax.training.plan import check_fits
    from fp8rl_jax.training.source import model_shape
    from fp8rl_jax.training.state import init_state, make_optimizer
    from pallas_kernels.matmul import selected_backend

    resolved: dict[str, Any] = {}
    sizes = (0.0, 0.0)
    try:
        recipe = config.resolved_recipe
        # once, and not in all runs that begin together
        self_test.confirm(config.precision.backend, lambda: kernel_sizes(model_shape(config)))
        check_recipe(recipe, config.precision.backend)
        if judge:
            check_recipe(judged(config, judge).resolved_recipe, config.precision.backend)
        check_functions(config.rl, config.rollout.samples_per_prompt)
        mesh = make_mesh(config.mesh)
        shape = model_shape(config)
        check_mesh(config, shape, mesh)
        quantized_layers(recipe, linear_names(shape))
        check_fits(shape, config, dict(mesh.shape))
        # on a GPU "auto" is more than one backend: the reference serves what has no kernel
        plain = selected_backend("auto") == "reference" and not self_test.refused()
        if config.precision.backend == "auto" and plain:
            resolved["precision.backend"] = "reference"
        if config.precision.exact == "auto":
            resolved["precision.exact"] = with_exact_decided(config).precision.exact
        if config.rollout.decode_layers == "auto":
            resolved["rollout.decode_layers"] = decode_layers(config)
        if config.trainer.loss_scale.mode == "auto":
            scale = config.trainer.loss_scale.resolve(config.compute_dtype)
            resolved["trainer.loss_scale.mode"] = scale.mode if scale else "none"
        chosen = config.sft.optimizer if config.task.kind == "text" else config.optimizer
        optimizer = make_optimizer(chosen, 1, recipe)
        state = jax.eval_shape(
            lambda key: init_state(init_policy(shape, key), optimizer), jax.random.key(0)
        )
        kept = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
        sizes = (0.0 if config.lora.rank else float(kept), parameter_count(shape) * 2.0)
    except UserError as error:
        return Preflight(str(error).splitlines(), resolved, *sizes)
    return Preflight([], resolved, *sizes)


def _main() -> None:
    asked, answers = json.load(sys.stdin), {}
    for name, text in asked["arms"].items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "arm.toml"
            path.write_text(text)
            config = read_config(RunConfig, path)
        answers[name] = asdict(_check(config, asked["judge"]))
    print(json.dumps(answers))


if __name__ == "__main__":
    _main()
