"""Trains two steps of a tiny run on the devices that there are; prints what a step measured as JSON.

Arguments: run file, output directory, then flags of `fp8rl train`.
"""

import json
import sys
from pathlib import Path

from fp8rl_jax.cli.main import main

run_file, output, *flags = sys.argv[1:]
code = main(["train", run_file, "--output", output, *flags])
rows = [json.loads(line) for line in (Path(output) / "metrics.jsonl").read_text().splitlines()] if code == 0 else []
print(json.dumps({"code": code, "rows": rows}))
