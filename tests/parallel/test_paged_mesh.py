"""Continuous batching on a mesh: each part of the batch has its own queue."""

from __future__ import annotations

from pathlib import Path

from parallel.helpers import run_on_devices


def test_parts_of_a_batch_sample_what_one_device_samples():
    """By themselves where a device has the whole model, together where it is split."""
    found = run_on_devices(Path(__file__).with_name("on_paged_mesh.py"), 8)
    for same, gap, _ in found.values():
        assert same and gap < 1e-5
    assert [rows for *_, rows in found.values()] == [3, 6]
