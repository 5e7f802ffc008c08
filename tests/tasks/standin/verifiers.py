"""What fp8rl_jax and environments use of the library `verifiers`, 0.1.14 to 0.3, for where it is not
installed. The tests of test_verifiers_environment.py hold with it and with the library itself."""

import copy
import inspect
import json
import signal
import sys
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module

# its modules
for _name in ("types", "errors", "clients", "clients.client", "envs", "envs.environment"):
    sys.modules[f"verifiers.{_name}"] = sys.modules[__name__]


class Error(Exception):
    pass


class InfraError(Error):
    pass


class OverlongPromptError(Error):
    pass


@dataclass
class Tool:
    name: str
    description: str
    parameters: dict
    strict: bool | None = None


@dataclass
class ToolCall:
    id: str
    name: str
    arguments: str


@dataclass
class Message:
    role: str
    content: str | list | None = None
    tool_calls: list | None = None
    tool_call_id: str | None = None

    def model_dump(self):
        return asdict(self)


UserMessage = partial(Message, "user")
ToolMessage = partial(Message, "tool")


def ResponseMessage(finish_reason, is_truncated, content=None, tool_calls=None):
    calls = [x if isinstance(x, ToolCall) else ToolCall(**x) for x in tool_calls or []]
    return Message("assistant", content, calls or None)


@dataclass
class Response:
    id: str
    created: int
    model: str
    message: Message


class Client(ABC):
    def __init__(self, client):
        self.client = client

    @abstractmethod
    def setup_client(self, config): ...

    @abstractmethod
    async def to_native_tool(self, tool): ...

    @abstractmethod
    async def get_native_response(self, prompt, model, sampling_args, tools=None): ...

    @abstractmethod
    async def close(self): ...


def _messages(given):
    return [Message(**message) if isinstance(message, dict) else message for message in given]


async def _call(function, arguments):
    result = function(**arguments)
    return await result if inspect.isawaitable(result) else result


class Rubric:
    def __init__(self, funcs=(), weights=None):
        self.funcs = list(funcs)
        self.weights = list(weights or [1.0] * len(self.funcs))

    def add_metric(self, func):
        self.funcs.append(func)
        self.weights.append(0.0)

    async def score_rollout(self, state):
        given = {key: state.get(key) for key in ("prompt", "completion", "answer", "info")}
        given["state"], metrics = state, {}
        for func in self.funcs:
            taken = inspect.signature(func).parameters
            arguments = {key: value for key, value in given.items() if key in taken}
            metrics[func.__name__] = float(await _call(func, arguments))
        state["metrics"] = metrics
        state["reward"] = sum(
            weight * metrics[func.__name__]
            for func, weight in zip(self.funcs, self.weights, strict=True)
        )


class Environment(ABC):
    tool_defs = None

    def __init__(
        self,
        dataset=None,
        eval_dataset=None,
        system_prompt=None,
        few_shot=(),
        rubric=None,
        **others,
    ):
        if dataset is None and eval_dataset is None:
            raise ValueError("Either dataset or eval_dataset must be provided")
        self.system_prompt, self.few_shot, self.rubric = system_prompt, few_shot, rubric or Rubric()
        vars(self).update(others)
        sets = [x if x is None else self._format(x) for x in (dataset, eval_dataset)]
        self.dataset_source, self.eval_dataset_source = sets
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)

    def _format(self, dataset):
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return [
            row
            | {
                "example_id": index,
                "prompt": row["prompt"]
                if "prompt" in row
                else [*system, *self.few_shot, {"role": "user", "content": row["question"]}],
            }
            for index, row in enumerate(dataset)
        ]

    def get_dataset(self):
        return self.dataset_source

    def get_eval_dataset(self):
        return self.eval_dataset_source or self.get_dataset()

    @property
    def requires_group_rollouts(self):
        names = {name for func in self.rubric.funcs for name in inspect.signature(func).parameters}
        return bool(names & {"prompts", "completions", "answers", "states"})

    async def init_state(self, input, client, model, sampling_args=None):
        state = copy.deepcopy(input) | {"client": client, "model": model, "trajectory": []}
        state |= {"tool_defs": self.tool_defs or [], "error": None, "final_env_response": None}
        if isinstance(input["prompt"], list):
            state["prompt"] = _messages(input["prompt"])
        return state

    @abstractmethod
    async def rollout(self, input, client, model, sampling_args=None): ...

    async def run_rollout(self, input, client, model, sampling_args):
        state = await self.rollout(input, client, model, sampling_args)
        await self.rubric.score_rollout(state)
        said = {key: [x.model_dump() for x in state[key]] for key in ("prompt", "completion")}
        return {key: state[key] for key in ("reward", "metrics", "error")} | said


