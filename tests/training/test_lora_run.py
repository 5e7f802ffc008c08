"""Whole runs with adapters through the command line: the base stays, the adapters learn, and a
resumed run is the same run."""

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_run import RUN as TINY
from tiny_run import check_refused, measured, train, write_run

import fp8rl_jax as fp8rl
from fp8rl_jax.cli.load import load_config
from fp8rl_jax.cli.main import main
from fp8rl_jax.config.recipe import recipe as changed_recipe
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.config.training import LoraConfig
from fp8rl_jax.models.lora import merge, split
from fp8rl_jax.training.plan import memory_plan
from fp8rl_jax.training.setup import build
from fp8rl_jax.weights.peft_format import load_adapters
from fp8rl_jax.weights.safetensors_io import read_safetensors

RUN = {
    "lora": {"rank": 8},
    "rl": {"kl_coefficient": 0.1, "entropy_coefficient": 0.1},
    "optimizer": {"learning_rate": 1e-2},
    "trainer": {"steps": 3},
}


@pytest.fixture
def run_file(tmp_path):
    return write_run(tmp_path, RUN)


def starting_policy(run_file: str, *flags: str):
    return build(load_config(RunConfig, [run_file, *flags], "fp8rl train")).session.weights


def check_files(run_file: str, out: Path, *flags: str) -> None:
    """model/ is the base that the seed gives plus the adapters of adapter/, which are not those
    that it gives, in the run's float32."""
    start = starting_policy(run_file, *flags)
    first, base = split(start)
    norms = tuple(name for name in first if name.endswith("norm"))
    trained = load_adapters(out / "adapter", start.config, LoraConfig(rank=8, norms=norms))
    adapters = {name: part for name, part in trained.items() if name not in norms}
    written = {
        name: tensor.astype(np.float64)
        for name, tensor in read_safetensors(out / "model" / "model.safetensors").items()
    }
    frozen = merge(base)
    last = trained["norm"] if "norm" in norms else frozen.norm
    kept = {"model.embed_tokens": frozen.embed_tokens.value, "model.norm": last.value}
    for name in ("input_layernorm", "post_attention_layernorm"):
        weight = trained[name] if name in norms else getattr(frozen.layers, name)
        kept[f"model.layers.0.{name}"] = weight.value[0]
    for name, tensor in kept.items():
        np.testing.assert_array_equal(written[f"{name}.weight"], np.asarray(tensor))
    for name in norms:
        assert not np.array_equal(trained[name].value, first[name].value), name
    for name, adapter in adapters.items():
        a, b = np.asarray(adapter.a.value, np.float64), np.asarray(adapter.b.value, np.float64)
        assert np.abs(b).max() > 1e-3 and not np.array_equal(a, first[name].a.value)
        part = "self_attn" if name in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
        expected = np.asarray(getattr(frozen.layers, name).value[0], np.float64) + 2.0 * b[0] @ a[0]
        got = written[f"model.layers.0.{part}.{name}.weight"]
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.slow
def test_run_and_resume_are_the_same_run_on_an_untouched_base(run_file, tmp_path, capsys):
    flags = ["--recipe", "fp8-rl", "--lora.base", "rollout", "--lora.norms", "*_layernorm", "norm"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(run_file, whole, *flags) == 0
    assert train(run_file, parts, *flags, "--trainer.steps", "2") == 0
    assert train(run_file, parts, *flags, "--resume") == 0
    assert measured(whole) == measured(parts) and len(measured(whole)) == 3
    first, *_, last = measured(whole)
    assert (
        first["kl"] < 1e-9 < last["kl"]
        and last["mismatch/k3"] > 1e-9
        and last["optim/skipped_steps"] == 0
    )
    assert "fp8/quant_snr_db_weight" not in last and last["optim/grad_norm"] > 0
    check_files(run_file, whole, *flags)
    for name in ("adapter/adapter_model.safetensors", "model/model.safetensors"):
        assert (whole / name).read_bytes() == (parts / name).read_bytes()
    saved = sum(
        file.stat().st_size for file in (whole / "checkpoints" / "3").rglob("*") if file.is_file()
    )
    trained = 4 * sum(x.size for x in jax.tree.leaves(split(starting_policy(run_file, *flags))[0]))
    assert saved < 3 * trained + 2e5
    capsys.readouterr()
    more = ["--seed", "1", "--trainer.steps", "4", "--resume-changed"]
    assert train(run_file, parts, *flags, "--resume", *more) == 2
    assert "trained on another base" in capsys.readouterr().err


@pytest.mark.slow
def test_a_compute_base_is_quantized_for_the_rollout_alone(run_file, tmp_path):
    flags = ["--recipe", "fp8-rl", "--trainer.steps", "2"]
    assert train(run_file, tmp_path / "out", *flags) == 0
    check_files(run_file, tmp_path / "out", *flags)
    assert all(
        row["fp8/quant_snr_db_weight"] > 25 and row["mismatch/k3"] > 1e-9
        for row in measured(tmp_path / "out")
    )


@pytest.mark.slow
def test_bf16_is_one_run_for_both_bases_and_another_one_starts_from_its_adapter(
    run_file, tmp_path, capsys
):
    """The recipe's rollout format of a bf16 run is the compute dtype."""
    one, other, third = tmp_path / "one", tmp_path / "other", tmp_path / "third"
    assert train(run_file, one) == 0
    assert train(run_file, other, "--lora.base", "rollout") == 0
    assert measured(one) == measured(other)
    check_files(run_file, one)
    flags = ["--lora.path", str(one / "adapter")]
    assert train(run_file, third, *flags, "--optimizer.learning-rate", "0") == 0
    for name in ("adapter/adapter_model.safetensors", "model/model.safetensors"):
        assert (one / name).read_bytes() == (third / name).read_bytes()
    # the reference is what the run started from
    assert all(row["kl"] < 1e-9 for row in measured(third))
    capsys.readouterr()
    assert train(run_file, tmp_path / "fourth", *flags, "--lora.rank", "4") == 2
    assert "lora.rank = 4, but the adapter has 8" in capsys.readouterr().err


@pytest.mark.slow
def test_supervised_training_of_adapters(run_file, tmp_path, capsys):
    out = tmp_path / "warm"
    flags = [
        "--sft.steps",
        "3",
        "--sft.batch-size",
        "8",
        "--recipe",
        "fp8-rl",
        "--lora.base",
        "rollout",
    ]
    assert main(["sft", run_file, "--sft.output", str(out), *flags]) == 0
    check_files(run_file, out, *flags[4:])
    flags = ["--lora.path", str(out / "adapter"), "--recipe", "fp8-rl"]
    capsys.readouterr()
    assert main(["eval", run_file, *flags]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["examples"] == 8


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lora.targets", "*.q_proj", "*.w_proj"], "lora.targets: '*.w_proj' matches no linear"),
        (["--lora.targets", "*.router"], "lora.targets: '*.router' matches no linear"),
        (["--lora.norms", "q_norm"], "lora.norms: 'q_norm' matches no norm of the model"),
        (["--lora.rank", "33"], "lora.rank = 33 is above a side of k_proj [32, 64]"),
        (["--lora.path", "nowhere"], "nowhere/adapter_config.json: cannot be read"),
        (["--lora.rank", "0", "--lora.path", "x"], "lora.path is set but lora.rank is 0"),
        (
            "--lora.base rollout --recipe jet-rl --precision.rollout.scale power_of_two".split(),
            "weights of e4m3 128x128 power_of_two scales in the rollout and of e4m3 128x128 "
            "float32 scales in the trainer",
        ),
    ],
)
def test_faults_are_one_line(run_file, tmp_path, capsys, flags, message):
    check_refused(run_file, tmp_path / "out", capsys, flags, message)


