"""A session: a policy that is sampled, rewarded and updated under one precision recipe.

The program at the top of fp8rl_jax/__init__.py is how it is used. It owns the weights, the
optimizer, the rollout engine, the KV calibration and the weight sync. `fp8rl train`, evaluations,
the warm start and the benchmarks go through it: there is no other loop body. A step does, in this
order:

    rollout     n completions of each of P prompts, with the weights of the last sync
    score       log-probabilities of the reference and of the old policy, where the loss, the reward
                or a correction needs them
    update      one or several optimizer updates; where there is one, its own forward gives the old
                log-probabilities
    calibrate   KV scales, where the recipe has an FP8 cache: of the update's own forward, or of one
                under the new weights on this step's tokens
    sync        the new weights, quantized, to the engine; where the rollout calibrates its cache,
                on the next step's prompts

Everything random is a function of (seed, step, number of the rollout in the step). Under
jax.distributed every process calls the same methods with the same prompts and rewards, and computes
its own rows.
"""

from __future__ import annotations

import inspect
import logging
import math
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from fp8rl_jax import rl, self_test
from fp8rl_jax.caching import keep_compiled_programs
from fp8rl_jax.config.files import run_directory
from fp8rl_jax.config.fingerprint import changes
from fp8rl_jax.config.recipe import Recipe
from fp8rl_jax.config.rl import RLConfig
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.config.schema import at_least, leaves, show, validate
from fp8rl_jax.config.settings import with_settings
from fp8rl_jax.config.training import CheckpointConfig, OptimizerConfig
from fp8rl_jax.config.unused import unused_settings
from fp8rl_jax.errors import UserError, switch
from fp8rl_jax.models.cache import KVScales
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.dither import dithered
from fp8rl_jax.models.lora import has_adapters, join, merge, split
from fp8rl_jax.models.policy import Policy
from fp8rl_jax.parallel import (
    PROGRESS,
    batch_sharding,
    batch_shards,
    check_batch,
    is_main_process,
    make_mesh,
    make_rollout_mesh,
    mesh_text,
    replicated,
    shard_policy,
    shared_faults,
    to_global,
    to_host,
)
from fp8rl_jax.precision import check_recipe, is_quantized, unlike_sides
from fp8rl_jax.rollout.apart import ApartEngine
from fp8rl_jax.rollout.arrival import SavedSample
from fp8rl_jax.rollout.engine import (
    PagedEngine,
    Prompts,
    Rollout,
    RolloutEngine,
    local_engine,
    pad_prompts,
)
from fp8rl_jax.rollout.sampling import at_temperature
from fp8rl_jax.rollout.vllm.engine import VllmEngine
from fp8rl_jax.tasks.dataset import Example
from fp8rl_jax.tasks.episodes import Episode
from fp8rl_jax.tasks.sandbox.pool import RewardPool
from fp8rl_jax.tasks.scores import Scores
from fp8rl_jax.tokenizers.tokenizer import Tokenizer
from fp8rl_jax.training.adapters import adapt, base_formats, restored, to_save
from fp8rl_jax.training.advantages import (
    explored,
    lengths_of,
    read_rewards,
    sample_advantages,
    select_rows,
    taught,
)
from fp8rl_jax.training.batch import Batch, bucket, narrow, untrim
from fp8rl_jax.training.carry_over import CarryOver
from fp8rl_jax.training.checkpoint import Checkpoints, difference
from fp8rl_jax.training.checks import (
    check_axes,
    check_policy,
    kernel_sizes,
    make_sampling,
    with_exact_decided,
)
from fp8rl_jax.training.experience import Entering, Experience, episode_experience, play
from fp8rl_jax.training.keys import rollout_key, sample_key, selection_key
from fp8rl_jax.training.learner import Learner, micro_batches, step_config
from fp8rl_jax.training.performance import Clock
from fp8rl_jax.training.prompts import Prompt, PromptEncoder, listed
from fp8rl_jax.training.serving import Serving
from fp8rl_jax.training.state import (
    TrainState,
    float32_masters,
    init_state,
    kept_masters,
    make_optimizer,
    sharded_state,
)
from fp8rl_jax.training.step import (
    batch_logprobs,
    batch_scores,
    supervised_update,
    text_loss,
)
from fp8rl_jax.training.stopping import deferred
from fp8rl_jax.training.text import Text, TextRows
from fp8rl_jax.training.watch import ArrivalWatch
from fp8rl_jax.weights.gathered import GatheredTensors
from fp8rl_jax.weights.hf_directory import as_read
from fp8rl_jax.weights.hf_names import hf_tensors
from fp8rl_jax.weights.load import in_own_codes, rollout_form, write_model
from fp8rl_jax.weights.peft_format import save_adapters
from fp8rl_jax.weights.quantized_export import ExportForm, export_form

_log = logging.getLogger("fp8rl")
_RELEASED = "session: its state was released; give it one with load"
_LOST = (
    "session: its state was lost in an update that failed; make another session and give it a "
    "checkpoint with restore"
)
_TABLES_OF_RUNS = ("task", "sft", "evaluation", "checkpoint", "tracking", "plan")
_OF_RUNS = {
    *("dry_run", "resume", "resume_changed"),
    *(key for key, _ in leaves(RunConfig) if key.split(".")[0] in _TABLES_OF_RUNS),
} - {"task.system_prompt", "sft.micro_batch_rows"}
"""Settings that do nothing in a session."""
_KEPT = 0.9
"""Part of the update that a saved model has at least, or it is said."""
_NARROWEST = 16
"""Tokens that prompts are padded to at least."""
_LIKELIHOOD: dict[str, Any] = {"rl": RLConfig(), "temperature": 1.0}
"""Of a `StepConfig` in which nothing is sampled."""
# programs, and not dozens of small operations, which on a mesh may wait for each other without an
# end
_mismatch = jax.jit(rl.mismatch_metrics, static_argnames="config")
_reward_kl = jax.jit(rl.reward_kl, static_argnames="config")


class Held(NamedTuple):
    """What an update changes, as it was before one."""

    trained: Any
    """Masters as they are kept, of what is trained."""
    optimizer: Any
    scales: KVScales | None


