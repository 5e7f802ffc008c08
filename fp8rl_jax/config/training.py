"""The configuration of updates and of a run's records: optimizer, trainer, adapters, supervised
stage, evaluation, checkpoints, trackers, memory plan."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields, replace
from typing import Literal

from fp8rl_jax.config.chips import CHIPS
from fp8rl_jax.config.formats import ELEMENTS, FLOAT32
from fp8rl_jax.config.recipe import Recipe
from fp8rl_jax.config.schema import above, at_least, one_of, report, within

_MAX_BETA2_OF_E4M3 = 0.99  # training/optimizer.py derives it
_LossScaleMode = Literal["auto", "dynamic", "static", "none"]


@dataclass(frozen=True)
class OptimizerConfig:
    """What moves the float32 master weights."""

    name: Literal["adamw", "sgd"] = "adamw"
    """adamw: arXiv 1711.05101. sgd: gradient descent without momentum, as arXiv 2602.07729 trains
    with; it keeps no state, and needs learning rates that are larger by orders."""
    learning_rate: float = 1e-6
    """Peak learning rate."""
    warmup_steps: int = 0
    """Updates of linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay after warm-up."""
    final_ratio: float = 0.1
    """Learning rate that a decay ends at, behind the last update, as a part of the peak."""
    beta1: float = 0.9
    """Decay of Adam's first moment."""
    beta2: float = 0.99
    """Decay of Adam's second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay on matrices; norms and embeddings are never decayed."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0: not clipped."""

    def faults(self, key: str, recipe: Recipe | None = None) -> list[str]:
        """List numbers out of their range, what the recipe keeps moments in and cannot, and what
        SGD has no use for, one line each.

        Args:
            key: of this table.
            recipe: of the run, where it is known.
        """
        checks = [
            at_least(f"{key}.learning_rate", self.learning_rate, 0.0),
            at_least(f"{key}.warmup_steps", self.warmup_steps, 0),
            within(f"{key}.final_ratio", self.final_ratio, 0.0, 1.0),
            at_least(f"{key}.weight_decay", self.weight_decay, 0.0),
            at_least(f"{key}.max_grad_norm", self.max_grad_norm, 0.0),
        ]
        if self.name == "adamw":
            checks += [
                within(f"{key}.beta1", self.beta1, 0.0, below=1.0),
                within(f"{key}.beta2", self.beta2, 0.0, below=1.0),
                above(f"{key}.eps", self.eps, 0.0),
            ]
        faults = [fault for fault in checks if fault]
        if self.name != "adamw":
            faults += [
                f"{key}.{field.name} has no use where {key}.name is {self.name!r}"
                for field in fields(self)
                if field.name in _OF_ADAM and getattr(self, field.name) != field.default
            ]
            return faults + [
                f"recipe {recipe.name!r}: {role} has no use where {key}.name is {self.name!r}; set "
                f'precision.{role} = "float32"'
                for role in ("first_moment", "second_moment")
                if recipe and getattr(recipe, role) != FLOAT32
            ]
        if recipe is None or recipe.second_moment_rounding == "nearest":
            return faults
        fmt = recipe.second_moment
        mantissa = re.match(r"e\dm(\d)", fmt.element) if fmt.element in ELEMENTS else None
        if mantissa is None:
            return faults
        # the deviation that training/optimizer.py derives, of 3 bits of mantissa at that beta2
        lost = 2.0 ** (3 - int(mantissa[1]))
        most = math.sqrt(max(1 - lost**2 * (1 - _MAX_BETA2_OF_E4M3**2), 0.0))
        if self.beta2 > most + 1e-9:
            faults.append(
                f"{key}.beta2 = {self.beta2}: an {fmt.element} second moment needs at most "
                f'{math.floor(100 * most) / 100:g}; use precision.second_moment = "bfloat16"'
            )
        return faults


_OF_ADAM = ("beta1", "beta2", "eps")


@dataclass(frozen=True)
class LossScaleConfig:
    """What the loss is multiplied by before the backward pass and gradients are divided by after
    it: float16 holds nothing below 6e-8 (arXiv 1710.03740, section 3.2)."""

    mode: _LossScaleMode = "auto"
    """dynamic: found while training; an overflow skips the update and lowers the scale. static:
    `initial`, always. auto: dynamic where compute_dtype is "float16", else none."""
    initial: float = 65536.0
    """Scale at the start, or always; PyTorch's default."""
    growth_factor: float = 2.0
    """The scale is multiplied by this after growth_interval updates in a row without overflow."""
    backoff_factor: float = 0.5
    """The scale is multiplied by this where a gradient overflows."""
    growth_interval: int = 400
    """Updates without overflow before the scale grows: 400 as in verl, PyTorch's own default is
    2000."""

    def __post_init__(self) -> None:
        key = "trainer.loss_scale"
        report(
            one_of(f"{key}.mode", self.mode, _LossScaleMode),
            above(f"{key}.initial", self.initial, 0.0),
            above(f"{key}.growth_factor", self.growth_factor, 1.0),
            above(f"{key}.backoff_factor", self.backoff_factor, 0.0, at_most=1.0),
            at_least(f"{key}.growth_interval", self.growth_interval, 1),
        )

    def resolve(self, compute_dtype: str) -> LossScaleConfig | None:
        """Return these settings where the run scales its loss ("auto" decided), else None."""
        if self.mode == "none" or (self.mode == "auto" and compute_dtype != "float16"):
            return None
        return replace(self, mode="static" if self.mode == "static" else "dynamic")


