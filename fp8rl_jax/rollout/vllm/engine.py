"""Rollouts by vLLM, on weights and KV scales that the trainer pushes at every step.

A push is an export: the weights in Hugging Face's names, written to a directory that the server
reads; or sent to it by NCCL; or handed over in memory, where vLLM is in this process. With a recipe
of block FP8 they are the e4m3 values and scales of the library's one quantizer, so that vLLM serves
the very bits that the trainer trains with; or bfloat16, which vLLM quantizes itself
(rollout.vllm.quantize). KV scales of the trainer's calibration ride along.

After each push a few tokens are sampled and their log-probabilities compared with our own forward.
That catches what versions cannot: vLLM on a CPU goes on with the old output head where embeddings
are tied, without a word (plugin/fp8rl_vllm.py mends it).

Versions of weights are read before and after each batch, and every answer is checked: its tokens,
their log-probabilities, and the token that ended it.

A server of ours that ends or hangs is started again with the weights of the last push, and the
batch is asked for anew; a request's seed fixes its draws. After rollout.vllm.restarts of these the
run ends with the reason.
"""

from __future__ import annotations

import logging
import math
import shutil
import tempfile
import uuid
import weakref
from collections.abc import Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from fp8rl_jax.config.recipe import RECIPES, Recipe, TrainerFormats
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.cache import KVScales
from fp8rl_jax.models.forms import rollout_policy, trainer_policy
from fp8rl_jax.models.forward import forward
from fp8rl_jax.models.logprobs import token_logprobs
from fp8rl_jax.models.lora import has_adapters, merge
from fp8rl_jax.models.policy import Policy, cast
from fp8rl_jax.parallel import batch_sharding, is_main_process, shared_faults, to_global, to_host
from fp8rl_jax.rollout.arrival import Arrival
from fp8rl_jax.rollout.sampler import Prompts, Rollout
from fp8rl_jax.rollout.sampling import Sampling
from fp8rl_jax.rollout.sync import NO_CONTEXT, SyncContext, transform_of, transformed
from fp8rl_jax.rollout.vllm.in_process import InProcess
from fp8rl_jax.rollout.vllm.server import Server, ServerGone
from fp8rl_jax.tokenizers.tokenizer import Tokenizer
from fp8rl_jax.weights.block_fp8 import unaligned_linears
from fp8rl_jax.weights.gathered import GatheredTensors
from fp8rl_jax.weights.hf_config import config_json
from fp8rl_jax.weights.hf_directory import converted_tensors
from fp8rl_jax.weights.load import device_tensors, write_model
from pallas_kernels.backend import Backend

_log = logging.getLogger(__name__)

_pushed = jax.jit(partial(rollout_policy, unroll=False), static_argnames=("recipe", "dtype"))
_PROBE_PROMPT, _PROBE_SAMPLED = 8, 16
_FORM = (
    *("architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "tie_word_embeddings"),
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
)
"""Keys of config.json that a model at an address must have as the policy has them."""
PARITY = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.5, "fp8": 1.0}
"""Largest mean |log p - ours| over the tokens of a parity check, by what the server computes in. In
float32 the weights of the step before are beyond it; in fewer bits it finds what is badly wrong."""


class _Push(NamedTuple):
    """directory: of the weights, or of a model like them without weights, None where it is not
    needed; tensors: that are sent without files; scales: of each layer, [query, key, value];
    version: what the server calls them; model: values of their config.json."""

    directory: Path | None
    tensors: Any
    scales: list[list[float]] | None
    version: str
    model: dict[str, Any]


