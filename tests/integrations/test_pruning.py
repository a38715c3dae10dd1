"""Rows that carry their places, and tables of pruned prompts, against recorded calls of vLLM."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from tests.golden_data import cases
from vlexport.integrations.vllm.pruning import (
    COLUMNS,
    MediaRows,
    advance,
    place_rows,
    settled_positions,
    with_places,
)
from vlexport.positions.rules import FrameMarkers, PlacedMedia, PositionRule
from vlexport.pruning.evs import EVS, EvsSelector
from vlexport.pruning.selectors import Select, Selection

IMAGE, VIDEO, START, END = 5, 6, 7, 8
TOKENS = {"image": IMAGE, "video": VIDEO}
TIMED = PositionRule(kind="time_scaled", tokens_per_second=2)
WRITTEN = PositionRule(
    kind="time_as_text", markers=FrameMarkers(vision_start=START, vision_end=END, video=VIDEO)
)


def media_rows(rule: PositionRule, rate: float) -> MediaRows:
    return MediaRows(
        rule=rule,
        selection=EVS,
        rate=rate,
        image=IMAGE,
        video=VIDEO,
        embed=lambda ids_L: ids_L[:, None].float().repeat(1, 2),
    )


def channels(rows: torch.Tensor, token: int = VIDEO) -> torch.Tensor:
    """Time, row and column of rows, from a prompt that has nothing else."""
    table, _ = settled_positions(len(rows), [(0, len(rows), 1)])
    return place_rows([token] * len(rows), [rows], table, 0)[1]


def test_recorded_prompts_end_at_the_plain_rule_whatever_the_chunks() -> None:
    """172 prompts of both families, also those that vLLM places wrongly or stumbles over."""
    count = 0
    for case in cases("recompute"):
        ids, expected = case.inputs["input_ids"], case.inputs["reference"]
        items, packed = [], []
        for index, (kind, offset, length) in enumerate(case.meta["media"]):
            block = case.inputs[f"block{index}"]
            step = int(block[3, 0]) if len(block) == 4 else 1 + int(block[:3].max())
            items.append((offset, length, step))
            lead = ids[offset : offset + length].tolist().index(TOKENS[kind])
            rows = torch.full((length, 3), index, dtype=torch.float16)
            packed.append(with_places(rows, block, TOKENS[kind], lead))
        table, shift = settled_positions(len(ids), items)
        text = torch.ones(len(ids), dtype=torch.bool)
        for offset, length, _ in items:
            text[offset : offset + length] = False
        assert torch.equal(table[:, text], expected[:, text]), case.meta
        for start, stop in pairwise(case.meta["bounds"]):
            at = [
                (max(start - offset, 0), min(stop - offset, length), index)
                for index, (offset, length, _) in enumerate(items)
            ]
            parts = [packed[index][low:high] for low, high, index in at if low < high]
            clean, table, shift = place_rows(ids, parts, table, start)
            assert [each[0].tolist() for each in clean] == [
                [index] * 3 for low, high, index in at if low < high
            ]
            assert torch.equal(table[:, :stop], expected[:, :stop]), (case.meta, start)
        assert torch.equal(table, expected), case.meta
        assert shift == int(expected.max()) + 1 - len(ids), case.meta
        count += 1
    assert count == 172


def test_recorded_items_are_pruned_and_placed_as_recorded() -> None:
    """Times are those of whole seconds; in half precision the recorded ones are rounded, ours are not."""
    for case in cases("evs_postprocess"):
        meta = case.meta
        rule = PositionRule(
            kind="time_scaled", merge=meta["merge"], tokens_per_second=meta.get("tokens_per_second", 1)
        )
        for index, grid in enumerate(map(tuple, meta["grids"])):
            embeds, recorded = case.inputs[f"embeds{index}"], case.outputs[f"out{index}"]
            made = media_rows(rule, meta.get("q") or 0.0)
            if meta["kind"] == "image":
                ours = made.of_image(embeds, grid)
            else:
                ours = made.of_video(embeds, grid, seconds=meta["second_per_grid"][index], stamps=[])
            assert torch.equal(ours[:, :-COLUMNS], recorded[:, :-4]), meta
            assert torch.equal(
                channels(ours, TOKENS[meta["kind"]]).to(recorded.dtype), recorded[:, -4:-1].T
            ), meta


class Recorded(EvsSelector):
    """Keeps as many tokens as were kept."""

    def retained_count(self, *_: object) -> int:
        return 1


def recorded_rows(kept_K: torch.Tensor) -> Select:
    return lambda embeds_TND, _: (embeds_TND.flatten(0, 1)[kept_K], kept_K)


def test_written_times_stand_where_they_are_recorded() -> None:
    for case in cases("q3_expanded"):
        mask, grid = case.inputs["mask"], tuple(case.meta["thw"])
        kept = mask.nonzero().flatten()
        # Main columns and one level; the dropped tokens repeat the frame before.
        rows = torch.zeros(len(mask), 4)
        rows[kept] = torch.arange(1.0, 1 + len(kept))[:, None]
        made = replace(
            media_rows(WRITTEN, 0.5), selection=Selection(selector=Recorded(), run=recorded_rows(kept))
        )
        ours = made.of_video(rows, grid, seconds=None, stamps=case.meta["timestamp_ids"])
        ids, lumped = case.outputs["ids"], case.outputs["lumped_ids"].tolist()
        is_video = ids == VIDEO
        assert torch.equal(ours[is_video, :4], rows[kept])
        # Text has its own embeddings in the main columns, and no level.
        assert torch.equal(ours[~is_video, :2], made.embed(ids[~is_video]))
        assert not ours[~is_video, 2:4].any()
        item = PlacedMedia(modality="video", offset=3, length=len(ids), grid=grid)
        prompt = [100, 101, START, *lumped, 102]
        table, _ = made.table(prompt, [item])
        _, table, shift = place_rows(prompt, [ours], table, 0)
        assert torch.equal(table[:, 3:-1], case.outputs["channels"][:3] + 3), case.meta
        last = 3 + int(case.outputs["channels"][:3].max()) + 1
        assert table[:, -1].tolist() == [last] * 3
        assert shift == last + 1 - len(prompt)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_places_are_exact_in_every_dtype(dtype: torch.dtype) -> None:
    """bfloat16 holds whole numbers up to 256, float16 up to 2048."""
    wanted = torch.tensor([[0, 257, 2049, 65537, 2**24 - 1]] * 3)
    rows = with_places(torch.ones(5, 2, dtype=dtype), wanted, token=VIDEO)
    assert torch.equal(channels(rows), wanted)


def test_items_side_by_side_and_other_slots_in_the_text_do_not_move_each_other() -> None:
    """A slot that a user wrote comes after those of its kind, because vLLM fills them in order."""
    made = media_rows(TIMED, 0.0)
    first, second = made.of_image(torch.ones(6, 2), (1, 4, 6)), made.of_image(torch.ones(2, 2), (1, 4, 2))
    video = made.of_video(torch.ones(8, 2), (2, 4, 4), seconds=1.0, stamps=[])
    ids = [100, *[IMAGE] * 8, IMAGE, *[VIDEO] * 8, 100]
    media = [
        PlacedMedia(modality="image", offset=1, length=6, grid=(1, 4, 6)),
        PlacedMedia(modality="image", offset=7, length=2, grid=(1, 4, 2)),
        PlacedMedia(modality="video", offset=10, length=8, grid=(2, 4, 4)),
    ]
    table, _ = made.table(ids, media)
    _, table, shift = place_rows(torch.tensor(ids), [first, second, video], table, 0)
    assert table[1].tolist() == [0, 1, 1, 1, 2, 2, 2, 4, 5, 5, 6, 6, 7, 7, 6, 6, 7, 7, 8]
    assert table[0, 10:].tolist() == [6] * 4 + [8] * 4 + [8]
    assert shift == 9 - len(ids)


def test_steps_without_rows_leave_the_table_and_give_its_shift() -> None:
    table, shift = settled_positions(5, [(1, 2, 4)])
    assert table.tolist() == [[0, 1, 1, 5, 6]] * 3
    found = place_rows([1, 5, 5, 1, 1], [], table, 5)
    assert found[0] == []
    assert torch.equal(found[1], table)
    assert found[2] == shift == 2


def test_text_after_an_item_does_not_depend_on_what_is_kept() -> None:
    for kind, grid, rule, wanted in (
        ("image", (1, 8, 6), TIMED, 3),
        ("video", (9, 8, 6), TIMED, 3),
        ("image", (1, 8, 6), WRITTEN, 4),
    ):
        item = PlacedMedia(modality=kind, offset=0, length=12, grid=grid)  # type: ignore[arg-type]
        assert advance(item, [TOKENS[kind]] * 12, rule) == wanted
    # Two timestamps of one token, both markers twice, and two frames of 4 x 3, of which 13 tokens are left.
    ids = [200, START, *[VIDEO] * 13, END, 201, START, END]
    item = PlacedMedia(modality="video", offset=0, length=len(ids), grid=(2, 8, 6))
    assert advance(item, ids, WRITTEN) == 6 + 2 * 4
