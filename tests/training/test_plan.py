"""The memory plan against what XLA says of the compiled programs, and what follows from it: fits,
changes, refusals."""

import json
import math
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from fp8rl_jax.cli.load import load_config
from fp8rl_jax.cli.main import main
from fp8rl_jax.config.recipe import PrecisionConfig, get_recipe
from fp8rl_jax.config.rl import CorrectionConfig, RLConfig
from fp8rl_jax.config.run import (
    MeshConfig,
    ModelConfig,
    PagedConfig,
    RolloutConfig,
    RolloutMeshConfig,
    RunConfig,
)
from fp8rl_jax.config.tasks import TaskConfig
from fp8rl_jax.config.training import LoraConfig, OptimizerConfig, SftConfig, TrainerConfig
from fp8rl_jax.models.cache import KVScales
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.forms import rollout_policy
from fp8rl_jax.models.policy import init_policy, parameter_count, with_scales
from fp8rl_jax.precision import is_quantized
from fp8rl_jax.rollout.engine import LocalEngine
from fp8rl_jax.rollout.sampler import generate
from fp8rl_jax.rollout.sampling import Sampling
from fp8rl_jax.training.learner import step_config
from fp8rl_jax.training.plan import PHASES, heard, memory_plan, mesh_sizes, report, what_fits
from fp8rl_jax.training.state import init_state, make_optimizer
from fp8rl_jax.training.step import Batch, StepConfig, _supervised_update, update_program
from fp8rl_jax.training.text import TextRows
from fp8rl_jax.weights.hf_config import read_policy_config

RUNS = Path(__file__).parents[2] / "experiments"
QWEN3_8B = read_policy_config(RUNS / "shapes" / "qwen3-8b")
# programs whose memory is mostly the weights' and mostly the activations'
WEIGHTS = PolicyConfig("qwen3", 1024, 512, 1536, 4, 8, 4, 64)
ACTIVATIONS = PolicyConfig("llama", 320, 96, 256, 3, 6, 2, 32)
FACTOR = 1.5


def run_config(prompts, samples, width, new, dtype, **trainer) -> RunConfig:
    rollout = RolloutConfig(prompts, samples, width, new, decode_layers="scan")
    return RunConfig(
        compute_dtype=dtype, rollout=rollout, trainer=TrainerConfig(logprob_chunk=64, **trainer)
    )


