"""Formats, the quantized tensor, and how a policy multiplies and computes with them."""

from fp8rl_jax.precision.check import (
    check_formats,
    check_recipe,
    describe,
    promises_exact,
    unlike_sides,
)
from fp8rl_jax.precision.compute import Compute
from fp8rl_jax.precision.exact import exact_compute
from fp8rl_jax.precision.formats import element_dtype, format_of, max_value, register
from fp8rl_jax.precision.formats.weights import WeightFormat
from fp8rl_jax.precision.layers import quantized_layers, quantized_on, why_in_compute
from fp8rl_jax.precision.linear import (
    AdaptedWeight,
    PredequantizedWeight,
    QuantizedInput,
    QuantizedWeight,
    Stored,
    as_weight,
    input_splits,
    is_quantized,
    linear,
    multiply_all,
    output_splits,
    predequantize,
)
from fp8rl_jax.precision.quantizer import (
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
from pallas_kernels import Blocks, Format, QTensor
from pallas_kernels.quantize import dequantize

__all__ = [
    "AdaptedWeight",
    "Blocks",
    "Compute",
    "QuantizedInput",
    "QuantizedWeight",
    "Format",
    "PredequantizedWeight",
    "QTensor",
    "QuantizationSums",
    "Stored",
    "WeightFormat",
    "as_weight",
    "check_formats",
    "check_recipe",
    "dequantize",
    "describe",
    "element_dtype",
    "exact_compute",
    "format_of",
    "is_finite",
    "input_splits",
    "is_quantized",
    "join_sums",
    "linear",
    "max_value",
    "multiply_all",
    "output_splits",
    "predequantize",
    "promises_exact",
    "quantize",
    "quantize_per_tensor",
    "quantized_layers",
    "quantized_on",
    "register",
    "stack_sums",
    "unlike_sides",
    "weight_sums",
    "why_in_compute",
]
