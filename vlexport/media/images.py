"""Images to one RGB frame.

Files are decoded in this process: PNG, JPEG and WebP decoders run in time linear in pixels and bytes, both
bounded from the header beforehand, and the deadline is checked whenever they read more data.
The picture is turned upright by its EXIF orientation; transparency is laid on white, as transformers'
processors do; of an animation the first picture is taken; of 16 bits the upper eight. Colour profiles are
not applied.
"""

from __future__ import annotations

import io
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from vlexport.errors import LimitError, MediaError
from vlexport.media.arrays import is_array, to_frames
from vlexport.media.limits import DEFAULT_LIMITS, MediaLimits
from vlexport.media.sources import name_of, plain, read_source
from vlexport.specs import Pixels

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image
    from torch import Tensor

# What the decoders and their metadata readers raise on damaged files.
DAMAGED = (
    OSError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, EOFError,
    RuntimeError, AssertionError, struct.error, Warning,
)  # fmt: skip
ORIENTATION = 0x0112
BAND_PIXELS = 2**20
# Sixteen bits of grey, by byte order.
SIXTEEN_BITS = frozenset({"I;16", "I;16L", "I;16B", "I;16N"})
# Wider numbers have no agreed range, and this colour space no conversion.
NO_BYTES = frozenset({"I", "F", "LAB"})
PNG_START = b"\x89PNG\r\n\x1a\n"
# JPEG markers: frames with a size (not tables, not extensions), and those without a body.
JPEG_SIZES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
JPEG_BARE = frozenset({0x01, *range(0xD0, 0xD9)})
# Progressive files have about ten passes over the image; each costs a little data and a lot of time.
MAX_JPEG_SCANS = 100
# Before the size; files have tens.
MAX_JPEG_SEGMENTS = 10_000


def read_image(
    source: Path | str | bytes | BinaryIO | Image | np.ndarray | Tensor, limits: MediaLimits = DEFAULT_LIMITS
) -> Pixels:
    """Read one image as [1, H, W, 3]; arrays and tensors are uint8, channels last or first."""
    import PIL.Image

    source = plain(source, limits)  # type: ignore[assignment]
    if is_array(source):
        return Pixels(kind="image", frames=to_frames(source, "image", limits))
    if isinstance(source, PIL.Image.Image):
        limits.check_frames("image", 1, source.height, source.width)
        return _pixels(source, "image")
    if not isinstance(source, Path | str | bytes):
        raise MediaError(
            f"{type(source).__name__} given as an image; a path, bytes, an open file, a data: URL, "
            "a PIL image, an array or a tensor expected."
        )
    return _pixels(_open(read_source(source, limits), name_of(source), limits), name_of(source))


class _TimedBytes(io.BytesIO):
    """Bytes that cannot be read any more when time is up; decoders read them piece by piece."""

    def __init__(self, data: bytes, name: str, seconds: float) -> None:
        super().__init__(data)
        self.name = name
        self.seconds = seconds
        self.end = time.monotonic() + seconds

    def read(self, size: int | None = -1, /) -> bytes:
        if time.monotonic() > self.end:
            raise LimitError(
                f"{self.name}: not decoded within {self.seconds:g} seconds. "
                "Shrink the image or raise MediaLimits.deadline_seconds (Python API)."
            )
        return super().read(size)


def _open(data: bytes, name: str, limits: MediaLimits) -> Image:
    import PIL.Image

    header = read_header(name, data)
    limits.check_frames(name, 1, header.height, header.width)
    file = _TimedBytes(data, name, limits.deadline_seconds)
    try:
        image = PIL.Image.open(file, formats=(header.form,))
    except (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning) as error:
        raise LimitError(
            f"{name}: it has more pixels than PIL decodes, whatever the limits here. Shrink the image."
        ) from error
    except DAMAGED as error:
        raise _damaged(name) from error
    if image.size != (header.width, header.height):
        raise _damaged(name)
    return image


def _damaged(name: str) -> MediaError:
    # The decoder's own words stay in __cause__: they may hold addresses of this process.
    return MediaError(f"{name}: damaged or cut short, it cannot be decoded. Write or download it again.")


def _pixels(image: Image, name: str) -> Pixels:
    import numpy as np
    import torch

    try:
        whole = _upright(image)
        frame_HWC = np.empty((whole.height, whole.width, 3), np.uint8)
        rows = max(1, BAND_PIXELS // whole.width)
        for top in range(0, whole.height, rows):
            bottom = min(top + rows, whole.height)
            frame_HWC[top:bottom] = np.asarray(_rgb(whole.crop((0, top, whole.width, bottom)), name))
    except DAMAGED as error:
        raise _damaged(name) from error
    return Pixels(kind="image", frames=torch.from_numpy(frame_HWC[None]))


def _upright(image: Image) -> Image:
    """Turn an image by its EXIF orientation; an unreadable EXIF block is ignored."""
    from PIL.Image import Transpose

    image.load()
    try:
        orientation = image.getexif().get(ORIENTATION)
    except DAMAGED:
        return image
    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    return image.transpose(turns[orientation]) if orientation in turns else image


def _rgb(image: Image, name: str) -> Image:
    import numpy as np
    import PIL.Image

    if image.mode in NO_BYTES:
        raise MediaError(
            f"{name}: pixels of PIL mode '{image.mode}' do not determine which bytes they are. "
            "Scale them to 0..255 and convert to mode 'L' or 'RGB'."
        )
    if image.mode in SIXTEEN_BITS:
        # Native order, whichever the mode has; PIL computes with I;16 alone.
        return PIL.Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        upper = image.convert("RGBA")
        white = PIL.Image.new("RGBA", upper.size, (255, 255, 255, 255))
        return PIL.Image.alpha_composite(white, upper).convert("RGB")
    return image.convert("RGB")


def is_image(start: bytes) -> bool:
    """Return whether a file that starts like this is an image that can be read."""
    webp = start[:4] == b"RIFF" and start[8:12] == b"WEBP"
    return webp or start.startswith((PNG_START, b"\xff\xd8\xff"))


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageHeader:
    """Format and size of an image file; `form` is the decoder's name for its format."""

    form: str
    width: int
    height: int


def read_header(name: str, data: bytes) -> ImageHeader:
    """Return format and size from the header, by content; the file's extension plays no part."""
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
