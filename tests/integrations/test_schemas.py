"""Names, shapes and sizes of what processors hand to encoders."""

from contextlib import nullcontext

import pytest
import torch

from tests.golden_data import cases
from tests.integrations.refusals import refused
from vlexport.errors import InputError
from vlexport.integrations.vllm import schemas
from vlexport.integrations.vllm.schemas import Field, Schema

CASES = [case.meta for case in cases("schemas")]
SCHEMAS = {
    "Qwen2_5_VLImagePixelInputs": schemas.PATCH_IMAGES,
    "Qwen2_5_VLImageEmbeddingInputs": schemas.EMBEDDED_IMAGES,
    "Qwen2_5_VLVideoPixelInputs": schemas.PATCH_VIDEOS,
    "Qwen2_5_VLVideoEmbeddingInputs": schemas.EMBEDDED_VIDEOS,
    "MiniCPMVImagePixelInputs": schemas.SLICED_IMAGES,
    "MiniCPMVImageEmbeddingInputs": schemas.EMBEDDED_SLICES,
}
# Words of our message for each recorded reason.
WORDS = {
    "dim": "dimension [0-9]+ of .* (is|makes)",
    "rank": "[0-9]+ dimensions given .*, [0-9]+ expected",
    "missing": "is missing; expected",
    "inconsistent": "are inconsistent",
    "empty": "an empty list given",
}


def tensors(shapes):
    """Shapes of a recorded field as tensors: null is absent, a list of shapes a list of tensors."""
    if shapes is None or shapes == []:
        return shapes
    return [torch.zeros(shape) for shape in shapes] if isinstance(shapes[0], list) else torch.zeros(shapes)


def test_inputs_are_accepted_and_refused_like_the_reference_and_for_its_reason(subtests):
    for case in CASES:
        given = {name: tensors(shapes) for name, shapes in case["fields"].items()}
        refusal = pytest.raises(InputError, match=WORDS[case["reason"]]) if case["error"] else nullcontext()
        with subtests.test(f"{case['cls']}-{case['reason']}"), refusal:
            SCHEMAS[case["cls"]].check(given)
    assert {case["cls"] for case in CASES} == set(SCHEMAS)
    assert {case["reason"] for case in CASES} == {*WORDS, None}
    assert len(CASES) == 22


def test_sizes_behind_names_are_returned_without_the_free_ones():
    given = {
        "pixel_values": [torch.zeros(3, 14, 140), torch.zeros(3, 14, 280)],
        "tgt_sizes": torch.zeros(2, 2),
        "num_slices": torch.zeros(1),
    }
    assert schemas.SLICED_IMAGES.check(given) == {"slices": 2, "channels": 3, "images": 1}


def test_a_list_counts_as_its_stack():
    schema = Schema(name="inputs", fields=(Field(name="x", shape=("items", 2, "width")),))
    stacked = schema.check({"x": torch.zeros(3, 2, 5)})
    assert schema.check({"x": [torch.zeros(2, 5)] * 3}) == stacked == {"items": 3, "width": 5}


def test_timestamps_may_be_a_list_or_none():
    given = {"pixel_values_videos": torch.zeros(4, 6), "video_grid_thw": torch.zeros(1, 3)}
    schemas.PATCH_VIDEOS.check(given | {"timestamps": [[0.0, 0.5]]})
    schemas.PATCH_VIDEOS.check(given | {"timestamps": None})
    with refused("videos as patches, timestamps: float given, a list with one entry per item expected."):
        schemas.PATCH_VIDEOS.check(given | {"timestamps": 0.5})


def test_right_slices_pass():
    slices = [torch.zeros(3, 14, 140), torch.zeros(3, 14, 28)]
    schemas.check_slices(slices, torch.tensor([[2, 5], [1, 2]]), torch.tensor([2]), 14)


IMAGES = {"pixel_values": torch.zeros(16, 6), "image_grid_thw": torch.zeros(2, 3)}


WRONG: list[tuple[dict[str, object], str]] = [
    ({"image_grid_thw": torch.zeros(2, 4)},
        "images as patches, image_grid_thw: dimension 1 of [2, 4] is 4, 3 expected ([images, 3])."),
    ({"pixel_values": torch.zeros(1, 16, 6)},
        "pixel_values: 3 dimensions given ([1, 16, 6]), 2 expected ([patches, patch_values])."),
    ({"image_grid_thw": None},
        "images as patches: image_grid_thw is missing; expected [images, 3]. Given: pixel_values."),
    ({"pixel_values": [torch.zeros(4, 6), torch.zeros(2, 6)]},
        "elements 0 and 1 are inconsistent, shapes [4, 6] and [2, 6]; [patches, patch_values] expected."),
    ({"pixel_values": []},
        "images as patches, pixel_values: an empty list given, [patches, patch_values] expected. Leave"),
    ({"pixel_values": "pixels"},
        "pixel_values: str given, a tensor or a list, [patches, patch_values], expected."),
    ({"pixel_values": [torch.zeros(3), 4]},
        "images as patches, pixel_values: element 1 is int, a tensor expected."),
    ({"pixelvalues": torch.zeros(3)},
        "images as patches: unknown fields pixelvalues; expected image_grid_thw, pixel_values."),
]  # fmt: skip


def test_a_wrong_field_is_named_with_what_was_expected(subtests):
    for change, message in WRONG:
        with subtests.test(message), refused(message):
            schemas.PATCH_IMAGES.check(IMAGES | change)


def test_a_size_that_disagrees_names_both_fields():
    given = {"pixel_values_videos": torch.zeros(4, 6), "video_grid_thw": torch.zeros(2, 3)}
    with refused("dimension 0 of [3] makes videos 3, but it is 2 in video_grid_thw; expected [videos]."):
        schemas.PATCH_VIDEOS.check(given | {"second_per_grid_ts": torch.zeros(3)})
    with refused("dimension 1 of [16, 6] makes patch_values 6, but it is 1176 in the caller's sizes"):
        schemas.PATCH_IMAGES.check(IMAGES, {"patch_values": 1176})


def test_free_sizes_are_named_when_the_others_disagree():
    given = {"image_embeds": [torch.zeros(4, 8), torch.zeros(4, 9)]}
    with refused("shapes [4, 8] and [4, 9]; [images, tokens, width] expected, where tokens may differ."):
        schemas.EMBEDDED_SLICES.check(given)


def test_slices_that_are_plain_images_or_miscounted_are_refused():
    sizes = torch.tensor([[2, 2]])
    with refused("slice 0: shape [3, 28, 28] given, [channels, 14, 56] expected for 2 x 2 patches of 14."):
        schemas.check_slices([torch.zeros(3, 28, 28)], sizes, torch.tensor([1]), 14)
    with refused("1 slices and 1 sizes given, the images count 1 + 2 = 3 slices; pass all three"):
        schemas.check_slices([torch.zeros(3, 14, 56)], sizes, torch.tensor([1, 2]), 14)
