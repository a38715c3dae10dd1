"""The key changes with everything that changes the result, and with nothing else."""

from __future__ import annotations

import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.sources import source_digest
from tests.bundle.examples import BUILD, PATCHES, PROFILE, TARGET, TOKENS
from vlexport.bundle import BuildKey, GraphsIdentity, entry_path, key_of
from vlexport.errors import InputError
from vlexport.specs import Range, ShapeProfile

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
        assert entry_path(Path("engines"), changed) != entry_path(Path("engines"), BUILD), name
    assert {field for field, _ in CHANGES} == {field.name for field in fields(BuildKey)}


def test_time_folders_environment_and_the_order_of_options_leave_the_key_alone(tmp_path, monkeypatch):
    one = replace(BUILD, options={"a": 1, "b": [1, 2]})
    before = key_of(one)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VLEXPORT_NOISE", "1")
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert key_of(replace(BUILD, options={"b": (1, 2), "a": 1})) == before
    assert entry_path(tmp_path, BUILD).name == entry_path(Path("engines"), BUILD).name


def test_the_key_is_the_same_in_every_release_until_its_version_changes() -> None:
    # Written down when key version 3 was defined: graphs of pruning and positions.
    assert key_of(BUILD) == "e554d1dffabd9bae3ce13d909db936c6913f49c792068ac937baa3295329df3c"


def test_an_entry_is_named_for_people_and_by_its_key() -> None:
    name = f"a_recipe-eager-float32-image-{key_of(BUILD)[:16]}"
    assert entry_path(Path("engines"), BUILD) == Path("engines") / name


def test_hostile_names_cannot_leave_the_output_folder() -> None:
    hostile = replace(BUILD, recipe="../../x/\0", dtype="", profile=ShapeProfile("a+b\n", PROFILE.ranges))
    path = entry_path(Path("engines"), hostile)
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
