"""`verify`, `parity`, `inspect`, `repro`, `export-inputs`: commands about one bundle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import typer

from vlexport._build.timings import Timings, keep, recall
from vlexport.cli.options import ADAPTER, BUNDLE, JSON, RECIPE_FILE, TRUST
from vlexport.cli.output import data_is_out, is_verbose, print_line, show, show_json, show_report, show_table
from vlexport.cli.progress import Overall, phases
from vlexport.errors import ParityError, RequestError, ResourceError


def verify(
    bundle: Path = BUNDLE, trust: str = TRUST, recipe: str = RECIPE_FILE, as_json: bool = JSON
) -> None:
    """Check hashes, trust and compatibility with this machine.

    The engine is not loaded.
    """
    from vlexport.bundle import Bundle

    opened = Bundle.open(bundle, trust=trust)
    from vlexport.parity.report import summary_of
    from vlexport.runtime.opening import require_fit

    require_fit(opened, recipe)
    manifest, summary = opened.manifest, summary_of(opened.verdict)
    if as_json:
        files = {name: record.sha256 for name, record in manifest.files.items()}
        found = {"bundle": str(bundle), "digest": opened.digest, "target": manifest.target.tag}
        show_json("verify", {**found, "parity": opened.verdict.status, "summary": summary, "files": files})
    else:
        show(f"{bundle}: {len(manifest.files)} files intact, trusted, fits {manifest.target}")
        print_line(f"accuracy check: {summary}")


def parity(
    bundle: Path = BUNDLE,
    against: str = typer.Option(
        None, metavar="CHECKPOINT", help="Reference checkpoint (default: the one the bundle was built from)."
    ),
    lora: Path = ADAPTER,
    layers: bool = typer.Option(False, "--layers", help="Compare block by block; report the first bad one."),
    task: Path | None = typer.Option(
        None, metavar="FILE", help="Compare answers to questions too (L4); JSON lines, see docs/parity.md."
    ),
    decoder: str | None = typer.Option(
        None, metavar="CHECKPOINT", help="Decoder for --task (default: the reference's own)."
    ),
    trust: str = TRUST,
    recipe: str = RECIPE_FILE,
    as_json: bool = JSON,
) -> None:
    """Repeat the accuracy check against the reference.

    The verdict is stored if the reference has the weights that the bundle was built from; with --task it is
    not, since answers to questions of one's own are a part of it.
    """
    from vlexport.bundle import Bundle
    from vlexport.runtime.opening import checkpoint_of

    if decoder is not None and task is None:
        raise RequestError("--decoder given without --task, whose questions it answers. Add --task FILE.")
    opened = Bundle.open(bundle, trust=trust, verify="lazy")
    source = checkpoint_of(opened, against, lora)
    from vlexport._build.build import store_verdict
    from vlexport.evaluate.answers import check

    kind = ("parity", opened.manifest.target.backend, opened.manifest.precision.dtype)
    overall = Overall(recall(*kind))
    with phases("parity", overall) as progress:
        progress("check", 0.0)
        chosen = source if against else None
        report = check(
            opened,
            chosen,
            layers=layers,
            task=task,
            decoder=decoder,
            recipe=recipe,
            lora=lora,
            progress=progress,
        )
        progress("store", 0.0)
        stored, reason = False, "answers to a task are a part of it"
        if task is None:
            reason = "the reference has other weights"
            try:
                stored = store_verdict(opened, report, source, recipe) is not None
            except (RequestError, ResourceError) as error:
                reason = str(error)
    keep(Timings(phases=overall.finish()), *kind)
    if as_json:
        found = {"bundle": str(bundle), "status": report.status, "stored": stored}
        identity = opened.manifest.identity()
        show_json("parity", {**found, "identity": identity, "table": report.to_json()})
    else:
        show_report(report.table() if is_verbose() else report.brief())
        if report.layers is not None:
            show(report.layers.table())
        print_line("verdict stored" if stored else f"verdict not stored: {reason}")
    with data_is_out():
        if not report.passed:
            bad = report.first_bad()
            raise ParityError(
                f"{bundle}: accuracy check '{report.status}', 'passed' expected: "
                f"{bad.told() if bad else 'it could not run'}. -v prints every row."
            )


def inspect(
    source: str = typer.Argument(
        metavar="SOURCE", help="Bundle directory, or a checkpoint: local directory or org/name[@revision]."
    ),
    as_json: bool = JSON,
) -> None:
    """Describe a bundle or a checkpoint without loading it."""
    from vlexport.tools.inspect import describe

    found = describe(source)
    if as_json:
        show_json("inspect", found)
        return
    show_table(("field", "value"), [row for name, value in found.items() for row in _rows_of(name, value)])
    if found.get("problem"):
        print_line(f"problem: {found['problem']}")


def _rows_of(name: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield name and text of each row; names of nested values are joined by dots."""
    if isinstance(value, Mapping):
        plain = {key: each for key, each in value.items() if not _has_parts(each)}
        if plain or not value:
            yield name, ", ".join(f"{key}: {_words(each)}" for key, each in plain.items()) or "none"
        for key, each in value.items():
            if key not in plain:
                yield from _rows_of(f"{name}.{key}", each)
    elif isinstance(value, list | tuple) and _has_parts(value):
        for index, each in enumerate(value):
            yield from _part(name, index, each)
    else:
        yield name, _words(value)


