"""Prompts that are conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_ROLES = ("system", "user", "assistant", "tool")


class Conversation(str):
    """A prompt of several messages.

    As text it is the transcript, which models without a chat template see:

    >>> Conversation([{"role": "user", "content": "2 + 2?"}])
    'user: 2 + 2?\\nassistant:'
    """

    messages: tuple[dict[str, str], ...]
    """Messages for a chat template, each with "role" and "content"."""

    def __new__(cls, messages: Sequence[Mapping[str, str]]) -> Conversation:
        conversation = super().__new__(cls, f"{transcript(messages)}\nassistant:")
        conversation.messages = tuple(dict(message) for message in messages)
        return conversation

    def __reduce__(self) -> tuple[Any, ...]:
        return Conversation, (self.messages,)


def transcript(messages: Sequence[Mapping[str, str]]) -> str:
    """Write one line a message, `role: content`."""
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


def continuation(prompt: str, observation: Sequence[Mapping[str, str]]) -> str:
    """Write what a model without a chat template reads behind its answer to `prompt`.

    The transcript goes on; behind a prompt of plain text the observation's text follows as it is.
    """
    if isinstance(prompt, Conversation):
        return f"\n{transcript(observation)}\nassistant:"
    return "".join(message["content"] for message in observation)


def chat_messages(prompt: str, system_prompt: str = "") -> list[dict[str, str]]:
    """Return `prompt` as the messages that a chat template takes.

    A conversation's own system message stands before the task's.
    """
    messages = (
        prompt.messages
        if isinstance(prompt, Conversation)
        else ({"role": "user", "content": prompt},)
    )
    if system_prompt and messages[0]["role"] != "system":
        messages = ({"role": "system", "content": system_prompt}, *messages)
    return [dict(message) for message in messages]


def message_faults(messages: Any, last: Sequence[str] = ("user", "tool")) -> str:
    """Say why `messages` is no conversation that a model can answer; empty where it is one."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        return "must be a list of messages"
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            return f"message {index} must have role and content, and nothing else"
        if message["role"] not in _ROLES:
            roles = ", ".join(_ROLES)
            return f"message {index} has role {message['role']!r}, which is none of {roles}"
        if not isinstance(message["content"], str):
            return f"message {index} must have text as its content"
        if message["role"] == "system" and index:
            return f"message {index} is a system message; only the first may be one"
    if messages[-1]["role"] not in last:
        return f"the last message is the {messages[-1]['role']}'s; there is nothing to answer"
    return ""
