"""How a policy computes: its kernels, the formats of its cache, and every operation besides a
linear.

A policy carries one `Compute` (models.policy), so the choice of kernels and of the arithmetic does
not travel through the calls of a forward pass. `Compute` leaves the order of its sums to XLA.
`ExactCompute` (precision.exact) has the same operations, and results that do not depend on the
batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from fp8rl_jax.config.formats import COMPUTE, TensorFormat
from fp8rl_jax.precision.formats import element_dtype
from pallas_kernels import QTensor, blockwise_matmul, grouped_matmul
from pallas_kernels.attention import KeyBlock, attention
from pallas_kernels.backend import Backend
from pallas_kernels.exact import Integers, with_gradient_of
from pallas_kernels.grouped_matmul import dot as grouped_dot
from pallas_kernels.matmul import Panels, blockwise_matmuls, dot, keeps_quantized, pack, packs
from pallas_kernels.quantize import dequantize
from pallas_kernels.rounding import rounded

ACTIVATIONS = {"silu": jax.nn.silu, "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True)}
"""Activations of the feed-forward layer, by Hugging Face's names."""


@dataclass(frozen=True)
class Compute:
    """The arithmetic of a forward pass; hashable, so a compiled program is specialised to it.

    Attributes:
        backend: kernels of quantized products, attention and the KV cache.
        query, key, value: formats of the KV cache; the compute dtype where it is not quantized.
        probability: what attention's probabilities are cast to, times 256.
        remat: recompute each layer in the backward pass instead of keeping its activations.
        attention_chunk: queries whose scores exist at one time where many are run at once; 0: all.
            None: all, and 128 in rows of 2^20 pairs of query and key or more.
        joins: where XLA splits the outputs or inputs of linears over devices, multiply weights that
            share an input as one, so that their gradients of it are added over devices at once; and
            add parts of sums in the compute dtype.
    """

    backend: Backend = "auto"
    query: TensorFormat = COMPUTE
    key: TensorFormat = COMPUTE
    value: TensorFormat = COMPUTE
    probability: TensorFormat = COMPUTE
    remat: bool = False
    attention_chunk: int | None = None
    joins: bool = False

    exact: ClassVar[bool] = False
    """Whether a token's results have the same bits whatever else is computed beside it."""

    @property
    def decodes_in_kernels(self) -> bool:
        """Whether one kernel may rotate, quantize and write a decode step's tokens, and another one
        attend; else a decode step takes the operations of a prefill."""
        heads = self.query, self.key, self.value
        simulated = any(fmt.quantized and not fmt.calibrated for fmt in heads)
        return not (self.exact or simulated or self.probability.quantized)

    def add(self, x: Float[Array, "*b n"], y: Float[Array, "*b n"]) -> Float[Array, "*b n"]:
        """Add in float32, rounded once to the operands' dtype."""
        return rounded(x.astype(jnp.float32) + y.astype(jnp.float32), x.dtype)

    def scale(self, x: Float[Array, "*b n"], factor: float) -> Float[Array, "*b n"]:
        """Multiply by a number, which is taken in x's dtype."""
        product = x.astype(jnp.float32) * jnp.asarray(factor, x.dtype).astype(jnp.float32)
        return rounded(product, x.dtype)

    def row_sum(self, x: Float[Array, "*b n"]) -> Float[Array, "*b 1"]:
        """Add over the last axis."""
        return x.sum(axis=-1, keepdims=True)

    def row_mean(self, x: Float[Array, "*b n"]) -> Float[Array, "*b 1"]:
        """Average over the last axis."""
        return self.row_sum(x) / x.shape[-1]

    def rms_norm(
        self,
        x: Float[Array, "*b dim"],
        weight: Float[Array, " dim"],
        eps: float,
        offset: float = 0.0,
    ) -> Float[Array, "*b dim"]:
        """Compute x / sqrt(mean(x^2) + eps) * (offset + weight) in float32 (arXiv 1910.07467)."""
        x32 = x.astype(jnp.float32)
        normed = x32 * lax.rsqrt(self.row_mean(x32 * x32) + eps)
        gain = weight.astype(jnp.float32)
        return rounded(normed * (gain + offset if offset else gain), x.dtype)

    def rope_tables(
        self,
        frequencies: Float[Array, " half"],
        positions: Int[Array, "b t"],
        amplitude: float = 1.0,
    ) -> tuple[Float[Array, "b t half"], Float[Array, "b t half"]]:
        """Compute cos and sin of each position's rotary angles (arXiv 2104.09864) times
        `amplitude`, float32."""
        cos, sin = self.turns(frequencies, positions)
        return (cos, sin) if amplitude == 1 else (cos * amplitude, sin * amplitude)

    def turns(
        self, frequencies: Float[Array, " half"], positions: Int[Array, "b t"]
    ) -> tuple[Float[Array, "b t half"], Float[Array, "b t half"]]:
        """Compute cos and sin of position * frequency, float32."""
        angles = positions[..., None].astype(jnp.float32) * frequencies
        return jnp.cos(angles), jnp.sin(angles)

    def rotate(
        self, x: Float[Array, "b t heads dim"], tables: tuple[Array, Array]
    ) -> Float[Array, "b t heads dim"]:
        """Apply rotary positions in Hugging Face's half-split layout, in float32."""
        cos, sin = (table[:, :, None, :] for table in tables)
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        turned = [first * cos - second * sin, second * cos + first * sin]
        return rounded(jnp.concatenate(turned, axis=-1), x.dtype)

    def attend(
        self,
        query: Float[Array, "b t heads dim"],
        blocks: list[KeyBlock],
        score_scale: Float[Array, ...] | float,
        value_scale: Float[Array, ...] | float,
        out_dtype: jnp.dtype,
    ) -> Float[Array, "b t heads dim"]:
        """Attend to blocks of keys (pallas_kernels.attention).

        The gradient is that of probabilities that are not cast, which have none of their own.
        """
        # cuDNN serves many queries at once where it can; there is no kernel of ours to insist on
        backend = "auto" if self.backend == "hopper" else self.backend

        def attend(query, blocks, probability=None):
            return attention(
                query,
                blocks,
                score_scale,
                value_scale,
                out_dtype,
                probability=probability,
                backend=backend,
            )

        if not self.probability.quantized:
            return attend(query, blocks)
        cast = partial(attend, probability=element_dtype(self.probability))
        return with_gradient_of(attend, cast)(query, blocks)

    def gated(
        self, gate: Float[Array, "*b n"], up: Float[Array, "*b n"], activation: str
    ) -> Float[Array, "*b n"]:
        """Compute activation(gate) * up (GLU variants, arXiv 2002.05202) in float32.

        Rounded behind the activation and behind the product, as torch and vLLM round it.
        """
        active = rounded(ACTIVATIONS[activation](gate.astype(jnp.float32)), gate.dtype)
        return rounded(active.astype(jnp.float32) * up.astype(jnp.float32), gate.dtype)

    def routing(
        self,
        x: Float[Array, "*b hidden"],
        router: Float[Array, "experts hidden"],
        scoring: Literal["softmax", "sigmoid"] = "softmax",
    ) -> Float[Array, "*b experts"]:
        """Compute the softmax of a router's logits, or the sigmoid of each, float32."""
        logits = jnp.einsum(
            "...h,eh->...e",
            x.astype(jnp.float32),
            router.astype(jnp.float32),
            precision=lax.Precision.HIGHEST,
        )
        return jax.nn.softmax(logits, axis=-1) if scoring == "softmax" else jax.nn.sigmoid(logits)

    def normalize(self, weights: Float[Array, "*b k"]) -> Float[Array, "*b k"]:
        """Divide gate weights by their sum."""
        return weights / self.row_sum(weights)

    def combine(
        self, weights: Float[Array, "b t k"], out: Float[Array, "b t k hidden"]
    ) -> Float[Array, "b t hidden"]:
        """Sum the experts' outputs with their weights, float32."""
        return jnp.einsum("btk,btkh->bth", weights, out.astype(jnp.float32), precision="highest")

    def softmax_terms(
        self, logits: Float[Array, "*b vocab"], temperature: float | Float[Array, ""]
    ) -> tuple[Float[Array, "*b vocab"], Float[Array, "*b vocab"]]:
        """Compute logits / temperature less their largest, and the exponentials of that, whose
        `row_sum` makes probabilities of them."""
        scaled = logits / temperature
        shifted = scaled - lax.stop_gradient(scaled.max(axis=-1, keepdims=True))
        return shifted, jnp.exp(shifted)

    def logprob_of(
        self,
        shifted: Float[Array, "*b vocab"],
        total: Float[Array, "*b 1"],
        tokens: Int[Array, "*b"],
    ) -> Float[Array, "*b"]:
        """Compute the tokens' log-probabilities from `softmax_terms` and the sum of the second."""
        chosen = jnp.take_along_axis(shifted, tokens[..., None], axis=-1)
        return (chosen - jnp.log(total))[..., 0]

    def logprob(
        self,
        logits: Float[Array, "*b vocab"],
        tokens: Int[Array, "*b"],
        temperature: float | Float[Array, ""],
    ) -> Float[Array, "*b"]:
        """Compute log softmax(logits / temperature) of the tokens."""
        shifted, weights = self.softmax_terms(logits, temperature)
        return self.logprob_of(shifted, self.row_sum(weights), tokens)

    def product(
        self,
        x: Float[Array, "*m k"],
        w: Float[Array, "*groups n k"] | Integers | Panels,
        group_sizes: Int[Array, " groups"] | None = None,
        out_dtype: jnp.dtype = jnp.float32,
    ) -> Float[Array, "*m n"]:
        """Multiply by the transpose of `w`, accumulated in float32.

        Args:
            group_sizes: of rows that are sorted by group, each with its group's part of `w`; rows
                behind the last group give zero.
            out_dtype: that of the computation, which an exact product is rounded to; else the
                result is float32.
        """
        assert not isinstance(w, Integers)
        if group_sizes is None:
            return dot(x, w, out_dtype)
        return grouped_dot(x, w, group_sizes, -1, out_dtype)

    def quantized_product(
        self,
        x: QTensor,
        w: QTensor,
        group_sizes: Int[Array, " groups"] | None,
        out_dtype: jnp.dtype,
    ) -> Float[Array, "*m n"]:
        """Multiply quantized rows by the transpose of a quantized weight, as `product` does."""
        return self._quantized_product(x, w, group_sizes, out_dtype, -1)

    def input_gradient(
        self,
        dy: QTensor,
        w: QTensor,
        group_sizes: Int[Array, " groups"] | None,
        out_dtype: jnp.dtype,
    ) -> Float[Array, "*m k"]:
        """Multiply quantized rows of the gradient of such a product by the weight [.., n, k]."""
        return self._quantized_product(dy, w, group_sizes, out_dtype, -2)

    def _quantized_product(self, x, w, group_sizes, out_dtype, over) -> Array:
        if group_sizes is None:
            return blockwise_matmul(
                x,
                w,
                out_dtype,
                over=over,
                batch_invariant=self.exact,
                sum_dtype=out_dtype if self.joins else jnp.float32,
                backend=self.backend,
            )
        return grouped_matmul(x, w, group_sizes, out_dtype, over=over, backend=self.backend)

    def quantized_products(
        self, x: QTensor, weights: list[QTensor], out_dtype: jnp.dtype
    ) -> list[Float[Array, "*m n"]]:
        """`quantized_product` with each weight."""
        return blockwise_matmuls(x, weights, out_dtype, backend=self.backend)

    def add_scaled(
        self, x: Float[Array, "*b n"], y: Float[Array, "*b n"], factor: float
    ) -> Float[Array, "*b n"]:
        """Compute x + factor * y."""
        return x + factor * y

    def prepared(
        self, w: QTensor | Float[Array, "*stack n k"] | Integers
    ) -> Float[Array, "*stack n k"] | Integers | Panels | None:
        """Convert a weight that a loop multiplies many times; None where it needs no conversion."""
        if isinstance(w, QTensor):
            if keeps_quantized(w, self.backend):
                return None
            return self.in_panels(dequantize(w, backend=self.backend))
        plain = isinstance(w, Array) and w.dtype == jnp.float32
        return self.in_panels(w) if plain and self.packs else None

    @property
    def packs(self) -> bool:
        """Whether a loop multiplies weights in the form of the CPU kernel."""
        return packs(self.backend)

    def in_panels(self, w: Float[Array, "*stack n k"]) -> Float[Array, "*stack n k"] | Panels:
        """Bring the weight of one linear into panels where the CPU kernel multiplies it."""
        return pack(w) if self.packs and w.ndim == 2 else w
