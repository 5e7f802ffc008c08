"""What a run needs of a device's memory, from shapes alone: before weights are read, and on a
machine without the device.

Nothing is guessed about what stays between programs. Weights, moments and rollout weights are the
shapes that the run's own functions give (`jax.eval_shape`), divided as the sharding rules divide
them, to the byte. What a program holds while it runs is an estimate: tests/training/test_plan.py
holds it to what XLA says of the compiled programs.

    always      masters, moments, the frozen base of adapters, rollout weights, the
                reference policy of a KL term, the supports of sampling replay
    rollout     KV cache, and weights that are unpacked for the decode loop
    backward    weights in the compute dtype, activations, logits of a chunk, gradients and, of
                several micro-batches, their sums
    optimizer   gradients, and what the optimizer makes of them
    sync        weights in the compute dtype on their way to their quantized form

The phases follow each other, so a run needs what always stays and the largest phase. A run on text
serves nothing, and has the two of an update. Where the rollout has devices of its own, these have a
plan of theirs, and the trainer's hold what is served only while it is on its way.

Does a run fit, and if not, what would make it: every answer is a plan of its own, computed from
the changed configuration.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import rich.console
import rich.table
from jax.sharding import AbstractMesh, AxisType
from rich.box import SIMPLE_HEAD

from fp8rl_jax.config.chips import CHIPS
from fp8rl_jax.config.formats import FLOAT32, TensorFormat
from fp8rl_jax.config.recipe import PrecisionConfig, Recipe
from fp8rl_jax.config.run import MeshConfig, RunConfig
from fp8rl_jax.config.training import LoraConfig, OptimizerConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.json_fields import Fields, read_json
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.forms import predequantized, rollout_policy
from fp8rl_jax.models.logprobs import positions_at_once
from fp8rl_jax.models.lora import join, split
from fp8rl_jax.models.policy import Layer, Policy, init_policy, parameter_count
from fp8rl_jax.parallel import (
    DECODE_RULES,
    DEFAULT_RULES,
    ShardingRules,
    batch_shards,
    policy_shardings,
)
from fp8rl_jax.parallel.mesh import AXES, axis_sizes
from fp8rl_jax.precision.formats import in_blocks, mantissa_bits
from fp8rl_jax.rollout.arrival import Arrival
from fp8rl_jax.rollout.paged.host import SHARD_RULES
from fp8rl_jax.rollout.paged.layout import choose_layout
from fp8rl_jax.rollout.sampler import cache_dtype, loop_dtype
from fp8rl_jax.training.adapters import adapted_shapes
from fp8rl_jax.training.gradients import check_gradients, kept_gradients
from fp8rl_jax.training.source import find_model
from fp8rl_jax.training.state import init_state, make_optimizer
from fp8rl_jax.weights.layouts import read_quantization
from pallas_kernels.attention import CHUNK, CHUNK_FROM
from pallas_kernels.backend import Backend, hopper_sms, platform, tracing_for
from pallas_kernels.matmul import selected_backend

PHASES = ("rollout", "backward", "optimizer", "sync")
_SCORE_COPIES = 4.5  # of attention scores, in float32: measured, tests/training/test_plan.py


@dataclass(frozen=True)
class Plan:
    """Bytes of one device.

    Attributes:
        always: what stays between phases, by name.
        phases: what each phase adds, by name.
        devices: of the mesh.
        rollout: of a device of the rollout's own, where it has some.
    """

    always: dict[str, int]
    phases: dict[str, dict[str, int]]
    devices: int
    rollout: Plan | None = None

    def needs(self, phase: str) -> int:
        """Add up the bytes during one phase."""
        return sum(self.always.values()) + sum(self.phases[phase].values())

    @property
    def fullest(self) -> tuple[int, str]:
        """Bytes of the phase and device that need most, and the phase."""
        own = max((self.needs(phase), phase) for phase in self.phases)
        return own if self.rollout is None else max(own, self.rollout.fullest)

    @property
    def peak(self) -> int:
        """Bytes during the phase that needs most."""
        return self.fullest[0]


@dataclass(frozen=True)
class _Shapes:
    """What a run holds, as trees of shapes."""

    recipe: Recipe
    policy: Policy
    trained: Any
    frozen: Policy | None
    kept: Any
    """Masters as they are stored."""
    found: Any
    """State of the optimizer."""
    gradients: Any
    served: Policy


def _shapes(shape: PolicyConfig, config: RunConfig) -> _Shapes:
    """What a run holds, traced once for all meshes and batches."""
    return _traced(
        shape,
        config.resolved_recipe,
        config.rollout.decode_layers == "unroll",
        (platform(), hopper_sms()),
        config.compute_dtype,
        config.lora,
        config.sft.optimizer if config.task.kind == "text" else config.optimizer,
        config.precision.backend,
    )


@lru_cache(maxsize=16)
def _traced(
    shape: PolicyConfig,
    recipe: Recipe,
    unroll: bool,
    device: tuple[str, int | None],
    compute_dtype: Literal["bfloat16", "float16", "float32"],
    lora: LoraConfig,
    optimizer: OptimizerConfig,
    backend: Backend,
) -> _Shapes:
    """`device`: that is traced for, which chooses kernels, and with them what is stored."""
    precision = PrecisionConfig(backend=backend)
    adapted = RunConfig(compute_dtype=compute_dtype, lora=lora, precision=precision)
    dtype = jnp.dtype(compute_dtype)
    policy = jax.eval_shape(lambda key: init_policy(shape, key), jax.random.key(0))
    rule = make_optimizer(optimizer, 1, recipe)
    trained, frozen = adapted_shapes(policy, adapted, recipe)
    state = jax.eval_shape(partial(init_state, optimizer=rule), join(trained, frozen))
    gradients, _ = jax.eval_shape(partial(kept_gradients, recipe=recipe), trained)
    served = jax.eval_shape(lambda p: rollout_policy(p, recipe, dtype, unroll, backend)[0], policy)
    kept, found = split(state.policy)[0], (state.optimizer, state.gradient_factors)
    return _Shapes(recipe, policy, trained, frozen, kept, found, gradients, served)


@dataclass(frozen=True)
class Footprint:
    """Bytes that one device holds, of what a step reads, writes and sends.

    Attributes:
        masters: as they are stored; of adapters, theirs alone.
        elements: of them, their number.
        optimizer: its state.
        gradients: as they are kept.
        served: the rollout's weights, where they stay.
        gathered: the same where the decode loop has them.
        read: what the loop multiplies, which is unpacked where no kernel takes it as it is.
        looked_up: of that, an embedding that is no output head.
        experts: of that, the experts' weights.
        token: keys and values of a token, in all layers.
    """

    masters: int
    elements: int
    optimizer: int
    gradients: int
    served: int
    gathered: int
    read: int
    looked_up: int
    experts: int
    token: float


def footprint(shape: PolicyConfig, config: RunConfig, mesh: AbstractMesh) -> Footprint:
    """Find what one device holds.

    Raises:
        UserError: as `memory_plan`.
    """
    of = _shapes(shape, config)
    rules = _decode_rules(config)
    placed = partial(_device_bytes, mesh=mesh, rules=rules)
    with as_on_chip(config.plan.chip):
        read = jax.eval_shape(predequantized, of.served)
        token = _cached_bits(shape, config, of.served, mesh) / 8
    layers = [read.layers] if isinstance(read.layers, Layer) else read.layers
    experts = [layer.experts for layer in layers if layer.experts is not None]
    return Footprint(
        _device_bytes(of.kept, mesh),
        _device_bytes(of.trained, mesh) // 4,
        _device_bytes(of.found, mesh),
        _device_bytes(of.gradients, mesh),
        _device_bytes(of.served, mesh),
        placed(of.served),
        placed(read),
        0 if read.lm_head is None else placed(read.embed_tokens),
        placed(experts),
        token,
    )


def memory_plan(
    shape: PolicyConfig, config: RunConfig, sizes: dict[str, int] | None = None
) -> Plan:
    """Plan what a run needs of a device's memory.

    Args:
        shape: of the policy.
        config: the run's configuration.
        sizes: of the mesh's axes; default: `mesh_sizes`.

    Raises:
        UserError: the recipe, the optimizer or the mesh cannot be, as a run would say.
    """
    sizes = sizes or mesh_sizes(config.mesh)
    mesh = abstract_mesh(sizes)
    check_gradients(config.resolved_recipe, mesh, config.trainer.packing, config.rl.objective)
    of = _shapes(shape, config)
    recipe, served, kept = of.recipe, of.served, of.kept
    dtype, weight = jnp.dtype(config.compute_dtype), recipe.rollout.weight
    masters = _device_bytes(of.trained, mesh)
    formats = f"{weight.element}, rest {dtype.name}" if weight.quantized else dtype.name
    always = {
        f"masters ({recipe.master.name})": _device_bytes(kept, mesh),
        "optimizer state": _device_bytes(of.found, mesh),
    }
    with as_on_chip(config.plan.chip):
        backward = _backward(shape, config, masters, mesh, recipe.master == FLOAT32)
    phases = {
        "backward": backward,
        "optimizer": {
            f"gradients ({recipe.weight_gradient.name})": _device_bytes(of.gradients, mesh),
            f"changed weights ({recipe.master.name})": _device_bytes(kept, mesh),
        },
    }
    if of.frozen is not None:
        always["frozen base"] = _device_bytes(of.frozen, mesh)
    if config.task.kind == "text":
        return Plan(always, phases, math.prod(sizes.values()))
    ours = config.rollout.engine != "vllm"  # whose server has memory of its own
    weights, own = f"rollout weights ({formats})", config.mesh.rollout
    if ours and not own.size:
        always[weights] = _device_bytes(served, mesh)
    if config.rl.kl_coefficient > 0 or config.rl.reward_kl.coefficient > 0:
        # beside the frozen base of adapters, which it shares
        always["KL reference policy"] = _device_bytes(kept, mesh)
    if config.rl.acceptance.enabled:
        always["what an update may go back to"] = _device_bytes((kept, of.found[0]), mesh)
    if size := config.support_size(shape.vocab_size):
        always[f"supports of {size} tokens (int32)"] = _support_bytes(config, size, mesh)
    beside = None
    with as_on_chip(config.plan.chip):
        if own.size:
            apart = rollout_mesh(config.mesh)
            rules = _decode_rules(config)
            beside = Plan(
                {weights: _device_bytes(served, apart, rules)},
                {"rollout": _rollout(shape, config, recipe, served, apart)},
                own.size,
            )
        rollout = _rollout(shape, config, recipe, served, mesh) if ours and not own.size else {}
    sync = {f"{weights}, on their way": _device_bytes(served, mesh)} if own.size else {}
    sync |= {
        f"weights in {dtype.name}": _device_bytes(of.policy, mesh) * dtype.itemsize // 4,
        "places of sync/*": Arrival(merged=True).nbytes(of.policy),
    }
    if recipe.master != FLOAT32:
        sync = {"masters in float32": masters} | sync
    phases = {"rollout": rollout, **phases, "sync": sync}
    if own.size:
        del phases["rollout"]
    return Plan(always, phases, math.prod(sizes.values()), beside)


def as_on_chip(name: str) -> AbstractContextManager[None]:
    """Trace as on a chip of that name, whatever this machine is; as here where kernels of ours are
    for none such."""
    chip = CHIPS.get(name)
    if chip is not None and chip.tpu:
        return tracing_for("tpu")
    return tracing_for(_SMS) if chip is not None and chip.hopper else nullcontext()


_SMS = 132
"""Of an H100 and an H200."""


def abstract_mesh(sizes: dict[str, int]) -> AbstractMesh:
    """Make a mesh of no devices."""
    return AbstractMesh(
        tuple(sizes[axis] for axis in AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES)
    )


def rollout_mesh(config: MeshConfig) -> AbstractMesh:
    """Make a mesh of no devices, for those of the rollout's own."""
    own = config.rollout
    return abstract_mesh({"data": own.data, "fsdp": 1, "expert": own.expert, "tensor": own.tensor})


