"""Whether bundles are what they are called: distinct builds, honest manifests, verdicts that hold.

Building lies above this part of the library, so it is reached by name, as a user's program reaches it.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args

from vlexport.bundle import Bundle
from vlexport.bundle.manifest import BuildKey, Manifest, Verdict, key_of
from vlexport.checkpoint import Checkpoint
from vlexport.errors import BundleError, ParityError
from vlexport.parity.check import check
from vlexport.parity.report import Verdict as Status
from vlexport.runtime.opening import open_engine
from vlexport.specs import Range, ShapeProfile

Found = Iterator[tuple[str, str]]
LEVEL = "identity"


@dataclass(frozen=True, kw_only=True)
class _Builder:
    """The builder's module, and one request."""

    module: Any
    spec: Any

    def key(self, **changes: object) -> BuildKey:
        found: BuildKey = self.module.build_key(replace(self.spec, **changes))
        return found


def identity_faults(recipe: str, checkpoints: Path) -> Found:
    """Every fault of keys, of a stored bundle, and of what is refused."""
    module = importlib.import_module("vlexport._build.build")
    with tempfile.TemporaryDirectory() as folder:
        spec = module.request(Checkpoint.open(checkpoints / "plain"), recipe=recipe, backend="eager")
        builder = _Builder(module=module, spec=replace(spec, output_dir=Path(folder) / "engines"))
        yield from _keys(builder, recipe, checkpoints / "other")
        bundle = module.build_checkpoint(builder.spec).bundle
        yield from _stored(bundle, builder)
        yield from _refusals(bundle, builder)


def _keys(builder: _Builder, recipe: str, other: Path) -> Found:
    """Requests that differ in one thing, and keys that differ in one field, are all different."""
    spec = builder.spec
    base = builder.key()
    requests = {
        "dtype": builder.key(precision=replace(spec.precision, dtype="float16")),
        "profile": builder.key(profile=_narrower(spec.profile)),
        "weights or settings": builder.module.build_key(
            builder.module.request(Checkpoint.open(other), recipe=recipe, backend="eager")
        ),
        "recipe": builder.key(recipe=replace(spec.recipe, digest="f" * 64)),
    }
    yield from _alike({name: key_of(key) for name, key in requests.items()}, key_of(base))
    for name in ("weights_digest", "preprocessing"):
        if getattr(requests["weights or settings"], name) == getattr(base, name):
            yield LEVEL, f"{name} does not see another checkpoint"
    yield from _alike({name: key_of(key) for name, key in _changed(base).items()}, key_of(base))


def _alike(keys: dict[str, str], base: str) -> Found:
    for name, key in keys.items():
        if key == base:
            yield LEVEL, f"two builds that differ in {name} have one key"


def _changed(base: BuildKey) -> dict[str, BuildKey]:
    """The key's fields with one changed at a time."""
    found: dict[str, BuildKey] = {}
    for field in fields(BuildKey):
        value = getattr(base, field.name)
        if isinstance(value, str):
            changed: Any = value[:-1] + ("1" if value.endswith("0") else "0")
        elif isinstance(value, ShapeProfile):
            changed = _narrower(value)
        elif field.name == "graphs":
            changed = replace(value, selector="another")
        elif field.name == "target":
            changed = replace(value, device="cuda" if value.device != "cuda" else "cpu")
        elif value is None:
            changed = "int8"
        else:
            changed = {**value, "further": "1"}
        found[field.name] = replace(base, **{field.name: changed})
    return found


def _narrower(profile: ShapeProfile) -> ShapeProfile:
    ranges = {symbol: Range(known.min, known.opt, known.opt) for symbol, known in profile.ranges.items()}
    return ShapeProfile(profile.name, ranges)


def _stored(bundle: Bundle, builder: _Builder) -> Found:
    """The manifest on disk holds what was requested, and the stored engine passes the check again."""
    opened = Bundle.open(bundle.path)
    manifest, key = opened.manifest, builder.key()
    if Manifest.parse(manifest.encoded()) != manifest:
        yield LEVEL, "the manifest is not read as it was written"
    stored = (manifest.precision.dtype, manifest.checkpoint.weights, manifest.key, manifest.profile)
    if stored != (builder.spec.dtype, key.weights_digest, key_of(key), builder.spec.profile):
        yield LEVEL, "the manifest does not hold what was built"
    report = check(opened)
    yield from ((level, "the stored bundle fails its check") for level in report.caught_by())


def _refusals(bundle: Bundle, builder: _Builder) -> Found:
    """A verdict other than passed and an altered payload are refused."""
    for status in get_args(Status):
        marked = builder.module.Built(bundle=bundle.with_verdict(Verdict(status=status)), cached=False)
        if marked.is_good != (status == "passed"):
            yield LEVEL, f"a bundle marked {status} is taken as {'good' if marked.is_good else 'bad'}"
    failed = bundle.with_verdict(Verdict(status="failed"))
    if not _refuses(lambda: open_engine(failed), ParityError):
        yield LEVEL, "an engine that failed its check was opened"
    name = max(failed.manifest.files, key=lambda each: failed.manifest.files[each].size)
    path = failed.path / name
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(-9, os.SEEK_END)
        last = file.read(1)
        file.seek(-9, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    if not _refuses(lambda: Bundle.open(bundle.path), BundleError):
        yield LEVEL, "a payload that was altered was opened"


def _refuses(action: Callable[[], object], expected: type[Exception]) -> bool:
    try:
        action()
    except expected:
        return True
    return False
