"""Precision is data, not code: a recipe names the number format of every tensor role, in the rollout and in the trainer.

The model is written once and knows no recipe by name. It asks the recipe for the format of a role (a linear's weight, its
activation, K, V, Q, an output gradient, ...) and the quantizer does the rest. So the systems that this library reimplements
are rows of one table, an ablation is a list of rows, and a mismatch between rollout and trainer is a difference between two
columns that can be named, measured and removed.

    recipe        trainer linears    rollout linears   KV cache    correction   stands for
    bf16          compute            compute           compute     none         the baseline
    fp8-rollout   compute            W8A8 block        compute     token TIS    FP8-RL, linears only
    fp8-kv        compute            compute           e4m3        token TIS    FP8-RL, KV cache and attention only
    fp8-rl        compute            W8A8 block        e4m3        token TIS    FP8-RL (arXiv 2601.18150), all of it
    fp8-e2e       W8A8 block, G e4m3 W8A8 block        compute     nemo_is      NeMo RL, FP8 in generation and training
    fp8-e2e-kv    W8A8 block, G e4m3 W8A8 block        e4m3        nemo_is      NeMo RL, FP8 KV cache and attention too
    jet-rl        W8A8 block, G e4m3 W8A8 block        compute     none         Jet-RL (arXiv 2601.14243), one flow
    infir2        as jet-rl, UE8M0   the same, UE8M0   compute     none         InfiR2 (arXiv 2509.22536)

"compute" means: not quantized, kept in the run's compute dtype (bfloat16; float16 or float32 on request). W8A8 block is
DeepSeek-V3's layout: weights e4m3 in 128x128 blocks, activations e4m3 in 1x128 groups along the contraction. G is the output
gradient, in 1x128 groups; where the trainer's linears are FP8, what they keep for the backward is FP8 too. UE8M0: scales are
powers of two. In every row embeddings, norms, output head, router and softmax probabilities stay in the compute dtype or above.

fp8-e2e and jet-rl are one flow: the formats of all roles are the same, and only the correction tells them apart. NeMo RL's FP8
recipes weight tokens by importance sampling without truncation (nemo_is); Jet-RL needs none, because rollout and trainer
quantize alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Literal

from fp8rl_jax.config.checks import at_least, report
from fp8rl_jax.config.presets import PRESETS
from fp8rl_jax.errors import UserError

FormatName = Literal["compute", "e4m3", "e5m2", "e2m1"]
CorrectionName = Literal[tuple(PRESETS)]  # type: ignore[valid-type]


@dataclass(frozen=True)
class TensorFormat:
    """How the values of one tensor role are stored and multiplied."""

    format: FormatName = "compute"
    """Element format; "compute" is the run's compute dtype, that is: not quantized."""
    block: tuple[int, int] | None = None
    """(rows, columns) that share one scale; None: one scale for the whole tensor."""
    scale: Literal["float32", "power_of_two"] = "float32"
    """Scale values: amax / max as it is, or rounded up to a power of two (UE8M0)."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """Rounding of the elements."""
    transform: Literal["none", "hadamard"] = "none"
    """Rotation applied before quantization."""

    @property
    def quantized(self) -> bool:
        return self.format != "compute"


COMPUTE = TensorFormat()
BLOCK_WEIGHT = TensorFormat("e4m3", (128, 128))
GROUP_ACTIVATION = TensorFormat("e4m3", (1, 128))
PER_TENSOR = TensorFormat("e4m3", None)


@dataclass(frozen=True)
class ForwardFormats:
    """The formats of one forward pass: the rollout has one, the trainer has one."""

    weight: TensorFormat = COMPUTE
    """Weights of the quantized linears, [out, in]."""
    activation: TensorFormat = COMPUTE
    """Inputs of the quantized linears, [tokens, in]."""
    query: TensorFormat = COMPUTE
    """Queries after q-norm and rope."""
    key: TensorFormat = COMPUTE
    """Cached keys, after k-norm and rope."""
    value: TensorFormat = COMPUTE
    """Cached values."""
    probability: TensorFormat = COMPUTE
    """Softmax probabilities as an operand of the PV product."""


LINEARS = ("*.q_proj", "*.k_proj", "*.v_proj", "*.o_proj", "*.gate_proj", "*.up_proj", "*.down_proj")


@dataclass(frozen=True)
class Recipe:
    """One row of the table: formats on both sides, what is calibrated, which correction it asks for."""

    name: str
    """Name on the command line."""
    rollout: ForwardFormats = ForwardFormats()
    """Formats of the rollout's forward pass."""
    trainer: ForwardFormats = ForwardFormats()
    """Formats of the trainer's forward pass."""
    output_gradient: TensorFormat = COMPUTE
    """Gradients entering a linear's backward products."""
    saved_activation: TensorFormat = COMPUTE
    """Linear inputs kept for the backward pass."""
    optimizer_moment: TensorFormat = COMPUTE
    """First and second moments of the optimizer."""
    quantized: tuple[str, ...] = LINEARS
    """Shell patterns over layer names (layers.3.q_proj) of the linears that take the weight and activation formats."""
    excluded: tuple[str, ...] = ()
    """Shell patterns taken out of `quantized` again; one that matches nothing is an error."""
    first_layers_in_compute: int = 0
    """Layers at the start of the model whose linears are not quantized, on either side."""
    last_layers_in_compute: int = 0
    """Layers at its end whose linears are not quantized, on either side."""
    kv_calibration: Literal["trainer", "rollout"] = "trainer"
    """Who measures amax of Q, K, V at a weight sync: the trainer on its step's tokens, or the forward that serves, on the next
    step's training prompts."""
    kv_percentile: float = 99.9
    """Percentile over micro-batch amaxes (not over elements), as in NeMo RL."""
    kv_margin: float = 1.05
    """Head-room factor on the calibrated amax, as in NeMo RL."""
    kv_constants: tuple[float, float, float] | None = None
    """What kv_margin * amax of Q, K and V is divided by for their scales; unset: the format's largest value, 448 for e4m3."""
    correction: CorrectionName = "none"
    """Preset of config/presets.py that rl.correction.method = "recipe" stands for."""
    exact: bool = False
    """A token's log-probability has the same bits in the rollout and in the trainer, whatever else is in the batch, however it is
    padded, chunked, packed or split. Only where both sides have the same formats, and on the reference backend."""

    @property
    def quantizes_linears(self) -> bool:
        return self.rollout.weight.quantized or self.trainer.weight.quantized

    @property
    def quantizes_cache(self) -> bool:
        return self.rollout.key.quantized or self.rollout.value.quantized or self.rollout.query.quantized


