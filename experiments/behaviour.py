"""The fingerprint of a record that is no ablation's: of golden runs of the recipes that it measured
(fp8rl_jax/ablation/behaviour.py), or what its own arithmetic makes of fixed numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fp8rl_jax.ablation.behaviour import differences, fingerprint
from fp8rl_jax.ablation.design import Design, read_design
from fp8rl_jax.errors import UserError

NEAR = 5e-3
"""How far what is made of fixed numbers may be apart, relative: last bits of another machine."""


def alike(before: Mapping[str, float], now: Mapping[str, float]) -> bool:
    """Whether two fingerprints of fixed numbers are of one code."""
    return before.keys() == now.keys() and all(
        math.isclose(before[key], now[key], rel_tol=NEAR) for key in before
    )


def measured(
    recipes: Iterable[str], dtypes: Sequence[str], record: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Give a record that is no ablation's its fingerprint, before anything is measured.

    Args:
        recipes, dtypes: what is measured, each recipe under each compute dtype.
        record: what there is already, where more is to be measured.

    Returns:
        {"arms": settings by name, "fingerprint": of them}, the record's "behaviour".

    Raises:
        UserError: the record has none, or of other recipes, or of other code.
    """
    arms = {
        f"{recipe}-{dtype}": {"recipe": recipe, "compute_dtype": dtype}
        for recipe in recipes
        for dtype in dtypes
    }
    before = (record or {}).get("behaviour")
    if record and (before or {}).get("arms") != arms:
        raise UserError("--output: the record there is of other recipes or dtypes; name another")
    now = behaviour(arms)["fingerprint"]
    if before and (lines := differences(before["fingerprint"], now)):
        raise UserError(f"--output: the record there is of other code; name another: {lines[0]}")
    return before or {"arms": arms, "fingerprint": now}


def behaviour(arms: Mapping[str, Any]) -> dict[str, Any]:
    """Take the fingerprint of golden runs: a record's "behaviour"."""
    (now,) = fingerprint(of_arms(arms))
    return {"arms": arms, "fingerprint": now}


def of_arms(arms: Mapping[str, Any]) -> Design:
    """An ablation of recipes, of which golden runs are made and no others."""
    settings = {"metric": {"margin": 1.0}, "baseline": next(iter(arms)), "arms": arms}
    return read_design({"name": "recipes", **settings})
