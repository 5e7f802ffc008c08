from __future__ import annotations

import subprocess
import sys

import pytest

from fp8rl_jax.config.correction import CRITERIA, PLAIN, PRESETS, Criterion
from fp8rl_jax.config.rl import (
    AdvantageConfig,
    CorrectionConfig,
    DynamicSamplingConfig,
    LossConfig,
    OverlongConfig,
    RLConfig,
    check_sampling,
)
from fp8rl_jax.errors import UserError


def test_defaults_are_the_fields_usual_ones():
    config = RLConfig()
    assert (config.clip_low, config.clip_high, config.dual_clip, config.kl_coefficient) == (
        0.2,
        0.2,
        None,
        0.0,
    )
    assert (config.advantage.estimator, config.advantage.ddof) == ("grpo", 1)
    assert (config.objective, config.ratio, config.aggregation) == ("clip", "token", "token_mean")
    assert (
        not config.dynamic_sampling.enabled
        and not config.overlong.buffer
        and not config.entropy_coefficient
    )
    assert config.correction.method == "recipe"
    filled = config.correction.resolve("token_tis")
    assert (filled.mode, filled.weights, filled.max_weight) == ("decoupled", "token", 2.0)
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
        (lambda: LossConfig(objective="ppo"), "rl.objective"),
        (lambda: LossConfig(objective="cispo", dual_clip=3.0), "rl.dual_clip"),
        (lambda: LossConfig(objective="cispo", ratio="sequence"), "rl.ratio"),
        (lambda: LossConfig(objective="p3o", dual_clip=3.0), "rl.dual_clip"),
        (lambda: LossConfig(objective="p3o", ratio="sequence"), "rl.ratio"),
        (lambda: LossConfig(kl_coefficient=0.1, kl_estimator="k1"), "rl.kl_gradient"),
        (lambda: LossConfig(kl_estimator="k4"), "rl.kl_estimator"),
        (lambda: LossConfig(entropy_coefficient=-1.0), "rl.entropy_coefficient"),
        (lambda: LossConfig(fixed_length=5), "rl.fixed_length"),
        (lambda: LossConfig(aggregation="fixed_length", fixed_length=0), "rl.fixed_length"),
        (lambda: OverlongConfig(buffer=-1), "rl.overlong.buffer"),
        (lambda: OverlongConfig(penalty=-1.0), "rl.overlong.penalty"),
        (lambda: DynamicSamplingConfig(max_rounds=0), "rl.dynamic_sampling.max_rounds"),
        (lambda: CorrectionConfig(weights="both"), "rl.correction.weights"),
        (lambda: CorrectionConfig(bounds="cut"), "rl.correction.bounds"),
        (lambda: CorrectionConfig(overflow="nan"), "rl.correction.overflow"),
        (lambda: CorrectionConfig(denominator="some"), "rl.correction.denominator"),
        (lambda: CorrectionConfig(bypass_loss="ppo_clip"), "rl.correction.bypass_loss"),
        (lambda: CorrectionConfig(batch_normalize="yes"), "rl.correction.batch_normalize"),
        (
            lambda: CorrectionConfig(method="none", batch_normalize=True),
            "rl.correction.batch_normalize",
        ),
        (lambda: CorrectionConfig(min_weight=-0.1), "rl.correction.min_weight"),
        (lambda: CorrectionConfig(method="icepop", min_weight=6.0), "rl.correction.min_weight"),
        (lambda: CorrectionConfig(method="k3", mode="bypass"), "rl.correction.denominator"),
        (
            lambda: CorrectionConfig(method="token_tis", mode="bypass", batch_normalize=True),
            "rl.correction.batch_normalize",
        ),
        (lambda: CorrectionConfig(reject=("geo:1",)), "rl.correction.reject"),
        (lambda: CorrectionConfig(reject=("seq_max_k1:2",)), "rl.correction.reject"),
        (lambda: CorrectionConfig(reject=("token_k1:2:0.5",)), "rl.correction.reject"),
        (lambda: CorrectionConfig(reject=("token_k2:0.1:0.5",)), "rl.correction.reject"),
        (lambda: CorrectionConfig(reject=("token_k3",)), "rl.correction.reject"),
        (lambda: CorrectionConfig(reject=("token_k3:much",)), "rl.correction.reject"),
        (lambda: CorrectionConfig(reject=("seq_mean_binary_kl:0.1",)), "rl.correction.reject"),
        (lambda: CorrectionConfig(reject=("token_binary_kl:0.1:1",)), "rl.correction.reject"),
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
    assert CorrectionConfig(method="none").resolve("token_tis").weights == "none"


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_sound_and_filled_once(name):
    config = CorrectionConfig(method=name)
    filled = config.filled()
    assert all(getattr(filled, field) is not None for field in PLAIN)
    assert filled.filled() == filled
    assert {name: getattr(filled, name) for name in PRESETS[name]} == PRESETS[name]


