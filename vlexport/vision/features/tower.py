"""transformers' own vision class as a tower: traced whole, with our attention and tables as inputs.

Parts that read sizes on the host get tables and segments of the call in their place. N patches, K taps.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from vlexport.errors import UNEXPECTED, CheckpointError, InputError, UnsupportedError
from vlexport.specs import MediaItem, Pixels
from vlexport.vision.attention.layout import CallLayout
from vlexport.vision.features.calls import (
    ATTENTION,
    Call,
    Folded,
    HostSizes,
    current,
    inside,
    strip_of_cells,
)
from vlexport.vision.features.classes import ReadWeights, outputs_of, vision_model
from vlexport.vision.features.packing import ImagePacking, PicturePacking, PooledPacking, TablePacking
from vlexport.vision.features.pixels import (
    PictureRule,
    Processor,
    image_rule,
    longest_edge_rule,
    patch_count_rule,
    to_images,
)
from vlexport.vision.position_tables import ANTIALIASED, Table
from vlexport.vision.preprocess import patch_rule
from vlexport.vision.resampler import GroupAttention
from vlexport.vision.tower import Tower

# What a class takes: images [B, 3, S, S]; the same with an axis of prompts before; rows of patches and a size
# for each image; rows of patches cell by cell, or [N, 3, P, P] in raster order, and grids; one wide image
# and sizes; what a processor makes of one.
IMAGES, NESTED, PATCHES, GRIDS, RASTER = "images", "nested", "patches", "grids", "raster"
STRIP, PICTURE = "strip", "picture"
# The argument of sides of cells, in patches, of each image.
MERGES = "image_merge_sizes"
# Attention of a class that is traced with one picture.
PLAIN = "sdpa"
# Of the picture, where a class names no size of images.
USUAL_SIDE = 448


class FeatureTower(Tower):
    """A class of transformers whose `get_image_features` is the tower."""

    def __init__(
        self, features: Any, packing: ImagePacking | TablePacking, *, form: str, dry: bool = False
    ) -> None:
        super().__init__()
        if form != PICTURE:
            adapt(features)
        self.features, self.packing, self.form, self.dry = features, packing, form, dry

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        if isinstance(self.packing.rule, PictureRule):
            with Folded() if self.dry or torch.compiler.is_exporting() else nullcontext():
                arguments = self.packing.rule.arguments(inputs["patches"][0])
                return outputs_of(self.features.get_image_features(**arguments))
        if isinstance(self.packing, ImagePacking):
            return self._images(inputs, self.packing)
        return self._grids(inputs, self.packing)

    def _images(self, inputs: Mapping[str, Tensor], packing: ImagePacking) -> dict[str, Tensor]:
        order, rule = inputs["order"], packing.rule
        pixels = to_images(inputs["patches"], order.shape[0], rule.side, rule.patch).index_select(0, order)
        call = Call(image_runs=inputs.get("image_runs"), images=order.shape[0], dry=self.dry)
        sizes: dict[str, Any] = {"image_sizes": []} if hasattr(self.features, "pack_image_features") else {}
        with inside(call):
            images = pixels[None] if self.form == NESTED else pixels
            return outputs_of(self.features.get_image_features(images, **sizes))

    def _grids(self, inputs: Mapping[str, Tensor], packing: TablePacking) -> dict[str, Tensor]:
        layout = CallLayout.of(inputs, packing.segmentations, packing.unit)
        rows = {name: layout.arrange(inputs[name]) for name in ("patches", *packing.per_patch)}
        device = inputs["patches"].device
        bounds = {name: torch.zeros(2, dtype=torch.int32, device=device) for name in layout.views}
        views = [(bounds[name], view) for name, view in layout.views.items() if name != "group"]
        call = Call(views=views, unit=packing.unit, rows=rows, dry=self.dry)
        grids: Any = torch.ones(1, 3, dtype=torch.int64, device=device)
        if self.form == PATCHES:
            count = inputs["group_inverse"].shape[0]
            groups = _Identity(count) if self.dry else layout.queried("group")
            with inside(call._replace(strip=1, groups=groups)):
                outputs = outputs_of(patch_features(self.features, rows["patches"], grids[:, 1:]))
            return {name: layout.results(output, "group", 1) for name, output in outputs.items()}
        if self.form == STRIP:
            side = packing.merge
            rows["positions"] = strip_of_cells(rows["positions"], side)
            with inside(call._replace(strip=side)):
                outputs = outputs_of(strip_features(self.features, rows["patches"], packing.rule.patch, side))
        else:
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
            patches, merge = rows["patches"], packing.merge
            if self.form == RASTER:
                # Of cells in one column the raster order is the order cell by cell.
                patches = patches.unflatten(1, (3, packing.rule.patch, -1))
                grids = HostSizes([(1, patches.shape[0] // merge, merge)])
                if MERGES in inspect.signature(self.features.get_image_features).parameters:
                    tables[MERGES] = HostSizes([merge])
            with inside(call):
                outputs = outputs_of(
                    self.features.get_image_features(patches, image_grid_thw=grids, **tables)
                )
        return {name: output.index_select(0, inputs["inverse"]) for name, output in outputs.items()}


class _Identity(NamedTuple):
    """Attention of one query to so many segments that gives it back for each."""

    num_rows: int

    def cross_attend(self, q_QHD: Tensor, *_: object) -> Tensor:
        return q_QHD.expand(self.num_rows, -1, -1)


def adapt(model: nn.Module) -> None:
    """Replace what cannot be traced, wherever a class has it; results are those of the class."""
    part: Any
    for part in model.modules():
        if isinstance(part, nn.Linear) and type(part).forward is nn.Linear.forward:
            part.forward = partial(_of_rows, part)  # type: ignore[method-assign]
        if hasattr(part, "interpolated_method"):
            part.forward = _stretching(part)
        if hasattr(part, "resize_positional_embeddings"):
            part.resize_positional_embeddings = _resized
        if hasattr(part, "probe") and isinstance(getattr(part, "attention", None), nn.MultiheadAttention):
            part.attention.forward = _pooling(part.attention)
        if hasattr(part, "patch_positional_embedding"):
            part.patch_positional_embedding.register_forward_pre_hook(
                lambda _, arguments: (arguments[0], current().rows["positions"])
            )


def _of_rows(layer: nn.Linear, x: Tensor) -> Tensor:
    """Apply a layer to rows, whatever axes they have: graph formats know it by its product of two axes."""
    rows = nn.functional.linear(x.flatten(0, -2), layer.weight, layer.bias)
    return rows.unflatten(0, x.shape[:-1]) if x.ndim > 2 else rows


def _stretching(part: Any) -> Any:
    def forward(embeddings: Tensor, *_: object) -> Tensor:
        rows, table = current().rows, part.position_embedding.weight
        entries_K, shares_K = rows["taps"].unbind(1), rows["tap_weights"].unbind(1)
        for entry_N, share_N in zip(entries_K, shares_K, strict=True):
            added = torch.nn.functional.embedding(entry_N, table).float() * share_N[:, None]
            embeddings = embeddings + added.to(embeddings.dtype)
        return embeddings

    return forward


def _resized(table: Tensor, *_: object, **__: object) -> Tensor:
    if "tap_weights" not in current().rows:
        raise UnsupportedError(
            "the class resizes its positions for each picture, and has no table of shares."
        )
    resized: Tensor = current().rows["tap_weights"] @ table.flatten(0, 1).float()
    return resized.to(table.dtype)[None]


def _pooling(attention: Any) -> Any:
    whole, attention.heads = attention.forward, attention.num_heads
    attention.scale = attention.head_dim**-0.5

    def forward(query: Tensor, key: Tensor, value: Tensor, **further: Any) -> tuple[Tensor, None]:
        call = current()
        if call.groups is None:
            # Its own weights would be averaged over heads, and nobody takes them.
            result: tuple[Tensor, None] = whole(query, key, value, **{**further, "need_weights": False})
            return result
        mixed = GroupAttention.forward(attention, query[0], key[0], value[0], call.groups)
        return mixed[:, None], None

    return forward


def patch_features(features: Any, patches_NP: Tensor, sizes_12: Tensor) -> Any:
    """Call a class on the rows of all images as one, in which it wants the values of a pixel side by side."""
    by_pixel = patches_NP.unflatten(1, (3, -1)).transpose(1, 2).flatten(1)
    return features.get_image_features(pixel_values=by_pixel[None], spatial_shapes=sizes_12)


def strip_features(features: Any, patches_NP: Tensor, patch: int, side: int) -> Any:
    """Call a class on all cells side by side, as one image that is `side` patches high."""
    cells = patches_NP.shape[0] // side**2
    cut = patches_NP.reshape(cells, side, side, 3, patch, patch).permute(3, 1, 4, 0, 2, 5)
    height, width = side * patch, cells * side * patch
    pixels = cut.reshape(1, 3, height, width)
    return features.get_image_features(pixels, image_sizes=[(height, width)])


def examined(
    model_type: str,
    settings: Mapping[str, Any],
    processor: Processor,
    image: Mapping[str, Any],
    video: Mapping[str, Any],
) -> dict[str, Any]:
    """Return what a class takes and gives, by a call without weights; `image` and `video` bound grids."""
    model = vision_model(model_type, settings, ATTENTION, meta=True)
    try:
        return _of_any_size(model, processor, image, video)
    except (CheckpointError, UnsupportedError) as problem:
        try:
            return _picture(vision_model(model_type, settings, PLAIN, meta=True), processor)
        except (InputError, UnsupportedError):
            # What the class failed at with pictures of any size or number is the better reason.
            raise problem from problem.__cause__


def _of_any_size(
    model: Any, processor: Processor, image: Mapping[str, Any], video: Mapping[str, Any]
) -> dict[str, Any]:
    taken = inspect.signature(model.get_image_features).parameters
    if "image_grid_thw" in taken:
        return _grids(model, image, video)
    if "image_sizes" in taken and first(model, "patch_positional_embedding") is not None:
        return _strip(model, image)
    if "spatial_shapes" in taken:
        return _patches(model, image)
    return _images(model, processor)


def _picture(model: Any, processor: Processor) -> dict[str, Any]:
    """Trace a class with what its processor makes of one square picture."""
    side = one(first(model, "image_size")) or USUAL_SIDE
    blank = Pixels(kind="image", frames=torch.zeros(1, side, side, 3, dtype=torch.uint8))
    rule = PictureRule.of(processor.images(blank)[0], inspect.signature(model.get_image_features).parameters)
    facts = _dry(model, PicturePacking(rule, 1, ("embeds",)), PICTURE)
    tokens, _ = facts.pop("rows"), facts.pop("cells")
    return {**facts, "rule": rule, "tokens": tokens, "form": PICTURE}


def _patches(model: Any, image: Mapping[str, Any]) -> dict[str, Any]:
    rule = patch_count_rule(image, patch=first(model, "patch_size"))
    table = Table(side=math.isqrt(first(model, "num_patches")), mode=ANTIALIASED)
    packing = PooledPacking(rule, table, ("embeds",))
    facts = _dry(model, packing, PATCHES)
    if facts.pop("rows") != facts.pop("cells"):
        raise UnsupportedError(f"{type(model).__name__} does not give one row for each image.")
    return {**facts, "rule": rule, "form": PATCHES, "table": table}


def _images(model: Any, processor: Processor) -> dict[str, Any]:
    sides, patch = first(model, "image_size"), one(first(model, "patch_size"))
    side = one(sides)
    if side is None:
        raise UnsupportedError(f"{type(model).__name__} takes images of no one size ({sides}).")
    rule = image_rule(processor, side, patch)
    packing = ImagePacking(rule, 1, ("embeds",))
    form, facts = _one_of(model, packing, IMAGES, NESTED)
    tokens, left = divmod(facts.pop("rows"), cells := facts.pop("cells"))
    if left or not tokens:
        raise UnsupportedError(
            f"{type(model).__name__} does not give rows image by image, but {left} for {cells}."
        )
    return {**facts, "rule": rule, "tokens": tokens, "form": form}


def _strip(model: Any, image: Mapping[str, Any]) -> dict[str, Any]:
    merge = getattr(model.config, "spatial_merge_size", 1)
    rule = longest_edge_rule(image, patch=first(model, "patch_size"), merge=merge)
    facts = _dry(model, TablePacking(rule, None, None, ("embeds",)), STRIP)
    del facts["rows"], facts["cells"]
    return {**facts, "rule": rule, "form": STRIP}


def _grids(model: Any, image: Mapping[str, Any], video: Mapping[str, Any]) -> dict[str, Any]:
    merge = first(model, "spatial_merge_size") or one(first(model, "merge_kernel_size"))
    merge, patch = merge or image.get("merge_size"), first(model, "patch_size")
    temporal, window = first(model, "temporal_patch_size") or 1, first(model, "window_size")
    name = type(model).__name__
    if not merge or not patch:
        raise UnsupportedError(
            f"{name} has a grid of patches, but not one size of patches ({patch}) and merged cells ({merge})."
        )
    if first(model, "include_temporal") or first(model, "merge_temporal"):
        raise UnsupportedError(
            f"{name} has positions in time, or attends over several frames: no table for it."
        )
    rule = patch_rule(image, video, patch=patch, merge=merge, temporal=temporal)
    window_side, table = window and window // merge // patch, _table(model)
    packing = TablePacking(rule, window_side, table, ("embeds",))
    form, facts = _one_of(model, packing, GRIDS, RASTER)
    if facts.pop("rows") != facts.pop("cells"):
        raise UnsupportedError(f"{name} does not give one row for each cell of {merge} x {merge} patches.")
    return {**facts, "rule": rule, "form": form, "window_side": window_side, "table": table}


def _table(model: nn.Module) -> Table | None:
    align = first(model, "interpolation_align_corners") is True
    side, mode = first(model, "num_grid_per_side"), first(model, "interpolation_mode") or "bilinear"
    if side is None and (method := first(model, "interpolated_method")) is not None:
        side, mode = math.isqrt(first(model, "num_positions")), method
    return side and Table(side=side, mode=mode, align_corners=align)


def first(model: nn.Module, name: str) -> Any:
    """Return the first value of this name in a class, in its vision part or its settings."""
    parts = [*model.modules(), *(module.config for module in model.modules() if hasattr(module, "config"))]
    parts += [part.vision_config for part in parts if hasattr(part, "vision_config")]
    return next((value for part in parts if (value := getattr(part, name, None)) is not None), None)


def one(sides: Any) -> int | None:
    """Return the side of a square; None if it is something else."""
    several = sides if isinstance(sides, list | tuple) else [sides]
    return several[0] if several and isinstance(several[0], int) and len(set(several)) == 1 else None


def _without_values(model: nn.Module, inputs: dict[str, Tensor]) -> AbstractContextManager[object]:
    """Make weights and inputs, in place, tensors without values that tables of constants may meet."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    inputs |= {name: mode.from_tensor(tensor) for name, tensor in inputs.items()}
    with mode:
        for part in model.modules():
            for name, weight in [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]:
                if weight.is_meta:
                    empty = torch.empty(weight.shape, dtype=weight.dtype, device="cpu")
                    setattr(part, name, nn.Parameter(empty) if isinstance(weight, nn.Parameter) else empty)
    return mode


