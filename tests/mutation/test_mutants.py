"""Planted bugs: the gate sees a sample of them, and the catalogue fits the code that it patches."""

import ast
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.mutation.bugs import LANES, NEVER_SURVIVE, Bug, all_bugs, find_bug, no_bug, plant
from tests.mutation.runner import (
    PACKAGE,
    Log,
    Outcome,
    as_markdown,
    is_strong_enough,
    judged,
    right_library,
    seen_by,
)
from tests.mutation.trials import CLASSES, demo_trials, recipe_of, write_trial
from vlexport.errors import InputError
from vlexport.recipe import list_recipes, recipe_folder

# One for each way that a bug can be seen: (name, a level that has to see it).
SAMPLE = {
    "windows shared by items": "L0",
    "row and column positions swapped": "L0",
    "attention output left in frame order": "L1",
    "first row zeroed": "L1",
    "epsilon of another norm": "L1",
    "tanh for exact gelu": "L1",
    "norm in the working dtype": "L3",
    "positions rounded to bfloat16": "L1",
    "rows: keys beyond a frame are seen": "L1",
    "text after a video moves by its height": "tests",
    "ties from the last index on": "tests",
    "cache key without dtype": "identity",
    "int8: scale of the neighbouring row": "L2",
    "int8: zero point off by one": "L2",
    "int8: rounded twice, to half the steps first": "L2",
    "far: keys beyond 1,024 dropped": "L1",
    "gate: nothing compared has passed": "L1",
    "stored: one bit of one weight in the ONNX file": "L0",
}


@pytest.mark.seconds
def test_every_bug_finds_its_place_in_the_code():
    lost, recipes = {}, recipe_folder()
    for bug in all_bugs():
        source = bug.path(PACKAGE, recipes, recipe_of(bug.trial)).read_text(encoding="utf-8")
        try:
            ast.parse(bug.planted(source), bug.file)
        except (InputError, SyntaxError) as error:
            lost[bug.name] = str(error)
    assert lost == {}
    with pytest.raises(InputError, match=r"its place is 0 times in vision/grid.py"):
        Bug(name="moved", file="vision/grid.py", old="no such text").planted("x = 1\n")


def test_there_are_enough_bugs_and_no_two_are_called_alike():
    assert len({bug.name for bug in all_bugs()}) == len(all_bugs()) >= 640
    assert set(NEVER_SURVIVE) <= {bug.kind for bug in all_bugs()}
    assert {lane for bug in all_bugs() for lane in bug.lanes} == set(LANES)
    assert find_bug("text after a video moves by its height").lanes == ()
    assert find_bug("kernel stays at the first run").lanes == ("onnxruntime",)
    demos = [trial for card in list_recipes() for trial in demo_trials(card.name)]
    assert len({*demos, *CLASSES}) == len(demos) + len(CLASSES)


INTEGERS = [name for name in SAMPLE if name.startswith("int8")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        [name for name in SAMPLE if name not in INTEGERS],
        INTEGERS,
    ],
    ids=["floats", "integers"],
)
def test_the_gate_sees_the_sample_and_nothing_where_there_is_no_bug(names):
    lines: list[str] = []
    outcomes = judged([find_bug(name) for name in names], workers=2, report=lines.append)
    unseen = {each.bug.name: each.faults for each in outcomes if SAMPLE[each.bug.name] not in each.faults}
    assert unseen == {}
    right = judged(right_library(outcomes), workers=2, report=lines.append)
    assert {each.bug.name: each.faults for each in right if each.faults} == {}


def outcome(kind, *levels, harmless=""):
    bug = Bug(name=kind, kind=kind, file="x.py", old="a", new="b", harmless=harmless)
    return Outcome(bug=bug, faults=dict.fromkeys(levels, "seen"))


CAUGHT = [outcome("arithmetic", "L1") for _ in range(99)]


def test_a_gate_is_strong_enough_by_what_survives_it():
    assert is_strong_enough([*CAUGHT, outcome("arithmetic")])
    assert not is_strong_enough([*CAUGHT[:19], outcome("arithmetic")])
    for kind in NEVER_SURVIVE:
        assert not is_strong_enough([*CAUGHT, outcome(kind)]), kind
    broken = outcome("arithmetic", "broken")
    assert not broken.caught
    assert not is_strong_enough([*CAUGHT, broken])
    assert "* arithmetic (arithmetic): broken, mend the patch: seen" in as_markdown([*CAUGHT, broken])