class VllmEngine:
    """A vLLM server, or vLLM in this process, as `RolloutEngine`.

    Args:
        config: of the run; `config.problems()` has said what vLLM cannot do.
        recipe: the run's, resolved.
        tokenizer: of the policy; its files go along with the weights.
    """

    def __init__(self, config: RunConfig, recipe: Recipe, tokenizer: Tokenizer):
        self.config, self.recipe, self.tokenizer = config, recipe, tokenizer
        self.settings, self._transform = config.rollout.vllm, transform_of(config)
        self.dtype, self.backend = jnp.dtype(config.compute_dtype), config.precision.backend
        self.version = 0
        self.scales: KVScales | None = None
        self.finite: dict[str, Bool[Array, ""]] = {}
        self.metrics: dict[str, Float[Array, ""]] = {}
        self.arrival: Arrival | None = None
        self.restarts = 0
        """Of the server, in this run."""
        self._run, self._vocab, self._ready = uuid.uuid4().hex, 0, False
        self._last: _Push | None = None
        self._server: Server | InProcess | None = None
        self._directory: Path | None = None

    def sync(self, policy: Policy, context: SyncContext = NO_CONTEXT) -> int:
        """Push `policy` (float32 masters, stacked) and have the server serve it.

        A push that is interrupted leaves nothing to serve, and `generate` says so; the next one
        starts over.

        rollout.transform is applied to what is pushed: adapters merged, nothing quantized yet.

        Args:
            context: with scales where the recipe quantizes the cache.

        Returns:
            The version of the weights now served.

        Raises:
            UserError: the server does not start, refuses the weights, or computes something else
                with them than we do; whatever `transformed` refuses.
        """
        if self.recipe.quantizes_cache and context.scales is None:
            raise ValueError(
                f"recipe {self.recipe.name!r}: sync needs the KV scales that the trainer calibrated"
            )
        self._ready, self._vocab = False, policy.config.vocab_size
        number = self.version + 1
        if self.settings.transport == "dlpack" and jax.process_count() > 1:
            raise UserError(
                'rollout.vllm.transport: "dlpack" is for one process; with several set "files"'
            )
        masters, mesh = policy, jax.sharding.get_mesh()
        if transform := self._transform:
            masters = jax.tree.map(jnp.asarray, merge(policy, None if mesh.empty else mesh))
            policy = transformed(masters, context, *transform)
        scales = to_host(context.scales)
        tensors = GatheredTensors(policy, compute=self.dtype if self._rounds else None)
        with shared_faults(), tensors.gathered():
            if is_main_process():
                self._push(policy, tensors, scales, number)
        self._check_parity(policy, number)
        if self.arrival is not None:
            if has_adapters(policy):
                policy = masters = merge(policy, None if mesh.empty else mesh)
            ours = self.recipe if self.settings.quantize == "ours" else RECIPES["bf16"]
            pushed, _ = _pushed(policy, recipe=ours, dtype=self.dtype)
            self.metrics = self.metrics | self.arrival.see(masters, pushed)
        self.version, self.scales, self._ready = number, context.scales, True
        return number

    def calibrate(self, *prompts: Prompts) -> None:
        """Refuse: vLLM 0.32 does not measure KV scales.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("calibrate: vLLM measures no KV scales; they come with `sync`")

    def conversations(self, width: int) -> AbstractContextManager[None]:
        """vLLM looks for prompts that it knows by itself."""
        return nullcontext()

    def wait(self) -> None:
        """Return at once: `sync` returns when the server serves."""

    def stop(self) -> None:
        """End the server, if it is ours; the next `sync` starts another."""
        if self._server is not None:
            self._server.stop()
        self._server, self._ready = None, False

    def generate(
        self, prompts: Prompts, samples: int, sampling: Sampling, key: Key[Array, ""]
    ) -> Rollout:
        """Sample `samples` completions of each prompt with the weights of the last push.

        All prompts are sent at once; the samples of one share its prefix.

        Args:
            sampling: neither truncated nor biased, since vLLM gives one log-probability a token.

        Raises:
            RuntimeError: there are no weights yet.
            UserError: `sampling` is truncated or biased; the server serves other weights, answers
                what cannot be, or is gone and not to be started again.
        """
        if not self._ready:
            raise RuntimeError("generate: no weights yet; call sync first")
        if sampling.truncated or sampling.bad_words is not None or sampling.logit_bias is not None:
            raise UserError(
                "rollout: vLLM gives the log-probability of the distribution that it sampled "
                "alone; top_k, top_p, min_p, bad_words and logit_bias need rollout.engine = "
                '"static" or "paged"'
            )
        host, seeds = to_host((prompts, _seeds(key, prompts.ids)))
        shape = len(host.lengths) * samples, sampling.max_new_tokens
        answer = (*(np.zeros(shape, dtype) for dtype in (np.int32, bool, np.float32)),)
        answer = (*answer, np.zeros(shape[0], bool), np.int32(0))
        with shared_faults():
            if is_main_process():
                answer = self._complete(host, samples, sampling, seeds)
        if jax.process_count() > 1:
            answer = multihost_utils.broadcast_one_to_all(answer)
        *table, restarts = answer
        if not (mesh := jax.sharding.get_mesh()).empty:
            table = to_global(table, batch_sharding(mesh))
        tokens, mask, logprobs, stopped = map(jnp.asarray, table)
        greedy = sampling.temperature == 0
        return Rollout(
            prompts,
            tokens,
            mask,
            jnp.zeros_like(logprobs) if greedy else logprobs,
            logprobs,
            stopped,
            self.version,
            metrics={"rollout/vllm_restarts": jnp.float32(restarts)},
        )

    # the server's side; on the main process alone

    @property
    def _block(self) -> bool:
        """Whether what is pushed is block FP8."""
        return self.recipe.quantizes("rollout") and self.settings.quantize == "ours"

    @property
    def _rounds(self) -> bool:
        """Whether it is quantized from the compute dtype, the number that the trainer quantizes."""
        return self._block and self.recipe.weight_source == "compute"

    def _push(
        self, policy: Policy, given: GatheredTensors, scales: KVScales | None, number: int
    ) -> None:
        """Push a policy, of which `given` are the tensors on the host."""
        directory, transport = self._home() / f"weights-{number}", self.settings.transport
        source: Any = getattr(self.tokenizer, "directory", self.tokenizer)
        if self._block and (unaligned := unaligned_linears(policy.config)):
            raise UserError(
                "rollout.engine: vLLM takes block FP8 of sides that 128 divides, and "
                f'{unaligned[0]} has others; set rollout.vllm.quantize = "vllm"'
            )
        tensors, dtype = None, "fp8-block" if self._block else self.dtype.name
        if transport == "nccl":  # named to the server before they are sent, and sent again
            found = converted_tensors(directory, policy.config, given, dtype)
            tensors = {name: x for several in found for name, x in several.items()}
        elif transport == "dlpack":
            merged = merge(policy)
            tensors = device_tensors(cast(merged, self.dtype) if self._rounds else merged, dtype)
        if tensors is not None and self.settings.address:
            directory = None
        elif tensors is not None and self._last is not None:
            directory = self._last.directory
        else:
            if directory.exists():  # of a push that was interrupted
                shutil.rmtree(directory)
            weights = given if tensors is None else None
            write_model(directory, policy.config, weights, source, dtype)
        rows = None
        if scales is not None:
            rows = np.stack([scales.query, scales.key, scales.value], 1).tolist()
        form = {key: x for key, x in config_json(policy.config).items() if key in _FORM}
        self._last = _Push(directory, tensors, rows, f"{self._run}:{number}", form)
        self._serve()
        if self.settings.address or transport == "dlpack":  # nothing is started again
            self._last = self._last._replace(tensors=None)
        for other in self._home().glob("weights-*"):
            if other != directory:
                shutil.rmtree(other, ignore_errors=True)

    def _serve(self) -> Server | InProcess:
        """Have the server serve the last push; start it, or once more, where it has gone."""
        assert self._last is not None
        while True:
            try:
                if self._server is None:
                    self._server = self._start()
                self._server.push(*self._last[:4])
                return self._server
            except ServerGone as error:
                self._restart(error)

    def _start(self) -> Server | InProcess:
        assert self._last is not None
        arguments = server_arguments(self.config, self.recipe)
        if self.settings.transport == "dlpack":
            server = InProcess([*arguments, *self.settings.arguments])
        else:
            # beside the directory, which goes with the engine
            server = Server(self.settings, arguments, self._home().with_suffix(".log"))
        server.start(self._last.directory)
        if isinstance(server, Server) and not server.ours:
            server.check_model(self._last.model)
        return server

    def _restart(self, error: ServerGone) -> None:
        """Let go of a server that is gone; the next use starts another.

        Raises:
            UserError: it is not ours, or this has happened too often.
        """
        server, self._server = self._server, None
        why, ours = str(error), not self.settings.address
        if isinstance(server, Server):
            why = server.why_gone(error)
            server.stop()
        if not ours or self.restarts >= self.settings.restarts:
            self._ready = False
            after = f" after {self.restarts} restarts (rollout.vllm.restarts)" if ours else ""
            raise UserError(f"rollout.vllm: {why}{after}") from None
        self.restarts += 1
        _log.warning("rollout.vllm: %s; starting it again", why)

    def _complete(
        self, prompts: Prompts, samples: int, sampling: Sampling, seeds: UInt32[np.ndarray, " p"]
    ) -> tuple[Any, ...]:
        greedy, before = sampling.temperature == 0, self.restarts
        stops = list(self.config.rollout.stop_strings) if sampling.stop_strings is not None else []
        bodies = [
            _body(
                tokens[:length].tolist(),
                1 if greedy else samples,  # vLLM refuses several greedy ones
                sampling.max_new_tokens,
                sampling.temperature,
                int(seed),
            )
            | {"stop": stops, "stop_token_ids": list(sampling.stop_token_ids)}
            for tokens, length, seed in zip(prompts.tokens, prompts.lengths, seeds, strict=True)
        ]
        answers = self._ask(bodies)
        width, ends = sampling.max_new_tokens, set(sampling.stop_token_ids)
        tokens = np.full((len(bodies) * samples, width), self.tokenizer.pad_token_id or 0, np.int32)
        mask = np.zeros(tokens.shape, bool)
        logprobs, stopped = np.zeros(tokens.shape, np.float32), np.zeros(len(tokens), bool)
        for prompt, answer in enumerate(answers):
            found = read_answer(answer, 1 if greedy else samples, width, ends, stops, self._vocab)
            for sample in range(samples):
                ids, values, ended = found[0 if greedy else sample]
                row = prompt * samples + sample
                tokens[row, : len(ids)], mask[row, : len(ids)] = ids, True
                logprobs[row, : len(ids)], stopped[row] = values, ended
        return tokens, mask, logprobs, stopped, np.int32(self.restarts - before)

    def _ask(self, bodies: list[dict[str, Any]]) -> list[Any]:
        """Answers of the last push's weights, from another server where one is gone."""
        while True:
            try:
                server = self._server or self._serve()
                self._check_version(server)
                answers = server.answers([body | {"model": server.model} for body in bodies])
                self._check_version(server)
                return answers
            except ServerGone as error:
                self._restart(error)

    def _check_version(self, server: Server | InProcess) -> None:
        assert self._last is not None
        if (served := server.version()) != self._last.version:
            self._ready = False
            raise UserError(
                f"rollout.vllm: {server.address} serves weights {served!r}, not this run's "
                f"{self._last.version!r}; another trainer pushes to it, or it was started anew"
            )

    def _check_parity(self, policy: Policy, number: int) -> None:
        """Sample a few tokens and compute their log-probabilities ourselves.

        Raises:
            UserError: they differ by more than rollout.vllm.parity.
        """
        prompt = np.random.default_rng(0).integers(self._vocab, size=_PROBE_PROMPT)
        row = np.zeros((1, _PROBE_PROMPT + _PROBE_SAMPLED), np.int32)
        theirs = np.zeros(_PROBE_SAMPLED, np.float32)
        with shared_faults():
            if is_main_process():
                row, theirs = self._probe(prompt)
        if jax.process_count() > 1:
            row, theirs = multihost_utils.broadcast_one_to_all((row, theirs))
        temperature = jnp.float32(self._probe_temperature)
        ours = to_host(
            _served_logprobs(policy, row, temperature, self.recipe, self.dtype, self.backend)
        )
        difference = float(np.abs(ours[0, _PROBE_PROMPT - 1 :] - theirs).mean())
        quantized = self.recipe.quantizes("rollout") or self.recipe.quantizes_cache
        kind = "fp8" if quantized else self.dtype.name
        limit = PARITY[kind] if self.settings.parity is None else self.settings.parity
        self.metrics = {"rollout/vllm_parity": jnp.float32(difference)}
        if not difference <= limit:
            raise UserError(
                f"rollout.vllm: with the weights of push {number} vLLM's log-probabilities are "
                f"{difference:.2g} from ours in the mean, more than rollout.vllm.parity = "
                f"{limit:g}: it serves other weights, or computes them wrongly"
            )

    def _probe(
        self, prompt: Int[np.ndarray, " s"]
    ) -> tuple[Int[np.ndarray, "1 row"], Float[np.ndarray, " t"]]:
        body = _body(prompt.tolist(), 1, _PROBE_SAMPLED, self._probe_temperature, 0)
        (answer,) = self._ask([body])
        ((ids, values, _),) = read_answer(answer, 1, _PROBE_SAMPLED, set(), [], self._vocab)
        return np.array([[*prompt, *ids]], np.int32), np.array(values, np.float32)

    @property
    def _probe_temperature(self) -> float:
        """The run's, so that a server whose log-probabilities leave it out is found."""
        return self.config.rollout.temperature or 1.0

    def _home(self) -> Path:
        """The directory where weights are handed over; removed with the engine."""
        if self._directory is None:
            parent = self.settings.directory or None
            try:
                if parent:
                    Path(parent).mkdir(parents=True, exist_ok=True)
                self._directory = Path(tempfile.mkdtemp(prefix="fp8rl-vllm-", dir=parent))
            except OSError as error:
                raise UserError(
                    f"rollout.vllm.directory: {parent or tempfile.gettempdir()} cannot be written "
                    f"({error.strerror})"
                ) from None
            weakref.finalize(self, shutil.rmtree, self._directory, ignore_errors=True)
        return self._directory


