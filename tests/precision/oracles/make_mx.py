"""Writes mx.json: `python make_mx.py MICROXCALING_CLONE TRANSFORMER_ENGINE_CLONE` with torch (CPU).

"microxcaling": microsoft/microxcaling @7bc41952de394f5cc5e782baf132e7c7542eb4e4,
`mx.mx_ops._quantize_mx` is run (block 32 of the last axis, 8 scale bits, round "even"): OCP's rule,
scale = 2^(floor(log2(amax)) - emax), elements that overflow are clamped. It is run in float64: in
float32 its `floor(log2(x))` takes a value just below a power of two for that power.
"float32_differs" are the [row, group] where the float32 run gives another value.

"transformer_engine": NVIDIA/TransformerEngine @d0067d0da6cb01811b8072a7d304f0e00344ce2b, the scale
rounded up. Its CPU reference is C++ (tests/cpp/operator/test_cast_mxfp8.cu `compute_ref`,
tests/cpp/test_common.h `float_to_e8m0`, `exp2f_rcp`), stated here as:
  v = amax * float32(1 / max), max = 448 (e4m3) or 57344 (e5m2); bits of v: exponent e, mantissa m
  byte = e + (m > 0 and e != 254 and not (e == 0 and m <= 0x400000)); 0 for v = 0
  element = round_to_nearest_even(x * 2^(127 - byte)), saturating
and held against `_float_to_e8m0` of tests/pytorch/test_mxfp8_2d_quantize.py (e4m3), which is run
(it divides by 448: the same bytes on these groups). Groups with inf or nan are left out: what a
GPU makes of them was not run.
"""

from __future__ import annotations

import ast
import math
import subprocess
import sys
import tempfile

import torch
from sources import checkout, tensor, write

MICROXCALING = "7bc41952de394f5cc5e782baf132e7c7542eb4e4"
TRANSFORMER_ENGINE = "d0067d0da6cb01811b8072a7d304f0e00344ce2b"
ELEMENTS = {
    "e4m3": "fp8_e4m3",
    "e5m2": "fp8_e5m2",
    "e2m3": "fp6_e2m3",
    "e3m2": "fp6_e3m2",
    "e2m1": "fp4_e2m1",
}
GROUP = 32


def below(value: float) -> float:
    """The float32 just below a positive float32."""
    return float(torch.nextafter(torch.tensor(value), torch.tensor(0.0)))


def above(value: float) -> float:
    """The float32 just above a positive float32."""
    return float(torch.nextafter(torch.tensor(value), torch.tensor(math.inf)))


def ties(largest_exponent: int, mantissa: int, smallest_exponent: int) -> list[float]:
    """Values half way between two elements, both signs, and 2^largest_exponent, which makes the
    scale 1 under OCP's rule."""
    half = []
    for exponent in range(smallest_exponent, largest_exponent + 1):
        step = 2.0 ** (exponent - mantissa)
        half += [2.0**exponent + (i + 0.5) * step for i in range(min(2**mantissa, 4))]
    step = 2.0 ** (smallest_exponent - mantissa)
    denormal = [(i + 0.5) * step for i in range(min(2**mantissa, 8))]
    values = [2.0**largest_exponent, *denormal, *half]
    return [value if i % 2 else -value for i, value in enumerate(values)][:GROUP]


