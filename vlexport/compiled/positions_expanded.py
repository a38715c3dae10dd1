"""The true layout of a pruned video whose prompt writes time as text: ids and five position channels.

T frames, J text tokens (timestamps and markers), K kept tokens, L = J + K tokens of the placeholder.

Pruning removes tokens, not positions: every remaining token stands where it would in the un-pruned video.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vlexport.compiled.positions import FrameMarkers, Grid, PositionRule, merged_sides
from vlexport.compiled.positions_media import media_positions
from vlexport.errors import InputError

LayoutWriter = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpandedVideo:
    """One pruned video's placeholder, frame by frame.

    channels_5L       `[time, row, column, is vision start, is video]`, counted from the video's start
    video_columns_K   where the kept tokens stand among the L, in order; the rest is text
    """

    ids_L: Tensor
    channels_5L: Tensor
    tokens_per_frame_T: Tensor
    video_columns_K: Tensor


def image_channels(grid_thw: Grid, merge: int) -> Tensor:
    """The block of an image beside such videos: `[time, row, column, merged width, 0]`, (5, L)."""
    channels_4L = media_positions(grid_thw, merge, 1, 1).T
    return torch.cat([channels_4L, torch.zeros_like(channels_4L[:1])])


def expanded_video(
    kept_K: Tensor,
    grid_thw: Grid,
    timestamps: Sequence[Sequence[int]],
    rule: PositionRule,
    *,
    write: LayoutWriter | None = None,
) -> ExpandedVideo:
    """Lay out the kept tokens between the timestamps, frame by frame; nothing is read back from the device.

    kept_K      ascending int64 indices into the video's tokens
    timestamps  token ids of each frame's timestamp text
    write       `write_layout` or its compiled form
    """
    if kept_K.dtype != torch.int64 or kept_K.dim() != 1:
        raise InputError(
            f"kept indices are {kept_K.dtype} of shape {list(kept_K.shape)}; expected a flat int64 tensor."
        )
    text_4J, frames_3T1, shape_3 = _plan_layout(grid_thw, timestamps, rule)
    device = kept_K.device
    values_6L, video_columns_K, counts_T = (write or write_layout)(
        kept_K,
        text_4J.to(device, non_blocking=True),
        frames_3T1.to(device, non_blocking=True),
        shape_3.to(device, non_blocking=True),
    )
    return ExpandedVideo(
        ids_L=values_6L[5],
        channels_5L=values_6L[:5],
        tokens_per_frame_T=counts_T,
        video_columns_K=video_columns_K,
    )


def lumped_ids(num_kept: int, timestamps: Sequence[Sequence[int]], markers: FrameMarkers) -> list[int]:
    """The placeholder before the kept tokens are known: all of them in frame 0. For interchange only."""
    ids: list[int] = []
    for frame, stamp in enumerate(timestamps):
        video = [markers.video] * (num_kept if frame == 0 else 0)
        ids += [*stamp, markers.vision_start, *video, markers.vision_end]
    return ids


def write_layout(
    kept_K: Tensor, text_4J: Tensor, frames_3T1: Tensor, shape_3: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Channels and ids (6, L), columns of the kept tokens (K), tokens per frame (T).

    text_4J     position, is vision start, id, and frames complete before each text token
    frames_3T1  first token, text tokens before it and position of each frame; one more frame closes the video
    shape_3     tokens per frame, merged width, id of a video token
    """
    first_T1, text_before_T1, base_T1 = frames_3T1
    per_frame, width, video = shape_3
    kept_before_T1 = torch.searchsorted(kept_K, first_T1)
    frame_K = kept_K // per_frame
    cell_K = kept_K - frame_K * per_frame
    row_K = cell_K // width
    base_K = base_T1.index_select(0, frame_K)
    zero_K = torch.zeros_like(kept_K)
    values_6K = torch.stack(
        [base_K, base_K + row_K, base_K + cell_K - row_K * width, zero_K, zero_K + 1, zero_K + video]
    )
    position_J, is_start_J, id_J, frames_before_J = text_4J
    values_6J = torch.stack([position_J, position_J, position_J, is_start_J, torch.zeros_like(id_J), id_J])
    column_K = torch.arange(kept_K.shape[0], device=kept_K.device) + text_before_T1.index_select(0, frame_K)
    kept_before_J = kept_before_T1.index_select(0, frames_before_J)
    column_J = torch.arange(id_J.shape[0], device=kept_K.device) + kept_before_J
    values_6L = torch.cat([values_6J, values_6K], dim=1)
    columns_L = torch.cat([column_J, column_K])
    return torch.zeros_like(values_6L).index_copy(1, columns_L, values_6L), column_K, kept_before_T1.diff()


def _plan_layout(
    grid_thw: Grid, timestamps: Sequence[Sequence[int]], rule: PositionRule
) -> tuple[Tensor, Tensor, Tensor]:
    markers = rule.markers
    if markers is None:
        raise InputError(
            f"position rule '{rule.kind}' has no frame markers; an expanded layout needs 'time_as_text'."
        )
    rows, columns = merged_sides(grid_thw, rule.merge)
    if len(timestamps) != grid_thw[0]:
        raise InputError(
            f"{len(timestamps)} timestamps given for the {grid_thw[0]} frames of grid {grid_thw}; "
            f"expected the token ids of one timestamp per frame."
        )
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
    frames.append((grid_thw[0] * rows * columns, len(text), position))
    shape_3 = torch.tensor([rows * columns, columns, markers.video])
    return torch.tensor(text).T.contiguous(), torch.tensor(frames).T.contiguous(), shape_3
