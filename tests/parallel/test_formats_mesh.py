"""Formats with quantizers of their own over 8 simulated devices: what is served has the bits of one
device, and updates its gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
from parallel.helpers import run_on_devices

pytestmark = pytest.mark.slow


def test_codes_are_those_of_one_device_and_gradients_are_its_own():
    found = run_on_devices(Path(__file__).with_name("on_formats_mesh.py"), 8, timeout=600)
    assert found.keys() == {"bf16", "jet-rl", "mxfp8", "nvfp4", "int4-qat"}
    for name, of in found.items():
        linears = 0 if name == "bf16" else 7
        assert of["codes"] and of["spread"] == of["linears"] == linears, name
        assert of["loss"] < 1e-5 and of["gradient"] < 1e-4, (name, of)
