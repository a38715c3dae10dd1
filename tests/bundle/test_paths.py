"""Nothing in a bundle leads out of its folder, reading or writing; a canary beside it stays untouched."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bundle.examples import MANIFEST, PAYLOADS, store, write
from tests.bundle.watch import untouched
from vlexport.bundle import MANIFEST_NAME, Bundle, Trust, staged
from vlexport.errors import BundleError, InputError, LockedError, VlexportError

CONTENT = PAYLOADS["engine.bin"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def bundle(tmp_path: Path, data: Path) -> Bundle:
    return store(tmp_path / "engines", data)


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """Outside, with the very bytes that the manifest expects: only its place is wrong."""
    path = tmp_path / "canary"
    path.write_bytes(CONTENT)
    return path


NAMES = {
    "dots": "..",
    "dots up": "../../canary",
    "dots inside": "a/../../../canary",
    "dots at the end": "a/..",
    "one dot": "./engine.bin",
    "one dot inside": "weights/./tower.data",
    "absolute": "CANARY",
    "double slash": "weights//tower.data",
    "slash at the end": "engine.bin/",
    "slash only": "/",
    "empty": "",
    "backslash": "..\\canary",
    "backslash inside": "weights\\tower.data",
    "drive": "C:\\canary",
    "drive with slash": "C:/canary",
    "drive without slash": "C:canary",
    "share": "\\\\host\\share\\canary",
    "stream": "engine.bin:canary",
    "zero byte": "engine.bin\0.txt",
    "zero byte first": "\0",
    "new line": "engine\n.bin",
    "escape": "\x1b[31mengine.bin",
    "hidden": ".hidden",
    "hidden inside": "weights/.hidden",
    "home": "~/canary",
    "variable": "$HOME/canary",
    "percent": "%2e%2e/canary",
    "space": "engine .bin",
    "space at the end": "engine.bin ",
    "dot at the end": "engine.bin.",
    "device": "con",
    "device with extension": "NUL.bin",
    "printer": "weights/LPT1.data",
    "full-width letters": "\uff45ngine.bin",
    "one dot leaders": "\u2024\u2024/canary",
    "full-width slash": "..\uff0fcanary",
    "division slash": "..\u2215canary",
    "combining": "e\u0301ngine.bin",
    "right to left": "\u202enib.enigne",
    "zero width": "engine\u200b.bin",
    "too long": "a" * 101,
    "path too long": "/".join(["a" * 60] * 5),
    "too deep": "/".join("abcdefghi"),
    "far too long": "a/" * 60_000 + "a",
    "the manifest": "manifest.json",
    "the manifest in capitals": "MANIFEST.JSON",
    "another but for case": "Engine.bin",
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES.keys())
def test_a_manifest_with_a_name_that_could_mean_something_else_is_refused(
    bundle: Bundle, data: Path, canary: Path, name: str
) -> None:
    name = str(canary) if name == "CANARY" else name
    value = json.loads((bundle.path / MANIFEST_NAME).read_bytes())
    value["files"][name] = {"size": len(CONTENT), "sha256": value["files"]["engine.bin"]["sha256"]}
    raw = (json.dumps(value, sort_keys=True, indent=1) + "\n").encode()
    (bundle.path / MANIFEST_NAME).write_bytes(raw)
    with untouched(canary), pytest.raises(BundleError, match="file name"):
        Bundle.open(bundle.path, user_data=data)


def replaced_by_link(root: Path, canary: Path) -> None:
    (root / "engine.bin").unlink()
    (root / "engine.bin").symlink_to(canary)


def relative_link(root: Path, canary: Path) -> None:
    (root / "engine.bin").unlink()
    (root / "engine.bin").symlink_to("../../canary")


def link_inside(root: Path, canary: Path) -> None:
    (root / "engine.bin").rename(root / "weights" / "real.bin")
    (root / "engine.bin").symlink_to("weights/real.bin")


def dangling_link(root: Path, canary: Path) -> None:
    (root / "engine.bin").unlink()
    (root / "engine.bin").symlink_to("nowhere")


def link_to_itself(root: Path, canary: Path) -> None:
    (root / "engine.bin").unlink()
    (root / "engine.bin").symlink_to("engine.bin")


def link_to_an_endless_device(root: Path, canary: Path) -> None:
    (root / "engine.bin").unlink()
    (root / "engine.bin").symlink_to("/dev/zero")


def linked_parent(root: Path, canary: Path) -> None:
    (root / "weights").rename(root.parent / "moved")
    (root / "weights").symlink_to(root.parent / "moved")


def linked_parent_inside(root: Path, canary: Path) -> None:
    (root / "weights").rename(root / "moved")
    (root / "weights").symlink_to("moved")


def hard_link(root: Path, canary: Path) -> None:
    (root / "engine.bin").unlink()
    (root / "engine.bin").hardlink_to(canary)


def hard_link_inside(root: Path, canary: Path) -> None:
    (root / "weights" / "again.data").hardlink_to(root / "weights" / "tower.data")


def pipe(root: Path, canary: Path) -> None:
    (root / "engine.bin").unlink()
    os.mkfifo(root / "engine.bin")


def endpoint(root: Path, canary: Path) -> None:
    (root / "engine.bin").unlink()
    here = Path.cwd()
    os.chdir(root)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("engine.bin")
    finally:
        os.chdir(here)


def device(root: Path, canary: Path) -> None:
    (root / "engine.bin").unlink()
    try:
        os.mknod(root / "engine.bin", 0o020666, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("making a device file takes root")


def folder_for_file(root: Path, canary: Path) -> None:
    (root / "engine.bin").unlink()
    (root / "engine.bin").mkdir()


def full_folder_for_file(root: Path, canary: Path) -> None:
    folder_for_file(root, canary)
    (root / "engine.bin" / "inner").write_bytes(CONTENT)


def file_for_folder(root: Path, canary: Path) -> None:
    shutil.rmtree(root / "weights")
    (root / "weights").write_bytes(CONTENT)


def extra_file(root: Path, canary: Path) -> None:
    (root / "more.bin").write_bytes(CONTENT)


def extra_hidden_file(root: Path, canary: Path) -> None:
    (root / ".more").write_bytes(CONTENT)


def extra_link(root: Path, canary: Path) -> None:
    (root / "more.bin").symlink_to(canary)


def extra_folder(root: Path, canary: Path) -> None:
    (root / "more").mkdir()


def extra_deep_folder(root: Path, canary: Path) -> None:
    (root / "/".join("abcdefghij")).mkdir(parents=True)


def extra_name_of_bytes(root: Path, canary: Path) -> None:
    (root / os.fsdecode(b"more\xff")).write_bytes(CONTENT)


def missing_file(root: Path, canary: Path) -> None:
    (root / "weights" / "tower.data").unlink()


def missing_folder(root: Path, canary: Path) -> None:
    shutil.rmtree(root / "weights")


def linked_manifest(root: Path, canary: Path) -> None:
    (root / MANIFEST_NAME).rename(root.parent / "manifest")
    (root / MANIFEST_NAME).symlink_to(root.parent / "manifest")


def hard_linked_manifest(root: Path, canary: Path) -> None:
    (root.parent / "manifest").hardlink_to(root / MANIFEST_NAME)


def manifest_as_pipe(root: Path, canary: Path) -> None:
    (root / MANIFEST_NAME).unlink()
    os.mkfifo(root / MANIFEST_NAME)


def manifest_as_folder(root: Path, canary: Path) -> None:
    (root / MANIFEST_NAME).unlink()
    (root / MANIFEST_NAME).mkdir()


def manifest_as_endless_device(root: Path, canary: Path) -> None:
    (root / MANIFEST_NAME).unlink()
    (root / MANIFEST_NAME).symlink_to("/dev/zero")


def manifest_missing(root: Path, canary: Path) -> None:
    (root / MANIFEST_NAME).unlink()


def manifest_too_large(root: Path, canary: Path) -> None:
    os.truncate(root / MANIFEST_NAME, 1 << 40)


ON_DISK: list[Callable[[Path, Path], None]] = [
    replaced_by_link, relative_link, link_inside, dangling_link, link_to_itself, link_to_an_endless_device,
    linked_parent, linked_parent_inside, hard_link, hard_link_inside, pipe, endpoint, device, folder_for_file,
    full_folder_for_file, file_for_folder, extra_file, extra_hidden_file, extra_link, extra_folder,
    extra_deep_folder, extra_name_of_bytes, missing_file, missing_folder, linked_manifest,
    hard_linked_manifest, manifest_as_pipe, manifest_as_folder, manifest_as_endless_device, manifest_missing,
    manifest_too_large,
]  # fmt: skip


@pytest.mark.parametrize("attack", ON_DISK, ids=lambda attack: attack.__name__)
@pytest.mark.parametrize("verify", ["full", "lazy"])
def test_a_folder_that_is_not_plain_files_is_refused(
    bundle: Bundle, data: Path, canary: Path, attack: Callable[[Path, Path], None], verify: str
) -> None:
    attack(bundle.path, canary)
    with untouched(canary), pytest.raises(BundleError):
        Bundle.open(bundle.path, verify="lazy" if verify == "lazy" else "full", user_data=data)


AFTER_OPENING = [
    replaced_by_link, relative_link, link_inside, dangling_link, link_to_itself, link_to_an_endless_device,
    hard_link, pipe, endpoint, device, folder_for_file,
]  # fmt: skip


@pytest.mark.parametrize("attack", AFTER_OPENING, ids=lambda attack: attack.__name__)
def test_a_payload_swapped_after_opening_is_refused(
    bundle: Bundle, canary: Path, attack: Callable[[Path, Path], None]
) -> None:
    attack(bundle.path, canary)
    with untouched(canary), pytest.raises(BundleError):
        bundle.read("engine.bin")


@pytest.mark.parametrize("attack", [linked_parent, linked_parent_inside, file_for_folder])
def test_a_parent_swapped_after_opening_is_refused(
    bundle: Bundle, canary: Path, attack: Callable[[Path, Path], None]
) -> None:
    attack(bundle.path, canary)
    with pytest.raises(BundleError):
        bundle.read("weights/tower.data")


def test_the_way_to_the_bundle_may_be_a_link(bundle: Bundle, tmp_path: Path, data: Path) -> None:
    (tmp_path / "latest").symlink_to(bundle.path)
    assert Bundle.open(tmp_path / "latest", user_data=data).read("engine.bin") == CONTENT


LEGAL_ENTRIES = ("manifest.json", "MANIFEST.JSON", "Engine.bin")


@pytest.mark.parametrize("name", [name for name in NAMES.values() if name not in LEGAL_ENTRIES])
def test_an_entry_is_not_written_under_a_name_that_could_mean_something_else(
    tmp_path: Path, canary: Path, name: str
) -> None:
    name = str(canary) if name == "CANARY" else name
    with untouched(canary), pytest.raises(InputError, match="entry name"), staged(tmp_path / "engines", name):
        raise AssertionError("entered")
    assert not (tmp_path / "engines").exists()


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_a_lock_that_is_not_a_file_is_refused_and_not_followed(
    tmp_path: Path, canary: Path, kind: str
) -> None:
    lock = tmp_path / "engines" / ".lock-entry"
    lock.parent.mkdir()
    make = {"link": lambda: lock.symlink_to(canary), "folder": lock.mkdir}
    make[kind]()
    with (
        untouched(canary),
        pytest.raises(LockedError, match="Remove it"),
        staged(tmp_path / "engines", "entry"),
    ):
        raise AssertionError("entered")


def test_an_entry_that_is_a_link_is_replaced_and_not_followed(
    tmp_path: Path, data: Path, canary: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    canary = canary.rename(outside / "canary")
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines" / "entry").symlink_to(outside)
    with untouched(canary):
        bundle = store(tmp_path / "engines", data)
    assert not bundle.path.is_symlink()
    assert Bundle.open(bundle.path, user_data=data) == bundle
    assert [path.name for path in outside.iterdir()] == ["canary"]


def test_a_file_in_the_place_of_an_entry_is_replaced(tmp_path: Path, data: Path) -> None:
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines" / "entry").write_text("in the way")
    bundle = store(tmp_path / "engines", data)
    assert Bundle.open(bundle.path, user_data=data) == bundle


def test_a_link_that_looks_like_a_leftover_is_not_followed(tmp_path: Path, data: Path, canary: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    canary = canary.rename(outside / "canary")
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines" / ".staging-entry-00000000-1-ab").symlink_to(outside)
    with untouched(canary):
        store(tmp_path / "engines", data)
    assert canary.read_bytes() == CONTENT


def test_a_leftover_full_of_links_is_removed_without_following_them(
    tmp_path: Path, data: Path, canary: Path
) -> None:
    leftover = tmp_path / "engines" / ".staging-entry-00000000-1-ab"
    leftover.mkdir(parents=True)
    (leftover / "file").symlink_to(canary)
    (leftover / "folder").symlink_to(canary.parent)
    os.utime(leftover, (0, 0))
    with untouched(canary):
        store(tmp_path / "engines", data)
    assert not leftover.exists()


BEFORE_PUBLISHING = [
    replaced_by_link, relative_link, link_inside, linked_parent, hard_link, pipe, device,
    full_folder_for_file, extra_file, extra_hidden_file, extra_link, extra_folder, missing_file,
]  # fmt: skip


@pytest.mark.parametrize("attack", BEFORE_PUBLISHING, ids=lambda attack: attack.__name__)
def test_what_is_not_plain_files_is_not_published(
    tmp_path: Path, data: Path, canary: Path, attack: Callable[[Path, Path], None]
) -> None:
    with staged(tmp_path / "engines", "entry", user_data=data) as staging:
        records = write(staging)
        attack(staging.folder, canary)
        with untouched(canary), pytest.raises(BundleError):
            staging.publish(replace(MANIFEST, files=records))
    assert not (tmp_path / "engines" / "entry").exists()
    assert not Trust.of(data).folder.exists()


def test_a_manifest_is_not_written_through_a_link(tmp_path: Path, data: Path, canary: Path) -> None:
    with untouched(canary), staged(tmp_path / "engines", "entry", user_data=data) as staging:
        records = write(staging)
        (staging.folder / MANIFEST_NAME).symlink_to(canary)
        bundle = staging.publish(replace(MANIFEST, files=records))
    assert Bundle.open(bundle.path, user_data=data) == bundle


def test_every_refusal_of_a_foreign_folder_is_one_of_our_errors(tmp_path: Path) -> None:
    for strange in (tmp_path / "none", Path("/dev/null"), Path("/proc/self"), tmp_path):
        with pytest.raises(VlexportError):
            Bundle.open(strange)
