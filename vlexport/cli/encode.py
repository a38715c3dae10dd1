"""`encode`: embeddings of images and videos, in one file or in a folder of shards."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vlexport.cli import options
from vlexport.cli.interrupts import kept_if_stopped
from vlexport.cli.options import grouped, new_file, option
from vlexport.cli.output import print_error, print_line, show, show_json
from vlexport.cli.progress import phases
from vlexport.errors import InputError, RequestError, VlexportError

if TYPE_CHECKING:
    from vlexport.runtime.outputs import Encoded


STDOUT = Path("-")
ABSENT = "{}: nothing is kept: one file is whole or absent. --output-dir keeps finished shards."


def _new_output(param: typer.CallbackParam, path: Path | None) -> Path | None:
    return path if path == STDOUT else new_file(".safetensors")(param, path)


@grouped
def encode(
    *,
    bundle: Path = options.BUNDLE,
    output: Path | None = option(
        "FILE",
        "One file for the embeddings, *.safetensors, or - for stdout.",
        "--output",
        "-o",
        callback=_new_output,
    ),
    shards: options.Shards,
    media: options.PrunedMedia,
    opening: options.Opening,
    trace: Path | None = options.TRACE,
    as_json: bool = options.JSON,
) -> None:
    """Encode images and videos into embeddings.

    Files are images or videos by their content; --image and --video name the kind. --output: tensors are
    named image.N.embeds, image.N.grid, video.N.embeds and video.N.grid. --output-dir: item.N.embeds and
    item.N.grid in shards, with one outcome for each item in index.jsonl; the same command goes on where a run
    has ended. Metadata name bundle, checkpoint and media. Items that cannot be encoded are reported and left
    out; the exit code is that of the first one.
    """
    if (output is None) == (shards.output_dir is None):
        words = "neither --output nor" if output is None else "both --output and"
        raise RequestError(f"{words} --output-dir given; one of them is expected.")
    if output is not None:
        if output == STDOUT and as_json:
            raise RequestError("--output - given with --json, which prints there too. Leave one of them out.")
        for name, given in (("--list", shards.media_list), ("--parquet", shards.parquet)):
            if given:
                raise RequestError(
                    f"{name} given with --output; expected with --output-dir. Give that instead."
                )
        _encode_files(bundle, media, output, opening, trace, as_json=as_json)
        return
    if trace is not None:
        raise RequestError("--trace given with --output-dir; expected with --output alone. Leave it out.")
    from vlexport.cli.collection import encode_collection

    encode_collection(bundle, media, shards, opening, as_json=as_json)


def _encode_files(
    bundle: Path,
    media: options.PrunedMedia,
    output: Path,
    opening: options.Opening,
    trace: Path | None,
    *,
    as_json: bool,
) -> None:
    # What can be refused without the engine is refused before torch is imported.
    from vlexport.runtime.request import check_media_options

    images, videos = _files(media)
    check_media_options(media.fps, media.prune, media.prune_before)
    # For one image of up to about 4,000 patches a copy in the order that products like best does not pay.
    arguments = opening.arguments(shared_weights=len(images) == 1 and not videos)
    usable = opening.require_usable(bundle, begin=True)
    from vlexport.reports.trace import traced
    from vlexport.runtime.outputs import provenance
    from vlexport.runtime.pipeline import load

    with kept_if_stopped(lambda: ABSENT.format(output)), traced(trace), phases("encode") as progress:
        progress("open", 0.0)
        with load(usable, **arguments) as pipeline:
            outcomes = pipeline.encode_all(images=images, videos=videos, progress=progress, **media.settings)
    media.note_whole(pipeline.pruner, images, videos)
    names = [*(f"image.{at}" for at in range(len(images))), *(f"video.{at}" for at in range(len(videos)))]
    results = dict(zip(names, outcomes, strict=True))
    errors = {name: result for name, result in results.items() if isinstance(result, VlexportError)}
    items = {name: result for name, result in results.items() if not isinstance(result, VlexportError)}
    for name, error in list(errors.items())[0 if items else 1 :]:
        print_error(f"vlexport: {name}: {error}")
    first = next(iter(errors.values()), None)
    if first and not items:
        raise first
    sources = zip(names, (*images, *videos), strict=True)
    metadata = {f"{name}.file": _name_of(source) for name, source in sources if name in items}
    metadata |= {name: str(value) for name, value in media.settings.items() if value is not None}
    shapes = _write(items, output, provenance(pipeline.bundle) | metadata)
    forms = {name: {"prune": item.form} for name, item in items.items() if item.form}
    if as_json:
        show_json("encode", {"out": str(output), "tensors": shapes, "forms": forms, "failed": errors})
    else:
        lines = [f"{name} {shape}" for name, shape in shapes.items()]
        lines += [f"{name} prune {form['prune']}" for name, form in forms.items()]
        for line in [*lines, *_counts(items)]:
            print_line(line)
        if output != STDOUT:
            show(str(output))
    if first:
        raise typer.Exit(first.exit_code)


def _write(items: Mapping[str, Encoded], output: Path, metadata: dict[str, str]) -> dict[str, list[int]]:
    from vlexport.runtime.outputs import save

    if output != STDOUT:
        return save(items, output, metadata)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "stdout.safetensors")
        shapes = save(items, file, metadata)
        show(file.read_bytes())
    return shapes


def _counts(items: Mapping[str, Encoded]) -> list[str]:
    return [
        f"{name} kept {len(item.kept)} of {len(item.mask)} tokens"
        for name, item in items.items()
        if item.kept is not None and item.mask is not None
    ]


def _files(media: options.PrunedMedia) -> tuple[list[options.File], list[options.File]]:
    from vlexport.runtime.request import NOTHING

    images, videos = media.by_kind()
    if not (images or videos):
        raise InputError(NOTHING)
    errors = list(filter(None, map(options.cannot_open, (*images, *videos))))
    if len(errors) == len(images) + len(videos):
        for error in errors[1:]:
            print_error(f"vlexport: {error}")
        raise errors[0]
    return images, videos


def _name_of(source: options.File) -> str:
    """Return a file's name as text: bytes that are no UTF-8 are written out."""
    name = source.name if isinstance(source, Path) else "stdin"
    return os.fsencode(name).decode("utf-8", errors="backslashreplace")
