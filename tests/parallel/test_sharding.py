"""Real policies on 8 simulated devices, against the same policies on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from parallel.helpers import run_on_devices

# mesh (data 2, fsdp 2, tensor 2); {tensor: (where it lives, its shape on one device)}
PLACED = {
    "embed_tokens": (["tensor", "fsdp"], [48, 96]),
    "layers.q_proj": ([None, "tensor", "fsdp"], [2, 128, 96]),
    "layers.k_proj": ([None, "tensor", "fsdp"], [2, 32, 96]),
    "layers.v_proj": ([None, "tensor", "fsdp"], [2, 32, 96]),
    "layers.o_proj": ([None, "fsdp", "tensor"], [2, 96, 128]),
    "layers.gate_proj": ([None, "tensor", "fsdp"], [2, 256, 96]),
    "layers.up_proj": ([None, "tensor", "fsdp"], [2, 256, 96]),
    "layers.down_proj": ([None, "fsdp", "tensor"], [2, 96, 256]),
    "layers.input_layernorm": ([None, None], [2, 192]),
    "layers.post_attention_layernorm": ([None, None], [2, 192]),
    "layers.q_norm": ([None, None], [2, 32]),
    "layers.k_norm": ([None, None], [2, 32]),
    "norm": ([None], [192]),
    "lm_head": (["tensor", "fsdp"], [48, 96]),
}

# 128x128 blocks: 96 columns a shard, or 32 rows, end inside a block, so that axis of the scales is
# replicated
SCALES = {
    "q_proj": ([None, "tensor", None], [2, 1, 2]),
    "k_proj": ([None, None, None], [2, 1, 2]),
    "v_proj": ([None, None, None], [2, 1, 2]),
    "o_proj": ([None, None, "tensor"], [2, 2, 1]),
    "gate_proj": ([None, "tensor", None], [2, 2, 2]),
    "up_proj": ([None, "tensor", None], [2, 2, 2]),
    "down_proj": ([None, None, "tensor"], [2, 2, 2]),
}


@pytest.fixture(scope="module")
def eight() -> dict[str, Any]:
    return run_on_devices(Path(__file__).with_name("on_eight_devices.py"), 8)


def leaves(table: dict[str, tuple]) -> dict[str, list]:
    return {name: list(placed) for name, placed in table.items()}


def test_a_session_in_python_refuses_a_mesh_that_it_has_no_use_for(eight):
    micro, expert = eight["session_errors"]
    assert "trainer.micro_batch_prompts = 1 does not divide by" in micro
    assert "mesh.expert = 4: the model has no experts" in expert


def test_mesh_sizes_are_checked_by_their_keys(eight):
    assert eight["left_over"] == {"data": 2, "fsdp": 2, "expert": 1, "tensor": 2}
    assert eight["mesh_errors"] == {
        "(3, 1, 1)": "mesh.data (3) x mesh.fsdp (1) x mesh.expert (1) x mesh.tensor (1) = 3, but "
        "there are 8 devices: "
        "set one of them to -1",
        "(-1, -1, 1)": "mesh.data, mesh.fsdp are all -1: at most one axis can take the devices "
        "that are left",
        "(-1, 3, 1)": "mesh.fsdp (3) x mesh.expert (1) x mesh.tensor (1) = 3 does not divide the "
        "8 devices: choose sizes that do",
        "(0, 1, 1)": "mesh.data = 0: give a positive size, or -1 for the devices that are left",
        "(2, 2, 1)": "mesh.data (2) x mesh.fsdp (2) x mesh.expert (1) x mesh.tensor (1) = 4, but "
        "there are 8 devices: "
        "set one of them to -1",
    }


def test_constrain_shards_what_divides_and_leaves_the_rest(eight):
    assert eight["constraints"] == {
        "8": [["data", "fsdp"], None, "tensor"],
        "3": [None, None, "tensor"],
    }


def test_policy_is_placed_by_the_rules(eight):
    assert eight["placed"] == leaves(
        {f"{name}.weight.value": placed for name, placed in PLACED.items()}
    )


def test_single_layers_are_placed_like_stacked_ones(eight):
    for name, (spec, shape) in PLACED.items():
        if name.startswith("layers."):
            for i in range(2):
                single = f"layers.{i}.{name.removeprefix('layers.')}.weight.value"
                assert eight["unstacked"][single] == [spec[1:], shape[1:]]
        else:
            assert eight["unstacked"][f"{name}.weight.value"] == [spec, shape]


def test_scales_live_with_the_tensor_that_they_scale(eight):
    for name, placed in SCALES.items():
        path = f"layers.{name}.weight.value.quantized"
        assert eight["quantized"][f"{path}.values"] == list(PLACED[f"layers.{name}"])
        assert eight["quantized"][f"{path}.scales"] == list(placed)


def test_optimizer_moments_are_placed_like_the_policy(eight):
    assert eight["moments_like_policy"] and eight["count"] == []


def test_forward_equals_one_device(eight):
    assert eight["forward_error"].keys() == {"(2, 2, 2)", "(1, 2, 4)"}  # 4 splits a key head
    assert max(eight["forward_error"].values()) < 1e-5


def test_gradient_equals_one_device_and_is_sharded(eight):
    assert eight["gradient_error"] < 1e-5
    assert eight["gradient_sharded_like_policy"]


def test_quantizing_a_sharded_policy_gives_the_same_bits(eight):
    assert eight["synced"] == eight["quantized"]
    assert eight["sync_equal"]


def test_quantized_forward_equals_one_device_where_no_activation_changes_its_code(eight):
    """A last-bit difference before an activation is rounded to e4m3 can change its code, a step of
    1/16 to 1/8 of it: that moves its token and the later ones of its row, and no other."""
    errors = sorted(eight["quantized_forward_error"])
    assert len(errors) == 8 * 12
    assert errors[len(errors) * 3 // 4] < 1e-5
    assert errors[-1] < 0.2  # of hidden states whose largest is about 4


def test_host_arrays_come_back_as_they_went(eight):
    assert eight["round_trip"] and eight["key"]


def test_a_file_s_own_codes_are_read_into_shards(eight):
    found = eight["exported"]
    assert found["codes"] and found["same_codes"] and found["quantized"]


def test_an_export_of_shards_has_the_bytes_and_holds_a_tensor_at_a_time(eight):
    found = eight["exported"]
    assert found["same"] == [True, True]
    largest = 512 * 192 * 4  # gate_proj of a layer
    assert found["gathered"] == largest
    # `data` has two copies of the shards
    assert found["beside"] == 2 * largest
    # what came from the devices, what is looked at for infinities, and objects of Python's
    assert largest < found["host"] < found["policy"] / 2
