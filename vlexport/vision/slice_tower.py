"""A vision tower over packed slices with a resampler at its end, and the tables that it asks for.

N patches of a call, C width, E width of tokens, G groups, R runs, B rows of a table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vlexport.specs import MediaItem
from vlexport.vision.layernorm_blocks import (
    FusedSegmentAttention,
    GeluMlp,
    LayerNorm,
    PatchKernel,
    SegmentBlock,
    SplitSegmentAttention,
)
from vlexport.vision.packed import take_cells
from vlexport.vision.resampler import Resampler, grid_waves, resized_places, time_waves
from vlexport.vision.slice_forms import FORMS, SlicePlaces
from vlexport.vision.slice_tables import along_line, bucket_ids, groups_of, pack, resize_weights
from vlexport.vision.tower import StagedTower


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerSizes:
    """Sizes, and what differs between towers of this shape.

    side            of the square table of positions, in patches
    learned_tables  positions of patches and of the resampler's keys are parameters, resized to each slice;
                    such towers also have one projection for queries, keys and values, and exact GELU
    grid_in_tower   positions of patches follow the slice's grid, not one long row
    frame_times     keys carry frame numbers, and the slices of several frames may share tokens
    """

    depth: int
    width: int
    heads: int
    inner: int
    patch: int
    side: int
    eps: float
    queries: int
    out_width: int
    out_heads: int
    learned_tables: bool
    grid_in_tower: bool
    frame_times: bool

    @property
    def query_side(self) -> int:
        """Side of the learned table of the resampler."""
        return math.isqrt(self.queries)


class Layout(NamedTuple):
    """Everything about a call but the contents of its patches."""

    order_N: Tensor
    places: SlicePlaces
    inputs: Mapping[str, Tensor]


class SliceTower(StagedTower):
    """Tower and resampler; while blocks run, rows of equal groups lie side by side."""

    def __init__(self, sizes: TowerSizes, form: str = "runs") -> None:
        super().__init__()
        self.sizes = sizes
        self.form = FORMS[form]
        learned = sizes.learned_tables
        self.embed = PatchKernel((3, sizes.patch, sizes.patch), sizes.width)
        self.positions = nn.Parameter(torch.empty(*(1,) * learned, sizes.side**2, sizes.width))
        self.blocks = nn.ModuleList(_block(sizes) for _ in range(sizes.depth))
        self.norm = LayerNorm(sizes.width, eps=sizes.eps)
        widths = (sizes.width, sizes.out_width)
        self.resampler = Resampler(widths, sizes.queries, sizes.out_heads, learned_table=learned)

    def begin(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Layout]:
        """Bring patches into the order of the blocks, embed them, add what tells their places."""
        layout = Layout(inputs["order"], self.form.places(inputs), inputs)
        x_NC = self.embed(self.arrange(inputs["patches"], layout))
        return x_NC + self._places(inputs).to(x_NC.dtype), layout

    def arrange(self, x: Tensor, layout: Layout) -> Tensor:
        return x.index_select(0, layout.order_N)

    def restore(self, x: Tensor, layout: Layout) -> Tensor:
        return torch.zeros_like(x).index_copy(0, layout.order_N.long(), x)

    def finish(self, x: Tensor, layout: Layout) -> dict[str, Tensor]:
        """Ask every group and put the answers back in the order of the items."""
        _, groups, answer_G = layout.places
        tokens = self.resampler(self.norm(x), self._key_places(layout.inputs), groups)
        return {"embeds": take_cells(tokens, answer_G, self.sizes.queries, groups.num_rows)}

    def _places(self, inputs: Mapping[str, Tensor]) -> Tensor:
        table_BC = self.positions.flatten(0, -2)
        if self.sizes.learned_tables:
            return resized_places(inputs["row_weights"], inputs["column_weights"], table_BC)
        return table_BC.index_select(0, inputs["position_ids"])

    def _key_places(self, inputs: Mapping[str, Tensor]) -> Tensor:
        if self.resampler.pos_embed is not None:
            weights = (inputs["key_row_weights"], inputs["key_column_weights"])
            return resized_places(*weights, self.resampler.pos_embed)
        places_NE = grid_waves(inputs["cells"], self.sizes.out_width)
        if self.sizes.frame_times:
            places_NE = places_NE + time_waves(inputs["frames"], self.sizes.out_width)
        return places_NE


def _block(sizes: TowerSizes) -> SegmentBlock:
    attention = FusedSegmentAttention if sizes.learned_tables else SplitSegmentAttention
    return SegmentBlock(
        sizes.width,
        sizes.eps,
        attention(sizes.width, sizes.heads),
        GeluMlp(sizes.width, sizes.inner, exact=sizes.learned_tables),
    )


def call_tables(media: Sequence[MediaItem], sizes: TowerSizes, form: str) -> dict[str, Tensor]:
    """Everything a call needs beside its patches: integers as int32, weights of resized tables as float32."""
    packed = pack(groups_of(media))
    tables = {"order": packed.order_N, **FORMS[form].tables(packed, sizes.queries)}
    if not sizes.learned_tables:
        places = (packed.cell_N2, packed.sides_N2)
        tables["position_ids"] = bucket_ids(
            *(places if sizes.grid_in_tower else along_line(*places)), sizes.side
        )
        tables["cells"] = packed.cell_N2
    if sizes.frame_times:
        tables["frames"] = packed.frame_N
    tables = {name: table.to(torch.int32) for name, table in tables.items()}
    if sizes.learned_tables:
        rows, columns = resize_weights(packed, sizes.side, antialias=True)
        tables |= {"row_weights": rows, "column_weights": columns}
        rows, columns = resize_weights(packed, sizes.query_side, antialias=False)
        tables |= {"key_row_weights": rows, "key_column_weights": columns}
    return tables
