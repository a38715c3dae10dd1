"""Graphs with planted faults: each is found in the network that the library made of it; its log is read."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest
from onnx import TensorProto, helper

from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport._build.export import export
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

REAL = [pytest.mark.slow, pytest.mark.skipif(RTX.missing() is not None, reason=str(RTX.missing()))]


def real(test):
    """Mark a test that builds with the library itself."""
    for mark in REAL:
        test = mark(test)
    return test


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """What a build of a right graph in bfloat16 hands to its child process."""
    folder = tmp_path_factory.mktemp("faults")
    checkpoint = Checkpoint.open(str(write_tiny_qwen2_5_vl(folder / "tiny", depth=2, with_decoder=False)))
    profile = RECIPE.profiles(RECIPE.read_config(checkpoint))["thumbnail"]
    graph = export(RECIPE, checkpoint, profile=profile, dtype="bfloat16", form="padded")
    return Job(
        library=RTX.module,
        model=str(write_model(graph, folder)),
        engine=str(folder / ENGINE),
        targets=("sm89",),
        profiles={profile.name: shapes_of(profile, graph.inputs)},
        plan=network_check.expected(graph),
    )


def build(job: Job, folder: Path):
    """An engine that is not wanted must not be written either."""
    spec = replace(job, engine=str(folder / ENGINE))
    return build_process.build(spec, BuildLimits(), lambda *_: None)


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


FAULTS = {
    "wide product": (
        typed("Gemm", WIDE, HALF),
        r"matrix products: bfloat16 12, float32 1 found, bfloat16 13 expected",
    ),
    "narrow norm": (narrow_norm, r"norm statistics: bfloat16 1, float32 4 found, float32 5 expected"),
    "narrow angles": (typed("Cos", HALF, WIDE), r"angles: bfloat16 1, float32 1 found, float32 2 expected"),
    "wide activation": (
        typed("Gelu", WIDE, HALF),
        r"activations: bfloat16 2, float32 1 found, bfloat16 3 expected",
    ),
    "wide attention": (typed("Attention", WIDE, HALF), r"fused attention"),
    "cast pair": (rounded, r"casts there and back: 1 pairs, at most 0 expected"),
    "dead end": (dead_end, r"inputs read: no output hangs on frame_counts_b"),
    "another table": (another_table, r"inputs read: no output hangs on frame_counts_b"),
}


@real
@pytest.mark.parametrize(("fault", "reason"), FAULTS.values(), ids=FAULTS)
def test_what_the_program_does_not_do_stops_the_build(job: Job, tmp_path: Path, fault, reason: str):
    with pytest.raises(UnsupportedError, match=reason):
        build(planted(job, tmp_path, fault), tmp_path)
    assert not (tmp_path / ENGINE).exists()


def ragged_job(folder: Path, unread: tuple[str, ...], library: str = "tensorrt_rtx") -> Job:
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
    bounds = ((1, 4, 4, 16), (4, 4, 64, 16), (8, 4, 256, 16))
    return Job(
        library=library,
        model=str(folder / "ragged.onnx"),
        engine=str(folder / ENGINE),
        targets=("sm89",),
        profiles={"any": {**dict.fromkeys("qkv", bounds), "lengths": ((1,), (4,), (8,))}},
        plan=Network(
            inputs={**dict.fromkeys("qkv", "bfloat16"), "lengths": "int64"},
            outputs={"mixed": "bfloat16"},
            unread=unread,
            attention={"bfloat16": 1},
            products={},
            statistics={},
            angles={},
            activations={},
        ),
    )


@real
def test_an_input_is_dropped_only_where_the_program_does_not_read_it(tmp_path: Path):
    with pytest.raises(UnsupportedError, match=r"inputs read: no output hangs on lengths"):
        build(ragged_job(tmp_path, ()), tmp_path)
    assert not (tmp_path / ENGINE).exists()
    assert build(ragged_job(tmp_path, ("lengths",)), tmp_path).engine_bytes > 0


def test_a_warning_that_an_input_is_dropped_stops_the_build():
    lines = ["Unused Input: lengths", "Unused Input: order", "Local timing cache"]
    network.refuse_dropped(lines, ("lengths", "order"))
    with pytest.raises(UnsupportedError, match=r"the library ignores order among the inputs"):
        network.refuse_dropped(lines, ("lengths",))


def test_a_weakly_typed_network_is_refused():
    """Networks of this library are typed whatever is requested; an older one could be weak."""
    library = SimpleNamespace(NetworkDefinitionCreationFlag=SimpleNamespace(STRONGLY_TYPED=0))
    found = network_check.typing_of(library, SimpleNamespace(get_flag={0: False}.get))
    assert found.wrong == "weak found, strong expected: the library could choose types"


@real
def test_bounds_that_the_library_does_not_keep_stop_the_build(job: Job, tmp_path: Path):
    (name, inputs), *_ = job.profiles.items()
    low, usual, high = inputs["patches"]
    spec = replace(job, profiles={name: {**inputs, "patches": (high, usual, low)}})
    with pytest.raises(UnsupportedError, match=rf"profile {name}"):
        build(spec, tmp_path)


@real
@pytest.mark.parametrize(
    ("targets", "error", "reason"),
    [
        (("sm89", "sm90"), UnsupportedError, r"does not build for sm90\. It builds for: sm75, sm80"),
        (("sm75",), MisfitError, r"builds no engine for sm75.*Build in another dtype"),
    ],
)
def test_a_target_is_refused_that_the_library_or_the_dtype_lacks(job: Job, tmp_path, targets, error, reason):
    with pytest.raises(error, match=reason):
        build(replace(job, targets=targets), tmp_path)
    assert not (tmp_path / ENGINE).exists()


SEVERITY = SimpleNamespace(ERROR=1, INTERNAL_ERROR=0, WARNING=2, INFO=3)
LINES = [
    "Total Host Persistent Memory: 80 bytes",
    "Total Activation Memory: 118369280 bytes",
    "[BlockAssignment] Algorithm ShiftNTopDown took 0.02ms to assign 1 blocks to 1 nodes requiring 7 bytes.",
    "Total Activation Memory: 70785536 bytes",
    "Total Weights Memory: 482176 bytes",
]


@pytest.mark.parametrize(
    ("lines", "num_profiles", "memory"),
    [
        (LINES, 2, (482176, (118369280, 70785536))),
        (LINES, 3, (0, ())),
        (LINES[:-1], 2, (0, ())),
        ([], 1, (0, ())),
    ],
    ids=["one number a profile", "another number of profiles", "no weights", "nothing"],
)
def test_memory_is_read_from_the_log_and_never_guessed(lines, num_profiles, memory):
    log = network.Log(SimpleNamespace(ILogger=type("ILogger", (), {"Severity": SEVERITY})))
    log.remarks += lines
    assert log.memory(num_profiles) == memory
