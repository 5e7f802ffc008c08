"""Adapters over 8 simulated devices: placed with the weights that they stand beside, with the
gradients of one device."""

from __future__ import annotations

from pathlib import Path

import pytest
from parallel.helpers import run_on_devices

pytestmark = pytest.mark.slow

# mesh (fsdp 2, expert 2, tensor 2); {adapter: (where it lives, its shape on one device)}
PLACED = {
    "q_proj.a": ([None, None, "fsdp"], [1, 3, 32]),
    "q_proj.b": ([None, "tensor", None], [1, 32, 3]),
    "o_proj.a": ([None, None, "tensor"], [1, 3, 32]),
    "o_proj.b": ([None, "fsdp", None], [1, 32, 3]),
    "experts.up_proj.a": ([None, "expert", None, "fsdp"], [1, 2, 3, 32]),
    "experts.up_proj.b": ([None, "expert", "tensor", None], [1, 2, 128, 3]),
    "experts.down_proj.a": ([None, "expert", None, "tensor"], [1, 2, 3, 128]),
    "experts.down_proj.b": ([None, "expert", "fsdp", None], [1, 2, 32, 3]),
}


@pytest.fixture(scope="module")
def found():
    return run_on_devices(Path(__file__).with_name("on_adapter_mesh.py"), 8, timeout=400)


def test_adapters_and_their_moments_are_placed_by_the_rules(found):
    placed = {
        name.removesuffix(".weight.value"): where for name, where in found["adapters"].items()
    }
    assert len(placed) == 2 * 7 and {name: placed[name] for name in PLACED} == {
        n: list(p) for n, p in PLACED.items()
    }
    assert found["moments"]


def test_loss_and_gradients_equal_one_device(found):
    assert (
        found["loss"] < 1e-5
        and len(found["gradient"]) == 7
        and max(found["gradient"].values()) < 1e-4
    )


def test_adapters_are_merged_into_shards(found):
    assert found["merged"] and found["merged_like_policy"]


def test_the_base_is_placed_once_and_known_again(found):
    assert found["base_untouched"] and found["checksums"] and not found["other_checksums"]
