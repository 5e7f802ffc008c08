"""Golden runs: what a tiny policy goes through under an arm's settings, in a few numbers that
another CPU gives again: `python -m fp8rl_jax.ablation.golden`, JSON in and out.

A run's own samples are no such numbers: where two tokens are as likely as each other, a last bit
chooses, and all that comes behind is another text. So nothing is left to a draw here. The policy's
weights come from a generator that is the same everywhere, and lie on the grid of bfloat16, as a
checkpoint's do. The tokens are forced, by a bias and by bad words, through the run's own sampler:
prefill, decode, cache and log-probabilities are what they are in a run. The rewards are given. Two
updates follow each other, each on the tokens as the weights before it serve them. What the arm's
own reward gives is asked apart from it, of fixed completions of one problem.

A process of its own, and on a CPU wherever it is, as `preflight` says.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8rl_jax.caching import keep_compiled_programs
from fp8rl_jax.config.files import read_config
from fp8rl_jax.config.formats import WIDE, TensorFormat
from fp8rl_jax.config.recipe import LINEAR_ROLES, STATE_ROLES, Recipe
from fp8rl_jax.config.run import MeshConfig, RunConfig
from fp8rl_jax.config.tasks import TaskConfig
from fp8rl_jax.models.policy import Policy, build_policy
from fp8rl_jax.precision.quantizer import round_through
from fp8rl_jax.rollout.constraints import compile_phrases
from fp8rl_jax.tasks.dataset import columns_of, load_splits
from fp8rl_jax.tasks.rewards import build_scorer
from fp8rl_jax.tasks.text import Document
from fp8rl_jax.tokenizers.byte_tokenizer import ByteTokenizer
from fp8rl_jax.training.experience import Experience
from fp8rl_jax.training.session import Session
from fp8rl_jax.training.text import tokenized
from fp8rl_jax.weights.load import byte_policy_config

PROMPTS = ("3+5=", "What is 7 times 6?", "drow", "a")
WORDS = ("abcdef", "fdbeca", "cea", "bd")
"""The completions of each prompt, of letters that do not repeat; a short one has its end of
sequence."""
_ALPHABET = "abcdef"
_UPDATES = 2
_TOKENS = 24
"""Of a prompt at most."""
_RATE = 1e-4
"""Every golden run's learning rate: a program is compiled for each, and settings are compared
besides."""
_COARSE = 0.06
"""A format with a larger error than this counts as "fp4": e5m2 has .05, four bits .09 to .12."""
_DEVIATION = 0.05
"""Of the weights: large enough that attention is not even, and small enough that a rounding of e4m3
that a last bit flips does not grow."""
COMPLETIONS = (
    *("{answer}", " {answer}\n", "{answer}.", "The answer is {answer}.", "{answer} is the answer"),
    *("**{answer}**", "\\boxed{{{answer}}}", "#### {answer}", "<answer>{answer}</answer>"),
    *("0 + {answer}", "0 + {answer} = {answer}", "{prompt}", "{prompt}{answer}", "{answer} or 1"),
    *("not {answer}", "-{answer}", "{answer}1", "1, then {answer}", "{answer}, then 1", ""),
)
"""Of a problem: right, wrong, and as models hedge."""
_METRICS = {
    "loss": "loss",
    "grad_norm": "optim/grad_norm",
    "k3": "mismatch/k3",
    "changed": "sync/changed",
    "arrived": "sync/arrived",
    "noise": "sync/noise",
    "kv_scale_q": "fp8/kv_scale_q",
    "kv_scale_k": "fp8/kv_scale_k",
    "kv_scale_v": "fp8/kv_scale_v",
}
"""Of `Session.update`, by the names that a fingerprint has; those that a recipe has not are left
out."""

Numbers = dict[str, list[float]]


def golden_config(config: RunConfig) -> RunConfig:
    """Make an arm's settings those of its golden run.

    What is computed stays; how much of it, and where, does not. Of vLLM, which promises no bits and
    is not everywhere, our own engine takes the place, and nothing is carried over.
    """
    trainer, rollout, model = config.trainer, config.rollout, config.model
    unit = max(trainer.updates_per_rollout, 1)
    init = replace(
        model.init,
        hidden_size=256,
        intermediate_size=256,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        num_experts=model.init.num_experts or 4 * trainer.router_replay,
    )
    return replace(
        config,
        seed=0,
        mesh=MeshConfig(),
        model=replace(model, path="", init=init),
        lora=replace(config.lora, path=""),
        optimizer=replace(config.optimizer, learning_rate=_RATE),
        trainer=replace(trainer, micro_batch_prompts=min(trainer.micro_batch_prompts, 1)),
        rollout=replace(
            rollout,
            prompts_per_step=unit * -(-len(PROMPTS) // unit),
            samples_per_prompt=len(WORDS),
            max_prompt_tokens=_TOKENS,
            max_new_tokens=len(_ALPHABET),
            engine="static" if rollout.engine == "vllm" else rollout.engine,
            paged=replace(rollout.paged, extra_prompts=0),
        ),
    )


def golden_policy(config: RunConfig) -> Policy:
    """Draw the weights, the same bits on every machine and with every numpy: RandomState's stream
    is frozen, and what its last bit may be is rounded away."""
    draws = np.random.RandomState(0)

    def tensor(name: str, shape: tuple[int, ...], axes: tuple[str, ...]) -> jax.Array:
        if axes[-1] == "norm":
            return jnp.ones(shape, jnp.float32)
        deviation = _DEVIATION / 2 if name.endswith(("o_proj", "down_proj")) else _DEVIATION
        values = deviation * draws.standard_normal(shape)
        return jnp.asarray(values.astype(jnp.bfloat16), jnp.float32)

    return build_policy(byte_policy_config(config.model.init), tensor)


def run_arm(config: RunConfig) -> Numbers:
    """Run `_UPDATES` updates under an arm's settings.

    Returns:
        By name a value of each update, and of `logprob`, the tokens' mean under the weights that
        are served, and `preferred`, its sum over a completion times the reward less its mean, one
        more: that after the last.
    """
    config = golden_config(config)
    session, count = _session(config), config.rollout.prompts_per_step
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(count)]
    rewards = np.array([(3 * i + i // 4) % 5 / 4 for i in range(count * len(WORDS))])
    found: Numbers = {}
    for step in range(_UPDATES + 1):
        rollout = _forced(session, prompts)
        logprobs = [float(row.sum()) for row in rollout.logprobs]
        numbers = {
            "logprob": sum(logprobs) / sum(map(len, rollout.tokens)),
            "preferred": float(np.mean(logprobs * (rewards - rewards.mean()))),
        }
        if step < _UPDATES:
            metrics = session.update(rollout, rewards.tolist(), next_prompts=prompts)
            numbers |= {key: metrics[name] for key, name in _METRICS.items() if name in metrics}
        for key, value in numbers.items():
            found.setdefault(key, []).append(_digits(value))
    return found


def run_start(config: RunConfig) -> Numbers:
    """Make the first updates of a warm start, on the same prompts and completions."""
    config = golden_config(config)
    session, answers = _session(config), [word[:5] for word in WORDS]
    session.restart(config.sft.optimizer, config.sft.steps)
    return _of_updates([session.supervise(PROMPTS, answers) for _ in range(_UPDATES)])


def run_text(config: RunConfig) -> Numbers:
    """Make the first updates on text; the last loss is that behind the others."""
    config = golden_config(replace(config, sft=replace(config.sft, micro_batch_rows=0)))
    session, documents = _session(config), [Document(text, text) for text in (*PROMPTS, *WORDS)]
    text = tokenized(documents, session.encoder, _TOKENS)
    session.restart(replace(config.sft.optimizer, learning_rate=_RATE), config.sft.steps)
    rows = text.rows(range(len(text)))
    return _of_updates([session.pretrain(rows) for _ in range(_UPDATES + 1)])


def _of_updates(steps: list[dict[str, float]]) -> Numbers:
    names = {"loss": "loss", "grad_norm": "optim/grad_norm"}
    return {key: [_digits(each[name]) for each in steps] for key, name in names.items()}


def rewards(task: TaskConfig) -> dict[str, float | str]:
    """Give what a task's reward gives for `COMPLETIONS` of its first held-out problem: the sum of
    its components, or the fault."""
    try:
        example = load_splits(replace(task, train_size=1, eval_size=1))[1].examples[0]
        score = build_scorer(task, columns=columns_of([example]))
    except Exception as error:
        return {"fault": _fault(error)}
    words = {"answer": example.answer, "prompt": example.prompt}
    found = {}
    for each in COMPLETIONS:
        try:
            scores = score(example.prompt, each.format(**words), example.answer, example.entry)
            found[each] = _digits(sum(scores))
        except Exception as error:
            found[each] = _fault(error)
    return found


def _fault(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


RUNS = {"arm": run_arm, "text": run_text, "start": run_start}


def measure(kind: str, config: RunConfig) -> dict[str, Any]:
    """Make a golden run of a kind of `RUNS`.

    Returns:
        Its numbers, and as "rounding" the coarsest that there is, which says how far a last bit
        goes; or {"fault": why} where it cannot be made, which keeps nobody from running the arm.
    """
    try:
        errors = [_error(fmt) for fmt in _formats(config.resolved_recipe)]
        rounding = "fp4" if max(errors, default=0.0) > _COARSE else "fp8"
        return {"rounding": rounding if errors else config.compute_dtype, **RUNS[kind](config)}
    except Exception as error:
        return {"fault": _fault(error)}


def _formats(recipe: Recipe) -> Iterator[TensorFormat]:
    """Every format that a recipe quantizes something to."""
    for of in recipe.variants:
        for side in (of.rollout, of.trainer):
            yield from (fmt for fmt in side.roles().values() if fmt.quantized)
        yield from (fmt for fmt in map(of.format_of, LINEAR_ROLES) if fmt.quantized)
    state = (getattr(recipe, role) for role in STATE_ROLES)
    yield from (fmt for fmt in state if fmt.element not in WIDE)


@cache
def _error(fmt: TensorFormat) -> float:
    """The error that a format makes of normal numbers, a part of their size."""
    x = np.random.RandomState(0).standard_normal((128, 128)).astype(np.float32)
    return float(np.linalg.norm(round_through(jnp.asarray(x), fmt, "reference") - x) / 128)


def _digits(value: float) -> float:
    return float(f"{value:.6g}")


def _session(config: RunConfig) -> Session:
    return Session(golden_policy(config), ByteTokenizer(), config=config)


def _forced(session: Session, prompts: Sequence[str]) -> Experience:
    """`WORDS` as completions of each prompt, through the session's sampler."""
    own, found = session.sampling, []
    for word in WORDS:
        session.sampling = replace(own, **_only(word, session.shape.vocab_size))
        found.append(session.rollout(prompts, samples=1))
    session.sampling = own
    rollouts = [each.rollout for each in found]
    rows = {
        name: jax.tree.map(
            lambda *x: jnp.asarray(np.stack(x, 1).reshape(-1, *x[0].shape[1:])),
            *(jax.device_get(getattr(each, name)) for each in rollouts),
        )
        for name in (
            *("tokens", "mask", "behaviour_logprobs", "policy_logprobs", "stopped"),
            *("expert_ids", "token_versions"),
        )
    }
    texts = [each.texts[place] for place in range(len(prompts)) for each in found]
    joined = replace(rollouts[0], metrics={}, **rows)
    return replace(found[0], texts=texts, samples=len(WORDS), rollout=joined)


