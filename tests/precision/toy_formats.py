"""A format of two levels as anyone would add it: integers from -7 to 7, two to a byte, an e4m3
scale for each 16 of a row, and a float32 scale for those of a row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import jax.numpy as jnp

from fp8rl_jax.precision import Format, QTensor, register

LARGEST, SCALES = 7.0, 448.0


@dataclass(frozen=True)
class TwoLevels(Format):
    block: tuple[int, int] = (1, 16)
    packed: ClassVar[int] = 2

    def quantize(self, x, backend="auto"):
        x, size = x.astype(jnp.float32), self.block[1]
        whole = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % size)])
        groups = jnp.abs(whole.reshape(*x.shape[:-1], -1, size)).max(-1)
        outer = groups.max(-1, keepdims=True) / (LARGEST * SCALES)
        outer = jnp.where(outer == 0, 1.0, outer)
        scales = (groups / LARGEST / outer).astype(jnp.float8_e4m3fn)
        steps = jnp.repeat(scales.astype(jnp.float32) * outer, size, -1)[..., : x.shape[-1]]
        codes = jnp.round(x / jnp.where(steps == 0, 1.0, steps)).clip(-LARGEST, LARGEST)
        codes = codes.astype(jnp.int8).astype(jnp.uint8) & 15
        return QTensor(codes[..., ::2] | codes[..., 1::2] << 4, scales, self, outer)

    def store(self, x, key, backend="auto"):
        """Up or down at random, and at least one step where there is something."""
        q = self.quantize(x)
        step = self.limit(q) / LARGEST
        codes = jnp.floor(x / jnp.where(step == 0, 1.0, step) + jax.random.uniform(key, x.shape))
        codes = codes.clip(jnp.where(x > 0, 1, 0), LARGEST).astype(jnp.uint8)
        return replace(q, values=codes[..., ::2] | codes[..., 1::2] << 4)

    def dequantize(self, q):
        nibbles = jnp.stack([q.values & 15, q.values >> 4], -1).reshape(q.shape)
        codes = jnp.where(nibbles > 7, nibbles.astype(jnp.float32) - 16, nibbles)
        return codes * self.limit(q) / LARGEST

    def limit(self, q):
        limits = LARGEST * q.scales.astype(jnp.float32) * q.outer
        return jnp.repeat(limits, self.block[1], -1)[..., : q.shape[-1]]


TWO_LEVELS = register("two_levels", TwoLevels())
