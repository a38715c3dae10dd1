"""A build in a process of its own, with limits, by backends that otherwise build where they are called."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlexport.backends import BuildLimits, Progress, find_backend
from vlexport.backends._child import Work, run
from vlexport.bundle.store import unfinished
from vlexport.checkpoint import Checkpoint
from vlexport.codec import decode, encode
from vlexport.specs import ShapeProfile

LIMITS = ("build_seconds", "build_memory")


def needs_process(arguments: Mapping[str, Any]) -> bool:
    """Return whether a build goes to a process of its own; one that starts such a process itself does not."""
    engine = find_backend(arguments["backend"])
    return not engine.can_limit_builds and (_limits(arguments) is not None or engine.may_crash)


def _limits(arguments: Mapping[str, Any]) -> BuildLimits | None:
    return BuildLimits.of(*map(arguments.get, LIMITS))


def run_limited(function: str, arguments: Mapping[str, Any], progress: Progress) -> Any:
    """Run a function with the arguments of `request`; limits among them are those of its process."""
    options = {name: value for name, value in arguments.items() if name not in LIMITS}
    source, into = options["checkpoint"], Path(options["output_dir"])
    if isinstance(source, Checkpoint) and source.adapter is not None:
        options["lora"] = source.adapter.files.location.place

    def remove_rest(pid: int) -> None:
        # An engine that was built waits for its check in the next build; everything else is in the way.
        for build in unfinished(into):
            if build.pid == pid and build.is_abandoned() and not build.has_engine:
                build.remove()

    work = Work(
        function=function,
        job=json.dumps({name: _written(value) for name, value in options.items()}),
        library=f"backend '{options['backend']}'",
        limits=_limits(arguments) or BuildLimits(),
        ended=remove_rest,
    )
    return json.loads(run(work, progress))


def read_arguments(job: str) -> dict[str, Any]:
    """Return the arguments in the job of a process."""
    arguments: dict[str, Any] = json.loads(job)
    if isinstance(arguments.get("profile"), dict):
        arguments["profile"] = decode(ShapeProfile, arguments["profile"])
    return arguments


def _written(value: Any) -> Any:
    return value.location.place if isinstance(value, Checkpoint) else encode(value)