def server_arguments(config: RunConfig, recipe: Recipe) -> list[str]:
    """Arguments of `vllm serve` behind the model's directory: what a run's keys mean to vLLM."""
    rollout, settings = config.rollout, config.rollout.vllm
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    found = [
        *("--dtype", config.compute_dtype),
        *("--max-model-len", str(max(longest, _PROBE_PROMPT + _PROBE_SAMPLED))),
        *("--logprobs-mode", "processed_logprobs"),
        *("--generation-config", "vllm"),  # no defaults of the model's own
    ]
    if settings.transport != "files":
        found += ["--load-format", "dummy"]  # weights come with the first push
    if settings.transport == "nccl":
        found += ["--weight-transfer-config", '{"backend": "nccl"}']
    if not settings.compiled:
        found.append("--enforce-eager")
    if jax.default_backend() == "cpu":
        # vLLM 0.32 on a CPU ends at a part of a prompt whose request has a seed
        found.append("--no-enable-chunked-prefill")
    if recipe.quantizes("rollout") and settings.quantize == "vllm":
        found += ["--quantization", "fp8_per_block"]
    if recipe.quantizes_cache:
        found += ["--kv-cache-dtype", "fp8"]
    return found


def _body(prompt: list[int], n: int, width: int, temperature: float, seed: int) -> dict[str, Any]:
    """A request to /v1/completions: nothing is left to defaults that change what is sampled."""
    return {
        "prompt": prompt,
        "n": n,
        "max_tokens": width,
        "temperature": temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "seed": seed,
        "logprobs": 0,  # of the sampled token alone
        "return_token_ids": True,
        "ignore_eos": True,  # it would be left out; stop_token_ids are not
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }


