"""Sizes of a paged cache, and of the programs that work on it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from jaxtyping import Array

from fp8rl_jax.config.run import PagedConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.policy import Policy
from fp8rl_jax.rollout.sampler import cache_dtype
from pallas_kernels.backend import platform


@dataclass(frozen=True)
class Layout:
    """The sizes that programs are compiled for.

    Attributes:
        slots: rows that decode at one time.
        page_size: tokens of a page.
        pages: of the cache.
        together: prompts that are loaded together.
        chunk: tokens of a row that are prefilled at one time.
        steps: decode steps of one call.
        widest: tokens of the longest prompt of calls that leave the cache to each other; 0: what is
            over leaves it.
    """

    slots: int
    page_size: int
    pages: int
    together: int
    chunk: int
    steps: int
    widest: int = 0

    def columns[T: (int, Array)](self, tokens: T) -> T:
        """Count the pages of `tokens` tokens."""
        return -(-tokens // self.page_size)

    def prefilling(self, tokens: int, config: PagedConfig, prompts: int) -> Layout:
        """The same cache, for calls that prefill at most so many tokens of each of P prompts."""
        chunk = min(tokens, config.prefill_tokens)
        together = max(1, min(prompts, self.slots, config.prefill_tokens // chunk))
        return replace(self, chunk=chunk, together=together)

    def of_turn(
        self, tokens: int, config: PagedConfig, prompts: tuple[int, int], new_tokens: int
    ) -> Layout:
        """As `prefilling`, of P prompts of at most S tokens, and as few of them together as leave
        pages for a row's completion: `choose_layout` has counted with those of chunks of S."""
        found, room = self.prefilling(tokens, config, prompts[0]), self.pages
        room -= self.columns(new_tokens)
        if found.prompt_pages(*prompts) <= room:
            return found
        fits = room // self.columns(prompts[1]) - self.slots
        return replace(found, together=max(self.together, min(found.together, fits)))

    def prompt_pages(self, prompts: int, tokens: int) -> int:
        """Count the pages of all prompts that may be loaded at one time, of so many and so long."""
        return min(prompts, self.slots + self.together) * self.columns(tokens)


def choose_layout(
    config: PagedConfig,
    prompts: tuple[int, int],
    samples: int,
    new_tokens: int,
    hopper: bool = False,
    room: float = math.inf,
    widest: int = 0,
) -> Layout:
    """Choose sizes for P prompts of at most S tokens and `samples` completions of each.

    Args:
        config: what the user wants; 0 leaves a size to this function.
        prompts: (P, S) of one shard of the batch.
        new_tokens: longest completion.
        hopper: the cache is read by Hopper's kernels.
        room: tokens of cache that the memory holds.
        widest: make pages, as far as there is room, for prompts of so many tokens each with its
            completion, as calls leave them to the next ones (Layout.widest); `samples` is 1 then.

    Raises:
        UserError: not even one row fits, or the kernels have no such page.
    """
    count, width = prompts
    default = min(32, max(width, widest, new_tokens))
    size = config.page_size or (_KERNEL_PAGE if hopper else default)
    if hopper and size % _KERNEL_PAGE:
        raise UserError(
            f"rollout.paged.page_size = {size}: Hopper's kernels take multiples of {_KERNEL_PAGE}"
        )
    room = config.cache_tokens or room
    most = min(config.slots or _most_slots(), count * samples)
    pages = needed = 0
    for slots in range(most, 0, -1):
        layout = Layout(slots, size, 0, 0, 0, config.decode_steps, widest)
        layout = layout.prefilling(width, config, count)
        loaded, row = layout.prompt_pages(count, width), layout.columns(new_tokens)
        wanted = loaded + slots * row
        if widest:
            wanted = count * (layout.columns(widest) + row) + layout.columns(widest)
        pages, needed = int(min(wanted, room // size)), loaded + row
        if pages >= needed:
            return replace(layout, pages=pages)
    raise UserError(
        f"rollout.paged.cache_tokens: the cache holds {pages * size} tokens, and a prompt of "
        f"rollout.max_prompt_tokens = {width} with rollout.max_new_tokens = {new_tokens} needs "
        f"{needed * size}; raise it, or make room"
    )


_KERNEL_PAGE = 64


def _most_slots() -> int:
    """Choose how many rows decode at one time, where more are waiting.

    Reading the weights is most of a step until so many rows share it that their products take as
    long: hundreds on a GPU, about a dozen on a CPU. More slots gain nothing beyond that, and lose
    where no row is left to refill them.
    """
    return 64 if platform() == "cpu" else 256


def token_bytes(policy: Policy) -> int:
    """Count the bytes of cache of one token."""
    numbers = sum(heads * dim for heads, dim in policy.config.cached)
    return policy.config.num_layers * numbers * cache_dtype(policy).itemsize
