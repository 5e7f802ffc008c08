"""What of an update arrives at the policy that is served, against sums over all of the weights."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from tiny_models import LLAMA, MOE

from fp8rl_jax.config.recipe import (
    RECIPES,
    PrecisionConfig,
    Recipe,
    SideScales,
    get_recipe,
    recipe,
)
from fp8rl_jax.config.run import ModelConfig, RunConfig
from fp8rl_jax.config.training import LoraConfig
from fp8rl_jax.models.dither import dithered
from fp8rl_jax.models.forms import rollout_policy, trainer_policy
from fp8rl_jax.models.lora import join, split
from fp8rl_jax.models.policy import LINEARS, Layer, Policy, Weight, init_policy, with_layers
from fp8rl_jax.precision import QuantizedWeight, dequantize, quantize
from fp8rl_jax.precision.rounding import dither, dither_blocks, dither_inside, round_by_hash
from fp8rl_jax.rollout import arrival
from fp8rl_jax.rollout.arrival import Arrival, SavedSample
from fp8rl_jax.weights.gathered import GatheredTensors
from fp8rl_jax.weights.hf_directory import as_read
from fp8rl_jax.weights.hf_names import hf_tensors
from fp8rl_jax.weights.load import load_policy, save_policy
from fp8rl_jax.weights.quantized_export import export_form

NAMES = ("changed", "arrived", "noise", "cosine")
BF16, F32 = jnp.dtype("bfloat16"), jnp.dtype("float32")
# q_proj is quantized in some layers alone, so that its stack comes in runs
PART = recipe("fp8-rl", "part", excluded=("layers.0.q_proj",))


def on_grid(policy, dtype=BF16):
    return jax.tree.map(lambda x: x.astype(dtype).astype(jnp.float32), policy)


def moved(policy, size: float):
    """By `size`, up or down."""
    leaves, tree = jax.tree.flatten(policy)
    signs = [
        jax.random.rademacher(jax.random.key(i), x.shape, jnp.float32) for i, x in enumerate(leaves)
    ]
    return tree.unflatten([x + size * sign for x, sign in zip(leaves, signs, strict=True)])


def whole(policy) -> np.ndarray:
    """Every number of a policy whose layers are stacked, float64."""

    def plain(x):
        q = x.quantized if isinstance(x, QuantizedWeight) else x
        return np.asarray(q if isinstance(q, jax.Array) else dequantize(q), np.float64).reshape(-1)

    leaves = jax.tree.leaves(policy, is_leaf=lambda x: isinstance(x, QuantizedWeight))
    return np.concatenate([plain(x) for x in leaves])


def by_definition(start, now, served_start, served_now) -> tuple[float, ...]:
    m, s = whole(now) - whole(start), whole(served_now) - whole(served_start)
    return (
        (s != 0).mean(),
        s @ m / (m @ m),
        np.linalg.norm(s - m) / np.linalg.norm(m),
        s @ m / np.sqrt((m @ m) * (s @ s)),
    )


@pytest.mark.parametrize(
    ("config", "formats", "dtype"),
    [(LLAMA, PART, "bfloat16"), (MOE, RECIPES["fp8-rl"], "float32"), (LLAMA, PART, "float16")],
    ids=["runs", "experts", "float16"],
)
def test_the_metrics_are_those_of_all_weights(config, formats, dtype, monkeypatch):
    start = on_grid(init_policy(dataclasses.replace(config, num_layers=2), jax.random.key(0)))
    now = moved(start, 1e-4)

    def form(policy, unroll: bool):
        return jax.jit(
            lambda p: rollout_policy(p, formats, jnp.dtype(dtype), unroll, "reference")[0]
        )(policy)

    stacked = [form(policy, False) for policy in (start, now)]
    expected = by_definition(start, now, *stacked)
    served = [form(policy, True) for policy in (start, now)]
    monkeypatch.setattr(arrival, "PLACES", 10**6)  # all there are
    follows = Arrival()
    assert follows.see(start, served[0]) == {}  # the start itself
    found = follows.see(now, served[1])
    assert set(found) == {f"sync/{name}" for name in NAMES}
    assert [found[f"sync/{name}"] for name in NAMES] == pytest.approx(expected, rel=1e-5)
    still = follows.see(start, served[0])
    assert all(math.isnan(value) for value in still.values())  # 0 / 0, and not 0
    # a few places stand for all, equally many in each layer
    monkeypatch.setattr(arrival, "PLACES", 700)
    follows = Arrival()
    follows.see(start, stacked[0])
    found = follows.see(now, stacked[1])
    assert follows.nbytes(start) < 40 * 700 * len(follows.kinds)
    assert [found[f"sync/{name}"] for name in NAMES] == pytest.approx(expected, rel=0.3)
    assert found["sync/arrived"] != pytest.approx(expected[1], rel=1e-6)


def test_each_kind_of_tensor_has_its_own(monkeypatch):
    start = on_grid(init_policy(LLAMA, jax.random.key(0)))
    tensors = start.stack.tensors()
    now = jax.tree.map(lambda x: x, start)
    changed = np.asarray(tensors["up_proj"].value) + np.float32(1.0)  # far more than a step
    now.stack.up_proj.weight.set_value(jnp.asarray(changed))
    follows, served = (
        Arrival(),
        lambda policy: rollout_policy(policy, RECIPES["bf16"], BF16, False)[0],
    )
    follows.see(start, served(start))
    total = follows.see(now, served(now))
    assert follows.kinds["up_proj"]["arrived"] == pytest.approx(total["sync/arrived"], rel=1e-6)
    assert follows.kinds["up_proj"]["changed"] == 1.0
    assert math.isnan(follows.kinds["q_proj"]["arrived"])
    assert set(follows.kinds) == {
        *tensors,
        "embed_tokens",
        "norm",
        *(["lm_head"] * (start.lm_head is not None)),
    }


def test_rounding_to_nearest_is_deaf_from_the_grid_and_hears_from_dithered_masters():
    """A change of a fifth of the smallest half step: none of it arrives. Dithered, all of it does
    in the mean; and the first policy is the same, bit for bit."""
    start = on_grid(init_policy(LLAMA, jax.random.key(0)))
    start = jax.tree.map(lambda x: jnp.where(jnp.abs(x) < 2**-8, 2**-7, x), start)
    change = 2.0**-8 * 2**-9 / 5
    masters = dithered(start, RECIPES["bf16"], 0, BF16)

    def served(policy):
        return rollout_policy(policy, RECIPES["bf16"], BF16, False)[0]

    for one, other in zip(
        jax.tree.leaves(served(start)), jax.tree.leaves(served(masters)), strict=True
    ):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    metrics = {}
    for name, policy in (("grid", start), ("dithered", masters)):
        follows = Arrival()
        follows.see(policy, served(policy))
        metrics[name] = follows.see(moved(policy, change), served(moved(policy, change)))
    assert metrics["grid"]["sync/arrived"] == metrics["grid"]["sync/changed"] == 0.0
    assert metrics["grid"]["sync/noise"] == pytest.approx(1.0)
    assert math.isnan(metrics["grid"]["sync/cosine"])  # nothing is served that has a direction
    assert metrics["dithered"]["sync/arrived"] == pytest.approx(1.0, abs=0.1)
    assert 0 < metrics["dithered"]["sync/cosine"] < 0.5 and metrics["dithered"]["sync/noise"] > 1


def test_the_seed_alone_fixes_the_dither_and_the_router_has_none():
    start = on_grid(init_policy(MOE, jax.random.key(0)))
    one, same, other = (dithered(start, RECIPES["bf16"], seed, BF16) for seed in (0, 0, 1))
    for path, x in jax.tree_util.tree_leaves_with_path(start):
        a, b, c = (
            np.asarray(dict(jax.tree_util.tree_leaves_with_path(p))[path])
            for p in (one, same, other)
        )
        assert a.tobytes() == b.tobytes()
        if "router" in jax.tree_util.keystr(path):
            assert a.tobytes() == np.asarray(x).tobytes()  # it is served in float32
        else:
            assert (a != c).mean() > 0.9 or not (np.asarray(x) != 0).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_both_sides_quantize_the_master_in_the_compute_dtype_and_no_further(dtype):
    """xtuner #2044 was a rollout that quantized another number than the trainer had."""
    masters = moved(init_policy(LLAMA, jax.random.key(0)), 1e-5)
    both = {}
    for source in ("compute", "master"):
        formats = recipe("jet-rl", "one", weight_source=source)
        sides = (
            trainer_policy(masters, formats, jnp.dtype(dtype), "reference"),
            rollout_policy(masters, formats, jnp.dtype(dtype), False, "reference")[0],
        )
        bits = [
            {
                name: (np.asarray(q.values).tobytes(), np.asarray(q.scales).tobytes())
                for name, weight in side.stack.tensors().items()
                if isinstance(weight.value, QuantizedWeight)
                for q in [weight.value.quantized]
            }
            for side in sides
        ]
        assert bits[0] == bits[1] and len(bits[0]) == 7
        both[source] = sides[0].stack.q_proj.value.quantized
    # an independent quantizer, of the number that each is to have
    for source, of in (("compute", dtype), ("master", "float32")):
        x = np.asarray(masters.stack.q_proj.value)[0].astype(jnp.dtype(of)).astype(np.float32)
        scale = np.float32(np.abs(x).max() / np.float32(448))
        assert np.asarray(both[source].scales)[0, 0, 0] == scale
        codes = (x / scale).astype(ml_dtypes.float8_e4m3fn)
        assert (codes == np.asarray(both[source].values)[0]).mean() > 0.999
    same = np.asarray(both["compute"].scales) == np.asarray(both["master"].scales)
    assert same.all() == (dtype == "float32")


