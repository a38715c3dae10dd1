"""`build` and `plan`: export, build, check and store an engine; or show what that takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vlexport._build.timings import Timings, keep, recall
from vlexport.cli.config import read_config, write_options
from vlexport.cli.options import BACKEND, BUNDLES_DIR, JSON, dtype_name
from vlexport.cli.output import data_is_out, is_verbose, print_line, show, show_json, show_report, show_table
from vlexport.cli.progress import Overall, duration, phases
from vlexport.errors import RequestError
from vlexport.specs import MediaBounds

if TYPE_CHECKING:
    from vlexport._build.build import Built
    from vlexport._build.plan import Forecast
    from vlexport.bundle import Verdict


def with_build_options(run: Callable[[dict[str, Any], bool], None]) -> Callable[..., None]:
    """Make a command with the options of a build; `run` gets the arguments of `request`, and `--json`."""

    def command(
        context: typer.Context,
        checkpoint: str = typer.Argument(
            metavar="CHECKPOINT", help="Local directory, or org/name[@revision] on the Hub."
        ),
        lora: Path = typer.Option(
            None, metavar="DIR", help="PEFT LoRA adapter to fold into the weights (default: none)."
        ),
        recipe: str = typer.Option(
            None,
            metavar="RECIPE",
            help="Recipe name, or the file of a private recipe (default: by model type).",
        ),
        backend: str = BACKEND,
        dtype: str = typer.Option(
            "float32",
            metavar="DTYPE",
            callback=dtype_name,
            help="float32, bfloat16 or float16 (fp32, bf16, fp16).",
        ),
        input_dtype: str = typer.Option(
            "float32",
            "--input",
            metavar="DTYPE",
            help="Dtype of patches: float32 (normalized) or uint8 (normalized by the engine).",
        ),
        quantize: str = typer.Option(
            None, metavar="SCHEME", help="Quantize the weights of the blocks: int8."
        ),
        profile: str = typer.Option(
            None,
            metavar="PROFILE",
            help="Shape profile: any, thumbnail, image or video; several as image,video "
            "(default: the recipe's).",
        ),
        selector: str = typer.Option(
            None,
            metavar="METHOD",
            help="Video token pruning method: evs, evs-snap or vidcom2 (default: the recipe's).",
        ),
        targets: str = typer.Option(
            None, metavar="GPUS", help="Compute capabilities to build for, e.g. sm89,sm120 (tensorrt_rtx)."
        ),
        device: str = typer.Option(
            None, metavar="DEVICE", help="Device of the engine: cpu or cuda (onnxruntime; default: cpu)."
        ),
        min_pixels: int = typer.Option(
            None, metavar="N", help="Minimum pixels of an image or frame (default: 1)."
        ),
        max_pixels: int = typer.Option(
            None, metavar="N", help="Maximum pixels of an image or frame (default: 2048x2048)."
        ),
        max_images: int = typer.Option(None, metavar="N", help="Maximum images per call (default: 4)."),
        max_frames: int = typer.Option(None, metavar="N", help="Maximum video frames per call (default: 0)."),
        build_seconds: float = typer.Option(
            None, metavar="S", help="Build timeout in seconds (0: no limit)."
        ),
        build_memory: float = typer.Option(
            None, metavar="GIB", help="Build memory limit in GiB (0: no limit)."
        ),
        output_dir: Path = BUNDLES_DIR,
        config: Path = typer.Option(  # noqa: ARG001  read before the others
            None,
            metavar="FILE",
            callback=read_config,
            is_eager=True,
            help="TOML file of these options; those on the command line win.",
        ),
        write_config: Path | None = typer.Option(
            None,
            "--write-config",
            "--write",
            metavar="FILE",
            help="Write the given options to a TOML file for --config.",
        ),
        as_json: bool = JSON,
    ) -> None:
        from vlexport.backends import BuildLimits

        if write_config is not None:
            write_options(context, write_config)
        given: dict[str, float | None] = {"seconds": build_seconds, "gibibytes": build_memory}
        limits = {name: value for name, value in given.items() if value is not None}
        arguments = {
            "checkpoint": checkpoint,
            "lora": lora,
            "recipe": recipe,
            "backend": backend,
            "dtype": dtype,
            "input_dtype": input_dtype,
            "quantise": quantize,
            "profile": bounds(profile, (min_pixels, max_pixels, max_images, max_frames)),
            "selector": selector,
            "targets": targets.split(",") if targets else (),
            "device": device,
            "limits": BuildLimits(**limits) if limits else None,
            "into": output_dir,
        }
        run(arguments, as_json)

    command.__name__, command.__doc__ = run.__name__, run.__doc__
    return command


@with_build_options
def build(arguments: dict[str, Any], as_json: bool) -> None:
    """Export, build, check and store an engine bundle.

    The last line of stdout is the path of the bundle.
    """
    from vlexport._build.limits import needs_process
    from vlexport._build.request import request

    kind = ("build", arguments["backend"], arguments["dtype"])
    overall = Overall(recall(*kind))
    weights = None
    with phases("build", overall) as progress:
        if needs_process(arguments["backend"], arguments["limits"]):
            from vlexport._build.build import build_limited

            built = build_limited(arguments, progress)
        else:
            spec = request(**arguments, progress=progress)
            # Imports torch; what was given is in order by now.
            from vlexport._build.build import build_checkpoint

            built, weights = build_checkpoint(spec, progress), spec.scale.num_weights
    if weights is not None and not built.cached and "resume" not in (seconds := overall.finish()):
        keep(Timings(phases=seconds, weights=weights), *kind)
    _show(built, as_json=as_json)
    with data_is_out():
        built.require_passed()


def _show(built: Built, *, as_json: bool) -> None:
    """Print the verdict and the path."""
    parity, path = built.bundle.verdict, str(built.bundle.path)
    status = "failed" if not built.is_good else "cached" if built.cached else "built"
    if as_json:
        verdict = {"status": parity.status, "table": parity.table}
        show_json("build", {"bundle": path, "status": status, "parity": verdict})
    else:
        show_report(report_of(parity), stderr=True)
        print_line("already built: nothing to do" if status == "cached" else status)
        if parity.status == "not_run" and built.is_good:
            print_line("not checked: run `vlexport parity` on the target device before the bundle is used")
        show(path)


def bounds(
    name: str | None, limits: tuple[int | None, int | None, int | None, int | None]
) -> str | MediaBounds | None:
    """Return the profile's name or custom bounds; refuse both at once."""
    if all(limit is None for limit in limits):
        return name
    if name is not None:
        raise RequestError(
            "--profile given together with --min-pixels, --max-pixels, --max-images or --max-frames; "
            "expected a profile or bounds. Leave one of them out."
        )
    names = ("min_pixels", "max_pixels", "max_images", "max_frames")
    given = {name: limit for name, limit in zip(names, limits, strict=True) if limit is not None}
    return MediaBounds(**given)


