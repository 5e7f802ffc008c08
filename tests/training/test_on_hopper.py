"""What a Hopper GPU would run: whole programs of trainer and sampler, lowered for one on a machine
that has none.

Every product of an FP8 recipe and every quantizer must be a kernel there. What a kernel computes,
its cases say; that shared memory and registers suffice, the compiler (both in
tests/kernels/test_hopper.py).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import kept
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax.extend.core import jaxprs_in_params
from rollout import tiny
from rollout.tiny import CONFIG, make_prompts

from fp8rl_jax.config.recipe import RECIPES
from fp8rl_jax.config.rl import CorrectionConfig, RLConfig
from fp8rl_jax.config.training import OptimizerConfig
from fp8rl_jax.models.cache import KVScales
from fp8rl_jax.models.config import ExpertsConfig, PolicyConfig
from fp8rl_jax.models.forms import rollout_policy
from fp8rl_jax.models.policy import init_policy, with_scales
from fp8rl_jax.precision.formats import in_blocks
from fp8rl_jax.rollout.calibration import observe_qkv
from fp8rl_jax.rollout.sampler import generate
from fp8rl_jax.rollout.sampling import Sampling
from fp8rl_jax.training.batch import Batch
from fp8rl_jax.training.state import init_state, make_optimizer
from fp8rl_jax.training.step import StepConfig, batch_logprobs, update
from pallas_kernels import blockwise_matmul, quantize_blocks
from pallas_kernels.backend import tracing_for

DENSE = replace(CONFIG, num_layers=1, head_dim=64)
MIXTURE = replace(DENSE, architecture="qwen3_moe", experts=ExpertsConfig(4, 2, 64, normalize=True))
# those of formats that kernels multiply
OURS = {
    name: recipe
    for name, recipe in RECIPES.items()
    if in_blocks(recipe.rollout.weight) and not name.startswith("fp8-lm")
}
SERVED = [
    name
    for name, recipe in OURS.items()
    if recipe.rollout.weight.quantized or recipe.quantizes_cache
]
TRAINED = [name for name, recipe in OURS.items() if recipe.trainer.weight.quantized]
PROMPTS = make_prompts()
ROWS, TOKENS = 12, 8
PROGRAMS = (
    "fp8rl_jax.rollout.engine",
    "fp8rl_jax.rollout.sampler",
    "fp8rl_jax.training.state",
    "fp8rl_jax.training.step",
    "pallas_kernels.check.compile",
    "pallas_kernels.check.interpret",
)
"""What the programs of `printed` are made of."""


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    # JAX asks the library for its version before it writes the call; 9.10 is what the GPU machines
    # have
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    with tracing_for(132):
        yield


def kernels(traced) -> Counter:
    """Kernel -> how often it stands in a program as it is lowered for CUDA."""
    calls = traced.lower(lowering_platforms=("cuda",)).as_text().split("@mosaic_gpu_v2(")[1:]
    # a dialect's name
    names = (
        set(re.findall(r"(?<![a-z_])([a-z][a-z_]*)_mosaic_gpu", call)) - {"stable"}
        for call in calls
    )
    return Counter(name for found in names for name in found)


def traced_sampler(name: str, config: PolicyConfig, tokens: int = TOKENS):
    recipe = RECIPES[name]
    serve = partial(
        rollout_policy, recipe=recipe, dtype=jnp.dtype("bfloat16"), unroll=False, backend="hopper"
    )
    policy = jax.eval_shape(lambda key: serve(init_policy(config, key))[0], jax.random.key(0))
    if recipe.quantizes_cache:
        policy = with_scales(policy, KVScales(*jnp.ones((3, config.num_layers))))
    return generate.trace(
        policy,
        PROMPTS.tokens,
        PROMPTS.lengths,
        PROMPTS.ids,
        jax.random.key(0),
        samples=ROWS // 3,
        sampling=Sampling(max_new_tokens=tokens),
    )


def sampled(name: str, config: PolicyConfig) -> Counter:
    return kernels(traced_sampler(name, config))


def equations(jaxpr, within: str = ""):
    """All equations of a program, those of its inner ones too; or those inside of a primitive."""
    for equation in jaxpr.eqns:
        inside = "" if equation.primitive.name == within else within
        if not within:
            yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner, inside)


def batch_of_ones() -> Batch:
    tokens, real = jnp.ones((ROWS, TOKENS), jnp.int32), jnp.ones((ROWS, TOKENS), bool)
    logprobs = jnp.zeros((ROWS, TOKENS))
    return Batch(PROMPTS.tokens, PROMPTS.lengths, tokens, real, logprobs, jnp.ones(ROWS))


def trained(name: str, config: PolicyConfig, function) -> Counter:
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-3), 1)
    batch = batch_of_ones()
    rl = RLConfig(correction=CorrectionConfig(method="none"))
    step = StepConfig(
        RECIPES[name], rl, "bfloat16", temperature=1.0, logprob_chunk=32, backend="hopper"
    )
    state = jax.eval_shape(
        lambda key: init_state(init_policy(config, key), optimizer), jax.random.key(0)
    )
    if function is batch_logprobs:
        return kernels(batch_logprobs.trace(state.policy, batch, step))
    return kernels(jax.jit(lambda state: update(state, batch, step, optimizer)).trace(state))


LINEARS = {"quantize_rows", "blockwise_matmul_few_rows"}
DECODE = {"decode_attention", "write_cache"}


@pytest.mark.parametrize("name", SERVED)
def test_a_sampler_runs_kernels(name):
    found = sampled(name, DENSE)
    assert set(found) == DECODE | (LINEARS if RECIPES[name].rollout.weight.quantized else set())
    # one call a shape: q, k and v, gate and up share theirs
    assert found["decode_attention"] == 2 and found["write_cache"] == 1


def test_a_decode_step_copies_no_cache():
    """Slots that are no multiple of 8 are filled up before the loop, not at each token."""
    width = PROMPTS.tokens.shape[1]
    assert width % 8 and 5 % 8
    traced = traced_sampler("fp8-rl", DENSE, tokens=5)
    pads = [
        e.invars[0].aval.shape
        for e in equations(traced.jaxpr.jaxpr, "while")
        if e.primitive.name == "pad"
    ]
    assert pads and not [shape for shape in pads if len(shape) == 4 and shape[2] in (5, width)]


@pytest.mark.parametrize("name", TRAINED)
def test_a_trainers_forward_runs_kernels(name):
    assert set(trained(name, DENSE, batch_logprobs)) == LINEARS | {"quantize_square"}


@pytest.mark.parametrize(
    ("backend", "found"), [("hopper", LINEARS | {"quantize_square"}), ("reference", set())]
)
def test_calibration_runs_the_forward_of_its_backend(backend, found):
    policy = jax.eval_shape(lambda key: init_policy(DENSE, key), jax.random.key(0))
    options = {"recipe": RECIPES["fp8-e2e-kv"], "dtype": jnp.dtype("bfloat16"), "backend": backend}
    assert (
        set(kernels(observe_qkv.trace(policy, PROMPTS.tokens, PROMPTS.lengths, **options))) == found
    )


@pytest.mark.slow
def test_an_update_runs_kernels():
    gradients = {"quantize_rows_tokens", "regroup", "blockwise_matmul"}
    assert set(trained("jet-rl", DENSE, update)) == LINEARS | {"quantize_square"} | gradients


@pytest.mark.slow
def test_experts_are_grouped_products():
    assert "grouped_matmul" in sampled("fp8-rl", MIXTURE)
    assert {"grouped_matmul", "grouped_outer_product"} <= set(trained("jet-rl", MIXTURE, update))


def printed(module: str, *arguments: str) -> dict:
    """What a program of this folder prints last; kept where nothing has changed that it reaches."""
    texts = [Path(__file__).with_name(f"{module}.py"), Path(__file__), Path(tiny.__file__)]
    name = " ".join((module, *arguments))
    part = "\0".join([name, *(path.read_text() for path in texts)])
    found = kept.found(
        "programs for Hopper", {name: part}, PROGRAMS, lambda _: {name: run(module, *arguments)}
    )
    return found[name]


def run(module: str, *arguments: str) -> dict:
    """Run a program of this folder; killed where it hangs."""
    done = subprocess.run(
        [sys.executable, "-m", f"training.{module}", *arguments],
        cwd=Path(__file__).parents[1],
        env={key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
        | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["one flow", "experts", "experts without FP8", "an adapter", "many rows", "long"]
)
def test_an_exact_rollout_has_the_trainers_bits(case):
    """Interpreted, kernels of all products, sums and attention: decode steps, prefill and the
    trainer's pass over rows together."""
    found = printed("on_interpreted_hopper", case)
    assert found["tokens"] and found["difference"] == 0