def shapes_of(shape: PolicyConfig, config: RunConfig):
    optimizer = make_optimizer(config.optimizer, 4)
    policy = jax.eval_shape(lambda key: init_policy(shape, key), jax.random.key(0))
    return policy, optimizer, jax.eval_shape(partial(init_state, optimizer=optimizer), policy)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "config"),
    [
        (WEIGHTS, run_config(2, 2, 4, 8, "bfloat16")),
        (ACTIVATIONS, run_config(4, 3, 40, 96, "float32")),
        (ACTIVATIONS, run_config(4, 3, 40, 96, "bfloat16", remat="layer", micro_batch_prompts=2)),
    ],
    ids=["weights", "activations", "remat and micro-batches"],
)
def test_update_needs_what_xla_says(shape, config):
    """State to the byte; what the program holds beside it within a factor of 1.5."""
    r, plan = config.rollout, memory_plan(shape, config)
    _, optimizer, state = shapes_of(shape, config)
    f32, (p, b, t) = (
        jnp.float32,
        (r.prompts_per_step, r.prompts_per_step * r.samples_per_prompt, r.max_new_tokens),
    )
    sizes = [((p, r.max_prompt_tokens), jnp.int32), ((p,), jnp.int32), ((b, t), jnp.int32)]
    sizes += [((b, t), bool), ((b, t), f32), ((b,), f32)]
    batch = Batch(*(jax.ShapeDtypeStruct(*size) for size in sizes))
    settings = StepConfig(
        get_recipe("bf16"),
        RLConfig(correction=CorrectionConfig(method="token_tis")),
        config.compute_dtype,
        1.0,
        micro_batches=p // (config.trainer.micro_batch_prompts or p),
        remat=config.trainer.remat == "layer",
        logprob_chunk=64,
    )
    found = (
        update_program.lower(state, None, batch, settings, optimizer).compile().memory_analysis()
    )
    batch_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(batch))
    carried = (
        plan.always["masters (float32)"]
        + plan.always["optimizer state"]
        + state.updates.dtype.itemsize
    )
    # XLA may round a scalar up
    assert abs(found.argument_size_in_bytes - batch_bytes - carried) <= 64
    estimate = max(sum(plan.phases[phase].values()) for phase in ("backward", "optimizer"))
    assert found.temp_size_in_bytes / FACTOR < estimate < found.temp_size_in_bytes * FACTOR


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "micro", "remat"), [("float32", 0, "none"), ("bfloat16", 4, "layer")]
)
def test_an_update_on_text_needs_what_xla_says(dtype, micro, remat):
    """The same of a run on text, which has an update alone."""
    sft = SftConfig(batch_size=12, row_tokens=136, micro_batch_rows=micro)
    config = replace(
        run_config(8, 8, 64, 64, dtype, remat=remat), task=TaskConfig(kind="text"), sft=sft
    )
    plan = memory_plan(ACTIVATIONS, config)
    assert [*plan.phases] == ["backward", "optimizer"]
    assert [*plan.always] == ["masters (float32)", "optimizer state"]
    optimizer = make_optimizer(sft.optimizer, 4)
    _, _, state = shapes_of(ACTIVATIONS, replace(config, optimizer=sft.optimizer))
    rows = TextRows(*[jax.ShapeDtypeStruct((12, 137), jnp.int32)] * 2)
    settings = replace(
        step_config(config, config.resolved_recipe),
        rl=RLConfig(),
        micro_batches=12 // (micro or 12),
    )
    lowered = _supervised_update.lower(state, None, rows, settings, optimizer)
    found = lowered.compile().memory_analysis()
    carried = sum(plan.always.values()) + state.updates.dtype.itemsize + 2 * 12 * 137 * 4
    assert abs(found.argument_size_in_bytes - carried) <= 64
    estimate = max(sum(plan.phases[phase].values()) for phase in plan.phases)
    assert found.temp_size_in_bytes / FACTOR < estimate < found.temp_size_in_bytes * FACTOR
    smaller = what_fits(ACTIVATIONS, config, mesh_sizes(config.mesh), plan.peak - 1)
    assert smaller[0][0] == "sft.micro_batch_rows = 1"
    assert ('trainer.remat = "layer"' in dict(smaller)) == (remat == "none")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "exact"), [("fp8-rl", False), ("bf16", True), ("nvfp4-rollout", False)]
)
def test_rollout_needs_what_xla_says(name, exact):
    config = replace(run_config(4, 4, 24, 160, "bfloat16"), recipe=name)
    config = replace(config, precision=PrecisionConfig(exact=exact))
    recipe, r, plan = config.resolved_recipe, config.rollout, memory_plan(WEIGHTS, config)
    policy, _, _ = shapes_of(WEIGHTS, config)
    served = jax.eval_shape(
        lambda p: rollout_policy(p, recipe, jnp.dtype("bfloat16"), False)[0], policy
    )
    scales = KVScales(*(jax.ShapeDtypeStruct((4,), jnp.float32) for _ in range(3)))
    if recipe.quantizes_cache:
        served = with_scales(served, scales)
    ints = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((4, 24), (4,), (4,)))
    key = jax.eval_shape(lambda: jax.random.key(0))
    sampling = Sampling(r.max_new_tokens, 1.0, 0, 1.0, 0.0, (1,))
    found = (
        generate.lower(served, *ints, key, samples=4, sampling=sampling).compile().memory_analysis()
    )
    (kept,) = (size for key, size in plan.always.items() if key.startswith("rollout weights"))
    # prompts, their lengths and ids, a key, scales
    assert 0 <= found.argument_size_in_bytes - kept < 2000
    estimate = sum(plan.phases["rollout"].values())
    assert found.temp_size_in_bytes / FACTOR < estimate < found.temp_size_in_bytes * FACTOR


