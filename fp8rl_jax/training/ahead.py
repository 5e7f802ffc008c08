"""A run's programs, compiled for devices that need not be here, from shapes alone.

What XLA makes of a run is read from them before anybody asks for the devices: memory of each, and
what they send each other. `jax.experimental.topologies` stands for the devices.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fp8rl_jax.config.chips import CHIPS
from fp8rl_jax.config.run import MeshConfig, RunConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.cache import KVScales
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.forms import rollout_policy
from fp8rl_jax.models.lora import join, split
from fp8rl_jax.models.policy import init_policy, with_scales
from fp8rl_jax.parallel import (
    batch_sharding,
    batch_shards,
    make_mesh,
    placed_shapes,
    policy_shardings,
)
from fp8rl_jax.parallel.collectives import collectives, sent_over
from fp8rl_jax.rollout.paged.host import lower_decode
from fp8rl_jax.rollout.paged.layout import choose_layout
from fp8rl_jax.rollout.sampler import Prompts, generate
from fp8rl_jax.rollout.sampling import Sampling
from fp8rl_jax.training.adapters import adapted_shapes
from fp8rl_jax.training.batch import Batch
from fp8rl_jax.training.learner import micro_batches, step_config
from fp8rl_jax.training.plan import as_on_chip, rollout_sizes
from fp8rl_jax.training.roofline import size_text
from fp8rl_jax.training.state import init_state, make_optimizer
from fp8rl_jax.training.step import StepConfig, update_program
from pallas_kernels.matmul import selected_backend


def lower_update(
    shape: PolicyConfig, config: RunConfig, mesh: jax.sharding.Mesh
) -> jax.stages.Lowered:
    """Lower the update of a run on problems, of rollouts as long as they may be.

    Args:
        shape: of the policy.
        config: of the run. Packed rows depend on lengths, so the update is not packed.
        mesh: of devices, or of a topology's.

    Raises:
        UserError: a tensor does not divide by its mesh axes.
    """
    recipe, r = config.resolved_recipe, config.rollout
    optimizer = make_optimizer(config.optimizer, 1, recipe)
    step = step_config(config, recipe)
    parts = micro_batches(config.trainer, r.prompts_per_step) // config.trainer.updates_per_rollout
    step = replace(step, micro_batches=parts)
    with jax.set_mesh(mesh):
        policy = jax.eval_shape(lambda: init_policy(shape, jax.random.key(0)))
        trained, frozen = adapted_shapes(policy, config, recipe)
        state = jax.eval_shape(
            partial(init_state, optimizer=optimizer, scaling=step.loss_scale),
            join(trained, frozen),
        )
        state = replace(state, policy=split(state.policy)[0])
        return update_program.lower(
            placed_shapes(state, policy_shardings(state, mesh)),
            placed_shapes(frozen, policy_shardings(frozen, mesh)),
            placed_shapes(_batch(config, step), batch_sharding(mesh)),
            step,
            optimizer,
        )


def lower_rollout(
    shape: PolicyConfig, config: RunConfig, mesh: jax.sharding.Mesh
) -> jax.stages.Lowered:
    """Lower what samples a run's completions: the whole call of the static engine, and of the paged
    one the program that decodes.

    Args:
        shape, config, mesh: as in `lower_update`.

    Raises:
        UserError: a tensor does not divide by its mesh axes; the paged engine has no room.
    """
    recipe, r = config.resolved_recipe, config.rollout
    dtype, unroll = jnp.dtype(config.compute_dtype), r.decode_layers == "unroll"
    numbers = r.max_new_tokens, r.temperature, r.top_k, r.top_p, r.min_p
    sampling = Sampling(*numbers, (*shape.eos_token_ids, *r.stop_token_ids))
    with jax.set_mesh(mesh):
        policy = jax.eval_shape(lambda: init_policy(shape, jax.random.key(0)))
        served = jax.eval_shape(
            lambda p: rollout_policy(p, recipe, dtype, unroll, config.precision.backend)[0], policy
        )
        if recipe.quantizes_cache:
            scales = _array(jnp.float32, shape.num_layers)
            served = with_scales(served, KVScales(scales, scales, scales))
        served = placed_shapes(served, policy_shardings(served, mesh))
        count = r.prompts_per_step
        ints = (count, r.max_prompt_tokens), (count,), (count,)
        prompts = Prompts(*(_array(jnp.int32, *sides) for sides in ints))
        prompts = placed_shapes(prompts, batch_sharding(mesh))
        if r.engine == "paged":
            part = count // batch_shards(mesh), r.max_prompt_tokens
            hopper = selected_backend(config.precision.backend) == "hopper"
            sizes = part, r.samples_per_prompt, r.max_new_tokens
            layout = choose_layout(r.paged, *sizes, hopper)
            return lower_decode(served, prompts, r.samples_per_prompt, sampling, layout)
        key = jax.eval_shape(lambda: jax.random.key(0))
        given = prompts.tokens, prompts.lengths, prompts.ids, key
        return generate.lower(served, *given, samples=r.samples_per_prompt, sampling=sampling)


@dataclass(frozen=True)
class Compiled:
    """What XLA plans of a program.

    Attributes:
        once: bytes that one device sends over a ring, by mesh axes, in all but loops whose number
            of rounds the program does not say.
        a_step: the same of one round of those: of the decode loop.
        temporary: bytes of memory beside arguments and results.
    """

    once: dict[str, int]
    a_step: dict[str, int]
    temporary: int


Lower = Callable[[PolicyConfig, RunConfig, jax.sharding.Mesh], jax.stages.Lowered]


def compile_for(
    lower: Lower,
    shape: PolicyConfig,
    config: RunConfig,
    sizes: dict[str, int],
    chip: str = "h200",
) -> Compiled:
    """Compile a program for a mesh of devices that are not here.

    Args:
        lower: `lower_update` or `lower_rollout`.
        shape, config: its arguments.
        sizes: of the mesh's axes.
        chip: as of `mesh_for`. Of a TPU's program it is not read what devices send: the compiler
            fuses that with products.

    Raises:
        UserError: as `lower` and `mesh_for`.
    """
    text, memory = compiled_program(lower, shape, config, sizes, chip)
    found = [] if CHIPS[chip].tpu else [*collectives(text)]
    return Compiled(
        sent_over((one for one in found if not one.loops), sizes),
        sent_over((one for one in found if one.loops), sizes),
        memory.temp_size_in_bytes,
    )


def compiled_program(
    lower: Lower,
    shape: PolicyConfig,
    config: RunConfig,
    sizes: dict[str, int],
    chip: str = "h200",
) -> tuple[str, Any]:
    """Compile as `compile_for`, and give the program's text and memory as XLA tells them."""
    with as_on_chip(chip), _cudnn_assumed():
        made = lower(shape, config, mesh_for(sizes, chip)).compile()
    text, memory = made.as_text(), made.memory_analysis()
    assert text is not None and memory is not None  # these compilers give both
    return text, memory


