"""Multi-head latent attention (MLA): the cache keeps one latent a token, which all heads make their
keys and values of, and one rotated key, which they share (DeepSeek-V2, arXiv 2405.04434, section
2.1; DeepSeek-V3, arXiv 2412.19437).

    queries            q_b_proj(norm(q_a_proj(x))), or q_proj(x); the last part of each head rotated
    latent, shared key kv_a_proj_with_mqa(x): norm(the first part), the rest rotated
    keys, values       kv_b_proj(latent), a head's key in front of the shared one

A cache of this is smaller than that of keys and values by an order of magnitude: DeepSeek-V3 keeps
576 numbers a token and layer in place of 40,960. Scoring and decode make keys and values of the
latents by the same product, so both sides round alike. A decode step makes those of all tokens in
the cache, a layer at a time, which is most of its work behind long texts: folding kv_b_proj into
queries and outputs, as decode kernels do, would spare it, and round otherwise.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from fp8rl_jax.models.attention import Attention, quantize_heads
from fp8rl_jax.models.policy import Layer
from fp8rl_jax.precision import Compute
from pallas_kernels.rounding import rounded

LATENT_NORM_EPS = 1e-6
"""Of the norms of latents, whatever rms_norm_eps is: DeepSeek's code and transformers' leave it at
their norm's default."""


class LatentAttention(Attention):
    """Latent attention of one layer, as `Attention`: the keys of its cache are the shared ones, the
    values are the latents."""

    @staticmethod
    def decodes_in_kernels(compute: Compute) -> bool:
        return False

    def entries(self, x: Array, layer: Layer) -> tuple[Array, Array, Array]:
        norm, project = self.operations.norm, self.operations.project
        latents = self.config.latents
        if layer.q_a_proj is None:
            queries, made = project(x, layer.q_proj, layer.kv_a_proj_with_mqa)
        else:
            inner, made = project(x, layer.q_a_proj, layer.kv_a_proj_with_mqa)
            inner = norm(inner, layer.q_a_layernorm, LATENT_NORM_EPS)
            queries = project(inner, layer.q_b_proj)[0]
        latent, key = jnp.split(made, [latents.rank], axis=-1)
        latent = norm(latent, layer.kv_a_layernorm, LATENT_NORM_EPS)
        q, k = self.pairs_apart(self.heads(queries, None)), self.pairs_apart(key[:, :, None])
        return q, k, latent[:, :, None]

    def rope_tables(self, frequencies: Array) -> tuple[Array, Array]:
        scaling = self.config.rope_scaling
        amplitude = 1.0 if scaling is None else scaling.amplitude
        return self.compute.rope_tables(frequencies, self.positions, amplitude)

    def rotated(self, x: Array, rope: tuple[Array, Array]) -> Array:
        still, turned = self.parts(x)
        turned = self.compute.rotate(turned, rope)
        return jnp.concatenate([still, turned], axis=-1)

    def pairs_apart(self, x: Array) -> Array:
        if not self.config.latents.interleaved:
            return x
        still, turned = self.parts(x)
        return jnp.concatenate([still, turned[..., ::2], turned[..., 1::2]], axis=-1)

    def pairs_back(self, x: Array) -> Array:
        if not self.config.latents.interleaved:
            return x
        still, turned = self.parts(x)
        pairs = jnp.stack(jnp.split(turned, 2, axis=-1), axis=-1)
        return jnp.concatenate([still, pairs.reshape(turned.shape)], axis=-1)

    def parts(self, x: Array) -> tuple[Array, Array]:
        """Split queries or the shared key into what is not rotated, if anything, and what is."""
        still, turned = jnp.split(x, [x.shape[-1] - self.config.latents.rotary_dim], axis=-1)
        return still, turned

    def stored(self, q: Array, k: Array, v: Array, scales):
        assert scales is not None
        compute, (sq, sk, sv) = self.compute, scales
        k, v = quantize_heads(k, sk, compute.key), quantize_heads(v, sv, compute.value)
        if compute.query.quantized:
            # it meets keys that are made of the latents, and not the FP8 values themselves
            q = _restored(quantize_heads(q, sq, compute.query), sq, q.dtype)
        return q, k, v, self.config.score_scale, 1.0

    def operands(
        self, q: Array, blocks: list[Any], layer: Layer, scales
    ) -> tuple[Array, list[Any]]:
        made = []
        for block in blocks:
            shared, latents = block.keys, block.values
            if scales is not None:
                shared, latents = (
                    _restored(x, scale[..., None, None], q.dtype)
                    for x, scale in zip((shared, latents), scales[1:], strict=True)
                )
            keys, values = self.made(latents[:, 0], shared[:, 0], layer)
            made.append(block._replace(keys=keys, values=values))
        return self.filled(q), made

    def made(
        self,
        latents: Float[Array, "rows slots rank"],
        shared: Float[Array, "rows slots rotary"],
        layer: Layer,
    ) -> tuple[Float[Array, "rows heads slots dim"], Float[Array, "rows heads slots dim"]]:
        """Make the keys and values of all heads."""
        config, (rows, slots) = self.config, shared.shape[:2]
        heads = self.operations.project_cached(latents, layer.kv_b_proj)
        heads = heads.reshape(rows, slots, config.num_heads, -1)
        still = config.head_dim - config.latents.rotary_dim
        of_all = (rows, slots, config.num_heads, shared.shape[-1])
        shared = jnp.broadcast_to(shared[:, :, None], of_all)
        keys = jnp.concatenate([heads[..., :still], shared], axis=-1)
        keys, values = self.filled(keys), self.filled(heads[..., still:])
        return jnp.swapaxes(keys, 1, 2), jnp.swapaxes(values, 1, 2)

    def filled(self, x: Array) -> Array:
        """Fill heads up with zeros to the one width that attention takes."""
        missing = self.config.attention_dim - x.shape[-1]
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])

    def output(self, out: Array, layer: Layer) -> Array:
        return super().output(out[..., : self.config.latents.value_dim], layer)


def _restored(x: Array, scale: Array, dtype: jnp.dtype) -> Array:
    """Dequantize what a scale was calibrated for."""
    return rounded(x.astype(jnp.float32) * scale, dtype)