def test_fields_set_by_hand_go_before_the_preset():
    config = CorrectionConfig(
        method="verl_decoupled_token_icepop", max_weight=3.0, reject=("seq_max_k3:0.5",)
    ).filled()
    assert (config.bounds, config.min_weight, config.max_weight) == ("mask", 0.5, 3.0)
    assert config.reject == ("seq_max_k3:0.5",)
    assert CorrectionConfig(method="k3", reject=()).filled().reject == ()


def test_quirks_of_verl_and_nemo_are_in_their_presets():
    for name in PRESETS:
        config = CorrectionConfig(method=name).filled()
        assert config.inverse_k1 == name.startswith("verl_")
        assert (config.overflow == "zero") == name.startswith("nemo_")
        assert config.denominator == (
            "all" if name.startswith(("nemo_", "verl_bypass", "kpop")) else "kept"
        )


def test_criteria_are_parsed():
    assert Criterion.parse("seq_mean_k1:0.999:1.001") == Criterion("seq_mean", "k1", 0.999, 1.001)
    assert Criterion.parse("token_k1:2") == Criterion("token", "k1", 0.5, 2.0)
    assert Criterion.parse("token_k1:0.5") == Criterion("token", "k1", 0.5, 2.0)
    assert Criterion.parse("seq_max_k3:0.5") == Criterion("seq_max", "k3", float("-inf"), 0.5)
    for name in CRITERIA:
        parsed = Criterion.parse(f"{name}:1.5")
        assert f"{parsed.level}_{parsed.statistic}" == name
        assert parsed.statistic in ("k1", "k2", "k3", "error", "binary_kl")


def test_what_needs_the_whole_batch_says_why():
    assert CorrectionConfig(method="token_tis").whole_batch == []
    assert CorrectionConfig(method="nemo_seq_mask_tis").whole_batch == []
    assert CorrectionConfig(method="verl_bypass_ppo_clip_k3_rs").whole_batch == []
    (reason,) = CorrectionConfig(method="geometric").whole_batch
    assert "rl.correction.reject" in reason and "denominator" in reason
    (reason,) = CorrectionConfig(method="token_tis", batch_normalize=True).whole_batch
    assert "rl.correction.batch_normalize" in reason
    assert len(CorrectionConfig(method="mis", batch_normalize=True).whole_batch) == 2


@pytest.mark.parametrize(
    "setting",
    [
        {"top_k": 20},
        {"top_p": 0.8},
        {"min_p": 0.05},
        {"bad_words": ["x"]},
        {"logit_bias": {"7": 1.0}},
    ],
)
def test_truncated_sampling_needs_the_switch(setting):
    with pytest.raises(
        UserError, match=f"{next(iter(setting))} = .*rl.correction.truncated_sampling"
    ):
        check_sampling(CorrectionConfig(), **setting)
    for choice in ("behaviour", "policy"):
        assert check_sampling(CorrectionConfig(truncated_sampling=choice), **setting) is True


def test_replay_needs_a_support():
    """Of what is not truncated there is none, and a bias is not of the policy."""
    replay = CorrectionConfig(truncated_sampling="replay")
    assert check_sampling(replay, top_p=0.9, bad_words=["x"]) is True
    assert check_sampling(replay) is False
    with pytest.raises(UserError, match="rollout.bad_words leave nearly the whole vocabulary"):
        check_sampling(replay, bad_words=["x"])
    with pytest.raises(UserError, match="rollout.logit_bias samples from others"):
        check_sampling(replay, top_k=5, logit_bias={"7": 1.0})


def test_full_sampling_passes_and_greedy_does_not():
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "bad_words": (), "logit_bias": {}}
    assert check_sampling(CorrectionConfig(), temperature=0.7, **off) is False
    with pytest.raises(UserError, match="rollout.temperature"):
        check_sampling(CorrectionConfig(truncated_sampling="policy"), temperature=0.0)
    with pytest.raises(UserError, match="rollout.temperature"):
        check_sampling(
            CorrectionConfig(truncated_sampling="behaviour"), temperature=0.0, bad_words=["x"]
        )


def test_every_field_is_documented_and_jax_is_not_imported():
    program = (
        "import sys, fp8rl_jax.config.rl; sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
    for cls in (
        AdvantageConfig,
        LossConfig,
        CorrectionConfig,
        RLConfig,
        OverlongConfig,
        DynamicSamplingConfig,
        Criterion,
    ):
        source = open(sys.modules[cls.__module__].__file__).read().splitlines()
        start = source.index(
            next(line for line in source if line.startswith(f"class {cls.__name__}"))
        )
        for field in cls.__annotations__:
            line = next(
                i for i, text in enumerate(source) if i > start and text.startswith(f"    {field}:")
            )
            assert source[line + 1].startswith('    """'), field
