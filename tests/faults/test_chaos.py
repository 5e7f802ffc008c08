"""The moments at which `make chaos` kills."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from experiments.chaos.__main__ import drawn


def test_moments_are_drawn_once_for_a_seed():
    """In every phase, from the start on, and before the first checkpoint."""
    phases = ["start", "gen", "reward", "train", "ckpt", "log", "eval", "sync"] * 8
    moves = [(float(i), i // 4 - 1, phase) for i, phase in enumerate(phases)]
    reference: Any = SimpleNamespace(processes=[None], told=[SimpleNamespace(moves=moves)])
    aims, again = (drawn(random.Random("0 plain"), reference, 12) for _ in range(2))
    assert aims == again and len(aims) == 12
    assert [aim.step for aim in aims[:3]] == [-1, 0, 1]
    assert [aim.step for aim in aims] == sorted(aim.step for aim in aims)
    assert set(phases) <= {aim.phase for aim in aims}
