"""`build` and `plan`: export, build, check and store an engine; or show what that takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vlexport import specs
from vlexport.cli.config import read_config, write_options
from vlexport.cli.options import (
    BUNDLES_DIR,
    FPS,
    JSON,
    argument,
    backends,
    dtype_name,
    grouped,
    media_files,
    option,
    pruning_methods,
    recipes,
)
from vlexport.cli.output import data_is_out, is_verbose, print_line, show, show_json, show_report, show_table
from vlexport.cli.progress import Overall, duration, phases
from vlexport.errors import ParityError

if TYPE_CHECKING:
    from vlexport._build.auto import Choice, Fleet
    from vlexport._build.build import Built
    from vlexport._build.plan import Forecast
    from vlexport._build.spec import BuildSpec
    from vlexport.backends import Progress
    from vlexport.bundle import Verdict
    from vlexport.parity.report import ParityReport
    from vlexport.parity.samples import Sample

CHOICE_COLUMNS = (
    "backend", "precision", "device", "ms", "relative L2", "tower ms", "tower relative L2", "not measured",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildOptions:
    """The options of a build."""

    checkpoint: str = argument("CHECKPOINT", "Local directory, or org/name[@revision] on the Hub.")
    lora: Path | None = option("DIR", "PEFT LoRA adapter to fold into the weights (default: none).")
    recipe: str | None = option(
        "RECIPE", "Recipe name, or file of a private one (default: by model type).", values=recipes
    )
    backend: str = option(
        "NAME",
        "Backend, or file of a private one (see `vlexport doctor`); auto: the fastest measured here, in any "
        "precision within --most-error.",
        default="onnxruntime",
        values=lambda: (specs.AUTO, *backends()),
        callback=specs.backend_name,
    )
    most_error: float | None = option(
        "X", "Relative L2 expected of the tower that auto may choose (default: 0.01).", "--most-error"
    )
    media: list[Path] = option(
        "FILE", "Image or video that auto measures on (repeatable; default: a random image).", default=[]
    )
    dtype: str = option(
        "DTYPE",
        "float32, bfloat16 or float16 (fp32, bf16, fp16).",
        default="float32",
        callback=dtype_name,
        values=specs.ENGINE_DTYPES,
    )
    input_dtype: str = option(
        "DTYPE",
        "Patches: float32, or uint8 that the engine normalizes.",
        default="float32",
        values=specs.INPUT_DTYPES,
    )
    quantize: str | None = option("SCHEME", "Quantize the weights of the blocks: int8.", values=("int8",))
    profile: str | None = option(
        "PROFILE",
        "Shape profile: any, thumbnail, image or video; several as image,video (default: the recipe's).",
        values=specs.PROFILES,
    )
    selector: str | None = option(
        "METHOD",
        "Token pruning method: evs, evs-snap, vidcom2 or divprune (default: the recipe's); with rules of "
        "--prune-before to compile, as evs,static,predicted.",
        values=pruning_methods,
    )
    targets: str | None = option("GPUS", "Compute capabilities to build for, e.g. sm89,sm120 (tensorrt_rtx).")
    device: str | None = option(
        "DEVICE", "Device of the engine: cpu or cuda (onnxruntime; default: cpu).", values=specs.DEVICES
    )
    min_pixels: int | None = option("N", "Minimum pixels of an image or frame (default: 1).")
    max_pixels: int | None = option("N", "Maximum pixels of an image or frame (default: 2048x2048).")
    max_images: int | None = option("N", "Maximum images per call (default: 4).")
    max_frames: int | None = option("N", "Maximum video frames per call (default: 0).")
    build_seconds: float | None = option("S", "Build timeout in seconds (0: no limit).")
    build_memory: float | None = option("GIB", "Build memory limit in GiB (0: no limit).")
    output_dir: Path = BUNDLES_DIR
    # Read before the others.
    config: Path | None = option(
        "FILE", "TOML file of these options; the command line wins.", callback=read_config, is_eager=True
    )
    write_config: Path | None = option(
        "FILE", "Write the given options to a TOML file for --config.", "--write-config", "--write"
    )

    def arguments(self, context: typer.Context) -> dict[str, Any]:
        if self.write_config is not None:
            write_options(context, self.write_config)
        names = {field.name for field in fields(self)} - {"config", "write_config"}
        source = context.get_parameter_source("dtype")
        is_default = source is not None and source.name == "DEFAULT"
        is_open = is_default and (self.backend == specs.AUTO or self.quantize is not None)
        return {
            **{name: getattr(self, name) for name in names},
            **({"dtype": None} if is_open else {}),
            "media": media_files(self.media),
        }


@grouped
def build(
    *,
    context: typer.Context,
    options: BuildOptions,
    name: str | None = option("NAME", "Name beside the bundle's own, a link; see `vlexport bundles`."),
    check: list[Path] = option(
        "FILE",
        "Image or video to compare at its own size too; folder or quoted glob (repeatable).",
        default=[],
    ),
    files: list[Path] = argument("[FILE]...", "More files of --check.", default=None),
    fps: float | None = FPS,
    as_json: bool = JSON,
) -> None:
    """Export, build, check and store an engine bundle.

    The last line of stdout is the path of the bundle. Files of --check are no part of it, and are compared
    where it is there already too; where one fails, nothing is stored. With --backend auto, backends and
    precisions are measured on a few blocks first, for minutes.
    """
    arguments, media = options.arguments(context), media_files([*check, *(files or [])], openable=True)
    from vlexport.bundle.store import check_tag, tag

    if name is not None:
        check_tag(options.output_dir, name)
    from vlexport._build.limits import needs_process
    from vlexport._build.request import request
    from vlexport._build.timings import Timings, expected_build, keep, recall

    arguments, choice = _settled(arguments, as_json=as_json, stderr=True)
    kind = ("build", arguments["backend"], arguments["quantize"] or arguments["dtype"])
    overall, weights, own = Overall(recall(*kind)), None, None
    with phases("build", overall) as progress:
        is_apart = needs_process(arguments)
        if media or not is_apart:
            spec = request(**arguments, progress=progress)
        if media:
            from vlexport.evaluate.own import fitting_samples

            samples = fitting_samples(spec, media, fps)
        if is_apart:
            from vlexport._build.build import build_limited

            built = build_limited(arguments, progress)
        else:
            weights = spec.scale.num_weights
            overall.expected = expected_build(*kind[1:], weights)[0].phases
            from vlexport._build.build import build_checkpoint  # torch too: the request is in order by now

            built = build_checkpoint(spec, progress)
        if media and built.is_good:
            own = _compared(built, spec, samples, lambda _, share: progress("check files", share))
    if weights is not None and not (built.cached or media) and "resume" not in (seconds := overall.finish()):
        for names in (kind, ("build",)):
            keep(Timings(phases=seconds, weights=weights), *names)
    _show(built, own, choice, as_json=as_json)
    with data_is_out():
        bundle = built.require_passed()
        if name is not None:
            print_line(f"named {tag(bundle.path, name)}")


def _compared(built: Built, spec: BuildSpec, samples: Sequence[Sample], progress: Progress) -> ParityReport:
    """Compare files with the stored engine; where one fails, remove what this build has stored."""
    from vlexport.bundle.store import remove_entry
    from vlexport.parity.check import check_own
    from vlexport.runtime.opening import open_engine

    with open_engine(built.bundle) as engine:
        report = check_own(engine, spec, samples, progress)
    if report.passed:
        return report
    path, bad = built.bundle.path, report.first_bad()
    if not built.cached:
        remove_entry(path.parent, path.name)
    show_report(report.brief(), stderr=True)
    kept = f"{path} was there before, and stays" if built.cached else "Nothing is stored"
    raise ParityError(
        f"files of --check: accuracy check '{report.status}', 'passed' expected: "
        f"{bad.told() if bad else 'it could not run'}. {kept}. Build float32, or leave the file out."
    )


def _settled(
    arguments: dict[str, Any], *, as_json: bool, stderr: bool = False, rate: float | None = None
) -> tuple[dict[str, Any], Choice | None]:
    """Return the arguments with the backend and precision that measurements choose, whose table is shown."""
    from vlexport._build.request import measured

    with phases("measure") as progress:
        arguments, choice = measured(arguments, progress, rate=rate)
    if choice is None:
        return arguments, None
    if not as_json:
        show_table(CHOICE_COLUMNS, rows_of(choice), stderr=stderr)
        print_line(
            f"{choice.patches} patches, {choice.blocks} of {choice.depth} blocks; the tower's are expected"
        )
    is_open = arguments["backend"] == specs.AUTO
    return {**arguments, **(choice.best.arguments() if is_open else {})}, choice


def rows_of(choice: Choice) -> list[tuple[str, ...]]:
    """Return a row for each backend and precision."""
    return [
        (
            candidate.backend,
            candidate.quantize or candidate.dtype or "",
            candidate.device or "",
            *(
                "" if value is None else f"{scale * value:{form}}"
                for scale, form, value in (
                    (1e3, ".1f", candidate.seconds),
                    (1, ".1e", candidate.error),
                    (1e3, ".0f", candidate.whole_seconds),
                    (1, ".1e", candidate.whole_error),
                )
            ),
            candidate.reason,
        )
        for candidate in choice.candidates
    ]


def _show(built: Built, own: ParityReport | None, choice: Choice | None, *, as_json: bool) -> None:
    parity, path = built.bundle.verdict, str(built.bundle.path)
    status = "failed" if not built.is_good else "cached" if built.cached else "built"
    if as_json:
        verdict = {"status": parity.status, "table": parity.table}
        files = {} if own is None else {"files": own.to_json()}
        show_json("build", {"bundle": path, "status": status, "parity": verdict, **files, **_json_of(choice)})
        return
    show_report(report_of(parity), stderr=True)
    if own is not None:
        from vlexport.evaluate.own import by_file

        lines = [f"{file}: {line}" for file, line in by_file(own).items()]
        show_report(own.table() if is_verbose() else "\n".join(lines), stderr=True)
    print_line("already built: nothing to do" if status == "cached" else status)
    if parity.status == "not_run" and built.is_good:
        print_line(
            "not checked: run `vlexport check --accuracy` on the target device before the bundle is used"
        )
    show(path)


def _json_of(choice: Choice | None) -> dict[str, object]:
    return {"choice": choice.to_json()} if choice else {}


def report_of(verdict: Verdict) -> str:
    """Return what a bundle's accuracy check found: a line, every row with `--verbose`."""
    from vlexport.parity.report import report_in

    report = report_in(verdict)
    if report is None:
        return verdict.status
    return report.table() if is_verbose() else report.brief()


