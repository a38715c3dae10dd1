"""The user's caches: whatever a maker is given is in the key, and of too many files the oldest go."""

from __future__ import annotations

import inspect
import logging
import os
import re
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest

from tests.adapters import write_adapter
from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport._build import build as _build
from vlexport._build import key as key_
from vlexport._build import token_graphs
from vlexport._build.aoti import target_here
from vlexport._build.key import build_key
from vlexport._build.request import request
from vlexport.bundle import user_folders as file_cache
from vlexport.bundle.manifest import GraphsIdentity, key_of
from vlexport.bundle.user_folders import CacheFile
from vlexport.checkpoint import Checkpoint
from vlexport.onnx import portable
from vlexport.pruning.methods import METHODS
from vlexport.specs import Symbol, TensorSpec


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_different_parts_are_different_files_whatever_they_contain():
    parts = [
        ("a-b", "c"), ("a", "b-c"), ("a", "b", "c"), ("a b",), ("a_b",), ("a/b",), ("a", ""), ("a",),
        ("é" * 300, "x"), ("é" * 300, "y"), ("a" * 300, "x"), ("a" * 300, "y"),
    ]  # fmt: skip
    files = [CacheFile.of("kind", *each) for each in parts]
    assert len({each.path for each in files}) == len(parts)
    for number, each in enumerate(files):
        each.write(str(number).encode())
    assert [each.read() for each in files] == [str(number).encode() for number in range(len(parts))]


def described(name, *given):
    """A model that says what its maker was given."""
    return onnx.ModelProto(doc_string=repr((name, *given)))


def family(**changes: Any) -> Any:
    """What the portable graphs read of a traced tower."""
    given = {
        "digest": "a" * 64, "rule": "time_scaled", "merge": 2, "pace": 2.0, "counts": False, "config": 1,
        "inputs": (TensorSpec(name="order", dtype="int32", shape=(Symbol("rows"),)),), "language": True,
        **changes,
    }  # fmt: skip
    language = SimpleNamespace(tokens_per_second=lambda _: given["pace"], counts_frames=given["counts"])
    recipe = SimpleNamespace(
        digest=given["digest"],
        position_rule=given["rule"],
        language=language if given["language"] else None,
        packing=lambda config: SimpleNamespace(merge=given["merge"], of=(given["digest"], config)),
    )
    return SimpleNamespace(recipe=recipe, config=given["config"], inputs=given["inputs"])


FAMILIES = {
    "base": family(),
    "another recipe": family(digest="b" * 64),
    "another config": family(config=2),
    "axes of another name": family(
        inputs=(TensorSpec(name="order", dtype="int32", shape=(Symbol("cells"),)),)
    ),
    "an input less": family(inputs=()),
    "linear": family(rule="linear"),
    "written time": family(rule="time_as_text"),
    "merged by 3": family(merge=3),
    "another pace": family(pace=2.5),
    "nearly the same pace": family(pace=2.0000000000000004),
    "frames counted": family(counts=True),
    "no language model": family(language=False),
}


@pytest.mark.seconds
def test_portable_graphs_from_the_cache_are_those_that_their_makers_make(monkeypatch):
    """Each family after all others have filled the cache, for every selector and without one."""
    tables = lambda packing, inputs: described("tables", packing.of, inputs)  # noqa: E731
    monkeypatch.setattr(portable, "tables_graph", tables)
    monkeypatch.setattr(portable, "digest_with_imports", lambda *_: "a" * 64)
    monkeypatch.setattr(portable, "prune_graph", lambda *given: described("prune", *given))
    for name in ("mrope_positions", "linear_positions"):

        def make(name=name):
            return described(name)

        make.__name__ = name
        monkeypatch.setattr(portable, name, make)
    selectors = (None, *METHODS)
    for _ in range(2):
        found = {
            (name, selector): portable.portable_graphs(graph, selector)
            for name, graph in FAMILIES.items()
            for selector in selectors
        }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CacheFile, "recall", lambda _: None)
        wanted = {
            (name, selector): portable.portable_graphs(graph, selector)
            for name, graph in FAMILIES.items()
            for selector in selectors
        }
    assert [key for key in wanted if found[key] != wanted[key]] == []
    # Each argument matters: the makers were given something else for each.
    bases = {name: found[name, "evs"] for name in FAMILIES}
    assert [name for name in FAMILIES if name != "base" and bases[name] == bases["base"]] == []


