"""`encode --output-dir`: the items that options and lists name, and the outcome of a run."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import typer

from vlexport.cli.interrupts import kept_if_stopped
from vlexport.cli.options import Opening, PrunedMedia, Shards
from vlexport.cli.output import print_error, print_line, show, show_json
from vlexport.cli.progress import phases
from vlexport.errors import InputError, RequestError
from vlexport.media.listing import files_of
from vlexport.runtime.collection import (
    INDEX,
    MAX_LINE_BYTES,
    Collection,
    CollectionSettings,
    Item,
    explained,
    read_list,
)
from vlexport.runtime.parquet import require_parquet, write_parquet
from vlexport.runtime.request import NOTHING
from vlexport.system import shortage


def list_items(media: PrunedMedia, lists: Iterable[Path], *, without: Path) -> Iterator[Item]:
    """Yield the items of files and lists; nothing in the folder of the results."""
    results = os.path.join(os.path.abspath(without), "")  # noqa: PTH100, PTH118  links stay as they are
    for kind, paths in (("image", media.image), ("video", media.video), (None, media.files or [])):
        for path in paths:
            if str(path) == "-":
                option = f"--{kind} " if kind else ""
                raise RequestError(
                    f"{option}- given with --output-dir; files that can be read again are "
                    "expected. For a list of files on stdin use --list -."
                )
            for file in files_of(path):
                if not os.path.abspath(file).startswith(results):  # noqa: PTH100
                    yield Item(source=str(file), kind=kind)
    for path in lists:
        with _lines(path) as lines:
            # In pieces: a file without lines, such as a device, is refused at the first.
            yield from read_list(iter(partial(lines.readline, MAX_LINE_BYTES + 1), b""), f"--list {path}")


def _lines(path: Path) -> AbstractContextManager[BinaryIO]:
    if str(path) == "-":
        return nullcontext(sys.stdin.buffer)
    try:
        return path.open("rb")
    except OSError as error:
        raise shortage(error) or RequestError(
            f"--list {path}: {error.strerror}. Name a file that may be read."
        ) from error


def encode_collection(
    bundle: Path,
    media: PrunedMedia,
    shards: Shards,
    opening: Opening,
    *,
    as_json: bool,
) -> None:
    """Encode what a folder of results lacks, and print the outcome."""
    folder = shards.output_dir
    assert folder is not None
    if media.is_empty and not shards.media_list:
        raise InputError(f"{NOTHING[:-1]} or --list.")
    settings = CollectionSettings(**media.settings, shard_items=shards.shard_items)
    if shards.parquet:
        require_parquet()
    arguments = opening.arguments()
    usable = opening.require_usable(bundle)
    items = list_items(media, shards.media_list, without=folder)
    with Collection.open(folder, items, usable, settings) as collection:
        kept = collection.num_items - collection.num_missing
        if kept:
            print_line(f"{folder}: {kept} of {collection.num_items} items are there already.")
        if collection.missing:
            _encode_missing(collection, bundle, arguments, kept)
        for part in collection.parts() if shards.parquet else ():
            with explained(folder):
                write_parquet(folder / part.shard)
        _show(collection, kept, as_json=as_json)


def _encode_missing(collection: Collection, bundle: Path, arguments: dict[str, Any], kept: int) -> None:
    from vlexport.runtime.pipeline import load

    total, started = collection.num_items, time.monotonic()

    def report(number: int, tokens: int) -> None:
        rate = f", {tokens / (time.monotonic() - started):.0f} a second" if tokens else ""
        progress(f"encode {number} of {total}, {tokens} tokens{rate}", (number - kept) / (total - kept))

    def left() -> str:
        stored = f"{total - collection.num_missing} of {total} items are kept, in finished shards"
        return f"{collection.folder}: {stored}; the same command goes on from there."

    with kept_if_stopped(left), phases("encode") as progress:
        progress("open", 0.0)
        with load(bundle, **arguments) as pipeline:
            if collection.settings.prune and "prune" in pipeline.forms:
                print_line(f"prune {pipeline.forms['prune']}")
            started = time.monotonic()
            collection.encode(pipeline, report)


def _show(collection: Collection, kept: int, *, as_json: bool) -> None:
    outcomes, folder = collection.finish(), collection.folder
    for record in outcomes.failed:
        source, message = record["source"], record["error"]["message"]
        print_error(f"vlexport: {message if message.startswith(source) else f'{source}: {message}'}")
    more = outcomes.num_failed - len(outcomes.failed)
    if more:
        print_error(f"vlexport: {more} more failed; {folder / INDEX} has all.")
    num_encoded = outcomes.num_items - outcomes.num_failed
    if as_json:
        failed = {
            record["item"]: {"source": record["source"], **record["error"]} for record in outcomes.failed
        }
        counts = {"items": outcomes.num_items, "encoded": num_encoded, "kept": kept}
        document = {"out": str(folder), **counts, "num_failed": outcomes.num_failed, "failed": failed}
        show_json("encode", document)
    else:
        print_line(f"{outcomes.num_items} items: {num_encoded} encoded, {outcomes.num_failed} failed")
        show(str(folder))
    if outcomes.failed:
        raise typer.Exit(outcomes.failed[0]["error"]["exit_code"])
