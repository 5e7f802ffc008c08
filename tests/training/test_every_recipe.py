"""`fp8rl train` of a mixture of experts under every recipe and of a dense model under one, from
Hugging Face directories, resumed once where there is state of a kind that no other here has."""

import math
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_run import EVEN_LETTERS, metric_rows, train, write_run

from fp8rl_jax.config.recipe import RECIPES
from fp8rl_jax.models.config import ExpertsConfig, PolicyConfig
from fp8rl_jax.models.policy import init_policy
from fp8rl_jax.tokenizers.byte_tokenizer import ByteTokenizer
from fp8rl_jax.tokenizers.tokenizer import load_tokenizer
from fp8rl_jax.weights.load import load_policy, save_policy

DENSE = PolicyConfig(
    architecture="qwen3",
    vocab_size=264,
    hidden_size=48,
    intermediate_size=40,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=24,
    eos_token_ids=(258,),
)
MOE = replace(DENSE, architecture="qwen3_moe", experts=ExpertsConfig(4, 2, 40, normalize=True))
SHAPES = {"dense": DENSE, "moe": MOE}
RUN = {"rollout": {"prompts_per_step": 2}, "trainer": {"steps": 2}, "checkpoint": {"every": 1}}
# Bounds of k3: 3e-14 and 7e-6 were measured, the rounding of float32 and that of e4m3 with random
# weights of this scale.
ROUNDING, QUANTIZED = 1e-11, 1e-4
# of formats that other recipes train and sample with
SAME_FORMATS = {"mxfp8-rollout", "nvfp4-rollout", "nvfp4-rl", "w4a16", "fp8-lm-o1", "fp8-lm-o2"}
SAME_FORMATS |= {"fp8-rollout", "fp8-kv", "fp8-e2e"}
# no state beside masters and moments, KV scales, exact mode; moments in other formats have a test of
# their own (test_gradients.py)
RESUMED = {("moe", "bf16", False), ("dense", "fp8-rl", False), ("moe", "jet-rl", True)}
RUNS = [("moe", recipe, False) for recipe in RECIPES if recipe not in SAME_FORMATS]
RUNS += [("moe", "jet-rl", True)]
RUNS += [("dense", "fp8-rl", False)]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: save_policy(
            init_policy(shape, jax.random.key(0)), root / name, ByteTokenizer(), "float32"
        )
        for name, shape in SHAPES.items()
    }


def arrays(directory: Path) -> dict[str, np.ndarray]:
    return {
        name: np.asarray(weight.value)
        for name, weight in load_policy(directory).layers.tensors().items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "recipe", "exact"), RUNS)
def test_two_steps_and_a_resumed_one(models, tmp_path, kind, recipe, exact):
    run_file, out = (
        write_run(
            tmp_path, EVEN_LETTERS, RUN, {"model": {"init": None, "path": str(models[kind])}}
        ),
        tmp_path / "out",
    )
    flags = (
        ["--recipe", recipe]
        + ["--trainer.router-replay"] * (kind == "moe")
        + ["--precision.exact"] * exact
    )
    assert train(run_file, out, *flags) == 0
    steps = metric_rows(out)[:2]
    for row in steps:
        assert all(math.isfinite(value) for value in row.values())
        assert row["optim/skipped_steps"] == 0 and row["optim/grad_norm"] > 0
    formats = RECIPES[recipe]
    low = ROUNDING if formats.rollout.roles() != formats.trainer.roles() else -ROUNDING
    high = QUANTIZED if formats.quantizes_linears or formats.quantizes_cache else ROUNDING
    if exact:
        assert all(
            row["mismatch/k3"] == row["mismatch/logprob_abs_diff_max"] == 0.0 for row in steps
        )
    else:
        assert all(low < row["mismatch/k3"] < high for row in steps)

    before, after = arrays(models[kind]), arrays(out / "model")
    assert before.keys() == after.keys() and ("router" in after) == (kind == "moe")
    assert [name for name in after if np.array_equal(before[name], after[name])] == []
    text = "abc="
    assert load_tokenizer(out / "model").encode(text) == ByteTokenizer().encode(text)

    if (kind, recipe, exact) not in RESUMED:
        return
    # as a run leaves it that is killed in its second step
    (out / "checkpoints" / "2").rename(tmp_path / "gone")
    assert train(run_file, out, *flags, "--resume") == 0
    again = arrays(out / "model")
    assert [name for name in after if not np.array_equal(again[name], after[name])] == []
    assert [row["step"] for row in metric_rows(out)] == [0, 1]