@pytest.mark.parametrize("library", portable.LIBRARIES)
def test_portable_graphs_of_another_version_of_a_library_are_made_anew(monkeypatch, library):
    found = []
    for version in ("1", "2"):
        monkeypatch.setattr(portable, "version", lambda name, version=version: version * (name == library))
        found.append(portable._kept("x.onnx", [], partial(described, version)))
    assert found[0] != found[1]


@pytest.mark.parametrize("module", [portable, token_graphs])
def test_graphs_of_other_sources_are_made_anew(monkeypatch, tmp_path, module):
    made: list[str] = []
    stub_packages(monkeypatch)
    for source in "ab":
        monkeypatch.setattr(module, "digest_with_imports", lambda *_, source=source: source * 64)
        if module is portable:
            made.append(portable._kept("x.onnx", [], partial(described, source)).decode())
        else:
            made += packages(tmp_path, "evs", target_here(), "float32", made=True)
    assert len(made) == 2
    assert module is token_graphs or made[0] != made[1]


def told(parts, device):
    """Say what would be traced."""
    return [(type(part.program).__name__, part.example[0].dtype) for part in parts], device


def stub_packages(monkeypatch) -> None:
    """Trace and compile into what says of what."""
    monkeypatch.setattr(token_graphs, "TRIED_APART", ())
    monkeypatch.setattr(token_graphs, "precision_of", lambda selector: {"of": selector.name})
    monkeypatch.setattr(token_graphs, "exported", told)

    @contextmanager
    def begin(program, path, settings):
        MADE.append(path.name)
        yield lambda: path.write_text(repr((program, settings)))

    monkeypatch.setattr(token_graphs, "begun_package", begin)
    monkeypatch.setattr(token_graphs, "_try", lambda *_: None)


MADE: list[str] = []


def packages(
    tmp_path: Path, method: str, target: Any, dtype: str, *, made: bool = False, cells: Any = ()
) -> Any:
    folder = tmp_path / str(len(list(tmp_path.iterdir()))) / "graphs"
    folder.mkdir(parents=True)
    MADE.clear()
    identity = GraphsIdentity(selector=method, target=target, cells=cells)
    token_graphs._write_packages(identity, folder, dtype)
    return [*MADE] if made else {path.name: path.read_bytes() for path in folder.iterdir()}


def test_packages_from_the_cache_are_those_that_would_be_compiled(monkeypatch, tmp_path):
    stub_packages(monkeypatch)
    monkeypatch.setattr(token_graphs, "digest_with_imports", lambda *_: "a" * 64)
    here = target_here()
    wanted = [
        (method, replace(here, device=device), dtype)
        for method in METHODS
        for device in ("cpu", "cuda")
        for dtype in ("float32", "float16", "bfloat16")
    ]
    for _ in range(2):
        found = [packages(tmp_path, *each) for each in wanted]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CacheFile, "recall", lambda _: None)
        assert found == [packages(tmp_path, *each) for each in wanted]
    assert len({each["tokens.pt2"] for each in found}) == len(found)


def test_packages_for_another_machine_or_version_are_compiled_anew(monkeypatch, tmp_path):
    stub_packages(monkeypatch)
    here = replace(target_here("cuda"), instruction_set="avx2")
    assert packages(tmp_path, "evs", here, "float32", made=True) == ["tokens.pt2", "host.pt2"]
    assert packages(tmp_path, "evs", here, "float32", made=True) == []
    for field in fields(here):
        other = replace(here, **{field.name: "another"})
        # Rows of un-pruned prompts are placed on the host, whatever device runs the engine.
        count = 1 if field.name == "device" else 2
        assert len(packages(tmp_path, "evs", other, "float32", made=True)) == count, field.name


@pytest.mark.seconds
def test_every_argument_of_a_build_is_in_its_key_or_changes_no_file(tmp_path, monkeypatch):
    """A place, limits and what shows progress change no file; devices are those of TensorRT (test_keys)."""
    monkeypatch.setattr(key_, "digest_with_imports", lambda *_: "a" * 64)
    path = write_tiny_qwen2_5_vl(tmp_path / "checkpoint")
    other = write_tiny_qwen2_5_vl(tmp_path / "other", seed=1)
    source = Checkpoint.open(path)
    arguments: dict[str, Any] = {
        "checkpoint": other,
        "lora": write_adapter(tmp_path / "adapter", source),
        "recipe": "generic",
        "backend": "eager",
        "dtype": "bfloat16",
        "input_dtype": "uint8",
        "quantize": "int8",
        "profile": "thumbnail",
        "min_pixels": 100,
        "max_pixels": 100_000,
        "max_images": 2,
        "max_frames": 2,
        "fp32_layers": {"merger.ln_q": "float32"},
        "selector": "vidcom2",
    }
    none = {"targets", "build_seconds", "build_memory", "output_dir", "progress"}
    assert set(inspect.signature(request).parameters) == {*arguments, "device"} | none
    base: dict[str, Any] = {"checkpoint": source, "fp32_layers": {}}
    found = {"": key_of(build_key(request(**base)))}
    for name, value in arguments.items():
        # The backend that serves this dtype; its own key is another one.
        served = {"backend": "eager"} if name == "dtype" else {}
        found[name] = key_of(build_key(request(**{**base, **served, name: value})))
    spec = request(**base)
    # A request for a device that is not here is refused.
    found["device"] = key_of(build_key(replace(spec, options=replace(spec.options, device="cuda"))))
    assert len(set(found.values())) == len(found)


