"""What XLA itself multiplies and adds in whole programs of exact mode, compiled for Hopper: `python
-m training.on_compiled_hopper PROGRAM MODEL` from tests/.

Prints the library calls of the optimized program, its products, and the operations in which it adds
floats in an order of its own. A process of its own: it starts anew with the compiler on its path.
"""

from __future__ import annotations

import json
import re
import sys
from functools import partial

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo
from training.test_on_hopper import DENSE, MIXTURE, PROMPTS, ROWS, TOKENS, batch_of_ones

from fp8rl_jax.config.recipe import PrecisionConfig, get_recipe
from fp8rl_jax.config.rl import CorrectionConfig, RLConfig
from fp8rl_jax.config.training import OptimizerConfig
from fp8rl_jax.models.forms import rollout_policy
from fp8rl_jax.models.policy import init_policy
from fp8rl_jax.rollout.sampler import generate
from fp8rl_jax.rollout.sampling import Sampling
from fp8rl_jax.training.state import init_state, make_optimizer
from fp8rl_jax.training.step import StepConfig, batch_logprobs, update
from pallas_kernels.backend import tracing_for
from pallas_kernels.check.compile import TARGET, activate_toolchain, sharding_on

MODELS = {
    "dense": (DENSE, "jet-rl", True),
    "experts": (MIXTURE, "bf16", True),
    "not exact": (DENSE, "jet-rl", False),
}
BFLOAT16 = jnp.dtype("bfloat16")


def lowered(program: str, model: str, on_device):
    config, name, exact = MODELS[model]
    recipe = get_recipe(name, PrecisionConfig(exact=exact))
    masters = partial(init_policy, config)
    rl = RLConfig(correction=CorrectionConfig(method="none"))
    step = StepConfig(recipe, rl, "bfloat16", temperature=1.0, logprob_chunk=32, backend="hopper")
    if program == "batch_logprobs":
        policy = on_device(jax.eval_shape(masters, jax.random.key(0)))
        return batch_logprobs.lower(policy, on_device(batch_of_ones()), step)
    if program == "update":
        optimizer = make_optimizer(OptimizerConfig(), 1)
        state = jax.eval_shape(lambda key: init_state(masters(key), optimizer), jax.random.key(0))
        run = jax.jit(lambda state, batch: update(state, batch, step, optimizer))
        return run.lower(on_device(state), on_device(batch_of_ones()))
    serve = partial(rollout_policy, recipe=recipe, dtype=BFLOAT16, unroll=False, backend="hopper")
    policy = jax.eval_shape(lambda key: serve(masters(key))[0], jax.random.key(0))
    arrays = policy, PROMPTS.tokens, PROMPTS.lengths, PROMPTS.ids, jax.random.key(0)
    sampling = Sampling(max_new_tokens=TOKENS)
    return generate.lower(*on_device(arrays), samples=ROWS // 3, sampling=sampling)


def _after(line: str, label: str) -> str:
    """The word behind a label of an instruction; empty where it has none."""
    return re.split(r'[",} ]', line.partition(label)[2], maxsplit=1)[0]


def main(program: str, model: str) -> None:
    activate_toolchain()
    sharding = sharding_on(TARGET.read_text())

    def on_device(tree):
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    # JAX asks the library for its version before it writes the call
    fused_attention_stablehlo.check_cudnn_version = lambda: 91000
    with tracing_for(132):
        text = lowered(program, model, on_device).compile().as_text()
    adding = {part.split()[0].lstrip("%") for part in text.split("\n\n") if " = f32[] add(" in part}
    lines = text.splitlines()
    sums = [line for line in lines if " reduce(" in line and "= f32[" in line]
    sums = [line for line in sums if _after(line, "to_apply=%") in adding]
    products = [line for line in lines if " dot(" in line or " convolution(" in line]
    found = {
        "calls": sorted({_after(line, 'custom_call_target="') for line in lines} - {""}),
        "products": sorted({_after(line, 'op_name="') for line in products}),
        "sums": sorted({_after(line, 'op_name="') for line in sums}),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
