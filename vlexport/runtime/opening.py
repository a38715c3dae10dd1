"""From a bundle on disk to an engine that runs: fit, recipe and verdict first, the library last."""

from __future__ import annotations

import shlex
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from vlexport.backends import (
    Backend,
    Engine,
    EngineSpec,
    Options,
    backend_names,
    find_backend,
    require,
)
from vlexport.bundle import Bundle, Manifest
from vlexport.bundle.trust import Programs
from vlexport.checkpoint import Adapter, Checkpoint
from vlexport.errors import (
    UNEXPECTED,
    BundleError,
    CheckpointError,
    InputError,
    LimitError,
    MisfitError,
    ParityError,
    RequestError,
)
from vlexport.recipe import Recipe, find_recipe, list_recipes
from vlexport.specs import Precision
from vlexport.target import Target, fit

# Of a setting; pixels of a whole video are the largest.
MAX_NUMBER = 2**40


def checkpoint_of(bundle: Bundle, against: str | None = None, lora: str | Path | None = None) -> Checkpoint:
    """Return the checkpoint that the bundle was built from, with the adapter that was folded into it.

    against  another checkpoint, which is read without that adapter
    lora     where the adapter is now; with another checkpoint, one for that
    """
    if against is not None:
        return Checkpoint.open(against, lora=lora)
    origin = bundle.manifest.checkpoint
    opened = Checkpoint.open(origin.place)
    if origin.adapter is None and lora is None:
        return opened
    if origin.adapter is None:
        raise RequestError(
            f"lora {lora} given, and {bundle.path} was built without an adapter. Leave lora out, or "
            f"build with it: {bundle.rebuild_command()} --lora {shlex.quote(str(lora))}"
        )
    place = lora or origin.adapter.source
    try:
        adapter = Adapter.open(place)
    except CheckpointError as error:
        raise CheckpointError(
            f"{bundle.path} was built with the adapter {origin.adapter.source} "
            f"({origin.adapter.digest[:12]}), which cannot be read at {place}. Pass the folder where it is "
            f"now as lora. {error}"
        ) from error
    if adapter.digest != origin.adapter.digest:
        raise CheckpointError(
            f"adapter {place} has digest {adapter.digest[:12]}, and {bundle.path} was built with "
            f"{origin.adapter.digest[:12]}: its files have changed. Pass the adapter of the build as "
            f"lora, or build again: {bundle.rebuild_command()}"
        )
    return opened.adapted(adapter)


def require_usable(bundle: Bundle, *, allow_failed: bool = False, unproven: bool = False) -> Backend:
    """Return the backend of a bundle; refuse misfits and failed checks, from the manifest alone.

    unproven  a newer library that has not been checked is none, as the bundle's proof follows
    """
    backend = backend_of(bundle, unchecked=allow_failed or unproven)
    if bundle.verdict.status != "passed" and not allow_failed:
        remedy = (
            f". `{bundle.command('check', '--accuracy', '-v')}` shows why; --allow-failed "
            "(allow_failed) runs it all the same."
        )
        if bundle.verdict.status == "not_run":
            remedy = (
                f": it was built where it could not run. `{bundle.command('check', '--accuracy')}` checks "
                "it; --allow-failed (allow_failed) runs it unchecked."
            )
        raise ParityError(
            f"{bundle.path}: its accuracy check is '{bundle.verdict.status}', 'passed' expected{remedy}"
        )
    return backend


def open_engine(
    bundle: Bundle, *, allow_failed: bool = False, options: Options | None = None, unproven: bool = False
) -> Engine:
    """Load the engine of a verified bundle that is usable here."""
    manifest = bundle.manifest
    backend = require_usable(bundle, allow_failed=allow_failed, unproven=unproven)
    spec = EngineSpec(inputs=manifest.inputs, outputs=manifest.outputs, profile=manifest.profile)
    settings, kind = options or Options(), "cpu" if manifest.target.device == "cpu" else "cuda"
    if settings.kind not in (None, kind):
        raise InputError(
            f"{bundle.path}: device '{settings.device}' given, and the engine was built and checked for "
            f"'{manifest.target.device}'. Leave it out, or build for the other device."
        )
    chosen, index = replace(settings, device=kind), settings.index
    if index is None:
        return Engine(backend.open(bundle, spec, chosen), spec)
    import torch

    count = 0 if kind == "cpu" else torch.cuda.device_count()
    if index >= count:
        raise InputError(
            f"{bundle.path}: device {settings.device} given, one of {count} GPUs expected for an engine of "
            f"'{manifest.target.device}'. Pass a smaller index, or none."
        )
    with torch.cuda.device(index):
        return Engine(backend.open(bundle, spec, chosen), spec, device=index)


def precision_of(manifest: Manifest) -> Precision:
    """Return dtypes, and the scheme of integers as the backend that built the bundle rounds."""
    stored = manifest.precision
    device = "cuda" if "device" in manifest.options else None
    backend = find_backend(manifest.target.backend)
    capability = require(backend, stored.dtype, stored.quantisation, device=device)
    scheme = capability.quantisation and backend.scheme(capability.quantisation, manifest.target)
    return Precision(dtype=stored.dtype, fp32_layers=stored.fp32_layers, quantisation=scheme)


