"""Which container a video file is, and whether all of it is there, before a decoder sees it."""

from __future__ import annotations

import os
from typing import BinaryIO

from vlexport.errors import MediaError

# First parts of MP4 and MOV files, after four bytes of size.
MOV_PARTS = frozenset({b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"})
MATROSKA_START, SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"
MAX_PARTS = 10_000


def container_of(file: BinaryIO, name: str) -> str:
    """The decoder's name for the container, by content; a file that was cut short is refused."""
    start = file.read(12)
    if start[4:8] in MOV_PARTS:
        form, end = "mov", _end_of_boxes(file)
    elif start.startswith(MATROSKA_START):
        form, end = "matroska", _end_of_segment(file)
    elif start.startswith(b"RIFF") and start[8:12] == b"AVI ":
        form, end = "avi", 8 + int.from_bytes(start[4:8], "little")
    else:
        raise MediaError(
            f"{name}: not a video that can be read. MP4, MOV, MKV, WebM, AVI or .npy expected; convert it. "
            "PNG, JPEG and WebP files are passed as images."
        )
    size = _size(file)
    if end > size:
        raise MediaError(
            f"{name}: cut short, it has {size} bytes of the {end} that its header tells. Download it again."
        )
    return form


def _size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def _end_of_boxes(file: BinaryIO) -> int:
    """Where the last of the top-level boxes ends; a box of size 0 reaches to the end of the file."""
    at, size = 0, _size(file)
    for _ in range(MAX_PARTS):
        file.seek(at)
        head = file.read(16)
        length = int.from_bytes(head[:4], "big")
        if length == 1:
            length = int.from_bytes(head[8:16], "big")
        if len(head) < 8 or length < 8 or at + length > size:
            return at + (length if len(head) >= 8 else 0)
        at += length
    return at


def _end_of_segment(file: BinaryIO) -> int:
    """Where the segment ends that follows the first element; 0 where its size is left open, as in streams."""
    file.seek(0)
    head = file.read(4096)
    length, at = _number(head, 4)
    at += length or 0
    if head[at : at + 4] != SEGMENT:
        return 0
    length, at = _number(head, at + 4)
    return at + length if length is not None else 0


def _number(data: bytes, at: int) -> tuple[int | None, int]:
    """A size of variable width and the place after it; None for the size of all ones, which is open."""
    first = data[at] if at < len(data) else 0
    width = 9 - first.bit_length()
    if width > 8:
        return None, at
    bits = int.from_bytes(data[at : at + width], "big") & ((1 << 7 * width) - 1)
    return (None if bits == (1 << 7 * width) - 1 else bits), at + width
