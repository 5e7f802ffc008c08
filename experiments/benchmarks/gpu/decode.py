"""Part `decode`: steps of the sampler's decode loop at Qwen3-8B's shape, in bfloat16, with FP8
weights, with an FP8 cache, and with both.

Weights and cache are random: what a step costs does not depend on them. All sides are in memory
together, so that they can take turns, and have as many layers as fit, 16 at most, since each layer
takes seconds to compile; the output head is a larger part of a step than in the whole model.
`read_bytes` is what a step has to read, weights and cache; over the seconds and a copy's bytes a
second it is the share of the bandwidth that is reached.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from experiments.benchmarks.gpu.figures import DECODE, DECODE_BF16, DECODE_BOTH
from experiments.benchmarks.gpu.jobs import Job, Setting
from experiments.benchmarks.gpu.timing import Work, bytes_of, compare
from experiments.benchmarks.gpu.training import device_memory, tiny_workload
from experiments.benchmarks.workloads import qwen3_config
from fp8rl_jax.config.recipe import PrecisionConfig, get_recipe
from fp8rl_jax.models.cache import KVBlock, KVScales, empty_block, empty_cache
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.forms import predequantized, rollout_policy
from fp8rl_jax.models.policy import Policy, init_policy, with_scales
from fp8rl_jax.rollout import sampler
from fp8rl_jax.rollout.sampling import Sampling
from pallas_kernels.decode_attention import whole_slots

SIDES = {
    DECODE_BF16: "bf16",
    "FP8 weights": "fp8-rollout",
    "FP8 cache": "fp8-kv",
    DECODE_BOTH: "fp8-rl",
}
"""Name -> recipe."""
POINTS = {DECODE: (128, 2048), "32 x 512": (32, 512), "16 x 16384": (16, 16384)}
"""Label -> rows that decode together, and tokens of context of each."""
STEPS, MOST_LAYERS = 16, 16
PART_OF_MEMORY = 0.75


def jobs(setting: Setting) -> list[Job]:
    """Both against bfloat16 at each point, then all four sides; in miniature both alone."""
    points = {DECODE: (2, 16)} if setting.tiny else POINTS
    job = partial(
        Job,
        sources=(__name__, "pallas_kernels", "fp8rl_jax"),
        operation="decode",
        seconds=240.0,
    )
    rounds = {"": {name: SIDES[name] for name in (DECODE_BF16, DECODE_BOTH)}}
    if not setting.tiny:
        rounds[", by part"] = SIDES
    return [
        job(f"{label}{more}", partial(decode, setting, sides, *point))
        for more, sides in rounds.items()
        for label, point in points.items()
    ]


def decode(setting: Setting, sides: dict[str, str], rows: int, context: int) -> dict[str, Any]:
    """Time `STEPS` steps of every side, in turns.

    Args:
        sides: name -> recipe.
    """
    config, steps = tiny_workload().config, 3
    if not setting.tiny:
        room = PART_OF_MEMORY * device_memory()
        config, steps = shape_for(room, sides, rows, context, setting), STEPS
    works = {
        name: Work(
            partial(run, steps), partial(arguments, config, recipe, rows, context, steps, setting)
        )
        for name, recipe in sides.items()
    }
    timed = compare(setting, works, (DECODE_BOTH,))
    if setting.compile_only:
        return timed
    read = {name: read_bytes(work) for name, work in works.items()}
    medians = {name: seconds["median"] for name, seconds in timed["seconds"].items()}
    return timed | {
        "layers": config.num_layers,
        "steps": steps,
        "read_bytes": read,
        "tokens_per_second": {name: rows * steps / x for name, x in medians.items()},
        "read_bytes_per_second": {name: read[name] * steps / x for name, x in medians.items()},
    }


def shape_for(
    memory: float, sides: dict[str, str], rows: int, context: int, setting: Setting
) -> PolicyConfig:
    """Qwen3-8B's shape, with as many of its 36 layers as all sides have room for, up to
    MOST_LAYERS."""

    def bytes_for(layers: int) -> int:
        config = qwen3_config(4096, 12288, layers, num_heads=32)
        shapes = [
            jax.eval_shape(
                partial(arguments, config, recipe, rows, context, STEPS, setting),
                jax.random.key(0),
            )
            for recipe in sides.values()
        ]
        return sum(map(bytes_of, shapes))

    one = bytes_for(1)
    layer = bytes_for(2) - one
    layers = max(1, min(MOST_LAYERS, 1 + int((memory - one) // layer)))
    return qwen3_config(4096, 12288, layers, num_heads=32)


def arguments(
    config: PolicyConfig,
    name: str,
    rows: int,
    context: int,
    steps: int,
    setting: Setting,
    key: jax.Array,
) -> tuple:
    """A policy in the rollout's form, and the sampler's state behind a prefill."""
    recipe, dtype = get_recipe(name, PrecisionConfig(exact=False)), jnp.dtype(jnp.bfloat16)
    weights, cache, tokens = jax.random.split(key, 3)
    policy, _ = rollout_policy(
        init_policy(config, weights, dtype), recipe, dtype, True, setting.backend
    )
    policy, kind = predequantized(policy), sampler.cache_dtype(policy)

    def drawn(keys: jax.Array, like: Any) -> Any:
        leaves, structure = jax.tree.flatten(like)
        values = [
            jax.random.normal(k, x.shape, dtype).astype(x.dtype)
            for k, x in zip(jax.random.split(keys, len(leaves)), leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, values)

    shape = jax.eval_shape(lambda: empty_cache(config, rows, context, kind, False))
    places = jnp.broadcast_to(jnp.arange(context, dtype=jnp.int32), (rows, context))
    prefix = KVBlock(*drawn(cache, shape), places >= 0, places)
    own = empty_block(config, rows, whole_slots(steps + 1, setting.backend), kind, False)
    if recipe.quantizes_cache:
        ones = KVScales(*(jnp.ones(config.num_layers) for _ in range(3)))
        policy = with_scales(policy, ones)
    fixed = sampler._Fixed(
        prefill=prefix,
        starts=jnp.full(rows, context, jnp.int32),
        keys=sampler.row_keys(jax.random.key(0), jnp.arange(rows), 1),
        slots=own.mask,
        limits=None,
        prompt_logprobs=None,
        prompt_expert_ids=None,
    )
    none, numbers = jnp.zeros((rows, steps + 1), bool), jnp.zeros((rows, steps + 1), jnp.float32)
    first = jax.random.randint(tokens, (rows,), 0, config.vocab_size, jnp.int32)
    state = sampler._State(
        t=jnp.int32(0),
        token=first,
        done=jnp.zeros(rows, bool),
        completion=(own.keys, own.values),
        phrases=(None, None),
        tokens=none.astype(jnp.int32),
        mask=none,
        behaviour_logprobs=numbers,
        policy_logprobs=numbers,
        support=None,
        stopped=jnp.zeros(rows, bool),
        expert_ids=None,
    )
    return policy, fixed, state


def run(steps: int, policy: Policy, fixed: Any, state: Any) -> jax.Array:
    """The tokens of so many steps."""
    sampling = Sampling(steps + 1)
    return sampler._proceed(policy, fixed, state, steps, sampling=sampling).tokens


def read_bytes(work: Work) -> int:
    """Count what a step reads: the weights, the head being the embedding, and the cache."""
    policy, fixed, _ = jax.eval_shape(work.arguments, jax.random.key(0))
    return bytes_of(policy) + bytes_of((fixed.prefill.keys, fixed.prefill.values))
