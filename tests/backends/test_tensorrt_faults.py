"""Graphs with planted faults: each is found in the network that the library made of it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest
from onnx import TensorProto, helper

from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport._export import export
from vlexport.backends import BuildLimits
from vlexport.backends._tensorrt import build_process, network, network_check
from vlexport.backends._tensorrt.backend import ENGINE, shapes_of, write_model
from vlexport.backends._tensorrt.messages import Job, Network
from vlexport.backends.tensorrt_rtx import BACKEND as RTX
from vlexport.checkpoint import Checkpoint
from vlexport.errors import MisfitError, UnsupportedError
from vlexport.recipe import find_recipe

RECIPE = find_recipe("qwen2_5_vl")
HALF, WIDE = TensorProto.BFLOAT16, TensorProto.FLOAT

pytestmark = [pytest.mark.slow, pytest.mark.skipif(RTX.missing() is not None, reason=str(RTX.missing()))]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """What a build of a right graph in bfloat16 hands to its child process."""
    folder = tmp_path_factory.mktemp("faults")
    checkpoint = Checkpoint.open(str(write_tiny_qwen2_5_vl(folder / "tiny", depth=2, with_decoder=False)))
    profile = RECIPE.profiles(RECIPE.read_config(checkpoint))["thumbnail"]
    graph = export(RECIPE, checkpoint, profile=profile, dtype="bfloat16", form="padded")
    return Job(
        library=RTX.flavour.module,
        model=str(write_model(graph, folder)),
        engine=str(folder / ENGINE),
        targets=("sm89",),
        profiles={profile.name: shapes_of(profile, graph.inputs)},
        plan=network_check.expected(graph),
    )


def build(job: Job, folder: Path):
    """An engine that is not wanted must not be written either."""
    asked = replace(job, engine=str(folder / ENGINE))
    told: list[tuple[str, float]] = []
    return build_process.build(asked, BuildLimits(), lambda phase, share: told.append((phase, share)))


def planted(job: Job, folder: Path, fault: Callable[[onnx.ModelProto], None]) -> Job:
    model = onnx.load(job.model)
    fault(model)
    onnx.save(model, folder / "planted.onnx")
    return replace(job, model=str(folder / "planted.onnx"))


def typed(op: str, inner: int, outer: int) -> Callable[[onnx.ModelProto], None]:
    """The first operation of a kind computes in another dtype, and what it gives is cast back."""

    def fault(model: onnx.ModelProto) -> None:
        nodes = model.graph.node
        place, node = next((place, node) for place, node in enumerate(nodes) if node.op_type == op)
        # The fourth input of attention is a mask.
        count = min(3, len(node.input))
        inputs, result = list(node.input), node.output[0]
        before = [helper.make_node("Cast", [name], [f"{name}_{op}"], to=inner) for name in inputs[:count]]
        node.input[:] = [*(each.output[0] for each in before), *inputs[count:]]
        node.output[0] = f"{result}_inner"
        nodes.insert(place + 1, helper.make_node("Cast", [f"{result}_inner"], [result], to=outer))
        for each in before:
            nodes.insert(place, each)

    return fault


def narrow_norm(model: onnx.ModelProto) -> None:
    """The dtype of a norm's statistics is one attribute."""
    node = next(node for node in model.graph.node if node.op_type == "RMSNormalization")
    kept = [each for each in node.attribute if each.name != "stash_type"]
    node.ClearField("attribute")
    node.attribute.extend([*kept, helper.make_attribute("stash_type", HALF)])


def rounded(model: onnx.ModelProto) -> None:
    """Float32 numbers go through bfloat16 and come back as if nothing had been."""
    nodes = model.graph.node
    place, node = next((place, node) for place, node in enumerate(nodes) if node.op_type == "Cos")
    source = node.input[0]
    nodes.insert(place, helper.make_node("Cast", [source], ["narrow"], to=HALF))
    nodes.insert(place + 1, helper.make_node("Cast", ["narrow"], ["wide"], to=WIDE))
    node.input[0] = "wide"


def another_table(model: onnx.ModelProto) -> None:
    """The lengths of one shelf are taken for those of another."""
    for node in model.graph.node:
        node.input[:] = ["frame_counts_a" if name == "frame_counts_b" else name for name in node.input]


def dead_end(model: onnx.ModelProto) -> None:
    """The same, and what does read the table leads nowhere."""
    another_table(model)
    node = helper.make_node("Cast", ["frame_counts_b"], ["nowhere"], to=WIDE)
    model.graph.node.append(node)


