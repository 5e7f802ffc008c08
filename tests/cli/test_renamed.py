"""Names from elsewhere: each is answered with the key here, in a file and as a flag, and every such
key exists."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8rl_jax.cli.load import load_config
from fp8rl_jax.config.renamed import SOURCES, renamed
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.config.schema import leaves
from fp8rl_jax.errors import UserError

KEYS = dict(leaves(RunConfig))
ROWS = [(source, name) for source, table in SOURCES.items() for name in table]
RELEASED = Path(__file__).with_name("keys_0.1.txt").read_text().split()


def faults(*argv: str) -> list[str]:
    with pytest.raises(UserError) as error:
        load_config(RunConfig, list(argv), "fp8rl train")
    return str(error.value).splitlines()


def test_every_name_is_answered_in_files_and_in_flags(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("\n".join(f"{name} = 1" for name in dict.fromkeys(name for _, name in ROWS)))
    lines = faults(
        str(file), *(word for _, name in ROWS for word in (f"--{name.replace('_', '-')}", "1"))
    )
    for source, name in ROWS:
        keys, note = SOURCES[source][name]
        end = f" ({note})" if note else ""
        (line,) = [line for line in lines if line.startswith(f"{file}: unknown key {name}: ")]
        assert f"{source}'s" in line and line.endswith(f" name; here it is {keys}{end}")
        flags = " and ".join(f"--{key.replace('_', '-')}" for key in keys.split(" and "))
        (line,) = {
            line for line in lines if line.startswith(f"--{name.replace('_', '-')}: unknown flag: ")
        }
        assert f"{source}'s" in line and line.endswith(f" name; here it is {flags}{end}")


def test_every_name_leads_to_keys_that_exist():
    for source, name in ROWS:
        assert name not in KEYS
        assert set(SOURCES[source][name][0].split(" and ")) <= KEYS.keys(), name
        meanings = {table[name][0] for table in SOURCES.values() if name in table}
        assert len(meanings) == 1, f"two projects mean different keys by {name}"


def test_a_whole_configuration_of_another_project_is_answered_key_by_key(tmp_path):
    file = tmp_path / "verl.toml"
    file.write_text(
        "[actor_rollout_ref.actor]\nclip_ratio_high = 0.28\nstrategy = 'fsdp'\noptim.lr = 1e-6\n"
        "[actor_rollout_ref.rollout]\nn = 8\ntemperature = 1.0\n[trainer]\ntotal_training_steps "
        "= 10\nremat = 'layer'\n"
    )
    assert faults(str(file)) == [
        f"{file}: unknown key actor_rollout_ref.actor.clip_ratio_high: verl's name; here it is "
        "rl.clip_high",
        f"{file}: unknown key actor_rollout_ref.actor.strategy",
        f"{file}: unknown key actor_rollout_ref.actor.optim.lr: verl's and NeMo RL's name; here "
        "it is optimizer.learning_rate",
        f"{file}: unknown key actor_rollout_ref.rollout.n: verl's name; here it is "
        "rollout.samples_per_prompt",
        f"{file}: unknown key actor_rollout_ref.rollout.temperature; did you mean "
        "rollout.temperature or evaluation.temperature?",
        f"{file}: unknown key trainer.total_training_steps: verl's name; here it is trainer.steps",
    ]


def test_a_run_on_slurm_is_a_script_and_no_flag():
    assert faults("--slurm") == [
        "--slurm: unknown flag; `sbatch experiments/launch/slurm.sh RUN.toml` trains on a SLURM "
        "cluster"
    ]


def test_a_misspelled_key_is_answered_with_the_nearest_key_first():
    assert renamed("optimizer.beta") is not None
    assert faults("--optimizer.beta", "1") == [
        "--optimizer.beta: unknown flag; did you mean --optimizer.beta2?"
    ]
    assert faults("--rl.beta", "1") == [
        "--rl.beta: unknown flag: TRL's and tunix's name; here it is --rl.kl-coefficient"
    ]


def test_every_key_of_release_0_1_exists_or_has_its_new_name():
    lost = [key for key in RELEASED if key not in KEYS and key not in SOURCES["an earlier version"]]
    assert lost == [], "give each a row in EARLIER"
