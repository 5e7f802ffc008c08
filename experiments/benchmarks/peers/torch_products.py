"""Peer: blockwise-scaled FP8 products by torch._scaled_mm and by a Triton kernel, on the card,
timed by CUDA events.

Requests: {"prepare": "torch" | "triton", "m": .., "n": .., "k": ..}, answered with {"copies": ..,
"error": ..} or {"failed": ..}, and {"time": "torch" | "triton"}, answered with {"seconds": ..} of
one call. The events stand behind a wait of some milliseconds, in which the host queues all calls,
and the calls go through copies of the inputs that are together four times the cache.
"""

import torch
from link import Link

CACHE_BYTES = 64 * 2**20
WAIT_CYCLES = 12_000_000  # about 6 ms
CALLS = 24


def main():
    link = Link()
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU")
    link.ready(["torch"], {"clock": "CUDA events behind a wait"})
    prepared = {}
    for request in link:
        try:
            if "prepare" in request:
                way, m, n, k = (request[name] for name in ("prepare", "m", "n", "k"))
                prepared.pop(way, None)
                prepared[way], about = prepare(way, m, n, k)
                link.answer(about)
            else:
                link.answer({"seconds": seconds(*prepared[request["time"]])})
        except Exception as error:  # a shape that a library does not serve is its result
            link.answer({"failed": f"{type(error).__name__}: {error}".splitlines()[0][:300]})


def prepare(way, m, n, k):
    """Make the product, its copies of the inputs, and its error.

    The error is from the product of the dequantized operands.
    """
    product, arranged = {"torch": (scaled_mm, for_cublas), "triton": (triton_product, list)}[way]
    number = 1 + -(-4 * CACHE_BYTES // (m * k + n * k))
    made = [operands(m, n, k, seed) for seed in range(min(number, 16))]
    copies = [arranged(arrays) for arrays in made]
    error = difference(product(*copies[0]), *made[0])
    if not error < 0.02:
        raise ValueError(f"its result is {error:.3f} of the largest off")
    for arrays in copies:  # warm-up
        product(*arrays)
    torch.cuda.synchronize()
    return (product, copies), {"copies": len(copies), "error": error}


def seconds(product, copies):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(WAIT_CYCLES)
    start.record()
    for call in range(CALLS):
        product(*copies[call % len(copies)])
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / CALLS


def operands(m, n, k, seed):
    """Draw normal data: x in 1x128 groups, w in 128x128 blocks.

    Both contiguous along k, n and k multiples of 128.
    """
    made = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(m, k, device="cuda", generator=made).view(m, 1, k // 128, 128)
    w = torch.randn(n, k, device="cuda", generator=made).view(n // 128, 128, k // 128, 128)
    out = []
    for blocks, shape in ((x, (m, k)), (w, (n, k))):
        scales = blocks.abs().amax((1, 3), keepdim=True) / 448
        out += [
            (blocks / scales).clamp(-448, 448).view(shape).to(torch.float8_e4m3fn),
            scales[:, 0, :, 0].contiguous(),
        ]
    return out


def for_cublas(arrays):
    """Lay out scales as cuBLAS wants them: those of x with rows innermost, of w in fours along k.

    All shapes here have fours.
    """
    x, x_scales, w, w_scales = arrays
    return x, x_scales.t().contiguous().t(), w, w_scales


def scaled_mm(x, x_scales, w, w_scales):
    return torch._scaled_mm(x, w.t(), x_scales, w_scales.t(), out_dtype=torch.bfloat16)


def triton_product(x, x_scales, w, w_scales):
    from triton_block import product

    return product(x, x_scales, w, w_scales)


def difference(got, x, x_scales, w, w_scales):
    wide = (x.float().view(len(x), -1, 128) * x_scales[..., None]).view(x.shape)
    blocks = (
        w.float().view(w_scales.shape[0], 128, w_scales.shape[1], 128) * w_scales[:, None, :, None]
    )
    want = wide @ blocks.view(w.shape).t()
    return float((got.float() - want).abs().max() / want.abs().max())


main()
