"""Arms x seeds on one base run, and whether an arm is worse than the baseline: `fp8rl ablate`."""
