"""What the mismatch is made of, and how it grows with depth: `python -m experiments.depth --output
FOLDER`.

Forward passes alone. A model is cut to its first layers, and each recipe's own rollout continues
ten sets of prompts: k3 is defined over tokens that the rollout under test sampled. On another's
tokens one that this rollout finds unlikely may outweigh all others. Four programs say how likely
the sampled tokens are:

    trainer    the update's forward, the trainer's formats, all tokens of a completion at once
    linears    the same program with the rollout's formats of the linears
    cache      the same program with all of the rollout's formats: the FP8 cache and queries are new
    decode     the rollout as it sampled: a token at a time over its cache, the formats of `cache`

Neighbours differ in one thing, so their k3 says what each part is worth: formats (trainer -
linears), cache (linears - cache), order of sums (cache - decode). `total` is trainer - decode, what
a run would log. k3 is no distance: the parts need not add up.

Tokens' k3 has a heavy tail. So the median over the sets stands beside the mean, and the largest
token's share of the total is kept.

The rollout's layers are scanned, as its unrolled form compiles ten times as long.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.behaviour import measured
from experiments.benchmarks.machine import facts
from experiments.command import run_command
from experiments.record import read, write
from fp8rl_jax.compare.probe import Tokens, at_once
from fp8rl_jax.config.recipe import RECIPES, ForwardFormats, Recipe
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.forms import rollout_policy, trainer_policy
from fp8rl_jax.models.policy import Policy, init_policy, run_of_layers, with_scales
from fp8rl_jax.rl.metrics import k3
from fp8rl_jax.rollout.calibration import calibrate_on_prompts
from fp8rl_jax.rollout.engine import Prompts, pad_prompts
from fp8rl_jax.rollout.sampler import Rollout, generate
from fp8rl_jax.rollout.sampling import Sampling
from fp8rl_jax.tokenizers.tokenizer import load_tokenizer
from fp8rl_jax.weights.hf_config import read_policy_config
from fp8rl_jax.weights.load import load_policy
from fp8rl_jax.weights.resolve import resolve_model

MODEL = "smollm2-135m"
SETS = (
    *("basic_arithmetic", "chain_sum", "spell_backward", "letter_counting", "word_sorting"),
    *("gcd", "number_sorting", "leg_counting", "caesar_cipher", "syllogism"),
)
"""Tasks of reasoning-gym: a prompt set each."""
PROMPTS, WIDTH, NEW = 4, 24, 16
PARTS = {"formats": (0, 1), "cache": (1, 2), "order": (2, 3), "total": (0, 3)}
"""Places of two of the four programs: trainer, linears, cache, decode."""
COMPUTE = ForwardFormats()
BACKEND = "reference"


@dataclass(frozen=True)
class Arguments:
    """Mismatch by depth, split into formats, cache and order of sums."""

    output: str = "experiments/results/depth"
    """Directory of results.json, summary.md and depth.svg. Points that results.json has already are
    kept."""
    depths: tuple[int, ...] = (2, 4, 8, 16, 30)
    """Layers of the model, its first."""
    weights: tuple[str, ...] = ("smollm2", "random")
    """SmolLM2-135M, and random weights in its shape (GPT-2's initialization)."""
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    """Compute dtypes."""
    recipes: tuple[str, ...] = tuple(name for name in RECIPES if name not in ("jet-rl",))
    """jet-rl has the formats of fp8-e2e."""

    def problems(self) -> list[str]:
        """Every value that cannot work, one line each; empty where all is well."""
        unknown = [f"--recipes: {name} unknown" for name in self.recipes if name not in RECIPES]
        unknown += [
            f"--weights: {name} unknown (smollm2, random)"
            for name in self.weights
            if name not in ("smollm2", "random")
        ]
        return unknown + [
            f"--depths: {depth} must be from 1 to 30"
            for depth in self.depths
            if not 1 <= depth <= 30
        ]


@cache
def model(weights: str) -> Policy:
    """All layers, float32."""
    policy = load_policy(resolve_model(MODEL), jnp.float32)
    return policy if weights == "smollm2" else init_policy(policy.config, jax.random.key(0))


def cut(policy: Policy, depth: int) -> Policy:
    """The first `depth` layers between the embedding and the head."""
    config: PolicyConfig = replace(policy.config, num_layers=depth)
    return Policy(
        config, policy.embed_tokens, run_of_layers(policy, 0, depth), policy.norm, policy.lm_head
    )


@cache
def prompts() -> Prompts:
    """The prompt sets one after the other, the last WIDTH tokens of each prompt."""
    import reasoning_gym

    directory = resolve_model(MODEL)
    tokenizer = load_tokenizer(directory, read_policy_config(directory).vocab_size)
    rows = []
    for name in SETS:
        data = reasoning_gym.create_dataset(name, size=PROMPTS, seed=0)
        rows += [tokenizer.encode(data[i]["question"])[-WIDTH:] for i in range(PROMPTS)]
    return pad_prompts(rows, list(range(len(rows))), WIDTH)


_calibrate = partial(calibrate_on_prompts, backend=BACKEND)
_serve = jax.jit(rollout_policy, static_argnums=(1, 2, 3, 4))
_train = jax.jit(trainer_policy, static_argnums=(1, 2, 3))
_at_once = jax.jit(at_once)
_sample = partial(generate, samples=1, sampling=Sampling(max_new_tokens=NEW))


def point(
    weights: str, depth: int, dtype: str, recipes: tuple[str, ...]
) -> dict[str, dict[str, Any]]:
    """By recipe: k3 of each part for each prompt set; `tokens`, how many were sampled; and of the
    total the largest token's share, and the largest difference of a log-probability.

    Recipes that sample or score alike share it.
    """
    policy, kind, given = cut(model(weights), depth), jnp.dtype(dtype), prompts()

    @cache
    def served(recipe: Recipe) -> Policy:
        made = _serve(policy, recipe, kind, False, BACKEND)[0]
        return with_scales(made, _calibrate(policy, given, recipe, kind))

    @cache
    def sampled(recipe: Recipe) -> Rollout:
        return _sample(served(recipe), *given, jax.random.key(0))

    @cache
    def scored(sampler: Recipe, recipe: Recipe, trainer: bool) -> jax.Array:
        rollout = sampled(sampler)
        tokens = Tokens(given.tokens, given.lengths, rollout.tokens, rollout.mask.sum(1))
        if trainer:
            return _at_once(_train(policy, recipe, kind, BACKEND), tokens)
        return _at_once(served(recipe), tokens)

    results = {}
    for name in recipes:
        # what is computed, and nothing else: the trainer measures the scales of a cache
        whole = replace(RECIPES[name], name="formats", correction="none")
        linears = replace(whole.rollout, query=COMPUTE.query, key=COMPUTE.key, value=COMPUTE.value)
        alone = Recipe("formats", rollout=linears)
        sampler = whole if whole.quantizes_cache else alone
        ways = (
            scored(sampler, replace(whole, rollout=COMPUTE), True),
            scored(sampler, alone, False),
            scored(sampler, sampler, False),
            sampled(sampler).policy_logprobs,
        )
        found = {part: np.asarray(k3(ways[i] - ways[j])) for part, (i, j) in PARTS.items()}
        results[name] = {
            part: [short(x) for x in values.reshape(len(SETS), -1).mean(1)]
            for part, values in found.items()
        } | {
            "tokens": ways[3].size,
            "share": short(found["total"].max() / max(found["total"].sum(), 1e-30)),
            "largest": short(np.abs(ways[0] - ways[3]).max()),
        }
    return results


def short(x: float | np.floating) -> float:
    """Four digits, as the record has them."""
    return float(f"{x:.4g}")


def mean(values: list[float]) -> tuple[float, float, float]:
    """Mean over prompt sets, and its 95 % interval by bootstrap over the sets."""
    drawn = np.random.default_rng(0).choice(values, (10_000, len(values))).mean(1)
    return float(np.mean(values)), *(float(x) for x in np.quantile(drawn, (0.025, 0.975)))


def table(chosen: list[dict]) -> str:
    """Write the points of one model and dtype, by depth: k3 by recipe, and at the greatest depth
    its interval, parts and largest token."""

    def cell(p: dict, name: str) -> str:
        total = p["k3"][name]["total"]
        middle, low, high = mean(total)
        limits = f" ({low:.1e} to {high:.1e})" if p is chosen[-1] else ""
        return f"{middle:.1e}{limits} / {np.median(total):.1e}"

    rows = [
        ["recipe", *(f"{p['depth']} layers" for p in chosen)]
        + ["of it: formats", "FP8 cache", "order of sums", "largest token"]
    ]
    rows.append(["---"] * len(rows[0]))
    for name, last in chosen[-1]["k3"].items():
        parts = [f"{np.mean(last[part]):.1e}" for part in ("formats", "cache", "order")]
        cells = [cell(p, name) for p in chosen]
        rows.append([f"`{name}`", *cells, *parts, f"{last['share']:.0%}"])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def summary(points: list[dict]) -> str:
    """Write a table a model and dtype."""
    about = (
        "k3 on tokens that the recipe's own rollout sampled, mean / median over the sets of "
        "prompts; at the greatest depth the mean's 95 % interval by bootstrap over the sets, its "
        "parts, and the share of it that is the largest token's."
    )
    parts = []
    for weights, dtype in dict.fromkeys((p["weights"], p["dtype"]) for p in points):
        chosen = sorted(
            (p for p in points if (p["weights"], p["dtype"]) == (weights, dtype)),
            key=lambda p: p["depth"],
        )
        parts += [f"### {weights}, {dtype}", about, table(chosen)]
    return "\n\n".join(parts) + "\n"


def draw(points: list[dict], path: Path) -> None:
    """Total k3 by depth, a panel for each model and dtype."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = list(dict.fromkeys((p["weights"], p["dtype"]) for p in points))
    figure, axes = plt.subplots(
        1, len(panels), figsize=(3.4 * len(panels), 3.6), sharey=True, squeeze=False
    )
    for axis, (weights, dtype) in zip(axes[0], panels, strict=True):
        chosen = sorted(
            (p for p in points if (p["weights"], p["dtype"]) == (weights, dtype)),
            key=lambda p: p["depth"],
        )
        for name in chosen[-1]["k3"]:
            found = np.asarray([mean(p["k3"][name]["total"]) for p in chosen])
            line = axis.plot(
                [p["depth"] for p in chosen], found[:, 0], marker="o", markersize=3, label=name
            )[0]
            axis.fill_between(
                [p["depth"] for p in chosen],
                found[:, 1],
                found[:, 2],
                alpha=0.15,
                color=line.get_color(),
            )
        axis.set(
            title=f"{weights}, {dtype}",
            xlabel="layers",
            yscale="log",
            xscale="log",
            xticks=[p["depth"] for p in chosen],
        )
        axis.set_xticklabels([p["depth"] for p in chosen])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("mismatch, k3")
    axes[0][-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)


def main(argv: list[str]) -> int:
    """Exit code: 0, or 2 for a fault in what was given."""
    return run_command("depth", Arguments, run, argv)


def run(arguments: Arguments) -> None:
    """Point by point; what is measured is on disk at once.

    Raises:
        UserError: what is there was measured with other recipes or dtypes, or by other code.
    """
    output = Path(arguments.output)
    output.mkdir(parents=True, exist_ok=True)
    path = output / "results.json"
    record = read(path) or {}
    record["behaviour"] = measured(arguments.recipes, arguments.dtypes, record)
    record.setdefault("points", [])
    have = {(p["weights"], p["depth"], p["dtype"]) for p in record["points"]}
    for depth in arguments.depths:
        for dtype in arguments.dtypes:
            for weights in arguments.weights:
                if (weights, depth, dtype) in have:
                    continue
                print(f"{weights}, {depth} layers, {dtype}", file=sys.stderr)
                found = point(weights, depth, dtype, arguments.recipes)
                record["made"] = facts("experiments.depth")
                made = {
                    "weights": weights,
                    "depth": depth,
                    "dtype": dtype,
                    "commit": record["made"]["commit"],
                }
                record["points"].append(made | {"k3": found})
                write(path, record)
            jax.clear_caches()  # the programs of one depth fit no other
    (output / "summary.md").write_text(summary(record["points"]))
    draw(record["points"], output / "depth.svg")
    print(summary(record["points"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
