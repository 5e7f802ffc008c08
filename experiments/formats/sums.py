"""Do products of a format add up alike in any order? What a last bit of a sum does begins there.

A product of two numbers of few bits has few bits itself, and where scales are powers of two they
leave it so: float32 may hold every partial sum, and then no order rounds. Scales that are float32
numbers fill its mantissa, and every addition rounds.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from experiments.depth import short
from experiments.formats.errors import INPUTS, Tensors
from experiments.formats.rows import BASELINE, BFLOAT16, Row, restored

MOST = 48
"""Tokens of a layer, and outputs of a linear."""


def alike(row: Row, tensors: Tensors) -> float:
    """Share of a linear's outputs that are the same whether their products are added in float32
    from the first to the last or from the last to the first.

    Args:
        tensors: as of `errors.tensors_of`; linears with an input of their own are looked at.
    """
    of_weights = jax.jit(partial(restored, name=row.name))
    activation = BFLOAT16 if row.name == BFLOAT16 else row.activation
    of_inputs = jax.jit(lambda x: x if activation == BASELINE else restored(x, activation))
    shares = []
    for name, kind in INPUTS.items():
        x, w = (
            np.asarray(rounded(jnp.asarray(part)))[:, _spread(part.shape[1])]
            for rounded, part in (
                (of_inputs, tensors["activation"][kind]),
                (of_weights, tensors["weight"][name]),
            )
        )
        for one, other in zip(x, w, strict=True):
            products = one[:, None] * other
            sums = (np.add.accumulate(p, -1)[..., -1] for p in (products, products[..., ::-1]))
            shares.append(np.equal(*sums).mean())
    return short(np.mean(shares))


def _spread(count: int) -> np.ndarray:
    """Places all over an axis."""
    return np.unique(np.linspace(0, count - 1, MOST).astype(int))
