"""A manifest has one spelling, everything else is refused, and older ones name what rebuilds them."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bundle.examples import KEY, MANIFEST, PAYLOADS
from tests.thirty import ROOT, cases
from vlexport.bundle import MANIFEST_NAME, SCHEMA, Bundle, FileRecord, Manifest, Verdict
from vlexport.codec import MAX_BYTES, MAX_DEPTH, canonical, parse
from vlexport.errors import BundleError, InputError

FULL = replace(MANIFEST, files={"engine.bin": FileRecord(size=3, sha256="e" * 64)})

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63) + 1, 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


def edited(change: Callable[[dict[str, Any]], object]) -> bytes:
    """The manifest's bytes after a change to its JSON, spelled canonically."""
    value = json.loads(FULL.encoded())
    change(value)
    return (json.dumps(value, sort_keys=True, indent=1) + "\n").encode()


def test_a_manifest_reads_back_as_itself() -> None:
    assert Manifest.parse(FULL.encoded()) == FULL


def test_the_digest_is_of_the_bytes_on_disk_and_independent_of_the_order_of_keys() -> None:
    shuffled = replace(
        FULL, preprocessing={key: FULL.preprocessing[key] for key in reversed(list(FULL.preprocessing))}
    )
    assert shuffled.encoded() == FULL.encoded()
    assert shuffled.digest() == FULL.digest()


def test_a_manifest_cannot_be_changed_through_the_values_it_was_made_of() -> None:
    rows = [1, 2]
    verdict = Verdict(status="observed", table={"rows": rows})
    rows.append(3)
    assert verdict.table == {"rows": (1, 2)}
    with pytest.raises(TypeError):
        verdict.table["rows"] = 4  # type: ignore[index]


@given(
    st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), JSON_VALUES, max_size=5)
)
def test_canonical_json_reads_back_and_is_written_the_same_again(value: dict[str, Any]) -> None:
    assert canonical(parse(canonical(value))) == canonical(value)
    assert json.loads(canonical(value)) == value


# Types of fields are the codec's, in tests/test_codec.py.
WRONG: dict[str, Callable[[dict[str, Any]], object]] = {
    "schema as text": lambda v: v.update(schema="1"),
    "schema true": lambda v: v.update(schema=True),
    "schema 0": lambda v: v.update(schema=0),
    "key too short": lambda v: v.update(key=KEY[:-1]),
    "key in capitals": lambda v: v.update(key=KEY.upper()),
    "recipe digest": lambda v: v["recipe"].update(digest="x" * 64),
    "ranges of two": lambda v: v["profile"]["ranges"].update(patches=[1, 2]),
    "ranges of four": lambda v: v["profile"]["ranges"].update(patches=[1, 2, 3, 4]),
    "ranges of text": lambda v: v["profile"]["ranges"].update(patches=["1", "2", "3"]),
    "ranges with true": lambda v: v["profile"]["ranges"].update(patches=[True, 2, 3]),
    "range of a multiple": lambda v: v["profile"]["ranges"].update({"4*patches": [1, 2, 3]}),
    "shape negative": lambda v: v["inputs"][0].update(shape=[-1]),
    "shape fraction": lambda v: v["inputs"][0].update(shape=[1.5]),
    "shape digits": lambda v: v["inputs"][0].update(shape=["12"]),
    "file size negative": lambda v: v["files"]["engine.bin"].update(size=-1),
    "file size true": lambda v: v["files"]["engine.bin"].update(size=True),
    "file hash": lambda v: v["files"]["engine.bin"].update(sha256="0"),
    "status": lambda v: v["parity"].update(status="fine"),
    "created without zone": lambda v: v.update(created="2026-01-31T12:00:00"),
    "created in other digits": lambda v: v.update(created="\u0662026-01-31T12:00:00Z"),
    "integer of 64 bits": lambda v: v["options"].update(opt_level=2**63),
    "lone surrogate": lambda v: v["options"].update(opt_level="\ud800"),
}


def without(key: str) -> bytes:
    return edited(lambda value: value.pop(key))


def with_more(*where: str) -> bytes:
    def add(value: dict[str, Any]) -> None:
        for step in where:
            value = value[step]
        value["extra"] = 1

    return edited(add)


