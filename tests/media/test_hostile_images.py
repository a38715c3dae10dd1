"""Images made to hurt: each is refused with the right class, or read right, within memory."""

import base64
import contextlib
import gzip
import io
import os
import random
import struct
import subprocess
import tempfile
import warnings
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.media import hostile
from tests.media.made_images import (
    PNG_START,
    animation,
    encoded,
    jpeg_with_size,
    pattern,
    picture,
    png,
    png_chunk,
    png_of_zeros,
    webp_canvas,
    webp_with_size,
)
from tests.thirty import cases
from vlexport.errors import LimitError, MediaError, VlexportError
from vlexport.media import MediaLimits, read_image

FORMS = ["PNG", "JPEG", "WEBP"]
OK, REFUSED, LIMITED = "ok", "MediaError", "LimitError"
EITHER = f"{OK} or {REFUSED}"


def cut(form):
    data = picture(form)
    size = len(data)
    places = {1, 3, 9, 16, 25, 33, size // 4, size // 2, 3 * size // 4, size - 20, size - 1}
    return {f"{form} cut at {place:05d} of {size}": (data[:place], EITHER) for place in sorted(places)}


def flipped(form, num):
    found = {}
    for seed in range(num):
        chance, data = random.Random(seed), bytearray(picture(form))
        for _ in range(1 + seed % 20):
            data[chance.randrange(12, len(data))] = chance.randrange(256)
        found[f"{form} with {1 + seed % 20} changed bytes, {seed}"] = (
            bytes(data),
            f"{OK} or {REFUSED} or {LIMITED}",
        )
    return found


def many_scans():
    """A progressive JPEG that paints its last scan a thousand times."""
    data = picture("JPEG", 512, 512, progressive=True)
    at = data.rindex(b"\xff\xda")
    return data[:at] + data[at:-2] * 1000 + data[-2:]


def jpeg_of_two_sizes():
    second = b"\xff\xc0\x00\x11\x08" + b"\xff" * 4 + b"\x03" + bytes(9)
    return picture("JPEG").replace(b"\xff\xdb", second + b"\xff\xdb", 1)


def exif(tag, kind, value):
    return b"Exif\x00\x00MM\x00*\x00\x00\x00\x08" + struct.pack(">HHHIII", 1, tag, kind, 1, value, 0)


# Of each form; the other images are a hundred.
FLIPPED = (cases("hostile images") - 100) // 3
TABLE = {
    "nothing": (b"", REFUSED),
    "one byte": (b"\xff", REFUSED),
    "zeros": (bytes(4096), REFUSED),
    "noise": (random.Random(0).randbytes(4096), REFUSED),
    "text": (b"hello, world", REFUSED),
    "html error page named png": (b"<html><body>404</body></html>", REFUSED),
    "svg": (b'<svg xmlns="http://www.w3.org/2000/svg"><rect/></svg>', REFUSED),
    "git lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", REFUSED),
    "gif": (encoded(Image.fromarray(pattern()).convert("P"), "GIF"), REFUSED),
    "bmp": (encoded(Image.fromarray(pattern()), "BMP"), REFUSED),
    "tiff": (encoded(Image.fromarray(pattern()), "TIFF"), REFUSED),
    "ico": (encoded(Image.fromarray(pattern()), "ICO"), REFUSED),
    "jpeg 2000": (b"\x00\x00\x00\x0cjP  \r\n\x87\n" + bytes(64), REFUSED),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 100 100\n", REFUSED),
    "zip": (b"PK\x03\x04" + bytes(60), REFUSED),
    "npy": (b"\x93NUMPY\x01\x00", REFUSED),
    "png: start only": (PNG_START, REFUSED),
    "png: no data": (png(64, 48), REFUSED),
    "png: 178 million pixels": (png_of_zeros(20000, 8900, 500), LIMITED),
    "png: largest header": (png(2**31 - 1, 2**31 - 1), LIMITED),
    "png: negative header": (png(2**32 - 1, 1), LIMITED),
    "png: zero width": (png(0, 48), REFUSED),
    "png: zero height": (png(64, 0), REFUSED),
    "png: zeros unpacked a thousandfold": (png_of_zeros(2000, 2000, 50_000_000), EITHER),
    "png: too few data": (png_of_zeros(2000, 2000, 50), REFUSED),
    "png: two headers": (
        png(64, 48, png_chunk(b"IHDR", struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0))), LIMITED
    ),
    "png: colour type 7": (png(64, 48, png_chunk(b"IDAT", zlib.compress(bytes(9999))), colour=7), REFUSED),
    "png: 3 bits": (png(64, 48, png_chunk(b"IDAT", zlib.compress(bytes(9999))), bits=3), REFUSED),
    "png: palette missing": (png(64, 48, png_chunk(b"IDAT", zlib.compress(bytes(48 * 65))), colour=3),
        EITHER),
    "png: data of noise": (png(64, 48, png_chunk(b"IDAT", random.Random(1).randbytes(999))), REFUSED),
    "png: wrong checksum": (picture("PNG")[:-20] + b"abcd" + picture("PNG")[-16:], REFUSED),
    "png: text of 100 million letters": (
        png(64, 48, png_chunk(b"zTXt", b"a\x00\x00" + zlib.compress(bytes(100_000_000), 9))), REFUSED
    ),
    "png: profile of 100 million bytes": (
        png(64, 48, png_chunk(b"iCCP", b"a\x00\x00" + zlib.compress(bytes(100_000_000), 9))), REFUSED
    ),
    "png: chunk longer than the file": (PNG_START + struct.pack(">I", 2**31 - 1) + b"IHDR" + bytes(40),
        REFUSED),
    "png: 16 bits of colour": (
        png(64, 48, png_chunk(b"IDAT", zlib.compress(bytes(48 * (64 * 6 + 1)))), bits=16), OK
    ),
    "png: animated": (animation("PNG", 1, 2, 3), OK),
    "png: exif of noise": (picture("PNG", exif=b"Exif\x00\x00" + random.Random(2).randbytes(200)), OK),
    "png: exif that points to itself": (picture("PNG", exif=exif(0x8769, 4, 8)), OK),
    "png: orientation 9": (picture("PNG", exif=exif(0x0112, 3, 9 << 16)), OK),
    "png: one pixel": (picture("PNG", 1, 1), OK),
    "png: 1 x 50000": (picture("PNG", 1, 50_000), OK),
    "png: 50000 x 1": (picture("PNG", 50_000, 1), OK),
    "png: one bit": (encoded(Image.fromarray(pattern()).convert("1"), "PNG"), OK),
    "png: sixteen bits": (encoded(Image.fromarray(np.zeros((48, 64), np.uint16)), "PNG"), OK),
    "png: palette with transparency": (
        encoded(Image.fromarray(pattern()).convert("P"), "PNG", transparency=bytes(100)), OK
    ),
    "jpeg: start only": (b"\xff\xd8\xff", REFUSED),
    "jpeg: no size": (b"\xff\xd8\xff\xe0\x00\x10JFIF\x00" + bytes(9) + b"\xff\xd9", REFUSED),
    "jpeg: data before the size": (b"\xff\xd8\xff\xda\x00\x08" + bytes(60), REFUSED),
    "jpeg: largest size": (jpeg_with_size(65535, 65535), LIMITED),
    "jpeg: zero height": (jpeg_with_size(64, 0), REFUSED),
    "jpeg: other size": (jpeg_with_size(1000, 1000), EITHER),
    "jpeg: padding": (b"\xff\xd8" + b"\xff" * 2**20, REFUSED),
    "jpeg: segments without end": (b"\xff\xd8" + b"\xff\xe1\x00\x02" * 100_000, REFUSED),
    "jpeg: a thousand scans": (many_scans(), LIMITED),
    "jpeg: two sizes": (jpeg_of_two_sizes(), LIMITED),
    "jpeg: cmyk": (encoded(Image.fromarray(pattern()).convert("CMYK"), "JPEG"), OK),
    "jpeg: grey": (encoded(Image.fromarray(pattern()).convert("L"), "JPEG"), OK),
    "jpeg: progressive": (picture("JPEG", progressive=True), OK),
    "jpeg: garbage behind": (picture("JPEG") + random.Random(3).randbytes(999), OK),
    "webp: start only": (b"RIFF\x00\x00\x00\x00WEBP", REFUSED),
    "webp: largest size": (webp_with_size(16384, 16384), LIMITED),
    "webp: other size": (webp_with_size(100, 100), REFUSED),
    "webp: canvas of 281 thousand billion pixels": (webp_canvas(2**24, 2**24), LIMITED),
    "webp: canvas larger than its picture": (webp_canvas(1000, 1000), EITHER),
    "webp: unknown part": (b"RIFF" + struct.pack("<I", 40) + b"WEBPABCD" + bytes(32), REFUSED),
    "webp: animated": (animation("WEBP", 1, 2, 3), OK),
    "webp: garbage behind": (picture("WEBP") + b"garbage", OK),
    **cut("PNG"),
    **cut("JPEG"),
    **cut("WEBP"),
    **flipped("PNG", FLIPPED),
    **flipped("JPEG", FLIPPED),
    **flipped("WEBP", FLIPPED),
}  # fmt: skip


