"""The reference of families whose packed tower is in transformers: its class, with the same weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from vlexport.specs import MediaItem
from vlexport.vision.attention.segmentation import take_cells


class PackedReference:
    """A vision tower of transformers in float32, attention by SDPA."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module.eval()

    @torch.inference_mode()
    def run(self, items: Sequence[MediaItem]) -> dict[str, Tensor]:
        tower: Any = self.module
        patches = torch.cat([item.patches for item in items])
        outputs = tower(patches, grid_thw=_grids(items), **self._parts(items))
        levels = enumerate(getattr(outputs, "deepstack_features", ()))
        return {"embeds": outputs.pooler_output, **{f"level_{at}": rows for at, rows in levels}}

    def blocks(self, items: Sequence[MediaItem]) -> tuple[dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
        tower: Any = self.module
        unit: int = tower.spatial_merge_size**2
        undo: Tensor | None = None
        if hasattr(tower, "window_size"):
            order_M, _ = self._windows(_grids(items))
            undo = torch.argsort(self._parts(items).get("window_index", order_M))
        return with_blocks(tower.blocks, lambda: self.run(items), lambda rows: take_cells(rows, undo, unit))

    def _parts(self, items: Sequence[MediaItem]) -> dict[str, Tensor]:
        """Return what a class of transformers is told where items are some of their cells, else nothing.

        Its own tables of the whole items: rows of the cells that are there, and their counts by segment.
        """
        if all(item.cells is None for item in items):
            return {}
        from transformers import vision_utils

        tower: Any = self.module
        grids_I3, merge = _grids(items), tower.spatial_merge_size
        there = [torch.ones(math.prod(item.grid) // merge**2, dtype=torch.bool) for item in items]
        for mask, item in zip(there, items, strict=True):
            if item.cells is not None:
                mask.zero_()[item.cells] = True
        there_M = torch.cat(there)
        there_N = there_M.repeat_interleave(merge**2)
        bounds = vision_utils.get_vision_cu_seqlens(grids_I3)
        parts = {
            "position_ids": vision_utils.get_vision_position_ids(grids_I3, merge)[there_N],
            "cu_seqlens": _bounds_of(there_N, bounds),
        }
        if hasattr(tower, "window_size"):
            order_M, bounds = self._windows(grids_I3)
            in_order_M = there_M[order_M]
            parts["window_index"] = (there_M.cumsum(0) - 1)[order_M][in_order_M]
            parts["cu_window_seqlens"] = _bounds_of(in_order_M.repeat_interleave(merge**2), bounds)
        if hasattr(tower, "interpolation_mode"):
            table = vision_utils.get_vision_interpolation_indices_and_weights(
                grids_I3,
                num_grid_per_side=tower.num_grid_per_side,
                mode=tower.interpolation_mode,
                align_corners=tower.interpolation_align_corners,
                spatial_merge_size=merge,
            )
            parts["interp_indices"], parts["interp_weights"] = (rows[there_N] for rows in table)
        return parts

    def _windows(self, grids_I3: Tensor) -> tuple[Tensor, Tensor]:
        """Return the order in which blocks see merged cells, and the bounds of windows."""
        from transformers.vision_utils import get_vision_window_index

        tower: Any = self.module
        merge, window, patch = tower.spatial_merge_size, tower.window_size, tower.patch_size
        windows: tuple[Tensor, Tensor] = get_vision_window_index(
            grids_I3, spatial_merge_size=merge, window_size=window, patch_size=patch
        )
        return windows


def with_blocks(
    blocks: Iterable[nn.Module], run: Callable[[], dict[str, Tensor]], rows_of: Callable[[Tensor], Tensor]
) -> tuple[dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
    """Return the outputs of a run, and the rows that each block took and gave in all of its calls."""
    taken: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}

    def keep(block: nn.Module, arguments: tuple[Tensor, ...], result: Tensor) -> None:
        taken.setdefault(block, []).append((rows_of(arguments[0]), rows_of(result)))

    with ExitStack() as hooks:
        for block in blocks:
            hooks.callback(block.register_forward_hook(keep).remove)
        outputs = run()
    pairs = (zip(*calls, strict=True) for calls in taken.values())
    return outputs, [(_joined(before), _joined(after)) for before, after in pairs]


def _joined(parts: tuple[Tensor, ...]) -> Tensor:
    # The rows of a single call are not copied.
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def packed_reference(
    config: Callable[..., Any],
    tower: Callable[[Any], nn.Module],
    settings: Mapping[str, object],
    load: Callable[[nn.Module], None],
) -> PackedReference:
    """Build a class of transformers with the settings of config.json; `load` gives it the weights."""
    options = {name: value for name, value in settings.items() if name != "model_type"}
    vision = config(**{**options, "attn_implementation": "sdpa"})
    with torch.device("meta"):
        module: Any = tower(vision)
    load(module)
    # Its table is a buffer outside the state, so it has to be made anew off the meta device.
    module.rotary_pos_emb = type(module.rotary_pos_emb)(vision)
    return PackedReference(module)


def _bounds_of(there_N: Tensor, bounds_B: Tensor) -> Tensor:
    """Return the bounds of the rows that are there, without segments that have none."""
    before_N = torch.cat([torch.zeros(1, dtype=torch.int64), there_N.cumsum(0)])
    found: Tensor = before_N[bounds_B.long()].unique().to(bounds_B.dtype)
    return found


def _grids(items: Sequence[MediaItem]) -> Tensor:
    return torch.tensor([item.grid for item in items])
