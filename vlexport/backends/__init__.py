"""Backends: one file each, found by file name. A backend turns a graph into files and files into an engine.

This module holds what they share: the contract, and the engine that checks every call before the
library sees it. No library of any backend is imported here.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

from vlexport.errors import InputError, RequestError, UnsupportedError
from vlexport.estimate import Costs, DeviceNeeds, TowerScale
from vlexport.specs import Quantisation, ShapeProfile, TensorSpec, bind, check_within

if TYPE_CHECKING:
    from torch import Tensor

    from vlexport.graph import Graph
    from vlexport.target import Target


# Thirty years, and more memory than any machine has: what timers and the system's limits still hold.
MOST_SECONDS, MOST_GIBIBYTES = 10**9, 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Capability:
    """One thing that a backend can do: a dtype, what is true of it, and what it takes if measured.

    With a quantisation, weights of blocks are integers and everything else is of that dtype.
    """

    dtype: str
    quantisation: Quantisation | None = None
    note: str = ""
    costs: Costs | None = None

    @property
    def spelled(self) -> str:
        """In one word, as tables name it."""
        return self.quantisation.name if self.quantisation else self.dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Options that every backend understands. A backend that has more of its own subclasses this."""

    threads: int = 0

    def to_json(self) -> dict[str, object]:
        """What changes the engine's files; threads do not."""
        return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildLimits:
    """What the process that builds one engine may take; 0 is no limit. No part of what is built."""

    seconds: float = 3600.0
    gibibytes: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.seconds <= MOST_SECONDS:
            raise RequestError(
                f"a build of at most {self.seconds:g} seconds was asked for; 0 (no limit) to {MOST_SECONDS} "
                "expected."
            )
        if not 0 <= self.gibibytes <= MOST_GIBIBYTES:
            raise RequestError(
                f"a build in at most {self.gibibytes:g} GiB was asked for; 0 (no limit) to {MOST_GIBIBYTES} "
                "expected."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """What an engine takes and gives."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    profile: ShapeProfile


class Payloads(Protocol):
    """The files of a bundle, each checked against its hash as it is read."""

    def read(self, name: str) -> bytes: ...


class Runner(Protocol):
    """The library's side of an engine; its inputs have been checked."""

    def run(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]: ...

    def close(self) -> None: ...


@runtime_checkable
class HasBudgets(Runner, Protocol):
    """A runner that is made for calls of a few sizes, in tokens, ascending; it pads what is smaller."""

    budgets: tuple[int, ...]


class Backend(Protocol):
    """What a backend file defines as `BACKEND`."""

    name: str
    extra: str | None
    summary: str
    form: str
    capabilities: tuple[Capability, ...]

    def missing(self) -> str | None:
        """Why this machine cannot build or run here, or None."""

    def target(self) -> Target:
        """This machine, as this backend sees it."""

    def versions(self) -> dict[str, str]:
        """Versions of the libraries that shape the files."""

    def build(self, graph: Graph, options: Options, out: Path) -> None:
        """Write the engine's files into the folder `out`."""

    def open(self, payloads: Payloads, spec: EngineSpec, options: Options) -> Runner:
        """Load an engine from its files."""


@runtime_checkable
class BuildsElsewhere(Backend, Protocol):
    """A backend that can build for devices which are not here, whose engines then cannot be run here."""

    def options(self, targets: Sequence[str], profiles: Sequence[ShapeProfile]) -> Options:
        """Options for these devices, with these profiles side by side in one engine."""

    def target_of(self, options: Options) -> Target:
        """What a build with these options is for."""

    def cannot_run(self, target: Target) -> str | None:
        """Why engines for a target do not run here, or None."""

    def build_telling(
        self, graph: Graph, options: Options, out: Path, progress: Callable[[str, float], None]
    ) -> None:
        """Build, telling phases and how much of each is done."""

    def proofs(self, out: Path) -> Mapping[str, str]:
        """What was found, by check, where the library's reading of the graph was held to the plan."""


@runtime_checkable
class LimitsBuilds(Backend, Protocol):
    """A backend that builds in a process of its own, which can be stopped."""

    def limited(self, options: Options, limits: BuildLimits) -> Options:
        """The same options, with limits on what a build takes."""


@runtime_checkable
class Foresees(Backend, Protocol):
    """A backend whose engines take memory of another device than this machine's own."""

    def foresee(
        self, options: Options, tower: TowerScale, inputs: Sequence[TensorSpec], dtype: str
    ) -> DeviceNeeds | None:
        """What an engine will take; None where nobody has measured."""


@runtime_checkable
class Quantises(Backend, Protocol):
    """A backend whose kernels for integers ask more of a machine than its other ones."""

    def unable(self, quantisation: Quantisation) -> str | None:
        """Why this machine does not run them, or None."""

    def instructions(self, quantisation: Quantisation) -> str | None:
        """What they need of the processor, one of those that `target` names for this machine."""


@runtime_checkable
class Reproduces(BuildsElsewhere, Protocol):
    """A backend whose library's makers have tools of their own, which read a graph without vlexport."""

    def write_alone(self, graph: Graph, options: Options, folder: Path) -> None:
        """Write the graph, and a program that builds it with the library alone."""


class Engine:
    """Something that runs: checks names, types, shapes and profile, then calls the library."""

    def __init__(self, runner: Runner, spec: EngineSpec) -> None:
        self._runner: Runner | None = runner
        self.spec = spec

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return self.spec.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return self.spec.outputs

    @property
    def budgets(self) -> tuple[int, ...]:
        """Tokens of the calls that the engine pads smaller ones to; none where every size serves as it is."""
        return self._runner.budgets if isinstance(self._runner, HasBudgets) else ()

    def run(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Outputs by name; shapes outside the profile are refused before the library sees them."""
        if self._runner is None:
            raise InputError("this engine is closed; open the bundle again.")
        values = bind(self.spec.inputs, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
        for spec in self.spec.inputs:
            given = str(tensors[spec.name].dtype).removeprefix("torch.")
            if given != spec.dtype:
                raise InputError(f"{spec.name}: {given} given, {spec.dtype} expected.")
        check_within(self.spec.profile, values)
        return self._runner.run({spec.name: tensors[spec.name] for spec in self.spec.inputs})

    def close(self) -> None:
        """Give the library's memory back; a closed engine refuses to run."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def backend_names() -> list[str]:
    """Every backend that ships, by file name."""
    return sorted(found.name for found in pkgutil.iter_modules(__path__) if not found.name.startswith("_"))


def find_backend(name: str) -> Backend:
    """A backend by name; loading it does not load its library."""
    if name not in backend_names():
        raise RequestError(f"no backend '{name}'. Known: {', '.join(backend_names())}.")
    backend: Backend = importlib.import_module(f"vlexport.backends.{name}").BACKEND
    return backend


def runs_here(backend: Backend) -> bool:
    """Whether this machine builds engines of a backend and runs them too."""
    if backend.missing() is not None:
        return False
    return not isinstance(backend, BuildsElsewhere) or backend.cannot_run(backend.target()) is None


def require(backend: Backend, dtype: str, quantise: str | None = None) -> Capability:
    """What serves the request; refuses what the backend does not serve, or one that this machine lacks."""
    found = capability_of(backend, dtype, quantise)
    if found is None:
        asked = f"{dtype} with weights in {quantise}" if quantise else dtype
        served = sorted(capability.spelled for capability in backend.capabilities)
        able = [name for name in backend_names() if capability_of(find_backend(name), dtype, quantise)]
        instead = f"{asked} is served by: {', '.join(able)}." if able else f"No backend serves {asked}."
        raise UnsupportedError(
            f"backend '{backend.name}' does not serve {asked}. It serves: {', '.join(served)}. {instead}"
        )
    reason = backend.missing()
    if reason is not None:
        raise UnsupportedError(f"backend '{backend.name}' cannot be used here: {reason}")
    if found.quantisation and isinstance(backend, Quantises):
        unable = backend.unable(found.quantisation)
        if unable is not None:
            raise UnsupportedError(f"--quantise {quantise} with backend '{backend.name}': {unable}")
    return found


def capability_of(backend: Backend, dtype: str, quantise: str | None = None) -> Capability | None:
    """The capability of a dtype and of a quantisation by its name, if the backend has it."""
    for each in backend.capabilities:
        if each.dtype == dtype and (each.quantisation.name if each.quantisation else None) == quantise:
            return each
    return None
