"""The guide for those who come from another project, made from fp8rl_jax/config/renamed.toml:

    python -m experiments.coming_from > docs/guides/coming_from.md

A test holds the page to the table.
"""

from __future__ import annotations

from fp8rl_jax.config.renamed import SOURCES

EARLIER = "an earlier version"
_HEAD = """# Coming from {names}

Written by `python -m experiments.coming_from > docs/guides/coming_from.md` from
[renamed.toml](../../fp8rl_jax/config/renamed.toml). A name stands for every key that ends in it: `algorithm.adv_estimator` is
verl's, `adv_estimator` is in the table. You need not look any of it up: a run with a key from elsewhere does not start, and is answered
with the key here,

    fp8rl train --clip-ratio-high 0.28 --dry-run
    fp8rl: error: --clip-ratio-high: unknown flag: verl's name; here it is --rl.clip-high

all keys of a file at once. What the keys here mean is in [config.md](../config.md). Data in the columns of TRL and verl is read as it is
([data.md](data.md)), and a reward function is a function here, too ([reward.md](reward.md)).
"""


def page() -> str:
    """The page: a table a project, earlier names of this library last."""
    sources = [*(source for source in SOURCES if source != EARLIER), EARLIER]
    lines = [_HEAD.format(names=" or ".join([", ".join(sources[:-2]), sources[-2]]))]
    for source in sources:
        lines += [
            f"## {source[0].upper()}{source[1:]}" if source == EARLIER else f"## {source}",
            "",
        ]
        lines += ["| there | here | values |", "|---|---|---|"]
        for name, (keys, note) in sorted(SOURCES[source].items()):
            here = " and ".join(f"`{key}`" for key in keys.split(" and "))
            lines.append(f"| `{name}` | {here} | {note} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(page(), end="")
