"""Images that can be read: what comes out is what transformers' processors would see."""

import io

import numpy as np
import PIL.Image
import pytest
import torch
from PIL import Image, ImageOps
from transformers.image_transforms import convert_to_rgb

from tests.media.made_images import animation, encoded, oriented, pattern, picture
from vlexport.errors import InputError, LimitError, MediaError
from vlexport.media import MediaLimits, read_image

LOSSLESS = ["PNG", "WEBP"]
FORMS = ["PNG", "JPEG", "WEBP"]


def read(data, **limits):
    return read_image(data, MediaLimits(**limits)).frames[0].numpy()


def transformers_sees(data):
    """Their loading: EXIF first, then RGB over white."""
    return convert_to_rgb(ImageOps.exif_transpose(Image.open(io.BytesIO(data))), return_numpy=True)


def faded(mode):
    """The pattern with transparency that runs from left to right."""
    alpha = np.tile(np.linspace(0, 255, 64).astype(np.uint8), (48, 1))
    image = Image.fromarray(np.dstack([pattern(), alpha]))
    return image if mode == "RGBA" else image.convert(mode)


@pytest.mark.parametrize("form", LOSSLESS)
def test_a_lossless_file_gives_its_pixels(form):
    assert np.array_equal(read(picture(form)), pattern())


