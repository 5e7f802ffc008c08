"""What bash completes, asked of bash."""

import subprocess

import pytest

from fp8rl_jax.cli.completion import script
from fp8rl_jax.cli.main import COMMANDS, main


@pytest.fixture(scope="module")
def completed():
    text = script("bash")

    def of(*words):
        asked = (
            f"{text}\nCOMP_WORDS=({' '.join(words)})\nCOMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))\n"
            '_fp8rl\nprintf "%s\\n" "${COMPREPLY[@]}"\n'
        )
        done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True)
        assert not done.stderr
        return done.stdout.split()

    return of


def test_commands_flags_and_values(completed):
    assert completed("fp8rl", "ex") == ["export"]
    assert set(completed("fp8rl", "''")) == set(COMMANDS)
    assert completed("fp8rl", "train", "run.toml", "--rollout.max-n") == [
        "--rollout.max-new-tokens"
    ]
    assert completed("fp8rl", "train", "--recipe", "jet") == ["jet-rl"]
    assert completed("fp8rl", "train", "--resume", "t") == ["true"]
    assert completed("fp8rl", "train", "--rollout.engine", "''") == ["paged", "static", "vllm"]
    # a file: the shell's own completion takes over
    assert completed("fp8rl", "train", "experiments/r") == []
    assert "--format" in completed("fp8rl", "export", "--f") and "--recipe" not in completed(
        "fp8rl", "fetch", "--"
    )


def test_zsh_reads_bashs_script_and_another_shell_is_one_line(capsys):
    assert main(["completion", "zsh"]) == 0
    out = capsys.readouterr().out
    assert (
        out.splitlines()[1].startswith("autoload")
        and script("bash").splitlines()[1:] == (out.splitlines()[2:])
    )
    assert main(["completion", "fish"]) == 2
    assert "bash" in capsys.readouterr().err
