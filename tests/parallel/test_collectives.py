"""What devices send each other: read from a program's text, and what a run's programs send."""

from __future__ import annotations

from pathlib import Path

import kept
import pytest
from parallel.helpers import run_on_devices

from fp8rl_jax.parallel.collectives import collectives, sent_over

PROGRAM = """\
HloModule jit_step, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%body (carry: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %reduced = f32[8,4]{1,0} all-reduce(%x), channel_id=1, replica_groups={{0,4},{1,5}}, to_apply=%add
  ROOT %out = (s32[], f32[8,4]) tuple(%i, %reduced)
}

%condition (carry: (s32[], f32[8,4])) -> pred[] {
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%wrapped (x: bf16[16,2]) -> bf16[4,2] {
  ROOT %part = bf16[4,2]{1,0} reduce-scatter(%x), replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%add
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %w = (s32[], f32[8,4]) while(%t), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"36"}}
  %v = (s32[], f32[8,4]) while(%w), condition=%condition, body=%body
  %g = (f8e4m3fn[64,128], f8e4m3fn[128,128]) all-gather-start(%q), replica_groups=mesh['data'=2,'fsdp'=2,'tensor'=2] {'fsdp'}, metadata={op_name="jit(step)/linear"}
  %r = ((f32[8,4]{1,0}), f32[8,4]{1,0}) all-reduce-start(%z), replica_groups={{0,1,2,3}}, to_apply=%add
  %o = (f32[8,4]{1,0}, f32[2]{0}) all-reduce-start(%z, %k), replica_groups={{0,4}}, to_apply=%add
  %s = ((bf16[16,2]), bf16[4,2]) async-start(%h), calls=%wrapped
  ROOT %p = f32[8]{0} collective-permute(%y), source_target_pairs={{0,1},{1,0}}
}
"""
SIZES = {"data": 2, "fsdp": 2, "tensor": 2}


def test_a_program_is_read():
    looped, again, gathered, started, joined, scattered, passed = collectives(PROGRAM)
    assert (looped.kind, looped.group, looped.times, looped.loops) == ("all-reduce", (0, 4), 36, 0)
    assert looped.arrays == (("f32", (8, 4)),) and looped.nbytes == 128
    assert looped.axes(SIZES) == ("data",)
    assert looped.sent == 36 * 128  # two devices: half a reduce-scatter, half a gather
    assert (again.times, again.loops) == (1, 1)
    assert gathered.arrays == (("f8e4m3fn", (128, 128)),) and gathered.group == (0, 2)
    assert gathered.axes(SIZES) == ("fsdp",) and gathered.where == "jit(step)/linear"
    assert gathered.sent == 128 * 128 // 2
    assert started.arrays == (("f32", (8, 4)),) and started.sent == 2 * 128 * 3 // 4
    assert started.axes(SIZES) == ("fsdp", "tensor") and joined.nbytes == 128 + 8
    assert scattered.group == (0, 2, 4, 6) and scattered.sent == 3 * 16
    assert scattered.axes(SIZES) == ("data", "fsdp")
    assert passed.kind == "collective-permute" and passed.sent == 32
    assert sent_over([looped, passed], SIZES) == {"data": 36 * 128, "tensor": 32}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = b", "no ENTRY"),
        ("ENTRY %main () -> f32[] {\n  %x = f32[] all-reduce(%y), to_apply=%add\n}", "devices"),
    ],
)
def test_what_cannot_be_read_is_said(text, message):
    with pytest.raises(ValueError, match=message):
        collectives(text)


@pytest.fixture(scope="module")
def found():
    return run_on_devices(Path(__file__).with_name("on_collectives.py"), 8, timeout=600)


@pytest.mark.slow
def test_an_update_sends_weights_and_gradients(found):
    """With fsdp what is sent grows neither with the batch, nor with the number of parts in which
    logits are made: each layer's weights are gathered twice, its gradients scattered."""
    for sent in found["update"].values():
        assert sent["batch"] <= 1.001 * sent["base"]
        assert sent["chunks"] == sent["base"]
        assert sent["base"] < 6 * sent["weights"]


@pytest.mark.slow
def test_weights_that_share_an_input_share_the_sum_of_its_gradient(found):
    """Two sums of a layer's results, one of attention where it is computed again, and two of
    gradients, in place of one for each of five linears."""
    assert found["sums"] == {"bf16": 5, "jet-rl": 5}


@pytest.mark.slow
def test_a_decode_step_sends_nothing_that_grows_with_the_batch(found):
    """Nothing at all but over tensor, where each device's part of a sum has to be added up."""
    for mesh, sent in found["decode"].items():
        others = {axes: size for axes, size in sent.items() if axes != "tensor"}
        assert sum(others.values()) <= 64, mesh  # whether all rows have ended
        assert ("tensor" in sent) == ("tensor" in mesh)


@pytest.mark.slow
@pytest.mark.usefixtures("toolchain")
def test_fp8_weights_of_the_program_for_hopper_stay_where_they_are():
    """Devices of tensor exchange sums of hidden states and what is drawn from: less than half of
    what it would be if they gathered the weights of attention alone."""
    script, name = Path(__file__).with_name("on_collectives_hopper.py"), "paged engine"
    found = kept.found(
        "programs on meshes",
        {name: script.read_text()},
        ("fp8rl_jax.training.ahead", "pallas_kernels.check.compile"),
        lambda _: {name: run_on_devices(script, 1, timeout=600)},
    )[name]
    attention, experts = found["weights"]
    assert attention < experts and 0 < found["sent"] < attention / 2 / 2


@pytest.mark.slow
def test_a_model_is_loaded_into_its_shards(found):
    """An eighth of it on each of eight devices, but for norms."""
    assert found["loaded"]["apart"] == 0
    assert 1 / 8 <= found["loaded"]["share"] < 1.1 / 8
