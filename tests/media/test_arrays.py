"""Videos that are arrays, tensors and .npy files: taken frame by frame, checked on their headers."""

import io
import pickle
import struct
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.media.made_videos import frames
from vlexport.errors import InputError, LimitError, MediaError
from vlexport.media import MediaLimits, read_video


def npy(array, **options):
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def npy_claiming(shape, dtype="|u1", *, body=b"", by_columns=False):
    header = repr({"descr": dtype, "fortran_order": by_columns, "shape": shape}).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + body


class Bomb:
    """Unpickling it fails the test."""

    def __reduce__(self):
        return pytest.fail, ("a pickle was loaded",)


PACKS: dict[str, Any] = {"array": np.asarray, "tensor": torch.from_numpy, "npy": npy}


def test_every_frame_is_taken():
    for name, pack in PACKS.items():
        for num in (1, 2, 5):
            pixels = read_video(pack(frames(num)), fps=3.0)
            assert np.array_equal(pixels.frames.numpy(), frames(num)), (name, num)
            assert (pixels.kind, pixels.frames_per_second) == ("video", 3.0)
    assert read_video(frames(2)).frames_per_second is None


def test_channels_are_last_where_there_are_three_else_first():
    for given, expected in (
        (frames(2).transpose(0, 3, 1, 2), frames(2)),
        (torch.from_numpy(frames(2)).permute(0, 3, 1, 2), frames(2)),
        # Both ends fit: the last axis counts.
        (frames(2, height=3, width=3), frames(2, height=3, width=3)),
    ):
        found = read_video(given).frames
        assert np.array_equal(found.numpy(), expected)
        assert found.is_contiguous()


def test_a_list_of_frames_is_a_video():
    whole = frames(3)
    for given in (list(whole), [Image.fromarray(each) for each in whole], tuple(torch.from_numpy(whole))):
        pixels = read_video(given, fps=2.0)
        assert np.array_equal(pixels.frames.numpy(), whole)
        assert pixels.frames_per_second == 2.0
    for wrong, words in (
        ([], "a list without frames"),
        ([whole[0], whole[0, :4]], "frame 1 has 64x4 pixels, frame 0 has 64x48"),
        ([whole], "height, width, 3"),
    ):
        with pytest.raises(MediaError, match=words):
            read_video(wrong)
    with pytest.raises(LimitError, match="3 frames, at most 2"):
        read_video(list(whole), limits=MediaLimits(max_frames=2))


def test_a_tensor_is_not_copied():
    tensor = torch.from_numpy(frames(2))
    assert read_video(tensor).frames.data_ptr() == tensor.data_ptr()


@pytest.mark.gpu
def test_a_tensor_stays_on_its_device():
    assert read_video(torch.from_numpy(frames(2)).cuda()).frames.device.type == "cuda"


def test_a_npy_file_is_known_by_its_content_in_either_order_and_with_every_header(tmp_path):
    (tmp_path / "video.mp4").write_bytes(npy(frames(3)))
    given = [tmp_path / "video.mp4", npy(np.asfortranarray(frames(3)))]
    for version in ((1, 0), (2, 0)):
        file = io.BytesIO()
        np.lib.format.write_array(file, frames(3), version=version)
        given.append(file.getvalue())
    assert all(np.array_equal(read_video(each).frames.numpy(), frames(3)) for each in given)


