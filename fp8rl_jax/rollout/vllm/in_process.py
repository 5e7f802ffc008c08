"""vLLM in the trainer's own process: weights go over by dlpack, with no file, and no copy before
the one into vLLM's parameters.

It has the calls of `server.Server`, and answers in the form of its routes. What hangs here hangs
the trainer, and what ends it ends the run: nothing is started again.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, redirect_stderr
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

from jaxtyping import Array

from fp8rl_jax.errors import UserError
from fp8rl_jax.rollout.vllm.server import EXTENSION, MODEL, PLUGIN

_SETTINGS = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # it would bind JAX's threads, too
}
"""Where the environment does not say otherwise."""
_ABOUT_HTTP = ("model", "prompt", "return_token_ids")
"""Fields of a request to /v1/completions that `SamplingParams` has not."""


class InProcess:
    """vLLM's `LLM`.

    Args:
        arguments: of `vllm serve` behind the model's directory.
    """

    address, model = "vLLM in this process", MODEL

    def __init__(self, arguments: Sequence[str]):
        self._arguments = list(arguments)
        self._llm: Any = None

    def start(self, directory: Path | None) -> None:
        """Make an `LLM` of the model of a directory.

        Raises:
            UserError: vLLM cannot be imported, or takes the model or an argument not.
        """
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        if str(PLUGIN) not in sys.path:
            sys.path.append(str(PLUGIN))
        try:
            vllm: Any = import_module("vllm")
            engine = import_module("vllm.engine.arg_utils").EngineArgs
            parsers = import_module("vllm.utils.argparse_utils")
        except ImportError as error:
            raise UserError(
                'rollout.vllm.transport: "dlpack" wants vLLM in the Python of the trainer, which '
                f'has none ({error}); else set "files" and rollout.vllm.python'
            ) from None
        words = ["--model", str(directory), "--worker-extension-cls", EXTENSION, *self._arguments]
        with _in_one_line("vLLM does not start"):
            parser = engine.add_cli_args(parsers.FlexibleArgumentParser())
            said = StringIO()
            try:
                with redirect_stderr(said):
                    given = parser.parse_args(words)
            except SystemExit:
                why = said.getvalue().strip().rpartition("\n")[2]
                raise UserError(
                    f"rollout.vllm.arguments: vLLM's LLM does not take them: {why}"
                ) from None
            self._llm = vllm.LLM.from_engine_args(engine.from_cli_args(given))

    def stop(self) -> None:
        """Let go of vLLM and its memory."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
        self._llm = None
        gc.collect()  # its parts refer to each other

    def push(
        self,
        path: Path | None,
        tensors: Iterable[tuple[str, Array]],
        scales: list[list[float]] | None,
        version: str,
    ) -> None:
        """Have weights, and KV scales, served as `version`; as of `Server.push`.

        Args:
            path: directory of a model like them, of which it is started anew if it was let go of.
            tensors: the weights under Hugging Face's names, taken one after the other.

        Raises:
            UserError: it refuses them, or does not start.
        """
        if self._llm is None:
            self.start(path)
        torch = import_module("torch")
        weights = ((name, torch.from_dlpack(x.block_until_ready())) for name, x in tensors)
        about = {"path": None, "scales": scales, "weights": weights}
        with self._let_go_on_error(), _in_one_line("a push"):
            self._llm.update_weight_version(f"loading {version}")
            self._llm.collective_rpc("fp8rl_push", kwargs=about)
            self._llm.reset_prefix_cache()
            self._llm.update_weight_version(version)

    def version(self) -> str:
        """Ask which weights are served.

        Raises:
            UserError: none, since the last batch was interrupted.
        """
        if self._llm is None:
            raise UserError("rollout.vllm: the last batch was interrupted; sync once more")
        return str(self._llm.get_weight_version())

    def answers(self, bodies: Sequence[dict[str, Any]]) -> list[Any]:
        """Complete prompts, all at once; answers in the order of `bodies`, as /v1/completions has
        both.

        Raises:
            UserError: vLLM refuses one, or fails.
        """
        vllm: Any = import_module("vllm")
        with self._let_go_on_error(), _in_one_line("a batch"):
            outputs = self._llm.generate(
                [{"prompt_token_ids": body["prompt"]} for body in bodies],
                [
                    vllm.SamplingParams(**{k: x for k, x in body.items() if k not in _ABOUT_HTTP})
                    for body in bodies
                ],
                use_tqdm=False,
            )
        return [{"choices": list(map(_choice, output.outputs))} for output in outputs]

    @contextmanager
    def _let_go_on_error(self) -> Generator[None]:
        """Stop after what was interrupted: requests would be left, or half a set of weights."""
        try:
            yield
        except BaseException:
            self.stop()
            raise


def _choice(output: Any) -> dict[str, Any]:
    """A completion in the form of /v1/completions."""
    ids = list(output.token_ids)
    steps = output.logprobs
    values = None
    if steps is not None:
        values = [step[token].logprob for step, token in zip(steps, ids, strict=True)]
    return {
        "index": output.index,
        "token_ids": ids,
        "logprobs": {"token_logprobs": values},
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }


@contextmanager
def _in_one_line(what: str) -> Generator[None]:
    """Say of whatever vLLM raises what it is about."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:400]
        raise UserError(f"rollout.vllm: {what}: {type(error).__name__}: {said}") from error
