"""What the settings ask of this machine and of the model, and a line for what they do not find."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.forms import trainer_policy
from fp8rl_jax.models.policy import Policy
from fp8rl_jax.models.tensors import of_kind
from fp8rl_jax.parallel import check_batch
from fp8rl_jax.precision import QTensor, check_recipe, promises_exact
from fp8rl_jax.rollout.constraints import make_constraints
from fp8rl_jax.rollout.sampling import Sampling
from fp8rl_jax.tokenizers.tokenizer import Tokenizer, end_tokens
from pallas_kernels.attention import KeyBlock, attention
from pallas_kernels.backend import BackendError
from pallas_kernels.check.cases import Shape
from pallas_kernels.matmul import selected_backend


def with_exact_decided(config: RunConfig, ours: bool = True) -> RunConfig:
    """Decide precision.exact = "auto" for this machine.

    Args:
        ours: `LocalEngine` samples; of others nothing is promised.

    Raises:
        UserError: the recipe cannot run here.
    """
    if config.precision.exact != "auto":
        return config
    recipe, backend = config.resolved_recipe, config.precision.backend
    check_recipe(recipe, backend)
    carries = config.rollout.paged.extra_prompts
    if carries and recipe.exact:
        raise UserError(
            f"rollout.paged.extra_prompts: recipe {recipe.name!r} is exact, and tokens that older "
            "weights sampled are not; set it to 0"
        )
    samples, ahead = config.task.kind != "text", config.rollout.steps_ahead
    differs = carries or ahead or config.rollout.transform or config.rl.acceptance.enabled
    plain = ours and samples and not differs
    exact = recipe.exact or (plain and promises_exact(recipe, backend))
    return replace(config, precision=replace(config.precision, exact=exact))


def kernel_sizes(config: PolicyConfig) -> Shape:
    """Give the sizes of a policy that kernels are tried at, those of its experts where it has
    some."""
    experts = config.experts
    return Shape(
        "",
        config.hidden_size,
        experts.intermediate_size if experts else config.intermediate_size,
        config.num_heads,
        config.num_kv_heads,
        config.attention_dim,
        experts.count if experts else 0,
        experts.per_token if experts else 0,
    )


def check_mesh(
    config: RunConfig, shape: PolicyConfig, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh
) -> None:
    """Refuse a mesh that splits no batch of a run into equal parts, or has no use for an axis.

    Raises:
        UserError: naming the key, and the sizes that fit.
    """
    r, trainer, sft = config.rollout, config.trainer, config.sft
    check_batch(r.prompts_per_step, mesh, "rollout.prompts_per_step")
    if config.task.kind == "text":
        key = "sft.micro_batch_rows" if sft.micro_batch_rows else "sft.batch_size"
        check_batch(sft.micro_batch_rows or sft.batch_size, mesh, key)
    elif not trainer.packing:  # packed rows are filled up
        of_update = r.prompts_per_step // trainer.updates_per_rollout
        check_batch(of_update, mesh, "rollout.prompts_per_step / trainer.updates_per_rollout")
    check_axes(config, shape, mesh)
    own = config.mesh.rollout
    if own.size and r.prompts_per_step % (parts := own.data * own.expert):
        raise UserError(
            f"rollout.prompts_per_step = {r.prompts_per_step} does not divide by mesh.rollout.data "
            f"x expert = {parts}: make it a multiple of {parts}"
        )


def check_axes(
    config: RunConfig, shape: PolicyConfig, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh
) -> None:
    """Refuse a mesh that splits no micro-batch into equal parts, or has no use for an axis.

    Raises:
        UserError: naming the key, and the sizes that fit.
    """
    trainer, own = config.trainer, config.mesh.rollout
    if config.task.kind != "text" and trainer.micro_batch_prompts and not trainer.packing:
        check_batch(trainer.micro_batch_prompts, mesh, "trainer.micro_batch_prompts")
    if shape.experts is None and mesh.shape["expert"] > 1:
        raise UserError(
            f"mesh.expert = {mesh.shape['expert']}: the model has no experts; set mesh.data or "
            "mesh.fsdp to that"
        )
    if shape.experts is None and own.expert > 1:
        raise UserError(
            f"mesh.rollout.expert = {own.expert}: the model has no experts; set mesh.rollout.data "
            "to that"
        )


def check_lengths(config: RunConfig, shape: PolicyConfig) -> None:
    """Refuse rows that are longer than the model's positions.

    Raises:
        UserError: naming the keys.
    """
    r, positions = config.rollout, shape.max_position_embeddings
    if config.task.kind == "text":
        asked, longest = "sft.row_tokens", config.sft.row_tokens
    else:
        asked = "rollout.max_prompt_tokens + rollout.max_new_tokens"
        longest = r.max_prompt_tokens + r.max_new_tokens
    if longest > positions:
        raise UserError(f"{asked} = {longest} exceeds the model's {positions} positions")


def check_shape(config: RunConfig, shape: PolicyConfig) -> None:
    """Refuse settings that a model of this shape cannot have.

    Raises:
        UserError: naming the key.
    """
    if config.rollout.engine == "vllm" and shape.latent is not None:
        raise UserError(
            f"rollout.engine = 'vllm': a {shape.family.hf_class} has latent attention, of "
            "which vLLM keeps another form of kv_b_proj, and whether a push renews that has not "
            'been tried; take "static" or "paged"'
        )
    if config.trainer.router_replay and shape.experts is None:
        raise UserError("trainer.router_replay: the model has no experts; leave it false")
    outside = [x for x in config.rollout.stop_token_ids if not 0 <= x < shape.vocab_size]
    if outside:
        raise UserError(
            f"rollout.stop_token_ids: {outside[0]} is outside of the model's vocabulary of "
            f"{shape.vocab_size}"
        )
    exact = config.resolved_recipe.exact
    if exact and selected_backend(config.precision.backend) == "hopper":
        _check_exact_on_hopper(shape, config)


def check_range(policy: Policy, dtype: jnp.dtype) -> None:
    """Refuse weights that the compute dtype cannot hold.

    Only float16 is narrower than the masters.

    Raises:
        UserError: naming the tensor and its largest magnitude.
    """
    limit = float(jnp.finfo(dtype).max)
    if limit >= float(jnp.finfo(jnp.bfloat16).max):
        return
    tensors = {
        f"layers.{name}": weight.value
        for name, weight in policy.stack.tensors().items()
        if name not in of_kind("router")
    }
    tensors |= {
        "embed_tokens": policy.embed_tokens.value,
        "norm": policy.norm.value,
        "lm_head": policy.head,
    }
    for name, weight in tensors.items():
        if isinstance(weight, QTensor):
            weight = weight.dequantize()
        if (largest := float(jnp.max(jnp.abs(weight)))) > limit:
            raise UserError(
                f"compute_dtype: {name} has a weight of magnitude {largest:g}, and {dtype} holds "
                f"nothing above {limit:g}; "
                'use "bfloat16"'
            )


def check_policy(policy: Policy, config: RunConfig) -> None:
    """What the settings ask of the model."""
    check_range(policy, jnp.dtype(config.compute_dtype))
    # for its refusals
    jax.eval_shape(
        lambda p: trainer_policy(
            p,
            config.resolved_recipe,
            jnp.dtype(config.compute_dtype),
            config.precision.backend,
        ),
        policy,
    )
    check_shape(config, policy.config)


def _check_exact_on_hopper(shape: PolicyConfig, config: RunConfig) -> None:
    """What attention in the order of a decode step asks of the model and of the batch."""
    if config.rollout.engine == "paged":
        raise UserError(
            "rollout.engine: with precision.exact, Hopper's attention reads rows and no pages; "
            'set it to "static"'
        )
    if config.trainer.packing:
        raise UserError(
            "trainer.packing: with precision.exact, Hopper's attention takes one sequence a row; "
            "set one of the two to false"
        )
    dtype = jnp.dtype(config.compute_dtype)
    try:
        jax.eval_shape(
            lambda q, k: attention(
                q,
                [KeyBlock(k, k, jnp.ones((1, 1, 8), bool))],
                shape.score_scale,
                1.0,
                dtype,
                key_order="decode",
                backend="hopper",
            ),
            jax.ShapeDtypeStruct((1, 1, shape.num_heads, shape.attention_dim), dtype),
            jax.ShapeDtypeStruct((1, shape.num_kv_heads, 8, shape.attention_dim), dtype),
        )
    except BackendError as error:
        raise UserError(f"precision.exact: {error}; set it to false") from None


def make_sampling(config: RunConfig, policy: Policy, tokenizer: Tokenizer) -> Sampling:
    r = config.rollout
    if tokenizer.vocab_size > policy.config.vocab_size:
        raise UserError(
            f"the tokenizer has ids up to {tokenizer.vocab_size - 1}, and the model's vocab_size "
            f"is {policy.config.vocab_size}; give load_tokenizer the vocab_size, or the model's "
            "own tokenizer"
        )
    ends = end_tokens(tokenizer, (*policy.config.eos_token_ids, *r.stop_token_ids))
    if not (ends or r.stop_strings):
        raise UserError(
            "rollout.stop_token_ids: the model names no end-of-sequence token; give the ids that "
            "end a completion, "
            "or rollout.stop_strings"
        )
    if r.max_new_tokens >= policy.config.max_position_embeddings:
        raise UserError(
            f"rollout.max_new_tokens = {r.max_new_tokens} leaves no room for a prompt in the "
            "model's "
            f"{policy.config.max_position_embeddings} positions"
        )
    constraints: Any = make_constraints(
        tokenizer, policy.config.vocab_size, r.stop_strings, r.bad_words, r.logit_bias
    )
    support = config.support_size(policy.config.vocab_size)
    numbers = r.max_new_tokens, r.temperature, r.top_k, r.top_p, r.min_p
    return Sampling(*numbers, ends, *constraints, support_size=support)
