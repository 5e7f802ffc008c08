"""How long a step takes at least on devices that need not be here, and what they send each other:
from shapes and data sheets alone, nothing measured.

A phase takes at least the longest of three times (the roofline: Williams et al., 2009): its
products at the device's rate, its bytes of memory at the memory's bandwidth, and what it sends over
data, fsdp and expert, which may travel while something is computed. What it sends over `tensor` is
added: a layer waits for its own sums.

    prefill     prompts forward, each once for its completions
    decode      `max_new_tokens` steps: each reads all weights that are served, keys and values
                of each prompt once, and those of the completions so far
    update      three forwards (a fourth of each layer where it is computed again), masters,
                moments and gradients read and written; gathers and sums
    sync        masters read, what is served written

Completions count as long as they may be; forwards for the log-probabilities of an older or a
reference policy do not count. What is sent is what XLA makes of this library's programs today, not
what would be needed at least: sums over tensor travel in float32 in a rollout, and in an update
where the weights are an adapter's base; the gradients of linears that are not quantized are summed
apart for prompts and completions.
`python -m experiments.collectives` compiles programs, and tests/training/test_roofline.py holds
these bytes to its record.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import jax.numpy as jnp
import numpy as np
import rich.console
import rich.table
from rich.box import SIMPLE_HEAD

from fp8rl_jax.config.chips import CHIPS, Chip
from fp8rl_jax.config.formats import WHOLE, TensorFormat
from fp8rl_jax.config.recipe import PrecisionConfig
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.policy import EXPERT_LINEARS, LINEARS, matrix_parameters, tensor_specs
from fp8rl_jax.parallel import DECODE_RULES, batch_shards, scale_spec
from fp8rl_jax.parallel.mesh import AXES, axes_text
from fp8rl_jax.training.checks import check_mesh
from fp8rl_jax.training.performance import attention_flops, update_flops
from fp8rl_jax.training.plan import (
    Footprint,
    abstract_mesh,
    footprint,
    memory_plan,
    rollout_sizes,
)

_SAMPLING = ("prefill", "decode")
_FORWARD_SUMS, _AGAIN_SUMS, _BACKWARD_SUMS = 2, 1, 2
"""Sums of hidden states over tensor in a layer: of attention and feed-forward; of the attention
alone where the layer is computed again; of the gradients of what queries, keys and values share,
and gate and up."""
_APART_SUMS = 5
"""Of these gradients, where each weight has its own."""
_RANKED = 8


@dataclass
class Work:
    """What one device does in a phase.

    Attributes:
        flops, fp8_flops: of products in 16 bits, and in FP8.
        bytes: read from its memory and written to it.
        sent: bytes that it sends over a ring, by mesh axis.
    """

    flops: float = 0.0
    fp8_flops: float = 0.0
    bytes: float = 0.0
    sent: dict[str, float] = field(default_factory=dict)

    def times(self, chip: Chip, sizes: dict[str, int]) -> dict[str, float]:
        """Seconds of each bound: "products", "memory", "links", and of "tensor"'s sums."""
        links = {axis: sent / link_rate(axis, chip, sizes) for axis, sent in self.sent.items()}
        return {
            "products": self.flops / chip.rate + self.fp8_flops / chip.fp8_rate,
            "memory": self.bytes / chip.bandwidth,
            "links": sum(seconds for axis, seconds in links.items() if axis != "tensor"),
            "tensor": links.get("tensor", 0.0),
        }

    def least(self, chip: Chip, sizes: dict[str, int]) -> float:
        """Seconds that the phase takes at least."""
        *bounds, waits = self.times(chip, sizes).values()
        return max(bounds) + waits


