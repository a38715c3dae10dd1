"""Videos made to hurt: each is refused with the right class, or read right, within memory and time."""

import contextlib
import errno
import io
import json
import os
import pathlib
import random
import signal
import struct
import subprocess
import sys

import av
import numpy as np
import pytest

from tests.media import hostile
from tests.media.made_images import animation, picture
from tests.media.made_videos import box_field, packets, spoiled, video
from vlexport.errors import LimitError, MediaError, MisfitError, ResourceError
from vlexport.media import MediaLimits, read_video, videos, worker

OK, REFUSED, LIMITED = "ok", "MediaError", "LimitError"
EITHER = f"{OK} or {REFUSED}"
TEN_HOURS = 36_000
FORMS = {"mp4": "libx264", "mkv": "libx264", "webm": "libvpx-vp9", "avi": "mpeg4"}


def cut(form):
    """Named by where, not by how many bytes: Matroska's random identifiers change the size by a byte."""
    data = video(form, FORMS[form])
    size = len(data)
    places = {f"byte {place}": place for place in (5, 12, 20, 40)}
    places |= {f"{share} quarters": share * size // 4 for share in (1, 2, 3)}
    places |= {f"{short} before the end": size - short for short in (100, 1)}
    return {f"{form} cut at {where}": (data[:place], REFUSED) for where, place in places.items()}


def changed(form):
    found = {}
    for seed in range(4):
        chance, data = random.Random(seed), bytearray(video(form, FORMS[form]))
        for _ in range(4**seed):
            data[chance.randrange(12, len(data))] = chance.randrange(256)
        found[f"{form} with {4**seed} changed bytes"] = (bytes(data), f"{OK} or {REFUSED} or {LIMITED}")
    return found


def frame_size_in_header(width, height):
    """An AVI whose header has a size; the frames keep theirs."""
    data = video("avi", "mjpeg", 8)
    at = data.index(b"strf") + 12
    return data[:at] + struct.pack("<ii", width, height) + data[at + 8 :]


def frame_size_in_frames(width, height):
    """An AVI of JPEG frames that each have a huge size."""
    data = video("avi", "mjpeg", 8)
    at = data.index(b"\xff\xc0") + 5
    return data.replace(data[at - 5 : at + 4], data[at - 5 : at] + struct.pack(">HH", height, width))


def matroska_seconds(seconds):
    data = video("mkv")
    at = data.index(b"\x44\x89\x88") + 3
    return data[:at] + struct.pack(">d", seconds * 1000) + data[at + 8 :]


def without_packets(form):
    data = video(form, FORMS[form])
    for place, size in packets(data):
        data = data[:place] + bytes(size) + data[place + size :]
    return data


def two_sizes():
    """An MKV of JPEG frames in which one is of another size."""
    data = video("mkv", "mjpeg", 4)
    at = data.rindex(b"\xff\xc0") + 5
    return data[:at] + struct.pack(">HH", 32, 32) + data[at + 4 :]


def pickled():
    file = io.BytesIO()
    np.save(file, np.array([{}], object), allow_pickle=True)
    return file.getvalue()


TABLE = {
    "nothing": (b"", REFUSED),
    "one byte": (b"\x00", REFUSED),
    "zeros": (bytes(4096), REFUSED),
    "noise": (random.Random(0).randbytes(4096), REFUSED),
    "png": (picture("PNG"), REFUSED),
    "jpeg": (picture("JPEG"), REFUSED),
    "animated webp": (animation("WEBP", 1, 2), REFUSED),
    "gif": (b"GIF89a" + bytes(99), REFUSED),
    "playlist": (b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/hostname\n", REFUSED),
    "list of files": (b"ffconcat version 1.0\nfile '/etc/hostname'\n", REFUSED),
    "text": (b"not a video", REFUSED),
    "wave": (b"RIFF\x24\x00\x00\x00WAVEfmt " + bytes(40), REFUSED),
    "mp4: start only": (b"\x00\x00\x00\x08ftyp", REFUSED),
    "mp4: noise behind the start": (b"\x00\x00\x00\x10ftypisom" + random.Random(1).randbytes(999), REFUSED),
    "mp4: box of 16 exabytes": (b"\x00\x00\x00\x01mdat" + b"\x7f" + b"\xff" * 7 + bytes(99), REFUSED),
    "mp4: boxes of no size": (b"\x00\x00\x00\x00free" * 5000, REFUSED),
    "mp4: ten thousand boxes": (b"\x00\x00\x00\x08free" * 20_000, REFUSED),
    "mp4: no tracks": (b"\x00\x00\x00\x08ftyp\x00\x00\x00\x08moov", REFUSED),
    "mp4: two frames ten hours apart": (video(num=2, ticks=[0, TEN_HOURS * 1000]), LIMITED),
    "mp4: ten hours in its header": (box_field(video(), b"mvhd", 16, struct.pack(">I", TEN_HOURS * 1000)),
        f"{OK} or {LIMITED}"),
    "mp4: two thousand million samples": (box_field(video(), b"stsz", 8, b"\x7f\xff\xff\xff"), REFUSED),
    "mp4: samples of two gigabytes": (box_field(video(), b"stsz", 12, b"\x7f\xff\xff\xff" * 20), REFUSED),
    "mp4: no samples": (box_field(video(), b"stsz", 4, bytes(8)), REFUSED),
    "mp4: chunks outside the file": (box_field(video(), b"stco", 8, b"\x7f\xff\xff\x00"), REFUSED),
    "mp4: time of no scale": (box_field(video(), b"mdhd", 12, bytes(4)), f"{REFUSED} or {LIMITED}"),
    "mp4: emptied frames": (without_packets("mp4"), REFUSED),
    "mp4: sound only": (video(with_sound=True).replace(b"vide", b"soun"), REFUSED),
    "mp4: another codec's name": (video().replace(b"avc1", b"jp2k"), REFUSED),
    "mp4: first frame spoiled": (spoiled(video(), 0), REFUSED),
    "mp4: one frame spoiled": (spoiled(video(num=8), 5), REFUSED),
    "mp4: 1 frame": (video(num=1), OK),
    "mp4: variable rate": (video(num=6, ticks=[0, 10, 500, 510, 5000, 5010]), OK),
    "mp4: garbage behind": (video() + bytes(999), OK),
    "mkv: start only": (b"\x1a\x45\xdf\xa3", REFUSED),
    "mkv: ten hours in its header": (matroska_seconds(TEN_HOURS), LIMITED),
    "mkv: a length that is no number": (matroska_seconds(float("nan")), f"{OK} or {REFUSED} or {LIMITED}"),
    "mkv: two frames ten hours apart": (video("mkv", num=2, ticks=[0, TEN_HOURS * 1000]), LIMITED),
    "mkv: one frame spoiled": (spoiled(video("mkv", "ffv1", 8), 2), REFUSED),
    "mkv: frames of two sizes": (two_sizes(), REFUSED),
    "mkv: jpeg 2000": (video("mkv", "jpeg2000"), REFUSED),
    "webm: one frame spoiled": (spoiled(video("webm", "libvpx-vp9", 8), 2), REFUSED),
    "webm: emptied frames": (without_packets("webm"), REFUSED),
    "avi: start only": (b"RIFF\x04\x00\x00\x00AVI ", REFUSED),
    "avi: 100000 x 100000 in its header": (frame_size_in_header(100_000, 100_000), f"{OK} or {LIMITED}"),
    "avi: no size in its header": (frame_size_in_header(0, 0), EITHER),
    "avi: 60000 x 60000 in its frames": (frame_size_in_frames(60_000, 60_000), f"{REFUSED} or {LIMITED}"),
    "avi: emptied frames": (without_packets("avi"), REFUSED),
    "avi: one frame spoiled": (spoiled(video("avi", "mjpeg", 8), 2), REFUSED),
    "npy: pickle": (pickled(), REFUSED),
    **cut("mp4"),
    **cut("mkv"),
    **cut("webm"),
    **cut("avi"),
    **changed("mp4"),
    **changed("mkv"),
    **changed("webm"),
    **changed("avi"),
}  # fmt: skip


def test_there_are_at_least_thirty_without_the_cut_and_changed_ones():
    assert sum(" cut at " not in name and " changed " not in name for name in TABLE) >= 30


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return hostile.read_all("video", video(), TABLE, tmp_path_factory.mktemp("hostile"))


@pytest.mark.seconds
@pytest.mark.thirty("hostile videos", len(TABLE))
def test_a_hostile_video_is_refused_or_read(outcomes):
    assert hostile.wrong(outcomes[0], TABLE) == {}


def plainly(data):
    if data.startswith(b"\x93NUMPY"):
        return np.load(io.BytesIO(data))
    with av.open(io.BytesIO(data), "r") as opened:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in opened.decode(video=0)])