@pytest.mark.parametrize(("name", "bits"), [("nvfp4-rollout", 4.5), ("w4a16", 4.125)])
def test_weights_of_four_bits_take_what_is_live(name, bits):
    """Two codes to a byte: what is planned, and what an engine holds."""
    config = replace(run_config(4, 4, 24, 160, "bfloat16"), recipe=name)
    engine = LocalEngine(config.resolved_recipe, jnp.dtype("bfloat16"), unroll=False)
    engine.sync(init_policy(WEIGHTS, jax.random.key(0)))
    live = sum(x.nbytes for x in jax.tree.leaves(engine.policy))
    always = memory_plan(WEIGHTS, config).always
    (planned,) = (size for key, size in always.items() if key.startswith("rollout weights"))
    assert planned == live
    linears = [x for x in jax.tree.leaves(engine.policy, is_leaf=is_quantized) if is_quantized(x)]
    numbers = sum(math.prod(x.shape) for x in linears)
    held = 8 * sum(x.quantized.nbytes for x in linears)
    assert held == pytest.approx(bits * numbers, rel=0.01)


def test_supports_are_counted_by_hand():
    """int32: ids and a count of each token, of what is in progress on a device."""
    config = run_config(8, 4, 24, 100, "bfloat16")
    replayed = replace(config.rl, correction=CorrectionConfig(truncated_sampling="replay"))

    def planned(size, sizes=None, **rollout):
        given = replace(config, rl=replayed, rollout=replace(config.rollout, **rollout))
        always = memory_plan(WEIGHTS, given, sizes).always
        assert [name for name in always if "supports" in name] == [
            f"supports of {size} tokens (int32)"
        ]
        return always[f"supports of {size} tokens (int32)"]

    assert planned(128, top_p=0.9) == 8 * 4 * 100 * 129 * 4
    assert planned(20, top_k=20, top_p=0.9) == 8 * 4 * 100 * 21 * 4
    assert planned(1024, min_p=0.1, support_size=5000) == 8 * 4 * 100 * 1025 * 4  # the vocabulary
    halves = mesh_sizes(config.mesh) | {"fsdp": 2}
    carried = PagedConfig(extra_prompts=4)
    assert planned(7, halves, top_k=3, support_size=7, paged=carried) == 6 * 4 * 100 * 8 * 4
    episodes = replace(config, rl=replayed, rollout=replace(config.rollout, top_k=3))
    episodes = replace(episodes, task=replace(config.task, max_turns=2))
    always = memory_plan(WEIGHTS, episodes).always
    assert always["supports of 3 tokens (int32)"] == 8 * 4 * (24 + 100 - 1) * 4 * 4
    for other in (replace(config, rl=replayed), replace(episodes, rl=config.rl)):
        assert other.support_size(1024) == 0
        assert not any("supports" in name for name in memory_plan(WEIGHTS, other).always)


def test_shipped_shape_is_qwen3_8b():
    # parameters that its model card gives: 8.2 B, of them 6.95 B beside the embeddings
    assert parameter_count(QWEN3_8B) == 8_190_735_360
    assert (
        6.94e9 < parameter_count(QWEN3_8B) - 2 * QWEN3_8B.vocab_size * QWEN3_8B.hidden_size < 6.96e9
    )