def test_of_adapters_the_adapters_are_compared_and_merged_ones_with_their_base():
    from fp8rl_jax.models.lora import init_adapters
    from fp8rl_jax.models.policy import cast

    base = on_grid(init_policy(LLAMA, jax.random.key(0)))
    adapters = init_adapters(LLAMA, LoraConfig(rank=4), jax.random.key(1))
    start = join(adapters, cast(base, BF16))
    trained, frozen = split(start)
    now = join(jax.tree.map(lambda x: x + 1e-5, trained), frozen)

    def served(policy):
        parts, frozen = split(policy)
        return join(jax.tree.map(lambda x: x.astype(BF16), parts), frozen)

    follows = Arrival()
    follows.see(start, served(start))
    found = follows.see(now, served(now))
    # b begins at 0, from where bfloat16 rounds nothing away
    assert found["sync/changed"] > 0.3 and follows.kinds["q_proj.b"]["arrived"] > 0.99
    assert saved_part(now, follows, "float32") == 1.0
    assert saved_part(now, follows, "bfloat16") < 0.3
    # the shapes of merged weights, for an engine that serves these
    names = Arrival(merged=True).saved(now).masters
    assert set(names) == {*base.stack.tensors(), "embed_tokens", "norm"} | (
        {"lm_head"} if base.lm_head is not None else set()
    )


