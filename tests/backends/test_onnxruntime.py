"""What only ONNX Runtime has: an arena, weights that are not copied, providers that a stand-in has."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnxruntime as real
import pytest
import torch

from tests.backends.towers import WIDTH, BuiltTower, build_tower, random_calls, sharp_checkpoint
from vlexport._build.export import export
from vlexport.backends import Engine, EngineSpec, Folder, Options, _engine, find_backend, onnxruntime, require
from vlexport.checkpoint import Checkpoint
from vlexport.errors import BundleError, InputError, MisfitError, UnsupportedError
from vlexport.recipe import recipe_for
from vlexport.specs import Precision, Range, ShapeProfile, Symbol, TensorSpec
from vlexport.target import fit

SHRINKAGE = "memory.enable_memory_arena_shrinkage"


TOKENS = Symbol("tokens")


def spec_of(**outputs):
    """Outputs with so many columns, of one input with ten."""
    tensors = {
        name: TensorSpec(name=name, dtype="float32", shape=(TOKENS, columns))
        for name, columns in {"patches": 10, **outputs}.items()
    }
    return EngineSpec(
        inputs=(tensors.pop("patches"),),
        outputs=tuple(tensors.values()),
        profile=ShapeProfile(name="any", ranges={TOKENS: Range(min=1, opt=1, max=99)}),
    )


def session_of(*outputs):
    """A session that gives columns 0 to N of its input under each name, in this order."""
    ends = ", ".join(f"float[tokens, {columns}] {name}" for name, columns in outputs)
    bounds = ", ".join(f"int64[1] {name}_end = {{{columns}}}" for name, columns in outputs)
    nodes = "\n".join(f"{name} = Slice(patches, zero, {name}_end, one)" for name, _ in outputs)
    model = onnx.parser.parse_model(f"""
        <ir_version: 9, opset_import: ["": 17]>
        slices (float[tokens, 10] patches) => ({ends})
        <int64[1] zero = {{0}}, int64[1] one = {{1}}, {bounds}> {{ {nodes} }}
    """)
    return real.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def test_the_arena_is_emptied_after_large_calls_only(monkeypatch):
    monkeypatch.setattr(_engine, "KEPT_VALUES", 8 * 10)
    session, settings = session_of(("embeds", 4)), []
    run = session.run_with_iobinding

    def watched(binding, given):
        try:
            settings.append(given.get_run_config_entry(SHRINKAGE))
        except RuntimeError:
            settings.append(None)
        run(binding, given)

    monkeypatch.setattr(session, "run_with_iobinding", watched)
    runner = onnxruntime._Runner(session, spec_of(embeds=4))
    for rows in (1, 8, 9, 2):
        runner.run({"patches": torch.zeros(rows, 10)})
    assert settings == [None, None, "cpu:0", None]


def test_outputs_have_the_names_under_which_they_were_requested():
    runner = onnxruntime._Runner(session_of(("early", 2), ("late", 3)), spec_of(late=3, early=2))
    patches = torch.rand(5, 10)
    found = runner.run({"patches": patches})
    assert list(found) == ["late", "early"]
    assert all(
        torch.equal(found[name], patches[:, :columns]) for name, columns in (("late", 3), ("early", 2))
    )


def test_rows_of_a_larger_tensor_are_taken_as_they_lie():
    """A view has the address of its own first row, and one with gaps is copied."""
    runner = onnxruntime._Runner(session_of(("embeds", 4)), spec_of(embeds=4))
    whole = torch.rand(9, 20)
    for patches in (whole[3:7, :10], whole.reshape(18, 10)[4:9]):
        assert torch.equal(runner.run({"patches": patches})["embeds"], patches[:, :4])


def test_an_engine_of_another_width_than_its_manifest_is_refused():
    runner = onnxruntime._Runner(session_of(("embeds", 4)), spec_of(embeds=5))
    with pytest.raises(BundleError, match="does not run this engine"):
        runner.run({"patches": torch.rand(5, 10)})


@pytest.fixture(scope="module")
def sharp(tmp_path_factory: pytest.TempPathFactory) -> BuiltTower:
    folder = tmp_path_factory.mktemp("sharp")
    return build_tower(sharp_checkpoint(folder / "checkpoint", depth=2), "onnxruntime", folder / "engine")


@pytest.mark.slow
@pytest.mark.parametrize("is_shared", [True, False])
def test_weights_are_used_where_they_lie(sharp: BuiltTower, is_shared: bool) -> None:
    spec, options = sharp.engine.spec, Options(threads=1, shared_weights=is_shared)
    runner = onnxruntime.BACKEND.open(Folder(sharp.files), spec, options)
    assert isinstance(runner, onnxruntime._Runner)
    # Without them the session would hold copies.
    assert runner._session.kept
    replace(sharp, engine=Engine(runner, spec)).check(random_calls(10, WIDTH))


@pytest.mark.slow
def test_an_engine_whose_weights_the_library_reads_itself_gets_a_copy(sharp, tmp_path, monkeypatch):
    items = next(iter(random_calls(1, WIDTH)))

    def in_place(*_):
        raise real.capi.onnxruntime_pybind11_state.Fail("External data path does not exist")

    monkeypatch.setattr(onnxruntime, "_session_in_place", in_place)
    runner = onnxruntime.BACKEND.open(Folder(sharp.files), sharp.engine.spec, Options(threads=1))
    copied = replace(sharp, engine=Engine(runner, sharp.engine.spec))
    assert torch.equal(copied.tokens(items), sharp.tokens(items))


BACKEND = find_backend("onnxruntime")
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


class Library:
    """ONNX Runtime with a provider for CUDA, which may not load: a session is on the CPU then."""

    def __init__(self, *, loads: bool = True) -> None:
        self.loads = loads
        self.asked: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(real, name)

    def get_available_providers(self) -> list[str]:
        return [CUDA, CPU]

    def InferenceSession(self, model: bytes, settings: Any, providers: list[Any], **given: Any) -> Any:
        self.asked.append(providers)
        session = real.InferenceSession(model, settings, providers=[CPU], **given)
        (wanted,) = providers
        if self.loads and wanted != CPU:
            session.get_providers = lambda: [CUDA, CPU]
        return session


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library()
    monkeypatch.setattr(onnxruntime, "_library", lambda: found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    return found


class Doubling:
    """The files of an engine that doubles its input by a stored weight."""

    def read(self, name: str) -> bytes:
        model = onnx.parser.parse_model(f"""
            <ir_version: 9, opset_import: ["": 18]>
            double (float[tokens, 10] patches) => (float[tokens, 10] embeds)
            <float[1] two = ["location": "{onnxruntime.WEIGHTS}", "offset": "0", "length": "4"]> {{
                embeds = Mul(patches, two)
            }}
        """)
        content: bytes = model.SerializeToString()
        return content

    def map(self, name: str) -> memoryview:
        return memoryview(np.array([2], np.float32).tobytes())


def opened(options: Options) -> Any:
    return BACKEND.open(Doubling(), spec_of(embeds=10), options)


def test_an_engine_opens_with_the_provider_that_it_was_built_for_and_no_other(library: Library) -> None:
    for options in (Options(), Options(device="cpu")):
        patches = torch.rand(3, 10)
        assert torch.equal(opened(options).run({"patches": patches})["embeds"], 2 * patches)
    assert all(providers == [CPU] for providers in library.asked)
    library.asked.clear()
    opened(Options(device="cuda"))
    assert library.asked == [[(CUDA, {"device_id": 1})]]


def test_a_provider_that_does_not_load_is_an_error_with_its_cause(library: Library) -> None:
    library.loads = False
    with pytest.raises(MisfitError, match=f"with {CPU}, {CUDA} expected: .+ or build with --device cpu"):
        opened(Options(device="cuda"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_library_itself_falls_back_to_the_cpu_and_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(MisfitError, match=f"opened the engine with {CPU}, {CUDA} expected"):
        opened(Options(device="cuda"))


def test_the_choice_is_in_the_target_and_each_fits_a_machine_that_has_the_device(library, monkeypatch):
    on_cpu = BACKEND.build_target(Options(), Precision())
    on_gpu = BACKEND.build_target(Options(device="cuda"), Precision(dtype="float16"))
    assert (on_cpu.device, on_gpu.device) == ("cpu", "cuda")
    for made in (on_cpu, on_gpu):
        assert fit(made, BACKEND.here(made)) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    misfit = fit(on_gpu, BACKEND.here(on_gpu))
    assert misfit is not None
    assert misfit.fields == ("device",)
    assert fit(on_cpu, BACKEND.here(on_cpu)) is None


def test_precisions_are_those_of_the_device(library: Library) -> None:
    assert require(BACKEND, "float32", "int8").quantisation is not None
    for dtype in ("float32", "float16", "bfloat16"):
        assert require(BACKEND, dtype, device="cuda").dtype == dtype
    for given, message in (
        ({"dtype": "float16"}, "in float32 and int8 alone. Add --device cuda"),
        (
            {"dtype": "float32", "quantize": "int8", "device": "cuda"},
            "kernels for integers are those of the CPU",
        ),
        ({"dtype": "float32", "device": "tpu"}, "'tpu' with backend 'onnxruntime': cpu or cuda expected"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            require(BACKEND, **given)
    with pytest.raises(UnsupportedError, match="'eager': it has no choice of devices"):
        require(find_backend("eager"), "float32", device="cuda")


def test_without_a_gpu_or_its_package_a_build_for_cuda_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(Library, "get_available_providers", lambda _: [CPU])
    monkeypatch.setattr(onnxruntime, "_library", Library)
    with pytest.raises(UnsupportedError, match="its package for GPUs is onnxruntime-gpu"):
        require(BACKEND, "float32", device="cuda")
    monkeypatch.undo()
    monkeypatch.setattr(onnxruntime, "_library", Library)
    with pytest.raises(UnsupportedError, match="torch finds no GPU"):
        require(BACKEND, "float32", device="cuda")


def test_devices_are_spelled_in_few_ways() -> None:
    for given, kind, index in (("cuda:3", "cuda", 3), (2, None, 2), ("cpu", "cpu", None)):
        options = Options(device=given)
        assert (options.kind, options.index) == (kind, index)
    assert Options(device="cuda").to_json() == {"device": "cuda"}
    assert Options(device=1).to_json() == Options(device="cpu").to_json() == {}
    for wrong in ("gpu", "cuda:", "cuda:x", -1, ""):
        with pytest.raises(InputError, match=r"device: .* given"):
            Options(device=wrong)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "number"), [("float16", 10), ("bfloat16", 16)])
def test_attention_of_half_precision_is_typed_throughout(tmp_path, dtype, number) -> None:
    checkpoint = Checkpoint.open(sharp_checkpoint(tmp_path / "checkpoint", depth=1))
    (tmp_path / "out").mkdir()
    graph = export(recipe_for(checkpoint), checkpoint, form=BACKEND.form, dtype=dtype)
    BACKEND.build(graph, Options(device="cuda"), tmp_path / "out")
    model = onnx.load(tmp_path / "out" / onnxruntime.MODEL, load_external_data=False)
    empty = [node for body in model.functions for node in body.node if node.op_type == "SequenceEmpty"]
    assert [each.attribute[0].i for each in empty] == [number] * len(empty)
    assert empty
    assert model.graph.output[0].type.tensor_type.elem_type == number
    weights = Counter(each.data_type for each in model.graph.initializer if len(each.dims) == 2)
    assert weights.most_common(1)[0][0] == number