@pytest.mark.seconds
def test_a_hostile_video_that_is_read_has_the_pixels_that_its_decoder_gives(outcomes):
    wrong, count = hostile.misread(outcomes[0], TABLE, plainly)
    assert wrong == []
    assert count > 4


def test_all_hostile_videos_together_stay_within_memory(outcomes):
    assert outcomes[1] < hostile.LIMITS.max_decoded_bytes + 256 * 2**20


STARTED = "import sys; sys.stdout.buffer.write(b'S' + bytes(8)); sys.stdout.buffer.flush(); "


def replaced(monkeypatch, code, started=STARTED):
    monkeypatch.setattr(videos, "START", started + code)


@pytest.mark.seconds
def test_a_decoder_that_hangs_is_stopped_at_the_deadline(monkeypatch, tmp_path):
    mark = tmp_path / "pid"
    code = f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    replaced(monkeypatch, code)
    with pytest.raises(LimitError, match="not decoded within 3 seconds") as caught:
        read_video(video(), limits=MediaLimits(deadline_seconds=3))
    # On a machine with less to do it may be read.
    assert caught.value.temporary
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)


KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
CRASHED = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
LACKING = f"import sys; sys.modules['av'] = None; {videos.START}"
PATCHED = "import vlexport.media.worker as worker\n{}\nworker.main()"
GREEDY = PATCHED.format("worker._decode = lambda *rest: bytearray(worker.WORK_BYTES)")
POOR = "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**29, 2**29))\n" + PATCHED.format(
    "worker._decode = lambda *rest: bytearray(2**29)"
)
EIO = PATCHED.format("def broken(*rest): raise OSError(5, 'Input/output error')\nworker._decode = broken")
UNMAPPED = "raise ImportError('libav.so: failed to map segment')"
CAPPED = pytest.mark.skipif(sys.platform == "win32", reason="this system caps no memory of a process")