def saved_part(policy, follows: Arrival, dtype: str) -> float:
    """What part of the update an export to `dtype` keeps."""
    located = {at.path: at for at in hf_tensors(policy.config).values()}
    form = export_form(dtype)
    quantized = {path for path, at in located.items() if form and form.holds(at)}
    sample = SavedSample(lambda path, x: as_read(located[path], x, dtype), quantized, follows)
    tensors = GatheredTensors(policy, see=sample.see)
    for at in hf_tensors(policy.config).values():
        tensors[at.path][at.index]
    return sample.arrived()


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8-block", "mxfp4"])
def test_what_an_export_keeps_is_what_its_files_say(dtype, tmp_path):
    """Of a start on the very grid, from where a small update leads nowhere, and of one beside it.

    A block of MXFP4 whose largest number falls below a power of two has another scale."""

    def read(policy) -> Policy:
        files = save_policy(policy, tmp_path / str(len([*tmp_path.iterdir()])), dtype=dtype)
        return jax.tree.map(lambda x: x.astype(jnp.float32), load_policy(files))

    beside = init_policy(LLAMA, jax.random.key(0))
    parts = []
    for start, size in ((read(beside), 1e-6), (beside, 3e-3)):
        now, follows = moved(start, size), Arrival()
        assert math.isnan(saved_part(now, follows, dtype))
        follows.see(start, start)
        parts.append(saved_part(now, follows, dtype))
        _, arrived, *_ = by_definition(start, now, read(start), read(now))
        assert parts[-1] == pytest.approx(arrived, rel=0.05, abs=0.01)
    assert (parts[0] > 5 if dtype == "mxfp4" else parts[0] < 0.1) and 0.5 < parts[1] < 2


