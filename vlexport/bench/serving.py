"""What a contender's process does: build its files, take a workload, run it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vlexport.backends import Options, find_backend
from vlexport.bench.contenders import Contender, Kind
from vlexport.bench.dense import with_dense_masks
from vlexport.bench.engines import build_engine, open_engine
from vlexport.bench.foreign import export_reference, open_exported
from vlexport.checkpoint import Checkpoint
from vlexport.export import cast_floats, export
from vlexport.graph import Graph
from vlexport.parity.noise import in_dtype
from vlexport.recipe import Recipe, recipe_for
from vlexport.specs import MediaItem, ShapeProfile, TensorSpec


@dataclass(frozen=True, kw_only=True)
class Job:
    """A contender with everything that it is measured on; `folder` holds its files."""

    contender: Contender
    recipe: Recipe[Any]
    checkpoint: Checkpoint
    folder: Path
    threads: int
    gemm: tuple[int, int, int]

    @property
    def options(self) -> Options:
        return Options(threads=self.threads)


class Served(Protocol):
    """A contender that is ready to take workloads."""

    def take(self, items: Sequence[MediaItem]) -> None:
        """Get ready for this call; none of it is timed."""

    def run(self) -> Tensor:
        """The call, from patches and grids to tokens."""


def build_files(job: Job, items: Sequence[MediaItem]) -> None:
    """Write the contender's files; the folder is whole or absent."""
    beside = job.folder.with_name(f"{job.folder.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    contender = job.contender
    if contender.kind == "exporter":
        reference = job.recipe.reference(job.checkpoint)
        exported, inputs = export_reference(reference, items, target=contender.library)
        exported.save(beside, inputs)
    else:
        build_engine(_graph(job), find_backend(contender.library), beside, job.options)
    beside.replace(job.folder)


def _graph(job: Job) -> Graph:
    contender = job.contender
    form = find_backend(contender.library).form
    if contender.kind == "product":
        return _product(job, form)
    graph = export(job.recipe, job.checkpoint, dtype=contender.dtype, form=form)
    return with_dense_masks(graph) if contender.kind == "dense" else graph


class _Product(nn.Module):
    """One matrix product with constant weights."""

    def __init__(self, inner: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(columns, inner) * inner**-0.5, requires_grad=False)

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"y": nn.functional.linear(inputs["x"], self.weight)}


def _product(job: Job, form: str) -> Graph:
    rows, inner, columns = job.gemm
    dtype = job.contender.dtype
    module = _Product(inner, columns).to(getattr(torch, dtype))
    program = torch.export.export(module, (_product_input(job),))
    return Graph(
        recipe=job.recipe,
        checkpoint=job.checkpoint,
        config=job.recipe.read_config(job.checkpoint),
        dtype=dtype,
        form=form,
        profile=ShapeProfile("product", {}),
        inputs=(TensorSpec(name="x", dtype=dtype, shape=(rows, inner)),),
        outputs=(TensorSpec(name="y", dtype=dtype, shape=(rows, columns)),),
        program=program,
    )


def _product_input(job: Job) -> dict[str, Tensor]:
    rows, inner, _ = job.gemm
    return {"x": torch.randn(rows, inner, dtype=getattr(torch, job.contender.dtype))}


def serve(job: Job) -> Served:
    """Open what the contender runs."""
    kinds: dict[Kind, Callable[[Job], Served]] = {
        "eager": _Reference,
        "compiled": _Reference,
        "exporter": _Exporter,
        "dense": _Ours,
        "ours": _Ours,
        "product": _ProductEngine,
    }
    return kinds[job.contender.kind](job)


class _Reference:
    """The other implementation, as it is or compiled for each workload's shapes anew."""

    def __init__(self, job: Job) -> None:
        self._dtype = job.contender.dtype
        self._compiled = job.contender.kind == "compiled"
        self._reference = job.recipe.reference(job.checkpoint)
        self._items: list[MediaItem] = []

    def take(self, items: Sequence[MediaItem]) -> None:
        kind = getattr(torch, self._dtype)
        self._items = [replace(item, patches=item.patches.to(kind)) for item in items]
        if self._compiled:
            torch.compiler.reset()
            self._reference.module.compile()

    def run(self) -> Tensor:
        if self._dtype == "float32":
            (tokens,) = self._reference.run(self._items).values()
        else:
            (tokens,) = in_dtype(self._reference, self._items, self._dtype).values()
        return tokens


class _Ours:
    """An engine; making the inputs from patches and grids is a part of every run."""

    def __init__(self, job: Job) -> None:
        self._recipe, self._dtype = job.recipe, job.contender.dtype
        self._config = job.recipe.read_config(job.checkpoint)
        backend = find_backend(job.contender.library)
        self._form = backend.form
        self._engine = open_engine(backend, job.folder, job.options)
        self._items: list[MediaItem] = []

    def take(self, items: Sequence[MediaItem]) -> None:
        self._items = list(items)

    def run(self) -> Tensor:
        inputs = self._recipe.prepare(self._config, self._items, self._form)
        (tokens,) = self._engine.run(cast_floats(inputs, self._dtype)).values()
        return tokens


class _Exporter:
    """A program for one shape; its inputs were made when it was exported and are not timed."""

    def __init__(self, job: Job) -> None:
        self._exported, self._inputs = open_exported(job.folder)

    def take(self, items: Sequence[MediaItem]) -> None:
        """The program holds its shape, and its inputs lie beside it."""

    def run(self) -> Tensor:
        return self._exported.run(self._inputs)


class _ProductEngine:
    """The yardstick for arithmetic: whatever the workload, the same product."""

    def __init__(self, job: Job) -> None:
        self._engine = open_engine(find_backend(job.contender.library), job.folder, job.options)
        self._input = _product_input(job)

    def take(self, items: Sequence[MediaItem]) -> None:
        """Nothing of the workload matters here."""

    def run(self) -> Tensor:
        return self._engine.run(self._input)["y"]


def job_for(contender: Contender, tower: Path, folder: Path, threads: int, gemm: Sequence[int]) -> Job:
    """Open the checkpoint that the contender is measured on."""
    checkpoint = Checkpoint.open(tower)
    rows, inner, columns = gemm
    return Job(
        contender=contender,
        recipe=recipe_for(checkpoint),
        checkpoint=checkpoint,
        folder=folder,
        threads=threads,
        gemm=(rows, inner, columns),
    )
