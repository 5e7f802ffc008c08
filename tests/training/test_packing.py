"""The packer by its own laws, and packed and cut updates against the plain one."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8rl_jax import rl
from fp8rl_jax.config.recipe import get_recipe
from fp8rl_jax.config.rl import CorrectionConfig, RLConfig
from fp8rl_jax.config.run import MeshConfig
from fp8rl_jax.config.training import OptimizerConfig, TrainerConfig
from fp8rl_jax.models.config import ExpertsConfig, PolicyConfig
from fp8rl_jax.models.forward import forward
from fp8rl_jax.models.logprobs import Support
from fp8rl_jax.models.policy import init_policy
from fp8rl_jax.parallel import make_mesh
from fp8rl_jax.training.batch import bucket, first_fit, narrow, of_width, pack, trim, untrim
from fp8rl_jax.training.state import init_state, make_optimizer
from fp8rl_jax.training.step import Batch, StepConfig, batch_logprobs, update

QWEN3 = PolicyConfig("qwen3", 61, 48, 80, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16)
WINDOWS = dataclasses.replace(QWEN3, architecture="mistral", sliding_window=4)
MOE = dataclasses.replace(
    QWEN3, architecture="qwen3_moe", num_layers=1, experts=ExpertsConfig(5, 2, 24, True)
)
RL = RLConfig(correction=CorrectionConfig(method="token_tis"), entropy_coefficient=0.01)
CONFIG = StepConfig(
    get_recipe("bf16"), RL, "float32", temperature=0.8, logprob_chunk=8, sharpness=True
)
# gradients show in the first moments
OPTIMIZER = make_optimizer(OptimizerConfig(learning_rate=1e-2, max_grad_norm=0.0), 4)
MESH = make_mesh(MeshConfig(data=1), jax.devices()[:1])
S, T, N, LENGTHS = 8, 9, 3, np.array([3, 5, 2, 4])
COMPLETIONS = np.array([5, 1, 0, 6, 6, 2, 0, 0, 0, 3, 4, 2])


@st.composite
def batches(draw):
    n, p, width = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(8, 24))
    prompts = draw(st.lists(st.integers(1, 4), min_size=p, max_size=p))
    completions = draw(st.lists(st.integers(0, width - 4), min_size=p * n, max_size=p * n))
    return np.array(prompts), np.array(completions), width


def fewest_rows(sizes: list[int], width: int) -> int:
    """Exactly, over all sets of items: the fewest rows, and then the fewest slots in the last
    one."""
    best = {0: (1, 0)}
    for chosen in range(1, 1 << len(sizes)):
        ways = []
        for i, size in enumerate(sizes):
            if chosen >> i & 1:
                rows, used = best[chosen ^ (1 << i)]
                ways.append((rows, used + size) if used + size <= width else (rows + 1, size))
        best[chosen] = min(ways)
    return best[(1 << len(sizes)) - 1][0]


@settings(max_examples=200, deadline=None)
@given(batches())
def test_first_fit_places_each_completion_once_and_wastes_little(case):
    prompts, completions, width = case
    n = len(completions) // len(prompts)
    rows = first_fit(prompts, completions, width)
    placed = [c for row in rows for _, members in row for c in members]
    assert sorted(placed) == np.flatnonzero(completions).tolist()
    used = [sum(prompts[p] + completions[members].sum() for p, members in row) for row in rows]
    assert all(total <= width for total in used)
    for row in rows:
        assert len({p for p, _ in row}) == len(row) and all(
            c // n == p for p, members in row for c in members
        )
    # first fit: what opened a row did not fit in an earlier one
    assert all(a + b > width for i, a in enumerate(used) for b in used[i + 1 :])
    alone = [int(prompts[c // n] + completions[c]) for c in placed]
    assert sum(used) <= sum(alone)
    if n == 1 and alone:
        assert len(rows) <= 11 / 9 * fewest_rows(alone, width) + 6 / 9


@settings(max_examples=100, deadline=None)
@given(batches(), st.integers(1, 3))
def test_every_token_is_in_the_rows_once_and_predicted_from_the_one_before(case, devices):
    prompts, completions, width = case
    n, s, t = len(completions) // len(prompts), 4, width
    packing = pack(prompts, completions, (s, t), width, devices=devices)
    assert packing.tokens.shape[0] % devices == 0 and packing.tokens.shape[1] == width
    start, end = len(prompts) * s, len(prompts) * s + len(completions) * t
    where = {int(x): i for i, x in np.ndenumerate(packing.tokens) if start <= x < end}
    real = {start + b * t + i for b, count in enumerate(completions) for i in range(count)}
    assert where.keys() == real and sum(start <= x < end for x in packing.tokens.flat) == len(real)
    assert {int(x) for x in packing.tokens.flat if x < start} <= {
        p * s + i for p, c in enumerate(prompts) for i in range(c)
    }
    np.testing.assert_array_equal(packing.segments == 0, packing.tokens == end)
    flat_places, columns = packing.places.reshape(-1), packing.targets.shape[1]
    assert (packing.places[np.arange(t) >= completions[:, None]] == packing.targets.size).all()
    for b, i in ((b, i) for b, count in enumerate(completions) for i in range(count)):
        row, place = divmod(int(flat_places[b * t + i]), columns)
        assert packing.targets[row, place] == b * t + i
        here, before = where[start + b * t + i], (row, packing.sources[row, place])
        assert here[0] == row and packing.positions[here] == prompts[b // n] + i
        # the token before: of the completion, or the last of the prompt that the completion sees
        previous = start + b * t + i - 1 if i else (b // n) * s + prompts[b // n] - 1
        assert packing.tokens[before] == previous and before[1] < here[1]
        assert packing.segments[before] == (packing.segments[here] if i else packing.prefixes[here])
    for row in packing.segments:
        starts = np.flatnonzero(np.diff(row, prepend=0))
        assert len({int(row[i]) for i in starts}) == len(starts)  # a segment is one stretch


def test_a_sequence_that_no_row_holds_is_refused():
    with pytest.raises(ValueError, match="a sequence of 9 tokens does not fit in a row of 8"):
        first_fit(np.array([3]), np.array([2, 6]), 8)


def test_buckets():
    assert [bucket(i, 2) for i in (1, 3, 4, 5, 7, 9, 13, 17, 25)] == [1, 3, 4, 6, 8, 12, 16, 24, 32]
    assert sorted({bucket(i, 4) for i in range(9, 33)}) == [10, 12, 14, 16, 20, 24, 28, 32]


def batch(routes: bool = False, support: bool = False) -> Batch:
    rng = np.random.default_rng(0)
    b = len(COMPLETIONS)
    mask = np.arange(T) < COMPLETIONS[:, None]
    made = Batch(
        rng.integers(1, 61, (4, S)).astype(np.int32),
        LENGTHS.astype(np.int32),
        rng.integers(1, 61, (b, T)).astype(np.int32),
        mask,
        rng.normal(-4, 0.3, (b, T)).astype(np.float32),
        rng.normal(size=b).astype(np.float32),
    )
    if routes:

        def ids(*shape):
            return rng.permuted(
                np.broadcast_to(np.arange(5, dtype=np.int8), (*shape, 1, 5)), axis=-1
            )[..., :2]

        made = replace(made, prompt_routes=ids(4, S), routes=ids(b, T))
    if support:
        ids = np.stack([(made.tokens + shift) % 61 for shift in (0, 7, 20)], -1)
        counts = np.where(mask, rng.integers(1, 6, (b, T)), 0)
        made = replace(made, support=Support(ids.astype(np.int32), counts.astype(np.int32)))
    return jax.tree.map(jnp.asarray, made)


@cache
def policy(shape: PolicyConfig):
    return init_policy(shape, jax.random.key(0))


def run(shape: PolicyConfig, given: Batch, config: StepConfig):
    state = jax.tree.map(jnp.copy, init_state(policy(shape), OPTIMIZER))
    state, logprobs, metrics = update(state, given, config, OPTIMIZER)
    return state.optimizer, logprobs, metrics


def assert_same(found, expected, mask):
    for got, wanted in zip(jax.tree.leaves(found[0]), jax.tree.leaves(expected[0]), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5 * float(np.abs(wanted).max()))
    np.testing.assert_allclose(
        np.where(mask, found[1], 0), np.where(mask, expected[1], 0), atol=1e-5
    )
    assert found[2].keys() == expected[2].keys()
    for name, value in expected[2].items():
        np.testing.assert_allclose(found[2][name], value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("shape", "micro", "width", "chunk"),
    [
        pytest.param(QWEN3, 1, 0, None, marks=pytest.mark.slow),
        (QWEN3, 2, 24, 5),
        (WINDOWS, 1, 24, None),
        pytest.param(MOE, 1, 24, None, marks=pytest.mark.slow),
    ],
    ids=["qwen3", "micro_batches_chunked", "windows", "moe_replay"],
)
def test_a_packed_update_is_the_plain_one(shape, micro, width, chunk):
    given = batch(routes=shape is MOE, support=chunk is not None)
    config = replace(CONFIG, attention_chunk=chunk)
    packed, padding = narrow(given, TrainerConfig(packing=True, pack_tokens=width), micro, MESH)
    assert packed.packing.tokens.shape[1] == (width or S + T)
    assert 0 < padding < narrow(given, TrainerConfig(), 1, MESH).padding
    expected = run(shape, given, CONFIG)
    assert any(np.abs(leaf).max() > 1e-4 for leaf in jax.tree.leaves(expected[0]))
    assert_same(run(shape, packed, replace(config, micro_batches=micro)), expected, given.mask)


def test_log_probabilities_of_a_packed_batch_do_not_depend_on_what_stands_beside_them():
    """Row by row alone; another neighbour's tokens are other tokens."""
    given = batch()
    packed, _ = narrow(given, TrainerConfig(packing=True, pack_tokens=40), 1, MESH)
    whole = np.asarray(batch_logprobs(policy(QWEN3), packed, CONFIG))
    assert not whole[~np.asarray(given.mask)].any()
    changed = replace(
        packed,
        tokens=jnp.where((jnp.arange(12) == 4)[:, None], 1 + packed.tokens % 60, packed.tokens),
    )
    other = np.asarray(batch_logprobs(policy(QWEN3), changed, CONFIG))
    same = np.arange(12) != 4
    np.testing.assert_array_equal(other[same], whole[same])
    assert np.abs(other[4] - whole[4]).max() > 0.01


