"""The source tree as data: files and their imports."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]

# The steps of a build lie in one folder, and others stand between them; what bundles of repositories look
# like is known above the package of bundles, and files of the user's cache below it.
PARTS_OF_THEIR_OWN = ("_build.", "bundle.hub", "bundle.user_folders", "parity.metrics")


@dataclass(frozen=True, kw_only=True)
class Import:
    """One imported module: `vlexport.x.y` or the top-level name of a library."""

    path: Path
    line: int
    module: str
    only_types: bool

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} imports {self.module}"


def script(name: str) -> ModuleType:
    """Load a Python file of the tree that is in no package."""
    spec = importlib.util.spec_from_file_location(Path(name).stem, ROOT / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def library_files() -> list[Path]:
    return sorted([*ROOT.glob("vlexport/**/*.py"), *ROOT.glob("recipes/**/*.py")])


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def part_of(path: Path) -> str:
    """`vlexport/runtime/decoder.py` is of `runtime`, a recipe of `recipes`; see `PARTS_OF_THEIR_OWN`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return part_of_module(".".join(parts if parts[0] == "vlexport" else ("vlexport", *parts)))


def part_of_module(name: str) -> str:
    """Return the part of a module of the library by its full name, `vlexport` for the package itself."""
    first, *rest = name.split(".")[1:] or [name]
    inside = f"{first}.{rest[0]}" if rest else first
    return inside if inside.startswith(PARTS_OF_THEIR_OWN) else first


def tracked_files() -> list[Path]:
    """Files that git holds, or every file of the library where there is no git."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    names = [name for name in listing.stdout.split("\0") if name]
    found = [ROOT / name for name in names if (ROOT / name).is_file()]
    return found or library_files()


def imports_of(path: Path) -> list[Import]:
    """Every import of a file at any depth, submodules named in full."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    type_lines = set(_type_checking_lines(tree))
    found = []
    for node in ast.walk(tree):
        for module in _modules(node):
            line = getattr(node, "lineno", 0)
            found.append(Import(path=path, line=line, module=module, only_types=line in type_lines))
    return found


@cache
def library_imports() -> tuple[Import, ...]:
    """Every import of the library; each file is parsed once."""
    return tuple(found for path in library_files() for found in imports_of(path))


def _modules(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.module is not None, "imports are absolute"
        names = [alias.name for alias in node.names]
        inside = [f"{node.module}.{name}" for name in names if _is_module(f"{node.module}.{name}")]
        if len(inside) < len(names):
            yield node.module
        yield from inside


def _is_module(name: str) -> bool:
    parts = name.split(".")
    if parts[0] != "vlexport":
        return False
    place = ROOT.joinpath(*parts)
    return place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()


def _type_checking_lines(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for inner in node.body:
                yield from range(inner.lineno, (inner.end_lineno or inner.lineno) + 1)