@grouped
def plan(
    *,
    context: typer.Context,
    options: BuildOptions,
    rate: float | None = option(
        "N", "Images a second; shows the machines like this one that they take, measured for minutes."
    ),
    as_json: bool = JSON,
) -> None:
    """Estimate shapes, padding, disk, memory and time of a build.

    Also shows whether the bundle exists already. Nothing is built or written. With --backend auto, first the
    measurements that choose it.
    """
    arguments, choice = _settled(options.arguments(context), as_json=as_json, rate=rate)
    from vlexport._build.request import plan as planned_by

    planned, fleet = planned_by(**arguments), None
    if choice is not None and rate is not None:
        # Of a backend that is named, every device that it has is measured.
        places = (None, options.device or "cpu")
        named = (candidate for candidate in choice.candidates if candidate.device in places)
        fleet = choice.fleet(choice.best if options.backend == specs.AUTO else next(named), rate)
    if as_json:
        sized = {"fleet": fleet.to_json()} if fleet else {}
        show_json("plan", {**planned.to_json(), **_json_of(choice), **sized})
        return
    show_table(("per call", "smallest", "typical", "largest"), calls_of(planned))
    show_table(("build", ""), build_of(planned))
    if fleet:
        show_table((f"{fleet.rate:g} images a second", ""), fleet_of(fleet))


