"""Chat templates: the Jinja program, shipped with a model, that turns messages into the text it was
trained on.

A template is code from whoever published the model, so it runs in Jinja's sandbox, in the
environment that transformers 5 gives it (`transformers.utils.chat_template_utils`): whitespace
control, loop controls, `{% generation %}`, `raise_exception`, `tojson` and `strftime_now`.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils
from jinja2.ext import Extension

from fp8rl_jax.errors import UserError
from fp8rl_jax.json_fields import read_json

_FILE, _FOLDER = "chat_template.jinja", "additional_chat_templates"
_OF_PROCESSOR = "chat_template.json"
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A compiled template and the special tokens that it may name, such as `bos_token`."""

    def __init__(self, text: str, source: Path, special_tokens: Mapping[str, str]):
        """Compile `text`; `source` is the file it came from, for messages.

        Raises:
            UserError: the template is not valid Jinja.
        """
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _tojson
        names = {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "namespace": _Namespace,
        }
        self._source, self._special_tokens = source, special_tokens
        try:
            text.encode()  # JSON may spell half of a surrogate pair, which no tokenizer takes
            self._template = environment.from_string(text, names)
        except (jinja2.TemplateError, SyntaxError, ValueError, RecursionError) as error:
            raise UserError(f"{source}: the chat template is not valid Jinja ({error})") from None

    @classmethod
    def from_directory(
        cls, directory: Path, config: dict[str, Any], special_tokens: Mapping[str, str]
    ) -> ChatTemplate | None:
        """Find the template.

        chat_template.jinja goes before tokenizer_config.json, and that before chat_template.json,
        where processors have it. Of several with names it is the one named "default".

        Args:
            directory: where the files lie.
            config: what tokenizer_config.json holds.
            special_tokens: text of each, by name.

        Raises:
            UserError: a file that cannot be read, a value that is no template, several without a
                default, or a template that is not valid Jinja.
        """
        for file in (directory / _FOLDER / "default.jinja", directory / _FILE):
            if file.is_file():
                try:
                    return cls(file.read_text(encoding="utf-8"), file, special_tokens)
                except (OSError, UnicodeDecodeError) as error:
                    raise UserError(f"{file}: cannot be read ({error})") from None
        if others := sorted(path.stem for path in (directory / _FOLDER).glob("*.jinja")):
            raise UserError(
                f"{directory / _FOLDER}: has the templates {', '.join(others)}, and there is no "
                f"{_FILE} to be the default; write one"
            )
        source, template = directory / "tokenizer_config.json", config.get("chat_template")
        if template is None and (directory / _OF_PROCESSOR).is_file():
            source = directory / _OF_PROCESSOR
            template = read_json(source).get("chat_template")
        if isinstance(template, list) and all(isinstance(entry, dict) for entry in template):
            template = {str(entry.get("name")): entry.get("template") for entry in template}
        if isinstance(template, dict):
            if "default" not in template:
                raise UserError(
                    f"{source}: chat_template names {', '.join(template) or 'nothing'}, and not "
                    "'default'; name one so"
                )
            template = template["default"]
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
                role; a field that is None counts as absent.
            add_generation_prompt: end with the opening of the assistant's turn.

        Raises:
            UserError: no message, a message without a role, or one that the template refuses or
                fails on.
        """
        if not messages:
            raise UserError("messages: a conversation has at least one message")
        for index, message in enumerate(messages):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise UserError(
                    f"messages[{index}] must be an object with a role and content, got {message!r}"
                )
        try:
            return self._template.render(
                messages=[_fields(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except Exception as error:  # the template is a program of its own, which may raise anything
            raise UserError(
                f"{self._source}: the chat template fails on these messages ({error})"
            ) from None


def _fields(message: dict[str, Any]) -> dict[str, Any]:
    """A message without its nulls, and with its reasoning under each name that templates read."""
    fields = {key: value for key, value in message.items() if value is not None}
    reasoning = next((fields[key] for key in _REASONING if key in fields), None)
    if reasoning is None:
        return fields
    return {"thinking": reasoning, **fields, "reasoning_content": reasoning}


class _Generation(Extension):
    """`{% generation %}` around what the assistant wrote, which changes nothing in the text."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # a call, as in transformers: what is set inside is not seen outside
        return jinja2.nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(jinja2.utils.Namespace):
    """Jinja's, without names that begin with an underscore, by which a template could reach
    Python's own."""

    def __init__(*args: Any, **kwargs: Any):
        self, *given = args  # so that a template may name an attribute "self"
        jinja2.utils.Namespace.__init__(self)
        for name, value in dict(*given, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"namespace: {name!r} begins with an underscore")
        jinja2.utils.Namespace.__setitem__(self, name, value)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which no prompt wants."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
