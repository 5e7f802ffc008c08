"""Continuous batching on a mesh: each part of the batch has its own queue."""

from __future__ import annotations

from pathlib import Path

import pytest
from parallel.helpers import run_on_devices


@pytest.mark.slow
def test_parts_of_a_batch_sample_what_one_device_samples():
    """By themselves where a device has the whole model, together where it is split."""
    found = run_on_devices(Path(__file__).with_name("on_paged_mesh.py"), 8, timeout=600)
    for same, gap, _, reused in found["meshes"].values():
        assert same and gap < 1e-5 and reused > 30
    assert [rows for *_, rows, _ in found["meshes"].values()] == [3, 6]
    for same, gap in (found["simulated"], *found["quantized"].values()):
        assert same and gap < 1e-4


@pytest.mark.slow
def test_what_devices_exchange_in_a_decode_step():
    """Nothing where each has the whole model; else nothing that grows with the batch, and of the
    logits (272 a row, two rows) a block of 128."""
    found = run_on_devices(Path(__file__).with_name("on_paged_collectives.py"), 8)
    whole, split = found.values()
    assert whole == [[], []]
    few, many = split
    assert few == many and few
    assert max(few) <= 2 * 128
