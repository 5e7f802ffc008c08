"""The configuration of vLLM as a rollout engine, and what it cannot serve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fp8rl_jax.config.formats import COMPUTE, TensorFormat
from fp8rl_jax.config.recipe import LINEARS, Recipe
from fp8rl_jax.config.schema import above, at_least

if TYPE_CHECKING:
    from fp8rl_jax.config.run import RunConfig


@dataclass(frozen=True)
class VllmConfig:
    """vLLM >= 0.32 as rollout engine: a server in a Python of its own, or in the trainer's."""

    python: str = ""
    """Python interpreter that has vLLM: a server is started with it on loopback, and ends with the
    run."""
    address: str = ""
    """http://host:port of a server that is running already. Its routes for weights ask for no key:
    keep it on a network that nobody else reaches."""
    transport: Literal["files", "nccl", "dlpack"] = "files"
    """How weights reach vLLM. files: in `directory`. nccl: broadcast from the trainer's first GPU
    to the server's, which are others. dlpack: in memory; vLLM is no server then, but in the
    trainer's process, whose Python has it, and neither `python` nor `address` is given."""
    directory: str = ""
    """Where weights are handed over as files; with `address`, on a file system that both see.
    Empty: a temporary directory."""
    quantize: Literal["ours", "vllm"] = "ours"
    """Who quantizes the linears of an FP8 recipe. ours: vLLM is given e4m3 values and scales, the
    bits that the trainer trains with. vllm: it is given 16 bits and makes its own (fp8_per_block)
    at every push."""
    compiled: bool = False
    """Let vLLM compile its graphs: a longer start, faster decode."""
    parity: float | None = None
    """Largest mean difference between vLLM's log-probabilities and ours of the few tokens that are
    checked after every push; unset: 1e-3 in float32, 0.5 in 16 bits, 1 in FP8."""
    start_seconds: float = 600.0
    """Until a server that was started must be ready."""
    request_seconds: float = 600.0
    """Longest silence of a server that is to answer, before it counts as hung."""
    restarts: int = 3
    """How often a server of ours that ends or hangs is started again."""
    arguments: tuple[str, ...] = ()
    """More arguments of `vllm serve`, such as --tensor-parallel-size; not those that recipe and
    dtype decide. In the trainer's process those of its engine alone, on one device."""

    def problems(self) -> list[str]:
        """List every value that cannot work, one line each; empty where all is well."""
        key = "rollout.vllm"
        checks = [
            above(f"{key}.start_seconds", self.start_seconds, 0.0),
            above(f"{key}.request_seconds", self.request_seconds, 0.0),
            at_least(f"{key}.restarts", self.restarts, 0),
            None if self.parity is None else above(f"{key}.parity", self.parity, 0.0),
        ]
        return [fault for fault in checks if fault]


_VLLM_OURS = (
    *("--host", "--port", "--served-model-name", "--worker-extension-cls", "--dtype"),
    *("--logprobs-mode", "--generation-config", "--quantization", "--kv-cache-dtype"),
)
"""Arguments of `vllm serve` that follow from the run."""
_VLLM_SEVERAL = (
    *("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp"),
    *("--data-parallel-size", "-dp", "--distributed-executor-backend"),
)
"""Arguments of `vllm serve` that have it compute in other processes."""


