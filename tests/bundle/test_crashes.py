"""Kills, races and replacements: whoever looks finds a whole entry or none."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.bundle.examples import store
from tests.fault_layer import SHORT, actions
from tests.thirty import LANE, cases
from vlexport.bundle import Bundle, files
from vlexport.errors import BundleError

# A process takes half a second to start.
NUM_BUILDERS = 4 if LANE == "fast" else 8


def start(into: Path, data: Path, names: Sequence[str], *options: str) -> subprocess.Popen[str]:
    """A builder that has loaded everything and waits for a line."""
    command = [sys.executable, "-m", "tests.bundle.builder", str(into), str(data), *names, *options]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def finish(process: subprocess.Popen[str]) -> list[str]:
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return out.split("\n")[:-1]


def staging_folders(into: Path) -> list[str]:
    return sorted(path.name for path in into.glob(".staging-*"))


@pytest.mark.seconds
@pytest.mark.parametrize("old", [False, True], ids=["a first build", "a replacing build"])
def test_a_build_killed_at_any_moment_leaves_no_half_bundle(into, data, old, record_property):
    count = cases("kills of a stored entry") // 2
    record_property("kills of a stored entry", count)
    options = ["--files", "12", "--pause", "0.01", "--force"]
    begun = time.monotonic()
    trial = start(into, data, ["trial"], *options)
    started = time.monotonic()
    go(trial)
    finish(trial)
    usual = time.monotonic() - started
    assert usual < time.monotonic() - begun

    source, outcomes = random.Random(int(old)), {"none": 0, "whole": 0}
    for attempt in range(count):
        name = f"entry{attempt}"
        if old:
            store(into, data, name=name)
        process = start(into, data, [name], *options)
        go(process)
        time.sleep(source.uniform(0.0, usual))
        process.kill()
        process.communicate()
        if (into / name).exists():
            Bundle.open(into / name, user_data=data)
            outcomes["whole"] += 1
        else:
            outcomes["none"] += 1
        rebuilt = store(into, data, name=name)
        assert Bundle.open(rebuilt.path, user_data=data) == rebuilt
        assert not [folder for folder in staging_folders(into) if folder.startswith(f".staging-{name}-")]
    # Of thousands of kills one falls between the two renames of a replacing store.
    assert outcomes["none"] <= 1 if old else outcomes["none"] > 0
    assert staging_folders(into) == []


@pytest.fixture(scope="module")
def forks() -> Iterator[Callable[..., dict[str, Any]]]:
    """Stores in forks of a process that has loaded the library."""
    command = [sys.executable, "-m", "tests.bundle.forked"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        orders, answers = process.stdin, process.stdout
        assert orders is not None
        assert answers is not None

        def stored(into: Path, data: Path, content: str, at: int = 0, action: str = "kill") -> dict[str, Any]:
            order = {"into": str(into), "data": str(data), "content": content, "at": at, "action": action}
            orders.write(json.dumps(order) + "\n")
            orders.flush()
            found: dict[str, Any] = json.loads(answers.readline())
            return found

        yield stored
        orders.close()


@pytest.mark.seconds
@pytest.mark.parametrize("before", [None, b"old"], ids=["a first store", "a replacing store"])
def test_a_store_that_is_killed_or_fails_at_any_operation_leaves_the_old_entry_or_the_new_one(
    tmp_path, forks, before, record_property
):
    def prepared(name: str) -> tuple[Path, Path]:
        into, data = tmp_path / name / "into", tmp_path / name / "data"
        if before is not None:
            store(into, data, payloads={"engine.bin": before})
        return into, data

    operations = forks(*prepared("count"), "new")["operations"]
    assert {"open", "mkdir", "rename", "fsync", "write", "read", "scandir"} <= set(operations)
    counts = Counter(kill=0, error=0)
    for at, action in actions(operations):
        into, data = prepared(f"{at}-{action}")
        where = f"{at} {operations[at - 1]} {action}"
        found = forks(into, data, "new", at, action)
        assert found["status"] == (-signal.SIGKILL if action == "kill" else 0), where
        # Errors that a user can mend come with what to do.
        assert action not in {"ENOSPC", "EACCES", SHORT} or not found["error"].startswith("OSError"), found
        if (into / "entry").exists():
            digest = hashlib.sha256((into / "entry" / "manifest.json").read_bytes()).hexdigest()
            # A store without an error whose record of trust failed says so; its entry waits for approval.
            assert (data / "trusted" / digest).exists() or (action != "kill" and not found["error"]), where
            content = Bundle.open(into / "entry", trust=digest, user_data=data).read("engine.bin")
            assert content in (before, b"new"), where
        else:
            # The second of two renames; a build replaces only what it cannot use.
            assert before is None or operations[at - 1] == "rename", where
        assert store(into, data, payloads={"engine.bin": b"next"}).read("engine.bin") == b"next", where
        assert staging_folders(into) == [], where
        counts["kill" if action == "kill" else "error"] += 1
    record_property("kills of the store, by operation", counts["kill"])
    record_property("failed operations of the store", counts["error"])


def test_a_killed_holder_of_the_lock_keeps_nobody_waiting(into, data, record_property):
    record_property("dead or false holders of locks", 1)
    process = start(into, data, ["entry"], "--pause", "10")
    go(process)
    while not staging_folders(into):
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert store(into, data).path.is_dir()
    assert staging_folders(into) == []


@pytest.mark.seconds
def test_builders_of_one_entry_do_the_work_once(into, data, record_property):
    entries = [f"entry{number}" for number in range(cases("rounds of 8 builders"))]
    record_property("rounds of 8 builders", len(entries))
    builders = [start(into, data, entries) for _ in range(NUM_BUILDERS)]
    for builder in builders:
        go(builder)
    reports = [finish(builder) for builder in builders]
    for outcomes in zip(*reports, strict=True):
        assert sorted(outcome.split()[0] for outcome in outcomes) == ["built", *["hit"] * (NUM_BUILDERS - 1)]
        assert len({outcome.split()[1] for outcome in outcomes}) == 1
    assert staging_folders(into) == []


@pytest.mark.seconds
@pytest.mark.parametrize("force", [[], ["--force"]], ids=["kept", "replaced"])
def test_builders_without_locks_leave_valid_entries(into, data, force, record_property):
    entries = [f"entry{number}" for number in range(cases("rounds of 8 builders without locks"))]
    record_property("rounds of 8 builders without locks", len(entries))
    builders = [start(into, data, entries, "--no-lock", *force) for _ in range(NUM_BUILDERS)]
    for builder in builders:
        go(builder)
    reports = [finish(builder) for builder in builders]
    for name, outcomes in zip(entries, zip(*reports, strict=True), strict=True):
        bundle = Bundle.open(into / name, user_data=data)
        assert bundle.digest in {outcome.split()[1] for outcome in outcomes}
    assert staging_folders(into) == []


def version(number: int) -> dict[str, bytes]:
    return {"engine.bin": b"%06d" % number * 500, "weights/tower.data": b"%06d" % number * 2000}


def read_once(path: Path, data: Path) -> str:
    """What a reader meets: a whole version, or word that it was replaced meanwhile."""
    try:
        bundle = Bundle.open(path, user_data=data)
        engine, weights = bundle.read("engine.bin"), bundle.read("weights/tower.data")
    except BundleError as error:
        return str(error)
    assert engine[:6] * 500 == engine
    assert engine[:6] * 2000 == weights
    return "whole"


def race(into: Path, data: Path, num_readers: int, num_reads: int) -> Counter[str]:
    """Readers against one writer that replaces the entry; how often every outcome was met, paths left out."""
    path, outcomes, done = store(into, data, payloads=version(0)).path, Counter[str](), threading.Event()

    def read() -> None:
        while not done.is_set():
            outcome = read_once(path, data).replace(str(path), "ENTRY").split(";")[0].split(". ")[0]
            with lock:
                outcomes[outcome] += 1

    lock = threading.Lock()
    readers = [threading.Thread(target=read) for _ in range(num_readers)]
    for reader in readers:
        reader.start()
    for number in itertools.count(1):
        store(into, data, payloads=version(number))
        if number >= 50 and outcomes.total() >= num_reads:
            break
        time.sleep(0.002)
    done.set()
    for reader in readers:
        reader.join()
    assert read_once(path, data) == "whole"
    return outcomes


@pytest.mark.seconds
def test_readers_meet_a_whole_entry_while_it_is_replaced_or_none(into, data, record_property):
    allowed = {
        "whole",
        "ENTRY: replaced or removed since it was opened",
        "ENTRY: no such folder",
        "ENTRY: 'manifest.json' cannot be read (No such file or directory)",
    }
    count = cases("reads by 32 readers")
    outcomes = race(into, data, num_readers=3 if LANE == "fast" else 32, num_reads=count)
    record_property("reads by 32 readers", outcomes.total())
    assert outcomes["whole"] > count / 10
    assert set(outcomes) <= allowed


def test_a_folder_that_is_replaced_while_its_manifest_is_opened_is_read_again(
    into: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read = store(into, data, payloads=version(0)).path, files.read_file

    def replaced_first(root: Path, name: str, limit: int) -> bytes:
        monkeypatch.setattr(files, "read_file", read)
        store(into, data, payloads=version(1))
        raise BundleError(f"{root}: '{name}' cannot be read (No such file or directory).")

    monkeypatch.setattr(files, "read_file", replaced_first)
    assert Bundle.open(path, user_data=data).read("engine.bin") == version(1)["engine.bin"]
