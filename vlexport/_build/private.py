"""Private recipes and backends: files given by a path or by an entry point, run as modules by content."""

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.util
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import CodeType, ModuleType
from typing import TypeVar

from vlexport.errors import RequestError

logger = logging.getLogger(__name__)
_LOADING = threading.RLock()
T = TypeVar("T")


def installed(kind: str, read: Callable[[Path], T]) -> list[T]:
    """Return what is read of the files of entry points; one that fails is named, once, and left out."""
    results = []
    for point in _points(f"vlexport.{kind}s", tuple(sys.path)):
        try:
            spec = importlib.util.find_spec(point.module)
            if spec is None or spec.origin is None:
                raise ModuleNotFoundError(f"no module {point.module}")
            results.append(read(Path(spec.origin)))
        except Exception as error:  # noqa: BLE001  code of others runs here, and raises what it likes
            _warn(f"{kind} '{point.name}' of entry point {point.value} is left out: {error}")
    return results


@cache
def _points(group: str, _: tuple[str, ...]) -> list[EntryPoint]:
    return sorted(entry_points(group=group), key=lambda point: point.name)


@cache
def _warn(words: str) -> None:
    logger.warning("%s", words)


def run_file(kind: str, path: Path, source: bytes, page: str) -> ModuleType:
    """Return the module of a private file, which runs once for each content of each file."""
    identity = hashlib.sha256(os.fsencode(path.resolve()) + b"\0" + source).hexdigest()
    name = f"_vlexport_private_{kind}_{identity}"
    with _LOADING:
        return sys.modules.get(name) or _run(name, kind, path, source, page)


def _run(name: str, kind: str, path: Path, source: bytes, page: str) -> ModuleType:
    """Run a private file as the module `name`; the module is gone again where that fails."""
    spec = importlib.util.spec_from_file_location(name, path, loader=_AsRead(path, source))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up there while it runs.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        raise RequestError(
            f"{kind} {path}, line {lines[-1] if lines else '?'}: {type(error).__name__}: {error}. The file "
            f"runs as a program and failed; mend it there. {page} lists what a {kind} may import."
        ) from error
    return module


class _AsRead(importlib.abc.InspectLoader):
    """A loader of the bytes that the digest was made of; bytecode on disk may be that of an older content."""

    def __init__(self, path: Path, source: bytes) -> None:
        self.path, self.source = path, source

    def get_source(self, fullname: str) -> str:
        return importlib.util.decode_source(self.source)

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.source, str(self.path))
