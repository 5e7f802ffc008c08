"""What devices can do at most, by the names that plan.chip may give: data sheets, nothing measured.

NVIDIA's cards are the SXM ones, rates dense (without sparsity), links in one direction; the H100,
H200 and B200 sit eight to a host whose NVLink joins them, 72 GB200 in a rack, and each has a
network adapter of its own (400 Gb/s; A100: 200). TPUs: docs.cloud.google.com/tpu/docs/v5e and
v6e, 256 in a pod, 6.4 and 25.6 Tb/s out of it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """One device.

    Attributes:
        memory: bytes.
        rate: 16-bit products, FLOP/s.
        fp8_rate: of the FP8 products that this library makes there; where it has no kernels they
            are products of 16 bits.
        bandwidth: of the memory, bytes/s.
        link: to the devices that are joined with it, bytes/s.
        joined: so many, itself among them.
        network: to all others, bytes/s.
        hopper: this library's kernels run there.
        tpu: its name in a TPU's topology; empty: it is none.
    """

    memory: float
    rate: float
    fp8_rate: float
    bandwidth: float
    link: float
    joined: int
    network: float
    hopper: bool = False
    tpu: str = ""


CHIPS = {
    "h100": Chip(80e9, 989e12, 1979e12, 3.35e12, 450e9, 8, 50e9, hopper=True),
    "h200": Chip(141e9, 989e12, 1979e12, 4.8e12, 450e9, 8, 50e9, hopper=True),
    "h20": Chip(96e9, 148e12, 296e12, 4.0e12, 450e9, 8, 50e9, hopper=True),
    "a100": Chip(80e9, 312e12, 312e12, 2.039e12, 300e9, 8, 25e9),
    "b200": Chip(180e9, 2250e12, 2250e12, 8e12, 900e9, 8, 50e9),
    "gb200": Chip(186e9, 2500e12, 2500e12, 8e12, 900e9, 72, 50e9),
    "tpu-v5e": Chip(16e9, 197e12, 197e12, 0.819e12, 200e9, 256, 3.125e9, tpu="v5e"),
    "tpu-v6e": Chip(32e9, 918e12, 918e12, 1.638e12, 400e9, 256, 12.5e9, tpu="v6e"),
}
