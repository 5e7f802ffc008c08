"""What a compiled program does, and what devices send each other in it, read from its text.

XLA alone decides where arrays are gathered, and says it nowhere else: a sharding that is left open
in one place of a model can make every device compute every token, and the result is the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


@dataclass(frozen=True)
class Instruction:
    """One of a compiled program, outside of those that XLA has fused.

    Attributes:
        line: of the text.
        opcode: what it does, such as "fusion".
        target: of a custom call; else empty.
        times, loops: as of `Collective`.
    """

    line: str
    opcode: str
    target: str
    times: int
    loops: int


@dataclass(frozen=True)
class Collective:
    """One exchange of a compiled program.

    Attributes:
        kind: one of KINDS.
        arrays: its results on one device, as (dtype, shape); several where XLA joined some.
        group: devices that exchange with each other, the first of the groups.
        times: how often a call of the program makes it: the product of the loops around it.
        loops: of them, how many have a number of rounds that the program does not say; `times` is
            of one round of these.
        where: of the source, as JAX names its operations.
    """

    kind: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    group: tuple[int, ...]
    times: int
    loops: int
    where: str

    @property
    def nbytes(self) -> int:
        """Bytes of its results on one device, once."""
        return sum(math.ceil(_bits(kind) * math.prod(shape) / 8) for kind, shape in self.arrays)

    @property
    def sent(self) -> int:
        """Bytes that one device sends in all its `times`, over a ring of the group.

        An all-reduce is a reduce-scatter and an all-gather.
        """
        n = len(self.group)
        of_ring = {
            "all-reduce": 2 * (n - 1) / n,
            "all-gather": (n - 1) / n,
            "reduce-scatter": n - 1,
            "all-to-all": (n - 1) / n,
            "collective-permute": 1,
        }[self.kind]
        return round(self.times * self.nbytes * of_ring)

    def axes(self, sizes: dict[str, int]) -> tuple[str, ...]:
        """Find the mesh axes along which its devices lie.

        Args:
            sizes: of all axes of the mesh that the program was compiled for, in their order.
        """
        places = np.unravel_index(self.group, tuple(sizes.values()))
        return tuple(axis for axis, at in zip(sizes, places, strict=True) if np.ptp(at))


def instructions(text: str) -> Iterator[Instruction]:
    """Yield what a compiled program runs, as often as a call of it does.

    Args:
        text: of `jax.stages.Compiled.as_text`.

    Raises:
        ValueError: the text is not a compiled program.
    """
    computations, entry = _computations(text)
    if not entry:
        raise ValueError("not the text of a compiled program: there is no ENTRY computation")
    yield from _walk(computations, entry, 1, 0)


def collectives(text: str) -> list[Collective]:
    """List what a compiled program exchanges.

    Args:
        text: of `jax.stages.Compiled.as_text`.

    Raises:
        ValueError: the text is not a compiled program, or a collective in it cannot be read.
    """
    return [
        _read(each, found)
        for each in instructions(text)
        if (found := _COLLECTIVE.search(each.line))
    ]


def sent_over(found: Iterable[Collective], sizes: dict[str, int]) -> dict[str, int]:
    """Add up the bytes that a device sends, by the mesh axes that they travel along."""
    told: dict[str, int] = {}
    for one in found:
        if len(one.group) > 1:
            link = " ".join(one.axes(sizes))
            told[link] = told.get(link, 0) + one.sent
    return told


_OPCODE = re.compile(r" = .*? ([a-z][\w\-]*)\(")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_CALLING = ("conditional", "call", "async-start")
"""Instructions that run other computations, beside loops."""
_COLLECTIVE = re.compile(rf" = (.*?) ({'|'.join(KINDS)})(-start)?\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\](, device_ids=\S+)? \{([^}]*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{\{(\d+),(\d+)\}")
_CALLED = re.compile(r"\b(?:body|condition|calls|to_apply|\w+_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
_ROUNDS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_NAME = re.compile(r'op_name="([^"]*)"')


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation by its name, and the name of the one that is entered."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    entry = ""
    for line in text.splitlines():
        if line.endswith("{") and (head := re.match(r"(ENTRY )?%?([\w.\-]+) \(", line)):
            lines = found[head[2]] = []
            entry = head[2] if head[1] else entry
        elif line.startswith("  "):
            lines.append(line)
    return found, entry


def _walk(
    computations: dict[str, list[str]], name: str, times: int, loops: int
) -> Iterator[Instruction]:
    for line in computations[name]:
        if (found := _OPCODE.search(line)) is None:
            continue
        opcode, target = found[1], _TARGET.search(line)
        yield Instruction(line, opcode, target[1] if target else "", times, loops)
        inside, unknown = times, loops
        if opcode == "while":
            rounds = _ROUNDS.search(line)
            inside, unknown = (times * int(rounds[1]), loops) if rounds else (times, loops + 1)
        elif opcode not in _CALLING:
            continue
        called = _CALLED.findall(line)
        for branches in _BRANCHES.findall(line):
            called += [branch.strip().lstrip("%") for branch in branches.split(",")]
        for other in called:
            if other in computations:
                yield from _walk(computations, other, inside, unknown)


def _read(instruction: Instruction, found: re.Match) -> Collective:
    line = instruction.line
    kind, arrays = found[2], _ARRAY.findall(found[1])
    # of what is started the operands come first, of an all-reduce only where they stand apart
    if found[3] and (kind != "all-reduce" or found[1].startswith("((")):
        pairs = [array for array in arrays if array[1]]  # others are what a device keeps of it
        arrays = pairs[len(pairs) // 2 :]
    name = _NAME.search(line)
    shapes = tuple((dtype, tuple(int(x) for x in sides.split(",") if x)) for dtype, sides in arrays)
    where, times, loops = name[1] if name else "", instruction.times, instruction.loops
    return Collective(kind, shapes, _group(line), times, loops, where)


def _group(line: str) -> tuple[int, ...]:
    if listed := _LISTED.search(line):
        return tuple(int(x) for x in listed[1].split(",") if x)
    if iota := _IOTA.search(line):
        groups, sides = ([int(x) for x in part.split(",")] for part in (iota[1], iota[2]))
        devices = np.arange(math.prod(sides)).reshape(sides)
        if iota[3]:
            devices = devices.transpose([int(x) for x in iota[3].split(",")])
        return tuple(int(x) for x in devices.reshape(groups)[0])
    if (named := _NAMED.search(line)) and not named[2] and ":" not in named[3]:
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        devices = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        along = re.findall(r"'(\w+)'", named[3])
        kept = tuple(slice(None) if axis in along else 0 for axis in sizes)
        return tuple(int(x) for x in devices[kept].reshape(-1))
    if pairs := _PAIRS.search(line):
        return int(pairs[1]), int(pairs[2])
    raise ValueError(f"a collective without its devices: {line.strip()[:200]}")


def _bits(dtype: str) -> int:
    """Of one number of XLA's type: f8e4m3fn, bf16, s32, pred."""
    return 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
