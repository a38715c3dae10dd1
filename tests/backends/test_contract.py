"""What holds for every backend: names, capabilities, calls that are checked before the library sees them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport._build.export import export
from vlexport.backends import (
    Capability,
    Engine,
    EngineSpec,
    Inside,
    Options,
    Runner,
    backend_names,
    eager,
    find_backend,
    inside_of,
    require,
    torch_tensorrt,
)
from vlexport.checkpoint import Checkpoint
from vlexport.errors import (
    BundleError,
    InputError,
    LimitError,
    MisfitError,
    RequestError,
    UnsupportedError,
)
from vlexport.recipe import recipe_for
from vlexport.specs import Range, ShapeProfile, Symbol, TensorSpec

ROWS = Symbol("rows")
SPEC = EngineSpec(
    inputs=(TensorSpec("patches", "float32", (4 * ROWS, 8)), TensorSpec("order", "int64", (ROWS,))),
    outputs=(TensorSpec("embeds", "float32", (ROWS, 2)),),
    profile=ShapeProfile("image", {ROWS: Range(2, 4, 6)}),
)


class Recorder(Runner):
    def __init__(self):
        self.seen = []
        self.closed = 0

    def run(self, tensors):
        self.seen.append(list(tensors))
        return {"embeds": torch.zeros(len(tensors["order"]), 2)}

    def close(self):
        self.closed += 1


def call(rows, **others):
    inputs = {"patches": torch.zeros(4 * rows, 8), "order": torch.zeros(rows, dtype=torch.int64), **others}
    return {name: tensor for name, tensor in inputs.items() if tensor is not None}


def test_a_backend_describes_itself_and_the_target_of_this_machine_fits_itself():
    for name in backend_names():
        backend = find_backend(name)
        assert backend.name == name
        assert all((backend.summary, backend.form, backend.capabilities)), name
        missing = backend.missing()
        assert (missing or "fine.").endswith("."), name
        if missing is None:
            target = backend.target()
            assert target.backend == name
            assert type(target).parse(target.tag) == target


class Damaged:
    """Files that are intact by their hashes and mean nothing."""

    def read(self, name):
        return b"[1, {}]"

    def map(self, name):
        return memoryview(self.read(name))


@pytest.mark.parametrize("name", backend_names())
def test_files_that_mean_nothing_are_refused_as_a_bundle_is(name, monkeypatch):
    if name == "torch_tensorrt":
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    elif importlib.util.find_spec(name) is None and name in ("onnxruntime", "openvino"):
        pytest.skip(f"{name} is not installed")
    with pytest.raises(BundleError, match=r"does not run this engine .*fetch an intact copy") as refused:
        find_backend(name).open(Damaged(), SPEC, Options())
    assert refused.value.exit_code == 5
    if name in ("eager", "inductor", "onnxruntime", "openvino"):
        with pytest.raises(BundleError, match=rf"backend '{name}' does not run this engine"):
            inside_of(find_backend(name), Damaged())


class Shown(eager.Eager):
    """A backend whose library fails in a way of its own, when its copy of the program runs."""

    name = "shown"

    def __init__(self, error):
        self.error = error

    def inside(self, payloads):
        def fail(*_):
            raise self.error

        return Inside(sums=fail, partly=fail)


class OwnError(Exception):
    """Of no family."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OwnError("x"), BundleError),
        (MemoryError(), MemoryError),
        (LimitError("y"), LimitError),
        (InputError("z"), BundleError),
    ],
)
def test_a_copy_of_a_program_that_does_not_run_is_refused_too(error, kind):
    found: Any = inside_of(Shown(error), Damaged())
    for run in (found.sums, found.partly):
        with pytest.raises(kind):
            run({}, str.isupper)


def test_an_unknown_backend_names_the_known_ones():
    with pytest.raises(RequestError, match=r"no backend 'abacus'\. Known: .*eager, "):
        find_backend("abacus")


def test_an_unserved_dtype_names_who_serves_it(monkeypatch):
    monkeypatch.setattr(eager.Eager, "capabilities", (Capability(dtype="float32"),))
    other = next(name for name in backend_names() if name != "eager")
    monkeypatch.setattr(type(find_backend(other)), "capabilities", (Capability(dtype="int4"),))
    with pytest.raises(UnsupportedError) as refused:
        require(find_backend("eager"), "int4")
    expected = f"backend 'eager' does not serve int4. It serves: float32. int4 is served by: {other}."
    assert str(refused.value) == expected