def read_answer(
    answer: Any, n: int, width: int, ends: Set[int], stops: Sequence[str], vocab: int
) -> list[tuple[list[int], list[float], bool]]:
    """Read what /v1/completions answers to one prompt.

    Args:
        n: completions that were asked for.
        width: most tokens of each.
        ends: token ids that end a completion, each kept as its last token.
        stops: texts that end one.
        vocab: token ids are below it.

    Returns:
        Of each completion, in the order of samples: tokens, log-probabilities, and whether it ended
        by itself.

    Raises:
        UserError: something is missing, or cannot be: log-probabilities that are not one finite
            number a token, a stop token that was left out, a completion that was cut off.
    """

    def refuse(why: str) -> NoReturn:
        raise UserError(f"rollout.vllm: /v1/completions: {why}")

    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not (isinstance(choices, list) and all(isinstance(x, dict) for x in choices)):
        refuse(f"the answer has no choices: {str(answer)[:100]}")
    by_index = {choice.get("index"): choice for choice in choices}
    if set(by_index) != set(range(n)):
        refuse(f"{n} completions asked for, {len(choices)} answered")
    found = []
    for choice in (by_index[index] for index in range(n)):
        ids, given = choice.get("token_ids"), choice.get("logprobs")
        if not (isinstance(ids, list) and 0 < len(ids) <= width):
            refuse(f"token_ids should be 1 to {width} ids: {str(ids)[:100]}")
        if not all(type(token) is int and 0 <= token < vocab for token in ids):
            refuse(f"token_ids are not those of a vocabulary of {vocab}: {str(ids)[:100]}")
        values = given.get("token_logprobs") if isinstance(given, dict) else None
        if not (
            isinstance(values, list)
            and len(values) == len(ids)
            and all(type(value) in (int, float) and math.isfinite(value) for value in values)
        ):
            refuse(f"{len(ids)} tokens, and log-probabilities {str(values)[:100]}")
        reason, by = choice.get("finish_reason"), choice.get("stop_reason")
        if reason == "stop":
            if not (by in stops or (by in ends and ids[-1] == by)):
                refuse(f"ended by {by!r}, and the last token is {ids[-1]}: one was left out")
        elif reason != "length" or len(ids) != width:
            refuse(f"finish_reason {reason!r} after {len(ids)} of {width} tokens")
        found.append((ids, [float(value) for value in values], reason == "stop"))
    return found


@jax.jit
def _seeds(key: Key[Array, ""], ids: Int[Array, " p"]) -> UInt32[Array, " p"]:
    """A seed for each prompt, of (key, prompt id) alone."""
    return jax.vmap(lambda i: jax.random.bits(jax.random.fold_in(key, i)))(ids)


@partial(jax.jit, static_argnames=("recipe", "dtype", "backend"))
def _served_logprobs(
    policy: Policy,
    tokens: Int[Array, "b t"],
    temperature: Float[Array, ""],
    recipe: Recipe,
    dtype: jnp.dtype,
    backend: Backend,
) -> Float[Array, "b t-1"]:
    """Log-probabilities with the linears that are served, over keys and values that are not
    quantized."""
    formats = TrainerFormats(recipe.rollout.weight, recipe.rollout.activation)
    served = trainer_policy(policy, replace(recipe, trainer=formats), dtype, backend)
    segments = jnp.ones(tokens.shape, jnp.int32)
    hidden = forward(served, tokens, segment_ids=segments, keep_cache=False).hidden
    return token_logprobs(hidden[:, :-1], served, tokens[:, 1:], temperature)[0]