@dataclass(frozen=True)
class TrainerConfig:
    """The update."""

    steps: int = 100
    """Rollout-and-update steps of the run."""
    updates_per_rollout: int = 1
    """Optimizer updates on each rollout (mini-batches); with 1 the old-logprob forward is
    skipped."""
    micro_batch_prompts: int = 0
    """Prompts (with all their completions) in one gradient-accumulation step; 0: all at once. The
    update stays the same up to the order of float32 sums; under a trainer in FP8 up to the scales
    of its weight gradient, too (training/step.py)."""
    remat: Literal["none", "layer"] = "none"
    """Rematerialize each layer in the backward pass: less memory, a third more compute."""
    logprob_chunk: int = 1024
    """Tokens whose logits exist at one time, per device, in the log-probability computation."""
    attention_chunk: int | None = None
    """Queries of a row whose attention scores exist at one time, recomputed in the backward pass;
    0: all of them. Unset: 128 in rows of 1024 tokens and more, else all."""
    packing: bool = False
    """Lay the completions of an update out in full rows instead of padding each to the longest;
    loss and metrics stay the same. Sequences of a row, prompt and completion, are told apart by
    segment ids; the samples of a prompt share its copy."""
    pack_tokens: int = 0
    """Tokens of a packed row, at least the longest prompt and completion together; 0: just those.
    Wider rows hold more samples of a prompt behind one copy of it, and cost more attention."""
    length_buckets: bool = False
    """Cut an update's batch to the longest prompt and completion in it, rounded up to a power of
    two or three quarters of one. The first update of each width is compiled anew, and where
    completions reach rollout.max_new_tokens nothing is gained."""
    loss_scale: LossScaleConfig = LossScaleConfig()
    """Loss scaling of float16."""
    sharpness: bool = False
    """Measure at every update, supervised ones too, how sharp the loss is in the logits of each
    sequence's last token (sharpness/*, rl/sharpness.py): the product of one token a sequence with
    the output head, in the update's own forward."""
    router_replay: bool = False
    """The trainer routes each token to the experts that the rollout used (R3); for models with
    experts."""
    abort_after_skips: int = 10
    """Consecutive updates skipped for non-finite values before the run stops with an error; updates
    skipped while a dynamic loss scale is being found (optim/overflow) are not counted."""
    abort_after_failed_rewards: int = 3
    """Consecutive steps in which the reward of every completion failed (an exception, no finite
    number, a timeout) before the run stops with an error; a shorter run stops where all its steps
    did."""


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters on a frozen base, and norms that are trained in full beside them; with rank
    0 all parameters are trained."""

    rank: int = 0
    """Rank of every adapter; 0: no adapters, all parameters are trained."""
    alpha: float = 16.0
    """The adapters' product is scaled by alpha / rank."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) (rsLoRA, arXiv 2312.03732)."""
    targets: tuple[str, ...] = ("*_proj",)
    """Shell patterns over linear names (layers.3.q_proj, layers.3.experts.up_proj) of what gets an
    adapter; a linear gets one in all layers that have it or in none."""
    norms: tuple[str, ...] = ()
    """Shell patterns over the names of RMSNorms (input_layernorm, q_norm; norm is the one behind
    the last layer) of what is trained in full beside the adapters, in all layers that have it.
    QeRL's are input_layernorm and post_attention_layernorm."""
    base: Literal["compute", "rollout"] = "compute"
    """Format of the frozen weights: the compute dtype, quantized once for the rollout where the
    recipe says so, and at every update where its trainer computes in FP8; or the recipe's rollout
    weight format on both sides, one copy that the trainer, too, computes with; a checkpoint in that
    format keeps its own codes."""
    path: str = ""
    """Adapter in PEFT's form (a directory) to start from; its rank, alpha, targets and norms must
    be these. Empty: A random, B zero, norms as the model has them."""

    @property
    def scale(self) -> float:
        """Factor on the product B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def problems(self) -> list[str]:
        """List every value that cannot work, one line each; empty where all is well."""
        faults = []
        if self.rank < 0:
            faults.append(f"lora.rank = {self.rank} must not be negative")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            faults.append(f"lora.alpha = {self.alpha} must be a number above 0")
        if self.rank > 0 and not self.targets:
            faults.append(
                "lora.targets is empty, so nothing would be trained; name linears, or set "
                "lora.rank to 0"
            )
        if self.rank == 0 and self.path:
            faults.append("lora.path is set but lora.rank is 0; set lora.rank to the adapter's")
        return faults


@dataclass(frozen=True)
class SftConfig:
    """Supervised training on the task's answers, the warm start of `fp8rl sft`, or on the text of
    `fp8rl pretrain`."""

    steps: int = 100
    """Updates."""
    batch_size: int = 64
    """Examples an update, or rows of text."""
    row_tokens: int = 512
    """Tokens of a row of text: documents stand one behind the other and are cut into rows of this
    width, and a token sees those before it of its own document in its row."""
    micro_batch_rows: int = 0
    """Rows of text in one gradient-accumulation step; 0: all at once."""
    cut_short: float = 0.0
    """Part of the demonstrations that lose their last token before end-of-sequence: a flaw that the
    reward can teach away."""
    optimizer: OptimizerConfig = OptimizerConfig(
        learning_rate=3e-3, warmup_steps=10, schedule="cosine"
    )
    """Its own optimizer settings."""
    output: str = ""
    """Run directory of the supervised stage, whose model/ is in Hugging Face form; empty: the run's
    output."""
    from_scratch: bool = False
    """Start from the built-in policy's random weights, whatever model.path says (it may name what
    this stage will write)."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Held-out evaluation."""

    every: int = 10
    """Evaluate before step 0, every this many steps, and at the end; 0: never."""
    examples: int = 128
    """Held-out examples used, from the start of the held-out set."""
    samples: int = 1
    """Completions an example: accuracy is avg@k, and pass@k is reported where k > 1."""
    temperature: float = 0.0
    """Sampling temperature; 0: greedy."""
    batch_size: int = 64
    """Completions generated at one time."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints of the whole training state."""

    every: int = 50
    """Steps between checkpoints; the last step is always saved. 0: only the last."""
    keep: int = 2
    """Newest checkpoints kept; at least 2, so that a damaged one is never the only one. The last
    known good one, from which a step went well, stays besides."""
    grace_seconds: float = 60.0
    """Seconds that a run has to write a checkpoint and end, once SIGTERM, SIGINT or SIGHUP asks it
    to; then it ends without one. 0: as long as its step takes. A second signal ends it at once."""

    def problems(self) -> list[str]:
        """List every value that cannot work, one line each; empty where all is well."""
        if 0 <= self.grace_seconds < math.inf:
            return []
        return [f"checkpoint.grace_seconds = {self.grace_seconds} must be seconds, or 0"]


