"""A Hugging Face directory's tensors as policy arrays, and back.

Reading accounts for every tensor: expected, of the right shape, and finite. What is written,
transformers, vLLM and SGLang load.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from fp8rl_jax.config.formats import TensorFormat
from fp8rl_jax.errors import UserError, listing
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.tensors import parameter_shapes
from fp8rl_jax.weights.hf_config import config_json, read_policy_config
from fp8rl_jax.weights.hf_names import (
    Location,
    Stored,
    hf_name,
    hf_tensors,
    is_ignored,
    is_measured_scale,
    stored_tensors,
)
from fp8rl_jax.weights.layouts import QUANT_FILE, Layout, read_quantization
from fp8rl_jax.weights.quantized_export import (
    ExportForm,
    check_form,
    export_form,
    quantization_config,
    quantized_kinds,
    quantized_tensors,
    quantizer,
)
from fp8rl_jax.weights.safetensors_io import (
    INDEX_FILE,
    SHARD_BYTES,
    Checkpoint,
    Kind,
    Kinds,
    count_non_finite,
    is_weights_file,
    read_checkpoint,
    without,
    write_checkpoint,
)
from fp8rl_jax.weights.stored_linears import Codes, StoredLinear, take_linears

_log = logging.getLogger("fp8rl")
_WEIGHT_DTYPES = tuple(
    np.dtype(scalar) for scalar in (ml_dtypes.bfloat16, np.float16, np.float32, np.float64)
)

# What a tokenizer consists of, in the spellings of transformers 4 and 5.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


Span = tuple[tuple[int, int], ...]
"""A part of an array: begin and end along each axis."""


class Stack(Protocol):
    """What an export reads of an array: a tensor at a time, in the order of `hf_tensors`."""

    @property
    def dtype(self) -> np.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, index: tuple[int, ...], /) -> np.ndarray: ...


@dataclass(frozen=True)
class ModelFiles:
    """The tensors of a Hugging Face directory, each with its place in the policy; nothing has been
    converted.

    Attributes:
        directory: where they are.
        config: of the policy.
        layout: how its quantized linears are stored; None: there are none.
        checkpoint: its tensors, quantized linears by the name of their weight.
        expected: every tensor's place.
        linears: the quantized ones.
        dtypes: of the policy's arrays.
    """

    directory: Path
    config: PolicyConfig
    layout: Layout | None
    checkpoint: Checkpoint
    expected: Mapping[str, Stored]
    linears: Mapping[str, StoredLinear]
    dtypes: Mapping[str, np.dtype]

    def arrays(self) -> dict[str, np.ndarray]:
        """Read the policy's arrays as `load_policy_arrays` gives them.

        Raises:
            UserError: a tensor that is not finite.
        """
        shapes = parameter_shapes(self.config)
        arrays = {path: np.empty(shapes[path], dtype) for path, dtype in self.dtypes.items()}
        for name, stored in self.expected.items():
            tensor = self._tensor(name)
            parts = np.split(tensor, len(stored.places), axis=max(tensor.ndim - 2, 0))
            for location, part in zip(stored.places, parts, strict=True):
                arrays[location.path][location.index] = part
        return arrays

    def parts(self, path: str, spans: Collection[Span]) -> dict[Span, np.ndarray]:
        """Read parts of one of the policy's arrays, in the dtype of `arrays`.

        Of the files their ranges alone are read. A quantized tensor of which anything is wanted is
        read whole.

        Args:
            spans: of the array, as many places as it has axes.

        Raises:
            UserError: a tensor that is not finite where it was read.
        """
        found = {
            span: np.empty([stop - start for start, stop in span], self.dtypes[path])
            for span in spans
        }
        for name, i, location in self._places[path]:
            count = len(location.index)
            wanted = {
                span: part
                for span, part in found.items()
                if all(a <= j < b for j, (a, b) in zip(location.index, span, strict=False))
            }
            if not wanted:
                continue
            matrices = len(self.expected[name].places)
            tensor = self._tensor(name) if name in self.linears else self.checkpoint.tensors[name]
            tensor = np.split(tensor, matrices, axis=max(tensor.ndim - 2, 0))[i]
            for span, part in wanted.items():
                values = read_range(tensor, span[count:])
                if count_non_finite(values):
                    self._tensor(name)  # says how many in all
                begins = (a for a, _ in span)
                at = tuple(j - a for j, a in zip(location.index, begins, strict=False))
                part[at] = values
        return found

    @cached_property
    def _places(self) -> dict[str, list[tuple[str, int, Location]]]:
        """Of each array the tensors that hold some of it: the i-th matrix of each, and where it
        is."""
        found: dict[str, list[tuple[str, int, Location]]] = {}
        for name, stored in self.expected.items():
            for i, location in enumerate(stored.places):
                found.setdefault(location.path, []).append((name, i, location))
        return found

    def codes(self, formats: Mapping[str, TensorFormat]) -> dict[str, Codes]:
        """Read what the files hold of quantized linears, without rounding anything.

        Args:
            formats: by path, what the linears of a stack are to be in.

        Returns:
            Stacks of codes and scales; without those of which any linear is stored otherwise.

        Raises:
            UserError: a tensor that is not finite.
        """
        found: dict[str, dict[tuple[int, ...], Any]] = {path: {} for path in formats}
        for name, stored in self.expected.items():
            for i, place in enumerate(stored.places):
                if place.path in formats:
                    part = self._codes(name, formats[place.path], i)
                    found[place.path][place.index] = part
        return {path: _stacked(of) for path, of in found.items() if None not in of.values()}

    def _tensor(self, name: str) -> np.ndarray:
        """In the file's dtype, or float32."""
        stored = self.linears.get(name)
        tensor = self.checkpoint.tensors[name] if stored is None else stored.dequantize()
        _check_finite(self.checkpoint, name, tensor)
        return tensor

    def _codes(self, name: str, fmt: TensorFormat, i: int) -> Codes | None:
        """Codes of the i-th place of a tensor."""
        linear, count = self.linears.get(name), len(self.expected[name].places)
        codes = None if linear is None else linear.codes(fmt, count)
        if codes is None:
            return None
        self._tensor(name)  # for its refusals
        values, scales = (np.split(x, count, axis=-2)[i] for x in codes[:2])
        return Codes(values, scales, codes.outer)