def header(*shape):
    content = json.dumps({"shape": shape, "rate": 1.0}).encode()
    return b"H" + len(content).to_bytes(8, "big") + content


NONSENSE = {
    "negative": header(2, -3, 4, 3),
    "fraction": header(2.0, 3, 4, 3),
    "channels": header(1, 3, 4, 2**45),
    "nothing": b"",
    "half": b"H",
    "end": b"Z" + bytes(8),
    "unknown": b"X" + bytes(8),
    "empty": b"H" + bytes(8),
    "frame first": b"F" + (9).to_bytes(8, "big") + bytes(9),
}


def written(record):
    return f"import sys; sys.stdout.buffer.write({record!r})"


@pytest.mark.parametrize(
    ("code", "started", "kind", "words"),
    [
        # Faults of the video.
        pytest.param(CRASHED, STARTED, MediaError, f"stopped with status -{signal.SIGSEGV:d}", id="crashed"),
        *(
            pytest.param(written(record), STARTED, MediaError, "the decoder stopped", id=name)
            for name, record in NONSENSE.items()
        ),
        pytest.param(written(header(10**6, 10**6, 10**6, 3)), STARTED, LimitError, "expected", id="promises"),
        pytest.param(
            GREEDY, "", LimitError, f"more than {worker.WORK_BYTES} bytes", id="greedy", marks=CAPPED
        ),
        # Of the machine, which may have less to do later.
        pytest.param(KILLED, STARTED, ResourceError, "status -9", id="killed"),
        pytest.param(KILLED, "", ResourceError, "status -9", id="killed early"),
        pytest.param("raise MemoryError", "", ResourceError, "for want of memory", id="memory"),
        pytest.param(UNMAPPED, "", ResourceError, "for want of memory", id="mapping"),
        pytest.param(POOR, "", ResourceError, "no memory or no thread left", id="address space"),
        pytest.param(
            "import not_there", "", MisfitError, "could not start .*No module named 'not_there'", id="broken"
        ),
        pytest.param(EIO, "", OSError, "Input/output error", id="disk"),
        pytest.param(
            LACKING, "", MisfitError, r"'av' is not installed\. `pip install vlexport`", id="no library"
        ),
    ],
)
def test_a_decoder_that_fails_is_a_fault_of_its_video_or_of_the_machine(
    monkeypatch, code, started, kind, words
):
    replaced(monkeypatch, code, started)
    with pytest.raises(kind, match=words) as caught:
        read_video(video())
    assert kind in (MediaError, LimitError) or getattr(caught.value, "temporary", True)


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EMFILE, errno.ENOMEM])
def test_a_decoder_for_which_the_system_has_no_process_is_short_of_resources(monkeypatch, number):
    def refused(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(subprocess, "Popen", refused)
    with pytest.raises(ResourceError, match=os.strerror(number)):
        read_video(video())


@pytest.mark.seconds
def test_a_decoder_starts_under_limits_that_are_lower_than_its_own():
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_DATA, (2**30, 2**30)); "
        "from vlexport.media import read_video; print(len(read_video(sys.stdin.buffer.read()).frames))"
    )
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, input=video(num=4), capture_output=True, check=False)
    assert done.stdout == b"4\n", done.stderr


