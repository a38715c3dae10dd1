"""The run on a GPU, driven without one: a stand-in for device and clock, and planted faults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import __main__ as program
from benchmarks.gpu import runner, steps
from benchmarks.gpu.clock import Host, Sample
from benchmarks.gpu.roofline import Ceilings, Tower, evs_seconds
from benchmarks.gpu.runner import COLUMNS, LIMITS, LOG, RESULTS, TABLE, Plan, joined, read, run
from benchmarks.gpu.sizes import TINY
from benchmarks.gpu.steps import STEPS, Run
from benchmarks.gpu.towers import Towers
from tests.repo.tree import ROOT

SECONDS = 0.002


class StandIn(Host):
    """A device that captures by remembering, and whose clock shows 2 ms for everything."""

    no_graphs = ""

    def __init__(self) -> None:
        self.num_calls = self.num_captures = 0
        self.growth = 0

    def sample(self, call) -> Sample:
        self.num_calls += 1
        call()
        return Sample(device=SECONDS, wall=2 * SECONDS)

    def allocated(self) -> int:
        self.num_calls += 1
        return 10**9 + self.growth * self.num_calls

    reserved = allocated

    def peak(self, call) -> int:
        call()
        return 12345

    def capture(self, call):
        self.num_captures += 1
        call()
        return call


def rows_of(name: str, folder: Path, device: Host, earlier=None, **sizes) -> list[dict]:
    made = Run(device=device, sizes=replace(TINY, **sizes), out=folder, work=folder, earlier=earlier or {})
    found = [*STEPS[name](made)]
    json.dumps(found)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module", autouse=True)
def one_export(folder: Path):
    """Export and load the towers once for all steps."""
    made = Towers(TINY, StandIn(), folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "Towers", lambda *_: made)
        yield


@pytest.fixture(scope="module")
def ceilings(folder: Path) -> dict[str, list[dict]]:
    return {"machine": rows_of("machine", folder, StandIn())}


@pytest.mark.seconds
def test_the_ceilings_are_amounts_over_the_clocks_seconds(ceilings) -> None:
    rows = {row["name"]: row for row in ceilings["machine"]}
    assert rows["matmul"]["rate"] == pytest.approx(2 * TINY.matmul**3 / SECONDS)
    assert rows["copy"]["rate"] == pytest.approx(2 * TINY.copy_bytes / SECONDS)
    assert rows["versions"]["torch"] == torch.__version__
    assert {each["name"] for each in rows["doctor"]["findings"]} >= {"gpu", "backend cudagraphs"}


def test_every_contender_is_checked_and_timed_beside_the_roofline(folder: Path, ceilings) -> None:
    rows = rows_of("towers", folder, StandIn(), ceilings, rounds=2)
    names = {f"{call}, {name}" for call in TINY.calls for name in ("hf eager", "eager", "cudagraphs")}
    assert {row["name"] for row in rows} == names
    for row in rows:
        assert row["p50_ms"] == pytest.approx(1e3 * SECONDS)
        assert row["over_roofline"] == pytest.approx(row["p50_ms"] / row["roofline_ms"])
        assert 0 < row["relative_l2"] < 0.15
        assert (row["rounds"], row["peak_bytes"]) == (2, 12345)


def test_a_tower_that_is_wrong_fails_its_step_after_all_rows(folder: Path, ceilings, monkeypatch) -> None:
    monkeypatch.setattr(steps, "errors", lambda *_: {"relative_l2": float("nan"), "worst_token": 0.0})
    sizes = replace(TINY, rounds=1)
    rows = STEPS["towers"](Run(device=StandIn(), sizes=sizes, out=folder, work=folder, earlier=ceilings))
    assert len([next(rows) for _ in range(3 * len(TINY.calls))]) == 6
    with pytest.raises(RuntimeError, match="over the limit of bfloat16: one image, hf eager: nan"):
        next(rows)


@pytest.mark.seconds
def test_every_size_is_captured_and_frames_are_compared(folder: Path, ceilings) -> None:
    rows = rows_of("captures", folder, StandIn(), ceilings, rounds=1)
    assert [row["name"] for row in rows] == [
        "64 tokens, 64 frames",
        "64 tokens, 8 frames",
        *TINY.frames,
    ]
    assert all(row["gain"] == pytest.approx(1) for row in rows[:2])
    assert all(row["bytes"] == 0 for row in rows[:2])


@pytest.mark.slow
def test_pruning_is_timed_by_itself_and_inside_a_graph(folder: Path, ceilings) -> None:
    device = StandIn()
    plain, compiled, captured = rows_of("pruning", folder, device, ceilings)
    assert plain["kept"] == compiled["kept"] == 256
    assert compiled["other_tokens"] == 0
    assert captured["both_us"] == pytest.approx(1e6 * SECONDS)
    assert device.num_captures == 1
    rates = Run(device=device, sizes=TINY, out=folder, work=folder, earlier=ceilings).ceilings
    assert rates is not None
    assert plain["evs_floor_us"] == pytest.approx(1e6 * evs_seconds(1024, 256, TINY.model.out, rates))


@pytest.mark.seconds
def test_the_decoder_reads_and_writes(folder: Path, ceilings) -> None:
    eager, compiled = rows_of("decoder", folder, StandIn(), ceilings)
    assert eager["tokens_per_s"] == pytest.approx(1 / (2 * SECONDS))
    assert eager["prefill_tokens_per_s"] == pytest.approx(TINY.prompts[0] / SECONDS)
    assert (eager["name"], compiled["name"]) == ("eager, 64 tokens", "compiled, 64 tokens")
    assert compiled["tokens_per_s"] == pytest.approx(1 / (2 * SECONDS))


@pytest.mark.slow
def test_the_soak_notices_memory_that_grows(folder: Path) -> None:
    device = StandIn()
    (row,) = rows_of("soak", folder, device)
    assert (row["growth"], row["name"]) == (0, "6 requests, eager")
    device.growth = 2**20
    with pytest.raises(RuntimeError, match="memory of the device grew by"):
        rows_of("soak", folder, device)


JUNIT = """<testsuites><testsuite>
<testcase classname="tests.gpu.a" name="x"/>
<testcase classname="tests.gpu.a" name="y"><skipped message="tensorrt: no NVIDIA GPU"/></testcase>
<testcase classname="tests.gpu.b" name="z"><failure message="assert 1 == 2&#10;more"/></testcase>
</testsuite></testsuites>"""


def test_tests_are_counted_and_the_skipped_named(tmp_path: Path, monkeypatch) -> None:
    codes = [0, 1]

    def pytest_run(command, **_):
        report = next(word for word in command if word.startswith("--junitxml="))
        Path(report.partition("=")[2]).write_text(JUNIT)
        return SimpleNamespace(returncode=codes.pop())

    monkeypatch.setattr("benchmarks.gpu.steps.subprocess.run", pytest_run)
    made = Run(device=StandIn(), sizes=TINY, out=tmp_path, work=tmp_path, earlier={})
    rows = steps.tests(made)
    lines = [next(rows) for _ in range(3)]
    assert lines == [
        {"name": "tests.gpu.a::y", "skipped": "tensorrt: no NVIDIA GPU"},
        {"name": "tests.gpu.b::z", "failure": "assert 1 == 2"},
        {"name": "counts", "failure": 1, "passed": 1, "skipped": 1},
    ]
    with pytest.raises(RuntimeError, match="pytest ended with 1"):
        next(rows)
    assert [*steps.tests(made)] == lines


# What each child does; a row, then an end of its own.
ENDS = {
    "machine": 'row("a"); row("b")',
    "towers": 'row("kept"); raise ValueError("planted")',
    "captures": 'row("kept"); time.sleep(60)',
    "pruning": 'row("kept"); os.kill(os.getpid(), 9)',
    "soak": 'row("last")',
}
CHILD = """
import json, os, sys, time
def row(name):
    print("ROW " + json.dumps({"name": name, "p50_ms": 1.5}), flush=True)
