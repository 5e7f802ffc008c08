"""What a quantized export holds: linears in a rollout's weight format, and what config.json says.

    format                        written as
    e4m3-128x128 ("fp8-block")    DeepSeek-V3's block FP8 (block_fp8)
    mxfp8, mxfp8_floor            compressed-tensors 0.20 mxfp8-quantized; ModelOpt 0.47 MXFP8
    mxfp6, mxfp6_up               compressed-tensors 0.20 mxfp6-pack-quantized
    mxfp4, mxfp4_up               compressed-tensors 0.20 mxfp4-pack-quantized
    nvfp4, nvfp4_four_over_six    compressed-tensors 0.20 nvfp4-pack-quantized; ModelOpt 0.47
                                  W4A16_NVFP4, or NVFP4 with the sizes of inputs
    int4                          compressed-tensors 0.20 pack-quantized

Blocks of several rows, such as nvfp4-16x16, are written as groups along each row, whose scales are
repeated. Read back, a linear has the values that the rollout computes with, bit for bit: they come
from the library's one quantizer, on the weight as it is given. Embeddings, lm_head, norms, biases
and routers stay in 16 bits.

Readers of block FP8 and MXFP8 quantize activations as the recipes do. The others are written for
weights alone. For NVFP4 activations (W4A4) both libraries have one outer scale for a linear,
measured beforehand, and no place for a row's own, which is what the recipes compute with: it is
written where the largest magnitude of each linear's inputs is given (`compare.inputs`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np

from fp8rl_jax.config.formats import WHOLE, TensorFormat, parse_format
from fp8rl_jax.errors import UserError, listing
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.tensors import of_kind
from fp8rl_jax.weights.block_fp8 import SCALE_SUFFIX, unaligned_linears
from fp8rl_jax.weights.hf_names import Location, hf_tensors
from fp8rl_jax.weights.layouts import BLOCK, FORMATS, LAYOUT_OF, VERSIONS
from fp8rl_jax.weights.safetensors_io import Kind
from fp8rl_jax.weights.stored_linears import pack_e2m3, pack_integers

Library = Literal["deepseek", "compressed-tensors", "modelopt"]

FP8_BLOCK = "fp8-block"
_MODELOPT = {"mxfp8": "MXFP8", "nvfp4": "W4A16_NVFP4"}
_PLAIN = ("bfloat16", "float16", "float32")
_NVFP4_LARGEST = np.float32(6 * 448)
"""What an outer scale of 1 reaches: the largest code times the largest scale."""


@dataclass(frozen=True)
class ExportForm:
    """A quantized form of an export.

    Attributes:
        format: of the weights.
        library: whose names the tensors have.
        linears: those that are quantized, such as "layers.3.q_proj"; None: all.
        inputs: by linear, the largest magnitude that it multiplies, of NVFP4 with activations in
            NVFP4; None: weights alone.
    """

    format: TensorFormat
    library: Library
    linears: frozenset[str] | None = None
    inputs: Mapping[str, float] | None = None

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        assert self.format.block is not None  # as `export_form` made it
        return self.format.block

    @property
    def layout(self) -> str:
        """Name of the `layouts.Layout`."""
        return LAYOUT_OF[self.format.element]

    def remarks(self, config: PolicyConfig) -> list[str]:
        """What other readers may not like about such an export, a line each."""
        if self.library == "deepseek":
            names = unaligned_linears(config)
            return names and [
                "sides that are no multiple of 128, which vLLM, SGLang or transformers may refuse: "
                f"{listing(names)}"
            ]
        found = []
        if self.inputs is not None:
            found.append(
                f"{self.format.name}: written with one outer scale for each linear's inputs, as "
                "measured; a recipe finds one for each row, so that readers compute other values"
            )
        elif self.layout in ("mxfp6", "mxfp4", "nvfp4"):
            found.append(
                f"{self.format.name}: written for weights alone, whoever serves it leaves "
                "activations in 16 bits"
                + "; --calibrate FILE measures theirs, for W4A4"
                * (self.layout == "nvfp4")
            )
        if self.layout == "nvfp4":
            found.append(
                f"{self.format.name}: each linear has its own outer scale, as the rollout has it; "
                "vLLM takes one for q, k and v, and one for gate and up, so that it serves other "
                "values"
            )
        transformers = self.library == "compressed-tensors" and self.layout in ("mxfp8", "nvfp4")
        if config.experts is not None and transformers:
            found.append(
                f"{self.format.name}: transformers 5.24 "
                + (
                    "does not open experts in it"
                    if self.layout == "mxfp8"
                    else "leaves out the outer scales of experts, and computes other values"
                )
            )
        return found

    def holds(self, location: Location) -> bool:
        """Whether a tensor is one of the linears that are quantized."""
        linear = _linear(location)
        return linear is not None and (self.linears is None or linear in self.linears)

    def input_scale(self, location: Location, module: str) -> dict[str, np.ndarray]:
        """Make the tensor that says how large the inputs of a linear are, if there is one.

        compressed-tensors' divides, 2688 / largest [1], and ModelOpt's multiplies, its reciprocal
        []; 1 where all inputs are 0.

        Args:
            module: Hugging Face's name of the linear.
        """
        linear = _linear(location)
        if self.inputs is None or linear is None:
            return {}
        largest = np.float32(self.inputs[linear]) or _NVFP4_LARGEST
        if self.library == "modelopt":
            return {f"{module}.input_scale": np.asarray(largest / _NVFP4_LARGEST)}
        return {f"{module}.input_global_scale": np.asarray([_NVFP4_LARGEST / largest])}


def _linear(location: Location) -> str | None:
    """A linear as recipes call it, "layers.3.q_proj"; None for other tensors."""
    name = location.path.removeprefix("layers.").removesuffix(".weight")
    if location.layer is None or name not in of_kind("linear", "experts"):
        return None
    return f"layers.{location.layer}.{name}"


def export_form(dtype: str | ExportForm) -> ExportForm | None:
    """Read what an export is to hold.

    Args:
        dtype: "bfloat16", "float16", "float32", "fp8-block", a format as recipes have it, or
            FORMAT@modelopt for ModelOpt's layout in place of compressed-tensors'.

    Returns:
        None for the first three.

    Raises:
        UserError: a format that has no layout, saying which have one.
    """
    if isinstance(dtype, ExportForm) or dtype in _PLAIN:
        return dtype if isinstance(dtype, ExportForm) else None
    text, _, library = dtype.partition("@")
    try:
        fmt = parse_format("e4m3-128x128" if text == FP8_BLOCK else text)
    except UserError:
        fmt = TensorFormat()
    layout, block = LAYOUT_OF.get(fmt.element), fmt.block or (0, 0)
    group = {form.layout: form.group for form in FORMATS.values()}.get(layout or "")
    if layout == "e4m3":
        sound = block == BLOCK and not library
    else:
        sound = layout is not None and WHOLE not in block and group in (None, block[1])
        sound &= not library or (library == "modelopt" and layout in _MODELOPT)
    if not sound:
        known = ", ".join(name for name in LAYOUT_OF if name != "e4m3")
        raise UserError(
            f"{dtype!r} cannot be exported, no layout is known for it; choose one of "
            f"{', '.join(_PLAIN)}, {FP8_BLOCK}, {known} (groups of 32 along a row, of NVFP4 "
            "16, of INT4 any), or for ModelOpt's layout "
            f"{', '.join(f'{name}@modelopt' for name in _MODELOPT)}"
        )
    other: Library = "modelopt" if library else "compressed-tensors"
    return ExportForm(fmt, "deepseek" if layout == "e4m3" else other)


def check_form(form: ExportForm, config: PolicyConfig) -> None:
    """Refuse what readers would.

    Raises:
        UserError: rows that the groups do not divide, which no library stores.
    """
    if form.library == "deepseek":
        return
    group = form.block[1]
    bad = dict.fromkeys(
        f"{location.path.removeprefix('layers.').removesuffix('.weight')} {list(location.shape)}"
        for location in hf_tensors(config).values()
        if form.holds(location) and location.shape[-1] % group
    )
    if bad:
        raise UserError(
            f"{form.format.name} cannot be exported: {form.library} stores rows that groups of "
            f"{group} divide, and others are {listing([*bad])}; choose another format, or bfloat16"
        )


@cache
def quantizer(fmt: TensorFormat) -> Any:
    """Return what makes a QTensor of a weight, compiled as a weight sync is, once for each
    shape."""
    import jax

    from fp8rl_jax.precision import quantize

    return jax.jit(lambda weight: quantize(weight, fmt))


def quantized_tensors(name: str, weight: np.ndarray, form: ExportForm) -> dict[str, np.ndarray]:
    """Quantize a linear's weight as the rollout does, into the tensors that an export has of it.

    Args:
        name: Hugging Face's, of the weight.
        weight: [out, in], finite, of any float dtype.
        form: of the export; `check_form` has seen it.

    Raises:
        UserError: an outer scale that is the reciprocal of no float32, which compressed-tensors'
            layout stores.
    """
    q = quantizer(form.format)(weight)
    values, scales = np.asarray(q.values), np.asarray(q.scales)
    if form.library == "deepseek":
        return {name: values, name + SCALE_SUFFIX: scales}
    rows = form.block[0]
    scales = np.repeat(scales, rows, axis=0)[: weight.shape[0]]
    modelopt = form.library == "modelopt"
    beside: dict[str, np.ndarray] = {}
    if form.layout == "int4":
        values = pack_integers(values)
        beside["_shape"] = np.array(weight.shape, np.int64)
    elif form.layout == "mxfp6":
        values = pack_e2m3(values)
    if form.layout == "nvfp4":
        outer = np.asarray(q.outer).reshape(())
        if outer == 0:  # of a weight that is served as zeros
            scales, outer = np.zeros_like(scales), np.ones((), np.float32)
        if modelopt:
            beside["_scale_2"] = outer
        else:
            beside["_global_scale"] = _reciprocal(name, outer).reshape(1)
    elif form.layout != "int4":
        scales = scales.view(np.uint8)
    place = name if modelopt or form.layout == "mxfp8" else f"{name}_packed"
    return {place: values, f"{name}_scale": scales} | {
        name + part: tensor for part, tensor in beside.items()
    }


def quantized_kinds(shape: tuple[int, ...], dtype: np.dtype, form: ExportForm) -> dict[str, Kind]:
    """Find what `quantized_tensors` makes of a weight, by what follows its name."""
    made = quantized_tensors("", np.zeros(shape, dtype), form)
    return {part: Kind(tensor.dtype, tensor.shape) for part, tensor in made.items()}


def _reciprocal(name: str, outer: np.ndarray) -> np.ndarray:
    """The float32 whose reciprocal an outer scale is: the quantizer made it as one."""
    near = 1 / outer
    for each in (near, np.nextafter(near, np.float32(math.inf)), np.nextafter(near, np.float32(0))):
        if 1 / each == outer:
            return each
    raise UserError(
        f"tensor {name}: its outer scale {outer} is the reciprocal of no float32, which "
        "compressed-tensors stores; export it with @modelopt, which stores the scale itself"
    )


def quantization_config(form: ExportForm, config: PolicyConfig) -> dict[str, Any]:
    """Return the `quantization_config` of an export.

    Routers are linears too: they are named one by one, as Qwen3-FP8 does, and so are linears that
    the form leaves in 16 bits.
    """
    kept = [
        name.removesuffix(".weight")
        for name, location in hf_tensors(config).items()
        if location.layer is not None
        and location.path.removeprefix("layers.").removesuffix(".weight")
        in of_kind("router", "linear", "experts")
        and not form.holds(location)
    ]
    kept = ["lm_head", *kept]
    if form.library == "deepseek":
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": form.format.element,
            "weight_block_size": list(BLOCK),
            "modules_to_not_convert": kept,
        }
    if form.library == "modelopt":
        return {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4" if form.inputs is not None else _MODELOPT[form.layout],
            "producer": {"name": "modelopt", "version": VERSIONS["modelopt"]},
            "group_size": form.block[1],
            "ignore": [*kept, "model.embed_tokens"],
        }
    name = next(name for name, found in FORMATS.items() if found.layout == form.layout)
    of = FORMATS[name]
    weights = {
        "num_bits": of.bits,
        "type": of.type,
        "symmetric": True,
        "strategy": of.strategies[0],
        "group_size": form.block[1],
        "dynamic": False,
    }
    if form.layout != "int4":
        weights["scale_dtype"] = "torch.float8_e4m3fn" if form.layout == "nvfp4" else "torch.uint8"
    inputs = weights | {"dynamic": True} if form.layout == "mxfp8" else None
    if form.inputs is not None:  # a group's scales are found as it comes, the outer one is given
        inputs = weights | {"dynamic": "local", "observer": "static_minmax"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": name}
    return {
        "quant_method": "compressed-tensors",
        "version": VERSIONS["compressed-tensors"],
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": kept,
        "kv_cache_scheme": None,
    }
