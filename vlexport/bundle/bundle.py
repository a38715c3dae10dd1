"""A finished build on disk: checked when it is opened, hashed again in the very bytes that are handed out."""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeVar

from vlexport._build.sources import recipe_digest
from vlexport.bundle import files
from vlexport.bundle.files import MANIFEST_NAME, FileRecord
from vlexport.bundle.manifest import Manifest, Verdict, backend_or_file, profile_options, shipped_or_file
from vlexport.bundle.trust import Newer, Trust, Verdicts
from vlexport.codec import MAX_BYTES, JsonObject, parse
from vlexport.errors import BundleError, InputError, MisfitError, NoBundleError
from vlexport.specs import PIXELS
from vlexport.target import Misfit, Target, fit

Depth = Literal["full", "lazy"]

# A writer may replace the bundle while it is read; every retry meets a newer complete one.
_MAX_RETRIES = 50

_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """Contents of a folder, not loaded, trusted or hashed; `manifest` is absent if there is a `problem`."""

    path: Path
    digest: str
    trusted: bool
    content: JsonObject
    manifest: Manifest | None
    problem: str | None
    checked: Verdict | None = None

    def read_json(self, name: str) -> JsonObject:
        assert self.manifest is not None
        record = self.manifest.files[name]
        if record.size > MAX_BYTES:
            raise BundleError(f"{self.path}: '{name}' has {record.size} bytes; expected at most {MAX_BYTES}.")
        return parse(files.read_payload(self.path, name, record))


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Bundle:
    """An open bundle: its folder, its manifest, and the manifest's digest.

    `checked` is the verdict of a later check of this user's own, kept outside the folder; None without one.
    `newer` has the tags of targets with a newer library where such a check passed.
    """

    path: Path
    manifest: Manifest
    digest: str
    checked: Verdict | None = field(default=None)
    newer: frozenset[str] = frozenset()
    begun: dict[str, Future[memoryview]] = field(default_factory=dict, compare=False)

    def __repr__(self) -> str:
        manifest = self.manifest
        return (
            f"Bundle({str(self.path)!r}, {manifest.recipe.name}, {manifest.target.backend}, "
            f"{manifest.precision.name}, profile {manifest.profile.name}, parity {self.verdict.status})"
        )

    @property
    def verdict(self) -> Verdict:
        """Return the verdict that counts: the user's own later one, else that of the build."""
        return self.checked or self.manifest.parity

    @classmethod
    def open(
        cls,
        path: Path | str | Bundle,
        *,
        trust: str | None = None,
        verify: Depth = "full",
        user_data: Path | None = None,
    ) -> Bundle:
        """Check manifest, names, sizes, trust and, unless `lazy`, every hash; nothing is loaded or run.

        `lazy` leaves the hashing of payloads to `read` and `map`, which always do it. `trust` is a
        digest that the user approves; it is recorded. A refusal is a `BundleError`, or its `UntrustedError`.
        """
        before = path if isinstance(path, Bundle) else None
        root = before.path if before else _root(path)

        def opened(raw: bytes) -> Bundle:
            manifest, digest = Manifest.parse(raw), hashlib.sha256(raw).hexdigest()
            files.check_listing(root, manifest.files)
            records = Trust.of(user_data)
            approved_now = records.require(digest, trust, root)
            if verify == "full":
                for name, record in manifest.files.items():
                    files.check_payload(root, name, record)
            if approved_now:
                records.record_of(digest, "approved", root)
            begun = before.begun if before and before.digest == digest else {}
            return cls(
                path=root,
                manifest=manifest,
                digest=digest,
                checked=Verdicts.of(user_data).read(digest),
                newer=Newer.of(user_data).read(digest),
                begun=begun,
            )

        return _of_one_state(root, opened)

    @classmethod
    def inspect(cls, path: Path | str, *, user_data: Path | None = None) -> Inspection:
        root = Path(path)
        raw = _of_one_state(root, bytes)
        digest = hashlib.sha256(raw).hexdigest()
        content: JsonObject = {}
        manifest, problem = None, None
        try:
            content = parse(raw)
            manifest = Manifest.parse(raw)
            files.check_listing(root, manifest.files)
        except (InputError, BundleError) as error:
            problem = str(error)
        return Inspection(
            path=root,
            digest=digest,
            trusted=Trust.of(user_data).knows(digest),
            content=content,
            manifest=manifest,
            problem=problem,
            checked=Verdicts.of(user_data).read(digest),
        )

    def read(self, name: str) -> bytes:
        """Return the bytes of one payload; their SHA-256, of this very object, is the manifest's."""
        record = self._record(name)
        return self._unless_replaced(lambda: files.read_payload(self.path, name, record))

    def map(self, name: str) -> memoryview:
        """Return the bytes of one payload as `read` does, shared with other processes where that is safe."""
        record, begun = self._record(name), self.begun.pop(name, None)
        read = begun.result if begun else lambda: files.map_payload(self.path, name, record)
        return self._unless_replaced(read)

    def begin(self, names: Iterable[str]) -> None:
        """Hash payloads in the background for their next `map`, also after this object is opened again."""
        for name in set(names) & set(self.manifest.files):
            pool = ThreadPoolExecutor(1)
            self.begun[name] = pool.submit(files.map_payload, self.path, name, self.manifest.files[name])
            pool.shutdown(wait=False)

    def fit(self, here: Target) -> Misfit | None:
        return fit(self.manifest.target, here, rebuild=self.rebuild_command(device=here.device))

    def require_fit(self, here: Target) -> None:
        result = self.fit(here)
        if result is not None:
            raise MisfitError(f"{self.path}: {result.reason}")

    def rebuild_command(
        self, recipe: str | None = None, selector: str | None = None, device: str | None = None
    ) -> str:
        """Return the command that builds this bundle again, with another recipe, selector or `device`."""
        manifest = self.manifest
        source = str(manifest.checkpoint.place)
        words = ["vlexport", "build", source, "--recipe", recipe or shipped_or_file(manifest.recipe.name)]
        if manifest.checkpoint.adapter is not None:
            words += ["--lora", manifest.checkpoint.adapter.source]
        words += ["--backend", backend_or_file(manifest.target.backend), "--dtype", manifest.precision.dtype]
        if manifest.input_dtype != PIXELS:
            words += ["--input-dtype", manifest.input_dtype]
        if manifest.precision.quantisation is not None:
            words += ["--quantize", manifest.precision.quantisation]
        if (method := selector or manifest.graphs.selector) is not None:
            words += ["--selector", ",".join((method, *manifest.graphs.cells))]
        targets = manifest.options.get("targets")
        if isinstance(targets, Sequence) and targets:
            words += ["--targets", device or ",".join(map(str, targets))]
        if (chosen := manifest.options.get("device")) is not None:
            words += ["--device", str(chosen)]
        return shlex.join([*words, *profile_options(manifest.profile.name)])

    def command(self, verb: str, *options: str) -> str:
        return command(self.path, self.manifest, verb, *options)

    def with_verdict(
        self, verdict: Verdict, here: Target | None = None, *, user_data: Path | None = None
    ) -> Bundle:
        """Return the bundle with a verdict that counts for this user alone; its folder is not written to."""
        newer = Newer.of(user_data)
        if here is not None and here.version != self.manifest.target.version:
            newer.write(self.digest, here.tag, passed=verdict.status == "passed")
        Verdicts.of(user_data).write(self.digest, verdict)
        return replace(self, checked=verdict, newer=newer.read(self.digest))

    def _record(self, name: str) -> FileRecord:
        if name not in self.manifest.files:
            payloads = ", ".join(sorted(self.manifest.files)) or "nothing"
            raise InputError(f"{self.path}: no payload {name!r}; this bundle holds {payloads}.")
        return self.manifest.files[name]

    def _unless_replaced(self, read: Callable[[], _Result]) -> _Result:
        try:
            return read()
        except BundleError as error:
            if not _still_there(self.path, self.digest):
                raise BundleError(
                    f"{self.path}: replaced or removed since it was opened; expected digest {self.digest}. "
                    f"Open it again."
                ) from error
            raise


