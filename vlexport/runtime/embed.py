"""Embed: embeddings of the whole prompt, media in their room, and the position of each token.

N prompt tokens, V rows of media, D width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from vlexport._build.token_graphs import TokenGraphs
from vlexport.bundle.manifest import LAYOUT
from vlexport.positions.mrope import (
    frame_positions,
    initial_positions,
    pruned_positions,
)
from vlexport.positions.rules import PlacedMedia, PositionRule, PromptPositions
from vlexport.positions.splice import check_rows, merge_visual, visual_slots
from vlexport.runtime.decoder import Decoder
from vlexport.runtime.outputs import Encoded
from vlexport.runtime.request import MediaLevels, RequestState
from vlexport.vision.static_shapes import to_device


@dataclass(frozen=True, kw_only=True, slots=True)
class Embedder:
    """Embeddings and positions of prompts for one decoder.

    counts_frames    position time counts the frames of a grid, whatever time is between them
    levels           names of the outputs that the decoder adds after its first layers, in order
    """

    decoder: Decoder
    rule: PositionRule
    graphs: TokenGraphs
    counts_frames: bool = False
    levels: Sequence[str] = ()

    def embed(self, state: RequestState) -> RequestState:
        return self.fill(self.place(state))

    def place(self, state: RequestState) -> RequestState:
        with state.timing("positions"):
            state.positions = self._positions(state)
            check_rows(state.prompt.placeholders, [len(item.embeds) for item in state.encoded])
        return state

    def fill(self, state: RequestState, start: int = 0) -> RequestState:
        """Embed the columns of a placed prompt from `start` on."""
        with state.timing("positions"):
            ids, state.levels = state.prompt.ids, None
            embeds_ND = self.decoder.embed(torch.tensor(ids[start:], dtype=torch.int64))
            slots_V = visual_slots(state.prompt.placeholders, len(ids))
            before = int((slots_V < start).sum())
            slots_V = slots_V[before:] - start
            if len(slots_V):
                device, dtype = embeds_ND.device, embeds_ND.dtype

                def rows_of(each: Iterable[Tensor]) -> Tensor:
                    return torch.cat([to_device(rows, device).to(dtype) for rows in _after(before, each)])

                visual_VD = rows_of(item.embeds for item in state.encoded)
                embeds_ND = merge_visual(embeds_ND, visual_VD, to_device(slots_V, device))
                levels = [rows_of(item.layers[name] for item in state.encoded) for name in self.levels]
                state.levels = MediaLevels(rows=torch.stack(levels), columns=slots_V) if levels else None
            state.embeds = embeds_ND
        return state

    def _grid(self, item: Encoded) -> tuple[int, int, int]:
        """Return the grid of an item, tiles of an image as one frame where positions do not depend on it."""
        frames, rows, columns = item.grid
        is_tiled = item.kind == "image" and self.rule.kind == "linear"
        return (1, frames * rows, columns) if is_tiled else item.grid

    def _positions(self, state: RequestState) -> PromptPositions:
        ids = state.prompt.ids
        media = [
            PlacedMedia(
                modality=item.kind,  # type: ignore[arg-type]
                offset=room.offset,
                length=room.length,
                grid=self._grid(item),
                seconds_per_grid=1.0 if self.counts_frames else item.seconds_per_grid,
                frame_numbers=item.frame_numbers,
            )
            for room, item in zip(state.prompt.placeholders, state.encoded, strict=True)
        ]
        kept, write = [item.kept for item in state.encoded], partial(self.graphs.write, forms=state.forms)
        drops = any(rows is not None for rows in kept)
        if state.is_pruned and self.rule.kind == "time_as_text":
            if drops:
                state.forms["layout"] = f"eager: {LAYOUT}"
            # On the host already, since the text was written from them.
            on_host = [None if rows is None else rows.cpu() for rows in kept]
            return frame_positions(ids, media, on_host, self.rule, write=write)
        # Where images alone are in a pruned prompt, all of it is known on the host.
        if state.is_pruned and self.rule.kind == "time_scaled" and drops:
            write_kept = partial(self.graphs.write_kept, forms=state.forms)
            return pruned_positions(len(ids), media, kept, self.rule, write=write_kept)
        return initial_positions(ids, media, self.rule, pruned=state.is_pruned, write=write)


def _after(num_rows: int, each: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield rows of several tensors without the first so many."""
    for rows in each:
        yield rows[num_rows:]
        num_rows = max(0, num_rows - len(rows))
