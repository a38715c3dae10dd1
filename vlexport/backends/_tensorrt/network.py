"""The library's objects on the way to an engine: log, targets, parsed network, profiles, progress."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from vlexport.backends import Progress
from vlexport.backends._tensorrt.messages import Bounds, Finding
from vlexport.errors import UnsupportedError

# The library logs this of an input that it has no use for; an engine without it would be wrong.
DROPPED = "unused input: "
WEIGHTS = re.compile(r"Total Weights Memory: (\d+) bytes")
# One for each profile, in their order.
ACTIVATIONS = re.compile(r"Total Activation Memory: (\d+) bytes")


class Log:
    """Messages of the library: reasons for errors, and how much memory an engine takes."""

    def __init__(self, library: Any) -> None:
        self.errors: list[str] = []
        self.warnings: list[str] = []
        self.remarks: list[str] = []
        severity = library.ILogger.Severity
        kept = {
            severity.INTERNAL_ERROR: self.errors,
            severity.ERROR: self.errors,
            severity.WARNING: self.warnings,
            severity.INFO: self.remarks,
        }

        class Logger(library.ILogger):  # type: ignore[misc]
            def __init__(self) -> None:
                library.ILogger.__init__(self)

            def log(self, level: Any, message: str) -> None:
                if level in kept:
                    kept[level].append(message)

        self.logger = Logger()

    def reason(self) -> str:
        return "; ".join(self.errors[-3:])[:1000] or "the library gives no reason"

    def memory(self, num_profiles: int) -> tuple[int, tuple[int, ...]]:
        weights = [int(match[1]) for match in map(WEIGHTS.search, self.remarks) if match]
        contexts = tuple(int(match[1]) for match in map(ACTIVATIONS.search, self.remarks) if match)
        return (weights[0], contexts) if (len(weights), len(contexts)) == (1, num_profiles) else (0, ())


def create_network(library: Any, builder: Any) -> Any:
    """Return an empty, strongly typed network; newer libraries may have dropped the flag."""
    flag = getattr(library.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return builder.create_network(0 if flag is None else 1 << int(flag))


def set_targets(library: Any, config: Any, targets: tuple[str, ...]) -> None:
    """Set compute capabilities, where the library builds for GPUs that are not here."""
    capabilities = getattr(library, "ComputeCapability", None)
    if capabilities is None:
        return
    names = {name.lower() for name in capabilities.__members__ if name.startswith("SM")}
    wrong = [target for target in targets if target not in names]
    if wrong:
        raise UnsupportedError(
            f"{library.__name__} {library.__version__} does not build for {', '.join(wrong)}. "
            f"It builds for: {', '.join(sorted(names, key=lambda name: int(name[2:])))}."
        )
    config.num_compute_capabilities = len(targets)
    for index, target in enumerate(targets):
        config.set_compute_capability(getattr(capabilities, target.upper()), index)


def parse(library: Any, builder: Any, log: Log, model: str) -> Any:
    """Return the network of an ONNX file."""
    network = create_network(library, builder)
    parser = library.OnnxParser(network, log.logger)
    if not parser.parse_from_file(model):
        reasons = "; ".join(str(parser.get_error(index)) for index in range(parser.num_errors))
        raise UnsupportedError(
            f"{library.__name__} does not parse the graph: {reasons[:1000] or log.reason()}"
        )
    return network


def refuse_dropped(warnings: Sequence[str], unread: Sequence[str]) -> None:
    """Refuse a network without an input that the traced program reads."""
    lines = [message for message in warnings if DROPPED in message.lower()]
    names = {message[message.lower().index(DROPPED) + len(DROPPED) :].strip() for message in lines}
    dropped = sorted(names - set(unread))
    if dropped:
        raise UnsupportedError(
            f"the library ignores {', '.join(dropped)} among the inputs of the graph, so the engine would "
            "compute something else. Build with another backend, or lower what reads it otherwise."
        )


def add_profiles(
    builder: Any, config: Any, profiles: Mapping[str, Mapping[str, Bounds]]
) -> tuple[Finding, ...]:
    """Set every profile, and read it back from the library."""
    findings = []
    for name, inputs in profiles.items():
        profile = builder.create_optimization_profile()
        for tensor, bounds in inputs.items():
            profile.set_shape(tensor, *bounds)
        index = config.add_optimization_profile(profile)
        kept = {tensor: tuple(map(tuple, profile.get_shape(tensor))) for tensor in inputs}
        wrong = [tensor for tensor, bounds in inputs.items() if kept[tensor] != bounds]
        wrong += ["refused by the library"] if index < 0 else []
        about = {"check": f"profile {name}", "found": f"{len(inputs)} inputs", "wrong": ", ".join(wrong)}
        findings.append(Finding(**about))
    return tuple(findings)


def progress_monitor(library: Any, progress: Progress) -> Any:
    """Return a monitor that reports the outermost phases; the inner ones are many and short."""

    class Monitor(library.IProgressMonitor):  # type: ignore[misc]
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
