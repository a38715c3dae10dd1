"""Pruning before the tower, from pixels to answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.golden_data import FOLDER
from tests.runtime.made import IMAGE, VIDEO, image, prompt, video
from tests.runtime.recorded import CHECKPOINT
from vlexport import build
from vlexport._build.request import request as spec_of
from vlexport._build.token_graphs import open_graphs, planned_graphs, write_graphs
from vlexport.backends import Folder
from vlexport.checkpoint import Checkpoint
from vlexport.errors import InputError, RequestError, UnsupportedError
from vlexport.positions.mrope import frame_positions
from vlexport.positions.rules import FrameMarkers, PlacedMedia, PositionRule
from vlexport.pruning import evs
from vlexport.pruning.cells import RULES, CellChoice
from vlexport.pruning.divprune import DivPruneSelector
from vlexport.pruning.methods import find_method
from vlexport.pruning.pixels import kept_cells
from vlexport.pruning.selectors import Pruned, eager, prune_part
from vlexport.runtime.encoder import EncoderOptions
from vlexport.runtime.opening import checkpoint_of
from vlexport.runtime.outputs import Encoded, save
from vlexport.runtime.pipeline import Pipeline, load
from vlexport.runtime.request import Generation, Request, RequestLimits
from vlexport.specs import MediaItem

Fresh = Callable[..., Pipeline]
CHOICES = ("static:0.5", "static-frames:0.7", "delta:0.6", "predicted", "0.9")
# Of float32 products over other numbers of rows.
SAME: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}


def still(seed: int, frames: int = 8):
    """Return a clip whose left half stands still."""
    clip = video(seed, frames=frames, height=112, width=112)
    clip.frames[:, :, :56] = clip.frames[:1, :, :56]
    return clip


def part_of(pipeline: Pipeline, item: MediaItem, text: str) -> MediaItem:
    """Return the cells that stay of an item, taken here."""
    packing: Any = pipeline.session.packing
    cells = kept_cells(CellChoice.of(text), packing.cells_of(item))
    rows = cells[:, None] * packing.unit + torch.arange(packing.unit)
    return replace(item, patches=item.patches[rows.flatten()], cells=cells)


def test_cells_are_squares_of_pixels_colour_by_colour(opened):
    frames = video(13, frames=6, height=112, width=168).frames
    cells = opened.session.packing.cells_of(opened.preprocess(replace(video(13), frames=frames)))
    assert cells.shape[:4] == (3, 4, 6, 3)
    for t, h, w in ((0, 0, 0), (1, 2, 5), (2, 3, 1)):
        square = frames[2 * t : 2 * t + 2, 28 * h : 28 * h + 28, 28 * w : 28 * w + 28]
        assert torch.equal(cells[t, h, w].sort().values, square.flatten(0, 2).T.sort().values)


@pytest.mark.parametrize("text", CHOICES)
def test_rows_are_those_of_the_chosen_cells_by_the_class_of_transformers(opened, text):
    clip = still(1)
    item = opened.preprocess(clip)
    encoded = opened.encode(clip, prune_before=text)
    expected = kept_cells(CellChoice.of(text), opened.session.packing.cells_of(item))
    assert encoded.kept.tolist() == expected.tolist()
    assert encoded.mask.nonzero()[:, 0].tolist() == expected.tolist()
    assert 0 < len(encoded.embeds) == len(expected) < len(encoded.mask)
    reference = opened.recipe.reference(checkpoint_of(opened.bundle)).run([part_of(opened, item, text)])
    torch.testing.assert_close(encoded.embeds, reference["embeds"], **SAME)


E2E = {"qwen2_vl": "e2e_qwen2_vl", "qwen2_5_vl": "e2e", "qwen3_vl": "e2e_qwen3_vl"}


@pytest.mark.seconds
@pytest.mark.parametrize("family", E2E)
def test_an_answer_is_that_of_transformers_on_the_kept_rows(family, shared):
    from transformers import AutoModelForImageTextToText

    checkpoint = Checkpoint.open(FOLDER / E2E[family] / "checkpoint")
    bundle = build(checkpoint, "eager", output_dir=shared / "engines")
    text, clip = "static:0.5", still(14)
    request = Request(raw_prompt=prompt(VIDEO, "What?"), videos=[clip], prune_before=text)
    with load(bundle, checkpoint=checkpoint) as pipeline:
        answer = pipeline.generate(replace(request, generation=Generation(max_new_tokens=1)))
        whole = torch.tensor(pipeline.generate(replace(request, prune_before=None)).prompt_token_ids)
        encoded: Any = pipeline.encode(videos=[clip], prune_before=text)[0]
        item = pipeline.preprocess(clip)
        (after,) = pipeline.encode(videos=[clip], prune=0.5, method="static")
        (all_rows,) = pipeline.encode(videos=[clip])
        part, language = part_of(pipeline, item, text), pipeline.language
    assert language is not None
    slot = language.tokenizer.id_of("<|video_pad|>")
    for name, own in after.layers.items():
        assert torch.equal(own, all_rows.layers[name][after.kept])
    rows = pipeline.recipe.reference(checkpoint).run([part])
    assert rows.keys() == {"embeds", *encoded.layers}
    for name, ours in {"embeds": encoded.embeds, **encoded.layers}.items():
        torch.testing.assert_close(ours, rows[name], **SAME)
    model: Any = AutoModelForImageTextToText.from_pretrained(checkpoint.path, dtype=torch.float32)
    stays = torch.ones_like(whole, dtype=torch.bool)
    stays[whole == slot] = encoded.mask
    ids = whole[stays]
    assert list(answer.prompt_token_ids) == ids.tolist()
    # A square clip: behind one, text goes on alike by its width, as here, and by its larger side.
    grid, seconds = torch.tensor([item.grid]), torch.tensor([item.seconds_per_grid])
    types = (whole == slot).int()[None] * 2
    found = model.model.get_rope_index(whole[None], types, video_grid_thw=grid, second_per_grid_ts=seconds)
    assert torch.equal(answer.positions, found[0][:, 0, stays])
    with torch.inference_mode():
        embeds = model.get_input_embeddings()(ids).masked_scatter((ids == slot)[:, None], rows.pop("embeds"))
        levels = {"visual_pos_masks": (ids == slot)[None], "deepstack_visual_embeds": [*rows.values()]}
        state = model.model.language_model(
            inputs_embeds=embeds[None], position_ids=found[0][:, :, stays], **(levels if rows else {})
        )
        assert answer.token_ids == (int(model.lm_head(state.last_hidden_state[0, -1]).argmax()),)


def test_contrast_is_for_images_and_the_others_leave_them_whole(opened):
    page = image(2, height=112, width=168)
    page.frames[:, 28:84] = 255
    printed = opened.encode(page, prune_before="contrast:0.5")
    rows, columns = printed.grid[1] // 2, printed.grid[2] // 2
    assert len(printed.embeds) == rows * columns // 2
    assert printed.mask.reshape(rows, columns).sum(1).tolist()[1:-1] == [0] * (rows - 2)
    for text in RULES:
        kinds = RULES[text].kinds
        choice = f"{text}:0.5" if RULES[text].is_rated else text
        assert ("image" in kinds) == (opened.encode(page, prune_before=choice).kept is not None)
        assert ("video" in kinds) == (opened.encode(still(3), prune_before=choice).kept is not None)


@pytest.mark.seconds
@pytest.mark.parametrize("text", ["static:0.5", "static:0.97", "delta:0.6", "predicted"])
def test_a_long_video_is_cut_between_frames_whatever_cells_are_left(fresh: Fresh, text):
    clip = still(4, frames=16)
    whole = fresh().encode(clip, prune_before=text)
    for most in (7, 16, 40):
        pipeline = fresh(encoder=EncoderOptions(max_tokens=most))
        part, first = part_of(pipeline, pipeline.preprocess(clip), text), 0
        pieces: Any = pipeline.session.cut(part, most)
        cells: list[torch.Tensor] = []
        for piece in pieces:
            cells.append(piece.cells + first)
            first += math.prod(piece.grid) // 4
        assert torch.equal(torch.cat(cells), whole.kept)
        cut = pipeline.encode(clip, prune_before=text)
        assert pipeline.session.num_calls > (len(whole.embeds) > 4 * most)
        assert torch.equal(cut.kept, whole.kept)
        assert torch.equal(cut.mask, whole.mask)
        torch.testing.assert_close(cut.embeds, whole.embeds, **SAME)


def test_what_is_cached_is_of_one_choice(fresh: Fresh):
    pipeline, clip = fresh(), still(5)
    counts = [len(pipeline.encode(clip, prune_before=text).embeds) for text in (None, *CHOICES)]
    assert (counts[0], counts[1], counts[-1]) == (64, 32, 6)
    assert len(set(counts)) > 3
    calls = pipeline.session.num_calls
    again = [len(pipeline.encode(clip, prune_before=text).embeds) for text in (None, *CHOICES)]
    assert (again, pipeline.session.num_calls) == (counts, calls)
    close = [len(pipeline.encode(clip, prune_before=f"static:{rate}").embeds) for rate in (0.5, 0.5000001)]
    assert close == [32, 31]
    picture = image(6)
    pipeline.encode(picture)
    calls = pipeline.session.num_calls
    pipeline.encode(picture, prune_before="static:0.5")
    assert pipeline.session.num_calls == calls


def chosen_of(item: Encoded) -> tuple[torch.Tensor, torch.Tensor]:
    assert item.kept is not None
    assert item.mask is not None
    return item.kept, item.mask


def test_what_is_given_out_may_be_written_to_and_saved(fresh: Fresh, tmp_path):
    pipeline, picture, before = fresh(), image(7, 112, 112), "contrast:0.5"
    first, second = pipeline.encode([picture, picture], prune_before=before)
    save({"image.0": first, "image.1": second}, tmp_path / "both.safetensors")
    chosen = [at.clone() for at in chosen_of(first)]
    for item in (first, second, None, None):
        kept, mask = chosen_of(item or pipeline.encode(picture, prune_before=before))
        assert torch.equal(kept, chosen[0])
        assert torch.equal(mask, chosen[1])
        kept.zero_()
        mask.fill_(True)


def asked(media: Sequence[Any], text: str | None) -> Request:
    return Request(
        raw_prompt=prompt(IMAGE, VIDEO, "What?"),
        images=[media[0]],
        videos=[media[1]],
        prune_before=text,
        generation=Generation(max_new_tokens=8),
    )


@pytest.mark.parametrize("text", ["static:0.5", "predicted"])
def test_an_answer_has_the_slots_positions_and_tokens_of_embeddings_that_came_pruned(fresh: Fresh, text):
    pipeline, media = fresh(), (image(7, height=56, width=112), still(8))
    answer = pipeline.generate(asked(media, text))
    encoded = pipeline.encode(list(media), prune_before=text)
    expected = pipeline.generate(asked(encoded, None))
    assert answer.prompt_token_ids == expected.prompt_token_ids
    assert torch.equal(answer.positions, expected.positions)
    assert answer.token_ids == expected.token_ids
    assert answer.kept == tuple(len(one.embeds) for one in encoded)
    whole = pipeline.generate(asked(media, None))
    dropped = sum(item.num_tokens - item.num_kept for item in answer.media)
    assert dropped > 0
    assert len(whole.prompt_token_ids) - len(answer.prompt_token_ids) == dropped


def test_a_dropped_cell_of_an_image_takes_its_position_with_it_where_time_is_text():
    rule = PositionRule(kind="time_as_text", markers=FrameMarkers(vision_start=1, vision_end=2, video=3))
    grid, kept = (1, 8, 12), torch.tensor([0, 5, 6, 13, 22])
    whole = PlacedMedia(modality="image", offset=2, length=24, grid=grid)
    part = PlacedMedia(modality="image", offset=2, length=len(kept), grid=grid)
    table = frame_positions([9] * 30, [whole], [None], rule).table_RN
    columns = [0, 1, *(2 + kept).tolist(), *range(26, 30)]
    assert torch.equal(frame_positions([9] * 11, [part], [kept], rule).table_RN, table[:, columns])


BAD = {
    "static": "a rate, or one of static:RATE",
    "divprune:0.5": "Other methods drop after the tower: prune with method",
    "static:": "expected",
    "static:nan": "expected",
    "static:1.0": "expected 0 <= rate < 1",
    "predicted:0.5": "expected",
    "sharp:0.5": "sharp:0.5",
    "1.5": "expected 0 <= rate < 1",
}


@pytest.mark.parametrize("text", BAD)
def test_a_choice_that_is_none_is_refused_before_anything_is_read(opened, text):
    with pytest.raises(InputError, match=BAD[text]):
        opened.encode("no such file", prune_before=text)
    with pytest.raises(InputError, match=BAD[text]):
        Request(prompt="What?", prune_before=text)


def test_embeddings_are_refused_where_tokens_are_chosen_by_pixels(opened, fresh: Fresh):
    encoded = opened.encode(still(9))
    with pytest.raises(InputError, match="chosen by pixels"):
        fresh().generate(asked([image(7), encoded], "static:0.5"))


METHODS = ("static", "static-frames", "evs", "evs-snap", "vidcom2", "divprune")


@pytest.mark.parametrize("method", METHODS)
def test_a_method_of_a_request_keeps_what_it_keeps_of_whole_rows(fresh: Fresh, method):
    pipeline, clip = fresh(), still(10)
    whole = pipeline.encode(clip)
    pruned = pipeline.encode(clip, prune=0.6, method=method)
    assert torch.equal(pruned.embeds, whole.embeds[pruned.kept])
    if method in RULES:
        packing: Any = pipeline.session.packing
        cells = packing.cells_of(pipeline.preprocess(clip))
        expected = kept_cells(CellChoice(name=method, rate=0.6), cells)
    else:
        expected = evs.prune(whole.embeds, whole.grid, 2, 0.6, eager(find_method(method))).kept
    assert torch.equal(pruned.kept, expected)
    again = pipeline.encode(clip, prune=0.6, method=method)
    assert torch.equal(again.kept, expected)
    request = replace(asked((image(7), clip), None), prune=0.6, method=method)
    answer = pipeline.generate(request)
    picture = pipeline.encode(image(7), prune=0.6, method=method)
    assert answer.kept == (len(picture.embeds), len(expected))
    assert answer.token_ids == pipeline.generate(asked((picture, pruned), None)).token_ids


@pytest.mark.seconds
@pytest.mark.parametrize("before", ["predicted", "static:0.3"])
@pytest.mark.parametrize("method", ["static", "evs", "evs-snap", "vidcom2", "divprune"])
def test_what_the_tower_had_is_pruned_further_by_a_rate_of_all(fresh: Fresh, before, method):
    pipeline, clip = fresh(), still(11)
    part = pipeline.encode(clip, prune_before=before)
    both = pipeline.encode(clip, prune_before=before, prune=0.8, method=method)
    count = find_method(method).retained_count(16, 4, 0.8) if method not in RULES else int(64 * (1 - 0.8))
    assert len(both.kept) == count
    assert set(both.kept.tolist()) < set(part.kept.tolist())
    place = torch.searchsorted(part.kept, both.kept)
    torch.testing.assert_close(both.embeds, part.embeds[place], **SAME)
    gentle = pipeline.encode(clip, prune_before=before, prune=0.01, method=method)
    assert torch.equal(gentle.kept, part.kept)
    request = replace(asked((image(7), clip), before), prune=0.8, method=method)
    answer = pipeline.generate(request)
    assert answer.kept[1] == count
    # What is left after both is what a prompt has to have room for.
    limits = RequestLimits(max_prompt_tokens=len(answer.prompt_token_ids))
    assert pipeline.generate(replace(request, limits=limits)).token_ids == answer.token_ids
    picture = pipeline.encode(image(7), prune_before=before, prune=0.8, method=method)
    assert answer.token_ids == pipeline.generate(asked((picture, both), None)).token_ids


def test_relevance_weighs_rows_by_the_words_of_the_question(fresh: Fresh):
    pipeline, clip = fresh(), still(10)
    whole = pipeline.encode(clip)
    pieces, language = set(), pipeline.language
    assert language is not None
    for words in ("red", "What is to the left?", ""):
        request = Request(prompt=words, videos=[clip], prune=0.8, method="relevance")
        answer = pipeline.generate(request)
        ids = language.tokenizer.encode(words, add_special=False).ids
        question = language.decoder.embed(torch.tensor(ids, dtype=torch.int64)).double().mean(0).float()
        selector = DivPruneSelector(asks=True, question=question)
        kept = evs.prune(whole.embeds, whole.grid, 2, 0.8, eager(selector)).kept
        mask = answer.media[0].mask
        assert mask is not None
        assert mask.nonzero()[:, 0].tolist() == kept.tolist()
        pieces.add(tuple(kept.tolist()))
    plain = pipeline.encode(clip, prune=0.8, method="divprune").kept
    assert kept.tolist() == plain.tolist()
    assert len(pieces) > 1
    with pytest.raises(InputError, match="without a question"):
        pipeline.encode(clip, prune=0.8, method="relevance")


def test_a_part_is_pruned_as_the_whole_where_all_of_it_is_there(opened):
    whole = opened.encode(still(12))
    all_cells = Pruned(embeds=whole.embeds, kept=torch.arange(len(whole.embeds)))
    for method in ("evs", "evs-snap", "vidcom2"):
        selector = find_method(method)
        expected = evs.prune(whole.embeds, whole.grid, 2, 0.7, eager(selector))
        part = prune_part(selector, all_cells, whole.grid, 2, 0.7)
        assert torch.equal(part.kept, expected.kept)
        assert torch.equal(part.embeds, expected.embeds)


def test_a_part_is_pruned_on_the_device_of_its_cells():
    part = Pruned(
        embeds=torch.empty(24, 8, device="meta"), kept=torch.empty(24, dtype=torch.int64, device="meta")
    )
    pruned = prune_part(find_method("evs"), part, (4, 8, 8), 2, 0.8)
    assert (len(pruned.kept), pruned.kept.device.type) == (16, "meta")


@pytest.mark.parametrize("method", ["evs", "evs-snap", "vidcom2"])
def test_a_cell_that_is_not_there_counts_as_the_last_one_of_its_place_and_is_not_kept(method):
    random = torch.Generator().manual_seed(0)
    for rate in (0.3, 0.5, 0.8):
        embeds = torch.randn(24, 8, generator=random).round()
        cells = (torch.rand(64, generator=random) < 0.5).nonzero()[:, 0][:24]
        known = dict(zip(cells.tolist(), embeds, strict=False))
        rows = [torch.zeros(8)] * 16
        for at in range(64):
            rows.append(known.get(at, rows[-16]))
        count = min(len(known), find_method(method).retained_count(16, 4, rate))
        whole, share = torch.stack(rows[16:]).view(4, 16, 8), torch.tensor(1 - rate)
        scores = find_method(method).scores(whole, share, count).flatten()
        expected = sorted(sorted(known, key=lambda at: (-float(scores[at]), at))[:count])
        part = prune_part(find_method(method), Pruned(embeds=embeds, kept=cells), (4, 8, 8), 2, rate)
        assert part.kept.tolist() == expected
        assert torch.equal(part.embeds, torch.stack([known[at] for at in expected]))


PAIRS: dict[str, dict[str, Any]] = {
    "without prune": {"method": "static"},
    "one of evs": {"prune": 0.5, "method": "sharp"},
    "'predicted' is for prune_before": {"prune": 0.5, "method": "predicted"},
    "counts whole frames": {"prune": 0.5, "method": "delta", "prune_before": "predicted"},
}


RULES_IN_WORDS: dict[tuple[Any, ...], tuple[str, str]] = {
    (None, None, None): ("", ""),
    (0.7, None, None): ("", "evs at rate 0.7"),
    (0.7, "divprune", None): ("divprune at rate 0.7", "divprune at rate 0.7"),
    (0.7, "relevance", None): ("relevance at rate 0.7", "relevance at rate 0.7"),
    (0.7, "contrast", None): ("contrast at rate 0.7", ""),
    (None, None, "predicted"): ("predicted before the tower", "predicted before the tower"),
    (0.8, None, 0.5): ("", "static at rate 0.5 before the tower, then evs at rate 0.8"),
}


@pytest.mark.parametrize("given", RULES_IN_WORDS, ids=str)
def test_the_rule_of_a_request_is_named_for_each_kind_of_media(opened, given):
    pruning = opened.pruner.plan(*given, has_question=True)
    named = tuple(opened.pruner.rule_of(pruning, kind) for kind in ("image", "video"))
    assert named == RULES_IN_WORDS[given]


@pytest.mark.parametrize("words", PAIRS)
def test_options_that_do_not_go_together_are_refused(opened, words):
    with pytest.raises((InputError, UnsupportedError), match=words):
        opened.encode(still(9), **PAIRS[words])


@pytest.mark.seconds
def test_rules_that_a_bundle_has_packages_of_run_compiled_and_choose_the_same(tmp_path, fresh: Fresh):
    bundle = build(CHECKPOINT, "eager", selector="evs,predicted,static", output_dir=tmp_path)
    assert bundle.manifest.graphs.cells == ("predicted", "static")
    assert "--selector evs,predicted,static" in bundle.rebuild_command()
    plain = fresh()
    with load(bundle) as pipeline:
        for frames in (1, 2, 3, 16):
            clip = still(frames, frames=frames)
            for text in ("static:0.6", "predicted", "delta:0.7"):
                compiled, eager = (each.encode(clip, prune_before=text) for each in (pipeline, plain))
                assert (compiled.kept is None) == (eager.kept is None)
                assert compiled.kept is None or torch.equal(compiled.kept, eager.kept)
                missing = f"eager: the bundle has no package of '{text.partition(':')[0]}'"
                assert (compiled.form or "").startswith(missing if text == "delta:0.7" else "compiled")


@pytest.mark.seconds
@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule.is_packaged])
def test_a_compiled_rule_keeps_the_cells_of_the_eager_one_at_every_size(name, tmp_path):
    identity = write_graphs(planned_graphs("evs", "cpu", (name,)), tmp_path, "float32")
    assert identity.target is not None
    graphs = open_graphs(identity, Folder(tmp_path), "float32")
    random = torch.Generator().manual_seed(0)
    for size in ((1, 1, 1), (1, 4, 5), (1, 1, 7), (2, 1, 1), (3, 6, 1), (5, 7, 9)):
        for levels in (2, 256):
            cells = torch.randint(0, levels, (*size, 3, 24), generator=random).to(torch.uint8)
            for rate in (0.2, 0.8) if RULES[name].is_rated else (None,):
                choice = CellChoice(name=name, rate=rate)
                kept, form = graphs.kept_cells(choice, cells)
                assert form == "compiled"
                assert kept.tolist() == kept_cells(choice, cells).tolist(), (size, levels, rate)


def test_a_selector_of_two_methods_or_of_rules_that_a_family_cannot_use_is_refused(tmp_path):
    with pytest.raises(RequestError, match="evs and vidcom2 given"):
        spec_of(Checkpoint.open(CHECKPOINT), backend="eager", selector="evs,vidcom2", output_dir=tmp_path)
    with pytest.raises(UnsupportedError, match="no pruning method 'sharp'"):
        spec_of(Checkpoint.open(CHECKPOINT), backend="eager", selector="static,sharp", output_dir=tmp_path)
