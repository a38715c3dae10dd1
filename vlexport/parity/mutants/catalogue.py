"""All planted bugs."""

from __future__ import annotations

from vlexport.errors import InputError
from vlexport.parity.mutants.around import AROUND
from vlexport.parity.mutants.blocks import ARITHMETIC
from vlexport.parity.mutants.family import FAMILY
from vlexport.parity.mutants.integers import INTEGERS
from vlexport.parity.mutants.lowered import LOWERED
from vlexport.parity.mutants.mutant import Mutant
from vlexport.parity.mutants.rows import ROWS

MUTANTS: tuple[Mutant, ...] = (*INTEGERS, *ARITHMETIC, *FAMILY, *ROWS, *AROUND, *LOWERED)


def find_mutant(name: str) -> Mutant:
    """A planted bug by its name."""
    for mutant in MUTANTS:
        if mutant.name == name:
            return mutant
    raise InputError(f"no mutant '{name}'. Known: {', '.join(sorted(each.name for each in MUTANTS))}.")
