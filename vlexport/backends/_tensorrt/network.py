"""From an ONNX file to an engine: parse, compare with the plan, ask for kernels, build.

The library comes as an argument; nothing here runs before it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlexport.backends._tensorrt import attention, memory, network_check
from vlexport.backends._tensorrt.api import Log, aim, strongly_typed
from vlexport.backends._tensorrt.cache import CacheFile, keep_timings, recall_timings
from vlexport.backends._tensorrt.messages import Bounds, Finding, Job
from vlexport.errors import MisfitError, ResourceError, UnsupportedError, VlexportError

Progress = Callable[[str, float], None]
# The library says so of an input that it has no use for; an engine without it would be wrong.
DROPPED = "unused input: "


@dataclass(frozen=True, kw_only=True)
class Built:
    """A serialised engine, and what its network looked like."""

    engine: Any
    layers: Mapping[str, Mapping[str, int]]
    attention: Mapping[str, str]
    findings: tuple[Finding, ...]
    memory: memory.Memory


def build(library: Any, job: Job, progress: Progress) -> Built:
    """Everything is compared with the plan before the library starts to build."""
    log = Log(library)
    builder = library.Builder(log.logger)
    config = builder.create_builder_config()
    aim(library, config, job.targets)
    progress("parse", 0.0)
    network = builder.create_network(strongly_typed(library))
    _parse(library, job, network, log)
    progress("read back", 0.0)
    refuse_dropped(log.warnings, job.plan.unread)
    found = network_check.read(library, network)
    findings = network_check.compare(library, network, found, job.plan)
    progress("probe attention", 0.0)
    kernels = attention.settle(library, network, job.targets)
    findings += _profiles(builder, config, job)
    _refuse_wrong(job, findings)
    config.progress_monitor = _monitor(library, progress)
    # Deep in an engine, products of float32 stay products of float32.
    config.clear_flag(library.BuilderFlag.TF32)
    config.profiling_verbosity = library.ProfilingVerbosity.DETAILED
    # Attention that is taken apart may want more than the library reserves.
    by_hand = attention.DECOMPOSED not in kernels.values() and _memory_by_hand(library, config)
    timings = CacheFile(path=Path(job.timings)) if job.timings else None
    if timings:
        recall_timings(config, timings)
    # The probes built engines too.
    log.remarks.clear()
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise _refused(job, log)
    # Some are only seen to be of no use when the engine is made.
    refuse_dropped(log.warnings, job.plan.unread)
    if timings:
        keep_timings(config, timings)
    taken = memory.heard(log.remarks, len(job.profiles))
    taken = taken if by_hand else replace(taken, contexts=())
    return Built(engine=engine, layers=found.layers, attention=kernels, findings=findings, memory=taken)


def _parse(library: Any, job: Job, network: Any, log: Log) -> None:
    parser = library.OnnxParser(network, log.logger)
    if not parser.parse_from_file(job.model):
        reasons = "; ".join(str(parser.get_error(index)) for index in range(parser.num_errors))
        raise UnsupportedError(f"{job.library} does not parse the graph: {reasons[:1000] or log.reason()}")


def _memory_by_hand(library: Any, config: Any) -> bool:
    """All memory comes from the one who runs the engine: what it takes is known, and graphs can be captured.

    TensorRT for RTX otherwise takes more while it runs, and says nothing of it; TensorRT never does.
    """
    flag = getattr(library.BuilderFlag, "REQUIRE_USER_ALLOCATION", None)
    if flag is not None:
        config.set_flag(flag)
    return True


def refuse_dropped(warnings: Sequence[str], unread: Sequence[str]) -> None:
    """Nothing may be dropped but what the traced program itself does not read."""
    said = [message for message in warnings if DROPPED in message.lower()]
    names = {message[message.lower().index(DROPPED) + len(DROPPED) :].strip() for message in said}
    dropped = sorted(names - set(unread))
    if dropped:
        raise UnsupportedError(
            f"the library ignores {', '.join(dropped)} among the inputs of the graph, so the engine would "
            "compute something else. Build with another backend, or lower what reads it otherwise."
        )


def _refuse_wrong(job: Job, findings: tuple[Finding, ...]) -> None:
    wrong = [f"{each.check}: {each.wrong}" for each in findings if each.wrong]
    if wrong:
        raise UnsupportedError(
            f"the network that {job.library} made of the graph is not what was asked for: "
            f"{'; '.join(wrong)}. Nothing was built; report it with the graph that `vlexport repro` writes."
        )


def _profiles(builder: Any, config: Any, job: Job) -> tuple[Finding, ...]:
    """Every profile is set, then read back from the library."""
    findings: list[Finding] = []
    for name, inputs in job.profiles.items():
        profile = builder.create_optimization_profile()
        for each, (low, usual, high) in inputs.items():
            profile.set_shape(each, low, usual, high)
        index = config.add_optimization_profile(profile)
        wrong = [each for each, bounds in inputs.items() if _shapes(profile, each) != bounds]
        text = f"{len(inputs)} inputs"
        findings.append(Finding(check=f"profile {name}", found=text, wrong=", ".join(wrong)))
        if index < 0:
            findings.append(Finding(check=f"profile {name}", found="-", wrong="refused by the library"))
    return tuple(findings)


def _shapes(profile: Any, name: str) -> Bounds:
    low, usual, high = (tuple(shape) for shape in profile.get_shape(name))
    return low, usual, high


def _monitor(library: Any, progress: Progress) -> Any:
    class Monitor(library.IProgressMonitor):  # type: ignore[misc]
        """Only the outermost phases are told; the inner ones are many and short."""

        def __init__(self) -> None:
            library.IProgressMonitor.__init__(self)
            self.steps: dict[str, int] = {}

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            if parent is None:
                self.steps[phase] = steps
                progress(phase, 0.0)

        def step_complete(self, phase: str, step: int) -> bool:
            if phase in self.steps:
                progress(phase, min(1.0, (step + 1) / max(1, self.steps[phase])))
            return True

        def phase_finish(self, phase: str) -> None:
            if self.steps.pop(phase, None) is not None:
                progress(phase, 1.0)

    return Monitor()


def _refused(job: Job, log: Log) -> VlexportError:
    reason = log.reason()
    text = f"{job.library} builds no engine for {', '.join(job.targets)}: {reason}"
    if "memory" in reason.lower():
        return ResourceError(text)
    if "HW-specific datatypes" in reason:
        return MisfitError(f"{text}. Build in another dtype for this device.")
    return UnsupportedError(f"{text}. Try another dtype, target or a smaller profile.")