def _one_of(
    model: Any, packing: ImagePacking | TablePacking, usual: str, other: str
) -> tuple[str, dict[str, Any]]:
    """Return which of two forms a class takes, and what it gives."""
    try:
        return usual, _dry(model, packing, usual)
    except UnsupportedError as problem:
        try:
            return other, _dry(model, packing, other)
        except UnsupportedError:
            # What the usual form failed at is the better reason.
            raise problem from problem.__cause__


def _dry(model: Any, packing: ImagePacking | TablePacking, form: str) -> dict[str, Any]:
    mix = max(packing.mixes().values(), key=len)
    items = [
        MediaItem(kind=kind, grid=grid, patches=torch.zeros(math.prod(grid), packing.row_width))
        for kind, grid in mix
    ]
    device = "cpu" if form == PICTURE else "meta"
    inputs = {name: tensor.to(device) for name, tensor in packing.prepare(items, "grouped").items()}
    tower = FeatureTower(model, packing, form=form, dry=True)
    try:
        fake = _without_values(model, inputs) if form == PICTURE else nullcontext()
        with torch.no_grad(), fake, ReadWeights() as touched:
            outputs = tower(inputs)
    except UNEXPECTED as error:
        raise UnsupportedError(
            f"{type(model).__name__} does not take {form} as the generic recipe gives them "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]}). `vlexport list --all` shows "
            "the classes that export; write a recipe for this one (recipes/README.md)."
        ) from error
    weights = tuple(name for name, weight in model.named_parameters() if id(weight) in touched.ids)
    return {
        "outputs": tuple(outputs),
        "weights": weights,
        "rows": len(outputs["embeds"]),
        "cells": inputs.get("group_inverse", inputs["order"]).shape[0],
    }
