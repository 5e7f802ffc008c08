"""Peer: transformers' `generate` on the same prompts and weights."""

import time

import torch
from link import Link
from transformers import AutoModelForCausalLM


def main():
    link = Link()
    torch.set_num_threads(link.settings["threads"])
    model = AutoModelForCausalLM.from_pretrained(link.settings["model"], dtype=torch.float32).eval()
    prompts = torch.tensor(link.settings["prompts"])
    (new_tokens,) = set(link.settings["lengths"])
    options = {
        "min_new_tokens": new_tokens,
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
