"""Do other libraries read an export as we do? `make peers`, or
`python -m experiments.opened_exports --python PYTHON`.

A small model with random weights is exported in every form that compressed-tensors has, with two
linears left in 16 bits, NVFP4 also with activations (W4A4), and read back. Beside ours stand, by
`benchmarks/peers/transformers_dequantize.py`, each linear as compressed-tensors decompresses it,
and as transformers holds it, which opens the directory on a CPU: both in bfloat16, to which ours
is rounded. A line says of how many linears all bits are alike; the exit status is 2 where one
differs.

What vLLM makes of the directories, which --keep leaves, has not been seen: that needs a GPU.

    VLLM_PYTHON -m vllm.entrypoints.cli.main serve DIRECTORY/mxfp8 --dtype bfloat16
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import ml_dtypes
import numpy as np

from experiments.benchmarks.peer import Peer, PeerSpec
from experiments.command import run_command
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.policy import init_policy, linear_names
from fp8rl_jax.weights.hf_directory import load_policy_arrays
from fp8rl_jax.weights.hf_names import hf_tensors
from fp8rl_jax.weights.load import save_policy
from fp8rl_jax.weights.quantized_export import ExportForm, export_form

FORMS = ("mxfp8", "mxfp6", "mxfp4", "nvfp4", "nvfp4-16x16", "nvfp4_four_over_six", "int4")
W4A4 = "nvfp4, W4A4"
SHAPE = PolicyConfig(
    architecture="qwen3",
    vocab_size=64,
    hidden_size=256,
    intermediate_size=384,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
)
LINEARS = frozenset(linear_names(SHAPE)) - {"layers.1.o_proj", "layers.1.down_proj"}


@dataclass(frozen=True)
class Arguments:
    """Exports of a small model as other libraries read them."""

    python: str
    """Interpreter with torch, transformers and compressed-tensors (`make peers` makes one)."""
    keep: str = ""
    """Directory that the exports are left in; empty: none is."""


def run(arguments: Arguments) -> None:
    """Export, ask, compare, print."""
    policy, differing = init_policy(SHAPE, jax.random.key(0)), []
    spec = PeerSpec("transformers", "--python", arguments.python, "transformers_dequantize.py")
    with Peer(spec, {"threads": 1}, 1, 0) as peer, tempfile.TemporaryDirectory() as place:
        peer.wait_until_ready()
        print(*(f"{name} {version}" for name, version in peer.about["versions"].items()), sep=", ")
        for name in (*FORMS, W4A4):
            form = export_form(name.partition(",")[0])
            assert form is not None  # not one of 16 bits
            inputs = dict.fromkeys(LINEARS, 3.0) if name == W4A4 else None
            form = replace(form, linears=LINEARS, inputs=inputs)
            directory = save_policy(policy, Path(arguments.keep or place) / name, dtype=form)
            file = Path(place) / "weights.npz"
            answer = peer.answer({"open": str(directory), "file": str(file)})
            alike = same_bits(directory, form, file)
            print(f"{name}: {alike} of {len(LINEARS)} linears alike, {answer}")
            if alike < len(LINEARS) or answer["differing"] or not answer["finite"]:
                differing.append(name)
    if differing:
        raise UserError(f"other values than ours in {', '.join(differing)}")


def same_bits(directory: Path, form: ExportForm, file: Path) -> int:
    """Count the linears of an export that have in `file` the bits that we read."""
    _, arrays = load_policy_arrays(directory)
    linears = {name: place for name, place in hf_tensors(SHAPE).items() if form.holds(place)}
    with np.load(file) as theirs:
        return sum(
            np.array_equal(
                theirs[name],
                arrays[place.path][place.index].astype(ml_dtypes.bfloat16).view(np.int16),
            )
            for name, place in linears.items()
        )


def main(argv: list[str]) -> int:
    """Exit code: 0, or 2 where a value differs or a fault is in what was given."""
    return run_command("opened_exports", Arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
