"""The process that opens and decodes a video file: what hangs, leaks or crashes there ends there.

It reads the file from standard input and writes records to standard output: a letter, a length, a body.
S is the start, sent before the file is read, H the header (JSON), F the bytes of one RGB frame in the order
taken, E an error (JSON), Z the end.
It opens no other file: the container's format is fixed by the caller and no protocol is allowed.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from vlexport.codec import decode
from vlexport.errors import LimitError, MediaError, MisfitError, ResourceError, VlexportError
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
# Of it, for what is held between two looks.
MARGIN_BYTES = 2**24
# A kernel's numbers have 63 bits.
MOST_SECONDS = 2**62


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A file's container format, its name in messages, its limits and the frames to take."""

    form: str
    name: str
    limits: MediaLimits
    sampling: Sampling


def main() -> None:
    """Decode standard input by the request in the last argument."""
    request = decode(Request, json.loads(sys.argv[-1]), "request")
    out = sys.stdout.buffer
    _cap_resources(request)
    try:
        import av  # noqa: F401  loaded before the file is touched
        import numpy as np  # noqa: F401

        _send(out, b"S", b"")
        out.flush()
        # Libraries write about damaged files there, and nobody reads it any longer.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        with os.fdopen(0, "rb") as file:
            _decode(file, out, request)
    except (MediaError, LimitError) as error:
        _refuse(out, type(error), str(error))
    except ModuleNotFoundError as error:
        text = (
            f"the package '{error.name}' is not installed. `pip install vlexport` installs what is missing."
        )
        _refuse(out, MisfitError, text)
    except MemoryError:
        if _has_room():
            text = f"{request.name}: decoding needs more than {WORK_BYTES} bytes. Write smaller frames."
            _refuse(out, LimitError, text)
        else:
            text = f"{request.name}: no memory or no thread left for its decoder. Free some, then try again."
            _refuse(out, ResourceError, text)
    except OSError as error:
        _send(out, b"E", json.dumps([OSError.__name__, error.strerror, error.errno]).encode())
    out.flush()


def _refuse(out: BinaryIO, kind: type[VlexportError], text: str) -> None:
    _send(out, b"E", json.dumps([kind.__name__, text]).encode())


def _cap_resources(request: Request) -> None:
    if sys.platform == "win32":
        return
    import resource

    # Should the parent be killed, the kernel ends a decoder that hangs.
    # A stream may decode for as long as its file plays.
    playing = request.limits.max_seconds if request.sampling.steady else 0.0
    seconds = int(min((request.limits.deadline_seconds + playing) * (os.cpu_count() or 1), MOST_SECONDS)) + 1
    caps = {resource.RLIMIT_CPU: seconds, resource.RLIMIT_DATA: WORK_BYTES, resource.RLIMIT_CORE: 0}
    for kind, most in caps.items():
        allowed = resource.getrlimit(kind)[1]
        cap = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
        resource.setrlimit(kind, (cap, cap))


