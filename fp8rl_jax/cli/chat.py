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

import sys
from collections.abc import Callable

import jax
import numpy as np

from fp8rl_jax.cli.generate import GenerateArguments, OpenModel
from fp8rl_jax.errors import UserError
from fp8rl_jax.rollout.constraints import TextStream
from fp8rl_jax.rollout.engine import LocalEngine
from fp8rl_jax.rollout.offline import batches, calibrate
from fp8rl_jax.rollout.sampling import Sampling

# a model may sample anything, and control characters would move the cursor or worse
_SHOWN = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"}


def talk(arguments: GenerateArguments, model: OpenModel, sampling: Sampling) -> None:
    """Reads lines from the terminal and answers them, until /exit or the end of the input.

    Raises:
        UserError: the model has no tokenizer, its tokens' bytes are not known, or its weights
            cannot be served.
    """
    if model.tokenizer is None:
        raise UserError("--interactive: needs a tokenizer, and the model has none")
    sys.stdout.reconfigure(errors="replace")
    chat = Chat(model, sampling, arguments.stop, arguments.compute_dtype, arguments.seed, _write)
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
        compute_dtype: of what the recipe does not quantize.
        seed: of the sampling.
        write: takes each piece of an answer as soon as it is known, and a line end behind the last.
    """

    def __init__(
        self,
        model: OpenModel,
        sampling: Sampling,
        stops: tuple[str, ...],
        compute_dtype: str,
        seed: int,
        write: Callable,
    ):
        self._model, self._sampling, self._stops, self._write = model, sampling, stops, write
        self._token_bytes = model.tokenizer.token_bytes()
        self._policy = model.load()
        self._engine = LocalEngine(model.recipe, compute_dtype, unroll=False)
        self._key = jax.random.key(seed)
        self._turn = 0
        self.messages: list[dict[str, str]] = []

    def begin(self) -> None:
        """Forgets the conversation."""
        self.messages = []

    def answer(self, text: str) -> list[int]:
        """Samples and writes the answer to `text`, and keeps both.

        A quantized cache is calibrated on the first turn's prompt.

        Returns:
            The tokens sampled, those of a completion that Ctrl-C ended included.

        Raises:
            UserError: the template refuses the text, or the conversation is too long; it then stays
                as it was.
        """
        tokens = self._encode(text)
        (prompts,) = batches([tokens], 1)
        prompts = prompts._replace(ids=np.asarray([self._turn], np.int32))
        if self._engine.policy is None:
            calibrate(self._engine, self._policy, [prompts])
            self._policy = None
        sampled, said, stream = [], [], TextStream(self._token_bytes, self._stops)
        try:
            for out in self._engine.stream(prompts, self._sampling, self._key):
                new = out.tokens[0][out.mask[0]].tolist()[len(sampled) :]
                sampled += new
                piece = stream.feed(new)
                if not any(said) and not self._model.tokenizer.decode(sampled).startswith(" "):
                    # SentencePiece takes the first space off a text
                    piece = piece.removeprefix(" ")
                said.append(piece)
                self._write(said[-1].translate(_SHOWN))
        except KeyboardInterrupt:
            pass
        said.append(stream.finish())
        self._write(said[-1].translate(_SHOWN) + "\n")
        self.messages += [
            {"role": "user", "content": text},
            {"role": "assistant", "content": "".join(said)},
        ]
        self._turn += 1
        return sampled

    def _encode(self, text: str) -> list[int]:
        tokenizer = self._model.tokenizer
        if tokenizer.has_chat_template:
            tokens = tokenizer.encode_chat([*self.messages, {"role": "user", "content": text}])
        else:
            tokens = tokenizer.encode(text)
        room = self._model.config.max_position_embeddings - self._sampling.max_new_tokens
        if len(tokens) > room:
            raise UserError(
                f"{len(tokens)} tokens and {self._sampling.max_new_tokens} new ones are more "
                "than the model's "
                f"{self._model.config.max_position_embeddings} positions; /new begins another "
                "conversation"
            )
        return tokens


def _write(text: str) -> None:
    print(text, end="", flush=True)
