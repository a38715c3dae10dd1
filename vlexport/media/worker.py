"""The process that opens and decodes a video file: what hangs, leaks or crashes there ends there.

It reads the file from standard input and writes records to standard output: a letter, a length, a body.
H is the header (JSON), F the bytes of one RGB frame in the order taken, E an error (JSON), Z the end.
It opens no other file: the container's format is fixed by the caller and no protocol is allowed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, BinaryIO

from vlexport.errors import LimitError, MediaError
from vlexport.media.limits import MediaLimits
from vlexport.media.sampling import Choice, Sampling, Timeline, choose

if TYPE_CHECKING:
    import numpy as np
    from av import VideoFrame
    from av.container import InputContainer
    from av.video.stream import VideoStream

# Formats of which one decoder each has seen years of attacks; nothing exotic is tried.
CODECS = "h264,hevc,vp8,vp9,libvpx,libvpx-vp9,av1,libdav1d,mpeg4,mjpeg,ffv1,rawvideo"
# Memory for the decoder's own frames and tables; what it hands out is not kept here.
WORK_BYTES = 2**31


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A file's container format, what messages call it, and how to take it."""

    form: str
    name: str
    limits: MediaLimits
    sampling: Sampling

    def to_json(self) -> str:
        """The argument that `main` reads."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Request:
        """Read back what `to_json` wrote."""
        known = json.loads(text)
        limits, sampling = MediaLimits(**known.pop("limits")), Sampling(**known.pop("sampling"))
        return Request(limits=limits, sampling=sampling, **known)


def main() -> None:
    """Decode standard input as the last argument says."""
    request = Request.from_json(sys.argv[-1])
    out = sys.stdout.buffer
    _cap_resources(request.limits)
    try:
        with os.fdopen(0, "rb") as file:
            _decode(file, out, request)
    except (MediaError, LimitError) as error:
        _send(out, b"E", json.dumps([type(error).__name__, str(error)]).encode())
    except MemoryError:
        text = f"{request.name}: decoding needs more than {WORK_BYTES} bytes. Write smaller frames."
        _send(out, b"E", json.dumps([LimitError.__name__, text]).encode())
    out.flush()


def _cap_resources(limits: MediaLimits) -> None:
    if sys.platform == "win32":
        return
    import resource

    # Should the parent be killed, the kernel ends a decoder that hangs.
    seconds = int(limits.deadline_seconds * (os.cpu_count() or 1)) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_DATA, (WORK_BYTES, WORK_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _send(out: BinaryIO, letter: bytes, body: bytes | memoryview) -> None:
    out.write(letter + len(body).to_bytes(8, "big"))
    out.write(body)


def _decode(file: BinaryIO, out: BinaryIO, request: Request) -> None:
    import av

    name, limits = request.name, request.limits
    try:
        with _open(file, request.form) as container:
            stream = _stream(container, name, limits)
            timeline = _timeline(container, stream, name, limits)
            choice = choose(timeline, request.sampling)
            limits.check_frames(name, len(choice.indices), stream.height, stream.width)
            container.seek(timeline.ticks[0], stream=stream)
            _send_frames(out, _frames(container, stream, timeline, choice, name), choice, name, limits)
    except av.error.MemoryError as error:
        raise MemoryError from error
    except (av.error.FFmpegError, ValueError, OSError) as error:
        raise _damaged(name, "it cannot be decoded") from error


def _damaged(name: str, how: str) -> MediaError:
    return MediaError(f"{name}: damaged or cut short, {how}. Write or download it again.")


def _open(file: BinaryIO, form: str) -> InputContainer:
    import av

    options = {"codec_whitelist": CODECS, "protocol_whitelist": "none", "format_whitelist": form}
    return av.open(file, "r", format=form, container_options=options)


def _stream(container: InputContainer, name: str, limits: MediaLimits) -> VideoStream:
    """The first video, checked as far as its header tells."""
    import av

    if not container.streams.video:
        raise MediaError(f"{name}: no video in it. Pass a file with a video stream.")
    stream = container.streams.video[0]
    if stream.codec_context.name not in CODECS.split(","):
        raise MediaError(f"{name}: its video codec is not one of {CODECS}. Convert it.")
    if not stream.width or not stream.height:
        raise _damaged(name, "its header gives no frame size")
    limits.check_frames(name, 1, stream.height, stream.width)
    if container.duration:
        limits.check_seconds(name, container.duration / av.time_base)
    # A damaged frame is an error, not a grey area; and no frame outgrows the header.
    stream.codec_context.options = {"err_detect": "explode", "max_pixels": str(limits.max_pixels)}
    return stream


def _timeline(container: InputContainer, stream: VideoStream, name: str, limits: MediaLimits) -> Timeline:
    """When frames are shown, from the packets, undecoded."""
    hides = stream.codec_context.name in {"vp8", "libvpx"}
    ticks: set[int] = set()
    for packet in container.demux(stream):
        at = packet.dts if packet.pts is None else packet.pts
        if packet.is_corrupt:
            raise _damaged(name, f"packet {len(ticks)} is corrupt")
        # this codec has packets that show nothing: bit 4 of their first byte is off
        shows = packet.size > 0 and not packet.is_discard and not (hides and not bytes(packet)[0] & 0x10)
        if shows and at is not None:
            ticks.add(at)
    if not ticks or stream.time_base is None:
        raise MediaError(f"{name}: no frames in it. Pass a video with at least one frame.")
    timeline = Timeline(
        ticks=sorted(ticks), tick=Fraction(stream.time_base), declared_rate=stream.average_rate or None
    )
    limits.check_seconds(name, float(timeline.seconds))
    return timeline


def _frames(
    container: InputContainer, stream: VideoStream, timeline: Timeline, choice: Choice, name: str
) -> Iterator[VideoFrame]:
    """The chosen frames, each found by its own time."""
    wanted = [timeline.ticks[index] for index in choice.indices]
    at = 0
    for frame in container.decode(stream):
        if frame.is_corrupt:
            raise _damaged(name, "a frame is corrupt")
        shown = frame.dts if frame.pts is None else frame.pts
        while at < len(wanted) and shown == wanted[at]:
            yield frame
            at += 1
        if at == len(wanted):
            return
        if shown is not None and shown > wanted[at]:
            break
    raise _damaged(name, f"frame {choice.indices[at]} is missing")


def _send_frames(
    out: BinaryIO, frames: Iterator[VideoFrame], choice: Choice, name: str, limits: MediaLimits
) -> None:
    shape: tuple[int, ...] | None = None
    for frame in frames:
        pixels = _upright(frame)
        if shape is None:
            shape = pixels.shape
            limits.check_frames(name, len(choice.indices), shape[0], shape[1])
            header = {"shape": [len(choice.indices), *shape], "rate": choice.frames_per_second}
            _send(out, b"H", json.dumps(header).encode())
        if pixels.shape != shape:
            raise MediaError(
                f"{name}: frames of {shape[1]}x{shape[0]} and of {pixels.shape[1]}x{pixels.shape[0]} pixels; "
                "one size expected. Convert it to one size."
            )
        _send(out, b"F", pixels.data.cast("B"))
    _send(out, b"Z", b"")


def _upright(frame: VideoFrame) -> np.ndarray:
    """RGB, turned as the container says."""
    import numpy as np

    pixels = frame.to_ndarray(format="rgb24")
    return np.ascontiguousarray(np.rot90(pixels, round(frame.rotation / 90)))
