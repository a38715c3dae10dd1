"""Video files that can be read: the right frames, upright, at the right rate."""

import os
import struct

import numpy as np
import pytest

from tests.media.made_videos import box_field, frames, grey, video
from vlexport.errors import LimitError
from vlexport.media import MediaLimits, Sampling, read_video, video_frames

# Neighbouring greys are 37 apart; the codecs below blur a flat picture by at most 4 (measured).
BLUR = 6
KINDS = [
    ("mp4", "libx264"),
    ("mp4", "mpeg4"),
    ("mov", "libx264"),
    ("mkv", "libx264"),
    ("mkv", "mjpeg"),
    ("mkv", "ffv1"),
    ("webm", "libvpx"),
    ("webm", "libvpx-vp9"),
    ("avi", "mpeg4"),
    ("avi", "mjpeg"),
    ("avi", "libx264"),
    ("avi", "rawvideo"),
]


def shows(pixels, numbers):
    """Whether these very frames came out, in this order."""
    levels = pixels.frames[:, 5, 5].float().mean(1).tolist()
    assert len(levels) == len(numbers)
    return all(abs(grey(number) - level) < BLUR for number, level in zip(numbers, levels, strict=True))


@pytest.mark.seconds
def test_frames_are_sampled_at_even_steps(subtests):
    for form, codec in KINDS:
        with subtests.test(f"{form} {codec}"):
            pixels = read_video(video(form, codec, 20, rate=10), fps=5.0)
            assert shows(pixels, range(0, 20, 2))
            assert (pixels.kind, pixels.frames_per_second) == ("video", 5.0)
            assert pixels.seconds == tuple(number / 10 for number in range(0, 20, 2))


def test_frames_are_found_between_hidden_ones():
    hidden = {"auto-alt-ref": "1", "lag-in-frames": "16", "deadline": "good", "cpu-used": "0"}
    assert shows(read_video(video("webm", "libvpx", 60, options=hidden), fps=5.0), range(0, 60, 2))


def test_a_file_with_sound_is_read():
    assert shows(read_video(video(with_sound=True), fps=5.0), range(0, 20, 2))


@pytest.mark.seconds
def test_two_frames_a_second_are_taken_unless_a_sampling_or_a_rate_is_given():
    assert shows(read_video(video(num=40, rate=10)), range(0, 40, 5))
    sampling = Sampling(frames_per_second=1, min_frames=3, max_frames=9, multiple=3)
    assert shows(read_video(video(num=36, rate=6), sampling=sampling), [0, 6, 12, 18, 24, 30])
    sampling = Sampling(frames_per_second=1, min_frames=1)
    assert shows(read_video(video(num=8, rate=4), fps=2.0, sampling=sampling), [0, 2, 4, 6])


@pytest.mark.seconds
def test_short_files_give_what_they_have_in_whole_groups():
    for num, expected in ((1, [0]), (2, [0, 1]), (3, [0, 1]), (5, [0, 1, 2, 3])):
        assert shows(read_video(video(num=num)), expected)


@pytest.mark.parametrize("form", ["mp4", "mkv"])
def test_at_a_variable_rate_frames_are_taken_by_time(form):
    ticks = [0, 100, 200, 1000, 1100, 1200, 2000, 2100]
    pixels = read_video(video(form, num=8, ticks=ticks), fps=2.0)
    assert shows(pixels, [0, 2, 5, 5])
    assert pixels.frames_per_second == pytest.approx(4 / 2.4, rel=1e-9)
    assert pixels.seconds == (0.0, 0.2, 1.2, 1.2)


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("matrix", "turns"),
    [((0, 1, -1, 0), -1), ((-1, 0, 0, -1), 2), ((0, -1, 1, 0), 1), ((1, 0, 0, 1), 0)],
    ids=["clockwise", "upside down", "counterclockwise", "upright"],
)
def test_a_video_taken_on_its_side_is_turned_upright(matrix, turns):
    pixels = np.zeros((4, 48, 64, 3), np.uint8)
    pixels[:, :24, :32] = 200
    a, b, c, d = (65536 * value for value in matrix)
    field = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    turned = read_video(box_field(video(pixels=pixels), b"tkhd", 40, field)).frames.numpy()
    expected = np.rot90(pixels, turns, axes=(1, 2))
    assert turned.shape == expected.shape
    # the encoder blurs the edges between the quarters, so the middles are compared
    middles = (slice(None), slice(8, None, 16), slice(8, None, 16))
    assert np.abs(turned[middles].astype(int) - expected[middles].astype(int)).max() < BLUR


