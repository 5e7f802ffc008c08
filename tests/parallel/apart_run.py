"""Run by test_apart.py on 4 devices: runs whose rollout has devices of its own.

Arguments: run file, directory. `apart` samples on two devices beside the trainer's two; `ahead`
does so while the trainer learns; `resumed` is that run ended behind its second step, and gone on
with. Prints what the same updates measure with nothing done at the same time, and the flags of
`ahead`, as JSON.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np

from fp8rl_jax.cli.main import main
from fp8rl_jax.config.files import read_config
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.training.collect import Collector
from fp8rl_jax.training.loop import train
from fp8rl_jax.training.setup import Setup, build, reward_pool
from fp8rl_jax.training.source import find_model
from fp8rl_jax.weights.load import load_policy

run_file, directory = sys.argv[1], Path(sys.argv[2])
APART = {"data": 1, "fsdp": 2, "rollout": {"data": 2}}
AHEAD = {"mesh": APART, "rollout": {"steps_ahead": 1}}


def flags(table: dict, prefix: str = "--") -> list[str]:
    given = []
    for name, value in table.items():
        key = prefix + name.replace("_", "-")
        given += flags(value, f"{key}.") if isinstance(value, dict) else [key, str(value)]
    return given


def go(name: str, *given: str) -> None:
    assert main(["train", run_file, "--output", str(directory / name), *given]) == 0


def begun(name: str) -> Setup:
    return build(read_config(RunConfig, run_file, AHEAD, {"output": str(directory / name)}))


def one_after_the_other() -> list[dict[str, float]]:
    """Metrics of the updates of `ahead`: each step's completions are of the weights that the update
    before it had not changed yet."""
    setup = begun("none")
    session, config, rows = setup.session, setup.config, []
    with reward_pool(setup) as pool:
        collector = Collector(session, setup.train, pool, config)
        session.sync(collector.prompts(0))
        found = collector.collect(0)
        for step in range(config.trainer.steps):
            coming = collector.collect(step + 1)
            given = found.experience, found.chosen, found.entering, collector.prompts(step + 2)
            rows.append(session.update(*given))
            found = coming
    return rows


go("apart", *flags({"mesh": APART}))
go("ahead", *flags(AHEAD))
train(begun("resumed"), callbacks=[lambda step, _: step == 1])
# its checkpoint, which has the step in hand, too, is as good a model as the one that it wrote
run, aside = directory / "resumed", directory / "aside"
(run / "model").rename(aside)
one, other = map(load_policy, (aside, find_model(run)))
jax.tree.map(np.testing.assert_array_equal, one, other)
aside.rename(run / "model")
go("resumed", *flags(AHEAD), "--resume")
print(json.dumps({"rows": one_after_the_other(), "flags": flags(AHEAD)}))
