"""The randomized Hadamard transform of NVFP4 pretraining (arXiv 2509.25149, section 4.2).

16 rows of an operand become 16 sums of them with signs, so that one outlier is spread over all. It
is orthogonal: where both operands of a product are transformed along what is summed, the product
stays as it is, but for the rounding of what comes next. The signs are one fixed vector for every
layer, Transformer Engine's (pytorch/custom_recipes/quantization_ref_nvfp4.py).
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

HADAMARD = 16
"""Rows that are transformed together."""
_SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], np.float32)


def _matrix() -> np.ndarray:
    """diag(signs) H / 4, with Sylvester's H."""
    h = np.ones((1, 1), np.float32)
    while len(h) < HADAMARD:
        h = np.block([[h, h], [h, -h]])
    return _SIGNS[:, None] * h / np.float32(4)


def hadamard(x: Float[Array, "m n"]) -> Float[Array, "m n"]:
    """Transform `x` along its rows, 16 at a time, in float32.

    Args:
        x: m is a multiple of 16.
    """
    groups = x.astype(jnp.float32).reshape(-1, HADAMARD, x.shape[-1])
    out = jnp.einsum("gin,ij->gjn", groups, jnp.asarray(_matrix()), precision="highest")
    return out.reshape(x.shape)
