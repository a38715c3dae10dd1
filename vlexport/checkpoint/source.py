"""The source of a checkpoint, a local folder or `org/name@revision` on the hub, and reading its files.

A branch or a tag is resolved to its commit once, so that weights cannot change under a name. Names of files
stay inside the folder, links do not leave it, JSON is strict and of limited size.
"""

from __future__ import annotations

import glob
import logging
import os
import re
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from vlexport.codec import load_strict, refuse_constant
from vlexport.errors import UNEXPECTED, CheckpointError, ResourceError
from vlexport.system import is_full, shortage

logger = logging.getLogger(__name__)

# Everything but weights: configs, tokenizers, chat templates. Never Python files, never pickles.
# The card names the licence.
SMALL_FILES = ("*.json", "*.jinja", "*.txt", "tokenizer.model", "README.md")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9][\w./-]*", re.ASCII)


# The largest config.json in use is below 100 KiB, the largest index below 10 MiB.
MAX_JSON_BYTES = 32 * 2**20
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Location:
    """A folder on this machine; for a hub checkpoint, missing files can be fetched into it."""

    source: str
    folder: Path
    revision: str | None
    hub_id: str | None

    @property
    def place(self) -> str:
        """Return what opens it from any folder: the hub id with its commit, or an absolute path."""
        return self.source if self.hub_id is not None else str(self.folder.absolute())

    def has(self, name: str) -> bool:
        return (self.folder / name).is_file()

    def fetch(self, names: Sequence[str]) -> None:
        missing = [glob.escape(name) for name in names if not self.has(name)]
        if missing and self.hub_id is not None and self.revision is not None:
            download(self.hub_id, self.revision, missing)


def locate(source: str | Path, revision: str | None) -> Location:
    """Find the folder; for a hub id, download what is small."""
    if not isinstance(source, str | Path):
        raise CheckpointError(
            f"{type(source).__name__} given as a checkpoint; expected the path of a folder, or a hub id as "
            "org/name or org/name@revision."
        )
    if isinstance(source, str) and source.startswith(("https://", "http://")):
        raise CheckpointError(
            f"{source}: a URL; expected a folder or a hub id. Pass org/name alone, or org/name@revision."
        )
    try:
        folder = Path(source).expanduser()
        if isinstance(source, Path) or folder.exists():
            return _local(folder, str(source), revision)
    except (OSError, RuntimeError) as error:  # RuntimeError: the home folder of nobody
        raise shortage(error) or CheckpointError(
            f"'{source}' cannot be opened ({reason(error)}); expected a folder that you may read, or a hub "
            "id as org/name. Check its permissions and its name."
        ) from error
    hub_id, _, written = source.partition("@")
    if not _HUB_ID.fullmatch(hub_id):
        raise CheckpointError(
            f"'{source}' does not exist here; expected a folder with config.json and safetensors, "
            f"or a hub id as org/name or org/name@revision. Check the path."
        )
    if written and revision and written != revision:
        raise CheckpointError(
            f"'{source}' given together with revision '{revision}'; expected one revision. Leave one of "
            f"them out."
        )
    chosen = written or revision or "main"
    if not _REVISION.fullmatch(chosen):
        raise CheckpointError(
            f"'{source}' has the revision '{chosen}'; expected a branch, a tag or a commit of 40 hex digits."
        )
    folder = download(hub_id, chosen, SMALL_FILES)
    if folder.name != chosen:
        logger.info("%s: revision %s is commit %s", hub_id, chosen, folder.name)
    return Location(source=f"{hub_id}@{folder.name}", folder=folder, revision=folder.name, hub_id=hub_id)


def _local(folder: Path, source: str, revision: str | None) -> Location:
    if not folder.is_dir():
        fault = "is not a folder" if folder.exists() else "does not exist"
        todo = f"Pass its folder, {folder.parent}." if folder.is_file() else "Check the path."
        raise CheckpointError(
            f"'{source}' {fault}; expected a folder with config.json and safetensors. {todo}"
        )
    if not os.access(folder, os.R_OK | os.X_OK):
        raise CheckpointError(
            f"'{source}' may not be read by you; expected a folder that you may read. Change its permissions."
        )
    snapshot = folder.resolve().name if link_root(folder) != folder.resolve() else None
    if revision not in (None, snapshot):
        raise CheckpointError(
            f"'{source}' is a local folder, but revision '{revision}' is given; expected a revision with "
            f"hub ids only. Leave it out."
        )
    return Location(source=source, folder=folder, revision=snapshot, hub_id=None)