def config_of(bundle: Bundle, recipe: Recipe[Any]) -> Any:
    """Return the settings that inputs are prepared by; refused where the engine's inputs contradict them."""
    manifest = bundle.manifest
    try:
        config = recipe.parse_config(manifest.preprocessing)
        _check_sizes(config, "preprocessing")
        axes = recipe.axes(config, manifest.attention_form)
        rows = {"patches": {1: recipe.row_width(config)}}
        if "patches" not in {spec.name for spec in manifest.inputs}:
            raise InputError("no input 'patches' found.")
        if manifest.input_dtype != recipe.input_dtype(config):
            raise InputError(f"patches are not {recipe.input_dtype(config)}, as these settings give them.")
        for spec in (*manifest.inputs, *manifest.outputs):
            expected = {**axes.get(spec.name, {}), **rows.get(spec.name, {})}
            if any(spec.shape[axis] != dim for axis, dim in expected.items()):
                raise InputError(f"{spec.name} has another shape than these settings give it.")
        recipe.profiles(config)
    except (*UNEXPECTED, InputError, LimitError) as error:
        words = " ".join(str(error).split())[:400]
        raise BundleError(
            f"{bundle.path}: manifest: preprocessing, inputs and recipe '{recipe.name}' contradict each "
            f"other ({type(error).__name__}: {words}). Build the bundle again or fetch an intact copy: "
            f"{bundle.rebuild_command()}"
        ) from error
    return config


def _check_sizes(config: Any, where: str) -> None:
    for setting in fields(config):
        value, path = getattr(config, setting.name), f"{where}.{setting.name}"
        if is_dataclass(value):
            _check_sizes(value, path)
        elif isinstance(value, int | float) and not isinstance(value, bool) and not 0 < value < MAX_NUMBER:
            raise InputError(f"{path}: {value} found; expected a number above 0 and below {MAX_NUMBER}.")


def require_fit(bundle: Bundle, recipe: str | None = None, *, unproven: bool = False) -> None:
    """Refuse what this machine would not run, with a `MisfitError`; nothing of the bundle is loaded."""
    backend_of(bundle, unchecked=unproven)
    config_of(bundle, recipe_of(bundle, recipe))


def stored_backend(bundle: Bundle) -> Backend:
    """Return the backend that built the bundle, a private one by the file that is remembered."""
    name = bundle.manifest.target.backend
    if name in backend_names():
        return find_backend(name)
    if (path := Programs.of().recall(bundle.digest, "backend")) is not None:
        return find_backend(str(path))
    raise MisfitError(
        f"{bundle.path}: built for backend '{name}', which this vlexport does not have. It has: "
        f"{', '.join(backend_names())}. Update vlexport, install the backend's package, or build for one of "
        "these."
    )


def backend_of(bundle: Bundle, *, unchecked: bool = False) -> Backend:
    """Return the backend for the bundle's version or a checked one; `unchecked`: any newer that reads it."""
    name, backend = bundle.manifest.target.backend, stored_backend(bundle)
    reason = backend.missing()
    if reason is not None:
        raise MisfitError(f"{bundle.path}: built for backend '{name}', which cannot be used here: {reason}")
    target = bundle.manifest.target
    here = backend.here(target)
    if not (backend.reads_older and _is_newer(here, target)):
        bundle.require_fit(here)
    elif not unchecked and here.tag not in bundle.newer:
        raise MisfitError(
            f"{bundle.path}: built with {name} {target.version}; {here.version} is here and reads its "
            f"format, and this bundle was not checked with it. Build again: {bundle.rebuild_command()}\n"
            f"Or let it prove itself once, and it opens: {bundle.command('check', '--run')}"
        )
    return backend


def _is_newer(here: Target, target: Target) -> bool:
    try:
        later = Version(here.version) > Version(target.version)
    except InvalidVersion:
        return False
    return later and fit(replace(target, version=here.version), here) is None


def recipe_of(bundle: Bundle, recipe: str | None = None) -> Recipe[Any]:
    """Return the recipe that made the bundle, in that version; a private one by its file, once given."""
    stored, programs = bundle.manifest.recipe, Programs.of()
    if recipe is None and (path := programs.recall(bundle.digest, "recipe")) is not None:
        recipe = str(path)
    # A name in a manifest is never taken for the path of a program.
    if recipe is None and stored.name not in {card.name for card in list_recipes()}:
        raise MisfitError(
            f"{bundle.path}: built by recipe '{stored.name}', which is not here. "
            "If it is a private one, pass its file as recipe."
        )
    chosen = find_recipe(recipe or stored.name)
    if chosen.digest != stored.digest:
        private = "" if recipe else "If a private recipe of this name built it, pass its file as recipe. "
        raise MisfitError(
            f"{bundle.path}: recipe '{recipe or stored.name}', or a module that it imports, has changed "
            f"since the build ({stored.digest[:12]} then, {chosen.digest[:12]} now): inputs may not fit the "
            f"engine. {private}Build again: {bundle.rebuild_command(recipe)}"
        )
    if chosen.file is not None:
        programs.remember(bundle.digest, "recipe", chosen.file)
    return chosen
