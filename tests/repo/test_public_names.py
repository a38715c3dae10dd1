"""What `vlexport` offers, pinned: a name that goes is a deprecation, a name that comes is a promise."""

import importlib

import pytest

import vlexport

PUBLIC = {
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


def test_the_public_names_are_these_and_what_their_modules_define():
    assert sorted(dir(vlexport)) == sorted([*PUBLIC, "__version__"])
    for name, home in PUBLIC.items():
        assert getattr(vlexport, name) is getattr(importlib.import_module(home), name), name
    with pytest.raises(AttributeError, match=r"vlexport has no 'exprot'\. Public names: Answer, .*load"):
        vlexport.exprot  # noqa: B018
