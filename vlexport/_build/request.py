"""Arguments of a build, resolved to a `BuildSpec`: files read, parts checked against each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

from vlexport._build.spec import BuildSpec
from vlexport.backends import Backend, BuildLimits, Capability, Progress, find_backend, log_progress, require
from vlexport.checkpoint import Adapter, Checkpoint
from vlexport.codec import checked, is_number
from vlexport.errors import InputError, RequestError, UnsupportedError, nearest
from vlexport.pruning.cells import RULES
from vlexport.recipe import Recipe, recipe_for
from vlexport.specs import (
    AUTO,
    PIXELS,
    BackendName,
    DeviceName,
    DtypeName,
    InputDtype,
    MediaBounds,
    MethodName,
    Precision,
    ProfileName,
    Scheme,
    ShapeProfile,
    dtype_name,
    union,
)

if TYPE_CHECKING:
    import torch

    from vlexport._build.plan import Forecast

P = ParamSpec("P")
# What measurements depend on.
MEASURED = (
    "dtype", "quantize", "input_dtype", "profile", "min_pixels", "max_pixels", "max_images", "max_frames",
    "lora", "recipe", "device", "most_error", "media",
)  # fmt: skip


def request(  # noqa: PLR0913  one argument per option of the command line
    checkpoint: Checkpoint | str | Path,
    backend: BackendName = "onnxruntime",
    *,
    lora: str | Path | None = None,
    recipe: str | None = None,
    dtype: DtypeName | torch.dtype | None = None,
    input_dtype: InputDtype = PIXELS,
    quantize: Scheme | None = None,
    profile: ProfileName | ShapeProfile | None = None,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    max_images: int | None = None,
    max_frames: int | None = None,
    fp32_layers: Mapping[str, str] | None = None,
    selector: MethodName | None = None,
    targets: str | Sequence[str] | None = None,
    device: DeviceName | None = None,
    build_seconds: float | None = None,
    build_memory: float | None = None,
    output_dir: str | Path = "engines",
    progress: Progress = log_progress,
) -> BuildSpec:
    """Return the spec of a build: the recipe serves the checkpoint, the backend precision and devices.

    input_dtype  of patches: `float32`, normalised, or `uint8`, which the engine normalises
    fp32_layers  parts of the tower that stay float32; None measures in float16 which ones have to
    """
    # Whatever needs no tower is refused first: recipes import torch.
    bounds = _bounds(profile, min_pixels, max_pixels, max_images, max_frames)
    engine, limits = find_backend(backend), BuildLimits.of(build_seconds, build_memory)
    targets = targets.split(",") if isinstance(targets, str) else targets or ()
    dtype = _own_dtype(engine, quantize) if dtype is None else dtype_name(dtype)
    capability = require(engine, dtype, quantize, input_dtype, device)
    engine.options(targets, (), limits)
    source = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint.open(checkpoint)
    source = source if lora is None else source.adapted(Adapter.open(lora))
    family = recipe_for(source, recipe)
    config = family.read_config(source, input_dtype)
    profiles = _profiles(family, config, profile if bounds is None else bounds)
    options = engine.options(targets, profiles, limits)
    options = replace(options, device=device) if device else options
    if fp32_layers is None and dtype == "float16":
        progress("measure ranges", 0.0)
        fp32_layers = _measured(family, source, engine.form, input_dtype)
    method, cells = chosen_selector(family, selector, takes_cells=family.packing(config).takes_cells)
    return BuildSpec(
        recipe=family,
        checkpoint=source,
        config=config,
        precision=_precision(engine, capability, fp32_layers),
        form=engine.form,
        profile=union(profiles),
        backend=engine,
        options=options,
        selector=method,
        cells=cells,
        tensors=family.stored_tensors(source, config),
        output_dir=Path(output_dir),
    )


def _own_dtype(engine: Backend, quantize: str | None) -> str:
    """Return float32, or the dtype that a backend has a scheme in."""
    schemes = {each.quantisation.name: each.dtype for each in engine.capabilities if each.quantisation}
    return schemes.get(quantize or "", "float32")


def _precision(engine: Backend, capability: Capability, fp32_layers: Mapping[str, str] | None) -> Precision:
    scheme = capability.quantisation and engine.scheme(capability.quantisation, engine.target())
    return Precision(dtype=capability.dtype, fp32_layers=fp32_layers or {}, quantisation=scheme)


def _forecasting(resolve: Callable[P, BuildSpec]) -> Callable[P, Forecast]:
    """Return `plan`, which takes the arguments that `resolve` takes."""

    def plan(*args: P.args, **named: P.kwargs) -> Forecast:
        """Estimate shapes, padding, disk, memory and time of a build, and tell whether it exists already.

        The arguments are those of `build`. Nothing is built or written.

            vlexport.plan("path/to/checkpoint", "openvino", max_pixels=448 * 448).cached
        """
        spec = resolve(*args, **named)
        # Imports torch; what was given is in order by now.
        from vlexport._build.plan import forecast

        return forecast(spec)

    plan.__signature__ = signature(resolve).replace(return_annotation="Forecast")  # type: ignore[attr-defined]
    return plan


plan = _forecasting(request)


def measured(
    arguments: Mapping[str, Any], progress: Progress = log_progress, *, rate: float | None = None
) -> tuple[dict[str, Any], Any]:
    """Return arguments of `request`, and the `Choice` of what they leave open, or None.

    They may have `most_error` and `media` too, which are for measurements alone. With a `rate` of images, a
    backend that is named is measured too.
    """
    if rate is not None and not (is_number(rate) and rate > 0):
        raise InputError(f"rate: {rate!r} given, a finite number of images a second above 0 expected.")
    of_request = {name: value for name, value in arguments.items() if name not in ("most_error", "media")}
    options = {name: value for name in MEASURED if (value := arguments.get(name)) not in (None, [])}
    backend = arguments["backend"]
    of_choice = ("most_error",) if rate is not None else ("most_error", "media")
    if backend != AUTO and (only := [name for name in of_choice if name in options]):
        raise RequestError(
            f"{' and '.join(only)} given with backend {backend}: nothing is chosen. Leave "
            f"{'them' if only[1:] else 'it'} out, or give backend {AUTO}."
        )
    if backend != AUTO and rate is None:
        return of_request, None
    if arguments.get("targets"):
        raise RequestError(f"targets given with backend {backend}: this machine is measured. Leave them out.")
    from vlexport import choose

    named = {} if backend == AUTO else {"backend": backend}
    return of_request, choose(arguments["checkpoint"], **named, **options, progress=progress)


def chosen_selector(
    recipe: Recipe[Any], names: str | None, *, takes_cells: bool
) -> tuple[str | None, tuple[str, ...]]:
    """Return the pruning method of a build, by default the recipe's, and rules for what the tower gets.

    names  of one method, of rules, or of both, as in `evs,static,predicted`
    """
    parts = names.split(",") if names else []
    cells = tuple(sorted({name for name in parts if name in RULES}))
    methods = [name for name in parts if name not in RULES]
    for name in cells:
        if not RULES[name].is_packaged:
            raise RequestError(
                f"selector: '{name}' given, which is not compiled: streams prune by it eagerly. Leave it out."
            )
    if cells and not takes_cells:
        raise UnsupportedError(
            f"towers of recipe '{recipe.name}' take whole items. Leave {', '.join(cells)} out of selector."
        )
    if recipe.pruning_rule is not None:
        from vlexport.pruning.methods import find_method

        if len(methods) > 1:
            raise RequestError(f"selector: {' and '.join(methods)} given; one pruning method is expected.")
        return find_method(methods[0] if methods else recipe.pruning_rule).name, cells
    if methods:
        raise UnsupportedError(
            f"recipe '{recipe.name}' has no spatial video tokens to prune. Leave out selector."
        )
    return None, cells


def _measured(recipe: Recipe[Any], checkpoint: Checkpoint, form: str, input_dtype: str) -> dict[str, str]:
    from vlexport._build.precision import measure_fp32_layers

    return measure_fp32_layers(recipe, checkpoint, form, input_dtype)


def _bounds(profile: object, *sizes: int | None) -> MediaBounds | None:
    checked("profile", profile, str | ShapeProfile | None)
    names = zip(MediaBounds.__slots__, sizes, strict=True)
    bounds = {name: size for name, size in names if size is not None}
    if bounds and profile is not None:
        raise RequestError(
            f"profile given together with {', '.join(bounds)}; expected a profile or bounds. Leave one of "
            "them out."
        )
    return MediaBounds(**bounds) if bounds else None


def _profiles(
    recipe: Recipe[Any], config: Any, name: str | ShapeProfile | MediaBounds | None
) -> list[ShapeProfile]:
    """Return the profiles of a name or of several, as in `image,video`; without any, the recipe's first."""
    if isinstance(name, MediaBounds):
        return [recipe.packing(config).profile(name.profile, name)]
    profiles = recipe.profiles(config)
    if isinstance(name, ShapeProfile):
        symbols = next(iter(profiles.values())).ranges.keys()
        if missing := sorted(map(str, symbols - name.ranges.keys())):
            raise InputError(
                f"profile '{name.name}': no ranges of {', '.join(missing)} given, a Range for each of "
                f"{', '.join(sorted(map(str, symbols)))} expected."
            )
        return [name]
    names = list(dict.fromkeys(name.split(","))) if name else [next(iter(profiles))]
    for part in names:
        if part not in profiles:
            raise UnsupportedError(
                f"recipe '{recipe.name}' has no profile '{part}'.{nearest(part, profiles)} It has: "
                f"{', '.join(sorted(profiles))}."
            )
    return [profiles[part] for part in names]
