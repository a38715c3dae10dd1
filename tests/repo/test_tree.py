"""The reader of imports sees what it is meant to see."""

import pytest

from tests.repo.tree import imports_of


@pytest.mark.parametrize(
    ("code", "modules"),
    [
        ("import vlexport.graph", ["vlexport.graph"]),
        ("from vlexport.graph import Graph", ["vlexport.graph"]),
        ("from vlexport import errors, specs", ["vlexport.errors", "vlexport.specs"]),
        ("from vlexport import export", ["vlexport"]),
        ("from vlexport.vision import grid, Tower", ["vlexport.vision", "vlexport.vision.grid"]),
        ("def late():\n    import onnxruntime as ort", ["onnxruntime"]),
        ("try:\n    from rich import print\nexcept ImportError:\n    pass", ["rich"]),
    ],
)
def test_an_import_is_found_wherever_it_stands(tmp_path, code, modules):
    path = tmp_path / "some.py"
    path.write_text(code, encoding="utf-8")
    assert [found.module for found in imports_of(path)] == modules


def test_an_import_for_types_is_told_apart(tmp_path):
    path = tmp_path / "some.py"
    code = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\nelse:\n    import numpy\n"
    path.write_text(code, encoding="utf-8")
    assert {found.module: found.only_types for found in imports_of(path)} == {
        "typing": False,
        "torch": True,
        "numpy": False,
    }
