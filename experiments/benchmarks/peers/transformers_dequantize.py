"""Peer: a directory with quantized weights, as compressed-tensors decompresses its linears and as
transformers opens it.

    {"open": DIRECTORY, "file": FILE}    writes the bits of every linear that compressed-tensors
                                         decompresses, bfloat16 as int16, by its name into an .npz;
                                         answers how many there are, in which of them transformers'
                                         model has another weight, and whether its logits are finite
"""

import json
from pathlib import Path

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from link import Link
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig


def main():
    link = Link()
    torch.set_num_threads(link.settings["threads"])
    torch.set_grad_enabled(False)
    link.ready(("torch", "transformers", "compressed-tensors"), {})
    for request in link:
        weights = decompressed(Path(request["open"]))
        bits = {name: weight.view(torch.int16).numpy() for name, weight in weights.items()}
        np.savez(request["file"], **bits)
        link.answer(in_transformers(request["open"], weights))


def decompressed(directory):
    """Every linear that has scales, bfloat16, by its name."""
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    (scheme,) = QuantizationConfig.model_validate(config).config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    parts = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        module, _, part = name.rpartition(".")
        parts.setdefault(module, {})[part] = tensor
    return {
        f"{module}.weight": compressor.decompress(own, scheme)["weight"].to(torch.bfloat16)
        for module, own in parts.items()
        if "weight_scale" in own
    }


def in_transformers(directory, weights):
    dequantize = CompressedTensorsConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.bfloat16, quantization_config=dequantize
    )
    held, logits = model.state_dict(), model(torch.arange(16)[None]).logits
    return {
        "linears": len(weights),
        "differing": [name for name, own in weights.items() if not torch.equal(held[name], own)],
        "finite": bool(torch.isfinite(logits).all()),
    }


main()
