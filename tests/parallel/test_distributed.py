"""Joining processes: which arguments jax gets, and two real processes against one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from parallel.helpers import ROOT, run_processes

from fp8rl_jax.cli.load import load_config
from fp8rl_jax.config.run import MeshConfig, RunConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.parallel import check_same, initialize, is_main_process

LAUNCH = ROOT / "experiments" / "launch"
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "gpu[01-02]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
}


@pytest.fixture
def calls(monkeypatch) -> list:
    """Every call of jax.distributed.initialize, which is not made."""
    made = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **kwargs: made.append(kwargs))
    monkeypatch.setattr("fp8rl_jax.parallel.distributed.meet", lambda *_: {})
    return made


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"},  # an allocation without srun
        SLURM | {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_NODES": "1"},
        {"OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_a_single_process_joins_nothing(calls, environ):
    initialize(MeshConfig(), environ)
    assert calls == []


@pytest.mark.parametrize(
    ("environ", "count", "place"),
    [
        (SLURM, 0, (8, 6)),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}, 0, (4, 3)),
        ({"PMI_SIZE": "4", "PMI_RANK": "2"}, 0, (4, 2)),
        ({"WORLD_SIZE": "2", "RANK": "1"}, 0, (2, 1)),
        ({"JOB_COMPLETION_INDEX": "0"}, 3, (3, 0)),
        ({"JOB_COMPLETION_INDEX": "2"}, 3, (3, 2)),
    ],
)
def test_a_launcher_numbers_its_processes(calls, environ, count, place):
    initialize(MeshConfig(coordinator="node0:1234", num_processes=count), environ)
    (call,) = calls
    assert call["coordinator_address"] == "node0:1234"
    assert (call["num_processes"], call["process_id"]) == place


@pytest.mark.parametrize(
    ("environ", "launcher", "keys"),
    [
        ({"PMI_SIZE": "4", "PMI_RANK": "0"}, "MPICH", ""),
        ({"WORLD_SIZE": "2", "RANK": "1"}, "torchrun", ""),
        ({"JOB_COMPLETION_INDEX": "1"}, "Kubernetes", " and mesh.num_processes"),
    ],
)
def test_none_of_several_trains_alone(calls, environ, launcher, keys):
    with pytest.raises(UserError, match=rf"{launcher}.*alone: set mesh.coordinator.*{keys}$"):
        initialize(MeshConfig(), environ)
    assert calls == []
    initialize(MeshConfig(), {"JOB_COMPLETION_INDEX": "0"})  # of a single pod, as far as it knows
    initialize(MeshConfig(), {"PMI_SIZE": "1", "PMI_RANK": "0"})


def test_launch_scripts_start_what_there_is():
    """Shells and Kubernetes can read them, and the command line knows their words."""
    for script in ("slurm.sh", "mpi.sh"):
        subprocess.run(["bash", "-n", LAUNCH / script], check=True)
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert service["spec"]["selector"]["job-name"] == job["metadata"]["name"] == pod["subdomain"]
    program, command, _, *words = container["command"]
    assert (program, command) == ("fp8rl", "train")
    config = load_config(RunConfig, words, "test")
    assert config.mesh.coordinator == "fp8rl-0.fp8rl:29500" and config.resume
    assert config.mesh.num_processes == job["spec"]["completions"] == job["spec"]["parallelism"]


@pytest.mark.parametrize(
    ("status", "restarts", "again"),
    [(0, 0, False), (2, 0, False), (75, 0, True), (137, 3, True), (137, 50, False)],
)
def test_a_slurm_job_begins_again_where_that_helps(tmp_path, status, restarts, again):
    """Not behind a fault of its settings, nor for ever."""
    for name, said in (("srun", f"exit {status}"), ("scontrol", 'echo "$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{said}\n")
        (tmp_path / name).chmod(0o755)
    environ = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts)}
    done = subprocess.run(
        ["bash", LAUNCH / "slurm.sh", "RUN.toml"],
        env=os.environ | environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status and done.stdout == ("requeue 7\n" if again else "")


def test_a_script_names_its_first_host(tmp_path):
    for name, said in (("mpirun", 'echo "$@"'), ("fp8rl", "true")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{said}\n")
        (tmp_path / name).chmod(0o755)
    environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [LAUNCH / "mpi.sh", "a,b,c", "RUN.toml", "--recipe", "fp8-rl"],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [
        *("--host", "a,b,c", "-np", "3", "fp8rl", "train", "RUN.toml", "--recipe", "fp8-rl"),
        *("--resume", "--mesh.coordinator", "a:29500"),
    ]


def test_explicit_arguments_come_first(calls):
    initialize(MeshConfig(coordinator="node0:1234", num_processes=4, process_id=3), SLURM)
    (call,) = calls
    assert (call["coordinator_address"], call["num_processes"], call["process_id"]) == (
        "node0:1234",
        4,
        3,
    )
    assert call["local_device_ids"] is None


@pytest.mark.parametrize("given", [None, "40"])
def test_a_process_that_waits_for_others_has_threads_to_spare(calls, monkeypatch, given):
    """With as many as cores, a run of two processes with two simulated devices each stood still at
    its second checkpoint, on two cores, in seven of seven tries."""
    monkeypatch.setenv("PJRT_NPROC", given or "")
    if given is None:
        del os.environ["PJRT_NPROC"]
    initialize(MeshConfig(), {})
    assert os.environ.get("PJRT_NPROC") == given
    initialize(MeshConfig(coordinator="node0:1234", num_processes=2, process_id=1), {})
    assert os.environ["PJRT_NPROC"] == (given or str(max(16, os.cpu_count() or 1)))


@pytest.mark.parametrize(
    ("environ", "devices"),
    [
        (SLURM, None),  # GPUs unknown: jax takes the one of the local task
        (SLURM | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, None),
        (SLURM | {"CUDA_VISIBLE_DEVICES": "0"}, []),  # bound by the scheduler
        (SLURM | {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, [4, 5]),
        # one task a node takes all
        (SLURM | {"SLURM_NTASKS": "2", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, []),
    ],
)
def test_a_cluster_is_detected_and_every_gpu_is_used(calls, monkeypatch, environ, devices):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    initialize(MeshConfig(), environ)
    (call,) = calls
    assert call["coordinator_address"].startswith("gpu01:") and call["process_id"] == 6
    assert (call["num_processes"], call["local_device_ids"]) == (
        int(environ["SLURM_NTASKS"]),
        devices,
    )


def test_an_open_mpi_launch_is_detected(calls, monkeypatch):
    launch = {
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    }
    for name, value in launch.items():
        monkeypatch.setenv(name, value)
    initialize(MeshConfig(), launch)
    (call,) = calls
    assert call["coordinator_address"].startswith("10.96.0.1:")
    assert (call["num_processes"], call["process_id"]) == (2, 1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MeshConfig(coordinator="a:1"), "mesh.num_processes, mesh.process_id must be set"),
        (MeshConfig(num_processes=2, process_id=0), "mesh.coordinator must be set"),
        (
            MeshConfig(coordinator="a", num_processes=2, process_id=0),
            "mesh.coordinator = 'a' must be host:port",
        ),
        (
            MeshConfig(coordinator="a:1", num_processes=2, process_id=2),
            "mesh.process_id = 2 must be from 0 to",
        ),
    ],
)
def test_incomplete_arguments_are_refused_by_key(calls, config, message):
    with pytest.raises(UserError, match=message):
        initialize(config, {})
    assert calls == []


def test_one_process_agrees_with_itself():
    check_same("anything")
    assert is_main_process()


@pytest.mark.slow
def test_two_processes_compute_what_one_does():
    script = Path(__file__).with_name("joined.py")
    (alone,) = run_processes(script, 1, 4)
    pair = run_processes(script, 2, 2)
    assert [p["main"] for p in pair] == [True, False]
    assert not alone["refused"]
    assert alone["told"] == ["", "fault 0"] and alone["least"] == [5, 3, 7]
    for scored in (alone["scored"], pair[0]["scored"]):
        assert len(set(scored["rewards"][:3])) == 3 and scored["rewards"][3] == 0
        assert scored["failed"] == [False, False, False, True] and (
            scored["timeouts"],
            scored["errors"],
        ) == (1, 0)
    assert alone["played"]["rewards"] == [0, 1, 0, 0, 1] and alone["played"]["errors"] == 1
    for i, joined in enumerate((alone, *pair)):
        trusted = joined["trusted"]
        assert trusted["no device"] and trusted["wrong"] == {"cache_write": "found by 0"}
        assert trusted["chosen"] == ["reference", "hopper"]
        late = "process 0 has told nothing of nothing within 0.3 s" if i == 2 else ""
        assert late in trusted["late"] and bool(late) == bool(trusted["late"])
    for i, joined in enumerate(pair):
        assert (joined["processes"], joined["devices"]) == (2, [4, 2])
        assert not joined["whole"], "parameters must be spread over both processes"
        assert joined["back"], "gathered parameters differ from those that were placed"
        assert joined["local"] == [i, i + 1, i + 2], "an array of one process must not be gathered"
        assert joined["psum"][0] == joined["psum"][1] == alone["psum"][0]
        assert joined["drawn"][0] == joined["drawn"][1] and joined["least"] == [4, 2, 7]
        assert joined["refused"].startswith("process 1 has another configuration than process 0")
        assert joined["told"] == ["", "process 1: fault 1" if i == 0 else "fault 1"]
        matrices = 4 * 192 * (2 * 96 + 2 * (2 * 256 + 2 * 64 + 3 * 512))
        norms = 4 * (5 * 192 + 4 * 32)
        assert joined["read"] == {"bytes": matrices // 2 + norms, "placed": True, "same": True}
        names = ["config.json", "generation_config.json", "model.safetensors"]
        assert joined["exported"] == {
            "files": names if i == 0 else [],
            "same": True,
            "said": "not exported; tensor model.embed_tokens.weight holds 18432 non-finite values",
        }
        assert joined["scored"] == pair[0]["scored"], (
            "processes that go on with other rewards compute other programs"
        )
        assert joined["played"] == alone["played"] and joined["gathered"] == ["", "ß"]
        np.testing.assert_allclose(joined["loss"], alone["loss"], rtol=1e-5)
        np.testing.assert_allclose(joined["updated"], alone["updated"], rtol=1e-5, atol=1e-6)