print("a word of a library")
"""


def planted(out: Path, **changed: object) -> Plan:
    given = {"steps": tuple(ENDS), "out": out, "about": "Planted.", "seconds": 60.0, **changed}
    return Plan(command=lambda name: [sys.executable, "-c", CHILD + ENDS[name]], **given)  # type: ignore[arg-type]


def test_a_broken_step_loses_its_own_rows_alone_and_the_run_ends_with_1(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(LIMITS, "captures", 2)
    lines: list[str] = []
    assert run(planted(tmp_path), lines.append) == 1
    found = read(tmp_path / RESULTS)["steps"]
    assert {name: [row["name"] for row in step["rows"]] for name, step in found.items()} == {
        "machine": ["a", "b"],
        "towers": ["kept"],
        "captures": ["kept"],
        "pruning": ["kept"],
        "soak": ["last"],
    }
    assert [found[name]["status"] for name in ("machine", "soak")] == ["fine", "fine"]
    assert found["towers"]["status"] == "failed with exit code 1: ValueError: planted"
    assert found["captures"]["status"] == "stopped after 2 s"
    assert found["pruning"]["status"].startswith("failed with exit code -9")
    assert "did not end well: towers, captures, pruning" in lines[-1]
    assert "a word of a library" in (tmp_path / LOG).read_text()
    assert "## captures: stopped after 2 s" in (tmp_path / TABLE).read_text()


def test_results_are_on_disk_after_every_row(tmp_path: Path, monkeypatch) -> None:
    seen, write = [], runner.write

    def watching(out, content):
        write(out, content)
        seen.append(len(read(out / RESULTS)["steps"]["machine"]["rows"]))

    monkeypatch.setattr(runner, "write", watching)
    assert run(planted(tmp_path, steps=("machine",)), lambda _: None) == 0
    assert seen == [0, 1, 2, 2]


@pytest.mark.seconds
def test_a_run_that_is_ended_leaves_no_child_and_keeps_its_rows(tmp_path: Path) -> None:
    words = ["--device", "cpu", "--sizes", "tiny", "--steps", "machine", "--out", str(tmp_path / "out")]
    temporary = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.gpu", *words]
    with subprocess.Popen(command, cwd=ROOT, env=temporary, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == f"machine: at most {LIMITS['machine']} s\n"
        deadline = time.monotonic() + 60
        listed = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        while not (children := [*map(int, listed.read_text().split())]) and time.monotonic() < deadline:
            time.sleep(0.05)
        parent.terminate()
        assert parent.wait(60) == 143
    assert children
    # Killed, and gone once the system has taken its memory back.
    deadline = time.monotonic() + 20
    while any(map(is_running, children)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, children))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert read(tmp_path / "out" / RESULTS)["steps"]["machine"]["status"] == "running"


def is_running(process: int) -> bool:
    """Return whether a process computes; an ended one may wait to be collected by init."""
    try:
        status = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def test_parts_of_a_run_are_joined_and_what_was_not_reached_is_named(tmp_path: Path) -> None:
    for part, names, seconds in (("first", ("machine", "soak"), 60.0), ("second", ("soak",), 0.0)):
        run(planted(tmp_path / part, steps=names, seconds=seconds), lambda _: None)
    whole = joined(tmp_path / part / RESULTS for part in ("first", "second"))
    assert {name: step["status"] for name, step in whole["steps"].items()} == {
        "machine": "fine",
        "soak": "not run: the 0 s of the run are over",
    }


def test_a_run_takes_25_minutes_and_every_step_has_its_limit() -> None:
    assert list(LIMITS) == list(STEPS)
    assert sum(LIMITS.values()) <= 25 * 60


# performance.md 6, in milliseconds at 788 TFLOP/s, 500 in attention and 4.3 TB/s.
ROOFLINE = [
    (((1, 32, 32),), 1.78),
    (((1, 78, 138),), 23.0),
    (((1, 24, 24),) * 20, 19.8),
    (((16, 32, 32),), 28.4),
    (((64, 32, 32),), 114),
    (((1, 154, 274),), 144),
]


def test_the_roofline_is_the_published_one() -> None:
    tower = Tower(depth=32, full=4, width=1280, inner=3420, row=1176, out=2048, merge=2, window=8)
    rates = Ceilings(matmul=788e12, attention=500e12, copy=4.3e12)
    assert tower.weights() == pytest.approx(668.7e6, rel=2e-3)
    for grids, milliseconds in ROOFLINE:
        assert 1e3 * tower.seconds(grids, rates) == pytest.approx(milliseconds, rel=5e-3), grids


def test_what_cannot_run_ends_with_a_code_and_the_way_out(capsys, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert program.main(["--out", str(tmp_path / "out")]) == 4
    assert "make gpu-rehearsal" in capsys.readouterr().err
    assert program.main(["--steps", "towers,nonsense"]) == 2
    assert "no step nonsense. Known: machine, tests" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_child_is_one_step_and_writes_rows(tmp_path: Path, capsys) -> None:
    given = ["--device", "cpu", "--sizes", "tiny", "--out", str(tmp_path), "--work", str(tmp_path)]
    assert program.main(["--child", "pruning", *given]) == 0
    rows = [json.loads(line.removeprefix("ROW ")) for line in capsys.readouterr().out.splitlines()]
    # The host times with its own clock.
    assert 0 < rows[0]["both_us"] < 1e6
    assert rows[1]["other_tokens"] == 0
    assert rows[2]["skipped"] == "no CUDA device: nothing is captured"


def test_the_docs_show_every_column_of_the_table() -> None:
    text = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    assert [name for name in LIMITS if f"`{name}`" not in text] == []
    columns = {column for each in COLUMNS.values() for column in each}
    assert [column for column in sorted(columns) if f"`{column}`" not in text] == []
