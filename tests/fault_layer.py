"""Operations on files, counted, and one of them ended: by a kill, or by an error of the system.

`install` puts itself in front of the functions of Python that open, read, write, sync, map, rename and
remove files. It is for child processes: nothing takes it away again. Only operations below the roots count:
the n-th is the same in every run. What safetensors writes, without Python, is written by Python here.
"""

from __future__ import annotations

import builtins
import errno
import io
import mmap
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.thirty import LANE

_PATHS = ("open", "mkdir", "rmdir", "unlink", "rename", "replace", "link", "scandir", "truncate", "chmod")
_DESCRIPTORS = ("fsync", "read", "write", "ftruncate", "posix_fallocate")
# What leaves the disk as it is: a kill before it is a kill before the next change.
READS = {"open for reading", "scandir", "read", "mmap"}
SHORT = "short"
ERRORS = ("ENOSPC", "EIO", "EACCES", "EMFILE", SHORT)


def actions(operations: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield a kill before each change, and an error of each operation.

    In the long lane that is every error, else one of them in turn, and a run of writes has its borders alone.
    """
    for at, name in enumerate(operations, 1):
        if LANE != "long" and list(operations[at - 2 : at + 1]) == ["write"] * 3:
            continue
        if name not in READS:
            yield at, "kill"
        for error in ERRORS if LANE == "long" else [ERRORS[at % len(ERRORS)]]:
            yield at, error


@dataclass
class FaultLayer:
    """What happens at operation `at`: `kill`, an error by name, or `short`: half a write and a full disk."""

    roots: Sequence[str]
    at: int = 0
    action: str = "kill"
    found: list[str] = field(default_factory=list)

    def meet(self, name: str, target: object, half: Callable[[], object] = lambda: None) -> None:
        """Count an operation on a path or a descriptor; end it if it is the one."""
        path = _path_of(target)
        if not path.startswith(tuple(self.roots)):
            return
        self.found.append(name)
        if len(self.found) != self.at:
            return
        if self.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.action == SHORT:
            half()
        code = errno.ENOSPC if self.action == SHORT else getattr(errno, self.action)
        raise OSError(code, os.strerror(code), path)


def _path_of(target: object) -> str:
    try:
        if isinstance(target, int):
            return str(Path(f"/proc/self/fd/{target}").readlink())
        return str(Path(os.fsdecode(target)).absolute())  # type: ignore[arg-type]
    except (OSError, TypeError, ValueError):
        return ""


def install(layer: FaultLayer) -> None:
    from vlexport.bundle import files
    from vlexport.system import MappedFile

    # Engines of 16 MiB are mapped; those of the tests are smaller.
    files.MAPPED_FROM = 1024
    for name in (*_PATHS, *_DESCRIPTORS):
        setattr(os, name, _wrapped(layer, name, getattr(os, name)))
    library: Any = sys.modules.get("safetensors.torch")
    if library is not None:
        library.save_file = lambda tensors, path, metadata=None: Path(path).write_bytes(
            library.save(tensors, metadata)
        )
    mapped = mmap.mmap

    class Mapped(mapped):  # type: ignore[misc, valid-type]
        def __new__(cls, descriptor: int, *rest: Any, **named: Any) -> Any:
            layer.meet("mmap", descriptor)
            return mapped.__new__(cls, descriptor, *rest, **named)

    mmap.mmap = Mapped  # type: ignore[misc, assignment]
    # A class of the library, whose base is the other one.
    shared = MappedFile.__new__

    def new(cls: type[MappedFile], descriptor: int, size: int = 0) -> MappedFile:
        layer.meet("mmap", descriptor)
        return shared(cls, descriptor, size)

    MappedFile.__new__ = new  # type: ignore[method-assign, assignment]
    io.open = builtins.open = _opener(layer)


def _opener(layer: FaultLayer) -> Callable[..., Any]:
    opened = io.open

    class Raw(io.FileIO):
        def write(self, content: Any, /) -> int:
            view = memoryview(content).cast("B")
            layer.meet("write", self.fileno(), lambda: io.FileIO.write(self, view[: len(view) // 2]))
            return super().write(content)

        def readinto(self, buffer: Any, /) -> int:
            layer.meet("read", self.fileno())
            return super().readinto(buffer)

        def readall(self) -> bytes:
            layer.meet("read", self.fileno())
            return super().readall()

    def open_(file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **named: Any) -> Any:
        changes = set(mode) & set("wax+")
        if not isinstance(file, int):
            layer.meet("open" if changes else "open for reading", file)
        if named.get("opener") is not None or not _path_of(file).startswith(tuple(layer.roots)):
            return opened(file, mode, buffering, *rest, **named)
        raw = Raw(file, mode.replace("b", "").replace("t", ""), closefd=named.pop("closefd", True))
        if buffering == 0:
            return raw
        kind = io.BufferedRandom if "+" in mode else io.BufferedWriter if changes else io.BufferedReader
        whole = kind(raw)
        names = dict(zip(("encoding", "errors", "newline"), rest, strict=False))
        return whole if "b" in mode else io.TextIOWrapper(whole, **names, **named)

    return open_


def _wrapped(layer: FaultLayer, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def counted(target: Any = ".", *rest: Any, **named: Any) -> Any:
        shown, path = name, target
        if name == "open" and not (rest[0] if rest else named["flags"]) & (os.O_WRONLY | os.O_RDWR):
            shown = "open for reading"
        if named.get("dir_fd") is not None and not Path(target).is_absolute():
            path = f"{_path_of(named['dir_fd'])}/{os.fsdecode(target)}"
        half = (
            (lambda: call(target, bytes(rest[0])[: len(rest[0]) // 2])) if name == "write" else (lambda: None)
        )
        layer.meet(shown, path, half)
        return call(target, *rest, **named)

    return counted
