"""Linears of block FP8 for vLLM on a CPU of any kind.

vLLM 0.32 has kernels for e4m3 in blocks of 128 x 128 where the CPU has AMX tiles, and refuses to
load such a model elsewhere. This is their definition in torch: activations are quantized in groups
of 1 x 128, both operands are widened, and the product is made in float32. It is slow, and there to
try recipes with, and to see what vLLM makes of an export.
"""

from __future__ import annotations

import torch  # ty: ignore[import-not-found]
from vllm.model_executor.kernels import linear  # ty: ignore[import-not-found]
from vllm.model_executor.kernels.linear.scaled_mm import (  # ty: ignore[import-not-found]
    BlockScaledMMLinearKernel,
)
from vllm.platforms import PlatformEnum, current_platform  # ty: ignore[import-not-found]


class WidenedFp8BlockKernel(BlockScaledMMLinearKernel.Fp8BlockScaledMMLinearKernel):
    """A product of block FP8 operands, by widening them."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Whether this is a CPU, and if not, that it is none."""
        return (True, None) if current_platform.is_cpu() else (False, "requires CPU platform.")

    def apply_block_scaled_mm(
        self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor
    ) -> torch.Tensor:
        """A [m, k] in groups of 1 x 128 by B [n, k] in blocks of 128 x 128, to float32 [m, n]."""
        rows, columns = self.weight_group_shape
        size = B.shape
        scales = Bs.repeat_interleave(rows, 0)[: size[0]].repeat_interleave(columns, 1)
        weight = B.float() * scales[:, : size[1]]
        return (A.float() * As.repeat_interleave(columns, 1)[:, : size[1]]) @ weight.T


def register() -> None:
    """Have vLLM take it where none of its own kernels runs.

    This is what its `register_linear_kernel` does, which knows no list of block FP8.
    """
    linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU].append(WidenedFp8BlockKernel)
