"""Which tokens stay, and where everything goes: embeddings into the prompt's room, positions for every token.

N prompt tokens, D width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from vlexport.compiled import evs
from vlexport.compiled.mrope import initial_positions, pruned_positions
from vlexport.compiled.positions import (
    PlacedMedia,
    PositionOptions,
    PositionRule,
    PromptPositions,
    check_rate,
    merged_sides,
)
from vlexport.compiled.splice import check_rows, merge_visual, visual_slots
from vlexport.errors import InputError, UnsupportedError
from vlexport.recipe import Recipe
from vlexport.runtime.decoder import Decoder
from vlexport.runtime.encoding import Encoded
from vlexport.runtime.stages import Asked, Placed, Seen
from vlexport.specs import MediaItem

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

    def prune(self, item: Encoded, rate: float) -> Encoded:
        """The item with what is kept of it; what came pruned stays as it is."""
        if item.kind != "video" or not rate or item.kept is not None:
            return item
        pruned = evs.prune(item.embeds, item.grid, self.merge, rate)
        mask = torch.zeros(len(item.embeds), dtype=torch.bool, device=pruned.kept.device)
        mask[pruned.kept] = True
        return replace(item, embeds=pruned.embeds, kept=pruned.kept, mask=mask)


class Placer:
    """Positions and embeddings of whole prompts for one decoder."""

    def __init__(self, decoder: Decoder, rule: PositionRule) -> None:
        self.decoder = decoder
        self.rule = rule

    def place(self, seen: Seen) -> Placed:
        """The prompt's embeddings with the media in their room, and the position of each token."""
        with seen.asked.watch.timing("positions"):
            positions = self._positions(seen.asked, seen.encoded)
            prompt = seen.asked.prompt
            check_rows(prompt.placeholders, [len(item.embeds) for item in seen.encoded])
            embeds_ND = self.decoder.embed(torch.tensor(prompt.ids, dtype=torch.int64))
            if seen.encoded:
                visual_VD = torch.cat([item.embeds.to(embeds_ND) for item in seen.encoded])
                slots_V = visual_slots(prompt.placeholders, len(prompt.ids)).to(embeds_ND.device)
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
                seconds_per_grid=item.seconds_per_grid,
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
