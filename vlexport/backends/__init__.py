"""Backends: one file each, found by file name. `base` has what they share."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

from vlexport._build.private import installed, run_file
from vlexport.backends._engine import Engine, FunctionRunner, refused_by
from vlexport.backends._inspection import (
    ChecksNetwork,
    Inside,
    Partly,
    Portable,
    RunsAlone,
    RunsPortable,
    Sums,
    WritesStandalone,
    inside_of,
    portable_of,
)
from vlexport.backends.base import (
    Backend,
    BuildLimits,
    Capability,
    EngineSpec,
    Folder,
    Options,
    Payloads,
    Progress,
    Runner,
    log_progress,
)
from vlexport.errors import MisfitError, RequestError, UnsupportedError, nearest
from vlexport.specs import BYTES, DTYPES, PIXELS, SHORT_DTYPES, Precision, backend_name

__all__ = (
    "Backend", "BuildLimits", "Capability", "ChecksNetwork", "Engine", "EngineSpec", "Folder",
    "FunctionRunner", "Inside", "Options", "Partly", "Payloads", "Portable", "Progress", "Runner",
    "RunsAlone", "RunsPortable", "Sums", "WritesStandalone", "backend_names", "capability_of", "find_backend",
    "inside_of", "log_progress", "portable_of", "refused_by", "require", "runs_here",
)  # fmt: skip


# Private backends that were given by their files, by name.
_GIVEN: dict[str, Backend] = {}


def backend_names() -> list[str]:
    """Return every backend that ships, by file name, that is installed, or that was given by its file."""
    return sorted({*_shipped(), *_private()})


def find_backend(name_or_path: str) -> Backend:
    """Return a backend by name, or a private one by its file; loading it does not load its library."""
    if name_or_path.endswith(".py"):
        given = _of_file(Path(name_or_path))
        _GIVEN[given.name] = given
        return given
    if (name := backend_name(name_or_path)) in _shipped():
        backend: Backend = importlib.import_module(f"vlexport.backends.{name}").BACKEND
        return backend
    if name not in (private := _private()):
        every = backend_names()
        raise RequestError(
            f"no backend '{name_or_path}'.{nearest(name, every)} Known: {', '.join(every)}. "
            "A private backend is given by the path of its file (*.py)."
        )
    return private[name]


def _shipped() -> set[str]:
    names = (module.name for module in pkgutil.iter_modules(__path__))
    return {name for name in names if not name.startswith("_") and name != "base"}


def _private() -> dict[str, Backend]:
    return {backend.name: backend for backend in installed("backend", _of_file)} | _GIVEN


def _of_file(path: Path) -> Backend:
    try:
        module = run_file("backend", path, path.read_bytes(), "docs/backends.md")
    except OSError as error:
        raise RequestError(f"backend {path}: {error.strerror}. A Python file is expected.") from error
    backend = getattr(module, "BACKEND", None)
    if not isinstance(backend, Backend) or backend.name in _shipped():
        raise RequestError(
            f"backend {path}: BACKEND is {getattr(backend, 'name', backend)!r}; a Backend is expected, of a "
            "name that no shipped one has. `vlexport new backend NAME` writes one."
        )
    backend.file = path.resolve()
    return backend


def runs_here(backend: Backend, precision: Precision | None = None) -> bool:
    """Return whether this machine builds engines of a backend, in this precision, and runs them too."""
    unable = precision is not None and backend.cannot_compute(precision)
    return backend.missing() is None and backend.cannot_run() is None and not unable


def require(
    backend: Backend,
    dtype: str,
    quantize: str | None = None,
    input_dtype: str = PIXELS,
    device: str | None = None,
) -> Capability:
    """Return the capability for a precision, on a chosen `device`; refuse one that is not served here."""
    if device is not None and device not in backend.devices:
        choice = " or ".join(backend.devices)
        raise UnsupportedError(
            f"device '{device}' with backend '{backend.name}': "
            + (f"{choice} expected." if choice else "it has no choice of devices. Leave device out.")
        )
    capability = capability_of(backend, dtype, quantize)
    if capability is None:
        every = [capability for name in backend_names() for capability in find_backend(name).capabilities]
        schemes = {capability.quantisation.name for capability in every if capability.quantisation}
        if quantize is not None and quantize not in schemes:
            raise UnsupportedError(
                f"quantize {quantize} given, {' or '.join(sorted(schemes))} expected. "
                "Leave it out for floats."
            )
        if dtype in schemes:
            raise UnsupportedError(f"dtype '{dtype}' given, a floating dtype expected. Pass it as quantize.")
        precision = f"{dtype} with weights in {quantize}" if quantize else dtype
        served = sorted(capability.spelled for capability in backend.capabilities)
        able = _serving(dtype, quantize)
        spelled = sorted({capability.spelled for capability in every})
        instead = (
            f"{precision} is served by: {', '.join(able)}."
            if able
            else f"No backend serves {precision}; precisions are {', '.join(spelled)}."
        )
        # A dtype of torch is no slip.
        close = "" if dtype in DTYPES else nearest(precision, [*served, *SHORT_DTYPES])
        raise UnsupportedError(
            f"backend '{backend.name}' does not serve {precision}.{close} It serves: {', '.join(served)}. "
            f"{instead}"
        )
    reason = backend.cannot_take_bytes if input_dtype == BYTES else None
    if reason is not None:
        raise UnsupportedError(f"input dtype {BYTES} with backend '{backend.name}': {reason}")
    reason = backend.missing()
    if reason is not None:
        raise MisfitError(f"backend '{backend.name}' cannot be used here: {reason}")
    unable = backend.cannot_compute(capability.precision, device)
    if unable is not None:
        precision = f"quantize {quantize}" if quantize else f"dtype {dtype}"
        others = ", ".join(name for name in _serving(dtype, quantize) if name != backend.name)
        elsewhere = f" {quantize or dtype} is served by: {others}." if others else ""
        raise UnsupportedError(f"{precision} with backend '{backend.name}': {unable}{elsewhere}")
    return capability


def _serving(dtype: str, quantize: str | None) -> list[str]:
    return [name for name in backend_names() if capability_of(find_backend(name), dtype, quantize)]


def capability_of(backend: Backend, dtype: str, quantize: str | None = None) -> Capability | None:
    """Return the capability of a dtype and of a quantisation by its name, if the backend has it."""
    for capability in backend.capabilities:
        if (
            capability.dtype == dtype
            and (capability.quantisation.name if capability.quantisation else None) == quantize
        ):
            return capability
    return None
