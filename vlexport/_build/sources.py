"""Digests of Python sources with all that they import from vlexport, read from the text, never by running."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

# What recipes are written with: its source is a part of a recipe's digest where the recipe imports it.
MATHEMATICS = tuple(f"vlexport.{part}" for part in ("vision", "pruning", "positions", "recipes"))


def recipe_digest(name: str) -> str | None:
    """Return the digest of the shipped recipe of a name; None where there is none."""
    path = _path_of(f"vlexport.recipes.{name}") if name.isidentifier() else None
    return None if path is None else digest_with_imports(path.read_bytes(), MATHEMATICS)


def ships_backend(name: str) -> bool:
    """Return whether a backend of this name is a part of vlexport, and no private file."""
    return name.isidentifier() and _path_of(f"vlexport.backends.{name}") is not None


def digest_with_imports(source: bytes, within: tuple[str, ...] = ("vlexport",)) -> str:
    """Return the SHA-256 over a source and the modules that `imported` finds."""
    digest = hashlib.sha256(source)
    for name, content in sorted(imported(source, within).items()):
        digest.update(f"\n{name} {hashlib.sha256(content).hexdigest()}".encode())
    return digest.hexdigest()


def imported(source: bytes, within: tuple[str, ...] = ("vlexport",)) -> dict[str, bytes]:
    """Return name and source of every module that a source imports, directly or not, from these packages.

    Imports inside functions count, as do texts that spell a module's full name (that of a process to start);
    imports for types only do not. Names put together while a program runs, as in `import_module(f"...")`,
    cannot be seen: the caller has to name such modules in the source. `vlexport/__init__.py` counts and is
    not followed: it loads modules on request.
    """
    modules: dict[str, bytes] = {}
    inside = tuple(f"{package}." for package in within)
    waiting = set(_imports(source, ""))
    while waiting:
        name = waiting.pop()
        path = _path_of(name) if f"{name}.".startswith(inside) and name not in modules else None
        if path is not None:
            modules[name] = path.read_bytes()
            package = name if path.name == "__init__.py" else name.rpartition(".")[0]
            waiting |= _imports(modules[name], package) if name != "vlexport" else set()
    return modules


def _path_of(name: str) -> Path | None:
    top, *rest = name.split(".")
    folder = Path(__file__).parents[1]
    if rest[:1] == ["recipes"]:
        spec = importlib.util.find_spec(f"{top}.recipes")
        assert spec is not None
        assert spec.submodule_search_locations
        folder, rest = Path(next(iter(spec.submodule_search_locations))), rest[1:]
    place = folder.joinpath(*rest)
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)


@cache
def _imports(source: bytes, package: str) -> frozenset[str]:
    names = set()
    for name in _names(ast.parse(source), package):
        parts = name.split(".")
        names |= {".".join(parts[: end + 1]) for end in range(len(parts))}
    return frozenset(names)


def _names(tree: ast.Module, package: str) -> Iterator[str]:
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            relative = "." * node.level + (node.module or "")
            origin = importlib.util.resolve_name(relative, package) if node.level and package else node.module
            yield from (f"{origin}.{alias.name}" for alias in node.names) if origin else ()
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from [node.value] if all(map(str.isidentifier, node.value.split("."))) else []
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            waiting += node.orelse
            continue
        waiting += ast.iter_child_nodes(node)
