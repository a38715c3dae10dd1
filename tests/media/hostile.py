"""Files made to hurt, by name, and a child process that reads them all and says what it cost.

Run as a script: reads every file of a folder as one kind of media and prints one outcome a line, then the
growth of its peak memory in bytes.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

from vlexport.errors import VlexportError
from vlexport.media import MediaLimits, read_image, read_video

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
    """`ok`, or the class of the refusal and its text; anything else is raised."""
    try:
        pixels = read_image(path, LIMITS) if kind == "image" else read_video(path, limits=LIMITS)
    except VlexportError as error:
        return f"{type(error).__name__} {error}"
    return f"ok {list(pixels.frames.shape)}"


def peak_bytes() -> int:
    """The largest this process and any child of it has been."""
    return 1024 * sum(
        resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )


def main(kind: str, harmless: Path, folder: Path) -> None:
    outcome(harmless, kind)
    before = peak_bytes()
    for path in sorted(folder.iterdir()):
        print(path.name, outcome(path, kind), sep="\t")
    print("peak", peak_bytes() - before, sep="\t")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