def test_what_a_checkpoint_holds_goes_on():
    start = on_grid(init_policy(LLAMA, jax.random.key(0)))
    now = moved(start, 1e-3)
    follows, other = Arrival(), Arrival()
    nothing = follows.saved(start)
    other.load(nothing)
    assert other.start is None
    follows.see(start, start)
    saved = follows.saved(start)
    assert jax.tree.map(np.shape, saved) == jax.tree.map(np.shape, nothing)
    other.load(saved)
    assert other.see(now, now) == follows.see(now, now)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounded_by_a_hash_a_value_is_itself_in_the_mean_and_alike_in_every_program(dtype):
    dtype = jnp.dtype(dtype)
    x = jnp.full((3, 500, 400), 1.0 + float(jnp.finfo(dtype).eps) * 0.3)
    x = x + jnp.arange(400) * 2.0**-23  # other bits in each column, from 0.3 of a step up
    part = (x - 1.0) / float(jnp.finfo(dtype).eps)
    up = np.asarray(round_by_hash(x, dtype) > 1.0)
    assert set(np.unique(np.asarray(round_by_hash(x, dtype), np.float32))) == {
        1.0,
        1.0 + float(jnp.finfo(dtype).eps),
    }
    # each column has a value of its own in 500 rows, the same in all three layers
    error = np.sqrt(0.25 / (500 * 400))
    assert abs(up[0].mean() - float(part.mean())) < 4 * error
    np.testing.assert_array_equal(up[0], up[1])
    alone = jax.jit(lambda x: round_by_hash(x, dtype) * 1)(x[1])
    np.testing.assert_array_equal(np.asarray(alone > 1.0), up[1])
    on_grid = jnp.asarray([0.0, 1.0, -1.5, 2.0**-100 * (dtype == BF16), jnp.inf])
    np.testing.assert_array_equal(round_by_hash(on_grid, dtype).astype(jnp.float32), on_grid)
    slope = jax.grad(lambda x: round_by_hash(x, dtype).astype(jnp.float32).sum())(x)
    assert float(slope.min()) == float(slope.max()) == 1.0


def on_grid_of(policy, fmt, dtype):
    """As a checkpoint that was quantized in `fmt` is read in `dtype`."""
    tensors = policy.stack.tensors()
    for name in set(LINEARS) & set(tensors):
        value = dequantize(quantize(tensors[name].value, fmt)).astype(dtype)
        tensors[name] = Weight(value.astype(jnp.float32), tensors[name].axes)
    return with_layers(policy, Layer(tensors))


def same_forms(start: Policy, masters: Policy, formats: Recipe, dtype: jnp.dtype) -> None:
    """Both sides multiply the same bits."""
    for side in ("trainer", "rollout"):
        one, other = (
            jax.tree.map(
                np.asarray,
                [
                    x.quantized if isinstance(x, QuantizedWeight) else x
                    for x in jax.tree.leaves(
                        trainer_policy(policy, formats, dtype, "reference")
                        if side == "trainer"
                        else rollout_policy(policy, formats, dtype, False, "reference")[0],
                        is_leaf=lambda x: isinstance(x, QuantizedWeight),
                    )
                ],
            )
            for policy in (start, masters)
        )
        for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            assert x.tobytes() == y.tobytes()


@pytest.mark.parametrize("row", ["jet-rl", "infir2"])  # a float32 scale, and a power of two
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_masters_of_an_fp8_checkpoint_are_drawn_from_its_cells_where_both_sides_have_them(
    row, dtype
):
    """Both forms of the policy are what they were; and an update arrives, of which nearly nothing
    did, as a weight that sets a scale moves all that it scales and few others leave their cells."""
    formats, dtype = RECIPES[row], jnp.dtype(dtype)
    start = on_grid_of(init_policy(LLAMA, jax.random.key(0)), formats.rollout.weight, BF16)
    masters = dithered(start, formats, 0, dtype)
    same_forms(start, masters, formats, dtype)
    cells = {}
    for name in masters.stack.tensors():
        before, after = (np.asarray(p.stack.tensors()[name].value) for p in (start, masters))
        if name in LINEARS:
            cells[name] = np.abs(after - before)[before != 0] / np.abs(before[before != 0])
            assert (cells[name] > 0).mean() > 0.99 and np.quantile(cells[name], 0.97) < 1 / 15
    # half a step of e4m3 is a 16th to a 32nd, and more below its normal numbers
    assert np.median(np.concatenate([*cells.values()])) == pytest.approx(1 / 48, rel=0.15)
    arrived = []
    for policy in (start, masters):
        follows = Arrival()
        for now in (policy, moved(policy, 2e-5)):
            follows.see(now, rollout_policy(now, formats, dtype, False, "reference")[0])
        arrived.append(np.mean([follows.kinds[name]["arrived"] for name in cells]))
    assert arrived[0] < 0.05 and arrived[1] == pytest.approx(1.0, abs=0.07)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("row", ["mxfp8", "nvfp4", "int4-qat"])
