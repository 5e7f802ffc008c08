"""Does a run fit, and if not, what would make it: every answer is a plan of its own, computed from
the changed configuration."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace

import jax
import rich.console
import rich.table

from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.config.training import DEVICE_BYTES
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.policy import parameter_count
from fp8rl_jax.training.plan import Plan, memory_plan

_FSDP = (2, 4, 8, 16)
_GB = 1e9


def device_limit(config: RunConfig) -> tuple[int, str] | None:
    """Bytes of one device and where the figure is from: plan.device, or what the device reports;
    None where neither says."""
    chosen = config.plan.device
    if chosen in DEVICE_BYTES:
        return DEVICE_BYTES[chosen], chosen
    if chosen:
        return int(float(chosen)), "plan.device"
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
    """Single changes that make a run smaller, the cheapest first: (what to set, the changed run,
    its mesh)."""
    optimizer, trainer, rollout = config.optimizer, config.trainer, config.rollout
    part = rollout.prompts_per_step // trainer.updates_per_rollout
    if trainer.micro_batch_prompts != 1 and part > 1:
        yield (
            "trainer.micro_batch_prompts = 1",
            replace(config, trainer=replace(trainer, micro_batch_prompts=1)),
            sizes,
        )
    if trainer.remat == "none":
        yield (
            'trainer.remat = "layer"',
            replace(config, trainer=replace(trainer, remat="layer")),
            sizes,
        )
    for name in ("bfloat16", "e4m3"):
        small = replace(optimizer, first_moment=name, second_moment=name)
        if name != "e4m3" or not RunConfig(optimizer=small).problems():
            yield (
                f'optimizer.first_moment = optimizer.second_moment = "{name}"',
                replace(config, optimizer=small),
                sizes,
            )
    for parts in _FSDP:
        rows = parts * sizes["data"] * sizes["expert"]
        if parts > sizes["fsdp"] and rollout.prompts_per_step % rows == 0:
            yield f"mesh.fsdp = {parts}", config, sizes | {"fsdp": parts}
    fewer = rollout.samples_per_prompt // 2
    if fewer >= 2:
        what = f"rollout.samples_per_prompt = {fewer}"
        yield what, replace(config, rollout=replace(rollout, samples_per_prompt=fewer)), sizes


def what_fits(
    shape: PolicyConfig, config: RunConfig, sizes: dict[str, int], limit: int
) -> list[tuple[str, int]]:
    """The changes under which the run fits into `limit` bytes a device, each with its peak.

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
    """Refuses a run that does not fit, where the device's memory is known and plan.check is on.

    Raises:
        UserError: with what the run needs, what there is, and the first change that makes it fit.
    """
    limit = device_limit(config) if config.plan.check else None
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


def report(shape: PolicyConfig, config: RunConfig, sizes: dict[str, int]) -> tuple[str, bool]:
    """The plan as a table, whether it fits where the device's memory is known, and if not, the
    changes under which it does.

    Returns:
        (text, False where it is known not to fit).
    """
    plan, limit = memory_plan(shape, config, sizes), device_limit(config)
    lines = [
        f"{parameter_count(shape):,} parameters; mesh "
        f"{', '.join(f'{axis} {size}' for axis, size in sizes.items())}",
        _table(plan).rstrip(),
    ]
    peak = max(plan.phases, key=plan.needs)
    size, unit = _unit(plan)
    need = f"{plan.peak / size:.1f} {unit} a device, in the {peak} phase"
    if limit is None:
        lines.append(
            f"Needs {need}. The device does not say what it has; name one with --plan.device."
        )
        return "\n".join(lines), True
    have = f"{limit[0] / _GB:.1f} GB ({limit[1]})"
    if plan.peak <= limit[0]:
        return "\n".join([*lines, f"FITS: {need}, of {have}"]), True
    fitting = what_fits(shape, config, sizes, limit[0])
    lines.append(f"DOES NOT FIT: {need}, of {have}")
    lines.append("It fits with" if fitting else "No pair of changes that is tried here is enough.")
    return "\n".join([*lines, *(f"  {what}: {size / _GB:.1f} GB" for what, size in fitting)]), False


def _unit(plan: Plan) -> tuple[float, str]:
    return (_GB, "GB") if plan.peak >= _GB else (1e6, "MB")


def _table(plan: Plan) -> str:
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD)
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