def test_qwen3_8b_in_bytes_by_hand():
    config = load_config(RunConfig, [str(RUNS / "runs" / "qwen3_8b_plan.toml")], "test")
    count, head = 8_190_735_360, 2 * 151936 * 4096
    norms = 36 * (2 * 4096 + 2 * 128) + 4096
    matrices = count - norms
    plan = memory_plan(QWEN3_8B, config)
    assert plan.always["masters (float32)"] == 4 * count
    # two counts, of the moments and of the schedule
    assert plan.always["optimizer state"] == 8 * count + 8
    linears = matrices - head
    assert plan.always[
        "rollout weights (e4m3, rest bfloat16)"
    ] == linears + linears // 128**2 * 4 + 2 * (head + norms)
    slots = 8 * 512 + 64 * 1024
    assert plan.phases["rollout"]["KV cache (float8_e4m3fn)"] == 2 * 36 * 8 * 128 * slots
    paged = replace(config, rollout=replace(config.rollout, engine="paged"))
    # 8 prompts and 64 completions
    held = {"KV cache, 69,632 tokens for 64 completions at a time (float8_e4m3fn)": 69632}
    halved = mesh_sizes(config.mesh) | {"fsdp": 2}
    for found in (memory_plan(QWEN3_8B, paged), memory_plan(QWEN3_8B, paged, halved)):
        rollout = found.phases["rollout"]
        assert rollout.items() >= {k: 2 * 36 * 8 * 128 * n for k, n in held.items()}.items()
        held = {"KV cache, 34,816 tokens for 32 completions at a time (float8_e4m3fn)": 34816}
    # episodes share no prompt
    episodes = replace(config, task=replace(config.task, max_turns=2))
    slots = 64 * 512 + 64 * 1024
    found = memory_plan(QWEN3_8B, episodes).phases["rollout"]
    assert found["KV cache (float8_e4m3fn)"] == 2 * 36 * 8 * 128 * slots
    gathered = rollout["rollout weights, gathered for the decode loop"]
    assert gathered == plan.always["rollout weights (e4m3, rest bfloat16)"]
    eight = replace(config.precision, first_moment="e4m3-1x128", second_moment="e4m3-1x128")
    packed = memory_plan(QWEN3_8B, replace(config, precision=eight)).always["optimizer state"]
    assert packed == 2 * (matrices + 4 * matrices // 128 + 4 * norms) + 8
    halves = memory_plan(QWEN3_8B, config, mesh_sizes(config.mesh) | {"fsdp": 2})
    assert halves.always["masters (float32)"] == 2 * matrices + 4 * norms
    with_reference = memory_plan(
        QWEN3_8B, replace(config, rl=replace(config.rl, kl_coefficient=0.1))
    )
    assert with_reference.peak - plan.peak == 4 * count
    adapted = memory_plan(QWEN3_8B, replace(config, lora=LoraConfig(rank=8)))
    # q, o; k, v; gate, up, down
    adapters = 36 * 8 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 12288))
    assert (
        adapted.always["masters (float32)"] == 4 * adapters
        and adapted.always["optimizer state"] == 8 * adapters + 8
    )
    assert adapted.always["frozen base"] == 2 * count
    # two of a layer and the last one leave the base
    lora = LoraConfig(rank=8, norms=("*_layernorm", "norm"))
    beside, trained = memory_plan(QWEN3_8B, replace(config, lora=lora)).always, 73 * 4096
    assert beside["masters (float32)"] == 4 * (adapters + trained)
    assert beside["optimizer state"] == 8 * (adapters + trained) + 8
    assert beside["frozen base"] == 2 * (count - trained)
    assert set(plan.phases) == set(PHASES) and plan.peak == max(
        plan.needs(phase) for phase in PHASES
    )


@pytest.mark.parametrize("engine", ["static", "paged"])
def test_a_rollout_with_devices_of_its_own_is_planned_beside_the_trainer(engine):
    config = run_config(8, 4, 24, 100, "bfloat16")
    config = replace(config, rollout=replace(config.rollout, engine=engine))
    own = RolloutMeshConfig(data=2, tensor=2)
    split = replace(config, mesh=MeshConfig(data=1, fsdp=4, rollout=own))
    sizes = mesh_sizes(split.mesh, 8)
    assert sizes == {"data": 1, "fsdp": 4, "expert": 1, "tensor": 1}
    there = mesh_sizes(MeshConfig(data=2, tensor=2), 4)
    shared, alone = memory_plan(WEIGHTS, config, sizes), memory_plan(WEIGHTS, config, there)
    found = memory_plan(WEIGHTS, split, sizes)
    weights = "rollout weights (bfloat16)"
    assert shared.always.keys() - found.always.keys() == {weights}
    assert found.rollout.always == {weights: alone.always[weights]}
    assert found.rollout.phases == {"rollout": alone.phases["rollout"]}
    assert found.phases["sync"][f"{weights}, on their way"] == shared.always[weights]
    assert found.phases["backward"] == shared.phases["backward"]
    assert found.peak == max(found.rollout.peak, *map(found.needs, found.phases))
    assert "Rollout, on devices of its own: data 2" in report(WEIGHTS, split, sizes)[0]


