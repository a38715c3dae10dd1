"""Who may import whom, read from the imports. Imports for types only count too: they tie modules as well."""

import sys
from graphlib import TopologicalSorter

import pytest

from tests.house.tree import Import, imports_of, library_files, part_of, relative

EVERYONE_MAY = {"errors"}

PARTS = {part_of(path) for path in library_files()}

# The facade names what is public; it loads nothing by itself.
ALLOWED = {
    "vlexport": PARTS,
    "cli": PARTS,
    "demo": PARTS - {"cli"},
    "bench": PARTS - {"cli", "demo"},
    "report": PARTS - {"cli", "demo"},
    "doctor": {"target", "backends"},
    "inspect": {"bundle", "checkpoint", "recipe"},
    # A prompt's text has to have room for what the engine gives.
    "parity": {
        "language",
        "runtime",
        "backends",
        "bundle",
        "recipe",
        "checkpoint",
        "export",
        "specs",
        "vision",
        "compiled",
    },
    # It looks for a finished bundle of recipe and checkpoint before it exports anything.
    "build": {
        "backends",
        "bundle",
        "checkpoint",
        "estimate",
        "export",
        "graph",
        "parity",
        "recipe",
        "request",
        "specs",
        "target",
    },
    # What a build is asked for; nothing is exported or built to know whether it can be served.
    "request": {"backends", "checkpoint", "estimate", "parity", "recipe", "specs", "target"},
    # What `build` would do, without doing it.
    "forecast": {"build", "bundle", "estimate", "export", "parity", "request", "specs"},
    # Legal calls of an engine, and an archive of a part of its graph, for tools of others.
    "inputs": {"bundle", "export", "parity", "recipe", "runtime", "specs"},
    "repro": {
        "backends",
        "bundle",
        "checkpoint",
        "export",
        "graph",
        "inputs",
        "recipe",
        "runtime",
        "vision",
    },
    "export": {"recipe", "graph", "checkpoint", "specs", "lowering", "vision"},
    "runtime": {
        "bundle",
        "backends",
        "compiled",
        "recipe",
        "language",
        "checkpoint",
        "media",
        "specs",
        "vision",
    },
    "recipes": {"recipe", "language", "specs", "vision", "compiled", "checkpoint"},
    # Operators of the towers must be known before a program that holds them is loaded.
    # What each takes in memory and on disk lies beside what it can do.
    "backends": {"graph", "specs", "target", "lowering", "vision", "estimate"},
    # From a traced tower to operators that the ONNX target fuses.
    "lowering": {"graph", "specs", "vision"},
    # A graph names the checkpoint whose weights it holds.
    "graph": {"recipe", "checkpoint", "specs"},
    # A recipe's functions take a checkpoint; a checkpoint knows no recipe.
    "recipe": {"checkpoint", "language", "specs", "target"},
    # Which language model stands behind a tower, and what its prompts look like.
    "language": {"checkpoint", "specs"},
    "checkpoint": {"specs", "target"},
    "bundle": {"specs", "target"},
    "estimate": {"specs", "target"},
    "compiled": {"specs"},
    "vision": {"specs"},
    "media": {"specs"},
    "target": set(),
    "specs": set(),
    "errors": set(),
}

MAY_LOOK_AT_EVERYTHING = {"vlexport", "cli", "demo", "bench", "report"}

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
STANDARD_LIBRARY_ONLY = {"errors", "specs", "target"}


def _target_part(found: Import) -> str | None:
    top, _, rest = found.module.partition(".")
    if top != "vlexport":
        return None
    return rest.split(".")[0] or "vlexport"


def test_the_rules_allow_no_circle():
    below = {part: others for part, others in ALLOWED.items() if part not in MAY_LOOK_AT_EVERYTHING}
    assert list(TopologicalSorter(below).static_order())


@pytest.mark.parametrize("path", library_files(), ids=relative)
def test_a_part_imports_only_what_it_may(path):
    part = part_of(path)
    assert part in ALLOWED, f"part '{part}' is new: say in ALLOWED what it may import, and who may import it"
    allowed = ALLOWED[part] | EVERYONE_MAY | {part}
    refused = [str(found) for found in imports_of(path) if _target_part(found) not in {None, *allowed}]
    assert refused == []


@pytest.mark.parametrize(
    "path", [path for path in library_files() if part_of(path) == "recipes"], ids=relative
)
def test_a_recipe_imports_no_other_recipe(path):
    assert [str(found) for found in imports_of(path) if _target_part(found) == "recipes"] == []


@pytest.mark.parametrize(
    "path", [path for path in library_files() if part_of(path) == "backends"], ids=relative
)
def test_a_backend_imports_no_other_backend(path):
    inside = [found for found in imports_of(path) if found.module.startswith("vlexport.backends.")]
    assert [str(found) for found in inside if not found.module.split(".")[2].startswith("_")] == []


@pytest.mark.parametrize("path", library_files(), ids=relative)
def test_an_optional_library_is_imported_in_its_own_place_only(path):
    refused = [
        str(found)
        for found in imports_of(path)
        if not relative(path).startswith(HOMES.get(found.module.split(".")[0], relative(path)))
    ]
    assert refused == []


@pytest.mark.parametrize(
    "path", [path for path in library_files() if part_of(path) in STANDARD_LIBRARY_ONLY], ids=relative
)
def test_the_lowest_parts_need_the_standard_library_only(path):
    tops = {found.module.split(".")[0]: str(found) for found in imports_of(path) if not found.only_types}
    assert [text for top, text in tops.items() if top not in {*sys.stdlib_module_names, "vlexport"}] == []