def edges() -> dict[str, list[float]]:
    """Groups by what is special about them; short ones are filled up with 0."""
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(GROUP, generator=generator).clamp(-1.9, 1.9)

    def with_amax(amax: float) -> list[float]:
        rest = (normal * (abs(amax) * 0.5)).tolist()
        return [*rest[:7], amax, *rest[8:]]

    return {
        "zeros": [0.0, -0.0],
        "float32 denormals": [i * (-1) ** i * 2.0**-149 * 2 ** (i // 2) for i in range(GROUP)],
        "near the smallest normal": [(1 + i / 16) * (-1) ** i * 2.0**-127 for i in range(GROUP)],
        "powers of two": [(-1) ** i * 2.0 ** (i - 15) for i in range(GROUP)],
        "amax just below 2^10": with_amax(below(1024.0)),
        "amax 2^10": with_amax(-1024.0),
        "amax just above 2^10": with_amax(above(1024.0)),
        "amax just below 2^-3": with_amax(-below(0.125)),
        "amax 1.99 x 2^4": [(1.5 + i / 64) * 16 * (-1) ** i for i in range(GROUP)],
        "around 448 x 8": [(416 + 2 * i) * 8.0 * (-1) ** (i // 2) for i in range(GROUP)],
        "amax 448": with_amax(448.0),
        "amax just above 448": with_amax(-above(448.0)),
        "amax just below 448": with_amax(below(448.0)),
        "amax 57344 x 2^-20": with_amax(57344.0 * 2.0**-20),
        "ties of e4m3": ties(8, 3, -6),
        "ties of e5m2": ties(15, 2, -14),
        "ties of e2m3": ties(2, 3, 0),
        "ties of e3m2": ties(4, 2, -2),
        "ties of e2m1": [
            4.0,
            0.25,
            -0.75,
            1.25,
            -1.75,
            2.5,
            -3.5,
            5.0,
            -0.25,
            0.75,
            -5.0,
            7.0,
            -7.5,
        ],
        "one large": [2.0**20, *(normal[1:] * 3).tolist()],
        "near float32's largest": [
            3.4028234663852886e38 * (1 - i / 33) * (-1) ** i for i in range(GROUP)
        ],
        "inf": [1.0, math.inf, -3.0],
        "nan": [1.0, math.nan, -3.0],
    }


def inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    factors = torch.tensor([[1.0], [3e-3], [7e2], [1.1e-6], [5e4], [13.0]])
    normal = torch.randn(6, 80, generator=generator) * factors
    groups = [[*row, *[0.0] * (GROUP - len(row))] for row in edges().values()]
    return {"normal": normal, "edges": torch.tensor(groups, dtype=torch.float32)}


def in_groups(x: torch.Tensor) -> torch.Tensor:
    columns = -x.shape[1] % GROUP
    return torch.nn.functional.pad(x, (0, columns)).reshape(x.shape[0], -1, GROUP)


def microxcaling(x: torch.Tensor, element: str) -> dict[str, object]:
    from mx.formats import _get_format_params
    from mx.mx_ops import _quantize_mx, _shared_exponents

    def run(values: torch.Tensor) -> torch.Tensor:
        return _quantize_mx(
            values.clone(), 8, ELEMENTS[element], axes=[-1], block_size=GROUP, round="even"
        ).float()

    exact, single = run(x.double()), run(x)
    same = (exact == single) | (exact.isnan() & single.isnan())
    differs = (~in_groups(~same).any(-1)).logical_not().nonzero().tolist()
    emax = _get_format_params(ELEMENTS[element])[2]
    exponents = _shared_exponents(in_groups(x.double()), axes=[-1])[..., 0] - emax
    # _quantize_mx's own next lines: above 127 nan (0xFF of E8M0), below -127 it is -127
    exponents = torch.where(exponents > 127, 128, exponents.nan_to_num(nan=128.0).clip(min=-127))
    return {
        "dequantized": tensor(exact),
        "scale": tensor((exponents + 127).to(torch.uint8)),
        "float32_differs": differs,
    }


def transformer_engine(x: torch.Tensor, element: str, by_division) -> dict[str, object]:
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[element]
    largest = torch.finfo(dtype).max
    groups = in_groups(x)
    amax = groups.abs().amax(-1)
    bits = (amax * torch.tensor(1.0 / largest, dtype=torch.float32)).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    up = (mantissa > 0) & (exponent != 254) & ~((exponent == 0) & (mantissa <= 0x400000))
    byte = torch.where(bits == 0, 0, exponent + up)
    inverse = torch.exp2(127.0 - byte.double())
    # float64 products are exact, as are those by a power of two in float32
    scaled = (groups.double() * inverse[..., None]).float().clip(-largest, largest)
    codes = scaled.to(dtype)
    restored = (codes.double() / inverse[..., None]).float()
    rows, columns = x.shape
    out = {
        "codes": tensor(codes.reshape(rows, -1)[:, :columns]),
        "dequantized": tensor(restored.reshape(rows, -1)[:, :columns]),
        "scale": tensor(byte.to(torch.uint8)),
    }
    if element == "e4m3":
        torch.testing.assert_close(by_division(amax), byte.to(torch.uint8), atol=0, rtol=0)
    return out


def float_to_e8m0(clone: str):
    """The function of that name in TransformerEngine's test, without the rest of the file."""
    path = f"{TRANSFORMER_ENGINE}:tests/pytorch/test_mxfp8_2d_quantize.py"
    text = subprocess.run(
        ["git", "-C", clone, "show", path], check=True, capture_output=True, text=True
    ).stdout
    tree = ast.parse(text)
    tree.body = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == "_float_to_e8m0"
    ]
    names = {"torch": torch, "FP8_E4M3_MAX": 448.0}
    exec(compile(tree, path, "exec"), names)
    return names["_float_to_e8m0"]


def main() -> None:
    microxcaling_clone, engine_clone = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, str(checkout(microxcaling_clone, MICROXCALING, "mx", folder)))
        x = inputs()
        by_division = float_to_e8m0(engine_clone)
        finite = x["edges"][: -len(("inf", "nan"))]
        write(
            "mx",
            {
                "edge_rows": list(edges()),
                "inputs": {name: tensor(values) for name, values in x.items()},
                "microxcaling": {
                    element: {name: microxcaling(values, element) for name, values in x.items()}
                    for element in ELEMENTS
                },
                "transformer_engine": {
                    element: {
                        name: transformer_engine(values, element, by_division)
                        for name, values in {"normal": x["normal"], "edges": finite}.items()
                    }
                    for element in ("e4m3", "e5m2")
                },
            },
        )


if __name__ == "__main__":
    main()