SOME_LAYERS = (
    "--model.init.num-layers 2 --precision.first-layers-in-compute 1 --rollout.decode-layers scan"
).split()


@pytest.mark.slow
def test_a_trainer_in_fp8_has_one_base(run_file, tmp_path):
    """Quantized at rest or at every update, it is the same; and rollout and trainer multiply it
    alike."""
    one, other = tmp_path / "one", tmp_path / "other"
    flags = ["--recipe", "jet-rl", "--trainer.steps", "2", *SOME_LAYERS]
    assert train(run_file, one, *flags, "--lora.base", "rollout") == 0
    assert train(run_file, other, *flags, "--lora.base", "compute") == 0
    for at_rest, every_update in zip(measured(one), measured(other), strict=True):
        a, b = (
            {x: row[x] for x in row if not x.startswith("fp8/")} for row in (at_rest, every_update)
        )
        # a layer of its own array is another program than a slice of all of them, with another
        # order of sums
        assert a == pytest.approx(b, rel=1e-4, abs=1e-6)
        assert a.keys() == at_rest.keys() - {"fp8/nonfinite_weight"}
        assert at_rest["optim/grad_norm"] > 0 and at_rest["mismatch/k3"] < 1e-6
    check_files(run_file, one, *flags, "--lora.base", "rollout")