def rollout_sizes(config: MeshConfig, sizes: dict[str, int]) -> dict[str, int]:
    """Find the sizes of the mesh that samples: the rollout's own, or the trainer's."""
    return dict(rollout_mesh(config).shape) if config.rollout.size else sizes


def mesh_sizes(config: MeshConfig, devices: int = 0) -> dict[str, int]:
    """Find the sizes of the trainer's mesh's axes without its devices.

    Args:
        config: where an axis is -1, it takes what is left.
        devices: in all, the rollout's own among them; 0: of no known number, and a -1 is 1.

    Raises:
        UserError: the axes do not multiply to so many devices, or none is left for the trainer.
    """
    if devices:
        left = devices - config.rollout.size
        if left < 1:
            raise UserError(
                f"mesh.rollout: data x expert x tensor = {config.rollout.size} leaves the trainer "
                f"none of {devices} devices; make it smaller"
            )
        return dict(zip(AXES, axis_sizes(config, left), strict=True))
    return {axis: max(getattr(config, axis), 1) for axis in AXES}


def _decode_rules(config: RunConfig) -> ShardingRules:
    """Where the decode loop of a run's engine has its weights."""
    return SHARD_RULES if config.rollout.engine == "paged" else DECODE_RULES


def _device_bytes(tree: Any, mesh: AbstractMesh, rules: ShardingRules = DEFAULT_RULES) -> int:
    """Bytes that one device holds of a tree of shapes, placed by the sharding rules."""
    placed = jax.tree.leaves(policy_shardings(tree, mesh, rules))
    leaves = zip(jax.tree.leaves(tree), placed, strict=True)
    return sum(
        math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize for x, sharding in leaves
    )


