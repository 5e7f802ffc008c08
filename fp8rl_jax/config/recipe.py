"""Precision is data, not code: a recipe names the number format of every tensor role, in the
rollout and in the trainer.

The model is written once and knows no recipe by name. It asks the recipe for the format of a role
(a linear's weight, its activation, K, V, Q, an output gradient, ...) and the quantizer does the
rest. So the systems that this library reimplements are rows of one table, an ablation is a list of
rows, and a mismatch between rollout and trainer is a difference between two columns that can be
named, measured and removed.

The built-in rows, and the table of what they stand for, are config/recipes.toml. A row of one's own
has the same form, in any TOML file of a run, and says what differs from its base (another row,
built-in or one's own; without one: all in the compute dtype, no correction):

    recipe = "my-fp8"

    [recipes.my-fp8]
    base = "fp8-e2e-kv"
    rollout.weight = "e4m3-128x128-power_of_two"     # a format by its name (config/formats.py) ...
    trainer.weight = "e4m3-128x128-power_of_two"
    output_gradient = { element = "e5m2" }           # ... or a table of what differs in the base's
    first_layers_in_compute = 1                      # and every other field of `Recipe` below
    last_layers_in_compute = 1
    layers."*.down_proj".output_gradient = "compute" # formats of the linears that match a pattern

In Python such a row is `Recipe(...)`, or `recipe("fp8-e2e-kv", "my-fp8",
output_gradient="e5m2-1x128")`; `Recipe.table` writes it back, for `RunConfig.recipes` and so for
the run's config.toml. `fp8rl doctor --recipe NAME` prints a row in full and what each linear of a
model becomes. What no kernel computes is refused with the row's name and field
(precision/check.py).
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from fp8rl_jax.config.correction import PRESETS
from fp8rl_jax.config.formats import (
    COMPUTE,
    FLOAT32,
    MINIFLOATS,
    WIDE,
    WITH_OWN_QUANTIZER,
    ScaleRule,
    TensorFormat,
    parse_format,
)
from fp8rl_jax.config.schema import (
    NONE_TEXT,
    Mismatch,
    at_least,
    convert,
    describe,
    fields_of,
    leaves,
    one_line,
    quoted,
    report,
    show,
    tables,
    unknown_key_hint,
)
from fp8rl_jax.errors import UserError

ATTENTION_ROLES = ("query", "key", "value", "probability")
"""Roles of attention, by their names in `ForwardFormats`."""
_LINEAR = ("weight", "activation")

# the names are data, read when the program starts
_CorrectionName = Literal[tuple(PRESETS)]  # ty: ignore[invalid-type-form]


@dataclass(frozen=True)
class TrainerFormats:
    """The formats of a trainer's forward pass."""

    weight: TensorFormat = COMPUTE
    """Weights of the quantized linears, [out, in]."""
    activation: TensorFormat = COMPUTE
    """Inputs of the quantized linears, [tokens, in]."""
    probability: TensorFormat = field(default=COMPUTE, kw_only=True)
    """Attention's exp(score - largest score of the query), before it is multiplied with V: "e4m3"
    or "e5m2", cast with a factor of 256 that normalization takes out again (FlashAttention-3's FP8
    forward, which vLLM runs). The sum that normalizes stays that of the float32 numbers, and the
    backward pass is that of probabilities that are not cast. On the reference backend alone."""

    def roles(self) -> dict[str, TensorFormat]:
        """The format of every role of a forward pass, whether or not it can be chosen here."""
        return {role: getattr(self, role, COMPUTE) for role in (*_LINEAR, *ATTENTION_ROLES)}


@dataclass(frozen=True)
class ForwardFormats(TrainerFormats):
    """The formats of a rollout's forward pass."""

    query: TensorFormat = COMPUTE
    """Queries after q-norm and rope; quantized where keys are, in the same way: with a calibrated
    scale, or rounded through."""
    key: TensorFormat = COMPUTE
    """Cached keys, after k-norm and rope. An element type without a block ("e4m3") is stored, with
    a calibrated scale. A format with scales of its own (of one row: "e4m3-1x32-power_of_two", or
    one that brings its own quantizer) is simulated: each token's head is rounded through it, the
    cache keeps the compute dtype, and nothing is calibrated."""
    value: TensorFormat = COMPUTE
    """Cached values; as rollout.key, and where that is simulated in any format of the kind. With
    latent attention the latents, and rollout.key is of the rotated key that heads share."""


GradientRounding = Literal["nearest", "stochastic"]
GradientTransform = Literal["none", "hadamard"]
GradientEstimator = Literal["straight_through", "differentiable"]


