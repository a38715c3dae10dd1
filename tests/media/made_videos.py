"""Video files from numbers: each frame is one grey, so that a decoded frame shows which one it was."""

from __future__ import annotations

import io
from collections.abc import Sequence
from fractions import Fraction

import av
import numpy as np
from av.audio.stream import AudioStream
from av.video.stream import VideoStream

FORMS = {"mp4": "mp4", "mov": "mov", "mkv": "matroska", "webm": "webm", "avi": "avi"}


def grey(number: int) -> int:
    """The level of a frame; neighbours differ by more than codecs blur."""
    return number * 37 % 200 + 20


def frames(num: int, height: int = 48, width: int = 64) -> np.ndarray:
    return np.stack([np.full((height, width, 3), grey(number), np.uint8) for number in range(num)])


def video(
    form: str = "mp4",
    codec: str = "libx264",
    num: int = 20,
    *,
    rate: int = 10,
    ticks: Sequence[int] | None = None,
    pixels: np.ndarray | None = None,
    options: dict[str, str] | None = None,
    with_sound: bool = False,
) -> bytes:
    """An encoded file; `ticks` are the frames' times in milliseconds, evenly spaced when left out."""
    file = io.BytesIO()
    shown = frames(num) if pixels is None else pixels
    with av.open(file, "w", format=FORMS[form]) as container:
        stream = container.add_stream(codec, rate=rate, options=options or {})
        assert isinstance(stream, VideoStream)
        stream.height, stream.width = shown.shape[1:3]
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        if ticks is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        sound = container.add_stream("aac", rate=8000) if with_sound else None
        for number, image in enumerate(shown):
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            if ticks is not None:
                frame.pts, frame.time_base = ticks[number], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
        if sound is not None:
            assert isinstance(sound, AudioStream)
            quiet = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.float32), format="fltp", layout="mono")
            quiet.sample_rate = 8000
            container.mux(sound.encode(quiet))
            container.mux(sound.encode())
    return file.getvalue()


def packets(data: bytes) -> list[tuple[int, int]]:
    """Place and size of every video packet in a file, in file order."""
    with av.open(io.BytesIO(data), "r") as container:
        found = [(packet.pos, packet.size) for packet in container.demux(container.streams.video[0])]
    return [(place, size) for place, size in found if place is not None and size]


def spoiled(data: bytes, number: int, pattern: bytes = b"\xff") -> bytes:
    """A file with the middle of one packet overwritten."""
    place, size = sorted(packets(data))[number]
    begin, end = place + size // 4, place + size
    return data[:begin] + (pattern * size)[: end - begin] + data[end:]


def box_field(data: bytes, box: bytes, offset: int, value: bytes) -> bytes:
    """An MP4 with bytes of one box replaced, counted from the end of the box's name."""
    at = data.index(box) + len(box) + offset
    return data[:at] + value + data[at + len(value) :]
