"""`check`, `inspect`, `report`, `repro` and `trust`: commands about one bundle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from vlexport._build.timings import Timings, keep, recall
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
from vlexport.codec import encode
from vlexport.errors import ParityError, RequestError, ResourceError

if TYPE_CHECKING:
    from vlexport.bundle import Bundle
    from vlexport.checkpoint import Checkpoint
    from vlexport.parity.report import ParityReport


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
    media = media_files(files or [], openable=True)
    settings = {"checkpoint": checkpoint, "lora": lora, "layers": layers or None, "task": task, "fps": fps}
    extra = [f"--{name}" for name, value in settings.items() if value is not None]
    if (extra or media) and not accuracy:
        words = ", ".join([*extra, *(["files"] if media else [])])
        raise RequestError(f"{words} given without --accuracy, which compares with them. Add it.")
    reference = {**settings, "media": media}
    facts: dict[str, object] = {"bundle": str(bundle)}
    if run or not accuracy:
        facts |= _check_files(bundle, recipe, run=run, as_json=as_json)
    if not accuracy:
        if as_json:
            show_json("check", facts)
        return
    report, more = _check_accuracy(bundle, reference, recipe)
    if as_json:
        show_json("check", {**facts, **more})
    else:
        show_report(report.table() if is_verbose() else report.brief())
        if report.layers is not None:
            show(report.layers.table())
        print_line("verdict stored" if more["stored"] else f"verdict not stored: {more['reason']}")
    with data_is_out():
        if not report.passed:
            bad = report.first_bad()
            raise ParityError(
                f"{bundle}: accuracy check '{report.status}', 'passed' expected: "
                f"{bad.told() if bad else 'it could not run'}. -v prints every row."
            )


def _check_files(bundle: Path, recipe: str | None, *, run: bool, as_json: bool) -> dict[str, object]:
    from vlexport.bundle import Bundle

    opened = Bundle.open(bundle)
    from vlexport.parity.report import summary_of
    from vlexport.runtime.opening import open_engine, require_fit

    require_fit(opened, recipe, unproven=run)
    manifest, summary, proof = opened.manifest, summary_of(opened.verdict), None
    if run:
        from vlexport.runtime.proof import require_proven

        with open_engine(opened, unproven=True) as engine:
            proof = require_proven(opened, engine)
    if not as_json:
        show(f"{bundle}: {len(manifest.files)} files intact, trusted, fits {manifest.target}")
        print_line(f"accuracy check: {summary}")
        if proof is not None:
            print_line(f"proof: passed: {proof.summary()}")
    return {
        "digest": opened.digest,
        "target": manifest.target.tag,
        "parity": opened.verdict.status,
        "summary": summary,
        "files": {name: record.sha256 for name, record in manifest.files.items()},
        "proof": encode(proof),
    }


def _check_accuracy(
    bundle: Path, reference: Mapping[str, Any], recipe: str | None
) -> tuple[ParityReport, dict[str, object]]:
    """Return the table and what `--json` prints about it."""
    from vlexport.bundle import Bundle
    from vlexport.runtime.opening import checkpoint_of

    opened = Bundle.open(bundle, verify="lazy")
    against = reference["checkpoint"]
    source = checkpoint_of(opened, against, reference["lora"])
    from vlexport.evaluate.answers import check as compared

    kind = ("parity", opened.manifest.target.backend, opened.manifest.precision.dtype)
    overall = Overall(recall(*kind))
    settings = {name: reference[name] for name in ("task", "lora", "media", "fps")}
    settings |= {"layers": bool(reference["layers"]), "recipe": recipe}
    with phases("check", overall) as progress:
        progress("check", 0.0)
        report = compared(opened, source if against else None, progress=progress, **settings)
        progress("store", 0.0)
        own = [name for name in ("task", "media") if reference[name]]
        reason = f"{' and '.join(own)} of your own are a part of it" if own else ""
        reason = reason or _store(opened, report, source, recipe)
    keep(Timings(phases=overall.finish()), *kind)
    result = {"status": report.status, "stored": not reason, "reason": reason}
    return report, {**result, "identity": opened.manifest.identity(), "table": report.to_json()}


def _store(bundle: Bundle, report: ParityReport, source: Checkpoint, recipe: str | None) -> str:
    from vlexport._build.build import store_verdict

    try:
        stored = store_verdict(bundle, report, source, recipe)
    except (RequestError, ResourceError) as error:
        return str(error)
    return "" if stored else "the reference has other weights"


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
        plain = [f"{key}: {_words(item)}" for key, item in value.items() if key not in nested]
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

    It shows accuracy, drift by block, latency, padding and memory, pruning, origin and environment. Nothing
    is measured: results come from the bundle, its accuracy check and the files given.
    """
    from vlexport.bundle import Bundle
    from vlexport.runtime.outputs import writing

    opened = Bundle.open(bundle)
    from vlexport.reports.facts import read_results
    from vlexport.reports.page import page

    text = page(opened, read_results(opened, bench=bench, plan=plan, sweep=sweep, overlay=overlay))
    with writing(output) as temporary:
        temporary.write_text(text, encoding="utf-8")
    if as_json:
        show_json("report", {"out": str(output), "bytes": output.stat().st_size})
        return
    show(str(output))


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
        if whole or own_weights or block:
            raise RequestError(
                "--inputs-only given with --block, --whole or --own-weights, which are about the graph of an "
                "archive. Leave them out."
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