@dataclass(frozen=True)
class LinearPrecision:
    """What one linear's products are computed in, on one side."""

    weight: TensorFormat = COMPUTE
    activation: TensorFormat = COMPUTE
    output_gradient: TensorFormat = COMPUTE
    saved_activation: TensorFormat = COMPUTE
    gradient_rounding: GradientRounding = "nearest"
    gradient_transform: GradientTransform = "none"
    weight_gradient_estimator: GradientEstimator = "straight_through"


LINEAR_ROLES = (
    "rollout.weight",
    "rollout.activation",
    "trainer.weight",
    "trainer.activation",
    "output_gradient",
    "saved_activation",
)
"""Roles whose format may differ between linears, by their keys in a recipe."""
_BACKWARD = ("output_gradient", "saved_activation")
STATE_ROLES = ("master", "weight_gradient", "first_moment", "second_moment")
"""What a training state keeps of each parameter, by its keys in a recipe."""


@dataclass(frozen=True)
class LayerFormats:
    """Formats of the linears whose names match a pattern, in place of the recipe's.

    Raises:
        UserError: a key that is none of LINEAR_ROLES.
    """

    pattern: str
    """Shell pattern over the names of linears, such as "layers.0.*" or "*.down_proj"."""
    formats: tuple[tuple[str, TensorFormat], ...]
    """(role, format) of the roles that differ."""

    def __post_init__(self) -> None:
        for role, _ in self.formats:
            if role not in LINEAR_ROLES:
                raise UserError(
                    f"layers.{quoted(self.pattern)}: {role} is no role of a linear (known: "
                    f"{', '.join(LINEAR_ROLES)})"
                )


LINEARS = ("*",)
"""Every linear: of embeddings, output head, norms and routers there is none among them."""


