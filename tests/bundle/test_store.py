"""Entries appear whole, are found again by their key, and faults of the disk leave nothing half done."""

from __future__ import annotations

import errno
import logging
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.bundle.examples import BUILD, KEY, MANIFEST, PAYLOADS, store, write
from vlexport.bundle import Bundle, Trust, Verdict
from vlexport.bundle import store as store_
from vlexport.bundle.inventory import bundles, remove
from vlexport.bundle.manifest import entry_path
from vlexport.bundle.store import entry_for, finished, remove_entry, staged, tag, working_folder
from vlexport.codec import MAX_BYTES
from vlexport.errors import LockedError, RequestError, ResourceError

# The real one; tests skip it otherwise.
SYNC = os.fsync


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith(".lock-"))


def test_an_entry_is_not_there_until_it_is_whole(into: Path, data: Path) -> None:
    with staged(into, "entry", user_data=data) as staging:
        manifest = replace(MANIFEST, files=write(staging))
        assert not staging.final.exists()
        assert finished(staging.final, KEY, user_data=data) is None
        staging.publish(manifest)
        assert finished(staging.final, KEY, user_data=data) is not None
    assert names(into) == ["entry"]


def test_a_build_that_ends_early_or_is_not_published_leaves_nothing(into, data):
    for error in (None, ValueError("x"), KeyboardInterrupt(), SystemExit(3)):
        with nullcontext() if error is None else pytest.raises(type(error)):
            _end(into, data, error)
        assert names(into) == [], error
    with pytest.raises(ResourceError, match="out of memory"):
        _end(into, data, MemoryError())
    assert names(into) == []
    assert not data.exists()


def _end(into: Path, data: Path, error: BaseException | None) -> None:
    with staged(into, "entry", user_data=data) as staging:
        write(staging)
        if error is not None:
            raise error


def test_the_working_folder_is_private_and_the_entry_is_not(into: Path, data: Path) -> None:
    with staged(into, "entry", user_data=data) as staging:
        assert staging.folder.parent.stat().st_mode & 0o777 == 0o700
        open_mode = staging.folder.stat().st_mode & 0o777
    assert store(into, data).path.stat().st_mode & 0o777 == open_mode


def test_a_finished_entry_is_found_by_its_key_alone_and_a_foreign_one_is_logged(into, data, caplog):
    bundle = store(into, data)
    assert finished(into / "entry", KEY, user_data=data) == bundle
    assert finished(into / "entry", "f" * 64, user_data=data) is None
    assert finished(into / "entry", KEY, user_data=data / "other") is None
    assert "neither built here nor approved" in caplog.text


def test_every_verdict_but_failed_is_a_hit_and_a_failed_entry_is_replaced(into, data):
    bundle = store(into, data)
    for status in ("passed", "observed", "blocked", "not_run", "failed"):
        bundle.with_verdict(Verdict(status=status), user_data=data)
        found = finished(into / "entry", KEY, user_data=data)
        assert (found is not None) == (status != "failed"), status
    with staged(into, "entry", user_data=data) as staging:
        staging.publish(replace(MANIFEST, files=write(staging, {"engine.bin": b"better"})))
    assert Bundle.open(into / "entry", user_data=data).read("engine.bin") == b"better"
    assert names(into) == ["entry"]


def test_a_damaged_entry_is_not_a_hit_and_is_replaced(into: Path, data: Path) -> None:
    (store(into, data).path / "engine.bin").unlink()
    assert finished(into / "entry", KEY, user_data=data) is None
    assert Bundle.open(store(into, data).path, user_data=data).manifest.files


@pytest.mark.parametrize("how", ["hard link", "link", "large"])
def test_an_entry_whose_manifest_is_refused_is_replaced_too(into, data, tmp_path, how):
    path = entry_path(into, BUILD, "model")
    manifest = store(into, data, name=path.name).path / "manifest.json"
    if how == "hard link":
        (tmp_path / "other").hardlink_to(manifest)
    elif how == "link":
        manifest.rename(tmp_path / "other")
        manifest.symlink_to(tmp_path / "other")
    else:
        manifest.write_bytes(b" " * (MAX_BYTES + 1))
    assert entry_for(into, BUILD, "model") == path
    assert finished(path, KEY, user_data=data) is None
    assert Bundle.open(store(into, data, name=path.name).path, user_data=data).manifest.files


