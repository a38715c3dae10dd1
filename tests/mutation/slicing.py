"""Bugs planted beside the tower of sliced images: cuts, tables, words, config, a decoder's scalings."""

from __future__ import annotations

from tests.mutation.mutant import RECIPE, Mutant

# What the demos call the checkpoints that show these bugs.
SLICES, TIMES, LEARNED, LINE = "slices", "slice times", "learned places", "places in a line"


def _cut(name: str, kind: str, old: str, new: str) -> Mutant:
    return Mutant(name=f"slices: {name}", kind=kind, file=RECIPE, old=old, new=new, trial=SLICES)


def _shared(name: str, kind: str, old: str, new: str, trial: str = SLICES) -> Mutant:
    file = "vision/slices.py"
    return Mutant(name=f"slices: {name}", kind=kind, file=file, old=old, new=new, trial=trial)


CUTS = (
    _cut(
        "cells of a cut column by column",
        "order",
        "cells.permute(0, 2, 4, 1, 3, 5)",
        "cells.permute(0, 4, 2, 1, 3, 5)",
    ),
    _cut("overview after its cells", "order", "parts.append(_rows", "parts.insert(0, _rows"),
    _cut("cut across for down", "pixels", "math.log(cut[1] / cut[0])", "math.log(cut[0] / cut[1])"),
    _cut(
        "one cell more is never tried", "pixels", "(wanted - 1, wanted, wanted + 1)", "(wanted - 1, wanted)"
    ),
    _cut("cells counted down", "pixels", "math.ceil(height * width", "math.floor(height * width"),
    _cut("sides rounded up", "pixels", "max(round(length / unit)", "max(math.ceil(length / unit)"),
    _cut("small cells stay small", "pixels", "rule, enlarge=True)", "rule, enlarge=False)"),
    _cut("small images stay small", "pixels", "enlarge=cut is None)", "enlarge=False)"),
    _cut("videos are cut", "pixels", 'if pixels.kind == "image" else None', "if pixels.kind else None"),
    _cut("no antialias", "pixels", "antialias=True, align", "antialias=False, align"),
    _cut("bilinear for bicubic", "pixels", '"bicubic", antialias=True', '"bilinear", antialias=True'),
    _cut("bytes divided by 256", "pixels", ".float() / 255", ".float() / 256"),
    _cut(
        "channels in reverse", "order", "return frames_THWC.permute(", "return frames_THWC.flip(3).permute("
    ),
    _shared(
        "channels last in a patch",
        "order",
        "split.permute(0, 2, 4, 1, 3, 5).reshape(-1, frames",
        "split.permute(0, 2, 4, 3, 5, 1).reshape(-1, frames",
    ),
)


def _table(name: str, kind: str, old: str, new: str, trial: str = SLICES) -> Mutant:
    return Mutant(name=f"slices: {name}", kind=kind, file=RECIPE, old=old, new=new, trial=trial)


