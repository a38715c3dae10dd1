"""Answers with generic bundles: the model and processor of transformers around the engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from PIL import Image
from transformers import AutoModelForImageTextToText

import vlexport
from benchmarks.classes import PIXELS
from tests.cli.lines import vlexport as command
from tests.recipes.whole_checkpoints import CLIPS, WHOLE, photographs, write_whole
from vlexport.errors import InputError, LimitError, MisfitError, UnsupportedError
from vlexport.runtime.request import Request

pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.20"), reason="classes as transformers 5.23 has them"
)
QUESTION = "What is this?"
TOKENS = 8
FRAMES = torch.zeros(4, 32, 32, 3, dtype=torch.uint8)
# Pairs of equal frames: of each an image processor makes the rows of a video.
CLIP = np.stack([np.asarray(photographs()[index].resize((120, 90))) for index in (0, 0, 2, 2)])


def built(model_type: str, folder, recipe: str = "generic"):
    source = folder / model_type
    if not source.exists():
        write_whole(model_type, source)
    return source, vlexport.build(source, recipe=recipe, output_dir=folder / "engines" / recipe)


@pytest.fixture(scope="module")
def tiles(tmp_path_factory):
    return built("internvl", tmp_path_factory.mktemp("tiles"))


def expected(source, processor: Any, images: list[Any]) -> tuple[list[int], list[int]]:
    """Return prompt and answer of transformers alone."""
    model, inputs = prepared(source, processor, images)
    tokens = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)[0].tolist()
    prompt = inputs["input_ids"][0].tolist()
    return prompt, tokens[len(prompt) :]


def prepared(source, processor: Any, images: list[Any]) -> tuple[Any, Any]:
    """Return a fresh model and the inputs of a question about pictures."""
    parts = [*({"type": "image"} for _ in images), {"type": "text", "text": QUESTION}]
    text = processor.tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
    )
    inputs = processor(text=[text], images=images or None, return_tensors="pt")
    return AutoModelForImageTextToText.from_pretrained(source).eval(), inputs


@torch.no_grad()
def pruned_by_hand(
    source, processor: Any, images: list[Any], masks: list[Any]
) -> tuple[list[int], list[int]]:
    """Return prompt and answer of transformers alone, with rows and their places left out."""
    model, inputs = prepared(source, processor, images)
    ids = inputs["input_ids"]
    embeds, is_row = model.get_input_embeddings()(ids), ids == model.config.image_token_id
    names = inputs.keys() & {"pixel_values", "image_grid_thw"}
    features = model.get_image_features(**{name: inputs[name] for name in names}).pooler_output
    embeds[is_row] = torch.cat([rows.flatten(0, -2) for rows in features])
    stays = torch.ones_like(is_row).masked_scatter(is_row, torch.cat(masks))[0]
    types = inputs.get("token_type_ids", torch.zeros_like(ids))[:, stays]
    short, places, tokens = embeds[:, stays], torch.arange(int(stays.sum()))[None], list[int]()
    after = places[0, -1] + 1
    if hasattr(model.model, "get_rope_index"):
        places, offset = model.model.get_rope_index(
            ids, mm_token_type_ids=inputs["mm_token_type_ids"], image_grid_thw=inputs["image_grid_thw"]
        )
        places, after = places[..., stays], ids.shape[1] + offset[0, 0]
    for number in range(TOKENS):
        more = {"token_type_ids": types} if "token_type_ids" in inputs else {}
        logits = model(inputs_embeds=short, position_ids=places, **more).logits
        tokens.append(int(logits[0, -1].argmax()))
        short = torch.cat([short, model.get_input_embeddings()(torch.tensor([tokens[-1:]]))], 1)
        places = torch.cat([places, (after + number).expand(*places.shape[:-1], 1)], -1)
        types = torch.cat([types, torch.zeros_like(types[:, :1])], 1)
    return ids[0, stays].tolist(), tokens


def clip_by_hand(source, processor: Any, model_type: str) -> tuple[list[int], list[int]]:
    """Return prompt and answer of transformers alone about a video and a picture, by its parts."""
    clip, picture, tokenizer = CLIPS[model_type][0], WHOLE[model_type][2], processor.tokenizer
    parts = [{"type": "video"}, {"type": "image"}, {"type": "text", "text": QUESTION}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
    )
    before, after = text.split(clip + picture)
    shown = processor(text=[picture], images=photographs()[:1], return_tensors="pt")
    if model_type.startswith("qwen"):
        made = [processor.image_processor(frame, return_tensors="pt") for frame in CLIP[::2]]
        _, rows, columns = made[0]["image_grid_thw"][0].tolist()
        places = "<|video_pad|>" * (rows * columns // 4)
        shown["pixel_values_videos"] = torch.cat([frame["pixel_values"] for frame in made])
        shown["video_grid_thw"] = torch.tensor([[2, rows, columns]])
        timed = (f"<{time} seconds><|vision_start|>{places}<|vision_end|>" for time in ("0.2", "1.2"))
        written = clip.replace("<|video_pad|>", "".join(timed) if model_type == "qwen3_vl" else 2 * places)
        if model_type == "qwen2_5_vl":
            shown["second_per_grid_ts"] = torch.tensor([1.0])
    else:
        mean, std = (torch.tensor(PIXELS[name])[:, None, None] for name in ("image_mean", "image_std"))
        small = [np.asarray(Image.fromarray(frame).resize((32, 32), 3)) for frame in CLIP]
        frames = (torch.tensor(np.stack(small)).permute(0, 3, 1, 2) / 255 - mean) / std
        written = "<video>" * (4 * 4 + 1)
        if model_type == "internvl":
            written = "\n".join(f"Frame{n}: <img>{'<IMG_CONTEXT>' * 4}</img>" for n in (1, 2, 3, 4))
            shown["pixel_values"] = torch.cat([frames, shown["pixel_values"]])
        else:
            shown["pixel_values_videos"] = frames[None]
    first, last = (
        tokenizer(words, add_special_tokens=False).input_ids for words in (before + written, after)
    )
    ids = torch.tensor([[*first, *shown["input_ids"][0].tolist(), *last]])
    model = AutoModelForImageTextToText.from_pretrained(source).eval()
    shown |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if "mm_token_type_ids" in shown:
        config = model.config
        shown["mm_token_type_ids"] = 1 * (ids == config.image_token_id) + 2 * (ids == config.video_token_id)
    tokens = model.generate(**shown, max_new_tokens=TOKENS, do_sample=False)[0].tolist()
    return ids[0].tolist(), tokens[ids.shape[1] :]


@pytest.mark.seconds
@pytest.mark.parametrize(
    "model_type",
    [
        "internvl",
        *(
            pytest.param(each, marks=[pytest.mark.slow, pytest.mark.full])
            for each in WHOLE
            if each != "internvl"
        ),
    ],
)
def test_answers_are_those_of_transformers(model_type, tmp_path):
    source, bundle = built(model_type, tmp_path)
    with vlexport.load(bundle.path, checkpoint=str(source)) as pipeline:
        processor = pipeline.require_generator().language.decoder.processor  # type: ignore[attr-defined]
        for images in ([], photographs()[:1], photographs()):
            answer = pipeline.generate(QUESTION, images=images, max_new_tokens=TOKENS)
            prompt, tokens = expected(source, processor, images)
            assert (list(answer.prompt_token_ids), list(answer.token_ids)) == (prompt, tokens)
            assert answer.positions.shape[1] == len(prompt)
            assert len(answer.media) == len(images)
        parts = [{"type": "video"}, {"type": "image"}, {"type": "text", "text": QUESTION}]
        asked = Request.of(
            [{"role": "user", "content": parts}],
            images=photographs()[:1],
            videos=[CLIP],
            fps=2.0,
            max_new_tokens=TOKENS,
        )
        if model_type in CLIPS:
            answer = pipeline.generate(asked)
            prompt, tokens = clip_by_hand(source, processor, model_type)
            assert (list(answer.prompt_token_ids), list(answer.token_ids)) == (prompt, tokens)
            assert [item.kind for item in answer.media] == ["video", "image"]
        else:
            refusal = "resizes videos is not known" if model_type == "glm4v" else "Gemma3Processor has none"
            with pytest.raises((InputError, UnsupportedError), match=refusal):
                pipeline.generate(asked)
        pruned: Any = {"images": photographs(), "prune": 0.5, "method": "divprune"}
        if model_type == "llava_onevision":
            with pytest.raises(UnsupportedError, match="192 places in the prompt for 208 rows"):
                pipeline.generate(QUESTION, **pruned, max_new_tokens=TOKENS)
            return
        answer = pipeline.generate(QUESTION, **pruned, max_new_tokens=TOKENS)
        assert all(item.num_kept == item.num_tokens // 2 for item in answer.media)
        if model_type == "qwen3_vl":
            return  # levels: against its recipe, below
        masks = [item.mask for item in answer.media]
        prompt, tokens = pruned_by_hand(source, processor, photographs(), masks)
        assert (list(answer.prompt_token_ids), list(answer.token_ids)) == (prompt, tokens)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen2_5_vl"])
def test_pruned_answers_are_those_of_the_recipe(model_type, tmp_path):
    answers, grids = [], []
    for recipe in ("generic", model_type):
        source, bundle = built(model_type, tmp_path, recipe)
        with vlexport.load(bundle.path, checkpoint=str(source)) as pipeline:
            # `relevance` takes words of the question; no text follows what is higher than wide.
            asked: list[Any] = [
                {"images": photographs(), "prune": 0.5, "method": "divprune"},
                {"images": photographs(), "prune": 0.7, "method": "relevance"},
                {"videos": [CLIP], "fps": 2.0, "prune": 0.5},
                {
                    "videos": [CLIP],
                    "fps": 2.0,
                    "images": photographs()[:1],
                    "prune": 0.5,
                    "method": "divprune",
                },
            ]
            answers.append([pipeline.generate(QUESTION, **each, max_new_tokens=TOKENS) for each in asked])
            if recipe == "generic":
                with pytest.raises(UnsupportedError, match=r"a frame rate is expected.*Pass fps"):
                    pipeline.generate(QUESTION, videos=[CLIP])
            # More pixels than the bound of a whole video.
            grids.append(pipeline.encode(CLIP.repeat(6, 0), fps=2.0).grid)
    assert grids[0] == grids[1]
    for generic, own in zip(*answers, strict=True):
        assert (generic.prompt_token_ids, generic.token_ids) == (own.prompt_token_ids, own.token_ids)
        assert torch.equal(generic.positions, own.positions)
        for item, other in zip(generic.media, own.media, strict=True):
            assert item.num_kept < item.num_tokens
            assert torch.equal(item.mask, other.mask)


@pytest.mark.seconds
def test_answers_made_in_turns_are_those_made_one_by_one(tiles):
    source, bundle = tiles
    with vlexport.load(bundle.path, checkpoint=str(source)) as pipeline:
        asked = [([photographs()[0]], "One?"), (photographs(), "Three?"), ([], "None?")]
        alone = [
            pipeline.generate(question, images=images, max_new_tokens=TOKENS) for images, question in asked
        ]
        streams = [
            pipeline.stream(question, images=images, max_new_tokens=TOKENS) for images, question in asked
        ]
        for _ in range(TOKENS):
            for stream in streams:
                next(stream)
        for stream, answer in zip(streams, alone, strict=True):
            for _ in stream:
                pass
            assert stream.require_answer().token_ids == answer.token_ids


@pytest.mark.seconds
def test_the_engine_and_not_the_own_tower_gives_the_rows(tiles):
    source, bundle = tiles
    with vlexport.load(bundle.path, checkpoint=str(source)) as pipeline:
        before = pipeline.session.num_calls
        pipeline.generate(QUESTION, images=photographs()[:1], max_new_tokens=1)
        assert pipeline.session.num_calls == before + 1
        pipeline.generate("Another?", images=photographs()[:1], max_new_tokens=1)
        assert pipeline.session.num_calls == before + 1, "the same picture comes from the cache"
        tower = pipeline.require_generator().language.decoder.model.model.vision_tower  # type: ignore[attr-defined]
        assert sum(weight.numel() for weight in tower.parameters()) == 0


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"prune_before": "static:0.5"}, UnsupportedError, "whole items"),
        ({"videos": [FRAMES, FRAMES[:2]], "fps": 2.0}, UnsupportedError, "as many frames in each"),
        ({"max_new_tokens": 5000}, LimitError, "the decoder takes 4096"),
        ({"generation": vlexport.Generation(prefill_chunk=4)}, UnsupportedError, "prefill_chunk"),
    ],
)
def test_what_a_whole_model_does_not_do_is_refused(tiles, options, kind, words):
    source, bundle = tiles
    with vlexport.load(bundle.path, checkpoint=str(source)) as pipeline:
        with pytest.raises(kind, match=words):
            pipeline.generate(QUESTION, **options)
        with pytest.raises(InputError, match="special tokens"):
            pipeline.generate("<IMG_CONTEXT> again")
        # The beginning of a special token is text where nothing makes it whole.
        assert pipeline.generate("Is 3 <", max_new_tokens=1).finish == "length"
        with pytest.raises(UnsupportedError, match="declares no language model"):
            pipeline.watch(fps=2)
        assert pipeline.generate(QUESTION, max_new_tokens=1).finish == "length"


def test_other_checkpoints_are_refused(tiles, tmp_path):
    source, bundle = tiles
    other = write_whole("gemma3", tmp_path / "other")
    with pytest.raises(MisfitError, match=r"for internvl \(InternVLModel\).*has no such part"):
        vlexport.load(bundle.path, checkpoint=str(other))
    weights = write_whole("internvl", tmp_path / "weights")
    model = AutoModelForImageTextToText.from_pretrained(source)
    with torch.no_grad():
        model.model.multi_modal_projector.linear_1.weight *= 1.01
    model.save_pretrained(weights)
    with pytest.raises(MisfitError, match="Build a bundle of the model's checkpoint"):
        vlexport.load(bundle.path, checkpoint=str(weights))


def test_the_command_answers(tiles, tmp_path):
    source, bundle = tiles
    photographs()[0].save(tmp_path / "picture.png")
    words = ("--image", tmp_path / "picture.png", "--prompt", QUESTION, "--max-new-tokens", TOKENS)
    done = command("run", bundle.path, "--checkpoint", source, *words, "--json")
    assert done.code == 0, done.err
    with vlexport.load(bundle.path, checkpoint=str(source)) as pipeline:
        answer = pipeline.generate(QUESTION, images=str(tmp_path / "picture.png"), max_new_tokens=TOKENS)
    assert done.document["token_ids"] == list(answer.token_ids)
    assert "Loading" not in done.err
