"""A pickle runs code when it is read: none is, wherever it lies, and no source reads one."""

from __future__ import annotations

import ast
import io
import json
import pickle
import shutil
import warnings
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._export.serde.schema import SCHEMA_VERSION

from tests.bundle.examples import store
from tests.repo.tree import library_files, relative
from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport._build import timings as timings_
from vlexport._build.aoti import load_function
from vlexport.backends import EngineSpec, Folder, Options, find_backend
from vlexport.backends._torch import load_program
from vlexport.bundle import Bundle
from vlexport.checkpoint import Adapter, Checkpoint
from vlexport.errors import BundleError, LimitError, RequestError
from vlexport.evaluate.tasks import read_task
from vlexport.media import read_image, read_video
from vlexport.specs import ShapeProfile

# Each has a reason beside it in its file: bytes of an approved bundle.
REVIEWED = {
    # Of a graph that an interrupted build left in this user's cache, where nobody else can write.
    ("vlexport/_build/export.py", "torch.export.load"),
    # Once its pickles were read as tensors and nothing else.
    ("vlexport/backends/_torch.py", "torch.export.load"),
    ("vlexport/backends/_torch.py", "torch.load"),
    ("vlexport/backends/torch_tensorrt.py", "torch.export.load"),
}
FORBIDDEN = {
    "pickle.load", "pickle.loads", "torch.load", "torch.export.load", "yaml.load", "marshal.loads",
    "shelve.open", "eval", "exec", "joblib.load", "dill.load", "dill.loads",
}  # fmt: skip


class Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.mark,)


def archive(content: bytes) -> bytes:
    """A file as torch.save and torch.export.save write it."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as whole:
        for name in (
            "archive/data.pkl",
            "archive/data/weights/weights.pt",
            "archive/byteorder",
            "archive/version",
        ):
            whole.writestr(name, content)
    return file.getvalue()


def exported() -> dict[str, bytes]:
    """The entries of a program as an eager bundle has it."""
    program = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    file = io.BytesIO()
    torch.export.save(program, file)
    with zipfile.ZipFile(file) as whole:
        return {name: whole.read(name) for name in whole.namelist()}


def written(entries: dict[str, bytes]) -> bytes:
    """A program as one file."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as whole:
        for name, content in entries.items():
            whole.writestr(name, content)
    return file.getvalue()


