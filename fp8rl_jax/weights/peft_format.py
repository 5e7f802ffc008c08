"""Adapters to and from PEFT's files, adapter_config.json and adapter_model.safetensors.

A linear's two tensors are `base_model.model.<its Hugging Face module>.lora_A.weight` [rank, in] and
`.lora_B.weight` [out, rank], one pair a layer and expert. A norm that is trained in full is one of
PEFT's modules_to_save, `base_model.model.<its module>.weight` as it is. Written and read like files
of peft 0.21.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fp8rl_jax.config.training import LoraConfig
from fp8rl_jax.errors import UserError, listing
from fp8rl_jax.json_fields import Fields, read_json
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.lora import (
    FINAL_NORM,
    Adapters,
    TrainedWeight,
    adapted_tensors,
    build_adapters,
    build_norms,
    trained_norms,
)
from fp8rl_jax.weights.hf_names import hf_tensors
from fp8rl_jax.weights.safetensors_io import count_non_finite, read_safetensors, write_safetensors

_CONFIG_FILE, _WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"

_DTYPES = ("float32", "bfloat16", "float16")
# initial values of A and B; the other ones that PEFT knows change the base, too
_PLAIN_INITS = (True, False, "gaussian", "eva", "orthogonal")


def save_adapters(
    adapters: Adapters,
    directory: str | Path,
    config: PolicyConfig,
    lora: LoraConfig,
    base: str = "",
) -> Path:
    """Write the adapters as a PEFT directory, float32; a failure leaves an earlier one as it was.

    Args:
        adapters: and norms that are trained in full; layers stacked, every shard addressable by
            this process.
        directory: made when it isn't there.
        config: of the base.
        lora: its rank, alpha and scaling.
        base: name or directory of the base model, which PEFT's AutoPeftModel loads; empty: none is
            named.

    Returns:
        `directory`.

    Raises:
        UserError: values that are not finite, or a directory that cannot be written.
    """
    directory, tensors = Path(directory), {}
    for name, path, index in _places(config, tuple(adapters)):
        part = adapters[path]
        weights = (
            {"": part}
            if isinstance(part, TrainedWeight)
            else {".lora_A": part.a, ".lora_B": part.b}
        )
        for suffix, weight in weights.items():
            stack = np.asarray(weight.value)
            tensors[f"{name}{suffix}.weight"] = stack[index].astype(np.float32)
    if bad := [name for name, tensor in tensors.items() if count_non_finite(tensor)]:
        raise UserError(f"{directory}: not written; tensors hold non-finite values: {listing(bad)}")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".export-", dir=directory) as staging:
            write_safetensors(Path(staging) / _WEIGHTS_FILE, tensors)
            text = json.dumps(_peft_config(config, lora, adapters, base), indent=2)
            (Path(staging) / _CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
            for name in (_WEIGHTS_FILE, _CONFIG_FILE):
                os.replace(Path(staging) / name, directory / name)
    except OSError as error:
        raise UserError(
            f"{directory}: cannot be written ({error.strerror}); choose another place"
        ) from None
    return directory


def load_adapters(directory: str | Path, config: PolicyConfig, lora: LoraConfig) -> Adapters:
    """Read the adapters of a PEFT directory, and norms beside them, as float32.

    Args:
        config: of the base.
        lora: what the adapters have to be.

    Raises:
        UserError: files that are missing or damaged; another rank, alpha, scaling or set of linears
            and norms than `lora` says; a kind of adapter other than plain LoRA.
    """
    directory = Path(directory)
    _check_config(directory / _CONFIG_FILE, lora)
    file, prefix = directory / _WEIGHTS_FILE, "base_model.model."
    tensors = dict(read_safetensors(file))
    adapted, norms = adapted_tensors(config, lora), trained_norms(config, lora)
    expected = {
        f"{name}.lora_{letter}.weight" for name, *_ in _places(config, adapted) for letter in "AB"
    } | {f"{name}.weight" for name, *_ in _places(config, norms)}
    for what, names in (
        ("missing", expected - tensors.keys()),
        ("unexpected", tensors.keys() - expected),
    ):
        if names:
            shown = listing(sorted(name.removeprefix(prefix) for name in names))
            raise UserError(
                f"{file}: tensors are {what}: {shown}; lora.targets must name the linears that "
                "the adapter has, and lora.norms the norms"
            )

    def read(path: str, end: str, shape: tuple[int, ...]) -> np.ndarray:
        stack = np.empty(shape, np.float32)
        for name, _, index in _places(config, (path,)):
            full = f"{name}{end}"
            _check_tensor(f"{file}: tensor {full}", tensors[full], stack[index].shape)
            stack[index] = tensors[full]
        return stack

    def factors(path: str, *shapes: tuple[int, ...]) -> list[np.ndarray]:
        ends = (".lora_A.weight", ".lora_B.weight")
        return [read(path, end, shape) for end, shape in zip(ends, shapes, strict=True)]

    return build_adapters(config, lora, factors) | build_norms(
        config, lora, lambda path, shape: read(path, ".weight", shape)
    )


def _places(
    config: PolicyConfig, names: tuple[str, ...]
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(PEFT's name without .lora_A.weight, tensor, index in its stack) of every matrix of the given
    tensors."""
    for hf_name, place in hf_tensors(config).items():
        tensor = place.path.removeprefix("layers.").removesuffix(".weight")
        if tensor in names:
            yield f"base_model.model.{hf_name.removesuffix('.weight')}", tensor, place.index


