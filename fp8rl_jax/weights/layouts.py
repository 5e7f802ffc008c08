"""How a checkpoint stores its linears: the words of config.json -> a `Layout`.

    layout  block          quant_method, and format or quant_algo
    e4m3    rows, columns  fp8 (DeepSeek-V3, Qwen3-FP8); fbgemm_fp8; compressed-tensors
                           float-quantized, naive-quantized; modelopt FP8,
                           FP8_PER_CHANNEL_PER_TOKEN
    mxfp8   1 x 32         compressed-tensors mxfp8-quantized; modelopt MXFP8
    mxfp6   1 x 32         compressed-tensors mxfp6-pack-quantized: e2m3
    mxfp4   1 x 32         compressed-tensors mxfp4-pack-quantized
    nvfp4   1 x 16         compressed-tensors nvfp4-pack-quantized; modelopt NVFP4, W4A16_NVFP4
    int4    1 x group      compressed-tensors pack-quantized, as llm-compressor and Kimi K2 have it

The tensors of a linear are those of compressed-tensors 0.20 and ModelOpt 0.47 (`stored_linears`).
What a later version of a library writes in another format than e4m3 is refused until it has been
compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fp8rl_jax.config.formats import TensorFormat
from fp8rl_jax.errors import UserError
from fp8rl_jax.json_fields import Fields, read_json

Block = tuple[int | None, int | None]
"""(rows, columns) that share a scale; None is all of them."""
BLOCK = (128, 128)
"""Of block FP8 as DeepSeek-V3 has it, and as it is written here."""
_WHOLE: Block = (None, None)
_CHANNEL: Block = (1, None)

LAYOUT_OF = {
    "e4m3": "e4m3",
    "mxfp8": "mxfp8",
    "mxfp8_floor": "mxfp8",
    "mxfp6": "mxfp6",
    "mxfp6_up": "mxfp6",
    "mxfp4": "mxfp4",
    "mxfp4_up": "mxfp4",
    "nvfp4": "nvfp4",
    "nvfp4_four_over_six": "nvfp4",
    "int4": "int4",
}
"""Of an element of a format, the layout whose numbers it has."""

QUANT_FILE = "hf_quant_config.json"
"""ModelOpt's own file beside config.json."""
_KEYS = ("quantization_config", "compression_config")  # the second is compressed-tensors' old one


@dataclass(frozen=True)
class Layout:
    """How the quantized linears of a checkpoint are stored.

    Attributes:
        name: as in the table above.
        block: what shares a scale.
        library: whose names and meanings the tensors of a packed linear have.
    """

    name: str
    block: Block
    library: str = "compressed-tensors"

    @property
    def format(self) -> TensorFormat | None:
        """What a recipe calls it; None where no recipe has such blocks."""
        rows, columns = self.block
        if rows is None or columns is None:
            return None
        return TensorFormat(self.name, (rows, columns))

    def __str__(self) -> str:
        return f"{self.name}, a scale for {in_words(self.block)}"


def in_words(block: Block) -> str:
    """Write a block as "128 x 128", "1 x all"."""
    return " x ".join("all" if side is None else str(side) for side in block)


class CompressedFormat(NamedTuple):
    """What a format of compressed-tensors holds: the layout's name, type and bits of a value, what
    may share a scale, and how many of them where only one number may."""

    layout: str
    type: str
    bits: int
    strategies: tuple[str, ...]
    group: int | None = None


FORMATS = {
    "float-quantized": CompressedFormat(
        "e4m3", "float", 8, ("tensor", "channel", "group", "block")
    ),
    "naive-quantized": CompressedFormat(
        "e4m3", "float", 8, ("tensor", "channel", "group", "block")
    ),
    "mxfp8-quantized": CompressedFormat("mxfp8", "float", 8, ("group",), 32),
    "mxfp6-pack-quantized": CompressedFormat("mxfp6", "float", 6, ("group",), 32),
    "mxfp4-pack-quantized": CompressedFormat("mxfp4", "float", 4, ("group",), 32),
    "nvfp4-pack-quantized": CompressedFormat("nvfp4", "float", 4, ("tensor_group", "group"), 16),
    "pack-quantized": CompressedFormat("int4", "int", 4, ("group", "channel", "tensor")),
}
_ALGORITHMS = {  # of ModelOpt
    "FP8": Layout("e4m3", _WHOLE),
    "FP8_PER_CHANNEL_PER_TOKEN": Layout("e4m3", _CHANNEL),
    "MXFP8": Layout("mxfp8", (1, 32)),
    "NVFP4": Layout("nvfp4", (1, 16), "modelopt"),
    "W4A16_NVFP4": Layout("nvfp4", (1, 16), "modelopt"),
}
VERSIONS = {"compressed-tensors": "0.20.0", "modelopt": "0.47.0"}
"""The newest of each library that its layouts were compared with."""


