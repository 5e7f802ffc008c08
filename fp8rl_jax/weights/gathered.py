"""A policy's tensors on the host, one layer of one stack at a time, wherever its shards are.

What is read looks like the arrays of `load_policy_arrays`, and is one layer of one of them at a
time: adapters are added to their base, and what is quantized is unpacked, of that layer alone. Of a
mixture a layer is all of its experts. Where processes share a policy, each gathers the same layers
in the same order, and the first one does something with them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8rl_jax.errors import UserError
from fp8rl_jax.models.lora import Adapted, TrainedWeight, added, has_adapters, unpacked
from fp8rl_jax.models.policy import Policy, Rounding, WeightRuns, entry_of, to_compute
from fp8rl_jax.models.tensors import of_kind, parameter_shapes
from fp8rl_jax.parallel import is_main_process, shared_faults, take_entry, to_host
from fp8rl_jax.precision import is_quantized
from fp8rl_jax.weights.hf_names import hf_tensors

_Place = tuple[str, tuple[int, ...]]
"""Path of a parameter, and the entry of its stack; () is all of it."""
See = Callable[[str, int, tuple[int, ...], np.ndarray | None, np.ndarray], None]
"""Called with the path of a stack, its number of entries, the index of one that is read, its base
where it has an adapter, and what it is, the adapter added and before it is rounded."""


class GatheredStack:
    """One parameter, as an export reads an array.

    Attributes:
        dtype, shape: of the array.
    """

    def __init__(self, tensors: GatheredTensors, path: str, dtype: np.dtype):
        self._tensors, self._path = tensors, path
        self.dtype, self.shape = dtype, parameter_shapes(tensors.config)[path]

    def __getitem__(self, index: tuple[int, ...]) -> np.ndarray:
        """Read a tensor; of those in `hf_tensors`, in their order."""
        begin = self.begin(index)
        return self._tensors.entry((self._path, begin))[index[len(begin) :]]

    def begin(self, index: tuple[int, ...]) -> tuple[int, ...]:
        """Of an index what is gathered by itself: of norms and biases all layers come at once, as
        stochastic rounding draws for a norm in its stack."""
        return index[:1] if len(self.shape) > 2 else ()


class GatheredTensors(Mapping[str, GatheredStack]):
    """The parameters of a policy by the paths of `parameter_shapes`.

    Args:
        policy: layers stacked; with adapters, quantized weights or without, over any devices.
        masters: what is trained is float32, in whatever form it is kept.
        compute: dtype that everything but routers is rounded to; None: it stays as it is.
        rounding: to that.
        see: see `See`.
    """

    def __init__(
        self,
        policy: Policy,
        masters: bool = False,
        compute: jnp.dtype | None = None,
        rounding: Rounding = "nearest",
        see: See | None = None,
    ):
        if not policy.stacked:
            raise ValueError("the layers are unrolled; export the trainer's policy")
        self.config = policy.config
        self._masters, self._adapted = masters, has_adapters(policy)
        self._compute, self._rounding, self._see = compute, rounding, see
        top = {"embed_tokens": policy.embed_tokens, "norm": policy.norm, "lm_head": policy.lm_head}
        layers = {f"layers.{name}": weight for name, weight in policy.stack.tensors().items()}
        weights = {name: weight for name, weight in (top | layers).items() if weight is not None}
        self._weights = {f"{name}.weight": weight for name, weight in weights.items()}
        self._stacks = {
            path: GatheredStack(self, path, self._dtype(path)) for path in self._weights
        }
        at = hf_tensors(policy.config).values()
        places = ((each.path, self[each.path].begin(each.index)) for each in at)
        self._left: list[_Place] = [*dict.fromkeys(places)]
        self._spread = any(
            isinstance(x, jax.Array) and not x.is_fully_addressable for x in jax.tree.leaves(policy)
        )
        self._held: tuple[_Place, np.ndarray] | None = None

    def __getitem__(self, path: str) -> GatheredStack:
        return self._stacks[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stacks)

    def __len__(self) -> int:
        return len(self._stacks)

    @contextmanager
    def gathered(self) -> Generator[bool]:
        """A block in which all tensors are read, once and in order; all processes enter it.

        Its value says whether this process reads them. The others gather the same ones behind
        the block, and so does the first those that it leaves.

        Raises:
            UserError: that of the block, on all processes.
        """
        if not self._spread:
            yield True
            return
        with shared_faults():
            try:
                yield is_main_process()
            except UserError:
                self._gather_left()
                raise
            self._gather_left()

    def _gather_left(self) -> None:
        self._held = None
        for place in [*self._left]:
            self._gather(place)

    def entry(self, place: _Place) -> np.ndarray:
        """One entry of a stack, on this process."""
        if self._held is None or self._held[0] != place:
            self._held = None  # before the next one
            self._held = place, self._host(place, self._gather(place))
        return self._held[1]

    def _gather(self, place: _Place) -> Any:
        """A weight of host arrays."""
        if self._spread:
            assert self._left and self._left[0] == place, place
            self._left.pop(0)
        path, index = place
        weight = self._weights[path]
        return to_host(entry_of(weight, index[0], take_entry) if index else weight)

    def _host(self, place: _Place, weight: Any) -> np.ndarray:
        """An entry as it is exported."""
        path, index = place
        value, base = unpacked(weight.base if isinstance(weight, Adapted) else weight), None
        if isinstance(weight, Adapted):
            base, value = value, added(value, weight.adapter)
        stack = self[path]
        if self._see is not None:
            self._see(path, stack.shape[0], index, base, value)
        del base
        if self._trained(weight):
            value = value.astype(np.float32, copy=False)
        if self._compute is not None and stack.dtype == self._compute != value.dtype:
            return np.asarray(_to_compute(value, self._compute, self._rounding))
        return value.astype(stack.dtype, copy=False)

    def _dtype(self, path: str) -> np.dtype:
        weight, name = self._weights[path], path.removeprefix("layers.").removesuffix(".weight")
        if self._compute is not None and name not in of_kind("router"):
            return np.dtype(self._compute)
        if self._trained(weight) or isinstance(weight, Adapted | WeightRuns):
            return np.dtype(np.float32)
        return np.dtype(np.float32) if is_quantized(weight.value) else np.dtype(weight.value.dtype)

    def _trained(self, weight: Any) -> bool:
        """Whether it is a master, which is float32 in whatever form it is kept."""
        return self._masters and (not self._adapted or isinstance(weight, TrainedWeight))


_to_compute = jax.jit(to_compute, static_argnums=(1, 2))
