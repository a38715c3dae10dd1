"""Positions of whole prompts: before pruning, and after it.

N prompt columns, L tokens of a block, K kept tokens, M items (the first one empty), X frame times.

Every function is pure: positions follow from the prompt's length, the placeholders and the blocks (or kept
indices), whatever the number and order of media. A prefill chunk takes its columns of the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vlexport.errors import InputError
from vlexport.positions.expanded import expanded_video, timestamps_in
from vlexport.positions.media import (
    frame_blocks,
    full_positions,
    pruned_channels,
    pruned_times,
)
from vlexport.positions.plan import (
    BlockRows,
    KeptCells,
    KeptWriter,
    Writer,
    move_together,
    plan_positions,
    write_kept_positions,
    write_positions,
)
from vlexport.positions.rules import (
    PlacedMedia,
    PositionRule,
    PromptPositions,
    check_placements,
    delta_of,
    in_prompt_order,
    merged_sides,
    num_tokens,
)


def initial_positions(
    ids: Sequence[int],
    media: Sequence[PlacedMedia],
    rule: PositionRule,
    *,
    pruned: bool = False,
    write: Writer = write_positions,
) -> PromptPositions:
    """Return positions of a whole prompt from its structure alone; media in any order.

    With `pruned`, placeholders hold kept tokens only and text advances as in a pruned request; the columns
    of such a placeholder are provisional (the first cells of its grid) until the kept tokens are known.
    A linear rule gives one row, the others three. `write` is `write_positions` or its compiled form.
    """
    ordered = in_prompt_order(media, len(ids))
    if rule.kind == "linear":
        return PromptPositions(table_RN=torch.arange(len(ids))[None], delta=torch.tensor(0))
    placed: list[tuple[int, Tensor]] = []
    for item in ordered:
        if rule.kind == "time_as_text" and item.modality == "video":
            placed += frame_blocks(ids, item, rule, pruned=pruned)
        else:
            placed.append((item.offset, _whole_block(item, rule, pruned=pruned)))
    return _write(len(ids), placed, write)


def frame_positions(
    ids: Sequence[int],
    media: Sequence[PlacedMedia],
    kept: Sequence[Tensor | None],
    rule: PositionRule,
    *,
    write: Writer = write_positions,
) -> PromptPositions:
    """Return positions of a prompt with written-out time: those of the un-pruned one, less what was dropped.

    kept   one per media item: ascending indices of the tokens that the prompt has room for; None keeps all
    write  `write_positions` or its compiled form
    """
    device = next((index.device for index in kept if index is not None), torch.device("cpu"))
    placed: list[tuple[int, Tensor]] = []
    for item, index_K in sorted(zip(media, kept, strict=True), key=lambda pair: pair[0].offset):
        if item.modality == "image":
            block_4L = _image_block(item, rule, index_K).to(device)
        else:
            all_G = torch.arange(num_tokens(item.grid, rule.merge), device=device)
            kept_K = all_G if index_K is None else index_K
            block_4L = _expanded_block(ids[item.offset : item.end], item, rule, kept_K)
        placed.append((item.offset, block_4L))
    return _write(len(ids), placed, write)


def pruned_positions(
    num_columns: int,
    media: Sequence[PlacedMedia],
    kept: Sequence[Tensor | None],
    rule: PositionRule,
    *,
    write: KeptWriter = write_kept_positions,
) -> PromptPositions:
    """Return positions of a pruned prompt straight from kept indices, for the time-scaled rule.

    kept   one per media item, in the order of `media`: ascending int64 indices into the item's tokens, all on
           one device; None keeps every token (images)
    write  `write_kept_positions` or its compiled form
    """
    if rule.kind != "time_scaled":
        raise InputError(
            f"position rule '{rule.kind}' given; kept indices alone give positions under 'time_scaled' only. "
            f"Use frame_positions where time is written out."
        )
    if len(media) != len(kept):
        raise InputError(f"{len(media)} media and {len(kept)} kept lists given; expected one list per item.")
    pairs = sorted(zip(media, kept, strict=True), key=lambda pair: pair[0].offset)
    ordered = in_prompt_order(media, num_columns)
    if not ordered:
        return _write(num_columns, [], write_positions)
    device = next((index.device for _, index in pairs if index is not None), torch.device("cpu"))
    kept_S = torch.cat(
        [torch.zeros(1, dtype=torch.int64, device=device)]
        + [_kept_indices(item, index, rule.merge, device) for item, index in pairs]
    )
    plan = plan_positions([(item.offset, item.length) for item in ordered], num_columns).to(device)
    cells = _kept_cells(ordered, rule, kept_S)
    table_3N, delta = write(plan, cells, rule.options.resumes_by_width)
    return PromptPositions(table_RN=table_3N, delta=delta)


def _write(num_columns: int, placed: Sequence[tuple[int, Tensor]], write: Writer) -> PromptPositions:
    placements = [(offset, block.shape[1]) for offset, block in placed]
    check_placements(placements, num_columns)
    if not placed:
        table_3N = torch.arange(num_columns).expand(3, num_columns).clone()
        return PromptPositions(table_RN=table_3N, delta=delta_of(table_3N))
    blocks = [block for _, block in placed]
    # Text takes its coordinates from the zeros before the blocks.
    rows = BlockRows(*torch.cat([blocks[0].new_zeros(4, 1), *blocks], dim=1))
    plan = plan_positions(placements, num_columns).to(blocks[0].device)
    table_3N = write(plan, rows, blocks[0].new_zeros(1), True)
    return PromptPositions(table_RN=table_3N, delta=delta_of(table_3N))


def _whole_block(item: PlacedMedia, rule: PositionRule, *, pruned: bool) -> Tensor:
    tokens = num_tokens(item.grid, rule.merge)
    if item.length > tokens or (item.length < tokens and not pruned):
        raise InputError(
            f"{item.modality} at {item.offset}: its placeholder has {item.length} tokens, its grid "
            f"{item.grid} gives {tokens}. Expand the prompt by the grid, or mark the prompt as pruned."
        )
    if not pruned:
        block_4L = full_positions(item, rule).T.clone()
        spatial = rule.options.resume == "spatial"
        block_4L[3] = max(merged_sides(item.grid, rule.merge)) if spatial else block_4L[:3].amax() + 1
        return block_4L
    block_4L = pruned_channels(item, rule, torch.arange(item.length)).clone()
    if not rule.options.resumes_by_width or rule.kind == "time_as_text":
        block_4L[3] = block_4L[:3].amax() + 1
    return block_4L


def _image_block(item: PlacedMedia, rule: PositionRule, kept_K: Tensor | None) -> Tensor:
    """Return the block of an image; what is kept of it has its place in the whole one."""
    if kept_K is None:
        return _whole_block(item, rule, pruned=False)
    whole = replace(item, length=num_tokens(item.grid, rule.merge))
    kept_K = _kept_indices(item, kept_K, rule.merge, kept_K.device)
    return _whole_block(whole, rule, pruned=False).index_select(1, kept_K)


def _expanded_block(ids_L: Sequence[int], item: PlacedMedia, rule: PositionRule, kept_K: Tensor) -> Tensor:
    video = expanded_video(kept_K, item.grid, timestamps_in(ids_L, item.grid, rule), rule)
    if video.ids_L.tolist() != list(ids_L):
        raise InputError(
            f"video at {item.offset}: {video.tokens_per_frame_T.tolist()} tokens of its frames are kept, its "
            "placeholder has room for others. Write the prompt again once the kept tokens are known."
        )
    channels_3L = video.channels_5L[:3]
    return torch.cat([channels_3L, (channels_3L.amax() + 1).expand(1, len(ids_L))])


def _kept_indices(item: PlacedMedia, index_K: Tensor | None, merge: int, device: torch.device) -> Tensor:
    tokens = num_tokens(item.grid, merge)
    if index_K is None:
        index_K = torch.arange(tokens, device=device)
    if index_K.dtype != torch.int64 or index_K.dim() != 1:
        raise InputError(
            f"kept indices of the {item.modality} at {item.offset} are {index_K.dtype} of shape "
            f"{list(index_K.shape)}; expected a flat int64 tensor."
        )
    if index_K.shape[0] != item.length or item.length > tokens:
        raise InputError(
            f"{item.modality} at {item.offset}: its placeholder has {item.length} tokens, "
            f"{index_K.shape[0]} of {tokens} are kept. Size the placeholder with the selector's own count."
        )
    return index_K


def _kept_cells(ordered: Sequence[PlacedMedia], rule: PositionRule, kept_S: Tensor) -> KeptCells:
    sides = [merged_sides(item.grid, rule.merge) for item in ordered]
    num_times = [item.grid[0] for item in ordered]
    moved = move_together(
        [
            torch.tensor([1, *(rows * columns for rows, columns in sides)]),
            torch.tensor([1, *(columns for _, columns in sides)]),
            torch.tensor([0, 1, *num_times[:-1]]).cumsum(0),
            torch.cat([torch.zeros(1, dtype=torch.int64), *(pruned_times(item, rule) for item in ordered)]),
        ],
        kept_S.device,
    )
    return KeptCells(kept_S, *moved)
