"""From a configuration to the parts of a run: model, tokenizer, data, mesh, run directory."""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import jax

from fp8rl_jax import self_test
from fp8rl_jax.config.fingerprint import fingerprint
from fp8rl_jax.config.recipe import Recipe
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.config.schema import validate
from fp8rl_jax.errors import UserError, listing
from fp8rl_jax.models.lora import split
from fp8rl_jax.models.policy import linear_names, parameter_count
from fp8rl_jax.parallel import initialize, leave_on_failure, make_mesh
from fp8rl_jax.precision import check_recipe, quantized_layers
from fp8rl_jax.rl import check_functions
from fp8rl_jax.rollout.engine import RolloutEngine
from fp8rl_jax.tasks.dataset import Dataset, Example, columns_of, load_splits
from fp8rl_jax.tasks.python_objects import (
    PythonReward,
    check_dataset,
    check_objects,
    name_objects,
)
from fp8rl_jax.tasks.sandbox.pickling import pack
from fp8rl_jax.tasks.sandbox.pool import RewardPool
from fp8rl_jax.tasks.text import load_documents
from fp8rl_jax.tasks.verifiers import unread_result, unverified
from fp8rl_jax.training.checks import check_lengths, check_mesh, kernel_sizes
from fp8rl_jax.training.plan import check_fits, device_text, report
from fp8rl_jax.training.prompts import PromptEncoder
from fp8rl_jax.training.session import Session
from fp8rl_jax.training.source import load_model, model_shape
from fp8rl_jax.training.text import Text, tokenized

_log = logging.getLogger("fp8rl")


@dataclass
class Setup:
    """What training, supervised training and evaluation share: a session, the problems or the text,
    and where the run writes."""

    config: RunConfig
    session: Session
    directory: Path
    train: Dataset | Text
    held_out: Dataset | Text
    dropped: int = 0
    """Training problems whose prompts are too long."""
    held_out_dropped: int = 0
    """The same of the held-out problems."""
    reward: PythonReward | None = None
    """Given in Python; `config` names it."""
    environment: type | None = None
    """The same of an environment's class."""

    @property
    def problems(self) -> tuple[Example, ...]:
        """Those to train on, then those held out."""
        assert isinstance(self.train, Dataset) and isinstance(self.held_out, Dataset)
        return self.train.examples + self.held_out.examples

    def fingerprint(self) -> dict[str, Any]:
        """Give what this run is, as plain JSON: settings, files, problems, objects."""
        objects = name_objects(self.config.task, self.reward, None, self.environment)[1]
        problems = {"train": self.train, "held-out": self.held_out}
        return fingerprint(self.config, objects) | {
            f"object the {name} problems": data.fingerprint for name, data in problems.items()
        }


def build(
    config: RunConfig,
    *,
    sampled: bool = True,
    engine: RolloutEngine | None = None,
    reward: PythonReward | None = None,
    dataset: Sequence[Any] | Iterable[Any] | None = None,
    environment: type | None = None,
    eval_dataset: Sequence[Any] | Iterable[Any] | None = None,
) -> Setup:
    """Load everything that a run needs.

    Refuses what cannot work before anything is computed.

    Args:
        config: resolved configuration.
        sampled: the rollout's samples are trained on, so truncated or greedy sampling is refused as
            rl.correction says.
        engine: who samples; by default our own.
        reward: function, or {name: function}, in place of what task.reward names
            (fp8rl_jax/tasks/rewards.py).
        dataset: problems, in place of those that task names, as `load_splits` takes them.
        environment: class, in place of the one that task names (fp8rl_jax/tasks/environment.py).
        eval_dataset: held-out problems, as `dataset`; none of them is trained on.

    Returns:
        The parts of the run. Its `config` names what was given in Python; where there are several
        processes, each is given the same.

    Raises:
        UserError: naming the key, file or tensor; one line for each fault of a configuration that
            the command line would refuse.
    """
    task, objects = name_objects(config.task, reward, dataset, environment, eval_dataset)
    config = replace(config, task=task)
    validate(config)
    check_dataset(task, dataset, eval_dataset)
    check_objects(task, objects)
    pack(objects)  # for its refusals
    config = _with_kept_exact(config)
    recipe = config.resolved_recipe
    if sampled and task.kind == "text":
        raise UserError(
            'task.kind = "text" has no problems to earn rewards with; `fp8rl pretrain` trains on it'
        )
    if sampled:
        config.samples_truncated()  # for its refusals
    initialize(config.mesh)
    with leave_on_failure():
        return _built(config, recipe, sampled, engine, reward, dataset, environment, eval_dataset)