def mesh_for(sizes: Mapping[str, int], chip: str = "h200") -> jax.sharding.Mesh:
    """Make a mesh of devices that are not here, to compile for.

    Args:
        sizes: of its axes.
        chip: a Hopper one, all of which are compiled for as H200s: JAX's CUDA plugin has to be on
            the path (`pallas_kernels.check.compile.activate_toolchain`). Or a TPU, for which
            libtpu has to be installed.

    Raises:
        UserError: no TPU has so many chips.
    """
    from jax.experimental import topologies

    count = math.prod(sizes.values())
    if tpu := CHIPS[chip].tpu:
        rows = 1 << (count.bit_length() - 1) // 2
        if count.bit_count() > 1 or not 1 <= count <= 256:
            raise UserError(
                f"plan.compile: a slice of {chip} has 1, 2, 4, ... or 256 chips, not {count}"
            )
        # which looks for the TPU of the machine, and then for whom to ask about it
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        topology = topologies.get_topology_desc(
            platform="tpu", topology_name=f"{tpu}:{rows}x{count // rows}"
        )
    else:
        from pallas_kernels.check.compile import TARGET

        topology = topologies.get_topology_desc(
            platform="cuda", target_config=TARGET.read_text(), topology=f"1x1x{count}"
        )
    return make_mesh(replace(MeshConfig(), **sizes), topology.devices)


