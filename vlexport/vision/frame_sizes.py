"""How many cells a frame of so many pixels may become, whatever its aspect; sides are rounded."""

from __future__ import annotations

import math

from vlexport.vision.preprocess import MAX_ASPECT, ResizeRule


def most_cells(rule: ResizeRule, pixels: int, cell: int) -> int:
    """Return the most cells of a frame of at most `pixels`; narrow strips gain most by rounding.

    `cell` is the side of a cell in pixels.
    """
    if not rule.resize:
        return max(1, pixels // cell**2)
    rounded = max(_longest(pixels, cell, across) for across in range(1, math.isqrt(pixels) // cell + 2))
    # A frame that is shrunk to less than a cell across is given a whole one again.
    strip = math.isqrt(MAX_ASPECT * rule.max_pixels) // cell if rule.max_pixels < MAX_ASPECT * cell**2 else 0
    return max(min(rounded, max(rule.max_pixels // cell**2, strip)), _grown(rule.min_pixels, cell))


def least_cells(rule: ResizeRule, pixels: int, cell: int) -> int:
    """Return A number of cells that no frame of at least `pixels` falls below."""
    if not rule.resize:
        return max(1, -(-pixels // cell**2))
    # Shrinking to the rule's largest area rounds both sides down, at most to half.
    area = min(pixels, rule.max_pixels // 4)
    plain = min(_shortest(area, cell, across) for across in range(1, math.isqrt(area) // cell + 2))
    # Thinner than half a cell, a strip rounds to nothing and grows to the rule's smallest area.
    grows = pixels <= MAX_ASPECT * (cell // 2) ** 2
    return min(plain, -(-rule.min_pixels // cell**2)) if grows else plain


def _longest(pixels: int, cell: int, across: int) -> int:
    """Return cells of the longest frame that is `across` cells wide and has at most `pixels`."""
    narrowest, widest = _rounds_to(across, cell), _rounds_to(across + 1, cell) - 1
    # Beyond this width the area ends the frame, below it the aspect does.
    turn = math.isqrt(pixels // MAX_ASPECT)
    sides = (min(max(side, narrowest), widest) for side in (turn, turn + 1))
    lengths = (min(pixels // side, MAX_ASPECT * side) for side in sides)
    return across * max(max(1, round(length / cell)) for length in lengths)


def _shortest(pixels: int, cell: int, across: int) -> int:
    """Return cells of the shortest frame that is `across` cells wide and has at least `pixels`."""
    widest = _rounds_to(across + 1, cell) - 1
    return across * max(1, round(-(-pixels // widest) / cell))


def _rounds_to(count: int, cell: int) -> int:
    """Return the smallest side that is rounded to `count` cells, halves going to even numbers."""
    side = -(-(2 * count - 1) * cell // 2)
    return side if round(side / cell) == count else side + 1


def _grown(area: int, cell: int) -> int:
    """Return the most cells of a frame that has grown to `area`; both sides are rounded up."""
    thinnest = math.sqrt(area / MAX_ASPECT)
    found = []
    for across in range(1, math.isqrt(area) // cell + 2):
        side = max((across - 1) * cell, thinnest)
        if side <= across * cell:
            found.append(across * math.ceil(area / side / cell))
    return max(found)
