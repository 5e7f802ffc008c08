"""Environments of the library `verifiers` (Prime Intellect), an extra: task.kind = "verifiers".

They are those that `verifiers.load_environment` loads, of versions 0.1.14 to 0.3. Such an
environment plays a rollout itself and asks a client for the model's turns, and so it does here: the
client answers with what the policy has said so far and stops the rollout where it is asked for
more. What it was asked with is the observation. A rollout that ends by itself is scored by the
environment's rubric. Prompts, replies, ends and rewards are therefore the library's own.

As with every environment a worker keeps nothing between two turns: it plays the earlier ones again,
and checks that it is asked what it was asked then.

Tools are written into the system message, and calls read from the completion, in Hermes' form: as
Qwen's chat templates write and vLLM's parser "hermes" reads them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any, NoReturn

from fp8rl_jax.config.tasks import TaskConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.functions import describe_fault
from fp8rl_jax.tasks.conversation import Conversation, Message, MessageFault, read_messages
from fp8rl_jax.tasks.environment import EnvironmentFault, Turn
from fp8rl_jax.tasks.rewards import to_score

_TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{signatures}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FIELDS = ("role", "content", "name", "tool_call_id", "reasoning_content")
_MODEL = "policy"


def read_rows(task: TaskConfig, split: str) -> Iterator[tuple[str, dict[str, Any], Conversation]]:
    """Yield (where it stands, the row, its prompt with the tools) of an environment's data set.

    Args:
        task: its name is the environment's id, its args are those of `load_environment`.
        split: "train" or "eval", which `get_dataset` or `get_eval_dataset` gives.

    Raises:
        UserError: the environment does not load or has no such data set, or a row has no prompt
            that is text.
    """
    library, environment = _load(task)
    key = f"task.name = {task.name!r}"
    if split == "eval" and environment.eval_dataset_source is None:
        raise UserError(
            f"{key} has no data set for evaluation; take task.eval_split out, and task.eval_size "
            "problems of the other are held out"
        )
    if split == "train" and environment.dataset_source is None:
        raise UserError(
            f'{key} has no data set for training; task.split = "eval" trains on that for evaluation'
        )
    try:
        rows = environment.get_eval_dataset() if split == "eval" else environment.get_dataset()
    # the environment's own code, the library of data sets, or the network
    except (Exception, SystemExit) as fault:
        raise UserError(f"{key}: its {split} data set does not load: {_why(fault)}") from fault
    client, loop = library.client(None), asyncio.new_event_loop()
    try:
        for index, row in enumerate(rows):
            where = f"{task.name} {split} row {index}"
            try:
                state = loop.run_until_complete(environment.init_state(row, client, _MODEL))
                prompt = read_messages(_plain(state["prompt"] or []))
                yield where, row, Conversation(_with_tools(prompt, state["tool_defs"]))
            except MessageFault as fault:
                raise UserError(f"{where}: prompt: {fault}") from fault
            except Exception as fault:
                raise UserError(f"{where}: {describe_fault(fault)}") from fault
    finally:
        loop.close()


def build_verifiers_player(
    task: TaskConfig,
) -> Callable[[Mapping[str, Any], Sequence[tuple[str, Sequence[Message]]], str | None], Turn]:
    """Build the function that plays one turn, as `environment.build_player` does.

    A text of None says that there is no room for another turn: the environment ends and is scored,
    as the library ends a conversation that is too long for its model.

    Raises:
        UserError: the environment does not load.
    """
    library, environment = _load(task)
    loop = asyncio.new_event_loop()

    def play(
        entry: Mapping[str, Any], history: Sequence[tuple[str, Sequence[Message]]], text: str | None
    ) -> Turn:
        said = [answer for answer, _ in history] + ([] if text is None else [text])
        seen = [entry["question"].messages, *(list(observation) for _, observation in history)]
        ends = text is None or len(said) == task.max_turns
        script = _Script(library, said, seen, ends)
        rollout = environment.run_rollout(
            dict(entry["metadata"]), library.client(script), _MODEL, {}
        )
        try:
            output = loop.run_until_complete(rollout)
        except _Asked as asked:
            return {"observation": asked.observation, "reward": 0.0, "done": False}
        if output["error"]:
            raise EnvironmentFault(" ".join(f"verifiers: {output['error']}".split()))
        if script.turn < len(said):
            raise EnvironmentFault(
                f"the rollout ended after turn {script.turn} when it was played again; it has to "
                "depend on the row and on the texts alone"
            )
        metrics = {str(name): to_score(value) for name, value in (output["metrics"] or {}).items()}
        return {
            "observation": [],
            "reward": to_score(output["reward"]),
            "done": True,
            "metrics": metrics,
        }

    return play


class _Asked(BaseException):
    """The environment asks for the turn that is to come.

    No environment may take it for a failure of its own, so it is no Exception."""

    def __init__(self, observation: list[Message]):
        self.observation = observation


class _Script:
    """The model's side of one rollout.

    Args:
        library: makes the responses.
        said: the completions so far.
        seen: the prompt with its tools, and the observation behind each completion, as far as they
            are known.
        ends: whether a request behind the last completion ends the conversation for want of room.
    """

    def __init__(
        self, library: _Library, said: list[str], seen: list[Sequence[Message]], ends: bool
    ):
        self.library, self.said, self.seen, self.ends = library, said, seen, ends
        self.turn = 0
        self._before: list[Message] = []

    def respond(self, prompt: Sequence[Any], tools: Sequence[Any]) -> Any:
        """Return the library's response to a request.

        Raises:
            EnvironmentFault: it is another one than before, or no continuation.
        """
        messages = _plain(prompt)
        if messages[: len(self._before)] != self._before:
            raise EnvironmentFault(
                "the environment rewrites the conversation, which has to go on from what was said"
            )
        try:
            new = read_messages(messages[len(self._before) :])
        except MessageFault as fault:
            raise EnvironmentFault(f"the environment's messages: {fault}") from None
        if self.turn == 0:
            new = _with_tools(new, tools)
        elif any(message["role"] in ("assistant", "system") for message in new):
            raise EnvironmentFault("an observation has messages of the user and of tools only")
        if self.turn < len(self.seen) and list(new) != list(self.seen[self.turn]):
            what = f"observation {self.turn}" if self.turn else "prompt or tools"
            raise EnvironmentFault(
                f"the environment asks with another {what} than before; it has to depend on the "
                "row and on the texts alone"
            )
        if self.turn == len(self.said):
            if self.ends:
                raise self.library.no_room()
            raise _Asked(list(new))
        response = self.library.response(self.said[self.turn], self.turn, bool(tools))
        self._before = [*messages, *_plain([response.message])]
        self.turn += 1
        return response


class _NoClient:
    """What stands where the library's client has an API's client."""

    def __getattr__(self, name: str) -> NoReturn:
        raise EnvironmentFault(
            f"the environment calls the client itself ({name}), and there is none here; it has to "
            "ask through get_model_response"
        )


class _Library:
    """What is taken from the library, which only now is imported.

    Raises:
        UserError: it is not installed, does not import, or is of a version without these
            environments.
    """

    def __init__(self):
        try:
            load = getattr(import_module("verifiers"), "load_environment", None)
            if load is None:
                raise UserError(
                    f"verifiers {version('verifiers')} has no load_environment: its environments "
                    "run agents as programs of their own (verifiers.v1), which are not played "
                    "here; pip install 'verifiers<0.4'"
                )
            environments = import_module("verifiers.envs.environment")
            if not hasattr(environments.Environment, "requires_group_rollouts"):
                raise UserError(
                    'task.kind = "verifiers" needs verifiers 0.1.14 or later, not '
                    f"{version('verifiers')}: pip install 'verifiers<0.4'"
                )
            clients, errors = map(import_module, ("verifiers.clients.client", "verifiers.errors"))
            self.types = import_module("verifiers.types")
        except UserError:
            raise
        except ModuleNotFoundError as fault:
            raise UserError(
                f"task.kind = \"verifiers\" needs {fault.name}: pip install 'verifiers<0.4'"
            ) from fault
        # whatever of its requirements does not fit it
        except Exception as fault:
            raise UserError(f"verifiers does not import: {describe_fault(fault)}") from fault
        self.load, self.environment = load, environments.Environment
        self.no_room: type[Exception] = errors.OverlongPromptError
        # everything that only a client of an API needs is there, and None
        absent = dict.fromkeys(clients.Client.__abstractmethods__)
        self._client = type("Client", (clients.Client,), absent | {"get_response": _get_response})

    def client(self, script: _Script | None) -> Any:
        """Return a client of the library's that answers from `script`."""
        client = self._client(_NoClient())
        client.script = script
        return client

    def response(self, text: str, turn: int, has_tools: bool) -> Any:
        """Return a completion as the library's response, its calls of tools read."""
        content, calls = read_calls(text) if has_tools else (text, [])
        types = self.types
        tool_calls = [
            types.ToolCall(
                id=f"call_{turn}_{index}",
                name=call["name"],
                arguments=json.dumps(call["arguments"], ensure_ascii=False),
            )
            for index, call in enumerate(calls)
        ]
        message = types.ResponseMessage(
            content=content,
            tool_calls=tool_calls or None,
            finish_reason="tool_calls" if calls else "stop",
            is_truncated=False,
        )
        return types.Response(id=f"turn_{turn}", created=0, model=_MODEL, message=message)


