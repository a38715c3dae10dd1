"""Results of other commands about a bundle, for its page: files of `bench`, `plan`, `sweep` and `run`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

from vlexport.bundle import Bundle
from vlexport.codec import MAX_BYTES, Json, JsonObject, Measure, decode, parse
from vlexport.errors import InputError, RequestError
from vlexport.os_errors import shortage
from vlexport.report.sweep import Sweep

T = TypeVar("T")
# Of a picture, which the page holds whole.
MAX_PICTURE = 16 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """How many times as fast as its base, with bounds."""

    median: Measure
    low: Measure
    high: Measure


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """Of one contender of `bench`, what a page shows."""

    name: str
    base: str
    ms_p50: Measure | None
    ms_p90: Measure | None
    ratio: Ratio | None
    relative_l2: Measure | None
    peak_bytes: int | None
    graphs: str
    reason: str
    identity: JsonObject


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """A file of `bench`: one call, of so many patches and tokens, by every contender."""

    patches: int
    tokens: int
    machine: JsonObject
    contenders: tuple[Contender, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """Of a file of `plan`, what a page shows: shares of padding by kind of block, and bytes."""

    path: str
    patches: tuple[int, int, int]
    padding: Mapping[str, float]
    disk_bytes: int | None
    build_memory_bytes: int | None
    run_memory_bytes: tuple[int, int, int] | None
    origin: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """What was measured of a bundle; each part may be absent.

    timings  calls in ascending order of their tokens
    overlay  a PNG of what pruning kept
    """

    timings: Sequence[Timed] = ()
    plan: Planned | None = None
    sweep: Sweep | None = None
    overlay: bytes = b""


def read_results(
    bundle: Bundle,
    *,
    bench: Sequence[Path] = (),
    plan: Path | None = None,
    sweep: Path | None = None,
    overlay: Path | None = None,
) -> Results:
    """Read the files of other commands; refuse what is not about this bundle."""
    timings = [_read(path, "bench", lambda found: _timed(found, bundle)) for path in bench]
    return Results(
        timings=sorted(timings, key=lambda each: each.tokens),
        plan=None if plan is None else _read(plan, "plan", lambda found: _planned(found, bundle)),
        sweep=None if sweep is None else _read(sweep, "sweep", lambda found: _swept(found, bundle)),
        overlay=b"" if overlay is None else _picture(overlay, bundle),
    )


def _read(path: Path, verb: str, make: Callable[[JsonObject], T]) -> T:
    again = f"`vlexport {verb} ... --json` writes one."
    try:
        content = parse(_bytes(path, MAX_BYTES))
        if (content.get("schema"), content.get("verb")) != (1, verb):
            raise InputError(
                f"schema {content.get('schema')}, verb {content.get('verb')!r} found; expected 1 and {verb}."
            )
        return make(content)
    except InputError as error:
        raise RequestError(f"--{verb} {path}: {error} {again}") from error


def _bytes(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            raw = file.read(limit + 1)
    except OSError as error:
        raise shortage(error) or InputError(f"cannot be read ({error.strerror}).") from error
    if len(raw) > limit:
        raise InputError(f"more than {limit} bytes found.")
    return raw


def _part(kind: type[T], value: Json, where: str) -> T:
    """Return the fields of a type out of an object that has more."""
    if not isinstance(value, Mapping):
        raise InputError(f"{where}: an object expected.")
    return decode(kind, _only(kind, value), where)


def _only(kind: Any, value: Json) -> Json:
    names = {each.name for each in fields(kind)}
    return (
        {name: each for name, each in value.items() if name in names} if isinstance(value, Mapping) else value
    )


def _timed(content: JsonObject, bundle: Bundle) -> Timed:
    listed = content.get("contenders")
    contenders = [_only(Contender, each) for each in listed] if isinstance(listed, tuple) else listed
    found = _part(Timed, {**content, "contenders": contenders}, "bench")
    if not any(is_of(each, bundle) for each in found.contenders):
        raise InputError(f"no contender is {bundle.path.name}; timings of this bundle expected.")
    return found


def is_of(contender: Contender, bundle: Bundle) -> bool:
    """Return whether a contender of `bench` is the bundle."""
    return contender.identity.get("key") == bundle.manifest.key


def _planned(content: JsonObject, bundle: Bundle) -> Planned:
    found = _part(Planned, content, "plan")
    # An entry's name ends with a part of its key.
    if Path(found.path).name.rpartition("-")[2] != bundle.manifest.key[:16]:
        raise InputError(f"the forecast of {Path(found.path).name} found, of {bundle.path.name} expected.")
    return found


def _swept(content: JsonObject, bundle: Bundle) -> Sweep:
    found = Sweep.from_json(_only(Sweep, content))
    if found.digest != bundle.digest:
        raise InputError(f"a sweep of {found.bundle} ({found.digest[:12]}) found, of {bundle.path} expected.")
    return found


def _picture(path: Path, bundle: Bundle) -> bytes:
    import PIL.Image

    try:
        raw = _bytes(path, MAX_PICTURE)
        with PIL.Image.open(BytesIO(raw), formats=["PNG"]) as picture:
            # Text entries may follow the pixels.
            picture.load()
            digest = picture.info.get("bundle_digest")
        if digest != bundle.digest:
            raise InputError(
                f"a picture of bundle {str(digest)[:12]} found, of {bundle.digest[:12]} expected."
            )
    except (InputError, OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError) as error:
        raise RequestError(
            f"--overlay {path}: {error} `vlexport run BUNDLE --decoder SOURCE --video FILE --prompt TEXT "
            "--prune RATE --overlay FILE` draws one."
        ) from error
    return raw