def test_masters_of_a_checkpoint_in_another_format_are_drawn_from_its_cells_too(row, dtype):
    """The largest of a group, which sets its scale, stays, and zeros; of 4 bits those are many."""
    formats, dtype = RECIPES[row], jnp.dtype(dtype)
    start = on_grid_of(init_policy(LLAMA, jax.random.key(0)), formats.rollout.weight, F32)
    masters = dithered(start, formats, 0, dtype)
    same_forms(start, masters, formats, dtype)
    arrived, drawn = [], []
    linears = [name for name in masters.stack.tensors() if name in LINEARS]
    for name in linears:
        before, after = (np.asarray(p.stack.tensors()[name].value) for p in (start, masters))
        drawn.append((before != after)[before != 0].mean())
    assert np.mean(drawn) > 0.8
    for policy in (start, masters):
        follows = Arrival()
        for now in (policy, moved(policy, 2e-4)):
            follows.see(now, rollout_policy(now, formats, dtype, False, "reference")[0])
        arrived.append(np.mean([follows.kinds[name]["arrived"] for name in linears]))
    assert arrived[0] < 0.3 and arrived[1] == pytest.approx(1.0, abs=0.25)


def test_a_draw_that_would_change_a_scale_is_none():
    """The largest value of a block is 225 steps, and its cell reaches to below 224, where the scale
    is half."""
    fmt, codes = RECIPES["infir2"].rollout.weight, np.ones((128, 128), np.float32) * 26
    codes[3, 5] = 225.0
    x = jnp.asarray(codes)
    expected, drawn = quantize(x, fmt), []
    for salt in range(8):
        made = dither_blocks(x, fmt, F32, jnp.uint32(salt))
        found = quantize(made, fmt)
        assert (found.scales == expected.scales).all() and (found.values == expected.values).all()
        drawn.append((made != x).mean())
    assert min(drawn) == 0.0 and max(drawn) > 0.99


@pytest.mark.parametrize("row", ["jet-rl", "infir2", "mxfp8", "nvfp4", "int4-qat"])
def test_masters_of_a_bfloat16_checkpoint_stay_in_their_cells_of_both(row):
    """Quantized straight from float32: what both sides compute with is the checkpoint's, the
    unquantized tensors stay, and no linear's master is left where bfloat16 has it."""
    formats = RECIPES[row]
    start = on_grid(init_policy(LLAMA, jax.random.key(0)))
    masters = dithered(start, formats, 0, F32)
    same_forms(start, masters, formats, F32)
    for name, weight in masters.stack.tensors().items():
        before, after = (np.asarray(x.value) for x in (start.stack.tensors()[name], weight))
        assert (before != after).mean() > 0.95 if name in LINEARS else (before == after).all()
        # a cell of bfloat16 on either side, where a draw was folded back
        np.testing.assert_allclose(after, before, rtol=2**-7)
    of_compute = dithered(start, dataclasses.replace(formats, weight_source="compute"), 0, BF16)
    assert jax.tree.all(
        jax.tree.map(lambda x, y: bool((x == y.astype(BF16)).all()), start, of_compute)
    )


@pytest.mark.parametrize(("row", "kick"), [("jet-rl", 5), ("infir2", 15)])
def test_weights_on_the_border_of_two_cells_do_not_cross_it_all_at_once(row, kick):
    """Some of bfloat16's numbers are on the borders of FP8's cells, where a block's largest is a
    multiple of 7 in its significand or its scale a power of two one in sixteen: all that an update
    moves across would be served many times."""
    fmt, rng = RECIPES[row].rollout.weight, np.random.default_rng(0)
    x = rng.normal(0, 0.02, (128, 2048)).astype(BF16).astype(np.float32)
    x[0, ::512] = 7 / 64
    moved = 2e-6 * rng.choice([-1.0, 1.0], x.shape)

    def arrived(masters) -> float:
        first, now = (
            np.asarray(quantize(jnp.asarray(y, F32), fmt).dequantize(), np.float64)
            for y in (masters, np.asarray(masters, np.float64) + moved)
        )
        return float(((now - first) * moved).sum() / (moved**2).sum())

    drawn = [arrived(dither_inside(jnp.asarray(x), fmt, jnp.uint32(salt))) for salt in range(16)]
    assert arrived(x) > kick
    assert np.mean(drawn) == pytest.approx(1.0, abs=0.3)