def read_quantization(directory: str | Path) -> Layout | None:
    """Read how a directory's weights are stored, from config.json or ModelOpt's
    hf_quant_config.json.

    Raises:
        UserError: whatever `parse_quantization` refuses, and two files that differ.
    """
    beside, values = Path(directory) / QUANT_FILE, read_json(Path(directory) / "config.json")
    layout = parse_quantization(values)
    if not beside.is_file():
        return layout
    # its keys are those of config.json's older form
    older = {"quant_method": "modelopt", **read_json(beside)}
    try:
        stated = parse_quantization({"quantization_config": older})
    except UserError as error:
        raise UserError(f"{beside}: {error}") from None
    if any(values.get(key) for key in _KEYS) and layout != stated:
        raise UserError(
            f"{beside}: contradicts the quantization_config of config.json; keep the one that says "
            "how the weights are stored"
        )
    return stated


def parse_quantization(config: dict[str, Any]) -> Layout | None:
    """Read from a config.json's values how its linears are stored.

    Returns:
        The layout; None for a plain checkpoint.

    Raises:
        UserError: another method or format than those above, naming it, a key of it that would
            change the numbers, or a version of a library that is not known yet.
    """
    given = [key for key in _KEYS if config.get(key)]
    if not given:
        return None
    if len(given) > 1 and config[given[0]] != config[given[1]]:
        raise UserError(
            f"{given[0]} and {given[1]} differ; keep the one that says how the weights are stored"
        )
    fields = Fields(config).object(given[0])
    method = fields.data.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        raise _not_read(fields, f"quant_method {method!r}")
    return _METHODS[method](fields)


def _not_read(fields: Fields, what: str) -> UserError:
    return UserError(
        f"{fields.prefix}{what} is not read; use the bf16 or float32 checkpoint, or one in FP8 "
        "(e4m3), MXFP8, MXFP6, MXFP4, NVFP4 or symmetric INT4 "
        f"(quant_method {', '.join(_METHODS)})"
    )


def _one_of(fields: Fields, key: str, default: Any, *others: Any) -> Any:
    """The value of a key that has few; absent or null it is `default`."""
    value = fields.data.get(key)
    if value is not None and value not in (default, *others):
        raise _not_read(fields, f"{key} {value!r}")
    return default if value is None else value


def _block(fields: Fields, key: str) -> Block:
    sizes = fields.integers(key)
    if len(sizes) != 2 or min(sizes) < 1:
        raise UserError(
            f"{fields.prefix}{key} must be two positive sizes, got {fields.data.get(key)!r}"
        )
    return sizes[0], sizes[1]


def _check_version(fields: Fields, library: str, layout: Layout) -> Layout:
    """Refuse what a later version than the known one has written, but in e4m3."""
    known, version = VERSIONS[library], fields.data.get("version")
    if version is None or layout.name == "e4m3":
        return layout
    parts = re.match(r"(\d+)\.(\d+)", version) if isinstance(version, str) else None
    if parts is None:
        raise UserError(
            f"{fields.prefix}version must be a version such as {known}, got {version!r}"
        )
    if [*map(int, parts.groups())] > [*map(int, known.split(".")[:2])]:
        raise UserError(
            f"{fields.prefix}version {version} of {library} is newer than {known}, up to which the "
            f"layout of {layout.name} is known; save the model with {known}, or write {known} here "
            "once it is sure that the layout has not changed"
        )
    return layout