RGB = r"uint8 \[frames, height, width, 3\] in RGB expected"
EMPTY = "holds no pixels"
KINDS = ("<u2", ">u2", ">i4", "<f4", "|b1", "|i1", "<c16", "|S1", "<U1")
SHAPES = ((4, 4, 3), (2, 4, 4, 4), (2, 4, 4, 1), (1, 2, 4, 4, 3), (), (96,))
VOID = ((0, 4, 4, 3), (2, 0, 4, 3), (2, 4, 0, 3))
HUGE = ((10**6, 64, 64, 3), (1, 2**31, 2**31, 3), (2**62, 1, 1, 3), (10**30, 10**30, 10**30, 3))
WHOLE = npy(frames(2))
DAMAGED = (
    b"\x93NUMPY", b"\x93NUMPY\x01\x00", b"\x93NUMPY\x09\x09" + bytes(99), b"\x93NUMPY\x01\x00\xff\xff{}",
    b"\x93NUMPY\x01\x00\x02\x00{}", b"\x93NUMPY\x02\x00\xff\xff\xff\x7f{", npy_claiming("abc"),
    npy_claiming((2, 4.5, 4, 3)), npy_claiming((2, 4, 4, 3), "nonsense"),
    npy_claiming((2, 4, 4, 3), "|u1" * 9999),
    b"\x93NUMPY\x01\x00\xe8\x03" + b"(" * 1000, b"\x93NUMPY\x01\x00\x1a\x00__import__('os').abort()  \n",
)  # fmt: skip
REFUSED = {
    **{
        f"numbers {kind}": (npy_claiming((2, 4, 4, 3), kind, body=bytes(96 * np.dtype(kind).itemsize)), RGB)
        for kind in KINDS
    },
    **{f"shape {shape}": (np.zeros(shape, np.uint8), RGB) for shape in SHAPES},
    **{f"array {shape}": (np.zeros(shape, np.uint8), EMPTY) for shape in VOID},
    **{f"file {shape}": (npy(np.zeros(shape, np.uint8)), EMPTY) for shape in VOID},
    **{f"negative {shape}": (npy_claiming(shape), EMPTY) for shape in ((-1, 4, 4, 3), (2, -4, -4, 3))},
    **{
        f"cut to {left}": (
            WHOLE[: len(WHOLE) - 18432 + left],
            f"{left} bytes follow the header, 18432 expected",
        )
        for left in (0, 1, 100, 18431)
    },
    **{f"damaged {number}": (data, "damaged header") for number, data in enumerate(DAMAGED)},
    "more behind": (WHOLE * 2, "holds something else too"),
    "pickles": (npy(np.array([Bomb()], object), allow_pickle=True), "object"),
    "pickles among frames": (npy(np.array([frames(1), Bomb()], object), allow_pickle=True), "object"),
    "a bare pickle": (pickle.dumps(Bomb()), "not a video"),
    **{f"type {type(each)}": (each, f"{type(each).__name__} given as") for each in (None, 5)},
}


def test_what_is_no_video_is_refused_and_no_pickle_opened(subtests):
    for name, (source, words) in REFUSED.items():
        with subtests.test(name), pytest.raises(MediaError, match=words):
            read_video(source)


def test_a_header_that_claims_too_much_is_refused_before_memory_is_taken():
    for shape in HUGE:
        with pytest.raises(LimitError, match="expected"):
            read_video(npy_claiming(shape))


def test_limits_hold_for_arrays_too(subtests):
    for limits, words in (
        (MediaLimits(max_frames=2), "3 frames, at most 2 expected"),
        (MediaLimits(max_pixels=3071), "64x48 pixels, at most 3071"),
        (MediaLimits(max_decoded_bytes=27647), "are 27648 bytes, at most 27647"),
    ):
        for name, pack in PACKS.items():
            with subtests.test(f"{name}: {words}"), pytest.raises(LimitError, match=words):
                read_video(pack(frames(3)), limits=limits)


def test_exactly_the_limits_are_read():
    limits = MediaLimits(max_frames=3, max_pixels=3072, max_decoded_bytes=27648)
    assert len(read_video(frames(3), limits=limits).frames) == 3


def test_a_rate_that_is_none_is_refused(subtests):
    for fps in (0.0, -2.0, float("nan"), float("inf")):
        with subtests.test(fps), pytest.raises(InputError, match=f"frames per second: {fps} given"):
            read_video(frames(2), fps=fps)