@dataclass(frozen=True)
class Recipe:
    """One row of the table: formats on both sides, what is calibrated, which correction it asks
    for.

    Raises:
        UserError: a negative number of layers; a trainer's query, key or value that is quantized;
            a format that a product cannot have, or that a training state cannot be kept in.
    """

    name: str = field(compare=False)
    """Name on the command line. Recipes that differ in it alone are equal, and compile once."""
    rollout: ForwardFormats = ForwardFormats()
    """Formats of the rollout's forward pass."""
    trainer: TrainerFormats = TrainerFormats()
    """Formats of the trainer's forward pass."""
    output_gradient: TensorFormat = COMPUTE
    """Gradients entering a linear's backward products."""
    saved_activation: TensorFormat = COMPUTE
    """Linear inputs kept for the backward pass."""
    gradient_rounding: GradientRounding = "nearest"
    """How output gradients are rounded to their format: to nearest, or up and down at random, right
    in the mean (arXiv 2509.25149 needs that of 4 bits). The draws are a hash of the gradient
    itself."""
    gradient_transform: GradientTransform = "none"
    """What both operands of a weight's gradient go through before they are quantized. hadamard: 16
    tokens are mixed at a time, with signs, so that an outlier is spread over all (arXiv
    2509.25149)."""
    weight_gradient_estimator: GradientEstimator = "straight_through"
    """The derivative that quantizing a weight has. straight_through: 1. differentiable: that of a
    smooth function near the steps of e2m1, 3 at most in the middle between two numbers and 0.2 at
    them (arXiv 2501.17116, section 3.1); of weights in e2m1 alone."""
    master: TensorFormat = FLOAT32
    """What the weights that are trained rest in between updates, which compute in float32. Here and
    in the next three roles a format with scales is of matrices alone: norms and biases, a small
    part of all parameters, stay in float32."""
    master_rounding: GradientRounding = "nearest"
    """How an update rounds a master: to nearest, which loses what is less than half a step, or up
    and down at random, right in the mean."""
    weight_gradient: TensorFormat = FLOAT32
    """What a weight's gradient is kept in from the backward pass to the optimizer, and what the
    replicas of mesh.data exchange. An element type with scales is scaled automatically, so that the
    sum does not overflow (training/gradients.py; arXiv 2310.18313)."""
    first_moment: TensorFormat = FLOAT32
    """What Adam's first moment rests in between updates, rounded to nearest."""
    second_moment: TensorFormat = FLOAT32
    """The same of the second moment."""
    second_moment_rounding: GradientRounding = "stochastic"
    """How it is rounded: an update changes it by less than half a step of few bits, and divides by
    its root. stochastic: right in the mean, and nothing above 0 becomes 0. nearest: as FP8-LM's,
    for 16 bits."""
    quantized: tuple[str, ...] = LINEARS
    """Shell patterns over layer names (layers.3.q_proj) of the linears that take the weight and
    activation formats."""
    excluded: tuple[str, ...] = ()
    """Shell patterns taken out of `quantized` again; one that matches nothing is an error."""
    first_layers_in_compute: float = 0.0
    """Layers at the start of the model whose linears are not quantized, on either side; below 1 the
    part of its layers, rounded to the nearest number of them."""
    last_layers_in_compute: float = 0.0
    """The same at its end."""
    layers: tuple[LayerFormats, ...] = ()
    """Other formats for the linears that match a pattern; of several that match, the later one
    counts. In TOML a table of tables: layers."*.down_proj".output_gradient = "e5m2-1x128". A weight
    in the compute dtype takes its activation and gradients along."""
    weight_source: Literal["compute", "master"] = "compute"
    """What a quantized weight is quantized from: the master rounded to the compute dtype, or the
    float32 master itself, from which updates arrive that are less than half a step of 16 bits.
    "master" only where both sides have the weight in one format, so that both see the same
    numbers."""
    weight_rounding: Literal["nearest", "stochastic"] = "nearest"
    """How both sides round a master to a compute dtype of 16 bits. stochastic: up or down with the
    probabilities that give the master in the mean (arXiv 2010.06192), by a hash of the value, so
    that both sides round alike: updates of less than half a step arrive, with new draws in every
    weight that has moved."""
    kv_granularity: Literal["layer", "head"] = "layer"
    """What shares a scale of Q, K or V in an FP8 cache: all of a layer, or one KV head of it."""
    kv_calibration: Literal["trainer", "update", "rollout"] = "update"
    """Which forward measures amax of Q, K, V for a weight sync: that of the update itself, under
    the weights before it; one of the trainer's under the new weights, on the same tokens; or the
    one that serves, on the next step's training prompts."""
    kv_prompts: int = 0
    """Prompts of a step that the trainer's own forward for it calibrates on, with all their
    completions; 0: all."""
    kv_percentile: float = 99.9
    """Percentile over micro-batch amaxes (not over elements), as in NeMo RL."""
    kv_margin: float = 1.05
    """Head-room factor on the calibrated amax, as in NeMo RL."""
    kv_constants: tuple[float, float, float] | None = None
    """What kv_margin * amax of Q, K and V is divided by for their scales; unset: the format's
    largest value, 448 for e4m3."""
    correction: _CorrectionName = "none"
    """Preset of config/correction.py that rl.correction.method = "recipe" stands for."""
    exact: bool = False
    """A token's log-probability has the same bits in the rollout and in the trainer, whatever else
    is in the batch, however it is padded, chunked, packed or split. Only where both sides have the
    same formats."""

    def __post_init__(self) -> None:
        for key in ("first_layers_in_compute", "last_layers_in_compute"):
            if (value := getattr(self, key)) < 0:
                raise UserError(f"recipe {self.name!r}: {key} must be at least 0, and is {value:g}")
            if value > 1 and value % 1:
                raise UserError(
                    f"recipe {self.name!r}: {key} = {value:g} is neither a number of layers nor, "
                    "below 1, a part of them"
                )
        if isinstance(self.trainer, ForwardFormats):  # a rollout's, given in Python to both sides
            given = self.trainer
            for role in ("query", "key", "value"):
                if given.roles()[role].quantized:
                    raise UserError(
                        f"recipe {self.name!r}: trainer.{role} cannot be quantized: the trainer "
                        "has them in the compute dtype"
                    )
            trainer = TrainerFormats(given.weight, given.activation, probability=given.probability)
            object.__setattr__(self, "trainer", trainer)
        report(*self._misplaced())

    def _misplaced(self) -> Iterator[str]:
        """A line for each role whose format is of another kind of role."""
        computed = {role: self.format_of(role) for role in LINEAR_ROLES}
        computed |= {f"rollout.{role}": fmt for role, fmt in self.rollout.roles().items()}
        computed |= {f"trainer.{role}": fmt for role, fmt in self.trainer.roles().items()}
        for rule in self.layers:
            computed |= {f"layers.{quoted(rule.pattern)}.{r}": fmt for r, fmt in rule.formats}
        for role, fmt in computed.items():
            if fmt.element in WIDE:
                yield (
                    f"recipe {self.name!r}: {role}: {fmt.name} is of what is kept between updates "
                    f"({', '.join(STATE_ROLES)}); a product takes compute or a quantized format"
                )
        for role in STATE_ROLES:
            if not getattr(self, role).quantized:
                yield (
                    f"recipe {self.name!r}: {role}: a training state does not follow the compute "
                    f"dtype; write {', '.join(WIDE)} or a quantized format"
                )

    def of_linear(self, linear: str) -> Recipe:
        """The recipe as it is for one linear, by its name: what `layers` says is in its roles."""
        return self.with_formats(
            *(rule.formats for rule in self.layers if fnmatchcase(linear, rule.pattern))
        )

    def with_formats(self, *changes: Sequence[tuple[str, TensorFormat]]) -> Recipe:
        """The recipe for every linear alike, with other formats in some of LINEAR_ROLES."""
        fields: dict[str, Any] = {"layers": ()}
        for role, fmt in (pair for some in changes for pair in some):
            side, _, last = role.rpartition(".")
            if side:
                fields[side] = replace(fields.get(side, getattr(self, side)), **{last: fmt})
            else:
                fields[role] = fmt
        if fields.keys() == {"layers"}:
            return replace(self, **fields)
        made = replace(self, **fields)
        # a weight that is not quantized takes what is multiplied with it along
        if not made.rollout.weight.quantized:
            made = replace(made, rollout=replace(made.rollout, activation=COMPUTE))
        if not made.trainer.weight.quantized:
            backward = dict.fromkeys(_BACKWARD, COMPUTE)
            trainer = TrainerFormats(probability=made.trainer.probability)
            made = replace(made, trainer=trainer, **backward)
        return made

    def linear(self, side: Literal["rollout", "trainer"]) -> LinearPrecision:
        """What the products of a linear are computed in, where all of them are alike
        (`of_linear`)."""
        formats: TrainerFormats = getattr(self, side)
        if side == "rollout":
            return LinearPrecision(formats.weight, formats.activation)
        return LinearPrecision(
            formats.weight,
            formats.activation,
            self.output_gradient,
            self.saved_activation,
            self.gradient_rounding if self.output_gradient.quantized else "nearest",
            self.gradient_transform if self.output_gradient.quantized else "none",
            self.weight_gradient_estimator,
        )

    def format_of(self, role: str) -> TensorFormat:
        """The format of one of LINEAR_ROLES."""
        side, _, last = role.rpartition(".")
        return getattr(getattr(self, side) if side else self, last)

    @property
    def variants(self) -> tuple[Recipe, ...]:
        """The recipe as it is for linears that no pattern of `layers` matches, and for those of
        each pattern alone."""
        return (self.with_formats(), *(self.with_formats(rule.formats) for rule in self.layers))

    def quantizes(self, side: Literal["rollout", "trainer"]) -> bool:
        """Whether any linear's weight is quantized on one side."""
        return any(getattr(variant, side).weight.quantized for variant in self.variants)

    @property
    def quantizes_linears(self) -> bool:
        return self.quantizes("rollout") or self.quantizes("trainer")

    @property
    def shares_weights(self) -> bool:
        """Whether both sides have any linear's weight in one quantized format."""
        pairs = ((variant.rollout.weight, variant.trainer.weight) for variant in self.variants)
        return any(one.quantized and one == other for one, other in pairs)

    @property
    def quantizes_cache(self) -> bool:
        """Whether the KV cache is stored in a format whose scales are calibrated."""
        heads = self.rollout.query, self.rollout.key, self.rollout.value
        return any(fmt.calibrated for fmt in heads)

    @property
    def quantizes_attention(self) -> bool:
        """Whether anything of attention is quantized, calibrated or not."""
        roles = self.rollout.roles()
        formats = (self.trainer.probability, *(roles[role] for role in ATTENTION_ROLES))
        return any(fmt.quantized for fmt in formats)

    def table(self, full: bool = False) -> dict[str, Any]:
        """The row as TOML has it, without its name: `RunConfig(recipe=row.name, recipes={row.name:
        row.table()})`.

        Args:
            full: every field; default: those that differ from a row without quantization, such as
                bf16.
        """
        return _table(self, Recipe(self.name), full)


