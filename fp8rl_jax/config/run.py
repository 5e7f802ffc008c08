"""The configuration of a run: one tree of frozen dataclasses, read from TOML with command-line
overrides."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from fp8rl_jax.config.recipe import PrecisionConfig, Recipe, get_recipe
from fp8rl_jax.config.rl import RLConfig, check_sampling
from fp8rl_jax.config.schema import above, at_least, report, unknown_placeholders
from fp8rl_jax.config.tasks import TaskConfig
from fp8rl_jax.config.training import (
    CheckpointConfig,
    EvaluationConfig,
    LoraConfig,
    OptimizerConfig,
    PlanConfig,
    SftConfig,
    TrackingConfig,
    TrainerConfig,
)
from fp8rl_jax.config.vllm import VllmConfig, vllm_problems
from fp8rl_jax.errors import UserError
from fp8rl_jax.functions import function_faults, import_once, settle


@dataclass(frozen=True)
class InitConfig:
    """Shape of the built-in byte-level policy, random weights, used where model.path is empty:
    Llama's architecture, or Qwen3-MoE's where it has experts."""

    hidden_size: int = 256
    """Width of the residual stream."""
    intermediate_size: int = 576
    """Width of the feed-forward layer, or of each expert."""
    num_experts: int = 0
    """Experts in each layer; 0: one feed-forward layer for all tokens."""
    experts_per_token: int = 2
    """Experts that a token uses, at most num_experts."""
    num_layers: int = 3
    """Transformer layers."""
    num_heads: int = 4
    """Query heads."""
    num_kv_heads: int = 2
    """Key and value heads; divides num_heads."""
    head_dim: int = 64
    """Width of one head."""
    rope_theta: float = 10000.0
    """Base of the rotary embedding."""

    def problems(self) -> list[str]:
        """List every value that cannot work, one line each; empty where all is well."""
        key = "model.init"
        sizes = {name: value for name, value in vars(self).items() if name != "rope_theta"}
        faults = [
            at_least(f"{key}.{name}", value, int(name != "num_experts"))
            for name, value in sizes.items()
        ]
        faults.append(above(f"{key}.rope_theta", self.rope_theta, 0.0))
        return [fault for fault in faults if fault]


@dataclass(frozen=True)
class ModelConfig:
    """Where the policy comes from."""

    path: str = ""
    """Hugging Face directory, hub id, .gguf file, a name that `fp8rl fetch` knows, or the directory
    of a run, for what it trained; empty: the built-in policy."""
    init: InitConfig = InitConfig()
    """The built-in policy's shape."""
    dither: Literal["auto", True, False] = "auto"
    """Draw each master at the start from all the numbers that round to its weight in a compute
    dtype of 16 bits, or in a format that both sides have it in. The first policy is the same bit
    for bit; but a checkpoint's weights lie in the middle of such a cell, and an update of less than
    half a step, which is what reinforcement learning makes, is lost with each of them (metric
    sync/arrived). Drawn at random, as many of them cross into the next cell as the update is long,
    so that it arrives in the mean, at no cost. Some weights of a bfloat16 checkpoint lie on the
    border of two FP8 cells, and would cross it all at once: where both sides quantize the float32
    master they are drawn, too, from the cells that they have in both formats. auto: where there are
    such cells and the weights themselves are trained. A float32 checkpoint's weights lie between
    two numbers already, and stay as they are."""


@dataclass(frozen=True)
class PagedConfig:
    """Sizes of the paged engine; on a mesh, of each shard of the batch."""

    slots: int = 0
    """Completions that are decoded at one time; 0: all of a step, as many as the cache holds, and
    256 (64 on a CPU) at most."""
    page_size: int = 0
    """Tokens of a page of the cache; 0: 64 with Hopper's kernels, which take multiples of 64, else
    32."""
    cache_tokens: int = 0
    """Tokens that the cache holds; 0: as many as the slots can use, if they fit into nine tenths of
    the memory that is free at the first rollout."""
    prefill_tokens: int = 512
    """Tokens of prompts that are prefilled at one time."""
    decode_steps: int = 64
    """Decode steps between two looks of the host."""
    extra_prompts: int = 0
    """Prompts in progress beyond those of a step. Its rollout ends as soon as
    rollout.prompts_per_step prompts have all their completions; what the others have is carried
    over to the next step and goes on with its weights (partial rollouts; metrics
    rollout/stale_tokens, rollout/oldest_token)."""


