"""What `fp8rl score` and `fp8rl generate` share: the model that the arguments name, opened cheaply
and loaded late."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from fp8rl_jax.cli.arguments import LinesArguments
from fp8rl_jax.config.files import read_recipes
from fp8rl_jax.config.recipe import Recipe, get_recipe
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.policy import Policy
from fp8rl_jax.precision import check_recipe
from fp8rl_jax.rollout.lines import Line, read_lines
from fp8rl_jax.tokenizers.tokenizer import Tokenizer, load_tokenizer
from fp8rl_jax.weights.hf_config import read_policy_config
from fp8rl_jax.weights.load import load_policy
from fp8rl_jax.weights.resolve import resolve_model


@dataclass(frozen=True)
class OpenModel:
    """A model directory whose weights are not read yet."""

    directory: Path
    config: PolicyConfig
    tokenizer: Tokenizer | None
    recipe: Recipe
    dtype: str

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """End tokens of the config and of the tokenizer; none for a model that never stops by
        itself."""
        return tuple(
            sorted(
                {
                    *self.config.eos_token_ids,
                    *(self.tokenizer.eos_token_ids if self.tokenizer else ()),
                }
            )
        )

    def read_lines(self, path: str, generation: bool, reserve: int = 0) -> list[Line]:
        """See `rollout.lines.read_lines`."""
        limit = self.config.max_position_embeddings
        return read_lines(path, self.config.vocab_size, self.tokenizer, generation, limit, reserve)

    def load(self) -> Policy:
        """The weights, in the compute dtype: both sides of a recipe round the masters to it before
        anything else."""
        return load_policy(self.directory, self.dtype)


def open_model(arguments: LinesArguments) -> OpenModel:
    """Finds the model and reads everything but its weights.

    Raises:
        UserError: an unknown recipe or model, a file of recipes with faults, a config or tokenizer
            that cannot be used.
    """
    recipe = get_recipe(arguments.recipe, rows=read_recipes(arguments.recipes))
    check_recipe(recipe)
    directory = resolve_model(arguments.model, report=lambda line: print(line, file=sys.stderr))
    config = read_policy_config(directory)
    tokenizer = load_tokenizer(directory, config.vocab_size)
    return OpenModel(directory, config, tokenizer, recipe, arguments.compute_dtype)