W8A8 = ForwardFormats(weight=BLOCK_WEIGHT, activation=GROUP_ACTIVATION)
KV8 = ForwardFormats(query=PER_TENSOR, key=PER_TENSOR, value=PER_TENSOR)
W8A8_KV8 = replace(W8A8, query=PER_TENSOR, key=PER_TENSOR, value=PER_TENSOR)
TRAINED_FP8 = {"trainer": W8A8, "output_gradient": GROUP_ACTIVATION, "saved_activation": GROUP_ACTIVATION}


KV_RULES = {
    "nemo": {"kv_percentile": 99.9, "kv_margin": 1.05, "kv_constants": None},
    # vLLM's Q_SCALE_CONSTANT, K_SCALE_CONSTANT and V_SCALE_CONSTANT, which verl's rollout goes by (verl pull request 4435)
    "verl": {"kv_percentile": 100.0, "kv_margin": 1.0, "kv_constants": (200.0, 200.0, 100.0)},
}
"""Rules from the amax of Q, K and V to their scales, by whose they are."""


def _with_scales(recipe: Recipe, side: str, scale: str | None, block: int | None = None) -> Recipe:
    """The recipe with another scale rule or block in every role of one side ("rollout", "trainer") that is quantized in blocks;
    the backward's roles are the trainer's."""

    def change(fmt: TensorFormat) -> TensorFormat:
        if not fmt.quantized or fmt.block is None:
            return fmt
        shape = fmt.block if block is None else tuple(1 if n == 1 else block for n in fmt.block)
        return replace(fmt, scale=scale or fmt.scale, block=shape)

    formats: ForwardFormats = getattr(recipe, side)
    changed = {side: replace(formats, weight=change(formats.weight), activation=change(formats.activation))}
    if side == "trainer":
        changed |= {role: change(getattr(recipe, role)) for role in ("output_gradient", "saved_activation")}
    return replace(recipe, **changed)


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("bf16"),
        Recipe("fp8-rollout", rollout=W8A8, correction="token_tis"),
        Recipe("fp8-kv", rollout=KV8, correction="token_tis"),
        Recipe("fp8-rl", rollout=W8A8_KV8, correction="token_tis"),
        Recipe("fp8-e2e", rollout=W8A8, correction="nemo_is", **TRAINED_FP8),
        Recipe("fp8-e2e-kv", rollout=W8A8_KV8, correction="nemo_is", **TRAINED_FP8),
        Recipe("jet-rl", rollout=W8A8, **TRAINED_FP8),
    )
}
RECIPES["infir2"] = replace(
    _with_scales(_with_scales(RECIPES["jet-rl"], "rollout", "power_of_two"), "trainer", "power_of_two"), name="infir2"
)


@dataclass(frozen=True)
class SideScales:
    """Scales of one side of the recipe alone. What both sides quantize they usually quantize alike: float32 scales in one
    and powers of two (UE8M0) in the other, DeepGEMM's default on some GPUs, are a mismatch of their own, which a run warns of and
    `fp8rl compare` shows."""

    scale: Literal["float32", "power_of_two"] | None = None
    """Scale rule of the side's block-quantized roles; unset: precision.scale, or the recipe's."""
    block: int | None = None
    """Side of its blocks: weights in blocks of block x block, activations and gradients in groups of 1 x block; unset: the
    recipe's, 128. Hopper's kernels have 128."""


