"""Exponents of floats and powers of two, exactly, in two spellings with one result.

torch reads the exponent from the bits. Graph formats have no bit cast (ONNX below opset 26, TensorRT): there
a logarithm proposes the exponent and comparisons with exact powers settle it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

SMALLEST, LARGEST = -126, 127  # exponents of normal float32 numbers
BIAS, FRACTION_BITS = 127, 23


class Binades(Protocol):
    """Both on float32 and integer tensors of any shape."""

    def exponent(self, values: Tensor) -> Tensor:
        """The e with 2**(e - 1) <= value < 2**e, for positive normal values; any integer for others."""

    def half(self, exponents: Tensor) -> Tensor:
        """The k with 2**e <= 4**k and 4**k < 2**(e + 2), for exponents from -1 up."""

    def power(self, exponents: Tensor) -> Tensor:
        """2**e in float32, with e brought into the range of normal numbers."""


@dataclass(frozen=True, slots=True)
class FromBits:
    """By the layout of IEEE single precision."""

    def exponent(self, values: Tensor) -> Tensor:
        """The biased exponent field, shifted."""
        return (values.view(torch.int32) >> FRACTION_BITS) - (BIAS - 1)

    def half(self, exponents: Tensor) -> Tensor:
        """A shift: Inductor checks integer divisions for zero at every element."""
        return (exponents + 1) >> 1

    def power(self, exponents: Tensor) -> Tensor:
        """An exponent field with a fraction of zero."""
        return ((exponents.clamp(SMALLEST, LARGEST) + BIAS) << FRACTION_BITS).view(torch.float32)


@dataclass(frozen=True, slots=True)
class FromComparisons:
    """By a table of powers, which becomes a constant of the graph."""

    powers: Tensor

    @classmethod
    def on(cls, device: torch.device) -> FromComparisons:
        """The table on a device; copying it there waits for the device, so trace this, do not run it."""
        return cls(torch.tensor([2.0**e for e in range(SMALLEST, LARGEST + 1)], device=device))

    def exponent(self, values: Tensor) -> Tensor:
        """A logarithm that is right to within one, then two comparisons."""
        smallest = 2.0**SMALLEST
        values = torch.where(values >= smallest, values, smallest).clamp_max(2.0**LARGEST)
        guess = values.log2().floor().to(torch.int64).clamp(SMALLEST, LARGEST)
        guess = guess - (values < self.power(guess)).to(torch.int64)
        guess = guess + (values >= self.power(guess + 1)).to(torch.int64)
        return guess.clamp_max(LARGEST) + 1  # there is no power above the largest to compare with

    def half(self, exponents: Tensor) -> Tensor:
        """A division: ONNX shifts unsigned integers only."""
        return torch.div(exponents + 1, 2, rounding_mode="floor")

    def power(self, exponents: Tensor) -> Tensor:
        """A row of the table."""
        return self.powers[exponents.clamp(SMALLEST, LARGEST).to(torch.int64) - SMALLEST]
