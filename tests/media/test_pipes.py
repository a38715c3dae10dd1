"""Frames of a pipe come out as they went in; what is no whole frame ends them."""

from __future__ import annotations

import io
import subprocess
from typing import BinaryIO, cast

import numpy as np
import pytest
import torch
from PIL import Image

from vlexport.errors import LimitError, MediaError
from vlexport.media import MediaLimits, piped_frames

FRAMES = [
    np.random.default_rng(width).integers(0, 256, (40, width, 3), dtype=np.uint8) for width in (50, 50, 7)
]


def written(frame):
    out = io.BytesIO()
    Image.fromarray(frame).save(out, "PPM")
    return out.getvalue()


def test_each_frame_comes_out_as_it_went_in():
    piped = list(piped_frames(io.BytesIO(b"".join(map(written, FRAMES)))))
    assert len(piped) == len(FRAMES)
    for one, frame in zip(piped, FRAMES, strict=True):
        assert torch.equal(one, torch.from_numpy(frame))


def test_a_frame_is_there_before_the_next_one_begins():
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as pipe:
        assert pipe.stdin
        assert pipe.stdout
        frames = piped_frames(cast("BinaryIO", pipe.stdout))
        for frame in FRAMES:
            pipe.stdin.write(written(frame))
            pipe.stdin.flush()
            assert torch.equal(next(frames), torch.from_numpy(frame))


def test_what_is_no_whole_frame_is_refused_after_the_whole_ones(subtests):
    whole = written(FRAMES[0])
    rests = {
        "cut": whole[:-5], "head": whole[:4], "PNG": b"\x89PNG\r\n\x1a\n" + bytes(99), "zeros": bytes(10**6),
        "16 bits": b"P6\n50 40\n65535\n" + bytes(50 * 40 * 6), "empty": b"P6\n0 40\n255\n",
    }  # fmt: skip
    for name, rest in rests.items():
        with subtests.test(name):
            frames = piped_frames(io.BytesIO(whole + rest))
            next(frames)
            with pytest.raises(MediaError, match=r"frame 1: .*ffmpeg -f image2pipe -c:v ppm -"):
                next(frames)


def test_a_frame_above_the_limit_is_refused_before_its_pixels():
    with pytest.raises(LimitError, match="frame 0: 999999x999999 pixels"):
        list(piped_frames(io.BytesIO(b"P6\n999999 999999\n255\n"), MediaLimits(max_pixels=10**6)))