@dataclass(frozen=True)
class PrecisionConfig:
    """Changes to the named recipe."""

    scale: Literal["float32", "power_of_two"] | None = None
    """Scale rule of every block-quantized role, on both sides; unset: the recipe's."""
    rollout: SideScales = field(default_factory=SideScales)
    trainer: SideScales = field(default_factory=SideScales)
    output_gradient: Literal["compute", "e4m3", "e5m2"] | None = None
    """Format of the gradients that enter a linear's backward products, where the trainer's linears are FP8; "e5m2" is the
    hybrid of verl's recipe. Unset: the recipe's."""
    excluded: tuple[str, ...] = ()
    """More layers to keep in the compute dtype, as shell patterns such as "layers.0.*"."""
    first_layers_in_compute: int = 0
    """Layers at the start of the model whose linears stay in the compute dtype, in the rollout and the trainer alike (NeMo RL's
    num_first_layers_in_bf16). Their part of an FP8 cache stays FP8."""
    last_layers_in_compute: int = 0
    """The same at the end of the model (num_last_layers_in_bf16)."""
    kv_calibration: Literal["trainer", "rollout"] | None = None
    """Who calibrates the KV scales of an FP8 cache; unset: the recipe's. trainer: the trainer's forward, on the step's prompts
    and completions (NeMo RL). rollout: the forward that serves, on the next step's training prompts (vLLM's first forward after
    a sync, in verl)."""
    kv_rule: Literal["nemo", "verl"] | None = None
    """From amax to KV scale; unset: the recipe's, which is nemo. nemo: the 99.9th percentile of the micro-batches' amaxes, times
    1.05 / 448. verl: amax / 200 for Q and K, amax / 100 for V, vLLM's constants; with kv_calibration = "rollout", verl's way."""
    exact: bool = False
    """Log-probabilities of rollout and trainer that are equal bit for bit: mismatch and importance weights are then exactly 0
    and 1. For recipes with one precision flow (bf16, jet-rl, infir2, fp8-e2e), on the reference backend; sums are made in
    float64, so it costs time."""
    backend: Literal["auto", "reference", "hopper"] = "auto"
    """Kernels: plain XLA, Hopper's Pallas kernels, or the best that the device has."""


def get_recipe(name: str, changes: PrecisionConfig | None = None) -> Recipe:
    """The named recipe, with the run's changes applied.

    Raises:
        UserError: the name is unknown, or a change asks for something that the recipe has no place for.
    """
    if name not in RECIPES:
        near = get_close_matches(name, RECIPES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(f"recipe: unknown name {name!r}{hint} (known: {', '.join(RECIPES)})")
    recipe, changes = RECIPES[name], changes or PrecisionConfig()
    for side in ("rollout", "trainer"):
        own: SideScales = getattr(changes, side)
        for key, value in vars(own).items():
            if value is not None and not getattr(recipe, side).weight.quantized:
                raise UserError(f"precision.{side}.{key}: recipe {name!r} quantizes no linear in the {side}")
        if own.block is not None:
            report(at_least(f"precision.{side}.block", own.block, 2))
        recipe = _with_scales(recipe, side, own.scale or changes.scale, own.block)
    if changes.output_gradient is not None:
        if not recipe.trainer.weight.quantized:
            raise UserError(f"precision.output_gradient: the linears of recipe {name!r} are not trained in FP8")
        gradient = replace(recipe.output_gradient, format=changes.output_gradient)
        recipe = replace(recipe, output_gradient=gradient if gradient.quantized else COMPUTE)
    for key in ("excluded", "first_layers_in_compute", "last_layers_in_compute"):
        if getattr(changes, key) and not recipe.quantizes_linears:
            raise UserError(f"precision.{key}: recipe {name!r} quantizes no linear layer, so there is nothing to exclude")
    ends = {key: getattr(changes, key) for key in ("first_layers_in_compute", "last_layers_in_compute")}
    report(*(at_least(f"precision.{key}", layers, 0) for key, layers in ends.items()))
    recipe = replace(recipe, **{key: layers for key, layers in ends.items() if layers})
    if changes.exact:
        recipe = replace(recipe, exact=True)
    for key in ("kv_calibration", "kv_rule"):
        if getattr(changes, key) is not None and not recipe.quantizes_cache:
            raise UserError(f"precision.{key}: recipe {name!r} has no FP8 cache, so there is nothing to calibrate")
    if changes.kv_calibration is not None:
        recipe = replace(recipe, kv_calibration=changes.kv_calibration)
    if changes.kv_rule is not None:
        recipe = replace(recipe, **KV_RULES[changes.kv_rule])
    return replace(recipe, excluded=recipe.excluded + tuple(changes.excluded))


__all__ = ["KV_RULES", "RECIPES", "ForwardFormats", "PrecisionConfig", "Recipe", "SideScales", "TensorFormat", "get_recipe"]
