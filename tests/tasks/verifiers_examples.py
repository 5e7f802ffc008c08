"""An environment package of `verifiers`, as `load_environment("verifiers-examples")` finds it: good
environments and bad ones."""

import itertools

import verifiers as vf
from datasets import Dataset

_COUNT = itertools.count()


def rows(count, start=0):
    return Dataset.from_list(
        [
            {"question": f"{i} + {i} =", "answer": str(2 * i), "info": {"i": i}}
            for i in range(start, start + count)
        ]
    )


def right(completion, answer):
    return float(completion[-1].content.strip() == answer)


async def short(completion, info, weight=0):
    return 1 / (1 + len(completion[-1].content) + info["i"])


def single(**settings):
    settings = {"dataset": rows(12), "eval_dataset": rows(4, 12)} | settings
    few_shot = [{"role": "user", "content": "1 + 0 ="}, {"role": "assistant", "content": "1"}]
    return vf.SingleTurnEnv(
        system_prompt="A number.",
        few_shot=few_shot,
        rubric=vf.Rubric(funcs=[right, short], weights=[1.0, 0.5]),
        **settings,
    )


class Guess(vf.MultiTurnEnv):
    """All rows have one prompt, as a game's do; the state counts what was said."""

    def __init__(self, **settings):
        problems = [{"question": "Guess my number.", "answer": str(i)} for i in range(8)]
        super().__init__(
            dataset=Dataset.from_list(problems),
            rubric=vf.Rubric(funcs=[self.found, self.tries], weights=[1.0, -0.125]),
            **settings,
        )

    async def setup_state(self, state):
        state["tries"] = 0
        return state

    async def env_response(self, messages, state, **_):
        state["tries"] += 1
        said = messages[-1].content
        if said == "give up":
            raise vf.InfraError("no sandbox")
        if said == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "Found."}]
            return state["final_env_response"]
        return [{"role": "user", "content": f"Not {said}, try {state['tries']}."}]

    def found(self, state):
        return float(bool(state["final_env_response"]))

    def tries(self, state):
        return state["tries"]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def last(completion, answer):
    return float(answer in (completion[-1].content or ""))


def tool(**settings):
    return vf.ToolEnv(
        dataset=rows(8), tools=[add], max_turns=3, rubric=vf.Rubric(funcs=[last]), **settings
    )


class Forgetful(Guess):
    async def env_response(self, messages, state, **_):
        return [{"role": "user", "content": str(next(_COUNT))}]


class Fickle(Guess):
    async def setup_state(self, state):
        state["prompt"] = [vf.UserMessage(content=str(next(_COUNT)))]
        return state


class Rewriting(Guess):
    async def get_prompt_messages(self, state):
        return (
            [vf.UserMessage(content=str(len(state["trajectory"])))]
            if state["trajectory"]
            else state["prompt"]
        )


class Calling(vf.Environment):
    async def rollout(self, input, client, model, sampling_args=None):
        return await client.client.chat.completions.create(model=model, messages=input["prompt"])


def together(completions):
    return [0.0 for _ in completions]


class NotOne:
    env_id = "not-one"
    env_args = {}


ASKED = [{"role": "user", "content": "1 + 1 ="}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
ENVIRONMENTS = {
    "single": single,
    "guess": Guess,
    "tool": tool,
    "forgetful": Forgetful,
    "fickle": Fickle,
    "rewriting": Rewriting,
    "calling": lambda: Calling(dataset=rows(8), rubric=vf.Rubric(funcs=[right])),
    "no prompt": lambda: single(dataset=Dataset.from_list([{"prompts": "x", "answer": "y"}])),
    "image": lambda: vf.SingleTurnEnv(dataset=Dataset.from_list([{"prompt": IMAGE}])),
    "only eval": lambda: single(dataset=None),
    "empty": lambda: single(dataset=rows(0)),
    "together": lambda: vf.SingleTurnEnv(dataset=rows(8), rubric=vf.Rubric(funcs=[together])),
    "null": lambda: vf.SingleTurnEnv(
        dataset=Dataset.from_list([{"prompt": ASKED}, {"prompt": None}])
    ),
    "none": NotOne,
    "group": lambda: vf.EnvGroup([tool(), tool()], env_names=["a", "b"]),
}


def load_environment(which="single", **settings):
    return ENVIRONMENTS[which](**settings)
