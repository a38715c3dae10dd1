"""Frames of a pipe, as `ffmpeg -f image2pipe -c:v ppm` writes them: each with its size before its pixels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO

from vlexport.errors import MediaError
from vlexport.media.limits import DEFAULT_LIMITS, MediaLimits

if TYPE_CHECKING:
    from torch import Tensor

# Width, height and largest value of binary PPM.
HEADER = re.compile(rb"P6\s+([1-9]\d{0,5})\s+([1-9]\d{0,5})\s+255\s")
LONGEST_HEADER = 32


def piped_frames(file: BinaryIO, limits: MediaLimits = DEFAULT_LIMITS) -> Iterator[Tensor]:
    """Yield frames [H, W, 3] one by one; what is no whole frame ends them with an error."""
    import torch

    number = 0
    while head := file.read(1):
        # Byte by byte, so that nothing of the next frame is waited for.
        while not (size := HEADER.fullmatch(head)):
            byte = file.read(1)
            head += byte
            if not byte or len(head) > LONGEST_HEADER:
                raise _damaged(number, f"{head[:LONGEST_HEADER]!r} is no header")
        width, height = int(size[1]), int(size[2])
        limits.check_frames(f"frame {number}", 1, height, width)
        data = bytearray(file.read(height * width * 3))
        if len(data) < height * width * 3:
            raise _damaged(number, "cut short")
        yield torch.frombuffer(data, dtype=torch.uint8).view(height, width, 3)
        number += 1


def _damaged(number: int, reason: str) -> MediaError:
    return MediaError(
        f"frame {number}: {reason}. Binary PPM expected, as `ffmpeg -f image2pipe -c:v ppm -` writes it."
    )
