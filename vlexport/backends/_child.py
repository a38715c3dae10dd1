"""Work in a process of its own: live phases, true cancel, limits of memory and time, one retry after a crash.

The process reads its job, a line of text, from standard input and writes lines of JSON to standard output:
phases, then the result or one error. Standard input stays open: when it closes, the parent is gone.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from vlexport import errors, system
from vlexport.backends.base import BuildLimits, Progress
from vlexport.errors import ResourceError, UnsupportedError, VlexportError

START = f"from {__name__} import main; main()"
# For compilers that the library has started to remove their files.
SECONDS_TO_END = 1.0
# What the library writes of the host's memory, and C++ without any; OpenBLAS, as it is loaded; no room for a
# library, and none for the stack of a thread.
NO_MEMORY = (
    "out of memory", "outofmemory", "memoryerror", "bad_alloc", "bad alloc", "cannot allocate",
    "memory allocation", "failed to map segment", "resource temporarily unavailable",
)  # fmt: skip


class CrashedError(VlexportError):
    """The process ended without a word, twice."""


class _CrashError(Exception):
    """The process ended without a word; tried once more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """A job, a line of text, and the function `module:name` that makes the result of it and a `Progress`.

    library  what is named where the process crashes
    ended    called with the number of a process that has ended, with a result or without one
    """

    function: str
    job: str
    library: str
    limits: BuildLimits
    ended: Callable[[int], None] = lambda _: None


def run(work: Work, progress: Progress) -> str:
    """Run the process; whatever ends this one, by an exception or a signal, ends that one too."""
    try:
        with suppress(_CrashError):
            return _attempt(work, progress)
        progress("again after a crash", 0.0)
        return _attempt(work, progress)
    except _CrashError as crash:
        raise CrashedError(
            f"{work.library} crashed twice while building: {crash}. Report it to the "
            "library's makers; `vlexport repro` writes a graph for that, of a bundle of onnxruntime."
        ) from crash


def _attempt(work: Work, progress: Progress) -> str:
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            system.command(START, work.function, str(math.ceil(work.limits.gibibytes * 2**30))),
            env=system.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            # A group of its own, by which what the library has started ends with it.
            process_group=None if sys.platform == "win32" else 0,
        )
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            end(process)

        timer = threading.Timer(work.limits.seconds, expire)
        try:
            if work.limits.seconds:
                timer.start()
            result = _receive(process, work.job, progress)
            process.wait()
        finally:
            timer.cancel()
            end(process)
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(BrokenPipeError):
                    pipe.close()
            work.ended(process.pid)
        if result is not None:
            return result
        log.seek(0)
        raise _reason(process.returncode, log.read()[-2000:], work.limits, timed_out=expired.is_set())


def end(process: subprocess.Popen[str]) -> None:
    """End a process that leads a group, and what it has started."""
    until = time.monotonic() + SECONDS_TO_END
    if sys.platform == "win32":
        process.kill()
    else:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
            # Its exit code is kept; the group goes on until the last of it has ended.
            while time.monotonic() < until:
                process.poll()
                os.killpg(process.pid, 0)
                time.sleep(0.01)
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _receive(process: subprocess.Popen[str], job: str, progress: Progress) -> str | None:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(job + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return None
    for line in process.stdout:
        message = json.loads(line)
        if "result" in message:
            return str(message["result"])
        if "errno" in message:
            raise OSError(message["errno"], message["message"])
        if "error" in message:
            if any(word in message["message"].lower() for word in NO_MEMORY):
                raise _no_memory(message["message"])
            raise getattr(errors, message["error"])(message["message"])
        progress(message["phase"], message["share"])
    return None


def _no_memory(detail: str) -> ResourceError:
    return ResourceError(
        f"the build ran out of memory ({detail}). Three ways out: name a smaller profile (profile or "
        "max_pixels), build in bfloat16 or float16, or build where there is more memory."
    )


def _reason(code: int, tail: str, limits: BuildLimits, *, timed_out: bool) -> Exception:
    if timed_out:
        return ResourceError(
            f"the build took longer than {limits.seconds:g} seconds and was stopped. Allow more time, "
            "or name smaller profiles or fewer targets."
        )
    if code == -9:
        return _no_memory("the system killed it")
    if any(word in tail.lower() for word in NO_MEMORY) or (limits.gibibytes and code < 0):
        most = f"it may take {limits.gibibytes:.3g} GiB; a higher limit of memory allows more"
        return _no_memory(most if limits.gibibytes else f"status {code}")
    lines = tail.strip().splitlines() or ["no message"]
    return _CrashError(f"status {code}, {lines[-1][:300]}")


def main() -> None:
    """Call the function named with the job on the first line of standard input."""
    name, most, job = sys.argv[1], int(sys.argv[2]), sys.stdin.readline()
    out = os.fdopen(os.dup(1), "w", buffering=1)
    # The library and what it loads may write to standard output; that goes to the log.
    os.dup2(2, 1)

    def send(**message: object) -> None:
        out.write(json.dumps(message) + "\n")

    def end_with_parent() -> None:
        sys.stdin.read()
        if sys.platform != "win32":
            os.killpg(0, signal.SIGTERM)
            time.sleep(SECONDS_TO_END)
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        if most and sys.platform == "win32":
            raise UnsupportedError("Windows has no memory limit of this kind. Build without a memory limit.")
        if most:
            import resource

            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        module, _, function = name.partition(":")
        call: Any = getattr(importlib.import_module(module), function)
        result = call(job, lambda phase, share: send(phase=phase, share=share))
    except VlexportError as error:
        # A private recipe may have classes of its own, which the parent does not load.
        ours = (kind for kind in type(error).__mro__ if getattr(errors, kind.__name__, None) is kind)
        send(error=next(ours).__name__, message=str(error))
    except OSError as error:
        send(errno=error.errno, message=error.strerror or str(error))
    except MemoryError:
        send(error="ResourceError", message="out of memory")
    else:
        send(result=result)
    out.flush()
    # Tearing the library down is not worth waiting for.
    os._exit(0)
