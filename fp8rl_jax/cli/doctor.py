"""`fp8rl doctor`: what is installed, what devices can do, how rewards can be contained, what a
recipe quantizes in a model, what a run's rewards take for right, how files are understood."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fp8rl_jax.config.files import read_recipes
from fp8rl_jax.config.formats import TensorFormat
from fp8rl_jax.config.recipe import (
    ATTENTION_ROLES,
    RECIPES,
    Recipe,
    get_recipe,
)

if TYPE_CHECKING:
    from fp8rl_jax.models.config import PolicyConfig

Side = Literal["rollout", "trainer"]
SIDES: tuple[Side, Side] = ("rollout", "trainer")
PACKAGES = (
    "fp8rl_jax",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "numpy",
    "ml-dtypes",
    "safetensors",
    "tokenizers",
)


DEVICES = (
    (
        "H100, H200 (sm_90)",
        "our Pallas kernels, each where its self-test passed, else plain XLA; cuDNN attends",
        "ran on two H200s for minutes, before their last changes; on no H100",
    ),
    (
        "B200",
        "plain XLA; mxfp8, and FP8 in blocks whose scales are powers of two, by its product of "
        "scaled operands, other FP8 dequantized",
        "these products were compiled; nothing ran",
    ),
    (
        "L4, RTX 4090",
        "as on a B200, but that products of scaled operands are made in 16 bits",
        "not run",
    ),
    (
        "A100",
        "plain XLA: FP8 in blocks is multiplied dequantized",
        "not run",
    ),
    ("MI300", "plain XLA", "not run"),
    ("TPU v5e, v6e", "plain XLA", "not run"),
    (
        "CPU",
        "C kernels for products, quantization, decode attention and exact mode on one device with "
        "a C compiler, else plain XLA",
        "all tests run here",
    ),
)
"""Device, what `auto` runs there today, and what of that has been seen."""


@dataclass(frozen=True)
class DoctorArguments:
    """Print devices, versions, kernel backends, how rewards can be contained, what a recipe
    quantizes in a model, and what a run's rewards take for right; or, with --data, how the files of
    a model and a task are understood."""

    model: str = ""
    """As in `fp8rl logprobs`; empty: the built-in policy."""
    recipe: str = "fp8-rl"
    """Precision recipe, built-in or of --recipes."""
    recipes: tuple[str, ...] = ()
    """TOML files whose [recipes.NAME] may be named, a run's config.toml among them; the `formats`
    that they name are imported."""
    data: str = ""
    """A task's rows (JSON lines, Parquet), or a run's TOML. Then one screen is printed and nothing
    else: the model's layers, windows and rotary positions, its special and end tokens, a prompt as
    the model sees it, which rows are kept, and what is read as answers."""
    kernels: bool = False
    """Try the GPU kernels anew, each against its expected values in a process of its own, and keep
    the verdicts; without it those are shown that are kept."""
    rewards: tuple[str, ...] = ()
    """TOML files of a run, as `fp8rl train` reads them: its rewards are tried with the answers that
    the problems have, which must be correct, and with wrong, empty and constant ones, which must
    not."""


def doctor(arguments: DoctorArguments) -> int:
    """Print one section a subject; return 1 when anything is wrong, after all sections."""
    faults: list[str] = []
    if arguments.data:
        return _print(_understood(arguments, faults), faults)
    recipe = get_recipe(arguments.recipe, rows=read_recipes(arguments.recipes))
    tried = _tried(arguments.kernels, faults)  # before JAX takes the GPU
    sections = [
        ("versions", _versions(faults)),
        ("devices", _devices(faults)),
        ("kernels", _kernels(faults)),
        ("self-test of GPU kernels", tried),
        ("what auto runs on which device", _table(DEVICES)),
        ("exact mode", _exact()),
        ("float8", _float8(faults)),
        ("sandbox of rewards", _sandbox()),
        (f"recipe {recipe.name}, in full", _row(recipe, faults)),
        ("linears", _linears(recipe, arguments.model, faults)),
    ]
    if recipe.quantizes_attention:
        sections.append(("attention", _attention(recipe)))
    if arguments.rewards:
        sections.append(("rewards", _rewards(arguments.rewards, faults)))
    return _print(sections, faults)


def _print(sections: Iterable[tuple[str, Iterable[str]]], faults: list[str]) -> int:
    for title, lines in sections:
        print(title)
        for line in lines:
            print(f"  {line}")
    for fault in faults:
        print(f"WRONG: {fault}")
    print("something is wrong" if faults else "all is well")
    return 1 if faults else 0


def _understood(
    arguments: DoctorArguments, faults: list[str]
) -> Iterator[tuple[str, Sequence[str]]]:
    """A model's files, and a task's rows as that model sees them."""
    from fp8rl_jax.cli.commands import progress
    from fp8rl_jax.cli.understood import data_lines, model_lines, task_of, tokenizer_lines
    from fp8rl_jax.errors import UserError
    from fp8rl_jax.tokenizers.tokenizer import load_tokenizer
    from fp8rl_jax.training.source import find_model
    from fp8rl_jax.weights.hf_config import read_policy_config

    tokenizer = None
    try:
        run = task_of(arguments.data)
        if model := arguments.model or run.model.path:
            directory = find_model(model, progress)
            config = read_policy_config(directory)
            yield f"model {model}", model_lines(config, directory)
            tokenizer = load_tokenizer(directory, config.vocab_size)
            none = ["none beside the weights: prompts can only be token ids"]
            ends = config.eos_token_ids
            yield "tokenizer", tokenizer_lines(tokenizer, ends) if tokenizer else none
        yield f"data {arguments.data}", data_lines(run, tokenizer)
    except UserError as error:
        faults += str(error).splitlines()


def _versions(faults: list[str]) -> list[str]:
    import importlib.metadata
    import platform

    lines = [f"python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            lines.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            faults.append(f"the package {package} is not installed")
    return lines


def _devices(faults: list[str]) -> list[str]:
    import jax

    try:
        devices = jax.devices()
    except RuntimeError as error:  # how JAX says that the platform asked for does not start
        faults.append(f"JAX finds no device: {' '.join(str(error).split())}")
        return []
    return [f"{device.id}: {device.platform} {device.device_kind}" for device in devices]


def _kernels(faults: list[str]) -> list[str]:
    from fp8rl_jax import self_test
    from pallas_kernels import native
    from pallas_kernels.backend import hopper_sms, resolve

    found = [
        f"{name}: auto runs {resolve('auto', next(iter(asked), name))}"
        for name, asked in self_test.SERVES.items()
    ]
    why = native.why_unavailable()
    used = "float32 products and inputs of a sampler, decode attention, exact mode"
    found.append(f"cpu: {f'none, {why}' if why else used}")
    if not hopper_sms():
        return found
    known, fault = self_test.assembler()
    _add(faults, fault)
    return [*found, f"ptxas: {known}"]


def _tried(anew: bool, faults: list[str]) -> list[str]:
    """The verdicts on GPU kernels that are kept, or made `anew`."""
    from fp8rl_jax import self_test

    verdicts = self_test.look(anew)
    if verdicts is None:
        return ["no Hopper GPU, which alone runs them: nothing to try"]
    lines = []
    for name, verdict in verdicts.items():
        if verdict is None:
            lines.append(f"{name}: no verdict yet; `fp8rl doctor --kernels` or a run tries it")
        elif verdict.why:
            instead = "auto runs plain XLA" if self_test.SERVES[name] else "of exact mode alone"
            lines.append(f"{name}: WRONG, {verdict.why} ({instead})")
            _add(faults, verdict.why if not verdict.found else f"{name}: {verdict.why}")
        else:
            lines.append(f"{name}: right in {verdict.cases} cases, {verdict.seconds:.0f} s")
    return lines


def _add(faults: list[str], fault: str) -> None:
    if fault and fault not in faults:
        faults.append(fault)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _exact() -> list[str]:
    import jax

    from pallas_kernels import invariant
    from pallas_kernels.matmul import selected_backend

    if jax.default_backend() == "tpu":
        return ["not on a TPU, which has no float64"]
    if selected_backend("auto") == "reference":
        if invariant.is_available():
            return [
                "on by default where both sides have the same formats; only few rows are slower"
            ]
        return ["with precision.exact = true, several times slower: more than one device, or a GPU"]
    if invariant.is_available():
        return ["with precision.exact = true; no GPU has confirmed it, each run checks itself"]
    return ["only with precision.backend = reference, several times slower: more than one GPU"]


def _sandbox() -> list[str]:
    """Mechanisms of this machine, and the values of task.reward.sandbox that they allow."""
    import sys

    from fp8rl_jax.tasks.sandbox import cgroup, seccomp, strict

    if sys.platform != "linux":
        return [
            "task.reward.sandbox = process: timeouts alone; limits need Linux",
            "task.reward.sandbox = strict: not possible, needs Linux",
        ]
    abi = strict.landlock_abi()
    guarded = strict.guarded(abi)
    forks = "each is asked for" if seccomp.is_available(gate=True) else "counted afterwards"
    version = cgroup.available()
    memory = f"bounded by {version}" if version else "looked at 50 times a second"
    lacks = strict.missing()
    return [
        f"Landlock: {f'ABI {abi} ({guarded})' if abi else 'none, or switched off'}",
        f"seccomp filters: {'there' if seccomp.is_available() else 'missing'}",
        f"forks of a reward: {forks}",
        f"memory of a reward with what it starts: {memory}",
        "task.reward.sandbox = process: possible",
        f"task.reward.sandbox = strict: {f'not possible, needs {lacks}' if lacks else 'possible'}",
    ]


def _rewards(files: Sequence[str], faults: list[str]) -> list[str]:
    """What a run's rewards make of right, wrong, empty and constant answers."""
    from fp8rl_jax.cli.load import load_config
    from fp8rl_jax.config.run import RunConfig
    from fp8rl_jax.errors import UserError
    from fp8rl_jax.tasks.dataset import columns_of, load_splits
    from fp8rl_jax.tasks.sandbox.pool import RewardPool
    from fp8rl_jax.tasks.verifiers import check_rewards

    task = load_config(RunConfig, list(files), "fp8rl doctor").task
    if task.is_environment:
        return ["an environment rewards its own steps: there is no answer to compare with"]
    try:
        train, held_out = load_splits(task)
        examples = train.examples + held_out.examples
        with RewardPool(task, columns=columns_of(examples)) as pool:
            lines, found = check_rewards(pool, examples)
    except UserError as error:
        found, lines = str(error).splitlines(), []
    faults += found
    return lines


