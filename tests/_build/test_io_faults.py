"""Each operation on files of a build, a check and an encode fails once, or is the last one before a kill."""

from __future__ import annotations

import os
import re
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests._build.test_build_faults import check_whole, leftovers, visible
from tests.cli.test_encode_collection import photos
from tests.fault_layer import SHORT, actions
from tests.fire import Fire, Stove, stove
from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport.bundle import Bundle

pytestmark = pytest.mark.slow
Note = Callable[[str, object], None]
# The exit code of a failed operation that cannot be done without, and its cause in the message. A bundle that
# may not be read is a damaged one; a failing disk has no code of its own.
ENDS = {
    **dict.fromkeys(("ENOSPC", SHORT), ((7,), "disk is full")),
    "EMFILE": ((7,), "too many open files"),
    "EACCES": ((2, 5), "permission denied"),
    "EIO": ((1,), "input/output error"),
}


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stove, Path, Path]]:
    """The process that forks commands, a checkpoint, and a bundle of it."""
    checkpoint = write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("checkpoint") / "tiny", depth=1)
    into = tmp_path_factory.mktemp("warm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("temporary")))
        patch.setattr(tempfile, "tempdir", None)
        words = [checkpoint, "--backend", "eager", "--output-dir", into]
        with stove(words, tmp_path_factory.mktemp("log")) as found:
            yield found, checkpoint, visible(into)[0]
    tempfile.tempdir = None


def check_end(fire: Fire, name: str, at: int, action: str) -> None:
    """Whatever is no kill is a success, or an error of ours or of the system with its reason."""
    code, messages, where = fire.wait(), fire.messages, f"{name} {at} {action}"
    if action == "kill":
        assert code == -signal.SIGKILL, where
        return
    if code == 0:
        return
    codes, cause = ENDS[action]
    assert code in codes, f"{where}: {code}\n{messages}"
    last = messages.splitlines()[-1]
    assert last.startswith("vlexport: "), f"{where}\n{messages}"
    assert cause in last.lower(), f"{where}\n{messages}"
    assert "Traceback" not in messages, f"{where}\n{messages}"


def users_folders() -> list[str]:
    """Return the folders of approvals and verdicts, of caches, and of temporary files."""
    return [os.environ[name] for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME", "TMPDIR")]


# The engine of onnxruntime is opened on mapped files; of a build with it each operation is met that is a map,
# and the first and the last of every other name.
@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_a_build_that_is_killed_or_fails_at_any_operation_leaves_a_whole_bundle_or_none(
    warm: tuple[Stove, Path, Path], tmp_path: Path, backend: str, record_property: Note
) -> None:
    found, checkpoint, _ = warm
    done: Counter[bool] = Counter()

    def build(into: Path, at: int = 0, action: str = "kill") -> Fire:
        fault = {"roots": [str(into), *users_folders()], "at": at, "action": action}
        return found.start("build", checkpoint, "--backend", backend, "--output-dir", into, fault=fault)

    # The first one writes to the user's cache what the others find there.
    for count in "cold", "warm":
        whole = build(tmp_path / count)
        assert whole.wait() == 0, whole.messages
    names = whole.operations
    assert {"open", "open for reading", "read", "write", "fsync", "mkdir", "rename", "unlink"} <= set(names)
    todo = list(actions(names))
    if backend == "onnxruntime":
        assert "mmap" in names
        ends = {
            place
            for name in set(names)
            for place in (names.index(name), len(names) - 1 - names[::-1].index(name))
        }
        todo = [(at, action) for at, action in todo if names[at - 1] == "mmap" or at - 1 in ends]
    for at, action in todo:
        into = tmp_path / f"{at}-{action}"
        fire = build(into, at, action)
        check_end(fire, names[at - 1], at, action)
        # Its trust could not be recorded: the bundle is there, and the message has what approves it.
        untrusted = re.search(r"vlexport trust .* ([0-9a-f]{64})", fire.messages)
        if untrusted:
            (path,) = visible(into)
            approved = Bundle.open(path, trust=untrusted[1], user_data=tmp_path / "another user")
            assert approved.manifest.parity.status == "passed"
        else:
            check_whole(into)
        assert len(leftovers(into)) <= 1
        if action == "kill" or at % 5 == 0 or untrusted:
            assert (again := build(into)).wait() == 0, again.messages
            check_whole(into)
            assert (len(visible(into)), leftovers(into)) == (1, [])
        done[action == "kill"] += 1
    record_property("kills of a build, by operation", done[True])
    record_property("failed operations of a build", done[False])


def test_a_check_that_is_killed_or_fails_at_any_operation_leaves_the_bundle_and_a_verdict(
    warm: tuple[Stove, Path, Path], record_property: Note
) -> None:
    found, _, bundle = warm
    before = {path: path.read_bytes() for path in bundle.rglob("*") if path.is_file()}
    roots, done = [str(bundle), *users_folders()], Counter[bool]()
    first = found.start("check", bundle, "--accuracy", fault={"roots": roots})
    assert first.wait() == 0, first.messages
    for at, action in actions(first.operations):
        fire = found.start("check", bundle, "--accuracy", fault={"roots": roots, "at": at, "action": action})
        check_end(fire, first.operations[at - 1], at, action)
        assert Bundle.open(bundle).verdict.status == "passed"
        done[action == "kill"] += 1
    assert {path: path.read_bytes() for path in bundle.rglob("*") if path.is_file()} == before
    record_property("kills of a check, by operation", done[True])
    record_property("failed operations of a check", done[False])


def test_an_encode_that_is_killed_or_fails_at_any_operation_leaves_whole_shards_and_goes_on(
    warm: tuple[Stove, Path, Path], tmp_path: Path, record_property: Note
) -> None:
    found, _, bundle = warm
    media, done = photos(tmp_path / "photos", 3), Counter[bool]()

    def encode(out: Path, at: int = 0, action: str = "kill") -> Fire:
        fault = {"roots": [str(out), str(bundle), *users_folders()], "at": at, "action": action}
        words = ("encode", bundle, "--image", media, "--output-dir", out, "--shard-items", 2)
        return found.start(*words, fault=fault)

    first = encode(tmp_path / "count")
    assert first.wait() == 0, first.messages
    whole = {path.name: path.read_bytes() for path in (tmp_path / "count").iterdir()}
    for at, action in actions(first.operations):
        out = tmp_path / f"{at}-{action}"
        check_end(encode(out, at, action), first.operations[at - 1], at, action)
        for shard in out.glob("*.safetensors"):
            assert load_file(shard)
        assert (again := encode(out)).wait() == 0, f"{at} {action}: {again.messages}"
        assert {path.name: path.read_bytes() for path in out.iterdir()} == whole
        done[action == "kill"] += 1
    record_property("kills of an encode, by operation", done[True])
    record_property("failed operations of an encode", done[False])
