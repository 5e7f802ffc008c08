"""The kernels on a Hopper GPU: are they right, and how fast. One command, one JSON file a part.

    python -m experiments.benchmarks.gpu --output FOLDER [--minutes 9] [--parts checks matmul]
    [--profile]

It is made for a card that is there for some commands of ten minutes. Run it again with the same
folder until nothing is left: a command begins no job that it might not end, and the next one goes
on there. In order of value:

    checks      small cases that every kernel has a part in, against their expected values, each
                three times for equal bits
    copy        a copy kernel's bytes a second, which all other bytes are divided by
    matmul      blockwise products against XLA in bfloat16 and cuBLASLt's FP8: the shapes of the
                targets
    attention   decode attention with FP8 and bfloat16 caches against cuDNN and XLA in bfloat16:
                likewise
    grouped     products of an expert layer against dense ones of the same work: likewise
    formats     products in MXFP8, MXFP4, NVFP4 and of INT4 weights, as XLA has them, against
                bfloat16
    decode      steps of the decode loop at Qwen3-8B's shape: bfloat16, FP8 weights, FP8 cache, both
    step        a GRPO step and a layer's training step, at Qwen3-8B's shape: FP8 against bfloat16
    exact       exact mode: operations at random shapes, runs whose rollout and trainer must agree
                bit for bit, a step against one that is not exact
    then        all other shapes of matmul, grouped and attention; quantize, the quantizers against
                XLA's; all other checks

A part's file is written after each of its jobs. Jobs run in processes of their own: one that hangs
or crashes is ended, and recorded as failed with the reason; an operation that has hung twice in a
command waits for the next one. Checks, and the compilation of what is timed, run in as many
processes as there are processors; what is timed runs alone. Only programs for which XLA chooses a
library's product by timing it are compiled where nothing else runs.

The folder has a cache of compiled programs, too, of 40 MB at most. If the next command runs on
another machine, take it along:

    tar c FOLDER | split -b 15M - gpu.tar.        cat gpu.tar.* | tar x

A result holds for the sources that it depends on. When one of them changes, that result is put
aside and measured again, and all others stay. To measure something twice, delete its part's file.

Times are a device's, see `timing.py`; what they are divided by takes turns with them, round by
round. The table at the end, and `figures.json`, have the figures that this library wants to reach,
of all parts that the folder holds. With --profile every result of a kernel has its time by the
profiler, too; with `--torch-python PYTHON` torch's and Triton's blockwise products are timed beside
ours. It needs JAX with CUDA, and of what the library needs rich, jaxtyping, flax and optax alone.
`--tiny` runs all parts in miniature on a CPU, with the reference in the kernels' place: it shows
that the command works, and no figure counts.
"""