def _has_room() -> bool:
    """Return whether the machine would let this process grow up to `WORK_BYTES`: then a file wanted more."""
    try:
        used = int(Path("/proc/self/statm").read_text().split()[5]) * mmap.PAGESIZE
        mmap.mmap(-1, WORK_BYTES - used - MARGIN_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except FileNotFoundError:
        # This system tells nobody what its processes take.
        return True
    except (OSError, MemoryError):
        return False
    return True


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
        # Opened again for the second reading: not every container can go back to its start.
        with _open(file, request.form) as container:
            stream = _stream(container, name, limits)
            frames = _frames(container, stream, timeline, choice)
            _send_frames(out, frames, choice, name, limits)
    except (av.error.MemoryError, av.error.BlockingIOError) as error:
        # The second is a thread that could not be started.
        raise MemoryError from error
    except (av.error.FFmpegError, ValueError) as error:
        # The decoder's own words stay in __cause__: they may hold addresses of this process.
        raise MediaError(
            f"{name}: damaged or cut short, it cannot be decoded. Write or download it again."
        ) from error


def _open(file: BinaryIO, form: str) -> InputContainer:
    import av

    file.seek(0)
    options = {"codec_whitelist": CODECS, "protocol_whitelist": "none", "format_whitelist": form}
    return av.open(file, "r", format=form, container_options=options)


def _stream(container: InputContainer, name: str, limits: MediaLimits) -> VideoStream:
    import av

    cover = av.stream.Disposition.attached_pic
    stream = next((video for video in container.streams.video if not video.disposition & cover), None)
    if stream is None:
        raise MediaError(f"{name}: no video in it. Pass a file with a video stream.")
    if stream.codec_context.name not in CODECS.split(","):
        raise MediaError(f"{name}: its video codec is not one of {CODECS}. Convert it.")
    if not stream.width or not stream.height:
        raise ValueError("no frame size in the header")
    limits.check_frames(name, 1, stream.height, stream.width)
    if container.duration:
        limits.check_seconds(name, container.duration / av.time_base)
    # A damaged frame is an error, not a grey area; and no frame outgrows the header.
    most = min(limits.max_pixels, 2**31 - 1)  # a C int
    stream.codec_context.options = {"err_detect": "explode", "max_pixels": str(most)}
    return stream


def _timeline(container: InputContainer, stream: VideoStream, name: str, limits: MediaLimits) -> Timeline:
    hides = stream.codec_context.name in {"vp8", "libvpx"}
    ticks: set[int] = set()
    # This container has decoding times only; the library guesses the others, wrongly.
    is_ordered = container.format.name == "avi"
    for packet in container.demux(stream):
        at = packet.dts if packet.pts is None else packet.pts
        if packet.is_corrupt:
            raise ValueError(f"packet {len(ticks)} is corrupt")
        # this codec has packets that show nothing: bit 4 of their first byte is off
        shows = packet.size > 0 and not packet.is_discard and not (hides and not bytes(packet)[0] & 0x10)
        if shows and at is not None:
            ticks.add(at)
            is_ordered = is_ordered or packet.pts is None
    if not ticks or stream.time_base is None:
        raise MediaError(f"{name}: no frames in it. Pass a video with at least one frame.")
    timeline = Timeline(
        ticks=sorted(ticks),
        tick=Fraction(stream.time_base),
        declared_rate=stream.average_rate or None,
        is_ordered=is_ordered,
    )
    limits.check_seconds(name, float(timeline.seconds))
    return timeline


def _frames(
    container: InputContainer, stream: VideoStream, timeline: Timeline, choice: Choice
) -> Iterator[VideoFrame]:
    ticks, chosen = timeline.ticks, list(choice.indices)
    for number, frame in enumerate(container.decode(stream)):
        if frame.is_corrupt:
            raise ValueError(f"frame {number} is corrupt")
        while chosen and (number == chosen[0] if timeline.is_ordered else frame.pts == ticks[chosen[0]]):
            yield frame
            chosen.pop(0)
        if not chosen:
            return
    raise ValueError(f"frame {chosen[0]} is missing")


def _send_frames(
    out: BinaryIO, frames: Iterator[VideoFrame], choice: Choice, name: str, limits: MediaLimits
) -> None:
    shape: tuple[int, ...] | None = None
    for frame in frames:
        pixels = _upright(frame)
        if shape is None:
            shape = pixels.shape
            limits.check_frames(name, len(choice.indices), shape[0], shape[1])
            times = {"rate": choice.frames_per_second, "seconds": choice.seconds}
            header = {"shape": [len(choice.indices), *shape], **times}
            _send(out, b"H", json.dumps(header).encode())
        if pixels.shape != shape:
            raise MediaError(
                f"{name}: frames of {shape[1]}x{shape[0]} and of {pixels.shape[1]}x{pixels.shape[0]} pixels; "
                "one size expected. Convert it to one size."
            )
        _send(out, b"F", pixels.data.cast("B"))
    _send(out, b"Z", b"")


def _upright(frame: VideoFrame) -> np.ndarray:
    import numpy as np

    pixels = frame.to_ndarray(format="rgb24")
    return np.ascontiguousarray(np.rot90(pixels, round(frame.rotation / 90)))
