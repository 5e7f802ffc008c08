"""What a step takes at least, against counts by hand and against programs that were compiled."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.collectives import PROGRAMS, RECORD, configured
from fp8rl_jax.cli.main import main
from fp8rl_jax.config.chips import CHIPS
from fp8rl_jax.config.run import (
    MeshConfig,
    PlanConfig,
    RolloutConfig,
    RolloutMeshConfig,
    RunConfig,
)
from fp8rl_jax.config.tasks import TaskConfig
from fp8rl_jax.config.training import LoraConfig, SftConfig, TrainerConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.config import ExpertsConfig, PolicyConfig
from fp8rl_jax.models.policy import matrix_parameters
from fp8rl_jax.training import ahead
from fp8rl_jax.training.plan import abstract_mesh, footprint, memory_plan, mesh_sizes
from fp8rl_jax.training.roofline import (
    Work,
    best_meshes,
    largest_batch,
    link_rate,
    meshes,
    outlook,
    step_work,
)

H200, ONE = CHIPS["h200"], mesh_sizes(MeshConfig(data=1))
SHAPE = PolicyConfig("qwen3", 1024, 256, 512, 4, 8, 4, 64)
CONFIG = RunConfig(
    recipe="jet-rl",
    compute_dtype="bfloat16",
    rollout=RolloutConfig(8, 4, 32, 64, decode_layers="scan"),
    trainer=TrainerConfig(remat="layer", micro_batch_prompts=4),
    plan=PlanConfig("h200"),
)
ROOT = Path(__file__).parents[2]


def test_a_phase_takes_the_longest_of_its_bounds_and_waits_for_tensor():
    sizes = ONE | {"fsdp": 4, "tensor": 2}
    work = Work(989e12, 2 * 1979e12, 4.8e12, {"fsdp": 0.9e12, "tensor": 45e9})
    times = work.times(H200, sizes)
    assert times == {"products": 3.0, "memory": 1.0, "links": 2.0, "tensor": 0.1}
    assert work.least(H200, sizes) == 3.1
    # a card without kernels of ours multiplies FP8 as 16 bits
    assert Work(fp8_flops=312e12).least(CHIPS["a100"], ONE) == 1.0


def test_a_rollout_beside_the_trainer_hides_behind_the_longer_of_the_two():
    own = RolloutMeshConfig(data=2, tensor=2)
    split = replace(CONFIG, mesh=MeshConfig(data=1, fsdp=4, rollout=own))
    there = mesh_sizes(MeshConfig(data=2, tensor=2), 4)
    sizes = ONE | {"fsdp": 4}
    together, alone = outlook(SHAPE, CONFIG, sizes, H200), outlook(SHAPE, CONFIG, there, H200)
    in_step = outlook(SHAPE, split, sizes, H200)
    rolled = alone.seconds["prefill"] + alone.seconds["decode"]
    assert in_step.seconds["decode"] == alone.seconds["decode"] != together.seconds["decode"]
    assert in_step.seconds["update"] == together.seconds["update"]
    assert in_step.step == pytest.approx(sum(in_step.seconds.values()))
    ahead = replace(split, rollout=replace(split.rollout, steps_ahead=1))
    longer = max(rolled, in_step.seconds["update"]) + in_step.seconds["sync"]
    assert outlook(SHAPE, ahead, sizes, H200).step == pytest.approx(longer)
    assert largest_batch(SHAPE, split, sizes, 141e9) % 4 == 0


@pytest.mark.parametrize(
    ("sizes", "axis", "rate"),
    [
        ({"fsdp": 8}, "fsdp", 450e9),
        ({"fsdp": 16}, "fsdp", 400e9),  # eight adapters of 50 GB/s carry each ring out of a host
        ({"fsdp": 8, "tensor": 8}, "fsdp", 50e9),  # one device of each host is in it
        ({"fsdp": 8, "tensor": 8}, "tensor", 450e9),
        ({"data": 4, "fsdp": 4}, "data", 100e9),
    ],
)
def test_a_ring_leaves_a_host_by_the_adapters_of_its_devices(sizes, axis, rate):
    assert link_rate(axis, H200, ONE | sizes) == rate


def test_products_are_counted_as_the_formats_say():
    """By hand: P prompt tokens, n completion tokens, N matrix parameters, no window."""
    matrices, layers, width = matrix_parameters(SHAPE), SHAPE.num_layers, 2 * SHAPE.q_size
    head = 2 * SHAPE.hidden_size * SHAPE.vocab_size
    prompt, rows, new = 8 * 32, 32, 64
    keys = 8 * sum(range(1, 33)) + rows * sum(range(33, 97))
    tokens = prompt + rows * new
    work = step_work(SHAPE, CONFIG, ONE, H200)
    once = 2 * matrices * tokens
    attention = 2 * layers * width * keys
    # forward, forward again, and both products of the backward: all in FP8
    assert work["update"].fp8_flops == pytest.approx(4 * once)
    assert work["update"].flops == pytest.approx(3 * (head * rows * new + attention))
    assert work["decode"].fp8_flops == pytest.approx(2 * matrices * rows * new)
    decoded = 2 * layers * width * rows * sum(range(33, 97))
    assert work["decode"].flops == pytest.approx(decoded + head * rows * new)
    assert work["prefill"].fp8_flops == pytest.approx(2 * matrices * prompt)

    def update(recipe: str, **chip) -> tuple[float, float]:
        found = step_work(SHAPE, replace(CONFIG, recipe=recipe), ONE, replace(H200, **chip))
        return found["update"].fp8_flops, found["update"].flops + found["update"].fp8_flops

    every = update("jet-rl")[1]
    assert update("fp8-rl") == (0, every) == update("jet-rl", hopper=False)
    plain = step_work(SHAPE, replace(CONFIG, recipe="bf16"), ONE, H200)
    assert plain["decode"].fp8_flops == 0
    # e4m3 and a few scales in place of bfloat16 but for the head, and a cache of half the bytes
    cached = 2 * SHAPE.num_kv_heads * 64 * layers
    seen = 64 * prompt + rows * sum(range(1, 65))
    held = footprint(SHAPE, CONFIG, abstract_mesh(ONE))
    assert held.token == 2 * cached  # jet-rl keeps its cache in the compute dtype
    kept = footprint(SHAPE, replace(CONFIG, recipe="fp8-rl"), abstract_mesh(ONE))
    assert kept.token == cached and kept.read == pytest.approx(matrices + 2 * 2 * 1024 * 256, 0.01)
    found = step_work(SHAPE, replace(CONFIG, recipe="fp8-rl"), ONE, H200)["decode"].bytes
    weights = 64 * (kept.read - 2 * 1024 * 256)
    assert found == pytest.approx(weights + cached * seen)


def test_sharding_divides_the_work_and_experts_are_read_as_they_are_chosen():
    alone = step_work(SHAPE, CONFIG, ONE, H200)
    eight = step_work(SHAPE, CONFIG, ONE | {"data": 2, "fsdp": 2, "tensor": 2}, H200)
    for phase in ("prefill", "decode", "update"):
        assert eight[phase].fp8_flops == pytest.approx(alone[phase].fp8_flops / 8)
        assert not alone[phase].sent and eight[phase].sent["tensor"] > 0
    mixture = replace(SHAPE, architecture="qwen3_moe", experts=ExpertsConfig(64, 2, 128, True))
    few = replace(CONFIG, rollout=replace(CONFIG.rollout, prompts_per_step=1, samples_per_prompt=2))
    few = replace(few, trainer=TrainerConfig(), recipe="bf16")
    held = footprint(mixture, few, abstract_mesh(ONE))
    read = step_work(mixture, few, ONE, H200)["decode"].bytes / 64
    share = 1 - (62 / 64) ** 2
    least = held.read - held.looked_up - (1 - share) * held.experts
    assert held.experts == 2 * 4 * 64 * 3 * 256 * 128 and least < read < 1.1 * least


def test_fp8_weights_whose_blocks_devices_would_share_are_gathered():
    """Keys and values are 256 wide, the MLP 512: on four devices 64 and 128, of blocks of 128."""
    recipe = replace(CONFIG, recipe="fp8-rl")
    step = {tensor: step_work(SHAPE, recipe, ONE | {"tensor": tensor}, H200) for tensor in (2, 4)}
    sums = 2 * 2 * SHAPE.num_layers * SHAPE.hidden_size * 4
    keys_and_values = SHAPE.num_layers * 2 * 256 * 256
    for tensor, held in ((2, 0), (4, keys_and_values)):
        share = (tensor - 1) / tensor
        tokens = {"prefill": 8 * 32, "decode": 32 * 64}
        for phase, passes in (("prefill", 1), ("decode", 64)):
            sent = share * (sums * tokens[phase] + passes * held)
            assert step[tensor][phase].sent["tensor"] == pytest.approx(sent)
    plain = step_work(SHAPE, replace(CONFIG, recipe="bf16"), ONE | {"tensor": 4}, H200)
    assert plain["decode"].sent["tensor"] == pytest.approx(0.75 * sums * 32 * 64)
    flow = step_work(SHAPE, CONFIG, ONE | {"tensor": 4}, H200)["update"].sent["tensor"]
    # two micro-batches, forward, forward again and backward
    more = 0.75 * 2 * 3 * keys_and_values
    assert flow == pytest.approx(plain["update"].sent["tensor"] + more)


def test_adapters_send_their_base_and_no_gradients_of_it():
    """The base is gathered for both passes; what is summed up is next to nothing."""
    sizes = ONE | {"data": 2, "fsdp": 2}
    adapters = replace(CONFIG, recipe="bf16", lora=LoraConfig(rank=8))
    held = footprint(SHAPE, adapters, abstract_mesh(sizes))
    work = step_work(SHAPE, adapters, sizes, H200)["update"]
    assert held.elements < 0.1 * held.gathered / 2
    assert work.sent == {"fsdp": 2 * 2 * held.gathered / 2}  # two micro-batches, two passes
    once = 2 * matrix_parameters(SHAPE) * (8 * 32 + 32 * 64) / 4
    whole = step_work(SHAPE, replace(adapters, lora=LoraConfig()), sizes, H200)["update"]
    head = 2 * SHAPE.hidden_size * SHAPE.vocab_size * 32 * 64 / 4
    assert whole.flops - work.flops == pytest.approx(once + head)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_what_is_sent_is_what_compiled_programs_send(program):
    """Bytes of programs that XLA made for H200s (experiments.collectives): all of them
    within 30 %, those of the decode loop, of prefill and of sums over tensor within 5 %; but of
    prefill where experts are gathered, of which XLA gathers less than all."""
    kept = json.loads(RECORD.read_text())["programs"][program.name]
    shape, config = configured(program)
    sizes = mesh_sizes(config.mesh)
    work = step_work(shape, config, sizes, H200)
    if program.what == "update":
        modelled = sum(work["update"].sent.values())
        assert modelled == pytest.approx(sum(kept["once"].values()), rel=0.3)
        # in 16 bits, and once for weights that share an input
        sums = kept["once"].get("tensor", 0)
        assert work["update"].sent.get("tensor", 0) == pytest.approx(sums, rel=0.05)
        return
    steps = config.rollout.max_new_tokens
    looped = sum(work["decode"].sent.values()) / steps
    if program.what == "static rollout":
        near = 0.3 if program.mesh == {"expert": 2, "tensor": 4} else 0.05
        assert sum(work["prefill"].sent.values()) == pytest.approx(sum(kept["once"].values()), near)
        assert looped == pytest.approx(sum(kept["a_step"].values()), rel=0.05, abs=1e6)


def test_meshes_are_ranked_by_their_steps_and_fit():
    found = [tuple(sizes.values()) for sizes in meshes(SHAPE, 12, H200)]
    assert len(found) == len(set(found)) and all(np.prod(sizes) == 12 for sizes in found)
    assert {sizes[3] for sizes in found} == {1, 2, 3, 4, 6} and {sizes[2] for sizes in found} == {1}
    batch = replace(CONFIG.rollout, prompts_per_step=16)
    config = replace(CONFIG, rollout=batch, trainer=TrainerConfig())
    best = best_meshes(SHAPE, config, 4, H200)
    assert [one.step for one in best] == sorted(one.step for one in best)
    assert best[0].tokens == pytest.approx(
        16 * 4 * 64 / (best[0].seconds["prefill"] + best[0].seconds["decode"])
    )
    assert {one.sizes["tensor"] for one in best} == {1, 2, 4}
    # what does not fit whole has micro-batches of a prompt a shard
    least = min(one.peak for one in best)
    fitting = best_meshes(SHAPE, config, 4, replace(H200, memory=least))
    assert {0} < {one.micro for one in fitting} and all(one.peak <= least for one in fitting)
    shards = {one.micro: one.sizes["data"] * one.sizes["fsdp"] for one in fitting if one.micro}
    assert all(micro == count for micro, count in shards.items())


def test_the_largest_batch_fits_and_no_larger_one():
    sizes = ONE | {"data": 2}
    limit = 3 * memory_plan(SHAPE, CONFIG, sizes).peak

    def peak(prompts: int) -> int:
        rollout = replace(CONFIG.rollout, prompts_per_step=prompts)
        return memory_plan(SHAPE, replace(CONFIG, rollout=rollout), sizes).peak

    most = largest_batch(SHAPE, CONFIG, sizes, limit)
    assert most % 4 == 0 and peak(most) <= limit < peak(most + 4)
    assert largest_batch(SHAPE, CONFIG, sizes, 1e6) == 0


def test_text_and_vllm_have_the_phases_that_run_here():
    text = replace(
        CONFIG, task=TaskConfig(kind="text"), sft=SftConfig(batch_size=8, row_tokens=128)
    )
    found = outlook(SHAPE, text, ONE, H200)
    assert [*found.seconds] == ["update"] and found.tokens == 0
    work = step_work(SHAPE, replace(text, trainer=TrainerConfig()), ONE, H200)["update"]
    assert work.fp8_flops == pytest.approx(3 * 2 * matrix_parameters(SHAPE) * 8 * 128)
    served = replace(CONFIG, rollout=replace(CONFIG.rollout, engine="vllm"))
    assert [*step_work(SHAPE, served, ONE, H200)] == ["update", "sync"]


def test_the_command_says_times_batch_and_meshes_and_refuses_what_cannot_be(capsys):
    run = ["plan", str(ROOT / "experiments/runs/qwen3_8b_plan.toml")]
    run += ["--model.path", str(ROOT / "experiments/shapes/qwen3-8b"), "--plan.devices", "2"]
    assert main([*run, "--mesh.data", "1", "--mesh.fsdp", "-1"]) == 0
    printed = capsys.readouterr().out
    assert "mesh data 1, fsdp 2, expert 1, tensor 1" in printed and "FITS: 86.6 GB" in printed
    assert "nothing is measured" in printed and "at most" in printed
    assert "The largest batch that fits this mesh: rollout.prompts_per_step = " in printed
    assert "tensor 2" in printed.rpartition("the shortest step first")[2]
    assert "this one is number 2)" in printed  # sums over tensor cost less than gathers here
    refused = [
        (["--plan.devices", "3", "--mesh.data", "1"], "there are 3 devices"),
        (["--plan.devices", "-1"], "plan.devices: -1"),
        (["--mesh.data", "1", "--mesh.expert", "2"], "the model has no experts"),
        (["--mesh.tensor", "1", "--rollout.prompts-per-step", "4"], "make it a multiple of 2"),
        (["--plan.device", "h200"], "plan.chip"),
    ]
    for flags, line in refused:
        assert main([*run, *flags]) == 2
        error = capsys.readouterr().err
        assert line in error and error.count("fp8rl: error:") == 1


def test_what_is_compiled_is_told_by_program_and_axis(monkeypatch):
    """What stands in for the compiler here compiles in `python -m experiments.collectives`."""

    def compiled(lower, shape, config, sizes, chip):
        assert sizes == ONE | {"fsdp": 2}
        asked.append(chip)
        if lower is ahead.lower_rollout:
            return ahead.Compiled({}, {"tensor": 76_100_000}, 6_700_000_000)
        return ahead.Compiled({"fsdp": 96_500_000_000, "data fsdp": 4_000}, {}, 14_820_000_000)

    asked: list[str] = []
    monkeypatch.setattr(ahead, "compile_for", compiled)
    _, update, rollout = ahead.describe(SHAPE, CONFIG, ONE | {"fsdp": 2}).splitlines()
    assert update == (
        "  update: 14.82 GB of temporaries; a device sends 96.5 GB over fsdp, 4 kB over data fsdp"
    )
    assert rollout == (
        "  static rollout: 6.7 GB of temporaries; a device sends 76.1 MB over tensor in each step "
        "of its loop"
    )
    on_tpu = replace(CONFIG, plan=PlanConfig("tpu-v6e"))
    first, update, _ = ahead.describe(SHAPE, on_tpu, ONE | {"fsdp": 2}).splitlines()
    assert first.startswith("Compiled for tpu-v6e by XLA")
    assert update == "  update: 14.82 GB of temporaries"  # what is sent is not read of it
    assert asked == ["h200", "h200", "tpu-v6e", "tpu-v6e"]
    monkeypatch.setattr(ahead.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="compile for a TPU with: pip install libtpu"):
        ahead.check_compiler(on_tpu)
    with pytest.raises(UserError, match="h100, h200, h20, tpu-v5e, tpu-v6e, and none for b200"):
        ahead.check_compiler(replace(CONFIG, plan=PlanConfig("b200")))
    with pytest.raises(
        UserError, match=r"a slice of tpu-v5e has 1, 2, 4, \.\.\. or 256 chips, not 6"
    ):
        ahead.mesh_for(ONE | {"data": 6}, "tpu-v5e")
    with pytest.raises(UserError, match=r"plan.compile: .* leave it false"):
        ahead.check_compiler(replace(CONFIG, task=TaskConfig(kind="text")))