def test_graphs_of_a_build_that_failed_are_named_and_not_served_again(tmp_path, caplog):
    folder, kept = tmp_path / "bundle", CacheFile.of("graphs", "wrong")
    right = CacheFile.of("graphs", "of another")
    folder.mkdir()
    kept.keep(b"a wrong graph")
    right.keep(b"a right graph")
    (folder / "positions.onnx").write_bytes(b"a wrong graph")
    (folder / "model.onnx").write_bytes(b"the engine")
    _build._forget_graphs(folder)
    assert f"{kept.path} held a graph of the bundle that failed, and was removed: build again" in caplog.text
    assert (kept.recall(), right.recall()) == (None, b"a right graph")


def test_the_least_recently_used_file_goes_first(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(file_cache, "MOST_FILES", 2)
    first, second, third = (CacheFile.of("graphs", name) for name in ("first", "second", "third"))
    for at, each in enumerate((first, second)):
        each.write(b"x")
        os.utime(each.path, (at, at))
    assert first.read() == b"x"
    third.write(b"y")
    assert (first.read(), second.read(), third.read()) == (b"x", b"", b"y")


@pytest.mark.parametrize(
    ("place", "hub_id", "name"),
    [("/data/alice@corp/Qwen", None, "Qwen"), (f"org/name@{'c' * 40}", "org/name", "name")],
)
def test_a_bundle_is_named_after_its_folder_or_its_id(place, hub_id, name, tmp_path):
    spec = request(Checkpoint.open(write_tiny_qwen2_5_vl(tmp_path / "tiny", depth=1)), backend="eager")
    location = replace(spec.checkpoint.location, source=place, folder=Path(place), hub_id=hub_id)
    assert replace(spec, checkpoint=replace(spec.checkpoint, location=location)).model == name


@pytest.fixture
def file(tmp_path: Path) -> CacheFile:
    return CacheFile(path=tmp_path / "tensorrt" / "some.cache")


def test_a_file_that_goes_while_others_are_counted_is_no_failure_to_write(file: CacheFile, caplog):
    file.write(b"one")
    # Listed, and not there.
    (file.path.parent / "gone.cache").symlink_to("nowhere")
    file.write(b"two")
    assert (file.read(), caplog.text) == (b"two", "")


def test_what_was_written_is_read_and_nothing_else_is_left(file: CacheFile):
    assert file.read() == b""
    file.write(b"one")
    file.write(b"two")
    assert file.read() == b"two"
    assert [each.name for each in file.path.parent.iterdir()] == ["some.cache"]


def test_a_file_is_named_by_everything_that_it_depends_on():
    path = CacheFile.of("tensorrt", "timings", "tensorrt", "11.2.0", "sm90").path
    assert re.fullmatch(r"timings-tensorrt-11\.2\.0-sm90-[0-9a-f]{16}\.cache", path.name)
    assert str(path).startswith(os.environ["XDG_CACHE_HOME"])
    assert CacheFile.of("tensorrt", "../up", "a/b").path.name.startswith(".._up-a_b-")


def test_too_much_is_neither_written_nor_read(file: CacheFile, monkeypatch: pytest.MonkeyPatch):
    file.write(b"before")
    monkeypatch.setattr(file_cache, "MOST_BYTES", 5)
    file.write(b"larger")
    assert file.path.read_bytes() == b"before"
    assert file.read() == b""


def test_a_place_that_cannot_be_written_to_is_a_warning(tmp_path: Path, file: CacheFile, caplog):
    (tmp_path / "tensorrt").write_text("a file")
    with caplog.at_level(logging.WARNING):
        file.write(b"x")
        assert file.read() == b""
    assert "some.cache cannot be written" in caplog.text