def _only(word: str, vocab_size: int) -> dict[str, Any]:
    """The part of a `Sampling` under which nothing but `word` can be drawn: the first letter has
    the largest bias, each letter bans all but the one behind it, and where all are banned the
    sequence ends."""
    tokenizer = ByteTokenizer()
    bias = np.zeros(vocab_size, np.float32)
    bias[[ord(letter) for letter in _ALPHABET]] = 1000
    bias[ord(word[0])] = 2000
    bias[list(tokenizer.eos_token_ids)] = 500
    follow = {*zip(word, word[1:], strict=False)}
    banned = [x + y for x in _ALPHABET for y in _ALPHABET if (x, y) not in follow]
    table = compile_phrases(banned, tokenizer.token_bytes(), vocab_size)
    return {"bad_words": table, "logit_bias": bias, "stop_strings": None}


def _main() -> None:
    logging.disable(logging.WARNING)
    keep_compiled_programs()
    known, scores, answers = {}, {}, []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "arm.toml"
        for kind, text in json.load(sys.stdin):
            path.write_text(text)
            config = read_config(RunConfig, path)
            # arms of one study or of several may have one golden run
            key = f"{kind} {replace(golden_config(config), task=TaskConfig())}"
            known[key] = known.get(key) or measure(kind, config)
            task = repr(config.task)
            if kind == "arm" and task not in scores:
                scores[task] = rewards(config.task)
            answers.append([known[key], scores.get(task) if kind == "arm" else None])
    print(json.dumps(answers))


if __name__ == "__main__":
    _main()
