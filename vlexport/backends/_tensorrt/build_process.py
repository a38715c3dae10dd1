"""A build in a process of its own: live phases, true cancel, limits, one retry after a crash."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import IO

from vlexport import errors
from vlexport.backends import BuildLimits
from vlexport.backends._tensorrt.messages import Job, Record
from vlexport.errors import ResourceError, VlexportError

WORKER = "vlexport.backends._tensorrt.worker"
WAYS_OUT = (
    "Three ways out: name a smaller profile (--profile, --max-pixels), build in bfloat16 or float16, or "
    "build where there is more memory."
)
# What the library says of the host's memory, and what C++ says when it has none.
NO_MEMORY = (
    "out of memory",
    "outofmemory",
    "memoryerror",
    "bad_alloc",
    "bad alloc",
    "cannot allocate",
    # No room for a library, and none for the stack of a thread.
    "failed to map segment",
    "resource temporarily unavailable",
)

Progress = Callable[[str, float], None]


class _CrashError(Exception):
    """The process ended without a word; tried once more."""


def build(job: Job, limits: BuildLimits, progress: Progress) -> Record:
    """Run the worker; whatever ends this process, by an exception or a signal, ends the worker too."""
    asked = replace(job, memory_bytes=math.ceil(limits.gibibytes * 2**30))
    try:
        return _attempt(asked, limits, progress)
    except _CrashError:
        progress("again after a crash", 0.0)
    try:
        return _attempt(asked, limits, progress)
    except _CrashError as crash:
        raise VlexportError(
            f"{job.library} crashed twice while building: {crash}. Report it to the "
            "library's makers with the graph that `vlexport repro` writes."
        ) from crash


def _attempt(job: Job, limits: BuildLimits, progress: Progress) -> Record:
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        expired = threading.Event()
        late = threading.Timer(limits.seconds, _expire, (expired, process))
        try:
            if limits.seconds:
                late.start()
            said = _listen(process, job, progress)
            process.wait()
        finally:
            late.cancel()
            process.kill()
            process.wait()
            _close(process)
        if said is not None:
            return said
        log.seek(0)
        raise _why(process.returncode, log, limits, timed_out=expired.is_set())


def _expire(expired: threading.Event, process: subprocess.Popen[str]) -> None:
    expired.set()
    process.kill()


def _close(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except BrokenPipeError:
                continue


def _listen(process: subprocess.Popen[str], job: Job, progress: Progress) -> Record | None:
    """Lines until the record, or None if the process ended without one."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(job.to_json() + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return None
    for line in process.stdout:
        said = json.loads(line)
        if "record" in said:
            return Record.from_json(said["record"])
        if "errno" in said:
            raise OSError(said["errno"], said["message"])
        if "error" in said:
            raise _told(said["error"], said["message"])
        progress(said["phase"], said["share"])
    return None


def _told(kind: str, message: str) -> VlexportError:
    """The worker's error as one of ours."""
    if any(word in message.lower() for word in NO_MEMORY):
        return _no_memory(message)
    found = getattr(errors, kind)
    assert issubclass(found, VlexportError)
    told: VlexportError = found(message)
    return told


def _no_memory(detail: str) -> ResourceError:
    return ResourceError(f"the build ran out of memory ({detail}). {WAYS_OUT}")


def _why(code: int, log: IO[str], limits: BuildLimits, *, timed_out: bool) -> Exception:
    """Why a process said nothing at the end."""
    tail = log.read()[-2000:]
    if timed_out:
        return ResourceError(
            f"the build took longer than {limits.seconds:g} seconds and was stopped. Allow more time "
            "(--build-seconds), or name smaller profiles or fewer targets."
        )
    if code == -9:
        return _no_memory("the system killed it")
    if any(word in tail.lower() for word in NO_MEMORY) or (limits.gibibytes and code < 0):
        most = f"it may take {limits.gibibytes:.3g} GiB; --build-memory allows more"
        return _no_memory(most if limits.gibibytes else f"status {code}")
    last = tail.strip().splitlines()[-1:] or ["no message"]
    return _CrashError(f"status {code}, {last[0][:300]}")
