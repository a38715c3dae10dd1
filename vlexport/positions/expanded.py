"""The true layout of a pruned video whose prompt writes time as text: ids and five position channels.

T frames, J text tokens (timestamps and markers), K kept tokens, L = J + K tokens of the placeholder.

Pruning removes tokens, not positions: a remaining token has its position of the un-pruned video.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vlexport.errors import InputError
from vlexport.positions.plan import move_together
from vlexport.positions.rules import FrameMarkers, Grid, PositionRule, merged_sides


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpandedVideo:
    """One pruned video's placeholder, frame by frame.

    channels_5L       `[time, row, column, is vision start, is video]`, counted from the video's start
    video_columns_K   where the kept tokens are among the L, in order; the rest is text
    """

    ids_L: Tensor
    channels_5L: Tensor
    tokens_per_frame_T: Tensor
    video_columns_K: Tensor


def expanded_video(
    kept_K: Tensor,
    grid_thw: Grid,
    timestamps: Sequence[Sequence[int]],
    rule: PositionRule,
) -> ExpandedVideo:
    """Lay out the kept tokens between the timestamps, frame by frame; nothing is read back from the device.

    kept_K      ascending int64 indices into the video's tokens
    timestamps  token ids of each frame's timestamp text
    """
    if kept_K.dtype != torch.int64 or kept_K.dim() != 1:
        raise InputError(
            f"kept indices are {kept_K.dtype} of shape {list(kept_K.shape)}; expected a flat int64 tensor."
        )
    markers = rule.markers
    if markers is None:
        raise InputError(
            f"position rule '{rule.kind}' has no frame markers; an expanded layout needs 'time_as_text'."
        )
    if len(timestamps) != grid_thw[0]:
        raise InputError(
            f"{len(timestamps)} timestamps given for the {grid_thw[0]} frames of grid {grid_thw}; "
            f"expected the token ids of one timestamp per frame."
        )
    rows, columns = merged_sides(grid_thw, rule.merge)
    text, frames = _walk_frames(timestamps, rows, columns, markers)
    lists = [*zip(*text, strict=True), *zip(*frames, strict=True)]
    moved = move_together([torch.tensor(values) for values in lists], kept_K.device)
    position_J, is_start_J, id_J, frames_before_J, first_T1, text_before_T1, base_T1 = moved
    kept_before_T1 = torch.searchsorted(kept_K, first_T1)
    frame_K = kept_K // (rows * columns)
    cell_K = kept_K - frame_K * (rows * columns)
    row_K = cell_K // columns
    base_K = base_T1.index_select(0, frame_K)
    zero_K, zero_J = torch.zeros_like(kept_K), torch.zeros_like(id_J)
    axes_3K = [base_K, base_K + row_K, base_K + cell_K - row_K * columns]
    values_6K = torch.stack([*axes_3K, zero_K, zero_K + 1, zero_K + markers.video])
    values_6J = torch.stack([position_J] * 3 + [is_start_J, zero_J, id_J])
    column_K = zero_K.add(1).cumsum(0) - 1 + text_before_T1.index_select(0, frame_K)
    column_J = zero_J.add(1).cumsum(0) - 1 + kept_before_T1.index_select(0, frames_before_J)
    values_6L = torch.cat([values_6J, values_6K], dim=1)
    columns_L = torch.cat([column_J, column_K])
    values_6L = torch.zeros_like(values_6L).index_copy(1, columns_L, values_6L)
    return ExpandedVideo(
        ids_L=values_6L[5],
        channels_5L=values_6L[:5],
        tokens_per_frame_T=kept_before_T1.diff(),
        video_columns_K=column_K,
    )


def timestamps_in(ids_L: Sequence[int], grid_thw: Grid, rule: PositionRule) -> list[list[int]]:
    """Return the ids before the vision start of each frame of a placeholder."""
    assert rule.markers is not None
    frames: list[list[int]] = [[]]
    for token in ids_L:
        if token == rule.markers.vision_end:
            frames.append([])
        elif token not in (rule.markers.vision_start, rule.markers.video):
            frames[-1].append(token)
    return frames[: grid_thw[0]]


def _walk_frames(
    timestamps: Sequence[Sequence[int]], rows: int, columns: int, markers: FrameMarkers
) -> tuple[list[tuple[int, int, int, int]], list[tuple[int, int, int]]]:
    """Return what is known before the kept tokens are.

    Of each text token: its position, whether it is a vision start, its id, and the frames complete before it.
    Of each frame, and once for the end: its first token in the grid, the text before it, and its position.
    """
    text: list[tuple[int, int, int, int]] = []
    frames: list[tuple[int, int, int]] = []
    position = 0
    for frame, stamp in enumerate(timestamps):
        for token in stamp:
            text.append((position, 0, token, frame))
            position += 1
        text.append((position, 1, markers.vision_start, frame))
        frames.append((frame * rows * columns, len(text), position + 1))
        position += 1 + max(rows, columns)
        text.append((position, 0, markers.vision_end, frame + 1))
        position += 1
    frames.append((len(timestamps) * rows * columns, len(text), position))
    return text, frames