def test_the_right_graph_is_built(job: Job, tmp_path: Path):
    assert [each for each in build(job, tmp_path).findings if each.wrong] == []
    assert (tmp_path / ENGINE).exists()


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (typed("Gemm", WIDE, HALF), r"matrix products: bfloat16 12, float32 1 found, bfloat16 13 expected"),
        (narrow_norm, r"norm statistics: bfloat16 1, float32 4 found, float32 5 expected"),
        (typed("Cos", HALF, WIDE), r"angles: bfloat16 1, float32 1 found, float32 2 expected"),
        (typed("Gelu", WIDE, HALF), r"activations: bfloat16 2, float32 1 found, bfloat16 3 expected"),
        (typed("Attention", WIDE, HALF), r"fused attention"),
        (rounded, r"casts there and back: 1 pairs, at most 0 expected"),
        (dead_end, r"inputs read: no output hangs on frame_counts_b"),
        (another_table, r"inputs read: no output hangs on frame_counts_b"),
    ],
    ids=[
        "wide product",
        "narrow norm",
        "narrow angles",
        "wide activation",
        "wide attention",
        "cast pair",
        "dead end",
        "another table",
    ],
)
def test_what_the_plan_does_not_say_stops_the_build(job: Job, tmp_path: Path, fault, told: str):
    with pytest.raises(UnsupportedError, match=told):
        build(planted(job, tmp_path, fault), tmp_path)
    assert not (tmp_path / ENGINE).exists()


def ragged(folder: Path) -> Path:
    """Attention with lengths of its keys: the parser of 1.7.1.116 ignores them without a warning."""
    kinds = {"q": HALF, "k": HALF, "v": HALF, "lengths": TensorProto.INT64}
    size: list[str | int | None] = ["rows", 4, "length", 16]
    rows = {**dict.fromkeys("qkv", size), "lengths": size[:1]}
    node = helper.make_node("Attention", ["q", "k", "v", "", "", "", "lengths"], ["mixed"], scale=0.25)
    graph = helper.make_graph(
        [node],
        "ragged",
        [helper.make_tensor_value_info(name, kinds[name], rows[name]) for name in kinds],
        [helper.make_tensor_value_info("mixed", HALF, rows["q"])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    onnx.save(model, folder / "ragged.onnx")
    return folder / "ragged.onnx"


def ragged_job(job: Job, folder: Path, unread: tuple[str, ...]) -> Job:
    size = ((1, 4, 4, 16), (4, 4, 64, 16), (8, 4, 256, 16))
    half = dict.fromkeys("qkv", "bfloat16")
    plan = Network(
        inputs={**half, "lengths": "int64"},
        outputs={"mixed": "bfloat16"},
        unread=unread,
        attention={"bfloat16": 1},
        products={},
        statistics={},
        angles={},
        activations={},
    )
    profiles = {"any": {**dict.fromkeys("qkv", size), "lengths": ((1,), (4,), (8,))}}
    return replace(job, model=str(ragged(folder)), profiles=profiles, plan=plan)


def test_an_input_that_the_parser_ignores_stops_the_build(job: Job, tmp_path: Path):
    with pytest.raises(UnsupportedError, match=r"inputs read: no output hangs on lengths"):
        build(ragged_job(job, tmp_path, ()), tmp_path)
    assert not (tmp_path / ENGINE).exists()


def test_an_input_that_the_program_itself_does_not_read_may_be_dropped(job: Job, tmp_path: Path):
    assert build(ragged_job(job, tmp_path, ("lengths",)), tmp_path).engine_bytes > 0


def test_a_warning_that_an_input_is_dropped_stops_the_build():
    said = ["Unused Input: lengths", "Unused Input: order", "Local timing cache"]
    network.refuse_dropped(said, ("lengths", "order"))
    with pytest.raises(UnsupportedError, match=r"the library ignores order among the inputs"):
        network.refuse_dropped(said, ("lengths",))


def test_a_weakly_typed_network_is_told():
    """Networks of this library are typed whatever is asked; an older one could be weak."""
    flags = SimpleNamespace(STRONGLY_TYPED=0)
    library = SimpleNamespace(NetworkDefinitionCreationFlag=flags)
    weak = SimpleNamespace(get_flag={0: False}.get)
    found = network_check.typing_of(library, weak)
    assert found.wrong == "weak found, strong expected: the library could choose types"


def test_bounds_that_the_library_does_not_keep_stop_the_build(job: Job, tmp_path: Path):
    (name, inputs), *_ = job.profiles.items()
    low, usual, high = inputs["patches"]
    asked = replace(job, profiles={name: {**inputs, "patches": (high, usual, low)}})
    with pytest.raises(UnsupportedError, match=rf"profile {name}"):
        build(asked, tmp_path)


def test_a_target_that_the_library_lacks_is_refused_with_those_it_has(job: Job, tmp_path: Path):
    with pytest.raises(UnsupportedError, match=r"does not build for sm90\. It builds for: sm75, sm80"):
        build(replace(job, targets=("sm89", "sm90")), tmp_path)


def test_a_dtype_that_the_target_lacks_is_refused_by_name(job: Job, tmp_path: Path):
    with pytest.raises(MisfitError, match=r"builds no engine for sm75.*Build in another dtype"):
        build(replace(job, targets=("sm75",)), tmp_path)
    assert not (tmp_path / ENGINE).exists()