def _output_gradient(recipe: Recipe, element: str) -> TensorFormat:
    """The format that precision.output_gradient stands for in a recipe."""
    if not recipe.quantizes("trainer"):
        raise UserError(
            f"precision.output_gradient: the linears of recipe {recipe.name!r} are not trained in "
            "FP8"
        )
    if element == "compute":
        return COMPUTE
    # the blocks of a format with its own quantizer are part of what its name means
    if element in WITH_OWN_QUANTIZER and element not in MINIFLOATS:
        return parse_format(element)
    like = recipe.output_gradient
    try:
        return replace(like if like.quantized else recipe.trainer.activation, element=element)
    except UserError as error:
        raise UserError(f"precision.output_gradient: {error}") from None


KV_RULES = {
    "nemo": {"kv_percentile": 99.9, "kv_margin": 1.05, "kv_constants": None},
    # vLLM's Q_SCALE_CONSTANT, K_SCALE_CONSTANT and V_SCALE_CONSTANT, which verl's rollout goes by
    # (verl pull request 4435)
    "verl": {"kv_percentile": 100.0, "kv_margin": 1.0, "kv_constants": (200.0, 200.0, 100.0)},
}
"""Rules from the amax of Q, K and V to their scales, by whose they are."""


def _with_scales(recipe: Recipe, side: str, scale: str | None, block: int | None = None) -> Recipe:
    """The recipe with another scale rule or block in every role of one side ("rollout", "trainer")
    that is quantized in blocks; the backward's roles are the trainer's."""

    def change(fmt: TensorFormat) -> TensorFormat:
        if not fmt.quantized or fmt.block is None:
            return fmt
        shape = fmt.block if block is None else tuple(1 if n == 1 else block for n in fmt.block)
        return replace(fmt, scale=scale or fmt.scale, block=shape)

    formats: TrainerFormats = getattr(recipe, side)
    changed: dict[str, Any] = {
        side: replace(formats, weight=change(formats.weight), activation=change(formats.activation))
    }
    roles = [role for role in LINEAR_ROLES if role.startswith(f"{side}.")]
    if side == "trainer":
        roles += _BACKWARD
        changed |= {role: change(getattr(recipe, role)) for role in _BACKWARD}
    changed["layers"] = tuple(
        LayerFormats(
            rule.pattern,
            tuple((role, change(fmt) if role in roles else fmt) for role, fmt in rule.formats),
        )
        for rule in recipe.layers
    )
    return replace(recipe, **changed)


