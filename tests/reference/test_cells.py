"""Towers on some cells of their items against transformers' own blocks; the rules that choose them."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest
import torch
from vlexport.recipes.demo import qwen2_5_vl, qwen2_vl, qwen3_vl
from vlexport.recipes.demo.writing import write_checkpoint

from vlexport.checkpoint import Checkpoint
from vlexport.pruning.cells import RULES, CellChoice
from vlexport.pruning.pixels import kept_cells
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


# The rules once more, cell by cell and byte by byte.


def plain_scores(name, cells, num_kept):
    """Return the cells that stay, from nested lists [frame][row][column][colour][byte]."""
    frames, rows, columns = len(cells), len(cells[0]), len(cells[0][0])
    places = [(t, h, w) for t in range(frames) for h in range(rows) for w in range(columns)]

    def flat(t, h, w):
        return [byte for colour in cells[t][h][w] for byte in colour]

    def apart(one, other):
        return sum(abs(a - b) for a, b in zip(one, other, strict=True))

    def best(scores, count, among):
        return sorted(sorted(among, key=lambda place: (-scores[place], place))[:count])

    def by_frame(scores, count, among):
        each, rest = divmod(count, len(among))
        sums = {t: sum(scores[t, h, w] for h in range(rows) for w in range(columns)) for t in among}
        more = sorted(among, key=lambda t: (-sums[t], t))[:rest]
        return [
            place
            for t in among
            for place in best(scores, each + (t in more), [p for p in places if p[0] == t])
        ]

    if name in ("static", "static-frames"):
        middle = {
            (h, w): [
                statistics.median_low(bytes_)
                for bytes_ in zip(*(flat(t, h, w) for t in range(frames)), strict=True)
            ]
            for h in range(rows)
            for w in range(columns)
        }
        scores = {(t, h, w): apart(flat(t, h, w), middle[h, w]) for t, h, w in places}
        return (
            best(scores, num_kept, places)
            if name == "static"
            else by_frame(scores, num_kept, list(range(frames)))
        )
    if name == "delta":
        scores = {(t, h, w): apart(flat(t, h, w), flat(t - 1, h, w)) for t, h, w in places if t}
        first = [place for place in places if place[0] == 0]
        return first + (by_frame(scores, num_kept - len(first), list(range(1, frames))) if frames > 1 else [])
    if name == "contrast":
        scores = {}
        for place in places:
            t, h, w = place
            scores[place] = sum(
                sum(abs(len(colour) * byte - sum(colour)) for byte in colour) for colour in cells[t][h][w]
            )
        return best(scores, num_kept, places)
    assert name == "predicted"
    kept = []
    for t, h, w in places:
        x = flat(t, h, w)
        if h == 0 and w == 0:
            dropped = False
        elif h == 0:
            dropped = x == flat(t, h, w - 1)
        elif w == 0:
            dropped = x == flat(t, h - 1, w)
        else:
            left, above, corner = flat(t, h, w - 1), flat(t, h - 1, w), flat(t, h - 1, w - 1)
            dropped = x == (above if corner == left and corner != above else left)
        if t and x == flat(t - 1, h, w):
            dropped = True
        if not dropped:
            kept.append((t, h, w))
    return kept


def picture(seed, frames):
    """Return a small picture or clip with areas of one colour, edges and noise, as cells."""
    generator = torch.Generator().manual_seed(seed)

    def number(low, high):
        return int(torch.randint(low, high, (1,), generator=generator))

    rows, columns, levels = number(1, 6), number(1, 6), (2, 3, 256)[number(0, 3)]
    size = (frames, rows, columns, 3, number(1, 4))
    cells = torch.randint(0, levels, size, generator=generator)
    still = torch.rand(size[:3], generator=generator) < 0.5
    cells[still] = number(0, levels)
    moving = torch.rand(size[:3], generator=generator) < 0.6
    return torch.where(moving[..., None, None], cells, cells[:1]).to(torch.uint8)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_keeps_the_cells_that_plain_numbers_keep(name):
    rule = RULES[name]
    for seed in range(120):
        cells = picture(seed, 1 if rule.kinds == ("image",) else 1 + seed % 5)
        frames, rows, columns = cells.shape[:3]
        for rate in (0.0, 0.3, 0.5, 0.7, 0.9, 0.99) if rule.is_rated else (None,):
            choice = CellChoice(name=name, rate=rate)
            whole = frames * rows * columns
            count = math.trunc(float(whole) * (1.0 - (rate or 0.0)))
            count = max(rows * columns if name == "delta" else 1, count)
            expected = [(t * rows + h) * columns + w for t, h, w in plain_scores(name, cells.tolist(), count)]
            assert kept_cells(choice, cells).tolist() == expected, (seed, rate)
