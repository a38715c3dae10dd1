"""Room for visual embeddings in a prompt, and the merge of both.

Places are index tensors made on the host from the placeholders; `merge_visual` only copies rows by index, so
it compiles without graph breaks and never waits for a device. Inside a compiled graph no `InputError` can be
raised (torch wraps it): call `check_rows` before it.   N prompt tokens, V visual rows, D width,
S deepstack levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vlexport.errors import InputError
from vlexport.positions.rules import check_placeholder, check_placements


@dataclass(frozen=True, kw_only=True, slots=True)
class Placeholder:
    """Room of one media item in the prompt; `is_embed` marks which slots are rows of it, None means all."""

    offset: int
    length: int
    is_embed: tuple[bool, ...] | None = None

    def __post_init__(self) -> None:
        check_placeholder(self.offset, self.length)
        if self.is_embed is not None and len(self.is_embed) != self.length:
            raise InputError(
                f"placeholder at {self.offset}: is_embed has {len(self.is_embed)} entries for "
                f"{self.length} tokens; give one per token, or None where every token is an embedding."
            )

    @property
    def num_embeds(self) -> int:
        return self.length if self.is_embed is None else sum(self.is_embed)

    @property
    def columns(self) -> Tensor:
        every = torch.arange(self.offset, self.offset + self.length)
        return every if self.is_embed is None else every[torch.tensor(self.is_embed, dtype=torch.bool)]


def visual_slots(placeholders: Sequence[Placeholder], num_tokens: int) -> Tensor:
    """Return prompt columns of all visual rows, int64 on the host; placeholders in prompt order."""
    check_placements([(item.offset, item.length) for item in placeholders], num_tokens)
    return torch.cat([torch.arange(0), *(item.columns for item in placeholders)])


def check_rows(placeholders: Sequence[Placeholder], row_counts: Sequence[int]) -> None:
    """Refuse encoder outputs whose rows are not what their placeholders hold room for."""
    if len(placeholders) != len(row_counts):
        raise InputError(
            f"{len(row_counts)} encoder outputs given for {len(placeholders)} placeholders; give one each."
        )
    room = [item.num_embeds for item in placeholders]
    for index, (placeholder, rows) in enumerate(zip(placeholders, row_counts, strict=True)):
        if rows != room[index]:
            raise InputError(
                f"media item {index}: {rows} embeddings given, its placeholder at {placeholder.offset} "
                f"has room for {room[index]} (all items: {' + '.join(map(str, row_counts))} = "
                f"{sum(row_counts)} given, {sum(room)} expected). "
                f"Expand the prompt with the pruning rate and the grids that the encoder ran with."
            )


def merge_visual(text_ND: Tensor, visual_VD: Tensor, slots_V: Tensor) -> Tensor:
    """Return the text's embeddings, in their dtype, with visual row i at column `slots_V[i]` (distinct)."""
    check_count(visual_VD.shape[0], slots_V.shape[0])
    if visual_VD.shape[1] != text_ND.shape[1]:
        raise InputError(
            f"visual embeddings are {visual_VD.shape[1]} wide, the text's {text_ND.shape[1]}; "
            f"split deepstack levels off first, or use the encoder of this decoder's checkpoint."
        )
    return text_ND.index_copy(0, slots_V, visual_VD.to(text_ND.dtype))


def check_count(num_rows: int, num_slots: int) -> None:
    """Refuse rows and slots that are not equally many."""
    if num_rows != num_slots:
        raise InputError(
            f"{num_rows} visual embeddings given, the prompt has room for {num_slots}; "
            f"expand the prompt with the pruning rate and the grids that the encoder ran with."
        )


def deepstack_tables(levels_SVD: Tensor, slots_V: Tensor, num_tokens: int) -> Tensor:
    """Return terms for the hidden states after decoder layer 0, 1, ...: [S, N, D], zero on text rows."""
    check_count(levels_SVD.shape[1], slots_V.shape[0])
    blank_SND = levels_SVD.new_zeros((levels_SVD.shape[0], num_tokens, levels_SVD.shape[2]))
    return blank_SND.index_copy(1, slots_V, levels_SVD)
