"""A trainer's layer in FP8 against bfloat16: bytes read and written, bytes kept for the backward,
seconds.

    linear     gate_proj alone
    linears    q, k, v of one input, o, gate and up of one input, down: each input given, so what is
               kept is what linears keep
    layer      the whole layer, attention and norms included

"Saved" is what lies in memory between forward and backward: the arrays that reverse-mode
differentiation keeps, weights in the trainer's form left out (they lie there anyway), and what all
layers share (masks, rotary tables). "Accessed" is XLA's own count for the compiled program, of what
its fused operations read and write; the trainer's form is made from float32 masters in it, as an
update does.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.lib import xla_client

from experiments.benchmarks.record import OURS, contest, result
from experiments.benchmarks.rounds import Laps, Plan, Side
from experiments.benchmarks.workloads import Workload
from fp8rl_jax.config.recipe import RECIPES, Recipe
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.attention import LayerInputs
from fp8rl_jax.models.cache import KVCache
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.forms import trainer_policy
from fp8rl_jax.models.forward import TransformerLayer
from fp8rl_jax.models.policy import Layer, Policy, init_policy, unstack
from fp8rl_jax.precision import Compute

SETTINGS = {
    "linear": "gate_proj; forward and backward in one program, the trainer's weights made from "
    "float32 masters in it",
    "layer": "the whole layer, no rematerialization, attention in chunks where the library's "
    "default has them",
}
TIMED = ("linear", "layer")


def trained_layer(workload: Workload, plan: Plan, target: Target | None = None) -> dict[str, Any]:
    """Count and time the layer of `workload.layer`.

    Args:
        target: a GPU that need not be there; programs are compiled and counted for it, too.

    Returns:
        The entry. "bytes" has recipe -> part -> what was counted: "saved", and "accessed" by device
        and program. "byte_ratios" divide the first recipe's by each other's, as "ratios" do
        seconds: above 1, `under` has fewer.
    """
    shape, dtype = workload.layer, jnp.dtype(workload.compute_dtype)
    layers = {
        recipe: TrainedLayer(
            workload.config,
            RECIPES[recipe],
            shape.rows,
            shape.prompt_tokens + shape.new_tokens,
            dtype,
        )
        for recipe in workload.layer_recipes
    }
    counted = {
        recipe: {part: _bytes(layer, part, target) for part in PARTS}
        for recipe, layer in layers.items()
    }
    sides = {recipe: _side(layer) for recipe, layer in layers.items()}
    entry = result("trained_layer", workload, shape, contest(sides, SETTINGS, (), plan))
    return entry | {"bytes": counted, "byte_ratios": byte_ratios(counted)}


def byte_ratios(counted: dict[str, dict[str, dict[str, int]]]) -> list[dict[str, Any]]:
    """Every count of the first recipe over the same of each other one."""
    first, *others = counted
    return [
        {
            "over": OURS + first,
            "under": OURS + other,
            "part": f"{part}, {what}",
            "ratio": value / counted[other][part][what],
        }
        for other in others
        for part, counts in counted[first].items()
        for what, value in counts.items()
    ]


def _bytes(layer: TrainedLayer, part: str, target: Target | None) -> dict[str, int]:
    counts = {"saved": saved_bytes(layer, part)}
    devices = {jax.default_backend(): None} | (
        {} if target is None else {target.name: target.sharding}
    )
    for device, sharding in devices.items():
        for program, value in accessed_bytes(layer, part, sharding).items():
            counts[f"accessed by {program} on {device}"] = value
    return counts


def _side(layer: TrainedLayer) -> Side:
    masters = jax.jit(layer.masters)()
    work = {
        part: (
            jax.jit(layer.programs(part)["forward_and_backward"]),
            jax.jit(layer.inputs, static_argnums=0)(part),
        )
        for part in TIMED
    }

    def run(number: int) -> dict[str, float]:
        laps = Laps()
        for part, (program, inputs) in work.items():
            laps.end(part, program(inputs, masters))
        return laps.seconds

    return run


INPUTS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
"""The linears of a layer, those together that share an input."""
PARTS = ("linear", "linears", "layer")


@dataclass(frozen=True)
class TrainedLayer:
    """A layer of a policy's shape on `rows` rows of `length` tokens.

    Attributes:
        config: dense; of its layers there is one here, and of its vocabulary little.
        dtype: compute dtype.
    """

    config: PolicyConfig
    recipe: Recipe
    rows: int
    length: int
    dtype: jnp.dtype

    def masters(self) -> Policy:
        """Random float32 weights, layers stacked."""
        config = replace(
            self.config,
            num_layers=1,
            vocab_size=128,
            bos_token_id=None,
            eos_token_ids=(),
            pad_token_id=None,
        )
        return init_policy(config, jax.random.key(0))

    def inputs(self, part: str) -> Any:
        """Random activations that `run` takes."""
        config = self.config
        widths = [config.hidden_size, config.q_size, config.hidden_size, config.intermediate_size]
        draws = [
            jax.random.normal(jax.random.key(1 + i), (self.rows, self.length, width)).astype(
                self.dtype
            )
            for i, width in enumerate(widths)
        ]
        return draws if part == "linears" else draws[0]

    def form(self, masters: Policy) -> Layer:
        """The layer's weights as the trainer multiplies them."""
        return unstack(trainer_policy(masters, self.recipe, self.dtype)).layers[0]

    def run(self, part: str) -> Callable[[Any, Layer], Any]:
        """The part as a function of its inputs and the trainer's weights."""
        positions = jnp.broadcast_to(jnp.arange(self.length), (self.rows, self.length))
        step = TransformerLayer(
            self.config, Compute(), positions, jnp.ones_like(positions), KVCache()
        )

        def linears(inputs, layer):
            return [
                step.project(x, *(getattr(layer, name) for name in names))
                for x, names in zip(inputs, INPUTS, strict=True)
            ]

        return {
            "linear": lambda x, layer: step.project(x, layer.gate_proj),
            "linears": linears,
            "layer": lambda x, layer: step(x, layer, None, LayerInputs())[0],
        }[part]

    def saved(self, part: str) -> list[jax.ShapeDtypeStruct]:
        """The arrays that are kept for the backward; nothing is computed."""
        run, form = self.run(part), jax.eval_shape(lambda: self.form(self.masters()))

        def kept(inputs, form):
            leaves = jax.tree.leaves(jax.vjp(run, inputs, form)[1])
            weights = {id(leaf) for leaf in jax.tree.leaves(form)}
            own = {
                id(x): x for x in leaves if isinstance(x, jax.core.Tracer) and id(x) not in weights
            }
            return list(own.values())

        return jax.eval_shape(kept, jax.eval_shape(partial(self.inputs, part)), form)

    def programs(self, part: str) -> dict[str, Callable]:
        """The forward, and the forward and backward together, as functions of (inputs, masters)."""
        run = self.run(part)

        def forward(inputs, masters):
            return run(inputs, self.form(masters))

        def both(inputs, masters):
            out, back = jax.vjp(forward, inputs, masters)
            return out, back(out)

        return {"forward": forward, "forward_and_backward": both}


