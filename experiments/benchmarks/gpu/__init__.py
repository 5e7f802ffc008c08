"""The kernels on a Hopper GPU: are they right, and how fast. One command, one JSON file a part.

    python -m experiments.benchmarks.gpu --output FOLDER [--minutes 9] [--parts checks matmul] [--profile]

Run it again with the same folder until nothing is left: what a file holds is not measured twice (delete a file to do so). With
--profile every result of a kernel has its time by the profiler, too. In order of value:

    checks      every case of every operation against its expected values, each three times for equal bits
    copy        a copy kernel's bytes a second, which all other bytes are divided by
    matmul      blockwise products against XLA in bfloat16, cuBLASLt's FP8, torch's and Triton's blockwise products
    grouped     products of an expert layer against dense ones of the same work
    attention   decode attention with FP8 and bfloat16 caches against cuDNN and XLA in bfloat16
    quantize    quantizers against XLA's
    step        a layer's training step, and a GRPO step, at Qwen3-8B's shape: FP8 against bfloat16

A part is a process of its own. A kernel that hangs or crashes costs its own case: the process is ended, the case is recorded as
failed with the reason, and the part goes on in a new process. Times are a device's, see `timing.py`; what they are divided by
takes turns with them, round by round. The table at the end, and `figures.json`, have the figures that this library wants to
reach, of all parts that the folder holds.

It needs JAX with CUDA, and the packages that `fp8rl_jax` needs for the part `step` alone. The peers torch and Triton are looked
for in `--torch-python`; where they are missing the file says why. `--tiny` runs all parts in miniature on a CPU, with the
reference in the kernels' place: it shows that the command works, and no figure of it counts.
"""
