"""The task of the trained checkpoint and its training, held to transformers' own model."""

import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from transformers import Qwen2_5_VLForConditionalGeneration
from vlexport.recipes.demo.qwen2_5_vl import SPECIAL_TOKENS, processor_json, token
from vlexport.recipes.demo.writing import write_checkpoint

from benchmarks.trained import scenes, train
from benchmarks.trained.evaluate import Reference, guesses, shares, shuffled
from benchmarks.trained.model import (
    CELLS,
    IGNORED,
    MERGE,
    PATCHES,
    TrainedModel,
    checkpoint_contents,
    patches_of,
)
from benchmarks.trained.task import SHOWN, write_shown, write_task
from tests.reference.processors import their_image, their_video

MEDIA = ("image", "video")


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("trained") / "untrained", checkpoint_contents())


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """New weights of the training, stored, so that transformers reads the same."""
    trained = TrainedModel(tmp_path_factory.mktemp("trained") / "fresh")
    trained.initialise(3)
    trained.save()
    trained.load()
    return trained


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(train, "SCENES", {"image": 3, "video": 2})
    monkeypatch.setattr(train, "QUESTIONS", 4)


def drawn(kind, count=40, seed=5):
    return [scenes.draw_scene(kind, seed, number) for number in range(count)]


@pytest.mark.parametrize("kind", scenes.MEDIA["video"])
def test_every_step_of_a_video_has_one_event_and_its_events_are_a_permutation(kind):
    """So steps in another order, or the first alone, leave all answers equally likely."""
    for scene in drawn(kind):
        rest, *steps = map(set, scene.things)
        (events,) = zip(*(step - rest for step in steps), strict=True)
        assert sorted(event.shape for event in events) == [0, 1, 2, 3]
        assert sorted(event.colour for event in events) == [0, 1, 2, 3]
        for question in scene.questions:
            pattern = re.sub("|".join(scenes.ORDINALS), "ORDINAL", question.prompt)
            if pattern != question.prompt:
                same = [each.answer for each in scene.questions if _like(each.prompt, pattern)]
                # Two things may move to one place, one from above and one from below.
                is_place = question.prompt.startswith("Where did")
                assert len(same) == 4
                assert (
                    set(same) <= set(question.choices) if is_place else sorted(same) == list(question.choices)
                )


def _like(prompt, pattern):
    return re.sub("|".join(scenes.ORDINALS), "ORDINAL", prompt) == pattern


def test_a_question_about_a_picture_has_one_answer_and_it_is_drawn():
    for scene in drawn("image"):
        (things,) = scene.things
        for question in scene.questions:
            named = [
                each
                for each in things
                if (scenes.SHAPES[each.shape] in question.prompt or "shape" in question.prompt)
                and (scenes.NAMES[each.colour] in question.prompt or "colour" in question.prompt)
            ]
            if question.category in {"colour", "shape", "where"}:
                assert len(named) == 1


def cells_of(frame):
    """The bytes of each cell."""
    rows = frame.reshape(scenes.ROWS, scenes.CELL, scenes.COLUMNS, scenes.CELL, 3).swapaxes(1, 2)
    return rows.reshape(CELLS, -1)


@pytest.mark.seconds
def test_a_page_is_flat_but_for_its_text_or_has_noise_in_every_cell():
    flat = 0
    for scene in drawn("page"):
        (frame,) = scene.frames
        (colours, counts), cells = (
            np.unique(frame.reshape(-1, 3), axis=0, return_counts=True),
            cells_of(frame),
        )
        if len(colours) > 2:
            assert len(np.unique(cells, axis=0)) == CELLS
            continue
        flat += 1
        paper = np.tile(colours[counts.argmax()], scenes.CELL**2)
        empty = {divmod(int(at), scenes.COLUMNS) for at in np.flatnonzero((cells == paper).all(axis=1))}
        assert len(empty) >= 4
        for question in scene.questions:
            if question.category == "page digit":
                place = question.prompt.removeprefix("Which digit is at the ").removesuffix("?")
                cells_there = (at for at, name in enumerate(scenes.PLACES) if name == place)
                assert not {divmod(at, scenes.COLUMNS) for at in cells_there} <= empty
    assert 10 < flat < 30


