"""The differentiable gradient estimator of FP4 weights (arXiv 2501.17116, section 3.1).

Rounding to e2m1 is a stair, whose derivative is 0 or infinite. Between two neighbouring numbers, a
width d apart, it is taken for the smooth

    f(x) = d/2 (1 + sign(2x/d - 1) |2x/d - 1|^(1/k)),   x from the lower one

so a weight's gradient is that of its quantized values times f'(x) = |2x/d - 1|^(1/k - 1) / k, at
the weight divided by its scale, and at most 3. It is large for a weight that is about to change its
number, and 1/k for one that has just arrived. Scales count as constants.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fp8rl_jax.precision.formats.grids import E2M1_LARGEST, step_of
from pallas_kernels import QTensor

K, LARGEST_SLOPE = 5, 3.0


def e2m1_slope(x: Float[Array, "*axes"]) -> Float[Array, "*axes"]:
    """Compute f'(x), float32.

    Args:
        x: float32, divided by its scale; beyond 6, where it saturates, as at 6.
    """
    size = jnp.minimum(jnp.abs(x), E2M1_LARGEST)
    steps = size / step_of(size, mantissa=1, smallest=0)
    middle = jnp.abs(2 * (steps - jnp.floor(steps)) - 1)
    return jnp.minimum(middle ** (1 / K - 1) / K, LARGEST_SLOPE)


@jax.custom_vjp
def with_estimated_gradient(
    master: Float[Array, "*stack n k"], quantized: QTensor
) -> Float[Array, "*stack n k"]:
    """The master, whose gradient is multiplied by `e2m1_slope`.

    It is taken at the master itself, which is kept anyway, where the compute dtype may have rounded
    what was quantized.

    Args:
        master: float32.
        quantized: what was made of it.
    """
    return master


def _forward(master, quantized):
    return master, (master, quantized)


def _backward(saved, gradient):
    master, quantized = saved
    scaled = master * (E2M1_LARGEST / quantized.format.limit(quantized))
    return gradient * e2m1_slope(scaled), None


with_estimated_gradient.defvjp(_forward, _backward)
