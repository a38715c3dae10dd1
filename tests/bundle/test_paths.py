"""Nothing in a bundle leads out of its folder, reading or writing; a canary beside it stays untouched."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bundle.examples import MANIFEST, PAYLOADS, store, write
from vlexport.bundle import MANIFEST_NAME, Bundle, Trust
from vlexport.bundle.store import staged
from vlexport.errors import BundleError, InputError, LockedError, VlexportError

CONTENT = PAYLOADS["engine.bin"]
_IN_ACCESS, _IN_MODIFY, _IN_ATTRIB, _IN_OPEN, _IN_DELETE_SELF, _IN_MOVE_SELF = 1, 2, 4, 0x20, 0x400, 0x800
_EVERYTHING = _IN_ACCESS | _IN_MODIFY | _IN_ATTRIB | _IN_OPEN | _IN_DELETE_SELF | _IN_MOVE_SELF


@contextmanager
def untouched(path: Path) -> Iterator[None]:
    """Fail unless the file is neither opened, read, written, moved nor removed meanwhile (Linux inotify)."""
    libc = ctypes.CDLL(None, use_errno=True)
    watcher = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    assert watcher >= 0
    try:
        assert libc.inotify_add_watch(watcher, os.fsencode(path), _EVERYTHING) >= 0
        yield
        assert not _events(watcher), f"{path} was touched"
    finally:
        os.close(watcher)


def _events(watcher: int) -> bytes:
    try:
        return os.read(watcher, 4096)
    except BlockingIOError:
        return b""


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """Outside, with the very bytes that the manifest expects: only its place is wrong."""
    path = tmp_path / "canary"
    path.write_bytes(CONTENT)
    return path


NAMES = (
    # Out of the folder, or another spelling of a name in it.
    "..", "../../canary", "a/../../../canary", "a/..", "./engine.bin", "weights/./tower.data", "CANARY",
    "weights//tower.data", "engine.bin/", "/", "",
    # What means something to Windows, a shell or a terminal.
    "..\\canary", "weights\\tower.data", "C:\\canary", "C:/canary", "C:canary", "\\\\host\\share\\canary",
    "engine.bin:canary", "engine.bin\0.txt", "\0", "engine\n.bin", "\x1b[31mengine.bin", ".hidden",
    "weights/.hidden", "~/canary", "$HOME/canary", "%2e%2e/canary", "engine .bin", "engine.bin ",
    "engine.bin.", "con", "NUL.bin", "weights/LPT1.data",
    # Letters that look like others.
    "\uff45ngine.bin", "\u2024\u2024/canary", "..\uff0fcanary", "..\u2215canary", "e\u0301ngine.bin",
    "\u202enib.enigne", "engine\u200b.bin",
    # Too long or too deep.
    "a" * 101, "/".join(["a" * 60] * 5), "/".join("abcdefghi"), "a/" * 60_000 + "a",
    # Of the manifest, or of a file that another system would not distinguish.
    "manifest.json", "MANIFEST.JSON", "Engine.bin",
)  # fmt: skip


def test_a_manifest_with_a_name_that_could_mean_something_else_is_refused(
    bundle, data, canary, subtests, record_property
):
    record_property("attacks by path", len(NAMES))
    whole = json.loads((bundle.path / MANIFEST_NAME).read_bytes())
    for name in (str(canary) if each == "CANARY" else each for each in NAMES):
        files = {**whole["files"], name: {**whole["files"]["engine.bin"], "size": len(CONTENT)}}
        raw = json.dumps({**whole, "files": files}, sort_keys=True, indent=1) + "\n"
        (bundle.path / MANIFEST_NAME).write_text(raw)
        with (
            subtests.test(ascii(name)[:40]),
            untouched(canary),
            pytest.raises(BundleError, match="file name"),
        ):
            Bundle.open(bundle.path, user_data=data)


Attack = Callable[[Path, Path], object]
ENGINE, TOWER, WEIGHTS, MORE = "engine.bin", "weights/tower.data", "weights", "more.bin"


def without(path: Path) -> Path:
    """Remove a file, for something else in its place."""
    path.unlink()
    return path


def moved(path: Path, to: Path) -> Path:
    path.rename(to)
    return path


def endpoint(root: Path, canary: Path) -> None:
    here = Path.cwd()
    os.chdir(without(root / ENGINE).parent)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(ENGINE)
    finally:
        os.chdir(here)


def device(root: Path, canary: Path) -> None:
    try:
        os.mknod(without(root / ENGINE), 0o020666, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("making a device file takes root")


def full_folder(root: Path, canary: Path) -> None:
    without(root / ENGINE).mkdir()
    (root / ENGINE / "inner").write_bytes(CONTENT)


def file_for_folder(root: Path, canary: Path) -> None:
    shutil.rmtree(root / WEIGHTS)
    (root / WEIGHTS).write_bytes(CONTENT)


OF_A_FILE: dict[str, Attack] = {
    "a link": lambda root, canary: without(root / ENGINE).symlink_to(canary),
    "a relative link": lambda root, _: without(root / ENGINE).symlink_to("../../canary"),
    "a link inside": lambda root, _: moved(root / ENGINE, root / WEIGHTS / "real").symlink_to("weights/real"),
    "a dangling link": lambda root, _: without(root / ENGINE).symlink_to("nowhere"),
    "a link to itself": lambda root, _: without(root / ENGINE).symlink_to(ENGINE),
    "a link to an endless device": lambda root, _: without(root / ENGINE).symlink_to("/dev/zero"),
    "a hard link": lambda root, canary: without(root / ENGINE).hardlink_to(canary),
    "a pipe": lambda root, _: os.mkfifo(without(root / ENGINE)),
    "an endpoint": endpoint,
    "a device": device,
    "a folder": lambda root, _: without(root / ENGINE).mkdir(),
}
OF_A_PARENT: dict[str, Attack] = {
    "a linked parent": lambda root, _: moved(root / WEIGHTS, root.parent / "moved").symlink_to(
        root.parent / "moved"
    ),
    "a parent linked inside": lambda root, _: moved(root / WEIGHTS, root / "moved").symlink_to("moved"),
    "a file for a folder": file_for_folder,
}
OF_THE_LISTING: dict[str, Attack] = {
    "a full folder": full_folder,
    "a further file": lambda root, _: (root / MORE).write_bytes(CONTENT),
    "a further hidden file": lambda root, _: (root / ".more").write_bytes(CONTENT),
    "a further link": lambda root, canary: (root / MORE).symlink_to(canary),
    "a further folder": lambda root, _: (root / "more").mkdir(),
    "a missing file": lambda root, _: without(root / TOWER),
}
ON_DISK: dict[str, Attack] = {
    **OF_A_FILE,
    **OF_A_PARENT,
    **OF_THE_LISTING,
    "a hard link inside": lambda root, _: (root / WEIGHTS / "again.data").hardlink_to(root / TOWER),
    "a further deep folder": lambda root, _: (root / "/".join("abcdefghij")).mkdir(parents=True),
    "a further name of bytes": lambda root, _: (root / os.fsdecode(b"more\xff")).write_bytes(CONTENT),
    "a missing folder": lambda root, _: shutil.rmtree(root / WEIGHTS),
    "a linked manifest": lambda root, _: moved(root / MANIFEST_NAME, root.parent / "manifest").symlink_to(
        root.parent / "manifest"
    ),
    "a hard-linked manifest": lambda root, _: (root.parent / "manifest").hardlink_to(root / MANIFEST_NAME),
    "a manifest as pipe": lambda root, _: os.mkfifo(without(root / MANIFEST_NAME)),
    "a manifest as folder": lambda root, _: without(root / MANIFEST_NAME).mkdir(),
    "a manifest as endless device": lambda root, _: without(root / MANIFEST_NAME).symlink_to("/dev/zero"),
    "no manifest": lambda root, _: without(root / MANIFEST_NAME),
    "a manifest too large": lambda root, _: os.truncate(root / MANIFEST_NAME, 1 << 40),
}


def attacked(folder: Path, data: Path, *tables: dict[str, Attack]) -> Iterator[tuple[str, Attack, Bundle]]:
    for name, attack in (each for table in tables for each in table.items()):
        yield name, attack, store(folder / name, data)


@pytest.mark.parametrize("verify", ["full", "lazy"])
def test_a_folder_that_is_not_plain_files_is_refused(
    tmp_path, data, canary, verify, subtests, record_property
):
    record_property("attacks by path", len(ON_DISK))
    for name, attack, bundle in attacked(tmp_path, data, ON_DISK):
        with subtests.test(name):
            attack(bundle.path, canary)
            with untouched(canary), pytest.raises(BundleError):
                Bundle.open(bundle.path, verify=verify, user_data=data)


def test_a_payload_or_its_parent_swapped_after_opening_is_refused(
    tmp_path, data, canary, subtests, record_property
):
    record_property("attacks by path", len(OF_A_FILE) + len(OF_A_PARENT))
    for name, attack, bundle in attacked(tmp_path, data, OF_A_FILE, OF_A_PARENT):
        with subtests.test(name):
            attack(bundle.path, canary)
            with untouched(canary), pytest.raises(BundleError):
                bundle.read(ENGINE if name in OF_A_FILE else TOWER)


def test_the_way_to_the_bundle_may_be_a_link(bundle: Bundle, tmp_path: Path, data: Path) -> None:
    (tmp_path / "latest").symlink_to(bundle.path)
    assert Bundle.open(tmp_path / "latest", user_data=data).read("engine.bin") == CONTENT


LEGAL_ENTRIES = ("manifest.json", "MANIFEST.JSON", "Engine.bin")


def test_an_entry_is_not_written_under_a_name_that_could_mean_something_else(
    tmp_path, canary, subtests, record_property
):
    record_property("attacks by path", len(NAMES) - len(LEGAL_ENTRIES))
    for name in (each for each in NAMES if each not in LEGAL_ENTRIES):
        with (
            subtests.test(ascii(name)[:40]),
            untouched(canary),
            pytest.raises(InputError, match="entry name"),
            staged(tmp_path / "engines", str(canary) if name == "CANARY" else name),
        ):
            raise AssertionError("entered")
    assert not (tmp_path / "engines").exists()


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_a_lock_that_is_not_a_file_is_refused_and_not_followed(tmp_path, canary, kind, record_property):
    record_property("dead or false holders of locks", 1)
    into = tmp_path / "engines"
    into.mkdir()
    {"link": lambda lock: lock.symlink_to(canary), "folder": Path.mkdir}[kind](into / ".lock-entry")
    with untouched(canary), pytest.raises(LockedError, match="Remove it"), staged(into, "entry"):
        raise AssertionError("entered")


@pytest.fixture
def outside(tmp_path, canary):
    """A folder with the canary, and a folder of engines beside it."""
    (tmp_path / "engines").mkdir()
    (tmp_path / "outside").mkdir()
    canary.rename(tmp_path / "outside" / "canary")
    return tmp_path / "outside"


def test_a_link_or_a_file_in_the_place_of_an_entry_is_replaced_and_not_followed(tmp_path, data, outside):
    (tmp_path / "engines" / "entry").symlink_to(outside)
    (tmp_path / "engines" / "other").write_text("in the way")
    with untouched(outside / "canary"):
        bundles = [store(tmp_path / "engines", data, name=name) for name in ("entry", "other")]
    assert not bundles[0].path.is_symlink()
    assert [Bundle.open(each.path, user_data=data) for each in bundles] == bundles
    assert [path.name for path in outside.iterdir()] == ["canary"]


def test_a_leftover_that_is_a_link_or_full_of_links_is_removed_without_following(tmp_path, data, outside):
    (tmp_path / "engines" / ".staging-entry-00000000-1-ab").symlink_to(outside)
    leftover = tmp_path / "engines" / ".staging-entry-00000000-1-cd"
    leftover.mkdir()
    (leftover / "file").symlink_to(outside / "canary")
    (leftover / "folder").symlink_to(outside)
    os.utime(leftover, (0, 0))
    with untouched(outside / "canary"):
        store(tmp_path / "engines", data)
    assert (outside / "canary").read_bytes() == CONTENT
    assert not leftover.exists()


def test_what_is_not_plain_files_is_not_published(tmp_path, data, canary, subtests, record_property):
    record_property("attacks by path", len(OF_A_FILE) + len(OF_A_PARENT) + len(OF_THE_LISTING))
    for name, attack in {**OF_A_FILE, **OF_A_PARENT, **OF_THE_LISTING}.items():
        with subtests.test(name), staged(tmp_path / "engines", "entry", user_data=data) as staging:
            records = write(staging)
            attack(staging.folder, canary)
            with untouched(canary), pytest.raises(BundleError):
                staging.publish(replace(MANIFEST, files=records))
    assert not (tmp_path / "engines" / "entry").exists()
    assert not Trust.of(data).folder.exists()


def test_a_manifest_is_not_written_through_a_link(tmp_path, data, canary):
    with untouched(canary), staged(tmp_path / "engines", "entry", user_data=data) as staging:
        records = write(staging)
        (staging.folder / MANIFEST_NAME).symlink_to(canary)
        bundle = staging.publish(replace(MANIFEST, files=records))
    assert Bundle.open(bundle.path, user_data=data) == bundle


def test_every_refusal_of_a_foreign_folder_is_one_of_our_errors(tmp_path: Path) -> None:
    for strange in (tmp_path / "none", Path("/dev/null"), Path("/proc/self"), tmp_path):
        with pytest.raises(VlexportError):
            Bundle.open(strange)