@dataclass(frozen=True)
class RolloutConfig:
    """How completions are sampled."""

    prompts_per_step: int = 8
    """Distinct prompts in one step."""
    samples_per_prompt: int = 8
    """Completions of each prompt; they share one prefill."""
    max_prompt_tokens: int = 64
    """Prompts longer than this are skipped, counted, and named in a warning. With task.max_turns
    above 1 it holds the whole conversation before an answer: an episode ends where the next prompt
    does not fit (metric episodes/truncated)."""
    max_new_tokens: int = 16
    """Longest completion, of one turn, its stop token included."""
    temperature: float = 1.0
    """Softmax temperature; 0 is greedy and cannot be trained on."""
    top_k: int = 0
    """Keep the k most likely tokens; 0: all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this; 1: all."""
    min_p: float = 0.0
    """Drop tokens less likely than this times the most likely one; 0: none."""
    support_size: int = 0
    """Most tokens that are drawn from, and kept of each token that is sampled, with
    rl.correction.truncated_sampling = "replay"; 0: top_k, or 128 without it. Where truncation
    leaves more, the likeliest are taken (metric rollout/support_capped); four bytes each, in
    `fp8rl plan`."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a completion, besides the tokenizer's and the model's own. The first of
    all of them, in this order, ends the answers of supervised training."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a completion with the token in which one is complete; the reward sees them."""
    bad_words: tuple[str, ...] = ()
    """Texts that no completion holds, inside of words either: tokens that would complete one are
    not sampled. They change the distribution, as top-k does: rl.correction.truncated_sampling must
    allow it. Evaluation goes without."""
    logit_bias: dict[str, float] = field(default_factory=dict)
    """{token: what is added to its logit before the temperature}; a token is an id, or a text that
    is a single token. It, too, needs rl.correction.truncated_sampling, and evaluation goes
    without."""
    decode_layers: Literal["auto", "unroll", "scan"] = "auto"
    """Layer loop in decode: unrolled (a scan copies each layer's weights for a kernel, and on a
    CPU) or scanned (compile time independent of depth). auto: unrolled on a CPU and with Hopper
    kernels."""
    engine: Literal["paged", "static", "vllm"] = "static"
    """static: all completions of a step decode until the longest has ended. paged: continuous
    batching, a slot whose completion has ended takes the next one; faster where lengths differ,
    slower where all are short and alike. vllm: a vLLM server (rollout.vllm)."""
    steps_ahead: int = 0
    """1: the next step's completions are sampled while this step is learned from, by weights that
    lack its update (one step off policy). The rollout has to have devices of its own, those of
    mesh.rollout or of vLLM, and rl.correction has to correct for older weights."""
    transform: str = ""
    """What is done to the served copy of the policy at each weight sync, beside the recipe's
    quantization: a function (policy, context: SyncContext) -> policy of your own,
    `module:function` or `path/to/file.py:function` (fp8rl_jax/rollout/sync.py)."""
    transform_args: dict[str, float] = field(default_factory=dict)
    """Keyword arguments of it."""
    paged: PagedConfig = PagedConfig()
    vllm: VllmConfig = VllmConfig()

    def __post_init__(self) -> None:
        settle(self, "transform", "transform_args")
        if isinstance(self.logit_bias, dict):  # a token's id is written as a number in Python
            biases = {str(token): bias for token, bias in self.logit_bias.items()}
            object.__setattr__(self, "logit_bias", biases)
        key = "rollout.transform"
        given = self.transform or None, (), f"{key}_args", self.transform_args
        report(*function_faults(key, *given))

    @property
    def truncated(self) -> bool:
        """Whether top-k, top-p or min-p leaves tokens out."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True)
class RolloutMeshConfig:
    """Devices of the rollout's own: data x expert x tensor, the last ones of each process."""

    data: int = 0
    """Replicas of what is served, which split the prompts; 0: the rollout samples on the trainer's
    devices."""
    tensor: int = 1
    """Shards of heads, feed-forward width and vocabulary."""
    expert: int = 1
    """Shards of the experts of a mixture, which also split the prompts."""

    @property
    def size(self) -> int:
        """Number of devices; 0: none of its own."""
        return self.data * self.tensor * self.expert

    def problems(self) -> list[str]:
        """List every value that cannot work, one line each; empty where all is well."""
        least = {"data": 0, "tensor": 1, "expert": 1}.items()
        faults = [at_least(f"mesh.rollout.{axis}", getattr(self, axis), n) for axis, n in least]
        if self.tensor * self.expert > 1 and not self.data:
            faults.append(
                "mesh.rollout.data: 0 gives the rollout no devices, so that tensor and expert "
                "split nothing; set it to 1 or more"
            )
        return [fault for fault in faults if fault]


