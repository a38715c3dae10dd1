"""Two results side by side: bundles, accuracy tables, or timings; what cannot be compared is refused.

`vlexport.onnx.diff` is about graphs; here they are one of the parts of a bundle.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from vlexport.bundle import Bundle
from vlexport.codec import Json, JsonObject, Measure, encode, freeze_object, parse
from vlexport.errors import InputError, RequestError
from vlexport.os_errors import shortage
from vlexport.parity.report import ParityReport, Row, Verdict, report_in

if TYPE_CHECKING:
    from vlexport.evaluate.intervals import Interval

Kind = Literal["bundle", "accuracy table", "timings"]
MODEL = ("checkpoint.weights", "checkpoint.adapter.digest")
# With other ones, times prove nothing about the bundles.
DEVICE = tuple(f"machine.{name}" for name in ("processor", "processors", "threads", "gpu"))
WORKLOAD = ("workload.patches", "workload.tokens", "workload.items")
EXPECTED = (
    "Two bundles, two accuracy tables (`vlexport parity BUNDLE --json`; a bundle has one too) or two "
    "files of `vlexport bench BUNDLE --json` expected."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A field whose value differs; None where one side lacks it."""

    name: str
    first: Json
    second: Json


@dataclass(frozen=True, kw_only=True, slots=True)
class Nearest:
    """The metric of a row that takes most of its limit."""

    verdict: Verdict
    metric: str | None = None
    value: Measure | None = None
    limit: Measure | None = None
    share: Measure | None = None

    @classmethod
    def of(cls, row: Row) -> Nearest:
        found = row.share()
        if found is None:
            return cls(verdict=row.verdict)
        name, share = found
        return cls(
            verdict=row.verdict, metric=name, value=row.metrics[name], limit=row.limits[name], share=share
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPair:
    """One row of both accuracy tables; None where a table lacks it."""

    level: str
    check: str
    shapes: str
    first: Nearest | None
    second: Nearest | None


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphPair:
    """An ONNX graph of two bundles: node counts, and the parts whose counts differ (kind, name, shape)."""

    name: str
    nodes: tuple[int, int]
    differences: tuple[tuple[str, str, str, int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """A contender of two files: medians, and how many times as fast the second is.

    against_reference  how many times as fast as the reference of its own file
    """

    name: str
    second_name: str
    milliseconds: tuple[float, float]
    ratio: Interval
    against_reference: tuple[JsonObject | None, JsonObject | None]
    identity: tuple[Difference, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What differs between two results of a kind.

    waived    reasons for which such a comparison is refused by default
    unpaired  contenders of one file that the other lacks
    """

    kind: Kind
    first: str
    second: str
    waived: tuple[str, ...] = ()
    identity: tuple[Difference, ...] = ()
    summaries: tuple[str, str] | None = None
    rows: tuple[RowPair, ...] = ()
    graphs: tuple[GraphPair, ...] = ()
    sizes: Mapping[str, tuple[int | None, int | None]] = field(default_factory=dict)
    timings: tuple[Timed, ...] = ()
    unpaired: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    def to_json(self) -> dict[str, object]:
        found: dict[str, object] = encode(self)
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class _Subject:
    """One of the two: `identity` are its facts by name, `model` the weights that it is about."""

    place: str
    kind: Kind
    identity: JsonObject
    model: str
    bundle: Bundle | None = None
    report: ParityReport | None = None
    is_own_reference: bool = True
    contenders: tuple[_Contender, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Contender:
    """A part of a file of timings: seconds of every call by round, the identity of a bundle."""

    name: str
    base: str
    rounds: tuple[tuple[float, ...], ...]
    ratio: JsonObject | None
    identity: JsonObject

    @property
    def means(self) -> list[float]:
        return list(map(statistics.fmean, self.rounds))


def compare(
    first: Path | str, second: Path | str, *, trust: str | None = None, allow_different: bool = False
) -> Comparison:
    """Compare two bundles, two accuracy tables or two files of timings.

    trust            the digest of one of the bundles, if it is from elsewhere
    allow_different  also where weights, devices or workloads differ

        compare("engines/BEFORE", "engines/AFTER").rows
    """
    digests = [Bundle.inspect(Path(place)).digest for place in (first, second) if Path(place).is_dir()]
    trust = trust and trust.strip().lower().removeprefix("sha256:")
    if trust is not None and trust not in digests:
        found = " and ".join(digests) or "no bundle"
        raise RequestError(f"trust={trust} given; the digest of one of the two expected, found {found}.")
    one, other = (_subject(Path(place), trust) for place in (first, second))
    if one.kind != other.kind and "timings" in (one.kind, other.kind):
        raise RequestError(f"{one.place}: {one.kind}, {other.place}: {other.kind}. {EXPECTED}")
    waived = tuple(_obstacles(one, other))
    if waived and not allow_different:
        raise RequestError(
            f"{one.place} and {other.place} cannot be compared: {'; '.join(waived)}. Results of one model "
            "expected, times of one workload and device. allow_different=True compares all the same."
        )
    made = Comparison(
        kind=one.kind if one.kind == other.kind else "accuracy table",
        first=one.place,
        second=other.place,
        waived=waived,
        identity=tuple(_differences(one.identity, other.identity)),
    )
    if made.kind == "timings":
        return _with_timings(made, one, other)
    made = replace(
        made, summaries=(_summary(one), _summary(other)), rows=tuple(_rows(one.report, other.report))
    )
    if one.bundle is None or other.bundle is None:
        return made
    sizes = [{name: each.size for name, each in b.manifest.files.items()} for b in (one.bundle, other.bundle)]
    return replace(
        made,
        graphs=tuple(_graphs(one.bundle, other.bundle)),
        sizes={name: (sizes[0].get(name), sizes[1].get(name)) for name in sorted({*sizes[0], *sizes[1]})},
    )


def _subject(place: Path, trust: str | None) -> _Subject:
    if place.is_dir():
        # What is approved is one of the two.
        approved = trust if trust == Bundle.inspect(place).digest else None
        bundle = Bundle.open(place, trust=approved, verify="lazy")
        identity = freeze_object(bundle.manifest.identity(), "identity")
        report = report_in(bundle.verdict)
        return _Subject(
            place=str(place),
            kind="bundle",
            identity=identity,
            model=_model(identity),
            bundle=bundle,
            report=report,
        )
    try:
        content = parse(place.read_bytes())
    except OSError as error:
        raise shortage(error) or RequestError(
            f"{place}: cannot be read ({error.strerror}). {EXPECTED}"
        ) from error
    except InputError as error:
        raise RequestError(f"{place}: no result of vlexport ({error}) {EXPECTED}") from error
    readers = {"parity": _table, "bench": _bench}
    verb = str(content.get("verb"))
    if content.get("schema") != 1 or verb not in readers:
        raise RequestError(f"{place}: schema {content.get('schema')}, verb {verb!r} found. {EXPECTED}")
    try:
        return readers[verb](str(place), content)
    except InputError as error:
        raise RequestError(f"{place}: {error} Write it again: vlexport {verb} BUNDLE --json") from error


def _model(identity: JsonObject) -> str:
    """Return the digest of the weights, and that of the adapter that was folded into them."""
    return " ".join(str(identity[name]) for name in MODEL if identity.get(name) is not None)


def _table(place: str, content: JsonObject) -> _Subject:
    identity, report = _object(content, "identity"), ParityReport.from_json(_object(content, "table"))
    return _Subject(
        place=place,
        kind="accuracy table",
        identity=identity,
        model=_model(identity),
        report=report,
        # A verdict is stored if the reference has the bundle's weights.
        is_own_reference=content.get("stored") is True,
    )


def _bench(place: str, content: JsonObject) -> _Subject:
    if content.get("unit") != "s":
        raise InputError(f"times in {content.get('unit')!r} found, in 's' expected.")
    parts = {name: _object(content, name) for name in ("machine", "workload")}
    identity = {f"{part}.{name}": each for part, known in parts.items() for name, each in known.items()}
    listed = content.get("contenders")
    contenders = map(_contender, listed if isinstance(listed, tuple) else ())
    return _Subject(
        place=place,
        kind="timings",
        identity=identity,
        model=str(identity.get("workload.weights")),
        contenders=tuple(each for each in contenders if each.rounds),
    )


def _contender(content: Json) -> _Contender:
    known = content if isinstance(content, Mapping) else {}
    given = known.get("rounds")
    rounds = [each for each in (given if isinstance(given, tuple) else ()) if isinstance(each, tuple)]
    if not all(each and all(isinstance(call, float) and call > 0 for call in each) for each in rounds):
        raise InputError("contenders.rounds: seconds of calls, above 0, expected.")
    ratio = _object(known, "ratio") if known.get("ratio") else None
    if ratio is not None and not isinstance(ratio.get("median"), float):
        raise InputError("contenders.ratio: a median expected.")
    return _Contender(
        name=str(known.get("name")),
        base=str(known.get("base")),
        rounds=tuple(rounds),
        ratio=ratio,
        identity=_object(known, "identity"),
    )


def _object(content: JsonObject, name: str) -> JsonObject:
    found = content.get(name)
    if not isinstance(found, Mapping):
        raise InputError(f"'{name}': an object expected.")
    return found


def _obstacles(one: _Subject, other: _Subject) -> Iterator[str]:
    """Yield why a comparison proves nothing."""
    if one.model != other.model:
        short = [" with ".join(each[:12] for each in side.model.split()) for side in (one, other)]
        yield f"weights differ ({short[0]} and {short[1]})"
    for each in (one, other):
        if not each.is_own_reference:
            yield f"{each.place} was checked against other weights than its own"
    for name in (*DEVICE, *WORKLOAD):
        first, second = one.identity.get(name), other.identity.get(name)
        if first != second:
            yield f"{name} differs ({first} and {second})"


def _differences(first: JsonObject, second: JsonObject) -> Iterator[Difference]:
    for name in sorted({*first, *second}):
        if first.get(name) != second.get(name):
            yield Difference(name=name, first=first.get(name), second=second.get(name))


def _summary(subject: _Subject) -> str:
    if subject.report is not None:
        return subject.report.summary()
    return subject.bundle.verdict.status if subject.bundle else "not_run"


def _rows(first: ParityReport | None, second: ParityReport | None) -> Iterator[RowPair]:
    """Yield the rows of both reports in their order; of rows with one name, the one nearest to its limit."""
    found = [_nearest(report) for report in (first, second)]
    for level, check, shapes in dict.fromkeys([*found[0], *found[1]]):
        key = (level, check, shapes)
        yield RowPair(
            level=level, check=check, shapes=shapes, first=found[0].get(key), second=found[1].get(key)
        )


def _nearest(report: ParityReport | None) -> dict[tuple[str, str, str], Nearest]:
    found: dict[tuple[str, str, str], Nearest] = {}
    for row in report.rows if report else ():
        key, each = (row.level, row.check, row.shapes), Nearest.of(row)
        if key not in found or (found[key].share or 0.0) < (each.share or 0.0):
            found[key] = each
    return found


def _graphs(first: Bundle, second: Bundle) -> Iterator[GraphPair]:
    from vlexport.onnx.diff import differences, num_nodes, parts_of

    for name in sorted({*first.manifest.files} & {*second.manifest.files}):
        if name.endswith(".onnx"):
            one, other = (parts_of(each.read(name), str(each.path / name)) for each in (first, second))
            nodes = (num_nodes(one), num_nodes(other))
            yield GraphPair(name=name, nodes=nodes, differences=tuple(differences(one, other)))


def _with_timings(made: Comparison, one: _Subject, other: _Subject) -> Comparison:
    from vlexport.evaluate.intervals import unpaired

    first, second = (_timed(each) for each in (one, other))
    names = {name: name for name in first if name in second}
    left = [[name for name in each if name not in names] for each in (first, second)]
    bundles = [
        [name for name in each if side[name].identity]
        for each, side in zip(left, (first, second), strict=True)
    ]
    if len(bundles[0]) == len(bundles[1]) == 1:
        # A bundle's name is its path: after a change it is another one.
        names[bundles[0][0]] = bundles[1][0]
    pairs = [(first[name], second[twin]) for name, twin in names.items()]
    if not pairs:
        raise RequestError(
            f"{one.place} and {other.place}: no contender in common. They have {', '.join(first)}, and "
            f"{', '.join(second)}."
        )
    timings = [
        Timed(
            name=a.name,
            second_name=b.name,
            milliseconds=(1e3 * statistics.median(a.means), 1e3 * statistics.median(b.means)),
            ratio=unpaired(a.means, b.means),
            against_reference=(a.ratio, b.ratio),
            identity=tuple(_differences(a.identity, b.identity)),
        )
        for a, b in pairs
    ]
    alone = (tuple(name for name in first if name not in names), tuple(set(second) - set(names.values())))
    return replace(made, timings=tuple(timings), unpaired=(alone[0], tuple(sorted(alone[1]))))


def _timed(subject: _Subject) -> dict[str, _Contender]:
    """Return references and bundles by name, without the twin that shows a run's own noise."""
    bases = {each.name for each in subject.contenders if each.base == each.name}
    return {each.name: each for each in subject.contenders if each.base in bases}
