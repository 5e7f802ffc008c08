"""Experts spread over 8 simulated devices compute what one device computes."""

from __future__ import annotations

from pathlib import Path

import pytest
from parallel.helpers import run_on_devices

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def meshes():
    return run_on_devices(Path(__file__).with_name("on_expert_mesh.py"), 8, timeout=400)


def test_forward_and_gradients_equal_one_device(meshes):
    assert len(meshes) == 3
    for found in meshes.values():
        assert found["forward"] < 1e-5 and found["odd"] < 1e-5
    gradients = {(name, of): g for name, f in meshes.items() for of, g in f["gradients"].items()}
    assert len(gradients) == 3
    for (_, of), errors in gradients.items():
        assert errors.keys() == {"q_proj", "router", "experts", "gate_proj"}
        if of == "eight_bit_gradient":
            # summed over blocks of each device's own tokens
            assert errors.pop("experts") < 0.03
        assert max(errors.values()) < 1e-5


def test_experts_and_their_scales_are_split_and_quantized_to_the_same_bits(meshes):
    split = meshes["data 2 expert 2 tensor 2"]
    assert split["up_proj"] == [None, "expert", "tensor", "fsdp"]
    assert split["up_proj_scales"][:3] == [None, "expert", "tensor"]
    assert split["router"] == [None, None, "fsdp"]
    # 64 rows a shard end inside a 128-block, so that axis of the scales is replicated
    assert meshes["fsdp 2 tensor 4"]["up_proj_scales"][:3] == [None, "expert", None]
    for found in meshes.values():
        assert found["sync_equal"]
        # a flipped rounding moves its token and the later ones of its row
        errors = sorted(found["quantized"])
        assert errors[len(errors) * 3 // 4] < 1e-5 and errors[-1] < 0.2
