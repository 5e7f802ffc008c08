"""The rules themselves, on meshes without devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from parallel.policies import CONFIG

from fp8rl_jax.errors import UserError
from fp8rl_jax.models.policy import tensor_specs
from fp8rl_jax.parallel import (
    DEFAULT_RULES,
    ShardingRules,
    batch_sharding,
    check_batch,
    constrain,
    scale_spec,
)


def abstract_mesh(*sizes: int) -> AbstractMesh:
    """Of data, fsdp and tensor."""
    return AbstractMesh(sizes, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


MESH = abstract_mesh(2, 2, 2)


def test_every_axis_of_every_tensor_has_a_rule():
    for name, (shape, axes) in tensor_specs(CONFIG).items():
        spec = DEFAULT_RULES.spec(axes, shape, MESH, name)
        assert len(spec) == len(shape)
        assert (len(shape) - axes.count("layers") < 2) == (set(spec) <= {None}), (
            "matrices are sharded, vectors are not"
        )


def test_rows_of_a_projection_go_to_tensor_and_its_hidden_width_to_fsdp():
    assert DEFAULT_RULES.spec(("layers", "heads", "embed"), (2, 64, 32), MESH) == PartitionSpec(
        None, "tensor", "fsdp"
    )
    assert DEFAULT_RULES.spec(("batch", None), (8, 3), MESH) == PartitionSpec(
        ("data", "fsdp"), None
    )


def test_other_rules_are_another_table():
    rules = ShardingRules(embed=("fsdp", "data"), mlp=None)
    assert rules.spec(("embed", "mlp"), (8, 6), MESH) == PartitionSpec(("fsdp", "data"), None)


def test_a_mesh_without_an_axis_does_not_shard_by_it():
    mesh = AbstractMesh((4,), ("tensor",), axis_types=(AxisType.Auto,))
    assert DEFAULT_RULES.spec(("vocab", "embed"), (8, 6), mesh) == PartitionSpec("tensor", None)


def test_the_error_names_tensor_axis_mesh_key_and_what_fits():
    with pytest.raises(UserError) as caught:
        DEFAULT_RULES.spec(("vocab", "embed"), (99, 32), abstract_mesh(1, 1, 6), "lm_head.weight")
    assert str(caught.value) == (
        "lm_head.weight (99, 32): axis vocab does not divide by mesh.tensor (6); use one of 1, 3 "
        "for it"
    )


def test_programming_errors_in_names():
    with pytest.raises(ValueError, match="no sharding rule for axis 'head'"):
        DEFAULT_RULES.spec(("head",), (8,), MESH)
    with pytest.raises(ValueError, match="2 axis names"):
        DEFAULT_RULES.spec(("embed", "mlp"), (8,), MESH)


@pytest.mark.parametrize(
    ("values", "scales", "spec", "expected"),
    [
        ((256, 512), (2, 4), ("tensor", "fsdp"), ("tensor", "fsdp")),
        # 288 columns a shard: inside a block
        ((256, 576), (2, 5), ("tensor", "fsdp"), ("tensor", None)),
        # 2 blocks for 2 shards, but 96 rows each
        ((192, 256), (2, 2), ("tensor", "fsdp"), (None, "fsdp")),
        ((64, 512), (1, 4), ("tensor", None), (None, None)),  # fewer blocks than shards
        ((256, 512), (2, 4), (None, ("data", "fsdp")), (None, ("data", "fsdp"))),
        ((256, 256), (2, 2), (None, ("data", "fsdp")), (None, None)),
    ],
)
def test_scales_go_with_the_values_where_blocks_are_whole(values, scales, spec, expected):
    assert scale_spec(PartitionSpec(*spec), values, (128, 128), scales, MESH) == PartitionSpec(
        *expected
    )
    stacked = scale_spec(PartitionSpec(None, *spec), (3, *values), (128, 128), (3, *scales), MESH)
    assert stacked == PartitionSpec(None, *expected)


def test_one_scale_for_a_whole_matrix_is_replicated():
    spec = scale_spec(PartitionSpec("fsdp", "tensor"), (64, 96), (64, 96), (1, 1), MESH)
    assert spec == PartitionSpec(None, None)


def test_batches_divide_by_data_times_fsdp():
    check_batch(8, MESH, "rollout.prompts_per_step")
    with pytest.raises(UserError) as caught:
        check_batch(6, MESH, "rollout.prompts_per_step")
    assert str(caught.value) == (
        "rollout.prompts_per_step = 6 does not divide by mesh.data (2) x mesh.fsdp (2) = 4: make "
        "it a multiple of 4"
    )


def test_an_expert_axis_splits_the_batch_too():
    """Experts live on different devices, so rows of prompts and completions do, as well; tensor
    shards see the same rows."""
    mesh = AbstractMesh(
        (2, 1, 2, 2), ("data", "fsdp", "expert", "tensor"), axis_types=(AxisType.Auto,) * 4
    )
    assert batch_sharding(mesh).shard_shape((8, 3)) == (2, 3)
    assert batch_sharding(mesh).spec == PartitionSpec(("data", "fsdp", "expert"))
    check_batch(4, mesh, "rollout.prompts_per_step")
    with pytest.raises(
        UserError, match=r"mesh.data \(2\) x mesh.fsdp \(1\) x mesh.expert \(2\) = 4"
    ):
        check_batch(6, mesh, "rollout.prompts_per_step")
    with jax.sharding.use_abstract_mesh(mesh):
        (laid,) = jax.make_jaxpr(lambda x: constrain(x, "batch", None))(jnp.ones((8, 3))).eqns
    assert laid.params["sharding"].spec == PartitionSpec(("data", "expert"), None)


def test_constrain_without_a_mesh_is_the_identity():
    x = jnp.arange(6.0).reshape(3, 2)
    assert constrain(x, "batch", None) is x
    np.testing.assert_array_equal(jax.jit(lambda x: constrain(x, "batch", "vocab"))(x), x)
