"""The contract of backends, and the engine that checks every call before a library runs it.

No library of any backend is imported here.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import mmap
import os
import pickle
import re
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from importlib.metadata import distributions, version
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from vlexport._build.estimate import Costs, DeviceNeeds, TowerScale
from vlexport.errors import (
    UNEXPECTED,
    BundleError,
    InputError,
    RequestError,
    ResourceError,
    UnsupportedError,
    VlexportError,
)
from vlexport.fields import checked
from vlexport.os_errors import shortage
from vlexport.specs import (
    Precision,
    Quantisation,
    ShapeProfile,
    Symbol,
    TensorSpec,
    bind,
    check_within,
    size_of,
)
from vlexport.target import Target, platform_here

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from vlexport._build.graph import Graph

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
"""Called with the name of a phase and the share of it that is done, 0 to 1."""

# Values of inputs up to which a library keeps what a call took, 3,567 patches of 1,176 columns. In ONNX
# Runtime that is 280 MB at most: small calls are a tenth faster for it, large ones not. OpenVINO would keep
# what its largest call needed, for every call after it.
KEPT_VALUES = 2**22


def log_progress(phase: str, share: float) -> None:
    """Log a phase at debug level."""
    logger.debug("%s %.0f%%", phase, 100 * share)


# Thirty years, and more memory than any machine has: timers and limits of the system still represent them.
MOST_SECONDS, MOST_GIBIBYTES = 10**9, 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Capability:
    """A precision that a backend serves, with its costs where they were measured.

    With a quantisation, weights of blocks are integers and everything else is of that dtype.
    """

    dtype: str
    quantisation: Quantisation | None = None
    note: str = ""
    costs: Costs | None = None

    @property
    def precision(self) -> Precision:
        return Precision(dtype=self.dtype, quantisation=self.quantisation)

    @property
    def spelled(self) -> str:
        """The name in tables."""
        return self.quantisation.name if self.quantisation else self.dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Options that every backend understands. A backend that has more of its own subclasses this.

    threads         of an engine on a processor; 0 leaves them to the library
    device          `cpu`, `cuda` or `cuda:1`, at a build one of `devices`; or the index of the GPU.
                    Without it an engine runs where it was built for, on torch's current GPU
    shared_weights  use weights as they are stored, mapped and shared between processes, where the library can
                    (`onnxruntime`): it opens at once and holds no copy of its own, and calls take longer
    """

    threads: int = 0
    device: int | str | None = None
    shared_weights: bool = False

    def __post_init__(self) -> None:
        if checked("threads", self.threads, int) < 0:
            raise InputError(f"threads: {self.threads} given, 0 (the library's default) or more expected.")
        given = checked("device", self.device, int | str | None)
        is_index = given is None or (isinstance(given, int) and given >= 0)
        if not is_index and not re.fullmatch("cpu|cuda(:[0-9]{1,4})?", str(given)):
            raise InputError(
                f"device: {given} given, cpu, cuda, cuda:1 or the index of a GPU (0 or more) expected."
            )
        checked("shared_weights", self.shared_weights, bool)

    @property
    def kind(self) -> str | None:
        """The kind of device, `cpu` or `cuda`, where one is named."""
        return self.device.partition(":")[0] if isinstance(self.device, str) else None

    @property
    def index(self) -> int | None:
        """The index of the GPU, where one is named."""
        after = self.device.partition(":")[2] if isinstance(self.device, str) else self.device
        return int(after) if after not in (None, "") else None

    def to_json(self) -> dict[str, object]:
        """Return the options that change a bundle; those of one process do not."""
        return {"device": self.kind} if self.kind == "cuda" else {}


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildLimits:
    """Limits of the process that builds one engine; 0 is no limit. Not a part of the build key."""

    seconds: float = 3600.0
    gibibytes: float = 0.0

    def __post_init__(self) -> None:
        limits = ((self.seconds, "seconds", MOST_SECONDS), (self.gibibytes, "GiB", MOST_GIBIBYTES))
        for given, unit, most in limits:
            if not 0 <= given <= most:
                raise RequestError(f"a limit of {given:g} {unit} given; 0 (no limit) to {most} expected.")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """Inputs, outputs and profile of an engine."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    profile: ShapeProfile


class Payloads(Protocol):
    """The files of a bundle, each checked against its hash as it is read."""

    def read(self, name: str) -> bytes: ...

    def map(self, name: str) -> memoryview:
        """Return the same bytes without a copy for this process where that is safe."""


class Folder:
    """Payloads of a folder that this process has written; nothing is hashed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def map(self, name: str) -> memoryview:
        with (self.path / name).open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


