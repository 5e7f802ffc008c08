"""Formats, the quantized tensor, and the precision-aware linear."""

from fp8rl_jax.precision.formats import (
    check_recipe,
    describe,
    element_dtype,
    max_value,
    unlike_sides,
)
from fp8rl_jax.precision.layers import quantized_layers, why_in_compute
from fp8rl_jax.precision.linear import (
    AdaptedInput,
    AdaptedWeight,
    HoistedWeight,
    grouped_linear,
    hoist,
    is_quantized,
    linear,
    quantize_input,
)
from fp8rl_jax.precision.qtensor import (
    QTensor,
    dequantize,
    is_finite,
    quantize,
    quantize_per_tensor,
    quantize_weight,
)
from fp8rl_jax.precision.statistics import QuantizationSums, stack_sums, weight_sums
from fp8rl_jax.precision.trained import TrainedInput, TrainedWeight, frozen_weight, trained_weight

__all__ = [
    "AdaptedInput",
    "AdaptedWeight",
    "HoistedWeight",
    "QTensor",
    "QuantizationSums",
    "TrainedInput",
    "TrainedWeight",
    "check_recipe",
    "dequantize",
    "describe",
    "element_dtype",
    "frozen_weight",
    "grouped_linear",
    "hoist",
    "is_finite",
    "is_quantized",
    "linear",
    "max_value",
    "quantize",
    "quantize_input",
    "quantize_per_tensor",
    "quantize_weight",
    "quantized_layers",
    "stack_sums",
    "trained_weight",
    "unlike_sides",
    "weight_sums",
    "why_in_compute",
]
