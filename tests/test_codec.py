"""Dataclasses come back from JSON as they were; anything else is refused by the path of its field."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from vlexport.codec import JsonObject, Measure, decode, encode
from vlexport.errors import InputError
from vlexport.specs import Multiple, Range, ShapeProfile, Symbol, TensorSpec
from vlexport.target import Target

PATCHES = Symbol("patches")


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: int
    rate: float = 1.0
    name: str | None = None


@dataclass(frozen=True, kw_only=True)
class Outer:
    kind: Literal["a", "b"]
    inner: Inner
    many: tuple[Inner, ...]
    pair: tuple[int, str]
    by_name: Mapping[str, Mapping[str, int]]
    spec: TensorSpec
    profile: ShapeProfile
    target: Target
    measured: Mapping[str, Measure]
    free: JsonObject
    flag: bool = False


GOOD = Outer(
    kind="a",
    inner=Inner(size=3, rate=0.5),
    many=(Inner(size=1, name="x"),),
    pair=(1, "two"),
    by_name={"a": {"b": 2}},
    spec=TensorSpec("patches", "float32", (2, PATCHES, Multiple(4, PATCHES))),
    profile=ShapeProfile("any", {PATCHES: Range(1, 2, 3)}),
    target=Target(backend="eager", version="1", platform="linux-x86_64", device="cpu"),
    measured={"error": 1e-6, "worst": math.inf},
    free={"list": (1, None, {"deep": True})},
)


def changed(path: str, value: object) -> Any:
    """Return the JSON of `GOOD` with another value at a path."""
    found = json.loads(json.dumps(encode(GOOD)))
    *steps, last = path.split(".")
    level = found
    for step in steps:
        level = level[step]
    level[last] = value
    return found


def test_a_dataclass_comes_back_as_it_was() -> None:
    assert decode(Outer, json.loads(json.dumps(encode(GOOD), allow_nan=False))) == GOOD


WRONG: list[tuple[str, object, str]] = [
    ("kind", "c", r"kind: 'c' \(str\) given, 'a' or 'b' expected"),
    ("inner.size", True, r"inner\.size: True \(bool\) given, a whole number expected"),
    ("inner.size", 1.5, r"inner\.size: 1\.5 \(float\) given, a whole number"),
    ("inner.rate", math.nan, r"inner\.rate: nan \(float\) given, a finite number"),
    ("inner.rate", "inf", r"inner\.rate: 'inf' \(str\) given, a finite number"),
    ("inner.name", 1, r"inner\.name: 1 \(int\) given, a text"),
    ("inner.name", "\ud800", r"inner\.name: a lone surrogate"),
    ("inner.extra", 1, r"inner: missing nothing, unknown 'extra'; expected exactly name, rate, size"),
    ("inner", {"size": 1}, r"inner: missing name, rate, unknown nothing"),
    ("inner", [], r"inner: list given, an Inner expected"),
    ("many", {}, r"many: dict given, a list expected"),
    ("many", [{"size": 1, "rate": 1, "name": 2}], r"many\[0\]\.name: 2 \(int\) given"),
    ("pair", [1], r"pair: 1 entries given, 2 expected"),
    ("pair", [1, 2], r"pair\[1\]: 2 \(int\) given, a text"),
    ("by_name.a.b", "x", r"by_name\.a\.b: 'x' \(str\) given"),
    ("by_name.a", 3, r"by_name\.a: 3 \(int\) given, a Mapping"),
    ("spec.shape", ["4*a*b"], r"spec\.shape\[0\]: '4\*a\*b'"),
    ("profile.ranges.patches", [3, 2, 1], r"profile\.ranges\.patches: range 3\.\.2\.\.1"),
    ("target", "eager", r"target.*expected 'backend@version"),
    ("measured.error", "big", r"measured\.error: 'big' \(str\) given, a finite number"),
    ("free", [], r"free: list given, a Mapping"),
    ("flag", 1, r"flag: 1 \(int\) given, True or False"),
    ("other", 1, r"top level: missing nothing, unknown 'other'"),
]  # fmt: skip


def test_what_differs_is_refused_by_the_path_of_its_field(subtests):
    for path, value, message in WRONG:
        with subtests.test(message), pytest.raises(InputError, match=message):
            decode(Outer, changed(path, value))


def test_what_a_dictionary_holds_is_read_as_its_kind() -> None:
    assert decode(dict[str, tuple[str, str]], {"a": ["b", "c"]}) == {"a": ("b", "c")}
    with pytest.raises(InputError, match=r"record\.a: "):
        decode(dict[str, tuple[str, str]], {"a": "b"}, "record")


def test_numbers_that_json_lacks_are_text_only_where_measurements_stand() -> None:
    assert encode(GOOD)["measured"]["worst"] == "inf"
    assert decode(Outer, encode(GOOD)).measured["worst"] == math.inf


def test_paths_and_nested_values_are_plain_json() -> None:
    assert encode({"at": Path("/x"), "all": (GOOD.inner,)}) == {
        "at": "/x",
        "all": [{"size": 3, "rate": 0.5, "name": None}],
    }