def link_rate(axis: str, chip: Chip, sizes: dict[str, int]) -> float:
    """Bytes per second that a device can send over a ring along a mesh axis.

    Devices that are joined by the chip's own links are neighbours of the innermost axes. Where a
    ring leaves them it has the network adapters of all its devices inside.
    """
    inner = math.prod(sizes[other] for other in AXES[AXES.index(axis) + 1 :])
    inside = min(max(chip.joined // inner, 1), sizes[axis])
    return chip.link if inside == sizes[axis] else min(chip.link, chip.network * inside)


def step_work(
    shape: PolicyConfig, config: RunConfig, sizes: dict[str, int], chip: Chip
) -> dict[str, Work]:
    """Count what one device does in a step, by phase.

    Args:
        shape: of the policy.
        config: the run's configuration.
        sizes: of the mesh's axes.
        chip: decides which products have kernels.

    Returns:
        "prefill", "decode", "update" and "sync"; of a run on text "update" alone, and without the
        first two where vLLM samples.

    Raises:
        UserError: as `memory_plan`.
    """
    held = footprint(shape, config, abstract_mesh(sizes))
    work = {"update": _update(shape, config, sizes, held, chip)}
    rollout = rollout_sizes(config.mesh, sizes)
    if config.task.kind == "text":
        return work
    sync = Work(bytes=held.masters + held.served)
    if config.rollout.engine == "vllm":
        return work | {"sync": sync}
    if rollout is not sizes:
        held = footprint(shape, config, abstract_mesh(rollout))
    return _rollout(shape, config, rollout, held, chip) | work | {"sync": sync}


def _seconds_of(
    work: dict[str, Work], config: RunConfig, sizes: dict[str, int], chip: Chip
) -> dict[str, float]:
    """Seconds that each phase takes at least on the devices that run it."""
    rollout = rollout_sizes(config.mesh, sizes)
    return {
        phase: each.least(chip, rollout if phase in _SAMPLING else sizes)
        for phase, each in work.items()
    }


def _step(seconds: dict[str, float], config: RunConfig) -> float:
    """Seconds of a step, in which the rollout may be beside the rest."""
    sampled = sum(seconds.get(phase, 0.0) for phase in _SAMPLING)
    if not config.rollout.steps_ahead:
        return sum(seconds.values())
    return max(sampled, seconds["update"]) + seconds["sync"]


def _ring(nbytes: float, devices: int) -> float:
    """What a device sends in a gather, or a scatter of sums, of so many bytes in all."""
    return nbytes * (devices - 1) / devices


def _in_fp8(chip: Chip, *operands: TensorFormat) -> bool:
    return chip.hopper and all(x.quantized and x.element in ("e4m3", "e5m2") for x in operands)


def _rollout(
    shape: PolicyConfig,
    config: RunConfig,
    sizes: dict[str, int],
    held: Footprint,
    chip: Chip,
) -> dict[str, Work]:
    recipe, r, tensor = config.resolved_recipe, config.rollout, sizes["tensor"]
    shards = batch_shards(abstract_mesh(sizes))
    prompts, steps = r.prompts_per_step / shards, r.max_new_tokens
    rows, hidden = prompts * r.samples_per_prompt, shape.hidden_size
    matrices = 2 * matrix_parameters(shape) / tensor
    head = 2 * hidden * shape.vocab_size / tensor
    fp8 = _in_fp8(chip, recipe.rollout.weight, recipe.rollout.activation)
    read = np.full(1, r.max_prompt_tokens), np.full(1, r.max_prompt_tokens + steps)
    before, after = (prompts * attention_flops(shape, lengths)[0] / tensor for lengths in read)
    grown = r.samples_per_prompt * (after - before)

    gathered = _gathered(shape, recipe.rollout.weight, sizes) if fp8 else 0.0

    def work(tokens: float, heads: float, attention: float, nbytes: float, passes: int = 1) -> Work:
        products = matrices * tokens
        other = head * heads + attention
        sums = {"tensor": 2 * _ring(_FORWARD_SUMS * shape.num_layers * tokens * hidden * 4, tensor)}
        sums["tensor"] += passes * gathered
        if sizes["expert"] > 1:
            sums["expert"] = _routed(shape, tokens, sizes["expert"], 2 + 4)
        split = (other, products) if fp8 else (other + products, 0.0)
        return Work(*split, nbytes, {axis: sent for axis, sent in sums.items() if sent})

    prompt = prompts * r.max_prompt_tokens
    prefill = work(prompt, prompts, before, held.gathered + prompt * held.token)
    if sizes["fsdp"] > 1:
        prefill.sent["fsdp"] = held.gathered - held.served
    # a step reads each prompt once, its completions so far, and the experts that its rows choose
    cached = (prompt * steps + rows * steps * (steps + 1) / 2) * held.token
    weights = held.read - held.looked_up - held.experts * (1 - _chosen(shape, rows, sizes))
    decode = work(rows * steps, rows * steps, grown, steps * weights + cached, steps)
    return {"prefill": prefill, "decode": decode}


def _chosen(shape: PolicyConfig, rows: float, sizes: dict[str, int]) -> float:
    """The share of a device's experts that some row chooses, where all are as likely."""
    if shape.experts is None:
        return 1.0
    share = shape.experts.per_token / shape.experts.count
    return 1 - (1 - share) ** (rows * sizes["expert"])


def _routed(shape: PolicyConfig, tokens: float, experts: int, width: int) -> float:
    """Bytes to exchange rows of all devices of the axis, `width` bytes a number: gathered in 16
    bits, and the sums of their results scattered in float32."""
    return _sparse(shape) * _ring(experts * tokens * shape.hidden_size * width, experts)


def _gathered(shape: PolicyConfig, weight: TensorFormat, sizes: dict[str, int]) -> float:
    """Bytes that a device sends to gather over tensor, at each product, the FP8 linears of which
    devices would share a block: kernels multiply these whole."""
    held, mesh, specs = 0.0, abstract_mesh(sizes), tensor_specs(shape)
    for name in (*LINEARS, *EXPERT_LINEARS):
        if f"layers.{name}" not in specs:
            continue
        sides, axes = specs[f"layers.{name}"]
        m, n = weight.block or (WHOLE, WHOLE)
        block = (sides[-2] if m == WHOLE else m, sides[-1] if n == WHOLE else n)
        blocks = (*sides[:-2], -(-sides[-2] // block[0]), -(-sides[-1] // block[1]))
        spec = DECODE_RULES.spec(axes, sides, mesh, name)
        if scale_spec(spec, sides, block, blocks, mesh) != spec:
            held += math.prod(sides) / (sizes["expert"] if "experts" in axes else 1)
    return _ring(held, sizes["tensor"])


def _sparse(shape: PolicyConfig) -> int:
    """Layers that have experts."""
    return shape.num_layers - len(shape.experts.dense_layers) if shape.experts else 0


def _update(
    shape: PolicyConfig,
    config: RunConfig,
    sizes: dict[str, int],
    held: Footprint,
    chip: Chip,
) -> Work:
    recipe, r, t = config.resolved_recipe, config.rollout, config.trainer
    shards, tensor = batch_shards(abstract_mesh(sizes)), sizes["tensor"]
    again = t.remat == "layer"
    if config.task.kind == "text":
        rows, micro = config.sft.batch_size, config.sft.micro_batch_rows or config.sft.batch_size
        prompts, completions = np.full(1, 0), np.full(1, config.sft.row_tokens)
        count, parts, updates = rows, rows / micro, 1
    else:
        prompts = np.full(1, r.max_prompt_tokens)
        completions = np.full(r.samples_per_prompt, r.max_new_tokens)
        updates = t.updates_per_rollout
        count = r.prompts_per_step
        micro = t.micro_batch_prompts or count / updates
        parts = count / updates / micro
    tokens = count / shards * (prompts.sum() + completions.sum())
    frozen = bool(config.lora.rank)
    flops = count / shards * update_flops(shape, prompts, completions, frozen=frozen) / tensor
    once = 2 * matrix_parameters(shape) * tokens / tensor  # of each of the products
    flops += once * again
    forward = _in_fp8(chip, recipe.trainer.weight, recipe.trainer.activation)
    back = _in_fp8(chip, recipe.trainer.weight, recipe.output_gradient)
    weight = _in_fp8(chip, recipe.output_gradient, recipe.linear("trainer").saved_activation)
    fp8 = once * (forward * (1 + again) + back + (weight and not frozen))
    width = jnp.dtype(config.compute_dtype).itemsize
    elements = held.elements
    # weights read for each product, gradients added to their sums; the optimizer reads and writes
    passes = 2 + again + 1
    moved = parts * (passes * elements * width + 8 * elements)
    moved += 2 * (held.masters + held.optimizer) + 4 * elements
    f, d = sizes["fsdp"], sizes["data"]
    quantized = recipe.trainer.weight.quantized
    # of adapters the base is gathered, and theirs is next to nothing
    served = held.gathered if quantized or frozen else elements * f * width
    halves = 1 if quantized else 2
    backward, sum_width = (_APART_SUMS, 4) if frozen else (_BACKWARD_SUMS, width)
    sums = shape.num_layers * (_FORWARD_SUMS + again * _AGAIN_SUMS + backward) * sum_width
    sums += _sparse(shape) * (4 - sum_width)  # those of experts in float32
    gathered = _gathered(shape, recipe.trainer.weight, sizes) if forward else 0.0
    sent = {
        "fsdp": parts * (2 * _ring(served, f) + halves * _ring(4 * elements * f, f)),
        "data": halves * 2 * _ring(held.gradients, d),
        "tensor": 2 * _ring(sums * tokens * shape.hidden_size, tensor)
        + updates * parts * (2 + again) * gathered,
        # forward, again for the input alone, and backward in 16 bits both ways
        "expert": _routed(shape, tokens, sizes["expert"], 2 + 4 + 2 * again + 2 + 2),
    }
    if frozen:
        sent["fsdp"], sent["data"] = parts * 2 * _ring(served, f), 0.0
    return Work(
        flops - fp8,
        fp8,
        updates * moved,
        {
            axis: nbytes * (updates if axis in ("fsdp", "data") else 1)
            for axis, nbytes in sent.items()
            if nbytes
        },
    )


@dataclass(frozen=True)
class Outlook:
    """A mesh, and what a step on it needs at least.

    Attributes:
        sizes: of the mesh's axes.
        micro: prompts of a micro-batch; 0: all of an update.
        peak: bytes of one device.
        seconds: at least, by phase.
        step: the same of a whole step.
        tokens: that all devices sample in a second at most; 0 where nothing of ours samples.
    """

    sizes: dict[str, int]
    micro: int
    peak: int
    seconds: dict[str, float]
    step: float
    tokens: float


def outlook(shape: PolicyConfig, config: RunConfig, sizes: dict[str, int], chip: Chip) -> Outlook:
    """Plan memory and times of a mesh.

    Raises:
        UserError: the run cannot have that mesh.
    """
    check_mesh(config, shape, abstract_mesh(sizes))
    peak = memory_plan(shape, config, sizes).peak
    seconds = _seconds_of(step_work(shape, config, sizes, chip), config, sizes, chip)
    r = config.rollout
    sampled = r.prompts_per_step * r.samples_per_prompt * r.max_new_tokens
    rolled = seconds.get("prefill", 0.0) + seconds.get("decode", 0.0)
    return Outlook(
        sizes,
        config.trainer.micro_batch_prompts,
        peak,
        seconds,
        _step(seconds, config),
        sampled / rolled if rolled else 0.0,
    )


def meshes(shape: PolicyConfig, devices: int, chip: Chip) -> Iterator[dict[str, int]]:
    """List the meshes of so many devices in which tensor stays where the chip's links join."""
    for tensor in _divisors(devices):
        if tensor > min(chip.joined, shape.num_heads):
            continue
        for expert in _divisors(devices // tensor):
            count = shape.experts.count if shape.experts is not None else 1
            if count % expert:
                continue
            for fsdp in _divisors(devices // tensor // expert):
                data = devices // tensor // expert // fsdp
                yield {"data": data, "fsdp": fsdp, "expert": expert, "tensor": tensor}


def _divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


def best_meshes(shape: PolicyConfig, config: RunConfig, devices: int, chip: Chip) -> list[Outlook]:
    """Rank the meshes of so many devices on which the run fits, the shortest step first.

    With micro-batches as they are set, or else of one prompt a shard.
    """
    found = []
    for sizes in meshes(shape, devices, chip):
        shards = batch_shards(abstract_mesh(sizes))
        least = replace(config.trainer, micro_batch_prompts=shards)
        for tried in (config, replace(config, trainer=least)):
            try:
                one = outlook(shape, tried, sizes, chip)
            except UserError:  # a tensor or a batch that does not divide by that mesh
                continue
            if one.peak <= chip.memory:
                found.append(one)
                break
    return sorted(found, key=lambda one: (one.step, one.peak))


def largest_batch(
    shape: PolicyConfig, config: RunConfig, sizes: dict[str, int], limit: float
) -> int:
    """Find the most prompts a step with which the run fits into `limit` bytes a device; 0: none.

    A multiple of what the mesh and the updates of a rollout ask for. A micro-batch stays as large
    as it is set.
    """
    unit = batch_shards(abstract_mesh(sizes)) * config.trainer.updates_per_rollout
    unit = math.lcm(unit, batch_shards(abstract_mesh(rollout_sizes(config.mesh, sizes))))
    micro = config.trainer.micro_batch_prompts
    unit = math.lcm(unit, micro * config.trainer.updates_per_rollout) if micro else unit

    def fits(units: int) -> bool:
        prompts = replace(config.rollout, prompts_per_step=units * unit)
        return memory_plan(shape, replace(config, rollout=prompts), sizes).peak <= limit

    if not fits(1):
        return 0
    low, high = 1, 2
    while high * unit <= 2**20 and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * unit


def describe(shape: PolicyConfig, config: RunConfig, sizes: dict[str, int]) -> str:
    """Write what `outlook` finds for the chip that plan.chip names: a table of phases beside the
    recipe bf16, what is sent, the largest batch, and the best meshes."""
    chip = CHIPS[config.plan.chip]
    devices = math.prod(sizes.values())
    work = step_work(shape, config, sizes, chip)
    defaults = PrecisionConfig(backend=config.precision.backend)
    plain = step_work(shape, replace(config, recipe="bf16", precision=defaults), sizes, chip)
    own = config.mesh.rollout.size
    beside = f" beside {own} of the rollout's own" if own else ""
    lines = [
        f"At least, on {devices} {config.plan.chip}{beside}, of a step with completions of "
        f"{config.rollout.max_new_tokens:,} tokens (a model of the data sheet's rates; nothing is "
        "measured):",
        _phases(work, plain, config, chip, sizes),
    ]
    here = outlook(shape, config, sizes, chip)
    if here.tokens:
        lines.append(f"Rollout: at most {here.tokens:,.0f} tokens/s on all devices.")
    if config.task.kind != "text":
        most = largest_batch(shape, config, sizes, chip.memory)
        lines.append(
            f"The largest batch that fits this mesh: rollout.prompts_per_step = {most}."
            if most
            else "No batch fits this mesh."
        )
    best = best_meshes(shape, config, devices, chip)
    place = next((i for i, one in enumerate(best) if one.sizes == sizes), None)
    lines.append(
        f"It fits on {len(best)} meshes of {devices} {config.plan.chip}{beside}, the shortest step "
        "first "
        f"(the same model{'' if place is None else f'; this one is number {place + 1}'}):\n"
        + _meshes(best)
        if best
        else f"It fits on no mesh of {devices} {config.plan.chip}."
    )
    return "\n".join(lines)


def _phases(
    work: dict[str, Work],
    plain: dict[str, Work],
    config: RunConfig,
    chip: Chip,
    sizes: dict[str, int],
) -> str:
    table = _table("phase", "products", "memory", "links", "tensor", "at least", "bf16", "sent")
    found, others = (_seconds_of(each, config, sizes, chip) for each in (work, plain))
    for phase, each in work.items():
        times = each.times(chip, rollout_sizes(config.mesh, sizes) if phase in _SAMPLING else sizes)
        least, other = found[phase], others[phase]
        sent = ", ".join(f"{axis} {size_text(nbytes)}" for axis, nbytes in each.sent.items())
        table.add_row(phase, *map(_seconds, (*times.values(), least, other)), sent)
    table.add_section()
    total = (_seconds(_step(each, config)) for each in (found, others))
    table.add_row("step", "", "", "", "", *total, "")
    return _printed(table)


def _meshes(best: list[Outlook]) -> str:
    table = _table(
        "mesh",
        "micro-batch",
        "GB a device",
        "rollout",
        "update",
        "step at least",
        "tokens/s at most",
    )
    for one in best[:_RANKED]:
        rollout = one.seconds.get("prefill", 0.0) + one.seconds.get("decode", 0.0)
        table.add_row(
            axes_text(one.sizes) or "one device",
            f"{one.micro:,}" if one.micro else "all",
            f"{one.peak / 1e9:,.1f}",
            *map(_seconds, (rollout, one.seconds["update"], one.step)),
            f"{one.tokens:,.0f}",
        )
    return _printed(table)


def size_text(nbytes: float) -> str:
    """Write bytes in the unit that fits: 96.5 GB, 4 kB."""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= size:
            return (
                f"{nbytes / size:,.4g} {unit}"
                if nbytes < 1e3 * size
                else f"{nbytes / size:,.0f} {unit}"
            )
    return f"{nbytes:.0f} B"


def _seconds(x: float) -> str:
    return f"{x:,.1f} s" if x >= 10 else f"{x:.2f} s" if x >= 0.1 else f"{1e3 * x:.2f} ms"


def _table(first: str, *titles: str) -> rich.table.Table:
    table = rich.table.Table(box=SIMPLE_HEAD)
    table.add_column(first)
    for title in titles:
        table.add_column(title, justify="left" if title == "sent" else "right")
    return table


def _printed(table: rich.table.Table) -> str:
    page = io.StringIO()
    rich.console.Console(file=page, width=130).print(table)
    return page.getvalue().rstrip()
