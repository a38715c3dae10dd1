"""Bugs planted around the engine: pixels, positions, pruning, splicing."""

from __future__ import annotations

from tests.mutation.mutant import Mutant


def _pixels(name: str, kind: str, old: str, new: str) -> Mutant:
    return Mutant(name=name, kind=kind, file="vision/preprocess.py", old=old, new=new)


PIXELS = (
    _pixels(
        "resize without antialias",
        "pixels",
        "F.interpolate(whole, (rows, columns), mode=mode, antialias=True",
        "F.interpolate(whole, (rows, columns), mode=mode, antialias=False",
    ),
    _pixels(
        "bilinear for bicubic",
        "pixels",
        'RESAMPLE_MODES = {2: "bilinear", 3: "bicubic"}',
        'RESAMPLE_MODES = {2: "bicubic", 3: "bilinear"}',
    ),
    _pixels(
        "corners of the image aligned",
        "pixels",
        "mode=mode, antialias=True, align_corners=False)\n    return resample_in_floats",
        "mode=mode, antialias=False, align_corners=True)\n    return resample_in_floats",
    ),
    _pixels(
        "channels in reverse", "order", "frames_TCHW.float() - mean", "frames_TCHW.flip(1).float() - mean"
    ),
    _pixels("mean not scaled to bytes", "pixels", "- mean / rule.rescale)", "- mean)"),
    _pixels("standard deviation not scaled to bytes", "pixels", "/ (std / rule.rescale)", "/ std"),
    _pixels(
        "frames before channels in a patch",
        "order",
        "permute(0, 3, 6, 4, 7, 2, 1, 5, 8)",
        "permute(0, 3, 6, 4, 7, 1, 2, 5, 8)",
    ),
    _pixels(
        "patches in raster order",
        "order",
        "permute(0, 3, 6, 4, 7, 2, 1, 5, 8)",
        "permute(0, 3, 4, 6, 7, 2, 1, 5, 8)",
    ),
    _pixels(
        "patches of a cell down first",
        "order",
        "permute(0, 3, 6, 4, 7, 2, 1, 5, 8)",
        "permute(0, 3, 6, 7, 4, 2, 1, 5, 8)",
    ),
    _pixels(
        "first frame repeated for an odd last one",
        "pixels",
        "frames_TCHW[-1:].expand",
        "frames_TCHW[:1].expand",
    ),
    _pixels("sides rounded down", "pixels", "round(height / factor) * factor", "height // factor * factor"),
    _pixels(
        "small images grown too little",
        "pixels",
        "math.ceil(height * grow / factor)",
        "math.floor(height * grow / factor)",
    ),
    _pixels(
        "videos within the bounds of images",
        "pixels",
        'rule.image if kind == "image" else rule.video',
        "rule.image",
    ),
    _pixels(
        "seconds of one frame, not of a group",
        "positions",
        "rule.temporal / pixels.frames_per_second",
        "1 / pixels.frames_per_second",
    ),
)


def _positions(name: str, file: str, old: str, new: str) -> Mutant:
    return Mutant(name=name, kind="positions", file=f"{file}.py", old=old, new=new)


POSITIONS = (
    _positions(
        "an item moves itself", "positions/plan", "advance_M.cumsum(0) - advance_M[:1]", "advance_M.cumsum(0)"
    ),
    _positions("text counted from one", "positions/plan", "is_text.cumsum(0) - is_text", "is_text.cumsum(0)"),
    _positions(
        "the item that ends is not counted", "positions/plan", "finished[end] += 1", "finished[end] += 0"
    ),
    _positions(
        "resume by the largest position",
        "positions/mrope",
        'pruned_resume == "reference"',
        'pruned_resume == "max"',
    ),
    _positions(
        "resume one too early",
        "positions/mrope",
        "max(merged_sides(item.grid, rule.merge)) if spatial else block_4L[:3].amax() + 1",
        "max(merged_sides(item.grid, rule.merge)) if spatial else block_4L[:3].amax()",
    ),
    _positions(
        "whole seconds rounded, not cut",
        "positions/media",
        "rule.tokens_per_second * int(seconds)",
        "rule.tokens_per_second * round(seconds)",
    ),
    _positions(
        "seconds of whole prompts cut",
        "positions/media",
        "_double_times(item.grid[0], seconds * rule.tokens_per_second)\n\n\ndef pruned_times",
        "_double_times(item.grid[0], int(seconds) * rule.tokens_per_second)\n\n\ndef pruned_times",
    ),
    _positions(
        "rows and columns of cells exchanged",
        "positions/media",
        "channels[..., 1] = torch.arange(rows)[:, None]\n    channels[..., 2] = torch.arange(columns)",
        "channels[..., 2] = torch.arange(rows)[:, None]\n    channels[..., 1] = torch.arange(columns)",
    ),
    _positions(
        "shift of decoding one short",
        "positions/rules",
        "table_RN.amax() + (1 - num_columns)",
        "table_RN.amax() + (0 - num_columns)",
    ),
    _positions(
        "stale anchor",
        "integrations/vllm/pruner",
        "return table_3N[2, start - 1 : start] + 1",
        "return table_3N[2, start - 1 : start]",
    ),
    _positions(
        "stored columns not counted from the item",
        "integrations/vllm/pruner",
        "stored_3K = table_3N[:, start : request.num_computed] - anchor_1",
        "stored_3K = table_3N[:, start : request.num_computed]",
    ),
    _positions(
        "chunk begins at the item",
        "integrations/vllm/pruner",
        "start = first.placeholder.offset if first.start else request.num_computed",
        "start = first.placeholder.offset if first.start > 1 else request.num_computed",
    ),
    _positions(
        "window one column short",
        "integrations/vllm/windows",
        "stop = min(end - placeholder.offset, placeholder.length)",
        "stop = min(end - placeholder.offset, placeholder.length - 1)",
    ),
    _positions(
        "decoding starts one too late",
        "positions/rules",
        "torch.arange(first, first + count",
        "torch.arange(first + 1, first + 1 + count",
    ),
)


