"""A time line of a command in Chrome's trace format: stages, engine calls and torch's operators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def traced(out: Path | None) -> Iterator[None]:
    """Record the block and write it to a file for ui.perfetto.dev, or do nothing without one.

    Kernels of a GPU are recorded where torch has one. The block itself runs slower.
    """
    if out is None:
        yield
        return
    import torch
    from torch.profiler import ProfilerActivity, profile

    gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    with profile(activities=[ProfilerActivity.CPU, *gpu]) as found:
        yield
    found.export_chrome_trace(str(out))
