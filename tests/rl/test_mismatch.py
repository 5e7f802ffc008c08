from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax import rl

mismatch_metrics = jax.jit(rl.mismatch_metrics, static_argnums=4)
DEFAULT = rl.CorrectionConfig(max_weight=2.0)


def reference_metrics(rollout, train, mask, advantages, cap):
    """The published formulas in float64, on the flat list of tokens and the list of completions."""
    rollout, train = rollout.astype(np.float64), train.astype(np.float64)
    sign = np.sign(np.broadcast_to(advantages[:, None], mask.shape))[mask]
    p, q = train[mask], rollout[mask]
    rho, mixture = np.exp(p - q), np.log(0.5 * np.exp(p) + 0.5 * np.exp(q))

    def k3(x):
        return np.exp(x) - x - 1

    weights = np.minimum(rho, cap)
    rows = [(train[b][mask[b]], rollout[b][mask[b]]) for b in range(len(mask)) if mask[b].any()]
    gaps = np.array([q.mean() - p.mean() for p, q in rows])
    expected = {
        "kl": np.mean(q - p),
        "k3": np.mean(rho - np.log(rho) - 1),
        "policy_kl_error": np.mean(np.exp(q - p) - (q - p) - 1),
        "js_divergence_error": np.mean(0.5 * k3(p - mixture) + 0.5 * k3(q - mixture)),
        "token_mult_prob_error": np.mean(np.exp(np.abs(q - p))),
        "logprob_abs_diff_mean": np.mean(np.abs(q - p)),
        "logprob_abs_diff_max": np.max(np.abs(q - p)),
        "pearson": np.corrcoef(np.exp(p), np.exp(q))[0, 1],
        "ppl_train": np.mean([np.exp(-p.mean()) for p, _ in rows]),
        "ppl_rollout": np.mean([np.exp(-q.mean()) for _, q in rows]),
        "ppl_ratio": np.mean(np.exp(gaps)),
        "log_ppl_diff": np.mean(gaps),
        "log_ppl_abs_diff": np.mean(np.abs(gaps)),
        "chi2_token": np.mean(rho**2) - 1,
        "chi2_seq": np.mean([np.exp(2 * (p - q).sum()) for p, q in rows]) - 1,
        "is_mean": np.mean(rho),
        "is_ess": 1 / np.mean((weights / weights.mean()) ** 2),
        "is_clip_frac": np.mean(rho > cap),
        "is_low_frac": np.mean(rho < 1 / cap),
    }
    for name, value in (("positive", 1), ("negative", -1)):
        expected[f"is_clip_frac_{name}"] = np.mean(rho[sign == value] > cap)
        expected[f"is_low_frac_{name}"] = np.mean(rho[sign == value] < 1 / cap)
    return {f"mismatch/{name}": value for name, value in expected.items()}


def measure(batch, config=DEFAULT, advantages=True):
    return mismatch_metrics(
        jnp.asarray(batch["rollout"]),
        jnp.asarray(batch["old"]),
        jnp.asarray(batch["mask"]),
        jnp.asarray(batch["advantages"]) if advantages else None,
        config,
    )


