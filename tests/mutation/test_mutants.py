"""Planted bugs: the gate sees a sample of them, and the catalogue fits the code that it patches."""

from pathlib import Path

import pytest

from tests.mutation.catalogue import MUTANTS, find_mutant
from tests.mutation.mutant import NEVER_SURVIVE, RECIPE, Mutant, lanes, no_bug, patched
from tests.mutation.running import PACKAGE, Outcome, judged
from tests.mutation.table import as_markdown, is_strong_enough
from tests.mutation.trials import recipe_of
from vlexport.errors import InputError
from vlexport.recipe import recipe_folder

# One for each way that a bug can be seen: (name, a level that has to see it).
SAMPLE = {
    "windows shared by items": "L0",
    "row and column positions swapped": "L0",
    "attention output left in frame order": "L1",
    "first row zeroed": "L3",
    "epsilon of another norm": "L1",
    "tanh for exact gelu": "L1",
    "norm in the working dtype": "L2",
    "positions rounded to bfloat16": "L1",
    "rows: keys beyond a frame are seen": "L1",
    "stale anchor": "L0",
    "ties from the last index on": "L0",
    "cache key without dtype": "identity",
    "int8: scale of the neighbouring row": "L2",
    "int8: zero point off by one": "L2",
    "int8: rounded twice, to half the steps first": "L2",
    "far: keys beyond 1,024 dropped": "L1",
    "gate: nothing compared has passed": "L1",
    "stored: one bit of one weight in the ONNX file": "L0",
}


def source_of(mutant):
    if mutant.file == RECIPE:
        return (recipe_folder() / f"{recipe_of(mutant.trial)}.py").read_text(encoding="utf-8")
    return (Path(PACKAGE) / mutant.file).read_text(encoding="utf-8")


def test_every_bug_finds_its_place_in_the_code():
    lost = {}
    for mutant in MUTANTS:
        try:
            compile(patched(mutant, source_of(mutant)), mutant.file, "exec")
        except (InputError, SyntaxError) as error:
            lost[mutant.name] = str(error)
    assert lost == {}


def test_there_are_enough_bugs_and_no_two_are_called_alike():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 60
    assert set(NEVER_SURVIVE) <= {mutant.kind for mutant in MUTANTS}


def test_a_bug_whose_place_is_gone_is_refused():
    mutant = Mutant(name="moved", kind="order", file="vision/grid.py", old="no such text", new="")
    with pytest.raises(InputError, match="its place is 0 times in vision"):
        patched(mutant, "x = 1\n")


@pytest.mark.slow
def test_the_gate_sees_the_sample_and_nothing_where_there_is_no_bug():
    told: list[str] = []
    bugs = [find_mutant(name) for name in SAMPLE]
    right = [no_bug(trial) for trial in dict.fromkeys(bug.trial for bug in bugs)]
    outcomes = judged([*right, *bugs], workers=2, tell=told.append)
    assert {each.mutant.name: each.faults for each in outcomes[: len(right)] if each.caught} == {}
    unseen = {
        each.mutant.name: each.faults
        for each in outcomes[len(right) :]
        if SAMPLE[each.mutant.name] not in each.faults
    }
    assert unseen == {}


def outcome(kind, *levels, harmless=""):
    mutant = Mutant(name=kind, kind=kind, file="x.py", old="a", new="b", harmless=harmless)
    return Outcome(mutant=mutant, faults=dict.fromkeys(levels, "seen"))


CAUGHT = [outcome("arithmetic", "L1") for _ in range(99)]


def test_a_gate_that_misses_one_in_a_hundred_is_strong_enough():
    assert is_strong_enough([*CAUGHT, outcome("arithmetic")])


@pytest.mark.parametrize("kind", NEVER_SURVIVE)
def test_a_gate_that_misses_a_bug_of_these_kinds_is_not(kind):
    assert not is_strong_enough([*CAUGHT, outcome(kind)])


def test_a_gate_that_misses_one_in_twenty_is_not():
    assert not is_strong_enough([*CAUGHT[:19], outcome("arithmetic")])


def test_a_patch_without_effect_is_listed_and_not_counted():
    page = as_markdown([*CAUGHT, outcome("windows", harmless="the order of equal segments is free")])
    assert "99 of 99 caught (100.0%)." in page
    assert "* windows (windows): the order of equal segments is free" in page


def test_a_patch_is_judged_where_it_can_be_seen():
    assert {
        name: lanes(find_mutant(name))[0] for name in ("stale anchor", "kernel stays at the first run")
    } == {
        "stale anchor": "around",
        "kernel stays at the first run": "onnxruntime",
    }