async def _get_response(
    self: Any, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any
) -> Any:
    return self.script.respond(prompt, tools or [])


def _load(task: TaskConfig) -> tuple[_Library, Any]:
    """(the library, the environment of `task`).

    Raises:
        UserError: either does not load, or is none that can be played.
    """
    library, key = _Library(), f"task.name = {task.name!r}"
    try:
        with signals_kept():
            environment = library.load(task.name, **task.args)
    # the environment's own code may raise anything, or call sys.exit
    except (Exception, SystemExit) as fault:
        raise UserError(f"{key}: {_why(fault)}") from fault
    if not isinstance(environment, library.environment):
        raise UserError(f"{key} is a {type(environment).__name__}, and no Environment of verifiers")
    if environment.requires_group_rollouts:
        raise UserError(
            f"{key} rewards the completions of a prompt together (a reward function with "
            "parameters in the plural); each is scored alone here"
        )
    if any(member.tool_defs for member in getattr(environment, "envs", ())):
        raise UserError(
            f"{key} is a group of environments with tools, which differ from row to row; name one "
            "of them"
        )
    return library, environment


@contextlib.contextmanager
def signals_kept() -> Generator[None]:
    """An environment takes SIGINT and SIGTERM for itself, and the process wants its own."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def _why(fault: BaseException) -> str:
    cause = fault.__cause__ or fault  # the library wraps what an environment raises
    if isinstance(cause, KeyError) and cause.args == ("question",):
        return "its data set has neither a column prompt nor a column question"
    if isinstance(cause, ImportError):
        return (
            f"{describe_fault(cause)}; install the environment's package with all that it needs "
            "(prime env install OWNER/NAME)"
        )
    return describe_fault(cause)


def _plain(messages: Any) -> list[Message]:
    """The library's messages as those of `conversation`; what else they have is left out."""
    plain = []
    for message in messages:
        given = message if isinstance(message, Mapping) else message.model_dump()
        fields = {key: given[key] for key in _FIELDS if given.get(key) is not None}
        if calls := given.get("tool_calls"):
            fields["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": json.loads(call["arguments"])},
                }
                for call in calls
            ]
        plain.append(fields)
    return plain


