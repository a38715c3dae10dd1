"""L0 of the graphs between tower and decoder: the bundle's own, held to the rules in plain numbers.

Scenes whose similarities are exact in every dtype have one right mask, ties included. On random scenes the
tokens within `NEAR` of the cut may be either kept or dropped, as sums of another order make them.
T frames, N tokens per frame, R = T * N rows, K kept rows.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from vlexport.backends import Portable
from vlexport.errors import VlexportError
from vlexport.parity.report import Row, exact_row
from vlexport.positions.media import pruned_channels
from vlexport.positions.mrope import frame_positions, initial_positions, join_rows, pruned_positions
from vlexport.positions.plan import Span, plan_positions
from vlexport.positions.rules import FrameMarkers, PlacedMedia, PositionRule
from vlexport.pruning.selectors import prune_by
from vlexport.recipe import C, Recipe
from vlexport.token_graphs import TokenGraphs

MOST_FRAMES, NUM_PROMPTS, MERGE = 64, 48, 2
RATES = (0.05, 0.3, 0.5, 0.75, 0.9)
# How near the cut sums in another order, and one rounding more or less, bring a token (tests/pruning).
NEAR = {"float32": 1e-5, "float16": 2.0**-9, "bfloat16": 2.0**-6}
# Of the rule in steps of 2**-10, whose own rounding is half a step (pruning/snapped.py).
NEAR_SNAPPED = 2.0**-9
# Seconds between frames: exact in float32, and not.
INTERVALS = (0.5, 1.0, 2.5, 1 / 3, 0.7, 4.1)
TEXT, START, END, IMAGE, VIDEO = range(5)
MARKERS = FrameMarkers(vision_start=START, vision_end=END, video=VIDEO)
WRITTEN = PositionRule(kind="time_as_text", merge=MERGE, markers=MARKERS)
Triple = tuple[int, int, int]
# Embeddings [R, D] of a video, its grid and a rate to the kept rows, their indices and a further fault.
Prune = Callable[[Tensor, Triple, float], tuple[Tensor, Tensor, str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How a family counts the cells and the time of a video.

    per_second     positions of time per second; 0 where time is written out
    counts_frames  the time between two frames is 1, whatever is given
    written        text after a frame goes on behind its larger side
    """

    merge: int = MERGE
    per_second: float = 2
    counts_frames: bool = False
    written: bool = False

    def time(self, frame: int, seconds: float, *, pruned: bool) -> int:
        """Return the time of a frame: in float64, or by whole seconds and in float32 in a pruned prompt."""
        given = 1.0 if self.counts_frames else _float32(seconds)
        if not pruned:
            return int(frame * (given * self.per_second))
        return int(_float32(frame * _float32(self.per_second * int(given))))

    def block(self, cells: Sequence[int], grid: Triple, seconds: float, *, pruned: bool) -> list[list[int]]:
        """Return time, row, column and width of these cells, as `prune.onnx` has them."""
        rows, columns = (side // self.merge for side in grid[1:])
        places = [(*divmod(cell, rows * columns), cell) for cell in cells]
        times = [self.time(frame, seconds, pruned=pruned) for frame, _, _ in places]
        width = max(rows, columns) if self.written else columns
        sides = [[rest // columns for _, rest, _ in places], [rest % columns for _, rest, _ in places]]
        return [times, *sides, [width] * len(places)]


def pace_of(recipe: Recipe[C], config: C) -> Pace:
    """Return how a recipe counts."""
    language, written = recipe.language, recipe.position_rule == "time_as_text"
    return Pace(
        merge=recipe.merge(config),
        per_second=0 if written else language.tokens_per_second(config) if language else 1.0,
        counts_frames=language is not None and language.counts_frames,
        written=written,
    )


def _float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def graph_rows(graphs: TokenGraphs, dtype: str, rule: str = "time_scaled", pace: float = 2) -> Iterator[Row]:
    """Yield a row for the masks of the pruning graph and one for positions; one more for written-out time."""
    method, draw = graphs.selection.selector.name, random.Random(0)
    made, ran = SCENES[method], set[str]()

    def prune(embeds: Tensor, grid: Triple, rate: float) -> tuple[Tensor, Tensor, str]:
        selection, form = graphs.selection_for(whole := embeds.to(graphs.device or "cpu"))
        ran.add(form)
        found = prune_by(selection, whole, grid, MERGE, rate)
        return found.embeds.cpu(), found.kept.cpu(), ""

    masks = [
        fault for frames in range(1, MOST_FRAMES + 1) for fault in _prune(prune, frames, dtype, made, draw)
    ]
    note = f"{method}, {_joined(ran)}"
    origin = "the rule in plain numbers: 1 to 64 frames, odd sides, ties, static scenes"
    yield exact_row("pruning graph", masks, origin, shapes=f"{MOST_FRAMES * len(made)} videos", note=note)
    run = Writers(graphs)
    placed = [fault for _ in range(NUM_PROMPTS) for fault in _place(run, draw, pace)]
    origin = "a walk over the tokens: whole, pruned, and from a chunk border on; several media"
    yield exact_row("positions graph", placed, origin, shapes=f"{NUM_PROMPTS} prompts", note=run.form())
    if rule == "time_as_text":
        run = Writers(graphs)
        written = [fault for _ in range(NUM_PROMPTS) for fault in _place_written(run, draw)]
        origin = "the same walk with text between frames, less the tokens that were dropped"
        shapes, check = f"{NUM_PROMPTS} prompts", "positions graph, written time"
        yield exact_row(check, written, origin, shapes=shapes, note=run.form())


class Writers:
    """The writers of positions as a request calls them, with the forms in which they ran."""

    def __init__(self, graphs: TokenGraphs) -> None:
        self.device = graphs.device or "cpu"
        self._rows, self._kept = dict[str, str](), dict[str, str]()
        self.write = partial(graphs.write, forms=self._rows)
        self.write_kept = partial(graphs.write_kept, forms=self._kept)

    def form(self) -> str:
        return _joined({*self._rows.values(), *self._kept.values()})


def _joined(forms: set[str]) -> str:
    return "; ".join(sorted(forms))[:150]


def portable_rows(
    portable: Portable, method: str, rule: str = "time_scaled", pace: Pace | None = None
) -> Iterator[Row]:
    """Yield the same rows for the portable graphs, which run in the library of the engine."""
    pace = pace or Pace()
    draw, intervals, made = random.Random(1), random.Random(2), SCENES[method]

    def prune(embeds: Tensor, grid: Triple, rate: float) -> tuple[Tensor, Tensor, str]:
        seconds, scale = intervals.choice(INTERVALS), pace.merge / MERGE
        grid = (grid[0], round(grid[1] * scale), round(grid[2] * scale))
        given = {"grid": torch.tensor(grid), "rate": torch.tensor(rate, dtype=torch.float64)}
        assert portable.prune is not None
        found = portable.prune({"embeds": embeds, **given, "seconds_per_grid": torch.tensor(seconds)})
        kept = found["kept"].tolist()
        fault = f"other times or places of kept tokens, {seconds:.3g} s between frames"
        right = found["block"].tolist() == pace.block(kept, grid, seconds, pruned=rate > 0)
        return found["kept_embeds"], found["kept"], "" if right else fault

    if portable.prune is not None:
        masks = [
            fault
            for frames in range(1, MOST_FRAMES + 1)
            for fault in (*_prune(prune, frames, "float32", made, draw), *_prune_nothing(prune, frames))
        ]
        origin = "the rule in plain numbers: 1 to 64 frames, odd sides, ties, static scenes, nothing to drop"
        yield exact_row("prune.onnx", masks, origin, shapes=f"{MOST_FRAMES * len(made)} videos", note=method)
    place = _count_portable if rule == "linear" else _place_portable
    placed = [fault for _ in range(NUM_PROMPTS) for fault in place(portable, draw)]
    origin = "a walk over the tokens: whole and pruned, several media, text or a medium at the end"
    yield exact_row("positions.onnx", placed, origin, shapes=f"{NUM_PROMPTS} prompts")


def _count_portable(portable: Portable, draw: random.Random) -> Iterator[str]:
    """Yield the faults of one prompt whose positions count up from 0, whatever was dropped."""
    count = draw.randint(1, 400)

    def run() -> list[Triple]:
        found = portable.positions({"num_tokens": torch.tensor(count)})
        return _with_delta(_triples(found["positions"].expand(3, -1)), int(found["delta"]))

    yield from _compared(f"{count} tokens", run, [(at, at, at) for at in range(count)])


def _place_portable(portable: Portable, draw: random.Random) -> Iterator[str]:
    """Yield the faults of one prompt, whole and pruned, from the blocks of its items."""
    items, tail = _drawn(draw)
    for pruned in (False, True):
        wanted, offsets = _walk(items, tail, pruned=pruned)
        blocks = [
            (*item.place(cell, pruned=pruned), item.grid[2])
            for item in items
            for cell in item.cells(pruned=pruned)
        ]
        given = {
            "num_tokens": torch.tensor(len(wanted)),
            "offsets": torch.tensor(offsets),
            "lengths": torch.tensor([len(item.cells(pruned=pruned)) for item in items]),
            "blocks": torch.tensor(blocks).T.contiguous(),
            "pruned": torch.tensor(pruned),
        }

        def run(given: dict[str, Tensor] = given) -> list[Triple]:
            found = portable.positions(given)
            return _with_delta(_triples(found["positions"]), int(found["delta"]))

        yield from _compared(f"pruned {pruned}", run, wanted)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """Embeddings [R, D], how much each token changed, and how near the cut a token may go either way."""

    embeds: Tensor
    change: list[float]
    near: float
    rate: float | None = None
    certain: bool = True


def still_scene(draw: random.Random, frames: int, per_frame: int, dtype: str) -> Scene:
    """Return axes, their opposites and zeros, many of them the same for frames on end."""
    tokens: list[tuple[int, int]] = []
    for place in range(frames * per_frame):
        stays = place >= per_frame and draw.random() < 0.7
        tokens.append(tokens[place - per_frame] if stays else (draw.randrange(4), draw.choice((1, -1))))
    # Lengths are powers of two; the last direction is the zero vector.
    rows = [[sign * 2.0 ** draw.randint(-2, 2) * (axis == at) for at in range(3)] for axis, sign in tokens]
    change = [255.0] * per_frame
    for (axis, sign), (axis_before, sign_before) in zip(tokens[per_frame:], tokens, strict=False):
        change.append(1.0 if axis != axis_before or axis == 3 else 1.0 - sign * sign_before)
    return Scene(embeds=torch.tensor(rows, dtype=getattr(torch, dtype)), change=change, near=0.0)


def moving_scene(draw: random.Random, frames: int, per_frame: int, dtype: str) -> Scene:
    """Return vectors that walk, a part of them standing still."""
    source = torch.Generator().manual_seed(draw.randrange(2**31))
    steps = torch.randn(frames, per_frame, draw.choice((5, 16, 33)), generator=source)
    walk = (steps * (torch.rand(frames, per_frame, 1, generator=source) < 0.6) * 0.5).cumsum(0) + steps[:1]
    embeds = walk.flatten(0, 1).to(getattr(torch, dtype))
    rows = embeds.double()
    unit = rows / rows.norm(dim=-1, keepdim=True)
    cosine = (unit[per_frame:] * unit[: len(unit) - per_frame]).sum(-1)
    return Scene(embeds=embeds, change=[255.0] * per_frame + (1 - cosine).tolist(), near=NEAR[dtype])


def snapped_scene(draw: random.Random, frames: int, per_frame: int, dtype: str) -> Scene:
    """Return a moving scene for the rule in steps of 2**-10."""
    return replace(moving_scene(draw, frames, per_frame, dtype), near=NEAR_SNAPPED)


def budget_scene(draw: random.Random, frames: int, per_frame: int, dtype: str) -> Scene:
    """Return a moving scene for budgets per frame; `change` is highest inside them.

    Tokens that share a cut, and budgets near a half, make a scene that has no certain mask.
    """
    embeds, rate = moving_scene(draw, frames, per_frame, dtype).embeds, draw.choice(RATES)
    rows = embeds.double()
    spread, channels = rows.var(0, correction=0).sort()
    half = max(1, rows.shape[1] // 2)
    unit = rows[:, channels[:half]]
    unit = (unit / unit.norm(dim=-1, keepdim=True)).unflatten(0, (frames, per_frame))

    def near(centre: Tensor) -> Tensor:
        squared = ((unit - centre) ** 2).sum(-1, keepdim=True)
        found: Tensor = (-squared / torch.tensor([0.25, 0.5, 1.0, 2.0, 4.0])).exp().sum(-1)
        return found

    to_video = near(unit.mean((0, 1)))
    alike = to_video + near(unit.mean(1, keepdim=True))
    share = (-to_video.mean(1) * 100).softmax(0)
    scaled = ((1 - rate) * (1 + share - share.mean())).clamp(max=1) * per_frame
    budgets = scaled.round().clamp(1, per_frame).long().tolist()
    ordered = alike.sort(dim=1).values
    gaps = [
        float(line[at] - line[at - 1]) for line, at in zip(ordered, budgets, strict=True) if at < per_frame
    ]
    certain = (
        min(gaps, default=1.0) > NEAR["float32"]
        and float((scaled % 1 - 0.5).abs().min()) > 1e-3
        and (half == len(spread) or float(spread[half] / spread[half - 1]) > 1 + 1e-4)
    )
    cuts = ordered.gather(1, torch.tensor(budgets)[:, None] - 1)
    inside = alike <= cuts
    change = (100.0 * inside - alike).flatten().tolist()
    return Scene(embeds=embeds, change=change, near=NEAR["float32"], rate=rate, certain=certain)


Make = Callable[[random.Random, int, int, str], Scene]
SCENES: dict[str, tuple[Make, ...]] = {
    "evs": (still_scene, moving_scene),
    "evs-snap": (still_scene, snapped_scene),
    "vidcom2": (budget_scene,),
}


def _prune(
    prune: Prune, frames: int, dtype: str, scenes: Sequence[Make], draw: random.Random
) -> Iterator[str]:
    """Yield the faults of one video of each kind."""
    for make in scenes:
        most = 5 if frames < MOST_FRAMES // 4 else 3
        rows, columns = draw.randint(1, most), draw.randint(1, most)
        per_frame = rows * columns
        scene = make(draw, frames, per_frame, dtype)
        if not scene.certain:
            continue
        rate = draw.choice(RATES) if scene.rate is None else scene.rate
        where = f"{make.__name__} {frames}x{rows}x{columns} at {rate}"
        least = frames if scene.rate is not None else per_frame
        count = max(least, int(float(frames * per_frame) * (1.0 - rate)))
        grid = (frames, MERGE * rows, MERGE * columns)

        def fault_of(
            scene: Scene = scene, grid: Triple = grid, rate: float = rate, count: int = count
        ) -> str:
            rows_KD, kept_K, fault = prune(scene.embeds, grid, rate)
            fault = _wrong_mask(scene, kept_K.tolist(), count) or fault
            right = fault or torch.equal(rows_KD, scene.embeds[kept_K])
            return fault if right else "other rows than those kept"

        yield from _named(where, fault_of)


def _prune_nothing(prune: Prune, frames: int) -> Iterator[str]:
    """Yield the faults of one video of which everything is kept."""
    embeds = torch.arange(frames * 6.0)[:, None].expand(-1, 2)

    def fault_of() -> str:
        rows_KD, kept_K, fault = prune(embeds, (frames, 2 * MERGE, 3 * MERGE), 0.0)
        right = kept_K.tolist() == list(range(len(embeds))) and torch.equal(rows_KD, embeds)
        return fault if right else "not all tokens are kept"

    yield from _named(f"{frames}x2x3 at 0", fault_of)


def _named(where: str, fault_of: Callable[[], str]) -> Iterator[str]:
    try:
        fault = fault_of()
    except (VlexportError, LookupError, RuntimeError, TypeError, ValueError) as error:
        fault = f"{type(error).__name__}: {error}"
    if fault:
        yield f"{where}: {fault}"


def _wrong_mask(scene: Scene, kept: list[int], count: int) -> str:
    """Return how kept indices differ from the most changed tokens, of equals the first."""
    order = sorted(range(len(scene.change)), key=lambda place: (-scene.change[place], place))
    wanted, cut = set(order[:count]), scene.change[order[count - 1]]
    if len(kept) != count or kept != sorted(set(kept)):
        return f"{len(kept)} tokens, {len(set(kept))} of them distinct; {count} in ascending order expected"
    wrong = [at for at in wanted.symmetric_difference(kept) if abs(scene.change[at] - cut) >= scene.near]
    return f"token {min(wrong)} is {'dropped' if min(wrong) in wanted else 'kept'}" if wrong else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """An image or a video in a prompt: cells of its grid, and which of them are kept when it is pruned."""

    text: int
    kind: str
    grid: Triple
    seconds: float
    kept: list[int]
    pace: float

    def place(self, cell: int, *, pruned: bool) -> Triple:
        """Return time, row and column of a cell, from the origin of the item."""
        _, rows, columns = self.grid
        frame, rest = divmod(cell, rows * columns)
        is_video = self.kind == "video"
        time = Pace(per_second=self.pace).time(frame, self.seconds, pruned=pruned) if is_video else 0
        return (time, *divmod(rest, columns))

    def cells(self, *, pruned: bool) -> list[int]:
        frames, rows, columns = self.grid
        return self.kept if pruned else list(range(frames * rows * columns))


def _drawn(draw: random.Random, pace: float = 2) -> tuple[list[Item], int]:
    """Return the items of a prompt, most after some text, and the text at the end, which may be none."""
    items = []
    for _ in range(draw.randint(1, 4)):
        kind = draw.choice(("image", "video"))
        frames = draw.choice((1, 2, 3, 7, MOST_FRAMES)) if kind == "video" else 1
        grid = (frames, draw.randint(1, 5), draw.randint(1, 5))
        cells, per_frame = range(frames * grid[1] * grid[2]), grid[1] * grid[2]
        rest = draw.sample(cells[per_frame:], draw.randint(0, len(cells) - per_frame))
        kept = [*cells[:per_frame], *sorted(rest)]
        seconds, text = draw.choice(INTERVALS), draw.randint(0, 5)
        items.append(Item(text=text, kind=kind, grid=grid, seconds=seconds, kept=kept, pace=pace))
    return items, draw.choice((0, 0, 1, 2, 6))


def _walk(items: Sequence[Item], tail: int, *, pruned: bool) -> tuple[list[Triple], list[int]]:
    """Return the position of every token, and the column of each item's first one."""
    columns, offsets, free = list[Triple](), list[int](), 0
    for item in items:
        columns += [(at, at, at) for at in range(free, free + item.text)]
        free += item.text
        offsets.append(len(columns))
        places = [item.place(cell, pruned=pruned) for cell in item.cells(pruned=pruned)]
        columns += [(free + time, free + row, free + column) for time, row, column in places]
        free += item.grid[2] if pruned else 1 + max(map(max, places))
    return [*columns, *((at, at, at) for at in range(free, free + tail))], offsets


def _place(graphs: Writers, draw: random.Random, pace: float) -> Iterator[str]:
    """Yield the faults of one prompt: whole, pruned, and from a chunk border on."""
    items, tail = _drawn(draw, pace)
    for pruned in (False, True):
        wanted, offsets = _walk(items, tail, pruned=pruned)
        media = [_placed(item, at, pruned=pruned) for item, at in zip(items, offsets, strict=True)]
        first = draw.randrange(len(items))
        start = offsets[first] - draw.randint(0, items[first].text)
        part = list(zip(items, media, strict=True))[first:]
        anchor = min(wanted[start])

        run = partial(_whole, graphs, items, media, len(wanted), pruned=pruned)
        yield from _compared(f"pruned {pruned}", run, wanted)
    yield from _compared(
        f"from column {start}",
        lambda: _triples(_chunk(graphs, part, start, len(wanted), anchor)),
        wanted[start:],
    )


def _whole(
    graphs: Writers, items: Sequence[Item], media: Sequence[PlacedMedia], length: int, *, pruned: bool
) -> list[Triple]:
    """Return the columns of a whole prompt, with `delta` checked."""
    kept = [torch.tensor(item.kept).to(graphs.device) if item.kind == "video" else None for item in items]
    rule = _rule(items[0])
    if pruned and any(each is not None for each in kept):
        found = pruned_positions(length, media, kept, rule, write=graphs.write_kept)
    else:
        found = initial_positions([0] * length, media, rule, pruned=pruned, write=graphs.write)
    return _with_delta(_triples(found.table_RN), int(found.delta))


def _rule(item: Item) -> PositionRule:
    return PositionRule(kind="time_scaled", merge=MERGE, tokens_per_second=item.pace)


def _place_written(graphs: Writers, draw: random.Random) -> Iterator[str]:
    """Yield the faults of one prompt that writes out the time of each frame, whole and pruned."""
    items, tail = _drawn(draw)
    stamps = [[draw.randint(0, 4) for _ in range(item.grid[0])] for item in items]
    kept = [torch.tensor(item.kept) if item.kind == "video" else None for item in items]
    for pruned in (False, True):
        walk = _Written()
        spans = [walk.add(item, before, pruned=pruned) for item, before in zip(items, stamps, strict=True)]
        walk.text(tail)
        media = [
            replace(_placed(item, start, pruned=False), length=stop - start)
            for item, (start, stop) in zip(items, spans, strict=True)
        ]

        def run(
            walk: _Written = walk, media: Sequence[PlacedMedia] = media, pruned: bool = pruned
        ) -> list[Triple]:
            if pruned:
                found = frame_positions(walk.ids, media, kept, WRITTEN, write=graphs.write)
            else:
                found = initial_positions(walk.ids, media, WRITTEN, write=graphs.write)
            return _with_delta(_triples(found.table_RN), int(found.delta))

        yield from _compared(f"written time, pruned {pruned}", run, walk.columns)


class _Written:
    """A prompt that writes out the time of each frame, token by token; dropped tokens leave their place."""

    def __init__(self) -> None:
        self.ids, self.columns, self.free = list[int](), list[Triple](), 0

    def add(self, item: Item, stamps: Sequence[int], *, pruned: bool) -> tuple[int, int]:
        """Add text and an item, and return the columns of the item."""
        self.text(item.text)
        start, is_video = len(self.ids), item.kind == "video"
        frames, rows, width = item.grid
        left = set(item.cells(pruned=pruned and is_video))
        for frame in range(frames):
            self.text(stamps[frame] if is_video else 0)
            self.text(int(is_video), START)
            for cell in range(rows * width):
                if frame * rows * width + cell in left:
                    self.ids.append(VIDEO if is_video else IMAGE)
                    self.columns.append((self.free, self.free + cell // width, self.free + cell % width))
            self.free += max(rows, width)
            self.text(int(is_video), END)
        return start, len(self.ids)

    def text(self, count: int, token: int = 0) -> None:
        for _ in range(count):
            self.ids.append(token)
            self.columns.append((self.free,) * 3)
            self.free += 1


def _with_delta(columns: list[Triple], delta: int) -> list[Triple]:
    """Return the columns, and one more where `delta` is not that of the first column after them."""
    first = 1 + max(map(max, columns))
    return columns if delta == first - len(columns) else [*columns, (first, first, first)]


def _compared(name: str, run: Callable[[], list[Triple]], wanted: list[Triple]) -> Iterator[str]:
    try:
        found = run()
    except (VlexportError, LookupError, RuntimeError, TypeError, ValueError) as error:
        yield f"{name}: {type(error).__name__}: {error}"
        return
    if found != wanted:
        at = next(
            (at for at, pair in enumerate(zip(found, wanted, strict=False)) if pair[0] != pair[1]), len(found)
        )
        yield f"{name}: column {at} differs of {len(wanted)}"


def _placed(item: Item, offset: int, *, pruned: bool) -> PlacedMedia:
    frames, rows, columns = item.grid
    return PlacedMedia(
        modality=item.kind,  # type: ignore[arg-type]
        offset=offset,
        length=len(item.cells(pruned=pruned)),
        grid=(frames, MERGE * rows, MERGE * columns),
        seconds_per_grid=item.seconds if item.kind == "video" else None,
    )


def _chunk(
    graphs: Writers, part: Sequence[tuple[Item, PlacedMedia]], start: int, length: int, anchor: int
) -> Tensor:
    """Return the columns of a pruned prompt from `start` on, as prefill in chunks computes them."""
    blocks = [pruned_channels(media, _rule(item), torch.tensor(item.kept)) for item, media in part]
    spans = [Span(offset=each.offset, length=each.length, num_rows=each.length) for _, each in part]
    return graphs.write(plan_positions(spans, start, length), join_rows(blocks), torch.tensor([anchor]), True)


def _triples(table_3N: Tensor) -> list[Triple]:
    return [(time, row, column) for time, row, column in table_3N.T.tolist()]
