"""Digests of sources with their imports: all that takes part counts, and nothing else."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport._build import sources
from vlexport._build.sources import MATHEMATICS
from vlexport.recipe import list_recipes

ROOT = Path(sources.__file__).parents[1]
# The others' modules are mostly those of these two.
QUICK = ("generic", "qwen3_vl")
SHIPPED = {card.path.stem: card.path.read_bytes() for card in list_recipes()}


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A copy of the package whose files a test may change."""
    copy = tmp_path / "vlexport"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(sources, "__file__", str(copy / "_build" / "sources.py"))
    return copy


def digest(recipe: str) -> str:
    return sources.digest_with_imports(SHIPPED[recipe], MATHEMATICS)


def test_a_file_that_a_recipe_does_not_import_leaves_its_digest(tree):
    before = {recipe: digest(recipe) for recipe in SHIPPED}
    (tree / "vision" / "of_another_family.py").write_text("ANSWER = 42\n", encoding="utf-8")
    (tree / "cli" / "run.py").write_text("", encoding="utf-8")
    assert {recipe: digest(recipe) for recipe in SHIPPED} == before


@pytest.mark.seconds
@pytest.mark.parametrize(
    "recipe", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SHIPPED]
)
def test_every_module_that_a_recipe_loads_changes_its_digest(tree, recipe):
    """The modules are those that Python itself loads, in a process that loads nothing else."""
    program = f"import sys, vlexport.recipes.{recipe}; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    mathematics = ("vlexport.vision.", "vlexport.pruning.", "vlexport.positions.")
    loaded = [name for name in ran.stdout.split() if name.startswith(mathematics)]
    assert len(loaded) >= 5
    before = digest(recipe)
    for name in loaded:
        folder = tree.parent / name.replace(".", "/")
        path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        kept = path.read_bytes()
        path.write_bytes(kept + b"CHANGED = True\n")
        assert digest(recipe) != before, name
        path.write_bytes(kept)
    assert digest(recipe) == before


def test_every_way_to_write_an_import_counts(tree):
    package = tree / "vision" / "inner"
    package.mkdir()
    (package / "__init__.py").write_text("from .leaf import VALUE as VALUE\n", encoding="utf-8")
    (package / "leaf.py").write_text("VALUE = 1\n", encoding="utf-8")
    ways = (
        "import vlexport.vision.inner.leaf",
        "from vlexport.vision.inner import leaf",
        "from vlexport.vision.inner import VALUE",
        "from vlexport.vision import inner",
        "def late():\n    from vlexport.vision.inner.leaf import VALUE",
        "if True:\n    import vlexport.vision.inner as other",
        "WORKER = 'vlexport.vision.inner.leaf'",
    )
    for way in ways:
        assert "vlexport.vision.inner.leaf" in sources.imported(way.encode(), MATHEMATICS), way
    only_types = b"if TYPE_CHECKING:\n  import vlexport.vision.inner\nelse:\n  import vlexport.vision.rotary"
    assert set(sources.imported(only_types, MATHEMATICS)) == {"vlexport.vision", "vlexport.vision.rotary"}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_all_modules_that_a_build_loads_are_in_the_digest_of_its_builders(backend, tmp_path):
    checkpoint = write_tiny_qwen2_5_vl(tmp_path / "tiny", depth=1)
    program = f"""if True:
        import json, sys
        from vlexport._build.build import build_checkpoint
        from vlexport._build.request import request
        from vlexport.checkpoint import Checkpoint
        checkpoint = Checkpoint.open({str(checkpoint)!r})
        spec = request(checkpoint, backend={backend!r}, output_dir={str(tmp_path / "into")!r})
        build_checkpoint(spec).require_passed()
        print(json.dumps([name for name in sys.modules if name.startswith("vlexport")]))
    """
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = {name for name in json.loads(ran.stdout) if not name.startswith("vlexport.recipes")}
    recipe = sources.imported(SHIPPED["qwen2_5_vl"], MATHEMATICS)
    makers = sources.imported(f"import vlexport._build.build, vlexport.backends.{backend}".encode())
    assert loaded - {*makers, *recipe} == set()
    assert len(loaded) > 60
    for part in ("cli", "evaluate", "tools", "report.page", "report.compare", "backends.openvino"):
        assert f"vlexport.{part}" not in makers


def test_the_process_that_builds_tensorrt_engines_counts():
    makers = sources.imported(b"import vlexport._build.build, vlexport.backends.tensorrt_rtx")
    assert {"vlexport.backends._tensorrt.build_process", "vlexport.backends._tensorrt.network"} <= set(makers)
