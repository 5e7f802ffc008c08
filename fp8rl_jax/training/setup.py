"""From a configuration to the parts of a run: model, tokenizer, data, mesh, run directory."""

from __future__ import annotations

import json
import logging
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from operator import attrgetter
from pathlib import Path

import jax
import jax.numpy as jnp

from fp8rl_jax.config.recipe import Recipe
from fp8rl_jax.config.rl import check_sampling
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.config.schema import validate
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.byte_tokenizer import ByteTokenizer
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.loading import byte_policy_config, load_policy, save_policy
from fp8rl_jax.models.lora import merge, split
from fp8rl_jax.models.peft_format import save_adapters
from fp8rl_jax.models.policy import Policy, init_policy, linear_names, parameter_count
from fp8rl_jax.models.resolve import resolve_model
from fp8rl_jax.models.tokenizer import Tokenizer, load_tokenizer
from fp8rl_jax.models.trained import trainer_policy
from fp8rl_jax.parallel import check_batch, initialize, make_mesh, shard_policy
from fp8rl_jax.precision import check_recipe, quantized_layers, unlike_sides
from fp8rl_jax.rollout.constraints import make_constraints
from fp8rl_jax.rollout.engine import LocalEngine
from fp8rl_jax.rollout.sampling import Sampling
from fp8rl_jax.tasks.dataset import Dataset, load_splits
from fp8rl_jax.training.adapters import adapt
from fp8rl_jax.training.fitting import check_fits, report
from fp8rl_jax.training.prompts import PromptEncoder
from pallas_kernels.matmul import selected_backend

_log = logging.getLogger("fp8rl")


@dataclass
class Setup:
    """The parts that training, supervised training and evaluation share."""

    config: RunConfig
    recipe: Recipe
    directory: Path
    mesh: jax.sharding.Mesh
    policy: Policy
    model_directory: Path | None
    tokenizer: Tokenizer
    encoder: PromptEncoder
    train: Dataset
    held_out: Dataset
    dropped: int
    """Training problems whose prompts are too long."""
    sampling: Sampling
    held_out_dropped: int = 0
    """The same of the held-out problems."""

    def engine(self) -> LocalEngine:
        """A sampler for the run's recipe."""
        choice = self.config.rollout.decode_layers
        copies = jax.default_backend() == "cpu" or selected_backend(self.config.precision.backend) == "hopper"
        unroll = choice == "unroll" or (choice == "auto" and copies)
        return LocalEngine(
            self.recipe, jnp.dtype(self.config.compute_dtype), unroll, self.config.precision.backend,
            expert_ids=self.config.trainer.router_replay,
        )  # fmt: skip

    @property
    def tokenizer_source(self) -> Path | ByteTokenizer:
        """What an export of the policy takes its tokenizer from."""
        return self.model_directory or self.tokenizer