def test_an_entry_that_appeared_meanwhile_is_replaced_by_a_whole_one(into: Path, data: Path) -> None:
    with staged(into, "entry", user_data=data) as staging:
        records = write(staging, {"engine.bin": b"second"})
        store(into / "side", data, payloads={"engine.bin": b"first"}).path.rename(into / "entry")
        second = staging.publish(replace(MANIFEST, files=records))
    assert Bundle.open(into / "entry", user_data=data) == second
    assert names(into) == ["entry", "side"]


def test_a_draft_can_be_checked_given_a_verdict_and_published(into: Path, data: Path) -> None:
    with staged(into, "entry", user_data=data) as staging:
        manifest = replace(MANIFEST, files=write(staging), parity=Verdict(status="not_run"))
        draft = staging.keep(manifest)
        assert draft.read("engine.bin") == PAYLOADS["engine.bin"]
        checked = draft.with_verdict(Verdict(status="observed"), user_data=data)
        bundle = staging.publish(replace(manifest, parity=checked.verdict))
    assert Bundle.open(into / "entry", user_data=data) == bundle
    assert bundle.verdict.status == "observed"
    assert {path.name for path in Trust.of(data).folder.iterdir()} == {draft.digest, bundle.digest}


def test_a_build_that_another_one_holds_is_refused_with_its_holder(into, data, caplog, record_property):
    record_property("dead or false holders of locks", 1)
    caplog.set_level(logging.INFO)
    with (
        staged(into, "entry", user_data=data),
        pytest.raises(LockedError, match=f"process {os.getpid()} is building it") as caught,
    ):
        _enter(into, wait_seconds=0.1)
    assert caught.value.exit_code == 8
    assert f"waiting for process {os.getpid()}" in caplog.text


def test_a_lock_without_a_working_folder_is_reported_too(into: Path) -> None:
    into.mkdir()
    with FileLock(into / ".lock-entry"), pytest.raises(LockedError, match="another process is building it"):
        _enter(into, wait_seconds=0.0)


def _enter(into: Path, *, wait_seconds: float = 600.0, need: int = 0) -> None:
    with staged(into, "entry", wait_seconds=wait_seconds, need=need):
        raise AssertionError("entered")


def test_other_entries_are_built_meanwhile(into: Path, data: Path) -> None:
    with staged(into, "entry", user_data=data):
        assert store(into, data, name="other").path.name == "other"


def test_without_locks_a_build_goes_on_and_logs_that(into, data, monkeypatch, caplog):
    def refuse(self: FileLock, **_: object) -> None:
        # What filelock itself raises, type and text, on file systems without locks.
        message = "FileSystem does not appear to support flock"
        raise NotImplementedError(message)

    monkeypatch.setattr(FileLock, "acquire", refuse)
    store(into, data)
    assert "has no locks" in caplog.text


def left_by(into: Path, host: str = "", name: str = "entry", pid: int = 2**30) -> Path:
    folder = into / f".staging-{name}-{host or store_._host()}-{pid}-0123456789abcdef"
    (folder / "bundle").mkdir(parents=True)
    (folder / "bundle" / "engine.bin").write_bytes(b"half")
    return folder


def test_what_a_dead_builder_left_is_removed_by_the_next_build_of_the_entry(into, data, record_property):
    record_property("dead or false holders of locks", 1)
    left, of_another = left_by(into), left_by(into, name="entry-2")
    store(into, data, name="other")
    assert left.exists()
    store(into, data)
    assert names(into) == [of_another.name, "entry", "other"]


@pytest.mark.parametrize("locks", [True, False], ids=["of a living process", "without locks"])
def test_work_that_may_still_go_on_stays(into, data, monkeypatch, locks, record_property):
    record_property("dead or false holders of locks", 1)
    left = left_by(into, pid=os.getppid() if locks else 2**30)
    if not locks:
        monkeypatch.setattr(store_, "_entry_lock", lambda *_: nullcontext(False))
    store(into, data)
    assert left.exists()


def test_what_may_still_be_written_elsewhere_stays_for_a_day(into: Path, data: Path) -> None:
    left = left_by(into, host="00000000")
    store(into, data)
    assert left.exists()
    os.utime(left, (0, 0))
    store(into, data)
    assert names(into) == ["entry"]


