"""A build in a process of its own: live phases, true cancel, limits, one retry after a crash.

The process reads a job from the first line of standard input and writes lines of JSON to standard output:
phases, then one record or one error. Standard input stays open: when it closes, the parent is gone.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from vlexport import errors
from vlexport.backends import BuildLimits, Progress
from vlexport.backends._tensorrt import attention, network_check
from vlexport.backends._tensorrt.cache import keep_timings, recall_timings
from vlexport.backends._tensorrt.messages import Job, Record
from vlexport.backends._tensorrt.network import (
    Log,
    add_profiles,
    parse,
    progress_monitor,
    refuse_dropped,
    set_targets,
)
from vlexport.errors import MisfitError, ResourceError, UnsupportedError, VlexportError
from vlexport.file_cache import CacheFile

WAYS_OUT = (
    "Three ways out: name a smaller profile (profile=, max_pixels=), build in bfloat16 or float16, or "
    "build where there is more memory."
)
# What the library writes of the host's memory, and what C++ writes when it has none.
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


class _CrashError(Exception):
    """The process ended without a word; tried once more."""


def build(job: Job, limits: BuildLimits, progress: Progress) -> Record:
    """Run the process; whatever ends this one, by an exception or a signal, ends that one too."""
    limited = replace(job, memory_bytes=math.ceil(limits.gibibytes * 2**30))
    try:
        return _attempt(limited, limits, progress)
    except _CrashError:
        progress("again after a crash", 0.0)
    try:
        return _attempt(limited, limits, progress)
    except _CrashError as crash:
        raise VlexportError(
            f"{job.library} crashed twice while building: {crash}. Report it to the "
            "library's makers with the graph that `vlexport repro` writes."
        ) from crash


def _attempt(job: Job, limits: BuildLimits, progress: Progress) -> Record:
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            process.kill()

        timer = threading.Timer(limits.seconds, expire)
        try:
            if limits.seconds:
                timer.start()
            record = _receive(process, job, progress)
            process.wait()
        finally:
            timer.cancel()
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(BrokenPipeError):
                    pipe.close()
        if record is not None:
            return record
        log.seek(0)
        raise _reason(process.returncode, log, limits, timed_out=expired.is_set())


def _receive(process: subprocess.Popen[str], job: Job, progress: Progress) -> Record | None:
    """Read lines until the record; None if the process ended without one."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(job.to_json() + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return None
    for line in process.stdout:
        message = json.loads(line)
        if "record" in message:
            return Record.from_json(message["record"])
        if "errno" in message:
            raise OSError(message["errno"], message["message"])
        if "error" in message:
            if any(word in message["message"].lower() for word in NO_MEMORY):
                raise _no_memory(message["message"])
            raise getattr(errors, message["error"])(message["message"])
        progress(message["phase"], message["share"])
    return None


def _no_memory(detail: str) -> ResourceError:
    return ResourceError(f"the build ran out of memory ({detail}). {WAYS_OUT}")


def _reason(code: int, log: IO[str], limits: BuildLimits, *, timed_out: bool) -> Exception:
    """Return why a process ended without a record or an error."""
    tail = log.read()[-2000:]
    if timed_out:
        return ResourceError(
            f"the build took longer than {limits.seconds:g} seconds and was stopped. Allow more time "
            "(seconds=), or name smaller profiles or fewer targets."
        )
    if code == -9:
        return _no_memory("the system killed it")
    if any(word in tail.lower() for word in NO_MEMORY) or (limits.gibibytes and code < 0):
        most = f"it may take {limits.gibibytes:.3g} GiB; gibibytes= allows more"
        return _no_memory(most if limits.gibibytes else f"status {code}")
    last = tail.strip().splitlines()[-1:] or ["no message"]
    return _CrashError(f"status {code}, {last[0][:300]}")


