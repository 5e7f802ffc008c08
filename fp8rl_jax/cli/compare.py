"""`fp8rl compare`: two sides on the same tokens, layer by layer; the first that differs, and
why."""

from __future__ import annotations

from fp8rl_jax.cli.compare_arguments import CompareArguments as Arguments

__all__ = ["Arguments", "run"]


def run(arguments: Arguments) -> int:
    """Prints the comparison; returns 1 where --expect-equal is given and a bit differs."""
    import sys
    from pathlib import Path

    from fp8rl_jax.cli.start import start_jax
    from fp8rl_jax.precision import check_recipe
    from fp8rl_jax.rollout.lines import check_writable, write_lines

    specs = arguments.sides()
    start_jax()
    for spec in specs:
        check_recipe(spec.recipe, spec.backend)
    from fp8rl_jax.compare.document import document
    from fp8rl_jax.compare.side import Side, check_alike, describe_side
    from fp8rl_jax.compare.text import summary
    from fp8rl_jax.compare.tokens import TEXT, as_recorded, as_tokens, from_file, from_text
    from fp8rl_jax.compare.walk import compare
    from fp8rl_jax.tokenizers.tokenizer import load_tokenizer
    from fp8rl_jax.weights.hf_config import read_policy_config
    from fp8rl_jax.weights.load import load_policy
    from fp8rl_jax.weights.resolve import resolve_model

    def report(line: str) -> None:
        print(line, file=sys.stderr)

    if arguments.json:
        check_writable(arguments.json)
    directories = [resolve_model(spec.model, report) for spec in specs]
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
    tokens = as_tokens(rows[: arguments.rows], arguments.max_tokens)
    recorded = None
    if arguments.recorded:
        recorded = arguments.recorded, as_recorded(rows[: arguments.rows], arguments.max_tokens)
    policies, sides = {}, []
    for spec, directory in zip(specs, directories, strict=True):
        key = (Path(directory).resolve(), spec.compute_dtype)
        policies[key] = (
            policies[key] if key in policies else load_policy(directory, spec.compute_dtype)
        )
        sides.append(
            Side.of(
                policies[key], spec.recipe, spec.phase, spec.compute_dtype, tokens, spec.backend
            )
        )
    found = compare(
        *sides, tokens, report if sys.stderr.isatty() else lambda line: None, arguments.temperature
    )
    given = len(rows), sum(len(row.prompt) + len(row.completion) for row in rows)
    described = [describe_side(spec.model, side) for spec, side in zip(specs, sides, strict=True)]
    results = document(found, described, tokens, tokenizer, given, recorded)
    if arguments.json:
        write_lines(arguments.json, [results | {"made": _record()}])
    print(summary(results))
    return 1 if arguments.expect_equal and not found.equal else 0


def _record() -> dict:
    """By what the results were made."""
    import sys
    from importlib.metadata import version

    import jax

    return {
        "command": ["fp8rl", *sys.argv[1:]],
        "versions": {name: version(name) for name in ("fp8rl_jax", "jax", "jaxlib")},
        "devices": [f"{device.platform}:{device.device_kind}" for device in jax.devices()],
    }
