"""The self-test of GPU kernels, without a GPU: planted faults, verdicts that are kept, and what a
process makes of them."""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import pytest
import tomli_w
from report.synthetic import write_run
from tiny_run import RUN

import fp8rl_jax as fp8rl
from fp8rl_jax import self_test
from fp8rl_jax.cli import doctor
from fp8rl_jax.cli import main as cli
from fp8rl_jax.config.recipe import get_recipe
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.precision import check_recipe
from fp8rl_jax.report.page import write_report
from fp8rl_jax.training.checks import kernel_sizes
from fp8rl_jax.training.record import write_run_record
from fp8rl_jax.weights.hf_config import config_json
from pallas_kernels.backend import BackendError, refuse_hopper, resolve, tracing_for
from pallas_kernels.check.cases import OPERATIONS, Shape
from pallas_kernels.check.device import cases_of_model, first_cases

ROOT = Path(__file__).parents[1]
GPU = {"device": "NVIDIA H100 80GB HBM3", "driver": "580.65.06, CUDA 13000", "jax": "0.11.2"}
MODEL = Shape("", 256, 384, 4, 2, 64)
RIGHT = '{"case": "a", "difference": 0.0, "of_allowed": 0.0, "passed": true, "runs_equal": true}'
WRONG = '{"case": "a", "difference": 0.5, "of_allowed": 9.0, "passed": false, "runs_equal": true}'
OTHER = '{"case": "a", "difference": 0.0, "of_allowed": 0.0, "passed": false, "runs_equal": false}'


