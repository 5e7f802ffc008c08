"""Prompts that are conversations.

A message is what chat templates take: a role, a content, and of the further fields that OpenAI,
TRL and verl write those in `_FURTHER`. A null is no field: Arrow, and so Parquet and Hugging Face's
datasets, give every message the fields that any has, and fill them with null.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fp8rl_jax.tokenizers.tokenizer import Tokenizer

ROLES = ("system", "user", "assistant", "tool")
# beside role and content -> who may have it
_FURTHER = {
    "name": ("system", "user", "assistant", "tool"),
    "tool_call_id": ("tool",),
    "tool_calls": ("assistant",),
    "reasoning_content": ("assistant",),
}

Message = dict[str, Any]
"""role, content (text; None beside tool_calls without one), further fields."""


class Conversation(str):
    """A prompt of several messages.

    As text it is the transcript, which models without a chat template see:

    >>> Conversation([{"role": "user", "content": "2 + 2?"}])
    'user: 2 + 2?\\nassistant:'
    """

    messages: tuple[Message, ...]
    """Messages for a chat template."""

    def __new__(cls, messages: Sequence[Mapping[str, Any]]) -> Conversation:
        conversation = super().__new__(cls, f"{transcript(messages)}\nassistant:")
        conversation.messages = tuple(dict(message) for message in messages)
        return conversation

    def __reduce__(self) -> tuple[Any, ...]:
        return Conversation, (self.messages,)


def transcript(messages: Sequence[Mapping[str, Any]]) -> str:
    """Write one line a message, `role: content`, and what else it has as JSON behind."""
    return "\n".join(_line(message) for message in messages)


def _line(message: Mapping[str, Any]) -> str:
    further = {key: message[key] for key in _FURTHER if key in message}
    parts = [message["content"]] if message["content"] is not None else []
    parts += [json.dumps(further, ensure_ascii=False)] if further else []
    return f"{message['role']}: {' '.join(parts)}"


def continuation(prompt: str, observation: Sequence[Mapping[str, Any]]) -> str:
    """Write what a model without a chat template reads behind its answer to `prompt`.

    The transcript goes on; behind a prompt of plain text the observation's text follows as it is.
    """
    if isinstance(prompt, Conversation):
        return f"\n{transcript(observation)}\nassistant:"
    return "".join(message["content"] for message in observation)


def chat_messages(prompt: str, system_prompt: str = "") -> list[Message]:
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


def prompt_tokens(tokenizer: Tokenizer, prompt: str, system_prompt: str = "") -> list[int]:
    """Encode a prompt, chat template or begin-of-sequence included: in training, and wherever a
    model is asked.

    Args:
        tokenizer: its chat template is used where it has one.
        prompt: text, or a `Conversation`.
        system_prompt: system message of chat models.
    """
    if tokenizer.has_chat_template:
        return tokenizer.encode_chat(chat_messages(prompt, system_prompt))
    return tokenizer.encode(prompt)


class MessageFault(ValueError):
    """Why messages are no conversation that a model can answer."""


def read_messages(messages: Any, last: Sequence[str] = ("user", "tool")) -> tuple[Message, ...]:
    """Read a conversation.

    Args:
        messages: objects with role and content, and the further fields of their role. A null is no
            field; content may be a list of one part of text.
        last: the roles that its last message may have.

    Raises:
        MessageFault: with the message's number.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise MessageFault("must be a list of messages")
    read = tuple(_read(message, f"message {index}") for index, message in enumerate(messages))
    for index, message in enumerate(read):
        if message["role"] == "system" and index:
            raise MessageFault(f"message {index} is a system message; only the first may be one")
    if read[-1]["role"] not in last:
        raise MessageFault(
            f"the last message is the {read[-1]['role']}'s; there is nothing to answer"
        )
    return read


def _read(message: Any, which: str) -> Message:
    if not isinstance(message, Mapping):
        raise MessageFault(f"{which} must have role and content")
    fields = {key: value for key, value in message.items() if value is not None}
    role, content = fields.pop("role", None), fields.pop("content", None)
    if not (calls := fields.get("tool_calls", ())):
        fields.pop("tool_calls", None)
    if role is None or (content is None and not calls):
        raise MessageFault(f"{which} must have role and content")
    if role not in ROLES:
        raise MessageFault(f"{which} has role {role!r}, which is none of {', '.join(ROLES)}")
    if strange := [key for key in fields if role not in _FURTHER.get(key, ())]:
        raise MessageFault(
            f"{which} has {strange[0]!r}, which is no field of the {role}'s messages (role, "
            f"content, {', '.join(key for key, roles in _FURTHER.items() if role in roles)})"
        )
    for key, value in fields.items():
        if key != "tool_calls" and not isinstance(value, str):
            raise MessageFault(f"{which} must have text as its {key}")
    if calls:
        fields["tool_calls"] = _calls(calls, which)
    text = None if content is None else _text(content, which)
    return {"role": role, "content": text, **fields}


def _text(content: Any, which: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise MessageFault(f"{which} must have text as its content")
    parts = [_without_nulls(part) for part in content]
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else part
        if kind != "text" or not isinstance(part.get("text"), str):
            raise MessageFault(
                f"{which} has a content part of type {kind!r:.40}; only text is read"
            )
    if len(parts) != 1:
        raise MessageFault(
            f"{which} has {len(parts)} content parts; write them as one text, since chat templates "
            "differ in what stands between them"
        )
    return parts[0]["text"]


def _calls(calls: Any, which: str) -> list[Any]:
    calls = _without_nulls(calls)
    if not isinstance(calls, list):
        raise MessageFault(f"{which} must have a list as its tool_calls")
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise MessageFault(
                f'{which} has a tool call that is not {{"function": {{"name", "arguments"}}}}'
            )
    return calls


def _without_nulls(value: Any) -> Any:
    """A call's arguments have nulls from Arrow, too: where calls differ in what they take."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_without_nulls(item) for item in value]
    return value
