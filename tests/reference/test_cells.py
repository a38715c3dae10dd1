"""Towers on some cells of their items against transformers' own blocks; the rules that choose them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from vlexport.recipes.demo import qwen2_5_vl, qwen2_vl, qwen3_vl
from vlexport.recipes.demo.writing import write_checkpoint

from tests.thirty import cases
from vlexport.checkpoint import Checkpoint
from vlexport.pruning.cells import RULES, CellChoice
from vlexport.pruning.pixels import kept_among, kept_cells
from vlexport.recipe import find_recipe
from vlexport.specs import MediaItem
from vlexport.vision.attention.layout import LAYOUTS

FAMILIES = {"qwen2_vl": qwen2_vl, "qwen2_5_vl": qwen2_5_vl, "qwen3_vl": qwen3_vl}
MIXES = [
    [("image", (1, 12, 20))],
    [("video", (3, 12, 8))],
    [("image", (1, 8, 8)), ("video", (4, 10, 12)), ("image", (1, 2, 2)), ("video", (2, 6, 18))],
]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param) / "tiny"
    checkpoint = Checkpoint.open(write_checkpoint(folder, FAMILIES[request.param].contents(), seed=3))
    recipe = find_recipe(request.param)
    config = recipe.read_config(checkpoint)
    return recipe, config, recipe.tower(checkpoint, "float32"), recipe.reference(checkpoint)


def items_of(recipe, config, mix, share, seed):
    """Return items with random patches, of which random cells are there."""
    generator = torch.Generator().manual_seed(seed)
    width, unit = recipe.row_width(config), recipe.merge(config) ** 2
    items = []
    for kind, grid in mix:
        patches = torch.randn(math.prod(grid), width, generator=generator)
        cells = math.prod(grid) // unit
        kept = (torch.rand(cells, generator=generator) < share).nonzero()[:, 0]
        kept = kept if len(kept) else torch.tensor([cells - 1])
        rows = (kept[:, None] * unit + torch.arange(unit)).flatten()
        items.append(MediaItem(kind=kind, patches=patches[rows], grid=grid, cells=kept))
    return items


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_tower_on_some_cells_computes_what_transformers_computes_on_the_same_rows(family, layout, share):
    recipe, config, tower, reference = family
    for seed, mix in enumerate(MIXES):
        items = items_of(recipe, config, mix, share, seed)
        with torch.inference_mode():
            ours = tower(recipe.prepare(config, items, layout))
        theirs = reference.run(items)
        assert ours.keys() == theirs.keys()
        for name, rows in theirs.items():
            assert len(rows) == sum(len(item.cells) for item in items)
            limit = recipe.limits["float32"].relative_l2
            assert float((ours[name] - rows).norm() / rows.norm()) < limit, (mix, name)


def test_all_cells_give_the_tables_of_whole_items(family):
    recipe, config, *_ = family
    whole = [replace(item, cells=None) for item in items_of(recipe, config, MIXES[2], 1.1, 0)]
    for layout in LAYOUTS:
        expected = recipe.prepare(config, whole, layout)
        given = recipe.prepare(config, items_of(recipe, config, MIXES[2], 1.1, 0), layout)
        assert expected.keys() == given.keys()
        assert all(torch.equal(expected[name], given[name]) for name in expected)


def test_the_blocks_of_the_reference_are_those_of_a_call_of_the_same_rows(family):
    recipe, config, _, reference = family
    items = items_of(recipe, config, MIXES[2], 0.5, 7)
    outputs, blocks = reference.blocks(items)
    patches = sum(len(item.patches) for item in items)
    assert torch.equal(outputs["embeds"], reference.run(items)["embeds"])
    assert {len(rows) for pair in blocks for rows in pair} == {patches}


# The rules once more, cell by cell and byte by byte, on nested lists [frame][row][column][colour][byte].

Place = tuple[int, int, int]
RATES = (0.0, 0.3, 0.5, 0.7, 0.9, 0.99)
NUMBERS = {"image": "pictures pruned by pixels", "video": "clips pruned by pixels"}


def flat(cell):
    return [byte for colour in cell for byte in colour]


def apart(one, other):
    return sum(abs(a - b) for a, b in zip(flat(one), flat(other), strict=True))


def spread(colour):
    total = sum(colour)
    return sum(abs(len(colour) * byte - total) for byte in colour)


def plain_median(cells):
    """Return the lower median over frames, byte by byte, as one row of bytes that stands for a cell."""
    return [[statistics.median_low(bytes_) for bytes_ in zip(*map(flat, cells), strict=True)]]


def plain_scores(name, cells) -> dict[Place, int]:
    """Return how much each cell is worth; by `predicted` 0 or 1."""
    frames, rows, columns = len(cells), len(cells[0]), len(cells[0][0])
    places = [(t, h, w) for t in range(frames) for h in range(rows) for w in range(columns)]
    if name in ("static", "static-frames"):
        middle = {
            (h, w): plain_median([cells[t][h][w] for t in range(frames)])
            for h in range(rows)
            for w in range(columns)
        }
        return {(t, h, w): apart(cells[t][h][w], middle[h, w]) for t, h, w in places}
    if name in ("delta", "delta-frames"):
        return {(t, h, w): apart(cells[t][h][w], cells[max(t - 1, 0)][h][w]) for t, h, w in places}
    if name == "contrast":
        return {(t, h, w): sum(map(spread, cells[t][h][w])) for t, h, w in places}
    assert name == "predicted"
    return {(t, h, w): int(not is_predicted(cells, t, h, w)) for t, h, w in places}


def is_predicted(cells, t, h, w):
    frame, x = cells[t], cells[t][h][w]
    if t and x == cells[t - 1][h][w]:
        return True
    if h == 0 or w == 0:
        return (h, w) != (0, 0) and x == (frame[h][w - 1] if h == 0 else frame[h - 1][w])
    left, above, corner = frame[h][w - 1], frame[h - 1][w], frame[h - 1][w - 1]
    return x == (above if corner == left and corner != above else left)


def plain_choice(name, scores: dict[Place, int], num_kept: int) -> list[Place]:
    """Return the cells that stay, in order."""

    def best(count: int, among: Iterable[Place]) -> list[Place]:
        return sorted(sorted(among, key=lambda place: (-scores[place], place))[:count])

    frames = {t: [place for place in scores if place[0] == t] for t, _, _ in scores}
    if name in ("static", "contrast"):
        return best(num_kept, scores)
    kept = frames.pop(0) if name in ("delta", "delta-frames") else []
    if not frames:
        return kept
    each, rest = divmod(num_kept - len(kept), len(frames))
    sums = {t: sum(map(scores.__getitem__, own)) for t, own in frames.items()}
    more = sorted(frames, key=lambda t: (-sums[t], t))[:rest]
    return [*kept, *(place for t, own in frames.items() for place in best(each + (t in more), own))]


def picture(seed, frames):
    """Return a picture or clip as cells: areas of one colour, edges, noise; few are as large as real ones."""
    generator = torch.Generator().manual_seed(seed)

    def number(low, high):
        return int(torch.randint(low, high, (1,), generator=generator))

    longest = 12 if seed % 20 == 3 else 5
    rows, columns, levels = number(1, longest + 1), number(1, longest + 1), (2, 3, 256)[number(0, 3)]
    size = (frames, rows, columns, 3, 1568 if seed % 40 == 1 else number(1, 4))
    cells = torch.randint(0, levels, size, generator=generator)
    still = torch.rand(size[:3], generator=generator) < 0.5
    cells[still] = number(0, levels)
    moving = torch.rand(size[:3], generator=generator) < 0.6
    return torch.where(moving[..., None, None], cells, cells[:1]).to(torch.uint8)


@pytest.mark.seconds
@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name in RULES for kind in RULES[name].kinds])
def test_a_rule_keeps_the_cells_that_plain_numbers_keep(name, kind, record_property):
    for seed in range(cases(NUMBERS[kind])):
        cells = picture(seed, 1 if kind == "image" else 1 + seed % 5)
        frames, rows, columns = cells.shape[:3]
        scores = plain_scores(name, cells.tolist())
        for rate in RATES if RULES[name].is_rated else (None,):
            if rate is None:
                expected = [place for place, score in scores.items() if score]
            else:
                count = math.trunc(float(frames * rows * columns) * (1.0 - rate))
                count = max(rows * columns if name == "delta" else 1, count)
                if name == "delta-frames":
                    later = math.trunc(float(rows * columns) * (1.0 - rate))
                    count = rows * columns + (frames - 1) * max(1, later)
                expected = plain_choice(name, scores, count)
            kept = kept_cells(CellChoice(name=name, rate=rate), cells).tolist()
            assert kept == [(t * rows + h) * columns + w for t, h, w in expected], (seed, rate)
    record_property(NUMBERS[kind], cases(NUMBERS[kind]))


@pytest.mark.parametrize("name", [name for name in RULES if RULES[name].causal])
def test_a_causal_rule_keeps_of_each_frame_what_it_keeps_by_two_frames(name):
    for seed in range(60):
        cells = picture(seed, 2 + seed % 5)
        whole, choice = (
            math.prod(cells.shape[1:3]),
            CellChoice(name=name, rate=0.6 if RULES[name].is_rated else None),
        )
        kept = kept_cells(choice, cells)
        for t in range(1, len(cells)):
            two = kept_cells(choice, cells[t - 1 : t + 1])
            of_frame = kept[(kept >= t * whole) & (kept < (t + 1) * whole)] - t * whole
            assert torch.equal(of_frame, two[two >= whole] - whole)


@pytest.mark.parametrize("name", ["static", "contrast"])
def test_a_rule_after_the_tower_keeps_the_best_of_the_cells_that_are_there(name):
    for seed in range(60):
        cells = picture(seed, 1 if name == "contrast" else 1 + seed % 5)
        whole = math.prod(cells.shape[:3])
        there = torch.rand(whole, generator=torch.Generator().manual_seed(seed)).argsort()[: whole // 2 + 1]
        scores = dict(enumerate(plain_scores(name, cells.tolist()).values()))
        ranked = sorted(there.tolist(), key=lambda at: (-scores[at], at))
        for rate in RATES:
            count = max(1, math.trunc(float(whole) * (1.0 - rate)))
            kept = kept_among(CellChoice(name=name, rate=rate), cells, there.sort().values)
            assert kept.tolist() == sorted(ranked[:count]), (seed, rate)
