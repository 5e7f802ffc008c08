"""`fp8rl generate`: one completion of each line, as the rollout makes it."""

from __future__ import annotations

from fp8rl_jax.cli.arguments import GenerateArguments as Arguments

__all__ = ["Arguments", "run"]


def run(arguments: Arguments) -> None:
    """Answers every line with "tokens" (of the prompt), "completion_tokens", "policy_logprobs", "finish_reason" and "text".

    "text" is there where the model has a tokenizer. A model without end tokens goes on to --max-new-tokens.
    """
    from fp8rl_jax.cli.applied import open_model
    from fp8rl_jax.rollout import offline
    from fp8rl_jax.rollout.lines import check_writable, write_lines
    from fp8rl_jax.rollout.sampling import Sampling

    model = open_model(arguments)
    lines = model.read_lines(arguments.input, generation=True, reserve=arguments.max_new_tokens)
    sampling = Sampling(
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        stop_token_ids=() if arguments.ignore_eos else model.stop_token_ids,
    )
    check_writable(arguments.output)
    completions = offline.complete(
        model.load(),
        [line.tokens for line in lines],
        model.recipe,
        sampling,
        arguments.compute_dtype,
        arguments.batch_size,
        arguments.seed,
    )
    answers = []
    for line, completion in zip(lines, completions, strict=True):
        answer = line.record | {
            "tokens": line.tokens,
            "completion_tokens": completion.tokens,
            "policy_logprobs": completion.policy_logprobs,
            "finish_reason": "stop" if completion.stopped else "length",
        }
        if model.tokenizer is not None:
            answer["text"] = model.tokenizer.decode(completion.tokens)
        answers.append(answer)
    write_lines(arguments.output, answers)