@dataclass(frozen=True)
class TrackingConfig:
    """Trackers and the record of sampled completions."""

    samples: int = 4
    """Completions of each step kept in samples.jsonl, with prompt, answer and reward; 0: none.
    Those of steps with an evaluation are shown in Weights & Biases (a table) and TensorBoard (text)
    as well, at most 32 of them, texts cut to 2,000 characters."""
    tensorboard: bool = False
    """Write TensorBoard events to <output>/tensorboard; needs the extra [trackers]."""
    wandb: bool = False
    """Log to Weights & Biases; needs the extra [trackers]."""
    wandb_project: str = "fp8rl"
    """Weights & Biases project."""
    wandb_name: str = ""
    """Weights & Biases run name; empty: the name of the run directory."""
    wandb_mode: Literal["online", "offline"] = "online"
    """offline: keep the run on disk until `wandb sync` sends it."""

    def problems(self) -> list[str]:
        """List every value that cannot work, one line each; empty where all is well."""
        faults = []
        if self.samples < 0:
            faults.append(f"tracking.samples = {self.samples} must not be negative")
        if self.wandb and not self.wandb_project:
            faults.append("tracking.wandb_project is empty; name the project that gets the run")
        return faults


@dataclass(frozen=True)
class PlanConfig:
    """What a device can hold: `fp8rl plan`, and the check before a run."""

    chip: str = ""
    """A device by its name (h100, h200, h20, a100, b200, gb200, tpu-v5e, tpu-v6e), or its bytes,
    such as 141e9; empty: what the device here reports. Of one that has a name `fp8rl plan` also
    says how long a step takes at least, the largest batch, and which meshes are best."""
    devices: int = 0
    """So many of them; an axis of the mesh that is -1 takes what is left. 0: as many as the mesh
    says, where -1 is 1."""
    compile: bool = False
    """`fp8rl plan` compiles update and rollout for that mesh, which takes a minute or more, and
    says what XLA plans of memory and what devices send each other: for Hopper, where `make
    toolchain` or JAX's CUDA plugin is there; for a TPU, of which it says the memory alone, where
    libtpu is."""
    check: bool = True
    """Refuse a run whose plan exceeds the device's memory, before anything large is loaded."""

    def problems(self) -> list[str]:
        """List every value that cannot work, one line each; empty where all is well."""
        faults = []
        try:
            known = not self.chip or self.chip in CHIPS or 0 < float(self.chip) < math.inf
        except ValueError:
            known = False
        if not known:
            names = ", ".join(CHIPS)
            faults.append(f"plan.chip = {self.chip!r}: give one of {names}, or bytes, as in 141e9")
        if fault := at_least("plan.devices", self.devices, 0):
            faults.append(fault)
        return faults