def test_the_ground_under_a_moving_camera_pans_by_half_or_whole_cells_and_stands_still_in_videos():
    found = set()
    for kind in scenes.MEDIA["video"]:
        for scene in drawn(kind, 20):
            first, second = scene.frames[[0, 2]].astype(int)
            # Of things, which come, most of the frame is free.
            apart = {
                pan: np.median(abs(np.roll(first, -pan, axis=1) - second)[:, 28:-28])
                for pan in (-28, -14, 0, 14, 28)
            }
            pan = min(apart, key=apart.__getitem__)
            found.add((kind, pan))
    assert found == {("video", 0), *(("camera", pan) for pan in (-28, -14, 14, 28))}


@pytest.mark.seconds
def test_every_word_of_a_question_is_one_token_and_special_tokens_keep_their_numbers(untrained):
    tokenizer = Tokenizer.from_file(str(untrained / "tokenizer.json"))
    assert [tokenizer.token_to_id(name) for name in SPECIAL_TOKENS] == [
        token(name) for name in SPECIAL_TOKENS
    ]
    for kind in scenes.QUESTIONS:
        for question in (each for scene in drawn(kind, 10) for each in scene.questions):
            for text in (question.prompt, question.answer):
                found = tokenizer.encode(text)
                assert len(found.ids) == len(re.findall(r"\w+|[^\w ]", text))
                assert tokenizer.decode(found.ids) == text
    text = "<|im_start|>user\nsome text, \u00e9\u4e16\U0001f30d <|image_pad|>"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_a_task_file_names_its_media_and_holds_their_pixels(tmp_path):
    lines = [json.loads(line) for line in write_task(tmp_path / "task", 16, 7).read_text().splitlines()]
    for line, (scene, question) in zip(lines, scenes.held_out(7, 16), strict=True):
        assert (line["prompt"], line["answer"]) == (question.prompt, question.answer)
        path = tmp_path / "task" / line[scene.medium]
        frames = np.load(path) if scene.medium == "video" else np.asarray(Image.open(path))[None]
        assert np.array_equal(frames, scene.frames)
    assert {line["category"] for line in lines} == {
        name for names in scenes.QUESTIONS.values() for name in names
    }


def test_questions_of_some_kinds_alone_are_of_their_categories():
    for kinds in (("image", "video"), ("page",)):
        found = {question.category for _, question in scenes.held_out(7, 16, kinds)}
        assert found == {name for kind in kinds for name in scenes.QUESTIONS[kind]}


def test_the_package_has_the_scene_that_is_drawn(tmp_path):
    write_shown(tmp_path)
    for name in ("image.png", "frames.png"):
        assert np.array_equal(np.asarray(Image.open(tmp_path / name)), np.asarray(Image.open(SHOWN / name)))
    assert (tmp_path / "question.json").read_text() == (SHOWN / "question.json").read_text()


@pytest.mark.slow
def test_a_guess_by_the_prompt_alone_is_right_in_less_than_three_of_ten():
    pairs = list(scenes.held_out(1, 400))
    assert shares(pairs, guesses(pairs))["all"] < 30


def test_patches_are_those_of_the_processors_of_transformers():
    for kind, theirs in (("image", their_image), ("video", their_video)):
        scene = scenes.draw_scene(kind, 0, 0)
        frames = torch.from_numpy(scene.frames)
        grid, patches = theirs(processor_json(kind), frames if kind == "video" else frames[0])
        assert grid == [scenes.STEPS if kind == "video" else 1, *PATCHES]
        # Another order of the same three operations in float32: 2.4e-7 measured.
        assert torch.allclose(patches_of(scene.frames[None]).flatten(0, 1), patches.float(), atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MEDIA)
