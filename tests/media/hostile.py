"""Files made to hurt, by name, and a child process that reads them all and measures what it cost.

Run as a script: reads every file of a folder as one kind of media and prints one outcome a line, then the
growth of its peak memory in bytes.
"""

from __future__ import annotations

import hashlib
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from vlexport.errors import VlexportError
from vlexport.media import MediaLimits, read_image, read_video

Outcomes = tuple[dict[str, str], int]
# What every hostile file is read under.
LIMITS = MediaLimits(
    max_pixels=2**22,
    max_frames=64,
    max_seconds=600,
    max_file_bytes=2**24,
    max_decoded_bytes=2**26,
    deadline_seconds=20,
)


def outcome(path: Path, kind: str) -> str:
    """`ok` with a digest of each frame, or the class of the refusal and its text; others are raised."""
    try:
        pixels = read_image(path, LIMITS) if kind == "image" else read_video(path, limits=LIMITS)
    except VlexportError as error:
        return f"{type(error).__name__} {error}"
    return " ".join(["ok", *digests(pixels.frames.numpy())])


def digests(frames: np.ndarray) -> list[str]:
    shape = f"{frames.shape[1:]}".encode()
    return [hashlib.sha256(shape + frame.tobytes()).hexdigest()[:16] for frame in frames]


def peak_bytes() -> int:
    """The largest this process and any child of it has been."""
    return 1024 * sum(
        resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )


def read_all(kind: str, harmless: bytes, table: Mapping[str, tuple[bytes, str]], folder: Path) -> Outcomes:
    """Read a table's files one after another in a child; what became of each, and the growth of its peak."""
    (folder / "files").mkdir()
    for number, (data, _) in enumerate(table.values()):
        (folder / "files" / f"{number:03d}").write_bytes(data)
    (folder / "harmless").write_bytes(harmless)
    command = [sys.executable, __file__, kind, str(folder / "harmless"), str(folder / "files")]
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600, env=paths)
    *lines, peak = done.stdout.splitlines()
    found = {name: line.split("\t")[1] for name, line in zip(table, lines, strict=True)}
    return found, int(peak.split("\t")[1])


def wrong(found: Mapping[str, str], table: Mapping[str, tuple[bytes, str]]) -> dict[str, str]:
    """Return those that were not refused or read as in the table, or show an address of a process."""
    return {
        name: text
        for name, text in found.items()
        if text.split(" ")[0] not in table[name][1].split(" or ") or "object at" in text
    }


def misread(
    found: Mapping[str, str],
    table: Mapping[str, tuple[bytes, str]],
    read: Callable[[bytes], np.ndarray | None],
) -> tuple[list[str], int]:
    """Return those with a frame that another reader, where it reads one, does not have; how many it reads."""
    wrong, count = [], 0
    for name, text in found.items():
        word, *ours = text.split(" ")
        if word == "ok" and (frames := read(table[name][0])) is not None:
            count += 1
            wrong += [name] * (not ours or not set(ours) <= set(digests(frames)))
    return wrong, count


def main(kind: str, harmless: Path, folder: Path) -> None:
    outcome(harmless, kind)
    before = peak_bytes()
    for path in sorted(folder.iterdir()):
        print(path.name, outcome(path, kind), sep="\t")
    print("peak", peak_bytes() - before, sep="\t")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