KEYS = sorted(json.loads(FULL.encoded()))
PARTS = [(), *((each,) for each in ("recipe", "checkpoint", "precision", "profile", "parity"))]
REFUSED: dict[str, tuple[bytes, str]] = {
    **{
        f"no {key}": (without(key), "no schema number" if key == "schema" else f"missing {key}")
        for key in KEYS
    },
    **{f"more in {where}": (with_more(*where), "unknown 'extra'") for where in PARTS},
    **{name: (edited(change), "manifest: ") for name, change in WRONG.items()},
    "nothing": (b"", "strict JSON"),
    "a list": (b"[]", "a JSON object"),
    "no text": (b"\xff\xfe", "strict JSON"),
    "a mark": (b"\xef\xbb\xbf{}", "strict JSON"),
    "a key twice": (b'{"a": 1, "a": 1}', "duplicate key 'a'"),
    "NaN": (b'{"a": NaN}', "NaN is not"),
    "infinity": (b'{"a": -Infinity}', "-Infinity is not"),
    "a large float": (b'{"a": 1e999}', "too large"),
    "a large integer": (b'{"a": ' + b"1" * 5000 + b"}", "strict JSON"),
    "deep": (b'{"a": ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", "nested deeper"),
    "very deep": (b"[" * 1_000_000, "nested deeper"),
    "long": (b'{"a": "' + b"x" * MAX_BYTES + b'"}', "at most"),
    # Hostile quotes and many keys take no quadratic time.
    **{
        f"many {unit}": (('{"a": "' + unit * 500_000).encode(), "manifest")
        for unit in ('\\"', '"', '","', '["')
    },
    "many keys": (
        ("{" + "".join(f'"{number}":1,' for number in range(150_000)) + '"149999":1}').encode(),
        "duplicate key '149999'",
    ),
    "older": (
        edited(lambda value: value.update(schema=1)),
        r"schema 1 found, 5 expected.*older version.*[Bb]uild",
    ),
    "newer": (
        edited(lambda value: value.update(schema=6, invented="later")),
        r"schema 6 found.*newer version. Update vlexport",
    ),
    **{
        f"{place} spelled otherwise": (raw, "not formatted as vlexport writes it")
        for place, raw in {
            "begin": b" " + FULL.encoded(),
            "more at the end": FULL.encoded() + b"\n",
            "less at the end": FULL.encoded().rstrip(),
        }.items()
    },
}


def test_another_form_spelling_or_schema_is_refused_with_what_is_wrong(subtests):
    for name, (raw, message) in REFUSED.items():
        with subtests.test(name), pytest.raises(BundleError, match=message):
            Manifest.parse(raw)


def test_what_json_cannot_hold_is_refused_when_it_is_given(subtests):
    for value in (float("nan"), float("inf"), 2**63, "\udc00"):
        with subtests.test(ascii(value)), pytest.raises(InputError, match="options"):
            replace(FULL, options={"a": [value]})


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_bundle_error(raw: bytes) -> None:
    with pytest.raises(BundleError):
        Manifest.parse(raw)


def test_a_mutated_manifest_is_refused_or_has_another_digest_than_the_one_trusted(record_property) -> None:
    record_property("mutated manifests", cases("mutated manifests"))
    source, good = random.Random(0), FULL.encoded()
    pieces = [b"", b"9", b'"', b"{", b"}", b",", b"null", b"-"]
    for _ in range(cases("mutated manifests")):
        raw = bytearray(good)
        for _ in range(source.randint(1, 4)):
            at = source.randrange(len(raw))
            raw[at : at + source.randint(0, 3)] = source.choice(pieces)
        try:
            manifest = Manifest.parse(bytes(raw))
        except BundleError:
            continue
        assert manifest.encoded() == raw
        assert (manifest.digest() == FULL.digest()) == (raw == good)


KEPT = ROOT / "tests" / "golden" / "bundles"
COMMAND = f"vlexport build org/name@{'c' * 40} --recipe FILE --backend eager --dtype bfloat16 --profile image"


@pytest.mark.parametrize("schema", range(1, SCHEMA + 1))
def test_a_bundle_of_every_schema_opens_or_is_refused_with_the_command_that_rebuilds_it(schema, tmp_path):
    path = shutil.copytree(KEPT / f"schema-{schema}", tmp_path / "bundle")
    digest = hashlib.sha256((path / MANIFEST_NAME).read_bytes()).hexdigest()
    assert Bundle.inspect(path, user_data=tmp_path).content["schema"] == schema
    if schema == SCHEMA:
        opened = Bundle.open(path, trust=digest, user_data=tmp_path)
        assert {name: opened.read(name) for name in opened.manifest.files} == PAYLOADS
        return
    with pytest.raises(BundleError, match=f"schema {schema} found.*{re.escape(COMMAND)}"):
        Bundle.open(path, trust=digest, user_data=tmp_path)


def test_a_command_is_quoted_and_left_out_where_the_manifest_has_no_source():
    hostile = b'{"checkpoint": {"source": "a; rm -rf ~"}, "recipe": 3, "schema": 1}'
    with pytest.raises(BundleError, match=r"vlexport build 'a; rm -rf ~' Build"):
        Manifest.parse(hostile)
    with pytest.raises(BundleError, match=r"of an older version\. Build"):
        Manifest.parse(b'{"checkpoint": [], "schema": 1}')


def test_the_page_names_every_field_and_schema():
    page = (ROOT / "docs" / "manifest.md").read_text(encoding="utf-8")
    assert [name for name in (each.name for each in fields(Manifest)) if f"| `{name}` |" not in page] == []
    assert [number for number in range(1, SCHEMA + 1) if f"| {number} |" not in page] == []
