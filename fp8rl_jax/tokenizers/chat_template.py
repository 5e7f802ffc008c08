"""Chat templates: the Jinja program, shipped with a model, that turns messages into the text it was
trained on.

A template is code from whoever published the model, so it runs in Jinja's sandbox, in the
environment that transformers gives it: whitespace control, loop controls, `raise_exception`,
`tojson` and `strftime_now`.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox

from fp8rl_jax.errors import UserError


class ChatTemplate:
    """A compiled template and the special tokens that it may name, such as `bos_token`."""

    def __init__(self, text: str, source: Path, special_tokens: dict[str, str]):
        """Compile `text`; `source` is the file it came from, for messages.

        Raises:
            UserError: the template is not valid Jinja.
        """
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        self._source = source
        self._special_tokens = special_tokens
        try:
            text.encode()  # JSON may spell half of a surrogate pair, which no tokenizer takes
            self._template = environment.from_string(
                text, {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
            )
        except (jinja2.TemplateError, SyntaxError, ValueError, RecursionError) as error:
            raise UserError(f"{source}: the chat template is not valid Jinja ({error})") from None

    @classmethod
    def from_directory(
        cls, directory: Path, config: dict[str, Any], special_tokens: dict[str, str]
    ) -> ChatTemplate | None:
        """Find the template in chat_template.jinja, or in `config`, of tokenizer_config.json.

        Raises:
            UserError: the template is unreadable or not valid Jinja.
        """
        file = directory / "chat_template.jinja"
        if file.is_file():
            try:
                return cls(file.read_text(encoding="utf-8"), file, special_tokens)
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"{file}: cannot be read ({error})") from None
        source = directory / "tokenizer_config.json"
        template = config.get("chat_template")
        if isinstance(template, list):  # several, by name
            named = [
                entry.get("template")
                for entry in template
                if isinstance(entry, dict) and entry.get("name") == "default"
            ]
            template = named[-1] if named else None
            if template is None:
                raise UserError(f"{source}: chat_template is a list without one named 'default'")
        if template is None:
            return None
        if not isinstance(template, str):
            raise UserError(
                f"{source}: chat_template must be a string, got {type(template).__name__}"
            )
        return cls(template, source, special_tokens)

    def render(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool) -> str:
        """Write a conversation as text.

        Args:
            messages: objects with a "role", and the "content" that the template expects of that
                role.
            add_generation_prompt: end with the opening of the assistant's turn.

        Raises:
            UserError: a message without a role, or one that the template refuses or fails on.
        """
        for index, message in enumerate(messages):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise UserError(
                    f"messages[{index}] must be an object with a role and content, got {message!r}"
                )
        try:
            return self._template.render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except Exception as error:  # the template is a program of its own, which may raise anything
            raise UserError(
                f"{self._source}: the chat template fails on these messages ({error})"
            ) from None


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any
) -> str:
    """Jinja's own filter escapes HTML, which no prompt wants."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