def command(path: Path, manifest: Manifest | None, verb: str, *options: str) -> str:
    """Return a command about a bundle, of which a manifest was read or none."""
    recipe = manifest.recipe if manifest is not None else None
    private = recipe is not None and recipe_digest(recipe.name) != recipe.digest
    return shlex.join(["vlexport", verb, str(path), *options, *(("--recipe", "FILE") if private else ())])


def _of_one_state(root: Path, read: Callable[[bytes], _Result]) -> _Result:
    for _ in range(_MAX_RETRIES):
        before = _identity(root)
        try:
            return read(_read_manifest(root))
        except BundleError:
            if _identity(root) == before:
                raise
    raise BundleError(
        f"{root}: replaced {_MAX_RETRIES} times while it was opened. Wait for its builder, then try again."
    )


def _identity(root: Path) -> tuple[int, int, int] | None:
    try:
        status = root.stat()
    except OSError:
        return None
    # Numbers of removed folders are used again.
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _still_there(root: Path, digest: str) -> bool:
    try:
        return hashlib.sha256(_read_manifest(root)).hexdigest() == digest
    except BundleError:
        return False


def _root(path: object) -> Path:
    if not isinstance(path, str | Path):
        raise NoBundleError(f"{type(path).__name__} given as a bundle; the path of its folder is expected.")
    return Path(path)


def _read_manifest(root: Path) -> bytes:
    if root.is_file():
        raise NoBundleError(f"{root}: a file; the folder of a bundle is expected. Pass {root.parent}.")
    if not root.is_dir():
        raise NoBundleError(
            f"{root}: no such folder; expected a bundle. `vlexport build` prints the path of the one it made."
        )
    if not os.path.lexists(root / MANIFEST_NAME):
        raise NoBundleError(f"{root}: this is not a bundle: {_unlike(root)}")
    return files.read_file(root, MANIFEST_NAME, MAX_BYTES)


def _unlike(root: Path) -> str:
    if (root / "config.json").exists():
        word = shlex.quote(str(root))
        return f"it looks like a checkpoint. This makes a bundle of it: vlexport build {word}"
    inner = next(iter(sorted(root.glob(f"*/{MANIFEST_NAME}"))), None)
    instead = f" There is one inside it: {inner.parent}" if inner else ""
    return f"it holds no {MANIFEST_NAME}. Expected a folder whose path `vlexport build` printed.{instead}"
