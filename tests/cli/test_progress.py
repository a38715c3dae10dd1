"""Progress over all phases: never back, with the time left where it is known, lines off a terminal."""

import io
import itertools
import json
import logging
import random
import re
import sys
import threading
import time
from contextlib import redirect_stderr

import pytest

from tests.cli.lines import Terminal, vlexport
from vlexport._build.timings import SECONDS, WEIGHTS, Timings, expected_build, keep, recall
from vlexport.cli import output, progress
from vlexport.cli.progress import Overall, duration, phases

BEFORE = Timings(phases={"export": 10.0, "build": 30.0, "check": 60.0}, weights=1000)


class Clock:
    """A clock that tests set."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize("before", [None, BEFORE])
def test_the_share_never_falls_and_ends_below_all_of_it(before):
    clock, draw = Clock(), random.Random(0)
    for _ in range(50):
        overall, shares = Overall(before, clock), [0.0]
        for phase in ("hash weights", "export", "build", "tactics", "check", "check engine", "store"):
            for inside in sorted(draw.random() for _ in range(4)):
                clock.now += draw.random() * 20
                overall.advance(phase, inside)
                shares.append(overall.share())
            overall.advance(phase, 0.0)
            shares.append(overall.share())
        assert all(one <= other for one, other in itertools.pairwise(shares))
        assert shares[-1] <= 0.99


def test_one_time_left_for_all_phases_from_the_first_report_on():
    clock = Clock()
    overall = Overall(BEFORE, clock)
    overall.advance("export", 0.0)
    assert overall.text() == "0%, about 2 min left"
    clock.now = 5.0  # a phase that reports nothing moves with the clock
    assert overall.share() == pytest.approx(0.05)
    clock.now = 10.0
    overall.advance("build", 0.5)
    assert overall.left() == pytest.approx(15.0 + 60.0)


def test_time_left_is_corrected_by_what_phases_took():
    """A machine of a third of the speed: within 30 % of what comes at a tenth, a half and nine tenths."""
    clock, pace, seen = Clock(), 3.0, {}
    overall = Overall(BEFORE, clock)
    total = pace * sum(BEFORE.phases.values())
    for phase, seconds in BEFORE.phases.items():
        for step in range(100):
            overall.advance(phase, step / 100)
            seen[clock.now / total] = overall.left()
            clock.now += pace * seconds / 100
    for share in (0.1, 0.5, 0.9):
        at = min(seen, key=lambda moment: abs(moment - share - 0.001))
        assert seen[at] == pytest.approx(total * (1 - at), rel=0.3)


def test_a_phase_that_is_skipped_is_behind_and_a_new_one_changes_nothing():
    clock = Clock()
    overall = Overall(BEFORE, clock)
    overall.advance("resume", 0.0)
    clock.now = 50.0
    assert overall.left() == pytest.approx(100.0)
    overall.advance("check", 0.5)
    assert overall.left() == pytest.approx(30.0)


def test_nothing_is_foretold_without_an_earlier_time():
    overall = Overall()
    overall.advance("export", 0.0)
    assert overall.text() == ""


def test_parts_of_a_phase_are_counted_and_foretold_by_themselves():
    clock = Clock()
    overall = Overall(None, clock)
    for number in range(6):
        overall.advance(f"round {number + 1} of 11", number / 11)
        clock.now += 2.0
    assert overall.words == "round 6 of 11"
    assert overall.text() == "45% of it, about 14 s left"
    assert overall.finish() == {"round": 12.0}


def test_times_are_kept_and_foretell_the_next_build_of_any_backend(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kind = ("build", "made-up", "float32")
    assert recall(*kind) is None
    first, known = expected_build("made-up", "float32", WEIGHTS[1])
    assert (dict(first.phases), known[:4]) == ({name: row[1] for name, row in SECONDS.items()}, "rule")
    keep(BEFORE, "build")
    assert sum(expected_build("made-up", "float32", 1000)[0].phases.values()) == pytest.approx(100.0)
    keep(BEFORE, *kind)
    assert recall(*kind) == BEFORE
    same, known = expected_build("made-up", "float32", 1000)
    assert (same.phases, known) == ({**BEFORE.phases, "graphs": 0.0}, "the last build by this backend here")


@pytest.mark.parametrize(("measured", "planned"), itertools.permutations(range(len(WEIGHTS)), 2))
def test_the_times_of_one_size_foretell_those_of_another(tmp_path, monkeypatch, measured, planned):
    """A machine twice as slow as that of the rule, which compiles graphs once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    phases = {name: 2 * row[measured] for name, row in SECONDS.items()}
    keep(Timings(phases=phases, weights=WEIGHTS[measured]), "build", "made-up", "float32")
    expected = expected_build("made-up", "float32", WEIGHTS[planned])[0].phases
    wanted = {name: 2 * row[planned] for name, row in SECONDS.items()}
    assert expected == pytest.approx({**wanted, "graphs": 0.0})


def test_seconds_of_phases_are_summed_where_they_come_again():
    clock = Clock()
    overall = Overall(None, clock)
    for phase in ("a", "b", "a"):
        overall.advance(phase, 0.0)
        clock.now += 2.0
    assert overall.finish() == {"a": 4.0, "b": 2.0}