def recipe(base: str | Recipe, name: str | None = None, **fields: Any) -> Recipe:
    """A recipe like `base`, in which some fields are others.

        changed = {"rollout.weight": "e4m3-64x64", "output_gradient": "e5m2-1x128"}
        recipe("fp8-rl", "mine", kv_margin=1.1, **changed)

    Args:
        base: a built-in recipe's name, or a recipe.
        name: of the new one; None: as the base's.
        fields: of `Recipe`, by dotted key; a format as its name, a `TensorFormat`, or a table of
            what differs in it; `rollout` and `trainer` as tables of such, or `ForwardFormats` and
            `TrainerFormats`.

    Raises:
        UserError: an unknown base; a line for each unknown field and each value that does not fit.
    """
    made = get_recipe(base) if isinstance(base, str) else base
    made = replace(made, name=made.name if name is None else name)
    faults: list[str] = []
    for pair in fields.items():
        made = _over(made, _nested([pair]), f"recipe {made.name!r}: ", "", faults)
    report(*map(one_line, faults))
    return made


def read_rows(rows: dict[str, Any], known: dict[str, Recipe]) -> dict[str, Recipe]:
    """The recipes of a table of rows, as TOML has it.

    Args:
        rows: {name: {field: value}}; a `base` is a name of `known` or of another row.
        known: recipes that are there already.

    Raises:
        UserError: a line for each fault, by its key in the file: recipes.NAME.FIELD.
    """
    faults: list[str] = []
    made: dict[str, Recipe] = {}

    def make(name: str, above: tuple[str, ...]) -> Recipe:
        if name in known:
            return known[name]
        if name in made:
            return made[name]
        base = Recipe(name)
        if name in above:
            circle = above[above.index(name) :]
            first = circle.index(min(circle))
            circle = (*circle[first:], *circle[:first], circle[first])
            faults.append(
                f"recipes.{quoted(circle[0])}.base: the bases go in a circle, {' -> '.join(circle)}"
            )
            return base
        row, prefix = rows[name], f"recipes.{quoted(name)}."
        if not isinstance(row, dict):
            faults.append(f"{prefix[:-1]}: expected a table, got {show(row)}")
            row = {}
        parent = row.get("base")
        if isinstance(parent, str) and (parent in known or parent in rows):
            base = make(parent, (*above, name))
        elif isinstance(parent, str):
            faults.append(f"{prefix}base: {_unknown(parent, [*known, *rows])}")
        elif parent is not None:
            faults.append(f"{prefix}base: expected a string, got {show(parent)}")
        values = {key: value for key, value in row.items() if key != "base"}
        made[name] = _over(replace(base, name=name), values, prefix, "", faults)
        return made[name]

    for name in rows:
        if name in known:
            faults.append(
                f"recipes.{quoted(name)}: is built in; give the row another name, and base = "
                f'"{name}"'
            )
        elif not _NAME.fullmatch(name):
            faults.append(
                f"recipes.{quoted(name)}: a name is of letters, digits, dots, dashes and "
                "underscores"
            )
        make(name, ())
    report(*map(one_line, faults))
    return {name: made[name] for name in rows}


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # a run's directory may be called so