@pytest.mark.parametrize("spread", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("cap", [1.05, 2.0])
def test_all_metrics_match_float64(make_batch, spread, cap):
    batch = make_batch(1, spread=spread)
    expected = reference_metrics(
        batch["rollout"], batch["old"], batch["mask"], batch["advantages"], cap
    )
    found = measure(batch, rl.CorrectionConfig(max_weight=cap))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


def test_small_divergences_keep_their_digits(make_batch):
    batch = make_batch(rows=64, width=64, spread=1e-3)
    found = measure(batch)
    expected = reference_metrics(
        batch["rollout"], batch["old"], batch["mask"], batch["advantages"], 2.0
    )
    for name in ("k3", "policy_kl_error", "js_divergence_error", "kl", "chi2_token", "chi2_seq"):
        np.testing.assert_allclose(
            found[f"mismatch/{name}"], expected[f"mismatch/{name}"], rtol=2e-3, err_msg=name
        )


def test_equal_policies_have_no_mismatch(make_batch):
    batch = make_batch()
    found = measure(batch | {"rollout": batch["old"]})
    ones = {"token_mult_prob_error", "ppl_ratio", "is_mean", "is_ess", "pearson"}
    for name, value in found.items():
        if not name.startswith("mismatch/ppl_t") and not name.startswith("mismatch/ppl_ro"):
            np.testing.assert_allclose(
                value, float(name.removeprefix("mismatch/") in ones), atol=1e-6, err_msg=name
            )


def test_padding_and_empty_rows_do_not_count(make_batch, spoil_padding):
    batch = make_batch()
    spoiled = batch | {
        name: spoil_padding(batch[name], batch["mask"]) for name in ("rollout", "old")
    }
    jax.tree.map(np.testing.assert_array_equal, measure(batch), measure(spoiled))
    filled = batch["mask"].any(1)
    dense = {name: value[filled] for name, value in batch.items()}
    found, expected = measure(batch), measure(dense)
    for name in found:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-7, err_msg=name)


def test_no_tokens_at_all_is_zero(make_batch):
    batch = make_batch()
    found = measure(batch | {"mask": np.zeros_like(batch["mask"])})
    assert all(value == 0 for value in found.values())


@pytest.mark.parametrize("side", ["rollout", "old"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_non_finite_logprob_reaches_the_mismatch_metrics(make_batch, side, bad):
    batch = make_batch()
    batch[side][0, 0] = bad
    found = measure(batch)
    for name in (
        "kl",
        "k3",
        "logprob_abs_diff_mean",
        "logprob_abs_diff_max",
        "token_mult_prob_error",
        "log_ppl_diff",
    ):
        if not (name == "k3" and np.isneginf(bad) and side == "old"):
            assert not np.isfinite(found[f"mismatch/{name}"]), name


def test_a_large_gap_is_large_and_finite_where_it_is_clamped(make_batch):
    batch = make_batch()
    batch["rollout"][0, 0] -= 50
    found = measure(batch)
    for name in ("is_mean", "is_ess", "chi2_token", "chi2_seq"):
        assert np.isfinite(found[f"mismatch/{name}"]), name
    assert found["mismatch/logprob_abs_diff_max"] > 49


def test_exchanged_policies_exchange_the_divergences(make_batch):
    batch = make_batch(spread=0.5)
    one, other = measure(batch), measure(batch | {"rollout": batch["old"], "old": batch["rollout"]})
    np.testing.assert_allclose(one["mismatch/policy_kl_error"], other["mismatch/k3"], rtol=1e-6)
    np.testing.assert_allclose(
        one["mismatch/js_divergence_error"], other["mismatch/js_divergence_error"], rtol=1e-6
    )
    assert one["mismatch/policy_kl_error"] != one["mismatch/k3"]


def test_signs_follow_rollout_against_train(make_batch):
    batch = make_batch()
    found = measure(batch | {"rollout": np.full((8, 11), -0.1), "old": np.full((8, 11), -0.3)})
    assert found["mismatch/kl"] > 0 and found["mismatch/log_ppl_diff"] > 0
    assert found["mismatch/ppl_ratio"] > 1 > found["mismatch/is_mean"]


def test_advantages_are_optional_and_gradients_finite(make_batch):
    batch = make_batch()
    found = measure(batch, advantages=False)
    assert not any(name.endswith(("positive", "negative")) for name in found)

    def total(train):
        return sum(
            mismatch_metrics(
                jnp.asarray(batch["rollout"]), train, jnp.asarray(batch["mask"])
            ).values()
        )

    assert np.isfinite(jax.jit(jax.grad(total))(jnp.asarray(batch["old"]))).all()


@pytest.mark.usefixtures("unchecked_shapes")
def test_misshapen_arrays_are_named():
    with pytest.raises(ValueError, match="train_logprobs has shape"):
        mismatch_metrics(jnp.zeros((2, 3)), jnp.zeros((2, 1)), jnp.ones((2, 3), bool))
