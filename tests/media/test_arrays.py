"""Videos that are arrays, tensors and .npy files: taken frame by frame, checked on their headers."""

import io
import pickle
import struct

import numpy as np
import pytest
import torch

from tests.media.made_videos import frames
from vlexport.errors import InputError, LimitError, MediaError
from vlexport.media import MediaLimits, read_video


def npy(array, **options):
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def npy_claiming(shape, dtype="|u1", *, body=b"", by_columns=False):
    """A .npy file whose header says what it likes."""
    header = repr({"descr": dtype, "fortran_order": by_columns, "shape": shape}).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + body


class Bomb:
    """Unpickling it fails the test."""

    def __reduce__(self):
        return pytest.fail, ("a pickle was loaded",)


@pytest.mark.parametrize("pack", [np.asarray, torch.from_numpy, npy], ids=["array", "tensor", "npy"])
@pytest.mark.parametrize("num", [1, 2, 5])
def test_every_frame_is_taken(pack, num):
    pixels = read_video(pack(frames(num)), fps=3.0)
    assert np.array_equal(pixels.frames.numpy(), frames(num))
    assert (pixels.kind, pixels.frames_per_second) == ("video", 3.0)


def test_without_a_rate_there_is_none():
    assert read_video(frames(2)).frames_per_second is None


def test_a_tensor_is_not_copied():
    tensor = torch.from_numpy(frames(2))
    assert read_video(tensor).frames.data_ptr() == tensor.data_ptr()


@pytest.mark.gpu
def test_a_tensor_stays_on_its_device():
    assert read_video(torch.from_numpy(frames(2)).cuda()).frames.device.type == "cuda"


def test_a_npy_file_is_known_by_its_content(tmp_path):
    path = tmp_path / "video.mp4"
    path.write_bytes(npy(frames(3)))
    assert np.array_equal(read_video(path).frames.numpy(), frames(3))


def test_a_npy_written_by_columns_gives_the_same_frames():
    assert np.array_equal(read_video(npy(np.asfortranarray(frames(3)))).frames.numpy(), frames(3))


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_every_version_of_the_header_is_read(version):
    file = io.BytesIO()
    np.lib.format.write_array(file, frames(2), version=version)
    assert np.array_equal(read_video(file.getvalue()).frames.numpy(), frames(2))


@pytest.mark.parametrize("dtype", ["<u2", ">u2", ">i4", "<f4", "|b1", "|i1", "<c16", "|S1", "<U1"])
def test_other_kinds_of_numbers_are_refused(dtype):
    size = 2 * 4 * 4 * 3 * np.dtype(dtype).itemsize
    with pytest.raises(MediaError, match=r"uint8 \[frames, height, width, 3\] in RGB expected"):
        read_video(npy_claiming((2, 4, 4, 3), dtype, body=bytes(size)))


@pytest.mark.parametrize("array", [np.array([Bomb()], object), np.array([frames(1), Bomb()], object)])
def test_a_pickle_is_refused_unopened(array):
    with pytest.raises(MediaError, match="object"):
        read_video(npy(array, allow_pickle=True))


def test_a_bare_pickle_is_refused_unopened():
    with pytest.raises(MediaError, match="not a video"):
        read_video(pickle.dumps(Bomb()))


@pytest.mark.parametrize(
    "shape", [(4, 4, 3), (2, 3, 4, 4), (2, 4, 4, 4), (2, 4, 4, 1), (1, 2, 4, 4, 3), (), (96,)]
)
def test_other_shapes_are_refused(shape):
    with pytest.raises(MediaError, match=r"uint8 \[frames, height, width, 3\]"):
        read_video(np.zeros(shape, np.uint8))


@pytest.mark.parametrize("shape", [(0, 4, 4, 3), (2, 0, 4, 3), (2, 4, 0, 3)])
@pytest.mark.parametrize("pack", [np.asarray, npy], ids=["array", "npy"])
def test_no_frames_and_no_pixels_are_refused(shape, pack):
    with pytest.raises(MediaError, match="holds no pixels"):
        read_video(pack(np.zeros(shape, np.uint8)))


@pytest.mark.parametrize("shape", [(-1, 4, 4, 3), (2, -4, -4, 3)])
def test_negative_sizes_are_refused(shape):
    with pytest.raises(MediaError, match="holds no pixels"):
        read_video(npy_claiming(shape))


HUGE = [(10**6, 64, 64, 3), (1, 2**31, 2**31, 3), (2**62, 1, 1, 3), (10**30, 10**30, 10**30, 3)]


@pytest.mark.parametrize("shape", HUGE, ids=str)
def test_a_header_that_claims_too_much_is_refused_before_memory_is_taken(shape):
    with pytest.raises(LimitError, match="expected"):
        read_video(npy_claiming(shape))


@pytest.mark.parametrize("left", [0, 1, 100, 18431])
def test_a_file_cut_short_is_refused(left):
    data = npy(frames(2))
    with pytest.raises(MediaError, match=f"{left} bytes follow the header, 18432 expected"):
        read_video(data[: len(data) - 18432 + left])


def test_a_file_with_more_behind_is_refused():
    with pytest.raises(MediaError, match="holds something else too"):
        read_video(npy(frames(2)) * 2)


@pytest.mark.parametrize(
    "data",
    [
        b"\x93NUMPY",
        b"\x93NUMPY\x01\x00",
        b"\x93NUMPY\x09\x09" + bytes(99),
        b"\x93NUMPY\x01\x00\xff\xff{}",
        b"\x93NUMPY\x01\x00\x02\x00{}",
        b"\x93NUMPY\x02\x00\xff\xff\xff\x7f{",
        npy_claiming("abc"),
        npy_claiming((2, 4.5, 4, 3)),
        npy_claiming((2, 4, 4, 3), "nonsense"),
        npy_claiming((2, 4, 4, 3), "|u1" * 9999),
        b"\x93NUMPY\x01\x00\xe8\x03" + b"(" * 1000,
        b"\x93NUMPY\x01\x00\x1a\x00__import__('os').abort()  \n",
    ],
    ids=range(12),
)
def test_a_damaged_header_is_refused(data):
    with pytest.raises(MediaError, match="damaged header"):
        read_video(data)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (MediaLimits(max_frames=2), "3 frames, at most 2 expected"),
        (MediaLimits(max_pixels=3071), "64x48 pixels, at most 3071"),
        (MediaLimits(max_decoded_bytes=27647), "are 27648 bytes, at most 27647"),
    ],
    ids=["frames", "pixels", "bytes"],
)
@pytest.mark.parametrize("pack", [np.asarray, torch.from_numpy, npy], ids=["array", "tensor", "npy"])
def test_limits_hold_for_arrays_too(pack, limits, words):
    with pytest.raises(LimitError, match=words):
        read_video(pack(frames(3)), limits=limits)


def test_exactly_the_limits_are_read():
    limits = MediaLimits(max_frames=3, max_pixels=3072, max_decoded_bytes=27648)
    assert len(read_video(frames(3), limits=limits).frames) == 3


@pytest.mark.parametrize("fps", [0.0, -2.0, float("nan"), float("inf")])
def test_a_rate_that_is_none_is_refused(fps):
    with pytest.raises(InputError, match=f"frames per second: {fps} given"):
        read_video(frames(2), fps=fps)


@pytest.mark.parametrize("source", [None, 5, [frames(1)]])
def test_other_types_are_refused_by_name(source):
    with pytest.raises(MediaError, match=f"{type(source).__name__} given as a video"):
        read_video(source)
