"""The inputs on which other projects' own code was run; oracle.json holds what it answered.

Six completions of two prompts, of 8, 6, 5, 7, 1 and 0 tokens. Rollout and trainer are a factor
exp(gap) apart, and the gap grows from one completion to the next: no criterion rejects the first
one, every criterion rejects some other. Numbers are rounded to four digits, so that they are the
same wherever NumPy runs.
"""

from __future__ import annotations

import numpy as np

LENGTHS = (8, 6, 5, 7, 1, 0)
SAMPLES_PER_PROMPT = 3


def oracle_inputs(name: str = "plain") -> dict[str, np.ndarray]:
    """float32 log-probabilities [6, 8] of current, old, rollout and reference policy, mask,
    advantages, rewards.

    plain: gaps up to 2. clamped: one token of the third completion has a gap of 25, one of the
    fourth -30, so that log-ratios are clamped. overflow: one token of the third completion has a
    gap of 100, which overflows float32.
    """
    rng = np.random.default_rng(2026)
    shape = (len(LENGTHS), max(LENGTHS))
    scale = np.array([0.0008, 0.04, 0.15, 0.5, 0.9, 0.3])[:, None]
    old = -rng.exponential(1.0, shape)
    gap = scale * rng.normal(size=shape)
    current = old + 0.3 * rng.normal(size=shape)
    reference = old + 0.5 * rng.normal(size=shape)
    match name:
        case "clamped":
            gap[2, 1], gap[3, 2] = 25.0, -30.0
        case "overflow":
            gap[2, 1] = 100.0
    arrays = {"old": old, "rollout": old - gap, "current": current, "reference": reference}
    arrays["advantages"] = np.array([1.2, -0.7, 0.4, -1.1, 0.9, -0.3])
    arrays["rewards"] = np.array([1.0, 0.25, 0.0, 0.5, 2.0, -1.0])
    rounded = {key: np.round(value, 4).astype(np.float32) for key, value in arrays.items()}
    return rounded | {"mask": np.arange(shape[1]) < np.array(LENGTHS)[:, None]}
