"""Images that can be read: what comes out is what transformers' processors would see."""

import io
import subprocess
import sys

import numpy as np
import PIL.Image
import pytest
import torch
import transformers
from packaging.version import Version
from PIL import Image, ImageOps
from transformers.image_transforms import convert_to_rgb

from tests.media.made_images import animation, encoded, oriented, pattern, picture
from vlexport.errors import InputError, LimitError, MediaError
from vlexport.media import MediaLimits, read_image

LOSSLESS = ["PNG", "WEBP"]
FORMS = ["PNG", "JPEG", "WEBP"]


def read(data, **limits):
    return read_image(data, MediaLimits(**limits)).frames[0].numpy()


def rgb_of_transformers(image):
    if Version(transformers.__version__) < Version("5.18"):
        pytest.skip("transformers after 5.17, which lays transparency on white; this one drops it")
    return np.asarray(convert_to_rgb(image, return_numpy=True))


def transformers_sees(data):
    """Their loading: EXIF first, then RGB over white."""
    return rgb_of_transformers(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))


def faded(mode):
    """The pattern with transparency that runs from left to right."""
    alpha = np.tile(np.linspace(0, 255, 64).astype(np.uint8), (48, 1))
    image = Image.fromarray(np.dstack([pattern(), alpha]))
    return image if mode == "RGBA" else image.convert(mode)


def same(data):
    """Whether we see the pixels that transformers sees."""
    return np.array_equal(read(data), transformers_sees(data))


def test_a_file_gives_the_pixels_that_transformers_sees_turned_upright(subtests):
    assert all(np.array_equal(read(picture(form)), pattern()) for form in LOSSLESS)
    for form in FORMS:
        assert same(picture(form)), form
        for orientation in range(1, 9):
            with subtests.test(f"{form} {orientation}"):
                assert same(oriented(form, orientation))
    assert read(oriented("PNG", 6)).shape == (64, 48, 3)


def test_transparency_is_laid_on_white():
    for form, mode in ((form, mode) for form in LOSSLESS for mode in ("RGBA", "LA")):
        data = encoded(faded(mode), form)
        assert same(data), (form, mode)
        assert read(data)[:, 0].min() == 255


def test_palettes_transparent_or_not_and_inverted_cmyk_are_read_as_transformers_reads_them():
    palette = Image.fromarray(pattern()).convert("P", palette=Image.Palette.ADAPTIVE)
    assert same(encoded(palette, "PNG"))
    # One transparent entry, or a transparency for each.
    for transparent in (3, bytes(range(0, 250, 10))):
        assert same(encoded(palette, "PNG", transparency=transparent)), transparent
    assert same(encoded(Image.fromarray(pattern()).convert("CMYK"), "JPEG"))


def test_a_transparent_colour_is_laid_on_white():
    data = encoded(Image.fromarray(pattern()), "PNG", transparency=tuple(map(int, pattern()[5, 7])))
    assert read(data)[5, 7].tolist() == [255, 255, 255]
    assert same(data)


def test_grey_is_repeated_in_three_channels():
    for mode in ("1", "L"):
        image = Image.fromarray(pattern()).convert(mode)
        assert np.array_equal(read(encoded(image, "PNG")), np.asarray(image.convert("RGB"))), mode


def test_of_sixteen_bits_of_grey_the_upper_eight_are_taken():
    values = (np.arange(48 * 64, dtype=np.uint16) * 21).reshape(48, 64)
    assert np.array_equal(read(encoded(Image.fromarray(values), "PNG"))[..., 1], values >> 8)
    for mode, order in (("I;16", "<u2"), ("I;16L", "<u2"), ("I;16B", ">u2"), ("I;16N", "=u2")):
        image = Image.frombytes(mode, (64, 48), values.astype(order).tobytes())
        assert np.array_equal(read(image)[..., 1], values >> 8), mode


def test_of_an_animation_the_first_picture_is_taken():
    for form in LOSSLESS:
        assert set(read(animation(form, 200, 100, 50)).ravel().tolist()) == {200}, form


def test_thin_pictures_are_read():
    for size in ((1, 1), (1, 50_000), (50_000, 1), (1, 65_500)):
        assert read(picture("PNG", *size)).shape == (*size, 3)


def test_the_content_decides_and_not_the_extension(tmp_path):
    for form, extension in (("PNG", "jpg"), ("JPEG", "webp"), ("WEBP", "mp4"), ("PNG", "npy")):
        path = tmp_path / f"image.{extension}"
        path.write_bytes(picture(form))
        for given in (path, str(path)):
            assert np.array_equal(read(given), transformers_sees(picture(form))), path.name


