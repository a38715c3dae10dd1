"""Image files from numbers, and their headers by hand."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
from PIL import Image

ORIENTATION = 0x0112
PNG_START = b"\x89PNG\r\n\x1a\n"


def pattern(height: int = 48, width: int = 64) -> np.ndarray:
    """A picture with no symmetry: every turn of it is another picture."""
    y, x = np.mgrid[:height, :width]
    return np.stack([x * 3 % 256, y * 5 % 256, (x * 2 + y) % 256], -1).astype(np.uint8)


def encoded(image: Image.Image, form: str, **options: object) -> bytes:
    """An image as a file of one format; lossless where the format can be."""
    file = io.BytesIO()
    image.save(file, form, **({"lossless": True, "exact": True} if form == "WEBP" else {}), **options)
    return file.getvalue()


def picture(form: str = "PNG", height: int = 48, width: int = 64, **options: object) -> bytes:
    return encoded(Image.fromarray(pattern(height, width)), form, **options)


def oriented(form: str, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return picture(form, exif=exif)


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, *chunks: bytes, bits: int = 8, colour: int = 2) -> bytes:
    """A PNG of any size on paper, holding the chunks given."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0))
    return PNG_START + header + b"".join(chunks) + png_chunk(b"IEND", b"")


def png_of_zeros(width: int, height: int, num_bytes: int) -> bytes:
    """A PNG whose data are this many zero bytes, whatever its header has."""
    return png(width, height, png_chunk(b"IDAT", zlib.compress(bytes(num_bytes), 9)))


def jpeg_with_size(width: int, height: int) -> bytes:
    """A real JPEG whose header has another size."""
    data = picture("JPEG")
    at = data.index(b"\xff\xc0")
    return data[: at + 5] + struct.pack(">HH", height, width) + data[at + 9 :]


def webp_with_size(width: int, height: int) -> bytes:
    """A real lossless WebP whose header has another size."""
    data = picture("WEBP")
    at = data.index(b"VP8L") + 9
    bits = int.from_bytes(data[at : at + 4], "little") & ~0xFFFFFFF | (height - 1) << 14 | (width - 1)
    return data[:at] + struct.pack("<I", bits) + data[at + 4 :]


def webp_canvas(width: int, height: int) -> bytes:
    """An extended WebP of a large canvas around a small picture."""
    body = struct.pack("<I", 0)[:4] + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    chunks = b"VP8X" + struct.pack("<I", 10) + body + picture("WEBP")[12:]
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WEBP" + chunks


def animation(form: str, *greys: int) -> bytes:
    first, *others = (Image.new("RGB", (64, 48), (grey, grey, grey)) for grey in greys)
    return encoded(first, form, save_all=True, append_images=others, duration=100)