def _float8(faults: list[str]) -> list[str]:
    """Values beyond a format's range must come out as its largest value, never as NaN or
    infinity."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from fp8rl_jax.config.formats import ELEMENTS, TensorFormat
    from fp8rl_jax.precision import max_value, quantize_per_tensor

    lines = []
    for name in ELEMENTS:
        fmt = TensorFormat(name)
        limit = max_value(fmt)
        given = jnp.asarray([1e9, -1e9, limit * 1.1, 1.0, 0.0])
        cast = jax.jit(quantize_per_tensor, static_argnums=2)(given, jnp.float32(1.0), fmt)
        got, expected = np.asarray(cast.astype(jnp.float32)), [limit, -limit, limit, 1.0, 0.0]
        lines.append(f"{name}: casts clamp at {limit:g}")
        if not np.array_equal(got, expected):
            lines[-1] = f"{name}: casts do not clamp"
            faults.append(
                f"{name}: {given.tolist()} became {got.tolist()}, not {expected}; update jaxlib "
                "and the driver"
            )
    return lines


def _row(recipe: Recipe, faults: list[str]) -> list[str]:
    """Every field, as TOML for a file of a run; a built-in row under a name that is free."""
    import tomli_w

    from fp8rl_jax.config.correction import PLAIN, CorrectionConfig
    from fp8rl_jax.errors import UserError
    from fp8rl_jax.precision import check_recipe

    try:
        check_recipe(recipe)
    except UserError as error:
        faults.append(str(error))
    name = f"my-{recipe.name}" if recipe.name in RECIPES else recipe.name
    correction = CorrectionConfig().resolve(recipe.correction)
    preset = {key: getattr(correction, key) for key in ("method", *PLAIN)}
    return [
        *tomli_w.dumps({"recipes": {name: recipe.table(full=True)}}).splitlines(),
        "",
        *_computed(recipe),
        f'# what correction = "{recipe.correction}" stands for',
        *tomli_w.dumps({"rl": {"correction": preset}}).splitlines(),
    ]


def _computed(recipe: Recipe) -> list[str]:
    """How linears in formats without a kernel are computed here; nothing where there are none."""
    import jax

    from fp8rl_jax.precision.formats import has, in_blocks
    from pallas_kernels import Format

    roles = [
        role for side in ("rollout", "trainer") for role in getattr(recipe, side).roles().items()
    ]
    linears = [fmt for name, fmt in roles if name in ("weight", "activation")]
    own = {
        fmt for fmt in (*linears, recipe.output_gradient) if fmt.quantized and not in_blocks(fmt)
    }
    if not own:
        return []
    scaled = all(has(fmt, Format.scaled_operand) for fmt in own)
    gpu = jax.default_backend() == "gpu"
    how = (
        "XLA's product of scaled operands: as stored on Blackwell, elsewhere in 16 bits"
        if gpu and scaled and recipe.rollout.activation.quantized
        else "dequantized, and multiplied in float32"
    )
    names = ", ".join(sorted(fmt.name for fmt in own))
    return [f"# no kernel of this library multiplies {names}: {how}", ""]


def _linears(recipe: Recipe, model: str, faults: list[str]) -> list[str]:
    """What each linear of the model becomes on both sides, those that are alike together, and what
    one side alone quantizes."""
    from fp8rl_jax.cli.commands import progress
    from fp8rl_jax.compare.linears import difference_text, rows, rows_text
    from fp8rl_jax.config.run import InitConfig
    from fp8rl_jax.errors import UserError
    from fp8rl_jax.models.policy import linear_names, parameter_count
    from fp8rl_jax.precision import quantized_on
    from fp8rl_jax.training.source import find_model
    from fp8rl_jax.weights.hf_config import read_policy_config
    from fp8rl_jax.weights.load import byte_policy_config

    try:
        if model:
            config = read_policy_config(find_model(model, progress))
        else:
            config = byte_policy_config(InitConfig())
        names = linear_names(config)
        quantized = [quantized_on(recipe, side, names) for side in SIDES]
    except UserError as error:
        faults.append(str(error))
        return []
    described = [{name: _formats(recipe, name, side, config) for name in names} for side in SIDES]
    told, layers = ("the rollout", "the trainer"), config.num_layers
    size = (
        f"{config.architecture}, {config.num_layers} layers, {parameter_count(config):,} parameters"
    )
    return [
        f"{model or 'built-in policy'}: {size}",
        *rows_text(rows(*described), SIDES, layers),
        *difference_text(quantized, told, names, layers),
        "never quantized: embeddings, norms, biases, output "
        f"head{', routers' * (config.experts is not None)}",
    ]


def _attention(recipe: Recipe) -> list[str]:
    """What the queries, keys and values of a rollout become, and the probabilities of both
    sides."""
    from fp8rl_jax.config.run import RunConfig

    kept = RunConfig().compute_dtype
    scope = "layer" if recipe.kv_granularity == "layer" else "KV head"

    def text(role: str, fmt: TensorFormat) -> str:
        if not fmt.quantized:
            return "float32" if role == "probability" else "compute dtype"
        if role == "probability":
            return f"{fmt.name}, cast times 256; by the reference backend"
        if fmt.calibrated:
            return f"{fmt.name}, a calibrated scale for each {scope}"
        return f"{fmt.name}, simulated: kept in {kept}, or the compute_dtype of the run"

    roles, width = recipe.rollout.roles(), max(map(len, ATTENTION_ROLES))
    told = {role: text(role, roles[role]) for role in ATTENTION_ROLES}
    trainer = text("probability", recipe.trainer.probability)
    if told["probability"] != trainer:
        told["probability"] = f"rollout: {told['probability']}; trainer: {trainer}"
    return [f"{role:<{width}}  {what}" for role, what in told.items()]


def _formats(recipe: Recipe, linear: str, side: Side, config: PolicyConfig) -> str:
    """What a linear computes with on one side, or why in the compute dtype."""
    from fp8rl_jax.compare.linears import formats_text
    from fp8rl_jax.precision import why_in_compute

    if why := why_in_compute(recipe, linear, config.num_layers):
        return f"compute dtype ({why})"
    own = recipe.of_linear(linear)
    formats = getattr(own, side)
    if not formats.weight.quantized:
        return "compute dtype"
    text = formats_text(formats)
    return text if side == "rollout" else f"{text}; output gradients: {own.output_gradient.name}"