@pytest.mark.slow
def test_every_change_that_is_offered_does_fit_and_others_do_not():
    config = load_config(RunConfig, [str(RUNS / "runs" / "qwen3_8b_plan.toml")], "test")
    sizes, limit = mesh_sizes(config.mesh), 141_000_000_000
    assert memory_plan(QWEN3_8B, config).peak > limit
    offered = dict(what_fits(QWEN3_8B, config, sizes, limit))
    assert {
        'precision.first_moment = precision.second_moment = "e4m3-1x128"',
        "mesh.fsdp = 2",
    } <= offered.keys()
    assert all(peak <= limit for peak in offered.values())
    packed = replace(
        config,
        precision=replace(config.precision, first_moment="e4m3-1x128", second_moment="e4m3-1x128"),
    )
    assert (
        memory_plan(QWEN3_8B, packed).peak
        == offered['precision.first_moment = precision.second_moment = "e4m3-1x128"']
    )
    assert "mesh.fsdp = 16" not in offered  # 8 prompts do not divide by it
    pairs = what_fits(QWEN3_8B, config, sizes, 120_000_000_000)
    assert all(peak <= 120_000_000_000 for _, peak in pairs)
    slow = replace(config, optimizer=OptimizerConfig(beta2=0.999))
    assert not any("e4m3" in what for what, _ in what_fits(QWEN3_8B, slow, sizes, 150_000_000_000))


def test_plan_command_says_whether_it_fits(capsys):
    run = str(RUNS / "runs" / "qwen3_8b_plan.toml")
    path = ["--model.path", str(RUNS / "shapes" / "qwen3-8b")]
    assert main(["plan", run, *path, "--model.dither", "false"]) == 1
    printed = capsys.readouterr().out
    # 0.02 is above 2^-6, where half a step of bfloat16 is 2^-14
    assert "changes in bfloat16 once it has moved by 6.1e-05, which is 62 updates" in printed
    assert "places of sync/*" in printed
    assert "DOES NOT FIT" in printed and "mesh.fsdp = 2: " in printed and "32.763" in printed
    assert main(["plan", run, *path, "--mesh.fsdp", "2"]) == 0
    assert "FITS: " in capsys.readouterr().out
    assert main(["plan", run, *path, "--plan.chip", "h300"]) == 2
    assert "plan.chip = 'h300'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--rollout.max-prompt-tokens", "9000", "--rollout.max-new-tokens", "90000"],
            "rollout.max_prompt_tokens + rollout.max_new_tokens = 99000 exceeds the model's 40960",
        ),
        (["--trainer.router-replay"], "trainer.router_replay: the model has no experts"),
        (["--rollout.stop-token-ids", "151936"], "outside of the model's vocabulary of 151936"),
        (
            [
                *("--recipe", "jet-rl", "--precision.exact", "true", "--plan.chip", "h200"),
                *("--rollout.engine", "paged", "--trainer.updates-per-rollout", "1"),
            ],
            "rollout.engine: with precision.exact, Hopper's attention reads rows and no pages",
        ),
    ],
)
def test_the_plan_refuses_what_a_run_refuses(capsys, flags, said):
    run = [str(RUNS / "runs" / "qwen3_8b_plan.toml")]
    path = ["--model.path", str(RUNS / "shapes" / "qwen3-8b")]
    assert main(["plan", *run, *path, "--mesh.fsdp", "2", *flags]) == 2
    printed = capsys.readouterr()
    assert said in printed.err and not printed.out