def lacks_compiler(chip: str) -> str:
    """Say why nothing can be compiled here for a chip; empty where it can."""
    from pallas_kernels.check.compile import missing_toolchain

    if CHIPS[chip].hopper:
        return missing_toolchain()
    if not CHIPS[chip].tpu:
        known = [name for name, each in CHIPS.items() if each.hopper or each.tpu]
        return f"there is a compiler here for {', '.join(known)}, and none for {chip}"
    if importlib.util.find_spec("libtpu") is None:
        return "nothing to compile for a TPU with: pip install libtpu==0.0.48.1"
    return ""


@contextmanager
def _cudnn_assumed() -> Generator[None]:
    """JAX asks cuDNN for its version where its attention is lowered; the library is not needed."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    asked = cudnn.check_cudnn_version
    cudnn.check_cudnn_version = lambda: 91300  # ty: ignore[invalid-assignment]
    try:
        yield
    finally:
        cudnn.check_cudnn_version = asked


def check_compiler(config: RunConfig) -> None:
    """Refuse plan.compile where no program of a run can be compiled here.

    Raises:
        UserError: which and why.
    """
    if config.task.kind == "text":
        raise UserError(
            'plan.compile: the programs of runs on problems are compiled; with task.kind = "text" '
            "leave it false"
        )
    if why := lacks_compiler(_compiled_for(config)):
        raise UserError(f"plan.compile: {why}; or leave it false")


def describe(shape: PolicyConfig, config: RunConfig, sizes: dict[str, int]) -> str:
    """Compile update and rollout for the run's plan.chip, H200s without one, and write what XLA
    plans of them.

    Args:
        config: of a run that `check_compiler` has let pass.

    Raises:
        UserError: as `compile_for`.
    """
    chip = _compiled_for(config)
    programs: dict[str, Lower] = {"update": lower_update}
    if config.rollout.engine != "vllm":
        programs[f"{config.rollout.engine} rollout"] = lower_rollout
    devices = "H200s" if CHIPS[chip].hopper else chip
    lines = [
        f"Compiled for {devices} by XLA (nothing ran; the cache and weights of a paged rollout are "
        "arguments, not temporaries):"
    ]
    own = rollout_sizes(config.mesh, sizes)
    for name, lower in programs.items():
        found = compile_for(lower, shape, config, own if lower is lower_rollout else sizes, chip)
        temporaries = f"  {name}: {size_text(found.temporary)} of temporaries"
        if CHIPS[chip].tpu:
            lines.append(temporaries)
            continue
        sent = [_sent(found.once)] if found.once else []
        sent += [f"{_sent(found.a_step)} in each step of its loop"] if found.a_step else []
        lines.append(f"{temporaries}; a device sends {' and '.join(sent) or 'nothing'}")
    return "\n".join(lines)


def _compiled_for(config: RunConfig) -> str:
    """Name the chip that a run's programs are compiled for."""
    return config.plan.chip if config.plan.chip in CHIPS else "h200"


def _sent(by_axes: dict[str, int]) -> str:
    return ", ".join(f"{size_text(size)} over {axes}" for axes, size in by_axes.items() if axes)


def _batch(config: RunConfig, step: StepConfig) -> Batch:
    """Shapes of what one update learns from."""
    r, updates = config.rollout, config.trainer.updates_per_rollout
    prompts = r.prompts_per_step // updates
    rows, width = prompts * r.samples_per_prompt, r.max_new_tokens
    old = updates > 1 or step.rl.correction.whole_batch or step.rl.reward_kl.coefficient > 0
    numbers = _array(jnp.float32, rows, width)
    return Batch(
        _array(jnp.int32, prompts, r.max_prompt_tokens),
        _array(jnp.int32, prompts),
        _array(jnp.int32, rows, width),
        _array(bool, rows, width),
        numbers,
        _array(jnp.float32, rows),
        old_logprobs=numbers if old else None,
        reference_logprobs=numbers if step.rl.kl_coefficient > 0 else None,
    )


def _array(dtype: Any, *sides: int) -> Any:
    return jax.ShapeDtypeStruct(sides, dtype)
