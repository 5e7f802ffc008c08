"""`fp8rl completion bash`: a script by which a shell completes commands, flags and their values.

    source <(fp8rl completion bash)        in ~/.bashrc; of zsh: source <(fp8rl completion zsh)

The script has all of them in it, so that no key waits for Python.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

import tyro

from fp8rl_jax.cli.load import flag_of, positional_fields
from fp8rl_jax.config.recipe import RECIPES
from fp8rl_jax.config.schema import leaves

_SCRIPT = """\
# Written by `fp8rl completion`.
{start}_fp8rl() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} flags=""
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{commands}" -- "$word"))
    return
  fi
  case "${{COMP_WORDS[1]}}" in
{flags}
  esac
  if [[ "$word" == -* ]]; then
    COMPREPLY=($(compgen -W "$flags --help" -- "$word"))
    return
  fi
  case "$before" in
{values}
  esac
}}
complete -o default -F _fp8rl fp8rl
"""
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


@dataclass(frozen=True)
class CompletionArguments:
    """Print a script by which a shell completes fp8rl's commands, flags and their values."""

    shell: Annotated[Literal["bash", "zsh"], tyro.conf.Positional]
    """Whose: source <(fp8rl completion bash), in ~/.bashrc."""


def completion(arguments: CompletionArguments) -> None:
    """Print the script."""
    print(script(arguments.shell), end="")


def script(shell: str) -> str:
    """Write the script of a shell, bash or zsh."""
    from fp8rl_jax.cli.main import COMMANDS

    values: dict[str, set[str]] = {"--recipe": set(RECIPES)}
    of_flags: dict[str, list[str]] = {}
    for name, command in COMMANDS.items():
        _, arguments = command.load()
        flags = dict(_flags(arguments))
        of_flags.setdefault(" ".join(sorted(flags)), []).append(name)
        for key, chosen in flags.items():
            if chosen:
                values.setdefault(key, set()).update(chosen)
    return _SCRIPT.format(
        start=_ZSH if shell == "zsh" else "",
        commands=" ".join(COMMANDS),
        flags="\n".join(
            f'    {"|".join(names)}) flags="{flags}" ;;' for flags, names in of_flags.items()
        ),
        values="\n".join(
            f'    {key}) COMPREPLY=($(compgen -W "{" ".join(sorted(chosen))}" -- "$word")) ;;'
            for key, chosen in sorted(values.items())
        ),
    )


def _flags(tree: type) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Flags of a command's arguments, and the values of those that have few."""
    not_flags = positional_fields(tree)
    for key, annotation in leaves(tree):
        if key not in not_flags:
            yield flag_of(key), tuple(_choices(annotation))


def _choices(annotation: Any) -> Iterator[str]:
    if annotation is bool:
        yield from ("true", "false")
    elif get_origin(annotation) is Literal:
        yield from map(str, get_args(annotation))
    else:  # of a union, but not of what a table or a tuple holds
        for part in get_args(annotation) if get_origin(annotation) in _UNIONS else ():
            yield from _choices(part)


_UNIONS = (typing.Union, type(int | None))
