"""Two results side by side: bundles, tables, timings, graphs; what cannot be compared is refused."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from vlexport.bundle import Bundle
from vlexport.codec import Json, JsonObject, Measure, encode
from vlexport.errors import InputError, RequestError
from vlexport.evaluate.intervals import Interval, unpaired
from vlexport.parity.report import ParityReport, Row, Verdict
from vlexport.reports.facts import BundleFacts
from vlexport.reports.features import SUFFIXES, Features, ItemPair, pairs_of
from vlexport.reports.results import Contender, calls_from, document
from vlexport.system import shortage

Kind = Literal["bundle", "accuracy table", "timings", "embeddings", "graphs"]
# With other ones, times prove nothing about the bundles.
DEVICE = tuple(f"machine.{name}" for name in ("processor", "processors", "threads", "gpu"))
WORKLOAD = ("workload.patches", "workload.tokens", "workload.items")
EXPECTED = (
    "Two bundles, two accuracy tables (`vlexport check BUNDLE --accuracy --json`; a bundle has one too), two "
    "files of `vlexport bench BUNDLE --json`, two of embeddings (*.safetensors, index.jsonl) or two ONNX "
    "graphs expected."
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
        if (nearest := row.share()) is None:
            return cls(verdict=row.verdict)
        name, share = nearest
        value, limit = row.metrics[name], row.limits[name]
        return cls(verdict=row.verdict, metric=name, value=value, limit=limit, share=share)


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
class TimedPair:
    """A contender of two files: medians, speed-up, and speed-ups against each file's own reference."""

    name: str
    second_name: str
    milliseconds: tuple[float, float]
    ratio: Interval
    against_reference: tuple[Interval | None, Interval | None]
    identity: tuple[Difference, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Differences of two results; `waived` obstacles, and `unpaired` contenders that one file lacks."""

    kind: Kind
    first: str
    second: str
    waived: tuple[str, ...] = ()
    identity: tuple[Difference, ...] = ()
    summaries: tuple[str, str] | None = None
    rows: tuple[RowPair, ...] = ()
    graphs: tuple[GraphPair, ...] = ()
    sizes: Mapping[str, tuple[int | None, int | None]] = field(default_factory=dict)
    timings: tuple[TimedPair, ...] = ()
    unpaired: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    items: tuple[ItemPair, ...] = ()

    def to_json(self) -> dict[str, object]:
        return {**encode(self)}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Subject:
    """One of the two: `identity` are its fields by name, `weights` those that it is about."""

    place: str
    kind: Kind
    identity: JsonObject
    weights: str
    facts: BundleFacts | None = None
    bundle: Bundle | None = None
    contenders: tuple[Contender, ...] = ()


def compare(
    first: Path | str, second: Path | str, *, graph: str | None = None, allow_different: bool = False
) -> Comparison:
    """Compare two bundles, accuracy tables, files of timings or of embeddings, or ONNX graphs.

    graph            a graph of bundles to compare by operator; of files *.onnx it is the file
    allow_different  also where weights, devices or workloads differ

        compare("engines/BEFORE", "engines/AFTER").rows
    """
    if all(Path(place).suffix in SUFFIXES for place in (first, second)):
        if graph is not None:
            raise RequestError(f"graph {graph!r} given with embeddings; bundles expected. Leave it out.")
        return _embeddings(*(Features.of(Path(place)) for place in (first, second)))
    if graph is not None or any(Path(place).suffix == ".onnx" for place in (first, second)):
        pair = _graph_pair(graph or "model.onnx", Path(first), Path(second))
        return Comparison(kind="graphs", first=str(first), second=str(second), graphs=(pair,))
    one, other = (_subject(Path(place)) for place in (first, second))
    if one.kind != other.kind and "timings" in (one.kind, other.kind):
        raise RequestError(f"{one.place}: {one.kind}, {other.place}: {other.kind}. {EXPECTED}")
    waived = tuple(_obstacles(one, other))
    if waived and not allow_different:
        raise RequestError(
            f"{one.place} and {other.place} cannot be compared: {'; '.join(waived)}. Results of one model "
            "expected, times of one workload and device. allow_different compares all the same."
        )
    comparison = Comparison(
        kind=one.kind if one.kind == other.kind else "accuracy table",
        first=one.place,
        second=other.place,
        waived=waived,
        identity=_differences(one.identity, other.identity),
    )
    if comparison.kind == "timings":
        return _with_timings(comparison, one, other)
    assert one.facts is not None
    assert other.facts is not None
    comparison = replace(
        comparison,
        summaries=(one.facts.summary, other.facts.summary),
        rows=tuple(_rows(one.facts.report, other.facts.report)),
    )
    if one.bundle is None or other.bundle is None:
        return comparison
    sizes = (one.facts.sizes, other.facts.sizes)
    return replace(
        comparison,
        graphs=tuple(_graphs(one.bundle, other.bundle)),
        sizes={name: (sizes[0].get(name), sizes[1].get(name)) for name in sorted({*sizes[0], *sizes[1]})},
    )


def _embeddings(first: Features, second: Features) -> Comparison:
    return Comparison(
        kind="embeddings",
        first=str(first.path),
        second=str(second.path),
        identity=_differences(first.made_by, second.made_by),
        items=tuple(pairs_of(first, second)),
    )


def _subject(path: Path) -> _Subject:
    place = str(path)
    if path.is_dir():
        bundle = Bundle.open(path, verify="lazy")
        return _about(place, "bundle", BundleFacts.of(bundle), bundle)
    try:
        content = document(path, ("check", "bench"))
    except InputError as error:
        raise RequestError(f"{place}: no result of vlexport ({error}) {EXPECTED}") from error
    verb = content["verb"]
    again = "check BUNDLE --accuracy" if verb == "check" else "bench BUNDLE"
    try:
        if verb == "check":
            return _about(place, "accuracy table", BundleFacts.from_json(content))
        return _bench(place, content)
    except InputError as error:
        raise RequestError(f"{place}: {error} Write it again: vlexport {again} --json") from error


def _about(place: str, kind: Kind, facts: BundleFacts, bundle: Bundle | None = None) -> _Subject:
    return _Subject(
        place=place, kind=kind, identity=facts.identity, weights=facts.weights, facts=facts, bundle=bundle
    )


def _bench(place: str, content: JsonObject) -> _Subject:
    call, *others = calls_from(content)
    if others:
        raise InputError(f"times of {len(others) + 1} files found, of one call expected.")
    parts = {"machine": call.machine, "workload": call.workload}
    return _Subject(
        place=place,
        kind="timings",
        identity={f"{part}.{name}": fact for part, facts in parts.items() for name, fact in facts.items()},
        weights=str(call.workload.get("weights")),
        contenders=tuple(contender for contender in call.contenders if contender.rounds),
    )


def _obstacles(one: _Subject, other: _Subject) -> Iterator[str]:
    if one.weights != other.weights:
        short = [" with ".join(digest[:12] for digest in side.weights.split()) for side in (one, other)]
        yield f"weights differ ({short[0]} and {short[1]})"
    for side in (one, other):
        if side.facts is not None and not side.facts.is_own_reference:
            yield f"{side.place} was checked against other weights than its own"
    for name in (*DEVICE, *WORKLOAD):
        first, second = one.identity.get(name), other.identity.get(name)
        if first != second:
            yield f"{name} differs ({first} and {second})"


def _differences(first: JsonObject, second: JsonObject) -> tuple[Difference, ...]:
    return tuple(
        Difference(name=name, first=first.get(name), second=second.get(name))
        for name in sorted({*first, *second})
        if first.get(name) != second.get(name)
    )


def _rows(first: ParityReport | None, second: ParityReport | None) -> Iterator[RowPair]:
    """Yield the rows of both reports in their order; of rows with one name, the one nearest to its limit."""
    one, other = _nearest(first), _nearest(second)
    for key in dict.fromkeys([*one, *other]):
        level, check, shapes = key
        yield RowPair(level=level, check=check, shapes=shapes, first=one.get(key), second=other.get(key))


def _nearest(report: ParityReport | None) -> dict[tuple[str, str, str], Nearest]:
    rows: dict[tuple[str, str, str], Nearest] = {}
    for row in report.rows if report else ():
        key, nearest = (row.level, row.check, row.shapes), Nearest.of(row)
        if key not in rows or (rows[key].share or 0.0) < (nearest.share or 0.0):
            rows[key] = nearest
    return rows


def _graphs(first: Bundle, second: Bundle) -> Iterator[GraphPair]:
    for name in sorted({*first.manifest.files} & {*second.manifest.files}):
        if name.endswith(".onnx"):
            yield _graph_pair(name, first, second)


def _graph_pair(name: str, *places: Path | Bundle) -> GraphPair:
    """Compare a graph of two bundles, or of a bundle and a file *.onnx, or two such files."""
    from vlexport.onnx.diff import differences, num_nodes, parts_of

    one, other = (
        parts_of(_graph(place, name), str(place.path / name if isinstance(place, Bundle) else place))
        for place in places
    )
    nodes = (num_nodes(one), num_nodes(other))
    return GraphPair(name=name, nodes=nodes, differences=tuple(differences(one, other)))


def _graph(place: Path | Bundle, name: str) -> bytes:
    if isinstance(place, Bundle) or place.is_dir():
        return Bundle.open(place, verify="lazy").read(name)
    try:
        return place.read_bytes()
    except OSError as error:
        raise shortage(error) or RequestError(
            f"{place}: cannot be read ({error.strerror}). Pass a .onnx file or a bundle."
        ) from error


def _with_timings(comparison: Comparison, one: _Subject, other: _Subject) -> Comparison:
    first, second = (_without_twins(side.contenders) for side in (one, other))
    names = {name: name for name in first if name in second}
    bundles = [
        [name for name in side if side[name].identity and name not in names] for side in (first, second)
    ]
    if len(bundles[0]) == len(bundles[1]) == 1:
        # A bundle's name is its path: after a change it is another one.
        names[bundles[0][0]] = bundles[1][0]
    if not names:
        raise RequestError(
            f"{one.place} and {other.place}: no contender in common. They have {', '.join(first)}, and "
            f"{', '.join(second)}."
        )
    timings = []
    for a, b in ((first[name], second[twin]) for name, twin in names.items()):
        ours, theirs = (list(map(statistics.fmean, side.rounds)) for side in (a, b))
        timings.append(
            TimedPair(
                name=a.name,
                second_name=b.name,
                milliseconds=(1e3 * statistics.median(ours), 1e3 * statistics.median(theirs)),
                ratio=unpaired(ours, theirs),
                against_reference=(a.ratio, b.ratio),
                identity=_differences(a.identity, b.identity),
            )
        )
    alone = tuple(name for name in first if name not in names), tuple(sorted({*second} - {*names.values()}))
    return replace(comparison, timings=tuple(timings), unpaired=alone)


def _without_twins(contenders: tuple[Contender, ...]) -> dict[str, Contender]:
    """Return references and bundles by name; a twin shows a run's own noise."""
    bases = {contender.name for contender in contenders if contender.base == contender.name}
    return {contender.name: contender for contender in contenders if contender.base in bases}