def _has_parts(value: object) -> bool:
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return bool(inner) and (isinstance(value, Mapping) or any(isinstance(each, Mapping) for each in inner))


def _part(name: str, index: int, value: object) -> Iterator[tuple[str, str]]:
    """Yield the rows of a list's element, under its own name if it has one."""
    if isinstance(value, Mapping) and "name" in value:
        rest = {key: each for key, each in value.items() if key != "name"}
        yield from _rows_of(f"{name}.{value['name']}", rest)
    else:
        yield from _rows_of(f"{name}.{index}", value)


def _words(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_words, value))}]"
    if value is None or value == {}:
        return "none"
    return str(value)


def report(
    bundle: Path = BUNDLE,
    output: Path = typer.Option(
        ..., "--output", "--html", "-o", metavar="FILE", help="Page to write, *.html."
    ),
    bench: list[Path] = typer.Option(
        [], metavar="FILE", help="Timings to show, of `bench --json` (repeatable: one for each size)."
    ),
    plan: Path | None = typer.Option(
        None, metavar="FILE", help="Padding and memory to show, of `plan --json`."
    ),
    sweep: Path | None = typer.Option(None, metavar="FILE", help="Pruning sweep to show, of `sweep --json`."),
    overlay: Path | None = typer.Option(
        None, metavar="FILE", help="Picture of kept tokens to show, of `run --overlay`."
    ),
    trust: str = TRUST,
    as_json: bool = JSON,
) -> None:
    """Write a page about a bundle, one offline HTML file.

    It shows accuracy, drift by block, latency, padding and memory, pruning, origin and environment. Nothing
    is measured: results come from the bundle, its accuracy check and the files given.
    """
    from vlexport.bundle import Bundle
    from vlexport.runtime.outputs import check_out, writing

    check_out(output, suffix=".html")
    opened = Bundle.open(bundle, trust=trust)
    from vlexport.report.facts import read_results
    from vlexport.report.page import page

    text = page(opened, read_results(opened, bench=bench, plan=plan, sweep=sweep, overlay=overlay))
    with writing(output) as temporary:
        temporary.write_text(text, encoding="utf-8")
    if as_json:
        show_json("report", {"out": str(output), "bytes": output.stat().st_size})
        return
    show(str(output))


def repro(
    bundle: Path = BUNDLE,
    output: Path = typer.Option(..., "--output", "-o", metavar="FILE", help="Archive to write, *.zip."),
    block: int = typer.Option(0, metavar="N", help="Index of the block to keep."),
    whole: bool = typer.Option(False, "--whole", help="Keep every block."),
    own_weights: bool = typer.Option(
        False, "--own-weights", help="Include the checkpoint's weights (default: random weights)."
    ),
    lora: Path = ADAPTER,
    trust: str = TRUST,
    recipe: str = RECIPE_FILE,
    as_json: bool = JSON,
) -> None:
    """Write a minimal archive for a bug report.

    For ONNX Runtime, OpenVINO and TensorRT. It holds one block of the graph, a call that failed the accuracy
    check (else a sample), expected outputs, versions, and a script that runs it without vlexport.
    """
    from vlexport.bundle import Bundle

    opened = Bundle.open(bundle, trust=trust, verify="lazy")
    from vlexport.tools.repro import ReproOptions, write_repro

    options = ReproOptions(block=block, whole=whole, own_weights=own_weights, lora=lora)
    names = write_repro(opened, output, options, recipe)
    if as_json:
        show_json("repro", {"out": str(output), "bytes": output.stat().st_size, "files": names})
        return
    print_line(f"{len(names)} files, {output.stat().st_size:,} bytes")
    show(str(output))


def export_inputs(
    bundle: Path = BUNDLE,
    output_dir: Path = typer.Option(..., "--output-dir", "-o", metavar="DIR", help="Directory to create."),
    trust: str = TRUST,
    recipe: str = RECIPE_FILE,
    as_json: bool = JSON,
) -> None:
    """Write valid inputs as raw files for trtexec and Polygraphy.

    The trtexec flags and a data loader script for Polygraphy are written to the same folder.
    """
    from vlexport.bundle import Bundle

    opened = Bundle.open(bundle, trust=trust, verify="lazy")
    from vlexport.tools import repro

    found = repro.export_inputs(opened, output_dir, recipe)
    if as_json:
        shapes = {case.name: {name: list(each.shape) for name, each in case.inputs.items()} for case in found}
        show_json("export-inputs", {"out": str(output_dir), "cases": shapes})
        return
    for case in found:
        print_line(f"{case.name}: profile {case.profile}")
    show(str(output_dir))