def test_tokens_of_a_batch_are_those_of_the_tower_of_transformers(fresh, small, kind):
    batch, _ = train.make_batch(fresh, kind, train.Moment(seed=0, step=0))
    patches = patches_of(batch.frames)
    grids = torch.tensor([[len(patches) // len(batch.frames), *PATCHES]] * len(batch.frames))
    with torch.no_grad():
        found = fresh.encode(patches).flatten(0, 1)
        wanted = fresh.model.model.visual(patches.flatten(0, 1), grid_thw=grids).pooler_output
    # 3.7e-6 measured at values up to 2.4.
    assert torch.allclose(found, wanted, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MEDIA)
def test_the_loss_of_questions_side_by_side_is_that_of_prompts_of_their_own(fresh, small, kind):
    reference = Reference.open(fresh.folder)
    batch, _ = train.make_batch(fresh, kind, train.Moment(seed=0, step=0))
    with torch.no_grad():
        loss, _, _ = fresh.loss(batch)
        wanted = [
            each
            for at, frames in enumerate(batch.frames)
            for ids, targets in zip(batch.ids_BQL[at], batch.targets_BQL[at], strict=True)
            for each in _losses(reference.model, fresh, kind, frames, ids, targets)
        ]
    assert len(wanted) > 10
    # 5e-8 measured.
    assert loss.item() == pytest.approx(sum(wanted) / len(wanted), rel=1e-6)


def _losses(model: Qwen2_5_VLForConditionalGeneration, fresh, kind, frames, ids, targets):
    """The loss of each answer token of one prompt, all of it by transformers."""
    wanted = targets != IGNORED
    if not wanted.any():
        return []
    text = fresh.tokenizer.decode(ids[: int(wanted.nonzero()[0]) + 1])
    prompt = text.removesuffix("<|im_end|>\n<|im_start|>assistant\n")
    patches = patches_of(frames[None])
    chat = [{"role": "user", "content": [{"type": kind}, {"type": "text", "text": prompt}]}]
    whole = fresh.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    pad = f"<|{kind}_pad|>"
    prompt_ids = fresh.tokenizer(whole.replace(pad, pad * (len(patches) * CELLS)))["input_ids"]
    answer = targets[wanted].tolist()
    full = torch.tensor([prompt_ids + answer])
    media: dict[str, object] = {
        "pixel_values" if kind == "image" else "pixel_values_videos": patches.flatten(0, 1)
    }
    if kind == "video":
        media["second_per_grid_ts"] = [MERGE / scenes.FRAMES_PER_SECOND]
    slots = full == fresh.specials[pad]
    logits = model(
        input_ids=full,
        attention_mask=torch.ones_like(full),
        mm_token_type_ids=slots.int() * (1 + (kind == "video")),
        **{f"{kind}_grid_thw": torch.tensor([[len(patches), *PATCHES]])},
        **media,
    ).logits[0, len(prompt_ids) - 1 : -1]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="none").tolist()


@pytest.mark.slow
def test_a_training_that_was_cut_off_goes_on_to_the_same_weights(small, tmp_path):
    lines: list[str] = []
    train.train(tmp_path / "whole", lines.append, steps=4)
    for stop in (1, 4):
        train.train(tmp_path / "cut", lines.append, steps=4, stop=stop)
    one, other = (torch.load(tmp_path / name / "training" / "state.pt") for name in ("whole", "cut"))
    assert all(torch.equal(one["model"][name], other["model"][name]) for name in one["model"])


@pytest.mark.slow
def test_transformers_reads_every_weight_of_a_training_and_answers(fresh):
    found: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(fresh.folder, output_loading_info=True)
    _, report = found
    assert not any(report.values())
    pairs = list(scenes.held_out(1, 8))
    reference = Reference.open(fresh.folder)
    assert len(reference.answers(pairs)) == len(reference.answers(pairs, shuffled)) == 8
