"""From a bundle on disk to an engine that runs: fit, recipe and verdict first, the library last."""

from __future__ import annotations

from typing import Any

from vlexport.backends import Backend, Engine, EngineSpec, Options, backend_names, find_backend
from vlexport.bundle import Bundle
from vlexport.errors import MisfitError, ParityError
from vlexport.recipe import Recipe, find_recipe, list_recipes


def open_engine(bundle: Bundle, *, allow_failed: bool = False, options: Options | None = None) -> Engine:
    """Load the engine of a verified bundle; misfits and failed checks are refused first."""
    manifest = bundle.manifest
    backend = backend_of(bundle)
    if manifest.parity.status == "not_run" and not allow_failed:
        raise ParityError(
            f"{bundle.path}: its accuracy check says 'not_run', 'passed' expected: it was built where it "
            f"could not run. `vlexport parity {bundle.path}` checks it; --allow-failed runs it unchecked."
        )
    if manifest.parity.status != "passed" and not allow_failed:
        raise ParityError(
            f"{bundle.path}: its accuracy check says '{manifest.parity.status}', 'passed' expected. "
            "Build it again, or pass --allow-failed to run it all the same."
        )
    spec = EngineSpec(inputs=manifest.inputs, outputs=manifest.outputs, profile=manifest.profile)
    settings = options or Options()
    return Engine(backend.open(bundle, spec, settings), spec)


def require_fit(bundle: Bundle, recipe: str | None = None) -> None:
    """Refuse what this machine would not run, with a `MisfitError`; nothing of the bundle is loaded."""
    backend_of(bundle)
    recipe_of(bundle, recipe)


def backend_of(bundle: Bundle) -> Backend:
    """The backend that runs the bundle, when it is here and in the version that the bundle was built with."""
    name = bundle.manifest.target.backend
    if name not in backend_names():
        raise MisfitError(
            f"{bundle.path}: built for backend '{name}', which this vlexport does not have. "
            f"It has: {', '.join(backend_names())}. Update vlexport, or build for one of these."
        )
    backend = find_backend(name)
    reason = backend.missing()
    if reason is not None:
        raise MisfitError(f"{bundle.path}: built for backend '{name}', which cannot be used here: {reason}")
    bundle.require_fit(backend.target())
    return backend


def recipe_of(bundle: Bundle, recipe: str | None = None) -> Recipe[Any]:
    """The recipe that made the bundle, in the version that made it; a private one is named by its file."""
    made = bundle.manifest.recipe
    # A name in a manifest is never taken for the path of a program.
    if recipe is None and made.name not in {card.path.stem for card in list_recipes()}:
        raise MisfitError(
            f"{bundle.path}: built by recipe '{made.name}', which is not here. "
            "If it is a private one, pass its file with --recipe."
        )
    found = find_recipe(recipe or made.name)
    if found.digest != made.digest:
        raise MisfitError(
            f"{bundle.path}: recipe '{made.name}' has changed since the build "
            f"({made.digest[:12]} then, {found.digest[:12]} now), so inputs may not fit the engine. "
            f"Build again: {bundle.rebuild_command()}"
        )
    return found