def test_a_picture_of_several_bands_is_the_same_as_in_one():
    for mode in ("RGB", "LA", "P"):
        large = Image.fromarray(np.tile(pattern(100, 100), (13, 16, 1))).convert(mode)
        assert np.array_equal(read(large), rgb_of_transformers(large)), mode


def test_an_exif_block_of_garbage_leaves_the_picture_as_stored():
    assert np.array_equal(read(picture("PNG", exif=b"Exif\x00\x00" + b"\xff" * 60)), pattern())


def test_the_limits_of_pil_stay_as_they_are():
    before = PIL.Image.MAX_IMAGE_PIXELS
    read(picture(), max_pixels=10**9)
    assert before == PIL.Image.MAX_IMAGE_PIXELS


def test_an_image_has_no_rate():
    pixels = read_image(picture())
    assert (pixels.kind, pixels.frames_per_second, pixels.frames.dtype) == ("image", None, torch.uint8)


def test_a_pil_image_gives_what_transformers_makes_of_it_turned_upright():
    for mode in ("RGB", "RGBA", "LA", "L", "1", "P", "CMYK", "YCbCr", "HSV"):
        image = faded(mode) if mode in {"RGBA", "LA"} else Image.fromarray(pattern()).convert(mode)
        assert np.array_equal(read(image), rgb_of_transformers(image)), mode
    data = oriented("JPEG", 8)
    assert np.array_equal(read(Image.open(io.BytesIO(data))), transformers_sees(data))


def test_arrays_and_tensors_are_taken_as_they_are_and_tensors_not_copied():
    tensor = torch.from_numpy(pattern())
    assert all(np.array_equal(read(each), pattern()) for each in (pattern(), tensor))
    assert read_image(tensor).frames.data_ptr() == tensor.data_ptr()


@pytest.mark.gpu
def test_a_tensor_stays_on_its_device():
    assert read_image(torch.from_numpy(pattern()).cuda()).frames.device.type == "cuda"


def test_arrays_turned_round_or_read_only_are_copied():
    array = pattern()[::-1, ::-1]
    array.flags.writeable = False
    assert np.array_equal(read(array), pattern()[::-1, ::-1])


def closed():
    image = Image.open(io.BytesIO(picture()))
    image.close()
    return image


RGB = r"uint8 \[height, width, 3\] in RGB expected\. Scale to 0\.\.255"
REFUSED = {
    "floats": (np.zeros((4, 4)), RGB),
    "grey": (np.zeros((4, 4), np.uint8), RGB),
    "alpha": (np.zeros((4, 4, 4), np.uint8), RGB),
    "channels in the middle": (np.zeros((4, 3, 4), np.uint8), RGB),
    "frames": (np.zeros((1, 4, 4, 3), np.uint8), RGB),
    "float tensor": (torch.zeros(4, 4, 3), RGB),
    "one number": (np.array(5, np.uint8), RGB),
    "no pixels": (np.zeros((0, 4, 3), np.uint8), "holds no pixels"),
    "closed": (closed(), "image: damaged"),
    **{f"mode {mode}": (Image.new(mode, (4, 4)), f"PIL mode '{mode}'") for mode in ("I", "F", "LAB")},
    **{
        f"type {type(each)}": (each, f"{type(each).__name__} given as an image")
        for each in (None, 5, [picture()], {"image": 1})
    },
}


def test_what_is_no_image_is_refused_with_the_way_out(subtests):
    for name, (source, words) in REFUSED.items():
        with subtests.test(name), pytest.raises(MediaError, match=words):
            read(source)
    with pytest.raises(LimitError, match="10x10 pixels, at most 99"):
        read(Image.new("RGB", (10, 10)), max_pixels=99)


def test_limits_are_finite_and_above_zero(subtests):
    for name in ("max_pixels", "max_frames", "max_seconds", "deadline_seconds"):
        for value in (0, -1, float("nan"), float("inf")):
            words = rf"{name}: {value} (\(float\) )?given"
            with subtests.test(f"{name} {value}"), pytest.raises(InputError, match=words):
                MediaLimits(**{name: value})  # type: ignore[arg-type]


def test_limits_can_only_be_lowered():
    ceiling = MediaLimits(max_pixels=100, max_frames=10, max_seconds=5)
    given = MediaLimits(max_pixels=1000, max_frames=4, max_seconds=5, deadline_seconds=1)
    lowered = ceiling.lowered(given)
    assert (lowered.max_pixels, lowered.max_frames, lowered.deadline_seconds) == (100, 4, 1)
    assert lowered == ceiling.lowered(lowered) == lowered.lowered(ceiling)


def test_importing_media_loads_no_library_for_it():
    code = "import sys, vlexport.media; print(*sorted({'torch', 'numpy', 'av', 'PIL'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