class Checker:
    """What stands for `pallas_kernels.check.device`: notes what it is asked, and does for
    `cache_write` what is planted there."""

    def __init__(self, folder: Path, monkeypatch):
        self.log, self._patch = folder / "asked", monkeypatch
        self.plant("")

    def plant(self, fault: str):
        program = (
            f"import os, sys, time\nopen({str(self.log)!r}, 'a').write(' '.join(sys.argv[1:]) + "
            f"'\\n')\nfault = sys.argv[1] == 'cache_write'\n"
            f"right = lambda: print('# a', {RIGHT!r}, sep='\\n', flush=True)\n"
            f"{fault or 'fault = False'}\nfault or right()"
        )
        self._patch.setattr(self_test, "COMMAND", (sys.executable, "-I", "-S", "-c", program))

    @property
    def asked(self) -> list[str]:
        """Operations since the last look, with an M where a model's sizes are tried."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return sorted(line.split()[0] + " M" * ("--model" in line) for line in lines)


@pytest.fixture
def start(monkeypatch):
    """Makes this a process that knows nothing yet."""

    def anew():
        monkeypatch.setattr(self_test, "_KNOWN", self_test._Known())
        refuse_hopper({})

    anew()
    yield anew
    refuse_hopper({})


def put_ptxas(folder: Path, release: str):
    (folder / "ptxas").write_text(f"#!/bin/sh\necho 'Cuda compilation tools, {release}'\n")
    (folder / "ptxas").chmod(0o755)


@pytest.fixture
def checker(tmp_path, monkeypatch, start):
    """A machine with a Hopper GPU, as far as `self_test` can see."""
    monkeypatch.setenv("FP8RL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    put_ptxas(tmp_path, "release 13.0, V13.0.88")
    monkeypatch.setattr(self_test, "machine", lambda: GPU)
    monkeypatch.setattr(jax, "clear_caches", lambda: None)  # other tests have theirs
    return Checker(tmp_path, monkeypatch)


def kept() -> Path:
    (file,) = (self_test.cache_dir() / "kernels").glob("*.json")
    return file


def test_a_process_that_checks_kernels_itself_tries_none(checker, start):
    """The GPU command: what it times must be the kernels, right or wrong."""
    self_test.trust()
    self_test.confirm("auto", lambda: MODEL), self_test.confirm("hopper")
    assert not checker.asked and not self_test.refused() and not self_test.record()
    start()
    self_test.confirm("auto")
    assert checker.asked == sorted(OPERATIONS)


def test_the_gpu_command_is_such_a_process():
    program = (
        "import sys, experiments.benchmarks.gpu.worker as worker\n"
        "worker.Setting = dict\n"
        "worker.serve = lambda *_: sys.exit(f'trusts {worker.self_test._KNOWN.trusts}')\n"
        "worker.main()"
    )
    command = [sys.executable, "-c", program, "{}", "[]"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stderr.splitlines()[-1] == "trusts True"


def test_verdicts_are_kept_until_what_they_depend_on_changes(checker, start, monkeypatch, tmp_path):
    self_test.confirm("auto", lambda: MODEL)
    of_model = [f"{name} M" for name in OPERATIONS]
    assert checker.asked == sorted([*OPERATIONS, *of_model])
    self_test.confirm("auto"), self_test.confirm("auto", lambda: MODEL)  # known to the process
    start()
    self_test.confirm("hopper", lambda: MODEL)  # and to the folder
    assert checker.asked == [] and self_test.refused() == {}
    self_test.confirm("auto", lambda: replace(MODEL, hidden=512))
    assert checker.asked == of_model
    whole = kept().read_text()
    changed = {"matmul": "another"}
    fingerprint = self_test._fingerprint
    with monkeypatch.context() as patch:
        patch.setattr(self_test, "_fingerprint", lambda x: changed.get(x) or fingerprint(x))
        start(), self_test.confirm("auto")
        assert checker.asked == ["matmul"]
    for damage in (whole[: len(whole) // 2], "[]", '{"verdicts": {"matmul": {"verdict": 3}}}', "ß"):
        kept().write_bytes(damage.encode("latin-1"))
        start(), self_test.confirm("auto")
        assert checker.asked == [*OPERATIONS]
        assert json.loads(kept().read_text())["machine"] == GPU
    with monkeypatch.context() as patch:
        patch.setattr(self_test, "machine", lambda: GPU | {"driver": "590.1, CUDA 13010"})
        start(), self_test.confirm("auto")
        assert checker.asked == [*OPERATIONS]
    assert not list((tmp_path / "cache").rglob("*.partial"))


def test_a_folder_that_cannot_be_written_is_said(checker, monkeypatch, caplog):
    monkeypatch.setenv("FP8RL_CACHE", "/proc/nowhere")
    self_test.confirm("auto")
    (line,) = caplog.messages
    assert "cannot be kept" in line and "FP8RL_CACHE" in line and self_test.refused() == {}


FAULTS = {
    "wrong": (
        f"if fault: print('# a', {WRONG!r}, sep='\\n')",
        "case a is off by 0.5 of the largest value, 9 times what is allowed",
    ),
    "other bits": (
        f"if fault: print('# a', {OTHER!r}, sep='\\n')",
        "case a gave other bits when it ran again",
    ),
    "raises": (
        'if fault: print(\'# a\\n{"case": "a", "raised": "JaxRuntimeError: illegal address"}\')',
        "case a raised JaxRuntimeError: illegal address",
    ),
    "hangs": (
        "if fault: right(), print('# b', flush=True), time.sleep(60)",
        "case b has not ended after 1.5 s",
    ),
    "crashes": (
        "if fault: right(), print('# b', flush=True), os.kill(os.getpid(), 11)",
        "case b was ended by SIGSEGV",
    ),
    "ends": (
        "if fault: right(), sys.exit('a last word')",
        "the self-test ended with status 1: a last word",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_kernel_with_a_fault_is_gone_around(checker, start, caplog, monkeypatch, fault):
    planted, why = FAULTS[fault]
    checker.plant(planted)
    monkeypatch.setattr(self_test, "SECONDS", 1.5 if fault == "hangs" else 60.0)
    began = time.monotonic()
    self_test.confirm("auto")
    assert time.monotonic() - began < 20
    (line,) = caplog.messages
    assert line.startswith(f"self-test of GPU kernels on NVIDIA H100 80GB HBM3: cache_write: {why}")
    assert "plain XLA computes that" in line and line.endswith("doctor --kernels` tries again")
    with tracing_for(132):
        assert resolve("auto", "write_cache") == "reference"
        assert resolve("auto", "blockwise_matmul") == resolve("hopper", "attention") == "hopper"
        with pytest.raises(BackendError, match=f"write_cache: .*refused: {re.escape(why)}"):
            resolve("hopper", "write_cache")
    start()
    checker.plant("raise SystemExit('a kept verdict is not made anew')")
    for _ in range(2):  # the line is said once a process
        self_test.confirm("auto")
    assert caplog.messages == [line, line]
    with pytest.raises(UserError) as refusal:
        check_recipe(get_recipe("bf16"), "hopper")
    (told,) = str(refusal.value).splitlines()
    assert told.startswith(f'precision.backend = "hopper": cache_write: {why}') and "auto" in told
    with pytest.raises(UserError, match='exact cannot be promised: .*cache_write.*"reference"'):
        check_recipe(replace(get_recipe("bf16"), exact=True))
    check_recipe(get_recipe("bf16")), check_recipe(get_recipe("bf16"), "reference")


def test_what_is_wrong_at_a_models_sizes_alone_is_wrong(checker):
    checker.plant(f"if fault and '--model' in sys.argv: print({WRONG!r})\nelse: fault = False")
    self_test.confirm("auto")
    assert self_test.refused() == {}
    self_test.confirm("auto", lambda: MODEL)
    assert list(self_test.refused()) == ["cache_write"]
    self_test.confirm("auto")  # what another model was tried with stays


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("sys.exit('No GPU: busy')", "the self-test ended with status 1: No GPU: busy"),
        (
            'print(\'# a\\n{"case": "a", "raised": "RESOURCE_EXHAUSTED"}\')',
            "case a raised RESOURCE",
        ),
        ("print('# a', flush=True), os.kill(os.getpid(), 9)", "case a was ended by SIGKILL"),
    ],
)
def test_a_fault_of_the_moment_is_not_kept(checker, start, fault, why):
    checker.plant(f"if fault: {fault}")
    self_test.confirm("auto")
    assert self_test.refused()["cache_write"].startswith(why)
    checker.plant("")
    start(), self_test.confirm("auto")
    assert self_test.refused() == {} and checker.asked == sorted([*OPERATIONS, "cache_write"])


@pytest.mark.parametrize("release", ["", "release 12.9, V12.9.41", "nothing"])
def test_an_assembler_that_is_missing_or_too_old_is_named(
    checker, start, tmp_path, caplog, release, monkeypatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    put_ptxas(tmp_path, release) if release else (tmp_path / "ptxas").unlink()
    self_test.confirm("auto")
    (line,) = caplog.messages
    assert f": {', '.join(OPERATIONS)}: " in line and checker.asked == []
    assert ("no ptxas on PATH" if not release else f"{tmp_path / 'ptxas'}, release") in line
    with tracing_for(132):
        assert resolve("auto", "decode_attention") != "hopper"
    put_ptxas(tmp_path, "release 13.1, V13.1.2")
    start(), self_test.confirm("auto")
    assert checker.asked == [*OPERATIONS] and self_test.refused() == {}


PLANTED = """
import os, sys
sys.argv.append("--interpret")
os.environ["JAX_PLATFORMS"] = "cpu"
from pallas_kernels.check import device
device.THEN = dict.fromkeys(device.OPERATIONS, ())
device.FIRST = {"quantize": ("one-number",), "cache_write": ("one-token",), "matmul": ("one-row",)}
from pallas_kernels.cache_write import hopper
right = hopper.write_cache
hopper.write_cache = lambda *a, **k: tuple(x + x for x in right(*a, **k))
from pallas_kernels.matmul import hopper
hopper.matmul = lambda *a, **k: os.kill(os.getpid(), 11)
device.main()
"""


def test_the_very_self_test_runs_in_the_interpreter(checker, monkeypatch, caplog):
    """Right values, a kernel that doubles what it writes, and one that ends its process."""
    monkeypatch.setattr(self_test, "OPERATIONS", ("cache_write", "matmul", "quantize"))
    monkeypatch.setattr(self_test, "COMMAND", (sys.executable, "-c", PLANTED))
    self_test.confirm("auto")
    why = self_test.refused()
    assert why.keys() == {"cache_write", "matmul"} and len(caplog.messages) == 1
    assert re.fullmatch(r"case one-token is off by .* times what is allowed", why["cache_write"])
    assert why["matmul"] == "case one-row was ended by SIGSEGV"
    found = self_test.record()["kernels"]
    assert found["right"] == ["quantize"] and found["wrong"] == why


STARTED = """
import sys
from jax._src import xla_bridge
from fp8rl_jax import self_test
from fp8rl_jax.cli.main import main
def verdicts(here, model):
    print(xla_bridge.backends_are_initialized(), model.hidden, model.head_dim)
    return {"cache_write": self_test.Verdict("planted")}
