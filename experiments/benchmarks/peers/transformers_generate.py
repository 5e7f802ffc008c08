"""Peer: transformers' `generate` on the same prompts and weights.

At its fastest setting: the forward compiled by torch.compile (inductor, which needs g++) for any
length, over a cache that grows, with scaled_dot_product_attention. Not compiled, or with a static
cache, compiled or not, it is slower.
"""

import time

import torch
from link import Link
from transformers import AutoModelForCausalLM


def main():
    link = Link()
    torch.set_num_threads(link.settings["threads"])
    model = AutoModelForCausalLM.from_pretrained(link.settings["model"], dtype=torch.float32).eval()
    model.forward = torch.compile(model.forward, dynamic=True)
    model.generation_config.eos_token_id = None  # nothing ends a completion but its length
    prompts = torch.tensor(link.settings["prompts"])
    (new_tokens,) = set(link.settings["lengths"])
    options = {
        "max_new_tokens": new_tokens,
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "use_cache": True,
        "pad_token_id": 0,
    }
    link.ready(
        ("torch", "transformers"),
        {
            "dtype": "float32",
            "attention": model.config._attn_implementation,
            "execution": "compiled by inductor, dynamic shapes",
            "logprobs": "none",
            "generate": options,
        },
    )
    for request in link:
        torch.manual_seed(request["round"])
        start = time.perf_counter()
        with torch.inference_mode():
            output = model.generate(
                input_ids=prompts, attention_mask=torch.ones_like(prompts), **options
            )
        link.answer(
            {
                "seconds": time.perf_counter() - start,
                "tokens": output[:, prompts.shape[1] :].numel(),
            }
        )


if __name__ == "__main__":
    main()