@pytest.mark.slow
def test_products_that_xla_chooses_would_be_seen():
    assert printed("on_interpreted_hopper", "plain products")["difference"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("model", ["dense", "experts"])
@pytest.mark.parametrize("program", ["generate", "batch_logprobs"])
@pytest.mark.usefixtures("toolchain")
def test_xla_adds_nothing_in_an_exact_program(program, model):
    """As compiled for Hopper: no product, and no sum but those that draw a token."""
    found = printed("on_compiled_hopper", program, model)
    assert found["calls"] == ["mosaic_gpu_v2"] and not found["products"]
    assert all("/vmap()/" in where for where in found["sums"]), found["sums"]
    assert bool(found["sums"]) == (program == "generate")


@pytest.mark.slow
@pytest.mark.usefixtures("toolchain")
def test_xla_multiplies_in_the_backward_pass_of_an_exact_update_alone():
    products = printed("on_compiled_hopper", "update", "dense")["products"]
    assert products and all("/transpose(" in where for where in products), products


@pytest.mark.usefixtures("toolchain")
@pytest.mark.parametrize("gpu", ["H200", "B200"])
def test_xla_multiplies_formats_without_a_kernel_in_16_bits_or_as_they_are_stored(gpu):
    """MXFP8 stays a product of scaled operands up to the compiler of its kernel; no operand of NVFP4
    becomes float32 on the way."""
    found = printed("on_compiled_formats", gpu)
    assert found == {
        "mxfp8": {"scaled": True, "float32": False},
        "nvfp4": {"scaled": False, "float32": False},
        "e4m3": {"scaled": True, "float32": False},
    }


@pytest.mark.slow
@pytest.mark.usefixtures("toolchain")
def test_what_xla_adds_would_be_seen():
    found = printed("on_compiled_hopper", "batch_logprobs", "not exact")
    assert found["sums"] and (found["products"] or len(found["calls"]) > 1)


def test_a_kernel_inside_of_shard_map():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((64, 256), (128, 256)))

    def product(x, w):
        x, w = quantize_blocks(x, backend="hopper"), quantize_blocks(w, (128, 128))
        return blockwise_matmul(x, w, backend="hopper")

    rows = jax.sharding.PartitionSpec("data")
    mapped = jax.shard_map(
        product,
        mesh=mesh,
        in_specs=(rows, jax.sharding.PartitionSpec()),
        out_specs=rows,
        check_vma=False,
    )
    assert set(kernels(jax.jit(mapped).trace(x, w))) == {
        "quantize_rows",
        "quantize_square",
        "blockwise_matmul_few_rows",
    }
