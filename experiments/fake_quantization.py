"""A check against others: is the mismatch what FP8 formats make of this model, or what our code
does? `python -m experiments.fake_quantization --python PYTHON --output FILE` (`make peers`).

Our rollout samples completions under fp8-rollout, and our trainer scores them without quantization,
both in float32. Then transformers scores the same tokens in torch, with fake quantization written
from the definitions by `benchmarks/peers/torch_fake_quantization.py`, which shares no code with
ours. On either side

    k3 = E[rho - 1 - log rho],    rho = unquantized probability / quantized one of a sampled token

is between two scorings of the same tokens by the same program. The tokens are those of our rollout,
so k3 is an unbiased KL for `both` alone, and for the other variants a measure.

Besides: share of codes that our quantizer and torch's have in common, and the relative error of
weights, activations and products of each kind of linear, with what makes a product's error larger
than that of its operands:

    by inverses     torch once more with amax * (1 / 448) and x * (1 / scale), as our quantizer has
                    it, where the definition divides: how far roundings alone take the two apart
    repeats         both sides again with embeddings that are moved by a millionth: the spread of k3
                    that roundings alone make, on the same tokens
    cancellation    sqrt(sum_jk (x_k w_jk)^2 / sum_j y_j^2): 1 for independent operands, and above
                    where the terms of a product cancel, so that it is small beside its errors
    random signs    the product's error once more with the signs of x drawn at random: the same
                    magnitudes and the same errors, without the cancellation
    accumulated     the error of a product in the quantized forward, whose input is off already
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from experiments.behaviour import measured
from experiments.benchmarks.machine import facts
from experiments.benchmarks.peer import Peer, PeerSpec
from experiments.command import run_command
from experiments.depth import SETS
from experiments.record import write
from fp8rl_jax.compare.probe import at_once, one_by_one
from fp8rl_jax.compare.tokens import Tokens
from fp8rl_jax.config.formats import TensorFormat
from fp8rl_jax.config.recipe import RECIPES, ForwardFormats, Recipe
from fp8rl_jax.models.forms import rollout_policy, trainer_policy
from fp8rl_jax.models.policy import Policy, Weight, changed_policy
from fp8rl_jax.precision import quantize
from fp8rl_jax.rollout.engine import pad_prompts
from fp8rl_jax.rollout.sampler import generate
from fp8rl_jax.rollout.sampling import Sampling
from fp8rl_jax.tokenizers.tokenizer import Tokenizer, end_tokens
from fp8rl_jax.weights.load import load
from fp8rl_jax.weights.resolve import resolve_model

SCRIPT = "torch_fake_quantization.py"
KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
BACKEND = "reference"
RESAMPLED = 10_000
_ScaleRule = Literal["float32", "power_of_two"]


@dataclass(frozen=True)
class Variant:
    """What is quantized, in the words of both sides."""

    weights: bool = True
    activations: bool = True
    kinds: tuple[str, ...] = KINDS
    """Of the linears."""
    ends: int = 0
    """Layers at each end that are not quantized."""
    scale: _ScaleRule = "float32"
    per_tensor: bool = False
    """One scale for a weight, and one for the activations of a sequence."""

    def for_peer(self, layers: int) -> dict[str, Any]:
        """As the peer's script takes it, for a model of so many layers."""
        weights, activations = ("tensor", "tensor") if self.per_tensor else ([128, 128], [1, 128])
        return {
            "kinds": self.kinds,
            "layers": list(range(self.ends, layers - self.ends)),
            "weights": weights if self.weights else None,
            "activations": activations if self.activations else None,
            "power_of_two": self.scale == "power_of_two",
            "inverse": False,
        }

    def recipe(self) -> Recipe | None:
        """As our rollout takes it; None where no kernel does: an activation that is quantized
        needs a weight that is, and has a group of its own."""
        if not self.weights or self.per_tensor:
            return None
        formats = ForwardFormats(
            TensorFormat("e4m3", (128, 128), self.scale),
            TensorFormat("e4m3", (1, 128), self.scale) if self.activations else TensorFormat(),
        )
        return Recipe(
            "fake",
            rollout=formats,
            quantized=tuple(f"*.{kind}" for kind in self.kinds),
            first_layers_in_compute=self.ends,
            last_layers_in_compute=self.ends,
        )


