"""Engines attached to transformers models in a variable: tiny random models with their language models."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from packaging.version import Version
from PIL import Image

from benchmarks.attached import (
    answers,
    attached,
    build,
    calls_of,
    config_of,
    features,
    memory,
    owner_of,
    pixels_of,
    whole_model,
)
from benchmarks.classes import random_state
from tests.recipes.whole_checkpoints import WHOLE, write_whole
from vlexport import attach, load
from vlexport.bundle import Bundle
from vlexport.codec import canonical, decode, encode, parse
from vlexport.errors import CheckpointError, InputError, MisfitError, UnsupportedError
from vlexport.recipe import served_types
from vlexport.runtime import attached as module
from vlexport.vision.features.classes import ReadWeights
from vlexport.vision.features.pixels import PictureRule

pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.20"),
    reason="classes of transformers that take their tables, as those of 5.23 do",
)
PICTURE = Path(__file__).parents[2] / "recipes" / "demo" / "trained" / "scene" / "image.png"
CLASSES = ("gemma3", "qwen3_vl", "internvl", "llava_onevision", "glm4v", "mistral3", "idefics3", "smolvlm")


def first(names: Sequence[str], count: int) -> list[Any]:
    """Leave all but so many to the suite that takes hours: each builds a bundle."""
    rest = [pytest.param(name, marks=pytest.mark.full) for name in names[count:]]
    return [*names[:count], *rest]


class Case(NamedTuple):
    model: Any
    bundle: Bundle
    folder: Path


def case_of(name: str, folder: Path) -> Case:
    model = whole_model(name, folder)
    return Case(model, build(folder, None if name in served_types() else "generic", "eager"), folder)


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return case_of("llava", tmp_path_factory.mktemp("attach") / "llava")


def weights(model: Any) -> int:
    return sum(each.nbytes for each in model.parameters())


def held_to_its_own_tower(case: Case, subtests: Any) -> None:
    model, calls = case.model, dict(calls_of(case.model))
    own = {kind: answers(model, call) for kind, call in calls.items()}
    pixels = pixels_of(owner_of(model), 3, config=config_of(model))
    features, before = model.get_image_features(**pixels), weights(model)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with attach(model, case.bundle) as engine:
        assert weights(model) == before - engine.freed_bytes
        assert f"{engine.freed_bytes:,} bytes" in repr(engine)
        assert engine.freed_bytes > 50_000
        for kind, call in calls.items():
            with subtests.test(call=kind):
                count = engine.session.num_calls
                logits, tokens = answers(model, call)
                assert (logits - own[kind][0]).norm() < 1e-5 * own[kind][0].norm()
                assert torch.equal(tokens, own[kind][1])
                pictures = len(call["spatial_shapes"]) if engine.session.packing.is_one else 1
                assert engine.session.num_calls == count + 2 * pictures
        given = model.get_image_features(**pixels)
        assert type(given) is type(features)
        assert type(given.pooler_output) is type(features.pooler_output)
        for ours, theirs in zip(given.pooler_output, features.pooler_output, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        assert isinstance(model.get_image_features(**pixels, return_dict=False), tuple)
    after = model.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in state.items())
    assert torch.equal(answers(model, calls["one image"])[0], own["one image"][0])


@pytest.mark.seconds
def test_tokens_and_structures_are_those_of_the_own_tower_which_is_gone_and_comes_back(llava, subtests):
    held_to_its_own_tower(llava, subtests)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5_vl", "llava_next"])
def test_so_they_are_for_rows_with_grids_and_for_tiles(name, tmp_path, subtests):
    held_to_its_own_tower(case_of(name, tmp_path / name), subtests)


@pytest.mark.seconds
def test_other_instances_keep_their_tower_and_threads_share_the_engine(llava):
    other = type(llava.model).from_pretrained(llava.folder).eval()
    calls = dict(calls_of(other))
    with attach(llava.model, llava.bundle, keep_weights=True) as engine:
        assert engine.freed_bytes == 0
        assert type(llava.model).get_image_features is type(other).get_image_features
        assert not {"get_image_features", "forward"} & {*vars(owner_of(other)), *vars(other)}
        own = {kind: answers(other, call)[1] for kind, call in calls.items()}
        assert engine.session.num_calls == 1
        kinds = [*calls] * 4
        with ThreadPoolExecutor(4) as pool:
            tokens = list(pool.map(lambda kind: answers(llava.model, calls[kind])[1], kinds))
        assert all(torch.equal(given, own[kind]) for given, kind in zip(tokens, kinds, strict=True))
        # Gradients reach the language model.
        llava.model(**calls["one image"]).logits.sum().backward()
    llava.model.zero_grad()


@pytest.mark.seconds
def test_other_threads_may_use_a_model_that_is_being_attached(llava, monkeypatch):
    reached, pixels, rows = module._Features._reached, pixels_of(owner_of(llava.model), 2), []

    def meanwhile(self: Any, call: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            use: Any = partial(pool.submit, llava.model.get_image_features, **pixels)

            def both() -> None:
                rows.append(use().result(60))
                call()

            return reached(self, both)

    monkeypatch.setattr(module._Features, "_reached", meanwhile)
    attach(llava.model, llava.bundle, keep_weights=True).detach()
    assert rows


@pytest.mark.seconds
def test_half_precision_takes_rows_of_its_dtype(llava):
    model = type(llava.model).from_pretrained(llava.folder, dtype=torch.bfloat16).eval()
    pixels = pixels_of(owner_of(model), 2)
    own = torch.cat([*model.get_image_features(**pixels).pooler_output])
    with attach(model, llava.bundle):
        rows = torch.cat([*model.get_image_features(**pixels).pooler_output])
    assert rows.dtype == torch.bfloat16
    assert (rows - own).norm() < 0.05 * own.norm()


@pytest.mark.seconds
def test_what_does_not_fit_is_refused_and_leaves_the_model_as_it_was(llava, tmp_path, monkeypatch):
    model, bundle = llava.model, llava.bundle
    with monkeypatch.context() as patch:
        patch.setattr(ReadWeights, "__enter__", lambda _: pytest.fail("broken"))
        with pytest.raises(pytest.fail.Exception, match="broken"):
            attach(model, bundle)
    assert not any(part._forward_hooks for part in owner_of(model).children())
    with pytest.raises(MisfitError, match=r"LlavaModel\), and Linear has no such part"):
        attach(torch.nn.Linear(1, 1), bundle)
    changed = type(model).from_pretrained(llava.folder).eval()
    changed.load_state_dict({**changed.state_dict(), **random_state(changed, seed=1)})
    with pytest.raises(MisfitError, match="embeds of random images is"):
        attach(changed, bundle)
    changed.save_pretrained(tmp_path)
    assert "get_image_features" not in vars(owner_of(changed))
    (tmp_path / "preprocessor_config.json").write_bytes(
        (llava.folder / "preprocessor_config.json").read_bytes()
    )
    with pytest.raises(MisfitError, match="Build a bundle of the model's checkpoint"):
        attach(type(model).from_pretrained(tmp_path).eval(), bundle)
    with pytest.raises(UnsupportedError, match=r"torch\.compile"):
        attach(torch.compile(model), bundle)
    with attach(model, bundle), pytest.raises(UnsupportedError, match="Detach that first"):
        attach(model, bundle)
    away = type(model).from_pretrained(llava.folder).eval()
    owner_of(away).to("meta")
    with pytest.raises(UnsupportedError, match="on meta, cpu expected"):
        attach(away, bundle)
    with attach(model, bundle):
        call, own = dict(calls_of(model))["one image"], model.config.vision_feature_layer
        for layer in (-1, 0, [own, -1]):
            words = re.escape(f"vision_feature_layer={layer} given, {own} expected. Leave it out, or detach")
            with pytest.raises(InputError, match=words):
                model.get_image_features(call["pixel_values"], vision_feature_layer=layer)
            with pytest.raises(InputError, match=words):
                model.generate(**call, vision_feature_layer=layer)
        with pytest.raises(InputError, match="vision_feature_select_strategy='full' given, 'default' exp"):
            model(**call, vision_feature_select_strategy="full")
        model(**call, vision_feature_layer=own)
        with pytest.raises(InputError, match=r"images \[3, "):
            model.get_image_features(torch.zeros(1, 3, 8, 8))


@pytest.mark.seconds
def test_weights_that_cannot_be_read_again_keep_the_model_attached(llava, tmp_path):
    model = type(llava.model).from_pretrained(llava.folder).eval()
    model.name_or_path = str(tmp_path)
    engine = attach(model, llava.bundle)
    call = dict(calls_of(llava.model))["one image"]
    with pytest.raises(CheckpointError, match="still attached"):
        engine.detach()
    assert torch.equal(answers(model, call)[1], answers(llava.model, call)[1])
    model.name_or_path = str(llava.folder)
    engine.detach()
    assert torch.equal(answers(model, call)[0], answers(llava.model, call)[0])
    with pytest.raises(UnsupportedError, match="detached before"), engine:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("model_type", first(CLASSES, 2))
def test_a_class_with_its_engine_gives_equal_tokens(model_type, tmp_path):
    assert attached(model_type, tmp_path / model_type) == "equal"


@pytest.mark.slow
def test_patches_line_by_line_go_cell_by_cell_to_the_engine(tmp_path):
    assert attached("paddleocr_vl", tmp_path / "paddleocr_vl") == "equal"


@pytest.mark.slow
def test_videos_that_no_engine_has_are_the_class_s_own_with_kept_weights_and_refused_without(tmp_path):
    model, bundle, _ = case_of("llava_next_video", tmp_path / "llava_next_video")
    calls = dict(calls_of(model))
    own = {kind: answers(model, call) for kind, call in calls.items()}
    words = "LlavaNextVideoModel: videos take another way .* Attach with keep_weights=True, or pass frames"
    with attach(model, bundle) as engine:
        assert engine.freed_bytes
        with pytest.raises(UnsupportedError, match=words):
            answers(model, calls["video"])
    with attach(model, bundle, keep_weights=True) as engine:
        count = engine.session.num_calls
        logits, tokens = answers(model, calls["video"])
        assert engine.session.num_calls == count
        assert torch.equal(logits, own["video"][0])
        assert torch.equal(tokens, own["video"][1])
        # Images in other threads take the engine meanwhile.
        kinds = [*calls] * 2
        with ThreadPoolExecutor(2) as pool:
            answered = list(pool.map(lambda kind: model.generate(**calls[kind], max_new_tokens=2), kinds))
        assert engine.session.num_calls == count + len(kinds) - 2
        for kind, tokens in zip(kinds, answered, strict=True):
            assert torch.equal(tokens, own[kind][1][:, : tokens.shape[1]])


@pytest.mark.slow
def test_frames_of_videos_go_to_the_engine_as_pictures(tmp_path):
    model, bundle = whole_model("gemma4", tmp_path), build(tmp_path, "generic")
    owner = owner_of(model)
    pixels = pixels_of(owner, 3, config=config_of(model))
    video = {
        "pixel_values_videos": pixels["pixel_values"],
        "video_position_ids": pixels["image_position_ids"],
        "num_frames_per_video": torch.tensor([2, 1]),
    }
    own = owner.get_video_features(**video)
    with attach(model, bundle) as engine:
        count = engine.session.num_calls
        given = owner.get_video_features(**video)
        assert engine.session.num_calls == count + 3
        with pytest.raises(InputError, match="but the bundle takes"):
            owner.get_video_features(**{**video, "pixel_values_videos": pixels["pixel_values"][:, :-1]})
    assert type(given) is type(own)
    for ours, theirs in zip(given.pooler_output, own.pooler_output, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_pictures_of_the_one_shape_give_equal_tokens_and_others_are_refused(tmp_path, subtests):
    case = case_of("lfm2_vl", tmp_path / "lfm2_vl")
    held_to_its_own_tower(case, subtests)
    model, pixels = case.model, pixels_of(owner_of(case.model), 3, config=config_of(case.model))
    for name, changed, words in (
        (
            "spatial_shapes",
            torch.tensor([[4, 4], [2, 8], [4, 4]]),
            "spatial_shapes [[2, 8]] of it, but the b",
        ),
        ("pixel_values", pixels["pixel_values"][:, :9], "makes pixel_values [1, 9, "),
        ("pixel_values", pixels["pixel_values"][:2], "makes pixel_values [2, 16, "),
    ):
        with (
            attach(model, case.bundle),
            subtests.test(name),
            pytest.raises(InputError, match=re.escape(words)),
        ):
            model.get_image_features(**{**pixels, name: changed})


def test_pictures_lie_side_by_side_along_any_axis():
    values = {"pixel_values": torch.arange(24.0).reshape(1, 2, 12), "sizes": torch.tensor([[2, 4]] * 3)}
    rule = PictureRule.of(
        {"pixel_values": values["pixel_values"][..., :4], "sizes": values["sizes"][:1]}, values
    )
    assert (
        decode(PictureRule, parse(canonical(encode(rule)))).arguments(torch.arange(8.0)).keys()
        == values.keys()
    )
    rows = values["pixel_values"].unflatten(2, (3, 4)).transpose(1, 2).reshape(3, 8)
    assert torch.equal(rule.rows("image", values), rows)
    with pytest.raises(
        InputError, match=r"\[1, 2, 12\], sizes \[\[2, 4\], \[2, 4\]\] of it, but .* \[1, 2, 4\]"
    ):
        rule.rows("image", {**values, "sizes": values["sizes"][:2]})


@pytest.mark.slow
def test_a_class_that_calls_no_features_gives_these_alone_and_is_refused_if_it_writes(tmp_path):
    model, folder = whole_model("siglip2", tmp_path / "siglip2"), tmp_path / "siglip2"
    bundle, pixels = build(folder, "generic"), pixels_of(model, 3)
    own, structure = features(model, pixels)
    with attach(model, bundle):
        rows, same = features(model, pixels)
        assert same == structure
        assert (rows - own).norm() < 1e-5 * own.norm()
        with pytest.raises(UnsupportedError, match="forward does not call get_image_features, which alone"):
            model(input_ids=torch.ones(1, 4, dtype=torch.int64), **pixels)
    assert torch.equal(features(model, pixels)[0], own)
    model.generate = None
    with pytest.raises(UnsupportedError, match="Siglip2Model: its forward does not call get_image_features"):
        attach(model, bundle)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", first(list(WHOLE), 1))
def test_a_picture_through_processor_and_pipeline_of_transformers_gets_the_own_answer(model_type, tmp_path):
    source = write_whole(model_type, tmp_path / model_type)
    bundle, picture = build(source, "generic"), Image.open(PICTURE).convert("RGB")
    with load(bundle.path, checkpoint=str(source)) as loaded:
        processor: Any = loaded.require_generator().language.decoder.processor  # type: ignore[attr-defined]
    model = transformers.AutoModelForImageTextToText.from_pretrained(source).eval()
    parts = [{"type": "image"}, {"type": "text", "text": "What is this?"}]
    text = processor.tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
    ask = transformers.pipeline("image-text-to-text", model=model, processor=processor, device="cpu")
    inputs = processor(text=[text], images=[picture], return_tensors="pt")
    limits = {"max_new_tokens": 8, "do_sample": False}
    own, answer = model.generate(**inputs, **limits), ask(picture, text=text, generate_kwargs=limits)
    with attach(model, bundle) as engine:
        count = engine.session.num_calls
        assert torch.equal(model.generate(**inputs, **limits), own)
        assert ask(picture, text=text, generate_kwargs=limits) == answer
        assert engine.session.num_calls == count + 2


@pytest.mark.full
def test_nothing_of_the_old_tower_is_held():
    found = memory()
    assert found["old weights alive"] == 0
    assert found["weights freed"] > 3e8
    assert found["held in no file"] <= (
        found["weights of the language model"] + 1.1 * found["files of the bundle"]
    )
