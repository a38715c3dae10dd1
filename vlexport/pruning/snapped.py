"""Cosine dissimilarity in exact integers: the same multiple of 2**-10 on every backend.

R rows, N rows per frame, C = R - N rows that have a predecessor, D width.

Rounding a cosine to 2**-10 does not make backends agree: each sums in its own order, and an ulp at a rounding
boundary moves a score by a whole step. So nothing here is ever inexact before it is rounded once:

1. Rows are scaled by a power of two and rounded to integers whose norm is at most 2**12. By Cauchy-Schwarz
   every partial sum of a product of two rows is then an integer of at most 2**24, which float32 holds: any
   order of summation, fused or not, gives the same dot product.
2. The power of two comes from a bound on the norm that is itself exact: the largest magnitude gives a first
   scale, the squares of the rows rounded at that scale sum exactly.
3. The quotient of dot product and norms is rounded by comparing integers; floating square roots and
   divisions only propose the candidate, so they may be a few ulps off.

Measured against the cosine in float64: at most 1.1 steps off, half a step being the rounding itself, for
widths of 1 to 20,480. Where one channel is 200 times the others the small ones lose bits in wide rows: 0.6
steps at width 3,584, 4 at 16,384 and 13 at 20,480.
"""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST, LARGEST = -126, 127  # exponents of normal float32 numbers
BIAS, FRACTION_BITS = 127, 23

STEPS = 1024
MAX_NORM_EXPONENT = 12

# Rounding moves a norm by at most sqrt(D) / 2, 128 at selectors.MAX_WIDTH: 2**12 / sqrt(ROOM) + 128 < 2**12.
ROOM = 1.0703125

# Rows below 2**-80 everywhere count as zero rows.
SMALLEST_EXPONENT = -80


def snapped_dissimilarity(embeds_RD: Tensor, num_tokens: int, portable: bool) -> Tensor:
    """Return 1 - cosine similarity to one frame before (C) in 2**-10; 1 for rows of zeros, NaN, infinity."""
    scale_R1 = _scale(embeds_RD, portable)
    num_changed = embeds_RD.shape[0] - num_tokens
    current_CD = _whole(embeds_RD[num_tokens:], scale_R1[num_tokens:])
    previous_CD = _whole(embeds_RD[:num_changed], scale_R1[:num_changed])
    dot_C = (current_CD * previous_CD).sum(-1)
    square_C = (current_CD * current_CD).sum(-1)
    # The predecessors are the first frame and, but for the last frame, the same rows again.
    first_ND = _whole(embeds_RD[:num_tokens], scale_R1[:num_tokens])
    before_C = torch.cat([(first_ND * first_ND).sum(-1), square_C])[:num_changed]
    return _one_minus_cosine(dot_C, square_C, before_C)


def snapped_distances(rows_BMD: Tensor, portable: bool) -> Tensor:
    """Return one minus the cosine similarity of all rows of a block (B, M, M), in multiples of 2**-10."""
    blocks, size, width = rows_BMD.shape
    rows_RD = rows_BMD.reshape(blocks * size, width)
    whole_BMD = _whole(rows_RD, _scale(rows_RD, portable)).view(blocks, size, width)
    square_BM = (whole_BMD * whole_BMD).sum(-1)
    dot_BMM = whole_BMD @ whole_BMD.transpose(1, 2)
    both_BMM = square_BM[:, :, None].expand(-1, -1, size), square_BM[:, None].expand(-1, size, -1)
    return _one_minus_cosine(dot_BMM, *both_BMM)


def snapped_likeness(rows_RD: Tensor, other_D: Tensor) -> Tensor:
    """Return the cosine similarity of every row with another one (R), in whole steps of 2**-10."""
    both = rows_RD, other_D.to(rows_RD.device)[None]
    whole_RD, whole_1D = (_whole(rows, _scale(rows, portable=False)) for rows in both)
    squares = [(whole * whole).sum(-1) for whole in (whole_RD, whole_1D)]
    distance_R = _one_minus_cosine((whole_RD * whole_1D).sum(-1), squares[0], squares[1].expand(len(rows_RD)))
    return ((1.0 - distance_R) * STEPS).to(torch.int64)


def _whole(rows: Tensor, scale: Tensor) -> Tensor:
    return (rows.float() * scale).round()


def _scale(embeds_RD: Tensor, portable: bool) -> Tensor:
    """Return powers of two (R, 1) that bring the norm of every row of integers to at most 2**12."""
    binades = BinadesWithoutBits(embeds_RD.device) if portable else Binades()
    width = embeds_RD.shape[1]
    largest_R1 = embeds_RD.float().abs().amax(-1, keepdim=True)
    row_exponent_R1 = binades.exponent(largest_R1).clamp_min(SMALLEST_EXPONENT)
    # D < 2**(2k) + 1, and magnitudes of at most 2**(12 - k): the squares sum to at most 2**24.
    width_11 = torch.full((1, 1), width, dtype=torch.float32, device=embeds_RD.device) - 0.5
    first_R1 = binades.power(MAX_NORM_EXPONENT - binades.half(binades.exponent(width_11)) - row_exponent_R1)
    first_R1 = first_R1 if portable else stored(first_R1)
    rough_RD = (embeds_RD.float() * first_R1).round()
    # x <= t + 1/2 for each magnitude x and its rounded t, so x**2 <= t**2 + t + 1/4.
    squares_R1 = (rough_RD * rough_RD).sum(-1, keepdim=True)
    bound_R1 = ROOM * (squares_R1 + rough_RD.abs().sum(-1, keepdim=True) + 0.25 * width)
    scale_R1 = first_R1 * binades.power(MAX_NORM_EXPONENT - binades.half(binades.exponent(bound_R1)))
    return scale_R1 if portable else stored(scale_R1)