VARIANTS = {
    "both": Variant(),
    "weights alone": Variant(activations=False),
    "activations alone": Variant(weights=False),
    "without down_proj": Variant(kinds=KINDS[:-1]),
    "only down_proj": Variant(kinds=KINDS[-1:]),
    "without the first and last two layers": Variant(ends=2),
    "power-of-two scales": Variant(scale="power_of_two"),
    "a scale per tensor": Variant(per_tensor=True),
}
"""128x128 and 1x128 with float32 scales, but for what the name says."""
REPEATED = ("both", "without the first and last two layers", "power-of-two scales")
REPEATS, MOVED = 4, 1e-6


@dataclass(frozen=True)
class Arguments:
    """The mismatch of fake quantization in torch beside ours, and one JSON file."""

    python: str
    """Interpreter with torch and transformers (`make peers` makes one)."""
    output: str
    """JSON file."""
    model: str = "smollm2-135m"
    """A Llama, as `fp8rl compare` takes it."""
    prompts: int = 4
    """Of each of ten tasks of reasoning-gym."""
    prompt_tokens: int = 32
    """The last ones of a prompt."""
    new_tokens: int = 24
    """Of each completion, at most."""

    def problems(self) -> list[str]:
        """Every value that cannot work, one line each; empty where all is well."""
        least = {"prompts": 1, "prompt_tokens": 1, "new_tokens": 2}
        return [
            f"--{name.replace('_', '-')}: {getattr(self, name)} must be at least {number}"
            for name, number in least.items()
            if getattr(self, name) < number
        ]


Scores = list[np.ndarray]
"""Log-probabilities of the tokens of each completion, float64."""


def k3(exact: Scores, quantized: Scores) -> list[np.ndarray]:
    """rho - 1 - log rho of every token, rho = exp(exact - quantized)."""
    differences = (a - b for a, b in zip(exact, quantized, strict=True))
    return [np.expm1(d) - d for d in differences]


def estimate(tokens: Sequence[np.ndarray]) -> dict[str, Any]:
    """Mean over all tokens, its 95 % interval by bootstrap over prompts, and the median token.

    Args:
        tokens: the values of each prompt's tokens.
    """
    counts = [len(values) for values in tokens]
    means = [float(values.mean()) for values in tokens]
    return {
        **weighted(means, counts),
        "median_token": float(np.median(np.concatenate(tokens))),
        "by_prompt": [rounded(value) for value in means],
    }


def mean(tokens: Sequence[np.ndarray]) -> float:
    """Mean over all tokens of all prompts."""
    return float(np.concatenate(tokens).mean())


def weighted(means: Sequence[float], counts: Sequence[int]) -> dict[str, Any]:
    """Mean over the tokens of all prompts from the prompts' means, and its interval."""
    sums, numbers = np.asarray(means) * counts, np.asarray(counts)
    drawn = np.random.default_rng(0).integers(len(sums), size=(RESAMPLED, len(sums)))
    means_drawn = sums[drawn].sum(1) / numbers[drawn].sum(1)
    low, high = np.quantile(means_drawn, (0.025, 0.975))
    return {"k3": float(sums.sum() / numbers.sum()), "interval": [float(low), float(high)]}


def apart(ours: Scores, theirs: Scores) -> dict[str, float]:
    """How far two programs' log-probabilities of the same tokens are from each other."""
    differences = np.concatenate(ours) - np.concatenate(theirs)
    return {
        "largest": float(np.abs(differences).max()),
        "mean": float(np.abs(differences).mean()),
        "k3": float(np.mean(np.expm1(differences) - differences)),
    }