def main() -> None:
    """Build the job on the first line of standard input."""
    job = Job.from_json(sys.stdin.readline())
    out = os.fdopen(os.dup(1), "w", buffering=1)
    # The library and what it loads may write to standard output; that goes to the log.
    os.dup2(2, 1)

    def send(**message: object) -> None:
        out.write(json.dumps(message) + "\n")

    def end_with_parent() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        _limit_memory(job.memory_bytes)
        record = _build(job, lambda phase, share: send(phase=phase, share=share))
    except VlexportError as error:
        send(error=type(error).__name__, message=str(error))
    except OSError as error:
        send(errno=error.errno, message=error.strerror or str(error))
    except MemoryError:
        send(error="ResourceError", message="out of memory")
    else:
        send(record=record.to_json())
    out.flush()
    # Tearing the library down is not worth waiting for.
    os._exit(0)


def _limit_memory(most: int) -> None:
    if not most:
        return
    if sys.platform == "win32":
        raise UnsupportedError("Windows has no memory limit of this kind. Build without gibibytes=.")
    import resource

    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _peak_memory() -> int:
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _build(job: Job, progress: Progress) -> Record:
    """Compare the parsed network with the plan, then let the library build it."""
    start = time.monotonic()
    library: Any = importlib.import_module(job.library)
    log = Log(library)
    builder = library.Builder(log.logger)
    config = builder.create_builder_config()
    set_targets(library, config, job.targets)
    progress("parse", 0.0)
    network = parse(library, builder, log, job.model)
    progress("read back", 0.0)
    refuse_dropped(log.warnings, job.plan.unread)
    found, layers = network_check.read(library, network)
    findings = (*network_check.compare(found, job.plan), network_check.typing_of(library, network))
    progress("probe attention", 0.0)
    kernels = attention.settle(library, network, job.targets)
    findings += add_profiles(builder, config, job.profiles)
    wrong = [f"{each.check}: {each.wrong}" for each in findings if each.wrong]
    if wrong:
        raise UnsupportedError(
            f"the network that {job.library} made differs from the graph: "
            f"{'; '.join(wrong)}. Nothing was built; report it with the graph that `vlexport repro` writes."
        )
    config.progress_monitor = progress_monitor(library, progress)
    # Deep in an engine, products of float32 stay products of float32.
    config.clear_flag(library.BuilderFlag.TF32)
    config.profiling_verbosity = library.ProfilingVerbosity.DETAILED
    # All memory comes from the one who runs the engine: what it takes is known, and graphs can be captured.
    # TensorRT for RTX otherwise takes more while it runs and logs none of it; TensorRT never does. Attention
    # that is decomposed may want more than the library reserves.
    is_fused = attention.DECOMPOSED not in kernels.values()
    allocation = getattr(library.BuilderFlag, "REQUIRE_USER_ALLOCATION", None)
    if is_fused and allocation is not None:
        config.set_flag(allocation)
    timings = CacheFile(path=Path(job.timings)) if job.timings else None
    if timings:
        recall_timings(config, timings)
    # The probes built engines too.
    log.remarks.clear()
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise _refused(job, log)
    # Some inputs are only seen to be of no use when the engine is made.
    refuse_dropped(log.warnings, job.plan.unread)
    if timings:
        keep_timings(config, timings)
    with Path(job.engine).open("wb") as file:
        file.write(engine)
    weights, contexts = log.memory(len(job.profiles))
    return Record(
        library=job.library,
        version=str(library.__version__),
        targets=job.targets,
        profiles=job.profiles,
        layers=layers,
        attention=kernels,
        findings=findings,
        engine_bytes=engine.nbytes,
        seconds=round(time.monotonic() - start, 2),
        peak_bytes=_peak_memory(),
        weights_bytes=weights,
        context_bytes=dict(zip(job.profiles, contexts if is_fused else (), strict=False)),
    )


def _refused(job: Job, log: Log) -> VlexportError:
    reason = log.reason()
    text = f"{job.library} builds no engine for {', '.join(job.targets)}: {reason}"
    if "memory" in reason.lower():
        return ResourceError(text)
    if "HW-specific datatypes" in reason:
        return MisfitError(f"{text}. Build in another dtype for this device.")
    return UnsupportedError(f"{text}. Try another dtype, target or a smaller profile.")


if __name__ == "__main__":
    main()