def children() -> set[int]:
    """This process's children, zombies too; servers that other tests forked may be among them."""
    found = set()
    for each in pathlib.Path("/proc").glob("[0-9]*/stat"):
        # A process may end while one looks.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            parent = each.read_text(errors="replace").rpartition(")")[2].split()[1]
            if int(parent) == os.getpid():
                found.add(int(each.parent.name))
    return found


@pytest.mark.seconds
@pytest.mark.skipif(sys.platform != "linux", reason="children are listed in /proc")
def test_no_decoder_is_left_behind_after_a_refusal():
    before = children()
    for data in (spoiled(video(), 3), matroska_seconds(TEN_HOURS)):
        with pytest.raises((MediaError, LimitError)):
            read_video(data)
    assert children() <= before


def test_a_folder_a_pipe_and_a_url_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.mp4")
    with pytest.raises(MediaError, match="a folder"):
        read_video(tmp_path)
    with pytest.raises(MediaError, match="a pipe, socket or device"):
        read_video(tmp_path / "pipe.mp4")
    with pytest.raises(MediaError, match="opens no network connections"):
        read_video("rtsp://host/stream")


@pytest.mark.seconds
def test_a_file_read_from_its_middle_is_read_from_its_start(tmp_path):
    path = tmp_path / "video.mkv"
    path.write_bytes(video("mkv", "mjpeg", 200))
    assert path.stat().st_size > 2**16
    assert np.array_equal(read_video(path).frames, read_video(path.read_bytes()).frames)
