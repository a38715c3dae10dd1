"""Packages of machine code: damaged bytes, and packages of another file, never reach torch."""

from __future__ import annotations

import io
import random
import zipfile

import pytest

from tests.strangers.mutations import mutate_bytes
from vlexport._build import aoti
from vlexport.errors import InputError


def package(root: str = "prune") -> bytes:
    """A file as torch writes one: entries as they are, below the name of the file."""
    dice, file = random.Random(1), io.BytesIO()
    with zipfile.ZipFile(file, "w") as whole:
        for name in (
            "archive_format",
            "data/aotinductor/model/c.wrapper.so",
            "data/aotinductor/model/c.json",
        ):
            whole.writestr(f"{root}/{name}", dice.randbytes(40_000))
    return file.getvalue()


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Packages that torch was given."""
    found: list[str] = []

    class Loader:
        def __init__(self, path: str, *_: object) -> None:
            found.append(path)

        def get_metadata(self) -> dict[str, str]:
            return {}

    monkeypatch.setattr("torch._C._aoti.AOTIModelPackageLoader", Loader)
    return found


def test_a_sound_package_is_opened(loads: list[str]) -> None:
    aoti.load_function(package(), "prune.pt2")
    assert len(loads) == 1


def test_damaged_bytes_of_a_package_never_reach_torch(loads: list[str]) -> None:
    sound, opened = package(), 0
    with zipfile.ZipFile(io.BytesIO(sound)) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    for seed in range(300):
        content = mutate_bytes(sound, "prune.pt2", seed).content
        try:
            aoti.load_function(content, "prune.pt2")
        except InputError:
            continue
        # What is damaged is beside the entries: dates, versions, padding.
        opened += 1
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            assert {name: archive.read(name) for name in archive.namelist()} == entries, seed
    assert len(loads) == opened < 10


@pytest.mark.parametrize("root", ["positions", "program", "prune2", ""])
def test_a_package_that_was_written_as_another_file_is_refused(loads: list[str], root: str) -> None:
    with pytest.raises(InputError, match=r"prune\.pt2: a package of .*not of this file"):
        aoti.load_function(package(root), "prune.pt2")
    assert loads == []
