"""Positions of pruned requests during chunked prefill, over a batch of requests.

N prompt columns, K rows of a window, D width of an embedding, C position channels (4 or 5).

A request's table always holds, at its first column not yet prefilled, the next free position; so a chunk
border may fall anywhere, media may come in any number and order, and no vision markers are searched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vlexport.errors import InputError
from vlexport.integrations.vllm.packed_embeds import PositionedRows, modality_of, unpack, with_modality
from vlexport.positions.mrope import check_blocks, join_rows, resumes_by_width
from vlexport.positions.plan import Span, Writer, plan_positions, write_positions
from vlexport.positions.rules import (
    PositionOptions,
    PromptPositions,
    check_integers,
    check_placements,
    delta_of,
)
from vlexport.positions.splice import Placeholder


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """The part of an item inside a step: columns counted from its offset, and their embedding rows."""

    placeholder: Placeholder
    start: int
    end: int
    first_row: int
    end_row: int

    @property
    def num_rows(self) -> int:
        return self.end_row - self.first_row


def items_in_window(placeholders: Sequence[Placeholder], start: int, end: int) -> tuple[int, int]:
    """Return first and last-plus-one item over the prompt columns `start` to `end`."""
    num_items = len(placeholders)
    low = next((i for i, each in enumerate(placeholders) if each.offset + each.length > start), num_items)
    high = next((i for i, each in enumerate(placeholders) if each.offset >= end), num_items)
    return low, high


def windows_between(placeholders: Sequence[Placeholder], start: int, end: int) -> list[Window]:
    """Return windows over the prompt columns `start` to `end`; items without rows there have none."""
    low, high = items_in_window(placeholders, start, end)
    windows = []
    for placeholder in placeholders[low:high]:
        first = max(start - placeholder.offset, 0)
        stop = min(end - placeholder.offset, placeholder.length)
        first_row, end_row = placeholder.rows_between(first, stop)
        if end_row > first_row:
            windows.append(
                Window(placeholder=placeholder, start=first, end=stop, first_row=first_row, end_row=end_row)
            )
    return windows


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillRequest:
    """One request of a prefill step.

    placeholders   of all its media, disjoint, in prompt order
    positions_3N   its stored table, int64 or int32, one column per prompt token. Text before the first media
                   item must be right; what comes later is overwritten as its chunk arrives.
    num_computed   prompt tokens prefilled before this step
    num_scheduled  tokens of this step; those beyond the prompt are ignored
    """

    placeholders: tuple[Placeholder, ...]
    positions_3N: Tensor
    num_computed: int
    num_scheduled: int

    def __post_init__(self) -> None:
        check_integers("stored positions", self.positions_3N)
        if self.positions_3N.dim() != 2 or self.positions_3N.shape[0] != 3:
            raise InputError(
                f"stored positions have shape {list(self.positions_3N.shape)}; expected (3, prompt tokens)."
            )
        if self.num_computed < 0 or self.num_scheduled < 0:
            raise InputError(
                f"{self.num_computed} computed and {self.num_scheduled} scheduled tokens; expected 0 or more."
            )
        check_placements([(each.offset, each.length) for each in self.placeholders], self.length)

    @property
    def length(self) -> int:
        return self.positions_3N.shape[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrunedStep:
    """Clean embeddings in the order given; per request its new positions, or None where nothing changed."""

    embeds: tuple[Tensor, ...]
    positions: tuple[PromptPositions | None, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class MultiModalPruner:
    """Rewrites positions as pruned media arrive, and cleans packed embeddings.

    hidden  width of the decoder's input embeddings, deepstack levels included
    write   `write_positions` or its compiled form
    """

    hidden: int
    options: PositionOptions = field(default_factory=PositionOptions)
    write: Writer = write_positions

    def recompute(
        self, embeds: Sequence[Tensor | PositionedRows], batch: Sequence[PrefillRequest]
    ) -> PrunedStep:
        """Write the positions of this step's media, and of the text after them.

        `embeds` are the windows of all requests in batch order, packed or followed by their channels.
        Columns after the chunk are provisional where media are still to come. A request with no window in
        this step is left alone.
        """
        windows = [self._windows(request) for request in batch]
        needed, given = sum(map(len, windows)), len(embeds)
        if needed != given:
            raise InputError(
                f"{given} embeddings given, the {len(batch)} requests need {needed} in this step; pass one "
                f"entry per media item that overlaps a request's columns, in batch order."
            )
        entries = [unpack(each, self.hidden) if isinstance(each, Tensor) else each for each in embeds]
        remaining = iter(entries)
        positions = [
            self._step(request, mine, [next(remaining) for _ in mine]) if mine else None
            for request, mine in zip(batch, windows, strict=True)
        ]
        return PrunedStep(embeds=tuple(self.strip(entries)), positions=tuple(positions))

    def strip(self, embeds: Sequence[Tensor | PositionedRows]) -> list[Tensor]:
        """Return the embeddings without position columns, for a draft model that keeps no table."""
        return [self._clean(each) for each in embeds]

    def _clean(self, embeds: Tensor | PositionedRows) -> Tensor:
        if isinstance(embeds, PositionedRows):
            self._check_width(embeds.embeds_KD.shape[1])
            return with_modality(embeds.embeds_KD, embeds.modality)
        self._check_width(embeds.shape[-1], at_least=True)
        return with_modality(embeds[:, : self.hidden], modality_of(embeds))

    def _check_width(self, width: int, *, at_least: bool = False) -> None:
        if width < self.hidden or (width > self.hidden and not at_least):
            raise InputError(
                f"embeddings of width {width}, the decoder takes {self.hidden}; pass the encoder's output of "
                f"the same checkpoint."
            )

    def _windows(self, request: PrefillRequest) -> list[Window]:
        end = min(request.num_computed + request.num_scheduled, request.length)
        return windows_between(request.placeholders, request.num_computed, end)

    def _step(
        self, request: PrefillRequest, windows: Sequence[Window], entries: Sequence[PositionedRows]
    ) -> PromptPositions:
        for window, entry in zip(windows, entries, strict=True):
            _check_rows(window, entry)
        table_3N = request.positions_3N.to(torch.int64)
        first = windows[0]
        start = first.placeholder.offset if first.start else request.num_computed
        anchor_1 = _anchor(request, table_3N, start)
        blocks = [entry.channels_CK.to(table_3N.device, torch.int64) for entry in entries]
        num_channels = check_blocks(blocks)
        if first.start:
            # An item that began in an earlier chunk goes on from the columns it has already written.
            stored_3K = table_3N[:, start : request.num_computed] - anchor_1
            rest_XK = blocks[0][3:, :1].expand(-1, first.start)
            blocks[0] = torch.cat([torch.cat([stored_3K, rest_XK]), blocks[0]], dim=1)
        spans = [
            Span(offset=each.placeholder.offset, length=each.placeholder.length, num_rows=each.end)
            for each in windows
        ]
        plan = plan_positions(spans, start, request.length).to(table_3N.device)
        by_width = resumes_by_width(num_channels, self.options)
        tail_3X = self.write(plan, join_rows(blocks), anchor_1, by_width)
        updated_3N = torch.cat([table_3N[:, :start], tail_3X], dim=1).to(request.positions_3N.dtype)
        return PromptPositions(table_RN=updated_3N, delta=delta_of(updated_3N))


def _check_rows(window: Window, entry: PositionedRows) -> None:
    where = f"placeholder at {window.placeholder.offset}"
    if window.placeholder.num_embeds != window.placeholder.length:
        raise InputError(
            f"{where}: {window.placeholder.num_embeds} of {window.placeholder.length} tokens take "
            f"embeddings; under pruning every token of a placeholder must. Build it without a mask."
        )
    if entry.channels_CK.shape[1] != window.num_rows:
        raise InputError(
            f"{where}: {entry.channels_CK.shape[1]} rows given, its columns {window.start} to {window.end} "
            f"need {window.num_rows}. Cut the encoder's output to the step's window."
        )


def _anchor(request: PrefillRequest, table_3N: Tensor, start: int) -> Tensor:
    """Return next free position at column `start`, from the stored table and without reading it back."""
    if start == 0:
        return torch.zeros(1, dtype=torch.int64, device=table_3N.device)
    starts_item = any(each.offset == start for each in request.placeholders)
    follows_item = any(each.offset + each.length == start for each in request.placeholders)
    if starts_item and not follows_item:
        return table_3N[2, start - 1 : start] + 1
    # After an earlier step this column holds the next free position, whatever comes at it.
    return table_3N[2, request.num_computed : request.num_computed + 1]