def calls_of(planned: Forecast) -> list[tuple[str, ...]]:
    """Return the rows that depend on the size of a call."""
    symbols = {symbol for spec in planned.inputs for symbol in spec.symbols()}
    ranges = {symbol: sizes for symbol, sizes in planned.profile.ranges.items() if symbol in symbols}
    memory = planned.needs.run_memory if planned.needs else (None, None, None)
    return [
        *((str(symbol), str(sizes.min), str(sizes.opt), str(sizes.max)) for symbol, sizes in ranges.items()),
        ("patches", *map(str, planned.patches)),
        ("memory", *map(format_bytes, memory)),
    ]


def build_of(planned: Forecast) -> list[tuple[str, str]]:
    """Return the rows that do not."""
    needs, device = planned.needs, planned.device
    measured = needs or device
    parts = ("tower", "connector", "language_model")
    modules = {name.replace("_", " "): getattr(planned.modules, name) for name in parts}
    gpu: dict[str, int | None] = {}
    if device:
        gpu = {"engine": device.engine, "GPU, weights": device.weights}
        gpu |= {f"GPU, largest call of {name}": size for name, size in device.calls.items()}
    rows = {
        **{spec.name: f"{spec.dtype} [{', '.join(map(str, spec.shape))}]" for spec in planned.inputs},
        **{f"modules, {part}": ", ".join(names) or "none" for part, names in modules.items()},
        "connector": f"rows of the tower to tokens: {planned.merges[0]} to {planned.merges[1]}",
        "adapter": f"{planned.adapter[0]} ({planned.adapter[1][:12]})" if planned.adapter else None,
        "stored weights": planned.quantised,
        "profile": planned.profile.name,
        "memory of build and check": format_bytes(needs.build_memory if needs else None),
        "disk": format_bytes(needs.disk if needs else None),
        "time": f"about {duration(planned.seconds[0])} ({planned.seconds[1]})",
        **{name: format_bytes(size) for name, size in gpu.items()},
        "attention padding, worst mix": ", ".join(
            f"{kind} {share:.0%}" for kind, share in planned.padding.items()
        ),
        "estimates measured on": measured.origin if measured else "unknown: this backend was not measured",
        "bundle": str(planned.path),
        "already built": "yes" if planned.cached else "no",
    }
    return [(name, text) for name, text in rows.items() if text is not None]


def fleet_of(fleet: Fleet) -> list[tuple[str, str]]:
    """Return the rows about machines for a rate."""
    return [
        ("of a machine like this one", f"{fleet.per_machine:.3g}"),
        ("machines", str(fleet.machines)),
        ("rows a second", f"{fleet.rows:,.0f}"),
    ]


def format_bytes(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else f"{num_bytes / 2**20:,.0f} MiB"
