"""Engines for measuring: built into a folder, opened from it; no gate and no manifest of their own."""

from __future__ import annotations

import json
from pathlib import Path

from vlexport.backends import Backend, Engine, EngineSpec, Options
from vlexport.graph import Graph
from vlexport.specs import Range, ShapeProfile, Symbol, TensorSpec, parse_dim

SPEC = "spec.json"


class FolderPayloads:
    """The files of an engine that the same program has just built."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, name: str) -> bytes:
        return (self._folder / name).read_bytes()


def build_engine(graph: Graph, backend: Backend, folder: Path, options: Options) -> None:
    """Write the engine's files and what it takes and gives; the folder must exist."""
    backend.build(graph, options, folder)
    (folder / SPEC).write_text(json.dumps(_spec_json(graph)), encoding="utf-8")


def open_engine(backend: Backend, folder: Path, options: Options) -> Engine:
    """Open what `build_engine` wrote."""
    spec = _read_spec(folder / SPEC)
    return Engine(backend.open(FolderPayloads(folder), spec, options), spec)


def _spec_json(graph: Graph) -> dict[str, object]:
    def rows(specs: tuple[TensorSpec, ...]) -> list[list[object]]:
        return [[spec.name, spec.dtype, [str(dim) for dim in spec.shape]] for spec in specs]

    ranges = {str(symbol): [size.min, size.opt, size.max] for symbol, size in graph.profile.ranges.items()}
    return {
        "inputs": rows(graph.inputs),
        "outputs": rows(graph.outputs),
        "profile": [graph.profile.name, ranges],
    }


def _read_spec(path: Path) -> EngineSpec:
    found = json.loads(path.read_text(encoding="utf-8"))
    name, ranges = found["profile"]
    inputs, outputs = (
        tuple(
            TensorSpec(name=each, dtype=dtype, shape=tuple(parse_dim(dim) for dim in shape))
            for each, dtype, shape in found[key]
        )
        for key in ("inputs", "outputs")
    )
    profile = ShapeProfile(name, {Symbol(symbol): Range(*sizes) for symbol, sizes in ranges.items()})
    return EngineSpec(inputs=inputs, outputs=outputs, profile=profile)