@dataclass(frozen=True)
class MeshConfig:
    """Devices: data x fsdp x expert x tensor. One axis may be -1 and takes what is left."""

    data: int = -1
    """Replicas of the policy."""
    fsdp: int = 1
    """Shards of parameters and optimizer state, which also split the batch."""
    tensor: int = 1
    """Shards of heads and feed-forward width."""
    expert: int = 1
    """Shards of the experts of a mixture, which also split the batch."""
    rollout: RolloutMeshConfig = RolloutMeshConfig()
    coordinator: str = ""
    """host:port of process 0 for jax.distributed; empty: taken from the cluster's environment, if
    there is one."""
    num_processes: int = 0
    """Processes of the run, with coordinator."""
    process_id: int = -1
    """This process's number, with coordinator."""
    lost_after_seconds: float = 45.0
    """A process of which the others hear nothing for so long is lost (stopped, or its host is
    gone): they end with a line that names it, and status 75. One that is killed is seen at once."""
    hung_after_seconds: float = 600.0
    """So long may a process do nothing new while others wait for it; then it is lost, too. Phases
    of a step, exchanges, decode calls of the paged engine and programs compiled are something
    new; rewards may take as long as their time limits add up to."""
    program_seconds: float = 3600.0
    """So long may one program compile, and so long may all processes together do nothing new, which
    is how a program that runs looks from outside."""

    def problems(self) -> list[str]:
        """List every value that cannot work, one line each; empty where all is well."""
        names = ("lost_after_seconds", "hung_after_seconds", "program_seconds")
        faults = [
            f"mesh.{name} = {getattr(self, name)} must be seconds, at least 1"
            for name in names
            if not 1 <= getattr(self, name) < math.inf
        ]
        if fault := at_least("mesh.num_processes", self.num_processes, 0):
            faults.append(fault)
        return faults


def precision_text(recipe: str, compute_dtype: str) -> str:
    """Write a run's precision as it is shown everywhere.

    A recipe's name alone leaves open what it does not quantize: "bf16 recipe, float32 compute"
    computes nothing in bfloat16.
    """
    return f"{recipe} recipe, {compute_dtype} compute"


