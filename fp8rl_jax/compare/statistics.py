"""How far two arrays are apart, as plain numbers.

    differing         part of the elements whose bits are not the same, both widened to float32
                      (which is exact)
    relative_error    ||a - b|| / ||a||, 0 where nothing differs
    snr_db            20 log10(||a|| / ||a - b||); None where nothing differs
    max_abs           largest |a - b|

Sums are in float64. A number that is not finite is None: JSON has no word for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Difference:
    """Of two arrays of one shape; the numbers of the table above."""

    elements: int
    differing: float
    relative_error: float | None
    snr_db: float | None
    max_abs: float | None

    @property
    def equal(self) -> bool:
        """Whether every bit is the same."""
        return self.differing == 0


def difference(a: np.ndarray, b: np.ndarray) -> Difference:
    """Compares two arrays of one shape, of any dtype that float32 holds exactly; integers below
    2^24 are such.

    Raises:
        ValueError: the shapes differ.
    """
    if a.shape != b.shape:
        raise ValueError(f"difference: shapes {a.shape} and {b.shape}")
    a, b = (np.ascontiguousarray(x, np.float32) for x in (a, b))
    differing = int((a.view(np.uint32) != b.view(np.uint32)).sum())
    if not differing:
        return Difference(a.size, 0.0, 0.0, None, 0.0)
    with np.errstate(invalid="ignore", over="ignore"):
        wide = a.astype(np.float64)
        delta = wide - b
        signal, noise = float(np.linalg.norm(wide.ravel())), float(np.linalg.norm(delta.ravel()))
        largest = float(np.abs(delta).max())
    relative = noise / signal if signal else (math.inf if noise else 0.0)
    snr = (
        20 * math.log10(signal / noise)
        if signal > 0 and noise > 0 and math.isfinite(relative)
        else None
    )
    return Difference(a.size, differing / a.size, _finite(relative), snr, _finite(largest))


def logprob_differences(
    a: np.ndarray, b: np.ndarray, mask: np.ndarray
) -> dict[str, float | int | None]:
    """The numbers of two sides' log-probabilities of the same tokens.

    Args:
        a, b: float32 [rows, tokens].
        mask: True where a token counts; at least one.

    Returns:
        tokens, differing, mean_abs and max_abs of a - b; k3, Schulman's estimate of KL(a || b) per
        token (http://joschu.net/blog/kl-approx.html), and row and position of the largest
        difference.
    """
    delta = np.where(mask, b.astype(np.float64) - a, 0.0)
    counted = delta[mask]
    row, position = np.unravel_index(np.argmax(np.where(mask, np.abs(delta), -1.0)), mask.shape)
    with np.errstate(over="ignore"):
        k3 = float(np.mean(np.expm1(counted) - counted))
    return {
        "tokens": int(mask.sum()),
        "differing": difference(a[mask], b[mask]).differing,
        "mean_abs": _finite(float(np.abs(counted).mean())),
        "max_abs": _finite(float(np.abs(counted).max())),
        "k3": _finite(k3),
        "row": int(row),
        "position": int(position),
        "a": _finite(float(a[row, position])),
        "b": _finite(float(b[row, position])),
    }


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None
