"""Format and size of PNG, JPEG and WebP images from their headers, before any decoder sees them."""

from __future__ import annotations

from dataclasses import dataclass

from vlexport.errors import LimitError, MediaError

PNG_START = b"\x89PNG\r\n\x1a\n"
# JPEG markers: frames with a size (not tables, not extensions), and those without a body.
JPEG_SIZES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
JPEG_BARE = frozenset({0x01, *range(0xD0, 0xD9)})
# Progressive files have about ten passes over the image; each costs a little data and a lot of time.
MAX_JPEG_SCANS = 100
# Before the size; files have tens.
MAX_JPEG_SEGMENTS = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageHeader:
    """What an image file says about itself; `form` is the decoder's name for its format."""

    form: str
    width: int
    height: int


def read_header(name: str, data: bytes) -> ImageHeader:
    """Recognise a format by its content; the file's extension plays no part."""
    if data.startswith(PNG_START):
        form, size = "PNG", _png_size(data)
    elif data.startswith(b"\xff\xd8\xff"):
        form, size = "JPEG", _jpeg_size(data)
        _check_scans(name, data)
    elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        form, size = "WEBP", _webp_size(data)
    else:
        raise MediaError(
            f"{name}: not an image that can be read. PNG, JPEG or WebP expected; convert it. "
            "Videos and .npy files of frames are passed as videos."
        )
    if size is None or min(size) < 1:
        raise MediaError(f"{name}: a {form} file with a damaged header. Write the image again.")
    return ImageHeader(form=form, width=size[0], height=size[1])


def _png_size(data: bytes) -> tuple[int, int] | None:
    if data[12:16] != b"IHDR" or len(data) < 24:
        return None
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def _jpeg_size(data: bytes) -> tuple[int, int] | None:
    at = 2
    for _ in range(MAX_JPEG_SEGMENTS):
        at = data.find(b"\xff", at)
        if at < 0 or at + 9 > len(data):
            return None
        marker = data[at + 1]
        if marker in JPEG_SIZES:
            height, width = data[at + 5 : at + 7], data[at + 7 : at + 9]
            return int.from_bytes(width, "big"), int.from_bytes(height, "big")
        if marker in {0xDA, 0xD9}:
            return None
        if marker in {0x00, 0xFF}:
            at += 1
        elif marker in JPEG_BARE:
            at += 2
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return None


def _check_scans(name: str, data: bytes) -> None:
    # Inside image data 0xFF is followed by 0x00 or a restart marker, so this finds scans and little else.
    scans = data.count(b"\xff\xda")
    if scans > MAX_JPEG_SCANS:
        raise LimitError(
            f"{name}: a JPEG file of {scans} scans, at most {MAX_JPEG_SCANS} expected. Write the image again."
        )


def _webp_size(data: bytes) -> tuple[int, int] | None:
    kind, body = data[12:16], data[20:30]
    if len(body) < 10:
        return None
    if kind == b"VP8X":
        return 1 + int.from_bytes(body[4:7], "little"), 1 + int.from_bytes(body[7:10], "little")
    if kind == b"VP8L" and body[0] == 0x2F:
        bits = int.from_bytes(body[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 " and body[3:6] == b"\x9d\x01\x2a":
        return int.from_bytes(body[6:8], "little") & 0x3FFF, int.from_bytes(body[8:10], "little") & 0x3FFF
    return None