def test_a_tag_that_moves_to_another_bundle_while_its_own_is_removed_stays(into, data, monkeypatch):
    one, two = (store(into, data, name=name).path for name in ("one", "two"))
    tag(one, "best")
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda *places: [tag(two, "best"), rename(*places)][1])
    remove_entry(into, "one")
    assert (names(into), (into / "best").resolve()) == (["best", "two"], two)


def test_what_a_builder_of_another_container_writes_stays_by_its_lock(into, data):
    store(into, data, name="other")
    left = left_by(into)
    (entry,) = (entry for entry in bundles(into) if entry.kind == "unfinished")
    with FileLock(into / ".lock-entry"):
        assert (remove(entry), left.exists()) == (False, True)
    assert (remove(entry), left.exists()) == (True, False)


def test_a_working_folder_of_this_process_stays_however_it_is_written(into, data, monkeypatch):
    into.mkdir()
    monkeypatch.chdir(into.parent)
    with working_folder(Path(into.name), "entry") as folder:
        store(into, data)
        assert folder.exists()


def test_foreign_names_are_left_alone(into: Path, data: Path) -> None:
    foreign = {".staging-", ".staging-x", ".staging-a-b-c-d-e", "engine", ".hidden"}
    for name in foreign:
        (into / name).mkdir(parents=True)
    store(into, data)
    assert foreign < set(names(into))


def test_too_little_room_is_refused_before_anything_is_written(into: Path) -> None:
    with pytest.raises(ResourceError, match=r"1000000000000000\.0 MB needed, [0-9.]+ MB free") as caught:
        _enter(into, need=10**21)
    assert caught.value.exit_code == 7
    assert names(into) == []


def test_a_disk_that_fills_up_during_a_build_is_a_resource_error(into):
    for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        with (
            pytest.raises(ResourceError, match=re.escape(str(into)) + r": the disk is full.*5\.0 MB needed"),
            staged(into, "entry", need=5_000_000),
        ):
            raise OSError(code, os.strerror(code))
        assert names(into) == [], code


def test_a_library_that_hides_a_full_disk_is_found_out(into: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ResourceError, match="writer failed"), staged(into, "entry"):
        raise RuntimeError("writer failed")


def test_other_failures_pass_unchanged(into, tmp_path):
    elsewhere = PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "checkpoint"))
    for error in (RuntimeError("a bug"), elsewhere):
        with pytest.raises(type(error)) as caught, staged(into, "entry"):
            raise error
        assert caught.value is error


def test_a_folder_that_cannot_be_written_is_refused_with_what_to_do(into, monkeypatch):
    for code in (errno.EACCES, errno.EROFS, errno.EPERM):

        def refuse(path: Any, *_: object, code: int = code, **__: object) -> None:
            raise OSError(code, os.strerror(code), str(path))

        with monkeypatch.context() as patch:
            patch.setattr(os, "mkdir", refuse)
            with pytest.raises(RequestError, match="Give another folder"):
                _enter(into)


def test_every_file_and_folder_is_on_the_disk_before_the_entry_appears(into, data, monkeypatch):
    synced, rename = set[int](), os.rename
    at_rename: list[set[int]] = []

    def counted_sync(descriptor: int) -> None:
        SYNC(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def counted_rename(source: str, target: str) -> None:
        at_rename.append(set(synced))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", counted_sync)
    monkeypatch.setattr(os, "rename", counted_rename)
    path = store(into, data).path
    digest_of_trust = next(Trust.of(data).folder.iterdir())
    inside = {entry.stat().st_ino for entry in [path, *path.rglob("*"), digest_of_trust]}
    assert len(inside) == 6
    assert inside <= at_rename[0]
    assert into.stat().st_ino in synced


def test_a_really_full_disk_ends_in_a_resource_error_and_the_next_build_succeeds(tmp_path: Path) -> None:
    program = f"""
        mount -t tmpfs -o size=64k none {tmp_path} || exit 77
        echo go | {sys.executable} -m tests.bundle.builder {tmp_path}/e {tmp_path}/d entry --files 40; echo $?
        ls -A {tmp_path}/e
        echo go | {sys.executable} -m tests.bundle.builder {tmp_path}/e {tmp_path}/d entry --files 4
    """
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", program]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no `unshare` to make a small disk with")
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("making a small disk takes user namespaces")
    lines = done.stdout.split("\n")
    assert lines[:3] == ["ready", "7", ".lock-entry"], done
    assert lines[4].startswith("built "), done
    assert "MB free" in done.stderr