def test_a_pickle_in_any_file_that_is_read_is_never_run(tmp_path, monkeypatch, subtests, record_property):
    mark = tmp_path / "mark"
    bare = pickle.dumps(Bomb(mark))
    file = io.BytesIO()
    np.save(file, np.array([Bomb(mark)], object), allow_pickle=True)
    forms = {"pickle": bare, "pt": archive(bare), "npy": file.getvalue()}
    tiny = write_tiny_qwen2_5_vl(tmp_path / "tiny", depth=1, with_decoder=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def checkpoint(content: bytes, name: str) -> None:
        folder = shutil.copytree(tiny, tmp_path / "copy", dirs_exist_ok=True)
        if name == "pytorch_model.bin":
            (folder / "model.safetensors").unlink()
        (folder / name).write_bytes(content)
        found = Checkpoint.open(folder)
        found.read(found.tensor_names())

    def adapter(content: bytes) -> None:
        folder = tmp_path / "adapter"
        folder.mkdir(exist_ok=True)
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.bin").write_bytes(content)
        Adapter.open(folder)

    def bundle(content: bytes) -> None:
        into = tmp_path / "engines"
        shutil.rmtree(into, ignore_errors=True)
        path = store(into, tmp_path / "data").path
        (path / "engine.bin").write_bytes(content)
        Bundle.open(path, verify="lazy", user_data=tmp_path / "data").read("engine.bin")

    def engine(content: bytes) -> None:
        folder = tmp_path / "engine"
        folder.mkdir(exist_ok=True)
        (folder / "program.pt2").write_bytes(content)
        (folder / "model.onnx").write_bytes(content)
        (folder / "model.weights").write_bytes(content)
        spec = EngineSpec(inputs=(), outputs=(), profile=ShapeProfile("any", {}))
        find_backend("onnxruntime").open(Folder(folder), spec, Options())

    spec = EngineSpec(inputs=(), outputs=(), profile=ShapeProfile("any", {}))

    def program(backend: str, content: bytes) -> None:
        folder = tmp_path / "program"
        folder.mkdir(exist_ok=True)
        (folder / "program.pt2").write_bytes(content)
        (folder / "program.safetensors").write_bytes(content)
        find_backend(backend).open(Folder(folder), spec, Options())

    def task(content: bytes) -> None:
        (tmp_path / "task").write_bytes(content)
        read_task(tmp_path / "task")

    def timings(content: bytes) -> None:
        kind = ("build", "eager", "float32")
        timings_._file(kind).write(content)
        timings_.recall(*kind)

    ways: dict[str, Callable[[bytes], object]] = {
        "image": read_image,
        "video": read_video,
        "weights": lambda content: checkpoint(content, "model.safetensors"),
        "weights of torch": lambda content: checkpoint(content, "pytorch_model.bin"),
        "config": lambda content: checkpoint(content, "config.json"),
        "adapter": adapter,
        "bundle": bundle,
        "engine of ONNX Runtime": engine,
        "engine of eager": lambda content: program("eager", content),
        "engine of inductor": lambda content: program("inductor", content),
        "package of a graph": lambda content: load_function(content, "prune.pt2"),
        "task": task,
        "cache": timings,
    }
    for way, read in ways.items():
        for form, content in forms.items():
            with subtests.test(f"{form} as {way}"):
                with suppress(RequestError, BundleError, LimitError):
                    read(content)
                assert not mark.exists()
    pickle.loads(bare)
    assert mark.exists(), "the bomb is one"
    record_property("pickles, by way in", len(ways) * len(forms))


WEIGHTS, CONSTANTS = (f"archive/data/{part}/model_{part}_config.json" for part in ("weights", "constants"))


def programs(bomb: bytes) -> dict[str, dict[str, bytes]]:
    """Programs of which torch runs a pickle, by where it is."""
    # What follows the end of a pickle is not read; the size has to be one of whole numbers.
    padded = bomb + bytes(-len(bomb) % 16)
    weights = json.loads(exported()[WEIGHTS])["config"]
    (entry, *_) = weights.values()

    def constant(name: str, *, use_pickle: bool) -> dict[str, bytes]:
        config = {"config": {"x": {**entry, "path_name": name, "use_pickle": use_pickle}}}
        return {CONSTANTS: json.dumps(config).encode(), f"archive/data/constants/{name}": padded}

    older = dict.fromkeys(("serialized_state_dict.pt", "serialized_example_inputs.pt"), b"{}")
    older["serialized_exported_program.json"] = exported()["archive/models/model.json"]
    older["version"] = ".".join(map(str, SCHEMA_VERSION)).encode()
    forms = {
        "example inputs": {"archive/data/sample_inputs/model.pt": bomb},
        "weights": {
            WEIGHTS: json.dumps({"config": {"x": {**entry, "use_pickle": True}}}).encode(),
            f"archive/data/weights/{entry['path_name']}": bomb,
        },
        "a tensor": constant("tensor_0", use_pickle=True),
        "an object": constant("opaque_obj_0", use_pickle=True),
        "an object that is said to be none": constant("opaque_obj_0", use_pickle=False),
    }
    return {name: exported() | changed for name, changed in forms.items()} | {
        f"an older form, {end}": older | {f"serialized_constants.{end}": bomb} for end in ("pt", "json")
    }


def test_a_program_whose_pickle_torch_would_run_is_refused(tmp_path, subtests, record_property):
    mark = tmp_path / "mark"
    spec = EngineSpec(inputs=(), outputs=(), profile=ShapeProfile("any", {}))
    forms = programs(pickle.dumps(Bomb(mark)))
    for name, entries in forms.items():
        with subtests.test(name), warnings.catch_warnings():
            # A warning of torch would end it before it comes to the pickle.
            warnings.simplefilter("ignore")
            (tmp_path / "program.pt2").write_bytes(written(entries))
            with suppress(Exception):
                torch.export.load(tmp_path / "program.pt2")
            assert mark.exists(), "torch runs it"
            mark.unlink()
            with pytest.raises(BundleError):
                find_backend("eager").open(Folder(tmp_path), spec, Options())
            assert not mark.exists()
    record_property("pickles, by way in", len(forms))


def test_a_program_with_an_entry_of_two_names_is_refused():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as whole:
        whole.writestr("archive/data/constants/x", b"{}")
    # A name ends at its first zero for Python.
    content = file.getvalue().replace(b"archive/data/constants/x", b"archive/data/constants\0x")
    with pytest.raises(ValueError, match="two names"):
        load_program(content)


def _calls(path: Path) -> set[str]:
    return {
        ast.unparse(node.func)
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.Call)
    }


def test_no_source_reads_a_pickle_or_runs_a_text_but_where_it_was_reviewed():
    found = {(relative(path), call) for path in library_files() for call in _calls(path) & FORBIDDEN}
    assert found == REVIEWED
