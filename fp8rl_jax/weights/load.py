"""Policies from and to Hugging Face directories: the link between arrays on disk and the NNX
module."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool

from fp8rl_jax.config.formats import TensorFormat
from fp8rl_jax.config.recipe import Recipe
from fp8rl_jax.config.run import InitConfig
from fp8rl_jax.errors import UserError, listing
from fp8rl_jax.models.config import ExpertsConfig, PolicyConfig
from fp8rl_jax.models.policy import (
    Layer,
    Policy,
    Weight,
    build_policy,
    init_policy,
    linear_names,
    tensor_specs,
    with_layers,
)
from fp8rl_jax.parallel import DEFAULT_RULES, shard_policy
from fp8rl_jax.precision import QTensor, format_of, is_quantized, quantized_layers
from fp8rl_jax.tokenizers.byte_tokenizer import ByteTokenizer
from fp8rl_jax.tokenizers.tokenizer import Tokenizer, load_tokenizer
from fp8rl_jax.weights.block_fp8 import SCALE_SUFFIX
from fp8rl_jax.weights.gathered import GatheredTensors
from fp8rl_jax.weights.hf_directory import (
    ModelFiles,
    Stack,
    export_dtype,
    export_policy,
    open_files,
)
from fp8rl_jax.weights.hf_names import hf_tensors
from fp8rl_jax.weights.quantized_export import ExportForm, export_form, quantizer
from fp8rl_jax.weights.resolve import resolve_model

_log = logging.getLogger("fp8rl")
_VOCABULARY_MULTIPLE = 8  # so that the embedding divides over a mesh
_files: WeakKeyDictionary[Policy, ModelFiles] = WeakKeyDictionary()
"""Of policies that were read from quantized files: mapped for as long as the policy is there."""


def byte_policy_config(init: InitConfig) -> PolicyConfig:
    """Return the shape of the built-in policy over `ByteTokenizer`'s ids, with tied embeddings.

    It has the sizes of `init`, and is a Llama, or a Qwen3-MoE where it has experts.

    The vocabulary is rounded up to a multiple of 8; the ids above the tokenizer's decode to
    nothing.

    Raises:
        UserError: sizes that do not fit each other.
    """
    if init.num_experts < 0:
        raise UserError(f"model.init.num_experts = {init.num_experts} must not be negative")
    experts = None
    if init.num_experts:
        experts = ExpertsConfig(
            init.num_experts, init.experts_per_token, init.intermediate_size, normalize=True
        )
    return PolicyConfig(
        architecture="qwen3_moe" if experts else "llama",
        vocab_size=-(-ByteTokenizer.vocab_size // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE,
        hidden_size=init.hidden_size,
        intermediate_size=init.intermediate_size,
        num_layers=init.num_layers,
        num_heads=init.num_heads,
        num_kv_heads=init.num_kv_heads,
        head_dim=init.head_dim,
        rope_theta=init.rope_theta,
        tie_word_embeddings=True,
        bos_token_id=ByteTokenizer.bos_token_id,
        eos_token_ids=ByteTokenizer.eos_token_ids,
        pad_token_id=ByteTokenizer.pad_token_id,
        experts=experts,
    )


def load_policy(
    directory: str | Path,
    dtype: jnp.dtype = jnp.float32,
    held: Mapping[str, TensorFormat] | None = None,
    mesh: Mesh | None = None,
) -> Policy:
    """Load the policy of a Hugging Face directory, layers stacked.

    Args:
        directory: config.json and safetensors, quantized ones too; `weights.resolve.resolve_model`
            makes one of anything else.
        dtype: of every tensor; values are converted on the host, bfloat16 to float32 exactly.
        held: formats of stacks of linears, by path ("layers.q_proj.weight"); where the files have
            them all in that format they are QTensors of the files' own codes.
        mesh: each tensor goes from the host to its places on the mesh, so that no device has to
            hold a whole model; every process passes the same, and reads ranges of the files that
            together are what its devices hold, but quantized tensors whole. Default: all to the
            default device.

    Raises:
        UserError: whatever `load_policy_arrays` refuses, a value that `dtype` cannot hold, and a
            tensor that does not divide by its mesh axes.
    """
    dtype, held = jnp.dtype(dtype), held or {}
    files = open_files(directory)
    codes = _own_codes(files, held, mesh)

    def tensor(name: str, shape: tuple[int, ...], axes: tuple[str, ...]) -> Array | QTensor:
        if (path := f"{name}.weight") in codes:
            return codes[path]
        whole = tuple((0, side) for side in shape)
        if mesh is None:
            return jnp.asarray(converted(path, files.parts(path, [whole])[whole]))
        place = NamedSharding(mesh, DEFAULT_RULES.spec(axes, shape, mesh, path))
        near = _in_rows(place, shape)
        spans = {
            device: tuple(x.indices(side)[:2] for x, side in zip(index or (), shape, strict=True))
            for device, index in near.addressable_devices_indices_map(shape).items()
        }
        parts = files.parts(path, {*spans.values()})
        for span in parts:
            parts[span] = converted(path, parts[span])
        shards = [jax.device_put(parts[span], device) for device, span in spans.items()]
        x = jax.make_array_from_single_device_arrays(shape, near, shards)
        return x if near == place else _moved(place)(x)

    def converted(path: str, source: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            values = source.astype(dtype, copy=False)
        if (
            values.dtype.itemsize < source.dtype.itemsize
            and not np.isfinite(values.astype(np.float32)).all()
        ):
            raise UserError(
                f"{directory}: values of {path} overflow {dtype}; load it as {source.dtype}"
            )
        return values

    policy = build_policy(files.config, tensor)
    if files.layout is not None and not held:
        _files[policy] = files
    return policy


def _in_rows(place: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """Split a tensor's rows where its columns are split.

    A part of the columns lies in every page of a file, and rows lie together. They are exchanged
    between devices then; where there are too few of them, it stays `place`.
    """
    if len(shape) < 2:
        return place
    *leading, rows, columns = (
        (entry,) if isinstance(entry, str) else entry or ()
        for entry in (*place.spec, *[None] * (len(shape) - len(place.spec)))
    )
    sizes = place.mesh.shape
    split = prod(sizes[axis] for axis in columns)
    if split == 1 or shape[-2] % (split * prod(sizes[axis] for axis in rows)):
        return place
    return NamedSharding(place.mesh, PartitionSpec(*leading, (*rows, *columns), None))


@cache
def _moved(place: NamedSharding) -> Callable[[Array], Array]:
    return jax.jit(lambda x: x, out_shardings=place)


def in_own_codes(policy: Policy, held: Mapping[str, TensorFormat]) -> Policy:
    """Put the codes of a policy's files in the place of the numbers that they stand for.

    Args:
        policy: the very one that `load_policy` gave; any other comes back as it is.
        held: as of `load_policy`.

    Returns:
        What `load_policy` gives with `held`, but for stacks whose numbers are not the files' any
        more, which stay as they are; it is said of which.

    Raises:
        UserError: a tensor that is not finite.
    """
    tensors = policy.stack.tensors()
    held = {path: x for path, x in held.items() if not is_quantized(tensors[_name(path)].value)}
    if (files := _files.get(policy)) is None or not held:
        return policy
    found, changed = {}, []
    for path, own in _own_codes(files, held).items():
        name, weight = _name(path), tensors[_name(path)]
        if _stands_for(own, weight.value):
            found[name] = Weight(own, weight.axes)
        else:
            changed.append(name)
    if changed:
        _log.warning(
            "%s: not the numbers that the checkpoint's codes stand for, as they were changed or "
            "loaded in a narrower dtype: quantized anew",
            listing(changed),
        )
    return with_layers(policy, Layer(tensors | found)) if found else policy


_stands_for = jax.jit(lambda own, values: jnp.array_equal(own.dequantize(), values))


def _name(path: str) -> str:
    """A tensor of the layers, as `Layer` has it."""
    return path.removeprefix("layers.").removesuffix(".weight")


def _own_codes(
    files: ModelFiles, held: Mapping[str, TensorFormat], mesh: Mesh | None = None
) -> dict[str, QTensor]:
    """What the files hold, by path; and a line about what they hold otherwise."""
    codes, specs = files.codes(held), tensor_specs(files.config)
    if files.layout is not None and (anew := [path for path in held if path not in codes]):
        _log.warning(
            "%s: %s stored as %s, not as the %s that the base is to rest in: quantized anew, which "
            "is a second rounding",
            files.directory,
            listing([path.removesuffix(".weight") for path in anew]),
            files.layout,
            held[anew[0]].name,
        )
    found = {}
    for path in [*codes]:
        # popped, so that the host holds one copy of what is already on the device
        own: Any = codes.pop(path)
        shape, axes = specs[path.removesuffix(".weight")]
        own = QTensor(own.values, own.scales, format_of(held[path], shape), own.outer)
        if mesh is None:
            found[path] = jax.tree.map(jnp.asarray, own)
        else:
            found[path] = shard_policy(Weight(own, axes), mesh).value
    return found


def load(
    source: str | Path,
    dtype: jnp.dtype = jnp.float32,
    held: Mapping[str, TensorFormat] | None = None,
    mesh: Mesh | None = None,
) -> tuple[Policy, Tokenizer]:
    """Load a policy and its tokenizer.

    Args:
        source: Hugging Face directory, hub id, .gguf file, or a name that `fp8rl fetch` knows
            ("smollm2-135m").
        dtype: of the weights; float32 is what training wants.
        held, mesh: as of `load_policy`.

    Raises:
        UserError: nothing is found, a file is damaged, or there is no tokenizer.
    """
    directory = resolve_model(str(source), report=_log.info)
    policy = load_policy(directory, dtype, held, mesh)
    tokenizer = load_tokenizer(directory, policy.config.vocab_size)
    if tokenizer is None:
        raise UserError(f"model.path: {directory} holds no tokenizer; training needs one")
    return policy, tokenizer


def byte_policy(seed: int = 0, **sizes: Any) -> tuple[Policy, ByteTokenizer]:
    """Make a small float32 policy over bytes with random weights, without files or downloads.

    Args:
        seed: of the weights.
        sizes: fields of `InitConfig`, such as hidden_size and num_layers.

    Raises:
        UserError: sizes that are unknown or do not fit each other.
    """
    if unknown := sizes.keys() - InitConfig.__dataclass_fields__.keys():
        raise UserError(
            f"byte_policy: unknown {', '.join(sorted(unknown))}; known: "
            f"{', '.join(InitConfig.__dataclass_fields__)}"
        )
    return init_policy(
        byte_policy_config(InitConfig(**sizes)), jax.random.key(seed)
    ), ByteTokenizer()


def rollout_form(recipe: Recipe, config: PolicyConfig, dtype: str) -> str | ExportForm:
    """Give the form of an export that holds what a recipe's rollout computes with.

    Args:
        recipe: of the run.
        config: of the policy.
        dtype: compute dtype, which is the form where the rollout quantizes no weight.

    Raises:
        UserError: weights of several formats, or one that has no layout.
    """
    formats = {
        name: recipe.of_linear(name).rollout.weight
        for name in quantized_layers(recipe, linear_names(config))
    }
    formats = {name: fmt for name, fmt in formats.items() if fmt.quantized}
    if not formats:
        return dtype
    first, *others = dict.fromkeys(fmt.name for fmt in formats.values())
    if others:
        raise UserError(
            f"recipe {recipe.name!r} has weights in {first} and in {others[0]}, and a checkpoint "
            "holds one format beside 16 bits; export it in one of them, or in bfloat16"
        )
    form = export_form(first)
    assert form is not None
    return ExportForm(form.format, form.library, frozenset(formats))


def device_tensors(policy: Policy, dtype: str) -> Iterator[tuple[str, Array]]:
    """Make an export's tensors on the first device, one at a time, under Hugging Face's names.

    Args:
        policy, dtype: as of `save_policy`; quantized, "fp8-block".

    Raises:
        UserError: behind the last one, naming those that hold what is not finite in `dtype`.
    """
    values, device, finite = _parameters(policy), jax.local_devices()[0], {}
    form = export_form(dtype)
    for path, named in groupby(hf_tensors(policy.config).items(), lambda item: item[1].path):
        stack = jnp.asarray(values[path])
        for name, location in named:
            tensor, finite[name] = _converted(
                stack, location.index, export_dtype(location, dtype, stack.dtype)
            )
            tensor = jax.device_put(tensor, device)
            if form is not None and form.holds(location):
                quantized = quantizer(form.format)(tensor)
                yield name, quantized.values
                yield name + SCALE_SUFFIX, quantized.scales
            else:
                yield name, tensor
    if bad := [name for name, holds in jax.device_get(finite).items() if not holds]:
        raise UserError(f"weights that are not finite in {dtype}: {listing(bad)}")


@partial(jax.jit, static_argnames="dtype")
def _converted(
    stack: Array, index: tuple[int, ...], dtype: np.dtype
) -> tuple[Array, Bool[Array, ""]]:
    for place in index:
        stack = jax.lax.dynamic_index_in_dim(stack, place, keepdims=False)
    tensor = stack.astype(dtype)
    return tensor, jnp.isfinite(tensor).all()


def _parameters(policy: Policy) -> dict[str, Any]:
    """Arrays by the paths of `parameter_shapes`."""
    if not policy.stacked:
        raise ValueError("the layers are unrolled; export the trainer's policy")
    weights = {"embed_tokens": policy.embed_tokens, "norm": policy.norm, "lm_head": policy.lm_head}
    weights |= {f"layers.{name}": weight for name, weight in policy.stack.tensors().items()}
    flat = {
        f"{name}.weight": weight.value for name, weight in weights.items() if weight is not None
    }
    if quantized := [name for name, value in flat.items() if is_quantized(value)]:
        raise ValueError(f"{', '.join(quantized)} are quantized; export the trainer's policy")
    return flat


def save_policy(
    policy: Policy,
    directory: str | Path,
    tokenizer: str | Path | ByteTokenizer | None = None,
    dtype: str | ExportForm = "bfloat16",
) -> Path:
    """Write the policy as a Hugging Face directory, one layer of one tensor at a time.

    A failure leaves an earlier export in `directory` as it was. Where processes share the policy,
    all of them call it together, and the first writes.

    Args:
        policy: plain arrays, layers stacked.
        directory: made when it isn't there.
        tokenizer: a directory whose tokenizer files are copied, the byte-level tokenizer, or None
            for a model of token ids.
        dtype: as of `export_policy`.

    Returns:
        `directory`.

    Raises:
        UserError: whatever `export_policy` refuses.
    """
    _parameters(policy)  # for its refusals
    tensors = GatheredTensors(policy)
    with tensors.gathered() as here:
        if here:
            write_model(directory, policy.config, tensors, tokenizer, dtype)
    return Path(directory)


def write_model(
    directory: str | Path,
    config: PolicyConfig,
    tensors: Mapping[str, Stack] | None,
    tokenizer: str | Path | ByteTokenizer | None = None,
    dtype: str | ExportForm = "bfloat16",
) -> Path:
    """Write a Hugging Face directory, as `export_policy` does, with a tokenizer of ours or another.

    Args:
        tensors: as `arrays` there.
        tokenizer: as of `save_policy`.
    """
    if not isinstance(tokenizer, ByteTokenizer):
        return export_policy(directory, config, tensors, dtype, tokenizer)
    with tempfile.TemporaryDirectory(prefix="fp8rl-tokenizer-") as files:
        tokenizer.save(files)
        return export_policy(directory, config, tensors, dtype, files)
