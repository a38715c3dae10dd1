"""All planted bugs."""

from __future__ import annotations

from vlexport.errors import InputError
from vlexport.parity.mutants.around import AROUND
from vlexport.parity.mutants.blocks import ARITHMETIC
from vlexport.parity.mutants.family import FAMILY
from vlexport.parity.mutants.integers import INTEGERS
from vlexport.parity.mutants.integral import INTEGRAL
from vlexport.parity.mutants.lowered import LOWERED
from vlexport.parity.mutants.mutant import LANES, Mutant, lanes
from vlexport.parity.mutants.rows import BOUNDS, ROWS
from vlexport.parity.mutants.sliced_towers import SLICED_TOWERS
from vlexport.parity.mutants.slicing import SLICING

_WINDOWED = (*INTEGERS, *ARITHMETIC, *FAMILY, *ROWS, *BOUNDS, *AROUND)
_SLICED = (*SLICING, *SLICED_TOWERS)
MUTANTS: tuple[Mutant, ...] = (*_WINDOWED, *_SLICED, *LOWERED, *INTEGRAL)


def find_mutant(name: str) -> Mutant:
    """A planted bug by its name."""
    for mutant in MUTANTS:
        if mutant.name == name:
            return mutant
    raise InputError(f"no mutant '{name}'. Known: {', '.join(sorted(each.name for each in MUTANTS))}.")


def judged_lanes(mutant: Mutant) -> tuple[str, ...]:
    """The parts of the line to judge; where there is no bug, all that any bug of the trial is judged on."""
    if mutant.planted:
        return lanes(mutant)
    taken = {lane for each in MUTANTS if each.trial == mutant.trial for lane in lanes(each)}
    return tuple(lane for lane in LANES if lane in taken)
