"""The wheel and the editable install carry the library and its recipes alike."""

import ast
import importlib.util
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests import lock
from tests.repo.tree import ROOT, library_files, relative


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy, so that the checkout stays clean."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("vlexport", "recipes", "benchmarks"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path_factory.mktemp("wheel")
    words = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", out, source]
    subprocess.run([sys.executable, *words], check=True, stdin=subprocess.DEVNULL)
    return next(out.glob("*.whl"))


@pytest.mark.seconds
def test_the_wheel_holds_every_file_and_finds_its_recipes_without_the_checkout(wheel, tmp_path):
    data = [
        "recipes/README.md",
        "recipes/generic.json",
        "recipes/vllm.json",
        "vlexport/tools/tested.txt",
        *(relative(path) for path in ROOT.glob("recipes/demo/trained/*/*")),
    ]
    files = [*(relative(path) for path in library_files()), "vlexport/py.typed", *data]
    expected = {name.replace("recipes/", "vlexport/recipes/", 1) for name in files}
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert found == expected
    words = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path / "site", wheel]
    subprocess.run([sys.executable, *words], check=True)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
        "import vlexport, vlexport.recipes\n"
        "from vlexport.recipe import list_recipes\n"
        "print(vlexport.recipes.__path__[0])\n"
        "print(' '.join(card.name for card in list_recipes()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    place, names = done.stdout.splitlines()
    assert place == str(tmp_path / "site" / "vlexport" / "recipes")
    assert names.split() == sorted(path.stem for path in ROOT.glob("recipes/[!_]*.py"))


def test_the_environment_that_runs_the_tests_finds_the_recipes_and_every_folder_is_a_package():
    spec = importlib.util.find_spec("vlexport.recipes")
    assert spec is not None
    assert list(spec.submodule_search_locations or ()) == [str(ROOT / "recipes")]
    folders = {path.parent for path in library_files()}
    assert [relative(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


# Distributions by their modules, where the names differ.
DISTRIBUTIONS = {
    "PIL": "pillow", "google": "protobuf", "onnx_ir": "onnx-ir", "onnxruntime": "onnxruntime-gpu",
    "tensorrt_rtx": "tensorrt-rtx", "torch_tensorrt": "torch-tensorrt",
}  # fmt: skip


def test_every_library_that_is_imported_is_a_dependency():
    found: dict[str, str] = {}
    for path in library_files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found |= {name.partition(".")[0]: relative(path) for name in names}
    # Of type checkers alone.
    ours = {"vlexport", "_typeshed", *sys.stdlib_module_names}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [
        text for name, texts in project["optional-dependencies"].items() if name != "dev" for text in texts
    ]
    declared = {Requirement(text).name for text in (*project["dependencies"], *extras)}
    imported = {name: path for name, path in found.items() if name not in ours}
    assert {"torch", "google", "jinja2"} <= set(imported)
    missing = {n: path for n, path in imported.items() if DISTRIBUTIONS.get(n, n) not in declared}
    assert missing == {}


def test_the_tested_versions_that_doctor_reads_are_the_pins_of_the_tests():
    assert (ROOT / "vlexport" / "tools" / "tested.txt").read_text(encoding="utf-8") == lock.tested()


def test_floors_are_the_versions_of_the_oldest_environment_but_for_torch():
    """`make test-oldest` installs these; torch is the exception that its file names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [
        Requirement(text)
        for text in (*project["dependencies"], *project["optional-dependencies"]["openvino"])
    ]
    floors = {
        each.name: [known.version for known in each.specifier if known.operator == ">="] for each in wanted
    }
    text = (ROOT / "tests/constraints-oldest.txt").read_text(encoding="utf-8")
    tested = dict(line.split("==") for line in text.splitlines() if not line.startswith("#"))
    assert {name for name, floor in floors.items() if not floor} == set()
    same = {name for name, (floor,) in floors.items() if Version(floor) == Version(tested.get(name, "0"))}
    assert set(floors) - same == {"torch", "onnxruntime"}
    assert floors["onnxruntime"] == floors["onnxruntime-gpu"]