def download(hub_id: str, revision: str, patterns: Sequence[str], into: Path | None = None) -> Path:
    """Download matching files of a revision into the hub cache; its offline mode is honoured.

    The folder's name is the commit. With `into` the files themselves are written there, instead of links.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    # The base that all transport failures share; the library that it comes from changed between versions.
    transport: tuple[type[Exception], ...] = (
        OSError,
        *(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception)),
        # A hub may answer with sizes that are none, or names that lead elsewhere.
        *UNEXPECTED,
    )
    try:
        folder = Path(
            snapshot_download(hub_id, revision=revision, allow_patterns=list(patterns), local_dir=into)
        )
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise CheckpointError(
            f"{hub_id} is no folder here, and {hub_id}@{revision} is not in the hub cache "
            f"({', '.join(patterns)}); the hub cannot be reached or HF_HUB_OFFLINE is set. Check the path, "
            f"or go online once."
        ) from error
    except transport as error:
        if is_full(error):
            raise ResourceError(
                f"{hub_id}@{revision}: the disk is full while downloading. Free some space or set HF_HOME "
                f"elsewhere."
            ) from error
        raise shortage(error) or CheckpointError(
            f"{hub_id}@{revision} cannot be downloaded ({reason(error)}). Expected a public repository, or "
            f"one that your token may read. Check id and revision, and log in with `hf auth login` where "
            f"access is restricted."
        ) from error
    if into is not None:
        return into
    if not COMMIT.fullmatch(folder.name) or (COMMIT.fullmatch(revision) and folder.name != revision):
        raise CheckpointError(
            f"{hub_id}: revision {revision} requested, {folder.name} delivered. Update huggingface_hub."
        )
    return folder


def open_inside(folder: Path, name: str) -> BufferedReader:
    """Open a regular file of the folder for reading; links may not leave the folder."""
    path = folder / name
    if not name or name in (".", "..") or "\0" in name or "\\" in name or Path(name).name != name:
        raise CheckpointError(
            f"{folder}: file name {name!r} given; expected a plain name inside the checkpoint's folder. "
            f"Put all files of a checkpoint side by side."
        )
    try:
        # `Path.resolve` raises a RuntimeError with the path in it for a loop of links, before Python 3.13.
        real = Path(os.path.realpath(path, strict=True))
        if not real.is_relative_to(link_root(folder)):
            raise CheckpointError(
                f"{path} is a link to {real}, outside the checkpoint; expected files inside it. Copy the "
                f"file there."
            )
        if not stat.S_ISREG(real.stat().st_mode):
            raise CheckpointError(f"{path} is not a regular file; expected one. Put the file itself there.")
        return real.open("rb")
    except OSError as error:
        raise shortage(error) or CheckpointError(
            f"{path} cannot be read ({reason(error)}); expected a readable file. Check the file and its "
            f"rights."
        ) from error


def link_root(folder: Path) -> Path:
    """Return where links may lead: the folder, or the entry of the hub cache whose `blobs/` it links to."""
    real = folder.resolve()
    entry = real.parent.parent
    if COMMIT.fullmatch(real.name) and real.parent.name == "snapshots" and (entry / "blobs").is_dir():
        return entry
    return real


def read_json(folder: Path, name: str) -> dict[str, object]:
    """Return the JSON object in a file of the folder; refuse duplicate keys, NaN and oversized files.

    Infinity, which files of Mamba decoders hold (`time_step_limit`), is read as transformers 5 writes it.
    """
    with open_inside(folder, name) as file:
        raw = file.read(MAX_JSON_BYTES + 1)
    if len(raw) > MAX_JSON_BYTES:
        raise CheckpointError(
            f"{folder / name} is larger than {MAX_JSON_BYTES} bytes; expected a configuration file below "
            f"that. Check that the right file is there."
        )
    return parse_object(raw, str(folder / name), _labelled)


def _labelled(word: str) -> dict[str, str]:
    return refuse_constant(word) if word == "NaN" else {"__float__": word}


def parse_object(
    raw: bytes, where: str, parse_constant: Callable[[str], object] = refuse_constant
) -> dict[str, object]:
    """Return the object of strict JSON: no duplicate keys, no NaN."""
    try:
        value = load_strict(raw.decode("utf-8"), parse_constant=parse_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{where} is not valid JSON ({reason(error)}). Download or save the checkpoint again."
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{where} holds a JSON {type(value).__name__}; expected an object. Save the checkpoint again."
        )
    return value


def reason(error: BaseException) -> str:
    """Return the message of an error, without its path."""
    words = error.strerror if isinstance(error, OSError) else str(error)
    return words or type(error).__name__


def listed(names: Sequence[str], most: int = 10) -> str:
    """Return the first few of the sorted names, and how many more there are."""
    shown = ", ".join(sorted(names)[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
