"""A pickle runs code when it is read: none is, wherever it lies, and no source reads one."""

from __future__ import annotations

import ast
import io
import json
import pickle
import shutil
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.bundle.examples import store
from tests.repo.tree import library_files, relative
from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport._build import timings as timings_
from vlexport._build.aoti import load_function
from vlexport.backends import EngineSpec, Folder, Options, find_backend
from vlexport.backends._program import CALLS, write_program
from vlexport.bundle import Bundle
from vlexport.bundle.user_folders import CacheFile
from vlexport.checkpoint import Adapter, Checkpoint
from vlexport.errors import BundleError, LimitError, RequestError
from vlexport.evaluate.tasks import read_task
from vlexport.media import read_image, read_video
from vlexport.specs import ShapeProfile

# Each has a reason beside it in its file: bytes of an approved bundle.
REVIEWED = {
    # Of a graph that an interrupted build left in this user's cache, where nobody else can write.
    ("vlexport/_build/export.py", "torch.export.load"),
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
        for name in ("program.pt2", "program.json", "program.safetensors"):
            (folder / name).write_bytes(content)
        find_backend(backend).open(Folder(folder), spec, Options())

    def task(content: bytes) -> None:
        (tmp_path / "task").write_bytes(content)
        read_task(tmp_path / "task")

    def timings(content: bytes) -> None:
        kind = ("build", "eager", "float32")
        CacheFile.of("timings", *kind).write(content)
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


def test_a_program_that_calls_anything_but_arithmetic_is_refused(tmp_path, subtests, record_property):
    """Names of its file are no code either, though torch writes a program of Python with names in it."""
    mark = tmp_path / "mark"
    code = f"other=open({str(mark)!r},'w'),out"
    rows = torch.export.export(Scaled(), ({"x": torch.ones(2)},), strict=False)
    write_program(rows, tmp_path)
    sound = json.loads((tmp_path / CALLS).read_bytes())
    ((name, _, args, kwargs),) = sound["calls"]
    calls = {
        "a file": [name, "aten.save.default", [args[0], str(mark)], {}],
        "a mapped file": [name, "aten.from_file.default", [str(mark), True, 8], {}],
        "a call": [name, "operator.call", [*args], {}],
        "a function of tensors": [name, "operator.matmul", [*args], {}],
        "another namespace": [name, "prim.Print.default", [*args], {}],
        "code as a word": [name, "aten.neg.out", [args[0]], {code: args[0]}],
        "an attribute": [name, "aten.add.__class__", [*args], {}],
        "a constant": [name, "aten.to.dtype", [args[0], {"torch": "load"}], {}],
        "an unknown value": [name, "aten.neg.default", [{"code": code}], {}],
    }
    forms = {what: sound | {"calls": [call]} for what, call in calls.items()}
    harmless = {
        "inputs": {"x": code}, "weights": {f"{code};": "factor"}, "outputs": {"rows": f"{code} "},
        "calls": [[f"{code} ", "aten.mul.Tensor", [{"node": code}, {"node": f"{code};"}], kwargs]],
    }  # fmt: skip
    spec, backend = EngineSpec(inputs=(), outputs=(), profile=ShapeProfile("any", {})), find_backend("eager")
    for what, changed in forms.items():
        (tmp_path / CALLS).write_text(json.dumps(changed))
        with subtests.test(what), pytest.raises(BundleError):
            backend.open(Folder(tmp_path), spec, Options())
    (tmp_path / CALLS).write_text(json.dumps(harmless))
    given = backend.open(Folder(tmp_path), spec, Options()).run({"x": torch.ones(2)})
    assert given["rows"].tolist() == [2, 2]
    assert not mark.exists()
    record_property("programs refused", len(forms))


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.full((2,), 2.0))

    def forward(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"rows": inputs["x"] * self.factor}


def _calls(path: Path) -> set[str]:
    return {
        ast.unparse(node.func)
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.Call)
    }


def test_no_source_reads_a_pickle_or_runs_a_text_but_where_it_was_reviewed():
    found = {(relative(path), call) for path in library_files() for call in _calls(path) & FORBIDDEN}
    assert found == REVIEWED
