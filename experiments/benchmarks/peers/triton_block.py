"""A blockwise-scaled FP8 product in Triton: one float32 sum a tile, promoted every 128 of k."""

import torch
import triton
import triton.language as tl

CONFIGS = [
    triton.Config({"BM": bm, "BN": bn}, num_warps=warps, num_stages=stages)
    for bm, bn, warps, stages in (
        (16, 64, 4, 5),
        (16, 128, 4, 5),
        (64, 128, 4, 4),
        (128, 128, 8, 3),
        (128, 128, 4, 4),
        (128, 256, 8, 3),
    )
]


@triton.autotune(configs=CONFIGS, key=["m", "n", "k"])
@triton.jit
def _kernel(x, x_scales, w, w_scales, out, m, n, k, BM: tl.constexpr, BN: tl.constexpr):
    # tiles in stripes of eight along m, so that those that run together share rows of w
    tile, tiles_m, tiles_n = tl.program_id(0), tl.cdiv(m, BM), tl.cdiv(n, BN)
    stripe, place = tile // (8 * tiles_n), tile % (8 * tiles_n)
    height = min(tiles_m - 8 * stripe, 8)
    i, j = 8 * stripe + place % height, place // height
    rows, columns, inner = i * BM + tl.arange(0, BM), j * BN + tl.arange(0, BN), tl.arange(0, 128)
    row, column, blocks = rows % m, columns % n, k // 128
    x += row[:, None] * k + inner[None, :]
    w += column[None, :] * k + inner[:, None]
    total = tl.zeros((BM, BN), tl.float32)
    for block in range(blocks):
        left, right = tl.load(x + block * 128), tl.load(w + block * 128)
        left_scales = tl.load(x_scales + row * blocks + block)
        right_scales = tl.load(w_scales + (column // 128) * blocks + block)
        total += tl.dot(left, right) * left_scales[:, None] * right_scales[None, :]
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    tl.store(out + rows[:, None] * n + columns[None, :], total.to(tl.bfloat16), mask=inside)


def product(x, x_scales, w, w_scales):
    (m, k), n = x.shape, len(w)
    out = torch.empty(m, n, dtype=torch.bfloat16, device=x.device)
    _kernel[lambda meta: (triton.cdiv(m, meta["BM"]) * triton.cdiv(n, meta["BN"]),)](
        x, x_scales, w, w_scales, out, m, n, k
    )
    return out
