"""Prune: drop tokens of images and videos, by the recipe's rule or another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vlexport._build.token_graphs import TokenGraphs
from vlexport.bundle import Bundle
from vlexport.codec import check_fields
from vlexport.errors import InputError, UnsupportedError, nearest
from vlexport.positions.rules import check_rate, merged_sides
from vlexport.pruning.cells import RULES, CellChoice, Pruning
from vlexport.pruning.divprune import DivPruneSelector
from vlexport.pruning.methods import METHODS, REQUESTED
from vlexport.pruning.selectors import Pruned, Selector, prune_by, prune_part
from vlexport.recipe import Recipe
from vlexport.runtime.outputs import Encoded
from vlexport.runtime.request import EncoderInput
from vlexport.specs import MediaItem
from vlexport.vision.static_shapes import to_device


@dataclass(frozen=True, kw_only=True, slots=True)
class PruningOptions:
    """Options of pruning.

    method   one of `METHODS`: what the bundle has to prune by; None takes any
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
    """Drops tokens by the bundle's graph, or by another method."""

    def __init__(
        self, recipe: Recipe[Any], merge: int, graphs: TokenGraphs, *, takes_cells: bool = False
    ) -> None:
        self.takes_cells = takes_cells
        self.recipe = recipe
        self.merge = merge
        self.graphs = graphs

    def check(self, rate: float | None) -> float:
        """Return the rate, 0 for none; refused where the family has nothing to prune."""
        if rate is None:
            return 0.0
        recipe = self.recipe
        if check_rate(rate) and recipe.pruning_rule is None and recipe.pictures is None:
            raise UnsupportedError(
                f"recipe '{recipe.name}' has no spatial video tokens to prune. Leave out prune."
            )
        return rate

    def plan(
        self,
        prune: float | None = None,
        method: str | None = None,
        prune_before: float | str | None = None,
        *,
        has_question: bool = False,
    ) -> Pruning:
        """Return how a request is pruned; refused where the family, or what is given together, forbids it."""
        rate, before = self.check(prune), None if prune_before is None else CellChoice.of(prune_before)
        known = [*REQUESTED, *(name for name, rule in RULES.items() if rule.is_rated)]
        if method is not None and method not in known:
            instead = f" '{method}' is for prune_before." if method in RULES else nearest(method, known)
            raise InputError(f"method: '{method}' given, one of {', '.join(known)} expected.{instead}")
        if method is not None and not rate:
            raise InputError(f"method '{method}' given without prune; a rate is expected with it.")
        if method == "relevance" and not has_question:
            raise InputError("method 'relevance' given without a question; it prunes where one is answered.")
        pruning = Pruning(rate=rate, method=method, before=before)
        if (before or pruning.after) and not self.takes_cells:
            raise UnsupportedError(
                f"towers of recipe '{self.recipe.name}' take whole items: no tokens are chosen by pixels. "
                f"Leave out {'prune_before' if before else 'method'}."
            )
        if before and pruning.after and pruning.after.rule.by_frame:
            raise UnsupportedError(
                f"prune_before '{before}' and method '{method}' given: that method counts whole frames. Give "
                "another one, or one of the two."
            )
        return pruning

    def check_timed(self, item: MediaItem) -> None:
        """Refuse videos whose kept tokens could not be placed; written-out time needs no interval."""
        scaled = self.recipe.position_rule == "time_scaled"
        if scaled and item.kind == "video" and item.seconds_per_grid is None:
            raise InputError(
                "pruning a video needs the time between its frames, for the positions of what is kept. "
                "Pass the frame rate as fps."
            )

    def selector(self, method: str | None) -> Selector:
        return self.graphs.selection.selector if method is None else REQUESTED[method]

    def rule_of(self, pruning: Pruning, kind: str) -> str:
        """Return in words by what media of a kind are pruned; empty where they stay whole."""
        chosen, words = pruning.of(kind), []
        if chosen.before:
            rate = "" if chosen.before.rate is None else f" at rate {chosen.before.rate:g}"
            words.append(f"{chosen.before.name}{rate} before the tower")
        if chosen.rate and (chosen.after or kind in self.selector(chosen.method).kinds):
            words.append(f"{chosen.method or self.selector(None).name} at rate {chosen.rate:g}")
        return ", then ".join(words)

    def whole_reason(self, pruning: Pruning, kinds: Sequence[str]) -> str:
        """Return why media of these kinds all stay whole, and what prunes them; empty where some do not."""
        if any(self.rule_of(pruning, kind) for kind in kinds) or not (pruning.rate or pruning.before):
            return ""
        given = [f"prune_before '{pruning.before}'"] if pruning.before else []
        if pruning.rate:
            given.append(f"prune {pruning.rate:g} by '{pruning.method or self.selector(None).name}'")
        before = {"image": "predicted or contrast:0.5", "video": "predicted or static:0.7"}
        ways = [
            f"for {kind}s give {f'prune_before {before[kind]}, or ' if self.takes_cells else ''}prune 0.5 "
            f"with method {'divprune' if kind == 'image' else 'evs'}"
            for kind in kinds
        ]
        whole = " and ".join(f"{kind}s" for kind in kinds)
        return f"{' and '.join(given)}: not for {whole}, which stay whole; {'; '.join(ways)}."

    def num_kept(self, item: MediaItem, total: int, rate: float, method: str | None = None) -> int:
        """Return how many of so many tokens of an item are left, where these are chosen by rows."""
        selector = self.selector(method)
        if item.kind not in selector.kinds or not rate:
            return total
        rows, columns = merged_sides(item.grid, self.merge)
        return min(total, selector.retained_count(rows * columns, item.grid[0], rate))

    def frame_rows(self, item: MediaItem, num_rows: int, kept: Tensor | None) -> tuple[int, ...]:
        if self.recipe.pruning_rule is None:
            return ()
        frames, (rows, columns) = item.grid[0], merged_sides(item.grid, self.merge)
        per_frame = rows * columns
        if kept is not None:
            return tuple(torch.bincount(kept.cpu() // per_frame, minlength=frames).tolist())
        return tuple(min(per_frame, max(0, num_rows - per_frame * frame)) for frame in range(frames))

    def prune(self, item: Encoded, rate: float, selector: Selector) -> Encoded:
        """Return the item with what is kept, by rows of all outputs; what came pruned stays as it is."""
        if item.kind not in selector.kinds or item.kept is not None:
            return item
        whole = torch.cat((item.embeds, *item.layers.values()), dim=-1) if item.layers else item.embeds
        is_own = selector is self.graphs.selection.selector
        graphs = self.graphs if is_own else self.graphs.pruning_by(selector)
        # Towers that are a class make any number of tokens of a grid.
        frames, per_frame = item.grid[0], len(whole) // item.grid[0]
        selection, form = graphs.selection_for(whole, per_frame)
        return _of_rows(item, prune_by(selection, whole, (frames, 1, per_frame), 1, rate), form)

    def prune_part(self, item: Encoded, rate: float, selector: Selector) -> Encoded:
        """Return what is kept of a video of which the tower had some cells, by rows of all outputs."""
        if item.kind not in selector.kinds or item.kept is None:
            return item
        whole = torch.cat((item.embeds, *item.layers.values()), dim=-1) if item.layers else item.embeds
        part = Pruned(embeds=whole, kept=item.kept)
        pruned = prune_part(selector, part, item.grid, self.merge, rate)
        return _of_rows(item, pruned, "eager: some cells of a video have no package")

    def finish(
        self,
        item: Encoded,
        source: EncoderInput,
        pruning: Pruning,
        question: Callable[[], Tensor] | None = None,
    ) -> Encoded:
        """Return the item of a request pruned as it asks, after the tower."""
        pruning = pruning.of(item.kind)
        if source.kept is not None:
            return kept_of(item, source.kept, source.form)
        if not pruning.rate or pruning.after:
            return item
        selector = self.selector(pruning.method)
        if isinstance(selector, DivPruneSelector) and selector.asks and question:
            selector = replace(selector, question=question())
        step = self.prune if source.item.cells is None else self.prune_part
        return step(item, pruning.rate, selector)


def kept_of(item: Encoded, kept: Tensor, form: str | None) -> Encoded:
    """Return those tokens of an item, whole or of some of its cells, that were chosen by its pixels."""
    kept = to_device(kept, item.embeds.device)
    rows = kept if item.kept is None else torch.searchsorted(item.kept, kept)
    whole = torch.cat((item.embeds, *item.layers.values()), dim=-1) if item.layers else item.embeds
    return _of_rows(item, Pruned(embeds=whole.index_select(0, rows), kept=kept), form)


def _of_rows(item: Encoded, pruned: Pruned, form: str | None) -> Encoded:
    widths = [output.shape[-1] for output in (item.embeds, *item.layers.values())]
    embeds, *layers = pruned.embeds.split(widths, dim=-1)
    count = len(item.embeds) if item.mask is None else len(item.mask)
    mask = torch.zeros(count, dtype=torch.bool, device=pruned.kept.device).index_fill_(0, pruned.kept, True)
    named = dict(zip(item.layers, layers, strict=True))
    return replace(item, embeds=embeds, layers=named, kept=pruned.kept, mask=mask, form=form)
