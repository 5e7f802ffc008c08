"""Writes int4.json: `python make_int4.py` with torch (CPU) and compressed-tensors 0.20.0.

"compressed-tensors": `PackedQuantizationCompressor.compress` and `.decompress` ("pack-quantized")
are run, after `calculate_qparams` on each group's least and largest value:
  scale = amax / 7.5, in the weight's dtype; where 0, that dtype's eps
  code = round_to_nearest_even(clip(w / scale, -8, 7)), the quotient in the weight's dtype
  restored = code * scale, in the scale's dtype
  packed: int32, the code + 8 of column 8i + j in bits 4j to 4j + 3 of word i; a row's last word is
  filled up with zero bits (not with code 0, which is 8)
"packing" has `pack_to_int32` and `unpack_from_int32` alone, also where columns are no multiple of 8.

"slime" is THUDM/slime @624b824a898ab0ec1fcb4d373004c7f3852bf515, the rule of Kimi K2's INT4
(symmetric); its kernel is CUDA
(slime/backends/megatron_utils/kernels/int4_qat/fake_int4_quant_cuda.cu
`int4_quant_1x32_kernel`), so stated here, in float32:
  scale = max(amax * float32(1 / 7), 1e-5); code = round_to_nearest_even(w / scale), in [-7, 7]
  stored: the codes packed as above and the scale rounded to the weight's dtype
  (tools/convert_hf_to_int4_direct.py), weight_shape int32
  restored = bfloat16(float32(code) * float32(scale)) (tools/convert_k2_thinking_int4_to_bf16.py)
"""

from __future__ import annotations

import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from sources import tensor, write


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    factors = torch.tensor([1.0, 0.3, 7.0, 0.011]).repeat(2)[:, None]
    normal = torch.randn(8, 256, generator=generator) * 0.02 * factors
    normal[3, :128] = 0.0
    normal[4, 32:64] = 1e-6 * normal[4, 32:64]
    normal[5, :32] = torch.arange(-16, 16) * 0.5  # amax is negative: -8, whole and half codes
    normal[6, :32] = torch.arange(32) * 0.25 - 0.25  # amax is 7.5: codes are the values, with ties
    return {"bfloat16": normal.to(torch.bfloat16), "float32": normal[3:7].clone()}


def compressed_tensors(weight: torch.Tensor, group: int) -> dict[str, object]:
    arguments = QuantizationArgs(num_bits=4, group_size=group, strategy="group", symmetric=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    columns = -(-weight.shape[1] // group) * group
    padded = torch.nn.functional.pad(weight, (0, columns - weight.shape[1]))
    groups = padded.unflatten(-1, (-1, group))
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments)
    state = {"weight": weight, "weight_scale": scale}
    stored = PackedQuantizationCompressor.compress(state, scheme)
    restored = PackedQuantizationCompressor.decompress(stored, scheme)["weight"]
    codes = unpack_from_int32(stored["weight_packed"], 4, weight.shape)
    return {
        "codes": tensor(codes),
        **{name: tensor(value) for name, value in stored.items()},
        "dequantized": tensor(restored),
    }


def slime(weight: torch.Tensor, group: int) -> dict[str, object]:
    groups = weight.float().unflatten(-1, (-1, group))
    seventh = torch.tensor(1.0 / 7.0, dtype=torch.float32)
    scale = (groups.abs().amax(-1) * seventh).clip(min=1e-5)
    codes = torch.round(groups / scale[..., None]).flatten(-2).to(torch.int8)
    stored = scale.to(weight.dtype)
    restored = (codes.float() * stored.float().repeat_interleave(group, -1)).to(torch.bfloat16)
    return {
        "codes": tensor(codes),
        "weight_packed": tensor(pack_to_int32(codes, 4)),
        "weight_scale": tensor(stored),
        "weight_shape": tensor(torch.tensor(weight.shape, dtype=torch.int32)),
        "dequantized": tensor(restored),
    }


def packing() -> dict[str, object]:
    generator = torch.Generator().manual_seed(3)
    table = {}
    for columns in (1, 7, 8, 9, 20, 40):
        codes = torch.randint(-8, 8, (3, columns), generator=generator, dtype=torch.int8)
        codes[0], codes[1] = -8, 7
        packed = pack_to_int32(codes, 4)
        assert torch.equal(unpack_from_int32(packed, 4, codes.shape), codes)
        table[f"3x{columns}"] = {"codes": tensor(codes), "packed": tensor(packed)}
    experts = torch.randint(-8, 8, (2, 3, 20), generator=generator, dtype=torch.int8)
    table["2x3x20"] = {"codes": tensor(experts), "packed": tensor(pack_to_int32(experts, 4))}
    return table


def refused(weight: torch.Tensor, group: int) -> str:
    """What it says to columns that are no multiple of the group."""
    try:
        compressed_tensors(weight, group)
    except (RuntimeError, ValueError) as error:
        return str(error)
    raise AssertionError("columns that are no multiple of the group were taken")


def main() -> None:
    named = weights()
    write(
        "int4",
        {
            "weights": {name: tensor(weight) for name, weight in named.items()},
            "compressed-tensors": {
                f"{name} {group}": compressed_tensors(weight, group)
                for name, weight, group in (
                    ("bfloat16", named["bfloat16"], 32),
                    ("bfloat16", named["bfloat16"], 128),
                    ("float32", named["float32"], 32),
                )
            },
            "refused": {"2x40 in groups of 32": refused(torch.ones(2, 40), 32)},
            "slime": {"bfloat16 32": slime(named["bfloat16"], 32)},
            "packing": packing(),
        },
    )


if __name__ == "__main__":
    main()
