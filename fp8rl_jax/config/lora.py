"""Low-rank adapters (LoRA, arXiv 2106.09685): what is trained in place of the weights.

A linear W [out, in] becomes W + scale * B A with A [rank, in], B [out, rank]. W is frozen; A and B
have float32 masters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters on a frozen base; with rank 0 all parameters are trained."""

    rank: int = 0
    """Rank of every adapter; 0: no adapters, all parameters are trained."""
    alpha: float = 16.0
    """The adapters' product is scaled by alpha / rank."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) (rsLoRA, arXiv 2312.03732)."""
    targets: tuple[str, ...] = ("*_proj",)
    """Shell patterns over linear names (layers.3.q_proj, layers.3.experts.up_proj) of what gets an
    adapter; a linear gets one in all layers that have it or in none."""
    base: Literal["compute", "rollout"] = "compute"
    """Format of the frozen weights: the compute dtype, quantized once for the rollout where the
    recipe says so, and at every update where its trainer computes in FP8; or the recipe's rollout
    weight format on both sides, one copy of FP8 weights that the trainer, too, computes with."""
    path: str = ""
    """Adapter in PEFT's form (a directory) to start from; its rank, alpha and targets must be
    these. Empty: A random, B zero."""

    @property
    def scale(self) -> float:
        """Factor on the product B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def problems(self) -> list[str]:
        """Every value that cannot work, one line each; empty where all is well."""
        found = []
        if self.rank < 0:
            found.append(f"lora.rank = {self.rank} must not be negative")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            found.append(f"lora.alpha = {self.alpha} must be a number above 0")
        if self.rank > 0 and not self.targets:
            found.append(
                "lora.targets is empty, so nothing would be trained; name linears, or set "
                "lora.rank to 0"
            )
        if self.rank == 0 and self.path:
            found.append("lora.path is set but lora.rank is 0; set lora.rank to the adapter's")
        return found
