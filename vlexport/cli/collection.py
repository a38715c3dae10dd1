"""`encode --output-dir`: the items that options and lists name, and the outcome of a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import typer

from vlexport.cli.interrupts import Stopped
from vlexport.cli.output import print_error, print_line, show, show_json
from vlexport.cli.progress import phases
from vlexport.errors import RequestError
from vlexport.media.listing import files_of
from vlexport.os_errors import shortage
from vlexport.runtime.collection import INDEX, MAX_LINE_BYTES, Collection, Item, read_list

if TYPE_CHECKING:
    from vlexport.runtime.pipeline import Pipeline


def list_items(
    images: Iterable[Path], videos: Iterable[Path], lists: Iterable[Path], *, without: Path
) -> Iterator[Item]:
    """Yield the items of images, videos and lists; nothing in the folder of the results."""
    results = os.path.join(os.path.abspath(without), "")  # noqa: PTH100, PTH118  links stay as they are
    for kind, given in (("image", images), ("video", videos)):
        for path in given:
            if str(path) == "-":
                raise RequestError(
                    f"--{kind} - given with --output-dir; files that can be read again are expected. For a "
                    "list of files on stdin use --list -."
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
    collection: Collection, open_pipeline: Callable[[], Pipeline], *, as_json: bool
) -> None:
    """Encode what is missing, and print the outcome; the engine is opened if it is needed."""
    total, kept = collection.num_items, collection.num_items - collection.num_missing
    if kept:
        print_line(f"{collection.folder}: {kept} of {total} items are there already.")
    if collection.missing:
        done = kept
        try:
            with phases("encode") as progress:
                progress("open", 0.0)

                def report(number: int) -> None:
                    nonlocal done
                    done = number
                    progress(f"encode {number} of {total}", (number - kept) / (total - kept))

                with open_pipeline() as pipeline:
                    if collection.settings.prune and "prune" in pipeline.forms:
                        print_line(f"prune {pipeline.forms['prune']}")
                    collection.encode(pipeline, report)
        except Stopped:
            print_error(
                f"{collection.folder}: finished shards are kept; the same command goes on from there."
            )
            raise
    outcomes = collection.finish()
    for record in outcomes.failed:
        source, message = record["source"], record["error"]["message"]
        print_error(f"vlexport: {message if message.startswith(source) else f'{source}: {message}'}")
    if outcomes.num_failed > len(outcomes.failed):
        more = outcomes.num_failed - len(outcomes.failed)
        print_error(f"vlexport: {more} more failed; {collection.folder / INDEX} has all.")
    num_encoded = outcomes.num_items - outcomes.num_failed
    if as_json:
        failed = {each["item"]: {"source": each["source"], **each["error"]} for each in outcomes.failed}
        counts = {"items": outcomes.num_items, "encoded": num_encoded, "kept": kept}
        document = {"out": str(collection.folder), **counts, "num_failed": outcomes.num_failed}
        show_json("encode", {**document, "failed": failed})
    else:
        print_line(f"{outcomes.num_items} items: {num_encoded} encoded, {outcomes.num_failed} failed")
        show(str(collection.folder))
    if outcomes.failed:
        raise typer.Exit(outcomes.failed[0]["error"]["exit_code"])