def _evs(name: str, old: str, new: str) -> Mutant:
    return Mutant(name=name, kind="pruning", file="pruning/evs.py", old=old, new=new)


def _select(name: str, old: str, new: str) -> Mutant:
    return Mutant(name=name, kind="pruning", file="pruning/selectors.py", old=old, new=new)


PRUNING = (
    _evs("first frame scored like the others", "FIRST_FRAME = 255.0", "FIRST_FRAME = 0.0"),
    _evs(
        "compared with itself",
        "_unit(embeds_RD[:num_changed], norm_R1[:num_changed])",
        "_unit(embeds_RD[num_tokens:], norm_R1[num_tokens:])",
    ),
    _evs(
        "similar tokens kept",
        "1.0 - _rounded(product_CD.sum(-1), dtype)",
        "1.0 + _rounded(product_CD.sum(-1), dtype)",
    ),
    _evs(
        "not a number counts as unchanged",
        "torch.where(changed_C.isnan(), 1.0, changed_C)",
        "torch.where(changed_C.isnan(), 0.0, changed_C)",
    ),
    _evs(
        "count rounded up",
        "math.trunc(float(tokens_per_frame * frames) * share)",
        "math.ceil(float(tokens_per_frame * frames) * share)",
    ),
    _evs("fewer than one frame left", "max(tokens_per_frame, math.trunc", "max(1, math.trunc"),
    _evs(
        "lengths of vectors count",
        "_rounded(current_CD * previous_CD, dtype)",
        "_rounded(embeds_RD[num_tokens:].float() * embeds_RD[:num_changed].float(), dtype)",
    ),
    _select(
        "ties from the last index on",
        "level_R & (level_R.to(torch.int64).cumsum(0) <= room)",
        "level_R & (level_R.to(torch.int64).flip(0).cumsum(0).flip(0) <= room)",
    ),
    _select(
        "all ties kept",
        "(level_R.to(torch.int64).cumsum(0) <= room)",
        "(level_R.to(torch.int64).cumsum(0) <= room + 1)",
    ),
    _select(
        "indices one too high",
        "return index_R.new_zeros(num_kept + 1).scatter(0, slot_R, index_R)[:num_kept]",
        "return index_R.new_zeros(num_kept + 1).scatter(0, slot_R, index_R)[:num_kept] + 1",
    ),
    _select(
        "rows of the first tokens for those kept",
        "embeds_TND.flatten(0, 1).index_select(0, kept_K), kept_K",
        "embeds_TND.flatten(0, 1)[: kept_K.shape[0]], kept_K",
    ),
    Mutant(
        name="rows spliced one column late",
        kind="positions",
        file="positions/splice.py",
        old="torch.arange(first, stop) for first, stop in runs",
        new="torch.arange(first + 1, stop + 1) for first, stop in runs",
    ),
    Mutant(
        name="text slots of a placeholder overwritten",
        kind="positions",
        file="positions/splice.py",
        old="            elif is_embed:\n                found.append((column, column + 1))",
        new="            else:\n                found.append((column, column + 1))",
    ),
)

AROUND = (*PIXELS, *POSITIONS, *PRUNING)
