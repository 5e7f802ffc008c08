"""`fp8rl score`: log-probabilities of given tokens, as the trainer computes them."""

from __future__ import annotations

from fp8rl_jax.cli.arguments import ScoreArguments as Arguments

__all__ = ["Arguments", "run"]


def run(arguments: Arguments) -> None:
    """Answers every line with "tokens" and "logprobs": the trainer's side of the recipe, whose
    rollout formats play no part."""
    from fp8rl_jax.cli.applied import open_model
    from fp8rl_jax.rollout import offline
    from fp8rl_jax.rollout.lines import check_writable, write_lines

    model = open_model(arguments)
    lines = model.read_lines(arguments.input, generation=False)
    check_writable(arguments.output)
    results = offline.score(
        model.load(),
        [line.tokens for line in lines],
        model.recipe,
        arguments.compute_dtype,
        arguments.temperature,
        arguments.batch_size,
    )
    pairs = zip(lines, results, strict=True)
    write_lines(
        arguments.output,
        (line.record | {"tokens": line.tokens, "logprobs": logprobs} for line, logprobs in pairs),
    )