def _of_fp8(fields: Fields) -> Layout:
    _one_of(fields, "fmt", "e4m3")
    _one_of(fields, "expert_dtype", "fp8")
    _one_of(fields, "activation_scheme", "dynamic", "static")
    _one_of(fields, "scale_fmt", "float", "ue8m0")
    if "weight_block_size" not in fields.data:
        return Layout("e4m3", BLOCK)  # as transformers has it; a single number is the tensor's
    given = fields.data["weight_block_size"] is not None
    return Layout("e4m3", _block(fields, "weight_block_size") if given else _WHOLE)


def _of_modelopt(fields: Fields) -> Layout | None:
    producer = fields.object("producer")
    if fields.data.get("quantization") is not None:  # the older form, and hf_quant_config.json's
        fields = fields.object("quantization")
    algorithm = fields.data.get("quant_algo")
    if algorithm is None:
        return None  # of the KV cache alone
    if not isinstance(algorithm, str) or algorithm not in _ALGORITHMS:
        raise _not_read(fields, f"quant_algo {algorithm!r}")
    layout = _ALGORITHMS[algorithm]
    if layout.name != "e4m3":
        groups = fields.object("config_groups")
        weights = [groups.object(name).object("weights") for name in groups.data]
        for each in (fields, *weights):
            _one_of(each, "group_size", layout.block[1])
    return _check_version(producer, "modelopt", layout)


def _of_compressed_tensors(fields: Fields) -> Layout | None:
    _one_of(fields.object("sparsity_config"), "format", "dense")
    if fields.object("transform_config").object("config_groups").data:
        raise _not_read(fields, "transform_config")
    groups, layouts = fields.object("config_groups"), {}
    for name in groups.data:
        group = groups.object(name)
        weights = group.object("weights")
        if not weights.data:
            continue
        container = group if group.data.get("format") is not None else fields
        form = container.data.get("format")
        if not isinstance(form, str) or form not in FORMATS:
            raise _not_read(container, f"format {form!r}")
        layouts[name] = _compressed_layout(weights, FORMATS[form])
    if not layouts:
        return None  # activations or the KV cache alone
    first, *others = layouts
    if differing := [name for name in others if layouts[name] != layouts[first]]:
        one, other = layouts[first], layouts[differing[0]]
        raise UserError(
            f"{groups.prefix}{first} and {differing[0]} store weights in blocks of "
            f"{in_words(one.block)} ({one.name}) and of {in_words(other.block)} ({other.name}); "
            "only one form in a checkpoint is read"
        )
    return _check_version(fields, "compressed-tensors", layouts[first])


def _compressed_layout(weights: Fields, form: CompressedFormat) -> Layout:
    bits, kind = weights.data.get("num_bits", 8), weights.data.get("type")
    if bits != form.bits or kind != form.type:
        raise _not_read(weights, f"type {kind!r} in {bits} bits")
    if not weights.boolean("symmetric", default=True):
        raise _not_read(weights, "symmetric false")
    # the others order columns while they calibrate, and store them as they were
    _one_of(weights, "actorder", None, "weight", "static")
    return Layout(form.layout, _compressed_block(weights, form))


def _compressed_block(weights: Fields, form: CompressedFormat) -> Block:
    if form.group is not None:
        _one_of(weights, "strategy", *form.strategies)
        _one_of(weights, "group_size", form.group)
        return 1, form.group
    group = weights.integer("group_size", default=None)
    implied = "tensor" if group is None else "channel" if group == -1 else "group"
    strategy = _one_of(weights, "strategy", implied, *form.strategies)
    if strategy == "block":
        if old := re.fullmatch(r"(\d+)x(\d+)", str(weights.data.get("block_structure"))):
            weights = Fields({"block_structure": [*map(int, old.groups())]}, weights.prefix)
        return _block(weights, "block_structure")
    if strategy == "group" and (group is None or group < 1):
        raise UserError(f"{weights.prefix}group_size must be positive, got {group}")
    return {"tensor": _WHOLE, "channel": _CHANNEL, "group": (1, group)}[strategy]


_METHODS: dict[str, Callable[[Fields], Layout | None]] = {
    "fp8": _of_fp8,
    "fbgemm_fp8": lambda fields: Layout("e4m3", _CHANNEL),
    "compressed-tensors": _of_compressed_tensors,
    "modelopt": _of_modelopt,
}
