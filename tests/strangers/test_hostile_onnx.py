"""Hostile ONNX files are refused by their header, or by the library, in a process that lives on."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.strangers.hostile_onnx import files
from tests.thirty import ROOT, cases

MEBI = 2**20
# What must not come as far as a parser that recurses, allocates or opens.
BY_HEADER = ("declared", "outside", "nested", "crowded")


def test_hostile_onnx_files_are_refused_within_memory_and_end_no_process(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    count = cases("hostile ONNX files")
    for name, content in files(count):
        (tmp_path / name).write_bytes(content)
    command = [sys.executable, "-m", "tests.strangers.hostile_onnx", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    rows = [line.split("\t") for line in done.stdout.splitlines() if "\t" in line]
    assert done.returncode == 0, f"{done.returncode} after {rows[-1:]}\n{done.stderr[-2000:]}"
    *outcomes, (_, peak) = rows
    assert len(outcomes) == count
    for name, compared, opened in outcomes:
        assert opened in ("ok", "BundleError", "ResourceError", "MemoryError"), name
        assert compared in ("ok", "RequestError"), name
        if name.partition("-")[2] in BY_HEADER:
            assert opened == "BundleError", name
    print(Counter(tuple(row[1:]) for row in outcomes))
    assert int(peak) < 512 * MEBI
    record_property("hostile ONNX files", count)
