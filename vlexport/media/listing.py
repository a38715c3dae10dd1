"""Media files of a folder or a glob, in an order that is the same every time."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from vlexport.errors import MediaError
from vlexport.system import shortage


def files_of(path: Path) -> Iterator[Path]:
    """Yield the files of a folder and the folders in it, or of a glob, by name; any other path as it is.

    Hidden ones are left out. Links to files count as files; links to folders are not followed, because a loop
    would never end.
    """
    if path.is_dir():
        files = _walk(path)
        if (first := next(files, None)) is None:
            raise MediaError(f"{path}: a folder without files. Name one with media, or a file.")
        yield first
        yield from files
    elif not path.exists() and glob.has_magic(str(path)):
        matching = sorted(glob.glob(str(path), recursive=True), reverse=True)  # noqa: PTH207  absolute ones too
        # `**` follows links to folders: what is reached in several ways is taken once.
        by_place = {file.parent.resolve() / file.name: file for file in map(Path, matching) if _is_file(file)}
        yield from sorted(by_place.values()) or [path]
    else:
        yield path


def _walk(folder: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> NoReturn:
        raise shortage(error) or MediaError(
            f"{error.filename}: a folder that cannot be read ({error.strerror}). Change its permissions, or "
            "name folders that you may read."
        ) from error

    for place, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if name[0] != ".")
        inside = (Path(place, name) for name in sorted(files) if name[0] != ".")
        yield from (file for file in inside if _is_file(file))


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return True
