"""Run by test_replicas.py: what eight replicas send each other in an update, in the program that is
compiled for Hopper."""

from __future__ import annotations

import json

from pallas_kernels.check.compile import activate_toolchain

REPLICAS = 8


def main() -> None:
    activate_toolchain()
    from parallel.on_gradients import compiled, sent

    from fp8rl_jax.training.ahead import mesh_for
    from pallas_kernels.backend import tracing_for

    mesh = mesh_for({"data": REPLICAS})
    names = ("float32", "bfloat16", "e4m3-power_of_two")
    with tracing_for(132):
        texts = {name: compiled(name, mesh) for name in names}
    print(json.dumps({name: sent(text) for name, text in texts.items()}))


if __name__ == "__main__":
    main()
