"""`fp8rl compare`: two sides on the same tokens, layer by layer: the first difference, and why."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import tyro

from fp8rl_jax.config.files import read_recipes, read_values, run_directory
from fp8rl_jax.config.recipe import PrecisionConfig, Recipe, get_recipe
from fp8rl_jax.config.run import RolloutConfig, RunConfig
from fp8rl_jax.config.vllm import VllmConfig
from fp8rl_jax.errors import UserError

Phase = Literal["trainer", "rollout"]


@dataclass(frozen=True)
class SideArguments:
    """One side; what is unset is as for both."""

    recipe: str | None = None
    """Precision recipe."""
    phase: Phase | None = None
    """Whose forward: the rollout's (prefill, then a token at a time over a cache) or the trainer's.
    Unset: a's is the rollout's, and b's the trainer's where nothing else tells the sides apart."""
    compute_dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """Dtype of everything that the recipe does not quantize."""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)


@dataclass(frozen=True)
class CompareArguments:
    """Compare two recipes, two checkpoints, or a rollout with its trainer, on the same tokens,
    layer by layer."""

    models: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="MODEL [MODEL]")]
    """One model for both sides, or one for each: a Hugging Face directory, hub id, .gguf file, a
    name that `fp8rl fetch` knows, or a run, for what it trained."""
    recipe: str = "bf16"
    """Precision recipe of both sides, built-in or of --recipes."""
    recipes: tuple[str, ...] = ()
    """TOML files whose [recipes.NAME] may be named, a run's config.toml among them; the `formats`
    that they name are imported."""
    compute_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Dtype of everything that the recipe does not quantize, on both sides."""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    a: SideArguments = field(default_factory=SideArguments)
    b: SideArguments = field(default_factory=SideArguments)
    input: str = ""
    """JSON objects, one a line, each with "tokens", "prompt" or "messages", and "completion_tokens"
    or "completion", as `fp8rl generate` and a run's samples.jsonl have them; without a completion a
    prompt's second half is taken for one."""
    text: str = ""
    """A text in place of a file; without both a built-in one."""
    recorded: str = ""
    """Key of the file's lines under which another engine's log-probabilities of "completion_tokens"
    stand, one a token: both sides are compared with them, too. In the answers of `fp8rl generate`
    it is policy_logprobs."""
    engine: Literal["none", "vllm"] = "none"
    """vllm: a vLLM server completes the prompts with a's model and recipe, and both sides are
    compared with its log-probabilities."""
    vllm: VllmConfig = field(default_factory=VllmConfig)
    """The server, with --engine vllm."""
    start: str = ""
    """The model that MODEL was trained from: what of the update since then each side's rollout
    serves (sync/* of a run), by kind of tensor. MODEL is to be saved in float32, or has lost most
    of it already."""
    temperature: float = 1.0
    """Of the log-probabilities: the one that the recorded ones were sampled at."""
    rows: int = 4
    """Lines of the file that are used, its first."""
    max_tokens: int = 128
    """Longest row, prompt and completion; what is longer is truncated."""
    json: str = ""
    """Also write everything that was measured to this file; `fp8rl report` draws a compare.json
    that it finds."""
    expect_equal: bool = False
    """Exit with 1 where any bit differs."""

    def problems(self) -> list[str]:
        """Every value that cannot work, one line each; empty where all is well."""
        checks = (
            (
                1 <= len(self.models) <= 2,
                f"MODEL: give one model, or one for each side; got {len(self.models)}",
            ),
            (not (self.input and self.text), "--text: there is an --input; give one of them"),
            (
                not self.recorded or bool(self.input),
                "--recorded: needs an --input, whose lines hold it",
            ),
            (
                not self.recorded or self.engine == "none",
                "--recorded: with --engine vllm the server's are; leave it out",
            ),
            (
                0 < self.temperature < math.inf,
                f"--temperature: {self.temperature} must be positive and finite",
            ),
            (self.rows >= 1, f"--rows: {self.rows} must be at least 1"),
            (self.max_tokens >= 2, f"--max-tokens: {self.max_tokens} must be at least 2"),
        )
        return [message for holds, message in checks if not holds]

    def sides(self) -> tuple[SideSpec, SideSpec]:
        """Fill in both sides.

        Raises UserError for a recipe that does not exist, has faults, or refuses a change.
        """
        rows = read_recipes(self.recipes)

        def filled(side: SideArguments, model: str) -> SideSpec:
            precision = _over(self.precision, side.precision)
            recipe = get_recipe(side.recipe or self.recipe, precision, rows)
            dtype = side.compute_dtype or self.compute_dtype
            return SideSpec(model, recipe, "rollout", dtype, precision.backend)

        a, b = filled(self.a, self.models[0]), filled(self.b, self.models[-1])
        phases = _phases(self.a.phase, self.b.phase, alike=a == b)
        return dataclasses.replace(a, phase=phases[0]), dataclasses.replace(b, phase=phases[1])

    def vllm_run(self) -> RunConfig:
        """The run whose rollouts are a's by vLLM: half of a row is left for the completion."""
        new = self.max_tokens // 2
        rollout = RolloutConfig(
            max_prompt_tokens=self.max_tokens - new,
            max_new_tokens=new,
            temperature=self.temperature,
            engine="vllm",
            vllm=self.vllm,
        )
        return RunConfig(
            recipe=self.a.recipe or self.recipe,
            recipes=read_recipes(self.recipes),
            precision=_over(self.precision, self.a.precision),
            compute_dtype=self.a.compute_dtype or self.compute_dtype,
            rollout=rollout,
        )


