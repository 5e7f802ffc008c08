"""FP8 linears keep 1.9 times fewer bytes for the backward than bfloat16 ones; what is counted is
what is kept."""

from __future__ import annotations

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from experiments.benchmarks import rounds, suite, trained_layer
from experiments.benchmarks.arguments import Arguments
from experiments.benchmarks.trained_layer import (
    TrainedLayer,
    accessed_bytes,
    load_target,
    saved_bytes,
)
from experiments.benchmarks.workloads import CPU_WORKLOADS, SMOLLM2_SHAPE, TRAINED, Shape
from fp8rl_jax.config.recipe import RECIPES
from fp8rl_jax.errors import UserError

SHAPES = {w.name: w for w in CPU_WORKLOADS if w.layer_recipes}
ROWS, LENGTH = 2, 256
TOKENS = ROWS * LENGTH
SMALL = replace(
    SMOLLM2_SHAPE.config,
    hidden_size=64,
    intermediate_size=96,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
)


def layer_of(workload, recipe):
    return TrainedLayer(
        workload.config, RECIPES[recipe], ROWS, LENGTH, jnp.dtype(workload.compute_dtype)
    )


@pytest.mark.parametrize("name", SHAPES)
def test_fp8_linears_keep_at_least_1_9_times_fewer_bytes(name):
    workload = SHAPES[name]
    plain, *trained = (layer_of(workload, recipe) for recipe in TRAINED)
    config = workload.config
    inputs = (config.hidden_size, config.q_size, config.hidden_size, config.intermediate_size)
    # one input for q, k and v, and one for gate and up, in either precision
    assert saved_bytes(plain, "linears") == 2 * TOKENS * sum(inputs)
    for layer in trained:
        assert saved_bytes(layer, "linears") == TOKENS * sum(n + 4 * -(-n // 128) for n in inputs)
        for part in ("linear", "linears"):
            assert saved_bytes(plain, part) >= 1.9 * saved_bytes(layer, part)
        assert saved_bytes(plain, "layer") - saved_bytes(layer, "layer") == pytest.approx(
            saved_bytes(plain, "linears") - saved_bytes(layer, "linears"), rel=0.01
        )


def test_what_is_counted_as_kept_is_what_the_backward_holds():
    """The whole of what a vjp holds is the count and the weights."""
    layer = TrainedLayer(SMALL, RECIPES["jet-rl"], ROWS, LENGTH, jnp.dtype("bfloat16"))
    inputs, form = jax.jit(lambda: (layer.inputs("linear"), layer.form(layer.masters())))()
    held = {
        id(x): x for x in jax.tree.leaves(jax.vjp(layer.run("linear"), inputs, form)[1])
    }.values()
    weight = form.gate_proj.value.quantized
    assert (
        sum(x.nbytes for x in held)
        == saved_bytes(layer, "linear") + weight.values.nbytes + weight.scales.nbytes
    )


def test_the_benchmark_counts_and_times(tmp_path, monkeypatch):
    monkeypatch.setattr(rounds, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(trained_layer, "PARTS", ("linear",))
    monkeypatch.setattr(trained_layer, "TIMED", ("linear",))
    tiny = replace(
        SMOLLM2_SHAPE,
        config=SMALL,
        layer=Shape(1, 2, 4, 8),
        layer_recipes=("bf16", "jet-rl"),
        step_recipes=(),
    )
    suite.run_all([tiny], Arguments(str(tmp_path / "out.json"), rounds=1), {})
    (entry,) = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    assert [r["part"] for r in entry["ratios"]] == ["seconds", "linear"] and "seconds" not in entry
    counts = entry["bytes"]["jet-rl"]["linear"]
    assert set(counts) == {
        "saved",
        "accessed by forward on cpu",
        "accessed by forward_and_backward on cpu",
    }
    # a forward reads the master and its input at least once
    assert counts["accessed by forward on cpu"] >= 4 * 64 * 96 + 2 * 24 * 64
    ratios = {(r["under"], r["part"]): r["ratio"] for r in entry["byte_ratios"]}
    assert ratios["fp8rl_jax/jet-rl", "linear, saved"] == pytest.approx(2 * 64 / (64 + 4))


def test_a_compiled_product_is_counted_by_its_operands():
    """bf16's one linear without anything around it: the masters, the input and the output at the
    very least, and finite."""
    layer = layer_of(SMOLLM2_SHAPE, "bf16")
    least = 4 * 576 * 1536 + 2 * TOKENS * (576 + 1536)
    assert least <= accessed_bytes(layer, "linear")["forward"] < 8 * least


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "cannot be read"), ("platform_name: 'CUDA'", "has no device_description_str")],
)
def test_a_gpu_that_cannot_be_described_is_one_line(tmp_path, text, message):
    file = tmp_path / "gpu.txtpb"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=message):
        load_target(str(file))


def test_without_its_compiler_a_gpu_is_no_target():
    try:
        import jax_plugins.xla_cuda13  # noqa: F401
    except ImportError:
        with pytest.raises(UserError, match="jax-cuda13-plugin"):
            load_target("pallas_kernels/check/h200.txtpb")