def test_a_patch_without_effect_is_listed_and_not_counted():
    page = as_markdown([*CAUGHT, outcome("windows", harmless="the order of equal segments is free")])
    assert "99 of 99 caught (100.0%)." in page
    assert "* windows (windows): the order of equal segments is free" in page


def test_the_written_table_says_who_saw_a_bug_the_last_time(tmp_path):
    path = tmp_path / "page.md"
    seen = [replace(outcome(kind, "L0", "L1"), judge="eager") for kind in ("kept: x", "tables")]
    test = "mutation/test_mutants.py::test_what_saw_a_bug_is_tried_on_the_right_library[a: b]"
    gone = [replace(outcome(name, "tests"), judge=f"{name}.py::test_y") for name in ("rows", "target")]
    page = as_markdown([*seen, replace(outcome("words", "tests"), judge=test), *gone, outcome("masks")])
    path.write_text(page, encoding="utf-8")
    assert "\n* `eager` L0 L1: kept: x; tables\n" in page
    assert seen_by(path) == {"kept: x": "eager", "tables": "eager", "words": test}


def test_what_saw_a_bug_is_tried_on_the_right_library():
    seen = [replace(CAUGHT[0], judge=judge) for judge in ("half", "eager", "reference/test_x.py::test_y[1]")]
    assert [(each.name, each.lanes, each.tests) for each in right_library([*seen, outcome("masks")])] == [
        ("no bug, windows", ("eager", "half"), ()),
        ("no bug, reference/test_x.py", (), ("reference/test_x.py",)),
    ]


def test_a_log_keeps_what_was_caught_for_the_same_bug(tmp_path):
    bugs = [find_bug(name) for name in list(SAMPLE)[:2]]
    log = Log(tmp_path / "log")
    log.add(Outcome(bug=bugs[0], faults={"L0": "seen"}, judge="eager"))
    log.add(Outcome(bug=bugs[1], faults={}))
    assert log.known(bugs) == {bugs[0].name: Outcome(bug=bugs[0], faults={"L0": "seen"}, judge="eager")}
    assert log.known([replace(bugs[0], new="another patch")]) == {}


FIRST = "from __future__ import annotations\n"
RAISES = "def merge_visual(*given):\n    return no_such_name\n\n\ndef _merge("


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "old", "new", "level"),
    [
        ("pruning/evs.py", FIRST, f"{FIRST}import no_such_module\n", "broken"),
        ("positions/splice.py", "def merge_visual(", RAISES, "broken"),
        ("vision/rotary.py", FIRST, f"{FIRST}1 / 0\n", "crash"),
    ],
    ids=["import", "name", "crash"],
)
def test_patches_that_fail_for_another_reason_than_their_fault_are_distinguished(file, old, new, level):
    lines: list[str] = []
    (found,) = judged([Bug(name="x", file=file, old=old, new=new)], workers=1, report=lines.append)
    assert list(found.faults) == [level]


BUILD = "import sys; sys.path.insert(0, sys.argv[1]); from vlexport.cli import main; main(sys.argv[2:])"
BUILT = {
    "no bug, windows": None,
    "window columns taken from rows": "L0",
    "frequencies rounded to bfloat16": "L1",
    "slices: keys have no places": "L1",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILT)
def test_a_build_with_a_bug_ends_with_status_3_and_names_the_level(tmp_path, name):
    bug = no_bug(name.removeprefix("no bug, ")) if BUILT[name] is None else find_bug(name)
    write_trial(bug.trial, tmp_path / "trial")
    copy = plant(bug, PACKAGE, recipe_folder(), recipe_of(bug.trial), tmp_path / "copy")
    words = ["build", str(tmp_path / "trial" / "plain"), "--backend", "eager"]
    words += ["--output-dir", str(tmp_path / "engines")]
    environment = {**os.environ, "XDG_DATA_HOME": str(tmp_path / "data"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(copy), *words],
        capture_output=True, text=True, check=False, env=environment, cwd=tmp_path,
    )  # fmt: skip
    failed = {line.split()[0] for line in done.stderr.splitlines() if "  failed" in line}
    if BUILT[name] is None:
        assert (done.returncode, ", passed\n" in done.stderr) == (0, True), done.stderr
    else:
        assert done.returncode == 3, done.stderr
        assert BUILT[name] in failed