class MultiTurnEnv(Environment):
    def __init__(self, max_turns=-1, **settings):
        super().__init__(**settings)
        self.max_turns = max_turns

        def num_turns(state):
            return len(state["trajectory"])

        self.rubric.add_metric(num_turns)

    @abstractmethod
    async def env_response(self, messages, state): ...

    async def setup_state(self, state):
        return state

    def is_over(self, state):
        turns = len(state["trajectory"])
        ends = state["error"], state["final_env_response"], state.get("prompt_too_long")
        return any(ends) or 0 < self.max_turns <= turns

    async def get_prompt_messages(self, state):
        if not state["trajectory"]:
            return state["prompt"]
        before, said = state["trajectory"][-1]
        return [*before, said, *_messages(await self.env_response([*before, said], state))]

    async def rollout(self, input, client, model, sampling_args=None):
        state = await self.init_state(input, client, model)
        state = await self.setup_state(state)
        while not self.is_over(state):
            try:
                prompt = await self.get_prompt_messages(state)
                if state["final_env_response"]:
                    break
                tools = state["tool_defs"] or None
                response = await client.get_response(prompt, model, {}, tools, state=state)
                state["trajectory"].append((prompt, response.message))
            except OverlongPromptError:
                state["prompt_too_long"] = True
            except Error as fault:
                state["error"] = repr(fault)
        before, said = state["trajectory"][-1]
        whole = [*before, said, *_messages(state["final_env_response"] or [])]
        state["completion"] = whole[len(state["prompt"]) :]
        return state


class SingleTurnEnv(MultiTurnEnv):
    def __init__(self, **settings):
        super().__init__(max_turns=1, **settings)

    async def env_response(self, messages, state):
        raise NotImplementedError


class ToolEnv(MultiTurnEnv):
    def __init__(self, tools, max_turns=10, **settings):
        super().__init__(max_turns=max_turns, **settings)
        self.tool_map = {tool.__name__: tool for tool in tools}
        self.tool_defs = [
            Tool(
                name,
                tool.__doc__.splitlines()[0],
                {
                    "type": "object",
                    "properties": {
                        x: {"type": "integer"} for x in inspect.signature(tool).parameters
                    },
                    "required": [*inspect.signature(tool).parameters],
                },
            )
            for name, tool in self.tool_map.items()
        ]

        def total_tool_calls(completion):
            return sum(len(message.tool_calls or ()) for message in completion)

        self.rubric.add_metric(total_tool_calls)

    def is_over(self, state):
        called = not state["trajectory"] or state["trajectory"][-1][1].tool_calls
        return super().is_over(state) or not called

    async def env_response(self, messages, state):
        replies = []
        for call in messages[-1].tool_calls:
            try:
                result = await _call(self.tool_map[call.name], json.loads(call.arguments))
            except Exception as fault:
                result = fault
            replies.append(ToolMessage(content=str(result), tool_call_id=call.id))
        return replies


class EnvGroup(Environment):
    def __init__(self, envs, env_names):
        self.envs = envs
        super().__init__(dataset=[row for env in envs for row in env.get_dataset()])

    async def rollout(self, input, client, model, sampling_args=None):
        raise NotImplementedError


def load_environment(env_id, **env_args):
    try:
        environment = import_module(env_id.replace("-", "_").split("/")[-1]).load_environment(
            **env_args
        )
        environment.env_id = environment.env_id if hasattr(environment, "env_id") else env_id
        return environment
    except ImportError as fault:
        raise ValueError(f"Could not import '{env_id}' environment.") from fault
    except Exception as fault:
        raise RuntimeError(f"Failed to load environment '{env_id}': {fault}") from fault