def vllm_problems(run: RunConfig, recipe: Recipe) -> list[str]:
    """List what vLLM cannot do, or not so that it can be learned from, one line each; nothing of
    another engine.

    Args:
        recipe: the run's, resolved.
    """
    rollout = run.rollout
    if rollout.engine != "vllm":
        return []
    vllm, formats = rollout.vllm, recipe.rollout
    block = TensorFormat("e4m3", (128, 128)), TensorFormat("e4m3", (1, 128))
    linears = {(each.rollout.weight, each.rollout.activation) for each in recipe.variants}
    whole = (
        recipe.quantized == LINEARS
        and not recipe.excluded
        and recipe.first_layers_in_compute == recipe.last_layers_in_compute == 0
        and linears == {block}
    )
    per_layer = TensorFormat("e4m3", None)
    given = {word.partition("=")[0].replace("_", "-") for word in vllm.arguments}
    here, several = vllm.transport == "dlpack", []
    truncated = rollout.truncated or bool(rollout.bad_words) or bool(rollout.logit_bias)
    checks = [
        (
            here or bool(vllm.python) != bool(vllm.address),
            "rollout.vllm: give python, an interpreter that has vLLM, or address, a running server",
        ),
        (
            not here or not (vllm.python or vllm.address),
            'rollout.vllm.transport: with "dlpack" vLLM is in this process; leave '
            "rollout.vllm.python and address out",
        ),
        (
            not here or not (several := sorted(given & set(_VLLM_SEVERAL))),
            f"rollout.vllm.arguments: {', '.join(several)}: in this process "
            '(rollout.vllm.transport = "dlpack") vLLM has one device',
        ),
        (
            not vllm.address or vllm.address.startswith(("http://", "https://")),
            f"rollout.vllm.address = {vllm.address!r} is no http://host:port",
        ),
        (
            not vllm.address or vllm.transport != "files" or bool(vllm.directory),
            "rollout.vllm.directory: with rollout.vllm.address, name a directory that the "
            "server sees, too",
        ),
        (
            not (taken := sorted(given & set(_VLLM_OURS))),
            f"rollout.vllm.arguments: {', '.join(taken)}: follow from the run's own keys",
        ),
        (
            whole or linears == {(COMPUTE, COMPUTE)},
            f'rollout.engine = "vllm": recipe {recipe.name!r} has formats of linears that vLLM '
            "does not serve; it has none, or e4m3 in blocks of 128 x 128 with activations in "
            "1 x 128 for all of them",
        ),
        (
            not whole or run.compute_dtype == "bfloat16",
            f"compute_dtype = {run.compute_dtype!r}: vLLM serves block FP8 beside bfloat16",
        ),
        (
            formats.query == formats.key == formats.value == COMPUTE
            or (
                formats.key == formats.value == per_layer
                and recipe.kv_granularity == "layer"
                and recipe.kv_calibration != "rollout"
            ),
            f'rollout.engine = "vllm": recipe {recipe.name!r} has a KV cache that vLLM does '
            "not serve; it takes e4m3 with a scale for each layer that the trainer calibrates "
            '(precision.kv_calibration = "update" or "trainer")',
        ),
        (
            not formats.probability.quantized,
            f'rollout.engine = "vllm": recipe {recipe.name!r} has rollout.probability, and what '
            "vLLM's attention casts its probabilities to is its own; leave it out",
        ),
        (
            recipe.weight_rounding == "nearest",
            "precision.weight_rounding: vLLM is pushed weights that are rounded to nearest; "
            'set "nearest", with model.dither',
        ),
        (
            run.precision.exact is not True and not recipe.exact,
            'precision.exact: of vLLM no bits are promised; leave it "auto"',
        ),
        (
            not truncated or run.rl.correction.truncated_sampling != "replay",
            'rl.correction.truncated_sampling: "replay" with rollout.engine = "vllm" is not read: '
            "vLLM returns supports (#49577) on a GPU alone, where it has not been tried; take "
            '"static" or "paged"',
        ),
        (
            not truncated or run.rl.correction.truncated_sampling == "replay",
            "rollout.top_k, top_p, min_p, bad_words, logit_bias: vLLM gives the "
            "log-probability of the distribution that it sampled alone; leave them out with "
            'rollout.engine = "vllm"',
        ),
        (
            not run.trainer.router_replay,
            'trainer.router_replay: rollout.engine = "vllm" brings no routes; leave it false',
        ),
    ]
    return [message for holds, message in checks if not holds]
