"""A quantized tensor and what it is in: the operands of every product here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Key, UInt32

from pallas_kernels.backend import Backend, block_name, platform


class ScaledOperand(NamedTuple):
    """A matrix whose rows are what is summed.

    Attributes:
        values: [m, k], a float of 8 or 4 bits.
        scales: [m, k / group], float8_e8m0fnu or float8_e4m3fn.
        factor: float32 [m or 1, 1] of whole rows; None: 1.
    """

    values: Array
    scales: Array
    factor: Array | None = None


@dataclass(frozen=True)
class Format(ABC):
    """How a tensor is stored, and what its stored form stands for.

    A subclass is a frozen dataclass, so that a compiled program is specialised to it. Kernels
    multiply `Blocks` (pallas_kernels.quantize); whatever else has these two methods is multiplied
    dequantized, by the reference.

    Attributes:
        block: (rows, columns) of the last two axes that share a scale.
        packed: numbers along a row that one stored value holds.
        regrouped: what the forward has quantized of an input is kept for the backward, and
            quantized anew along tokens there; else what is kept is quantized along tokens from the
            input itself.
        by_block: a block's bits depend on that block alone, so that a row may be quantized in
            pieces of whole blocks.
    """

    block: tuple[int, int]
    packed: ClassVar[int] = 1
    regrouped: ClassVar[bool] = False
    by_block: ClassVar[bool] = False

    @abstractmethod
    def quantize(self, x: Float[Array, "*batch m n"], backend: Backend = "auto") -> QTensor:
        """Quantize by blocks of the last two axes; a NaN or an infinity makes a scale that is not
        finite."""

    @abstractmethod
    def dequantize(self, q: QTensor) -> Float[Array, "*batch m n"]:
        """Compute what `q` stands for, float32."""

    @abstractmethod
    def limit(self, q: QTensor) -> Float[Array, ...]:
        """Find the largest magnitude that the scale of each element covers, float32, broadcastable
        to `q`."""

    def scaled_operand(self, q: QTensor) -> ScaledOperand | None:
        """Bring a matrix into the form that a device's own product of scaled operands takes
        (`jax.lax.scaled_dot`); None where there is none."""
        return None

    def dithered(self, q: QTensor, salt: UInt32[Array, ""]) -> Float[Array, "*batch m n"]:
        """Draw each number at random from all those that round to it, float32; zeros stay, and the
        largest, which set a scale.

        Args:
            salt: fixes the draws, whatever the sharding.

        Raises:
            NotImplementedError: the format does not know its cells.
        """
        raise NotImplementedError(f"{self.name} has no dithered")

    def store(
        self, x: Float[Array, "*batch m n"], key: Key[Array, ""], backend: Backend = "auto"
    ) -> QTensor:
        """Quantize what is not negative, is divided by, and changes by less than a step each time,
        as Adam's second moment does: rounded stochastically, and nothing above 0 becomes 0.

        Raises:
            NotImplementedError: the format has no such rounding.
        """
        raise NotImplementedError(f"{self.name} has no store")

    def quantize_stochastic(
        self, x: Float[Array, "*batch m n"], salt: UInt32[Array, ""]
    ) -> QTensor:
        """Quantize with each value rounded up or down at random, so that its mean is the value.

        Args:
            salt: fixes the draws, whatever the sharding.

        Raises:
            NotImplementedError: the format rounds to nearest only.
        """
        raise NotImplementedError(f"{self.name} has no stochastic rounding")

    @property
    def transposed(self) -> Format:
        """The same along the other axis: the format of `QTensor.T`, and how an operand is quantized
        that is summed over its rows."""
        return Transposed(self.block[::-1], self)

    @property
    def square(self) -> bool:
        """Whether a product that is summed over rows may read the same values and scales; else it
        wants a quantization of its own, as a scale must be constant over what is summed."""
        return self.block[0] == self.block[1]

    @property
    def by_row(self) -> bool:
        """Whether a row's bits depend on that row alone, and so a token's not on its batch."""
        return self.block[0] == 1

    @property
    def name(self) -> str:
        """For messages."""
        return f"{type(self).__name__} {block_name(self.block)}"


@dataclass(frozen=True)
class Transposed(Format):
    """A format along the other axis: groups of a row are groups of a column.

    Attributes:
        of: the format.
    """

    of: Format

    def quantize(self, x: Float[Array, "*batch m n"], backend: Backend = "auto") -> QTensor:
        """Quantize the transpose, and turn it back."""
        return self.of.quantize(jnp.swapaxes(x, -1, -2), backend).T

    def quantize_stochastic(
        self, x: Float[Array, "*batch m n"], salt: UInt32[Array, ""]
    ) -> QTensor:
        """Quantize the transpose with these draws, and turn it back."""
        return self.of.quantize_stochastic(jnp.swapaxes(x, -1, -2), salt).T

    def dequantize(self, q: QTensor) -> Float[Array, "*batch m n"]:
        """Compute what `q` stands for, float32."""
        return jnp.swapaxes(q.T.dequantize(), -1, -2)

    def limit(self, q: QTensor) -> Float[Array, ...]:
        """The largest magnitudes, turned back."""
        return jnp.swapaxes(self.of.limit(q.T), -1, -2)

    @property
    def transposed(self) -> Format:
        return self.of

    @property
    def name(self) -> str:
        return f"{self.of.name}, transposed"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QTensor:
    """A quantized tensor: x is about values * (scale of the block) * (outer scale).

    Attributes:
        values: [..., m, n], or fewer columns where several numbers are packed into one; in a loop
            on a CPU `Bits` of them, which `from_bits` turns back before they are used.
        scales: [..., ceil(m / block[0]), ceil(n / block[1])], float32 or a format of its own.
        format: what says so.
        outer: float32 [..., m or 1, 1], the scale of the scales; None: there is none. One over the
            rows of a batch would make a row's bits depend on its neighbours.
    """

    values: Array
    scales: Array
    format: Format = field(metadata={"static": True})
    outer: Array | None = None

    @property
    def block(self) -> tuple[int, int]:
        return self.format.block

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor that it stands for."""
        if isinstance(self.format, Transposed):
            *first, rows, columns = self.T.shape
            return *first, columns, rows
        *first, columns = self.values.shape
        return *first, columns * self.format.packed

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in jax.tree.leaves(self))

    @property
    def T(self) -> QTensor:  # noqa: N802  # numpy's name
        """The transpose of the last two axes: the same values and scales, read the other way."""
        turned = jax.tree.map(lambda x: jnp.swapaxes(x, -1, -2), self)
        return replace(turned, format=self.format.transposed)

    def rows(self) -> QTensor:
        """The tensor as one matrix, its leading axes in one; of rows that were quantized each by
        itself."""
        return jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), self)

    def dequantize(self) -> Float[Array, "*batch m n"]:
        """Compute what it stands for, float32."""
        return self.format.dequantize(self)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Bits:
    """An array of 8-bit floats as its bit patterns.

    Attributes:
        patterns: uint8.
        dtype: name of what they are of.
    """

    patterns: Array
    dtype: str = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.patterns.shape


