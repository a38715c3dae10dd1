"""Looking into an engine's files; a backend has these methods where its format allows them."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from vlexport.backends._engine import refused_by
from vlexport.backends.base import Backend, Options, Payloads

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from vlexport._build.graph import Graph
    from vlexport.specs import Quantisation

# What runs a job, which it finds beside it.
PROGRAM = Path(__file__).with_name("_standalone_run.py")
Partly = Callable[[Mapping[str, "Tensor"], Callable[[str], bool]], Mapping[str, "Tensor"]]


class Sums(Protocol):
    """Calls of a copy of a stored program which give the results of its additions by name."""

    def __call__(
        self, inputs: Mapping[str, Tensor], fed: Mapping[str, Tensor], only: Collection[str] = ()
    ) -> Mapping[str, Tensor]:
        """Return the sums in `only`, else all; parts that read a sum in `fed` get the rows given there."""


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
    cell_tables  structure and kept cells to the inputs of a call of these, where rules choose cells
    selects    by rule, patches of an item to its cells that stay
    """

    tables: GraphCall
    prune: GraphCall | None
    positions: GraphCall
    cell_tables: GraphCall | None = None
    selects: Mapping[str, GraphCall] = field(default_factory=dict)


@runtime_checkable
class ShowsContents(Protocol):
    """A backend whose files show weights, or values on the way."""

    def inside(self, payloads: Payloads) -> Inside: ...


@runtime_checkable
class ChecksNetwork(Protocol):
    """A backend that compares its library's network with the graph while it builds."""

    def network_checks(self, out: Path) -> Mapping[str, str]: ...


@runtime_checkable
class RunsPortable(Protocol):
    """A backend whose library runs the graphs around the engine."""

    def write_portable(
        self, graph: Graph, selector: str | None, out: Path, cells: Sequence[str] = ()
    ) -> None:
        """Write the graphs; without a selector none prunes."""

    def portable(self, payloads: Payloads, selector: str | None, cells: Sequence[str] = ()) -> Portable: ...


def portable_of(
    backend: Backend, payloads: Payloads, selector: str | None, cells: Sequence[str] = ()
) -> Portable | None:
    """Return the graphs around an engine; None where the library runs none."""
    return backend.portable(payloads, selector, cells) if isinstance(backend, RunsPortable) else None


@runtime_checkable
class WritesStandalone(Protocol):
    """A backend whose library builds or runs a graph alone. `has_trtexec`: trtexec reads that graph too."""

    has_trtexec: bool

    def write_standalone(self, graph: Graph, options: Options, folder: Path) -> str:
        """Write the graph and a program for it; return lines about these files, for whoever gets them."""


@runtime_checkable
class RunsAlone(Protocol):
    """A backend whose library runs an engine's files without vlexport."""

    def job(self, options: Options, quantisation: Quantisation | None) -> dict[str, object]:
        """Return what `_standalone_run.py` needs: library, model, device and settings."""


def write_run(folder: Path, job: Mapping[str, object]) -> str:
    """Write a program that runs a model with its library alone, as in `job`; return lines about both."""
    (folder / "job.json").write_text(json.dumps(job, indent=1) + "\n", encoding="utf-8")
    (folder / "run.py").write_bytes(PROGRAM.read_bytes())
    return (
        f"  python run.py        runs {job['model']} with {job['library']} and numpy alone;\n"
        "                       prints the errors, exit code 1 where one is over its limit\n"
        "  job.json             the library's settings"
    )


def inside_of(backend: Backend, payloads: Payloads) -> Inside:
    """Return the contents of an engine's files; every error of the library is a `BundleError`."""
    if not isinstance(backend, ShowsContents):
        return Inside()
    refused = refused_by(f"backend '{backend.name}'", Exception)
    inside = refused(backend.inside)(payloads)
    return replace(
        inside, sums=inside.sums and refused(inside.sums), partly=inside.partly and refused(inside.partly)
    )


def as_arrays(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Return the tensors as contiguous arrays of numpy."""
    return {name: tensor.detach().cpu().contiguous().numpy() for name, tensor in tensors.items()}
