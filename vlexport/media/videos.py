"""Videos to RGB frames: arrays and .npy frame by frame, files sampled.

Files are decoded in a process of their own (about 0.2 s to start), because a decoder may hang or crash on
a file made to do so: it is killed at the deadline, its memory is capped where the system can do that, and
it can open nothing but the one file. Frames at a variable rate are taken by time; a damaged frame before
the last frame taken is a refusal, never a grey area. The picture is turned upright as in the container.
"""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO

from vlexport import system
from vlexport.codec import encode
from vlexport.errors import LimitError, MediaError, MisfitError, ResourceError, VlexportError
from vlexport.media import worker
from vlexport.media.arrays import NPY_START, is_array, read_npy, to_frames
from vlexport.media.images import read_image
from vlexport.media.limits import DEFAULT_LIMITS, MediaLimits
from vlexport.media.sampling import Sampling
from vlexport.media.sources import name_of, open_source, plain
from vlexport.specs import Pixels, check_frame_rate

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image
    from torch import Tensor

START = "from vlexport.media.worker import main; main()"
# First parts of MP4 and MOV files, after four bytes of size.
MOV_PARTS = frozenset({b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"})
MATROSKA_START, SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"
MAX_PARTS = 10_000
REFUSALS = {kind.__name__: kind for kind in (MediaError, LimitError, MisfitError, ResourceError)}
# What a system has too few of when it starts no process, and what an interpreter writes without memory.
SCARCE = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
LACK = re.compile(r"MemoryError|allocate|failed to map segment|start new thread")


def read_video(
    source: Path | str | bytes | BinaryIO | np.ndarray | Tensor | Sequence[Image | np.ndarray | Tensor],
    *,
    fps: float | None = None,
    limits: MediaLimits = DEFAULT_LIMITS,
    sampling: Sampling | None = None,
) -> Pixels:
    """Read frames [T, H, W, 3] and their rate.

    Arrays, tensors, .npy and lists of frames are taken whole and `fps` is their rate; a file is sampled and
    `fps` is the rate to take (in place of `sampling.frames_per_second`).
    """
    if fps is not None:
        check_frame_rate(fps)
    source = plain(source, limits)  # type: ignore[assignment]
    if isinstance(source, list | tuple):
        return Pixels(kind="video", frames=_stacked(source, limits), frames_per_second=fps)
    if is_array(source):
        return Pixels(kind="video", frames=to_frames(source, "video", limits), frames_per_second=fps)
    if not isinstance(source, Path | str | bytes):
        raise MediaError(
            f"{type(source).__name__} given as a video; a path, bytes, an open file, an array or tensor of "
            "frames, or a list of frames expected. Of several videos, each has a list of its own."
        )
    name = name_of(source)
    with open_source(source, limits) as file:
        starts_npy = file.read(len(NPY_START)) == NPY_START
        file.seek(0)
        if starts_npy:
            return Pixels(kind="video", frames=read_npy(file, name, limits), frames_per_second=fps)
        chosen = sampling or Sampling()
        chosen = replace(chosen, frames_per_second=fps) if fps is not None else chosen
        request = worker.Request(form=container_of(file, name), name=name, limits=limits, sampling=chosen)
        return _read_file(file, request)


def _stacked(frames: Sequence[object], limits: MediaLimits) -> Tensor:
    import torch

    if not frames:
        raise MediaError("video: a list without frames given. Pass at least one frame.")
    first = read_image(frames[0], limits).frames  # type: ignore[arg-type]
    limits.check_frames("video", len(frames), *first.shape[1:3])
    whole = [first]
    for number, frame in enumerate(frames[1:], 1):
        pixels = read_image(frame, limits).frames  # type: ignore[arg-type]
        if pixels.shape != first.shape:
            raise MediaError(
                f"video: frame {number} has {pixels.shape[2]}x{pixels.shape[1]} pixels, frame 0 has "
                f"{first.shape[2]}x{first.shape[1]}. Resize all frames to one size."
            )
        whole.append(pixels)
    return torch.cat(whole)


def video_frames(
    source: Path | str | bytes, *, fps: float, limits: MediaLimits = DEFAULT_LIMITS
) -> Iterator[Tensor]:
    """Yield frames [H, W, 3] of a video file one by one: what is shown at first + n / fps.

    One frame is held at a time, so max_frames and max_decoded_bytes bound nothing here; deadline_seconds
    bounds the wait for each frame. Raise max_seconds for a file that is longer.
    """
    sampling = Sampling(frames_per_second=fps, steady=True)
    unbounded = replace(limits, max_frames=2**31, max_decoded_bytes=2**62)
    name = name_of(source)
    with open_source(source, limits) as file:
        request = worker.Request(
            form=container_of(file, name), name=name, limits=unbounded, sampling=sampling
        )
        with _started(file, request) as process:
            yield from _frames_of(process, request)


def _frames_of(process: subprocess.Popen[bytes], request: worker.Request) -> Iterator[Tensor]:
    import torch

    assert process.stdout is not None
    with _within_deadline(process, request) as has_started:
        num_frames, *shape = _header(process.stdout, request, has_started)["shape"]
    for _ in range(num_frames):
        with _within_deadline(process, request) as has_started:
            has_started.set()
            frame = torch.empty(shape, dtype=torch.uint8)
            _record_into(process.stdout, frame.numpy().data.cast("B"))
        yield frame
    with _within_deadline(process, request) as has_started:
        has_started.set()
        _record(process.stdout, b"Z")


def _read_file(file: BinaryIO, request: worker.Request) -> Pixels:
    import torch

    with _started(file, request) as process, _within_deadline(process, request) as has_started:
        assert process.stdout is not None
        header = _header(process.stdout, request, has_started)
        frames = torch.empty(header["shape"], dtype=torch.uint8)
        for frame in frames:
            _record_into(process.stdout, memoryview(frame.numpy()).cast("B"))
        _record(process.stdout, b"Z")
        seconds = tuple(map(float, header["seconds"]))
        return Pixels(kind="video", frames=frames, frames_per_second=header["rate"], seconds=seconds)


def _header(stream: IO[bytes], request: worker.Request, has_started: threading.Event) -> Any:
    """Return what a decoder sends before its frames, whose shape is within the limits."""
    _record(stream, b"S")
    has_started.set()
    header = json.loads(_record(stream, b"H"))
    num_frames, height, width, channels = header["shape"]
    if channels != 3 or any(type(size) is not int or size < 0 for size in header["shape"]):
        raise ValueError("no shape of frames")
    request.limits.check_frames(request.name, num_frames, height, width)
    return header


@contextmanager
def _within_deadline(process: subprocess.Popen[bytes], request: worker.Request) -> Iterator[threading.Event]:
    """Kill a decoder that takes longer over the block, and explain why it ended; the block sets the start."""
    late, has_started = threading.Event(), threading.Event()

    def stop() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(min(request.limits.deadline_seconds, threading.TIMEOUT_MAX), stop)
    timer.start()
    try:
        yield has_started
    except (EOFError, ValueError, LookupError, TypeError):
        # It died, was killed, or was taken over by what it read and answers nonsense.
        if late.is_set():
            slow = LimitError(
                f"{request.name}: not decoded within {request.limits.deadline_seconds:g} seconds. "
                "Cut it, shrink it or raise MediaLimits.deadline_seconds (Python API)."
            )
            slow.temporary = True
            raise slow from None
        raise _ended(process, request, has_started.is_set()) from None
    finally:
        timer.cancel()


def _ended(process: subprocess.Popen[bytes], request: worker.Request, has_started: bool) -> VlexportError:
    assert process.stderr is not None
    status, words = process.wait(), process.stderr.read().decode(errors="replace").split("\n")
    if status == -9 or LACK.search(words[-2] if len(words) > 1 else ""):
        return ResourceError(
            f"{request.name}: the system ended its decoder (status {status}), probably for want of memory. "
            "Free memory, then try again."
        )
    if not has_started:
        last = words[-2][:200] if len(words) > 1 else "no message"
        return MisfitError(
            f"{request.name}: its decoder could not start (status {status}: {last}). `vlexport doctor` shows "
            "what is installed."
        )
    return MediaError(f"{request.name}: the decoder stopped with status {status}. Convert the file.")


@contextmanager
def _started(file: BinaryIO, request: worker.Request) -> Iterator[subprocess.Popen[bytes]]:
    try:
        process = subprocess.Popen(
            system.command(START, json.dumps(encode(request))),
            env=system.environment(),
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=2**20,
        )
    except OSError as error:
        kind = ResourceError if error.errno in SCARCE else MisfitError
        raise kind(
            f"{request.name}: no process can be started for its decoder ({error.strerror}); Python expected "
            f"at {sys.executable}, and room for one more process. Make room, then try again."
        ) from error
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _length(stream: IO[bytes], letter: bytes) -> int:
    """Return the length of the next record, which must be of this letter; raise an error record."""
    head = _exactly(stream, 9)
    length = int.from_bytes(head[1:], "big")
    if head[:1] == b"E":
        kind, text, *number = json.loads(_exactly(stream, length))
        raise OSError(*number, text) if kind == OSError.__name__ else REFUSALS[kind](text)
    if head[:1] != letter:
        raise ValueError("not the record that is due")
    return length


def _record(stream: IO[bytes], letter: bytes) -> bytes:
    return _exactly(stream, _length(stream, letter))


def _record_into(stream: IO[bytes], place: memoryview) -> None:
    if _length(stream, b"F") != len(place):
        raise ValueError("not a frame of the size promised")
    if stream.readinto(place) < len(place):  # type: ignore[attr-defined]
        raise EOFError


def _exactly(stream: IO[bytes], length: int) -> bytes:
    data = stream.read(length)
    if len(data) < length:
        raise EOFError
    return data


def container_of(file: BinaryIO, name: str) -> str:
    """Return the decoder's name for the container, by content; refuse a file that was cut short."""
    start = file.read(12)
    if start[4:8] in MOV_PARTS:
        form, end = "mov", _end_of_boxes(file)
    elif start.startswith(MATROSKA_START):
        form, end = "matroska", _end_of_segment(file)
    elif start.startswith(b"RIFF") and start[8:12] == b"AVI ":
        form, end = "avi", 8 + int.from_bytes(start[4:8], "little")
    else:
        raise MediaError(
            f"{name}: not a video that can be read: MP4, MOV, MKV, WebM, AVI or .npy expected. Images are "
            "PNG, JPEG or WebP, passed as images. Convert the file."
        )
    size = _size(file)
    if end > size:
        raise MediaError(
            f"{name}: cut short, it has {size} bytes of the {end} of its header. Download it again."
        )
    return form


def _size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def _end_of_boxes(file: BinaryIO) -> int:
    """Return where the last of the top-level boxes ends; a box of size 0 reaches to the end of the file."""
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
    """Return where the segment after the first element ends; 0 where its size is open, as in streams."""
    file.seek(0)
    head = file.read(4096)
    length, at = _number(head, 4)
    at += length or 0
    if head[at : at + 4] != SEGMENT:
        return 0
    length, at = _number(head, at + 4)
    return at + length if length is not None else 0


def _number(data: bytes, at: int) -> tuple[int | None, int]:
    first = data[at] if at < len(data) else 0
    width = 9 - first.bit_length()
    if width > 8:
        return None, at
    bits = int.from_bytes(data[at : at + width], "big") & ((1 << 7 * width) - 1)
    return (None if bits == (1 << 7 * width) - 1 else bits), at + width
