"""Train-rollout mismatch of every recipe: one policy, the same steps, the mismatch of each step.

    python -m experiments.mismatch                                       # what is missing is trained, then all is summed up
    python -m experiments.mismatch --variants bf16-exact jet-rl-exact    # some more, beside those that are there
    python -m experiments.mismatch --variants                            # tables and charts anew, nothing trained

A variant is a name and what it adds to `fp8rl train`; `variants.py` lists them. Each is trained once a seed from one warm
start, with the run files demo.toml and mismatch.toml. A run that was cut off goes on from its checkpoint. What a run leaves
goes into results.json, which keeps the runs that are not trained again, so that more variants and seeds can be added anywhere.

The question is verl's and NeMo RL's: whose rollout strays furthest from its trainer? They report rollout-only FP8 above
FP8 end to end above bf16. All weights are the same on both sides, so everything measured here is numerics.
"""
