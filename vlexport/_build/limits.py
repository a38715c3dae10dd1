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
from vlexport.specs import MediaBounds, ShapeProfile

_PROFILES: dict[str, type] = {kind.__name__: kind for kind in (MediaBounds, ShapeProfile)}


def needs_process(backend: str, limits: BuildLimits | None) -> bool:
    """Return whether a build goes to a process of its own; one that starts such a process itself does not."""
    engine = find_backend(backend)
    return not engine.can_limit_builds and (limits is not None or engine.may_crash)


def run_limited(function: str, arguments: Mapping[str, Any], progress: Progress) -> Any:
    """Run a function with the arguments of `request`; `limits` among them are those of its process."""
    given = {name: value for name, value in arguments.items() if name != "limits"}
    source, into = given["checkpoint"], Path(given["into"])
    if isinstance(source, Checkpoint) and source.adapter is not None:
        given["lora"] = source.adapter.files.location.place

    def remove_rest(pid: int) -> None:
        # An engine that was built waits for its check in the next build; everything else is in the way.
        for each in unfinished(into):
            if each.pid == pid and each.is_abandoned() and not each.has_engine:
                each.remove()

    work = Work(
        function=function,
        job=json.dumps({name: _written(value) for name, value in given.items()}),
        library=f"backend '{given['backend']}'",
        limits=arguments.get("limits") or BuildLimits(),
        ended=remove_rest,
    )
    return json.loads(run(work, progress))


def read_arguments(job: str) -> dict[str, Any]:
    """Return the arguments in the job of a process."""
    given: dict[str, Any] = json.loads(job)
    if isinstance(given.get("profile"), dict):
        ((name, value),) = given["profile"].items()
        given["profile"] = decode(_PROFILES[name], value)
    return given


def _written(value: Any) -> Any:
    if isinstance(value, Checkpoint):
        return value.location.place
    if type(value).__name__ in _PROFILES:
        return {type(value).__name__: encode(value)}
    return encode(value)
