"""Kernels on a mesh: each device computes its share, and nothing is gathered that need not be."""

from __future__ import annotations

from pathlib import Path

import pytest
from parallel.helpers import run_on_devices

from pallas_kernels.partition import scatters, splits

OPERANDS = (("m", "k"), ("m", "b"), ("n", "k"), ("c", "b"))
BLOCKS = {"b": ("k", 128), "c": ("n", 128)}
SIZES = {"data": 2, "fsdp": 2, "tensor": 2}


@pytest.fixture(scope="module")
def printed():
    return run_on_devices(Path(__file__).with_name("on_partitioned_kernels.py"), 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout, collectives, shard",
    [
        ("columns", [], [16, 384]),
        ("contraction", ["all-reduce"], [16, 768]),
        ("gathered_weight", ["all-gather"], [16, 384]),
        ("broken_blocks", ["all-gather"], [64, 96]),  # gathered, computed as a whole, and cut
    ],
)
def test_each_device_computes_its_share(printed, layout, collectives, shard):
    difference, found, result = printed[layout]
    assert difference < 1e-4 and found == collectives and result == shard


def test_a_mesh_axis_is_used_once_and_by_the_first_that_has_it():
    given = [
        ((64, 512), [("data", "fsdp"), ()]),
        ((64, 4), [(), ()]),
        ((768, 512), [("tensor",), ("fsdp",)]),
        ((6, 4), [(), ()]),
    ]
    assert splits(OPERANDS, BLOCKS, (), given, SIZES) == {"m": ("data", "fsdp"), "n": ("tensor",)}


def test_a_block_is_not_split():
    given = [
        ((64, 576), [(), ("tensor",)]),
        ((64, 5), [(), ()]),
        ((192, 576), [("fsdp",), ()]),
        ((2, 5), [(), ()]),
    ]
    assert splits(OPERANDS, BLOCKS, (), given, SIZES) == {}


def test_what_must_be_whole_is_not_split():
    given = [
        ((64, 512), [("data",), ()]),
        ((64, 4), [(), ()]),
        ((768, 512), [("tensor",), ()]),
        ((6, 4), [(), ()]),
    ]
    assert splits(OPERANDS, BLOCKS, ("m",), given, SIZES) == {"n": ("tensor",)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "product, collectives", [("grouped", ["all-reduce"]), ("gradient", ["all-gather"])]
)
def test_the_rows_of_groups_are_whole(printed, product, collectives):
    difference, found = printed[product]
    assert difference < 1e-4 and found == collectives


@pytest.mark.slow
def test_a_sum_of_which_devices_want_parts_is_scattered(printed):
    difference, found, shard = printed["gradient_of_shards"]
    assert difference == 0 and found == ["all-reduce", "reduce-scatter"] and shard == [64, 256]


def test_what_is_scattered_is_summed_and_divides():
    class Wanted:
        def __init__(self, shape, *spec):
            self.shape, self.sharding = shape, self
            self.spec = spec

    split, over = {"m": ("data", "fsdp"), "n": ("tensor",)}, ("data", "fsdp")

    def found(shape, *spec, results=(("n", "k"),)):
        return scatters(results, split, over, Wanted(shape, *spec), SIZES)

    assert found((64, 512), "tensor", "fsdp") == {1: ("fsdp",)}
    assert found((64, 512), ("tensor", "fsdp"), "data") == {0: ("fsdp",), 1: ("data",)}
    assert found((6, 512), ("tensor", "fsdp")) == found((64, 512), "tensor") == {}
    assert found((64, 512), "tensor", "fsdp", results=(("n", "k"), ("n",))) == {}


@pytest.mark.slow
def test_a_kernel_with_two_results(printed):
    """Values stay where they are; their scales, 32 times smaller, are gathered where nobody wants a
    part of them."""
    assert printed["quantizer"] == [0.0, ["f32[4,64,4]"]]


@pytest.mark.slow
def test_a_block_that_no_scale_counts_splits_nothing(printed):
    assert printed["few_rows"] == []


@pytest.mark.slow
def test_prefill_is_split_by_rows_and_heads(printed):
    difference, found, shard = printed["prefill"]
    assert difference < 1e-6 and found == [] and shard == [2, 5, 4, 32]
