"""The reader of imports sees what it is meant to see."""

from tests.repo.tree import imports_of

WAYS = {
    "import vlexport.specs": ["vlexport.specs"],
    "from vlexport.specs import Range": ["vlexport.specs"],
    "from vlexport import errors, specs": ["vlexport.errors", "vlexport.specs"],
    "from vlexport import export": ["vlexport"],
    "from vlexport.vision import grid, Tower": ["vlexport.vision", "vlexport.vision.grid"],
    "def late():\n    import onnxruntime as ort": ["onnxruntime"],
    "try:\n    from rich import print\nexcept ImportError:\n    pass": ["rich"],
}


def test_an_import_is_found_wherever_it_stands(tmp_path):
    path, found = tmp_path / "some.py", {}
    for code in WAYS:
        path.write_text(code, encoding="utf-8")
        found[code] = [each.module for each in imports_of(path)]
    assert found == WAYS


def test_an_import_for_types_is_told_apart(tmp_path):
    path = tmp_path / "some.py"
    code = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\nelse:\n    import numpy\n"
    path.write_text(code, encoding="utf-8")
    assert {found.module: found.only_types for found in imports_of(path)} == {
        "typing": False,
        "torch": True,
        "numpy": False,
    }
