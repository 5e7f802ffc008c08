"""`fp8rl export`: a model from anything that `--model` takes to a Hugging Face directory in another
form."""

from __future__ import annotations

from fp8rl_jax.cli.arguments import ExportArguments as Arguments

__all__ = ["Arguments", "run"]

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "float32": "float32", "fp8-block": "fp8-block"}


def run(arguments: Arguments) -> None:
    """Prints the directory on standard output, and on standard error what other readers may not
    like about it."""
    import sys
    from pathlib import Path

    from fp8rl_jax.cli.start import start_jax
    from fp8rl_jax.errors import UserError
    from fp8rl_jax.weights.block_fp8 import unaligned_linears
    from fp8rl_jax.weights.hf_directory import export_policy, listing, load_policy_arrays
    from fp8rl_jax.weights.resolve import resolve_model

    def report(line: str) -> None:
        print(line, file=sys.stderr)

    start_jax()
    source = resolve_model(arguments.model, report)
    target = Path(arguments.output).expanduser()
    if target.exists() and target.samefile(source):
        raise UserError(
            f"--output: {target} is the model's own directory, which is never overwritten; "
            "choose another"
        )
    config, arrays = load_policy_arrays(source)
    if arguments.format == "fp8-block" and (names := unaligned_linears(config)):
        report(
            "sides that are no multiple of 128, which vLLM, SGLang or transformers may refuse: "
            f"{listing(names)}"
        )
    print(export_policy(target, config, arrays, _DTYPES[arguments.format], tokenizer_from=source))
