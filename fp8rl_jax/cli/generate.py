"""`fp8rl generate`: completions of each line, as the rollout makes them, or a conversation in the
terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fp8rl_jax.cli.arguments import GenerateArguments as Arguments

if TYPE_CHECKING:
    from fp8rl_jax.cli.applied import OpenModel
    from fp8rl_jax.rollout.offline import Completion
    from fp8rl_jax.rollout.sampling import Sampling

__all__ = ["Arguments", "run"]


def run(arguments: Arguments) -> None:
    """Answers every line with "tokens" (of the prompt), "completion_tokens", "policy_logprobs",
    "finish_reason" and "text".

    "text" is there where the model has a tokenizer, and "stop_string" where one ended the
    completion. With --n the last four stand in each of "completions", beside "mean_logprob". A
    model without end tokens goes on to --max-new-tokens.
    """
    from fp8rl_jax.cli.applied import open_model
    from fp8rl_jax.rollout import offline
    from fp8rl_jax.rollout.lines import check_writable, write_lines

    model = open_model(arguments)
    sampling = make_sampling(arguments, model)
    if arguments.interactive:
        from fp8rl_jax.cli.chat import talk

        return talk(arguments, model, sampling)
    lines = model.read_lines(arguments.input, generation=True, reserve=arguments.max_new_tokens)
    check_writable(arguments.output)
    answers = offline.complete(
        model.load(),
        [line.tokens for line in lines],
        model.recipe,
        sampling,
        arguments.compute_dtype,
        arguments.batch_size,
        arguments.seed,
        arguments.n,
        arguments.prompt_logprobs,
    )
    pieces = model.tokenizer.token_bytes() if arguments.stop else []
    records = []
    for line, answer in zip(lines, answers, strict=True):
        record = line.record | {"tokens": line.tokens}
        if answer.prompt_logprobs is not None:
            record["prompt_logprobs"] = answer.prompt_logprobs
        parts = [_record(arguments, model, pieces, completion) for completion in answer.completions]
        if arguments.n == 1:
            record |= parts[0]
        else:
            for part, completion in zip(parts, answer.completions, strict=True):
                part["mean_logprob"] = completion.mean_logprob
            record["completions"] = parts[: arguments.best or arguments.n]
        records.append(record)
    write_lines(arguments.output, records)


def make_sampling(arguments: Arguments, model: OpenModel) -> Sampling:
    """What the arguments ask for, with the model's own end tokens.

    Raises:
        UserError: stop strings, bad words or a bias that the model's tokenizer cannot serve.
    """
    from fp8rl_jax.rollout.constraints import Keys, make_constraints
    from fp8rl_jax.rollout.sampling import Sampling

    constraints = make_constraints(
        model.tokenizer,
        model.config.vocab_size,
        arguments.stop,
        arguments.bad_words,
        arguments.biases(),
        Keys("--stop", "--bad-words", "--logit-bias"),
    )
    return Sampling(
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        stop_token_ids=() if arguments.ignore_eos else model.stop_token_ids,
        **constraints._asdict(),
    )


def _record(
    arguments: Arguments, model: OpenModel, pieces: list[bytes], completion: Completion
) -> dict[str, Any]:
    from fp8rl_jax.rollout.stop_text import cut_text

    record = {
        "completion_tokens": completion.tokens,
        "policy_logprobs": completion.policy_logprobs,
        "finish_reason": "stop" if completion.stopped else "length",
    }
    if model.tokenizer is not None:
        raw = b"".join(pieces[token] for token in completion.tokens if token < len(pieces))
        text, stop = cut_text(
            model.tokenizer.decode(completion.tokens), raw, arguments.stop, arguments.include_stop
        )
        record |= {"text": text} | ({} if stop is None else {"stop_string": stop})
    return record