def test_sharpness_is_that_of_the_last_tokens_logits():
    """A sequence at a time, nothing shared or packed."""
    given, n, rows = batch(), N, np.flatnonzero(COMPLETIONS)
    lengths, tokens = LENGTHS[rows // n], np.zeros((len(rows), S + T), np.int32)
    for row, i, length in zip(tokens, rows, lengths, strict=True):
        row[:length], row[length : length + T] = given.prompts[i // n][:length], given.tokens[i]
    made = policy(QWEN3)
    hidden = jax.jit(lambda x: forward(made, x).hidden)(tokens)
    ends = lengths + COMPLETIONS[rows] - 1
    at, targets = np.arange(len(rows)), tokens[np.arange(len(rows)), ends]
    each = rl.sharpness(hidden[at, ends - 1] @ made.head.T / 0.8, jnp.asarray(targets), 1e-2)
    _, _, metrics = run(QWEN3, given, CONFIG)
    assert float(metrics["sharpness/0.01"]) == pytest.approx(float(each.mean()), rel=1e-4)
    _, _, without = run(QWEN3, given, replace(CONFIG, sharpness=False))
    assert without.keys() == {name for name in metrics if not name.startswith("sharpness/")}


def test_a_trimmed_update_is_the_plain_one():
    """At the aggregation that divides by the width, too."""
    given, settings = batch(support=True), replace(RL, aggregation="fixed_length")
    expected = run(QWEN3, given, replace(CONFIG, rl=settings))
    trimmed, padding = narrow(given, TrainerConfig(length_buckets=True), 1, MESH)
    assert (
        trimmed.prompts.shape == (4, 6)
        and trimmed.tokens.shape == (12, 6) == trimmed.rollout_logprobs.shape
    )
    assert padding == pytest.approx(1 - (LENGTHS.sum() + COMPLETIONS.sum()) / (4 * 6 + 12 * 6))
    found = run(QWEN3, trimmed, replace(CONFIG, rl=of_width(settings, T)))
    assert_same((found[0], untrim(found[1], T), found[2]), expected, given.mask)


def test_cutting_keeps_what_is_not_a_column():
    given = batch(routes=True)
    narrow = trim(given, 5, 3)
    assert narrow.routes.shape == (12, 3, 1, 2) and narrow.prompt_routes.shape == (4, 6, 1, 2)
    assert narrow.advantages is given.advantages and narrow.lengths is given.lengths
    assert trim(given, 8, 9).tokens.shape == given.tokens.shape and trim(
        given, 1, 0
    ).tokens.shape == (12, 1)


def test_a_batch_without_a_token_packs_and_has_no_gradient():
    empty = replace(batch(), mask=jnp.zeros((12, T), bool))
    packed, padding = narrow(empty, TrainerConfig(packing=True), 1, MESH)
    _, logprobs, metrics = run(QWEN3, packed, CONFIG)
    assert padding == 1 - LENGTHS.sum() / packed.packing.tokens.size
    assert (
        not np.any(logprobs) and metrics["optim/grad_norm"] == 0 and metrics["optim/skipped"] == 0
    )