class Runner(ABC):
    """A loaded engine of a library; its inputs have been checked. `Engine` drops it when it is closed.

    reentrant  whether the library takes several calls at once, of any sizes; others get one at a time
    budgets    token counts, ascending, that calls are padded to; empty where every size runs as it is
    """

    reentrant: bool = False
    budgets: tuple[int, ...] = ()

    @abstractmethod
    def run(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs by name."""

    def warm_up(self) -> None:  # noqa: B027
        """Prepare every size in `budgets` before its first call."""

    def release(self) -> None:  # noqa: B027
        """Release what `reopen` or the next call can have again."""

    def reopen(self) -> None:  # noqa: B027
        """Open what is not open yet, or no longer."""

    def close(self) -> None:  # noqa: B027
        """Release what the last reference to the runner would not."""


class DeviceRunner(Runner):
    """A runner whose calls begin with one GPU of several as torch's current device."""

    def __init__(self, runner: Runner, device: int) -> None:
        self._runner, self._device = runner, device
        self.reentrant, self.budgets = runner.reentrant, runner.budgets

    def run(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        import torch

        with torch.cuda.device(self._device):
            return self._runner.run(tensors)

    def warm_up(self) -> None:
        import torch

        with torch.cuda.device(self._device):
            self._runner.warm_up()

    def close(self) -> None:
        self._runner.close()


class DeferredRunner(Runner):
    """A runner that is opened when it is first needed; one call at a time."""

    def __init__(self, begin: Callable[[], Runner]) -> None:
        self._begin = begin
        self._runner: Runner | None = None

    def run(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.reopen()
        assert self._runner is not None
        return self._runner.run(tensors)

    def release(self) -> None:
        self.close()

    def reopen(self) -> None:
        self._runner = self._runner or self._begin()

    def close(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()


class FunctionRunner(Runner):
    """A function of torch, such as a module, in the place of a library."""

    def __init__(self, function: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
        self.function = function

    def run(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        import torch

        with torch.inference_mode():
            return self.function(dict(tensors))


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
    release  lets go of memory that weights took when they were read; they can be read again
    sums     the results of additions of a call, some of them replaced where they are read
    partly   the outputs of a call of the stored program with weights of zero where they are named
    rounded  rows as the stored program rounds them to integers of 8 bits, in floating point again
    """

    weights: Mapping[str, Tensor] = field(default_factory=dict)
    release: Callable[[], None] = field(default=lambda: None)
    sums: Sums | None = None
    partly: Partly | None = None
    rounded: Callable[[Tensor], Tensor] | None = None


GraphCall = Callable[[Mapping[str, "Tensor"]], Mapping[str, "Tensor"]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Portable:
    """The graphs around an engine that run without vlexport; `prune` is None where nothing can be dropped.

    tables     structure of a call's media to the engine's inputs but the patches
    prune      embeddings and grid of a video to what is kept, and its block of positions
    positions  blocks of a prompt to positions and delta
    """

    tables: GraphCall
    prune: GraphCall | None
    positions: GraphCall


class Backend(ABC):
    """A way to turn graphs into files and files into engines. A file of this folder defines one as `BACKEND`.

    form          the attention layout that its engines run
    extra         the extra of pyproject.toml that installs its libraries, None if they are always installed
    distributions packages that shape the files, its own library last
    wheels        distributions that hold its library, where there are several, the preferred one first
    device        where its engines run, as `Target` spells it
    devices       what a build may choose from, `device` first; empty where there is no choice
    rows_on       where the rows of its engines arrive, for inputs of the host: `cpu` or `cuda`
    """

    name: str
    summary: str
    form: str
    capabilities: tuple[Capability, ...]
    extra: str | None = None
    distributions: tuple[str, ...] = ("torch",)
    wheels: tuple[str, ...] = ()
    device: str = "cpu"
    devices: tuple[str, ...] = ()
    rows_on: str = "cpu"
    # True if `build` starts a process of its own, which honours the limits of its options.
    can_limit_builds: bool = False
    # True if the library is known to end processes: whole builds have one of their own, without limits too.
    may_crash: bool = False
    # Why engines cannot take patches as bytes, if they cannot.
    cannot_take_bytes: str | None = None
    # Files that `open` takes by `Payloads.map`.
    mapped: tuple[str, ...] = ()
    # True if its files are of a format that newer versions of its library read.
    reads_older: bool = False
    # True if `write_standalone` is implemented.
    can_write_standalone: bool = False
    # True if trtexec reads the graph of `write_standalone`.
    has_trtexec: bool = False

    @abstractmethod
    def build(self, graph: Graph, options: Options, out: Path, progress: Progress = log_progress) -> None:
        """Write the engine's files into the folder `out`."""

    @abstractmethod
    def open(self, payloads: Payloads, spec: EngineSpec, options: Options) -> Runner:
        """Load an engine from its files."""

    def missing(self) -> str | None:
        """Return why this machine can neither build nor run, or None."""
        for name in self.distributions:
            spec = importlib.util.find_spec(name.replace("-", "_"))
            # A wheel that is removed takes files that another one has too; what is left is no module.
            if name == self.distributions[-1] and (spec is None or spec.origin is None) and self.installed():
                return (
                    f"the module {name} is not complete, though {' and '.join(self.installed())} is "
                    f"installed: files of it were removed, as with another of its wheels. {self.mend()} "
                    "installs them again."
                )
            if spec is None:
                package = f"'vlexport[{self.extra}]'" if self.extra else "vlexport"
                return f"the package {name} is not installed. pip install {package} installs it."
        return None

    def installed(self) -> dict[str, str]:
        """Return the installed distributions that hold its library, and their versions."""
        names = self.wheels or [name for name in self.distributions[-1:] if name != "torch"]
        known = {name: next(iter(distributions(name=name)), None) for name in names}
        return {name: each.version for name, each in known.items() if each is not None}

    def mend(self) -> str:
        """Return the command that installs the files of its library again, of one distribution."""
        (name, release), *others = self.installed().items()
        first = (
            f"pip uninstall --yes {' '.join([name, *(other for other, _ in others)])} && " if others else ""
        )
        return f"{first}pip install --force-reinstall --no-deps {name}=={release}"

    def versions(self) -> dict[str, str]:
        """Return the versions of the libraries that shape the files."""
        return {name: version(name) for name in self.distributions}

    def target(self) -> Target:
        """Return this machine with the backend's library."""
        release = self.versions()[self.distributions[-1]]
        return Target(backend=self.name, version=release, platform=platform_here(), device=self.device)

    def here(self, made: Target) -> Target:
        """Return this machine as an engine that was built for a target would run on it."""
        return self.target()

    def build_target(self, options: Options, precision: Precision) -> Target:
        """Return the machine that a build is for: this one, unless the options name another."""
        return self.target()

    def options(
        self,
        targets: Sequence[str] = (),
        profiles: Sequence[ShapeProfile] = (),
        limits: BuildLimits | None = None,
    ) -> Options:
        """Return the options for these devices, with the profiles side by side in one engine."""
        if targets:
            raise UnsupportedError(
                f"backend '{self.name}' builds for this machine only; targets given: {', '.join(targets)}. "
                "Leave targets out, or build with backend tensorrt_rtx."
            )
        return Options()

    def cannot_run(self, target: Target | None = None) -> str | None:
        """Return why engines for a target, by default for this machine, do not run here, or None."""
        return None

    def cannot_compute(self, precision: Precision, device: str | None = None) -> str | None:
        """Return why this machine does not run the kernels of a precision on a device, or None."""
        return None

    def memory_estimate(
        self, options: Options, tower: TowerScale, inputs: Sequence[TensorSpec], dtype: str
    ) -> DeviceNeeds | None:
        """Return what an engine takes of a GPU; None where it was not measured."""
        return None

    def network_checks(self, out: Path) -> Mapping[str, str]:
        """Return the result of each check that the library's network is the graph, by name."""
        return {}

    def inside(self, payloads: Payloads) -> Inside:
        """Return the contents of an engine's files; empty where the format hides them."""
        return Inside()

    def write_portable(self, graph: Graph, selector: str | None, out: Path) -> None:  # noqa: B027
        """Write the graphs around the engine, if the library runs them; without a selector none prunes."""

    def portable(self, payloads: Payloads, selector: str | None) -> Portable | None:
        """Return the graphs written for the same selector; None where the library runs none."""
        return None

    def write_standalone(self, graph: Graph, options: Options, folder: Path) -> str:
        """Write the graph, and a program that builds or runs it with the library alone.

        Return lines about these files, for people who have nothing else.
        """
        raise UnsupportedError(f"backend '{self.name}' has no format that its library alone builds from.")


def write_run(folder: Path, job: Mapping[str, object]) -> str:
    """Write a program that runs a model with its library alone, as in `job`; return lines about both."""
    (folder / "job.json").write_text(json.dumps(job, indent=1) + "\n", encoding="utf-8")
    script = Path(__file__).with_name("_standalone_run.py").read_text(encoding="utf-8")
    (folder / "run.py").write_text(script, encoding="utf-8")
    return (
        f"  python run.py        runs {job['model']} with {job['library']} and numpy alone;\n"
        "                       prints the errors, exit code 1 where one is over its limit\n"
        "  job.json             the library's settings"
    )


class Engine:
    """A loaded engine that checks names, types, shapes and profile before each call of its library.

    Any thread may call it; calls wait for each other unless the runner is reentrant. It belongs to the
    process that opened it.
    """

    def __init__(self, runner: Runner, spec: EngineSpec) -> None:
        self._runner: Runner | None = runner
        self.spec = spec
        self._process = os.getpid()
        self._turn: AbstractContextManager[object] = nullcontext() if runner.reentrant else Lock()

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return self.spec.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return self.spec.outputs

    @property
    def budgets(self) -> tuple[int, ...]:
        """Token counts that calls are padded to; empty where every size runs as it is."""
        return self._runner.budgets if self._runner else ()

    def warm_up(self) -> None:
        """Prepare the sizes in `budgets` before the first call."""
        if self._runner:
            self._runner.warm_up()

    def release(self) -> None:
        """Release memory until the next call, where the library can be opened again."""
        with self._turn:
            if self._runner is not None:
                self._runner.release()

    def reopen(self) -> None:
        """Open the library now, where it would be opened by the next call."""
        with self._turn:
            if self._runner is not None:
                self._runner.reopen()

    def run(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return outputs by name; shapes outside the profile never reach the library."""
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
        """Refuse a closed engine, and a process that a fork made: threads of libraries do not survive one."""
        if os.getpid() != self._process:
            raise InputError(
                f"this engine was opened in process {self._process} and is used in process {os.getpid()}, "
                "which was forked from it. Open the bundle in each process, best one started by 'spawn'."
            )
        if self._runner is None:
            raise InputError("this engine is closed; open the bundle again.")

    def close(self) -> None:
        """Release the library's memory; a closed engine refuses to run, and a forked copy holds none."""
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
    """Refuse outputs that differ from the manifest."""
    for spec in specs:
        tensor = found.get(spec.name)
        shape = [size_of(dim, values) for dim in spec.shape]
        given = None if tensor is None else (str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        if (
            given is None
            or given[0] != spec.dtype
            or len(given[1]) != len(shape)
            or any(wanted not in (None, size) for wanted, size in zip(shape, given[1], strict=True))
        ):
            raise BundleError(
                f"the engine gave {given or 'nothing'} as '{spec.name}'; {spec.dtype} {shape} is in its "
                "manifest. Build the bundle again or fetch an intact copy."
            )


DAMAGED = (
    "Its files are those of the manifest: they were damaged before, or are for another version. Build the "
    "bundle again or fetch an intact copy."
)


# Of an archive, and of the pickles in it.
ARCHIVE_ERRORS = (EOFError, zipfile.BadZipFile, zlib.error, pickle.PickleError)


@contextmanager
def refused_by(
    library: str, *families: type[Exception], tensors: Mapping[str, Tensor] | None = None
) -> Iterator[None]:
    """Raise a `BundleError` in place of what a library raises about an engine whose inputs are in order.

    `families` are the library's own; the others come from Python and torch. Lack of memory in a call with
    these tensors is a `ResourceError`; elsewhere it passes unchanged.
    """
    kinds: tuple[type[Exception], ...] = (*UNEXPECTED, *ARCHIVE_ERRORS, *families)
    shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in (tensors or {}).items())
    try:
        yield
    except InputError as error:
        # Inputs were checked before, so what is refused are the engine's own files.
        raise BundleError(f"{library} does not run this engine ({error}) {DAMAGED}") from error
    except (VlexportError, MemoryError):
        raise
    except kinds as error:
        words, place = " ".join(str(error).split())[:400], f" at {shapes}" if shapes else ""
        if isinstance(error, OSError) and shortage(error) is not None:
            # Of the machine, not of the files; it is explained by who knows the place.
            raise
        if any(word in str(error).lower() for word in ("alloc", "out of memory", "no space")):
            if not shapes:
                raise
            raise ResourceError(
                f"out of memory in {library}{place} ({words}). Send fewer items at once."
            ) from error
        raise BundleError(
            f"{library} does not run this engine{place} ({type(error).__name__}: {words}). {DAMAGED}"
        ) from error


def inside_of(backend: Backend, payloads: Payloads) -> Inside:
    """Return the contents of an engine's files; every error of the library is a `BundleError`."""
    refused = refused_by(f"backend '{backend.name}'", Exception)
    found = refused(backend.inside)(payloads)
    return replace(
        found, sums=found.sums and refused(found.sums), partly=found.partly and refused(found.partly)
    )


def is_large(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether a library has to give back what it took for a call; values count, of any type."""
    return sum(each.numel() for each in tensors.values()) > KEPT_VALUES


def as_arrays(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Return the tensors as contiguous arrays of numpy."""
    return {name: tensor.detach().cpu().contiguous().numpy() for name, tensor in tensors.items()}