TABLES = (
    Mutant(
        name="slices: queries in the order of the blocks",
        kind="order",
        file="vision/attention/layout.py",
        old='_inverse"] = cut.rank_S',
        new='_inverse"] = cut.rank_S.argsort()',
        trial=SLICES,
    ),
    Mutant(
        name="slices: slices of one length see each other",
        kind="masks",
        file="vision/attention/grouped.py",
        old="[count_R, length_R * unit]",
        new="[count_R // count_R, length_R * count_R * unit]",
        trial=SLICES,
    ),
    _table(
        "cells of a slice begin one late",
        "positions",
        "(lengths_S.cumsum(0) - lengths_S)[slice_N])[order_M]",
        "(lengths_S.cumsum(0) - lengths_S)[slice_N]).roll(1)[order_M]",
    ),
    _table(
        "slices are not parts of groups",
        "order",
        "Segments(order_M=order_N, lengths_S=lengths_G)",
        "Segments(order_M=order_N.flip(0), lengths_S=lengths_G)",
    ),
    Mutant(
        name="slices: items joined in reverse",
        kind="order",
        file="vision/attention/packing.py",
        old="item.patches for item in media])",
        new="item.patches for item in media[::-1]])",
        trial=SLICES,
    ),
    Mutant(
        name="slices: tokens counted once an item",
        kind="order",
        file="vision/attention/packing.py",
        old="self.queried.queries * len(",
        new="self.queried.queries * bool(",
        trial=SLICES,
    ),
    _table("fractions on a border go below it", "positions", "right=True", "right=False"),
    _table(
        "buckets one too high",
        "positions",
        "torch.arange(step, 1.0, step)",
        "torch.arange(0.0, 1.0, step)",
    ),
    _table(
        "rows and columns of buckets exchanged",
        "positions",
        "bucket_N2[:, 0] * table_side + bucket_N2[:, 1]",
        "bucket_N2[:, 1] * table_side + bucket_N2[:, 0]",
    ),
    _table(
        "fractions rounded to float16",
        "types",
        "cell_N2.float() / sides_N2.float()",
        "(cell_N2.half() / sides_N2.half()).float()",
    ),
    _table(
        "sides of a slice exchanged",
        "positions",
        "fields_S3[slice_N[order_M], :2], ",
        "fields_S3[slice_N[order_M], :2].flip(-1), ",
    ),
    _table(
        "rows and columns of keys exchanged",
        "positions",
        "[within_N // columns_N, within_N % columns_N]",
        "[within_N % columns_N, within_N // columns_N]",
    ),
    _table(
        "line of places counted by height",
        "positions",
        "cell_N2[:, 0] * sides_N2[:, 1] +",
        "cell_N2[:, 0] * sides_N2[:, 0] +",
        LINE,
    ),
    _shared("number 0 is no time", "positions", "any(frame != NO_TIME", "any(frame > 0", TIMES),
    _shared(
        "frames of a group asked apart",
        "positions",
        "[len(group) for group in item.frame_groups] if _has_time(item) else",
        "",
        TIMES,
    ),
    _shared(
        "times of the next slice",
        "positions",
        "for group in item.frame_groups for frame in group] or",
        "for group in item.frame_groups[::-1] for frame in group] or",
        TIMES,
    ),
)


def _words(name: str, old: str, new: str) -> Mutant:
    return Mutant(name=f"slices: {name}", kind="order", file=RECIPE, old=old, new=new, trial=SLICES)


def _recipe(name: str, kind: str, old: str, new: str, trial: str = SLICES) -> Mutant:
    return Mutant(name=f"slices: {name}", kind=kind, file=RECIPE, old=old, new=new, trial=trial)


OTHERS = (
    _words("rows of cells not told apart", '"\\n".join([cell', '"".join([cell'),
    _words("words of a cut across for down", "[cell * columns] * rows", "[cell * rows] * columns"),
    _words("words of cells before the overview", "return whole + (cells", "return cells + (whole"),
    _recipe(
        "dropped last layer kept",
        "arithmetic",
        'depth - view.get_bool("drop_vision_last_layer", False)',
        "depth",
    ),
    _recipe("another default epsilon", "arithmetic", '"layer_norm_eps", 1e-6', '"layer_norm_eps", 1e-5'),
    _recipe(
        "table as large as the image",
        "positions",
        '("image_size", 2**20) // patch,',
        '("image_size", 2**20) // patch + 1,',
    ),
    _recipe(
        "embeddings of the decoder not scaled",
        "arithmetic",
        'embeds=view.require_float("scale_emb")',
        "embeds=1.0",
        LEARNED,
    ),
    _recipe("branches of the decoder not scaled", "arithmetic", "branches=branch", "branches=1.0", LEARNED),
    _recipe(
        "depth of the decoder not rooted",
        "arithmetic",
        '("num_hidden_layers") ** 0.5',
        '("num_hidden_layers")',
        LEARNED,
    ),
    Mutant(
        name="slices: factors of the decoder not applied",
        kind="arithmetic",
        file="runtime/text_model.py",
        old="(factor * tensor.float())",
        new="(1.0 * tensor.float())",
        trial=LEARNED,
    ),
)

SLICING = (*CUTS, *TABLES, *OTHERS)