def _with_tools(messages: Sequence[Message], tools: Sequence[Any]) -> list[Message]:
    """`messages` with the tools in their system message."""
    if not tools:
        return list(messages)
    signatures = "\n".join(
        json.dumps({"type": "function", "function": _function(tool)}, ensure_ascii=False)
        for tool in tools
    )
    text, rest = _TOOLS.format(signatures=signatures), list(messages)
    if rest[0]["role"] == "system":
        text = f"{rest.pop(0)['content']}\n\n{text}"
    return [{"role": "system", "content": text}, *rest]


def _function(tool: Any) -> dict[str, Any]:
    strict = {} if tool.strict is None else {"strict": tool.strict}
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return function | strict


def read_calls(text: str) -> tuple[str | None, list[dict[str, Any]]]:
    """Read the calls of tools that a completion has.

    Returns:
        (what stands before the first one, None where nothing does; each as {"name", "arguments"}).
        Where one is no JSON of this form there are none, and the text is whole.
    """
    try:
        calls = [json.loads(found) for found in _CALL.findall(text)]
        calls = [{"name": call["name"], "arguments": call["arguments"]} for call in calls]
    except (ValueError, TypeError, KeyError, RecursionError):
        return text, []
    if not calls or not all(isinstance(call["name"], str) for call in calls):
        return text, []
    return text[: text.index("<tool_call>")] or None, calls
