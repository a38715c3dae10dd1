"""Who may import whom, read from the imports. Imports for types only count too: they tie modules as well."""

import sys
from graphlib import TopologicalSorter

from tests.repo.tree import Import, library_files, library_imports, part_of, relative

EVERYONE_MAY = {"errors", "fields", "codec"}

PARTS = {part_of(path) for path in library_files()}

# The facade names what is public; it loads nothing by itself.
ALLOWED = {
    "fields": set(),
    # Leaves of JSON: symbols, ranges, targets.
    "codec": {"specs", "target"},
    "vlexport": PARTS,
    "__main__": {"cli"},
    "cli": PARTS,
    "demo": PARTS - {"cli"},
    "bench": {"checkpoint", "media", "parity", "recipe", "runtime", "specs"},
    "report": PARTS - {"cli", "demo"},
    # The deep checks preprocess, place and prune by the settings of a tiny checkpoint.
    "doctor": {"backends", "checkpoint", "positions", "pruning", "recipe", "specs"},
    # The accuracy check, for authors of recipes.
    "testing": {"backends", "checkpoint", "codec", "_export", "parity", "recipe", "specs", "vision"},
    "inspect": {"bundle", "checkpoint", "recipe"},
    "parity": {
        "runtime",
        "backends",
        "build_spec",
        "bundle",
        "graph",
        "recipe",
        "checkpoint",
        "_export",
        "specs",
        "vision",
    },
    # It looks for a finished bundle of recipe and checkpoint before it exports anything.
    "_build": {
        "backends",
        "build_spec",
        "bundle",
        "checkpoint",
        "estimate",
        "_export",
        "graph",
        "parity",
        "request",
        # What opens a bundle finds its recipe, a private one too.
        "runtime",
        "sources",
        "target",
    },
    # The value that everything about a build follows from.
    "build_spec": {"backends", "checkpoint", "estimate", "graph", "recipe", "specs", "vision"},
    # Options to a build; nothing is exported or built to know whether they can be served.
    "request": {"backends", "build_spec", "checkpoint", "precision", "recipe", "specs"},
    # The layers that overflow float16, found by running the tower on the samples of the accuracy check.
    "precision": {"_export", "checkpoint", "parity", "recipe", "specs", "vision"},
    # What `build` would do, without doing it.
    "plan": {"build_spec", "backends", "_build", "bundle", "estimate", "_export", "parity", "specs"},
    # Legal calls of an engine, and an archive of a part of its graph, for tools of others.
    "inputs": {"bundle", "_export", "parity", "recipe", "runtime", "specs"},
    "repro": {
        "specs",
        "backends",
        "bundle",
        "checkpoint",
        "_export",
        "graph",
        "inputs",
        "runtime",
    },
    "_export": {"recipe", "graph", "checkpoint", "specs", "vision"},
    "runtime": {
        "bundle",
        "backends",
        "positions",
        "pruning",
        "recipe",
        "language",
        "checkpoint",
        "media",
        "specs",
        "vision",
    },
    "recipes": {"recipe", "language", "specs", "vision", "positions", "pruning", "checkpoint"},
    # Operators of the towers must be known before a program that holds them is loaded.
    # What each takes in memory and on disk lies beside what it can do.
    "backends": {"codec", "graph", "specs", "target", "onnx", "vision", "estimate"},
    # From a traced tower to operators that the ONNX target fuses.
    "onnx": {"graph", "specs", "vision"},
    # A graph names the checkpoint whose weights it holds.
    "graph": {"recipe", "checkpoint", "specs"},
    # A recipe's functions take a checkpoint; a checkpoint knows no recipe.
    "recipe": {"checkpoint", "language", "sources", "specs", "vision"},
    # Which language model stands behind a tower, and what its prompts look like.
    "language": {"checkpoint", "specs"},
    "checkpoint": {"specs", "target"},
    "bundle": {"specs", "target"},
    "estimate": {"specs"},
    # Grids and rates are defined with the rules of positions.
    "pruning": {"positions"},
    "positions": set(),
    # Interfaces of other systems, over what stays torch.
    "integrations": {"positions", "specs"},
    "vision": {"specs"},
    "media": {"specs"},
    "target": set(),
    "sources": set(),
    "specs": set(),
    "errors": set(),
}

MAY_LOOK_AT_EVERYTHING = {"vlexport", "cli", "demo", "report"}

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
    "matplotlib": ("vlexport/report/",),
    "recipes": (),
}

# Parts that run before any heavy library is there.
STANDARD_LIBRARY_ONLY = {"errors", "sources", "specs", "target"}


def _target_part(found: Import) -> str | None:
    top, _, rest = found.module.partition(".")
    if top != "vlexport":
        return None
    return rest.split(".")[0] or "vlexport"


def test_the_rules_allow_no_circle():
    below = {part: others for part, others in ALLOWED.items() if part not in MAY_LOOK_AT_EVERYTHING}
    assert list(TopologicalSorter(below).static_order())


def test_a_part_imports_only_what_it_may():
    parts = {part_of(path) for path in library_files()}
    assert parts - set(ALLOWED) == set(), "new parts: define in ALLOWED what each may import"
    refused = [
        str(found)
        for found in library_imports()
        if _target_part(found)
        not in {None, *ALLOWED[part_of(found.path)], *EVERYONE_MAY, part_of(found.path)}
    ]
    assert refused == []


def test_a_recipe_imports_no_other_recipe():
    """Demos may share their contents: they are in no digest."""
    refused = [
        str(found)
        for found in library_imports()
        if part_of(found.path) == "recipes" and _target_part(found) == "recipes"
        if not (found.path.parent.name == "demo" and found.module.startswith("vlexport.recipes.demo"))
    ]
    assert refused == []


def test_a_backend_imports_no_other_backend():
    inside = [
        found
        for found in library_imports()
        if part_of(found.path) == "backends" and found.module.startswith("vlexport.backends.")
    ]
    others = [found for found in inside if not found.module.split(".")[2].startswith(("_", "base"))]
    assert [str(found) for found in others] == []


def test_an_optional_library_is_imported_in_its_own_place_only():
    refused = [
        str(found)
        for found in library_imports()
        if not relative(found.path).startswith(HOMES.get(found.module.split(".")[0], relative(found.path)))
    ]
    assert refused == []


def test_the_lowest_parts_need_the_standard_library_only():
    known = {*sys.stdlib_module_names, "vlexport"}
    refused = [
        str(found)
        for found in library_imports()
        if part_of(found.path) in STANDARD_LIBRARY_ONLY
        and not found.only_types
        and found.module.split(".")[0] not in known
    ]
    assert refused == []
