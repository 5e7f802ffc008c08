from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from fp8rl_jax.config.rl import AdvantageConfig, CorrectionConfig, LossConfig, RLConfig, check_sampling
from fp8rl_jax.errors import UserError


def test_defaults_are_the_fields_usual_ones():
    config = RLConfig()
    assert (config.clip_low, config.clip_high, config.dual_clip, config.kl_coefficient) == (0.2, 0.2, None, 0.0)
    assert (config.advantage.estimator, config.advantage.ddof) == ("grpo", 1)
    assert (config.correction.mode, config.correction.max_weight) == ("decoupled", 2.0)
    assert config.correction.truncated_sampling == "refuse"
    assert hash(config) == hash(RLConfig())


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: AdvantageConfig(estimator="gpro"), "rl.advantage.estimator"),
        (lambda: AdvantageConfig(ddof=2), "rl.advantage.ddof"),
        (lambda: AdvantageConfig(epsilon=0.0), "rl.advantage.epsilon"),
        (lambda: LossConfig(clip_low=0.0), "rl.clip_low"),
        (lambda: LossConfig(clip_low=1.5), "rl.clip_low"),
        (lambda: LossConfig(clip_high=float("nan")), "rl.clip_high"),
        (lambda: LossConfig(clip_high=float("inf")), "rl.clip_high"),
        (lambda: LossConfig(clip_high="0.2"), "rl.clip_high"),
        (lambda: LossConfig(dual_clip=1.0), "rl.dual_clip"),
        (lambda: LossConfig(kl_coefficient=-0.1), "rl.kl_coefficient"),
        (lambda: LossConfig(aggregation="mean"), "rl.aggregation"),
        (lambda: CorrectionConfig(method="tis"), "rl.correction.method"),
        (lambda: CorrectionConfig(mode="both"), "rl.correction.mode"),
        (lambda: CorrectionConfig(max_weight=0.5), "rl.correction.max_weight"),
        (lambda: CorrectionConfig(max_weight=True), "rl.correction.max_weight"),
        (lambda: CorrectionConfig(truncated_sampling="yes"), "rl.correction.truncated_sampling"),
        (lambda: RLConfig(clip_high=-1.0), "rl.clip_high"),
    ],
)
def test_bad_values_name_their_key(make, key):
    with pytest.raises(UserError, match=f"^{key}: "):
        make()


def test_all_faults_are_reported_together():
    with pytest.raises(UserError) as caught:
        LossConfig(clip_low=0.0, dual_clip=0.5, aggregation="mean")
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "rl.clip_low",
        "rl.dual_clip",
        "rl.aggregation",
    ]


def test_recipe_method_is_resolved_only_where_it_is_asked_for():
    assert CorrectionConfig().resolve("token_tis").method == "token_tis"
    assert CorrectionConfig(method="none").resolve("token_tis").method == "none"


@pytest.mark.parametrize("setting", [{"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05}])
def test_truncated_sampling_needs_the_switch(setting):
    with pytest.raises(UserError, match=f"{next(iter(setting))} = .*rl.correction.truncated_sampling"):
        check_sampling(CorrectionConfig(), **setting)
    for choice in ("behaviour", "policy"):
        assert check_sampling(CorrectionConfig(truncated_sampling=choice), **setting) is True


def test_full_sampling_passes_and_greedy_does_not():
    assert check_sampling(CorrectionConfig(), temperature=0.7, top_k=0, top_p=1.0, min_p=0.0) is False
    with pytest.raises(UserError, match="rollout.temperature"):
        check_sampling(CorrectionConfig(truncated_sampling="policy"), temperature=0.0)


def test_every_field_is_documented_and_jax_is_not_imported():
    program = "import sys, fp8rl_jax.config.rl; sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
    source = open(sys.modules[RLConfig.__module__].__file__).read().splitlines()
    for cls in (AdvantageConfig, LossConfig, CorrectionConfig, RLConfig):
        for field in dataclasses.fields(cls):
            line = next(i for i, text in enumerate(source) if text.startswith(f"    {field.name}:"))
            assert source[line + 1].startswith('    """'), field.name
