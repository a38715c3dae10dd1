"""Prune: drop tokens of videos by the recipe's rule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vlexport._build.token_graphs import TokenGraphs
from vlexport.bundle import Bundle
from vlexport.codec import check_fields
from vlexport.errors import InputError, UnsupportedError
from vlexport.positions.rules import check_rate, merged_sides
from vlexport.pruning.methods import METHODS
from vlexport.pruning.selectors import prune_by
from vlexport.recipe import Recipe
from vlexport.runtime.outputs import Encoded
from vlexport.specs import MediaItem


@dataclass(frozen=True, kw_only=True, slots=True)
class PruningOptions:
    """Options of pruning.

    method   `evs`, `evs-snap` (the same tokens on every device) or `vidcom2`: what the bundle has to prune
             by; None takes any
    """

    method: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.method is not None and self.method not in METHODS:
            raise InputError(f"method: '{self.method}' given, one of {', '.join(sorted(METHODS))} expected.")

    def require(self, bundle: Bundle) -> None:
        built = bundle.manifest.graphs.selector
        if self.method is not None and built is not None and built != self.method:
            raise UnsupportedError(
                f"{bundle.path}: prunes by '{built}', and '{self.method}' was requested. The method is "
                f"chosen at the build: {bundle.rebuild_command(selector=self.method)}"
            )


class Pruner:
    """Drops tokens of videos by the bundle's graph; images stay whole."""

    def __init__(self, recipe: Recipe[Any], merge: int, graphs: TokenGraphs) -> None:
        self.recipe = recipe
        self.merge = merge
        self.graphs = graphs

    def check(self, rate: float | None) -> float:
        """Return the rate, 0 for none; refused where the family has nothing to prune."""
        if rate is None:
            return 0.0
        if check_rate(rate) and self.recipe.pruning_rule is None:
            raise UnsupportedError(
                f"recipe '{self.recipe.name}' has no spatial video tokens to prune. Leave out prune."
            )
        return rate

    def check_timed(self, item: MediaItem) -> None:
        """Refuse videos whose kept tokens could not be placed; written-out time needs no interval."""
        scaled = self.recipe.position_rule == "time_scaled"
        if scaled and item.kind == "video" and item.seconds_per_grid is None:
            raise InputError(
                "pruning a video needs the time between its frames, for the positions of what is kept. "
                "Pass the frame rate as fps."
            )

    def num_kept(self, item: MediaItem, total: int, rate: float) -> int:
        if item.kind != "video" or not rate:
            return total
        rows, columns = merged_sides(item.grid, self.merge)
        return self.graphs.selection.selector.retained_count(rows * columns, item.grid[0], rate)

    def frame_rows(self, item: MediaItem, total: int, num_rows: int, kept: Tensor | None) -> tuple[int, ...]:
        if self.recipe.pruning_rule is None:
            return ()
        frames, per_frame = item.grid[0], total // item.grid[0]
        if kept is not None:
            return tuple(torch.bincount(kept.cpu() // per_frame, minlength=frames).tolist())
        return tuple(min(per_frame, max(0, num_rows - per_frame * frame)) for frame in range(frames))

    def prune(self, item: Encoded, rate: float) -> Encoded:
        """Return the item with what is kept, by rows of all outputs; what came pruned stays as it is."""
        if item.kind != "video" or not rate or item.kept is not None:
            return item
        outputs = (item.embeds, *item.layers.values())
        whole = torch.cat(outputs, dim=-1) if item.layers else item.embeds
        selection, form = self.graphs.selection_for(whole)
        pruned = prune_by(selection, whole, item.grid, self.merge, rate)
        embeds, *layers = pruned.embeds.split([output.shape[-1] for output in outputs], dim=-1)
        mask = torch.zeros(len(item.embeds), dtype=torch.bool, device=pruned.kept.device)
        mask.index_fill_(0, pruned.kept, True)
        named = dict(zip(item.layers, layers, strict=True))
        return replace(item, embeds=embeds, layers=named, kept=pruned.kept, mask=mask, form=form)