@pytest.mark.parametrize("form", FORMS)
def test_a_file_gives_the_pixels_that_transformers_sees(form):
    assert np.array_equal(read(picture(form)), transformers_sees(picture(form)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_turned_upright(form, orientation):
    data = oriented(form, orientation)
    assert np.array_equal(read(data), transformers_sees(data))


def test_a_picture_taken_on_its_side_changes_its_shape():
    assert read(oriented("PNG", 6)).shape == (64, 48, 3)


@pytest.mark.parametrize("form", LOSSLESS)
@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparency_is_laid_on_white(form, mode):
    data = encoded(faded(mode), form)
    assert np.array_equal(read(data), transformers_sees(data))
    assert read(data)[:, 0].min() == 255


def test_a_palette_gives_its_colours():
    data = encoded(Image.fromarray(pattern()).convert("P", palette=Image.Palette.ADAPTIVE), "PNG")
    assert np.array_equal(read(data), transformers_sees(data))


@pytest.mark.parametrize("transparent", [3, bytes(range(0, 250, 10))], ids=["one entry", "by entry"])
def test_a_transparent_palette_is_laid_on_white(transparent):
    image = Image.fromarray(pattern()).convert("P", palette=Image.Palette.ADAPTIVE)
    data = encoded(image, "PNG", transparency=transparent)
    assert np.array_equal(read(data), transformers_sees(data))


def test_a_transparent_colour_is_laid_on_white():
    data = encoded(Image.fromarray(pattern()), "PNG", transparency=tuple(map(int, pattern()[5, 7])))
    assert read(data)[5, 7].tolist() == [255, 255, 255]
    assert np.array_equal(read(data), transformers_sees(data))


@pytest.mark.parametrize("mode", ["1", "L"])
def test_grey_is_repeated_in_three_channels(mode):
    image = Image.fromarray(pattern()).convert(mode)
    expected = np.asarray(image.convert("RGB"))
    assert np.array_equal(read(encoded(image, "PNG")), expected)


def test_inverted_cmyk_as_printers_write_it_is_read_as_transformers_reads_it():
    data = encoded(Image.fromarray(pattern()).convert("CMYK"), "JPEG")
    assert np.array_equal(read(data), transformers_sees(data))


def test_of_sixteen_bits_of_grey_the_upper_eight_are_taken():
    values = (np.arange(48 * 64, dtype=np.uint16) * 21).reshape(48, 64)
    assert np.array_equal(read(encoded(Image.fromarray(values), "PNG"))[..., 1], values >> 8)


@pytest.mark.parametrize("form", LOSSLESS)
def test_of_an_animation_the_first_picture_is_taken(form):
    assert set(read(animation(form, 200, 100, 50)).ravel().tolist()) == {200}


@pytest.mark.parametrize("size", [(1, 1), (1, 50_000), (50_000, 1), (1, 65_500)])
def test_thin_pictures_are_read(size):
    assert read(picture("PNG", *size)).shape == (*size, 3)


@pytest.mark.parametrize(
    ("form", "extension"), [("PNG", "jpg"), ("JPEG", "webp"), ("WEBP", "mp4"), ("PNG", "npy")]
)
def test_the_content_decides_and_not_the_extension(tmp_path, form, extension):
    path = tmp_path / f"image.{extension}"
    path.write_bytes(picture(form))
    assert np.array_equal(read(path), transformers_sees(picture(form)))
    assert np.array_equal(read(str(path)), transformers_sees(picture(form)))


@pytest.mark.parametrize("mode", ["RGB", "LA", "P"])
def test_a_picture_of_several_bands_is_the_same_as_in_one(mode):
    large = Image.fromarray(np.tile(pattern(100, 100), (13, 16, 1))).convert(mode)
    assert np.array_equal(read(large), np.asarray(convert_to_rgb(large, return_numpy=True)))


def test_an_exif_block_of_garbage_leaves_the_picture_as_stored():
    assert np.array_equal(read(picture("PNG", exif=b"Exif\x00\x00" + b"\xff" * 60)), pattern())


def test_the_limits_of_pil_stay_as_they_are():
    before = PIL.Image.MAX_IMAGE_PIXELS
    read(picture(), max_pixels=10**9)
    assert before == PIL.Image.MAX_IMAGE_PIXELS


def test_an_image_has_no_rate():
    pixels = read_image(picture())
    assert (pixels.kind, pixels.frames_per_second, pixels.frames.dtype) == ("image", None, torch.uint8)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA", "L", "1", "P", "CMYK", "YCbCr", "HSV"])
def test_a_pil_image_gives_what_transformers_makes_of_it(mode):
    image = faded(mode) if mode in {"RGBA", "LA"} else Image.fromarray(pattern()).convert(mode)
    assert np.array_equal(read(image), np.asarray(convert_to_rgb(image, return_numpy=True)))


def test_a_pil_image_with_an_orientation_is_turned_upright():
    data = oriented("JPEG", 8)
    assert np.array_equal(read(Image.open(io.BytesIO(data))), transformers_sees(data))


@pytest.mark.parametrize("mode", ["I", "F", "LAB"])
def test_a_pil_image_without_a_range_is_refused(mode):
    with pytest.raises(MediaError, match=f"PIL mode '{mode}'"):
        read(Image.new(mode, (4, 4)))


def test_a_pil_image_over_the_limit_is_refused():
    with pytest.raises(LimitError, match="10x10 pixels, at most 99"):
        read(Image.new("RGB", (10, 10)), max_pixels=99)


def test_a_pil_image_that_was_closed_is_refused():
    image = Image.open(io.BytesIO(picture()))
    image.close()
    with pytest.raises(MediaError, match="image: damaged"):
        read(image)


@pytest.mark.parametrize("pack", [np.asarray, torch.from_numpy], ids=["array", "tensor"])
def test_arrays_and_tensors_are_taken_as_they_are(pack):
    assert np.array_equal(read(pack(pattern())), pattern())


def test_a_tensor_is_not_copied():
    tensor = torch.from_numpy(pattern())
    assert read_image(tensor).frames.data_ptr() == tensor.data_ptr()


@pytest.mark.gpu
def test_a_tensor_stays_on_its_device():
    assert read_image(torch.from_numpy(pattern()).cuda()).frames.device.type == "cuda"


def test_arrays_turned_round_or_read_only_are_copied():
    array = pattern()[::-1, ::-1]
    array.flags.writeable = False
    assert np.array_equal(read(array), pattern()[::-1, ::-1])


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((4, 4)),
        np.zeros((4, 4), np.uint8),
        np.zeros((4, 4, 4), np.uint8),
        np.zeros((3, 4, 4), np.uint8),
        np.zeros((1, 4, 4, 3), np.uint8),
        torch.zeros(4, 4, 3),
        np.array(5, np.uint8),
    ],
    ids=["floats", "grey", "alpha", "channels first", "frames", "float tensor", "one number"],
)
def test_other_arrays_are_refused_with_the_way_out(array):
    with pytest.raises(MediaError, match=r"uint8 \[height, width, 3\] in RGB expected\. Scale to 0\.\.255"):
        read(array)


def test_an_array_without_pixels_is_refused():
    with pytest.raises(MediaError, match="holds no pixels"):
        read(np.zeros((0, 4, 3), np.uint8))


@pytest.mark.parametrize("source", [None, 5, [picture()], {"image": 1}])
def test_other_types_are_refused_by_name(source):
    with pytest.raises(MediaError, match=f"{type(source).__name__} given as an image"):
        read(source)


@pytest.mark.parametrize("name", ["max_pixels", "max_frames", "max_seconds", "deadline_seconds"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_limits_are_finite_and_above_zero(name, value):
    with pytest.raises(InputError, match=rf"{name}: {value} (\(float\) )?given"):
        MediaLimits(**{name: value})


def test_limits_can_only_be_lowered():
    ceiling = MediaLimits(max_pixels=100, max_frames=10, max_seconds=5)
    asked = MediaLimits(max_pixels=1000, max_frames=4, max_seconds=5, deadline_seconds=1)
    lowered = ceiling.lowered(asked)
    assert (lowered.max_pixels, lowered.max_frames, lowered.deadline_seconds) == (100, 4, 1)
    assert lowered == ceiling.lowered(lowered) == lowered.lowered(ceiling)