def _over(node: Any, values: dict[str, Any], prefix: str, path: str, faults: list[str]) -> Any:
    """A recipe, or a part of one, with the values of a table over it; what does not fit gets a line
    in `faults`.

    Args:
        prefix: what a line begins with.
        path: dotted key of `node` in the recipe, with a dot at its end.
    """
    changes = {}
    for name, value in values.items():
        key, annotation = path + quoted(name), fields_of(type(node)).get(name)
        if annotation is None or key == "name":
            known = [
                "base",
                *(leaf for leaf, _ in leaves(Recipe) if leaf != "name"),
                *tables(Recipe),
            ]
            faults.append(f"{prefix}{key}: unknown key{unknown_key_hint(key, known)}")
        elif name == "layers" and isinstance(value, dict):
            changes[name] = _layers(node, value, prefix, faults)
        elif dataclasses.is_dataclass(annotation) and isinstance(value, annotation):
            changes[name] = value
        elif dataclasses.is_dataclass(annotation) and isinstance(value, dict):
            changes[name] = _over(getattr(node, name), value, prefix, f"{key}.", faults)
        elif annotation is TensorFormat and isinstance(value, str):
            try:
                changes[name] = parse_format(value)
            except UserError as error:
                faults.append(f"{prefix}{key}: {error}")
        else:
            try:
                changes[name] = convert(value, annotation)
            except Mismatch:
                wanted = (
                    "the name of a format, or a table"
                    if annotation is TensorFormat
                    else describe(annotation)
                )
                faults.append(f"{prefix}{key}: expected {wanted}, got {show(value)}")
    try:
        return replace(node, **changes)
    except UserError as error:
        faults.append(f"{prefix}{path[:-1]}: {error}" if path else str(error))
        return node


def _layers(
    recipe: Recipe, rules: dict[str, Any], prefix: str, faults: list[str]
) -> tuple[LayerFormats, ...]:
    """The recipe's `layers` with those of a table {pattern: {role: format}} over them; a format
    that is a table says what differs in the format that the pattern had."""
    found = {rule.pattern: rule for rule in recipe.layers}
    for pattern, values in rules.items():
        path = f"layers.{quoted(pattern)}"
        if not isinstance(values, dict):
            faults.append(f"{prefix}{path}: expected a table, got {show(values)}")
            continue
        before = recipe.with_formats(found[pattern].formats) if pattern in found else recipe
        known: dict[str, Any] = {}
        for key, value in _flat(values):
            if key in LINEAR_ROLES:
                known[key] = value
            else:
                hint = unknown_key_hint(key, [*LINEAR_ROLES])
                faults.append(f"{prefix}{path}.{key}: unknown key{hint}")
        for role, value in known.items():
            *side, last = role.split(".")
            table = {side[0]: {last: value}} if side else {last: value}
            before = _over(before, table, f"{prefix}{path}.", "", faults)
        roles = dict(found[pattern].formats if pattern in found else ()) | known
        formats = tuple((role, before.format_of(role)) for role in LINEAR_ROLES if role in roles)
        found[pattern] = LayerFormats(pattern, formats)
    return tuple(found.values())


