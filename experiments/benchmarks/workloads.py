"""What is run: which model, which shapes, which recipes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from fp8rl_jax.config.recipe import RECIPES
from fp8rl_jax.config.run import InitConfig
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.policy import Policy, init_policy, parameter_count
from fp8rl_jax.rollout.engine import Prompts, pad_prompts
from fp8rl_jax.weights.hf_config import read_policy_config
from fp8rl_jax.weights.load import byte_policy_config, load_policy
from fp8rl_jax.weights.resolve import resolve_model


@dataclass(frozen=True)
class Shape:
    """`samples` completions of `new_tokens` tokens for each of `prompts` prompts of `prompt_tokens`
    tokens."""

    prompts: int
    samples: int
    prompt_tokens: int
    new_tokens: int

    @property
    def rows(self) -> int:
        return self.prompts * self.samples

    @property
    def lengths(self) -> Int[np.ndarray, " rows"]:
        """Tokens of each completion."""
        return np.full(self.rows, self.new_tokens, np.int32)

    @property
    def tokens(self) -> int:
        """Tokens generated in one round."""
        return int(self.lengths.sum())


@dataclass(frozen=True)
class Uneven(Shape):
    """Completions of log-normal lengths, `median` tokens in the median and `new_tokens` in the
    longest."""

    median: int

    @property
    def lengths(self) -> Int[np.ndarray, " rows"]:
        """Tokens of each completion: the same draw at every call."""
        drawn = np.random.default_rng(0).standard_normal(self.rows)
        drawn = (drawn - np.median(drawn)) / (drawn.max() - np.median(drawn))
        lengths = self.median * (self.new_tokens / self.median) ** drawn
        return np.maximum(np.rint(lengths), 1).astype(np.int32)


@dataclass(frozen=True)
class Workload:
    """A model and what is done with it.

    Attributes:
        model: name that `fp8rl fetch` knows; empty: random weights of the shape `config`.
        config: shape of the random weights.
        generation, uneven, step, loop, layer: shapes of the five benchmarks. The loop's prompts are
            those of its task: `prompt_tokens` is what they are padded to. Rows of the layer are
            prompt and completion together.
        generation_recipes, uneven_recipes, step_recipes, loop_recipes, layer_recipes: recipes of
            the five, as `grpo.make_session` reads them; the first is what ratios refer to. Empty:
            that benchmark does not run on this workload.
        micro_batch_prompts: prompts in one gradient-accumulation step; 0: all.
        remat: recompute layers in the backward pass.
        absolute: seconds are results, not only raw data.
    """

    name: str
    compute_dtype: str
    generation: Shape | None = None
    uneven: Uneven | None = None
    step: Shape | None = None
    loop: Shape | None = None
    layer: Shape | None = None
    generation_recipes: tuple[str, ...] = ()
    uneven_recipes: tuple[str, ...] = ()
    step_recipes: tuple[str, ...] = ()
    loop_recipes: tuple[str, ...] = ()
    layer_recipes: tuple[str, ...] = ()
    model: str = ""
    config: PolicyConfig | None = None
    micro_batch_prompts: int = 0
    remat: bool = False
    absolute: bool = False

    def recipes(self, benchmark: str) -> tuple[str, ...]:
        """The recipes of a benchmark, by its name on the command line."""
        return {
            "generation": self.generation_recipes,
            "uneven_generation": self.uneven_recipes,
            "grpo_step": self.step_recipes,
            "loop_overhead": self.loop_recipes,
            "trained_layer": self.layer_recipes,
        }[benchmark]

    def load_policy(self) -> Policy:
        """Float32 masters, layers stacked."""
        if self.model:
            return load_policy(resolve_model(self.model, report=print), jnp.float32)
        return jax.jit(partial(init_policy, self.config))(jax.random.key(0))

    def describe(self) -> dict[str, Any]:
        """For the record."""
        if self.model:
            shape, weights = (
                read_policy_config(resolve_model(self.model)),
                f"{self.model}, as fp8rl fetch makes it",
            )
        else:
            shape, weights = self.config, "random"
        return {
            "name": self.name,
            "parameters": parameter_count(shape),
            "weights": weights,
            "compute_dtype": self.compute_dtype,
            "micro_batch_prompts": self.micro_batch_prompts,
            "remat": self.remat,
        }


def random_prompts(shape: Shape, vocab_size: int) -> Prompts:
    """Draw distinct prompts of exactly `prompt_tokens` tokens, the same at every call.

    Special tokens (low ids) are left out.
    """
    ids = np.random.default_rng(0).integers(
        vocab_size // 4, vocab_size, (shape.prompts, shape.prompt_tokens)
    )
    return pad_prompts(ids.tolist(), list(range(shape.prompts)), shape.prompt_tokens)


SMOLLM2 = Workload(
    name="SmolLM2-135M-Instruct",
    model="smollm2-135m",
    compute_dtype="float32",
    generation=Shape(prompts=32, samples=1, prompt_tokens=16, new_tokens=64),
    uneven=Uneven(prompts=256, samples=1, prompt_tokens=8, new_tokens=80, median=4),
    step=Shape(prompts=4, samples=8, prompt_tokens=16, new_tokens=32),
    loop=Shape(prompts=4, samples=8, prompt_tokens=64, new_tokens=16),
    generation_recipes=(
        "static/bf16-plain",
        "static/bf16-plain-reference",
        "paged/bf16-plain",
        "static/bf16",
        "fp8-rl-plain",
    ),
    uneven_recipes=("paged/bf16-plain", "static/bf16-plain"),
    step_recipes=("bf16",),
    loop_recipes=("bf16",),
)


TRAINED = ("bf16", "fp8-e2e", "jet-rl")
"""The trainer in bfloat16, and twice in FP8: the programs of the last two's updates differ in the
correction alone."""
SMOLLM2_SHAPE = Workload(
    name="SmolLM2-135M's shape",
    config=PolicyConfig(
        "llama",
        49152,
        576,
        1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rope_theta=1e5,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    ),
    compute_dtype="bfloat16",
    step=Shape(prompts=2, samples=4, prompt_tokens=16, new_tokens=32),
    layer=Shape(prompts=1, samples=1, prompt_tokens=512, new_tokens=512),
    step_recipes=TRAINED,
    layer_recipes=TRAINED,
)


def qwen3_config(
    hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int
) -> PolicyConfig:
    """Give a shape of Qwen3 with a tied head."""
    return PolicyConfig(
        "qwen3",
        151936,
        hidden_size,
        intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        tie_word_embeddings=True,
        max_position_embeddings=40960,
    )


def _qwen3(name: str, hidden_size: int, intermediate_size: int) -> Workload:
    config = qwen3_config(hidden_size, intermediate_size, num_layers=28, num_heads=16)
    every = tuple(RECIPES)
    shape = Shape(prompts=16, samples=8, prompt_tokens=128, new_tokens=256)
    return Workload(
        name=name,
        config=config,
        compute_dtype="bfloat16",
        generation=shape,
        step=shape,
        loop=shape,
        layer=Shape(prompts=8, samples=1, prompt_tokens=512, new_tokens=512),
        generation_recipes=every,
        step_recipes=every,
        loop_recipes=("bf16", "fp8-rl"),
        layer_recipes=TRAINED,
        micro_batch_prompts=4,
        remat=True,
        absolute=True,
    )


GPU_WORKLOADS = (_qwen3("Qwen3-0.6B's shape", 1024, 3072), _qwen3("Qwen3-1.7B's shape", 2048, 6144))
QWEN3_LAYER = Workload(
    name=GPU_WORKLOADS[0].name,
    config=GPU_WORKLOADS[0].config,
    compute_dtype="bfloat16",
    layer=SMOLLM2_SHAPE.layer,
    layer_recipes=TRAINED,
)
BOTH_WAYS = ("bf16-plain", "bf16-exact", "jet-rl-plain", "jet-rl-exact")
DEMO = Shape(prompts=32, samples=8, prompt_tokens=8, new_tokens=8)
EXACT = (
    Workload(
        name="the demo, exact",
        config=byte_policy_config(InitConfig(intermediate_size=576, num_layers=2)),
        compute_dtype="float32",
        step=DEMO,
        step_recipes=BOTH_WAYS,
    ),
    Workload(
        name="the demo with experts, exact",
        config=byte_policy_config(
            InitConfig(intermediate_size=192, num_layers=2, num_experts=8, experts_per_token=2)
        ),
        compute_dtype="float32",
        step=DEMO,
        step_recipes=BOTH_WAYS,
    ),
    Workload(
        name="SmolLM2-135M's shape in float32, exact",
        config=SMOLLM2_SHAPE.config,
        compute_dtype="float32",
        step=Shape(prompts=4, samples=8, prompt_tokens=16, new_tokens=32),
        step_recipes=BOTH_WAYS,
    ),
    Workload(
        name="SmolLM2-135M's shape in bfloat16, 8 rows, exact",
        config=SMOLLM2_SHAPE.config,
        compute_dtype="bfloat16",
        step=SMOLLM2_SHAPE.step,
        step_recipes=BOTH_WAYS,
    ),
)
CPU_WORKLOADS = (SMOLLM2, SMOLLM2_SHAPE, QWEN3_LAYER, *EXACT)