def test_the_plan_says_when_a_weight_of_an_fp8_checkpoint_changes(tmp_path):
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))

    def said(recipe: str, dtype: str = "float32", **optimizer) -> str:
        model, optimizer = ModelConfig(str(tmp_path)), OptimizerConfig(**optimizer)
        settings = {"compute_dtype": dtype, "model": model, "optimizer": optimizer}
        return heard(RunConfig(recipe=recipe, **settings))

    # 0.02 is 16 to 32 half steps of e4m3 (3 bits of mantissa); the trainer of fp8-rl has no format
    for dtype in ("float32", "bfloat16"):
        line = said("fp8-rl", dtype, learning_rate=1e-4)
        assert "has moved by 6.3e-04 to 1.3e-03, which is 7 to 13 updates" in line
        assert "From the checkpoint in bfloat16" in line
    # masters of 11 bits that are rounded to nearest hear nothing of a small update
    line = said("fp8-lm-o2", "bfloat16", learning_rate=1e-6)
    assert "masters in float16-power_of_two, rounded to nearest, lose what moves a" in line
    assert "by less than 7.6e-06" in line and not said("fp8-lm-o2", "bfloat16", learning_rate=1e-5)
    wide = {"quantization_config": quantization, "initializer_range": 0.04}
    (tmp_path / "config.json").write_text(json.dumps(wide))
    assert "a weight of 0.04 changes" in said("fp8-rl") and "1.3e-03 to 2.5e-03" in said("fp8-rl")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    still = ModelConfig(str(tmp_path), dither=False)
    assert "With model.dither" in heard(RunConfig(recipe="jet-rl", model=still))
    # drawn from the cells; not served in that format; SGD; a checkpoint that is not quantized
    assert not said("jet-rl") and not said("bf16", "bfloat16") and not said("fp8-rl", name="sgd")
    (tmp_path / "config.json").write_text("{}")
    assert not said("fp8-rl")


@pytest.mark.parametrize(
    ("form", "weights", "recipe", "said"),
    [
        # half a step of int4 is a 14th of a group's largest weight; e2m1 has one bit of mantissa
        ("pack-quantized", {"num_bits": 4, "group_size": 128}, "w4a16", "29 to 43 updates"),
        ("pack-quantized", {"num_bits": 4, "group_size": 32}, "w4a16", ""),
        ("nvfp4-pack-quantized", {"num_bits": 4}, "nvfp4-rl", "25 to 50 updates"),
        ("mxfp8-quantized", {}, "mxfp8-rollout", "7 to 13 updates"),
    ],
)
def test_the_plan_says_when_a_weight_of_a_packed_checkpoint_changes(
    form, weights, recipe, said, tmp_path
):
    weights = {"type": "int" if form == "pack-quantized" else "float"} | weights
    quantization = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"weights": weights}},
    }
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    optimizer = OptimizerConfig(learning_rate=1e-4)
    line = heard(RunConfig(recipe=recipe, model=ModelConfig(str(tmp_path)), optimizer=optimizer))
    assert said in line and bool(said) == ("From the checkpoint in bfloat16 they" in line)


@pytest.mark.parametrize("known", ["configured", "reported"])
def test_train_refuses_before_weights_are_read(tmp_path, capsys, monkeypatch, fault, known):
    """The directory holds a config.json and no weights: whatever loads them would say so."""
    shape = json.loads((RUNS / "shapes" / "qwen3-8b" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(shape))
    flags = ["--model.path", str(tmp_path), "--rollout.decode-layers", "scan"]
    if known == "configured":
        flags += ["--plan.chip", "h100"]
    else:
        device = SimpleNamespace(
            memory_stats=lambda: {"bytes_limit": 60_000_000_000}, device_kind="card"
        )
        monkeypatch.setattr("fp8rl_jax.training.plan.jax.local_devices", lambda: [device])
    asked = time.monotonic()
    assert main(["train", *flags]) == 2
    detected, error = time.monotonic() - asked, capsys.readouterr().err
    (line,) = (each for each in error.splitlines() if each.startswith("fp8rl: error:"))
    fault("too large", line, status=2, detected=detected)
    assert (
        error.count("fp8rl: error:") == 1
        and "memory: the run needs" in error
        and "GB a device" in error
    )
    assert ("80.0 GB (h100)" if known == "configured" else "60.0 GB (card") in error
    assert main(["train", *flags, "--no-plan.check"]) == 2
    assert "memory" not in capsys.readouterr().err