def read_range(tensor: np.ndarray, span: Span) -> np.ndarray:
    """Read a part of a mapped tensor: of whole rows nothing beside it comes from the file."""
    return np.ascontiguousarray(tensor[tuple(slice(*ends) for ends in span)])


def _stacked(parts: Mapping[tuple[int, ...], Codes]) -> Codes:
    """One stack of what belongs at its places."""
    leading = np.max([*parts], axis=0) + 1

    def whole(arrays: Sequence[np.ndarray]) -> np.ndarray:
        made = np.empty((*leading, *arrays[0].shape), arrays[0].dtype)
        for index, array in zip(parts, arrays, strict=True):
            made[index] = array
        return made

    values, scales, outer = zip(*parts.values(), strict=True)
    return Codes(whole(values), whole(scales), None if outer[0] is None else whole(outer))


def open_files(directory: str | Path) -> ModelFiles:
    """Account for every tensor of a Hugging Face directory.

    Raises:
        UserError: whatever `read_policy_config`, `read_checkpoint`, `read_quantization` and
            `take_linears` refuse; tensors that are missing, unexpected, misshapen or of a dtype
            that weights don't have; a tied lm_head that differs.
    """
    directory = Path(directory)
    config = read_policy_config(directory)
    layout = read_quantization(directory)
    checkpoint = read_checkpoint(directory)
    _check_tensor_count(directory, config, checkpoint)
    measured = [name for name in checkpoint.tensors if is_measured_scale(name)]
    checkpoint = without(checkpoint, {n for n in checkpoint.tensors if is_ignored(n, config)})
    expected = stored_tensors(config, checkpoint.tensors)
    checkpoint, linears = take_linears(checkpoint, expected, layout)
    _check_names(directory, config, checkpoint, expected)
    dtypes = _check_shapes_and_dtypes(checkpoint, expected, linears)
    _check_tied_head(config, checkpoint)
    if measured:
        activations = layout is not None and layout.name == "nvfp4"
        _log.warning(
            "%s: scales of activations and of the KV cache are not used, a run measures its own%s: "
            "%s",
            directory,
            ' (activations in NVFP4, "nvfp4_rows", have an outer scale a row, not one a linear)'
            * activations,
            listing(measured),
        )
    return ModelFiles(directory, config, layout, checkpoint, expected, linears, dtypes)


