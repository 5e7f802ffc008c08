"""Random batches for the tests of rl: ragged masks, an empty row, and rubbish in the padding."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.fixture(scope="session")
def make_batch():
    """Makes float32 log-probabilities of four policies near each other, advantages [B], entropy,
    and a mask [B, T]."""

    def make(
        seed: int = 0, rows: int = 8, width: int = 11, spread: float = 0.3
    ) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        lengths = rng.integers(1, width + 1, rows)
        lengths[2] = 0
        logprobs = -rng.exponential(1.0, (rows, width))
        near = {
            name: logprobs + rng.normal(0, spread, logprobs.shape)
            for name in ("old", "rollout", "reference")
        }
        floats = {
            "logprobs": logprobs,
            **near,
            "entropy": rng.uniform(0, 3, logprobs.shape),
            "advantages": rng.normal(0, 1, rows),
        }
        batch = {name: value.astype(np.float32) for name, value in floats.items()}
        return batch | {"mask": np.arange(width) < lengths[:, None]}

    return make


@pytest.fixture(scope="session")
def spoil_padding():
    """Puts NaN, inf and -inf into the masked entries of an array."""

    def spoil(array: np.ndarray, mask: np.ndarray) -> np.ndarray:
        rubbish = np.resize([np.nan, np.inf, -np.inf], array.shape)
        return np.where(mask, array, rubbish).astype(array.dtype)

    return spoil