@dataclass(frozen=True)
class RunConfig:
    """Everything a run needs; `--dry-run` prints it resolved."""

    output: str = "runs/{recipe}"
    """Run directory; {recipe} is replaced by the recipe's name, {seed} by the seed."""
    recipe: str = "bf16"
    """Precision recipe: a built-in one, of the table in fp8rl_jax/config/recipes.toml, or a row of
    [recipes]."""
    recipes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Recipes of one's own, {name: row}: [recipes.my-fp8] with a `base` and any field of a recipe.
    Rows of several files add up; on the command line, --recipes.my-fp8.kv-margin 1.1."""
    formats: tuple[str, ...] = ()
    """Python files that register number formats of one's own (`fp8rl_jax.precision.register`),
    imported before the recipe is read, in every process of the run."""
    compute_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Dtype of everything that the recipe does not quantize; master weights are float32 unless the
    recipe says otherwise. float16 rounds 8 times finer than bfloat16, so rollout and trainer differ
    less (arXiv 2510.26788); it holds at most 65504, and trainer.loss_scale is for what is too small
    for it."""
    seed: int = 0
    """Seed of data order, sampling and initialization."""
    dry_run: bool = False
    """Print the resolved configuration, parameter counts and the memory plan, then stop."""
    resume: bool = False
    """Go on from the newest whole checkpoint in the run directory, or start where there is none
    yet."""
    resume_changed: bool = False
    """With resume: go on though settings, problems or rewards differ from the checkpoint's, so that
    it is another experiment from here on; run.json keeps what was changed."""
    model: ModelConfig = ModelConfig()
    precision: PrecisionConfig = PrecisionConfig()
    lora: LoraConfig = LoraConfig()
    task: TaskConfig = field(default_factory=TaskConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    rl: RLConfig = field(default_factory=RLConfig)
    optimizer: OptimizerConfig = OptimizerConfig()
    trainer: TrainerConfig = TrainerConfig()
    sft: SftConfig = SftConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    mesh: MeshConfig = MeshConfig()
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    plan: PlanConfig = PlanConfig()

    def __post_init__(self) -> None:
        for file in self.formats:
            import_once(file, "formats")

    @property
    def precision_text(self) -> str:
        """`precision_text` of this run."""
        return precision_text(self.recipe, self.compute_dtype)

    @cached_property
    def resolved_recipe(self) -> Recipe:
        """The recipe of the run, with the changes of [precision]; looked up once.

        Its name is one of the built-in rows or of the run's own.

        Raises:
            UserError: a line for each fault, as `config.recipe.get_recipe` has them.
        """
        return get_recipe(self.recipe, self.precision, self.recipes)

    @property
    def dithers(self) -> bool:
        """Whether masters are drawn at the start, as `model.dither` says."""
        if self.model.dither == "auto":
            recipe = self.resolved_recipe
            cells = self.compute_dtype != "float32" or recipe.shares_weights
            return cells and recipe.weight_rounding == "nearest" and self.lora.rank == 0
        return self.model.dither

    def under(self, recipe: str) -> RunConfig:
        """The run under another recipe; whether it is exact is left to that one."""
        return replace(self, recipe=recipe, precision=replace(self.precision, exact="auto"))

    def with_exact_of(self, run: RunConfig) -> RunConfig:
        """This run, which began with the settings of another; what that one found out of
        precision.exact says nothing of another recipe."""
        same = self.recipe == run.recipe or self.precision.exact != run.precision.exact
        return self if same else self.under(self.recipe)

    @property
    def directory(self) -> Path:
        """`output` with its placeholders filled in."""
        return Path(self.output.format(recipe=self.recipe, seed=self.seed))

    def samples_truncated(self) -> bool:
        """Whether the rollout samples from another distribution than the policy's.

        Raises:
            UserError: it does, and rl.correction does not say what that means; or the temperature
                is 0.
        """
        rollout = self.rollout
        return check_sampling(
            self.rl.correction,
            temperature=rollout.temperature,
            top_k=rollout.top_k,
            top_p=rollout.top_p,
            min_p=rollout.min_p,
            bad_words=rollout.bad_words,
            logit_bias=rollout.logit_bias,
        )

    def support_size(self, vocab: int) -> int:
        """Count the ids that the sampler keeps of each token's support; 0: none are kept.

        Args:
            vocab: size of the vocabulary.
        """
        r = self.rollout
        if not r.truncated or self.rl.correction.truncated_sampling != "replay":
            return 0
        return min(r.support_size or r.top_k or 128, vocab)

    def problems(self) -> list[str]:
        """List the faults between keys, one line each; empty where all is well."""
        rollout, trainer, episodes = self.rollout, self.trainer, self.task.max_turns > 1
        faults, recipe = [], None
        try:
            recipe = self.resolved_recipe
            faults += self._calibration_problems(recipe) + self._carrying_problems(recipe)
            faults += self._acceptance_problems(recipe) + self._apart_problems(recipe)
            if recipe.weight_rounding == "stochastic" and self.compute_dtype == "float32":
                faults.append(
                    'precision.weight_rounding: float32 compute rounds no master; set "nearest"'
                )
            if (
                self.model.dither is True
                and self.compute_dtype == "float32"
                and not recipe.shares_weights
            ):
                faults.append(
                    "model.dither: in float32 compute a side that quantizes no weights sees all of "
                    "a master, and one that was moved would be another policy; leave it false"
                )
            if recipe.weight_rounding == "stochastic" and self.model.dither is True:
                faults.append(
                    "model.dither: rounded stochastically, dithered masters would not be the "
                    "checkpoint; set one of them"
                )
            if self.rollout.transform and (recipe.exact or self.precision.exact is True):
                faults.append(
                    "rollout.transform: what it changes the trainer does not have, so that no bit "
                    "can be promised; set precision.exact = false"
                )
            faults += vllm_problems(self, recipe)
        except UserError as error:
            faults += str(error).splitlines()
        faults += unknown_placeholders("output", self.output, "recipe", "seed")
        faults += unknown_placeholders("sft.output", self.sft.output, "recipe", "seed")
        checks = [
            *(
                (size >= 0, f"rollout.paged.{name} must not be negative")
                for name, size in vars(rollout.paged).items()
            ),
            (
                self.model.dither is not True or self.lora.rank <= 0,
                "model.dither: with lora.rank above 0 the weights of the model are not trained, "
                "and adapters begin on no grid; leave it false",
            ),
            (rollout.paged.prefill_tokens >= 1, "rollout.paged.prefill_tokens must be at least 1"),
            (rollout.paged.decode_steps >= 1, "rollout.paged.decode_steps must be at least 1"),
            (rollout.prompts_per_step >= 1, "rollout.prompts_per_step must be at least 1"),
            (rollout.samples_per_prompt >= 1, "rollout.samples_per_prompt must be at least 1"),
            (rollout.max_new_tokens >= 2, "rollout.max_new_tokens must be at least 2"),
            (rollout.temperature >= 0, "rollout.temperature must not be negative"),
            (rollout.top_k >= 0, "rollout.top_k must not be negative"),
            (rollout.support_size >= 0, "rollout.support_size must not be negative"),
            (
                0 <= self.seed < 2**32,
                f"seed = {self.seed} must be at least 0 and below 2**32, from where on seeds are "
                "the same as others",
            ),
            (rollout.max_prompt_tokens >= 1, "rollout.max_prompt_tokens must be at least 1"),
            (trainer.steps >= 1, "trainer.steps must be at least 1"),
            (trainer.updates_per_rollout >= 1, "trainer.updates_per_rollout must be at least 1"),
            (trainer.micro_batch_prompts >= 0, "trainer.micro_batch_prompts must not be negative"),
            (trainer.logprob_chunk >= 1, "trainer.logprob_chunk must be at least 1"),
            (
                trainer.attention_chunk is None or trainer.attention_chunk >= 0,
                "trainer.attention_chunk must not be negative",
            ),
            (trainer.pack_tokens >= 0, "trainer.pack_tokens must not be negative"),
            (
                trainer.packing or not trainer.pack_tokens,
                "trainer.pack_tokens has no use without trainer.packing",
            ),
            (
                not trainer.pack_tokens
                or trainer.pack_tokens >= rollout.max_prompt_tokens + rollout.max_new_tokens,
                f"trainer.pack_tokens = {trainer.pack_tokens} does not hold "
                "rollout.max_prompt_tokens + rollout.max_new_tokens = "
                f"{rollout.max_prompt_tokens + rollout.max_new_tokens}",
            ),
            (
                not (trainer.packing and trainer.length_buckets),
                "trainer.length_buckets cuts padding that trainer.packing does not run on; set "
                "one of them",
            ),
            (trainer.abort_after_skips >= 1, "trainer.abort_after_skips must be at least 1"),
            (
                trainer.abort_after_failed_rewards >= 1,
                "trainer.abort_after_failed_rewards must be at least 1",
            ),
            (self.sft.steps >= 1, "sft.steps must be at least 1"),
            (self.sft.batch_size >= 1, "sft.batch_size must be at least 1"),
            (self.sft.row_tokens >= 2, "sft.row_tokens must be at least 2"),
            (self.sft.micro_batch_rows >= 0, "sft.micro_batch_rows must not be negative"),
            (
                self.sft.batch_size % max(self.sft.micro_batch_rows, 1) == 0,
                f"sft.micro_batch_rows = {self.sft.micro_batch_rows} does not divide "
                f"sft.batch_size = {self.sft.batch_size}",
            ),
            (self.evaluation.every >= 0, "evaluation.every must not be negative"),
            (
                not self.evaluation.every or self.task.eval_size != 0,
                f"evaluation.every = {self.evaluation.every} needs held-out problems, and "
                "task.eval_size = 0 holds out none; "
                "set evaluation.every = 0, or raise task.eval_size",
            ),
            (self.evaluation.examples >= 1, "evaluation.examples must be at least 1"),
            (self.evaluation.samples >= 1, "evaluation.samples must be at least 1"),
            (self.evaluation.batch_size >= 1, "evaluation.batch_size must be at least 1"),
            (self.checkpoint.every >= 0, "checkpoint.every must not be negative"),
            (self.evaluation.temperature >= 0, "evaluation.temperature must not be negative"),
            (self.checkpoint.keep >= 2, "checkpoint.keep must be at least 2"),
            (0 <= self.sft.cut_short <= 1, "sft.cut_short must be between 0 and 1"),
            (0 < rollout.top_p <= 1, "rollout.top_p must be above 0 and at most 1"),
            (0 <= rollout.min_p < 1, "rollout.min_p must be at least 0 and below 1"),
            (
                all(rollout.stop_strings),
                "rollout.stop_strings: an empty text would match everywhere",
            ),
            (all(rollout.bad_words), "rollout.bad_words: an empty text would match everywhere"),
            (
                self.rl.overlong.buffer <= rollout.max_new_tokens,
                f"rl.overlong.buffer = {self.rl.overlong.buffer} is more than "
                f"rollout.max_new_tokens = {rollout.max_new_tokens}",
            ),
            (
                not self.rl.dynamic_sampling.enabled or rollout.samples_per_prompt >= 2,
                "rl.dynamic_sampling.enabled needs rollout.samples_per_prompt of at least 2",
            ),
            (
                not (episodes and (self.rl.overlong.buffer or self.rl.overlong.filter)),
                "rl.overlong: its length is that of one completion; leave buffer and filter "
                "unset with task.max_turns above 1",
            ),
            (
                self.rl.objective != "p3o" or self.rl.correction.value("mode") == "bypass",
                'rl.objective: "p3o" has the ratio to the policy that sampled; set '
                'rl.correction.mode = "bypass"',
            ),
            (
                self.rl.objective != "p3o" or not trainer.micro_batch_prompts,
                "trainer.micro_batch_prompts: the effective part of the sample, which rl.objective "
                '"p3o" weighs by, is of a whole update; set it to 0',
            ),
            (
                not (episodes and self.rl.selection),
                "rl.selection: an episode may be several rows of a batch; leave it unset with "
                "task.max_turns above 1",
            ),
            (
                not (episodes and trainer.router_replay),
                "trainer.router_replay: routes are those of one completion; leave it false with "
                "task.max_turns above 1",
            ),
        ]
        for key, optimizer in (
            ("optimizer", self.optimizer),
            ("sft.optimizer", self.sft.optimizer),
        ):
            faults += optimizer.faults(key, recipe)
        faults += [message for holds, message in checks if not holds]
        if faults:
            return faults
        part, rest = divmod(rollout.prompts_per_step, trainer.updates_per_rollout)
        if rest:
            faults.append(
                f"trainer.updates_per_rollout = {trainer.updates_per_rollout} does not divide "
                f"rollout.prompts_per_step = {rollout.prompts_per_step}"
            )
        elif trainer.micro_batch_prompts and part % trainer.micro_batch_prompts:
            faults.append(
                f"trainer.micro_batch_prompts = {trainer.micro_batch_prompts} does not divide "
                f"the {part} prompts of an update"
            )
        return faults

    def _carrying_problems(self, recipe: Recipe) -> list[str]:
        """What keeps completions from being carried over to the next step."""
        if self.rollout.paged.extra_prompts <= 0:
            return []
        correction = self.rl.correction.resolve(recipe.correction)
        checks = [
            (
                self.rollout.engine == "paged",
                'rollout.engine = "static" carries nothing over; set it to "paged"',
            ),
            (
                self.precision.exact is not True,
                "with precision.exact no bit may differ, and those of older weights' tokens do; "
                "set one of the two to 0 or false",
            ),
            (
                correction.value("weights") != "none" or correction.value("reject"),
                "nothing corrects for tokens that older weights sampled; set rl.correction.method, "
                'as in "token_tis"',
            ),
            (self.task.max_turns == 1, "episodes are not carried over; leave it 0"),
            (
                not self.trainer.router_replay,
                "trainer.router_replay has no routes of older weights; set one of the two",
            ),
        ]
        return [f"rollout.paged.extra_prompts: {why}" for holds, why in checks if not holds]

    def _apart_problems(self, recipe: Recipe) -> list[str]:
        """What keeps the rollout from devices of its own, or from sampling ahead there."""
        own, ahead, episodes = self.mesh.rollout.size, self.rollout.steps_ahead, self.task.max_turns
        vllm = self.rollout.engine == "vllm" and self.rollout.vllm.transport != "dlpack"
        correction = self.rl.correction.resolve(recipe.correction)
        corrects = correction.value("weights") != "none" or correction.value("reject")
        place, key = "mesh.rollout", "rollout.steps_ahead"
        checks = [
            (
                not own or self.rollout.engine != "vllm",
                f"{place}: vLLM has devices of its own; leave it out, or set rollout.engine to "
                '"static" or "paged"',
            ),
            (
                not own or self.lora.rank == 0,
                f"{place}: adapters are served beside the trainer's base; leave it out with "
                "lora.rank above 0",
            ),
            (
                not own or not self.rollout.paged.extra_prompts,
                f"{place}: what is carried over stays on the trainer's devices; set "
                "rollout.paged.extra_prompts = 0",
            ),
            (ahead in (0, 1), f"{key} = {ahead} must be 0 or 1"),
            (
                not ahead or own or vllm,
                f"{key}: the rollout has no devices of its own to sample on meanwhile; give it "
                'some, as in mesh.rollout.data = 1, or a server with rollout.engine = "vllm"',
            ),
            (
                not ahead or corrects,
                f"{key}: nothing corrects for completions of older weights; set "
                'rl.correction.method, as in "token_tis"',
            ),
            (
                not ahead or (not recipe.exact and self.precision.exact is not True),
                f"{key}: with precision.exact no bit may differ, and those of older weights do; "
                "set one of the two to 0 or false",
            ),
            (not ahead or episodes == 1, f"{key}: episodes are not sampled ahead; set it to 0"),
            (
                not ahead or not self.rl.dynamic_sampling.enabled,
                f"{key}: how often a step samples would hang on rewards of older weights; set "
                "rl.dynamic_sampling.enabled = false",
            ),
            (
                not ahead or not self.rl.acceptance.enabled,
                f"{key}: what was sampled ahead would be of weights that were taken back; set "
                "rl.acceptance.enabled = false",
            ),
            (
                not ahead or not self.rollout.paged.extra_prompts,
                f"{key}: completions are carried over or sampled ahead; set one of the two to 0",
            ),
        ]
        return [message for holds, message in checks if not holds]

    def _acceptance_problems(self, recipe: Recipe) -> list[str]:
        """What keeps rl.acceptance from judging updates."""
        if not self.rl.acceptance.enabled:
            return []
        checks = [
            (
                not recipe.exact and self.precision.exact is not True,
                "with precision.exact the served policy is the trainer's, and there is no gap to "
                "judge by; set one of the two to false",
            ),
            (
                self.task.max_turns == 1,
                "its gap is of single completions; leave it off with task.max_turns above 1",
            ),
            (
                self.rollout.paged.extra_prompts <= 0,
                "completions that are carried over would be of weights that were taken back; set "
                "rollout.paged.extra_prompts = 0",
            ),
            (self.task.kind != "text", "text has no rewards to judge by; leave it off"),
            (
                self.rollout.samples_per_prompt >= 2,
                "completions of a prompt are compared; set rollout.samples_per_prompt of at least "
                "2",
            ),
        ]
        return [f"rl.acceptance.enabled: {why}" for holds, why in checks if not holds]

    def _calibration_problems(self, recipe: Recipe) -> list[str]:
        """What keeps rl.clip_calibration from having an effect."""
        if not self.rl.clip_calibration.enabled:
            return []
        correction = self.rl.correction.resolve(recipe.correction)
        checks = [
            (
                recipe.quantizes("trainer"),
                f"the trainer of recipe {recipe.name!r} is not in FP8, and its ratios are exact",
            ),
            (
                self.trainer.updates_per_rollout > 1,
                "with trainer.updates_per_rollout = 1 the ratio is 1; set at least 2",
            ),
            (
                correction.value("mode") != "bypass",
                'rl.correction.mode "bypass" has no ratio of pi_old; use "decoupled"',
            ),
        ]
        return [f"rl.clip_calibration.enabled: {why}" for holds, why in checks if not holds]
