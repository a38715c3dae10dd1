"""All planted bugs."""

from __future__ import annotations

from tests.mutation.around import AROUND
from tests.mutation.blocks import ARITHMETIC
from tests.mutation.dense import DENSE
from tests.mutation.family import FAMILY
from tests.mutation.integers import INTEGERS
from tests.mutation.integral import INTEGRAL
from tests.mutation.lowered import LOWERED
from tests.mutation.mutant import LANES, Mutant, lanes
from tests.mutation.rows import BOUNDS, ROWS
from tests.mutation.settings import BLIND_SPOTS
from tests.mutation.shipped import SHIPPED
from tests.mutation.sliced_towers import SLICED_TOWERS
from tests.mutation.slicing import SLICING
from vlexport.errors import InputError

_WINDOWED = (*INTEGERS, *ARITHMETIC, *FAMILY, *ROWS, *BOUNDS, *AROUND)
_SLICED = (*SLICING, *SLICED_TOWERS)
MUTANTS: tuple[Mutant, ...] = (*_WINDOWED, *_SLICED, *LOWERED, *INTEGRAL, *BLIND_SPOTS, *SHIPPED, *DENSE)


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
