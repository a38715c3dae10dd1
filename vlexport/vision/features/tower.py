"""transformers' own vision class as a tower: traced whole, with our attention and tables as inputs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vlexport.errors import UnsupportedError
from vlexport.specs import MediaItem
from vlexport.vision.attention.layout import CallLayout
from vlexport.vision.features.calls import ATTENTION, Call, inside
from vlexport.vision.features.classes import Touched, made, outputs_of
from vlexport.vision.features.packing import ImagePacking, TablePacking
from vlexport.vision.features.pixels import image_rule, to_images
from vlexport.vision.features.taps import Table
from vlexport.vision.preprocess import patch_rule
from vlexport.vision.tower import Tower


class FeatureTower(Tower):
    """A class of transformers whose `get_image_features` is the tower."""

    def __init__(
        self, features: Any, packing: ImagePacking | TablePacking, *, nested: bool, dry: bool = False
    ) -> None:
        super().__init__()
        self.features, self.packing, self.nested, self.dry = features, packing, nested, dry

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        if isinstance(self.packing, ImagePacking):
            return self._images(inputs, self.packing)
        return self._grids(inputs, self.packing)

    def _images(self, inputs: Mapping[str, Tensor], packing: ImagePacking) -> dict[str, Tensor]:
        order, rule = inputs["order"], packing.rule
        pixels = to_images(inputs["patches"], order.shape[0], rule.side, rule.patch).index_select(0, order)
        call = Call(image_runs=inputs.get("image_runs"), images=order.shape[0], dry=self.dry)
        with inside(call):
            return outputs_of(image_features(self.features, pixels, nested=self.nested))

    def _grids(self, inputs: Mapping[str, Tensor], packing: TablePacking) -> dict[str, Tensor]:
        layout = CallLayout.of(inputs, packing.segmentations, packing.unit)
        rows = {name: layout.arrange(inputs[name]) for name in ("patches", *packing.per_patch)}
        device = inputs["patches"].device
        bounds = {name: torch.zeros(2, dtype=torch.int32, device=device) for name in layout.views}
        views = [(bounds[name], view) for name, view in layout.views.items()]
        call = Call(views=views, unit=packing.unit, dry=self.dry)
        tables: dict[str, Any] = {
            "cu_seqlens": bounds["frame"],
            "max_seqlen": 1,
            "position_ids": rows["positions"],
        }
        if "window" in bounds:
            tables |= {
                "window_index": torch.arange(layout.order_M.shape[0], device=device),
                "cu_window_seqlens": bounds["window"],
                "max_window_seqlen": 1,
            }
        if packing.table is not None:
            tables |= {"interp_indices": rows["taps"], "interp_weights": rows["tap_weights"]}
        grids = torch.ones(1, 3, dtype=torch.int64, device=device)
        with inside(call):
            found = outputs_of(
                self.features.get_image_features(rows["patches"], image_grid_thw=grids, **tables)
            )
        return {name: each.index_select(0, layout.inverse_M) for name, each in found.items()}


def image_features(features: Any, pixels: Tensor, *, nested: bool) -> Any:
    """Call a class of images of one size; `nested` ones have an axis of prompts before that of images."""
    given: dict[str, Any] = {}
    if hasattr(features, "pack_image_features"):
        given["image_sizes"] = []
    return features.get_image_features(pixels[None] if nested else pixels, **given)


def examined(
    model_type: str, settings: Mapping[str, Any], image: Mapping[str, Any], video: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what a class takes and gives, as fields of a config: found by a call without weights."""
    model = made(model_type, settings, ATTENTION, meta=True)
    if "image_grid_thw" in inspect.signature(model.get_image_features).parameters:
        return _grids(model, image, video)
    return _images(model, image)


def _images(model: Any, image: Mapping[str, Any]) -> dict[str, Any]:
    sides = _first(model, "image_size")
    side = _one(sides)
    if side is None:
        raise UnsupportedError(f"{type(model).__name__} takes images of {sides}; one side for both expected.")
    rule = image_rule(image, side, _one(_first(model, "patch_size")))
    try:
        found = _dry(model, ImagePacking(rule, 1, ("embeds",)), nested=False)
        nested = False
    except (RuntimeError, ValueError):
        found = _dry(model, ImagePacking(rule, 1, ("embeds",)), nested=True)
        nested = True
    tokens = found.pop("rows") // max(1, found.pop("cells"))
    return {**found, "rule": rule, "tokens": tokens, "nested": nested}


def _grids(model: Any, image: Mapping[str, Any], video: Mapping[str, Any]) -> dict[str, Any]:
    merge, patch = _first(model, "spatial_merge_size"), _first(model, "patch_size")
    temporal, window = _first(model, "temporal_patch_size"), _first(model, "window_size")
    if not merge or not patch or not temporal:
        raise UnsupportedError(
            f"{type(model).__name__} has a grid of patches, but not the sizes that tables are made of: merge "
            f"{merge}, patch {patch}, frames {temporal}."
        )
    rule = patch_rule(image, video, patch=patch, merge=merge, temporal=temporal)
    side = _first(model, "num_grid_per_side")
    table = side and Table(
        side=side,
        mode=_first(model, "interpolation_mode") or "bilinear",
        align_corners=_first(model, "interpolation_align_corners") is True,
    )
    window_side = window and window // merge // patch
    found = _dry(model, TablePacking(rule, window_side, table, ("embeds",)), nested=False)
    del found["rows"], found["cells"]
    return {**found, "rule": rule, "window_side": window_side, "table": table}


def _first(model: nn.Module, name: str) -> Any:
    """Return the first value of this name in a class, in its vision part or its settings."""
    parts = [*model.modules(), *(each.config for each in model.modules() if hasattr(each, "config"))]
    parts += [each.vision_config for each in parts if hasattr(each, "vision_config")]
    return next((found for each in parts if (found := getattr(each, name, None)) is not None), None)


def _one(sides: Any) -> int | None:
    """Return the side of a square; None if it is something else."""
    several = sides if isinstance(sides, list | tuple) else [sides]
    return several[0] if several and isinstance(several[0], int) and len(set(several)) == 1 else None


def _dry(model: Any, packing: ImagePacking | TablePacking, *, nested: bool) -> dict[str, Any]:
    """Call a class without weights on the largest mix; attention gives back what it is given."""
    mix = max(packing.mixes().values(), key=len)
    items = [
        MediaItem(kind=kind, grid=grid, patches=torch.zeros(math.prod(grid), packing.row_width))
        for kind, grid in mix
    ]
    inputs = {name: each.to("meta") for name, each in packing.prepare(items, "grouped").items()}
    tower = FeatureTower(model, packing, nested=nested, dry=True)
    with torch.no_grad(), Touched() as touched:
        outputs = tower(inputs)
    weights = tuple(name for name, each in model.named_parameters() if id(each) in touched.found)
    return {
        "outputs": tuple(outputs),
        "weights": weights,
        "rows": len(outputs["embeds"]),
        "cells": inputs["order"].shape[0],
    }
