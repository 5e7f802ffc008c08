"""A process that ends must not leave the others waiting."""

import time
from pathlib import Path

import pytest
from parallel.helpers import exit_codes


@pytest.mark.parametrize(("end", "code"), [("killed", -9), ("failed", 1)])
def test_no_process_waits_for_one_that_ended(end, code):
    started = time.monotonic()
    survivor, ended = exit_codes(Path(__file__).with_name("left.py"), 2, 1, end, timeout=90)
    assert ended == code
    assert survivor not in (0, None), "None: it still waited when time was up"
    # what jax's own exit would take: 100 s to miss a killed process, 300 s to give up on one that
    # failed
    assert time.monotonic() - started < 60
