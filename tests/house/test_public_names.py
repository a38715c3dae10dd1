"""What `vlexport` offers, pinned: a name that goes is a deprecation, a name that comes is a promise."""

import importlib.util
import subprocess
import sys

import pytest

import vlexport

PUBLIC = {
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


def test_the_public_names_are_these_and_no_others():
    assert sorted(dir(vlexport)) == sorted([*PUBLIC, "__version__"])


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_name_is_what_its_module_defines(name):
    module = importlib.import_module(PUBLIC[name])
    assert getattr(vlexport, name) is getattr(module, name)


@pytest.mark.parametrize("name", ["export", "build"])
def test_a_function_keeps_its_name_after_the_module_of_the_same_name_is_loaded(name):
    code = f"import sys, vlexport.{name}; assert vlexport.{name} is sys.modules['vlexport.{name}'].{name}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(AttributeError, match=r"vlexport has no 'exprot'\. Public names: Bundle, .*load"):
        vlexport.exprot  # noqa: B018
