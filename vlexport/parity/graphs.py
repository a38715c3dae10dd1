"""L0 of the graphs between tower and decoder: the form that a bundle runs, beside the library's eager one.

What the eager functions compute is tested in tests/reference, once for all bundles.
T frames, N tokens per frame, R = T * N rows, D width, K kept rows, S block rows, M items.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle, islice, product

import torch
import torch.nn.functional as F
from torch import Tensor

from vlexport._build.token_graphs import TokenGraphs
from vlexport.backends import Portable
from vlexport.backends._inspection import GraphCall
from vlexport.errors import VlexportError
from vlexport.parity.report import Row, exact_row
from vlexport.positions.media import full_positions, pruned_channels
from vlexport.positions.plan import (
    BlockRows,
    KeptCells,
    plan_positions,
    write_kept_positions,
    write_positions,
)
from vlexport.positions.rules import Grid, PlacedMedia, PositionRule, merged_sides
from vlexport.pruning.cells import RULES, CellChoice
from vlexport.pruning.pixels import kept_cells
from vlexport.pruning.selectors import Selector, eager, prune_by
from vlexport.recipe import C, Recipe
from vlexport.system import raise_interruption
from vlexport.vision.attention.packing import Packing
from vlexport.vision.grid_tower import GridPacking

# Frames, rows and columns in tokens: one frame and many, odd sides, a single row or column.
VIDEOS = ((1, 2, 3), (2, 3, 5), (3, 7, 1), (8, 1, 4), (33, 2, 3))
RATES, NUM_PROMPTS = (0.3, 0.5, 0.9), 8
# Seconds between frames: exact in float32 and not, below a second and above.
INTERVALS = (0.5, 1.0, 1 / 3, 2.5, 4.1)
# Methods whose scores of static scenes are exact, so that equal tokens tie in every form.
EXACT_TIES = ("evs", "evs-snap")
# How near the cut sums in another order, and one rounding more or less, bring a token (tests/pruning).
NEAR = {"float32": 1e-5, "float16": 2.0**-9, "bfloat16": 2.0**-6}
ORIGIN = "equal to the library's eager form"
# Embeddings [R, D], grid and rate of a video to kept rows, their indices and a further fault.
Prune = Callable[[Tensor, Grid, float], tuple[Tensor, Tensor, str]]


def graph_rows(graphs: TokenGraphs, dtype: str) -> Iterator[Row]:
    """Yield a row for the pruning graph and one for positions, with the forms that ran in their notes."""
    selector, device = graphs.selection.selector, torch.device(graphs.device or "cpu")
    forms, rows_in, kept_in = set[str](), dict[str, str](), dict[str, str]()

    def prune(embeds: Tensor, grid: Grid, rate: float) -> tuple[Tensor, Tensor, str]:
        selection, form = graphs.selection_for(whole := embeds.to(device))
        forms.add(form)
        pruned = prune_by(selection, whole, grid, 1, rate)
        return pruned.embeds.cpu(), pruned.kept.cpu(), ""

    def place() -> Iterator[str]:
        for spans, count, rows, cells in _prompts():
            plan, anchor_1 = plan_positions(spans, count), torch.tensor([17])
            yield _other(
                "positions",
                [graphs.write(plan, rows, anchor_1, True, rows_in)],
                [write_positions(plan, rows, anchor_1, True)],
            )
            moved = KeptCells(*(part.to(device) for part in cells))
            placed = graphs.write_kept(plan.to(device), moved, True, kept_in)
            yield _other("positions of kept tokens", placed, write_kept_positions(plan, cells, True))

    faults = _first(_unlike(prune, selector, dtype, 1, RATES))
    note = f"{selector.name}, {_joined(forms)}"
    yield exact_row("pruning graph", faults, ORIGIN, shapes=f"{len(VIDEOS)} videos", note=note)
    faults = _first(place())
    note = _joined({*rows_in.values(), *kept_in.values()})
    yield exact_row("positions graph", faults, ORIGIN, shapes=f"{NUM_PROMPTS} prompts", note=note)
    for name in graphs.packaged_cells:
        faults = _first(_other_cells(graphs, name))
        yield exact_row(
            "cells graph", faults, ORIGIN, shapes=f"{len(VIDEOS)} videos", note=f"{name}, compiled"
        )


def portable_rows(portable: Portable, selector: Selector, recipe: Recipe[C], config: C) -> Iterator[Row]:
    """Yield the same rows for all outputs of the portable graphs, with time as the recipe counts it."""
    language, merge, intervals = recipe.language, recipe.merge(config), cycle(INTERVALS)
    pace = language.tokens_per_second(config) if language else 1.0
    rule = PositionRule(kind="time_scaled", merge=merge, tokens_per_second=pace)

    def prune(embeds: Tensor, grid: Grid, rate: float) -> tuple[Tensor, Tensor, str]:
        assert portable.prune is not None
        seconds, video = next(intervals), {"embeds": embeds, "grid": torch.tensor(grid)}
        sizes = {"rate": torch.tensor(rate, dtype=torch.float64), "seconds_per_grid": torch.tensor(seconds)}
        pruned = portable.prune({**video, **sizes})
        counted = 1.0 if language and language.counts_frames else seconds
        item = PlacedMedia(
            modality="video", offset=0, length=len(embeds), grid=grid, seconds_per_grid=counted
        )
        block_4K = pruned_channels(item, rule, pruned["kept"]) if rate else full_positions(item, rule).T
        if recipe.position_rule == "time_as_text":
            time_K = torch.zeros_like(block_4K[0])
            block_4K = torch.stack([time_K, *block_4K[1:3], time_K + max(merged_sides(grid, merge))])
        other = _other(f"block with {seconds:.3g} s between frames", [pruned["block"]], [block_4K])
        return pruned["kept_embeds"], pruned["kept"], other

    def place() -> Iterator[str]:
        for spans, count, rows, _ in _prompts():
            if recipe.position_rule == "linear":
                placed = portable.positions({"num_tokens": torch.tensor(count)})
                table_1N, delta = torch.arange(count)[None], torch.tensor(0)
                yield _other("positions", [placed["positions"], placed["delta"]], [table_1N, delta])
                continue
            sizes = {
                "num_tokens": torch.tensor(count),
                "offsets": torch.tensor([offset for offset, _ in spans]),
                "lengths": torch.tensor([length for _, length in spans]),
                "blocks": torch.stack(rows)[:, 1:],
            }
            plan, anchor_1 = plan_positions(spans, count), torch.tensor([0])
            for is_pruned in (False, True):
                placed = portable.positions({**sizes, "pruned": torch.tensor(is_pruned)})
                table_3N = write_positions(plan, rows, anchor_1, is_pruned)
                delta = table_3N.amax() + 1 - count
                yield _other("positions", [placed["positions"], placed["delta"]], [table_3N, delta])

    if portable.prune is not None:
        faults = _first(_unlike(prune, selector, "float32", merge, (0.0, *RATES)))
        shapes = f"{len(VIDEOS)} videos"
        yield exact_row("prune.onnx", faults, ORIGIN, shapes=shapes, note=selector.name)
    yield exact_row("positions.onnx", _first(place()), ORIGIN, shapes=f"{NUM_PROMPTS} prompts")
    for name in portable.selects:
        faults = _first(_other_selects(portable.selects[name], name, recipe.packing(config)))
        yield exact_row("select.onnx", faults, ORIGIN, shapes=f"{len(VIDEOS)} videos", note=name)


def _other_selects(run: GraphCall, name: str, packing: Packing) -> Iterator[str]:
    assert isinstance(packing, GridPacking)
    source = torch.Generator().manual_seed(0)
    for size, rate in product(VIDEOS, RATES):
        bytes_THWUP = torch.randint(0, 3, (*size, packing.unit, packing.row_width), generator=source).to(
            torch.uint8
        )
        # Few values, and whole cells of one.
        bytes_THWUP[:, ::2] = bytes_THWUP[:1, :1, :1]
        patches = bytes_THWUP
        if packing.levels is None:
            patches = packing.rule.levels.pixels(bytes_THWUP.flatten(0, 3)).view(bytes_THWUP.shape)
        choice = CellChoice(name=name, rate=rate if RULES[name].is_rated else None)
        expected_K = kept_cells(choice, packing.bytes_in_cells(bytes_THWUP))
        count = len(expected_K) if RULES[name].is_rated else math.prod(size)
        chosen = run({"patches": patches, "room": torch.zeros(count, dtype=torch.bool)})
        yield _other(f"cells of {size}", [chosen["cells"][: int(chosen["number"])]], [expected_K])


def _other_cells(graphs: TokenGraphs, name: str) -> Iterator[str]:
    source = torch.Generator().manual_seed(0)
    for size, rate in product(VIDEOS, RATES):
        # Few values, so that cells are equal, and colours of two bytes.
        cells_THWCB = torch.randint(0, 3, (*size, 3, 2), generator=source).to(torch.uint8)
        choice = CellChoice(name=name, rate=rate if RULES[name].is_rated else None)
        kept_K, _ = graphs.kept_cells(choice, cells_THWCB)
        yield _other(
            f"cells of {'x'.join(map(str, size))} at {rate}", [kept_K], [kept_cells(choice, cells_THWCB)]
        )


def _first(faults: Iterator[str]) -> list[str]:
    try:
        return list(islice(filter(None, faults), 1))
    except (VlexportError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise_interruption(error)
        return [f"{type(error).__name__}: {error}"]


def _joined(forms: set[str]) -> str:
    return "; ".join(sorted(forms))[:150]


def _other(name: str, ours: Sequence[Tensor], eager_ones: Sequence[Tensor]) -> str:
    pairs = zip(ours, eager_ones, strict=True)
    return "" if all(torch.equal(one.cpu(), other) for one, other in pairs) else f"other {name}"


def _unlike(
    prune: Prune, selector: Selector, dtype: str, merge: int, rates: Sequence[float]
) -> Iterator[str]:
    """Yield how what is kept of videos differs; beside the cut of moving scenes either token may be."""
    source = torch.Generator().manual_seed(0)
    scenes = (True, False) if selector.name in EXACT_TIES else (False,)
    for (frames, rows, columns), rate, is_still in product(VIDEOS, rates, scenes):
        embeds_TND = _scene(frames, rows * columns, source, is_still=is_still).to(getattr(torch, dtype))
        embeds_RD, grid = embeds_TND.flatten(0, 1), (frames, rows * merge, columns * merge)
        kept_K = prune_by(eager(selector), embeds_RD, grid, merge, rate).kept
        rows_KD, found_K, fault = prune(embeds_RD, grid, rate)
        scores_R = selector.scores(embeds_TND, torch.tensor(1 - rate)).flatten()
        near = 0.0 if is_still or selector.sums_are_exact else NEAR[dtype]
        moved = [*({*found_K.tolist()} ^ {*kept_K.tolist()})]
        is_far = bool(((scores_R[moved] - scores_R[kept_K].amin()).abs() >= near).any())
        if is_far or found_K.shape != kept_K.shape or bool((found_K.diff() < 1).any()):
            fault = f"other tokens are kept: {sorted(moved)[:4]}"
        fault = fault or _other("rows than those kept", [rows_KD], [embeds_RD[found_K]])
        yield f"{frames}x{rows}x{columns} at {rate}: {fault}" if fault else ""


def _scene(frames: int, per_frame: int, source: torch.Generator, *, is_still: bool) -> Tensor:
    """Return [T, N, D]: axes, opposites and zeros of which many stay for frames on end, or vectors that walk.

    Lengths of still ones are powers of two, so that similarities are exact in every dtype.
    """
    stays_TN = torch.rand(frames, per_frame, generator=source) < 0.6
    if not is_still:
        steps_TND = torch.randn(frames, per_frame, 16, generator=source)
        return (steps_TND * stays_TN[..., None]).cumsum(0) + steps_TND[:1]
    codes_TN = torch.randint(-3, 4, (frames, per_frame), generator=source)
    for frame in range(1, frames):
        codes_TN[frame] = torch.where(stays_TN[frame], codes_TN[frame - 1], codes_TN[frame])
    length_TN = 2.0 ** torch.randint(-2, 3, (frames, per_frame), generator=source)
    return F.one_hot(codes_TN.abs(), 5)[..., 1:] * (codes_TN.sign() * length_TN)[..., None]


def _prompts() -> Iterator[tuple[list[tuple[int, int]], int, BlockRows, KeptCells]]:
    """Yield columns of one to four items and of all, and what is in them: blocks of channels, kept cells."""
    source = torch.Generator().manual_seed(0)
    draw = partial(torch.randint, generator=source)
    for number in range(NUM_PROMPTS):
        num_items = 1 + number % 4
        lengths_I, columns_M = draw(1, 31, (num_items,)), draw(1, 5, (1 + num_items,))
        ends_I = (lengths_I + draw(0, 4, (num_items,))).cumsum(0)
        spans = [*zip((ends_I - lengths_I).tolist(), lengths_I.tolist(), strict=True)]
        # The first row is that of text.
        channels_4S = draw(0, 60, (4, 1 + int(lengths_I.sum())))
        channels_4S[:, 0] = 0
        kept = [torch.randperm(2 * length, generator=source)[:length].sort()[0] for _, length in spans]
        cells = KeptCells(
            kept_S=torch.cat([torch.tensor([0]), *kept]),
            per_frame_M=columns_M * draw(1, 5, (1 + num_items,)),
            width_M=columns_M,
            first_time_M=60 * torch.arange(1 + num_items),
            times_X=draw(0, 60, (60 * (1 + num_items),)),
        )
        yield spans, int(ends_I[-1]) + number % 3, BlockRows(*channels_4S), cells
