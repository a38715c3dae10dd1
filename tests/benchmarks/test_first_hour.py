"""A step of the first hour: its exit code, time, memory and cap."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.first_hour import GIB, Step, step, text_of

MIB = 2**20


def python(code, folder, memory=GIB):
    return step("x", [sys.executable, "-c", code], dict(os.environ), memory, folder / "log")


def peak(folder: Path) -> int:
    ran: Step = python(f"bytearray(200 * {MIB})", folder)
    return ran.peak


@pytest.mark.seconds
def test_a_step_has_what_the_command_took(tmp_path):
    ran = python(f"print(len(bytearray(200 * {MIB})))", tmp_path)
    assert (ran.code, ran.out) == (0, f"{200 * MIB}\n")
    # A child begins with the peak of who starts it, and this process has torch.
    code = f"from tests.benchmarks.test_first_hour import *; print(peak(Path({str(tmp_path)!r})))"
    peak = int(subprocess.check_output([sys.executable, "-c", code], text=True))
    # The interpreter itself takes 10 MiB.
    assert 200 * MIB <= peak <= 230 * MIB
    assert python("raise SystemExit(7)", tmp_path).code == 7


def test_no_command_takes_more_than_the_cap(tmp_path):
    ran = python(f"bytearray(200 * {MIB})", tmp_path, memory=100 * MIB)
    assert ran.code == 1
    assert "MemoryError" in ran.out


def test_the_table_has_every_command_and_their_sum():
    steps = [
        Step(name=name, seconds=seconds, busy=2.0, peak=GIB, code=0, out="")
        for name, seconds in (("install", 40.4), ("build", 100.4))
    ]
    text = text_of(steps, 16 * GIB, 32, 0.5, 0.0)
    assert "| `install` | 40 | 2 | 1.0 | 0 |" in text
    assert "141 s in all (4 s of processors), 32 blocks, at most 16 GiB a process; load 0.5 before" in text


@pytest.mark.slow
def test_a_wheel_is_made_from_this_checkout_beside_a_tower_of_any_depth(tmp_path):
    from benchmarks.first_hour import prepare

    checkpoint, wheel = prepare(tmp_path, depth=1)
    assert (checkpoint / "config.json").is_file()
    assert wheel.name.startswith("vlexport-")
