"""The behaviour fingerprint of an ablation: what the code that runs it does with its arms.

A record says at which commit it was made, but not whether the code does the same today. Its
fingerprint does: every setting of every arm, the numbers of a golden run of it (golden.py), and the
rewards of fixed completions. It is taken before the first run of an ablation and kept in
design.json, so that a record is never given one without the runs. A refactor that keeps the numbers
keeps the record; where they change, or a setting has another default, the record is of other code.

Numbers are compared within what another CPU may make of them: another order of sums, another width
of vectors, a compiler that optimizes or does not. `_BOUNDS` was found by measuring these.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fp8rl_jax.ablation.design import SET_BY_RUNNER, Design
from fp8rl_jax.ablation.preflight import last_line
from fp8rl_jax.ablation.record import shared_settings
from fp8rl_jax.config.files import dump_toml
from fp8rl_jax.config.fingerprint import flat, is_free, plain
from fp8rl_jax.errors import UserError

_PACKAGES = Path(__file__).parents[2] / "fp8rl_jax", Path(__file__).parents[2] / "pallas_kernels"
_COMPILER = (
    "--xla_backend_optimization_level=0 "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters "
    "--xla_cpu_parallel_codegen_split_count=1"
)
"""Nothing is optimized: most of a golden run is compiling."""
_SUFFIXES = (".py", ".toml", ".c", ".h")
_BOUNDS = {
    "logprob": (5e-3, 0.0),
    "preferred": (0.0, 0.08),
    "loss": (0.0, 0.015),
    "grad_norm": (0.025, 0.0),
    "k3": (0.5, 4e-4),
    "changed": (0.02, 0.0),
    "arrived": (0.05, 0.0),
    "noise": (0.05, 0.01),
    "kv_scale": (0.025, 0.0),
}
"""How far each number of the first step may be apart where something is rounded to FP8, relative
and absolute: one e4m3 rounding that a last bit flips moves all that comes behind. At least three
times what was seen between a compiler that optimizes and one that does not, vector widths, and
kernels."""
_GROWTH = {"loss": 3.0, "changed": 3.0}
"""And by so many times that for each update before it, which begins where the last one has led. On
another processor losses under NVFP4 were .028 apart after two updates and under MXFP4 .019 after
one, and of weights rounded to bfloat16 a 126th part more had changed after a second."""
_ROUTED_GROWTH = _GROWTH | {"logprob": 1.0}
"""The same of mixtures. With another order of sums in dX log-probabilities of one were 1.2e-4 apart
after one update and 5.5e-3 after two: its routers had chosen other experts for 5 of 96 tokens."""
_PART = {"fp4": 4.0, "fp8": 1.0, "float16": 0.2, "bfloat16": 0.2, "float32": 0.005}
"""Of these where this is the coarsest rounding; of k3, which is a square, its square. Steps of four
bits are four times those of e4m3."""
_K3 = 3e-3
"""Of a rollout with FP8 linears. One that is further from its trainer is so because its roundings
are larger, and so is what a flipped one does: as the root of k3. At a k3 of .2 another processor
masked another sequence, and the gradient's norm was 22 % apart."""


def settings(design: Design) -> dict[str, Any]:
    """Give what every arm is: {"all": {key: value}, "arms": {name: {key: value}}}.

    Defaults stand there, too, so that another default is seen. What says where a run is made and
    what it records is left out.
    """
    found = {
        arm.name: {
            key: plain(value)
            for key, value in flat(arm.config).items()
            if key not in SET_BY_RUNNER
            and (key.startswith(("sft.", "evaluation.")) or not is_free(key, {}))
        }
        for arm in design.arms
    }
    return _shared(found)


