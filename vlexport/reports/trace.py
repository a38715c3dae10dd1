"""A time line of a command in Chrome's trace format: stages, engine calls and torch's operators."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vlexport.runtime.outputs import writing


@contextmanager
def traced(out: Path | None) -> Iterator[None]:
    """Record the block to a file for ui.perfetto.dev, with kernels of a GPU; do nothing without a file."""
    if out is None:
        yield
        return
    import torch
    from torch.profiler import ProfilerActivity, profile

    gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    with profile(activities=[ProfilerActivity.CPU, *gpu]) as profiler:
        yield
    with writing(out, "--trace") as temporary:
        profiler.export_chrome_trace(str(temporary))
        # Names of the machine and of this folder are in the profiler's own file.
        trace = json.loads(temporary.read_text(encoding="utf-8"))
        # The profiler's marks of itself have no process number, which every event of the format has.
        events = [event for event in trace["traceEvents"] if isinstance(event.get("pid"), int)]
        written = json.dumps({"displayTimeUnit": "ms", "traceEvents": events})
        temporary.write_text(written, encoding="utf-8")