def test_off_a_terminal_there_is_a_line_at_least_every_so_often(capsys, monkeypatch):
    assert progress.LINE_SECONDS <= 20
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.02)
    printed, print_line = threading.Event(), output.print_line
    lines = []

    def counted(text):
        lines.append(text)
        print_line(text)
        if len(lines) == 4:
            printed.set()

    monkeypatch.setattr(progress, "print_line", counted)
    with phases("x") as advance:
        advance("export", 0.0)
        assert printed.wait(20)
    assert all(re.fullmatch(r" +\d+\.\d s  export", line) for line in capsys.readouterr().err.splitlines())


def test_off_a_terminal_parts_that_are_counted_have_few_lines(capsys):
    with phases("x") as advance:
        for number in range(1000):
            advance(f"read {number + 1} of 1000", number / 1000)
        advance("encode 1 of 1000", 0.0)
    lines = [line.split(" s  ")[1].split(" (")[0] for line in capsys.readouterr().err.splitlines()]
    assert lines[:2] == ["read 1 of 1000", "read 51 of 1000"]
    assert lines[-1] == "encode 1 of 1000"
    assert len(lines) == 21


def test_tokens_are_shown_and_are_numbers_for_programs():
    clock = Clock()
    overall = Overall(None, clock)
    overall.advance("encode 1 of 20, 0 of 2000 tokens", 0.0)
    clock.now += 4.0
    overall.advance("encode 3 of 20, 500 of 2000 tokens, 125 a second", 0.25)
    assert (overall.phase, overall.text()) == ("encode", "25% of it, about 12 s left")
    event = json.loads(overall.event("encode"))
    assert (event["tokens"], event["all_tokens"], event["tokens_per_second"]) == (500, 2000, 125)
    assert event["seconds_left"] == 12.0
    overall.advance("encode 4 of 20, 600 tokens, 120 a second", 0.3)
    event = json.loads(overall.event("encode"))
    assert (event["tokens"], event["tokens_per_second"], "all_tokens" in event) == (600, 120, False)
    overall.advance("round 1 of 2", 0.0)
    assert "tokens" not in json.loads(overall.event("bench"))


def test_what_is_printed_under_a_bar_stands_above_it_and_leaves_no_copy(monkeypatch):
    sent = Terminal()
    monkeypatch.setattr(sys, "stderr", sent)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    with phases("build") as advance:
        for number in range(5):
            advance("export", number / 5)
            output.print_error(f"detail {number}")
            time.sleep(0.15)  # the bar is drawn ten times a second
    output.print_error("done")
    assert terminal_lines(sent.getvalue()) == [*(f"detail {number}" for number in range(5)), "done"]


def terminal_lines(sent):
    """Return the lines that stay on a terminal: a line is erased where the cursor is, or goes up to."""
    lines, at = [""], 0
    for text, code in re.findall(r"([^\x1b\n\r]+)|(\n|\r|\x1b\[[\d;?]*[A-Za-z])", sent):
        if text:
            lines[at] += text
        elif code == "\n":
            at += 1
            lines += [""] * (at == len(lines))
        elif code == "\x1b[1A":
            at -= 1
        elif code == "\x1b[2K":
            lines[at] = ""
    return [line for line in lines if line]


def test_quiet_prints_no_progress_and_no_notes_but_data_and_errors(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    loud, quiet = vlexport("bundles", "ls", "-o", tmp_path), vlexport("bundles", "ls", "-o", tmp_path, "-q")
    assert "entries" in loud.err
    assert (quiet.code, quiet.out, quiet.err) == (0, loud.out, "")
    assert "does not exist here" in vlexport("--quiet", "build", "nowhere").err
    token = output.VERBOSITY.set(-1)
    with phases("x") as advance:
        advance("export", 0.0)
    output.VERBOSITY.reset(token)


def test_programs_get_a_line_of_json_for_each_phase_and_hundredth(tmp_path):
    (tmp_path / "x").mkdir()
    ran = vlexport("bundles", "ls", "--check", "-o", tmp_path, "--progress", "json")
    assert (ran.code, [line for line in ran.err.splitlines() if line[0] == "{"]) == (0, [])
    assert vlexport("bundles", "ls", "-o", tmp_path, "--progress=yaml").code == 2
    assert vlexport("--progress", "json", "list").code == 0
    token, printed = output.EVENTS.set(True), io.StringIO()
    with redirect_stderr(printed), phases("build") as advance:
        for step in range(1000):
            advance("check", step / 1000)
        advance("store", 0.0)
    output.EVENTS.reset(token)
    events = list(map(json.loads, printed.getvalue().splitlines()))
    assert {(event["event"], event["verb"]) for event in events} == {("progress", "build")}
    assert (events[0]["phase"], events[-1]["phase"]) == ("check", "store")
    shares = [event["share"] for event in events]
    assert (shares == sorted(shares), 40 < len(events) < 110) == (True, True)
    assert all(event["seconds_left"] >= 0 for event in events)


def test_verbose_prints_details_without_tracebacks():
    with output.logs_printed(1):
        assert logging.getLogger("vlexport").level == logging.DEBUG
    assert "Traceback" not in vlexport("build", "nowhere", "-v").ends(2).err


def test_durations_are_short():
    assert [duration(each) for each in (3, 89, 100, 5000, 7200)] == [
        "3 s",
        "89 s",
        "2 min",
        "83 min",
        "2.0 h",
    ]
