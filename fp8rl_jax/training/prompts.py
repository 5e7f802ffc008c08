"""Between text and tokens: prompts and answers in, completions out."""

from __future__ import annotations

import operator
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from fp8rl_jax.config.schema import show
from fp8rl_jax.errors import UserError
from fp8rl_jax.parallel import to_host
from fp8rl_jax.rollout.engine import Prompts, Rollout, pad_prompts
from fp8rl_jax.tasks.conversation import (
    Conversation,
    MessageFault,
    continuation,
    prompt_tokens,
    read_messages,
)
from fp8rl_jax.tasks.dataset import Example
from fp8rl_jax.tasks.episodes import Episode
from fp8rl_jax.tokenizers.tokenizer import Tokenizer, end_tokens

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]] | Example
"""Text, token ids, the messages of a conversation, or a problem of a data set."""
_MESSAGES = '[{"role": "user", "content": "..."}]'


def listed(given: Any, what: str = "prompts") -> list[Any]:
    """Give the prompts, or the completions, of a call as a list.

    Raises:
        UserError: there are none, or it is one instead of several.
    """
    wanted = f"{what}: expected a list of at least one {what.removesuffix('s')}"
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise UserError(f"{wanted}, got {show(given)}")
    several = list(given)
    if not several:
        raise UserError(f"{wanted}, got none")
    if all(isinstance(prompt, Mapping) and "role" in prompt for prompt in several):
        raise UserError(
            f"prompts: these are messages of one conversation; give a list of such: [{_MESSAGES}]"
        )
    return several


class PromptEncoder:
    """Encodes a task's prompts for one model.

    Args:
        tokenizer: its chat template is used where it has one.
        system_prompt: system message of chat models.
        width: longest prompt in tokens, which a whole conversation up to its last answer has to
            fit; batches are padded to it.
        ends: tokens that end a completion, beside the tokenizer's own.
        vocab_size: of the model, which may have more tokens than the tokenizer; by default that of
            the tokenizer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        system_prompt: str,
        width: int,
        ends: Sequence[int] = (),
        vocab_size: int | None = None,
    ):
        self.tokenizer, self.system_prompt, self.width = tokenizer, system_prompt, width
        self.vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
        self.ends = end_tokens(tokenizer, ends)

    @property
    def pad(self) -> int:
        """Token id that fills rows up."""
        return self.tokenizer.pad_token_id or 0

    @property
    def end(self) -> int:
        """Token that ends an answer to learn from.

        Raises:
            UserError: none is known.
        """
        if not self.ends:
            raise UserError(
                "rollout.stop_token_ids: neither the tokenizer nor the model names an end token, "
                "and an answer to learn from ends with one; give its id"
            )
        return self.ends[0]

    def tokens(self, example: Example) -> list[int]:
        """Encode one prompt, chat template or begin-of-sequence included.

        Raises:
            UserError: a prompt that the template or the tokenizer refuses, or of which nothing is
                left, and where it came from.
        """
        with _naming(example):
            tokens = prompt_tokens(self.tokenizer, example.prompt, self.system_prompt)
            if not tokens:
                raise UserError("the prompt gives no tokens")
        return tokens

    def of_any(self, i: int, prompt: Prompt) -> list[int]:
        """Encode prompt `i` of those that a user gave; token ids are taken as they are.

        Raises:
            UserError: as `tokens`; messages that are no conversation, ids outside of the
                vocabulary.
        """
        if isinstance(prompt, Example):
            return self.tokens(prompt)
        source = f"prompts: prompt {i}"
        if isinstance(prompt, str):
            return self.tokens(Example(i, prompt, "", "", {"source": source}))
        if isinstance(prompt, Mapping) or not isinstance(prompt, Iterable):
            raise UserError(
                f"{source} is {show(prompt)}; give text, token ids or messages, {_MESSAGES}"
            )
        if not any(isinstance(part, Mapping) for part in prompt):
            return self._ids(source, prompt)
        try:
            conversation = Conversation(read_messages(prompt))
        except MessageFault as fault:
            raise UserError(f"{source} {fault}") from None
        return self.tokens(Example(i, conversation, "", "", {"source": source}))

    def answer(self, i: int, answer: str | Sequence[int], end: bool) -> list[int]:
        """Encode completion `i` of those that a user gave; `end`: a text gets its end token.

        Raises:
            UserError: it is empty, or has ids outside of the vocabulary.
        """
        if not isinstance(answer, str):
            ids = self._ids(f"completion {i}", answer)
        else:
            ids = self.tokenizer.encode(answer, add_special_tokens=False)
            ids += [self.end] if end else []
        if not ids:
            raise UserError(f"completion {i} has no tokens")
        return ids

    def answers(
        self, answers: Sequence[str | Sequence[int]], rows: int, width: int
    ) -> tuple[Int[np.ndarray, "b t"], Bool[np.ndarray, "b t"]]:
        """Right-pad completions, with empty rows behind; gives tokens and their mask.

        Raises:
            UserError: as `answer`, or one is longer than `width`.
        """
        tokens, mask = np.zeros((rows, width), np.int32), np.zeros((rows, width), bool)
        for row, answer in enumerate(answers):
            ids = self.answer(row, answer, end=True)
            if len(ids) > width:
                raise UserError(
                    f"rollout.max_new_tokens = {width}: answer {row} has {len(ids)} tokens; "
                    "raise it"
                )
            tokens[row, : len(ids)], mask[row, : len(ids)] = ids, True
        return tokens, mask

    def _ids(self, what: str, tokens: Sequence[Any]) -> list[int]:
        size = self.vocab_size
        try:
            ids = [operator.index(token) for token in tokens]
        except TypeError:
            raise UserError(f"{what} is {show(tokens)}, which are no token ids") from None
        if not all(0 <= token < size for token in ids):
            raise UserError(f"{what} has token ids outside of the vocabulary, 0 to {size - 1}")
        return ids

    def next_turn(self, episode: Episode) -> list[int]:
        """Encode the prompt of an episode's next turn: the whole conversation so far.

        A chat template writes the conversation; `join_turns` sees whether it kept what was sampled.
        Without one the prompt is the last turn's, the tokens that were sampled, and the
        observation's text (`continuation`).
        """
        if not episode.turns or self.tokenizer.has_chat_template:
            return self.tokens(episode.next_example)
        last, (_, observation) = episode.turns[-1], episode.history[-1]
        said = continuation(episode.example.prompt, observation)
        return [*last.prompt, *last.tokens, *self.tokenizer.encode(said, add_special_tokens=False)]

    def target(self, example: Example) -> list[int]:
        """Encode the supervised answer, its end token included.

        Raises:
            UserError: no end token is known, or the tokenizer refuses the answer.
        """
        with _naming(example):
            tokens = self.tokenizer.encode(example.target, add_special_tokens=False)
        return [*tokens, self.end]

    def fits(self, example: Example) -> bool:
        return len(self.tokens(example)) <= self.width

    def batch(self, examples: Sequence[Example]) -> Prompts:
        """Right-pad prompts; every example must fit."""
        return pad_prompts(
            [self.tokens(e) for e in examples], [e.index for e in examples], self.width, self.pad
        )

    def texts(self, rollout: Rollout) -> list[str]:
        """Decode completions, special tokens left out."""
        tokens, mask = to_host((rollout.tokens, rollout.mask))
        return [
            self.tokenizer.decode(row[kept].tolist())
            for row, kept in zip(np.asarray(tokens), np.asarray(mask), strict=True)
        ]


@contextmanager
def _naming(example: Example) -> Generator[None]:
    """Say of which problem a fault is."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{example.where}: {error}") from None
