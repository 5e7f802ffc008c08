"""Writes nvfp4.json: `python make_nvfp4.py TRANSFORMER_ENGINE_CLONE` with torch (CPU).

NVIDIA/TransformerEngine @d0067d0da6cb01811b8072a7d304f0e00344ce2b: `NVFP4QuantizerRef` of
transformer_engine/pytorch/custom_recipes/reference_nvfp4.py is run, that file and
reference_utils.py alone, without the compiled library. Its formulas, all in float32:
  outer = 448 * 6 / amax; at most float32's largest; 1 where that is 0 (256 instead of 448 in
    four-over-six with that bound)
  block scale = e4m3(min(block_amax * (outer * float32(1 / 6)), 448)), to nearest even
  element = e2m1(clip(x * min(1 / (block scale * (1 / outer)), largest), -6, 6)), to nearest even
  four-over-six: block scale = e4m3(min((block_amax / 6 * outer) [* 1.5], 448)); the one * 1.5
    where its summed error is smaller (strictly)
It doesn't dequantize; "dequantized" is tests/cpp/operator/test_dequantize_nvfp4.cu's:
  element * ((block scale * amax) * float32(1 / (6 * 448)))
"amax" is what the reference keeps of the outer scale; "encode" is the outer scale from it and
"decode" float32(1 / encode).

"transposed": what it makes of the columns (its columnwise output is the transposed matrix,
quantized along the other axis). "hadamard": `_apply_rht`, float32 and bfloat16.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile

import torch
from sources import checkout, stub, tensor, write

COMMIT = "d0067d0da6cb01811b8072a7d304f0e00344ce2b"
FOLDER = "transformer_engine/pytorch/custom_recipes"


def reference(clone: str):
    """The module reference_nvfp4 with its imports of the compiled library stubbed."""
    for name in ("transformer_engine", "transformer_engine.pytorch", FOLDER.replace("/", ".")):
        stub(name)
    stub(
        "transformer_engine.pytorch.quantized_tensor",
        QuantizedTensorStorage=type("QuantizedTensorStorage", (), {}),
        Quantizer=_Usage,
    )
    stub(FOLDER.replace("/", ".") + ".gemm", MMParams=object, GEMMType=_AnyMember())
    with tempfile.TemporaryDirectory() as folder:
        root = checkout(clone, COMMIT, FOLDER, folder) / FOLDER
        for name in ("reference_utils", "reference_nvfp4"):
            full = f"{FOLDER.replace('/', '.')}.{name}"
            spec = importlib.util.spec_from_file_location(full, root / f"{name}.py")
            module = importlib.util.module_from_spec(spec)
            sys.modules[full] = module
            setattr(sys.modules[full.rpartition(".")[0]], name, module)
            spec.loader.exec_module(module)
    return module


class _Usage:
    """What the reference uses of Quantizer."""

    def __init__(self, *, rowwise: bool, columnwise: bool):
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise


class _AnyMember:
    """An enumeration whose members are named in default values only."""

    def __getattr__(self, name: str) -> str:
        return name


def inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    factors = torch.tensor([[1.0], [0.3], [7.0], [1.1], [5.0], [13.0], [0.09], [3e-3]])
    normal = torch.randn(32, 64, generator=generator) * factors.repeat(4, 1)
    even = torch.randn(16, 64, generator=generator)
    rows = torch.randn(9, 48, generator=generator)
    rows[0] = 0.0
    rows[1] *= 2.0**-140
    rows[2, 5] = 3e38
    rows[3] *= 1e-30
    rows[4, 16:32] = 0.0
    rows[4, 32:] *= 2.0**-12
    rows[5] = torch.arange(48).remainder(16) * 0.25 * torch.tensor([1.0, -1.0]).repeat(24)
    rows[5, 0::16] = 6.0  # ties where the block scale times the outer scale is 1
    rows[6, 1:] = 0.0
    rows[7, :16] = -0.0
    return {
        "normal": normal,
        "bfloat16": (even * torch.linspace(0.2, 9, 16)[:, None]).to(torch.bfloat16),
        "edges": rows,
    }


def run(module, x: torch.Tensor, *, columnwise: bool, **options):
    kind = module.reference_utils.Fp4Formats.E2M1
    return module.NVFP4QuantizerRef(kind, columnwise=columnwise, **options).quantize(x)


def rows(module, x: torch.Tensor, **options) -> dict:
    """The matrix quantized along its rows."""
    found = run(module, x, columnwise=False, **options)
    bound = float(found.nvfp4_e4m3_max)
    return _parts(module, found.data, found.scale, found.global_amax_row, bound, x.shape)


def columns(module, x: torch.Tensor) -> dict:
    """The transposed matrix, quantized along what were its columns."""
    found = run(module, x, columnwise=True)
    bound = float(found.nvfp4_e4m3_max)
    return _parts(module, found.data_t, found.scale_t, found.global_amax_col, bound, x.T.shape)


def _parts(module, data, scale, amax, bound: float, shape) -> dict[str, object]:
    amax = amax.float()
    encode = (torch.tensor(bound) * 6.0 / amax).clip(max=torch.finfo(torch.float32).max)
    encode = torch.where(encode == 0, 1.0, encode)
    scale = scale[: shape[0]]
    factor = torch.tensor(1.0 / (6.0 * bound), dtype=torch.float32)
    outer = amax if amax.numel() == 1 else amax[:, None]
    blocks = ((scale.float() * outer) * factor).repeat_interleave(16, 1)[:, : shape[1]]
    return {
        "codes": tensor(data),
        "scale": tensor(scale),
        "amax": tensor(amax),
        "encode": tensor(encode),
        "decode": tensor(1.0 / encode),
        "dequantized": tensor(module.cast_from_fp4x2(data, torch.float32) * blocks),
    }


def brief(found: dict) -> dict:
    """Without the dequantized values, which the codes and scales determine."""
    return {name: part for name, part in found.items() if name != "dequantized"}


def hadamard(module) -> dict:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(16, 32, generator=generator)
    quantizer = module.NVFP4QuantizerRef(
        module.reference_utils.Fp4Formats.E2M1, with_rht=True, quant_tile_shape=(1, 16)
    )
    matrix = quantizer._build_hadamard_matrix(16, x.device, torch.float32)
    return {
        "signs": module.get_wgrad_sign_vector().tolist(),
        "matrix": tensor(matrix.to(torch.int8)),
        "input": tensor(x),
        "output": tensor(quantizer._apply_rht(x)),
        "bfloat16": tensor(quantizer._apply_rht(x.to(torch.bfloat16))),
    }


def main() -> None:
    module = reference(sys.argv[1])
    x = inputs()

    def table(case: str, **options) -> dict:
        return {"input": case, **rows(module, x[case], **options)}

    def first_rows(count: int, **options) -> dict:
        return {
            "input": "normal",
            "first_rows": count,
            **rows(module, x["normal"][:count], **options),
        }

    def transposed(case: str) -> dict:
        return {"transposed": brief(columns(module, x[case]))}

    square = {"quant_tile_shape": (16, 16)}
    write(
        "nvfp4",
        {
            "inputs": {name: tensor(values) for name, values in x.items()},
            "1x16": {
                "normal": table("normal"),
                "bfloat16": brief(table("bfloat16")) | transposed("bfloat16"),
                "edges": table("edges"),
            },
            "1x16 row by row": {
                "normal": brief(table("normal", row_scaled_nvfp4=True)),
                "edges": table("edges", row_scaled_nvfp4=True),
            },
            "16x16": {
                "normal": brief(table("normal", **square)),
                "20 rows": brief(first_rows(20, **square)),
            },
            "four over six": {
                f"{error} {bound} {tile[0]}x16": brief(
                    table(
                        "normal",
                        nvfp4_use_4over6=True,
                        nvfp4_e4m3_max=bound,
                        nvfp4_4over6_err_mode=error,
                        quant_tile_shape=tile,
                    )
                )
                for error, bound, tile in (
                    ("MAE", 256, (1, 16)),
                    ("MSE", 448, (1, 16)),
                    ("MAE", 256, (16, 16)),
                )
            },
            "hadamard": hadamard(module),
        },
    )


if __name__ == "__main__":
    main()
