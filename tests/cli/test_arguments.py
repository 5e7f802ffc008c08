from __future__ import annotations

import pytest

from fp8rl_jax.cli.commands import ReportArguments
from fp8rl_jax.cli.generate import GenerateArguments, LogprobsArguments
from fp8rl_jax.cli.load import parse_arguments
from fp8rl_jax.errors import UserError

LINES = ["--model", "m", "--input", "i.jsonl", "--output", "o.jsonl"]


def faults(tree, *argv):
    with pytest.raises(UserError) as error:
        parse_arguments(tree, list(argv), "prog")
    return str(error.value).splitlines()


def test_every_command_parses_its_arguments():
    generate = [
        *LINES,
        "--recipe",
        "fp8-rl",
        "--compute-dtype",
        "float32",
        "--max-new-tokens",
        "8",
        "--ignore-eos",
    ]
    arguments = parse_arguments(GenerateArguments, [*generate, "--temperature", "0.5"], "prog")
    assert arguments == GenerateArguments(
        "m",
        "i.jsonl",
        "o.jsonl",
        "fp8-rl",
        "float32",
        max_new_tokens=8,
        temperature=0.5,
        ignore_eos=True,
    )
    assert parse_arguments(LogprobsArguments, LINES, "prog") == LogprobsArguments(
        "m", "i.jsonl", "o.jsonl"
    )
    report = parse_arguments(ReportArguments, ["runs/a", "runs/b", "--output", "r.html"], "prog")
    assert report == ReportArguments(("runs/a", "runs/b"), "r.html")


def test_what_is_missing_is_listed():
    assert faults(LogprobsArguments, "--model", "m") == ["--input: required", "--output: required"]
    assert faults(GenerateArguments, "--model", "m") == ["--input: required", "--output: required"]
    assert faults(ReportArguments) == ["DIRECTORY: give at least one run directory"]


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--max-new-tokens", "0"),
        ("--temperature", "-1"),
        ("--top-k", "-1"),
        ("--top-p", "0"),
        ("--top-p", "1.5"),
        ("--min-p", "1"),
        ("--top-k", "5"),
        ("--top-p", "0.9"),
        ("--min-p", "0.1"),
        ("--prompt-template", "{q}"),
        ("--batch-size", "0"),
        ("--n", "0"),
        ("--n", "2"),
        ("--best", "2"),
        ("--stop", ""),
        ("--bad-words", ""),
        ("--logit-bias", "5"),
        ("--logit-bias", "5=x"),
        ("--logit-bias", "5=nan"),
    ],
)
def test_values_that_cannot_work_are_named(flag, value):
    (line,) = faults(GenerateArguments, *LINES, flag, value)
    assert line.startswith(f"{flag}: ")


def test_interactive_takes_no_files():
    arguments = parse_arguments(
        GenerateArguments,
        ["--model", "m", "--interactive", "--logit-bias", "a=b=-1.5", "7=2"],
        "prog",
    )
    assert arguments.interactive and arguments.biases() == {"a=b": -1.5, "7": 2.0}
    found = faults(
        GenerateArguments,
        *LINES,
        "--interactive",
        "--prompt-logprobs",
        "--n",
        "2",
        "--temperature",
        "1",
    )
    assert len(found) == 3 and all(line.startswith("--interactive: ") for line in found)


def test_a_bias_names_each_token_once():
    (line,) = faults(GenerateArguments, *LINES, "--logit-bias", "5=1", "5=2")
    assert line.startswith("--logit-bias: 5=1 5=2 must be TOKEN=BIAS, each token once")