def to_bits(tree: Any) -> Any:
    """Replace arrays of 8-bit floats in a tree by their `Bits`, where XLA has no instruction for
    such numbers: on a CPU. A loop that stacks or slices them there converts the whole stack at each
    step. Elsewhere the tree stays as it is."""
    if platform() != "cpu":
        return tree

    def one(x: Array) -> Array | Bits:
        if not jnp.issubdtype(x.dtype, jnp.floating) or jnp.finfo(x.dtype).bits != 8:
            return x
        return Bits(lax.bitcast_convert_type(x, jnp.uint8), x.dtype.name)

    return jax.tree.map(one, tree)


def from_bits(tree: Any) -> Any:
    """Undo `to_bits`."""

    def one(x: Array | Bits) -> Array:
        if not isinstance(x, Bits):
            return x
        return lax.bitcast_convert_type(x.patterns, jnp.dtype(x.dtype))

    return jax.tree.map(one, tree, is_leaf=lambda x: isinstance(x, Bits))


def moved(move: Callable[..., Array], *arrays: Array) -> Array:
    """Apply what moves numbers of one dtype and computes none, as a gather or an update of a slice,
    by way of their bits where `to_bits` has them."""
    assert len({x.dtype for x in arrays}) == 1
    as_bits = to_bits(arrays)
    if not all(isinstance(x, Bits) for x in as_bits):
        return move(*arrays)
    return lax.bitcast_convert_type(move(*(x.patterns for x in as_bits)), arrays[0].dtype)
