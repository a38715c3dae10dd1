"""`check`, `inspect`, `report`, `repro` and `trust`: commands about one bundle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from vlexport.cli.options import (
    ADAPTER,
    BUNDLE,
    FPS,
    JSON,
    RECIPE_FILE,
    argument,
    flag,
    media_files,
    new_file,
    option,
)
from vlexport.cli.output import data_is_out, is_verbose, print_line, show, show_json, show_report, show_table
from vlexport.cli.progress import Overall, phases
from vlexport.errors import RequestError

if TYPE_CHECKING:
    from vlexport.tools.check import Checked


def check(
    bundle: Path = BUNDLE,
    files: list[Path] = argument(
        "[FILE]...", "With --accuracy: images and videos of your own, a row for each.", default=None
    ),
    fps: float | None = FPS,
    run: bool = flag("--run", "Run the engine on calls that are stored with the reference's rows."),
    accuracy: bool = flag("--accuracy", "Repeat the accuracy check against the reference."),
    checkpoint: str | None = option(
        "CHECKPOINT", "Reference for --accuracy (default: the one the bundle was built from)."
    ),
    lora: Path | None = ADAPTER,
    layers: bool = flag("--layers", "With --accuracy: compare block by block; report the first bad one."),
    task: Path | None = option(
        "FILE", "With --accuracy: compare answers to questions (L4); JSON lines, see docs/parity.md."
    ),
    recipe: str | None = RECIPE_FILE,
    as_json: bool = JSON,
) -> None:
    """Check hashes, trust and machine; with options, accuracy too.

    The engine is loaded with --run, which needs no checkpoint, and with --accuracy. With a newer library
    that passes, the bundle opens from then on. The verdict of --accuracy is stored if the reference has the
    weights that the bundle was built from; with --task or files it is not, as they are a part of it.
    """
    checked = _checked(
        bundle,
        accuracy=accuracy,
        files=media_files(files or [], openable=True),
        fps=fps,
        run=run,
        checkpoint=checkpoint,
        lora=lora,
        layers=layers,
        task=task,
        recipe=recipe,
    )
    if as_json:
        show_json("check", checked.to_json())
    else:
        _show(checked)
    with data_is_out():
        checked.require_passed()


def _checked(bundle: Path, *, accuracy: bool, **options: Any) -> Checked:
    from vlexport.tools.check import check as library

    if not accuracy:
        return library(bundle, **options)
    from vlexport._build.timings import Timings, keep, recall
    from vlexport.bundle import Bundle

    manifest = Bundle.open(bundle, verify="lazy").manifest
    kind = ("parity", manifest.target.backend, manifest.precision.dtype)
    overall = Overall(recall(*kind))
    with phases("check", overall) as progress:
        progress("check", 0.0)
        checked = library(bundle, accuracy=True, progress=progress, **options)
    keep(Timings(phases=overall.finish()), *kind)
    return checked


def _show(checked: Checked) -> None:
    if checked.intact:
        manifest = checked.bundle.manifest
        show(f"{checked.bundle.path}: {len(manifest.files)} files intact, trusted, fits {manifest.target}")
        print_line(f"accuracy check: {checked.summary}")
    if checked.proof is not None:
        print_line(f"proof: passed: {checked.proof.summary()}")
    if (report := checked.report) is not None:
        show_report(report.table() if is_verbose() else report.brief())
        if report.layers is not None:
            show(report.layers.table())
        print_line(f"verdict not stored: {checked.unstored}" if checked.unstored else "verdict stored")


def inspect(
    source: str = argument("SOURCE", "Bundle, or a checkpoint: local directory or org/name[@revision]."),
    as_json: bool = JSON,
) -> None:
    """Describe a bundle or a checkpoint without loading it."""
    from vlexport.tools.inspect import inspect as described

    facts = described(source)
    if as_json:
        show_json("inspect", facts)
        return
    show_table(("field", "value"), [row for name, value in facts.items() for row in _rows_of(name, value)])
    if facts.get("problem"):
        print_line(f"problem: {facts['problem']}")


def _rows_of(name: str, value: object) -> Iterator[tuple[str, str]]:
    if _is_table(value):
        for index, row in enumerate(value):
            fields = dict(row) if isinstance(row, Mapping) else row
            label = fields.pop("name", index) if isinstance(fields, dict) else index
            yield from _rows_of(f"{name}.{label}", fields)
    elif isinstance(value, Mapping):
        nested = {
            key for key, item in value.items() if _is_table(item) or (isinstance(item, Mapping) and item)
        }
        plain = [f"{key}: {_words(item)}" for key, item in value.items() if item != "" and key not in nested]
        if plain or not value:
            yield name, ", ".join(plain) or "none"
        for key in filter(nested.__contains__, value):
            yield from _rows_of(f"{name}.{key}", value[key])
    else:
        yield name, _words(value)


def _is_table(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, list | tuple) and any(isinstance(row, Mapping) for row in value)


def _words(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_words, value))}]"
    if value is None or value == {}:
        return "none"
    return str(value)


def report(
    bundle: Path = BUNDLE,
    files: list[Path] = argument(
        "[FILE]...", "With --measure: images and videos of your own, to time and to prune.", default=None
    ),
    fps: float | None = FPS,
    measure: bool = flag("--measure", "Measure what the results given lack, or say what that needs."),
    checkpoint: str | None = option(
        "CHECKPOINT", "Reference and decoder for --measure (default: the one of the build)."
    ),
    recipe: str | None = RECIPE_FILE,
    output: Path = option(
        "FILE", "Page to write, *.html.", "--output", "--html", "-o", default=..., callback=new_file(".html")
    ),
    bench: list[Path] = option(
        "FILE", "Timings to show, of `bench --json` (repeatable: one for each size).", default=[]
    ),
    plan: Path | None = option("FILE", "Padding and memory to show, of `plan --json`."),
    sweep: Path | None = option("FILE", "Pruning sweep to show, of `sweep --json`."),
    overlay: Path | None = option("FILE", "Picture of kept tokens to show, of `run --overlay`."),
    as_json: bool = JSON,
) -> None:
    """Write a page about a bundle, one offline HTML file.

    It shows accuracy, drift by block, latency, padding and memory, pruning, origin and environment. Results
    come from the bundle, its accuracy check and the files given; --measure adds those that lack.
    """
    if Path("-") in (files or []):
        raise RequestError("- given; files that can be read again are expected. Name them.")
    media = [file for file in media_files(files or [], openable=True) if isinstance(file, Path)]
    from vlexport.backends import log_progress
    from vlexport.reports.results import report as library

    with phases("report") if measure else nullcontext(log_progress) as progress:
        written = library(
            bundle,
            output,
            media,
            fps=fps,
            measure=measure,
            checkpoint=checkpoint,
            recipe=recipe,
            bench=bench,
            plan=plan,
            sweep=sweep,
            overlay=overlay,
            progress=progress,
        )
    if as_json:
        show_json("report", written.to_json())
        return
    if written.unmeasured:
        print_line(written.unmeasured)
    show(str(written.out))


def repro(
    bundle: Path = BUNDLE,
    output: Path = option(
        "PATH",
        "Archive to write, *.zip; with --inputs-only the directory to create.",
        "--output",
        "-o",
        default=...,
    ),
    inputs_only: bool = flag("--inputs-only", "Write inputs alone, as raw files for trtexec and Polygraphy."),
    block: int = option("N", "Index of the block to keep.", default=0),
    whole: bool = flag("--whole", "Keep every block."),
    own_weights: bool = flag("--own-weights", "Include the checkpoint's weights (default: random weights)."),
    lora: Path | None = ADAPTER,
    recipe: str | None = RECIPE_FILE,
    as_json: bool = JSON,
) -> None:
    """Write a minimal archive for a bug report, or inputs alone.

    For ONNX Runtime, OpenVINO and TensorRT. It holds one block of the graph, a call that failed the accuracy
    check (else a sample), expected outputs, versions, and a script that runs it without vlexport. Inputs
    alone come with the flags of trtexec and a data loader script for Polygraphy.
    """
    from vlexport.bundle import Bundle

    opened = Bundle.open(bundle, verify="lazy")
    from vlexport.tools.repro import ReproOptions, export_inputs, write_repro

    if inputs_only:
        if whole or own_weights or block or lora:
            raise RequestError(
                "--inputs-only given with --block, --whole, --own-weights or --lora, which are about the "
                "graph of an archive. Leave them out."
            )
        cases = export_inputs(opened, output, recipe)
        facts: dict[str, object] = {
            "cases": {
                case.name: {name: list(tensor.shape) for name, tensor in case.inputs.items()}
                for case in cases
            }
        }
        lines = [f"{case.name}: profile {case.profile}" for case in cases]
    else:
        options = ReproOptions(block=block, whole=whole, own_weights=own_weights, lora=lora)
        names, size = write_repro(opened, output, options, recipe), output.stat().st_size
        facts, lines = {"bytes": size, "files": names}, [f"{len(names)} files, {size:,} bytes"]
    if as_json:
        show_json("repro", {"out": str(output), **facts})
        return
    for line in lines:
        print_line(line)
    show(str(output))


def trust(
    bundle: Path = BUNDLE,
    digest: str = argument(
        "DIGEST",
        "Digest that its builder published. The first 12 digits suffice against a mix-up; against a forger "
        "give all 64.",
    ),
    as_json: bool = JSON,
) -> None:
    """Approve a bundle from elsewhere by its digest.

    Every file is hashed first. The approval holds for every later command of this user.
    """
    from vlexport.bundle import Bundle

    opened = Bundle.open(bundle, trust=digest)
    if as_json:
        show_json("trust", {"bundle": str(bundle), "digest": opened.digest})
        return
    show(f"{bundle}: {len(opened.manifest.files)} files intact, digest {opened.digest} approved")
