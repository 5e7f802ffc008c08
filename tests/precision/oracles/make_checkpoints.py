"""Writes checkpoints.json: `python make_checkpoints.py` with torch 2.13 (CPU), transformers 5.24.0,
compressed-tensors 0.20.0 and nvidia-modelopt 0.47.0 (a pure Python wheel; it needs omegaconf, pulp,
scipy and accelerate besides).

One weight of 32 x 64 (bfloat16), as each library writes it:
"compressed-tensors": a preset scheme on a `torch.nn.Linear` named "linear", scales by
`generate_gparam` and `calculate_qparams` on the least and largest value of each group,
`ModelCompressor.compress_model` and `.update_config`; "dequantized" is the compressor's
`decompress`. MXFP6 is e2m3.
"modelopt": a Llama of one layer whose k_proj is the weight, `mtq.quantize` with the preset
configuration and one batch to calibrate, `export_hf_checkpoint`; the tensors of k_proj,
hf_quant_config.json and config.json's quantization_config. q_proj and v_proj hold smaller values:
one weight_scale_2 is shared by q, k and v, of their largest amax. "dequantized" is the
`dequantize` of NVFP4QTensor and MXFP8QTensor, rounded to bfloat16.
"""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path

import modelopt.torch.quantization as mtq
import torch
from compressed_tensors.compressors import BaseCompressor, ModelCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationStatus,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import MXFP8QTensor, NVFP4QTensor
from safetensors.torch import load_file
from sources import tensor, write
from transformers import LlamaConfig, LlamaForCausalLM

PRESETS = ("NVFP4", "NVFP4A16", "MXFP8", "MXFP4", "MXFP6A16", "W4A16")
INPUTS = (-3.0, 2.5)  # the least and largest value of an input, for NVFP4's input_global_scale
CONFIGURATIONS = ("NVFP4_DEFAULT_CFG", "W4A16_NVFP4_CFG", "MXFP8_DEFAULT_CFG")


def weight() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    factors = torch.tensor([1.0, 0.3, 7.0, 0.01]).repeat(8)[:, None]
    values = torch.randn(32, 64, generator=generator) * 0.02 * factors
    values[3, :32] = 0.0
    values[7, 32:] *= 2.0**-12
    values[9, 0] = 1.75  # the largest: of MX formats' scales the case at which rules differ
    values[10, 0] = -0.4375
    values[11, 5] = 0.4375 * (1 - 2.0**-8)
    values[13] = torch.tensor([0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]).repeat(8) / 64
    values[13, ::8] = 6.0 / 64
    return values.to(torch.bfloat16)


def compressed_tensors(preset: str) -> dict[str, object]:
    model = torch.nn.Sequential()
    model.add_module("linear", torch.nn.Linear(64, 32, bias=False, dtype=torch.bfloat16))
    scheme = preset_name_to_scheme(preset, ["Linear"])
    if preset == "W4A16":
        scheme.weights.group_size = 32
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}))
    linear = model.linear
    linear.weight.data.copy_(weight())
    overall = None
    if hasattr(linear, "weight_global_scale"):
        overall = generate_gparam(linear.weight.data.min(), linear.weight.data.max())
        linear.weight_global_scale.data.copy_(overall)
    if hasattr(linear, "input_global_scale"):
        least, largest = (torch.tensor(value) for value in INPUTS)
        linear.input_global_scale.data.copy_(generate_gparam(least, largest))
    arguments = linear.quantization_scheme.weights
    groups = linear.weight.data.unflatten(-1, (-1, arguments.group_size))
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments, global_scale=overall)
    linear.weight_scale.data.copy_(scale)
    linear.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    stored = {name: value.clone() for name, value in model.state_dict().items()}
    with tempfile.TemporaryDirectory() as folder:
        compressor.update_config(folder)
        config = json.loads((Path(folder) / "config.json").read_text())
    kind = BaseCompressor.get_value_from_registry(config["quantization_config"]["format"])
    local = {name.removeprefix("linear."): value for name, value in stored.items()}
    restored = kind.decompress(local, linear.quantization_scheme)["weight"]
    found = {"tensors": {name: tensor(value) for name, value in stored.items()}, "config": config}
    # the same bytes as NVFP4's: only the names and the configuration are kept
    if preset == "NVFP4A16":
        return {"tensors": sorted(stored), "config": config}
    return {**found, "dequantized": tensor(restored)}


def modelopt(configuration: str) -> dict[str, object]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            architectures=["LlamaForCausalLM"],
            vocab_size=32,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            tie_word_embeddings=False,
            dtype="bfloat16",
        )
    ).to(torch.bfloat16)
    model.model.layers[0].self_attn.k_proj.weight.data.copy_(weight())
    batch = torch.arange(32)[None]
    model = mtq.quantize(
        model, copy.deepcopy(getattr(mtq, configuration)), lambda quantized: quantized(batch)
    )
    with tempfile.TemporaryDirectory() as folder:
        export_hf_checkpoint(model, export_dir=folder)
        stored = load_file(f"{folder}/model.safetensors")
        quant_config = json.loads((Path(folder) / "hf_quant_config.json").read_text())
        config = json.loads((Path(folder) / "config.json").read_text())["quantization_config"]
    prefix = "model.layers.0.self_attn.k_proj."
    local = {
        name.removeprefix(prefix): value.clone()
        for name, value in stored.items()
        if name.startswith(prefix)
    }
    found = {"hf_quant_config.json": quant_config, "config": {"quantization_config": config}}
    if configuration == "W4A16_NVFP4_CFG":
        return {"tensors": sorted(prefix + name for name in local), **found}
    shape = weight().shape
    if "weight_scale_2" in local:
        restored = NVFP4QTensor(shape, torch.bfloat16, local["weight"]).dequantize(
            torch.bfloat16,
            scale=local["weight_scale"],
            double_scale=local["weight_scale_2"],
            block_sizes={-1: 16},
        )
    else:
        restored = MXFP8QTensor(shape, torch.bfloat16, local["weight"]).dequantize(
            torch.bfloat16, scale=local["weight_scale"]
        )
    tensors = {prefix + name: tensor(value) for name, value in local.items()}
    return {"tensors": tensors, **found, "dequantized": tensor(restored)}


def main() -> None:
    write(
        "checkpoints",
        {
            "weight": tensor(weight()),
            "inputs": INPUTS,
            "compressed-tensors": {preset: compressed_tensors(preset) for preset in PRESETS},
            "modelopt": {
                configuration: modelopt(configuration) for configuration in CONFIGURATIONS
            },
        },
    )


if __name__ == "__main__":
    main()
