"""Levels beside embeddings on the host: joined, kept, cast, counted, dropped and written row by row.

The engine is a stand-in whose row of an output is a sum over that cell's own patches, so that every row of
every output is known without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from vlexport.recipes.demo.qwen3_vl import contents
from vlexport.recipes.demo.writing import write_checkpoint

from vlexport._build.token_graphs import eager_graphs
from vlexport.checkpoint import Checkpoint
from vlexport.errors import InputError
from vlexport.positions.rules import PositionRule
from vlexport.positions.splice import Placeholder
from vlexport.recipe import find_recipe
from vlexport.runtime.embed import Embedder
from vlexport.runtime.embedding_cache import EmbeddingCache
from vlexport.runtime.encoder import Encoder, EncoderOptions, EncoderOutput, EngineSession
from vlexport.runtime.outputs import Encoded, save
from vlexport.runtime.prune import Pruner
from vlexport.runtime.request import EncoderInput, Request, RequestState, TokenizedPrompt
from vlexport.specs import MediaItem, Range, Symbol

WIDTH = 4
NAMES = ("embeds", "level_0", "level_1")


def known(item: MediaItem) -> dict[str, Tensor]:
    """Return the rows that the stand-in gives for an item: a part of the sum for each."""
    cells = item.patches.unflatten(0, (-1, 4)).sum(1)
    return {name: cells[:, at * WIDTH : (at + 1) * WIDTH] for at, name in enumerate(NAMES)}


class StandIn:
    """An engine whose rows are known."""

    budgets = ()

    def __init__(self, inputs: Any) -> None:
        self.inputs = inputs

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        whole = MediaItem(kind="image", patches=inputs["patches"], grid=(1, 1, len(inputs["patches"])))
        return known(whole)


@pytest.fixture(scope="module")
def tower(tmp_path_factory):
    checkpoint = Checkpoint.open(
        write_checkpoint(tmp_path_factory.mktemp("levels") / "tiny", contents(), seed=0)
    )
    recipe = find_recipe("qwen3_vl")
    config = recipe.read_config(checkpoint)
    assert recipe.packing(config).outputs == NAMES
    item = video(recipe.row_width(config), 2)
    prepared = recipe.prepare(config, [item], "grouped")
    inputs = [
        SimpleNamespace(name=name, dtype=str(each.dtype).removeprefix("torch."))
        for name, each in prepared.items()
    ]
    rows = Symbol("tokens")
    manifest = SimpleNamespace(
        attention_form="grouped",
        outputs=[SimpleNamespace(shape=(rows, WIDTH))],
        profile=SimpleNamespace(range_of=lambda _: Range(1, 1, 65536)),
        proof=SimpleNamespace(deterministic="call"),
    )
    # A tower without a bundle: what opens one checks more than these tests need.
    made: Any = object.__new__(EngineSession)
    made.bundle, made.engine = SimpleNamespace(manifest=manifest), StandIn(inputs)
    made.recipe, made.config, made.packing, made.num_calls = recipe, config, recipe.packing(config), 0
    return made


def video(width: int, frames: int, seed: int = 0) -> MediaItem:
    source = torch.Generator().manual_seed(seed)
    rows = torch.randn(frames * 4 * 6, width, generator=source)
    return MediaItem(kind="video", patches=rows, grid=(frames, 4, 6), seconds_per_grid=1.0)


def encoded(item: MediaItem) -> Encoded:
    rows = known(item)
    return Encoded(
        kind=item.kind, embeds=rows.pop("embeds"), grid=item.grid, seconds_per_grid=1.0, layers=rows
    )


def assert_rows(given: Encoded, item: MediaItem) -> None:
    wanted = known(item)
    for name, rows in {"embeds": given.embeds, **given.layers}.items():
        assert torch.equal(rows, wanted.pop(name)), name
    assert not wanted


@pytest.mark.parametrize("max_tokens", [6, 13, 1000])
def test_items_and_cut_videos_have_the_levels_of_their_own_rows(tower, max_tokens):
    items = [video(tower.packing.row_width, frames, seed=frames) for frames in (7, 1, 4)]
    # Frames that share something stay together.
    items.append(replace(items[0], frame_groups=((0, 1), (2, 3), (4, 5), (6,))))
    encoder = Encoder(tower, EncoderOptions(max_tokens=max_tokens))
    for item, outcome in zip(items, encoder.encode([EncoderInput(item=each) for each in items]), strict=True):
        assert isinstance(outcome, EncoderOutput)
        assert (outcome.encoded.grid, outcome.encoded.frame_groups) == (item.grid, item.frame_groups)
        assert_rows(outcome.encoded, item)


def test_the_cache_keeps_levels_counts_their_bytes_and_owns_their_memory(tower):
    item = video(tower.packing.row_width, 3)
    given = encoded(item)
    size = 3 * 18 * WIDTH * 4
    cache = EmbeddingCache(size)
    cache.store(b"key", item, given)
    assert cache.num_bytes == size
    for rows in (given.embeds, *given.layers.values()):
        rows.zero_()
    found = cache.find(b"key")
    assert found is not None
    assert_rows(found.encoded, item)
    tight = EmbeddingCache(size - 1)
    tight.store(b"key", item, encoded(item))
    assert len(tight) == 0


def test_levels_are_cast_to_the_decoders_dtype_and_stand_at_the_columns_of_their_rows(tower):
    items = [video(tower.packing.row_width, frames, seed=frames) for frames in (2, 1)]
    state = RequestState(request=Request(prompt="?"))
    state.encoded, state.is_pruned = tuple(map(encoded, items)), False
    rooms = (Placeholder(offset=3, length=12), Placeholder(offset=17, length=6))
    state.prompt = TokenizedPrompt(ids=tuple(range(30)), placeholders=rooms)
    decoder: Any = SimpleNamespace(embed=lambda ids: torch.zeros(len(ids), WIDTH, dtype=torch.bfloat16))
    rule = PositionRule(kind="linear", merge=2)
    Embedder(decoder=decoder, rule=rule, graphs=eager_graphs(), levels=NAMES[1:]).embed(state)
    wanted = {name: torch.cat([known(each)[name] for each in items]).bfloat16() for name in NAMES}
    columns = [*range(3, 15), *range(17, 23)]
    assert torch.equal(state.embeds[columns], wanted["embeds"])
    assert state.levels is not None
    assert state.levels.columns.tolist() == columns
    for start, stop in ((0, 30), (4, 20), (14, 18)):
        (table,) = state.levels.between(start, stop)
        assert table.dtype == torch.bfloat16
        for at, name in enumerate(NAMES[1:]):
            whole = torch.zeros(30, WIDTH, dtype=torch.bfloat16)
            whole[columns] = wanted[name]
            assert torch.equal(table[at], whole[start:stop]), (name, start)
    assert state.levels.between(15, 17) == ()


def test_pruning_drops_the_same_rows_of_every_level(tower):
    item = video(tower.packing.row_width, 5)
    graphs = eager_graphs()
    pruner = Pruner(tower.recipe, 2, graphs)
    found = pruner.prune(encoded(item), 0.6, pruner.selector(None))
    assert found.kept is not None
    assert 6 <= len(found.kept) < 30
    for name, rows in {"embeds": found.embeds, **found.layers}.items():
        assert torch.equal(rows, known(item)[name][found.kept]), name


def test_a_file_of_embeddings_holds_every_level(tower, tmp_path):
    item = video(tower.packing.row_width, 2)
    save({"film": encoded(item)}, tmp_path / "rows.safetensors")
    stored = load_file(tmp_path / "rows.safetensors")
    for name, rows in known(item).items():
        assert torch.equal(stored[f"film.{name}"], rows)


def test_levels_of_another_length_are_refused_where_they_are_made(tower):
    given = encoded(video(tower.packing.row_width, 2))
    for wrong in ({"level_0": given.embeds[1:]}, {"level_0": given.embeds, "level_1": given.embeds[:0]}):
        with pytest.raises(InputError, match=r"level_\d: \d+ rows given, as many as embeddings"):
            replace(given, layers=wrong)