@dataclass(frozen=True)
class SideSpec:
    """What a side is, as it is written into the results."""

    model: str
    recipe: Recipe
    phase: Phase
    compute_dtype: str
    backend: Literal["auto", "reference", "cpu", "hopper"]


def _over(common: Any, side: Any) -> Any:
    """The changes for both sides, with one side's over them, of a PrecisionConfig or of a table in
    it."""
    default, changes = type(side)(), {}
    for name, value in vars(side).items():
        if dataclasses.is_dataclass(value):
            changes[name] = _over(getattr(common, name), value)
        elif value != getattr(default, name):
            changes[name] = value
    return dataclasses.replace(common, **changes)


def _phases(a: Phase | None, b: Phase | None, alike: bool) -> tuple[Phase, Phase]:
    """Sides that nothing else tells apart are the rollout and its trainer; others are of one
    phase."""
    if a is None and b is None:
        return "rollout", "trainer" if alike else "rollout"
    opposite: dict[Phase, Phase] = {"rollout": "trainer", "trainer": "rollout"}
    if a is None:
        assert b is not None
        a = opposite[b] if alike else b
    return a, b or (opposite[a] if alike else a)


def compare(arguments: CompareArguments) -> int:
    """Print the comparison; return 1 where --expect-equal is given and a bit differs."""
    import sys
    from functools import cache
    from pathlib import Path

    import jax.numpy as jnp

    from fp8rl_jax.cli.commands import progress, start_jax
    from fp8rl_jax.precision import check_recipe
    from fp8rl_jax.rollout.offline import check_writable, write_lines

    specs = arguments.sides()
    start_jax()
    for spec in specs:
        check_recipe(spec.recipe, spec.backend)
    from fp8rl_jax.compare.comparison import compare as compare_sides
    from fp8rl_jax.compare.comparison import document
    from fp8rl_jax.compare.side import Side, check_alike, describe_side, update_served
    from fp8rl_jax.compare.text import summary
    from fp8rl_jax.compare.tokens import (
        TEXT,
        as_recorded,
        as_tokens,
        from_file,
        from_text,
        from_vllm,
    )
    from fp8rl_jax.tokenizers.tokenizer import load_tokenizer
    from fp8rl_jax.training.source import find_model
    from fp8rl_jax.weights.hf_config import read_policy_config
    from fp8rl_jax.weights.load import load_policy

    if arguments.json:
        check_writable(arguments.json)
    directories = [find_model(spec.model, progress) for spec in specs]
    for model in dict.fromkeys((*arguments.models, *filter(None, [arguments.start]))):
        if name := _transform(model):
            progress(
                f"{model}: served what rollout.transform = {name!r} made of its weights at each "
                "step; it is left out here, and the weights are compared as they are in the files"
            )
    configs = [read_policy_config(directory) for directory in directories]
    check_alike(configs, directories)
    tokenizer = load_tokenizer(directories[0], configs[0].vocab_size)
    if arguments.input:
        limit = min(config.max_position_embeddings for config in configs)
        rows = from_file(
            arguments.input, configs[0].vocab_size, tokenizer, limit, arguments.recorded
        )
    else:
        rows = from_text(arguments.text or TEXT, tokenizer)
    loaded = cache(load_policy)
    policies = [
        loaded(Path(directory).resolve(), jnp.dtype(spec.compute_dtype))
        for spec, directory in zip(specs, directories, strict=True)
    ]
    used, recorded = rows[: arguments.rows], arguments.recorded
    if arguments.engine == "vllm":
        if tokenizer is None:
            raise UserError(f"{directories[0]}: has no tokenizer, which vLLM asks for")
        used = from_vllm(arguments.vllm_run(), policies[0], tokenizer, used)
        recorded = "vllm"
    tokens = as_tokens(used, arguments.max_tokens)
    sides = [
        Side.of(policy, spec.recipe, spec.phase, spec.compute_dtype, tokens, spec.backend)
        for policy, spec in zip(policies, specs, strict=True)
    ]
    shown = progress if sys.stderr.isatty() else lambda line: None
    comparison = compare_sides(*sides, tokens, shown, arguments.temperature)
    given = len(rows), sum(len(row.prompt) + len(row.completion) for row in rows)
    described = [describe_side(spec.model, side) for spec, side in zip(specs, sides, strict=True)]
    told = (recorded, as_recorded(used, arguments.max_tokens)) if recorded else None
    results = document(comparison, described, tokens, tokenizer, given, told)
    if arguments.start:
        start = find_model(arguments.start, progress)
        check_alike([read_policy_config(start), configs[0]], [start, directories[0]])
        results["arrived"] = [
            update_served(*map(load_policy, (start, directory)), spec.recipe, spec.compute_dtype)
            for spec, directory in zip(specs, directories, strict=True)
        ]
    if arguments.json:
        write_lines(arguments.json, [results | {"made": _record()}])
    print(summary(results))
    return 1 if arguments.expect_equal and not comparison.equal else 0


def _transform(model: str) -> str:
    """The rollout.transform of a run; empty where there is none."""
    if (run := run_directory(model)) is None:
        return ""
    rollout = read_values(RunConfig, [str(run)], []).get("rollout", {})
    return rollout.get("transform", "")


def _record() -> dict:
    """What made the results: command, versions, devices."""
    import sys
    from importlib.metadata import version

    import jax

    return {
        "command": ["fp8rl", *sys.argv[1:]],
        "versions": {name: version(name) for name in ("fp8rl_jax", "jax", "jaxlib")},
        "devices": [f"{device.platform}:{device.device_kind}" for device in jax.devices()],
    }
