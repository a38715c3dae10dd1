"""Who may import whom, read from the imports. Imports for types only count too: they tie modules as well."""

import sys
from graphlib import TopologicalSorter

from tests.repo.tree import (
    Import,
    imports_of,
    library_files,
    library_imports,
    part_of,
    part_of_module,
    relative,
)

EVERYONE_MAY = {"errors", "codec", "system"}

PARTS = {part_of(path) for path in library_files()}

# The facade names what is public; it loads nothing by itself.
ALLOWED = {
    "_build": set(),
    "codec": set(),
    "vlexport": PARTS,
    "__main__": {"cli"},
    "cli": PARTS,
    # What a machine has, what a bundle is, the demo, archives for reports of bugs.
    "tools": PARTS - {"cli"},
    "reports": PARTS - {"cli", "tools"},
    # Answers to questions, for the accuracy check and at every rate of pruning, and times of calls. The
    # report has tables and picture of a sweep.
    "evaluate": {
        "backends",
        "_build.spec",
        "bundle",
        "checkpoint",
        "media",
        "parity",
        "parity.metrics",
        "positions",
        "pruning",
        "recipe",
        "reports",
        "runtime",
        "specs",
        "target",
        # Frames of fewer pixels, for as many tokens.
        "vision",
    },
    # The accuracy check, for authors of recipes and backends.
    "testing": {
        "backends",
        "_build.request",
        "_build.spec",
        "checkpoint",
        "codec",
        "_build.export",
        "parity",
        "recipe",
        # The demo's checkpoint, for backends.
        "recipes",
        "specs",
        "vision",
    },
    "parity": {
        "parity.metrics",
        "runtime",
        "backends",
        "_build.spec",
        "bundle",
        "_build.graph",
        "recipe",
        "checkpoint",
        "_build.export",
        # The graphs of a bundle are held to rules of their own.
        "positions",
        "pruning",
        "_build.token_graphs",
        "specs",
        "vision",
    },
    # It looks for a finished bundle of recipe and checkpoint before it exports anything.
    # What opens a bundle finds its recipe, a private one too.
    "_build.build": {
        "backends",
        "_build.spec",
        "bundle",
        "checkpoint",
        "_build.estimate",
        "_build.export",
        "bundle.user_folders",
        "_build.graph",
        "_build.key",
        "_build.limits",
        "parity",
        "_build.request",
        # The card of a bundle is written by its build.
        "reports",
        "runtime",
        "specs",
        "target",
        "_build.token_graphs",
    },
    # Whatever changes the result, and the finished bundle of it.
    "_build.key": {
        "_build.private",
        "_build.sources",
        "_build.spec",
        "_build.token_graphs",
        "backends",
        "bundle",
        "parity",
        "target",
    },
    # Arguments of a build, and back, for a process of its own.
    "_build.limits": {"backends", "bundle", "checkpoint", "codec", "specs"},
    # The value that everything about a build follows from.
    "_build.spec": {"backends", "checkpoint", "_build.estimate", "_build.graph", "recipe", "specs", "vision"},
    # Options to a build; nothing is exported or built to know whether they can be served.
    "_build.request": {
        "backends",
        "_build.spec",
        "checkpoint",
        "_build.plan",
        "_build.precision",
        "pruning",
        "recipe",
        "specs",
        # `choose`, by its public name: it makes requests itself, and is in no bundle's key.
        "vlexport",
    },
    # Engines of a few blocks, timed as bundles are and held to the reference.
    "_build.auto": {
        "_build.export",
        "_build.request",
        "_build.spec",
        "backends",
        "checkpoint",
        "evaluate",
        "media",
        "parity",
        "parity.metrics",
        "runtime",
        "specs",
        "vision",
    },
    # The layers that overflow float16, found by running the tower on the samples of the accuracy check.
    "_build.precision": {
        "_build.export",
        "checkpoint",
        "parity",
        "parity.metrics",
        "recipe",
        "specs",
        "vision",
    },
    # What `build` would do, without doing it.
    "_build.plan": {
        "_build.spec",
        "backends",
        "_build.key",
        "bundle",
        "checkpoint",
        "codec",
        "_build.estimate",
        "_build.export",
        "parity",
        "specs",
        "_build.timings",
    },
    # Bundles in repositories, whose page is the card of the bundle.
    "bundle.hub": {"backends", "bundle", "checkpoint", "parity", "reports"},
    # What commands took on this machine.
    "_build.timings": {"bundle.user_folders"},
    "_build.export": {"recipe", "_build.graph", "checkpoint", "specs", "vision"},
    "runtime": {
        "bundle",
        # A bundle's own proof is measured as its check was.
        "parity.metrics",
        "backends",
        "positions",
        "pruning",
        "recipe",
        "checkpoint",
        "media",
        "specs",
        "target",
        "_build.token_graphs",
        "vision",
    },
    "recipes": {"recipe", "specs", "vision", "positions", "pruning", "checkpoint"},
    # Operators of the towers must be known before a program that holds them is loaded.
    # What each takes in memory and on disk lies beside what it can do.
    "backends": {
        "_build.private",
        "codec",
        "_build.graph",
        "specs",
        "target",
        "onnx",
        "vision",
        "_build.estimate",
        "bundle.user_folders",
        "_build.aoti",
        # A tower with integers in it is traced again.
        "_build.export",
    },
    # From a traced tower to operators that the ONNX target fuses, and the graphs around it.
    "onnx": {
        "bundle.user_folders",
        "_build.graph",
        "positions",
        "pruning",
        "_build.sources",
        "specs",
        "vision",
    },
    # A graph names the checkpoint whose weights it holds.
    "_build.graph": {"recipe", "checkpoint", "specs"},
    # A recipe's functions take a checkpoint; a checkpoint knows no recipe.
    "recipe": {"checkpoint", "positions", "_build.private", "_build.sources", "specs", "vision"},
    "checkpoint": {"specs", "target"},
    "bundle": {"bundle.user_folders", "_build.sources", "specs", "target"},
    "_build.estimate": {"specs"},
    # Grids and rates are defined with the rules of positions.
    "pruning": {"_build.aoti", "_build.parts", "positions"},
    "positions": {"specs"},
    # Towers of models of other systems become bundles of the same checkpoint, which prune and place there.
    "integrations": {
        "backends",
        "checkpoint",
        "positions",
        "pruning",
        "recipe",
        "runtime",
        "specs",
    },
    "vision": {"specs"},
    "media": {"specs"},
    "target": set(),
    "_build.aoti": {"target"},
    "_build.parts": set(),
    # Between the tower and the decoder, and in the bundle.
    "_build.token_graphs": {
        # The process that packages of a GPU are compiled and called in.
        "backends",
        "_build.aoti",
        "_build.parts",
        "bundle",
        "bundle.user_folders",
        "positions",
        "pruning",
        "_build.sources",
        "target",
    },
    "bundle.user_folders": set(),
    "parity.metrics": set(),
    "_build.private": set(),
    "_build.sources": set(),
    "specs": set(),
    "errors": set(),
    "system": set(),
}