def saved_bytes(layer: TrainedLayer, part: str) -> int:
    """Bytes of `TrainedLayer.saved`."""
    return sum(x.size * x.dtype.itemsize for x in layer.saved(part))


def accessed_bytes(
    layer: TrainedLayer, part: str, sharding: jax.sharding.Sharding | None = None
) -> dict[str, int]:
    """Bytes that the compiled programs read and write, by XLA's count.

    Args:
        sharding: on a device that need not be there, to compile for it; default: this process's
            own.
    """
    shapes = jax.eval_shape(lambda: (layer.inputs(part), layer.masters()))
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes
    )
    with contextlib.nullcontext() if sharding is None else _uncached():
        compiled = {
            name: jax.jit(program).lower(*shapes).compile()
            for name, program in layer.programs(part).items()
        }
    return {name: int(_analysis(program)["bytes accessed"]) for name, program in compiled.items()}


@contextlib.contextmanager
def _uncached() -> Iterator[None]:
    """Programs go into no cache: one for a device that is not there could not be read from it
    again."""
    key = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, key)
    jax.config.update(key, math.inf)
    try:
        yield
    finally:
        jax.config.update(key, before)


def _analysis(compiled: jax.stages.Compiled) -> dict[str, float]:
    """XLA's cost analysis. A program of a device that is not there has none of its own: its
    optimized HLO is counted here."""
    if (analysis := compiled.cost_analysis()) is not None:
        return analysis
    (module,) = compiled.runtime_executable().hlo_modules()
    return xla_client._xla.hlo_module_cost_analysis(jax.devices("cpu")[0].client, module)


@dataclass(frozen=True)
class Target:
    """The device's name, and the sharding of a program that runs on it alone."""

    name: str
    sharding: jax.sharding.Sharding


def load_target(file: str) -> Target | None:
    """The device that a file describes (XLA's GpuTargetConfigProto in text form); None for no file.

    Raises:
        UserError: the file cannot be read, is no description, or the packages are missing.
    """
    if not file:
        return None
    # importing Pallas takes longer than importing JAX
    from pallas_kernels.check.compile import sharding_on

    try:
        text = Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--gpu-target: {file} cannot be read ({error})") from None
    named = re.search(r'device_description_str: *"([^"]+)"', text)
    if named is None:
        raise UserError(
            f"--gpu-target: {file} has no device_description_str; it must be a "
            "GpuTargetConfigProto in text form"
        )
    try:
        sharding = sharding_on(text)
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"--gpu-target: {reason}; it needs jax-cuda13-plugin and jax-cuda13-pjrt of jax's "
            "version"
        ) from None
    return Target(named[1], sharding)
