"""What only ONNX Runtime has: an arena, emptied after large calls, and weights that are not copied."""

from dataclasses import replace

import numpy as np
import onnx
import onnxruntime as library
import pytest
import torch

from tests.backends.towers import BuiltTower, build_tower, random_calls, sharp_checkpoint
from vlexport.backends import Engine, EngineSpec, Folder, Options, _engine, onnxruntime
from vlexport.errors import BundleError
from vlexport.specs import Range, ShapeProfile, Symbol, TensorSpec

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
    nodes, ends = [], []
    for name, columns in outputs:
        bounds = [
            onnx.numpy_helper.from_array(np.array([at], np.int64), f"{name}{at}") for at in (0, columns)
        ]
        nodes += [
            onnx.helper.make_node("Constant", [], [f"{name}.{each.name}"], value=each) for each in bounds
        ]
        axis = onnx.numpy_helper.from_array(np.array([1], np.int64), f"{name}.axis")
        nodes.append(onnx.helper.make_node("Constant", [], [axis.name], value=axis))
        words = ["patches", *(f"{name}.{each.name}" for each in bounds), axis.name]
        nodes.append(onnx.helper.make_node("Slice", words, [name]))
        ends.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["tokens", columns]))
    begin = onnx.helper.make_tensor_value_info("patches", onnx.TensorProto.FLOAT, ["tokens", 10])
    model = onnx.helper.make_model(
        onnx.helper.make_graph(nodes, "slices", [begin], ends),
        opset_imports=[onnx.helper.make_opsetid("", 17)],
        ir_version=9,
    )
    return library.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


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
    tower = replace(sharp, engine=Engine(runner, spec))
    found = [tower.errors(items) for items in random_calls(10, 96)]
    assert max(relative for relative, _ in found) < 1e-5
    assert max(worst for _, worst in found) < 5e-5


@pytest.mark.slow
def test_an_engine_whose_weights_the_library_reads_itself_gets_a_copy(sharp, tmp_path, monkeypatch):
    items = next(iter(random_calls(1, 96)))

    def in_place(*_):
        raise library.capi.onnxruntime_pybind11_state.Fail("External data path does not exist")

    monkeypatch.setattr(onnxruntime, "_session_in_place", in_place)
    runner = onnxruntime.BACKEND.open(Folder(sharp.files), sharp.engine.spec, Options(threads=1))
    copied = replace(sharp, engine=Engine(runner, sharp.engine.spec))
    assert torch.equal(copied.tokens(items), sharp.tokens(items))
