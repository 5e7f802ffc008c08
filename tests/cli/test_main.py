from __future__ import annotations

import importlib
import io
import logging
import os
import re
import resource
import subprocess
import sys
import types
from dataclasses import dataclass
from typing import get_type_hints

import pytest

from fp8rl_jax.cli import main as cli
from fp8rl_jax.cli.commands import _StandardError
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.errors import UserError


@dataclass(frozen=True)
class Arguments:
    """Arguments of a command that exists in these tests only."""

    size: int = 1


@pytest.fixture
def command(monkeypatch):
    """Adds the command `probe` whose `run` is the given function."""

    def add(run, arguments=Arguments, **properties):
        module = types.ModuleType("fp8rl_jax.cli.probe")
        module.run = lambda given: run(given)
        module.run.__annotations__ = {"given": arguments}
        monkeypatch.setitem(sys.modules, "fp8rl_jax.cli.probe", module)
        monkeypatch.setitem(cli.COMMANDS, "probe", cli.Command("a test", "probe:run", **properties))

    return add


def test_a_command_gets_its_arguments_and_gives_its_exit_code(command):
    seen = []
    command(lambda arguments: seen.append(arguments))
    assert cli.main(["probe", "--size", "3"]) == 0
    assert seen == [Arguments(3)]
    command(lambda arguments: 7)
    assert cli.main(["probe"]) == 7


def test_a_command_may_read_toml(command, tmp_path):
    seen = []
    (tmp_path / "run.toml").write_text("seed = 5\n[rollout]\ntop_k = 4")
    command(seen.append, RunConfig, first_keys=("recipe",))
    assert cli.main(["probe", str(tmp_path / "run.toml"), "--recipe", "fp8-rl"]) == 0
    assert (seen[0].seed, seen[0].rollout.top_k, seen[0].recipe) == (5, 4, "fp8-rl")


def test_faults_of_the_user_are_lines_and_exit_code_2(command, capsys):
    def run(arguments):
        raise UserError("x.safetensors: truncated\ny.safetensors: missing")

    command(run)
    assert cli.main(["probe"]) == 2
    assert capsys.readouterr().err == (
        "fp8rl: error: x.safetensors: truncated\nfp8rl: error: y.safetensors: missing\n"
    )
    assert cli.main(["probe", "--sise", "3"]) == 2
    assert capsys.readouterr().err == "fp8rl: error: --sise: unknown flag; did you mean --size?\n"


def test_an_interrupt_is_130_and_a_bug_keeps_its_traceback(command):
    def interrupted(arguments):
        raise KeyboardInterrupt

    def broken(arguments):
        raise ZeroDivisionError

    command(interrupted)
    assert cli.main(["probe"]) == 130
    command(broken)
    with pytest.raises(ZeroDivisionError):
        cli.main(["probe"])


def test_help_lists_every_command(capsys):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(
        f"  {name} " in text and command.summary in text for name, command in cli.COMMANDS.items()
    )
    assert cli.main([]) == 2


def test_unknown_commands_are_named(capsys):
    assert cli.main(["fecth"]) == 2
    assert capsys.readouterr().err == "fp8rl: error: unknown command 'fecth'; did you mean fetch?\n"


def test_the_old_name_of_a_command_is_answered_with_the_new_one(capsys):
    assert cli.main(["score", "--model", "m"]) == 2
    assert capsys.readouterr().err == "fp8rl: error: fp8rl score is now called fp8rl logprobs\n"


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_is_whole(name, capsys):
    module, function = cli.COMMANDS[name].function.split(":")
    command = getattr(importlib.import_module(f"fp8rl_jax.cli.{module}"), function)
    assert command.__doc__ and next(iter(get_type_hints(command).values())).__doc__
    first, flags = cli.COMMANDS[name].first_keys, []
    if first:
        assert cli.main([name, "--recipe", "x", "--help"]) == 0
        short = capsys.readouterr().out
        flags = re.findall(r"^  --(\S+) \(", short, re.MULTILINE)
        assert flags == [key.replace("_", "-") for key in first] and len(flags) == 10
        assert len(short.splitlines()) < 45 and f"fp8rl {name} --help-all" in short
    with pytest.raises(SystemExit) as stop:
        cli.main([name, "--help-all" if first else "--help"])
    assert stop.value.code == 0
    whole = capsys.readouterr().out
    assert "Traceback" not in whole and all(f"--{flag}" in whole for flag in flags)


def test_positional_arguments_are_named(capsys):
    assert cli.main(["fetch"]) == 2
    assert capsys.readouterr().err == "fp8rl: error: NAME: required\n"
    assert cli.main(["fetch", "one", "two"]) == 2
    assert capsys.readouterr().err == "fp8rl: error: Unrecognized options: two\n"


PROGRAM = """
import sys
from fp8rl_jax.cli.main import main
try:
    code = main(sys.argv[1:])
except SystemExit as stop:
    code = stop.code
heavy = {"jax", "jaxlib", "flax", "numpy", "matplotlib"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else code)
"""


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
@pytest.mark.parametrize(("flag", "code"), [("--help", 0), ("--no-such-flag=1", 2)])
def test_help_and_faults_take_under_two_seconds_and_never_import_jax(name, flag, code):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, name, flag], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == code, run.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2
    if code:
        assert "fp8rl: error: --no-such-flag: unknown flag" in run.stderr
        assert "Traceback" not in run.stderr


@pytest.mark.parametrize(
    "words", [["--help"], ["config"], ["compare", "--help"], ["train", "no-such-file.toml"]]
)
def test_a_closed_pipe_ends_a_command_quietly(words):
    reader, writer = os.pipe()
    os.close(reader)
    streams = {"stdout": writer, "stderr": subprocess.PIPE}
    if words[0] == "train":  # its fault goes to standard error
        streams = {"stdout": subprocess.PIPE, "stderr": writer}
    run = subprocess.run(
        [sys.executable, "-m", "fp8rl_jax.cli.main", *words], **streams, timeout=60
    )
    os.close(writer)
    assert (run.returncode, run.stdout or b"", run.stderr or b"") == (141, b"", b"")


def test_lines_of_the_log_go_where_standard_error_is_now(monkeypatch):
    handler, bar = _StandardError(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", bar)
    handler.handle(logging.LogRecord("fp8rl", logging.INFO, "", 0, "compiling", None, None))
    assert bar.getvalue() == "compiling\n"


def test_another_broken_pipe_is_a_bug_and_keeps_its_traceback(command):
    def broken(arguments):
        raise BrokenPipeError

    command(broken)
    with pytest.raises(BrokenPipeError):
        cli.main(["probe"])