def _check_tensor(what: str, tensor: np.ndarray, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise UserError(f"{what} has shape {list(tensor.shape)}, expected {list(shape)}")
    if tensor.dtype.name not in _DTYPES:
        raise UserError(f"{what} has dtype {tensor.dtype}; only {', '.join(_DTYPES)} can be read")
    if bad := count_non_finite(tensor):
        raise UserError(
            f"{what} holds {bad} non-finite values of {tensor.size}; the file is damaged"
        )


def _peft_config(
    config: PolicyConfig, lora: LoraConfig, adapters: Adapters, base: str
) -> dict[str, Any]:
    norms = [name for name, part in adapters.items() if isinstance(part, TrainedWeight)]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "use_rslora": lora.rslora,
        "lora_dropout": 0.0,
        "target_modules": _target_modules(config, tuple(adapters.keys() - {*norms})),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": _modules_to_save(norms),
        "use_dora": False,
    }


def _target_modules(config: PolicyConfig, names: tuple[str, ...]) -> list[str]:
    """What picks the adapted linears and no others: the last word of their names where it suffices,
    else whole names."""

    def last(module: str) -> str:
        return module.rsplit(".", 1)[-1]

    adapted = {name.removeprefix("base_model.model.") for name, *_ in _places(config, names)}
    others = {
        last(name.removesuffix(".weight"))
        for name in hf_tensors(config)
        if name.removesuffix(".weight") not in adapted
    }
    return sorted({module if last(module) in others else last(module) for module in adapted})


def _modules_to_save(norms: list[str]) -> list[str] | None:
    """What picks these norms and no others: PEFT takes each module whose name ends so, and the last
    norm's own word ends the others' names, too."""
    return [f"model.{name}" if name == FINAL_NORM else name for name in norms] or None


def _check_config(path: Path, lora: LoraConfig) -> None:
    """Refuses an adapter that is not the plain LoRA that `lora` describes."""
    data = read_json(path)
    fields = Fields(data, f"{path}: ")
    if (kind := data.get("peft_type")) != "LORA":
        raise UserError(f"{path}: peft_type is {kind!r}; only LORA adapters can be read")
    plain = (
        "use_dora",
        "use_qalora",
        "use_bdlora",
        "lora_bias",
        "fan_in_fan_out",
        "rank_pattern",
    )
    plain += (
        "alpha_pattern",
        "layer_replication",
        "target_parameters",
        "trainable_token_indices",
        "alora_invocation_tokens",
    )
    if odd := [key for key in plain if data.get(key)]:
        raise UserError(
            f"{path}: {odd[0]} is set; only plain LoRA, of one rank and scale, can be read"
        )
    saved = data.get("modules_to_save") or []
    if bool(saved) != bool(lora.norms):
        raise UserError(
            f"lora.norms = {json.dumps(lora.norms)}, but the adapter's modules_to_save are "
            f"{json.dumps(saved)} ({path}); name the norms that it has"
        )
    if data.get("bias", "none") != "none":
        raise UserError(
            f"{path}: bias is {data['bias']!r}; only adapters without biases can be read"
        )
    if (init := data.get("init_lora_weights", True)) not in _PLAIN_INITS:
        raise UserError(
            f"{path}: init_lora_weights is {init!r}, which changes the base; only adapters "
            "beside it can be read"
        )
    for key, mine, theirs in (
        ("rank", lora.rank, fields.integer("r")),
        ("alpha", lora.alpha, fields.number("lora_alpha")),
        ("rslora", lora.rslora, fields.boolean("use_rslora")),
    ):
        if mine != theirs:
            raise UserError(
                f"lora.{key} = {json.dumps(mine)}, but the adapter has {json.dumps(theirs)} "
                f"({path}); set it so"
            )
