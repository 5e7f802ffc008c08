"""The studies behind docs/training.md: what their arms are, and what is said of a record."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import training_page
from experiments.behaviour import alike
from experiments.figures import RESULTS
from experiments.fp4 import LEARNED, fingerprint, snr, ways
from experiments.fp4 import main as fp4
from experiments.stability import UNSCALED
from experiments.stability import main as stability
from fp8rl_jax.precision import check_recipe, is_finite


def test_the_arms_of_fp4_differ_in_one_thing_each():
    for recipe in LEARNED.values():
        check_recipe(recipe)
    found = {
        name: (recipe.trainer.activation.element, recipe.weight_gradient_estimator)
        for name, recipe in LEARNED.items()
    }
    assert found == {
        "compute": ("compute", "straight_through"),
        "both": ("fp4_clamped", "differentiable"),
        "straight through": ("fp4", "straight_through"),
        "estimator": ("fp4", "differentiable"),
        "clamping": ("fp4_clamped", "straight_through"),
    }


def test_signal_to_noise_of_outliers():
    """One of 100 in a hundred numbers: nothing else is left of them until it is clamped."""
    x = np.random.default_rng(0).normal(size=(1, 100, 100)).astype(np.float32)
    x[0, :, 0] = 100
    found = {key: snr(x, made) for key, made in ways(100, 100).items()}
    for shared in ("token", "tensor"):
        assert found[shared, "as it is"] == pytest.approx(20, abs=0.5)  # all but the outlier is 0
        assert found[shared, "0.97 compensated"] > 30 > 3 > found[shared, "0.97 clamped"]


def test_the_committed_ratios_are_of_this_code():
    kept = json.loads((RESULTS / "fp4" / "snr.json").read_text())["rows"]["ways"]
    assert alike(kept["fingerprint"], fingerprint()), "python -m experiments.fp4 --parts snr"


def test_floats_without_scales_round_saturate_and_underflow():
    x = jnp.float32([[0.3, 17.0, 1e4, -1e4, 1e-4, 2.0**-9]])
    q = UNSCALED["unscaled_e4m3"].quantize(x)
    np.testing.assert_array_equal(q.dequantize(), [[0.3125, 16, 480, -480, 0, 2.0**-9]])
    assert not is_finite(UNSCALED["unscaled_e4m3"].quantize(x.at[0, 0].set(jnp.nan)))


def test_what_is_said_of_runs(tmp_path):
    calm = [1 + 0.01 * (i % 7) for i in range(60)]
    spiked = [9.0 if i == 50 else x for i, x in enumerate(calm)]
    early = [9.0 if i == 45 else x for i, x in enumerate(calm)]
    entries = [
        {
            "row": row,
            "rate": 0.1,
            "seed": seed,
            "stability/diverged": gone,
            "losses": a,
            "sharpness": b,
        }
        for row, seed, gone, a, b in (
            ("compute", 0, 0.0, calm, calm),
            ("e2m1", 0, 1.0, spiked, early),
            ("e2m1", 1, 0.0, spiked, calm),
        )
    ]
    (tmp_path / "stability").mkdir()
    settings = {"steps": 60, "batch_size": 4, "hidden_size": 8}
    text = json.dumps({"settings": settings, "entries": entries})
    (tmp_path / "stability" / "runs.json").write_text(text)
    ((table,),) = training_page.sections(tmp_path).values()
    assert table.rows == [
        ["`compute`", "0 of 1 (0 to 98 %); 1.03"],
        ["`e2m1`", "1 of 2 (1 to 99 %); 1.83"],
    ]
    assert (
        "Of 2 runs whose loss had a spike, sharpness had one at an earlier step in 1" in table.about
    )


def test_what_cannot_be_measured_is_refused(capsys):
    assert fp4(["--parts", "speed"]) == 2 == stability(["--seeds", "0"])
    said = capsys.readouterr().err
    assert "--parts: speed unknown (snr, learning)" in said and "--seeds: 0 must be" in said