def _built(
    config: RunConfig,
    recipe: Recipe,
    sampled: bool,
    engine: RolloutEngine | None,
    reward: PythonReward | None,
    dataset: Sequence[Any] | Iterable[Any] | None,
    environment: type | None,
    eval_dataset: Sequence[Any] | Iterable[Any] | None,
) -> Setup:
    """The parts of a run whose processes are joined."""
    r = config.rollout
    # ask for the device, which joining the processes must precede
    self_test.confirm(config.precision.backend, lambda: kernel_sizes(model_shape(config)))
    check_recipe(recipe, config.precision.backend)
    if sampled:
        check_functions(config.rl, r.samples_per_prompt)
    mesh = make_mesh(config.mesh)
    shape, is_text = model_shape(config), config.task.kind == "text"
    check_mesh(config, shape, mesh)
    check_lengths(config, shape)
    if (sampled or is_text) and not config.dry_run:
        check_fits(shape, config, dict(mesh.shape))
    policy, tokenizer = load_model(config, mesh)
    if is_text:
        return _of_text(config, Session(policy, tokenizer, config=config, engine=engine))
    session = Session(policy, tokenizer, config=config, engine=engine)
    train, held_out = load_splits(config.task, dataset, environment, eval_dataset)
    train, dropped = _fitting(train, session.encoder, "training")
    held_out, held_out_dropped = _fitting(held_out, session.encoder, "held-out")
    return Setup(
        session.config,
        session,
        config.directory,
        train,
        held_out,
        dropped,
        held_out_dropped,
        reward,
        environment,
    )


def _of_text(config: RunConfig, session: Session) -> Setup:
    """The parts of a run on text."""
    train, held_out = (
        tokenized(some, session.encoder, config.sft.row_tokens)
        for some in load_documents(config.task)
    )
    return Setup(session.config, session, config.directory, train, held_out)


def reward_pool(setup: Setup) -> RewardPool:
    """Start workers for the run's rewards, those given in Python among them.

    What they print goes to `reward_log`.
    """
    is_text = isinstance(setup.train, Text)
    return RewardPool(
        setup.config.task,
        reward_log(setup),
        setup.reward,
        setup.environment,
        () if is_text else columns_of(setup.problems),
    )


def announce(setup: Setup, report: Callable[[str], None], step: str = "") -> None:
    """Tell what a run begins with: its precision and its problems, or its text.

    Warns where a step takes more than there are, and where no completion can equal the answers.

    Args:
        report: receives the line.
        step: key of the number of problems that a step takes; empty: nothing is trained.
    """
    what = f"{setup.config.precision_text}{', exact' * setup.session.recipe.exact}"
    texts = [text for text in (setup.train, setup.held_out) if isinstance(text, Text)]
    if texts:
        parts = (f"{len(x.tokens):,} tokens of {x.documents:,} documents" for x in texts)
        report(f"{what}: {' to train on, '.join(parts)} held out")
        return
    counts = f"{len(setup.train)} problems to train on, {len(setup.held_out)} held out"
    report(f"{what}: {counts}, {setup.dropped + setup.held_out_dropped} dropped as too long")
    if step and len(setup.train) < (taken := attrgetter(step)(setup.config)):
        task, remedy = setup.config.task, "give more problems"
        if task.train_size:
            remedy = f"raise task.train_size = {task.train_size}"
        elif len(setup.held_out) and not task.names_held_out:
            remedy += f", or hold out fewer than {len(setup.held_out)} (task.eval_size)"
        _log.warning(
            "%d problems to train on are fewer than the %d that a step takes (%s), so it meets "
            "some of them more than once; %s",
            len(setup.train),
            taken,
            step,
            remedy,
        )
    if hint := unread_result(setup.config.task, setup.problems):
        _log.warning("%s", hint)


