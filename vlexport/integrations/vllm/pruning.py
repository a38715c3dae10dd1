"""Pruned videos inside vLLM: rows that carry where they belong, and the positions of their prompts.

N prompt columns, R rows of a tower, L rows of an item, K of these in one step, D width.

vLLM takes the table of a prompt before any of its media is encoded. In each step it hands over the rows that
the step brings and the number of tokens computed before, but neither columns nor items. So the table is final
for text at once, which no kept token moves, and every column of an item has the item's start; and a row
carries, in further columns, what its position follows from. An item's first row is at its start, so its
first column keeps that, however often a step is done again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vlexport.positions.expanded import expanded_video
from vlexport.positions.media import pruned_channels
from vlexport.positions.rules import Grid, PlacedMedia, PositionRule, delta_of, merged_sides
from vlexport.pruning.selectors import Selection, prune_by

# Values are digits to the base 256, most significant first: whole numbers that every dtype holds.
SHIFTS = (16, 8, 0)
# Time, row and column from the item's start; the row's number, the item's rows, the columns before its first
# slot, and the id of its slots.
VALUES = 7
COLUMNS = VALUES * len(SHIFTS)


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaRows:
    """Rows of images and pruned videos as a model hands them to vLLM.

    image, video  ids of their slots in a prompt
    embed         embeddings of token ids, for the text inside a video's placeholder
    """

    rule: PositionRule
    selection: Selection
    rate: float
    image: int
    video: int
    embed: Callable[[Tensor], Tensor]

    def of_image(self, rows_LD: Tensor, grid: Grid) -> Tensor:
        item = PlacedMedia(modality="image", offset=0, length=len(rows_LD), grid=grid)
        channels_4L = pruned_channels(item, self.rule, torch.arange(len(rows_LD), device=rows_LD.device))
        return with_places(rows_LD, channels_4L, self.image)

    def of_video(
        self, rows_RD: Tensor, grid: Grid, *, seconds: float | None, stamps: Sequence[Sequence[int]]
    ) -> Tensor:
        """Return what is kept, where time is written out between the text of the placeholder.

        seconds  between two frames of the grid
        stamps   token ids of each frame's timestamp, where time is written out
        """
        pruned = prune_by(self.selection, rows_RD, grid, self.rule.merge, self.rate)
        if self.rule.kind != "time_as_text":
            item = PlacedMedia(
                modality="video", offset=0, length=len(pruned.kept), grid=grid, seconds_per_grid=seconds
            )
            return with_places(pruned.embeds, pruned_channels(item, self.rule, pruned.kept), self.video)
        layout = expanded_video(pruned.kept, grid, stamps, self.rule)
        text_LD = self.embed(layout.ids_L).to(rows_RD)
        # Levels of text are zero.
        text_LD = F.pad(text_LD, (0, rows_RD.shape[1] - text_LD.shape[1]))
        rows_LD = text_LD.index_copy(0, layout.video_columns_K, pruned.embeds)
        # In the prompt all slots of a video follow the first timestamp and vision start.
        return with_places(rows_LD, layout.channels_5L, self.video, lead=len(stamps[0]) + 1)

    def table(self, ids: Sequence[int], media: Sequence[PlacedMedia]) -> tuple[Tensor, int]:
        items = [(item.offset, item.length, advance(item, ids, self.rule)) for item in media]
        return settled_positions(len(ids), items)


def advance(item: PlacedMedia, ids: Sequence[int], rule: PositionRule) -> int:
    """Return how far text goes on after the start of an item, whatever is kept of it."""
    rows, columns = merged_sides(item.grid, rule.merge)
    if rule.kind == "time_scaled":
        return columns
    if item.modality == "image" or rule.markers is None:
        return max(rows, columns)
    text = sum(token != rule.markers.video for token in ids[item.offset : item.end])
    return text + item.grid[0] * max(rows, columns)


def settled_positions(num_columns: int, items: Sequence[tuple[int, int, int]]) -> tuple[Tensor, int]:
    """Return table (3, N) and shift, final for text; items are offset, length and advance."""
    steps_N = torch.ones(num_columns, dtype=torch.int64)
    for offset, length, step in items:
        steps_N[offset : offset + length] = 0
        steps_N[offset + length - 1] = step
    table_3N = (steps_N.cumsum(0) - steps_N).repeat(3, 1)
    return table_3N, int(delta_of(table_3N))


def with_places(rows_LD: Tensor, channels_CL: Tensor, token: int, lead: int = 0) -> Tensor:
    """Return the rows of a whole item, each with its place, of which `channels_CL` begins with three."""
    length, device = len(rows_LD), rows_LD.device
    about = torch.tensor([[length], [lead], [token]], device=device).expand(3, length)
    values_7L = torch.cat([channels_CL[:3], torch.arange(length, device=device)[None], about])
    digits_73L = torch.stack([values_7L >> shift & 255 for shift in SHIFTS], dim=1)
    return torch.cat([rows_LD, digits_73L.flatten(0, 1).T.to(rows_LD.dtype)], dim=1)


def place_rows(
    ids: Sequence[int] | Tensor, packed: Sequence[Tensor], table_3N: Tensor, computed: int
) -> tuple[list[Tensor], Tensor, int]:
    """Return the rows of a step without their places, the table with these, and its shift.

    packed    of each item that the step has rows of, in prompt order
    computed  tokens of the prompt before the step
    """
    table_3N, rows, free = table_3N.clone(), list[Tensor](), computed
    tokens = ids.tolist() if packed and isinstance(ids, Tensor) else ids
    for part in packed:
        digits_K73 = part[:, -COLUMNS:].to(table_3N.device, torch.int64).unflatten(1, (VALUES, -1))
        values_K7 = (digits_K73 << torch.tensor(SHIFTS, device=table_3N.device)).sum(-1)
        number, length, lead, token = values_K7[0, 3:].tolist()
        # Only the first item of a step may have begun before it; others begin where their slots say.
        start = free - number if number else tokens.index(token, free + lead) - lead
        first, stop = start + number, start + number + len(part)
        table_3N[:, first:stop] = table_3N[:, start : start + 1] + values_K7[:, :3].T
        rows.append(part[:, :-COLUMNS])
        free = start + length
    return rows, table_3N, int(delta_of(table_3N))
