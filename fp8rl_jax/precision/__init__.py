"""Formats, the quantized tensor, and how a policy multiplies and computes with them."""

from fp8rl_jax.precision.compute import Compute
from fp8rl_jax.precision.exact import exact_compute
from fp8rl_jax.precision.formats import (
    check_recipe,
    describe,
    element_dtype,
    max_value,
    promises_exact,
    unlike_sides,
)
from fp8rl_jax.precision.layers import quantized_layers, why_in_compute
from fp8rl_jax.precision.linear import (
    AdaptedWeight,
    FP8Input,
    FP8Weight,
    PredequantizedWeight,
    Stored,
    as_weight,
    is_quantized,
    linear,
    predequantize,
)
from fp8rl_jax.precision.qtensor import (
    QTensor,
    dequantize,
    is_finite,
    quantize,
    quantize_per_tensor,
)
from fp8rl_jax.precision.statistics import (
    QuantizationSums,
    join_sums,
    stack_sums,
    weight_sums,
)

__all__ = [
    "AdaptedWeight",
    "Compute",
    "FP8Input",
    "FP8Weight",
    "PredequantizedWeight",
    "QTensor",
    "QuantizationSums",
    "Stored",
    "as_weight",
    "check_recipe",
    "dequantize",
    "describe",
    "exact_compute",
    "element_dtype",
    "is_finite",
    "is_quantized",
    "join_sums",
    "linear",
    "max_value",
    "predequantize",
    "promises_exact",
    "quantize",
    "quantize_per_tensor",
    "quantized_layers",
    "stack_sums",
    "unlike_sides",
    "weight_sums",
    "why_in_compute",
]
