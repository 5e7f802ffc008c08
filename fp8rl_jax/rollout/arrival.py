"""How much of the update arrives at the policy that is served.

What is served is a rounding of what is learned. A checkpoint's weights lie on the grid of bfloat16,
and an update of reinforcement learning moves them by less than half a step of it: rounded to
nearest, all but a few of the served weights then stay where they were, however long it goes on in
one direction. So after every weight sync the change of the served weights since the start, dS, is
held against that of the float32 masters, dM, both as float32, at the same places:

    sync/changed   share of the served values that differ from those at the start
    sync/arrived   <dS, dM> / |dM|^2: 1 is all of the update, 0 a policy that hears nothing
    sync/noise     |dS - dM| / |dM|: what else has come along
    sync/cosine    <dS, dM> / (|dS| |dM|)

One alone says little. Fresh stochastic rounding has an `arrived` of 1 in the mean and a dS that is
mostly noise; rounding to nearest from the checkpoint's own grid has little of either. Nothing is
defined before the masters have moved.

The places are drawn once, from a fixed seed: 16,384 of each tensor, equally many in each layer, or
all of a smaller one. Sums are weighted by what each place stands for, and made on the host in
float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fp8rl_jax.models.lora import Adapted, TrainedWeight
from fp8rl_jax.models.policy import Layer, Policy, WeightRuns
from fp8rl_jax.parallel import to_host
from fp8rl_jax.precision import Blocks, QTensor, QuantizedWeight
from pallas_kernels.qtensor import from_bits, to_bits

PLACES = 16_384
"""Of each tensor."""
ENTRIES = 8
"""Of each stack, about, that are quantized once more to find what a saved form keeps of them."""
DEAF = 0.5
"""Part of the update that arrives below which a policy counts as deaf to it."""
JUMP = 4.0
"""So many times the update is more than draws of weights in few bits make of it by chance."""

_Places = dict[str, tuple[Int[np.ndarray | Array, "entries places"], ...]]
Sample = dict[str, Float[np.ndarray, "*axes"]]


class Start(NamedTuple):
    """Masters and served values at the places, when the first weights were served."""

    masters: Sample
    served: Sample


class Began(NamedTuple):
    """What a tensor was at the start, at the places.

    Attributes:
        at: the places, as an index.
        values: float32.
        stands_for: values, each of these.
    """

    at: tuple[np.ndarray | Array, ...]
    values: np.ndarray
    stands_for: float


class Arrival:
    """Follows one session's updates to what is served.

    An engine calls `see` in every sync; the session keeps `start` in its checkpoints.

    Args:
        merged: adapters are served merged into their base, and so compared; else they themselves
            are what is compared.
    """

    def __init__(self, merged: bool = False) -> None:
        self._merged = merged
        self.start: Start | None = None
        self.kinds: dict[str, dict[str, float]] = {}
        """What `metrics` has, of each kind of tensor alone ("q_proj", "norm", ...), at the last
        sync."""
        self._places: _Places = {}
        self._stands_for: dict[str, float] = {}

    def see(self, masters: Policy, served: Policy) -> dict[str, Any]:
        """Compare what is served with the masters, or keep both as the start.

        Args:
            masters: float32, layers stacked.
            served: its rollout form, layers stacked or a list.

        Returns:
            The metrics of the table above, float32 scalars; NaN where the masters are where they
            began, and nothing at the start itself.
        """
        self._choose(masters)
        now = Start(*to_host(_sampled(masters, served, self._places)))
        if self.start is None:
            self.start = now
            return {}
        sums = {
            name: weight * _sums(*(x[name] - y[name] for x, y in zip(now, self.start, strict=True)))
            for name, weight in self._stands_for.items()
        }
        self.kinds = {name: _metrics(found) for name, found in sums.items()}
        found = _metrics(np.sum([*sums.values()], axis=0))
        return {f"sync/{name}": np.float32(value) for name, value in found.items()}

    def began(self, path: str, index: tuple[int, ...]) -> Began | None:
        """Find what a stack, or one entry of it, was at the start; None: it is not trained, or
        nothing was served yet.

        Args:
            path: as of `parameter_shapes`.
            index: of the entry; () is all of it.
        """
        name = path.removeprefix("layers.").removesuffix(".weight")
        if self.start is None or name not in self.start.masters:
            return None
        at, values = self._places[name], self.start.masters[name]
        if index or not path.startswith("layers."):
            entry = index[0] if index else 0
            at, values = tuple(x[entry] for x in at), values[entry]
        else:
            at = (np.arange(len(values))[:, None], *at)
        return Began(at, values, self._stands_for[name])

    def saved(self, masters: Policy) -> Start:
        """Give what a checkpoint holds; NaN, in its shapes, where there is no start yet."""
        self._choose(masters)
        none = {
            name: np.full(at[-1].shape, np.nan, np.float32) for name, at in self._places.items()
        }
        return self.start or Start(none, none)

    def load(self, start: Start) -> None:
        """Go on from what `saved` gave."""
        known = all(np.isfinite(x).any() for x in start.masters.values())
        self.start = start if known else None

    def nbytes(self, masters: Policy) -> int:
        """Count the bytes of the places and of two samples, which a sync holds on every device.

        Args:
            masters: or their shapes.
        """
        self._choose(masters)
        return sum(x.nbytes for at in self._places.values() for x in (*at, *at[:1] * 2))

    def _choose(self, masters: Policy) -> None:
        if self._places:
            return
        shapes = jax.eval_shape(lambda policy: _pieces(policy, self._merged), masters)
        for number, (name, stacks) in enumerate(shapes.items()):
            entries, shape = sum(x.shape[0] for x in stacks), stacks[0].shape[1:]
            size, each = math.prod(shape), -(-PLACES // entries)
            draw = np.random.default_rng(number)
            flat = (
                np.broadcast_to(np.arange(size), (entries, size))
                if size <= each
                else draw.integers(size, size=(entries, each))
            )
            self._places[name] = tuple(x.astype(np.int32) for x in np.unravel_index(flat, shape))
            self._stands_for[name] = size / flat.shape[1]


class SavedSample:
    """What part of an update a saved form keeps, counted as an export reads its tensors
    (`weights.gathered.See`): what the form holds of some entries now less what it would hold of
    them as they were at the start.

    Args:
        stored: from the path of a stack and values of it to what is read from the form, float32.
        quantized: paths of which `stored` takes whole entries; of others it takes any values.
        arrival: knows the start of weights that are trained themselves; of others it is the base of
            their adapters.
    """

    def __init__(
        self,
        stored: Callable[[str, np.ndarray], np.ndarray],
        quantized: Collection[str],
        arrival: Arrival,
    ) -> None:
        self._stored, self._quantized, self._arrival = stored, quantized, arrival
        self._sums = np.zeros(6)

    def see(
        self,
        path: str,
        entries: int,
        index: tuple[int, ...],
        base: np.ndarray | None,
        value: np.ndarray,
    ) -> None:
        """Take an entry of a stack: its value, and its base where it has an adapter."""
        every = max(entries // ENTRIES, 1) if index else 1
        if index and index[0] % every:
            return
        if base is None:
            began = self._arrival.began(path, index)
            if began is None:
                return
        else:
            stride = max(base.size // (16 * PLACES), 1)
            at = np.unravel_index(np.arange(0, base.size, stride), base.shape)
            began = Began(at, np.asarray(base[at], np.float32), stride)
        at, before, weight = began
        after = np.asarray(value[at], np.float32)
        if path in self._quantized:
            if base is None:
                base = np.array(value)
                base[at] = before
            stored = [self._stored(path, x)[at] for x in (base, value)]
        else:
            stored = [self._stored(path, x) for x in (before, after)]
        self._sums += every * weight * _sums(after - before, stored[1] - stored[0])

    def arrived(self) -> float:
        """Read the part that is kept, as `sync/arrived` counts it; NaN where nothing changed."""
        return _metrics(self._sums)["arrived"]


def _sums(masters: np.ndarray, served: np.ndarray) -> Float[np.ndarray, 6]:
    """Of two changes: places, served places that changed, dS dM, dM^2, dS^2 and (dS - dM)^2."""
    m, s = masters.astype(np.float64), served.astype(np.float64)
    terms = (np.ones_like(s), s != 0, s * m, m * m, s * s, (s - m) ** 2)
    return np.array([term.sum() for term in terms])


def _metrics(sums: Float[np.ndarray, 6]) -> dict[str, float]:
    count, changed, both, masters, served, apart = sums
    with np.errstate(divide="ignore", invalid="ignore"):
        found = {
            "changed": changed / count,
            "arrived": both / masters,
            "noise": np.sqrt(apart / masters),
            "cosine": both / np.sqrt(masters * served),
        }
    return {name: float(value) if masters > 0 else math.nan for name, value in found.items()}


@jax.jit
def _sampled(masters: Policy, served: Policy, places: _Places) -> tuple[Any, Any]:
    """Values at the places, float32 [entries, places] a tensor, of both."""

    def sample(policy: Policy) -> dict[str, Array]:
        pieces = _pieces(policy)
        return {name: _taken(pieces[name], at) for name, at in places.items()}

    return sample(masters), sample(served)


def _pieces(policy: Policy, merged: bool = False) -> dict[str, list[Any]]:
    """Every tensor that is trained, as arrays or QTensors whose first axes follow each other: its
    layers, in runs or one by one; of others an axis of length 1 before their own.

    Args:
        merged: the bases of adapters, not the adapters.
    """
    found: dict[str, list[Any]] = {}
    trained: set[str] = set()
    """Beside a base that is frozen."""
    layers = [policy.layers] if isinstance(policy.layers, Layer) else policy.layers
    tensors = [pair for layer in layers for pair in layer.tensors().items()]
    for name, weight in tensors:
        if isinstance(weight, Adapted) and merged:
            weight = weight.base
        if isinstance(weight, Adapted):
            parts = {f"{name}.a": [weight.adapter.a], f"{name}.b": [weight.adapter.b]}
        else:
            parts = {name: weight.parts if isinstance(weight, WeightRuns) else [weight]}
        if isinstance(weight, Adapted | TrainedWeight):
            trained.update(parts)
        for key, several in parts.items():
            values = [_bare(part.value) for part in several]
            found.setdefault(key, []).extend(values if policy.stacked else map(_one, values))
    whole = {"embed_tokens": policy.embed_tokens, "norm": policy.norm, "lm_head": policy.lm_head}
    trained.update(name for name, weight in whole.items() if isinstance(weight, TrainedWeight))
    found |= {key: [_one(weight.value)] for key, weight in whole.items() if weight is not None}
    if merged or not trained:
        return found
    return {key: values for key, values in found.items() if key in trained}


def _bare(value: Any) -> Array | QTensor:
    return value.quantized if isinstance(value, QuantizedWeight) else value


def _one(value: Any) -> Any:
    return jax.tree.map(lambda x: x[None], value)


def _taken(
    pieces: list[Any], at: tuple[Int[np.ndarray | Array, "entries places"], ...]
) -> Float[Array, "entries places"]:
    taken, begin = [], 0
    for piece in pieces:
        count = piece.shape[0]
        own = [x[begin : begin + count] for x in at]
        begin += count
        first = jnp.arange(count)[:, None]
        if isinstance(piece, QTensor) and not isinstance(piece.format, Blocks):
            piece = piece.dequantize()
        if isinstance(piece, QTensor):
            sides = zip(own[-2:], piece.block, strict=True)
            blocks = [index // side for index, side in sides]
            codes = jax.tree.map(itemgetter((first, *own)), to_bits(piece.values))
            scales = piece.scales[first, *own[:-2], *blocks]
            taken.append(from_bits(codes).astype(jnp.float32) * scales)
        else:
            taken.append(piece[first, *own].astype(jnp.float32))
    return jnp.concatenate(taken)