def _alone[**P, R](method: Callable[P, R]) -> Callable[P, R]:
    """Lets a method of a session wait for those of other threads: each takes over what the one
    before has left. Arguments that it does not take are one line."""
    signature = inspect.signature(method)

    @wraps(method)
    def run(self, *args, **kwargs):
        try:
            signature.bind(self, *args, **kwargs)
        except TypeError as error:
            raise UserError(f"session.{run.__name__}: {error}") from None
        with self._in_use:
            return method(self, *args, **kwargs)

    return run


def _on_mesh[**P, R](method: Callable[P, R]) -> Callable[P, R]:
    """Runs a method of a session in its mesh, and alone."""

    @_alone
    @wraps(method)
    def run(self, *args, **kwargs):
        with jax.set_mesh(self.mesh):
            return method(self, *args, **kwargs)

    return run


class Session:
    """A policy in training, from Python.

    Its methods may be called from several threads, and wait for each other. Ctrl-C in the middle of
    an update lets it end first: the session is whole, with that update or without it.

    Args:
        policy: layers stacked, as `fp8rl.load` gives it; floats of another dtype are widened to
            float32 masters. The session learns on a copy, made at its first update; drop yours
            where memory counts. A frozen base (`lora.base = "rollout"`) of the very policy that
            `load` gave takes the codes of its checkpoint, where that is in the recipe's format.
        tokenizer: of the policy.
        recipe: a built-in recipe's name, or a Recipe; by default that of `config`.
        config: every setting, as `fp8rl train` takes it; task, evaluation, tracking and output are
            not used.
        engine: who samples; by default what rollout.engine names.
        settings: single settings by their last name (learning_rate=1e-5, samples_per_prompt=8,
            clip_high=0.28, seed=1), by their dotted key (**{"rl.correction.method": "token_tis"}),
            or whole tables (rl=RLConfig(...)); docs/config.md.

    Attributes:
        config, recipe, mesh, tokenizer: as resolved; mesh is the trainer's.
        serving: the engine and what it serves.
        exact_by_default: whether precision.exact was "auto".
        sampling: of `rollout`.
        step: updates so far, in rollouts.
        clock: times of the present step's phases; `lap` reads it and begins the next.

    Raises:
        UserError: settings that cannot work, one line each, naming the key.
    """

    def __init__(
        self,
        policy: Policy,
        tokenizer: Tokenizer | None = None,
        recipe: str | Recipe | None = None,
        *,
        config: RunConfig | None = None,
        engine: RolloutEngine | None = None,
        **settings: Any,
    ):
        tokenizer = _checked(policy, tokenizer)
        alone = (
            config is None
            and not {"prompts_per_step", "rollout.prompts_per_step", "rollout"} & settings.keys()
        )
        config = RunConfig() if config is None else config
        config = with_settings(config, settings, recipe, _OF_RUNS)
        if alone:  # prompts come with each call, so what divides their number divides this one too
            unit = _prompts_of_equal_micro_batches(config)
            config = replace(config, rollout=replace(config.rollout, prompts_per_step=unit))
        validate(config)
        keep_compiled_programs()
        self_test.confirm(config.precision.backend, lambda: kernel_sizes(policy.config))
        self.exact_by_default = config.precision.exact == "auto"
        ours = engine is None and config.rollout.engine != "vllm"
        config = with_exact_decided(config, ours)
        self.config, self.tokenizer = config, tokenizer
        self.recipe = config.resolved_recipe
        check_recipe(self.recipe, config.precision.backend)
        if unlike := unlike_sides(self.recipe):
            _log.warning(
                "precision: rollout and trainer do not quantize alike, a mismatch of its own: %s",
                unlike,
            )
        if unused := unused_settings(config):
            _log.warning("settings that do nothing here: %s", "; ".join(unused))
        self.mesh, own = make_mesh(config.mesh), make_rollout_mesh(config.mesh)
        check_axes(config, policy.config, self.mesh)
        check_policy(policy, config)
        rollout = config.rollout
        self._arrivals = ArrivalWatch(config.compute_dtype, config.lora.rank > 0)
        self.sampling = make_sampling(config, policy, tokenizer)
        self.encoder = PromptEncoder(
            tokenizer,
            config.task.system_prompt,
            rollout.max_prompt_tokens,
            self.sampling.stop_token_ids,
            policy.config.vocab_size,
        )
        if config.task.system_prompt and not tokenizer.has_chat_template:
            _log.warning(
                "task.system_prompt: has no effect, the model has no chat template to write it with"
            )
        if not (engine is None or hasattr(engine, "generate")):
            raise UserError(
                f"engine: expected one that samples, got {show(engine)}; rollout.engine names ours"
            )
        if engine is None and config.rollout.engine == "vllm":
            engine = VllmEngine(config, self.recipe, tokenizer)
        if engine is None:
            sampler = local_engine(config, self.recipe)
            engine = sampler if own is None else ApartEngine(sampler, own, self.mesh)
        self.serving = Serving(engine, config, self.recipe)
        self.clock, self.step = Clock(), 0
        self._in_use, self._gone = threading.RLock(), _RELEASED
        shards = [batch_shards(mesh) for mesh in (self.mesh, own) if mesh is not None]
        self._unit = math.lcm(_prompts_of_equal_micro_batches(config), *shards)
        """What the number of a batch's prompts has to divide by."""
        # what a file's codes stand for stays in them
        policy = in_own_codes(policy, base_formats(config, policy.config))
        with jax.set_mesh(self.mesh):
            masters = jax.tree.map(
                lambda x: x if is_quantized(x) else x.astype(jnp.float32),
                policy,
                is_leaf=is_quantized,
            )
            adapted = shard_policy(adapt(masters, config, self.recipe), self.mesh)
            if config.dithers:
                dtype = jnp.dtype(config.compute_dtype)
                adapted = dithered(adapted, self.recipe, config.seed, dtype)
            self._shapes = jax.eval_shape(lambda: adapted)
            trained, frozen = split(adapted)
            # what is served first is what the first update starts from
            kept = kept_masters(trained, self.recipe)
            self._policy: Policy | None = join(kept, frozen)
        self._state: TrainState | None = None
        self._learner: Learner | None = None
        self._rollouts = 0
        """Of this step."""
        self._carry_over: CarryOver | None = None
        if extra := rollout.paged.extra_prompts:
            check_batch(extra, self.mesh, "rollout.paged.extra_prompts")
            if not isinstance(engine, PagedEngine):
                raise UserError(
                    "rollout.paged.extra_prompts: only PagedEngine carries completions over"
                )
            batch = self.encoder.width, self.encoder.pad
            self._carry_over = CarryOver(engine, self.mesh, self.sampling, extra, *batch)

    # sampling

    @_on_mesh
    def rollout(
        self,
        prompts: Sequence[Prompt] | Prompts,
        samples: int | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Experience:
        """Sample completions to learn from, with the weights of the last sync.

        The first call makes that sync.

        The number of prompts and their longest length are rounded up to a power of two or three
        quarters of one, so that a change within a bucket compiles nothing. Such filling is not seen
        in what is returned, nor learned from.

        With rollout.paged.extra_prompts = E, E prompts stay in progress and are carried over: what
        is returned are the first prompts to have all their completions, of those carried over and
        these: `prompt_ids` says which. So give `Example`s or encoded `Prompts`, which have ids, and
        E of them more the first time; `carried` says how many there are.

        Args:
            prompts: P prompts; of text and of conversations the tokenizer's chat template makes the
                tokens, where it has one. Encoded `Prompts` are taken as they are.
            samples: completions of each, by default rollout.samples_per_prompt.
            key: fixes the draws; by default a function of (seed, step, number of the rollout in
                this step).

        Returns:
            `texts` [P * samples], those of a prompt side by side, `tokens`, `logprobs`,
            `weight_version`.

        Raises:
            UserError: no prompts, or one that is empty or too long for the model; or, where some
                are carried over, they have no ids, or none would be left to return.
        """
        if not isinstance(prompts, Prompts):
            prompts = listed(prompts)
        if self._carry_over and not (
            isinstance(prompts, Prompts) or all(isinstance(each, Example) for each in prompts)
        ):
            raise UserError(
                "prompts: with rollout.paged.extra_prompts others may come back than were given, "
                "and text does not say which; give Examples, whose index does"
            )
        PROGRESS.begin(self.step)
        samples, key = self._draw(samples, key)
        encoded, count = self.encode(prompts)
        with self.serving.in_use:
            self._serve(encoded)
            if self._carry_over:
                rollout = self._carry_over.rollout(encoded, count, samples, key, self.clock)
                count = len(rollout.prompts.lengths)
            else:
                rollout = self._generate(encoded, samples, key)
        return self._experience(rollout, count, samples, self.sampling.temperature)

    def rollout_ahead(
        self, prompts: Prompts, key: Key[Array, ""], begun: threading.Event
    ) -> Rollout:
        """Sample in a thread of its own while another learns (rollout.steps_ahead).

        The weights that are served now sample, and the next sync waits for it. Of several processes
        only the rollout's devices exchange anything.

        Args:
            prompts: encoded, on the host, a whole batch of them.
            key: fixes the draws.
            begun: is set as soon as a sync would wait.

        Raises:
            RuntimeError: the weights of the last update are not served yet.
        """
        with self.serving.in_use, jax.set_mesh(self.mesh):
            if self.serving.due or self.serving.uncalibrated:
                raise RuntimeError("rollout_ahead: the weights are not served; call sync first")
            begun.set()
            made = self._generate(prompts, self.config.rollout.samples_per_prompt, key)
        placed = to_global(replace(made, metrics={}), batch_sharding(self.mesh))
        return replace(placed, metrics=made.metrics)

    def _generate(self, prompts: Prompts, samples: int, key: Key[Array, ""]) -> Rollout:
        with self.clock.enter("gen"):
            return jax.block_until_ready(self.engine.generate(prompts, samples, self.sampling, key))

    @_on_mesh
    def sample(
        self,
        prompts: Sequence[Prompt] | Prompts,
        samples: int = 1,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Experience:
        """Sample completions to look at or to evaluate.

        They are drawn apart from training, which they do not change.

        Args:
            prompts: as in `rollout`.
            samples: completions of each.
            temperature: 0: greedy. Nothing is truncated or biased.
            seed: of the draws.
        """
        encoded, count = self.encode(prompts)
        _check_samples(samples)
        if fault := at_least("temperature", temperature, 0.0):
            raise UserError(fault)
        sampling, key = (
            at_temperature(self.sampling, temperature),
            sample_key(self.config.seed, seed),
        )
        with self.serving.in_use, self.serving.aside():
            self._serve(encoded)
            rollout = self.engine.generate(encoded, samples, sampling, key)
        return self._experience(rollout, count, samples, temperature, truncated=False)

    @_on_mesh
    def play(
        self,
        examples: Sequence[Example],
        pool: RewardPool,
        samples: int | None = None,
        key: Key[Array, ""] | None = None,
    ) -> tuple[Experience, Scores]:
        """Play episodes of several turns with environments (task.kind = "environment" or
        "verifiers").

        Gives the episodes and what they earned.

        Args:
            examples: problems of the environment.
            pool: plays the environments.
            samples, key: as in `rollout`.
        """
        if self._carry_over:
            raise UserError(
                "rollout.paged.extra_prompts: episodes are not carried over; set it to 0"
            )
        samples, key = self._draw(samples, key)
        self._serve(examples)
        episodes, scores = play(
            self.engine, self.encoder, pool, examples, samples, self.sampling, key, self.clock
        )
        return self.of_episodes(episodes, samples), scores

    def of_episodes(self, episodes: Sequence[Episode], samples: int) -> Experience:
        """Make of episodes of `play` what `update` takes."""
        return episode_experience(
            episodes,
            samples,
            self.sampling.temperature,
            self.encoder.width + self.sampling.max_new_tokens - 1,
            self.encoder.pad,
            batch_sharding(self.mesh),
            truncated=self.config.samples_truncated(),
        )

    def of_rollout(self, rollout: Rollout) -> Experience:
        """Make of a rollout of `rollout`, with as many samples as the configuration has, what
        `update` takes."""
        samples = self.config.rollout.samples_per_prompt
        count = len(rollout.prompts.lengths)
        return self._experience(rollout, count, samples, self.sampling.temperature)

    # learning

    @_on_mesh
    def update(
        self,
        rollout: Experience,
        rewards: Sequence[float | None] | Scores,
        entering: Entering = None,
        next_prompts: Sequence[Prompt] | Prompts | None = None,
    ) -> dict[str, float]:
        """Learn from a rollout, and serve the new weights.

        Measures the mismatch between rollout and trainer, and calibrates an FP8 cache.

        Args:
            rollout: of `rollout` or `play`.
            rewards: one for each of `rollout.texts`; None where there is none: the sample has no
                advantage and no part in its group's mean. Or the scores of a RewardPool.
            entering: samples that enter the loss; by default all.
            next_prompts: of the next step. Where the rollout calibrates an FP8 cache it does so on
                these now, and without them on the next rollout's own prompts.

        Returns:
            Numbers by name: loss, policy_loss, reward/*, advantages/*, mismatch/*, optim/*, fp8/*,
            correction/*, completions/*, ...

            A rollout of older weights, which a correction is for, has the distance between their
            policy and the present one as off_policy/* in place of mismatch/*, and
            rollout/oldest_token versions between them.

        Raises:
            UserError: as many rewards as samples are wanted, each finite, not all None; or the
                rollout was sampled at another temperature, or by older weights for which nothing
                corrects.
        """
        config, clock = self.config, self.clock
        _check_experience(rollout)
        behind = self.serving.behind(rollout.weight_version)
        if rollout.temperature != self.sampling.temperature:
            raise UserError(
                f"rollout: sampled at temperature {rollout.temperature:g}, and "
                f"rollout.temperature is {self.sampling.temperature:g}; learn from what "
                "session.rollout gives"
            )
        earned = read_rewards(rollout, rewards)
        learner, state = self._started()
        micro_batches = learner.micro_batches(rollout.prompts_in_batch)
        batch = rollout.batch(learner.config.rl, entering)
        first = not config.rl.selection or config.rl.reward_kl.coefficient > 0
        if first:
            batch = learner.with_logprobs(state, batch, micro_batches, clock)
        lengths, divergence = rollout.by_sample(lengths_of(batch.mask)), None
        if config.rl.reward_kl.coefficient:
            divergence = _reward_kl(
                batch.old_logprobs, batch.reference_logprobs, batch.mask, config=config.rl.reward_kl
            )
            divergence = rollout.by_sample(divergence)
        advantages, metrics = sample_advantages(
            earned.values,
            earned.valid,
            lengths,
            divergence,
            earned.real,
            config=config.rl,
            samples=rollout.samples,
            longest=self.sampling.max_new_tokens,
        )
        batch = replace(batch, advantages=rollout.by_row(advantages))
        sampled = rollout.scored_logprobs
        metrics |= explored(batch, sampled)
        if config.rl.selection:
            key = selection_key(config.seed, self.step)
            batch, sampled, chosen = select_rows(rollout, batch, earned, key, config.rl, self._unit)
            metrics |= chosen
            micro_batches = learner.micro_batches(len(batch.lengths))
            if not first:
                batch = learner.with_logprobs(state, batch, micro_batches, clock)
        metrics |= taught(batch)
        served = self.scales
        with self._given_away():
            state, train_logprobs, learned, seen = learner.update(
                state, batch, micro_batches, clock, served
            )
            # XLA may lay small tensors out anew, and every program would be compiled for both
            # layouts
            self._take(shard_policy(state, self.mesh))
            self.step, self._rollouts = self.step + 1, 0
            weights = self.weights
            if self.serving.calibrates("trainer"):
                metrics |= self.serving.measure(weights, batch, micro_batches, seen, served, clock)
        mismatch = _mismatch(
            sampled,
            train_logprobs,
            batch.mask,
            batch.advantages,
            config=learner.config.rl.correction,
        )
        if behind:
            mismatch = {name.replace("mismatch/", "off_policy/"): x for name, x in mismatch.items()}
        metrics |= learned | jax.block_until_ready(mismatch)
        encoded = None if next_prompts is None else self.encode(next_prompts)[0]
        self.serving.sync(weights, self.step, encoded, clock)
        clock.work(self.shape, *rollout.work(), frozen=config.lora.rank > 0)
        metrics |= rollout.metrics() | self.engine.metrics
        if behind:
            oldest = behind + metrics.get("rollout/oldest_token", 0.0)
            metrics |= {"rollout/stale_tokens": 1.0, "rollout/oldest_token": oldest}
        metrics |= self.serving.metrics()
        found = {name: float(value) for name, value in to_host(metrics).items()}
        self._arrivals.see(self.step - 1, found)
        return found

    @_on_mesh
    def supervise(
        self, prompts: Sequence[Prompt] | Prompts, answers: Sequence[str | Sequence[int]]
    ) -> dict[str, float]:
        """Make one supervised update.

        Minimizes the mean negative log-likelihood of the answers' tokens, prompts not counted.

        The optimizer is that of `update`; `restart` gives another. What is served stays as it is
        until the next `rollout`.

        Args:
            prompts: as in `rollout`.
            answers: of each prompt; a text gets the end-of-sequence token, token ids are taken as
                they are.

        Returns:
            loss, optim/* and nonfinite/*.

        Raises:
            UserError: an answer is empty or has more than rollout.max_new_tokens tokens.
        """
        encoded, count = self.encode(prompts)
        answers = listed(answers, "answers")
        if len(answers) != count:
            raise UserError(f"answers: {len(answers)} for {count} prompts; give one for each")
        tokens, mask = self.encoder.answers(
            answers, len(encoded.lengths), self.sampling.max_new_tokens
        )
        return self._supervised(self._given(encoded, tokens, mask), 1)

    @_on_mesh
    def pretrain(self, rows: TextRows) -> dict[str, float]:
        """Make one supervised update on rows of text, in micro-batches of sft.micro_batch_rows.

        Otherwise as `supervise`.
        """
        micro_batches = len(rows.tokens) // (self.config.sft.micro_batch_rows or len(rows.tokens))
        return self._supervised(to_global(rows, batch_sharding(self.mesh)), micro_batches)

    def _supervised(self, batch: Batch | TextRows, micro_batches: int) -> dict[str, float]:
        learner, state = self._started()
        config = replace(learner.config, **_LIKELIHOOD, micro_batches=micro_batches)
        with self._given_away():
            state, metrics = supervised_update(state, batch, config, learner.optimizer)
            self._take(state)
        return {name: float(value) for name, value in to_host(metrics).items()}

    @_on_mesh
    def text_loss(
        self, text: Text, rows: int | None = None, batch_size: int = 16
    ) -> tuple[float, int]:
        """Compute the mean negative log-likelihood of text, in nats a token.

        In the trainer's formats, as `pretrain` predicts it.

        Args:
            text: as `tokenized` makes it.
            rows: how many, from the first one on; by default all.
            batch_size: rows computed at one time.

        Returns:
            The mean, NaN where nothing is predicted, and the number of tokens that are.
        """
        rows = min(len(text) if rows is None else rows, len(text))
        batch_size = -(-min(batch_size, rows) // batch_shards(self.mesh)) * batch_shards(self.mesh)
        config, sums = replace(step_config(self.config, self.recipe), **_LIKELIHOOD), []
        weights = self.weights
        for start in range(0, rows, batch_size):
            some = np.arange(start, start + batch_size)
            # empty ones behind the last, so that one compiled program serves all
            part = text.rows(np.where(some < rows, some, len(text)))
            found = text_loss(weights, to_global(part, batch_sharding(self.mesh)), config)
            sums.append(np.sum(np.asarray(to_host(found), np.float64), axis=1))
        total, count = np.sum(sums, axis=0)
        return float(total / count) if count else math.nan, int(count)

    @_alone
    def restart(self, optimizer: OptimizerConfig | None = None, updates: int | None = None) -> None:
        """Begin anew from the present weights.

        Step 0, another optimizer with a state of its own, and as reference policy the present one.
        What follows a warm start by `supervise`.

        Args:
            optimizer: by default the configuration's.
            updates: of the whole schedule, by default trainer.steps * trainer.updates_per_rollout.
        """
        self._policy, self._state, self._learner = self._kept, None, None
        self.step = self._rollouts = 0
        if self._carry_over:
            self._carry_over.progress = None
        self.serving.begin()
        self._started(optimizer, updates)

    @_on_mesh
    def score(self, rollout: Experience) -> tuple[Float[Array, "b t"], Float[Array, "b t"]]:
        """Compute the trainer's log-probabilities of a rollout's tokens, as `update` does before it
        learns, and the entropies in nats of the distributions that they are of: those over the
        tokens' supports where the rollout has them, and `scored_logprobs` the rollout's."""
        _check_experience(rollout)
        config = step_config(self.config, self.recipe)
        batch = rollout.batch(config.rl)
        count = micro_batches(self.config.trainer, rollout.prompts_in_batch)
        narrowed = narrow(batch, self.config.trainer, count, self.mesh).batch
        config = replace(config, micro_batches=count)
        found = batch_scores(self.weights, narrowed, config)
        one, other = (untrim(x, batch.tokens.shape[1]) for x in found)
        return one, other

    @_on_mesh
    def logprobs(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[str | Sequence[int]],
        batch_size: int = 16,
        temperature: float | None = None,
    ) -> list[Float[np.ndarray, " length"]]:
        """Compute the trainer's log-probabilities of given completions, in the trainer's formats.

        Args:
            prompts: P prompts.
            completions: P * n, those of a prompt side by side. Token ids are scored as they are;
                text is tokenized, and may get other tokens than those that were sampled.
            batch_size: prompts computed at one time.
            temperature: by default that of sampling.

        Returns:
            For each completion the log-probability of each of its tokens, float32.

        Raises:
            UserError: completions that are no multiple of the prompts, or one that is empty.
        """
        prompts, answers = listed(prompts), enumerate(listed(completions, "completions"))
        completions = [self.encoder.answer(i, answer, end=False) for i, answer in answers]
        if len(completions) % len(prompts):
            raise UserError(
                f"completions: {len(completions)} are no multiple of {len(prompts)} prompts"
            )
        n, found = len(completions) // len(prompts), []
        width = bucket(max(map(len, completions)), 2)
        config, weights = step_config(self.config, self.recipe), self.weights
        if temperature is not None:
            config = replace(config, temperature=temperature)
        for start in range(0, len(prompts), batch_size):
            some = completions[start * n : (start + batch_size) * n]
            encoded, _ = self.encode(prompts[start : start + batch_size])
            tokens, mask = self.encoder.answers(some, len(encoded.lengths) * n, width)
            batch = self._given(encoded, tokens, mask)
            values = to_host(batch_logprobs(weights, batch, config))
            found += [values[row, : len(completion)] for row, completion in enumerate(some)]
        return found

    # weights

    @property
    @_alone
    def state(self) -> TrainState:
        """A snapshot of masters, optimizer and what is found on the way. It is copied when it is
        read, since every update gives the session's own buffers away: three times the policy's
        float32 bytes with Adam."""
        return jax.tree.map(jnp.copy, self._started()[1])

    @_alone
    def release(self) -> TrainState:
        """Give the state itself away, uncopied.

        The session can do nothing until `load` gives it one. So sessions of several recipes can
        take turns on one policy in the memory of one.
        """
        _, state = self._started()
        self._state, self._gone = None, _RELEASED
        return state

    @_alone
    def load(self, state: TrainState) -> None:
        """Go on from a state of `release`, or a `state`, which becomes the session's own.

        Raises:
            UserError: it is no state, or one of another model, of other adapters or of another
                optimizer or loss scale; or its arrays have been given away.
        """
        self._check_state(state)
        # not of `state`: the reference is the policy before the first update
        self._learner = self._learner or Learner(self.config, self.recipe, self._kept, self.mesh)
        self._policy = None
        self._take(state)

    @_alone
    def hold(self) -> Held:
        """Copy what the next update changes, for `go_back`: masters of what is trained, and the
        optimizer's state."""
        _, state = self._started()
        copied = jax.tree.map(jnp.copy, (split(state.policy)[0], state.optimizer))
        return Held(*copied, self.scales)

    @_on_mesh
    def go_back(self, held: Held, next_prompts: Sequence[Prompt] | Prompts | None = None) -> None:
        """Take back the updates since `hold`, and serve what was served then.

        Steps, updates and what is found on the way are counted on.

        Args:
            held: becomes the session's own.
            next_prompts: as in `update`.
        """
        _, state = self._started()
        policy = join(held.trained, split(state.policy)[1])
        self._take(replace(state, policy=policy, optimizer=held.optimizer))
        self.serving.scales = held.scales
        # in place of the sync that is taken back: a number of it is that of the step
        self.engine.version -= 1
        self.sync(next_prompts)

    @property
    def arrival(self) -> dict[str, dict[str, float]]:
        """How much of the update since the start is served, of each kind of tensor ("q_proj",
        "norm", ...): changed, arrived, noise and cosine, as `rollout.arrival` says. Empty before
        the first update is served; with several kinds together it is sync/* of `update`."""
        return {} if self.engine.arrival is None else self.engine.arrival.kinds

    @property
    @_alone
    def policy(self) -> Policy:
        """A copy of the present weights in float32, adapters merged."""
        return jax.tree.map(jnp.copy, merge(self.weights))

    @_on_mesh
    def save(
        self, directory: str | Path, dtype: str | None = None, adapters: str | Path | None = None
    ) -> Path:
        """Write a Hugging Face directory that `fp8rl.load`, transformers, vLLM and SGLang open.

        An earlier one is replaced.

        Args:
            directory: made where it is not there. Adapters are merged.
            dtype: "bfloat16", "float16", "float32", or a quantized form as `fp8rl export` takes it
                ("rollout" for the recipe's own); by default the compute dtype, so that what is
                saved is what was trained. One that holds less of it is warned about, with the part
                of the update that it loses.
            adapters: where LoRA's adapters go in PEFT's form, float32; by default "adapter" in
                `directory`.

        Raises:
            UserError: the directory cannot be written, values are not finite, or a form that is
                not exported.
        """
        directory, dtype = Path(directory), dtype or self.config.compute_dtype
        policy, adapted = self._kept, has_adapters(self._kept)
        if dtype == "rollout" and adapted:
            raise UserError(
                "save: the rollout serves a base and adapters beside it; name a format, which "
                "quantizes both as one"
            )
        compute = self.config.compute_dtype
        saved = rollout_form(self.recipe, policy.config, compute) if dtype == "rollout" else dtype
        form = export_form(saved)
        source: Any = getattr(self.tokenizer, "directory", self.tokenizer)
        # the number that both sides quantize, or multiply
        rounds = saved == compute or bool(form and self.recipe.weight_source == "compute")
        sample = self._saved_sample(saved, rounds)
        tensors = GatheredTensors(
            policy,
            masters=True,
            compute=jnp.dtype(compute) if rounds else None,
            rounding=self.recipe.weight_rounding,
            see=None if sample is None else sample.see,
        )
        with tensors.gathered() as here:
            if here:
                write_model(directory, policy.config, tensors, source, saved)
        trained, base = split(policy)
        if base is not None:
            trained = to_host(split(self.weights)[0])
        with shared_faults():
            if is_main_process():
                arrives = math.nan if sample is None else sample.arrived()
                if arrives < _KEPT:
                    _log.warning(
                        "%s: %.0f %% of what was learned since the start is left in %s, the rest "
                        "is less than half a step of it; %s",
                        directory,
                        100 * arrives,
                        dtype,
                        "the adapters beside it have all of it"
                        if adapted
                        else 'dtype = "float32" keeps all of it',
                    )
                for line in form.remarks(policy.config) if form else ():
                    _log.warning("%s: %s", directory, line)
                if base is not None:
                    assert isinstance(trained, dict)  # adapters
                    where = directory / "adapter" if adapters is None else Path(adapters)
                    save_adapters(
                        trained, where, policy.config, self.config.lora, self.config.model.path
                    )
        return directory

    def _saved_sample(self, saved: str | ExportForm, rounds: bool) -> SavedSample | None:
        """Give what finds how much of the update a saved form keeps; None: all of it.

        Args:
            saved: dtype or form.
            rounds: to the compute dtype before it is quantized.
        """
        compute, form = jnp.dtype(self.config.compute_dtype), export_form(saved)
        narrower = form or jnp.finfo(str(saved)).nmant < jnp.finfo(compute).nmant
        if self.engine.arrival is None or not (narrower or has_adapters(self._kept)):
            return None
        located = {at.path: at for at in hf_tensors(self._kept.config).values()}
        quantized = {path for path, at in located.items() if form and form.holds(at)}
        # what is rounded at random arrives in the mean
        nearest = rounds and self.recipe.weight_rounding == "nearest"

        def stored(path: str, values: np.ndarray) -> np.ndarray:
            if path in quantized and nearest:
                values = values.astype(compute)
            return as_read(located[path], values, saved)

        return SavedSample(stored, quantized, self.engine.arrival)

    def checkpoint(self, directory: str | Path) -> None:
        """Write everything that `restore` needs to go on as if nothing had happened.

        Earlier checkpoints there stay.

        Raises:
            UserError: the disk is full or not writable.
        """
        checkpoints = Checkpoints(Path(directory), CheckpointConfig())
        try:
            about = {"recipe": self.recipe.name, "mesh": mesh_text(self.mesh)}
            checkpoints.save(self.step, self.saved(), about)
        finally:
            checkpoints.close()

    def restore(self, directory: str | Path) -> None:
        """Go on from the newest whole checkpoint in a directory, or of a run's directory.

        Raises:
            UserError: there is none, or it is of another kind of session or of another recipe, or
                of a run with rollout.steps_ahead, whose completions in hand no session has.
        """
        run, directory = run_directory(directory), Path(directory)
        directory = directory if run is None else run / "checkpoints"
        if not directory.is_dir() or (directory / "config.json").exists():
            what = "is a model, which fp8rl.load opens" if directory.is_dir() else "is not there"
            raise UserError(f"{directory}: {what}; restore takes what checkpoint has written")

        def agree(step: int, before: dict[str, Any]) -> None:
            if (recipe := before.get("recipe", self.recipe.name)) != self.recipe.name:
                raise UserError(
                    f"{directory}: the checkpoint of step {step} is of recipe {recipe!r}, and the "
                    f"session of {self.recipe.name!r}; make it with recipe = {recipe!r}, or go on "
                    "from that session's weights (state and load, or save and fp8rl.load)"
                )
            if before.get("rollout.steps_ahead"):
                raise UserError(
                    f"{directory}: the checkpoint of step {step} is of a run with "
                    "rollout.steps_ahead, and has completions in hand; go on with the run "
                    f"({switch('resume')}), or from its weights (fp8rl.load)"
                )
            here = {"mesh": mesh_text(self.mesh)}
            for line in changes({"mesh": before["mesh"]}, here) if "mesh" in before else ():
                _log.warning("resumed with a change: %s", line)

        checkpoints = Checkpoints(directory, CheckpointConfig())
        try:
            self.load_saved(*checkpoints.restore(self.saved(), agree))
        finally:
            checkpoints.close()

    @_on_mesh
    def saved(self) -> tuple:
        """Give what a checkpoint holds.

        The arrays are the session's own, which its next update gives away.
        """
        _, state = self._started()
        (heads, _), _ = self.shape.cached
        shape = self.shape.num_layers, heads
        if self.recipe.kv_granularity == "layer":
            shape = shape[:1]
        beside = (self.serving.saved(shape),)
        if self._carry_over:
            beside += (self._carry_over.saved(self.config.rollout.samples_per_prompt),)
        assert self.engine.arrival is not None
        beside += (self.engine.arrival.saved(self._shapes),)
        return *to_save(state), *to_global(beside, replicated(self.mesh))

    @_on_mesh
    def load_saved(self, step: int, saved: tuple) -> None:
        """Go on at `step` with what `saved` gave."""
        _, before = self._started()
        *state, scales = saved[:-2] if self._carry_over else saved[:-1]
        if self._carry_over:
            self._carry_over.load(to_host(saved[-2]))
        assert self.engine.arrival is not None
        self.engine.arrival.load(to_host(saved[-1]))
        self._take(restored(before, *state))
        self.step, self._rollouts = step, 0
        self.serving.load(scales, step)

    @_on_mesh
    def sync(self, prompts: Sequence[Prompt] | Prompts | None = None) -> None:
        """Serve the present weights now; `rollout`, `sample` and `update` do it where it is due.

        Args:
            prompts: what an FP8 cache is calibrated on where that is due, too. Without them the
                next rollout's own are.
        """
        encoded = None if prompts is None else self.encode(prompts)[0]
        self.serving.sync(self.weights, self.step, encoded, self.clock)
        self.serving.check_finite()

    def lap(self) -> dict[str, float]:
        """Read time/* and perf/* since the last call, for a step of one rollout and one update."""
        clock, self.clock = self.clock, Clock()
        return clock.metrics()

    def encode(self, prompts: Sequence[Prompt] | Prompts) -> tuple[Prompts, int]:
        """Encode prompts as arrays on the mesh, and count them.

        The batch is filled up with copies of the first.

        Raises:
            UserError: no prompts, or one that is empty or too long for the model.
        """
        if isinstance(prompts, Prompts):
            return to_global(prompts, batch_sharding(self.mesh)), len(prompts.lengths)
        prompts = listed(prompts)
        rows = [self.encoder.of_any(i, prompt) for i, prompt in enumerate(prompts)]
        ids = [
            prompt.index if isinstance(prompt, Example) else i for i, prompt in enumerate(prompts)
        ]
        positions, longest = (
            self.shape.max_position_embeddings,
            self.sampling.max_new_tokens,
        )
        room = positions - longest
        for i, row in enumerate(rows):
            if not 0 < len(row) <= room:
                raise UserError(
                    f"prompts: prompt {i} has {len(row)} tokens; from 1 to {room} fit, the "
                    f"model's {positions} positions less "
                    f"rollout.max_new_tokens = {longest}"
                )
        missing = bucket(-(-len(rows) // self._unit), 2) * self._unit - len(rows)
        width = min(bucket(max(_NARROWEST, *map(len, rows)), 2), room)
        padded = pad_prompts(
            rows + rows[:1] * missing, ids + ids[:1] * missing, width, self.encoder.pad
        )
        return to_global(padded, batch_sharding(self.mesh)), len(rows)

    # what the methods above share

    def __reduce__(self) -> NoReturn:
        raise UserError(
            "session: it holds devices and compiled programs, so it is neither pickled nor copied; "
            "checkpoint and restore keep its state, and save its policy"
        )

    @property
    def engine(self) -> RolloutEngine:
        """Who samples."""
        return self.serving.engine

    @property
    def scales(self) -> KVScales | None:
        """KV scales of the present weights where the trainer calibrates an FP8 cache, else
        None."""
        return self.serving.scales

    @property
    def carried(self) -> int:
        """Prompts whose completions are carried over to the next rollout."""
        return 0 if self._carry_over is None else self._carry_over.carried

    @property
    def learner(self) -> Learner:
        """What an update is specialised to; made with the optimizer's state when it is first
        wanted."""
        return self._started()[0]

    @property
    def shape(self) -> PolicyConfig:
        """The model's sizes."""
        return self._shapes.config

    @property
    def weights(self) -> Policy:
        """Float32 masters, adapters beside their base: the session's own buffers, which the next
        update gives away; a copy where the recipe keeps them in another format."""
        return float32_masters(self._kept)

    @property
    def _kept(self) -> Policy:
        """The same as it is kept."""
        if self._state is not None:
            return self._state.policy
        if self._policy is None:
            raise UserError(self._gone)
        return self._policy

    def _started(
        self, optimizer: OptimizerConfig | None = None, updates: int | None = None
    ) -> tuple[Learner, TrainState]:
        """The learner and the optimizer's state, which a session that only samples does without."""
        if self._learner is None:
            policy = self._kept
            clipping, bounds = self.config.rl.clip_calibration, None
            if clipping.enabled:
                bounds = clipping.start(self.config.rl.clip_low, self.config.rl.clip_high)
            rl.check_functions(self.config.rl, self.config.rollout.samples_per_prompt)
            with jax.set_mesh(self.mesh):
                learner = Learner(self.config, self.recipe, policy, self.mesh)
                learner.use(optimizer, updates)
                self._state = sharded_state(
                    policy, learner.optimizer, self.mesh, learner.config.loss_scale, bounds
                )
            self._learner, self._policy = learner, None
        if self._state is None:
            raise UserError(self._gone)
        return self._learner, self._state

    @contextmanager
    def _given_away(self) -> Generator[None]:
        """A block in which the state's buffers are given to a program and new ones taken: as a
        whole, where Ctrl-C comes in between, or not at all."""
        before = self._state
        with deferred():
            try:
                yield
            except BaseException:
                if any(x.is_deleted() for x in jax.tree.leaves(before)) and self._state is before:
                    self._state, self._gone = None, _LOST
                raise

    def _check_state(self, state: Any) -> None:
        """Refuse what is no state of a session like this one."""
        if not isinstance(state, TrainState):
            raise UserError(
                f"state: expected what release or state gives, and got {type(state).__name__}; a "
                "policy begins a session of its own, and restore reads a checkpoint"
            )
        optimizer = self._learner.optimizer if self._learner else None
        optimizer = optimizer or make_optimizer(self.config.optimizer, 1, self.recipe)
        scaling = self.config.trainer.loss_scale.resolve(self.config.compute_dtype)
        like = jax.eval_shape(lambda p: init_state(p, optimizer, scaling), self._shapes)
        if self.config.rl.clip_calibration.enabled:
            like = replace(like, clip_bounds=jax.ShapeDtypeStruct((2,), jnp.float32))
        found, own, given = difference(state, like), self.shape, state.policy.config
        if not found and own != given:
            names = [name for name in vars(own) if getattr(own, name) != getattr(given, name)]
            found = f"its model has another {' and '.join(names)}"
        if found:
            raise UserError(
                f"state: is of another kind of session: {found}; load it into one of the same "
                "model, adapters, optimizer and loss scale"
            )
        if any(x.is_deleted() for x in jax.tree.leaves(state)):
            raise UserError(
                "state: its arrays are another session's own, or were; load takes them over, and "
                "`state` gives a copy"
            )

    def _take(self, state: TrainState) -> None:
        """Go on with other weights, of which nothing is served or measured yet."""
        self._state = state
        self.serving.changed()

    def _serve(self, prompts: Sequence[Prompt] | Prompts) -> None:
        """The present weights, and scales for them, before anything is sampled."""
        if self._state is None and self._policy is None:
            raise UserError(self._gone)
        if self.serving.due:
            self.sync(prompts)
        elif self.serving.uncalibrated:
            self.serving.calibrate(self.encode(prompts)[0], self.clock)

    def _draw(self, samples: int | None, key: Key[Array, ""] | None) -> tuple[int, Key[Array, ""]]:
        """Samples of a prompt, and the key of this step's next rollout."""
        self.config.samples_truncated()  # for its refusals
        if samples is not None:
            _check_samples(samples)
        if key is None:
            key = rollout_key(self.config.seed, self.step, self._rollouts)
        self._rollouts += 1
        return self.config.rollout.samples_per_prompt if samples is None else samples, key

    def _experience(
        self,
        rollout: Rollout,
        count: int,
        samples: int,
        temperature: float,
        truncated: bool | None = None,
    ) -> Experience:
        """Of the first `count` prompts; truncated by default where the run's sampling is."""
        return Experience(
            rollout=rollout,
            texts=self.encoder.texts(rollout)[: count * samples],
            samples=samples,
            temperature=temperature,
            truncated=self.config.samples_truncated() if truncated is None else truncated,
        )

    def _given(self, prompts: Prompts, tokens: Any, mask: Any) -> Batch:
        """Given completions as a batch, on the mesh."""
        zeros: Any = np.zeros(tokens.shape, np.float32)
        batch = Batch(prompts.tokens, prompts.lengths, tokens, mask, zeros, zeros[:, 0])
        return to_global(batch, batch_sharding(self.mesh))


def _checked(policy: Any, tokenizer: Any) -> Tokenizer:
    """Give the tokenizer.

    Raises:
        UserError: they are no policy and no tokenizer.
    """
    if isinstance(tokenizer, Policy):
        raise UserError("policy and tokenizer are swapped; give Session(policy, tokenizer)")
    if isinstance(policy, str | Path):
        whole = f"Session(*fp8rl.load({str(policy)!r}), ...)"
        raise UserError(f"policy: expected a Policy, and got the name of one; give {whole}")
    if isinstance(policy, tuple | list):
        raise UserError(
            f"policy: expected a Policy, and got a {type(policy).__name__}; give what fp8rl.load "
            "returns as two arguments: Session(*fp8rl.load(...), ...)"
        )
    if not isinstance(policy, Policy):
        raise UserError(
            f"policy: expected a Policy, and got {type(policy).__name__}; fp8rl.load(...) "
            "gives one, with its tokenizer"
        )
    if not isinstance(tokenizer, Tokenizer):
        raise UserError(
            f"tokenizer: expected that of fp8rl.load(...), and got {type(tokenizer).__name__}"
        )
    return tokenizer


def _check_samples(samples: Any) -> None:
    if not isinstance(samples, int | np.integer) or samples < 1:
        raise UserError(f"samples: {show(samples)} must be a whole number of at least 1")


def _check_experience(rollout: Any) -> None:
    if not isinstance(rollout, Experience):
        raise UserError(f"rollout: expected what session.rollout gives, got {show(rollout)}")


def _prompts_of_equal_micro_batches(config: RunConfig) -> int:
    """What the number of a batch's prompts has to divide by, that updates and micro-batches are
    equal."""
    trainer = config.trainer
    return max(trainer.updates_per_rollout, 1) * max(trainer.micro_batch_prompts, 1)
