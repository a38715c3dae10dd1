"""Which tokens stay, and where everything goes: embeddings into the prompt's room, positions for every token.

N prompt tokens, D width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vlexport.errors import InputError, UnsupportedError
from vlexport.positions.mrope import initial_positions, pruned_positions
from vlexport.positions.rules import (
    PlacedMedia,
    PositionOptions,
    PositionRule,
    PromptPositions,
    check_rate,
    merged_sides,
)
from vlexport.positions.splice import check_rows, merge_visual, visual_slots
from vlexport.pruning import evs
from vlexport.recipe import Recipe
from vlexport.runtime.decoder import Decoder
from vlexport.runtime.encoding import Encoded
from vlexport.runtime.stages import Asked, Placed, Seen
from vlexport.specs import MediaItem
from vlexport.vision.static_shapes import to_device

UNTIMED = (
    "pruning a video needs the time between its frames, for the positions of what is kept. "
    "Pass the frame rate with --fps (fps=)."
)


class Pruner:
    """Drops tokens of videos by the recipe's rule; images stay whole."""

    def __init__(self, recipe: Recipe[Any], merge: int) -> None:
        self.recipe = recipe
        self.merge = merge

    def check(self, rate: float | None) -> float:
        """The rate, 0 for none; refused where the family has nothing to prune."""
        if rate is None:
            return 0.0
        if check_rate(rate) and self.recipe.pruning_rule is None:
            raise UnsupportedError(
                f"recipe '{self.recipe.name}' has no spatial video tokens to prune. Leave out --prune."
            )
        return rate

    def check_timed(self, item: MediaItem) -> None:
        """Refuse videos whose kept tokens could not be placed."""
        if item.kind == "video" and item.seconds_per_grid is None:
            raise InputError(UNTIMED)

    def num_kept(self, item: MediaItem, total: int, rate: float) -> int:
        """How many of an item's tokens will be left, before anything is encoded."""
        if item.kind != "video" or not rate:
            return total
        rows, columns = merged_sides(item.grid, self.merge)
        return evs.retained_count(rows * columns, item.grid[0], rate)

    def frame_rows(self, item: MediaItem, total: int, num_rows: int, kept: Tensor | None) -> tuple[int, ...]:
        """Rows left of each frame; before they are chosen, as if the first frames stayed whole."""
        if self.recipe.pruning_rule is None:
            return ()
        frames, each = item.grid[0], total // item.grid[0]
        if kept is not None:
            return tuple(torch.bincount(kept.cpu() // each, minlength=frames).tolist())
        return tuple(min(each, max(0, num_rows - each * frame)) for frame in range(frames))

    def prune(self, item: Encoded, rate: float) -> Encoded:
        """Return the item with what is kept of all its outputs; what came pruned stays as it is.

        Rows are compared over all outputs, side by side.
        """
        if item.kind != "video" or not rate or item.kept is not None:
            return item
        outputs = (item.embeds, *item.layers.values())
        whole = torch.cat(outputs, dim=-1) if item.layers else item.embeds
        pruned = evs.prune(whole, item.grid, self.merge, rate)
        embeds, *layers = pruned.embeds.split([each.shape[-1] for each in outputs], dim=-1)
        mask = torch.zeros(len(item.embeds), dtype=torch.bool, device=pruned.kept.device)
        mask.index_fill_(0, pruned.kept, True)
        named = dict(zip(item.layers, layers, strict=True))
        return replace(item, embeds=embeds, layers=named, kept=pruned.kept, mask=mask)


class Placer:
    """Positions and embeddings of whole prompts for one decoder."""

    def __init__(self, decoder: Decoder, rule: PositionRule, *, counts_frames: bool = False) -> None:
        self.decoder = decoder
        self.rule = rule
        self.counts_frames = counts_frames

    def place(self, seen: Seen) -> Placed:
        """The prompt's embeddings with the media in their room, and the position of each token."""
        with seen.asked.watch.timing("positions"):
            positions = self._positions(seen.asked, seen.encoded)
            prompt = seen.asked.prompt
            check_rows(prompt.placeholders, [len(item.embeds) for item in seen.encoded])
            embeds_ND = self.decoder.embed(torch.tensor(prompt.ids, dtype=torch.int64))
            if seen.encoded:
                device = embeds_ND.device
                visual_VD = torch.cat(
                    [to_device(item.embeds, device).to(embeds_ND.dtype) for item in seen.encoded]
                )
                slots_V = to_device(visual_slots(prompt.placeholders, len(prompt.ids)), device)
                embeds_ND = merge_visual(embeds_ND, visual_VD, slots_V)
            return Placed(seen=seen, embeds=embeds_ND, positions=positions)

    def _positions(self, asked: Asked, encoded: tuple[Encoded, ...]) -> PromptPositions:
        ids = asked.prompt.ids
        media = [
            PlacedMedia(
                modality=item.kind,  # type: ignore[arg-type]
                offset=room.offset,
                length=room.length,
                grid=item.grid,
                seconds_per_grid=1.0 if self.counts_frames else item.seconds_per_grid,
            )
            for room, item in zip(asked.prompt.placeholders, encoded, strict=True)
        ]
        if asked.is_pruned and self.rule.kind == "time_scaled":
            return pruned_positions(len(ids), media, [item.kept for item in encoded], self.rule)
        return initial_positions(ids, media, self.rule, pruned=asked.is_pruned)


def position_rule(recipe: Recipe[Any], merge: int, speed: float, options: PositionOptions) -> PositionRule:
    """The recipe's rule with the numbers of a checkpoint."""
    kind: Any = recipe.position_rule
    return PositionRule(kind=kind, merge=merge, tokens_per_second=speed, options=options)
