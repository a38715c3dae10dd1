"""`verify`, `parity`, `inspect`, `repro`, `export-inputs`: commands about one bundle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from vlexport._build.timings import Timings, keep, recall
from vlexport.cli.options import ADAPTER, BUNDLE, JSON, RECIPE_FILE, TRUST, argument, flag, new_file, option
from vlexport.cli.output import data_is_out, is_verbose, print_line, show, show_json, show_report, show_table
from vlexport.cli.progress import Overall, phases
from vlexport.codec import encode
from vlexport.errors import ParityError, RequestError, ResourceError

if TYPE_CHECKING:
    from vlexport.bundle import Bundle
    from vlexport.checkpoint import Checkpoint
    from vlexport.parity.report import ParityReport


def verify(
    bundle: Path = BUNDLE,
    run: bool = flag("--run", "Run the engine on calls that are stored with the reference's rows."),
    trust: str | None = TRUST,
    recipe: str | None = RECIPE_FILE,
    as_json: bool = JSON,
) -> None:
    """Check hashes, trust and compatibility with this machine.

    The engine is loaded with --run alone, which needs no checkpoint. With a newer library that passes, the
    bundle opens from then on.
    """
    from vlexport.bundle import Bundle

    opened = Bundle.open(bundle, trust=trust)
    from vlexport.parity.report import summary_of
    from vlexport.runtime.opening import open_engine, require_fit

    require_fit(opened, recipe, unproven=run)
    manifest, summary, proof = opened.manifest, summary_of(opened.verdict), None
    if run:
        from vlexport.runtime.proof import require_proven

        with open_engine(opened, unproven=True) as engine:
            proof = require_proven(opened, engine)
    if as_json:
        files = {name: record.sha256 for name, record in manifest.files.items()}
        result = {"bundle": str(bundle), "digest": opened.digest, "target": manifest.target.tag}
        verdict = {"parity": opened.verdict.status, "summary": summary, "files": files}
        show_json("verify", {**result, **verdict, "proof": encode(proof)})
    else:
        show(f"{bundle}: {len(manifest.files)} files intact, trusted, fits {manifest.target}")
        print_line(f"accuracy check: {summary}")
        if proof is not None:
            print_line(f"proof: passed: {proof.summary()}")


def parity(
    bundle: Path = BUNDLE,
    against: str | None = option(
        "CHECKPOINT", "Reference checkpoint (default: the one the bundle was built from)."
    ),
    lora: Path | None = ADAPTER,
    layers: bool = flag("--layers", "Compare block by block; report the first bad one."),
    task: Path | None = option(
        "FILE", "Compare answers to questions too (L4); JSON lines, see docs/parity.md."
    ),
    decoder: str | None = option("CHECKPOINT", "Decoder for --task (default: the reference's own)."),
    trust: str | None = TRUST,
    recipe: str | None = RECIPE_FILE,
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
    from vlexport.evaluate.answers import check

    kind = ("parity", opened.manifest.target.backend, opened.manifest.precision.dtype)
    overall = Overall(recall(*kind))
    with phases("parity", overall) as progress:
        progress("check", 0.0)
        settings = {"layers": layers, "task": task, "decoder": decoder, "recipe": recipe, "lora": lora}
        report = check(opened, source if against else None, progress=progress, **settings)  # type: ignore[arg-type]
        progress("store", 0.0)
        reason = "answers to a task are a part of it" if task else _store(opened, report, source, recipe)
    keep(Timings(phases=overall.finish()), *kind)
    if as_json:
        result = {"bundle": str(bundle), "status": report.status, "stored": not reason}
        show_json("parity", {**result, "identity": opened.manifest.identity(), "table": report.to_json()})
    else:
        show_report(report.table() if is_verbose() else report.brief())
        if report.layers is not None:
            show(report.layers.table())
        print_line(f"verdict not stored: {reason}" if reason else "verdict stored")
    with data_is_out():
        if not report.passed:
            bad = report.first_bad()
            raise ParityError(
                f"{bundle}: accuracy check '{report.status}', 'passed' expected: "
                f"{bad.told() if bad else 'it could not run'}. -v prints every row."
            )


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
    from vlexport.tools.inspect import describe

    facts = describe(source)
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
    trust: str | None = TRUST,
    as_json: bool = JSON,
) -> None:
    """Write a page about a bundle, one offline HTML file.

    It shows accuracy, drift by block, latency, padding and memory, pruning, origin and environment. Nothing
    is measured: results come from the bundle, its accuracy check and the files given.
    """
    from vlexport.bundle import Bundle
    from vlexport.runtime.outputs import writing

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
    output: Path = option("FILE", "Archive to write, *.zip.", "--output", "-o", default=...),
    block: int = option("N", "Index of the block to keep.", default=0),
    whole: bool = flag("--whole", "Keep every block."),
    own_weights: bool = flag("--own-weights", "Include the checkpoint's weights (default: random weights)."),
    lora: Path | None = ADAPTER,
    trust: str | None = TRUST,
    recipe: str | None = RECIPE_FILE,
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
    names, size = write_repro(opened, output, options, recipe), output.stat().st_size
    if as_json:
        show_json("repro", {"out": str(output), "bytes": size, "files": names})
        return
    print_line(f"{len(names)} files, {size:,} bytes")
    show(str(output))


def export_inputs(
    bundle: Path = BUNDLE,
    output_dir: Path = option("DIR", "Directory to create.", "--output-dir", "-o", default=...),
    trust: str | None = TRUST,
    recipe: str | None = RECIPE_FILE,
    as_json: bool = JSON,
) -> None:
    """Write valid inputs as raw files for trtexec and Polygraphy.

    The trtexec flags and a data loader script for Polygraphy are written to the same folder.
    """
    from vlexport.bundle import Bundle

    opened = Bundle.open(bundle, trust=trust, verify="lazy")
    from vlexport.tools import repro

    cases = repro.export_inputs(opened, output_dir, recipe)
    if as_json:
        shapes = {
            case.name: {name: list(tensor.shape) for name, tensor in case.inputs.items()} for case in cases
        }
        show_json("export-inputs", {"out": str(output_dir), "cases": shapes})
        return
    for case in cases:
        print_line(f"{case.name}: profile {case.profile}")
    show(str(output_dir))