def build(config: RunConfig, *, sampled: bool = True) -> Setup:
    """Loads everything that the run needs, and refuses what cannot work before anything is computed.

    Args:
        config: resolved configuration.
        sampled: the rollout's samples are trained on, so truncated or greedy sampling is refused as rl.correction says.

    Raises:
        UserError: naming the key, file or tensor; one line for each fault of a configuration that the command line would refuse.
    """
    validate(config)
    recipe = config.resolved_recipe()
    r = config.rollout
    if sampled:
        check_sampling(
            config.rl.correction, temperature=r.temperature, top_k=r.top_k, top_p=r.top_p, min_p=r.min_p,
            bad_words=r.bad_words, logit_bias=r.logit_bias,
        )  # fmt: skip
    initialize(config.mesh)
    check_recipe(recipe, config.precision.backend)  # asks for the device, which joining the processes must precede
    if unlike := unlike_sides(recipe):
        _log.warning("precision: rollout and trainer do not quantize alike, a mismatch of its own: %s", unlike)
    mesh = make_mesh(config.mesh)
    check_batch(r.prompts_per_step, mesh, "rollout.prompts_per_step")
    if sampled and not config.dry_run:
        check_fits(model_shape(config), config, dict(mesh.shape))
    policy, tokenizer, source = load_model(config)
    check_range(policy, jnp.dtype(config.compute_dtype))
    # for its refusals
    jax.eval_shape(lambda p: trainer_policy(p, recipe, jnp.dtype(config.compute_dtype), config.precision.backend), policy)
    if config.trainer.router_replay and policy.config.experts is None:
        raise UserError("trainer.router_replay: the model has no experts; leave it false")
    if not (tokenizer.eos_token_ids or r.stop_token_ids or r.stop_strings):
        raise UserError(
            "rollout.stop_token_ids: the model names no end-of-sequence token; give the ids that end a completion, "
            "or rollout.stop_strings"
        )
    longest = r.max_prompt_tokens + r.max_new_tokens
    if longest > policy.config.max_position_embeddings:
        raise UserError(
            f"rollout.max_prompt_tokens + rollout.max_new_tokens = {longest} exceeds the model's "
            f"{policy.config.max_position_embeddings} positions"
        )
    encoder = PromptEncoder(tokenizer, config.task.system_prompt, r.max_prompt_tokens)
    train, held_out = load_splits(config.task)
    train, dropped = _fitting(train, encoder, "training")
    held_out, held_out_dropped = _fitting(held_out, encoder, "held-out")
    stops = tuple(dict.fromkeys((*tokenizer.eos_token_ids, *policy.config.eos_token_ids, *r.stop_token_ids)))
    constraints = make_constraints(tokenizer, policy.config.vocab_size, r.stop_strings, r.bad_words, r.logit_bias)
    sampling = Sampling(r.max_new_tokens, r.temperature, r.top_k, r.top_p, r.min_p, stops, *constraints)
    directory = Path(config.output.format(recipe=config.recipe))
    policy = shard_policy(adapt(policy, config, recipe), mesh)
    return Setup(
        config, recipe, directory, mesh, policy, source, tokenizer, encoder, train, held_out, dropped, sampling, held_out_dropped
    )


def announce(setup: Setup, report: Callable[[str], None], step: str = "") -> None:
    """What a run begins with: its precision and its problems; and a warning where a step takes more than there are.

    Args:
        report: receives the line.
        step: key of the number of problems that a step takes; empty: nothing is trained.
    """
    counts = f"{len(setup.train)} problems to train on, {len(setup.held_out)} held out"
    report(f"{setup.config.precision_text}: {counts}, {setup.dropped + setup.held_out_dropped} dropped as too long")
    if step and len(setup.train) < (taken := attrgetter(step)(setup.config)):
        task, remedy = setup.config.task, "give more problems"
        if task.train_size:
            remedy = f"raise task.train_size = {task.train_size}"
        elif len(setup.held_out) and not task.eval_path:
            remedy += f", or hold out fewer than {len(setup.held_out)} (task.eval_size)"
        _log.warning(
            "%d problems to train on are fewer than the %d that a step takes (%s), so it meets some of them more than once; %s",
            len(setup.train), taken, step, remedy,
        )  # fmt: skip


def model_shape(config: RunConfig) -> PolicyConfig:
    """The policy's shape; of its files only config.json is read."""
    if not config.model.path:
        return byte_policy_config(config.model.init)
    return PolicyConfig.from_directory(resolve_model(config.model.path, report=_log.info))


def load_model(config: RunConfig) -> tuple[Policy, Tokenizer, Path | None]:
    """The policy (float32 masters), its tokenizer, and its directory (None for the built-in policy)."""
    if not config.model.path:
        tokenizer = ByteTokenizer()
        shape = byte_policy_config(config.model.init)
        return init_policy(shape, jax.random.key(config.seed)), tokenizer, None
    directory = resolve_model(config.model.path, report=_log.info)
    policy = load_policy(directory, jnp.float32)
    tokenizer = load_tokenizer(directory, policy.config.vocab_size)
    if tokenizer is None:
        raise UserError(f"model.path: {directory} holds no tokenizer; training needs one")
    return policy, tokenizer, directory


