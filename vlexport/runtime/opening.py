"""From a bundle on disk to an engine that runs: fit, recipe and verdict first, the library last."""

from __future__ import annotations

from typing import Any

from vlexport.backends import Engine, EngineSpec, Options, find_backend
from vlexport.bundle import Bundle
from vlexport.errors import MisfitError, ParityError, RequestError, UnsupportedError
from vlexport.recipe import Recipe, find_recipe


def open_engine(bundle: Bundle, *, allow_failed: bool = False, options: Options | None = None) -> Engine:
    """Load the engine of a verified bundle; misfits and failed checks are refused first."""
    manifest = bundle.manifest
    if manifest.parity.status != "passed" and not allow_failed:
        raise ParityError(
            f"{bundle.path}: its accuracy check says '{manifest.parity.status}', 'passed' expected. "
            "Build it again, or pass --allow-failed to run it all the same."
        )
    backend = find_backend(manifest.target.backend)
    reason = backend.missing()
    if reason is not None:
        raise UnsupportedError(f"backend '{backend.name}' cannot be used here: {reason}")
    bundle.require_fit(backend.target())
    spec = EngineSpec(inputs=manifest.inputs, outputs=manifest.outputs, profile=manifest.profile)
    settings = options or Options()
    return Engine(backend.open(bundle, spec, settings), spec)


def recipe_of(bundle: Bundle, recipe: str | None = None) -> Recipe[Any]:
    """The recipe that made the bundle, in the version that made it; a private one is named by its file."""
    made = bundle.manifest.recipe
    try:
        found = find_recipe(recipe or made.name)
    except RequestError as error:
        raise MisfitError(
            f"{bundle.path}: built by recipe '{made.name}', which is not here. "
            "If it is a private one, pass its file with --recipe."
        ) from error
    if found.digest != made.digest:
        raise MisfitError(
            f"{bundle.path}: recipe '{made.name}' has changed since the build "
            f"({made.digest[:12]} then, {found.digest[:12]} now), so inputs may not fit the engine. "
            f"Build again: {bundle.rebuild_command()}"
        )
    return found