def load_policy_arrays(directory: str | Path) -> tuple[PolicyConfig, dict[str, np.ndarray]]:
    """Read the weights of a Hugging Face directory as numpy arrays.

    Returns:
        The config, and arrays in the file's dtype by the paths of `parameter_shapes`, such as
        "layers.q_proj.weight" [L, out, in]. The linears of a quantized checkpoint are float32, each
        value times its scale. There is no "lm_head.weight" when the embeddings are tied, whether or
        not the file repeats them.

    Raises:
        UserError: whatever `open_files` refuses, and tensors that are not finite.
    """
    files = open_files(directory)
    return files.config, files.arrays()


def _check_tensor_count(directory: Path, config: PolicyConfig, checkpoint: Checkpoint) -> None:
    """Refuse a config whose tensors would be far too many to list, let alone to hold.

    Raises:
        UserError: the files hold fewer matrices than the config has layers and experts.
    """
    experts = 0 if config.experts is None else config.experts.count * len(config.sparse_layers)
    count = sum(t.shape[0] if t.ndim == 3 else 1 for t in checkpoint.tensors.values())
    if count < config.num_layers + experts:
        raise UserError(
            f"{directory}: holds {count} tensors, too few for the {config.num_layers} layers and "
            f"{experts} experts of its config"
        )


def _check_names(
    directory: Path, config: PolicyConfig, checkpoint: Checkpoint, expected: Mapping[str, Stored]
) -> None:
    head = hf_name("lm_head.weight")
    missing = [name for name in expected if name not in checkpoint.tensors]
    allowed = {head} if config.tie_word_embeddings else set()
    unexpected = [n for n in checkpoint.tensors if n not in expected and n not in allowed]
    faults = []
    if missing:
        faults.append(f"{len(missing)} tensors are missing: {listing(missing)}")
    if unexpected:
        faults.append(f"{len(unexpected)} tensors are unexpected: {listing(unexpected)}")
    if missing == [head]:
        faults.append("if the embeddings are tied, config.json must say tie_word_embeddings: true")
    elif faults:
        faults.append("check that config.json describes these weights")
    if faults:
        raise UserError(f"{directory}: {'; '.join(faults)}")


def _check_shapes_and_dtypes(
    checkpoint: Checkpoint, expected: Mapping[str, Stored], linears: Mapping[str, StoredLinear]
) -> dict[str, np.dtype]:
    """The dtype of each parameter once it is read. Beside quantized layers, which become float32,
    others may be narrower."""
    widened = {place.path for name in linears for place in expected[name].places}
    dtypes: dict[str, np.dtype] = {}
    faults: dict[str, str] = {}
    for name, stored in expected.items():
        tensor, paths = checkpoint.tensors[name], [place.path for place in stored.places]
        dtype, shape = tensor.dtype, linears[name].shape if name in linears else tensor.shape
        if name in linears or (
            widened.intersection(paths) and dtype in _WEIGHT_DTYPES and dtype.itemsize < 4
        ):
            dtype = np.dtype(np.float32)
        if shape != stored.shape:
            faults[name] = f"has shape {list(shape)}, config.json implies {list(stored.shape)}"
        elif dtype not in _WEIGHT_DTYPES:
            faults[name] = (
                f"has dtype {dtype}, and no scale belongs to it; use a bf16, float16 or float32 "
                "checkpoint, or a quantized one whose config.json says how it is stored"
            )
        elif differing := [path for path in paths if dtypes.setdefault(path, dtype) != dtype]:
            faults[name] = f"has dtype {dtype}, earlier layers have {dtypes[differing[0]]}"
    if faults:
        file = checkpoint.files[next(iter(faults))]
        raise UserError(
            f"{file}: tensor {listing([f'{name} {fault}' for name, fault in faults.items()])}"
        )
    return dtypes


