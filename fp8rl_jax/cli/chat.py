"""`fp8rl generate --interactive`: a conversation in the terminal, each token shown as soon as it is
sampled.

    Ctrl-C       ends the completion that is being written; what is there stays in the conversation
    /new         begins another conversation
    /exit        leaves, and so does Ctrl-D

A model with a chat template sees the whole conversation at every turn; one without sees each line
alone, as a text to go on with. Turn t draws what `fp8rl generate` draws for line t of a file with
the same prompts and --seed.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from fp8rl_jax.cli.open_model import OpenModel
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.policy import Policy
from fp8rl_jax.rollout.constraints import TextStream
from fp8rl_jax.rollout.engine import LocalEngine
from fp8rl_jax.rollout.offline import batches, calibrate
from fp8rl_jax.rollout.sampling import Sampling
from fp8rl_jax.tasks.conversation import Conversation, prompt_tokens
from fp8rl_jax.tasks.dataset import render_prompt

# a model may sample anything, and control characters would move the cursor or worse
_PRINTABLE = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"}


def talk(model: OpenModel, sampling: Sampling, stops: Sequence[str], seed: int) -> None:
    """Read lines from the terminal and answer them, until /exit or the end of the input.

    Raises:
        UserError: the model has no tokenizer, its tokens' bytes are not known, or its weights
            cannot be served.
    """
    if model.tokenizer is None:
        raise UserError("--interactive: needs a tokenizer, and the model has none")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    chat = Chat(model, sampling, stops, seed, _write)
    while True:
        try:
            line = input("> ").strip()
        except KeyboardInterrupt:
            _write("\n")
            continue
        except EOFError:
            return _write("\n")
        if line == "/exit":
            return None
        if line == "/new":
            chat.begin()
        elif line:
            try:
                chat.answer(line)
            except UserError as error:
                _write(f"fp8rl: {error}\n")


class Chat:
    """A conversation with a model.

    Args:
        model: its weights are read here.
        sampling: how a completion is drawn.
        stops: the texts of `sampling.stop_strings`; they are neither shown nor kept.
        seed: of the sampling.
        write: takes each piece of an answer as soon as it is known, and a line end behind the last.
    """

    def __init__(
        self,
        model: OpenModel,
        sampling: Sampling,
        stops: Sequence[str],
        seed: int,
        write: Callable[[str], None],
    ):
        assert model.tokenizer is not None
        self._tokenizer, self._positions = model.tokenizer, model.config.max_position_embeddings
        self._task = model.task
        self._sampling, self._stops, self._write = sampling, stops, write
        self._token_bytes = model.tokenizer.token_bytes()
        self._policy: Policy | None = model.load()
        self._engine = LocalEngine(model.recipe, jnp.dtype(model.dtype), unroll=False)
        self._key = jax.random.key(seed)
        self._turn = 0
        self.messages: list[dict[str, str]] = []

    def begin(self) -> None:
        """Forget the conversation."""
        self.messages = []

    def answer(self, text: str) -> list[int]:
        """Sample and write the answer to `text`, and keep both.

        A quantized cache is calibrated on the first turn's prompt.

        Returns:
            The tokens sampled, those of a completion that Ctrl-C ended included.

        Raises:
            UserError: the template refuses the text, or the conversation is too long; it then stays
                as it was.
        """
        tokens = self._encode(text)
        (prompts,) = batches([tokens], 1)
        prompts = prompts._replace(ids=jnp.asarray([self._turn], jnp.int32))
        if self._policy is not None:
            calibrate(self._engine, self._policy, [prompts])
            self._policy = None  # the engine has its own form of it
        sampled, pieces, stream = [], [], TextStream(self._token_bytes, self._stops)
        try:
            for out in self._engine.stream(prompts, self._sampling, self._key):
                new = out.tokens[0][out.mask[0]].tolist()[len(sampled) :]
                sampled += new
                piece = stream.feed(new)
                if not any(pieces) and not self._tokenizer.decode(sampled).startswith(" "):
                    # SentencePiece takes the first space off a text
                    piece = piece.removeprefix(" ")
                pieces.append(piece)
                self._write(piece.translate(_PRINTABLE))
        except KeyboardInterrupt:
            pass
        pieces.append(stream.finish())
        self._write(pieces[-1].translate(_PRINTABLE) + "\n")
        self.messages += [
            {"role": "user", "content": text},
            {"role": "assistant", "content": "".join(pieces)},
        ]
        self._turn += 1
        return sampled

    def _encode(self, text: str) -> list[int]:
        prompt = text
        if self._tokenizer.has_chat_template:
            prompt = Conversation([*self.messages, {"role": "user", "content": text}])
        entry = {"question": prompt, "answer": None, "metadata": {}}
        prompt = render_prompt(self._task.prompt_template, entry)
        tokens = prompt_tokens(self._tokenizer, prompt, self._task.system_prompt)
        if len(tokens) > self._positions - self._sampling.max_new_tokens:
            raise UserError(
                f"{len(tokens)} tokens and {self._sampling.max_new_tokens} new ones are more "
                f"than the model's {self._positions} positions; /new begins another conversation"
            )
        return tokens


def _write(text: str) -> None:
    print(text, end="", flush=True)
