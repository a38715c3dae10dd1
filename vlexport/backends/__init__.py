"""Backends: one file each, found by file name. A backend turns a graph into files and files into an engine.

This module holds what they share: the contract, and the engine that checks every call before the
library sees it. No library of any backend is imported here.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

from vlexport.errors import UNEXPECTED, BundleError, InputError, RequestError, UnsupportedError, VlexportError
from vlexport.estimate import Costs, DeviceNeeds, TowerScale
from vlexport.specs import Quantisation, ShapeProfile, Symbol, TensorSpec, bind, check_within, size_of

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

    def warm_up(self) -> None:
        """Prepare every size now, which the first call of each would do otherwise."""


@runtime_checkable
class Reentrant(Runner, Protocol):
    """A runner whose library takes several calls at once, of any sizes; all others get one at a time."""

    reentrant: bool


Partly = Callable[[Mapping[str, "Tensor"], Callable[[str], bool]], Mapping[str, "Tensor"]]


class Sums(Protocol):
    """Calls of a copy of a stored program which give the results of its additions by name."""

    def __call__(
        self, inputs: Mapping[str, Tensor], fed: Mapping[str, Tensor], wanted: Collection[str] = ()
    ) -> Mapping[str, Tensor]:
        """Return the sums in `wanted`, else all; parts that read a sum in `fed` get the rows given there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inside:
    """The contents of an engine's files, read apart from what runs them; empty where a format hides them.

    weights  tensors by their names in the tower, with `.part0`, `.int8` and `.scale` where these were made
    sums     the results of additions of a call, some of them replaced where they are read
    partly   the outputs of a call of the stored program with weights of zero where a name says so
    rounded  rows as the stored program rounds them to integers of 8 bits, in floating point again
    """

    weights: Mapping[str, Tensor] = field(default_factory=dict)
    sums: Sums | None = None
    partly: Partly | None = None
    rounded: Callable[[Tensor], Tensor] | None = None


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
class ShowsInside(Backend, Protocol):
    """A backend whose files can be read by more than what runs them."""

    def inside(self, payloads: Payloads) -> Inside:
        """Read the contents of an engine's files."""


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
    """Something that runs: checks names, types, shapes and profile, then calls the library.

    Any thread may call it; calls wait for each other unless the runner is reentrant. It belongs to the
    process that opened it.
    """

    def __init__(self, runner: Runner, spec: EngineSpec) -> None:
        self._runner: Runner | None = runner
        self.spec = spec
        self._process = os.getpid()
        lock = nullcontext() if isinstance(runner, Reentrant) and runner.reentrant else Lock()
        self._turn: AbstractContextManager[object] = lock

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

    def warm_up(self) -> None:
        """Prepare the sizes in `budgets` before the first call."""
        if isinstance(self._runner, HasBudgets):
            self._runner.warm_up()

    def run(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Outputs by name; shapes outside the profile are refused before the library sees them."""
        self.require_own_process()
        values = bind(self.spec.inputs, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
        for spec in self.spec.inputs:
            given = str(tensors[spec.name].dtype).removeprefix("torch.")
            if given != spec.dtype:
                raise InputError(f"{spec.name}: {given} given, {spec.dtype} expected.")
        check_within(self.spec.profile, values)
        chosen = {spec.name: tensors[spec.name] for spec in self.spec.inputs}
        with self._turn:
            if self._runner is None:
                raise InputError("this engine is closed; open the bundle again.")
            found = self._runner.run(chosen)
        _check_outputs(self.spec.outputs, found, values)
        return found

    def require_own_process(self) -> None:
        """Refuse a process that a fork made: threads and device handles of libraries do not survive one."""
        if os.getpid() != self._process:
            raise InputError(
                f"this engine was opened in process {self._process} and is used in process {os.getpid()}, "
                "which was forked from it. Open the bundle in each process, best one started by 'spawn'."
            )

    def close(self) -> None:
        """Give the library's memory back; a closed engine refuses to run. A forked copy has none."""
        if os.getpid() != self._process:
            return
        with self._turn:
            runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_outputs(
    specs: Sequence[TensorSpec], found: Mapping[str, Tensor], values: Mapping[Symbol, int]
) -> None:
    """Refuse an engine that gives something else than its manifest has."""
    for spec in specs:
        tensor = found.get(spec.name)
        shape = [size_of(dim, values) for dim in spec.shape]
        given = None if tensor is None else (str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        fits = given is not None and given[0] == spec.dtype and len(given[1]) == len(shape)
        if (
            given is None
            or not fits
            or any(wanted not in (None, size) for wanted, size in zip(shape, given[1], strict=True))
        ):
            raise BundleError(
                f"the engine gave {given or 'nothing'} as '{spec.name}'; {spec.dtype} {shape} stands in its "
                "manifest. Build the bundle again or fetch an intact copy."
            )


@contextmanager
def refused_by(library: str, *families: type[Exception]) -> Iterator[None]:
    """Raise a `BundleError` in place of what a library raises about an engine whose inputs are in order.

    `families` are the library's own; the others come from Python and torch. What ran out passes unchanged.
    """
    kinds: tuple[type[Exception], ...] = (*UNEXPECTED, EOFError, zipfile.BadZipFile, *families)
    try:
        yield
    except (VlexportError, MemoryError):
        raise
    except kinds as error:
        if any(word in str(error).lower() for word in ("alloc", "out of memory", "no space")):
            raise
        words = " ".join(str(error).split())[:400]
        raise BundleError(
            f"{library} does not run this engine ({type(error).__name__}: {words}). Its files are those of "
            "the manifest: they were damaged before, or are for another version. Build the bundle again or "
            "fetch an intact copy."
        ) from error


def inside_of(backend: Backend, payloads: Payloads) -> Inside:
    """Return the contents of an engine's files; nothing where the backend does not show them.

    Each library has error classes of its own for files that it cannot read: all of them are refused.
    """
    if not isinstance(backend, ShowsInside):
        return Inside()
    refused = refused_by(f"backend '{backend.name}'", Exception)
    found = refused(backend.inside)(payloads)
    return replace(
        found, sums=found.sums and refused(found.sums), partly=found.partly and refused(found.partly)
    )


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
        known = sorted({each.spelled for name in backend_names() for each in find_backend(name).capabilities})
        instead = (
            f"{asked} is served by: {', '.join(able)}."
            if able
            else f"No backend serves {asked}; precisions are {', '.join(known)}."
        )
        raise UnsupportedError(
            f"backend '{backend.name}' does not serve {asked}. It serves: {', '.join(served)}. {instead}"
        )
    reason = backend.missing()
    if reason is not None:
        raise UnsupportedError(f"backend '{backend.name}' cannot be used here: {reason}")
    if found.quantisation and isinstance(backend, Quantises):
        unable = backend.unable(found.quantisation)
        if unable is not None:
            raise UnsupportedError(f"--quantize {quantise} with backend '{backend.name}': {unable}")
    return found


def capability_of(backend: Backend, dtype: str, quantise: str | None = None) -> Capability | None:
    """The capability of a dtype and of a quantisation by its name, if the backend has it."""
    for each in backend.capabilities:
        if each.dtype == dtype and (each.quantisation.name if each.quantisation else None) == quantise:
            return each
    return None
