"""Verified engines from the vision half of vision-language models.

    plan(checkpoint, backend=...)                 shapes, disk, memory and time of a build
    choose(checkpoint)                            the backends and precisions of this machine, measured
    bundle = build(checkpoint, backend, ...)      an engine in a folder, checked
    check(bundle, accuracy=True)                  the accuracy check again
    pipeline = load(bundle, checkpoint=...)       an engine that encodes, and answers
    bench([bundle]), sweep(bundle, task=...)      times, and what pruning costs
    inspect, compare, report, push, pull, doctor  as on the command line
    graph = export(find_recipe(name), ...)        a traced tower, for `build` too

Parameters are named as options are; `to_json` of a result, or itself, is what `--json` prints.
Public names are loaded on first use, so importing this package loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vlexport._build.auto import choose
    from vlexport._build.build import build
    from vlexport._build.export import export
    from vlexport._build.graph import Graph
    from vlexport._build.request import plan
    from vlexport.bundle import Bundle
    from vlexport.bundle.hub import pull, push
    from vlexport.checkpoint import Checkpoint
    from vlexport.errors import VlexportError
    from vlexport.evaluate.bench import bench
    from vlexport.evaluate.sweep import sweep
    from vlexport.media.limits import MediaLimits
    from vlexport.parity.report import ParityReport
    from vlexport.positions.rules import PositionOptions
    from vlexport.recipe import Recipe, find_recipe
    from vlexport.reports.compare import compare
    from vlexport.reports.results import report
    from vlexport.runtime.attached import attach
    from vlexport.runtime.decoder import DecoderOptions
    from vlexport.runtime.encoder import EncoderOptions
    from vlexport.runtime.generate import RuntimeOptions
    from vlexport.runtime.outputs import Answer, Encoded
    from vlexport.runtime.pipeline import Pipeline, load
    from vlexport.runtime.prune import PruningOptions
    from vlexport.runtime.request import Generation, Request, RequestLimits
    from vlexport.specs import MediaItem, Pixels, ShapeProfile
    from vlexport.tools.check import check
    from vlexport.tools.doctor import doctor
    from vlexport.tools.inspect import inspect

__version__ = "0.1.0"

# An installed package holds its recipes. In a checkout they are next to it, and no install is needed.
_CHECKOUT = Path(__file__).parents[1]
if not Path(__file__).with_name("recipes").is_dir() and (_CHECKOUT / "recipes" / "__init__.py").is_file():
    __path__.append(str(_CHECKOUT))

_HOMES = {
    "Answer": "vlexport.runtime.outputs",
    "Bundle": "vlexport.bundle",
    "Checkpoint": "vlexport.checkpoint",
    "DecoderOptions": "vlexport.runtime.decoder",
    "Encoded": "vlexport.runtime.outputs",
    "EncoderOptions": "vlexport.runtime.encoder",
    "Generation": "vlexport.runtime.request",
    "Graph": "vlexport._build.graph",
    "MediaItem": "vlexport.specs",
    "MediaLimits": "vlexport.media.limits",
    "ParityReport": "vlexport.parity.report",
    "Pipeline": "vlexport.runtime.pipeline",
    "Pixels": "vlexport.specs",
    "PositionOptions": "vlexport.positions.rules",
    "PruningOptions": "vlexport.runtime.prune",
    "Recipe": "vlexport.recipe",
    "Request": "vlexport.runtime.request",
    "RequestLimits": "vlexport.runtime.request",
    "RuntimeOptions": "vlexport.runtime.generate",
    "ShapeProfile": "vlexport.specs",
    "VlexportError": "vlexport.errors",
    "attach": "vlexport.runtime.attached",
    "bench": "vlexport.evaluate.bench",
    "build": "vlexport._build.build",
    "check": "vlexport.tools.check",
    "choose": "vlexport._build.auto",
    "compare": "vlexport.reports.compare",
    "doctor": "vlexport.tools.doctor",
    "export": "vlexport._build.export",
    "find_recipe": "vlexport.recipe",
    "inspect": "vlexport.tools.inspect",
    "load": "vlexport.runtime.pipeline",
    "plan": "vlexport._build.request",
    "pull": "vlexport.bundle.hub",
    "push": "vlexport.bundle.hub",
    "report": "vlexport.reports.results",
    "sweep": "vlexport.evaluate.sweep",
}

__all__ = [
    "Answer",
    "Bundle",
    "Checkpoint",
    "DecoderOptions",
    "Encoded",
    "EncoderOptions",
    "Generation",
    "Graph",
    "MediaItem",
    "MediaLimits",
    "ParityReport",
    "Pipeline",
    "Pixels",
    "PositionOptions",
    "PruningOptions",
    "Recipe",
    "Request",
    "RequestLimits",
    "RuntimeOptions",
    "ShapeProfile",
    "VlexportError",
    "__version__",
    "attach",
    "bench",
    "build",
    "check",
    "choose",
    "compare",
    "doctor",
    "export",
    "find_recipe",
    "inspect",
    "load",
    "plan",
    "pull",
    "push",
    "report",
    "sweep",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"vlexport has no '{name}'. Public names: {', '.join(__all__)}.")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
