"""Results of other commands for pages and comparisons: files of `bench`, `plan`, `sweep` and `run`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from vlexport.backends import Progress, log_progress
from vlexport.bundle import Bundle, Manifest
from vlexport.bundle.manifest import DIGITS
from vlexport.codec import MAX_BYTES, Json, JsonObject, Measure, decode, encode, parse
from vlexport.errors import InputError, RequestError
from vlexport.evaluate.intervals import Interval
from vlexport.system import shortage

if TYPE_CHECKING:
    from vlexport.reports.sweep import Sweep

T = TypeVar("T")
# Of a picture, which the page holds whole.
MAX_PICTURE = 16 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """One contender of `bench`; `rounds` are the seconds of every call."""

    name: str
    base: str
    rounds: tuple[tuple[float, ...], ...]
    ms_p50: Measure | None
    ms_p90: Measure | None
    ratio: Interval | None
    relative_l2: Measure | None
    peak_bytes: int | None
    graphs: str
    reason: str
    identity: JsonObject


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """One call of `bench`, of so many patches and tokens, by every contender; `file` was sent alone."""

    file: str | None = None
    patches: int
    tokens: int
    unit: str
    machine: JsonObject
    workload: JsonObject
    contenders: tuple[Contender, ...]

    def __post_init__(self) -> None:
        if self.unit != "s":
            raise InputError(f"times in {self.unit!r} found, in 's' expected.")
        rounds = [calls for contender in self.contenders for calls in contender.rounds]
        if not all(calls and min(calls) > 0 for calls in rounds):
            raise InputError("contenders.rounds: seconds of calls, above 0, expected.")


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
    """What was measured of a bundle; `timings` ascend by tokens, `overlay` is a PNG of kept tokens.

    unmet  why a section of the page could not be measured, by its title
    """

    timings: Sequence[Timed] = ()
    plan: Planned | None = None
    sweep: Sweep | None = None
    overlay: bytes = b""
    unmet: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """A page that was written, and a line about what it lacks."""

    out: Path
    bytes: int
    unmeasured: str

    def to_json(self) -> dict[str, object]:
        return {**encode(self)}


def report(  # noqa: PLR0913  the options of the command line, in one place
    bundle: Bundle | str | Path,
    output: str | Path,
    files: Sequence[Path] = (),
    *,
    fps: float | None = None,
    measure: bool = False,
    checkpoint: str | None = None,
    recipe: str | None = None,
    bench: Sequence[str | Path] = (),
    plan: str | Path | None = None,
    sweep: str | Path | None = None,
    overlay: str | Path | None = None,
    progress: Progress = log_progress,
) -> Written:
    """Write a page about a bundle, one offline HTML file.

    output   the page, *.html
    measure  what the results given lack, with `files`, images and videos of your own, against a `checkpoint`
    bench    files of `vlexport bench --json`, one for each size; `plan` and `sweep`: of these commands
    overlay  a picture of `vlexport run --overlay`

        vlexport.report("engines/BUNDLE", "page.html", bench=["bench.json"])
    """
    from vlexport.runtime.outputs import check_out, writing

    if (files or fps or checkpoint) and not measure:
        raise RequestError("files, fps or checkpoint given without measure, which uses them. Add it.")
    check_out(Path(output), suffix=".html")
    opened = Bundle.open(bundle)
    results = read_results(opened, bench=bench, plan=plan, sweep=sweep, overlay=overlay)
    from vlexport.reports.page import page, unmeasured

    if measure:
        from vlexport.reports.measure import Measurement

        lacking = Measurement(bundle=opened, media=files, fps=fps, checkpoint=checkpoint, recipe=recipe)
        opened, results = lacking.complete(results, progress)
    with writing(Path(output)) as temporary:
        temporary.write_text(page(opened, results), encoding="utf-8")
    missing = unmeasured(opened, results)
    return Written(out=Path(output), bytes=Path(output).stat().st_size, unmeasured=missing)


def read_results(
    bundle: Bundle,
    *,
    bench: Sequence[str | Path] = (),
    plan: str | Path | None = None,
    sweep: str | Path | None = None,
    overlay: str | Path | None = None,
) -> Results:
    """Read the files of other commands; refuse what is not about this bundle."""
    files = [_read(Path(path), "bench", lambda content: _timed(content, bundle)) for path in bench]
    timings = [call for calls in files for call in calls]
    return Results(
        timings=sorted(timings, key=lambda call: call.tokens),
        plan=None if plan is None else _read(Path(plan), "plan", lambda content: _planned(content, bundle)),
        sweep=None if sweep is None else _read(Path(sweep), "sweep", lambda content: _swept(content, bundle)),
        overlay=b"" if overlay is None else _picture(Path(overlay), bundle),
    )


def _read(path: Path, verb: str, make: Callable[[JsonObject], T]) -> T:
    try:
        return make(document(path, (verb,)))
    except InputError as error:
        again = f"`vlexport {verb} ... --json` writes one."
        raise RequestError(f"--{verb} {path}: {error} {again}") from error


def document(path: Path, verbs: Sequence[str]) -> JsonObject:
    """Return the JSON that one of these commands wrote."""
    content = parse(_bytes(path, MAX_BYTES))
    schema, verb = content.get("schema"), content.get("verb")
    if schema != 1 or verb not in verbs:
        raise InputError(f"schema {schema}, verb {verb!r} found; expected 1 and {' or '.join(verbs)}.")
    return content


def _bytes(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            raw = file.read(limit + 1)
    except OSError as error:
        raise shortage(error) or InputError(f"cannot be read ({error.strerror}).") from error
    if len(raw) > limit:
        raise InputError(f"more than {limit} bytes found.")
    return raw


def calls_from(content: JsonObject) -> list[Timed]:
    """Return the calls in a file of `bench`: one, or one for each of the media that were timed alone."""
    calls = content.get("calls", (content,))
    if not isinstance(calls, tuple) or not all(isinstance(call, Mapping) for call in calls) or not calls:
        raise InputError("'calls': a list of objects expected.")
    return [_call(call) for call in calls if isinstance(call, Mapping)]


def _call(content: JsonObject) -> Timed:
    """Return one call; fields that nothing here shows are left out."""
    listed = content.get("contenders")
    contenders = (
        [_only(Contender, contender) for contender in listed] if isinstance(listed, tuple) else listed
    )
    return decode(Timed, _only(Timed, {"file": None, **content, "contenders": contenders}), "bench")


def _only(kind: Any, value: Json) -> Json:
    if not isinstance(value, Mapping):
        return value
    return {part.name: value[part.name] for part in fields(kind) if part.name in value}


def _timed(content: JsonObject, bundle: Bundle) -> list[Timed]:
    calls = calls_from(content)
    if not all(any(is_of(one, bundle.manifest) for one in call.contenders) for call in calls):
        raise InputError(f"no contender is {bundle.path.name}; timings of this bundle expected.")
    return calls


def is_of(contender: Contender, manifest: Manifest) -> bool:
    """Return whether a contender of `bench` is the bundle of a manifest."""
    return contender.identity.get("key") == manifest.key


def planned_from(content: JsonObject) -> Planned:
    """Return what a page shows of a document of `plan`."""
    return decode(Planned, _only(Planned, content), "plan")


def _planned(content: JsonObject, bundle: Bundle) -> Planned:
    plan = planned_from(content)
    # An entry's name ends with a part of its key.
    if Path(plan.path).name.rpartition("-")[2] != bundle.manifest.key[:DIGITS]:
        raise InputError(f"the forecast of {Path(plan.path).name} found, of {bundle.path.name} expected.")
    return plan


def _swept(content: JsonObject, bundle: Bundle) -> Sweep:
    from vlexport.reports.sweep import Sweep

    sweep = Sweep.from_json(_only(Sweep, content))
    if sweep.digest != bundle.digest:
        raise InputError(f"a sweep of {sweep.bundle} ({sweep.digest[:12]}) found, of {bundle.path} expected.")
    return sweep


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
            f"--overlay {path}: {error} `vlexport run BUNDLE --video FILE --prompt TEXT "
            "--prune RATE --overlay FILE` draws one."
        ) from error
    return raw
