"""The reference of families whose packed tower is in transformers: its class, with the same weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from vlexport.specs import MediaItem
from vlexport.vision.attention.segmentation import take_cells

# From a tower and the grids of a call, the order in which its blocks see merged cells.
Order = Callable[[Any, Tensor], Tensor]


class PackedReference:
    """A vision tower of transformers in float32, attention by SDPA."""

    def __init__(self, module: nn.Module, order: Order | None) -> None:
        self.module = module.eval()
        self.order = order

    @torch.inference_mode()
    def run(self, items: Sequence[MediaItem]) -> dict[str, Tensor]:
        tower: Any = self.module
        patches = torch.cat([item.patches for item in items])
        outputs = tower(patches, grid_thw=_grids(items))
        levels = enumerate(getattr(outputs, "deepstack_features", ()))
        return {"embeds": outputs.pooler_output, **{f"level_{at}": rows for at, rows in levels}}

    def blocks(self, items: Sequence[MediaItem]) -> tuple[dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
        tower: Any = self.module
        undo = torch.argsort(self.order(tower, _grids(items))) if self.order else None
        unit: int = tower.spatial_merge_size**2
        taken: list[tuple[Tensor, Tensor]] = []

        def keep(_: nn.Module, arguments: tuple[Tensor, ...], result: Tensor) -> None:
            taken.append((take_cells(arguments[0], undo, unit), take_cells(result, undo, unit)))

        with ExitStack() as hooks:
            for block in tower.blocks:
                hooks.callback(block.register_forward_hook(keep).remove)
            return self.run(items), taken


def packed_reference(
    config: Callable[..., Any],
    tower: Callable[[Any], nn.Module],
    settings: Mapping[str, object],
    load: Callable[[nn.Module], None],
    order: Order | None = None,
) -> PackedReference:
    """Build a class of transformers with the settings of config.json; `load` gives it the weights."""
    options = {name: value for name, value in settings.items() if name != "model_type"}
    vision = config(**{**options, "attn_implementation": "sdpa"})
    with torch.device("meta"):
        module: Any = tower(vision)
    load(module)
    # Its table is a buffer outside the state, so it has to be made anew off the meta device.
    module.rotary_pos_emb = type(module.rotary_pos_emb)(vision)
    return PackedReference(module, order)


def _grids(items: Sequence[MediaItem]) -> Tensor:
    return torch.tensor([item.grid for item in items])