MAY_LOOK_AT_EVERYTHING = {"vlexport", "cli", "reports", "tools"}

# Libraries that belong to one place: the prefixes of the files that may import them.
HOMES = {
    "onnxruntime": ("vlexport/backends/onnxruntime.py",),
    "openvino": ("vlexport/backends/openvino.py",),
    "tensorrt": ("vlexport/backends/tensorrt.py", "vlexport/backends/_"),
    "tensorrt_rtx": ("vlexport/backends/tensorrt_rtx.py", "vlexport/backends/_"),
    "torch_tensorrt": ("vlexport/backends/torch_tensorrt.py",),
    "typer": ("vlexport/cli/",),
    "click": ("vlexport/cli/",),
    "rich": ("vlexport/cli/",),
    "matplotlib": ("vlexport/reports/",),
    "vllm": ("vlexport/integrations/vllm/",),
    "recipes": (),
}

# Parts that run before any heavy library is there.
STANDARD_LIBRARY_ONLY = {"errors", "codec", "system", "_build.private", "_build.sources", "specs", "target"}


def _target_part(found: Import) -> str | None:
    return part_of_module(found.module) if found.module.split(".")[0] == "vlexport" else None


def refused(wrong):
    """List the imports that are wrong."""
    return [str(found) for found in library_imports() if wrong(found, part_of(found.path))]


def test_a_part_imports_only_what_it_may_and_the_rules_allow_no_circle():
    below = {part: others for part, others in ALLOWED.items() if part not in MAY_LOOK_AT_EVERYTHING}
    assert list(TopologicalSorter(below).static_order())
    assert set(ALLOWED) >= PARTS, "new parts: define in ALLOWED what each may import"
    assert (
        refused(lambda found, part: _target_part(found) not in {None, *ALLOWED[part], *EVERYONE_MAY, part})
        == []
    )


def test_recipes_and_backends_import_no_other_of_their_kind():
    """Demos share contents, being in no digest; `_NAME_*.py` belongs to the recipe `NAME`."""

    def other_recipe(found, part):
        demo = found.path.parent.name == "demo" and found.module.startswith("vlexport.recipes.demo")
        own = found.module.startswith(f"vlexport.recipes._{found.path.stem}")
        return part == "recipes" and _target_part(found) == "recipes" and not (demo or own)

    def other_backend(found, part):
        inside = part == "backends" and found.module.startswith("vlexport.backends.")
        return inside and not found.module.split(".")[2].startswith(("_", "base"))

    assert refused(other_recipe) == []
    assert refused(other_backend) == []


def test_libraries_are_imported_in_their_own_place_and_not_at_all_by_the_lowest_parts():
    known = {*sys.stdlib_module_names, "vlexport"}

    def misplaced(found, _):
        place = relative(found.path)
        return not place.startswith(HOMES.get(found.module.split(".")[0], place))

    def heavy(found, part):
        other = found.module.split(".")[0] not in known
        return part in STANDARD_LIBRARY_ONLY and not found.only_types and other

    assert refused(misplaced) == []
    assert refused(heavy) == []


WAYS = {
    "import vlexport.specs": {"vlexport.specs": False},
    "from vlexport.specs import Range": {"vlexport.specs": False},
    "from vlexport import errors, specs": {"vlexport.errors": False, "vlexport.specs": False},
    "from vlexport import export": {"vlexport": False},
    "from vlexport.vision import grid, Tower": {"vlexport.vision": False, "vlexport.vision.grid": False},
    "def late():\n    import onnxruntime as ort": {"onnxruntime": False},
    "try:\n    from rich import print\nexcept ImportError:\n    pass": {"rich": False},
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\nelse:\n    import numpy\n": {
        "typing": False,
        "torch": True,
        "numpy": False,
    },
}


def test_an_import_is_found_wherever_it_stands_and_distinguished_where_it_is_for_types(tmp_path):
    path = tmp_path / "some.py"
    for code, wanted in WAYS.items():
        path.write_text(code, encoding="utf-8")
        assert {found.module: found.only_types for found in imports_of(path)} == wanted, code