def check_range(policy: Policy, dtype: jnp.dtype) -> None:
    """Refuses weights that the compute dtype cannot hold; only float16 is narrower than the masters.

    Raises:
        UserError: naming the tensor and its largest magnitude.
    """
    limit = float(jnp.finfo(dtype).max)
    if limit >= float(jnp.finfo(jnp.bfloat16).max):
        return
    tensors = {f"layers.{name}": weight.value for name, weight in policy.layers.tensors().items() if name != "router"}
    tensors |= {"embed_tokens": policy.embed_tokens.value, "norm": policy.norm.value, "lm_head": policy.head}
    for name, weight in tensors.items():
        if (largest := float(jnp.max(jnp.abs(weight)))) > limit:
            raise UserError(
                f"compute_dtype: {name} has a weight of magnitude {largest:g}, and {dtype} holds nothing above {limit:g}; "
                'use "bfloat16"'
            )


def describe(setup: Setup) -> str:
    """Parameter counts, quantized layers and the memory plan, for `--dry-run`."""
    shape, config = setup.policy.config, setup.config
    parts, _ = split(setup.policy)
    chosen = quantized_layers(setup.recipe, linear_names(shape))
    lines = [
        f"parameters: {parameter_count(shape):,} "
        f"({shape.num_layers} layers, hidden {shape.hidden_size}, vocabulary {shape.vocab_size})",
        f"trained: {sum(x.size for x in jax.tree.leaves(parts)):,}",
        f"quantized linears: {len(chosen)} of {len(linear_names(shape))}",
        f"mesh: {dict(setup.mesh.shape)}",
        report(shape, config, dict(setup.mesh.shape))[0],
    ]
    return "\n".join(lines)


def reward_log(setup: Setup) -> Path:
    """File for what this process's rewards print."""
    process = jax.process_index()
    return setup.directory / (f"rewards-{process}.log" if process else "rewards.log")


def save_model(policy: Policy, setup: Setup, dtype: str | None = None) -> None:
    """Writes the run's model/ (Hugging Face form, adapters merged) and, where there are adapters, adapter/ (PEFT's form).

    Args:
        policy: layers stacked, every shard addressable by this process.
        dtype: of model/, by default float16 of a run that computes in it and bfloat16 of any other; the adapters are float32.

    Raises:
        UserError: a directory that cannot be written, or values that are not finite.
    """
    dtype = dtype or ("float16" if setup.config.compute_dtype == "float16" else "bfloat16")
    save_policy(merge(policy), setup.directory / "model", setup.tokenizer_source, dtype)
    adapters, base = split(policy)
    if base is not None:
        config = setup.config
        save_adapters(adapters, setup.directory / "adapter", policy.config, config.lora, config.model.path)


def write_run_record(directory: Path, config_text: str) -> None:
    """config.toml (resolved) and run.json (versions, command, commit, devices) of a run directory.

    A resumed run keeps the records of its earlier starts under "earlier".
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.toml").write_text(config_text)
        packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "ml-dtypes", "numpy", "fp8rl_jax")
        record = {
            "command": ["fp8rl", *sys.argv[1:]],
            "started": time.time(),
            "python": platform.python_version(),
            "versions": {name: version(name) for name in packages},
            "commit": _commit(),
            "devices": [f"{d.platform}:{d.device_kind}" for d in jax.devices()],
            "processes": jax.process_count(),
        }
        path = directory / "run.json"
        if path.exists():
            before = json.loads(path.read_text())
            record["earlier"] = [*before.pop("earlier", []), before]
        path.write_text(json.dumps(record, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"{directory}: the run's record cannot be written ({error.strerror}); choose another output") from error
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error}); move it away") from error


def _commit() -> str | None:
    here = Path(__file__).parent
    asked = subprocess.run(["git", "-C", here, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or None


def _fitting(data: Dataset, encoder: PromptEncoder, which: str) -> tuple[Dataset, int]:
    kept = [e for e in data.examples if encoder.fits(e)]
    dropped = len(data.examples) - len(kept)
    if dropped:
        _log.warning(
            "%d of %d %s prompts have more than rollout.max_prompt_tokens = %d tokens and are skipped",
            dropped, len(data.examples), which, encoder.width,
        )  # fmt: skip
    if dropped and not kept:
        raise UserError(f"rollout.max_prompt_tokens = {encoder.width}: every {which} prompt is longer; raise it")
    return Dataset(tuple(kept), data.duplicates), dropped
