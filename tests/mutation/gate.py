"""Whether the gate can fail: nothing to compare, tables nobody checks, one block behind wide limits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tests.changed_recipes import with_few_mixes, with_tower
from vlexport.backends import Engine, Runner
from vlexport.parity.check import Checker
from vlexport.parity.integers import unchecked_rows
from vlexport.parity.parts import stage_name
from vlexport.parity.report import ParityReport
from vlexport.parity.subject import Subject
from vlexport.specs import Range, ShapeProfile, TensorSpec

Found = Iterator[tuple[str, str]]
# Tables that no recipe has, one of them named as shelves are.
STRANGE = ("strange", "strange_cells_a")
# A fault of one block, and a limit that the noise of any reference is above.
FACTOR, NARROW = 1.01, 1e-12


def gate_faults(subject: Subject, engine: Engine) -> Found:
    """Yield what a gate would let pass, by the level that should have refused it; `engine` is a right one."""
    yield from _empty(subject, engine)
    yield from _unchecked(subject, engine)


def _empty(subject: Subject, engine: Engine) -> Found:
    """A profile that no sample fits leaves nothing to compare."""
    profile = ShapeProfile("odd", {symbol: Range(5, 5, 5) for symbol in engine.spec.profile.ranges})
    climb = Checker(_like(engine, profile), subject, _silent)
    rows = (*climb.engine_integers(), *climb.structure())
    if ParityReport(rows=rows, required=()).status == "passed":
        yield "L1", "nothing was compared, and passed"


def _like(engine: Engine, profile: ShapeProfile) -> Engine:
    class Unasked(Runner):
        def run(self, tensors: object) -> dict[str, Any]:
            return {}

    return Engine(Unasked(), replace(engine.spec, profile=profile))


def _unchecked(subject: Subject, engine: Engine) -> Found:
    """Tables that no check touches are named."""
    strange = tuple(TensorSpec(name=name, dtype="int32", shape=(1,)) for name in STRANGE)
    rules = replace(Checker(engine, subject, _silent).rules, inputs=strange)
    told = {row.check for row in unchecked_rows(subject, rules) if row.verdict == "observed"}
    yield from (("L0", f"table {name} is not checked, and not named") for name in STRANGE if name not in told)


def spoiled(subject: Subject) -> Subject:
    """Return a subject with a wrong last block, and with a limit so narrow that noise widens it."""
    limit = subject.structure_limit
    assert limit is not None

    def change(module: Any) -> None:
        matrix = next(each for each in module.blocks[-1].parameters() if each.ndim > 1)
        matrix.data.mul_(FACTOR)

    narrow = replace(limit, relative_l2=NARROW, worst_token=NARROW)
    wrong = replace(with_tower(subject.recipe, change), limits={"float32": narrow})
    return replace(subject, recipe=wrong)


def block_faults(subject: Subject, engine: Engine) -> Found:
    """Yield a fault if the wrong block of this spoiled pair is not named."""
    small = replace(subject, recipe=with_few_mixes(subject.recipe, subject.config))
    failed = {row.check for row in Checker(engine, small, _silent).structure() if row.verdict == "failed"}
    tower: Any = subject.tower()
    last = stage_name(len(tower.blocks) - 1)
    if last not in failed:
        yield "L1", f"{last} is wrong behind a widened limit, and not named"


def _silent(phase: str, share: float) -> None:
    """Nobody watches."""