def test_what_lies_between_two_numbers_of_a_format_or_is_read_unquantized_stays():
    """A float32 master is somewhere in its FP8 cell; and a trainer in the compute dtype would see a
    draw from one as another policy."""
    start = init_policy(LLAMA, jax.random.key(0))
    quantized = on_grid_of(start, RECIPES["jet-rl"].rollout.weight, F32)
    part = recipe("jet-rl", "part", excluded=("layers.0.q_proj",))
    unlike = PrecisionConfig(trainer=SideScales(scale="power_of_two"))
    for policy, formats, moves in (
        (start, RECIPES["jet-rl"], False),
        (quantized, RECIPES["fp8-rl"], False),
        (quantized, get_recipe("jet-rl", unlike), False),
        (quantized, part, True),
    ):
        made = dithered(policy, formats, 0, F32).stack.tensors()
        same = {
            name: (np.asarray(made[name].value) == np.asarray(weight.value))
            .reshape(LLAMA.num_layers, -1)
            .mean(1)
            for name, weight in policy.stack.tensors().items()
        }
        for name, (first, *_, last) in same.items():
            drawn = moves and name in LINEARS
            assert (first == 1.0) == (not drawn or name == "q_proj") and (last < 0.1) == drawn


@pytest.mark.parametrize(
    ("row", "dtype", "settings", "expected"),
    [
        ("bf16", "bfloat16", {}, True),
        ("bf16", "float32", {}, False),
        ("fp8-rl", "float32", {}, False),  # the trainer would see the draws
        ("jet-rl", "float32", {}, True),
        ("jet-rl", "float32", {"lora": LoraConfig(rank=2)}, False),
        ("jet-rl", "float32", {"model": ModelConfig(dither=False)}, False),
        (
            "jet-rl",
            "bfloat16",
            {"precision": PrecisionConfig(weight_rounding="stochastic")},
            False,
        ),
    ],
)
def test_masters_are_drawn_where_there_are_cells(row, dtype, settings, expected):
    config = RunConfig(recipe=row, compute_dtype=dtype, **settings)
    assert config.dithers == expected
    asked = dataclasses.replace(config, model=ModelConfig(dither=True))
    refused = [fault for fault in asked.problems() if fault.startswith("model.dither")]
    impossible = not expected and config.model.dither == "auto"
    assert bool(refused) == impossible


@pytest.mark.parametrize(
    "name", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"]
)
def test_every_number_of_a_format_is_drawn_from_its_cell(name):
    """Against ml_dtypes: all finite numbers but 0, those below float32's range of a CPU, and the
    largest; a power of two has less room below."""
    dtype = jnp.dtype(name)
    width, size = (
        (np.uint16, 2**16) if dtype.itemsize == 2 else (np.uint8, 2 ** jnp.finfo(dtype).bits)
    )
    x = np.arange(size).astype(width).view(dtype).astype(np.float32)
    x = np.sort(x[np.isfinite(x) & (x > 0)])
    found = np.asarray(
        jax.jit(dither, static_argnums=1)(np.tile(x, (512, 1)), dtype, jnp.uint32(7)), np.float64
    )
    np.testing.assert_array_equal(
        found.astype(dtype).astype(np.float32), np.broadcast_to(x, found.shape)
    )
    still = x <= float(jnp.finfo(dtype).smallest_normal) if dtype.itemsize == 2 else x < 0
    assert (found[:, -1] == x[-1]).all() and (found[:, still] == x[still]).all()
    # a CPU takes the steps next to float32's smallest number for 0
    moves = ~still[:-1] & (x[:-1] > (1e-30 if name == "bfloat16" else 0.0))
    middles = (x[:-1].astype(np.float64) + x[1:]) / 2
    low, high = np.concatenate([[x[0] / 2], middles[:-1]])[moves], middles[moves]
    below, above = found[:, :-1].min(0)[moves], found[:, :-1].max(0)[moves]
    room = high - low
    assert (below >= low).all() and (above <= high).all()
    assert (below < low + room / 16).all() and (above > high - room / 16).all()
    middle = found[:, :-1].mean(0)[moves]
    assert (abs(middle - (low + high) / 2) < room / 10).all()