self_test.machine, self_test._verdicts = lambda: {"device": "H100"}, verdicts
sys.exit(main(["train", sys.argv[1], "--precision.backend", "hopper"]))
"""


def test_a_command_tries_kernels_before_jax_takes_a_device(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(tomli_w.dumps(RUN | {"output": str(tmp_path / "run")}))
    words = [sys.executable, "-c", STARTED, str(file)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 2 and done.stdout.splitlines() == ["False 64 16"]
    (line,) = done.stderr.splitlines()
    assert line.startswith('fp8rl: error: precision.backend = "hopper": cache_write: planted; ')
    assert not (tmp_path / "run").exists()


def test_from_python_a_session_and_a_load_try_them(monkeypatch, start, tmp_path):
    tried = []

    def verdicts(here, model):
        tried.append(model and (model.hidden, model.intermediate, model.head_dim))
        return {"matmul": self_test.Verdict("planted")}

    monkeypatch.setattr(self_test, "machine", lambda: GPU)
    monkeypatch.setattr(self_test, "_verdicts", verdicts)
    monkeypatch.setattr(jax, "clear_caches", lambda: None)
    policy, tokenizer = fp8rl.byte_policy(**RUN["model"]["init"])
    with pytest.raises(UserError, match="hopper.*matmul: planted"):
        fp8rl.Session(policy, tokenizer, "bf16", backend="hopper")
    start()
    (tmp_path / "config.json").write_text(json.dumps(config_json(policy.config)))
    monkeypatch.setattr("fp8rl_jax.weights.load.load", lambda *_, **__: "loaded")
    assert fp8rl.load(tmp_path) == "loaded"
    start()
    check_recipe(get_recipe("fp8-rl"))
    assert tried == [(64, 96, 16), (64, 96, 16), None]
    assert self_test.refused() == {"matmul": "planted"}


def test_every_kernel_that_auto_may_choose_can_be_refused():
    asked = set()
    for file in (ROOT / "pallas_kernels").glob("*/api.py"):
        text = file.read_text()
        asked |= set(re.findall(r'(?:choose|chosen_backend|resolve)\(\s*"(\w+)"', text))
        asked |= set(re.findall(r'^OPERATION = "(\w+)"', text, re.M))
        asked |= set(re.findall(r'resolve\(\w+, "(\w+)"\)', text))
    assert tuple(self_test.SERVES) == OPERATIONS
    assert asked - {"attention"} == {name for of in self_test.SERVES.values() for name in of}


def test_every_operation_is_tried_at_a_models_sizes():
    sizes = kernel_sizes(PolicyConfig("qwen3", 99, 256, 384, 2, 4, 2, 64))
    assert sizes == MODEL
    experts = replace(MODEL, experts=4)
    tried = {name: [case.name for case in cases_of_model(name, experts)] for name in OPERATIONS}
    assert all(tried.values()) and cases_of_model("grouped_matmul", MODEL) == []
    for name in OPERATIONS:
        for case in (*first_cases(name), *cases_of_model(name, experts)):
            assert case.expected and jax.eval_shape(case.arguments, jax.random.key(0))


FAKE = """
#include <string.h>
int cuInit(unsigned f) { return %d; }
int cuDeviceGet(int *d, int n) { *d = 7; return n; }
int cuDeviceGetAttribute(int *v, int a, int d) { *v = a == 75 ? %d : 0; return d != 7; }
int cuDeviceGetName(char *s, int n, int d) { strncpy(s, "NVIDIA H200", n); return d != 7; }
int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
"""


def test_a_hopper_gpu_is_known_by_its_driver(tmp_path, monkeypatch):
    assert self_test._hopper_gpu() is None  # there is no driver here
    load, found = ctypes.CDLL, []
    for name, status, major in (("hopper", 0, 9), ("ampere", 0, 8), ("none", 100, 9)):
        library = tmp_path / f"{name}.so"
        program = FAKE % (status, major)
        words = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
        subprocess.run(words, input=program, text=True, check=True)
        with monkeypatch.context() as patch:
            patch.setattr(ctypes, "CDLL", lambda _, library=library: load(str(library)))
            found.append(self_test._hopper_gpu())
    assert found[0]["device"] == "NVIDIA H200" and found[0]["driver"].endswith(", CUDA 13000")
    assert found[1:] == [None, None]


def test_without_a_hopper_gpu_nothing_happens(monkeypatch, start, tmp_path):
    monkeypatch.setenv("FP8RL_CACHE", str(tmp_path / "cache"))

    def never(*_, **__):
        raise AssertionError("a process is started")

    monkeypatch.setattr(subprocess, "run", never)
    monkeypatch.setattr(self_test, "machine", self_test.machine.__wrapped__)
    for platforms in ("cpu", None):
        with monkeypatch.context() as patch:
            patch.setattr(type(jax.config), "jax_platforms", platforms, raising=False)
            self_test.confirm("auto", never), self_test.confirm("hopper", never)
            assert self_test.look() is None and self_test.record() == {}
    assert not (tmp_path / "cache").exists()


def test_a_gpu_that_jax_has_no_plugin_for_is_none(monkeypatch):
    monkeypatch.setattr(type(jax.config), "jax_platforms", None, raising=False)
    monkeypatch.setattr(self_test, "_hopper_gpu", lambda: dict(GPU))
    monkeypatch.setattr(self_test, "assembler", lambda: ("ptxas 13", ""))
    assert self_test.machine.__wrapped__() is None
    monkeypatch.setattr(self_test, "_PLUGINS", ("jax-cuda13-plugin", "numpy"))
    found = self_test.machine.__wrapped__()
    assert found["plugin"].startswith("numpy ") and found["ptxas"] == "ptxas 13"
    assert found.keys() == {"device", "driver", "jax", "jaxlib", "plugin", "ptxas"}


def test_a_run_and_its_page_say_what_was_gone_around(checker, tmp_path):
    checker.plant(FAULTS["wrong"][0])
    self_test.confirm("auto")
    run = write_run(tmp_path / "run", "bf16")
    (run / "run.json").unlink()
    write_run_record(RunConfig(output=str(run)))
    kernels = json.loads((run / "run.json").read_text())["kernels"]
    assert kernels["device"] == GPU["device"] and list(kernels["wrong"]) == ["cache_write"]
    page = write_report([run], tmp_path / "page.html").read_text()
    assert "plain XLA in place of the kernels of cache_write" in page
    assert "9 times what is allowed" in page


def test_doctor_shows_verdicts_and_makes_them(checker, start, capsys):
    def lines() -> list[str]:
        said = capsys.readouterr().out.split("self-test of GPU kernels\n")[1]
        return said.split("\nwhat auto runs")[0].splitlines()

    assert cli.main(["doctor"]) == 0
    assert checker.asked == [] and lines()[1] == (
        "  cache_write: no verdict yet; `fp8rl doctor --kernels` or a run tries it"
    )
    start(), checker.plant(FAULTS["wrong"][0])
    assert cli.main(["doctor", "--kernels"]) == 1 and checker.asked == [*OPERATIONS]
    found = lines()
    assert found[0] == "  attention: right in 1 cases, 0 s"
    assert found[1].startswith("  cache_write: WRONG, case a is off by 0.5")
    start()
    assert cli.main(["doctor"]) == 1
    assert "WRONG: cache_write: case a is off" in (said := capsys.readouterr().out)
    assert "cache_write: auto runs reference" in said and checker.asked == []
    start(), checker.plant("")
    assert cli.main(["doctor", "--kernels"]) == 0 and len(checker.asked) == len(OPERATIONS)


def test_the_page_and_doctor_have_one_table_of_devices():
    page = (ROOT / "pallas_kernels" / "README.md").read_text()
    for row in doctor.DEVICES:
        assert f"| {' | '.join(row)} |\n" in page
