"""The graphs between tower and decoder: pruning of videos and positions of prompts.

`build` compiles them into the bundle as AOTInductor packages, every size free; opening a bundle neither
traces nor compiles. Pruning and positions of kept tokens run on the device on which an engine's rows arrive,
positions of whole prompts on the host. Without a C++ compiler at the build, and where packages do not fit,
they run eagerly; every form that ran is stated with its reason.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Literal

import torch
from filelock import FileLock, Timeout
from torch import Tensor, nn

from vlexport import system
from vlexport._build.aoti import begun_package, compiler, load_function, target_here
from vlexport._build.parts import Part, exported, functions
from vlexport._build.sources import digest_with_imports
from vlexport.backends import BuildLimits, Payloads, _child
from vlexport.bundle.manifest import GraphsIdentity
from vlexport.bundle.trust import recall_program
from vlexport.bundle.user_folders import CacheFile
from vlexport.errors import (
    BundleError,
    InputError,
    MisfitError,
    ResourceError,
    UnsupportedError,
)
from vlexport.positions.plan import (
    BlockRows,
    KeptCells,
    KeptWriter,
    PositionPlan,
    Writer,
    write_kept_positions,
    write_positions,
)
from vlexport.pruning.cells import CellChoice
from vlexport.pruning.compile import chooser_part, precision_of, selection_part
from vlexport.pruning.methods import METHODS, find_method
from vlexport.pruning.pixels import Choose, kept_cells
from vlexport.pruning.selectors import Selection, Selector, eager
from vlexport.target import fit

logger = logging.getLogger(__name__)

Form = Literal["compiled", "eager"]
# Stage to `compiled`, or `eager` with the reason.
Forms = MutableMapping[str, str]
CELLS = "cells_{}.pt2"
# What runs on the device on which rows arrive, and what runs on the host where that is another.
PACKAGES = TOKENS, HOST = "tokens.pt2", "host.pt2"
# Packages for these devices are compiled, and called once, in a process of their own: with torch 2.11 on an
# H100 it crashed (docs/gpu.md).
TRIED_APART = ("cuda",)
# What shapes a package besides torch.
MAKERS = tuple(
    f"vlexport.{part}"
    for part in ("_build.aoti", "_build.parts", "_build.token_graphs", "positions", "pruning")
)
# Of one package; on two busy cores a minute.
LONGEST_COMPILE_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenGraphs:
    """Pruning and positions in the form in which they run.

    form           of the packages; tensors that they do not take run eagerly all the same
    reason         why the form is eager; empty where it is compiled
    dtype, device  of embeddings and kept indices that packages take, without a dtype none; `packaged_rows`
                   takes rows of the host
    """

    selection: Selection
    form: Form = "eager"
    reason: str = ""
    dtype: str = ""
    device: str = ""
    packaged_rows: Writer = write_positions
    packaged_kept: KeptWriter = write_kept_positions
    packaged_cells: Mapping[str, Choose] = field(default_factory=dict)

    @property
    def stated(self) -> str:
        return self.form if not self.reason else f"eager: {self.reason}"

    def selection_for(self, embeds: Tensor, per_frame: int = 1) -> tuple[Selection, str]:
        """Return the selection for embeddings of so many tokens a frame, and the form in which it runs."""
        actual = f"{str(embeds.dtype).removeprefix('torch.')} on {embeds.device.type}"
        taken = f"{self.dtype} on {self.device}"
        misfit = f"embeddings are {actual}, the package takes {taken}" if actual != taken else ""
        most = self.selection.selector.most_packaged
        if most is not None and per_frame > most:
            misfit = f"frames have {per_frame} tokens, the package takes up to {most}"
        if not self.dtype and self.form == "compiled":
            name, is_long = self.selection.selector.name, most is not None and per_frame > most
            build = f" ({self._selector_option(name)})" if name in METHODS and not is_long else ""
            return self.selection, f"eager: the package prunes by another method{build}"
        form = self._form(misfit)
        fits = form == self.stated
        return (self.selection if fits else eager(self.selection.selector)), form

    def pruning_by(self, selector: Selector) -> TokenGraphs:
        return replace(self, selection=eager(selector), dtype="")

    def kept_cells(self, choice: CellChoice, cells_THWCB: Tensor) -> tuple[Tensor, str]:
        """Return which cells of an item the tower gets, and the form in which they were chosen."""
        run = self.packaged_cells.get(choice.name)
        build = self._selector_option(self.selection.selector.name, choice.name)
        misfit = "" if run else f"the bundle has no package of '{choice.name}' ({build})"
        if not choice.rule.is_packaged:
            misfit = f"'{choice.name}' is not compiled"
        return kept_cells(choice, cells_THWCB, run), self._form(misfit)

    def _selector_option(self, method: str, *cells: str) -> str:
        """Return the option of a build whose bundle has a package of a method and of further rules."""
        return f"build with --selector {','.join((method, *self.packaged_cells, *cells))}"

    def write(
        self,
        plan: PositionPlan,
        rows: BlockRows,
        anchor_1: Tensor,
        by_width: bool,
        forms: Forms | None = None,
    ) -> Tensor:
        """Write positions of planned columns from the channels of their blocks, and the form to `forms`."""
        form = self._positions_form(rows.time_S.device, "cpu", forms, by_width=by_width)
        run = self.packaged_rows if form == "compiled" else write_positions
        return run(plan, rows, anchor_1, by_width)

    def write_kept(
        self, plan: PositionPlan, cells: KeptCells, by_width: bool, forms: Forms | None = None
    ) -> tuple[Tensor, Tensor]:
        form = self._positions_form(cells.kept_S.device, self.device, forms, by_width=by_width)
        run = self.packaged_kept if form == "compiled" else write_kept_positions
        return run(plan, cells, by_width)

    def _positions_form(
        self, device: torch.device, taken: str, forms: Forms | None, *, by_width: bool
    ) -> str:
        misfit = f"positions are on {device.type}, the package takes {taken}" if device.type != taken else ""
        form = self._form(misfit if by_width else "text that resumes by the largest position has no package")
        if forms is not None:
            forms["positions"] = form
        return form

    def _form(self, misfit: str) -> str:
        if self.form == "compiled" and misfit:
            warn_once(f"a graph between tower and decoder runs eagerly: {misfit}")
            return f"eager: {misfit}"
        return self.stated


@cache
def warn_once(words: str) -> None:
    """Log that graphs are not compiled, once in a process."""
    logger.warning(words)


def eager_graphs(selector: str = "evs", reason: str = "") -> TokenGraphs:
    """Return the graphs as they run operation by operation."""
    return TokenGraphs(selection=eager(find_method(selector)), reason=reason)


def planned_graphs(selector: str | None, device: str, cells: tuple[str, ...] = ()) -> GraphsIdentity:
    """Return which graphs a build on this machine makes for rows on a device; without a selector, none."""
    if selector is None:
        return GraphsIdentity(reason="bundles of this recipe have no graphs between tower and decoder")
    if compiler() is None:
        return GraphsIdentity(selector=selector, reason="no C++ compiler where the bundle was built")
    if device == "cuda" and not torch.cuda.is_available():
        return GraphsIdentity(selector=selector, reason="no GPU where the bundle was built")
    return GraphsIdentity(selector=selector, target=target_here(device), cells=cells)


@contextmanager
def compiling(identity: GraphsIdentity, scratch: Path, dtype: str) -> Iterator[None]:
    """Compile planned graphs in a process that ends with the block; `write_graphs` retries what failed.

    One core is idle while a tower is traced. Where all were compiled before there is no process.
    """
    if identity.target is None or all(kept.recall() for kept in _kept(identity, dtype).values()):
        yield
        return
    folder = Path(tempfile.mkdtemp(dir=scratch), "graphs")
    folder.mkdir()
    with Popen(
        system.command(_child.START, f"{__name__}:write_packages", "0"),
        # What compilers leave there goes with the folder.
        env={**system.environment(), "TMPDIR": str(folder.parent)},
        stdin=PIPE,
        stdout=DEVNULL,
        stderr=DEVNULL,
        text=True,
        process_group=None if sys.platform == "win32" else 0,
    ) as process:
        try:
            assert process.stdin is not None
            # The process ends when its input does.
            with suppress(BrokenPipeError):
                process.stdin.write(f"{_job(identity, folder, dtype)}\n")
                process.stdin.flush()
            yield
        finally:
            _child.end(process)


def write_packages(job: str, progress: object) -> str:  # noqa: ARG001  jobs are called with both
    """Write packages in this process, ahead of its caller, or for one that must not crash with them."""
    method, cells, device, folder, dtype = json.loads(job)
    if sys.platform != "win32":
        # The trace beside it is what a build waits for.
        os.nice(5)
    _write_packages(planned_graphs(method, device, tuple(cells)), Path(folder), dtype)
    return ""


def write_graphs(identity: GraphsIdentity, folder: Path, dtype: str) -> GraphsIdentity:
    """Write the packages of planned graphs, and return what they are.

    What was compiled before is taken from the user's cache. With a compiler that fails or crashes, or
    without room for it, the form is eager.
    """
    if identity.target is None or identity.selector is None:
        return identity
    try:
        if identity.target.device in TRIED_APART:
            count = len(_names(identity))
            work = _child.Work(
                function=f"{__name__}:write_packages",
                job=_job(identity, folder, dtype),
                library="torch's compiler",
                limits=BuildLimits(seconds=LONGEST_COMPILE_SECONDS * count),
            )
            _child.run(work, lambda *_: None)
        else:
            _write_packages(identity, folder, dtype)
    except (_child.CrashedError, UnsupportedError, MisfitError, ResourceError) as error:
        for name in _names(identity):
            (folder / name).unlink(missing_ok=True)
        return replace(identity, target=None, reason=str(error), cells=())
    return identity


def _job(identity: GraphsIdentity, folder: Path, dtype: str) -> str:
    assert identity.target is not None
    return json.dumps([identity.selector, identity.cells, identity.target.device, str(folder), dtype])


def _names(identity: GraphsIdentity) -> tuple[str, ...]:
    """Return the files of the packages of a target."""
    assert identity.target is not None
    here = PACKAGES[: 1 if identity.target.device == "cpu" else 2]
    return (*here, *map(CELLS.format, identity.cells))


def _kept(identity: GraphsIdentity, dtype: str) -> dict[str, CacheFile]:
    """Return where the user's cache keeps each package.

    A dtype, a selector or a device changes nothing about what runs on the host beside it.
    """
    target = identity.target
    assert target is not None
    assert identity.selector is not None
    own, host = (identity.selector, dtype, target.tag), (replace(target, device="cpu").tag,)
    source = digest_with_imports(f"import {__name__}".encode(), MAKERS)
    keys = {name: "\n".join((name, *(own if name == TOKENS else host), source)) for name in _names(identity)}
    return {
        name: CacheFile.of("graphs", hashlib.sha256(text.encode()).hexdigest()) for name, text in keys.items()
    }


def _parts(identity: GraphsIdentity, dtype: str) -> dict[str, tuple[Part, ...]]:
    """Return what is in each package: pruning, positions of kept tokens and of whole prompts, then rules."""
    assert identity.target is not None
    assert identity.selector is not None
    prune = selection_part(find_method(identity.selector), dtype)
    kept, rows = (_position_part(each) for each in (_Kept(), _Rows()))
    whole = {TOKENS: (prune, kept, rows)}
    packages = whole if identity.target.device == "cpu" else {TOKENS: (prune, kept), HOST: (rows,)}
    return packages | {CELLS.format(name): (chooser_part(name),) for name in identity.cells}


def _write_packages(identity: GraphsIdentity, folder: Path, dtype: str) -> None:
    target = identity.target
    assert target is not None
    assert identity.selector is not None
    precision, parts = precision_of(find_method(identity.selector)), _parts(identity, dtype)
    with ExitStack() as stack:
        unfinished = []
        for name, kept in _kept(identity, dtype).items():
            stack.enter_context(_alone(kept))
            content = recall_program(kept)
            if content is not None:
                (folder / name).write_bytes(content)
                continue
            path = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder.parent)), name)
            program = exported(parts[name], target.device if name == TOKENS else "cpu")
            settings = precision if name == TOKENS else {}
            finish = stack.enter_context(begun_package(program, path, settings))
            unfinished.append((kept, path, program, finish))
        for kept, path, program, finish in unfinished:
            finish()
            content = path.read_bytes()
            _try(content, path.name, program)
            kept.keep(content)
            (folder / path.name).write_bytes(content)


def _try(content: bytes, name: str, program: torch.export.ExportedProgram) -> None:
    """Load a new package and call it once; refuse it as one that could not be compiled."""
    assert program.example_inputs is not None
    try:
        load_function(content, name)(*program.example_inputs[0])
    except (RuntimeError, BundleError) as error:
        words = " ".join(str(error).split())[:200]
        raise system.shortage(error) or UnsupportedError(
            f"{name} was compiled and does not run here ({words}); a C++ compiler that finds no shared C++ "
            "library makes such packages (docs/gpu.md)"
        ) from error


@contextmanager
def _alone(kept: CacheFile) -> Iterator[None]:
    """Keep other builds from compiling the same, as a courtesy: without locks both compile."""
    lock = FileLock(kept.path.with_suffix(".lock"))
    with ExitStack() as stack:
        try:
            kept.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            stack.enter_context(lock.acquire(timeout=LONGEST_COMPILE_SECONDS))
        except (Timeout, NotImplementedError, OSError) as error:
            logger.info("%s: compiled without a lock (%s)", kept.path, error)
        yield


def opened_graphs(identity: GraphsIdentity, payloads: Payloads, dtype: str) -> TokenGraphs | None:
    """Load the graphs of a bundle; None where the family has nothing to run."""
    return None if identity.selector is None else open_graphs(identity, payloads, dtype)


def open_graphs(identity: GraphsIdentity, payloads: Payloads, dtype: str) -> TokenGraphs:
    """Load the packages of a bundle; eager where it has none or they are for another machine or version."""
    with _damages_named():
        plain = eager_graphs(identity.selector or "evs", identity.reason)
        if identity.target is None:
            if identity.selector is not None:
                warn_once(f"pruning and positions run eagerly: {identity.reason}")
            return plain
        misfit = fit(identity.target, target_here(identity.target.device))
        if misfit is not None:
            reason = f"packages for {identity.target} differ from this machine in {', '.join(misfit.fields)}"
            warn_once(f"pruning and positions run eagerly: {reason}")
            return replace(plain, reason=reason)
        try:
            prune, kept, rows, *choosers = (
                function
                for name, parts in _parts(identity, dtype).items()
                for function in functions(load_function(payloads.read(name), name), parts)
            )
        except (MisfitError, ResourceError) as error:
            # Of this machine, and for pruning and answers alone.
            warn_once(f"pruning and positions run eagerly: {error}")
            return replace(plain, reason=str(error))

    def write(plan: PositionPlan, blocks: BlockRows, anchor_1: Tensor, by_width: bool) -> Tensor:
        assert by_width
        (table_3N,) = rows(*plan, *blocks, anchor_1)
        return table_3N

    def write_kept(plan: PositionPlan, cells: KeptCells, by_width: bool) -> tuple[Tensor, Tensor]:
        assert by_width
        table_3N, delta = kept(*plan, *cells)
        return table_3N, delta

    return replace(
        plain,
        selection=Selection(selector=plain.selection.selector, run=_of_pairs(prune)),
        form="compiled",
        dtype=dtype,
        device=identity.target.device,
        packaged_rows=write,
        packaged_kept=write_kept,
        packaged_cells=dict(zip(identity.cells, map(_of_pairs, choosers), strict=True)),
    )


def _of_pairs(function: Callable[..., Sequence[Tensor]]) -> Choose:
    """Return a packaged function of rows or cells and a size, whose results are two."""

    def run(values: Tensor, size_K: Tensor) -> tuple[Tensor, Tensor]:
        first, second = function(values.contiguous(), size_K)
        return first, second

    return run


@contextmanager
def _damages_named() -> Iterator[None]:
    try:
        yield
    except (InputError, UnsupportedError, OSError, RuntimeError) as error:
        words = " ".join(str(error).split())[:300]
        raise system.shortage(error) or BundleError(
            f"the graphs of pruning and positions cannot be opened ({words}). "
            "Build the bundle again or fetch an intact copy."
        ) from error


class _Rows(nn.Module):
    """`write_positions` with its tensors side by side."""

    num_results = 1
    # Columns, rows and items.
    sizes = (61, 61, 61, 41, 3, 41, 41, 41, 41, 1)

    def forward(self, *tensors: Tensor) -> Tensor:
        return write_positions(PositionPlan(*tensors[:5]), BlockRows(*tensors[5:9]), tensors[9], True)


class _Kept(nn.Module):
    """`write_kept_positions` with its tensors side by side."""

    num_results = 2
    # Columns, rows, items and times of frames.
    sizes = (53, 53, 53, 37, 5, 37, 5, 5, 5, 11)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        return write_kept_positions(PositionPlan(*tensors[:5]), KeptCells(*tensors[5:]), True)


def _position_part(program: _Rows | _Kept) -> Part:
    example = tuple(torch.ones(size, dtype=torch.int64) for size in program.sizes)
    free = tuple({0: torch.export.Dim.DYNAMIC} if size > 1 else {} for size in program.sizes)
    return Part(program, example, free, num_results=program.num_results)
