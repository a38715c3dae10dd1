"""Each operation on files of a build, a check and an encode fails once, or is the last one before a kill."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.cli.test_encode_collection import photos
from tests.fault_layer import READS, SHORT
from tests.fire import Fire, Stove, stove
from tests.test_build_faults import check_whole, leftovers, visible
from tests.thirty import LANE
from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport.bundle import Bundle

pytestmark = pytest.mark.slow
ERRORS = ("ENOSPC", "EIO", "EACCES", "EMFILE", SHORT)
Note = Callable[[str, object], None]


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stove, Path, Path]]:
    """The process that forks commands, a checkpoint, and a bundle of it."""
    checkpoint = write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("checkpoint") / "tiny", depth=1)
    into = tmp_path_factory.mktemp("warm")
    with stove(
        [checkpoint, "--backend", "eager", "--output-dir", into], tmp_path_factory.mktemp("log")
    ) as found:
        yield found, checkpoint, visible(into)[0]


def actions(operations: list[str]) -> Iterator[tuple[int, str]]:
    """Yield a kill before each change, and an error of each operation.

    In the long lane that is every error, else one of them in turn, and a run of writes has its borders alone.
    """
    for at, name in enumerate(operations, 1):
        if LANE != "long" and operations[at - 2 : at + 1] == ["write"] * 3:
            continue
        if name not in READS:
            yield at, "kill"
        for error in ERRORS if LANE == "long" else [ERRORS[at % len(ERRORS)]]:
            yield at, error


def check_end(fire: Fire, action: str, where: str) -> None:
    """Whatever is no kill is a success, or an error of ours or of the system with its reason."""
    code, messages = fire.wait(), fire.messages
    if action == "kill":
        assert code == -signal.SIGKILL, where
        return
    assert code in (0, 1, 2, 5, 7), f"{where}: {code}\n{messages}"
    assert code == 0 or messages.splitlines()[-1].startswith("vlexport: "), f"{where}\n{messages}"
    assert "This is a bug" not in messages, f"{where}\n{messages}"
    assert "Traceback" not in messages, f"{where}\n{messages}"


def test_a_build_that_is_killed_or_fails_at_any_operation_leaves_a_whole_bundle_or_none(
    warm: tuple[Stove, Path, Path], tmp_path: Path, record_property: Note
) -> None:
    found, checkpoint, _ = warm
    done = {"kills of a build, by operation": 0, "failed operations of a build": 0}

    def build(into: Path, at: int = 0, action: str = "kill") -> Fire:
        fault = {"roots": [str(into)], "at": at, "action": action}
        return found.start("build", checkpoint, "--backend", "eager", "--output-dir", into, fault=fault)

    first = build(tmp_path / "count")
    assert first.wait() == 0, first.messages
    for at, action in actions(first.operations):
        into = tmp_path / f"{at}-{action}"
        check_end(build(into, at, action), action, f"{first.operations[at - 1]} {at} {action}")
        check_whole(into)
        assert len(leftovers(into)) <= 1
        if at % 5 == 0:
            assert (again := build(into)).wait() == 0, again.messages
            check_whole(into)
            assert (len(visible(into)), leftovers(into)) == (1, [])
        done["kills of a build, by operation" if action == "kill" else "failed operations of a build"] += 1
    for kind, count in done.items():
        record_property(kind, count)


def test_a_check_that_is_killed_or_fails_at_any_operation_leaves_the_bundle_and_a_verdict(
    warm: tuple[Stove, Path, Path], record_property: Note
) -> None:
    found, _, bundle = warm
    before = {path: path.read_bytes() for path in bundle.rglob("*") if path.is_file()}
    roots = [str(bundle), str(Path(os.environ["XDG_DATA_HOME"]))]
    first = found.start("parity", bundle, fault={"roots": roots})
    assert first.wait() == 0, first.messages
    todo = list(actions(first.operations))
    for at, action in todo:
        fire = found.start("parity", bundle, fault={"roots": roots, "at": at, "action": action})
        check_end(fire, action, f"{first.operations[at - 1]} {at} {action}")
        assert Bundle.open(bundle).verdict.status == "passed"
    assert {path: path.read_bytes() for path in bundle.rglob("*") if path.is_file()} == before
    record_property("failed operations of a check", len(todo))


def test_an_encode_that_is_killed_or_fails_at_any_operation_leaves_whole_shards_and_goes_on(
    warm: tuple[Stove, Path, Path], tmp_path: Path, record_property: Note
) -> None:
    found, _, bundle = warm
    media = photos(tmp_path / "photos", 3)

    def encode(out: Path, at: int = 0, action: str = "kill") -> Fire:
        fault = {"roots": [str(out)], "at": at, "action": action}
        words = ("encode", bundle, "--image", media, "--output-dir", out, "--shard-items", 2)
        return found.start(*words, fault=fault)

    first = encode(tmp_path / "count")
    assert first.wait() == 0, first.messages
    whole = {path.name: path.read_bytes() for path in (tmp_path / "count").glob("[!.]*")}
    todo = list(actions(first.operations))
    for at, action in todo:
        out = tmp_path / f"{at}-{action}"
        check_end(encode(out, at, action), action, f"{first.operations[at - 1]} {at} {action}")
        for shard in out.glob("*.safetensors"):
            assert load_file(shard)
        assert (again := encode(out)).wait() == 0, f"{at} {action}: {again.messages}"
        assert {path.name: path.read_bytes() for path in out.glob("[!.]*")} == whole
    record_property("failed operations of an encode", len(todo))
