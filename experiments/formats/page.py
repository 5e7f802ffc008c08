"""What docs/formats.md says of the records: its tables, and its picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.formats.attention import ATTENTION
from experiments.formats.mismatch import BASE, FLOWS
from experiments.formats.rows import BASELINE, BFLOAT16, ROWS
from fp8rl_jax.statistics import Comparison, compare_arms

RECORDS = Path(__file__).parents[1] / "results" / "formats"
MARGIN = 0.05
"""Nats of loss up to which a row counts as no worse."""

Entry = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """A section of the page: its heading, a paragraph, and a table of these cells."""

    heading: str
    about: str
    heads: list[str]
    rows: list[list[str]]


class Records:
    """The records of a folder; one that is not there has no entries."""

    def __init__(self, folder: Path = RECORDS):
        paths = {path.stem: path for path in sorted(folder.glob("*.json"))}
        self.kept = {name: json.loads(path.read_text()) for name, path in paths.items()}
        self.rows: dict[str, Any] = {}
        for record in self.kept.values():
            self.rows |= record["rows"]

    def entries(self, part: str, **key: Any) -> list[Entry]:
        """Those of a part that have these values."""
        found = self.kept.get(part, {"entries": []})["entries"]
        return [entry for entry in found if key.items() <= entry.items()]

    def settings(self, part: str) -> dict[str, Any]:
        """What a part was measured with."""
        return self.kept[part]["settings"]

    def names(self) -> list[str]:
        """Rows that anything is known of, by the bits of their weights, the most first."""
        return sorted(self.rows, key=lambda name: -round(self.bits(name)["nominal"], 2))

    def bits(self, name: str) -> dict[str, float]:
        """Nominal and stored bits of a weight."""
        return self.rows[name]["bits"]

    def k3(self, name: str, flow: str, batch: int | None = None) -> list[float]:
        """k3 of each set of prompts, of one batch or of those that all rows have."""
        batches = self.common if batch is None else {batch}
        entries = self.entries("mismatch", row=name, flow=flow)
        return [x for entry in entries if entry["batch"] in batches for x in entry["k3"]]

    @property
    def common(self) -> set[int]:
        """Batches that have been measured of all rows, so that rows are compared on the same."""
        whole: dict[str, set[int]] = {}
        for entry in self.entries("mismatch", flow="both"):
            whole.setdefault(entry["row"], set()).add(entry["batch"])
        return set.intersection(*whole.values()) if whole else set()


def median(values: Sequence[float]) -> tuple[float, float, float]:
    """Median over prompt sets, and its 95 % interval by bootstrap over the sets."""
    drawn = np.random.default_rng(0).choice(values, (10_000, len(values)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return float(np.median(values)), float(low), float(high)


def _interval(values: Sequence[float]) -> str:
    if not values:
        return ""
    middle, low, high = median(values)
    return f"{middle:.2g} ({low:.2g} to {high:.2g})"


def _middle(of: dict[str, float]) -> float:
    """Median over kinds of linear."""
    return float(np.median(list(of.values())))


def _percent(x: float) -> str:
    return f"{100 * x:.2g} %"


def _error(of: dict[str, float] | None) -> str:
    """A relative error, and the ratio of signal to noise that it is."""
    if not of:
        return ""
    x = _middle(of)
    return f"{_percent(x)}, {-20 * np.log10(x):.0f} dB" if x else "0"


def _range(of: dict[str, float] | None) -> str:
    """Least and largest of the kinds."""
    if not of:
        return ""
    low, high = min(of.values()), max(of.values())
    return (
        f"{100 * low:.2g} to {_percent(high)}" if f"{low:.2g}" != f"{high:.2g}" else _percent(low)
    )


def _bits(records: Records, name: str) -> str:
    nominal, stored = (records.bits(name)[key] for key in ("nominal", "stored"))
    return f"{nominal:.2f}" + (f" (kept in {stored:.2f})" if stored - nominal > 0.01 else "")


OUTSIDE = "from outside"
"""What marks a format that a file has registered (`--module`)."""


def _name(name: str) -> str:
    outside = name not in (BASELINE, *(row.name for row in ROWS))
    return f"`{name}`" + f", {OUTSIDE}" * outside


def _formats(records: Records, name: str) -> list[str]:
    """Cells that say which row this is."""
    own = records.rows[name]["activation"]
    beside = {name: "the same", "compute": "compute dtype"}.get(own, f"`{own}`")
    return [_name(name), "the same" if name == BFLOAT16 else beside]


def overview(records: Records, model: str) -> Table:
    """Every format in a line."""
    settings, rows = records.settings("mismatch"), []
    sets = len(records.entries("mismatch")[0]["k3"]) * len(records.common)
    for name in records.names():
        if not records.entries("mismatch", row=name):
            continue
        of = next(iter(records.entries("errors", row=name, model=model)), {})
        whole = {flow: records.k3(name, flow) for flow in FLOWS}
        if records.rows[name]["activation"] == "compute" and name != BFLOAT16:
            whole["weights"] = whole["both"]
        rows.append(
            [
                *_formats(records, name),
                _bits(records, name),
                _error(of.get("weight")),
                _error(of.get("activation")),
                _interval(whole["both"]),
                f"{np.mean(whole['both']):.2g}" if whole["both"] else "",
                _interval(whole["weights"]),
                _interval(whole["unified"]),
            ]
        )
    about = f"""
        {model}, float32 compute, {sets} sets of {settings["prompts"]} prompts, {settings["new_tokens"]} tokens of each, sampled
        by the side under test. Bits of a weight with its scales. Errors are relative, root mean square, of weights over a
        matrix, of activations the median over tokens; medians over layers and kinds of linear. k3: median over the sets of
        prompts, with a 95 % interval by bootstrap over these sets, one completion of each prompt
        ([with other prompts](#with-other-prompts)); the mean beside it, which a few tokens make. Rollout-only: served in the
        format, scored in float32. Unified: scored in the same formats, not exact. Under exact it is 0.0.
    """
    heads = [
        *("weights", "activations", "bits", "error of weights", "of activations"),
        *("k3, rollout-only", "its mean", "k3, weights alone", "k3, unified, not exact"),
    ]
    return Table("All formats", about, heads, rows)


def by_kind(records: Records, model: str) -> Table:
    """Errors by kind of layer."""
    inputs, cached, rows = (
        ("into attention", "o_proj", "into mlp", "down_proj"),
        ("key", "value"),
        [],
    )
    for name in records.names():
        for of in records.entries("errors", row=name, model=model):
            kinds = {**of.get("activation", {}), **of.get("cache", {})}
            cells = [_percent(kinds[kind]) if kinds else "" for kind in (*inputs, *cached)]
            rows.append([_name(name), _range(of["weight"]), *cells, _range(of.get("gradient"))])
    about = """
        Medians over layers, of activations, K, V and output gradients over tokens before; least to largest where there are
        more kinds of linear than columns. K and V are in the format of the activations, in groups along a token's heads.
    """
    heads = ["weights' format", "weights", *(f"x {kind}" for kind in inputs), "K", "V", "gradients"]
    return Table(f"Relative errors by kind of layer: {model}", about, heads, rows)


def learned(records: Records) -> Table | None:
    """Losses after supervised training."""
    whole: dict[str, list[Entry]] = {}
    for entry in sorted(records.entries("learning"), key=lambda entry: entry["seed"]):
        whole.setdefault(entry["row"], []).append(entry)
    if BASELINE not in whole:
        return None
    seeds, settings = len(whole[BASELINE]), records.settings("learning")
    whole = {name: of for name, of in whole.items() if len(of) == seeds}
    rows = []
    compared = {
        key: compare_arms(
            {name: [entry[key] for entry in of] for name, of in whole.items()},
            BASELINE,
            MARGIN,
            better="lower",
        )
        for key in ("loss", "unquantized")
    }
    for name in [BASELINE, *(name for name in records.names() if name in whole)]:
        cells = [
            _name(name) if name != BASELINE else "nothing quantized",
            "" if name == BASELINE else _gradient(records, name),
            f"{np.mean([entry['loss'] for entry in whole[name]]):.3f}",
        ]
        for of in compared.values():
            if name == BASELINE:
                cells.append("baseline")
                continue
            cells.append(against(of[name]))
        rows.append(cells)
    about = f"""
        The demo's policy from random weights, {settings["steps"]} supervised updates of {settings["batch_size"]} examples, {seeds} paired
        seeds, float32 compute; weights, activations and gradients in the format, forward and backward. Loss is the mean negative
        log-likelihood of a held-out answer's token, in nats. Differences to nothing quantized are paired over seeds, at 95 %
        where no other level stands, with the verdict of `fp8rl ablate` at a margin of {MARGIN}; behind it the difference that
        such a study sees in 80 % of all cases.
    """
    heads = [
        *("format", "gradients", "loss, in its own formats", "less the baseline's; could be seen"),
        "the same weights, nothing quantized; could be seen",
    ]
    return Table("What is learned in it", about, heads, rows)


def against(c: Comparison) -> str:
    """A difference to the baseline with its interval, its verdict, and what could have been
    seen."""
    level = "" if abs(c.alpha - 0.05) < 1e-9 else f"{100 * (1 - c.alpha):.4g} %: "
    limits = f"({level}{c.difference.low:+.3f} to {c.difference.high:+.3f})"
    seen = "" if c.detectable is None else f"{c.detectable:.3f}"
    return f"{c.difference.mean:+.3f} {limits}: {c.verdict}; {seen}"


def _gradient(records: Records, name: str) -> str:
    own = records.rows[name]["gradient"]
    return {name: "the same", "compute": "compute dtype"}.get(own, f"`{own}`")


def identical(records: Records) -> Table:
    """Exact mode."""
    rows = [
        [
            _name(name),
            str(entry["tokens"]),
            f"{entry['largest']}",
            "".join(f"{100 * of['alike']:.3g} %" for of in records.entries("sums", row=name)),
        ]
        for name in records.names()
        for entry in records.entries("exact", row=name)
    ]
    about = f"""
        Both sides in the format with `precision.exact`: largest difference of a log-probability between the sampler, token by
        token over its cache, and the trainer. {records.settings("exact")["model"]}, all layers; an identity, so one seed. Beside
        it what exact mode is for: the share of a linear's outputs, on real weights and inputs, whose products add up to the same
        float32 from the first to the last as from the last to the first.
    """
    heads = ["format", "tokens", "largest difference", "sums alike in two orders"]
    return Table("Exact mode", about, heads, rows)


def of_attention(records: Records) -> Table:
    """Probabilities, keys and values."""
    rows = []
    for row in ATTENTION:
        entries = records.entries("attention", row=row.name, roles=list(row.roles))
        found = {entry["flow"]: entry for entry in entries}
        if "both" not in found:
            continue
        k3 = {flow: found[flow]["k3"] for flow in ("both", "unified") if flow in found}
        rows.append(
            [
                ", ".join(row.roles),
                f"`{row.name}`",
                _interval(k3["both"]),
                f"{np.mean(k3['both']):.2g}",
                _interval(k3.get("unified", [])),
                f"{found['exact']['largest']}" if "exact" in found else "",
            ]
        )
    about = """
        The same model, prompts and draws as above, linears in float32. Probabilities are cast times 256 and normalized by the
        float32 sum; keys and values are rounded, each head of a token by itself, and kept in the compute dtype. A trainer can
        cast probabilities, too; keys and values it has in the compute dtype.
    """
    heads = ["role", "format", "k3, rollout-only", "its mean", "k3, unified, not exact"]
    heads += ["largest difference under exact"]
    return Table("Inside of attention", about, heads, rows)


IN_RECORD = {
    (BASE, "both"): "both",
    (BASE, "weights"): "weights alone",
    (BASE, "activations"): "activations alone",
    ("e4m3-128x128-power_of_two", "both"): "power-of-two scales",
    ("e4m3", "both"): "a scale per tensor",
}
"""What experiments/results/fake_quantization.json calls them. Per tensor it has one scale for the
activations of a sequence, where the row here has one a token."""


def beside_torch(records: Records) -> Table:
    """Our k3 beside that of fake quantization in torch."""
    torch = json.loads((RECORDS.parent / "fake_quantization.json").read_text())
    rows = []
    for (name, flow), variant in IN_RECORD.items():
        if not (own := records.k3(name, flow)):
            continue
        low, high = np.quantile(
            np.random.default_rng(0).choice(own, (10_000, len(own))).mean(1), (0.025, 0.975)
        )
        given = records.k3(name, "given") if flow == "both" else []
        of = torch["variants"][variant]["torch"]
        rows.append(
            [
                f"`{name}`"
                + {"both": "", "weights": ", weights alone"}.get(flow, ", activations alone"),
                f"{np.mean(own):.4f} ({low:.4f} to {high:.4f})",
                f"{np.mean(given):.4f}" if given else "",
                f"{of['k3']:.4f} ({of['interval'][0]:.4f} to {of['interval'][1]:.4f})",
            ]
        )
    about = f"""
        Mean k3, with 95 % intervals by bootstrap over sets of prompts (ours) or prompts (torch). Ours is of tokens that the row
        itself sampled, and once more of those that `{BASE}` sampled, as all of torch's are.
    """
    tokens = torch["completions"]["tokens"]
    heads = ["format", "ours", f"ours, tokens of `{BASE}`", f"torch, {tokens} tokens"]
    return Table("Beside fake quantization in torch", about, heads, rows)


def repeated(records: Records) -> Table | None:
    """Other prompts and other draws."""
    numbers = sorted({entry["batch"] for entry in records.entries("mismatch", flow="both")})
    if len(numbers) < 2:
        return None
    rows, inside = [], []
    for name in records.names():
        found = [records.k3(name, "both", number) for number in numbers]
        if all(found):
            _, low, high = median(found[0])
            inside += [low <= np.median(of) <= high for of in found[1:]]
            means = " / ".join(f"{np.mean(of):.2g}" for of in found)
            rows.append([f"`{name}`", *map(_interval, found), means])
    about = f"""
        k3, rollout-only, of other problems of the same tasks and other draws. An interval is over the sets of one batch: it says
        how far the median would move with other sets of this kind, and nothing of other tasks. Another batch's median is as
        uncertain itself, so that about five of six are to be expected in the interval of the first. Here {sum(inside)} of
        {len(inside)} are; all rows have the same prompts, so that these are not independent.
    """
    heads = ["format", *(f"batch {number}" for number in numbers), "means"]
    return Table("With other prompts", about, heads, rows)


def tables(records: Records) -> list[Table]:
    """The sections of the page, of what has been measured."""
    made: list[Table | None] = []
    models = list(dict.fromkeys(entry["model"] for entry in records.entries("errors")))
    if "mismatch" in records.kept:
        made.append(overview(records, records.settings("mismatch")["model"]))
    if "learning" in records.kept:
        made.append(learned(records))
    if "exact" in records.kept:
        made.append(identical(records))
    if "attention" in records.kept:
        made.append(of_attention(records))
    made += [by_kind(records, model) for model in models]
    if "mismatch" in records.kept:
        made += [beside_torch(records), repeated(records)]
    return [table for table in made if table is not None]


FLOOR = 1e-4
"""Where the picture draws the unified flow, whose k3 is 0.0 under exact mode."""
LABELLED = {
    "bfloat16": ("bfloat16", (-7, 4, "right")),
    BASE: ("e4m3 128x128", (-8, -4, "right")),
    "e4m3-128x128-power_of_two": ("UE8M0 128x128", (-8, 2, "right")),
    "e4m3-1x32": ("e4m3 1x32", (7, -4, "left")),
    "e5m2-128x128": ("e5m2 128x128", (-8, 6, "right")),
    "e3m4-128x128": ("e3m4 128x128", (7, -4, "left")),
    "mxfp8": ("MXFP8", (8, -2, "left")),
    "mxfp6": ("MXFP6", (-8, -4, "right")),
    "mxfp4": ("MXFP4", (0, 10, "center")),
    "nvfp4": ("NVFP4", (8, -7, "left")),
    "nvfp4-16x16": ("NVFP4 16x16", (-7, -9, "right")),
    "int4-1x32": ("INT4 1x32, weights alone", (8, 2, "left")),
    "int4-1x128": ("INT4 1x128", (-6, 7, "right")),
    "e4m2": ("e4m2", (5, -2, "left")),
    "e3m2": ("e3m2", (-5, -2, "right")),
    "e2m2": ("e2m2", (5, -2, "left")),
    "e2m3": ("e2m3", (-6, -15, "right")),
    "e2m1": ("e2m1", (6, 0, "left")),
    "mxfp6_e3m2": ("MXFP6 e3m2", (5, -2, "left")),
    "mxfp8_e5m2": ("MXFP8 e5m2", (5, 2, "left")),
    "mxfp8_floor": ("MXFP8, rounded down", (8, 0, "left")),
    "two_levels": ("two_levels, from outside", (8, 6, "left")),
}
"""Rows with a name in the picture, and where it stands beside its point."""
LADDER = ("e4m2", "e3m2", "e2m3", "e2m2", "e2m1")
"""Rows that no device has, drawn smaller."""


def draw(records: Records, path: Path) -> None:
    """k3 by bits, rollout-only with its interval, and unified at the floor."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "formats"
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(9.6, 5.6))
    colour, other, grey = "#b3362b", "#2b6cb3", "#8a8a8a"
    for name in records.names():
        if not (found := records.k3(name, "both")):
            continue
        bits = records.bits(name)["nominal"]
        middle, low, high = median(found)
        small = name in LADDER or name not in LABELLED
        axis.errorbar(
            bits,
            middle,
            [[middle - low], [high - middle]],
            fmt="o",
            markersize=3.5 if small else 6,
            color=grey if small else colour,
            elinewidth=1,
            zorder=2 if small else 3,
        )
        if name in LABELLED:
            text, (right, up, side) = LABELLED[name]
            axis.annotate(
                text,
                (bits, middle),
                (right, up),
                textcoords="offset points",
                ha=side,
                fontsize=7 if small else 8.5,
                color=grey if small else "black",
            )
        if [entry["largest"] for entry in records.entries("exact", row=name)] == [0.0]:
            axis.plot(bits, FLOOR, "v", markersize=6, color=other, zorder=3, clip_on=False)
        if unified := records.k3(name, "unified"):
            value = float(np.median(unified))
            if value > FLOOR:
                axis.plot(bits, value, "s", markersize=4, mfc="white", color=other, zorder=3)
    axis.plot(
        [], [], "o", color=colour, label="rollout-only: served in the format, float32 trainer"
    )
    axis.plot([], [], "s", color=other, mfc="white", label="unified: both sides in it, not exact")
    axis.plot([], [], "v", color=other, label="unified in exact mode: 0.0, drawn at the floor")
    axis.set(
        yscale="log",
        xlabel="bits of a weight, its scales included",
        ylabel="mismatch k3, median over sets of prompts (95 %)",
        ylim=(FLOOR, 5),
        xlim=(3.3, 17.2),
        title="SmolLM2-135M: what a bit is worth, and what one flow is worth",
    )
    axis.set_xscale("log", base=2)
    ticks = (4, 5, 6, 7, 8, 9, 12, 16)
    axis.set_xticks(ticks, list(map(str, ticks)))
    axis.minorticks_off()
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8.5, loc="upper right", frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
