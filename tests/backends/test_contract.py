"""What holds for every backend: names, capabilities, calls that are checked before the library sees them."""

import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

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
from vlexport.errors import (
    BundleError,
    InputError,
    LimitError,
    MisfitError,
    RequestError,
    UnsupportedError,
)
from vlexport.specs import Range, ShapeProfile, Symbol, TensorSpec

ROWS = Symbol("rows")
SPEC = EngineSpec(
    inputs=(TensorSpec("patches", "float32", (4 * ROWS, 8)), TensorSpec("order", "int64", (ROWS,))),
    outputs=(TensorSpec("embeds", "float32", (ROWS, 2)),),
    profile=ShapeProfile("image", {ROWS: Range(2, 4, 6)}),
)


class Recorder(Runner):
    """A library that remembers what it was given."""

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
