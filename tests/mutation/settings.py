"""Bugs planted in facts of releases, settings of preprocessing, words, keys, chunks and snapped scores."""

from __future__ import annotations

from tests.mutation.mutant import RECIPE, Mutant
from tests.mutation.slicing import LINE, SLICES, TIMES


def _release(name: str, old: str, new: str, trial: str = SLICES) -> Mutant:
    return Mutant(name=f"facts: {name}", kind="facts", file=RECIPE, old=old, new=new, trial=trial)


FACTS = (
    _release("heads of 64 columns", "HEAD_WIDTH = 128", "HEAD_WIDTH = 64"),
    _release("2.5 places patches in a grid", '"2.5": Variant(grid_in_tower=False, ', '"2.5": Variant(', LINE),
    _release("2.6 places patches in a line", '"2.6": Variant(', '"2.6": Variant(grid_in_tower=False, '),
    _release("4.5 without frame times", '"4.5": Variant(frame_times=True, ', '"4.5": Variant(', TIMES),
    _release("4.0 without videos", '"4.0": Variant()', '"4.0": Variant(videos=False)'),
    _release(
        "norms read from each other's names",
        '("norm1.", "layer_norm1."), ("norm2.", "layer_norm2."),',
        '("norm1.", "layer_norm2."), ("norm2.", "layer_norm1."),',
    ),
)


def _setting(name: str, file: str, old: str, new: str, trial: str = "windows") -> Mutant:
    return Mutant(name=f"settings: {name}", kind="settings", file=file, old=old, new=new, trial=trial)


SETTINGS = (
    _setting(
        "upper bound by pixels not read", "vision/preprocess.py", 'settings.get("max_pixels") or size', "size"
    ),
    _setting(
        "edges before pixels",
        "vision/preprocess.py",
        'settings.get("min_pixels") or size.get("shortest_edge")',
        'size.get("shortest_edge") or settings.get("min_pixels")',
    ),
    _setting(
        "cap of videos not read", "vision/preprocess.py", 'settings.get("cap_pixels_per_frame")', "False"
    ),
    _setting("always normalised", "vision/preprocess.py", 'settings.get("do_normalize", True)', "True"),
    _setting("most slices not read", RECIPE, 'view.get_int("max_slice_nums", 9)', "9", SLICES),
    _setting(
        "mean of slices by one name only",
        RECIPE,
        'view.get_floats("norm_mean", view.get_floats("image_mean", half))',
        'view.get_floats("image_mean", half)',
        SLICES,
    ),
)

WORDS = (
    Mutant(
        name="words: images counted from 1",
        kind="words",
        file=RECIPE,
        old="<image_id>{number}<",
        new="<image_id>{number + 1}<",
        trial=SLICES,
    ),
    Mutant(
        name="words: early cells have words of their own",
        kind="words",
        file=RECIPE,
        old="EARLY_WORDS = SliceWords(numbered=False, cells_apart=False)",
        new="EARLY_WORDS = SliceWords(numbered=False, cells_apart=True)",
        trial=LINE,
    ),
    Mutant(
        name="words: a video in the slots of images",
        kind="words",
        file=RECIPE,
        old='"video": "<|video_pad|>"}',
        new='"video": "<|image_pad|>"}',
    ),
    Mutant(
        name="words: markers of a chat in another order",
        kind="words",
        file="runtime/prompt.py",
        old="next(remaining[kind]) for kind in kinds",
        new="next(remaining[kind]) for kind in sorted(kinds)",
    ),
)


def _kept(name: str, file: str, old: str, new: str) -> Mutant:
    return Mutant(name=f"kept: {name}", kind="identity", file=file, old=old, new=new)


KEYS = (
    _kept(
        "exporter versions out of the key",
        "_build.py",
        "exporter_versions=versions,",
        "exporter_versions={},",
    ),
    _kept(
        "first megabyte of a tensor hashed",
        "checkpoint/safetensors.py",
        "content.update(part)",
        'content.update(b"" if begin else part)',
    ),
    _kept(
        "first megabyte of a payload hashed",
        "bundle/files.py",
        "            digest.update(chunk)\n            size",
        '            digest.update(chunk if size < 1 << 20 else b"")\n            size',
    ),
)

CHUNKS = (
    Mutant(
        name="chunks: one token left over is not read",
        kind="chunks",
        file="runtime/generate.py",
        old="range(0, len(embeds_ND), step)",
        new="range(0, max(len(embeds_ND) - 1, 1), step)",
    ),
    Mutant(
        name="chunks: positions of the first chunk for all",
        kind="chunks",
        file="runtime/generate.py",
        old="table_RN[:, chunk])",
        new="table_RN[:, : len(embeds_ND[chunk])])",
    ),
)


def _snapped(name: str, old: str, new: str) -> Mutant:
    return Mutant(name=f"snapped: {name}", kind="pruning", file="pruning/snapped.py", old=old, new=new)


# `<` for `<=` in the correction upwards is no bug where division is rounded correctly. At a tie 2**21 dot =
# (2 k + 1) norms, so the odd factor leaves 2**21 to the norms: norms = 2**21 m, m at most 2**13, are exact in
# float32, and so are k + 1/2, their quotient, and the sum k + 1. The candidate is k + 1 already.
SNAPPED = (
    _snapped("steps of 1/512", "STEPS = 1024", "STEPS = 512"),
    _snapped(
        "no correction downwards",
        "steps_C = steps_C - ((2 * steps_C - 1)",
        "steps_C = steps_C - 0 * ((2 * steps_C - 1)",
    ),
    _snapped(
        "no correction upwards",
        "steps_C = steps_C + ((2 * steps_C + 1)",
        "steps_C = steps_C + 0 * ((2 * steps_C + 1)",
    ),
    _snapped("one bit less of a row", "MAX_NORM_EXPONENT = 12", "MAX_NORM_EXPONENT = 11"),
)

BLIND_SPOTS = (*FACTS, *SETTINGS, *WORDS, *KEYS, *CHUNKS, *SNAPPED)
