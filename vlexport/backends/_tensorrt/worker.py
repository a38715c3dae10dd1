"""The process that builds one engine: what crashes, hangs or eats memory there ends there.

It reads a job from the first line of standard input and writes lines of JSON to standard output: phases,
then one result or one error. Standard input stays open as a leash: when it closes, the parent is gone.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from vlexport.backends._tensorrt import network
from vlexport.backends._tensorrt.messages import Job, Record
from vlexport.errors import UnsupportedError, VlexportError


def main() -> None:
    """Build what the first line of standard input asks for."""
    job = Job.from_json(sys.stdin.readline())
    out = os.fdopen(os.dup(1), "w", buffering=1)
    # The library and what it loads may write to standard output; that goes to the log.
    os.dup2(2, 1)
    threading.Thread(target=_leash, daemon=True).start()
    try:
        _cap_memory(job.memory_bytes)
        record = _build(job, out)
    except VlexportError as error:
        _say(out, {"error": type(error).__name__, "message": str(error)})
    except OSError as error:
        _say(out, {"errno": error.errno, "message": error.strerror or str(error)})
    except MemoryError:
        _say(out, {"error": "ResourceError", "message": "out of memory"})
    else:
        _say(out, {"record": record.to_json()})
    out.flush()
    # Tearing the library down is not worth waiting for.
    os._exit(0)


def _leash() -> None:
    sys.stdin.read()
    os._exit(1)


def _cap_memory(most: int) -> None:
    if not most:
        return
    if sys.platform == "win32":
        raise UnsupportedError("Windows has no memory limit of this kind. Build without --build-memory.")
    import resource

    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _say(out: TextIO, line: dict[str, object]) -> None:
    out.write(json.dumps(line) + "\n")


def _build(job: Job, out: TextIO) -> Record:
    start = time.monotonic()
    library: Any = importlib.import_module(job.library)
    built = network.build(library, job, lambda phase, share: _say(out, {"phase": phase, "share": share}))
    with Path(job.engine).open("wb") as file:
        file.write(built.engine)
    return Record(
        library=job.library,
        version=str(library.__version__),
        targets=job.targets,
        profiles=job.profiles,
        layers=built.layers,
        attention=built.attention,
        findings=built.findings,
        engine_bytes=built.engine.nbytes,
        seconds=round(time.monotonic() - start, 2),
        peak_bytes=_peak(),
        weights_bytes=built.memory.weights,
        context_bytes=dict(zip(job.profiles, built.memory.contexts, strict=False)),
    )


def _peak() -> int:
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
