"""`fp8rl report DIRECTORY ...`: one self-contained HTML page that compares runs side by side."""

from __future__ import annotations

from fp8rl_jax.cli.arguments import ReportArguments as Arguments


def run(arguments: Arguments) -> None:
    """Writes the page and prints its path."""
    from pathlib import Path

    from fp8rl_jax.report.page import write_report

    directories = [Path(directory) for directory in arguments.directories]
    print(
        write_report(
            directories,
            Path(arguments.output) if arguments.output else directories[0] / "report.html",
        )
    )