def _shared(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What all arms have, and what each has beside it."""
    shared = shared_settings(found)
    own = {
        name: {key: value for key, value in each.items() if key not in shared}
        for name, each in found.items()
    }
    return {"all": shared, "arms": own}


def _of_arm(shared: Mapping[str, Any], name: str) -> dict[str, Any]:
    return shared["all"] | shared["arms"].get(name, {})


def fingerprint(*designs: Design) -> list[dict[str, Any]]:
    """Take the fingerprints of designs under the present code, in one process.

    Returns:
        {"settings": of `settings`, "golden": numbers by arm, "rewards": those of fixed completions,
        shared as settings are}, as a record has it; the numbers of a warm start as "start".

    Raises:
        UserError: that process failed.
    """
    runs = []
    for number, design in enumerate(designs):
        kinds = {"train": "arm", "pretrain": "text", "sft": "start"}
        runs += [(number, x.name, kinds[design.command(x)], x.config) for x in design.arms]
        runs += [(number, "start", "start", design.base)] * (design.file.start != "none")
    wanted = [(kind, dump_toml(replace(config, output="unused"))) for *_, kind, config in runs]
    once = [*dict.fromkeys(wanted)]  # designs have arms in common
    done = subprocess.run(
        [sys.executable, "-m", "fp8rl_jax.ablation.golden"],
        input=json.dumps(once),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": _COMPILER},
    )
    if done.returncode:
        raise UserError(f"the golden runs failed: {last_line(done.stderr + done.stdout)}")
    found = [{"settings": settings(design), "golden": {}} for design in designs]
    asked: list[dict[str, Any]] = [{} for _ in designs]
    numbers = dict(zip(once, json.loads(done.stdout.splitlines()[-1]), strict=True))
    for (number, name, *_), run in zip(runs, wanted, strict=True):
        each, rewards = numbers[run]
        found[number]["golden"][name] = each
        if rewards:
            asked[number][name] = rewards
    return [each | {"rewards": _shared(of)} for each, of in zip(found, asked, strict=True)]


def sources() -> str:
    """SHA-256 of what a golden run is made of: with the same on the same machine it is the same,
    and need not be made again."""
    found = hashlib.sha256(f"jax {version('jax')} {version('jaxlib')}".encode())
    for folder in _PACKAGES:
        for path in sorted(folder.rglob("*")):
            if path.suffix in _SUFFIXES:
                found.update(f"{path.relative_to(folder.parent)} ".encode() + path.read_bytes())
    return found.hexdigest()


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Name what differs between two fingerprints, one line each.

    A setting that one of them does not know is none: it came or went with a refactor, and what it
    does is in the numbers.
    """
    lines = []
    for name, was in before["golden"].items():
        if name not in now["golden"]:
            lines.append(f"{name}: there is no such arm now")
            continue
        lines += [f"{name}: {line}" for line in _settings_differ(before, now, name)]
        routed = _of_arm(before["settings"], name).get("model.init.num_experts")
        growth = _ROUTED_GROWTH if routed else _GROWTH
        lines += [f"{name}: {line}" for line in _numbers_differ(was, now["golden"][name], growth)]
        lines += [f"{name}: {line}" for line in _rewards_differ(before, now, name)]
    return lines


def _settings_differ(before: Mapping[str, Any], now: Mapping[str, Any], name: str) -> Iterator[str]:
    was, is_now = (_of_arm(of["settings"], name) for of in (before, now))
    for key in was.keys() & is_now.keys():
        if was[key] != is_now[key]:
            yield f"{key} was {was[key]!r} and is {is_now[key]!r}"


def _numbers_differ(
    was: Mapping[str, Any], is_now: Mapping[str, Any], growth: Mapping[str, float]
) -> Iterator[str]:
    part = _part(was)
    for key in dict.fromkeys([*was, *is_now]):
        if key not in was or key not in is_now or isinstance(was[key], str):
            if was.get(key) != is_now.get(key):
                yield f"{key} was {was.get(key)!r} and is {is_now.get(key)!r}"
            continue
        for step, (x, y) in enumerate(zip(was[key], is_now[key], strict=True)):
            allowed = _allowed(key, part, x, y) * (1 + growth.get(key, 0.0) * step)
            if not abs(x - y) <= allowed:  # NaN is never within
                yield (
                    f"{key} of step {step} was {x:.6g} and is {y:.6g}, further apart than another "
                    f"CPU's last bits can make it ({allowed:.2g})"
                )
                break


def _rewards_differ(before: Mapping[str, Any], now: Mapping[str, Any], name: str) -> Iterator[str]:
    """Of the completions that both were asked about."""
    was, is_now = (_of_arm(of["rewards"], name) if "rewards" in of else {} for of in (before, now))
    for text in was.keys() & is_now.keys():
        if was[text] != is_now[text]:
            yield f"the reward of {text!r} was {was[text]!r} and is {is_now[text]!r}"


def _part(golden: Mapping[str, Any]) -> float:
    """Of `_BOUNDS` for the numbers of a golden run; one that failed has none."""
    part = _PART.get(golden.get("rounding", ""), 1.0)
    apart = math.sqrt(max([0.0, *golden.get("k3", [])]) / _K3)
    return max(part, apart) if apart > 1 else part


def _allowed(key: str, part: float, x: float, y: float) -> float:
    relative, absolute = _BOUNDS[key.partition("_scale")[0] + "_scale" * ("_scale" in key)]
    if key == "k3":  # a part of a positive number says nothing from 1 on
        return max(min(part, 1.0) * relative * max(abs(x), abs(y)), part**2 * absolute)
    return part * max(relative * max(abs(x), abs(y)), absolute)