@pytest.mark.slow
def test_adapters_are_part_of_an_exact_forward(run_file, tmp_path):
    """In FP8 and, since k_proj is left out, in the compute dtype."""
    out = tmp_path / "out"
    flags = (
        "--recipe jet-rl --lora.base rollout --precision.excluded *.k_proj --precision.exact "
        "--compute-dtype bfloat16"
    ).split()
    flags += ["--trainer.steps", "2"]
    assert train(run_file, out, *flags) == 0
    steps = [row for row in measured(out) if "optim/grad_norm" in row]
    assert [row["mismatch/logprob_abs_diff_max"] for row in steps] == [0.0, 0.0]
    assert all(row["optim/grad_norm"] > 0 for row in steps)


def test_the_plan_counts_what_is_trained(run_file, tmp_path, capsys):
    assert (
        train(
            run_file, tmp_path / "out", "--recipe", "fp8-rl", "--lora.base", "rollout", "--dry-run"
        )
        == 0
    )
    printed = capsys.readouterr().out
    trained = 8 * sum((64 + 64, 32 + 64, 32 + 64, 64 + 64, 96 + 64, 96 + 64, 64 + 96))
    assert f"trained: {trained:,}" in printed
    moments, base = (
        float(re.search(rf"{name} +([0-9.]+)", printed)[1])
        for name in ("optimizer state", "frozen base")
    )
    assert moments == round(2 * 4 * trained / 1e6, 3)
    linears, embedding = 64 * (64 + 32 + 32 + 64 + 96 + 96) + 96 * 64, 264 * 64
    assert 1 < base * 1e6 / (linears + 4 * embedding) < 1.1  # scales and norms are the rest


def test_norms_are_trained_in_full_beside_adapters_and_noise_is_on_what_is_served(tmp_path):
    """QeRL whole: a frozen base of 4 bits, adapters, norms, and noise from the second update on."""
    policy, tokenizer = fp8rl.byte_policy(**TINY["model"]["init"])
    settings = {
        "compute_dtype": "float32",
        "samples_per_prompt": 4,
        "max_new_tokens": 6,
        "learning_rate": 1e-2,
        "lora.rank": 2,
        "lora.base": "rollout",
        "lora.norms": ["*_layernorm", "norm"],
        "rollout.transform": "fp8rl_jax.rollout.noise:on_norms",
        "rollout.transform_args": {"start": 0.5, "end": 0.1, "stages": 3},
        "trainer.steps": 3,
    }
    recipe = changed_recipe("w4a16", "qerl", rollout={"weight": "nvfp4"})

    def session_of(**more) -> fp8rl.Session:
        return fp8rl.Session(policy, tokenizer, recipe, **(settings | more))

    def step(session) -> None:
        rollout = session.rollout(["ab=", "cde="])
        session.update(rollout, [text.count("e") + len(text) for text in rollout.texts])

    def norms(policy) -> dict[str, np.ndarray]:
        found = {"norm": policy.norm.value} | {
            name: weight.value
            for name, weight in policy.stack.tensors().items()
            if name.endswith("norm")
        }
        return {name: np.array(value) for name, value in found.items()}

    session = session_of()
    trained, frozen = split(session.weights)
    live = memory_plan(policy.config, session.config).always
    for name, held in (
        ("masters (float32)", trained),
        ("optimizer state", session.state.optimizer),
        ("frozen base", frozen),
    ):
        assert live[name] == sum(x.nbytes for x in jax.tree.leaves(held)), name
    before, base = norms(policy), [np.array(x) for x in jax.tree.leaves(frozen)]
    step(session)
    after = norms(session.weights)
    assert all(np.abs(after[name] - x).max() > 1e-3 for name, x in before.items())
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(split(session.weights)[1]), base)
    assert {"norm", "input_layernorm", "q_proj.b"} <= session.arrival.keys()
    # the noise of the second stage is on the served norms, and not on the masters
    served = session.engine.policy
    apart = {
        "norm": served.norm.value - after["norm"],
        "input_layernorm": served.layers[0].input_layernorm.value - after["input_layernorm"][0],
    }
    assert all(0.3 < float(np.std(x)) < 0.7 for x in apart.values())
    jax.tree.map(np.testing.assert_array_equal, norms(session.policy), after)

    session.checkpoint(tmp_path / "checkpoints")
    other = session_of()
    other.restore(tmp_path / "checkpoints")
    for each in (session, other):
        step(each)
    jax.tree.map(np.testing.assert_array_equal, other.weights, session.weights)

    written = session.save(tmp_path / "out")
    merged, _ = fp8rl.load(written)
    jax.tree.map(np.testing.assert_array_equal, norms(merged), norms(session.weights))
    again = session_of(**{"lora.path": str(written / "adapter")})
    jax.tree.map(np.testing.assert_array_equal, again.weights, session.weights)
