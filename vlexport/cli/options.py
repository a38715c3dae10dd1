"""Options that several commands share, alone or in groups, and how they are declared."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import typer
from typer.core import TyperGroup

from vlexport import specs
from vlexport.cli.output import print_line
from vlexport.errors import VlexportError
from vlexport.media.kinds import kind_of
from vlexport.media.limits import DEFAULT_LIMITS
from vlexport.media.listing import files_of
from vlexport.media.sources import open_source

if TYPE_CHECKING:
    from vlexport.bundle import Bundle
    from vlexport.runtime.prune import Pruner

File = Path | bytes
Values = Sequence[str] | Callable[[], Iterable[str]]


def option(
    metavar: str, text: str, *names: str, default: Any = None, values: Values = (), **settings: Any
) -> Any:
    """Return an option with a value; it is named after its parameter unless names are given.

    values  what a shell offers for it, or what gives them when it asks
    """

    def complete(incomplete: str) -> list[str]:
        names = values() if callable(values) else values
        return [name for name in names if name.startswith(incomplete)]

    offered = None if values == () else complete
    return typer.Option(default, *names, metavar=metavar, help=text, autocompletion=offered, **settings)


def backends() -> Iterable[str]:
    from vlexport.backends import backend_names

    return backend_names()


def recipes() -> Iterable[str]:
    from vlexport.recipe import list_recipes

    return [card.name for card in list_recipes()]


def pruning_methods() -> Iterable[str]:
    from vlexport.pruning.methods import METHODS

    return METHODS


def requested_methods() -> Iterable[str]:
    from vlexport.pruning.cells import RULES
    from vlexport.pruning.methods import REQUESTED

    return [*REQUESTED, *(name for name, rule in RULES.items() if rule.is_rated)]


def cell_rules() -> Iterable[str]:
    from vlexport.pruning.cells import RULES

    return RULES


def argument(metavar: str, text: str, **settings: Any) -> Any:
    return typer.Argument(metavar=metavar, help=text, **settings)


def flag(name: str, text: str) -> Any:
    """Return an option without a value, off by default."""
    return typer.Option(False, name, help=text)


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of its groups: parameters that are dataclasses of options."""
    types = get_type_hints(command)
    groups: dict[str, Any] = {name: kind for name, kind in types.items() if is_dataclass(kind)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name in groups:
            types |= get_type_hints(groups[parameter.name])
            parameters += inspect.signature(groups[parameter.name]).parameters.values()
        else:
            parameters.append(parameter)

    @wraps(command)
    def flat(**values: Any) -> None:
        for name, kind in groups.items():
            values[name] = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
        command(**values)

    signature = inspect.Signature(
        [parameter.replace(annotation=types[parameter.name]) for parameter in parameters]
    )
    flat.__signature__ = signature  # type: ignore[attr-defined]
    flat.__annotations__ = {parameter.name: types[parameter.name] for parameter in parameters}
    return flat


def new_file(suffix: str) -> Callable[[typer.CallbackParam, Path | None], Path | None]:
    """Return a check of the path of an option: a file with this ending can be written there."""

    def check(param: typer.CallbackParam, path: Path | None) -> Path | None:
        from vlexport.runtime.outputs import check_out

        if path is not None:
            check_out(path, max(param.opts, key=len), suffix)
        return path

    return check


def dtype_name(name: str | None) -> str | None:
    """Return torch's name of a dtype; other names pass unchanged."""
    return name if name is None else specs.dtype_name(name)


BUNDLE = argument("BUNDLE", "Bundle directory.", exists=True, file_okay=False)
BACKEND = option(
    "NAME",
    "Backend, or file of a private one (see `vlexport doctor`).",
    default="onnxruntime",
    values=backends,
    callback=specs.backend_name,
)
RECIPE_FILE = option("FILE", "Private recipe that built the bundle.", "--recipe")
ADAPTER = option("DIR", "Adapter of the build (default: where the build found it).", "--lora")
VIDEOS = option("FILE", "Video or .npy frames, folder, quoted glob or - for stdin (repeatable).", default=[])
FPS = option("RATE", "Frame rate of .npy frames, or sampling rate for video files.")
BUNDLES_DIR = option("DIR", "Directory for bundles.", "--output-dir", "-o", default=Path("engines"))
TRACE = option(
    "FILE",
    "Write a time line of stages and operators, *.json in Chrome's format.",
    callback=new_file(".json"),
)
JSON = flag("--json", "Print one JSON document to stdout.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """How a bundle is opened."""

    allow_failed: bool = flag("--allow-failed", "Load a bundle that failed its accuracy check.")
    recipe: str | None = RECIPE_FILE
    threads: int = option("N", "Engine threads (0: library default).", default=0)

    def arguments(self, *, shared_weights: bool = False) -> dict[str, Any]:
        from vlexport.backends import Options

        engine = Options(threads=self.threads, shared_weights=shared_weights)
        return {"allow_failed": self.allow_failed, "recipe": self.recipe, "options": engine}

    def require_usable(self, path: Path, *, begin: bool = False) -> Bundle:
        """Return a bundle that is to be loaded, or refuse it, before what loads it is imported.

        begin  hash its weights meanwhile, for whoever loads what is returned
        """
        from vlexport.backends import backend_names, find_backend
        from vlexport.bundle import Bundle
        from vlexport.runtime import opening

        bundle = Bundle.open(path, verify="lazy")
        backend = bundle.manifest.target.backend
        if begin and backend in backend_names():
            bundle.begin(find_backend(backend).mapped)
        opening.require_usable(bundle, allow_failed=self.allow_failed)
        return bundle


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoding:
    """The language model that answers."""

    checkpoint: str | None = option(
        "CHECKPOINT", "Checkpoint of the decoder (default: the one that the bundle was built from)."
    )
    dtype: str | None = option(
        "DTYPE", "Decoder dtype (default: as stored).", callback=dtype_name, values=specs.ENGINE_DTYPES
    )
    device: str = option("DEVICE", "Decoder device, e.g. cpu, cuda, cuda:1.", default="cpu")

    def arguments(self, bundle: Bundle, prompt_layout: str | None = None) -> dict[str, Any]:
        from vlexport.runtime.decoder import DecoderOptions
        from vlexport.runtime.generate import RuntimeOptions
        from vlexport.runtime.opening import checkpoint_of

        decoder = DecoderOptions(dtype=self.dtype, device=self.device)
        runtime = RuntimeOptions(decoder=decoder, prompt_layout=prompt_layout)
        return {"checkpoint": self.checkpoint or checkpoint_of(bundle), "runtime": runtime}


@dataclass(frozen=True, kw_only=True, slots=True)
class Media:
    """Images and videos."""

    image: list[Path] = option("FILE", "Image, folder, quoted glob or - for stdin (repeatable).", default=[])
    video: list[Path] = VIDEOS
    fps: float | None = FPS


@dataclass(frozen=True, kw_only=True, slots=True)
class PrunedMedia(Media):
    """Images and videos, of which tokens may be pruned; their kind is that of their content, or named."""

    files: list[Path] = argument("[FILE]...", "Images and videos, folders or - for stdin.", default=None)
    prune: float | None = option("RATE", "Fraction of tokens to drop after the tower, 0 <= RATE < 1.")
    method: str | None = option(
        "METHOD",
        "By what --prune drops: evs, static, divprune (images too), ... (default: as the bundle).",
        values=requested_methods,
    )
    prune_before: str | None = option(
        "METHOD",
        "Drop cells before the tower: predicted, contrast:RATE (images), static:RATE (videos), ...",
        values=cell_rules,
    )

    @property
    def settings(self) -> dict[str, Any]:
        """Return what requests take beside the media."""
        return {name: getattr(self, name) for name in ("prune", "method", "prune_before", "fps")}

    @property
    def is_empty(self) -> bool:
        return not (self.files or self.image or self.video)

    def by_kind(self, *, openable: bool = False) -> tuple[list[File], list[File]]:
        """Return images and videos; what cannot be opened counts as an image where it is not refused."""
        images, videos = (media_files(paths, openable=openable) for paths in (self.image, self.video))
        for file in media_files(self.files or [], openable=openable):
            is_video = cannot_open(file) is None and kind_of(file) == "video"
            (videos if is_video else images).append(file)
        return images, videos

    def note_whole(self, pruner: Pruner, images: Sequence[object], videos: Sequence[object]) -> None:
        """Print that nothing is dropped where the method is for media of another kind."""
        kinds = [kind for kind, media in (("image", images), ("video", videos)) if media]
        given = (self.prune, self.method, self.prune_before)
        if words := pruner.whole_reason(pruner.plan(*given, has_question=True), kinds):
            print_line(words)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shards:
    """A folder of embeddings, and lists of what goes there."""

    output_dir: Path | None = option("DIR", "Folder for shards and an index; an earlier run is resumed.")
    media_list: list[Path] = option(
        "FILE",
        "List of media for --output-dir, paths or JSON lines; - for stdin (repeatable).",
        "--list",
        default=[],
    )
    shard_items: int = option("N", "Items of a shard of --output-dir.", default=256)
    parquet: bool = flag("--parquet", "Write each shard of --output-dir as Parquet too, a row for each item.")


def media_files(paths: Iterable[Path], *, openable: bool = False) -> list[File]:
    """Return the files that are meant: those of folders and globs by name, `-` as bytes.

    openable  refuse now what cannot be opened, before an engine is loaded for it
    """
    files: list[File] = []
    for path in paths:
        if str(path) == "-":
            files.append(sys.stdin.buffer.read(DEFAULT_LIMITS.max_file_bytes + 1))
        else:
            files += files_of(path)
    for file in files if openable else ():
        if (error := cannot_open(file)) is not None:
            raise error
    return files


def cannot_open(source: File) -> VlexportError | None:
    try:
        if isinstance(source, Path):
            open_source(source, DEFAULT_LIMITS).close()
    except VlexportError as error:
        return error
    return None


class Commands(TyperGroup):
    """The commands by group."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each group, in order; typer has groups with rich markup alone."""
        groups: dict[str, list[tuple[str, Any]]] = {}
        for name in self.list_commands(ctx):
            command = self.commands[name]
            groups.setdefault(str(getattr(command, "rich_help_panel", "")), []).append((name, command))
        width = max(map(len, self.commands))
        room = formatter.width - width - 4
        for group, commands in groups.items():
            with formatter.section(group):
                formatter.write_dl(
                    [(name.ljust(width), command.get_short_help_str(room)) for name, command in commands]
                )
