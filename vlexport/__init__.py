"""Verified engines from the vision half of vision-language models.

    recipe = find_recipe(name)                       what to export
    graph = export(recipe, checkpoint, ...)          a traced tower
    bundle = build(graph, backend, ...)              an engine in a folder, checked
    report = check(bundle, against=checkpoint)       the accuracy check again
    pipeline = load(path)                            an engine that runs

Public names are loaded on first use, so importing this package loads no torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vlexport.build import build
    from vlexport.bundle import Bundle
    from vlexport.checkpoint import Checkpoint
    from vlexport.errors import VlexportError
    from vlexport.export import export
    from vlexport.graph import Graph
    from vlexport.parity import ParityReport, check
    from vlexport.recipe import Recipe, find_recipe
    from vlexport.runtime.pipeline import load
    from vlexport.specs import ShapeProfile

__version__ = "0.1.0"

__all__ = [
    "Bundle",
    "Checkpoint",
    "Graph",
    "ParityReport",
    "Recipe",
    "ShapeProfile",
    "VlexportError",
    "__version__",
    "build",
    "check",
    "export",
    "find_recipe",
    "load",
]

_HOMES = {
    "Bundle": "vlexport.bundle",
    "Checkpoint": "vlexport.checkpoint",
    "Graph": "vlexport.graph",
    "ParityReport": "vlexport.parity",
    "Recipe": "vlexport.recipe",
    "ShapeProfile": "vlexport.specs",
    "VlexportError": "vlexport.errors",
    "build": "vlexport.build",
    "check": "vlexport.parity",
    "export": "vlexport.export",
    "find_recipe": "vlexport.recipe",
    "load": "vlexport.runtime.pipeline",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"vlexport has no '{name}'. Public names: {', '.join(__all__)}.")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__


class _Package(ModuleType):
    """Keeps `export` and `build` functions.

    Loading the module `vlexport.export` makes Python store it here under its name; this stores its function.
    """

    def __setattr__(self, name: str, value: object) -> None:
        shadows = isinstance(value, ModuleType) and name in _HOMES
        super().__setattr__(name, getattr(value, name) if shadows else value)


sys.modules[__name__].__class__ = _Package