def rounded(value: Any) -> Any:
    """Floats to five digits, within whatever holds them."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


_serve = jax.jit(rollout_policy, static_argnums=(1, 2, 3, 4))
_train = jax.jit(trainer_policy, static_argnums=(1, 2, 3))
_at_once, _one_by_one = jax.jit(at_once), jax.jit(one_by_one)


class Ours:
    """Our sampler's completions, and how our programs score them.

    Attributes:
        sequences, prompt_lengths: token ids of each prompt with its completion.
        rollout: the log-probabilities that came with the tokens.
    """

    def __init__(self, policy: Policy, tokenizer: Tokenizer, arguments: Arguments):
        import reasoning_gym

        self.policy = policy
        rows = []
        for name in SETS:
            data = reasoning_gym.create_dataset(name, size=arguments.prompts, seed=0)
            encoded = (tokenizer.encode(data[i]["question"]) for i in range(arguments.prompts))
            rows += [tokens[-arguments.prompt_tokens :] for tokens in encoded]
        prompts = pad_prompts(rows, list(range(len(rows))), arguments.prompt_tokens)
        ends = end_tokens(tokenizer, policy.config.eos_token_ids)
        sampling = Sampling(arguments.new_tokens, stop_token_ids=ends)
        served = self._served(RECIPES["fp8-rollout"])
        made = generate(served, *prompts, jax.random.key(0), samples=1, sampling=sampling)
        self.mask = np.asarray(made.mask)
        lengths = jnp.asarray(self.mask.sum(1), jnp.int32)
        self.tokens = Tokens(prompts.tokens, prompts.lengths, made.tokens, lengths)
        self.rollout = self._rows(made.policy_logprobs)
        completions = np.asarray(made.tokens)
        self.prompt_lengths = [len(row) for row in rows]
        self.sequences = [
            [*row, *completions[i, self.mask[i]].tolist()] for i, row in enumerate(rows)
        ]

    def trainer(self) -> Scores:
        """Nothing quantized, all of a completion at once."""
        trained = _train(self.policy, RECIPES["bf16"], jnp.dtype("float32"), BACKEND)
        return self._rows(_at_once(trained, self.tokens))

    def score(self, recipe: Recipe, decode: bool = False, seed: int | None = None) -> Scores:
        """By the rollout's formats, all of a completion at once or a token at a time.

        Args:
            seed: of what the embedding is moved by; None: it is not.
        """
        way = _one_by_one if decode else _at_once
        return self._rows(way(self._served(recipe, seed), self.tokens))

    def _served(self, recipe: Recipe, seed: int | None = None) -> Policy:
        policy = self.policy if seed is None else moved(self.policy, seed)
        return _serve(policy, recipe, jnp.dtype("float32"), False, BACKEND)[0]

    def _rows(self, values: jax.Array) -> Scores:
        wide = np.asarray(values, np.float64)
        return [row[kept] for row, kept in zip(wide, self.mask, strict=True)]


def moved(policy: Policy, seed: int) -> Policy:
    """The policy with another last digit or two in its embedding, and so in a head tied to it."""
    embedding = policy.embed_tokens
    noise = jax.random.normal(jax.random.key(seed), embedding.value.shape)
    other = Weight(embedding.value * (1 + MOVED * noise), embedding.axes)
    return changed_policy(policy, embed_tokens=other)


def compare_codes(path: Path, policy: Policy) -> dict[str, Any]:
    """Our quantizer's codes and scales beside torch's, of the same numbers.

    Args:
        path: what the peer has written.
    """
    tensors = policy.stack.tensors()
    found: dict[str, Any] = {}
    with np.load(path) as arrays:
        inputs = [name.removeprefix("x.") for name in arrays.files if name.startswith("x.")]
        sources: dict[str, tuple[tuple[int, int], list[tuple[str, Callable[[], Any]]]]] = {
            "weights": (
                (128, 128),
                [
                    (f"weight.{i}.{kind}", partial(lambda k, i: tensors[k].value[i], kind, i))
                    for kind in KINDS
                    for i in range(policy.config.num_layers)
                ],
            ),
            "activations": (
                (1, 128),
                [(f"activation.{n}", partial(arrays.__getitem__, f"x.{n}")) for n in inputs],
            ),
        }
        for role, (block, tensors_of) in sources.items():
            for rule in ("float32", "power_of_two"):
                fmt = TensorFormat("e4m3", block, rule)
                made = jax.jit(partial(quantize, fmt=fmt, backend=BACKEND))
                ways = (rule, "inverse") if rule == "float32" else (rule,)
                counts = {way: Agreement() for way in ways}
                for name, read in tensors_of:
                    ours = made(jnp.asarray(read()))
                    for way, agreement in counts.items():
                        agreement.add(
                            np.asarray(ours.values).view(np.uint8),
                            arrays[f"{way}.codes.{name}"],
                            np.asarray(ours.scales),
                            arrays[f"{way}.scales.{name}"],
                        )
                for way, agreement in counts.items():
                    found[f"{role}, {way}"] = asdict(agreement)
    return found


@dataclass
class Agreement:
    """How many codes and scales two quantizers have in common."""

    codes: int = 0
    equal_codes: int = 0
    largest_step: int = 0
    """The largest distance of two codes, in steps of the format."""
    scales: int = 0
    equal_scales: int = 0
    largest_scale_error: float = 0.0
    """The largest relative distance of two scales."""

    def add(self, codes: Any, other: Any, scales: Any, other_scales: Any) -> None:
        """Count one tensor: codes as uint8, scales as float32, of one shape each."""
        self.codes += codes.size
        self.equal_codes += int((codes == other).sum())
        self.largest_step = max(self.largest_step, int(np.abs(steps(codes) - steps(other)).max()))
        self.scales += scales.size
        self.equal_scales += int((scales == other_scales).sum())
        relative = np.abs(scales.astype(np.float64) / other_scales - 1)
        self.largest_scale_error = max(self.largest_scale_error, float(relative.max()))


def steps(codes: np.ndarray) -> np.ndarray:
    """The place of each code in the order of values, 0 for both zeros."""
    size = (codes & 0x7F).astype(np.int32)
    return np.where(codes & 0x80, -size, size)


def measure(arguments: Arguments) -> dict[str, Any]:
    """Everything of the record but where it was made."""
    directory = resolve_model(arguments.model)
    policy, tokenizer = load(directory)
    ours = Ours(policy, tokenizer, arguments)
    layers, counts = policy.config.num_layers, [len(row) for row in ours.rollout]
    settings = {
        "model": str(directory),
        "sequences": ours.sequences,
        "prompt_lengths": ours.prompt_lengths,
        "threads": len(os.sched_getaffinity(0)),
    }
    peer = Peer(PeerSpec("torch", "--python", arguments.python, SCRIPT), settings, 1, sum(counts))
    with peer, tempfile.TemporaryDirectory() as folder:
        peer.wait_until_ready()
        said = peer.answer({"score": None})
        exact, trainer = theirs(said), ours.trainer()
        record: dict[str, Any] = {
            "peer": peer.about,
            "completions": {"tokens": sum(counts), "prompts": len(counts), "of_prompt": counts},
            "unquantized": apart(trainer, exact),
            "rollout": estimate(k3(trainer, ours.rollout)),
            "variants": {},
            "hidden": {"median_rms": said["rms"], "largest": said["largest"], "error": {}},
        }
        for name, variant in VARIANTS.items():
            print(name, file=sys.stderr)
            said = peer.answer({"score": variant.for_peer(layers)})
            scored, recipe = theirs(said), variant.recipe()
            of = record["variants"][name] = {"torch": estimate(k3(exact, scored))}
            record["hidden"]["error"][name] = said["hidden_error"]
            if recipe is not None:
                own = ours.score(recipe)
                of["ours"] = estimate(k3(trainer, own))
                of["apart"] = apart(own, scored)
            if name == "both":
                by_inverses = variant.for_peer(layers) | {"inverse": True}
                other = theirs(peer.answer({"score": by_inverses}))
                record["by_inverses"] = estimate(k3(exact, other)) | {"apart": apart(other, scored)}
        print("repeats", file=sys.stderr)
        record["repeats"] = {name: {"torch": [], "ours": []} for name in REPEATED}
        for seed in range(REPEATS):
            for name, of in record["repeats"].items():
                told = VARIANTS[name].for_peer(layers) | {"moved": [seed, MOVED]}
                recipe = VARIANTS[name].recipe()
                assert recipe is not None
                again = theirs(peer.answer({"score": told}))
                of["torch"].append(mean(k3(exact, again)))
                of["ours"].append(mean(k3(trainer, ours.score(recipe, seed=seed))))
        weights_alone = VARIANTS["weights alone"].recipe()
        assert weights_alone is not None
        decoded = ours.score(weights_alone, decode=True)
        record["decode, weights alone"] = estimate(k3(trainer, decoded))
        print("errors by kind", file=sys.stderr)
        record["errors"] = peer.answer({"errors": 0})
        record["accumulated"] = peer.answer({"accumulated": True})
        record["gaussian"] = peer.answer({"gaussian": 0})
        print("codes", file=sys.stderr)
        path, chosen = Path(folder) / "codes.npz", range(0, len(counts), arguments.prompts)
        peer.answer({"codes": str(path), "sequences": list(chosen)})
        record["codes"] = compare_codes(path, policy)
    return rounded(record)


def theirs(said: dict[str, Any]) -> Scores:
    """Log-probabilities as the peer answers them."""
    return [np.asarray(row, np.float64) for row in said["logprobs"]]


def summary(record: dict[str, Any]) -> str:
    """Write what the record says as tables: variants, kinds of linears, codes."""
    lines = [
        "| quantized | torch, k3 (95 % interval) | its median token | ours on the same tokens |",
        "|---|---|---|---|",
    ]

    def cell(of: dict[str, Any]) -> str:
        low, high = of["interval"]
        return f"{of['k3']:.4f} ({low:.4f} to {high:.4f})"

    for name, of in record["variants"].items():
        own = cell(of["ours"]) if "ours" in of else ""
        lines.append(
            f"| {name} | {cell(of['torch'])} | {of['torch']['median_token']:.1e} | {own} |"
        )
    lines.append(f"| both: our rollout itself | | | {cell(record['rollout'])} |")
    lines.insert(
        3,
        f"| both, by inverses | {cell(record['by_inverses'])} | "
        f"{record['by_inverses']['median_token']:.1e} | |",
    )
    decoded = cell(record["decode, weights alone"])
    lines.append(f"| weights alone, a token at a time | | | {decoded} |")
    heads = "torch, mean (least to largest) | ours |"
    lines += ["", f"| embedding moved by 1e-6, {REPEATS} times | {heads}", "|---|---|---|"]
    for name, of in record["repeats"].items():
        cells = [f"{np.mean(x):.4f} ({min(x):.4f} to {max(x):.4f})" for x in of.values()]
        lines.append(f"| {name}, repeated | {' | '.join(cells)} |")
    lines += [
        "",
        "| linear | weights | activations | product | product, all tokens | cancellation "
        "| product, random signs | accumulated |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, of in {"independent normal": record["gaussian"], **record["errors"]}.items():
        middle, every = of["median"], of["all_tokens"]
        shares = (
            of["weights"],
            middle["activations"],
            middle["product"],
            every["product"],
        )
        cells = [f"{100 * share:.1f} %" for share in shares]
        cells += [f"{middle['cancellation']:.2f}", f"{100 * middle['random_signs']:.1f} %"]
        accumulated = record["accumulated"].get(name)
        cells.append(f"{100 * accumulated['outputs']:.1f} %" if accumulated else "")
        shown = f"`{name}`" if name in KINDS else name
        lines.append(f"| {shown} | {' | '.join(cells)} |")
    lines += ["", "| codes | equal codes | equal scales |", "|---|---|---|"]
    for name, of in record["codes"].items():
        shares = (of["equal_codes"] / of["codes"], of["equal_scales"] / of["scales"])
        lines.append(f"| {name} | {' | '.join(f'{100 * share:.4f} %' for share in shares)} |")
    return "\n".join(lines) + "\n"


def run(arguments: Arguments) -> None:
    """Measure, write the file, and print the tables."""
    made = {
        "made": facts("experiments.fake_quantization"),
        "behaviour": measured(("bf16", "fp8-rollout"), ("float32",)),
    }
    record = measure(arguments)
    given = {
        name: value for name, value in asdict(arguments).items() if name not in ("python", "output")
    } | {"model": Path(arguments.model).name}
    write(Path(arguments.output), made | {"arguments": given} | record)
    print(summary(record))


def main(argv: list[str]) -> int:
    """Exit code: 0, or 2 for a fault in what was given."""
    return run_command("fake_quantization", Arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