def test_there_are_at_least_sixty_without_the_cut_and_changed_ones():
    assert sum(" cut at " not in name and " changed " not in name for name in TABLE) >= 60


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return hostile.read_all("image", picture(), TABLE, tmp_path_factory.mktemp("hostile"))


@pytest.mark.seconds
@pytest.mark.thirty("hostile images", len(TABLE))
def test_a_hostile_image_is_refused_or_read(outcomes):
    assert hostile.wrong(outcomes[0], TABLE) == {}


def plainly(data):
    """An image as PIL has it, where nothing but its colours is converted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Image.open(io.BytesIO(data)) as opened:
            if opened.mode not in ("RGB", "L", "CMYK") or "exif" in opened.info:
                return None
            return np.asarray(opened.convert("RGB"))[None]


def test_a_hostile_image_that_is_read_has_the_pixels_that_its_decoder_gives(outcomes):
    wrong, count = hostile.misread(outcomes[0], TABLE, plainly)
    assert wrong == []
    assert count >= 20


def test_all_hostile_images_together_stay_within_memory(outcomes):
    # 256 MiB over the largest picture that is allowed
    assert outcomes[1] < 3 * hostile.LIMITS.max_pixels + 256 * 2**20


def test_a_whole_picture_is_never_replaced_by_half_of_one():
    for form in FORMS:
        data, whole = picture(form), read_image(picture(form)).frames
        for place in range(12, len(data), max(1, len(data) // 60)):
            with contextlib.suppress(VlexportError):
                assert np.array_equal(read_image(data[:place]).frames, whole), (form, place)


def test_what_is_no_file_is_refused_without_waiting_for_it(tmp_path):
    link = tmp_path / "link.png"
    link.symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe")
    endless = [("/dev/zero", "a pipe, socket or device")] if Path("/dev/zero").exists() else []
    for source, words in (
        (tmp_path, "a folder, a regular file expected"),
        (tmp_path / "nothing.png", "No such file"),
        (link, "No such file"),
        ("a\0b.png", "not a path"),
        (b"", "empty"),
        (tmp_path / "pipe", "a pipe, socket or device"),
        *endless,
    ):
        with pytest.raises(MediaError, match=words):
            read_image(source)


def test_a_url_is_refused_with_the_way_out(subtests):
    urls = ("https://host/a.png", "file:///a.png", "s3://bucket/a", "data:image/png,AA")
    for url in (*urls, Path("https://host/a.png")):
        words = "opens no network connections; download it first"
        with subtests.test(str(url)), pytest.raises(MediaError, match=words):
            read_image(url)


def test_a_data_url_is_bytes_within_the_limits():
    url = "data:image/png;base64," + base64.b64encode(picture("PNG", 10, 10)).decode()
    assert torch.equal(read_image(url).frames, read_image(picture("PNG", 10, 10)).frames)
    for wrong, words in (("data:image/png;base64,A", "not base64"), (url[:-40], "cannot be decoded")):
        with pytest.raises(MediaError, match=words):
            read_image(wrong)
    with pytest.raises(LimitError, match=r"data: URL: .* at most 50 expected"):
        read_image(url, MediaLimits(max_file_bytes=50))


def test_an_open_file_is_read_from_its_start_and_left_where_it_was(tmp_path):
    path = tmp_path / "picture"
    path.write_bytes(picture())
    with path.open("rb") as file:
        file.seek(7)
        assert torch.equal(read_image(file).frames, read_image(path).frames)
        assert file.tell() == 7
        with pytest.raises(LimitError, match="at most 100 expected"):
            read_image(file, MediaLimits(max_file_bytes=100))
    with pytest.raises(MediaError, match="cannot be read"):
        read_image(file)
    with path.open(encoding="latin-1") as file, pytest.raises(MediaError, match="opened as text"):
        read_image(file)
    with tempfile.NamedTemporaryFile() as file:
        file.write(picture())
        assert torch.equal(read_image(file).frames, read_image(path).frames)  # type: ignore[arg-type]


def test_an_open_file_in_a_damaged_archive_is_refused():
    whole, archive = gzip.compress(picture()), io.BytesIO()
    assert torch.equal(
        read_image(gzip.GzipFile(fileobj=io.BytesIO(whole))).frames,  # type: ignore[arg-type]
        read_image(picture()).frames,
    )
    with zipfile.ZipFile(archive, "w") as writer:
        writer.writestr("a.png", picture())
    spoiled = bytearray(archive.getvalue())
    spoiled[spoiled.index(picture()) + 99] ^= 1
    packed = zipfile.ZipFile(io.BytesIO(spoiled))
    middle = len(whole) // 2
    for file in (
        gzip.GzipFile(fileobj=io.BytesIO(whole[:-20])),
        gzip.GzipFile(fileobj=io.BytesIO(whole[:middle] + b"\xff" * 99 + whole[middle + 99 :])),
        packed.open("a.png"),
        packed,
    ):
        with pytest.raises(MediaError, match="an open file that cannot be read"):
            read_image(file)  # type: ignore[arg-type]


def test_a_high_limit_of_bytes_takes_no_memory_and_an_unbuffered_pipe_is_read_to_its_end(tmp_path):
    path = tmp_path / "picture.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 300, 3), np.uint8)).save(path)
    frames, limits = read_image(path).frames, MediaLimits(max_file_bytes=2**63 - 1)
    assert torch.equal(read_image(path, limits).frames, frames)
    with subprocess.Popen(["cat", path], stdout=subprocess.PIPE, bufsize=0) as pipe:
        assert torch.equal(read_image(pipe.stdout, limits).frames, frames)  # type: ignore[arg-type]


def test_a_file_over_the_limit_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "sparse.png"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(LimitError, match=f"{2**40} bytes, at most {2**30} expected"):
        read_image(path)


def test_a_picture_over_a_limit_is_refused_with_the_way_out():
    for data, limits, words in (
        (picture(), MediaLimits(max_file_bytes=100), "at most 100 expected"),
        (picture(), MediaLimits(deadline_seconds=1e-9), "not decoded within 1e-09 seconds"),
        (
            picture("PNG", 10, 10),
            MediaLimits(max_pixels=99),
            r"10x10 pixels, at most 99 in all expected\. Shrink it or raise",
        ),
        (png_of_zeros(20000, 9000, 50), MediaLimits(max_pixels=10**9), "more pixels than PIL decodes"),
    ):
        with pytest.raises(LimitError, match=words):
            read_image(data, limits)
    assert read_image(picture("PNG", 10, 10), MediaLimits(max_pixels=100)).frames.shape == (1, 10, 10, 3)


def test_a_refusal_keeps_the_decoders_words_out_of_its_text():
    with pytest.raises(MediaError) as caught:
        read_image(PNG_START + io.BytesIO(b"abc").read())
    assert "BytesIO" not in str(caught.value)
