"""Rollout engines: who serves completions, and how new weights reach it.

A weight sync rounds the float32 masters to the compute dtype, quantizes the recipe's linears from
there, and lays the layers out for decode, all in one compiled program. Of a policy
with adapters the frozen base is converted once, and a sync moves the adapters. Every sync has a
number, and every rollout carries the number of the weights that made it. It leaves a sum of every
tensor, which is looked at again before anything is sampled: weights that a part of two syncs, a
write to a wrong place or broken memory has changed are never served.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from fp8rl_jax.config.recipe import Recipe
from fp8rl_jax.config.run import PagedConfig, RunConfig
from fp8rl_jax.errors import UserError, switch
from fp8rl_jax.models.cache import KVScales
from fp8rl_jax.models.forms import finite_flags, rollout_adapters, rollout_policy
from fp8rl_jax.models.lora import join, split
from fp8rl_jax.models.policy import Policy, with_scales
from fp8rl_jax.parallel import batch_shards, constrain, least_of, marks, to_host
from fp8rl_jax.precision import check_recipe, join_sums
from fp8rl_jax.rollout.arrival import Arrival
from fp8rl_jax.rollout.calibration import observe_served, qkv_metrics, scales_from_amax
from fp8rl_jax.rollout.paged.host import converse as paged_converse
from fp8rl_jax.rollout.paged.host import generate as paged_generate
from fp8rl_jax.rollout.paged.host import go_on as paged_go_on
from fp8rl_jax.rollout.paged.layout import Layout, choose_layout, token_bytes
from fp8rl_jax.rollout.paged.state import Kept, Rows
from fp8rl_jax.rollout.partial import InProgress
from fp8rl_jax.rollout.sampler import Prompts, Rollout, generate, rows_of, stream
from fp8rl_jax.rollout.sampling import Sampling
from fp8rl_jax.rollout.sync import NO_CONTEXT, SyncContext, transform_of, transformed
from pallas_kernels.backend import Backend, platform
from pallas_kernels.matmul import selected_backend

# of the module, so that two engines of one kind share what is compiled
_rollout_policy = jax.jit(rollout_policy, static_argnames=("recipe", "dtype", "unroll", "backend"))
_rollout_adapters = jax.jit(
    rollout_adapters, static_argnames=("config", "dtype", "unroll", "rounding")
)
_seen = jax.jit(lambda policy: (finite_flags(policy), marks(policy)))
_same = jax.jit(lambda served, written: marks(served) == written)
_counts = jax.jit(partial(jnp.sum, axis=1))
_wrapped = jax.jit(jax.random.wrap_key_data)


@jax.jit
def _placed(
    prompts: Prompts, limits: Int[Array, " b"] | None, order: Int[Array, " p"]
) -> tuple[Prompts, Int[Array, " b"] | None]:
    """Prompts in another order, and their rows' limits."""
    if limits is not None:
        limits = limits[rows_of(order, len(limits) // len(order))]
    return _by_batch((jax.tree.map(lambda x: x[order], prompts), limits))


@jax.jit
def _of_prompts(rollout: Rollout, order: Int[Array, " p"]) -> Rollout:
    return _by_batch(rollout.of_prompts(order))


def _by_batch[T](tree: T) -> T:
    """Lay all but numbers out by the batch."""
    return jax.tree.map(
        lambda x: constrain(x, "batch", *[None] * (x.ndim - 1)) if x.ndim else x, tree
    )


class RolloutEngine(Protocol):
    """What a session needs of an engine: ours, or an external one."""

    version: int
    """Number of the last weight sync; a session that goes on from a checkpoint sets it."""
    arrival: Arrival | None
    """Where a session wants to know what of its updates is served, `sync` calls its `see` and has
    what it says among `metrics`."""

    @property
    def finite(self) -> dict[str, Bool[Array, ""]]:
        """One flag a tensor role of the last sync, True where every value is finite."""

    @property
    def metrics(self) -> dict[str, Float[Array, ""]]:
        """fp8/* and sync/* metrics of the last sync and calibration."""

    @property
    def scales(self) -> KVScales | None:
        """KV scales that are served."""

    def sync(self, policy: Policy, context: SyncContext = NO_CONTEXT) -> int:
        """Serve these weights from now on; returns their version."""

    def calibrate(self, *prompts: Prompts) -> None:
        """Measure the KV scales of the weights served, if the recipe leaves that to the rollout."""

    def generate(
        self, prompts: Prompts, samples: int, sampling: Sampling, key: Key[Array, ""]
    ) -> Rollout:
        """Sample completions."""

    def conversations(self, width: int) -> AbstractContextManager[None]:
        """While it holds, a call of `generate` with one sample of each prompt may go on from the
        call before: prompts of the same ids that begin as those of the earlier call and their
        completions do, of `width` tokens at most. An engine may keep what it has computed of them;
        what it samples is the same."""

    def wait(self) -> None:
        """Return when the last sync and calibration are done."""


class LocalEngine:
    """Our own sampler, in the trainer's process and on its devices.

    Args:
        recipe: its rollout formats.
        compute_dtype: of what the recipe does not quantize.
        unroll: decode layer by layer instead of scanning them.
        backend: kernels.
        expert_ids: rollouts bring the experts of each token, for the trainer to replay.
        transform: spec of what is done to the served policy (rollout.sync), and its arguments.
    """

    def __init__(
        self,
        recipe: Recipe,
        compute_dtype: jnp.dtype,
        unroll: bool = True,
        backend: Backend = "auto",
        expert_ids: bool = False,
        transform: tuple[str, Mapping[str, float]] | None = None,
    ):
        check_recipe(recipe, backend)
        self.expert_ids, self.transform = expert_ids, transform
        self.recipe, self.dtype, self.backend = recipe, jnp.dtype(compute_dtype), backend
        self.version = 0
        self.policy: Policy | None = None
        self._replaced: KVScales | None = None
        self.arrival: Arrival | None = None
        self.finite: dict[str, Array] = {}
        self.metrics: dict[str, Array] = {}
        self._convert = partial(
            _rollout_policy, recipe=recipe, dtype=self.dtype, unroll=unroll, backend=backend
        )
        self._convert_adapters = partial(
            _rollout_adapters,
            dtype=self.dtype,
            unroll=unroll,
            rounding=recipe.weight_rounding,
        )
        self._base: tuple[Policy, Policy] | None = None
        self._marks: UInt32[Array, " leaves"] | None = None

    @property
    def scales(self) -> KVScales | None:
        """KV scales that are served."""
        return None if self.policy is None else self.policy.kv_scales

    def sync(self, policy: Policy, context: SyncContext = NO_CONTEXT) -> int:
        """Take over `policy` (float32 masters, stacked).

        A sync that is interrupted leaves nothing to serve, and `generate` says so.

        Args:
            context: its scales are required where the recipe quantizes the cache and leaves
                calibration to the trainer, so that those of an older version can never be served.
                Where it leaves it to the rollout, call `calibrate` next.

        Returns:
            The version of the weights now served. `finite` and `metrics` then speak of them.

        Raises:
            UserError: whatever `transformed` refuses.
        """
        return self.serve(self.convert(policy, context))

    def convert(self, policy: Policy, context: SyncContext = NO_CONTEXT) -> Policy:
        """Make of `policy` what is served, and let go of what was; arguments as of `sync`."""
        if (
            self.recipe.quantizes_cache
            and self.recipe.kv_calibration != "rollout"
            and context.scales is None
        ):
            raise ValueError(
                f"recipe {self.recipe.name!r}: sync needs the KV scales that the trainer calibrated"
            )
        self._replaced = self.scales
        self.policy = None  # frees the old weights before the new ones are made
        trained, frozen = split(policy)
        if frozen is None:
            self._base = None
            served, self.metrics = self._convert(policy)
        else:
            adapters = self._convert_adapters(trained, config=policy.config)
            served = join(adapters, self._served_base(frozen))
        if self.transform is not None:
            served = transformed(served, context, *self.transform)
        served = with_scales(served, context.scales)
        if self.arrival is not None:
            self.metrics = self.metrics | self.arrival.see(policy, served)
        return served

    def serve(self, served: Policy) -> int:
        """Serve what `convert` has made, on the devices that it is on; returns its version."""
        self.finite, self._marks = _seen(served)
        self.version += 1
        self.policy = served
        return self.version

    def calibrate(self, *prompts: Prompts) -> None:
        """Measure the KV scales with the weights and in the formats that serve, on prompts alone.

        `finite` then speaks of them, too, and `metrics` of what the scales served before would have
        cost these prompts.

        Args:
            prompts: one batch or several, each measured in a forward of its own; their amaxes are
                joined as the recipe says.

        Raises:
            RuntimeError: there are no weights yet, or the recipe does not leave calibration to the
                rollout.
        """
        if self.policy is None:
            raise RuntimeError("calibrate: no weights yet; call sync first")
        if not self.recipe.quantizes_cache or self.recipe.kv_calibration != "rollout":
            raise RuntimeError(
                f"calibrate: recipe {self.recipe.name!r} does not calibrate a cache in the rollout"
            )
        observe = partial(observe_served, self.policy, recipe=self.recipe)
        seen = [observe(batch.tokens, batch.lengths, self._replaced) for batch in prompts]
        seen = join_sums(seen) if len(seen) > 1 else seen[0]
        self.policy = with_scales(self.policy, scales_from_amax(seen.amax, self.recipe))
        self.finite, self._marks = _seen(self.policy)
        if self._replaced is not None:
            self.metrics = self.metrics | qkv_metrics(seen)

    def _served_base(self, frozen: Policy) -> Policy:
        """Make the rollout's form of a frozen base, once; of the base's own arrays where the form
        has them all."""
        if self._base is None or not _is_same(self._base[0], frozen):
            self._base = None
            form, arrays = jax.eval_shape(self._convert, frozen)[0], jax.tree.leaves(frozen)
            if _kinds(jax.tree.leaves(form)) == _kinds(arrays):
                served, self.metrics = jax.tree.unflatten(jax.tree.structure(form), arrays), {}
            else:
                served, self.metrics = self._convert(frozen)
            self._base = frozen, served
        return self._base[1]

    def generate(
        self,
        prompts: Prompts,
        samples: int,
        sampling: Sampling,
        key: Key[Array, ""],
        prompt_logprobs: bool = False,
        limits: Int[Array, " b"] | None = None,
    ) -> Rollout:
        """Sample `samples` completions of each prompt with the weights of the last sync.

        Args:
            prompt_logprobs: return those of the prompts' tokens, too.
            limits: most tokens of each completion; default: sampling.max_new_tokens.

        Raises:
            RuntimeError: there are no weights yet, or a cache that the rollout calibrates has not
                been calibrated since.
        """
        rollout = generate(
            self._ready(),
            *prompts,
            key,
            samples=samples,
            sampling=sampling,
            expert_ids=self.expert_ids,
            prompt_logprobs=prompt_logprobs,
            limits=limits,
        )
        return replace(rollout, prompts=prompts, weight_version=self.version)

    def stream(
        self, prompts: Prompts, sampling: Sampling, key: Key[Array, ""], every: int = 1
    ) -> Iterator[Rollout]:
        """Sample one completion of each prompt and look at it as it grows.

        `generate`'s tokens, after the first and then after `every` more.
        """
        policy = self._ready()
        return stream(policy, *prompts, key, sampling=sampling, every=every)

    def conversations(self, width: int) -> AbstractContextManager[None]:
        """Nothing is kept: a prompt is prefilled whole in every call."""
        return nullcontext()

    def wait(self) -> None:
        """Return when the last sync and calibration are done."""
        jax.block_until_ready(self.policy)

    def _ready(self) -> Policy:
        if self.policy is None:
            raise RuntimeError("generate: no weights yet; call sync first")
        if self.recipe.quantizes_cache and self.scales is None:
            raise RuntimeError(
                f"generate: recipe {self.recipe.name!r} has no KV scales for these weights; call "
                "calibrate(prompts) after sync"
            )
        same = to_host(_same(self.policy, self._marks))
        if not same.all():
            paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(self.policy)]
            name = jax.tree_util.keystr(paths[int(same.argmin())], simple=True, separator=".")
            self.policy = None
            raise UserError(
                f"rollout.engine: {name} is no longer what sync {self.version} "
                "wrote, so nothing was sampled with it; the memory of this machine may be broken: "
                f"go on with {switch('resume')}, on another one if it happens again"
            )
        return self.policy


class PagedEngine(LocalEngine):
    """Our sampler with continuous batching over a paged cache (rollout.paged).

    Args:
        paged: slots, pages and steps; the rest as of `LocalEngine`.
    """

    def __init__(
        self,
        recipe: Recipe,
        compute_dtype: jnp.dtype,
        unroll: bool = True,
        backend: Backend = "auto",
        expert_ids: bool = False,
        transform: tuple[str, Mapping[str, float]] | None = None,
        paged: PagedConfig | None = None,
    ):
        super().__init__(recipe, compute_dtype, unroll, backend, expert_ids, transform)
        self.paged = paged or PagedConfig()
        self._lengths: dict[int, float] = {}
        """Mean completion length of each prompt, as it was sampled last."""
        self._layouts: dict[tuple, Layout] = {}
        self._free: dict[tuple, float] = {}
        self._turns = 0
        """Width of the conversations that calls go on from each other with; 0: each is alone."""
        self._earlier: Earlier | None = None

    def generate(
        self,
        prompts: Prompts,
        samples: int,
        sampling: Sampling,
        key: Key[Array, ""],
        prompt_logprobs: bool = False,
        limits: Int[Array, " b"] | None = None,
    ) -> Rollout:
        """Sample as `LocalEngine.generate`, longest prompts' completions first where earlier
        rollouts tell.

        Raises:
            RuntimeError: as there.
            UserError: a row does not fit the cache.
        """
        turn = self._turns and samples == 1 and not self.expert_ids
        if turn and not prompt_logprobs and limits is None:
            return replace(self._turn(prompts, sampling, key), weight_version=self.version)
        (rollout,) = self._sample(prompts, samples, sampling, key, prompt_logprobs, limits)
        ids, counts = to_host((prompts.ids, _counts(rollout.mask)))
        self._lengths |= dict(zip(ids.tolist(), counts.reshape(len(ids), -1).mean(1), strict=True))
        return replace(rollout, weight_version=self.version)

    @contextmanager
    def conversations(self, width: int) -> Generator[None]:
        """The caches of a call are there for the next one, as many as the memory holds; a prompt
        that is given twice is sampled once."""
        self._turns = width
        try:
            yield
        finally:
            self._turns, self._earlier = 0, None

    def _turn(self, prompts: Prompts, sampling: Sampling, key: Key[Array, ""]) -> Rollout:
        """Sample one completion of each prompt, with what the call before has left."""
        policy, (count, width) = self._ready(), prompts.tokens.shape
        layout, shards = self._layout(policy, prompts, 1, sampling, self._turns)
        tokens, lengths, ids = to_host(prompts)
        fed = [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]
        _, first, again = np.unique(ids, return_index=True, return_inverse=True)
        first = first[again]  # the place of the first prompt of the same id
        asked, size = first == np.arange(count), count // shards
        earlier, self._earlier = self._earlier, None
        shape, source, begins = (count, sampling.max_new_tokens), *np.zeros((2, count), np.int32)
        if earlier is not None and (earlier.shape != shape or earlier.marks is not self._marks):
            earlier = None  # of another batch, or other weights or scales
        if earlier is not None:
            source, begins = earlier.continued(np.where(asked, ids, -1), fed, size)
        longest = (lengths - begins)[asked].max()
        chunk = fraction_of(width, longest, (16, 4, 1))
        rollout, kept, there = paged_converse(
            policy,
            prompts,
            key,
            sampling=sampling,
            layout=layout.of_turn(chunk, self.paged, (size, width), sampling.max_new_tokens),
            asked=jnp.asarray(asked),
            kept=None if earlier is None else earlier.kept,
            source=jnp.asarray(source),
            lengths=jnp.asarray(begins),
        )
        if not asked.all():
            rollout = _of_prompts(rollout, first)
        sampled, mask, there = to_host((rollout.tokens, rollout.mask, there))
        for row, words, own in zip(fed, sampled, mask, strict=True):
            row += words[own].tolist()[:-1]  # nothing was sampled behind the last one
        places = {int(ids[place]): int(place) for place in np.flatnonzero(asked & there)}
        self._earlier = Earlier(shape, self._marks, kept, places, fed)
        return rollout

    def stream(
        self, prompts: Prompts, sampling: Sampling, key: Key[Array, ""], every: int = 1
    ) -> Iterator[Rollout]:
        """Sample as `LocalEngine.stream`."""
        yield from map(jax.device_get, self._sample(prompts, 1, sampling, key, every=every))

    def _sample(
        self,
        prompts: Prompts,
        samples: int,
        sampling: Sampling,
        key: Key[Array, ""],
        prompt_logprobs: bool = False,
        limits: Int[Array, " b"] | None = None,
        every: int = 0,
    ) -> Iterator[Rollout]:
        policy, ids = self._ready(), to_host(prompts.ids)
        layout, shards = self._layout(policy, prompts, samples, sampling)
        known = [self._lengths[i] for i in ids.tolist() if i in self._lengths]
        typical = float(np.median(known)) if known else 0.0
        expected = np.array([self._lengths.get(i, typical) for i in ids.tolist()])
        order, places, size = balanced(expected, shards), np.arange(len(ids)), len(ids) // shards
        back = None
        if (order // size != places // size).any():  # to other shards of the batch, and back
            prompts, limits = _placed(prompts, limits, order)
            back, order = np.argsort(order), places
        rollouts = paged_generate(
            policy,
            prompts,
            key,
            samples=samples,
            sampling=sampling,
            layout=layout,
            order=jnp.asarray(order % size, jnp.int32),
            limits=limits,
            expert_ids=self.expert_ids,
            prompt_logprobs=prompt_logprobs,
            every=every,
        )
        for rollout in rollouts:
            yield rollout if back is None else _of_prompts(rollout, back)

    def go_on(
        self, progress: InProgress, sampling: Sampling, enough: int
    ) -> tuple[Rows, dict[str, Array]]:
        """Sample on with completions in progress until `enough` prompts have all theirs, in equal
        shares of its shards.

        In the order of the prompts, so that what comes of it depends on nothing else.

        Args:
            progress: on the mesh.

        Returns:
            Their rows, and rollout/*.

        Raises:
            RuntimeError, UserError: as `generate`.
        """
        policy, prompts = self._ready(), progress.prompts
        layout, shards = self._layout(policy, prompts, progress.samples, sampling)
        order = jnp.tile(jnp.arange(len(prompts.lengths) // shards, dtype=jnp.int32), shards)
        return paged_go_on(
            policy,
            prompts,
            _wrapped(progress.keys),
            progress.rows,
            sampling=sampling,
            layout=layout,
            order=order,
            enough=enough // shards,
        )

    def _layout(
        self,
        policy: Policy,
        prompts: Prompts,
        samples: int,
        sampling: Sampling,
        widest: int = 0,
    ) -> tuple[Layout, int]:
        """The sizes of a shard of the batch, and the number of shards."""
        count, width = prompts.tokens.shape
        shards = batch_shards(jax.sharding.get_abstract_mesh())
        if count % shards:
            raise ValueError(f"generate: {count} prompts do not split into {shards} equal shards")
        shape = (count // shards, width), samples, sampling.max_new_tokens
        if (shape, widest) not in self._layouts:
            hopper = selected_backend(self.backend) == "hopper"
            # found once: what is free differs from call to call, and those that leave the cache to
            # each other have one
            held = count, samples, sampling.max_new_tokens, widest or width
            if held not in self._free:
                self._free[held] = _least_free(policy.norm.value, f"free bytes for {held}")
            room = self._free[held] / token_bytes(policy)
            chosen = choose_layout(self.paged, *shape, hopper, room, widest)
            self._layouts[shape, widest] = chosen
        return self._layouts[shape, widest], shards


@dataclass(frozen=True)
class Earlier:
    """The last call of a conversation.

    Attributes:
        shape: prompts, and most tokens of a completion.
        marks: of the weights and scales that served it.
        kept: what it left in the cache.
        places: of each prompt id that is there.
        fed: tokens of each prompt and of its completion, as far as they are in the cache.
    """

    shape: tuple[int, int]
    marks: UInt32[Array, " leaves"] | None
    kept: Kept
    places: dict[int, int]
    fed: list[list[int]]

    def continued(
        self, ids: Int[np.ndarray, " p"], prompts: list[list[int]], size: int
    ) -> tuple[Int[np.ndarray, " p"], Int[np.ndarray, " p"]]:
        """Find what prompts go on from.

        Args:
            ids: of prompts; -1 for one that nothing is looked for.
            prompts: their tokens.
            size: prompts of a shard of the batch.

        Returns:
            (place of the earlier prompt in its shard, tokens that both begin with), 0 where nothing
            is kept, or in another shard.
        """
        source, begins = np.zeros((2, len(ids)), np.int32)
        for place, (name, tokens) in enumerate(zip(ids.tolist(), prompts, strict=True)):
            before = self.places.get(name, -1)
            if before >= 0 and before // size == place // size:
                source[place] = before % size
                begins[place] = shared_prefix(self.fed[before], tokens)
        return source, begins


def shared_prefix(one: list[int], other: list[int]) -> int:
    """Count the tokens that both begin with, of `other` all but the last."""
    pairs = zip(one, other[:-1], strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other) - 1))


def balanced(expected: Float[np.ndarray, " p"], shards: int) -> Int[np.ndarray, " p"]:
    """Deal prompts to the shards of a batch, as many to each, the longest first and each to the
    shard that has least so far (Graham's rule, 1969).

    Args:
        expected: length of each prompt's completions.

    Returns:
        Places of the prompts, shard by shard.
    """
    sums, dealt = np.zeros(shards), [[] for _ in range(shards)]
    for place in np.argsort(-expected, kind="stable"):
        shard = int(np.argmin(sums))
        dealt[shard].append(int(place))
        full = len(dealt[shard]) == len(expected) // shards
        sums[shard] = np.inf if full else sums[shard] + expected[place]
    return np.array(sum(dealt, []))


def local_engine(config: RunConfig, recipe: Recipe) -> LocalEngine:
    """Make the engine of a run.

    Args:
        recipe: the run's, resolved.
    """
    made = LocalEngine
    if config.rollout.engine == "paged":
        made = partial(PagedEngine, paged=config.rollout.paged)
    return made(
        recipe,
        jnp.dtype(config.compute_dtype),
        decode_layers(config) == "unroll",
        config.precision.backend,
        expert_ids=config.trainer.router_replay,
        transform=transform_of(config),
    )


def decode_layers(config: RunConfig) -> Literal["unroll", "scan"]:
    """Choose the layer loop of a run's decode, where rollout.decode_layers is "auto".

    Unrolled on a CPU, where a scan copies the cache, and with Hopper's kernels.
    """
    if config.rollout.decode_layers != "auto":
        return config.rollout.decode_layers
    hopper = selected_backend(config.precision.backend) == "hopper"
    return "unroll" if hopper or platform() == "cpu" else "scan"


def _least_free(placed: Array, name: str) -> float:
    """The free bytes of the device that has fewest, of those where an array lies: all processes
    compile one program, and so have one layout."""
    free = min(free_bytes(shard.device) for shard in placed.addressable_shards)
    processes = {device.process_index for device in placed.sharding.device_set}
    return least_of(name, free, processes)


def free_bytes(device: jax.Device) -> float:
    """Count the bytes of a device that a cache may take, of those that are free now nine tenths;
    infinity where the device does not say."""
    statistics = device.memory_stats() or {}
    if "bytes_limit" not in statistics:
        return math.inf
    return 0.9 * (statistics["bytes_limit"] - statistics["bytes_in_use"])


def _is_same(one: Policy, other: Policy) -> bool:
    """Whether two policies hold the same arrays."""
    leaves, structure = jax.tree.flatten(one)
    others, other_structure = jax.tree.flatten(other)
    return structure == other_structure and all(x is y for x, y in zip(leaves, others, strict=True))


def _kinds(arrays: list[Array]) -> list[tuple[tuple[int, ...], jnp.dtype]]:
    return [(x.shape, x.dtype) for x in arrays]


def fraction_of(width: int, longest: int, divisors: tuple[int, ...]) -> int:
    """Divide `width` by the first of `divisors` that leaves room for `longest`."""
    return next(size for n in divisors if (size := -(-width // n)) >= longest)


def pad_prompts(tokens: list[list[int]], ids: list[int], width: int, pad: int = 0) -> Prompts:
    """Pad token lists to `width` on the right.

    Raises:
        ValueError: a prompt is empty or longer than `width`.
    """
    table: Any = np.full((len(tokens), width), pad, np.int32)
    lengths: Any = np.asarray([len(prompt) for prompt in tokens], np.int32)
    identities: Any = np.asarray(ids, np.int32)
    for row, prompt in enumerate(tokens):
        if not 0 < len(prompt) <= width:
            raise ValueError(f"prompt {ids[row]}: {len(prompt)} tokens, need between 1 and {width}")
        table[row, : len(prompt)] = prompt
    return Prompts(table, lengths, identities)
