"""Between text and tokens: prompts in, completions out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fp8rl_jax.parallel import to_host
from fp8rl_jax.rollout.engine import Prompts, Rollout, pad_prompts
from fp8rl_jax.tasks.conversation import chat_messages, continuation
from fp8rl_jax.tasks.dataset import Example
from fp8rl_jax.tasks.episodes import Episode
from fp8rl_jax.tokenizers.tokenizer import Tokenizer


class PromptEncoder:
    """Encodes a task's prompts for one model.

    Args:
        tokenizer: its chat template is used where it has one.
        system_prompt: system message of chat models.
        width: longest prompt in tokens, which a whole conversation up to its last answer has to
            fit; batches are padded to it.
    """

    def __init__(self, tokenizer: Tokenizer, system_prompt: str, width: int):
        self.tokenizer, self.system_prompt, self.width = tokenizer, system_prompt, width

    @property
    def pad(self) -> int:
        """Token id that fills rows up."""
        return self.tokenizer.pad_token_id or 0

    def tokens(self, example: Example) -> list[int]:
        """Encode one prompt, chat template or begin-of-sequence included."""
        if self.tokenizer.has_chat_template:
            return self.tokenizer.encode_chat(chat_messages(example.prompt, self.system_prompt))
        return self.tokenizer.encode(example.prompt)

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
        """Encode the supervised answer, its end-of-sequence included."""
        return self.tokenizer.encode(example.target, add_special_tokens=False) + [
            self.tokenizer.eos_token_ids[0]
        ]

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