def opening(setup: Setup) -> list[str]:
    """Tell of the model, of what the recipe quantizes of it, of the devices, and where a reward or
    an environment that was given in Python runs; a line each."""
    session, config = setup.session, setup.config
    recipe, shape = session.recipe, session.shape
    origin = config.model.path or f"built-in, random weights of seed {config.seed}"
    linears = linear_names(shape)
    sides = {"rollout": recipe.rollout, "trainer": recipe.trainer}
    formats = [
        f"{side} {what} {each.element}"
        for side, of in sides.items()
        for what, each in (("weights", of.weight), ("inputs", of.activation))
        if each.quantized
    ]
    formats += [f"KV cache {recipe.rollout.key.element}"] * recipe.quantizes_cache
    chosen = f"{len(quantized_layers(recipe, linears))} of {len(linears)} linears"
    given = [name for name in ("reward", "environment") if getattr(setup, name) is not None]
    apart = [
        f"{name}: runs on copies, in worker processes; your variables do not change, and what it "
        f"prints is in {reward_log(setup)}"
        for name in given
    ]
    return [
        f"model: {origin}; {parameter_count(shape):,} parameters in {shape.num_layers} layers",
        f"quantized: {'; '.join([chosen, *([listing(formats)] if formats else [])])}",
        f"device: {device_text(shape, config, dict(session.mesh.shape))}",
        *apart,
    ]


def check_answers(setup: Setup, pool: RewardPool) -> None:
    """Warn of problems whose own answers do not count as correct."""
    if found := unverified(pool, setup.problems):
        _log.warning("%s; `fp8rl doctor --rewards CONFIG` tries them all", found)


def describe(setup: Setup) -> str:
    """Describe parameter counts, quantized layers and the memory plan, for `--dry-run`."""
    session, config = setup.session, setup.config
    policy, mesh = session.weights, dict(session.mesh.shape)
    shape, (parts, _) = policy.config, split(policy)
    chosen = quantized_layers(session.recipe, linear_names(shape))
    lines = [
        f"parameters: {parameter_count(shape):,} "
        f"({shape.num_layers} layers, hidden {shape.hidden_size}, vocabulary {shape.vocab_size})",
        f"trained: {sum(x.size for x in jax.tree.leaves(parts)):,}",
        f"quantized linears: {len(chosen)} of {len(linear_names(shape))}",
        f"mesh: {mesh}",
        report(shape, config, mesh)[0],
    ]
    return "\n".join(lines)


def reward_log(setup: Setup) -> Path:
    """Name the file for what this process's rewards print."""
    process = jax.process_index()
    return setup.directory / (f"rewards-{process}.log" if process else "rewards.log")


def _with_kept_exact(config: RunConfig) -> RunConfig:
    """A resumed run keeps what precision.exact = "auto" was decided to be when it began."""
    path = config.directory / "config.toml"
    if not config.resume or config.precision.exact != "auto" or not path.exists():
        return config
    try:
        before = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not TOML ({error}); move it away") from error
    kept = before.get("precision", {}).get("exact")
    # of another recipe it says nothing; that the recipe is another is said later
    if not isinstance(kept, bool) or before.get("recipe") != config.recipe:
        return config
    return replace(config, precision=replace(config.precision, exact=kept))


def _fitting(data: Dataset, encoder: PromptEncoder, which: str) -> tuple[Dataset, int]:
    long = {example.index: example for example in data.examples if not encoder.fits(example)}
    kept = tuple(example for example in data.examples if example.index not in long)
    if long:
        where = [f"{x.where} ({len(encoder.tokens(x))} tokens)" for x in long.values()]
        _log.warning(
            "%d of %d %s prompts have more than rollout.max_prompt_tokens = %d tokens and are "
            "skipped: %s",
            len(long),
            len(data),
            which,
            encoder.width,
            listing(where),
        )
    if long and not kept:
        raise UserError(
            f"rollout.max_prompt_tokens = {encoder.width}: every {which} prompt is longer; raise it"
        )
    return Dataset(kept, data.duplicates), len(long)
