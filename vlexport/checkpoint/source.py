"""Where a checkpoint comes from: a local folder, or `org/name@commit` on the hub."""

from __future__ import annotations

import errno
import glob
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vlexport.checkpoint.files import COMMIT, link_root, reason
from vlexport.errors import CheckpointError, ResourceError

# Everything but weights: configs, tokenizers, chat templates. Never Python files, never pickles.
SMALL_FILES = ("*.json", "*.jinja", "*.txt", "tokenizer.model")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Location:
    """A folder on this machine; for a hub checkpoint, missing files can be fetched into it."""

    source: str
    folder: Path
    revision: str | None
    hub_id: str | None

    def has(self, name: str) -> bool:
        """True when the file is here already."""
        return (self.folder / name).is_file()

    def fetch(self, names: Sequence[str]) -> None:
        """Download the named files of a hub checkpoint that are not here yet."""
        missing = [glob.escape(name) for name in names if not self.has(name)]
        if missing and self.hub_id is not None and self.revision is not None:
            download(self.hub_id, self.revision, missing)


def locate(source: str | Path, revision: str | None) -> Location:
    """Find the folder; for a hub id, download what is small."""
    folder = Path(source).expanduser()
    if isinstance(source, Path) or folder.exists():
        return _local(folder, str(source), revision)
    hub_id, _, written = source.partition("@")
    if not _HUB_ID.fullmatch(hub_id):
        raise CheckpointError(
            f"'{source}' does not exist here; expected a folder with config.json and safetensors, "
            f"or a hub id as org/name@commit. Check the path."
        )
    if written and revision and written != revision:
        raise CheckpointError(
            f"'{source}' given together with revision '{revision}'; expected one revision. Leave one of "
            f"them out."
        )
    commit = written or revision or ""
    if not COMMIT.fullmatch(commit):
        raise CheckpointError(
            f"'{source}' is no folder here, and as a hub id it has {_pin_state(commit)}; expected a full "
            f"commit of 40 lowercase hex digits, so that the weights cannot change. Write {hub_id}@COMMIT, "
            f"with COMMIT from https://huggingface.co/{hub_id}/commits/main."
        )
    folder = download(hub_id, commit, SMALL_FILES)
    return Location(source=f"{hub_id}@{commit}", folder=folder, revision=commit, hub_id=hub_id)


def _local(folder: Path, source: str, revision: str | None) -> Location:
    if not folder.is_dir():
        given = "is not a folder" if folder.exists() else "does not exist"
        raise CheckpointError(
            f"'{source}' {given}; expected a folder with config.json and safetensors. Check the path."
        )
    snapshot = folder.resolve().name if link_root(folder) != folder.resolve() else None
    if revision not in (None, snapshot):
        raise CheckpointError(
            f"'{source}' is a local folder, but revision '{revision}' is given; expected a revision with "
            f"hub ids only. Leave it out."
        )
    return Location(source=source, folder=folder, revision=snapshot, hub_id=None)


def _pin_state(commit: str) -> str:
    return f"the revision '{commit}'" if commit else "no revision"


def download(hub_id: str, commit: str, patterns: Sequence[str]) -> Path:
    """Bring matching files of a pinned commit into the hub cache; its offline mode is honoured."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    # The base that all transport failures share; the library that it comes from changed between versions.
    transport: tuple[type[Exception], ...] = (
        OSError,
        *(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception)),
    )
    try:
        folder = Path(snapshot_download(hub_id, revision=commit, allow_patterns=list(patterns)))
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise CheckpointError(
            f"{hub_id}@{commit} is not in the hub cache ({', '.join(patterns)}), and the hub cannot be "
            f"reached or HF_HUB_OFFLINE is set. Expected the files there or a connection. Go online once, "
            f"or give a local folder."
        ) from error
    except transport as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceError(
                f"{hub_id}@{commit}: the disk is full while downloading. Free some space or set HF_HOME "
                f"elsewhere."
            ) from error
        raise CheckpointError(
            f"{hub_id}@{commit} cannot be downloaded ({reason(error)}). Expected a public repository, or "
            f"one that your token may read. Check id and commit, and log in with `hf auth login` where "
            f"access is restricted."
        ) from error
    if folder.name != commit:
        raise CheckpointError(
            f"{hub_id}: commit {commit} asked for, {folder.name} delivered. Update huggingface_hub."
        )
    return folder