def _rollout(
    shape: PolicyConfig, config: RunConfig, recipe: Recipe, served: Policy, mesh: AbstractMesh
) -> dict[str, int]:
    r, dtype = config.rollout, jnp.dtype(config.compute_dtype)
    in_progress = r.prompts_per_step + r.paged.extra_prompts
    prompts, samples = math.ceil(in_progress / batch_shards(mesh)), r.samples_per_prompt
    rows, tensor = prompts * samples, mesh.shape["tensor"]
    if config.task.max_turns > 1:  # each episode has a prompt of its own
        prompts, samples = rows, 1
    on_hopper = selected_backend(config.precision.backend) == "hopper"
    kept = _cache_dtype(config, served)
    tokens = prompts * r.max_prompt_tokens  # of a prefill
    held, what = tokens + rows * r.max_new_tokens, "KV cache"
    if r.engine == "paged":
        sizes = (prompts, r.max_prompt_tokens), samples, r.max_new_tokens
        layout = choose_layout(r.paged, *sizes, on_hopper)
        tokens, rows = layout.together * layout.chunk, layout.slots
        held = layout.pages * layout.page_size
        what = f"KV cache, {held:,} tokens for {layout.slots} completions at a time"
    bits = held * _cached_bits(shape, config, served, mesh)
    heads = recipe.rollout.key, recipe.rollout.value
    names = dict.fromkeys(fmt.name for fmt in heads if fmt.quantized and not fmt.calibrated)
    simulated = f"; {' and '.join(names)} simulated" if names else ""
    found = {f"{what} ({kept.name}{simulated})": bits // 8}
    if (latent := shape.latent) is not None:
        # what kv_b_proj gives, and keys and values as attention multiplies them
        widths = shape.head_dim - latent.rotary_dim + latent.value_dim + 2 * shape.attention_dim
        made = held * shape.num_heads * widths // tensor
        found["keys and values of one layer, made of latents (float32)"] = 4 * made
    rules = _decode_rules(config)
    gathered = _device_bytes(served, mesh, rules)
    if gathered > _device_bytes(served, mesh):
        found["rollout weights, gathered for the decode loop"] = gathered
    if unpacked := _unpacked_bytes(served):
        own = rules is DECODE_RULES and shape.experts is not None
        shards = tensor * (mesh.shape["expert"] if own else 1)
        found["rollout weights unpacked for the decode loop"] = unpacked // shards
    share = _queries(r.max_prompt_tokens, r.max_prompt_tokens, None) / r.max_prompt_tokens
    prefill = (
        _layer_activations(shape, tokens, r.max_prompt_tokens, dtype.itemsize, share) // tensor
    )
    kernels = on_hopper and recipe.rollout.weight.quantized
    prefill += _expert_activations(shape, tokens, dtype.itemsize, mesh, kernels)
    found["activations of one layer, logits"] = prefill + 3 * 4 * rows * shape.vocab_size // tensor
    return found


def _cache_dtype(config: RunConfig, served: Policy) -> jnp.dtype:
    return (cache_dtype if config.rollout.engine == "paged" else loop_dtype)(served)


def _cached_bits(shape: PolicyConfig, config: RunConfig, served: Policy, mesh: AbstractMesh) -> int:
    """Bits of a token's keys and values, in all layers, on one device."""
    # what heads have in common is whole on each device
    tensor = mesh.shape["tensor"]
    numbers = sum(heads * dim // math.gcd(heads, tensor) for heads, dim in shape.cached)
    return shape.num_layers * numbers * jnp.finfo(_cache_dtype(config, served)).bits


def _support_bytes(config: RunConfig, size: int, mesh: AbstractMesh) -> int:
    """Bytes of the supports of a rollout: ids and a count a token, those in progress among them."""
    r, width = config.rollout, config.rollout.max_new_tokens
    if config.task.max_turns > 1:  # a row for each episode that its template does not split
        width += r.max_prompt_tokens - 1
    prompts = math.ceil((r.prompts_per_step + r.paged.extra_prompts) / batch_shards(mesh))
    return prompts * r.samples_per_prompt * width * (size + 1) * 4


def _unpacked_bytes(served: Policy) -> int:
    """Bytes of what a decode loop multiplies in place of the weights that stay."""
    kept = dict(jax.tree.leaves_with_path(served))
    made = jax.tree.leaves_with_path(jax.eval_shape(predequantized, served))
    new = (x for path, x in made if path not in kept or kept[path].dtype != x.dtype)
    return sum(x.size * x.dtype.itemsize for x in new)


def _backward(
    shape: PolicyConfig, config: RunConfig, masters: int, mesh: AbstractMesh, in_float32: bool
) -> dict[str, int]:
    r, t, width = config.rollout, config.trainer, jnp.dtype(config.compute_dtype).itemsize
    shards, tensor = batch_shards(mesh), mesh.shape["tensor"]
    if config.task.kind == "text":
        of_update, per_micro = (
            config.sft.batch_size,
            config.sft.micro_batch_rows or config.sft.batch_size,
        )
        rows, keys = math.ceil(per_micro / shards), config.sft.row_tokens
        tokens, length = rows * keys, keys
    else:
        of_update = r.prompts_per_step // t.updates_per_rollout
        per_micro = t.micro_batch_prompts or of_update
        prompts = math.ceil(per_micro / shards)
        rows, keys = prompts * r.samples_per_prompt, r.max_prompt_tokens + r.max_new_tokens
        tokens, length = prompts * r.max_prompt_tokens + rows * r.max_new_tokens, r.max_new_tokens
    queries = _queries(length, keys, t.attention_chunk)
    hopper = selected_backend(config.precision.backend) == "hopper"
    if hopper and width == 2 and shape.attention_dim <= 128:
        queries = 0  # cuDNN's attention holds no scores
    layer = _layer_activations(shape, tokens, keys, width, queries / length)
    kernels = hopper and config.resolved_recipe.trainer.weight.quantized
    experts = _expert_activations(shape, tokens, width, mesh, kernels)
    inputs = shape.num_layers * tokens * shape.hidden_size * width
    vocab = shape.vocab_size
    chunk = rows * positions_at_once(rows, length, vocab, t.logprob_chunk)
    found = {
        "activations of a micro-batch": inputs + layer // tensor + experts
        if t.remat == "layer"
        else shape.num_layers * (layer // tensor + experts),
        "logits of a chunk (float32)": 3 * 4 * chunk * shape.vocab_size // tensor,
    }
    if width < 4 or not in_float32:
        found["weights in the compute dtype"] = masters * width // 4
    if per_micro == of_update:
        return found | {"gradients (float32)": masters}
    # added up in float32 while they are read, so those of one micro-batch stay in the compute dtype
    sums = {"sums of gradients, before and after (float32)": 2 * masters}
    return found | {"gradients of a micro-batch": masters * width // 4} | sums


def _queries(tokens: int, keys: int, chunk: int | None) -> int:
    """Queries of a row whose attention scores exist at one time, as models.forward chooses."""
    if chunk is None:
        chunk = CHUNK if tokens * keys >= CHUNK_FROM else 0
    return min(chunk or tokens, tokens)


def _layer_activations(
    shape: PolicyConfig, tokens: int, keys: int, width: int, share: float
) -> int:
    """Bytes that one layer leaves for its backward pass: what enters and leaves its products,
    norms, rope and softmax; of experts `_expert_activations`.

    Norms, rope and softmax work in float32 whatever the compute dtype; attention scores are held
    for a `share` of the queries.
    """
    feed_forward = shape.intermediate_size
    if shape.experts is not None:
        feed_forward = max(feed_forward if shape.dense_layers else 0, shape.experts.shared_size)
    computed = 6 * shape.hidden_size + 3 * shape.q_size + 4 * shape.kv_size + 4 * feed_forward
    wide = 4 * shape.hidden_size + 2 * shape.q_size + 2 * shape.kv_size
    if (latent := shape.latent) is not None:
        latents = (latent.query_rank or 0) + latent.rank + latent.rotary_dim
        computed, wide = computed + 3 * latents, wide + 2 * latents
    wide += int(_SCORE_COPIES * shape.num_heads * keys * share)
    return tokens * (width * computed + 4 * wide)


def _expert_activations(
    shape: PolicyConfig, tokens: int, width: int, mesh: AbstractMesh, kernels: bool
) -> int:
    """Bytes of a layer's experts: rows of all devices of the axis, since any of them may be routed
    here, once for each expert of a token. Where no kernel multiplies them they stand in tiles, too,
    with products in float32. The factors are fitted to programs compiled for Hopper."""
    if shape.experts is None:
        return 0
    rows = tokens * mesh.shape["expert"] * shape.experts.per_token
    hidden, inner = shape.hidden_size, shape.experts.intermediate_size
    inner //= mesh.shape["tensor"]
    if kernels:
        return rows * width * (2 * hidden + 4 * inner)
    return rows * (hidden * (2 * width + 16) + inner * 32)


_FSDP = (2, 4, 8, 16)
_GB = 1e9


def _device_limit(config: RunConfig) -> tuple[int, str] | None:
    """Bytes of one device and where the figure is from: plan.chip, or what the device reports; None
    where neither says."""
    chosen = config.plan.chip
    if chosen in CHIPS:
        return int(CHIPS[chosen].memory), chosen
    if chosen:
        return int(float(chosen)), "plan.chip"
    statistics = jax.local_devices()[0].memory_stats() or {}
    limit = statistics.get("bytes_limit")
    kind = jax.local_devices()[0].device_kind
    return (
        None
        if limit is None
        else (limit, f"{kind}, as far as XLA_PYTHON_CLIENT_MEM_FRACTION lets JAX use it")
    )


def changes(
    config: RunConfig, sizes: dict[str, int]
) -> Iterator[tuple[str, RunConfig, dict[str, int]]]:
    """List single changes that make a run smaller, the cheapest first.

    Each as (what to set, the changed run, its mesh).
    """
    trainer, rollout = config.trainer, config.rollout
    if config.task.kind == "text":
        yield from _text_changes(config, sizes)
        return
    of_update = rollout.prompts_per_step // trainer.updates_per_rollout
    fewest = batch_shards(abstract_mesh(sizes))
    if (trainer.micro_batch_prompts or of_update) > fewest:
        smaller = replace(trainer, micro_batch_prompts=fewest)
        yield (
            f"trainer.micro_batch_prompts = {fewest}",
            replace(config, trainer=smaller),
            sizes,
        )
    if trainer.remat == "none":
        yield (
            'trainer.remat = "layer"',
            replace(config, trainer=replace(trainer, remat="layer")),
            sizes,
        )
    for what, changed in _smaller_moments(config, config.optimizer):
        yield what, changed, sizes
    for mesh in _more_fsdp(config, sizes):
        if rollout.prompts_per_step % batch_shards(abstract_mesh(mesh)) == 0:
            yield f"mesh.fsdp = {mesh['fsdp']}", config, mesh
    fewer = rollout.samples_per_prompt // 2
    if fewer >= 2:
        what = f"rollout.samples_per_prompt = {fewer}"
        yield what, replace(config, rollout=replace(rollout, samples_per_prompt=fewer)), sizes


def _more_fsdp(config: RunConfig, sizes: dict[str, int]) -> Iterator[dict[str, int]]:
    """Meshes with more shards of the weights: of the same devices where plan.devices says how many
    there are, which leaves fewer replicas."""
    for fsdp in _FSDP:
        data = sizes["data"]
        if config.plan.devices:
            data, rest = divmod(sizes["data"] * sizes["fsdp"], fsdp)
            if rest:
                continue
        if fsdp > sizes["fsdp"]:
            yield sizes | {"data": data, "fsdp": fsdp}


def _smaller_moments(
    config: RunConfig, optimizer: OptimizerConfig
) -> Iterator[tuple[str, RunConfig]]:
    for name in ("bfloat16", "e4m3-1x128"):
        small = replace(config.precision, first_moment=name, second_moment=name)
        changed = replace(config, precision=small)
        if not optimizer.faults("optimizer", changed.resolved_recipe):
            yield f'precision.first_moment = precision.second_moment = "{name}"', changed


def _text_changes(
    config: RunConfig, sizes: dict[str, int]
) -> Iterator[tuple[str, RunConfig, dict[str, int]]]:
    """`changes` of a run on text."""
    sft, trainer = config.sft, config.trainer
    fewest = batch_shards(abstract_mesh(sizes))
    if (sft.micro_batch_rows or sft.batch_size) > fewest:
        made = replace(config, sft=replace(sft, micro_batch_rows=fewest))
        yield f"sft.micro_batch_rows = {fewest}", made, sizes
    if trainer.remat == "none":
        made = replace(config, trainer=replace(trainer, remat="layer"))
        yield 'trainer.remat = "layer"', made, sizes
    for what, changed in _smaller_moments(config, sft.optimizer):
        yield what, changed, sizes
    for mesh in _more_fsdp(config, sizes):
        rows = sft.micro_batch_rows or sft.batch_size
        if rows % batch_shards(abstract_mesh(mesh)) == 0:
            yield f"mesh.fsdp = {mesh['fsdp']}", config, mesh


def what_fits(
    shape: PolicyConfig, config: RunConfig, sizes: dict[str, int], limit: int
) -> list[tuple[str, int]]:
    """Find the changes under which a run fits into `limit` bytes a device, with peaks.

    Single changes; where none is enough, pairs of them.
    """
    now, single, pairs = memory_plan(shape, config, sizes).peak, [], []
    for what, changed, mesh in changes(config, sizes):
        try:
            peak = memory_plan(shape, changed, mesh).peak
        except UserError:  # a tensor that does not divide by that mesh
            continue
        if peak <= limit:
            single.append((what, peak))
        elif peak < now:
            pairs.append((what, changed, mesh))
    if single:
        return single
    found = []
    for what, changed, mesh in pairs:
        for other, both, both_mesh in changes(changed, mesh):
            keys = {part.split(" = ")[0] for part in (what, other)}
            try:
                peak = memory_plan(shape, both, both_mesh).peak
            except UserError:
                continue
            if len(keys) == 2 and peak <= limit and (f"{other} and {what}", peak) not in found:
                found.append((f"{what} and {other}", peak))
    return found


def check_fits(shape: PolicyConfig, config: RunConfig, sizes: dict[str, int]) -> None:
    """Refuse a run that does not fit, where the memory is known and plan.check is on.

    Raises:
        UserError: with what the run needs, what there is, and the first change that makes it fit.
    """
    limit = _device_limit(config) if config.plan.check else None
    if limit is None:
        return
    peak = memory_plan(shape, config, sizes).peak
    if peak <= limit[0]:
        return
    fitting = what_fits(shape, config, sizes, limit[0])
    advice = (
        f"set {fitting[0][0]} ({fitting[0][1] / _GB:.1f} GB)"
        if fitting
        else "no change that `fp8rl plan` knows is enough"
    )
    raise UserError(
        f"memory: the run needs {peak / _GB:.1f} GB a device, and there are {limit[0] / _GB:.1f} "
        f"GB ({limit[1]}): {advice}; "
        "`fp8rl plan` shows the figures, and plan.check = false tries it all the same"
    )


def device_text(shape: PolicyConfig, config: RunConfig, sizes: dict[str, int]) -> str:
    """Name the devices, and what the plan counts for each, of its memory where that is known."""
    text = f"{jax.device_count()} x {jax.local_devices()[0].device_kind}"
    plan, limit = memory_plan(shape, config, sizes), _device_limit(config)
    size, unit = _unit(plan)
    of = f" of {limit[0] / _GB:.1f} GB" if limit else ""
    return f"{text}, {plan.peak / size:.1f} {unit} needed{of} each"


def out_of_memory(shape: PolicyConfig, config: RunConfig, sizes: dict[str, int]) -> str:
    """What to tell of a run that asked for more than there was: its plan, and two changes."""
    plan = memory_plan(shape, config, sizes)
    size, unit = _unit(plan)
    peak, phase = plan.fullest
    smaller = [what for what, *_ in itertools.islice(changes(config, sizes), 2)]
    return (
        f"`fp8rl plan` counts {peak / size:.1f} {unit} a device, most of all in the {phase} "
        f"phase; set {' or '.join(smaller) or 'fewer prompts and tokens'}"
    )


def report(shape: PolicyConfig, config: RunConfig, sizes: dict[str, int]) -> tuple[str, bool]:
    """Print the plan as a table, and whether it fits where the device's memory is known.

    If it does not, also the changes under which it does.

    Returns:
        (text, False where it is known not to fit).
    """
    plan, limit = memory_plan(shape, config, sizes), _device_limit(config)
    lines = [
        f"{parameter_count(shape):,} parameters; mesh "
        f"{', '.join(f'{axis} {size}' for axis, size in sizes.items())}",
        _table(plan).rstrip(),
    ]
    if plan.rollout is not None:
        own = ", ".join(f"{axis} {size}" for axis, size in vars(config.mesh.rollout).items())
        lines += [f"Rollout, on devices of its own: {own}", _table(plan.rollout).rstrip()]
    if hearing := heard(config):
        lines.append(hearing)
    (peak, phase), (size, unit) = plan.fullest, _unit(plan)
    need = f"{peak / size:.1f} {unit} a device, in the {phase} phase"
    if limit is None:
        lines.append(
            f"Needs {need}. The device does not say what it has; name one with --plan.chip."
        )
        return "\n".join(lines), True
    have = f"{limit[0] / _GB:.1f} GB ({limit[1]})"
    if plan.peak <= limit[0]:
        return "\n".join([*lines, f"FITS: {need}, of {have}"]), True
    fitting = what_fits(shape, config, sizes, limit[0])
    lines.append(f"DOES NOT FIT: {need}, of {have}")
    lines.append("It fits with" if fitting else "No pair of changes that is tried here is enough.")
    return "\n".join([*lines, *(f"  {what}: {size / _GB:.1f} GB" for what, size in fitting)]), False


_USUAL_WEIGHT = 0.02
"""Standard deviation of weights at the start where config.json has no `initializer_range`."""


def heard(config: RunConfig) -> str:
    """Say after how many of Adam's updates a weight changes that starts on the grid of what is
    served.

    Nothing where it need not wait: with dithered masters and adapters, and where the checkpoint
    lies on no grid that the rollout rounds to. Nothing of SGD, which moves each weight by another
    length.

    A number w of p bits lies half a step, 2^(floor(log2 |w|) - p), from where it rounds to another
    one; in a format with scales that is between 2^-(p + 1) and 2^-p of it. Adam moves it by the
    learning rate at most as long as gradients are alike.

    Raises:
        UserError: the model's config.json is not read.
    """
    if config.lora.rank or not config.model.path or config.optimizer.name != "adamw":
        return ""
    if config.task.kind == "text":  # nothing is served
        return ""
    rate, recipe = config.optimizer.learning_rate, config.resolved_recipe
    directory = Path(find_model(config.model.path))
    fields = Fields(read_json(directory / "config.json"))
    size = fields.number("initializer_range", 0) or _USUAL_WEIGHT
    if lost := _lost(recipe, rate, size):
        return lost
    if layout := read_quantization(directory):
        stored = layout.format
        if stored is None or recipe.rollout.weight != stored:
            return ""  # the rollout rounds to another grid
        shared, drawn = recipe.trainer.weight == stored, in_blocks(stored)
        if drawn and config.dithers and recipe.shares_weights:
            return ""
        what, halves = f"{stored.element}, which the checkpoint is in,", _half_steps(stored, size)
        if shared and drawn:
            remedy = "With model.dither updates arrive in the mean from the first."
        else:
            remedy = (
                "From the checkpoint in bfloat16, or under a recipe whose trainer has this format, "
                "they arrive from the first."
                if drawn
                else "From the checkpoint in bfloat16 they arrive from the first."
            )
    elif config.compute_dtype == "float32" or config.dithers:
        return ""
    else:
        what, bits = config.compute_dtype, jnp.finfo(config.compute_dtype).nmant + 1
        halves = [2.0 ** (math.floor(math.log2(size)) - bits)]
        remedy = "With model.dither updates arrive in the mean from the first."
    needed = [max(math.ceil(half / rate), 1) for half in halves]
    updates = config.trainer.steps * config.trainer.updates_per_rollout
    return (
        f"Updates: a weight of {size:.2g} changes in {what} once it has moved by "
        f"{' to '.join(f'{half:.1e}' for half in halves)}, which is "
        f"{' to '.join(f'{n:,}' for n in needed)} updates in one direction at "
        f"optimizer.learning_rate = {rate:g}; the run has {updates:,}. {remedy}"
    )


def _lost(recipe: Recipe, rate: float, size: float) -> str:
    """What to say where masters are rounded to nearest and an update is less than half a step of
    theirs: it is lost, each time anew."""
    fmt = recipe.master
    if recipe.master_rounding == "stochastic" or not in_blocks(fmt):
        return ""
    bits = jnp.finfo(fmt.element_type.dtype).nmant + 1
    half = 2.0 ** (math.floor(math.log2(size)) - bits)
    if rate >= half:
        return ""
    return (
        f"Updates: masters in {fmt.name}, rounded to nearest, lose what moves a weight of "
        f"{size:.2g} by less than {half:.1e}, and an update moves it by "
        f'optimizer.learning_rate = {rate:g}. Set precision.master = "float32", or '
        'master_rounding = "stochastic" in a recipe of your own.'
    )


def _half_steps(fmt: TensorFormat, size: float) -> list[float]:
    """From the shortest to the longest, of a weight of this size in a format with scales."""
    if (bits := mantissa_bits(fmt)) is None:
        # 7 even steps of INT4 to a group's largest weight, which is 2 to 3 deviations
        return [size * deviations / 14 for deviations in (2, 3)]
    return [size * 2.0**-power for power in (bits + 2, bits + 1)]


def _unit(plan: Plan) -> tuple[float, str]:
    return (_GB, "GB") if plan.peak >= _GB else (1e6, "MB")


def _table(plan: Plan) -> str:
    table = rich.table.Table(box=SIMPLE_HEAD)
    unit, name = _unit(plan)
    for title in ("phase", "of one device", name):
        table.add_column(title, justify="right" if title == name else "left")
    for phase, parts in {"always": plan.always, **plan.phases}.items():
        for i, (name, size) in enumerate(parts.items()):
            table.add_row("" if i else phase, name, f"{size / unit:,.3f}")
        total = sum(plan.always.values()) if phase == "always" else plan.needs(phase)
        table.add_row(
            "",
            "together" if phase == "always" else f"{phase} with what is always there",
            f"{total / unit:,.3f}",
        )
        table.add_section()
    page = io.StringIO()
    rich.console.Console(file=page, width=110).print(table)
    return page.getvalue()
