"""Prefill in chunks of every size, chunk x n - 1, n and n + 1 tokens among them: the answer of one chunk."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.runtime.recorded import CHECKPOINT
from tests.tiny_minicpmv import Tiny, write_tiny_minicpmv
from vlexport.checkpoint import Checkpoint
from vlexport.positions.mrope import initial_positions, pruned_positions
from vlexport.positions.rules import PlacedMedia, PositionRule, PromptPositions
from vlexport.recipe import find_recipe
from vlexport.runtime import generate
from vlexport.runtime.decoder import DecoderOptions, TransformersDecoder, load_text_model
from vlexport.runtime.request import Generation, Request, RequestState

# Float32 sums in another order, on logits around 1.
LIMIT = 2e-5
RULE = PositionRule(kind="time_scaled", merge=2, tokens_per_second=2.0)
# Text, an image of 2x3 tokens, text, a video of 3 frames of 2x2 tokens of which 7 are kept when pruned, text.
IMAGE, VIDEO = (3, (1, 2, 3)), (12, (3, 2, 2))
MEDIA: Any = (("image", IMAGE), ("video", VIDEO))
KEPT = {"image": list(range(6)), "video": [0, 1, 2, 3, 5, 8, 11]}


def media(*, pruned: bool) -> list[PlacedMedia]:
    return [
        PlacedMedia(
            modality=kind,
            offset=offset,
            length=len(KEPT[kind]) if pruned else frames * rows * columns,
            grid=(frames, 2 * rows, 2 * columns),
            seconds_per_grid=1.0 if kind == "video" else None,
        )
        for kind, (offset, (frames, rows, columns)) in MEDIA
    ]


def table(count: int, *, pruned: bool) -> Tensor:
    if not pruned:
        return initial_positions([0] * count, media(pruned=False), RULE).table_RN
    kept = [torch.tensor(KEPT[kind]) for kind in ("image", "video")]
    return pruned_positions(count, media(pruned=True), kept, RULE).table_RN


def logits(decoder: Any, embeds: Tensor, positions: Tensor, chunk: int | None) -> Tensor:
    generation = Generation(prefill_chunk=chunk, max_new_tokens=1)
    state = RequestState(request=Request(prompt="a", generation=generation))
    state.embeds, state.positions = embeds, PromptPositions(table_RN=positions, delta=torch.tensor(0))
    return generate.prefill(decoder, state).logits


def decoder_of(checkpoint: Checkpoint, recipe: str) -> TransformersDecoder:
    language = find_recipe(recipe).language
    assert language is not None
    return TransformersDecoder(load_text_model(checkpoint, language, "float32"), DecoderOptions())


def embeddings(width: int, count: int) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("pruned", [False, True])
def test_answers_do_not_depend_on_where_chunks_end(pruned: bool) -> None:
    decoder = decoder_of(Checkpoint.open(CHECKPOINT), "qwen2_5_vl")
    count = VIDEO[0] + (len(KEPT["video"]) if pruned else 12) + 5
    embeds, positions = embeddings(decoder.width, count), table(count, pruned=pruned)
    wanted = decoder.begin(count + 1).step(embeds, positions)
    for chunk in range(1, count + 2):
        torch.testing.assert_close(logits(decoder, embeds, positions, chunk), wanted, atol=LIMIT, rtol=0)


@pytest.mark.parametrize("beyond", [-1, 0, 1])
@pytest.mark.parametrize("times", [1, 2])
def test_chunks_of_the_library_s_own_size_end_anywhere(
    beyond: int, times: int, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    """Under a linear rule; a chunk of 6 tokens for one of 2,048."""
    path = write_tiny_minicpmv(tmp_path / "checkpoint", Tiny(depth=1))
    decoder = decoder_of(Checkpoint.open(path), "minicpmv")
    monkeypatch.setattr(generate, "CHUNK", 6)
    count = 6 * times + beyond
    embeds, positions = embeddings(decoder.width, count), torch.arange(count)[None]
    wanted = decoder.begin(count + 1).step(embeds, positions)
    torch.testing.assert_close(logits(decoder, embeds, positions, None), wanted, atol=LIMIT, rtol=0)
