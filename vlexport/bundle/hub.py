"""Bundles in model repositories, on the Hub or in a local folder: a folder for each bundle, and a page."""

from __future__ import annotations

import glob
import hashlib
import logging
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vlexport.backends import Progress, log_progress
from vlexport.bundle import MANIFEST_NAME, Bundle, Manifest
from vlexport.bundle.files import check_listing, check_payload, copy_payload, fix, read_file
from vlexport.bundle.store import put_in_place, working_folder
from vlexport.checkpoint.source import download
from vlexport.codec import MAX_BYTES, encode
from vlexport.errors import BundleError, RequestError
from vlexport.parity.report import report_in
from vlexport.reports.card import CARD, card, plain
from vlexport.system import explained, make_folder, replacing, shortage

logger = logging.getLogger(__name__)

PAGE = "README.md"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pushed:
    """A bundle in a repository: where it is, and the digest to publish."""

    place: str
    digest: str

    def to_json(self) -> dict[str, object]:
        return {**encode(self)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Pulled:
    """A bundle out of a repository; it opens once its digest is trusted."""

    bundle: Path
    digest: str
    trusted: bool

    def to_json(self) -> dict[str, object]:
        return {**encode(self)}


def push(bundle: Bundle | str | Path, target: str, *, progress: Progress = log_progress) -> Pushed:
    """Copy a verified bundle into a repository, with its card as the page.

    target  `org/name` on the Hub, made private where it does not exist; or the path of a folder (`./name`)

        vlexport.push("engines/BUNDLE", "org/name").digest
    """
    progress("verify", 0.0)
    opened = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
    progress("copy", 0.0)
    return Pushed(place=_copy_to(opened, target), digest=opened.digest)


def _copy_to(bundle: Bundle, target: str) -> str:
    name = bundle.path.resolve().name
    if (root := _local(target)) is not None:
        make_folder(root)
        _copy_bundle(bundle, root / name)
        with replacing(root / PAGE) as temporary:
            temporary.write_text(_page(bundle, name, target), encoding="utf-8")
        return str(root / name)
    with tempfile.TemporaryDirectory() as folder:
        _copy_bundle(bundle, Path(folder) / name)
        (Path(folder) / PAGE).write_text(_page(bundle, name, target), encoding="utf-8")
        _upload(target, Path(folder))
    return f"{target}/{name}"


def pull(
    source: str,
    name: str | None = None,
    *,
    output_dir: str | Path = "engines",
    progress: Progress = log_progress,
) -> Pulled:
    """Copy a bundle out of a repository, every byte as in its manifest.

    Nothing of it is loaded or run. It is opened only where its digest is trusted.
    source  as for `push`, on the Hub with `@revision`
    name    of several bundles in a repository

        pulled = vlexport.pull("org/name")
        vlexport.load(pulled.bundle, trust=DIGEST_THAT_ITS_BUILDER_PUBLISHED)
    """
    progress("copy", 0.0)
    into, local = Path(output_dir), _local(source)
    make_folder(into)
    with _fetched(source, name, local, into) as (root, folder):
        raw = read_file(root / folder, MANIFEST_NAME, MAX_BYTES)
        manifest, digest = Manifest.parse(raw), hashlib.sha256(raw).hexdigest()
        path = into / folder
        _place(root / folder, manifest, raw, path)
    return Pulled(bundle=path, digest=digest, trusted=Bundle.inspect(path).trusted)


def _page(bundle: Bundle, name: str, target: str) -> str:
    manifest = bundle.manifest
    text = bundle.read(CARD).decode("utf-8") if CARD in manifest.files else card(manifest, name, None)
    checked = report_in(bundle.checked) if bundle.checked else None
    again = f"\nChecked again after the build: {checked.summary()}.\n" if checked else ""
    return f"""{text}
## Get it

```bash
vlexport pull {shlex.quote(target)} {shlex.quote(plain(name))}
vlexport trust {shlex.quote(f"engines/{plain(name)}")} {bundle.digest}
```
{again}"""


def _local(place: str) -> Path | None:
    try:
        path = Path(place).expanduser()
    except RuntimeError as error:
        raise RequestError(f"{place}: no user of this name here; the path of a folder expected.") from error
    is_path = path.is_absolute() or place.startswith((".", "~")) or path.is_dir()
    if not is_path and place.partition("@")[0].count("/") != 1:
        raise RequestError(
            f"{place}: org/name on the Hub, or the path of a folder such as ./{place} expected."
        )
    return path if is_path else None


def _copy_bundle(bundle: Bundle, path: Path) -> None:
    _place(bundle.path, bundle.manifest, read_file(bundle.path, MANIFEST_NAME, MAX_BYTES), path)


def _place(source: Path, manifest: Manifest, raw: bytes, path: Path) -> None:
    """Copy a bundle to its place, also over a damaged copy of it."""
    if not path.exists():
        _copy(source, manifest, raw, path)
    elif Bundle.inspect(path).digest != hashlib.sha256(raw).hexdigest():
        raise RequestError(f"{path}: another bundle of this name is there. Move it, or give another folder.")
    elif not _is_intact(path, manifest):
        _copy(source, manifest, raw, path)


def _is_intact(path: Path, manifest: Manifest) -> bool:
    try:
        check_listing(path, manifest.files)
        for name, record in manifest.files.items():
            check_payload(path, name, record)
    except BundleError as error:
        logger.warning("the damaged copy is replaced: %s", error)
        return False
    return True


def _copy(source: Path, manifest: Manifest, raw: bytes, path: Path) -> None:
    size = sum(record.size for record in manifest.files.values())
    with explained(path.parent, size), working_folder(path.parent, path.name) as scratch:
        folder = scratch / "copy"
        folder.mkdir()
        for name, record in manifest.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            # For whom the umask lets read it, as a build is.
            copy_payload(source, name, record, folder / name, mode=0o666)
            fix(folder / name)
        (folder / MANIFEST_NAME).write_bytes(raw)
        check_listing(folder, manifest.files)
        put_in_place(folder, path)


@contextmanager
def _fetched(source: str, name: str | None, local: Path | None, into: Path) -> Iterator[tuple[Path, str]]:
    if local is not None:
        yield local, _one(local, name, source)
        return
    hub_id, _, revision = source.partition("@")
    snapshot = download(hub_id, revision or "main", [f"*/{MANIFEST_NAME}"])
    chosen = _one(snapshot, name, source)
    with (snapshot / chosen / MANIFEST_NAME).open("rb") as file:
        manifest = Manifest.parse(file.read(MAX_BYTES + 1))
    # Whatever else lies there is left there.
    names = [glob.escape(f"{chosen}/{name}") for name in (MANIFEST_NAME, *manifest.files)]
    with working_folder(into, chosen) as folder:
        download(hub_id, snapshot.name, names, folder)
        yield folder, chosen


def _one(root: Path, name: str | None, source: str) -> str:
    names = sorted(
        path.parent.name for path in root.glob(f"*/{MANIFEST_NAME}") if not path.parent.name.startswith(".")
    )
    if name is None and len(names) == 1:
        return names[0]
    if name in names:
        return name
    raise RequestError(
        f"{source}: {f'no bundle {name!r}' if name else f'{len(names)} bundles'} there; the name of one "
        f"expected. It has: {', '.join(names) or 'none'}."
    )


def _upload(hub_id: str, folder: Path) -> None:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        api = HfApi()
        api.create_repo(hub_id, private=True, exist_ok=True)
        api.upload_folder(repo_id=hub_id, folder_path=folder, commit_message="Add a bundle of vlexport")
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError, ValueError) as error:
        raise shortage(error) or RequestError(
            f"{hub_id}: cannot be written ({error}). Expected a repository that your token may write to: "
            "log in with `hf auth login`, or push to a folder."
        ) from error
