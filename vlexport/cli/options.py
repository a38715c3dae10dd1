"""Options that several commands share, and short names of dtypes."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from vlexport import specs
from vlexport.errors import VlexportError
from vlexport.media.limits import DEFAULT_LIMITS
from vlexport.media.listing import files_of
from vlexport.media.sources import open_source

if TYPE_CHECKING:
    from vlexport.bundle import Bundle


def dtype_name(name: str | None) -> str | None:
    """Return torch's name of a dtype; other names pass unchanged."""
    return name if name is None else specs.dtype_name(name)


BUNDLE = typer.Argument(metavar="BUNDLE", help="Bundle directory.", exists=True, file_okay=False)
BACKEND = typer.Option("onnxruntime", metavar="NAME", help="Inference backend (see `vlexport list`).")
RECIPE_FILE = typer.Option(None, "--recipe", metavar="FILE", help="Private recipe that built the bundle.")
ADAPTER = typer.Option(
    None, "--lora", metavar="DIR", help="Adapter of the build (default: where the build found it)."
)
TRUST = typer.Option(None, metavar="DIGEST", help="Approve a bundle from elsewhere by its digest.")
ALLOW_FAILED = typer.Option(False, "--allow-failed", help="Load a bundle that failed its accuracy check.")
IMAGES = typer.Option([], metavar="FILE", help="Image file, folder, quoted glob or - for stdin (repeatable).")
VIDEOS = typer.Option(
    [], metavar="FILE", help="Video file or .npy frames, folder, quoted glob or - for stdin (repeatable)."
)
FPS = typer.Option(None, metavar="RATE", help="Frame rate of .npy frames, or sampling rate for video files.")
PRUNE = typer.Option(None, metavar="RATE", help="Fraction of video tokens to prune, 0 <= RATE < 1.")
DECODER = typer.Option(
    ..., metavar="CHECKPOINT", help="Checkpoint of the decoder: local directory, or org/name[@revision]."
)
DECODER_DTYPE = typer.Option(
    None, "--dtype", metavar="DTYPE", callback=dtype_name, help="Decoder dtype (default: as stored)."
)
DECODER_DEVICE = typer.Option(
    "cpu", "--device", metavar="DEVICE", help="Decoder device, e.g. cpu, cuda, cuda:1."
)
THREADS = typer.Option(0, metavar="N", help="Engine threads (0: library default).")
BUNDLES_DIR = typer.Option(
    Path("engines"), "--output-dir", "-o", metavar="DIR", help="Directory for bundles."
)
TRACE = typer.Option(
    None, metavar="FILE", help="Write a time line of stages and operators, *.json in Chrome's format."
)
JSON = typer.Option(False, "--json", help="Print one JSON document to stdout.")


def media_files(given: Iterable[Path], *, openable: bool = False) -> list[Path | bytes]:
    """Return the files that are meant: those of folders and globs by name, `-` as bytes.

    openable  refuse now what cannot be opened, before an engine is loaded for it
    """
    found: list[Path | bytes] = []
    for path in given:
        if str(path) == "-":
            found.append(sys.stdin.buffer.read(DEFAULT_LIMITS.max_file_bytes + 1))
        else:
            found += files_of(path)
    for each in found if openable else ():
        if (error := cannot_open(each)) is not None:
            raise error
    return found


def cannot_open(source: Path | bytes) -> VlexportError | None:
    """Return why a file cannot be opened, or None."""
    try:
        if isinstance(source, Path):
            open_source(source, DEFAULT_LIMITS).close()
    except VlexportError as error:
        return error
    return None


def require_usable(bundle: Path, trust: str | None, *, allow_failed: bool, begin: bool = False) -> Bundle:
    """Return a bundle that is to be loaded, or refuse it, before what loads it is imported.

    begin  hash its weights meanwhile, for whoever loads what is returned
    """
    from vlexport.backends import backend_names, find_backend
    from vlexport.bundle import Bundle
    from vlexport.runtime import opening

    opened = Bundle.open(bundle, trust=trust, verify="lazy")
    backend = opened.manifest.target.backend
    if begin and backend in backend_names():
        opened.begin(find_backend(backend).mapped)
    opening.require_usable(opened, allow_failed=allow_failed)
    return opened


class Commands(TyperGroup):
    """The commands by group."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each group, in order; typer has groups with rich markup alone."""
        shown: dict[str, list[tuple[str, Any]]] = {}
        for name in self.list_commands(ctx):
            command = self.commands[name]
            shown.setdefault(str(getattr(command, "rich_help_panel", "")), []).append((name, command))
        width = max(map(len, self.commands))
        for group, commands in shown.items():
            with formatter.section(group):
                formatter.write_dl(
                    [
                        (name.ljust(width), command.get_short_help_str(formatter.width - width - 4))
                        for name, command in commands
                    ]
                )
