"""Which kind a source is that comes without a name for it."""

from __future__ import annotations

from pathlib import Path

from vlexport.media.arrays import is_array
from vlexport.media.images import is_image
from vlexport.media.limits import DEFAULT_LIMITS, MediaLimits
from vlexport.media.sources import open_source, plain

START = 16


def kind_of(source: object, limits: MediaLimits = DEFAULT_LIMITS) -> str:
    """Return `image` or `video`: files by content, arrays by their number of axes, lists are frames."""
    if isinstance(kind := getattr(source, "kind", None), str):
        return kind
    if isinstance(source, list | tuple) or (is_array(source) and len(source.shape) == 4):
        return "video"
    source = plain(source, limits)
    if isinstance(source, str | Path):
        with open_source(source, limits) as file:
            source = file.read(START)
    return "video" if isinstance(source, bytes) and not is_image(source[:START]) else "image"