@pytest.mark.seconds
def test_the_content_decides_and_not_the_name(tmp_path):
    names = ("video.png", "video", "a video with spaces.mkv", "-video.mp4", os.fsdecode(b"no UTF-8 \xff.mp4"))
    for name in names:
        path = tmp_path / name
        path.write_bytes(video())
        given = path if "." in name else str(path)
        assert shows(read_video(given, fps=5.0), range(0, 20, 2)), name
    assert len(list(video_frames(path, fps=5.0))) == 10


def test_the_colours_are_rgb():
    pixels = np.zeros((4, 48, 64, 3), np.uint8)
    pixels[..., 0] = 200
    red, green, blue = read_video(video("mkv", "libx264", pixels=pixels)).frames[0, 5, 5].tolist()
    assert red > 190
    assert max(green, blue) < 10


def test_a_file_of_exactly_the_limits_is_read():
    limits = MediaLimits(max_pixels=3072, max_frames=4, max_seconds=2, max_decoded_bytes=4 * 9216)
    assert len(read_video(video(), limits=limits).frames) == 4


@pytest.mark.seconds
def test_a_file_over_a_limit_is_refused_with_the_way_out(subtests):
    for limits, words in (
        (MediaLimits(max_pixels=3071), r"64x48 pixels, at most 3071 in all expected\. Shrink it"),
        (MediaLimits(max_frames=3), r"4 frames, at most 3 expected\. Take fewer frames"),
        (MediaLimits(max_seconds=1.9), r"2\.0 seconds long, at most 1\.9 expected\. Cut it"),
        (MediaLimits(max_decoded_bytes=36863), r"are 36864 bytes, at most 36863 expected"),
        (MediaLimits(max_file_bytes=1000), r"at most 1000 expected\. Compress it"),
        (MediaLimits(deadline_seconds=0.001), r"not decoded within 0\.001 seconds\. Cut it"),
    ):
        with subtests.test(words), pytest.raises(LimitError, match=words):
            read_video(video(), limits=limits)


def test_limits_that_no_system_holds_are_none():
    limits = MediaLimits(deadline_seconds=1e19, max_seconds=1e19, max_pixels=2**40, max_file_bytes=2**70)
    assert shows(read_video(video(with_sound=True), fps=5.0, limits=limits), range(0, 20, 2))
    with pytest.raises(LimitError, match=r"fps: 1e\+08 given, 200000000 frames of this video; at most"):
        next(video_frames(video(), fps=1e8))
    assert len(list(video_frames(video(), fps=5.0, limits=limits))) == 10


def test_a_file_may_be_longer_than_the_frames_that_are_kept():
    assert len(read_video(video(num=400, rate=10), limits=MediaLimits(max_frames=80)).frames) == 80


def test_decoded_frames_equal_those_of_the_same_library_in_this_process(tmp_path):
    import av

    path = tmp_path / "video.mkv"
    path.write_bytes(
        video("mkv", pixels=frames(12) // 2 + np.arange(64, dtype=np.uint8)[None, None, :, None])
    )
    with av.open(path) as container:
        expected = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert np.array_equal(read_video(path, fps=10.0).frames.numpy(), np.stack(expected))
