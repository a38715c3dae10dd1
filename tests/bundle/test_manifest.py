"""A manifest has one spelling; older ones name what rebuilds them; keys change with what changes results."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.sources import source_digest
from tests.bundle.examples import BUILD, KEY, MANIFEST, PATCHES, PAYLOADS, PROFILE, TARGET, TOKENS
from tests.thirty import ROOT, cases
from vlexport.bundle import Bundle
from vlexport.bundle.files import MANIFEST_NAME, FileRecord
from vlexport.bundle.manifest import SCHEMA, BuildKey, GraphsIdentity, Manifest, Verdict, entry_path, key_of
from vlexport.codec import MAX_BYTES, MAX_DEPTH, canonical, parse
from vlexport.errors import BundleError, InputError
from vlexport.specs import Range, ShapeProfile

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


@pytest.mark.seconds
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
        r"schema 1 found, 7 expected.*older version.*[Bb]uild",
    ),
    "newer": (
        edited(lambda value: value.update(schema=8, invented="later")),
        r"schema 8 found.*newer version. Update vlexport",
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
    with pytest.raises(BundleError, match=r"`vlexport build 'a; rm -rf ~'`\. Build"):
        Manifest.parse(hostile)
    with pytest.raises(BundleError, match=r"of an older version\. Build"):
        Manifest.parse(b'{"checkpoint": [], "schema": 1}')


def test_the_command_for_an_older_bundle_names_its_commit_once_its_adapter_and_its_bounds(subtests):
    commit = "a" * 40
    for source, place in (
        (f"org/name@{commit}", f"org/name@{commit}"),
        (f"/hub/snapshots/{commit}", f"/hub/snapshots/{commit}"),
    ):
        checkpoint = {"source": source, "revision": commit, "adapter": {"source": "/lora"}}
        older = {
            "checkpoint": checkpoint,
            "profile": {"name": "custom-1-784-4-0"},
            "target": "mine@1",
            "schema": 6,
        }
        bounds = "--min-pixels 1 --max-pixels 784 --max-images 4 --max-frames 0"
        command = f"`vlexport build {place} --lora /lora --backend FILE.py {bounds}`."
        with subtests.test(place), pytest.raises(BundleError, match=re.escape(command)):
            Manifest.parse(json.dumps(older).encode())


def test_the_page_names_every_field_and_schema():
    page = (ROOT / "docs" / "manifest.md").read_text(encoding="utf-8")
    assert [name for name in (each.name for each in fields(Manifest)) if f"| `{name}` |" not in page] == []
    assert [number for number in range(1, SCHEMA + 1) if f"| {number} |" not in page] == []


CHANGES: list[tuple[str, Any]] = [
    ("recipe", "another_recipe"),
    ("recipe_digest", "f" * 64),
    ("package_digest", "f" * 64),
    ("weights_digest", "f" * 64),
    ("config_digest", "f" * 64),
    ("preprocessing", {"patch_size": 16}),
    ("preprocessing", {"patch_size": 14.0}),
    ("preprocessing", {"patch_size": "14"}),
    ("preprocessing", {"patch_size": 14, "more": None}),
    ("backend", "inductor"),
    ("backend_version", "0.2"),
    ("torch_version", "2.13.1"),
    ("exporter_versions", {"onnxscript": "0.6"}),
    ("exporter_versions", {"onnxscript": "0.5", "onnx": "1.21"}),
    ("dtype", "bfloat16"),
    ("fp32_layers", {}),
    ("fp32_layers", {"norm": "float16"}),
    ("quantisation", "int8"),
    ("quantisation", ""),
    ("attention_form", "equal_frames"),
    ("graphs", GraphsIdentity(selector="vidcom2", target=BUILD.graphs.target)),
    ("graphs", GraphsIdentity(selector="evs", reason="no C++ compiler")),
    ("graphs", replace(BUILD.graphs, cells=("static",))),
    ("graphs", replace(BUILD.graphs, cells=("predicted", "static"))),
    ("profile", ShapeProfile("video", PROFILE.ranges)),
    ("profile", ShapeProfile("image", {PATCHES: Range(4, 1024, 4096)})),
    ("profile", ShapeProfile("image", {**PROFILE.ranges, TOKENS: Range(2, 256, 1024)})),
    ("profile", ShapeProfile("image", {**PROFILE.ranges, TOKENS: Range(1, 255, 1024)})),
    ("profile", ShapeProfile("image", {**PROFILE.ranges, TOKENS: Range(1, 256, 1025)})),
    ("options", {"opt_level": 4}),
    ("options", {}),
    ("target", replace(TARGET, backend="inductor")),
    ("target", replace(TARGET, version="0.2")),
    ("target", replace(TARGET, platform="macos-arm64")),
    ("target", replace(TARGET, device="sm89")),
    ("target", replace(TARGET, instruction_set="avx2")),
    ("target", replace(TARGET, torch=None)),
]


def test_every_changed_input_gives_a_key_and_a_path_of_its_own(record_property):
    record_property("changes of the key", len(CHANGES))
    names = {key_of(BUILD): "unchanged"}
    for field, value in CHANGES:
        name, changed = f"{field}: {value}", replace(BUILD, **{field: value})
        key = key_of(changed)
        assert key not in names, (name, names[key])
        names[key] = name
        paths = {entry_path(Path("engines"), build, "model") for build in (changed, BUILD)}
        assert len(paths) == 2, name
    assert {field for field, _ in CHANGES} == {field.name for field in fields(BuildKey)}


def test_time_folders_environment_and_the_order_of_options_leave_the_key_alone(tmp_path, monkeypatch):
    one = replace(BUILD, options={"a": 1, "b": [1, 2]})
    before = key_of(one)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VLEXPORT_NOISE", "1")
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert key_of(replace(BUILD, options={"b": (1, 2), "a": 1})) == before
    assert entry_path(tmp_path, BUILD, "m").name == entry_path(Path("engines"), BUILD, "m").name


def test_the_key_is_the_same_in_every_release_until_its_version_changes() -> None:
    # Written down when key version 4 was defined: rules before the tower.
    assert key_of(BUILD) == "126169659da505e54b1ef0405e255938502bbf73b8199676ca23b55a02763f4c"


def test_an_entry_is_named_for_people_and_by_its_key() -> None:
    name = f"Model-2.5B-eager-float32-image-{key_of(BUILD)[:8]}"
    assert entry_path(Path("engines"), BUILD, "Model-2.5B") == Path("engines") / name


def test_hostile_names_cannot_leave_the_output_folder() -> None:
    hostile = replace(BUILD, dtype="", profile=ShapeProfile("a+b\n", PROFILE.ranges))
    path = entry_path(Path("engines"), hostile, "../../x/\0")
    assert path.parent == Path("engines")
    assert path.name.startswith("x-eager-x-a_b-")


def test_a_digest_that_is_none_is_refused() -> None:
    with pytest.raises(InputError, match="weights_digest"):
        replace(BUILD, weights_digest="latest")


def test_a_source_digest_sees_names_and_content_of_python_files_only(tmp_path: Path) -> None:
    package = tmp_path / "package"
    (package / "inner").mkdir(parents=True)
    (package / "inner" / "one.py").write_text("1")
    first = source_digest(package)
    (package / "notes.txt").write_text("x")
    assert source_digest(package) == first
    (package / "inner" / "one.py").rename(package / "inner" / "two.py")
    second = source_digest(package)
    assert second != first
    (package / "inner" / "two.py").write_text("2")
    assert source_digest(package) not in (first, second)
    assert source_digest(package / "inner" / "two.py") != source_digest(package)
