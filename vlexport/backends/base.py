"""The contract of backends: build files, open them, name what is missing, the target, and options.

No library of any backend is imported here. Engines and their calls are in `_engine`, looking into files in
`_inspection`.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions, version
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from vlexport._build.estimate import Costs, DeviceNeeds, TowerScale
from vlexport.codec import checked
from vlexport.errors import InputError, RequestError, UnsupportedError
from vlexport.specs import Precision, Quantisation, ShapeProfile, TensorSpec
from vlexport.system import MappedFile
from vlexport.target import Target, platform_here

if TYPE_CHECKING:
    from torch import Tensor

    from vlexport._build.graph import Graph

logger = logging.getLogger(__name__)

# Beyond it a library fails where it starts them, as if the engine were damaged.
MOST_THREADS = 1024

Progress = Callable[[str, float], None]
"""Called with the name of a phase and the share of it that is done, 0 to 1."""


def log_progress(phase: str, share: float) -> None:
    """Log a phase at debug level."""
    logger.debug("%s %.0f%%", phase, 100 * share)


@dataclass(frozen=True, kw_only=True, slots=True)
class Capability:
    """A precision that a backend serves and its costs; with a quantisation, blocks' weights are integers."""

    dtype: str
    quantisation: Quantisation | None = None
    note: str = ""
    costs: Costs | None = None

    @property
    def precision(self) -> Precision:
        return Precision(dtype=self.dtype, quantisation=self.quantisation)

    @property
    def spelled(self) -> str:
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
        if not 0 <= checked("threads", self.threads, int) <= MOST_THREADS:
            raise InputError(
                f"threads: {self.threads} given, 0 (the library's default) to {MOST_THREADS} expected."
            )
        device = checked("device", self.device, int | str | None)
        is_index = device is None or (isinstance(device, int) and device >= 0)
        if not is_index and not re.fullmatch("cpu|cuda(:[0-9]{1,4})?", str(device)):
            raise InputError(
                f"device: {device} given, cpu, cuda, cuda:1 or the index of a GPU (0 or more) expected."
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

    @classmethod
    def of(cls, build_seconds: float | None, build_memory: float | None) -> Self | None:
        """Return the limits of the options of a build; None where none is given."""
        limits = {
            "seconds": checked("build_seconds", build_seconds, float | None),
            "gibibytes": checked("build_memory", build_memory, float | None),
        }
        chosen = {name: limit for name, limit in limits.items() if limit is not None}
        return cls(**chosen) if chosen else None

    def __post_init__(self) -> None:
        # Thirty years, and more memory than any machine has: timers and limits of the system represent them.
        for limit, unit, most in ((self.seconds, "seconds", 10**9), (self.gibibytes, "GiB", 2**20)):
            if not 0 <= limit <= most:
                raise RequestError(f"a limit of {limit:g} {unit} given; 0 (no limit) to {most} expected.")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """Inputs, outputs and profile of an engine."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    profile: ShapeProfile


class Payloads(Protocol):
    """The files of a bundle, each checked against its hash as it is read."""

    def read(self, name: str) -> bytes: ...

    def map(self, name: str) -> memoryview: ...


class Folder:
    """Payloads of a folder that this process has written; nothing is hashed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def map(self, name: str) -> memoryview:
        with (self.path / name).open("rb") as file:
            return memoryview(MappedFile(file.fileno()))


class Runner(ABC):
    """A loaded engine of a library; its inputs have been checked. `Engine` drops it when it is closed.

    reentrant  whether the library takes several calls at once, of any sizes; others get one at a time
    budgets    token counts, ascending, that calls are padded to; empty where every size runs as it is
    """

    reentrant: bool = False
    budgets: tuple[int, ...] = ()

    @abstractmethod
    def run(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]: ...

    def warm_up(self) -> None:  # noqa: B027
        """Prepare every size in `budgets` before its first call."""

    def close(self) -> None:  # noqa: B027
        """Release what the last reference to the runner would not."""


class Backend(ABC):
    """A way to turn graphs into files and files into engines. A file of this folder defines one as `BACKEND`.

    form               the attention layout that its engines run
    extra              the extra of pyproject.toml that installs its libraries; None: they always are
    distributions      packages that shape the files, its own library last
    wheels             distributions that hold its library, where there are several, the preferred one first
    device             where its engines run, as `Target` spells it
    devices            what a build may choose from, `device` first; empty where there is no choice
    rows_on            where the rows of its engines arrive, for inputs of the host: `cpu` or `cuda`
    can_limit_builds   `build` starts a process of its own, which honours the limits of its options
    may_crash          the library is known to end processes: whole builds have one of their own
    cannot_take_bytes  why engines cannot take patches as bytes, if they cannot
    mapped             files that `open` takes by `Payloads.map`
    reads_older        files are of a format that newer versions of its library read
    by_item            bits of an item's rows do not depend on what else is in its call, in all that was tried
    file               where a private backend lies
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
    can_limit_builds: bool = False
    may_crash: bool = False
    cannot_take_bytes: str | None = None
    mapped: tuple[str, ...] = ()
    reads_older: bool = False
    by_item: bool = False
    file: Path | None = None

    @abstractmethod
    def build(self, graph: Graph, options: Options, out: Path, progress: Progress = log_progress) -> None: ...

    @abstractmethod
    def open(self, payloads: Payloads, spec: EngineSpec, options: Options) -> Runner: ...

    def missing(self) -> str | None:
        """Return why this machine can neither build nor run, or None."""
        for name in self.distributions:
            spec = importlib.util.find_spec(name.replace("-", "_"))
            wheels = self.installed() if name == self.distributions[-1] else {}
            # A wheel that is removed takes files that another one has too; what is left is no module.
            if wheels and (spec is None or spec.origin is None):
                return (
                    f"the module {name} is not complete, though {' and '.join(wheels)} is installed: files "
                    f"of it were removed, as with another of its wheels. {self.mend()} installs them again."
                )
            if spec is None:
                package = f"'vlexport[{self.extra}]'" if self.extra else "vlexport"
                return f"the package {name} is not installed. pip install {package} installs it."
        return None

    def installed(self) -> dict[str, str]:
        names = self.wheels or [name for name in self.distributions[-1:] if name != "torch"]
        return {name: wheel.version for name in names for wheel in list(distributions(name=name))[:1]}

    def mend(self) -> str:
        """Return the command that installs the files of its library again, of one distribution."""
        wheels = self.installed()
        name, release = next(iter(wheels.items()))
        removal = f"pip uninstall --yes {' '.join(wheels)} && " if len(wheels) > 1 else ""
        return f"{removal}pip install --force-reinstall --no-deps {name}=={release}"

    def versions(self) -> dict[str, str]:
        return {name: version(name) for name in self.distributions}

    def target(self) -> Target:
        release = self.versions()[self.distributions[-1]]
        return Target(backend=self.name, version=release, platform=platform_here(), device=self.device)

    def here(self, target: Target) -> Target:
        """Return this machine as an engine that was built for a target would run on it."""
        return self.target()

    def build_target(self, options: Options, precision: Precision) -> Target:
        return self.target()

    def scheme(self, quantisation: Quantisation, target: Target) -> Quantisation:
        """Return what a scheme of its capabilities is on a machine, or was where a bundle was built."""
        return quantisation

    def options(
        self,
        targets: Sequence[str] = (),
        profiles: Sequence[ShapeProfile] = (),
        limits: BuildLimits | None = None,
    ) -> Options:
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
