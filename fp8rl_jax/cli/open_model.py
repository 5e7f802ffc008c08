"""A model that a command is given: all but its weights, which are read when they are needed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fp8rl_jax.config.files import read_config, read_recipes, run_directory
from fp8rl_jax.config.recipe import Recipe, get_recipe
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.config.tasks import TaskConfig

if TYPE_CHECKING:
    from fp8rl_jax.models.config import PolicyConfig
    from fp8rl_jax.models.policy import Policy
    from fp8rl_jax.rollout.offline import Line
    from fp8rl_jax.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class OpenModel:
    """A model directory whose weights are not read yet."""

    directory: Path
    config: PolicyConfig
    tokenizer: Tokenizer | None
    recipe: Recipe
    dtype: str
    task: TaskConfig
    """How prompts are written: of a run as it trained."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """End tokens of the config and of the tokenizer; none for a model that never stops."""
        from fp8rl_jax.tokenizers.tokenizer import end_tokens

        return end_tokens(self.tokenizer, self.config.eos_token_ids)

    def read_lines(self, path: str, generation: bool, reserve: int = 0) -> list[Line]:
        """Read lines that fit the model; see `rollout.offline.read_lines`."""
        from fp8rl_jax.rollout.offline import read_lines

        limit = self.config.max_position_embeddings
        size = self.config.vocab_size
        return read_lines(path, size, self.tokenizer, generation, limit, reserve, self.task)

    def load(self) -> Policy:
        """Load the weights in the compute dtype.

        Both sides of a recipe round the masters to it before anything else.
        """
        import jax.numpy as jnp

        from fp8rl_jax.weights.load import load_policy

        return load_policy(self.directory, jnp.dtype(self.dtype))


def open_model(
    model: str, recipe: str, recipes: tuple[str, ...], compute_dtype: str | None
) -> OpenModel:
    """Find a model and read everything but its weights.

    Args:
        model: Hugging Face directory, hub id, .gguf file, a name that `fp8rl fetch` knows, or a
            run.
        recipe: built-in, or of `recipes`.
        recipes: TOML files of recipes.
        compute_dtype: of everything that the recipe does not quantize; None: float32 on a CPU,
            bfloat16 on other devices.

    Raises:
        UserError: an unknown recipe or model, a file of recipes with faults, a config or tokenizer
            that cannot be used.
    """
    import jax

    from fp8rl_jax.cli.commands import progress
    from fp8rl_jax.precision import check_recipe
    from fp8rl_jax.tokenizers.tokenizer import load_tokenizer
    from fp8rl_jax.training.source import find_model
    from fp8rl_jax.weights.hf_config import read_policy_config

    row = get_recipe(recipe, rows=read_recipes(recipes))
    check_recipe(row)
    directory = find_model(model, progress)
    config = read_policy_config(directory)
    tokenizer = load_tokenizer(directory, config.vocab_size)
    run = run_directory(model)
    task = TaskConfig() if run is None else read_config(RunConfig, run).task
    # a CPU gains nothing by bfloat16, whose rounding turned SmolLM2-135M's greedy answers
    dtype = compute_dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    return OpenModel(directory, config, tokenizer, row, dtype, task)