def _one_minus_cosine(dot_C: Tensor, square_C: Tensor, before_C: Tensor) -> Tensor:
    """Return 1 - dot / sqrt(square * before) in whole steps; all three are integers up to 2**24."""
    most = 2.0 ** (2 * MAX_NORM_EXPONENT)
    # False for NaN too. Where both norms are finite, so is the dot product.
    sound_C = (square_C > 0) & (before_C > 0) & (square_C <= most) & (before_C <= most)
    dot_C = torch.where(sound_C, dot_C, 0.0)
    # Norms in units of 2**-5, so their product is in units of 2**-10.
    norms_C = _root(torch.where(sound_C, square_C, 1.0)) * _root(torch.where(sound_C, before_C, 1.0))
    steps_C = (dot_C.abs() * float(STEPS * STEPS) / norms_C.float() + 0.5).floor().to(torch.int64)
    # The nearest step is the last k with (2 k - 1) norms <= 2 STEPS dot; the candidate is at most one off.
    doubled_C = dot_C.abs().to(torch.int64) * (2 * STEPS * STEPS)
    steps_C = steps_C - ((2 * steps_C - 1) * norms_C > doubled_C).to(torch.int64)
    steps_C = steps_C + ((2 * steps_C + 1) * norms_C <= doubled_C).to(torch.int64)
    similar_C = steps_C.clamp_max(STEPS).float() * dot_C.sign()
    return 1.0 - similar_C * (1.0 / STEPS)


def _root(squares_C: Tensor) -> Tensor:
    """Return floor(32 * sqrt(square)), int64."""
    scaled_C = squares_C.to(torch.int64) * STEPS
    root_C = scaled_C.float().sqrt().floor().to(torch.int64)
    root_C = root_C - (root_C * root_C > scaled_C).to(torch.int64)
    return root_C + ((root_C + 1) * (root_C + 1) <= scaled_C).to(torch.int64)


def stored(column_R1: Tensor) -> Tensor:
    """Return the same column (rows, 1), written to memory once.

    Inductor would compute it again for every element that uses it, a third of the time of a kernel: a square
    root that may set errno does not leave a loop. A view by strides makes it keep the values.
    """
    return column_R1.as_strided(column_R1.shape, (1, 1))


class Binades:
    """By the layout of IEEE single precision, on float32 and integer tensors of any shape."""

    def exponent(self, values: Tensor) -> Tensor:
        """Return e with 2**(e - 1) <= value < 2**e, for positive normal values; any integer for others."""
        return (values.view(torch.int32) >> FRACTION_BITS) - (BIAS - 1)

    def half(self, exponents: Tensor) -> Tensor:
        """Return the k with 2**e <= 4**k and 4**k < 2**(e + 2), for exponents from -1 up.

        Shift: Inductor checks integer divisions for zero at every element.
        """
        return (exponents + 1) >> 1

    def power(self, exponents: Tensor) -> Tensor:
        """Return 2**e in float32, with e brought into the range of normal numbers."""
        return ((exponents.clamp(SMALLEST, LARGEST) + BIAS) << FRACTION_BITS).view(torch.float32)


class BinadesWithoutBits(Binades):
    """By a table of powers, which becomes a constant of the graph.

    Graph formats have no bit cast (ONNX below opset 26, TensorRT): there a logarithm proposes the exponent
    and comparisons with exact powers settle it.
    """

    def __init__(self, device: torch.device) -> None:
        """Make the table on a device; copying it there waits for the device, so trace this, do not run it."""
        self.powers = torch.tensor([2.0**e for e in range(SMALLEST, LARGEST + 1)], device=device)

    def exponent(self, values: Tensor) -> Tensor:
        """Take a logarithm, right to within one, then compare twice."""
        smallest = 2.0**SMALLEST
        values = torch.where(values >= smallest, values, smallest).clamp_max(2.0**LARGEST)
        guess = values.log2().floor().to(torch.int64).clamp(SMALLEST, LARGEST)
        guess = guess - (values < self.power(guess)).to(torch.int64)
        guess = guess + (values >= self.power(guess + 1)).to(torch.int64)
        return guess.clamp_max(LARGEST) + 1  # there is no power above the largest to compare with

    def half(self, exponents: Tensor) -> Tensor:
        """Divide: ONNX shifts unsigned integers only."""
        return torch.div(exponents + 1, 2, rounding_mode="floor")

    def power(self, exponents: Tensor) -> Tensor:
        return self.powers[exponents.clamp(SMALLEST, LARGEST).to(torch.int64) - SMALLEST]