def _flat(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted role, value) of a table of formats: what stands under rollout and trainer is one
    deeper."""
    for key, value in table.items():
        if not prefix and key in ("rollout", "trainer") and isinstance(value, dict):
            yield from _flat(value, f"{key}.")
        else:
            yield prefix + key, value


def _table(node: Any, default: Any, full: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in fields_of(type(node)):
        value, standard = getattr(node, name), getattr(default, name)
        if name == "name" or (value == standard and not full):
            continue
        if name == "layers":
            found[name] = {
                rule.pattern: _nested((role, fmt.name) for role, fmt in rule.formats)
                for rule in value
            }
        elif isinstance(value, TensorFormat):
            found[name] = value.name
        elif dataclasses.is_dataclass(value):
            found[name] = _table(value, standard, full)
        else:
            found[name] = (
                NONE_TEXT if value is None else list(value) if isinstance(value, tuple) else value
            )
    return found


def _nested(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """A table of dotted keys as tables in a table."""
    table: dict[str, Any] = {}
    for key, value in pairs:
        *parents, last = key.split(".")
        inner = table
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value
    return table


def _unknown(name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown name {name!r}{hint} (known: {', '.join(known)})"


RECIPES: dict[str, Recipe] = read_rows(
    tomllib.loads(Path(__file__).with_name("recipes.toml").read_text(encoding="utf-8"))["recipes"],
    {},
)
"""The built-in recipes."""


@dataclass(frozen=True)
class SideScales:
    """Scales of one side of the recipe alone. What both sides quantize they usually quantize alike:
    float32 scales in one and powers of two (UE8M0) in the other, DeepGEMM's default on some GPUs,
    are a mismatch of their own, which a run warns of and `fp8rl compare` shows."""

    scale: ScaleRule | None = None
    """Scale rule of the side's block-quantized roles; unset: precision.scale, or the recipe's."""
    block: int | None = None
    """Side of its blocks: weights in blocks of block x block, activations and gradients in groups
    of 1 x block; unset: the recipe's, 128 in all built-in ones. Hopper's kernels have 128."""


@dataclass(frozen=True)
class PrecisionConfig:
    """Changes to the named recipe: what is varied most, as flags. A row of [recipes.NAME] sets any
    field."""

    scale: ScaleRule | None = None
    """Scale rule of every block-quantized role, on both sides; unset: the recipe's."""
    rollout: SideScales = field(default_factory=SideScales)
    trainer: SideScales = field(default_factory=SideScales)
    output_gradient: str | None = None
    """Format of the gradients that enter a linear's backward products, where the trainer's linears
    are FP8: "compute"; an element type in the recipe's blocks, "e4m3", "e5m2" (the hybrid of verl's
    recipe), "e3m2" or one that was registered (config.formats); or what has a quantizer of its own
    in its usual blocks, such as "mxfp8" in 1x32 and "nvfp4" in 1x16. Other blocks are
    precision.trainer.block, or [recipes.NAME]. Unset: the recipe's."""
    master: str | None = None
    """Format that the weights rest in between updates, by its name, such as
    "float16-power_of_two"; unset: the recipe's, float32 in most built-in ones."""
    weight_gradient: str | None = None
    """The same of their gradients on the way to the optimizer and between replicas."""
    first_moment: str | None = None
    """The same of Adam's first moment, such as "bfloat16" or "e4m3-1x128"."""
    second_moment: str | None = None
    """The same of the second moment."""
    excluded: tuple[str, ...] = ()
    """More layers to keep in the compute dtype, as shell patterns such as "layers.0.*"."""
    first_layers_in_compute: float = 0.0
    """Layers at the start of the model whose linears stay in the compute dtype, in the rollout and
    the trainer alike (NeMo RL's num_first_layers_in_bf16), or below 1 the part of them; 0: the
    recipe's number, none in all built-in ones but nvfp4 and mxfp4. Their part of an FP8 cache stays
    FP8."""
    last_layers_in_compute: float = 0.0
    """The same at the end of the model (num_last_layers_in_bf16)."""
    weight_source: Literal["compute", "master"] | None = None
    """What a quantized weight is quantized from: the master rounded to the compute dtype, or the
    float32 master itself, where both sides have it in one format; unset: the recipe's."""
    weight_rounding: Literal["nearest", "stochastic"] | None = None
    """How both sides round a master to a compute dtype of 16 bits; unset: the recipe's. stochastic
    is in place of model.dither."""
    kv_calibration: Literal["trainer", "update", "rollout"] | None = None
    """Which forward calibrates the KV scales of an FP8 cache; unset: the recipe's. trainer: one of
    the trainer's under the new weights, on the step's prompts and completions (NeMo RL). update:
    the update's own, on the same tokens under the weights before it, which costs next to nothing
    (delayed scaling by one update, as in Transformer Engine). rollout: the forward that serves, on
    the next step's training prompts (vLLM's first forward after a sync, in verl)."""
    kv_rule: Literal["nemo", "verl"] | None = None
    """From amax to KV scale; unset: the recipe's, which is nemo. nemo: the 99.9th percentile of the
    micro-batches' amaxes, times 1.05 / 448. verl: amax / 200 for Q and K, amax / 100 for V, vLLM's
    constants; with kv_calibration = "rollout", verl's way."""
    kv_prompts: int | None = None
    """Prompts of a step, evenly spread over it, that kv_calibration = "trainer" measures, with all
    their completions; fewer cost less and may miss the largest value (fp8/sat_frac_k says so).
    0: all; unset: the recipe's."""
    exact: Literal["auto", True, False] = "auto"
    """Log-probabilities of rollout and trainer that are equal bit for bit: mismatch and importance
    weights are then exactly 0 and 1. For recipes with one precision flow (bf16, jet-rl, fp8-e2e,
    infir2, mxfp8, mxfp4, nvfp4, nvfp4-rl, int4-qat, fp4, fp8-lm-*). auto: where that costs nothing,
    on one CPU device, and kept when the run resumes; not of `fp8rl pretrain`, which samples
    nothing. true: elsewhere, too; with backend = "hopper" on one GPU and one sequence a row, with
    "reference" on all devices and meshes, several times slower. A run in which a bit differs all
    the same stops under true; under auto it says so and goes on."""
    backend: Literal["auto", "reference", "cpu", "hopper"] = "auto"
    """Kernels: plain XLA, C kernels for one CPU device (they need a C compiler), Hopper's Pallas
    kernels; auto: Hopper's where there is such a GPU, each if its self-test at first use passed
    (`fp8rl doctor`), C kernels where they run, else plain XLA."""