def test_a_missing_library_is_named_with_its_extra_and_is_no_fault_of_the_request(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr(torch_tensorrt, "installed", lambda _: torch_tensorrt.ABSENT)
    optional = [each for each in map(find_backend, backend_names()) if each.extra]
    assert {each.extra for each in optional} == {"openvino", "rtx", "tensorrt"}
    for backend in optional:
        words = rf"is not installed\. pip install 'vlexport\[{backend.extra}\]'"
        with pytest.raises(MisfitError, match=words):
            require(backend, "float32")


def test_inputs_reach_the_library_in_the_order_of_the_specs_and_nothing_else_does():
    library = Recorder()
    shuffled = dict(reversed(call(4, more=torch.zeros(1)).items()))
    Engine(library, SPEC).run(shuffled)
    assert library.seen == [["patches", "order"]]


OUTSIDE = r"rows: {} does not fit profile 'image' \(2 to 6\); the nearest legal size is {}"
WRONG = [
    (call(1), LimitError, OUTSIDE.format(1, 2)),
    (call(7), LimitError, OUTSIDE.format(7, 6)),
    (call(4, order=None), InputError, "input 'order' is missing. Given: patches; expected: order, patches"),
    (call(4, order=torch.zeros(3, dtype=torch.int64)), InputError, "rows is 3 here and 4 in an earlier"),
    (call(4, patches=torch.zeros(15, 8)), InputError, "15 is not a multiple of 4"),
    (call(4, patches=torch.zeros(16, 9)), InputError, r"shape \[16, 9\] given, \[4\*rows, 8\] expected"),
    (call(4, patches=torch.zeros(16)), InputError, r"shape \[16\] given, \[4\*rows, 8\] expected"),
    (call(4, patches=torch.zeros(16, 8).half()), InputError, "patches: float16 given, float32 expected"),
    (call(4, order=torch.zeros(4)), InputError, "order: float32 given, int64 expected"),
]


def test_a_wrong_call_is_refused_before_the_library_sees_it_and_the_ends_of_a_profile_are_inside():
    library = Recorder()
    for given, error, words in WRONG:
        with pytest.raises(error, match=words):
            Engine(library, SPEC).run(given)
    assert library.seen == []
    assert [len(Engine(library, SPEC).run(call(rows))["embeds"]) for rows in (2, 6)] == [2, 6]


def test_a_closed_engine_gives_its_memory_back_once_and_refuses_to_run():
    library = Recorder()
    with Engine(library, SPEC) as engine:
        pass
    engine.close()
    assert library.closed == 1
    with pytest.raises(InputError, match="closed; open the bundle again"):
        engine.run(call(4))


BACKENDS = [name for name in ("onnxruntime", "openvino") if find_backend(name).missing() is None]

# Opens the engine, and prints which files and sockets outside of it the process holds then.
OPEN = """
import os, sys, time
from contextlib import closing
from pathlib import Path
from vlexport.backends import EngineSpec, Folder, Options, find_backend
from vlexport.specs import ShapeProfile

# Opening needs the names of outputs only to run.
spec = EngineSpec(inputs=(), outputs=(), profile=ShapeProfile("any", {}))
with closing(find_backend(sys.argv[1]).open(Folder(Path(sys.argv[2])), spec, Options(threads=1))):
    time.sleep(0.5)
    held = {os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.exists()}
print(sorted(path for path in held if "socket:" in path or path.startswith(sys.argv[3])))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKENDS)
def test_opening_an_engine_reports_nothing_to_anybody(name: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_tiny_qwen2_5_vl(tmp_path / "checkpoint", depth=1))
    backend, engine, home = find_backend(name), tmp_path / "engine", tmp_path / "home"
    engine.mkdir()
    home.mkdir()
    graph = export(recipe_for(checkpoint), checkpoint, dtype="float32", form=backend.form)
    backend.build(graph, Options(), engine)
    known = ("ORT_DISABLE_TELEMETRY", "CI", "TF_BUILD", "JENKINS_URL", "GITHUB_ACTIONS", "XDG_CACHE_HOME")
    environment = {key: value for key, value in os.environ.items() if key not in known}
    ran = subprocess.run(
        [sys.executable, "-c", OPEN, name, str(engine), str(home)],
        env={**environment, "HOME": str(home)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (0, "[]\n"), ran.stderr
    assert sorted(path.name for path in home.rglob("*")) == []
