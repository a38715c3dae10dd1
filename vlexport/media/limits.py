"""Limits of one image or video."""

from __future__ import annotations

from dataclasses import dataclass, fields

from vlexport.codec import check_fields
from vlexport.errors import InputError, LimitError

MEBI = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaLimits:
    """Limits of one image or video, set by the operator; a request may only lower them.

    `max_pixels` is of one image or frame, `max_frames` counts the frames that are kept, `max_seconds` is the
    length of a video file, `max_decoded_bytes` the size of all kept frames together. `deadline_seconds`
    bounds the decoding of one item.
    """

    max_pixels: int = 64 * MEBI
    max_frames: int = 768
    max_seconds: float = 3600.0
    max_file_bytes: int = 1024 * MEBI
    max_decoded_bytes: int = 4096 * MEBI
    deadline_seconds: float = 60.0

    def __post_init__(self) -> None:
        check_fields(self)
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise InputError(f"{field.name}: {value} given, a finite number above 0 expected.")

    def lowered(self, to: MediaLimits) -> MediaLimits:
        lower = {
            limit.name: min(getattr(self, limit.name), getattr(to, limit.name)) for limit in fields(self)
        }
        return MediaLimits(**lower)

    def check_file(self, name: str, num_bytes: int) -> None:
        if num_bytes > self.max_file_bytes:
            raise LimitError(
                f"{name}: {num_bytes} bytes, at most {self.max_file_bytes} expected. "
                "Compress it or raise MediaLimits.max_file_bytes (Python API)."
            )

    def check_frames(self, name: str, frames: int, height: int, width: int) -> None:
        if height * width > self.max_pixels:
            raise LimitError(
                f"{name}: {width}x{height} pixels, at most {self.max_pixels} in all expected. "
                "Shrink it or raise MediaLimits.max_pixels (Python API)."
            )
        if frames > self.max_frames:
            raise LimitError(
                f"{name}: {frames} frames, at most {self.max_frames} expected. "
                "Take fewer frames per second or raise MediaLimits.max_frames (Python API)."
            )
        num_bytes = 3 * frames * height * width
        if num_bytes > self.max_decoded_bytes:
            raise LimitError(
                f"{name}: {frames} frames of {width}x{height} pixels are {num_bytes} bytes, "
                f"at most {self.max_decoded_bytes} expected. "
                "Take fewer or smaller frames or raise MediaLimits.max_decoded_bytes (Python API)."
            )

    def check_seconds(self, name: str, seconds: float) -> None:
        if seconds > self.max_seconds:
            raise LimitError(
                f"{name}: {seconds:.1f} seconds long, at most {self.max_seconds:g} expected. "
                "Cut it or raise MediaLimits.max_seconds (Python API)."
            )


DEFAULT_LIMITS = MediaLimits()
