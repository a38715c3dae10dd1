"""Embed: embeddings of the whole prompt, media in their room, and the position of each token.

N prompt tokens, V rows of media, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

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
        with state.timing("positions"):
            state.positions = self._positions(state)
            prompt = state.prompt
            check_rows(prompt.placeholders, [len(item.embeds) for item in state.encoded])
            embeds_ND = self.decoder.embed(torch.tensor(prompt.ids, dtype=torch.int64))
            if state.encoded:
                device, dtype = embeds_ND.device, embeds_ND.dtype
                visual_VD = torch.cat([to_device(item.embeds, device).to(dtype) for item in state.encoded])
                slots_V = visual_slots(prompt.placeholders, len(prompt.ids))
                embeds_ND = merge_visual(embeds_ND, visual_VD, to_device(slots_V, device))
                levels = [
                    torch.cat([to_device(item.layers[name], device).to(dtype) for item in state.encoded])
                    for name in self.levels
                ]
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
