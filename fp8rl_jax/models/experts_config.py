"""The shape of a mixture of experts."""

from __future__ import annotations

import dataclasses

from fp8rl_jax.errors import UserError

_LARGEST_COUNT = 10_000  # of layers and of experts


def check_count(key: str, count: int) -> None:
    """Refuses a number of layers or experts that no model has: a damaged one must not become a loop
    of that length.

    Raises:
        UserError: naming the key.
    """
    if count > _LARGEST_COUNT:
        raise UserError(f"{key} must be at most {_LARGEST_COUNT}, got {count}")


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts in place of the feed-forward layer (arXiv 1701.06538), of which each
    token uses a few.

    Attributes:
        count: experts in a layer.
        per_token: experts that a token uses: those that the router's softmax puts first.
        intermediate_size: feed-forward width of one expert.
        normalize: the weights of a token's experts are divided by their sum (`norm_topk_prob`).
        dense_layers: layers that keep a feed-forward layer of the policy's `intermediate_size`.
    """

    count: int
    per_token: int
    intermediate_size: int
    normalize: bool
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.intermediate_size < 1:
            raise UserError(f"moe_intermediate_size must be positive, got {self.intermediate_size}")
        check_count("num_experts", self.count)
        if not 1 <= self.per_token <= self.count:
            raise UserError(
                f"num_experts_per_tok ({self.per_token}) must be from 1 to num_experts "
                f"({self.count})"
            )