def _check_finite(checkpoint: Checkpoint, name: str, tensor: np.ndarray) -> None:
    if bad := count_non_finite(tensor):
        raise UserError(
            f"{checkpoint.files[name]}: tensor {name} holds {bad} non-finite values of "
            f"{tensor.size}; the checkpoint is damaged"
        )


def _check_tied_head(config: PolicyConfig, checkpoint: Checkpoint) -> None:
    head, embedding = hf_name("lm_head.weight"), hf_name("embed_tokens.weight")
    if not config.tie_word_embeddings or head not in checkpoint.tensors:
        return
    if not np.array_equal(checkpoint.tensors[head], checkpoint.tensors[embedding]):
        raise UserError(
            f"{checkpoint.files[head]}: tensor {head} differs from {embedding}, "
            f"but config.json says tie_word_embeddings: true; set it to false or drop the tensor"
        )


def export_policy(
    directory: str | Path,
    config: PolicyConfig,
    arrays: Mapping[str, Stack] | None,
    dtype: str | ExportForm = "bfloat16",
    tokenizer_from: str | Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write the weights, config.json, generation_config.json and the tokenizer's files.

    Everything is written beside its final name first and moved when complete, the weights first: a
    full disk leaves an earlier export in `directory` as it was. Weights of an earlier export, and
    what else says how they are stored, are replaced; other files are not touched.

    Args:
        directory: made when it isn't there.
        config: the policy's config.
        arrays: as `load_policy_arrays` gives them, [L, ...] for layers, any float dtype, or what
            reads like them, one tensor after the other; None: all but the weights is written.
        dtype: "bfloat16" or "float16" (rounded to nearest even), "float32", or what
            `quantized_export.export_form` reads: linears quantized from `arrays` as they are, and
            the rest in bfloat16.
        tokenizer_from: a directory whose tokenizer files, and generation_config.json, are copied
            where they exist.
        shard_bytes: weights beyond this size are split over files of about this size.

    Returns:
        `directory`.

    Raises:
        UserError: arrays that are missing, unexpected or misshapen; a tensor that is not finite,
            before or after the conversion to `dtype`; a dtype that is not exported; a directory
            that cannot be written.
    """
    directory, form = Path(directory), export_form(dtype)
    if form is not None:
        check_form(form, config)
    if arrays is not None:
        _check_parameters(directory, config, arrays)
    generation = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
        "pad_token_id": config.pad_token_id,
    }
    hf_config = config_json(config, _plain_dtype(dtype).name)
    if form is not None:
        hf_config["quantization_config"] = quantization_config(form, config)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".export-", dir=directory) as staging_name:
            staging = Path(staging_name)
            weights = []
            if arrays is not None:
                kinds = export_kinds(config, arrays, dtype)
                tensors = converted_tensors(directory, config, arrays, dtype)
                weights = write_checkpoint(staging, kinds, tensors, shard_bytes)
            _write_json(staging / "config.json", hf_config)
            _write_json(
                staging / "generation_config.json",
                {k: v for k, v in generation.items() if v is not None},
            )
            if tokenizer_from is not None:
                _copy(Path(tokenizer_from), staging)
            for name in sorted(
                os.listdir(staging),
                key=lambda name: (name not in weights, name == INDEX_FILE, name),
            ):
                os.replace(staging / name, directory / name)
            for name in os.listdir(directory):
                if (is_weights_file(name) or name == QUANT_FILE) and name not in weights:
                    os.unlink(directory / name)
    except OSError as error:
        raise UserError(
            f"{directory}: cannot be written ({error.strerror}); choose another place"
        ) from None
    return directory


def lost_in(config: PolicyConfig, flat: Mapping[str, Stack], dtype: str | ExportForm) -> float:
    """Count which part of the float32 values that an export does not quantize it would round.

    Of a model that was trained in float32 nearly all; of one that was widened from 16 bits none.

    Args:
        config, flat, dtype: as of `export_policy`.
    """
    form = export_form(dtype)
    rounded = size = 0
    for location in hf_tensors(config).values():
        if form and form.holds(location):
            continue
        source = flat[location.path][location.index]
        narrow = export_dtype(location, dtype, source.dtype)
        if source.dtype.itemsize > narrow.itemsize:
            with np.errstate(over="ignore"):
                rounded += np.count_nonzero(source.astype(narrow).astype(source.dtype) != source)
        size += source.size
    return rounded / max(size, 1)


def _check_parameters(directory: Path, config: PolicyConfig, flat: Mapping[str, Stack]) -> None:
    shapes = parameter_shapes(config)
    if missing := sorted(shapes.keys() - flat.keys()):
        raise UserError(f"{directory}: not exported; parameters are missing: {listing(missing)}")
    if unexpected := sorted(flat.keys() - shapes.keys()):
        raise UserError(
            f"{directory}: not exported; parameters are unexpected: {listing(unexpected)}"
        )
    for path, shape in shapes.items():
        if flat[path].shape != shape:
            raise UserError(
                f"{directory}: not exported; parameter {path} has shape {list(flat[path].shape)}, "
                f"the config implies {list(shape)}"
            )


def export_kinds(
    config: PolicyConfig, flat: Mapping[str, Stack], dtype: str | ExportForm
) -> Iterator[Kinds]:
    """Say of what kind the tensors of `converted_tensors` are, before any of them is made."""
    form, quantized = export_form(dtype), {}
    for name, location in hf_tensors(config).items():
        made = Kind(export_dtype(location, dtype, flat[location.path].dtype), location.shape)
        if form is None or not form.holds(location):
            yield {name: made}
            continue
        if made not in quantized:
            quantized[made] = quantized_kinds(made.shape, made.dtype, form)
        scale = form.input_scale(location, name.removesuffix(".weight"))
        yield {name + part: kind for part, kind in quantized[made].items()} | {
            name: Kind(x.dtype, x.shape) for name, x in scale.items()
        }


def converted_tensors(
    directory: Path, config: PolicyConfig, flat: Mapping[str, Stack], dtype: str | ExportForm
) -> Iterator[dict[str, np.ndarray]]:
    """Make an export's tensors, one of the policy's at a time: itself, or its quantized values and
    their scales.

    Args:
        directory: named in errors.
        config, flat, dtype: as of `export_policy`, which checks them.

    Raises:
        UserError: a tensor that is not finite, before or after the conversion.
    """
    form = export_form(dtype)
    for name, location in hf_tensors(config).items():
        source = flat[location.path][location.index]
        tensor = _rounded(directory, name, source, export_dtype(location, dtype, source.dtype))
        if form is None or not form.holds(location):
            yield {name: tensor}
            continue
        scale = form.input_scale(location, name.removesuffix(".weight"))
        yield quantized_tensors(name, tensor, form) | scale


def as_read(location: Location, source: np.ndarray, dtype: str | ExportForm) -> np.ndarray:
    """Compute what a reader of an export gets of a tensor, float32.

    Args:
        location: of the tensor.
        source: its values; of one that the form does not quantize, any of them.
        dtype: as of `export_policy`.
    """
    form = export_form(dtype)
    if form and form.holds(location):
        return np.asarray(quantizer(form.format)(source).dequantize())
    with np.errstate(over="ignore"):
        return source.astype(export_dtype(location, dtype, source.dtype)).astype(np.float32)


def export_dtype(location: Location, dtype: str | ExportForm, source: np.dtype) -> np.dtype:
    """Return what a tensor of an export is rounded to.

    One that is quantized keeps its own, and so does a router's bias, which readers want in float32.
    """
    form = export_form(dtype)
    kept = location.path == "layers.router_bias.weight" or (form and form.holds(location))
    return source if kept else _plain_dtype(dtype)


def _plain_dtype(dtype: str | ExportForm) -> np.dtype:
    """Of what is not quantized."""
    return np.dtype("bfloat16" if export_form(dtype) else str(dtype))


def _rounded(directory: Path, name: str, source: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if bad := count_non_finite(source):
        raise UserError(f"{directory}: not exported; tensor {name} holds {bad} non-finite values")
    if source.dtype == dtype:
        return source
    with np.errstate(over="ignore"):  # overflows are counted below
        rounded = source.astype(dtype)
    if bad := count_non_finite(rounded):
        raise UserError(
            f"{directory}: not exported; {bad} values of tensor {name} overflow {dtype}"
        )
    return rounded


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _copy(source: Path, target: Path) -> None:
    for name in (*TOKENIZER_FILES, "generation_config.json"):
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
