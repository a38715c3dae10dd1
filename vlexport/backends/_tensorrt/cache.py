"""Caches of the libraries for a GPU: timings of kernels, and kernels compiled while running.

They are in the user's cache folder, one file for each library version and device.
"""

from __future__ import annotations

import logging
from typing import Any

from vlexport.bundle.user_folders import CacheFile

logger = logging.getLogger(__name__)


def recall_timings(config: Any, file: CacheFile) -> None:
    """Set the timings of earlier builds; those of another GPU, and damaged ones, are refused and ignored."""
    timings = config.create_timing_cache(file.read())
    if timings is None or not config.set_timing_cache(timings, False):
        logger.info("%s is of another GPU or damaged; kernels are timed anew", file.path)
        config.set_timing_cache(config.create_timing_cache(b""), False)


def keep_timings(config: Any, file: CacheFile) -> None:
    """Keep the timings that this build added."""
    timings = config.get_timing_cache()
    content = timings.serialize() if timings is not None else None
    if content is not None:
        file.write(bytes(content))
