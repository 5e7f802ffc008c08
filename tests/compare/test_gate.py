"""`fp8rl gate`: the numbers, and that each planted fault is named."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout.tiny import full_logits, log_softmax, take
from tiny_run import LEARNS, write_run

import fp8rl_jax as fp8rl
from fp8rl_jax.cli.main import main
from fp8rl_jax.compare.gate import measure
from fp8rl_jax.config.gate import GateConfig
from fp8rl_jax.config.recipe import recipe
from fp8rl_jax.models.forms import trainer_policy
from fp8rl_jax.rollout.sampling import at_temperature
from fp8rl_jax.rollout.sync import SyncContext
from fp8rl_jax.tasks.dataset import Example

PROMPTS = [Example(i, text, "", "", {}) for i, text in enumerate(("ab", "c", "hello", "de f"))]
STRICT = GateConfig(max_k3=0.0, max_token_mult_prob_error=None, rows=3)


def decided(seed: int = 0):
    """A byte policy whose logits spread over several nats."""
    policy, tokenizer = fp8rl.byte_policy(
        hidden_size=192, intermediate_size=320, num_layers=2, num_heads=4, num_kv_heads=2, seed=seed
    )
    return jax.tree.map(lambda x: x * 4.0 if x.ndim > 1 and x.std() > 0 else x, policy), tokenizer


def session_of(name, **settings) -> fp8rl.Session:
    usual = {
        "compute_dtype": "float32",
        "samples_per_prompt": 2,
        "prompts_per_step": 4,
        "max_new_tokens": 6,
        "precision.exact": False,
        "rollout.stop_token_ids": (1,),
    }
    return fp8rl.Session(*decided(), name, **(usual | settings))


def stale(session):
    session.engine.sync(decided(1)[0], SyncContext(0, None, session.scales))


def quantized_from_masters(session):
    engine = session.engine
    engine._convert = partial(
        engine._convert, recipe=replace(session.recipe, weight_source="master")
    )
    engine.sync(session.weights, SyncContext(0, None, session.scales))


def hotter(session):
    session.sampling = at_temperature(session.sampling, 1.3)


def percentiles(session):
    small = jax.tree.map(lambda x: 0.3 * x, session.scales)
    session.engine.sync(session.weights, SyncContext(0, None, small))


def nothing(session):
    pass


LEFT_OUT = recipe("jet-rl", "left-out", layers={"*.gate_proj": {"trainer.weight": "compute"}})


@pytest.mark.parametrize(
    ("name", "settings", "plant", "cause"),
    [
        ("fp8-rl", {}, stale, "weights: .* are not those of the present weights: they are stale"),
        (
            "fp8-rollout",
            {"compute_dtype": "bfloat16"},
            quantized_from_masters,
            "weights: .* are quantized from the float32 masters; .* their bfloat16",
        ),
        ("bf16", {}, hotter, r"temperature: at 1\.3 the trainer agrees .*\.temperature is 1:"),
        ("fp8-kv", {}, percentiles, r"KV scales: \d+\.\d% of the queries, .* lie beyond"),
        (
            LEFT_OUT,
            {},
            nothing,
            r"linears: only the rollout quantizes 2 of 14 linears: gate_proj in all 2 layers; the other",
        ),
        ("fp8-rollout", {}, nothing, r"first difference: layers\.0\.q_proj, format: weight"),
    ],
)
def test_each_planted_fault_is_named(name, settings, plant, cause):
    session = session_of(name, **settings)
    session.sync(PROMPTS)
    plant(session)
    found = measure(session, PROMPTS, STRICT)
    assert found.faults[0].startswith("k3 ") and found.faults[0].endswith(" is above 0")
    assert len(found.causes) == 1
    assert re.match(cause, found.causes[0]), found.causes


def test_numbers_are_those_of_both_distributions():
    session = session_of("fp8-rollout")
    gate = GateConfig(max_k3=None, max_token_mult_prob_error=None, rows=8, max_full_kl=1e-9)
    found = measure(session, PROMPTS, gate)
    assert found.faults[0].startswith("full_kl ") and found.causes
    session = session_of("fp8-rollout")
    rollout = session.rollout(PROMPTS).rollout
    mask = np.asarray(rollout.mask)
    trainer = trainer_policy(session.weights, session.recipe, jnp.dtype("float32"), "auto")
    rows = [log_softmax(full_logits(form, rollout)) for form in (session.engine.policy, trainer)]
    kl = np.sum(np.exp(rows[0]) * (rows[0] - rows[1]), axis=-1)[mask]
    # a prefill and a token at a time round activations alike but for their last bits
    np.testing.assert_allclose(found.full_kl, [kl.mean(), kl.max()], rtol=0.05)
    sampled, scored = (take(x, rollout.tokens)[mask] for x in rows)
    difference = scored - sampled
    k3 = np.expm1(difference) - difference
    assert found.tokens == mask.sum()
    assert found.numbers["k3"] == pytest.approx(k3.mean(), rel=0.05)
    assert found.numbers["kl"] == pytest.approx(-difference.mean(), rel=0.05)
    entropy = -np.sum(np.exp(rows[1]) * rows[1], axis=-1)[mask]
    for bins, values in ((found.by_entropy, entropy), (found.by_probability, np.exp(sampled))):
        assert sum(each.tokens for each in bins) == pytest.approx(1)
        assert sum(each.of_sum for each in bins) == pytest.approx(1)
        assert sum(each.tokens * each.k3 for each in bins) == pytest.approx(k3.mean(), rel=0.05)
        for low, high, tokens, *_ in bins:
            inside = (values >= low) & (values < high)
            assert tokens == pytest.approx(inside.mean(), abs=0.05)


def test_the_command_passes_fails_and_refuses(tmp_path, capsys):
    run = write_run(tmp_path, LEARNS, {"recipe": "jet-rl"})
    output = "--output", str(tmp_path / "run")
    assert main(["gate", str(run), *output, "--gate.json", str(tmp_path / "gate.json")]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == "passed" and "KL over the full vocabulary" in said
    written = json.loads((tmp_path / "gate.json").read_text())
    assert written["passed"] and written["numbers"]["k3"] == 0 == written["full_kl"][0]
    assert not (tmp_path / "run").exists()  # nothing is trained, nothing is there
    strict = ["--recipe", "fp8-rl", "--gate.max-k3", "1e-12", "--gate.rows", "0"]
    assert main(["gate", str(run), *output, *strict]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[-1].startswith("failed: k3 ") and said[-1].endswith("is above 1e-12")
    for wrong, message in (
        (["--gate.prompts", "-1"], "gate.prompts"),
        (["--gate.max-k3", "nan"], "--gate.max-k3"),
        (["--gate.rows", "0", "--gate.max-full-kl", "1"], "gate.max_full_kl: needs rows"),
        (["--gate.prompts", "4000"], "gate.prompts = 4000: there are 64 problems"),
    ):
        assert main(["gate", str(run), *output, *wrong]) == 2
        assert message in capsys.readouterr().err
