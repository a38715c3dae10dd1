"""Names, shapes and sizes of what processors hand to encoders."""

from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file

from tests.golden_data import FOLDER, cases
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
NAMES = (("pixel_values", "grid_thw"), ("pixel_values_videos", "grid_thw", "seconds"))
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


def test_fields_of_a_processor_become_the_items_that_were_recorded():
    tensors = load_file(FOLDER / "e2e_qwen3_vl" / "image_then_video.safetensors")
    image, video = ({name: tensors[f"media{at}.{name}"] for name in names} for at, names in enumerate(NAMES))
    grids = [image["grid_thw"], video["grid_thw"]]
    given = {
        "pixel_values": torch.cat([image["pixel_values"]] * 2),
        "image_grid_thw": grids[0].repeat(2, 1),
        "pixel_values_videos": video["pixel_values_videos"],
        "video_grid_thw": grids[1][None],
        "timestamps": [video["seconds"]],
    }
    items = schemas.media_items(given)
    assert [item.kind for item in items] == ["image", "image", "video"]
    assert [list(item.grid) for item in items] == [each.tolist() for each in (grids[0], *grids)]
    for item in items[:2]:
        assert torch.equal(item.patches, image["pixel_values"])
    assert torch.equal(items[2].patches, video["pixel_values_videos"])
    assert items[2].frame_seconds == tuple(video["seconds"].tolist())
    assert items[0].frame_seconds == ()
    assert items[2].seconds_per_grid is None
    with refused("images: 8 rows given,"):
        schemas.media_items({**given, "pixel_values": image["pixel_values"][:8]})


def test_embeddings_of_another_process_become_what_requests_take():
    given = {
        "video_embeds": torch.arange(24.0).view(12, 2),
        "video_grid_thw": torch.tensor([[2, 4, 4], [1, 4, 4]]),
        "second_per_grid_ts": torch.tensor([0.5, 1.0]),
    }
    first, second = schemas.encoded_items(given, merge=2)
    assert torch.equal(torch.cat([first.embeds, second.embeds]), given["video_embeds"])
    assert (len(first.embeds), first.seconds_per_grid, second.seconds_per_grid) == (8, 0.5, 1.0)
    assert second.grid == (1, 4, 4)
    assert second.kind == "video"
    with refused("unknown fields pixel_values"):
        schemas.encoded_items({**given, "pixel_values": torch.zeros(4, 6)}, merge=2)
