"""The build of a TensorRT engine, in a process of its own."""

from __future__ import annotations

import importlib
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vlexport.backends import BuildLimits, Progress, _child
from vlexport.backends._tensorrt import attention, network, network_check
from vlexport.backends._tensorrt.messages import Finding, Job, Record
from vlexport.backends._tensorrt.network import Log
from vlexport.bundle.user_folders import CacheFile
from vlexport.errors import MisfitError, ResourceError, UnsupportedError, VlexportError

logger = logging.getLogger(__name__)


def build(job: Job, limits: BuildLimits, progress: Progress) -> Record:
    """Build in a child; return its record."""
    work = _child.Work(
        function=f"{__name__}:build_job", job=job.to_json(), library=job.library, limits=limits
    )
    return Record.from_json(_child.run(work, progress))


def build_job(text: str, progress: Progress) -> str:
    """Compare the parsed network with the plan, then let the library build it; return the record as JSON."""
    start, job = time.monotonic(), Job.from_json(text)
    library: Any = importlib.import_module(job.library)
    log = Log(library)
    builder = library.Builder(log.logger)
    config = builder.create_builder_config()
    network.set_targets(library, config, job.targets)
    progress("parse", 0.0)
    parsed = network.parse(library, builder, log, job.model)
    progress("read back", 0.0)
    network.refuse_dropped(log.warnings, job.plan.unread)
    counts, layers = network_check.read(library, parsed)
    findings = (*network_check.compare(counts, job.plan), network_check.typing_of(library, parsed))
    progress("probe attention", 0.0)
    kernels = attention.settle(library, parsed, job.targets)
    findings += network.add_profiles(builder, config, job.profiles)
    _require_equal(job, findings)
    config.progress_monitor = network.progress_monitor(library, progress)
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
    engine = builder.build_serialized_network(parsed, config)
    if engine is None:
        raise _refused(job, log)
    # Some inputs are only seen to be of no use when the engine is made.
    network.refuse_dropped(log.warnings, job.plan.unread)
    if timings:
        keep_timings(config, timings)
    Path(job.engine).write_bytes(engine)
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
    ).to_json()


def _require_equal(job: Job, findings: Sequence[Finding]) -> None:
    wrong = [f"{finding.check}: {finding.wrong}" for finding in findings if finding.wrong]
    if wrong:
        raise UnsupportedError(
            f"the network that {job.library} made differs from the graph: "
            f"{'; '.join(wrong)}. Nothing was built. Report it; `vlexport repro` "
            "writes a graph for that, of a bundle of --backend onnxruntime."
        )


def _peak_memory() -> int:
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def recall_timings(config: Any, file: CacheFile) -> None:
    """Set the timings of earlier builds; those of another GPU, and damaged ones, are refused and ignored."""
    timings = config.create_timing_cache(file.read())
    if timings is None or not config.set_timing_cache(timings, False):
        logger.info("%s is of another GPU or damaged; kernels are timed anew", file.path)
        config.set_timing_cache(config.create_timing_cache(b""), False)


def keep_timings(config: Any, file: CacheFile) -> None:
    timings = config.get_timing_cache()
    content = timings.serialize() if timings is not None else None
    if content is not None:
        file.write(bytes(content))


def _refused(job: Job, log: Log) -> VlexportError:
    reason = log.reason()
    text = f"{job.library} builds no engine for {', '.join(job.targets)}: {reason}"
    if "memory" in reason.lower():
        return ResourceError(text)
    if "HW-specific datatypes" in reason:
        return MisfitError(f"{text}. Build in another dtype for this device.")
    return UnsupportedError(f"{text}. Try another dtype, target or a smaller profile.")