def report_of(verdict: Verdict) -> str:
    """Return what a bundle's accuracy check found: a line, every row with `--verbose`."""
    from vlexport.parity.report import report_in

    report = report_in(verdict)
    if report is None:
        return verdict.status
    return report.table() if is_verbose() else report.brief()


@with_build_options
def plan(arguments: dict[str, Any], as_json: bool) -> None:
    """Estimate shapes, padding, disk, memory and time of a build.

    Also shows whether the bundle exists already. Nothing is built or written.
    """
    from vlexport._build.request import request

    spec = request(**arguments)
    from vlexport._build.plan import forecast

    found = forecast(spec)
    if as_json:
        show_json("plan", found.to_json())
        return
    show_table(("per call", "smallest", "typical", "largest"), calls_of(found))
    show_table(("build", ""), build_of(found))


def calls_of(found: Forecast) -> list[tuple[str, str, str, str]]:
    """Return the rows that depend on the size of a call."""
    used = {symbol for spec in found.inputs for symbol in spec.symbols()}
    ranges = {symbol: known for symbol, known in found.profile.ranges.items() if symbol in used}
    low, usual, high = found.needs.run_memory if found.needs else (None, None, None)
    return [
        *((str(symbol), str(r.min), str(r.opt), str(r.max)) for symbol, r in ranges.items()),
        ("patches", str(found.patches[0]), str(found.patches[1]), str(found.patches[2])),
        ("memory", format_bytes(low), format_bytes(usual), format_bytes(high)),
    ]


def build_of(found: Forecast) -> list[tuple[str, str]]:
    """Return the rows that do not."""
    needs = found.needs
    worst = ", ".join(f"{kind} {share:.0%}" for kind, share in found.padding.items())
    modules = found.modules
    parts = {
        "tower": modules.tower,
        "connector": modules.connector,
        "language model": modules.language_model,
    }
    shapes = [(spec.name, f"{spec.dtype} [{', '.join(map(str, spec.shape))}]") for spec in found.inputs]
    return [
        *shapes,
        *((f"modules, {part}", ", ".join(names) or "none") for part, names in parts.items()),
        ("connector", f"rows of the tower to tokens: {found.merges[0]} to {found.merges[1]}"),
        *([("adapter", f"{found.adapter[0]} ({found.adapter[1][:12]})")] if found.adapter else []),
        *([("stored weights", found.quantised)] if found.quantised else []),
        ("profile", found.profile.name),
        ("memory of build and check", format_bytes(needs.build_memory if needs else None)),
        ("disk", format_bytes(needs.disk if needs else None)),
        ("time", f"about {duration(found.seconds[0])} ({found.seconds[1]})"),
        *device_of(found),
        ("attention padding, worst mix", worst),
        ("estimates measured on", _origin(found)),
        ("bundle", str(found.path)),
        ("already built", "yes" if found.cached else "no"),
    ]


def device_of(found: Forecast) -> list[tuple[str, str]]:
    """Return the memory of the GPU that runs the engine, for backends that build for one."""
    if found.device is None:
        return []
    sizes = {
        "engine": found.device.engine,
        "GPU, weights": found.device.weights,
        **{f"GPU, largest call of {name}": size for name, size in found.device.calls.items()},
    }
    return [(name, format_bytes(size)) for name, size in sizes.items()]


def _origin(found: Forecast) -> str:
    known = found.needs or found.device
    return known.origin if known else "unknown: this backend was not measured"


def format_bytes(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else f"{num_bytes / 2**20:,.0f} MiB"
