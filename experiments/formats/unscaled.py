"""What experiments/stability.py trains in, for `formats` of a run: floats without scales."""

from experiments.stability import rows

rows()