def get_recipe(
    name: str, changes: PrecisionConfig | None = None, rows: dict[str, Any] | None = None
) -> Recipe:
    """The named recipe, with the run's changes applied.

    Args:
        rows: of one's own, beside the built-in ones, as `read_rows` takes them.

    Raises:
        UserError: the name is unknown, a row has faults, or a change asks for something that the
            recipe has no place for.
    """
    known = RECIPES | read_rows(rows or {}, RECIPES)
    if name not in known:
        raise UserError(f"recipe: {_unknown(name, [*known])}")
    recipe, changes = known[name], changes or PrecisionConfig()
    if changes.output_gradient is not None:
        recipe = replace(recipe, output_gradient=_output_gradient(recipe, changes.output_gradient))
    for side in ("rollout", "trainer"):
        own: SideScales = getattr(changes, side)
        for key, value in vars(own).items():
            if value is not None and not recipe.quantizes(side):
                raise UserError(
                    f"precision.{side}.{key}: recipe {name!r} quantizes no linear in the {side}"
                )
        if own.block is not None:
            report(at_least(f"precision.{side}.block", own.block, 2))
        recipe = _with_scales(recipe, side, own.scale or changes.scale, own.block)
    kept = {role: text for role in STATE_ROLES if (text := getattr(changes, role)) is not None}
    faults: list[str] = []
    recipe = _over(recipe, kept, "precision.", "", faults)
    report(*faults)
    for key in ("excluded", "first_layers_in_compute", "last_layers_in_compute"):
        if getattr(changes, key) and not recipe.quantizes_linears:
            raise UserError(
                f"precision.{key}: recipe {name!r} quantizes no linear layer, so there is "
                "nothing to exclude"
            )
    ends = {
        key: getattr(changes, key) for key in ("first_layers_in_compute", "last_layers_in_compute")
    }
    report(*(at_least(f"precision.{key}", layers, 0) for key, layers in ends.items()))
    recipe = replace(recipe, **{key: layers for key, layers in ends.items() if layers})
    if changes.exact is True:
        recipe = replace(recipe, exact=True)
    if changes.weight_rounding is not None:
        recipe = replace(recipe, weight_rounding=changes.weight_rounding)
    if changes.weight_source is not None:
        if not recipe.quantizes_linears:
            raise UserError(f"precision.weight_source: recipe {name!r} quantizes no linear layer")
        recipe = replace(recipe, weight_source=changes.weight_source)
    for key in ("kv_calibration", "kv_rule", "kv_prompts"):
        if getattr(changes, key) is not None and not recipe.quantizes_cache:
            raise UserError(
                f"precision.{key}: recipe {name!r} has no queries, keys or values of one scale for "
                "the whole tensor (e4m3, e5m2), so there is nothing to calibrate"
            )
    if changes.kv_calibration is not None:
        recipe = replace(recipe, kv_calibration=changes.kv_calibration)
    if changes.kv_prompts is not None:
        report(at_least("precision.kv_prompts", changes.kv_prompts, 0))
        recipe = replace(recipe, kv_prompts=changes.kv_prompts)
    if changes.kv_rule is not None:
        recipe = replace(recipe, **KV_RULES[changes.kv_rule])
    return replace(recipe, excluded=recipe.excluded + tuple(changes.excluded))


__all__ = [
    "COMPUTE",
    "KV_RULES",
    "RECIPES",
    "ATTENTION_ROLES",
    "LINEAR_ROLES",
    "STATE_ROLES",
    "ForwardFormats",
    "LayerFormats",
    "PrecisionConfig",
    "Recipe",
    "SideScales",
    "TensorFormat",
    "TrainerFormats",
    "get_recipe",
    "read_rows",
    "recipe",
]
