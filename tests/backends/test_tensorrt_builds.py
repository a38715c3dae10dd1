"""TensorRT for RTX really builds here, without a GPU; what it made of the graph is read back."""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
from vlexport.recipes.demo.qwen2_5_vl import contents
from vlexport.recipes.demo.writing import write_checkpoint

from benchmarks.towers import THREE_BILLION
from tests.cli.lines import vlexport
from tests.parity.test_float16 import SPIKED, write_spiky
from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport._build.export import export
from vlexport._build.graph import Graph
from vlexport._build.precision import measure_fp32_layers
from vlexport.backends._tensorrt.backend import ENGINE, RECORD
from vlexport.backends._tensorrt.messages import Record
from vlexport.backends.tensorrt_rtx import BACKEND as RTX
from vlexport.checkpoint import Checkpoint
from vlexport.errors import MisfitError, ParityError, UnsupportedError
from vlexport.recipe import find_recipe
from vlexport.runtime.opening import open_engine

building = importlib.import_module("vlexport._build.build")
RECIPE = find_recipe("qwen2_5_vl")
TARGETS = ("sm86", "sm89", "sm120")
# Each takes the library 7 s.
DTYPES = [pytest.param(dtype, marks=pytest.mark.slow) for dtype in ("float16", "float32", "bfloat16")]
DEPTH = 2

pytestmark = pytest.mark.skipif(RTX.missing() is not None, reason=str(RTX.missing()))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(str(write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("tiny") / "tiny", depth=DEPTH)))


@pytest.fixture(scope="module")
def profiles(checkpoint: Checkpoint):
    known = RECIPE.profiles(RECIPE.read_config(checkpoint))
    return [known["thumbnail"], known["image"]]


@pytest.fixture(scope="module", params=DTYPES)
def graph(request: pytest.FixtureRequest, checkpoint: Checkpoint, profiles) -> Graph:
    return export(RECIPE, checkpoint, profile=profiles[0], dtype=request.param, form="padded")


@pytest.fixture(scope="module")
def record(graph: Graph, profiles, tmp_path_factory: pytest.TempPathFactory) -> Record:
    """One engine for three targets with two profiles."""
    out = tmp_path_factory.mktemp("built")
    RTX.build(graph, RTX.options(TARGETS, profiles), out)
    found = Record.from_json((out / RECORD).read_text())
    assert (out / ENGINE).stat().st_size == found.engine_bytes
    assert {path.name for path in out.iterdir()} == {ENGINE, RECORD}
    return found


def test_the_parsed_network_is_the_program_in_its_dtypes(record: Record, graph: Graph):
    assert [each for each in record.findings if each.wrong] == []
    assert {"inputs", "inputs read", "matrix products", "fused attention", "typing"} <= {
        each.check for each in record.findings
    }
    # Patches, four products of each block, two of the merger; two norms a block and one before the merger.
    assert record.layers["MATRIX_MULTIPLY"] == {graph.dtype: 1 + 5 * DEPTH + 2}
    assert record.layers["REDUCE"] == {"float32": 2 * DEPTH + 1}
    # One layer for the block with windows, three for the full one.
    assert record.layers["ATTENTION_OUTPUT"] == {graph.dtype: 1 + 3}
    assert record.targets == TARGETS


def test_half_precision_gets_fused_attention_and_float32_is_taken_apart(record: Record, graph: Graph):
    expected = "decomposed" if graph.dtype == "float32" else "fused"
    assert set(record.attention.values()) == {expected}


def test_profiles_hold_the_shapes_of_their_symbols(record: Record, profiles):
    assert list(record.profiles) == ["thumbnail", "image"]
    inputs = record.profiles["image"]
    tokens = next(known for symbol, known in profiles[1].ranges.items() if symbol.name == "tokens")
    assert [shape[0] for shape in inputs["patches"]] == [4 * tokens.min, 4 * tokens.opt, 4 * tokens.max]


def test_the_library_reports_how_much_memory_of_a_gpu_each_profile_takes(record: Record, graph: Graph):
    values = sum(tensor.numel() for tensor in graph.program.state_dict.values() if tensor.is_floating_point())
    exact = values * {"float32": 4, "bfloat16": 2, "float16": 2}[graph.dtype]
    # Each weight begins at a round address; patches of the tiny tower are the largest.
    assert exact <= record.weights_bytes <= exact * 1.1
    # Attention that is taken apart may take more while it runs, so nothing is stated.
    assert list(record.context_bytes) == ([] if graph.dtype == "float32" else ["thumbnail", "image"])
    # Outputs and tables apart, every profile holds at least one row of a block for its patches.
    for name, taken in record.context_bytes.items():
        assert taken > record.profiles[name]["patches"][2][0] * 64 * (exact // values)


@pytest.mark.slow
@pytest.mark.parametrize(
    "target", ["sm75", *(pytest.param(name, marks=pytest.mark.full) for name in ("sm80", "sm121"))]
)
def test_the_other_targets_are_served_too_the_oldest_in_float16_only(graph, profiles, target, tmp_path):
    if target == "sm75" and graph.dtype != "float16":
        with pytest.raises((MisfitError, UnsupportedError), match=r"(?s)no engine for sm75.*another dtype"):
            RTX.build(graph, RTX.options((target,), profiles), tmp_path)
        return
    RTX.build(graph, RTX.options((target,), profiles), tmp_path)
    found = Record.from_json((tmp_path / RECORD).read_text())
    assert found.targets == (target,)
    assert [each for each in found.findings if each.wrong] == []


def test_an_unserved_target_is_refused_with_those_that_are(checkpoint: Checkpoint):
    spec = building.request(checkpoint, backend="tensorrt_rtx", profile="thumbnail", targets=("sm90",))
    with pytest.raises(UnsupportedError, match=r"sm90 given.*sm75, sm80, sm86, sm89, sm120, sm121"):
        building.build_key(spec)


def test_other_backends_refuse_targets(checkpoint: Checkpoint):
    with pytest.raises(UnsupportedError, match=r"backend 'eager' builds for this machine only"):
        building.request(checkpoint, backend="eager", targets=("sm89",))


@pytest.mark.seconds
def test_a_profile_that_no_memory_holds_is_refused_by_name(checkpoint: Checkpoint, tmp_path: Path):
    graph = export(RECIPE, checkpoint, form="padded")
    with pytest.raises(UnsupportedError, match=r"profile 'any'.*image,video"):
        RTX.build(graph, RTX.options(("sm89",), (graph.profile,)), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def built(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory):
    spec = building.request(
        checkpoint,
        backend="tensorrt_rtx",
        dtype="bfloat16",
        profile="thumbnail,image",
        targets=("sm89",),
        output_dir=tmp_path_factory.mktemp("engines"),
    )
    return spec, building.build_checkpoint(spec)


@pytest.mark.slow
def test_a_build_without_its_device_never_is_passed_and_is_found_again(built):
    spec, made = built
    assert made.bundle.manifest.parity.status == "not_run"
    assert "built for sm89; this machine has" in made.bundle.manifest.encoded().decode()
    assert made.require_passed() is made.bundle
    assert building.build_checkpoint(spec).cached


@pytest.mark.slow
def test_a_bundle_for_another_device_is_refused_by_its_manifest(built):
    bundle = built[1].bundle
    assert bundle.manifest.target.device == "sm89"
    with pytest.raises(MisfitError, match=r"device is sm89 in the bundle and"):
        open_engine(bundle)
    with pytest.raises(MisfitError, match=r"device is sm89 in the bundle and"):
        open_engine(bundle, allow_failed=True)


@pytest.mark.slow
def test_an_engine_nobody_has_run_is_refused_on_its_device(built, monkeypatch):
    bundle = built[1].bundle
    monkeypatch.setattr("vlexport.backends._tensorrt.backend.device_here", lambda: "sm89")
    with pytest.raises(ParityError, match=r"built where it could not run.*vlexport check"):
        open_engine(bundle)


@pytest.fixture(scope="module")
def spiky(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write_spiky(tmp_path_factory.mktemp("spiky") / "tiny")


def spiky_spec(spiky: Checkpoint, into: Path, fp32_layers: dict[str, str] | None):
    return building.request(
        spiky,
        backend="tensorrt_rtx",
        dtype="float16",
        profile="thumbnail",
        fp32_layers=fp32_layers,
        targets=("sm89",),
        output_dir=into,
    )


@pytest.mark.slow
def test_weights_that_overflow_float16_pass_the_gate_with_fp32_layers_that_are_named(spiky, tmp_path):
    made = building.build_checkpoint(spiky_spec(spiky, tmp_path, None))
    manifest = made.bundle.manifest
    record = Record.from_json((made.bundle.path / RECORD).read_text())
    assert dict(manifest.precision.fp32_layers) == SPIKED
    rows = [row for row in manifest.parity.table["rows"] if row["level"] in ("L0", "L2", "L3")]
    # What an engine of this library hides is named and stays unseen.
    others = [row["check"] for row in rows if row["verdict"] != "passed" and "not seen: " not in row["note"]]
    assert (manifest.parity.status, others) == ("not_run", [])
    assert "float32: blocks.0.mlp, blocks.1, blocks.1.mlp" in manifest.encoded().decode()
    # Three products of each of the two MLPs.
    assert record.layers["MATRIX_MULTIPLY"]["float32"] == 6


@pytest.mark.slow
def test_naive_float16_of_the_same_weights_fails_the_gate(spiky, tmp_path):
    made = building.build_checkpoint(spiky_spec(spiky, tmp_path, {}))
    assert made.bundle.manifest.parity.status == "failed"
    with pytest.raises(ParityError, match="was not shown to agree with the reference"):
        made.require_passed()


def test_fp32_layers_are_a_part_of_the_key(spiky, tmp_path):
    naive = building.build_key(spiky_spec(spiky, tmp_path, {}))
    measured = building.build_key(spiky_spec(spiky, tmp_path, None))
    assert measured == replace(naive, fp32_layers=SPIKED)


THREE = ("thumbnail", "image", "video")
OTHER_SIZES = [(160, "bfloat16"), (320, "float32"), (320, "bfloat16"), (640, "float32")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hidden", "dtype"),
    [
        (160, "float32"),
        (640, "bfloat16"),
        *(pytest.param(*each, marks=pytest.mark.full) for each in OTHER_SIZES),
    ],
)
def test_plan_is_within_a_third_of_what_is_built(tmp_path: Path, dtype: str, hidden: int):
    """Measured: half precision at most 12 %, engines in float32 a quarter off."""
    sizes = replace(
        THREE_BILLION, hidden=hidden, heads=hidden // 80, inner=3 * hidden, depth=2, with_decoder=False
    )
    source = write_checkpoint(tmp_path / "checkpoint", contents(sizes), seed=0)
    words = ("--backend", "tensorrt_rtx", "--targets", "sm89", "--dtype", dtype)
    planned = vlexport("plan", source, *words, "--profile", ",".join(THREE), "--json").document["device"]
    checkpoint = Checkpoint.open(str(source))
    known = RECIPE.profiles(RECIPE.read_config(checkpoint))
    profiles = [known[name] for name in THREE]
    graph = export(RECIPE, checkpoint, profile=profiles[0], dtype=dtype, form="padded")
    RTX.build(graph, RTX.options(("sm89",), profiles), tmp_path)
    record = Record.from_json((tmp_path / RECORD).read_text())
    assert planned["engine_bytes"] == pytest.approx(record.engine_bytes, rel=0.3)
    assert planned["device_weights_bytes"] == pytest.approx(record.weights_bytes, rel=0.05)
    calls = planned["device_call_bytes"]
    assert list(calls) == list(THREE)
    assert (dtype == "float32") == (record.context_bytes == {}) == (set(calls.values()) == {None})
    for name, taken in record.context_bytes.items():
        # Inputs are counted too, the patches by far the largest of them.
        rows, width = record.profiles[name]["patches"][2]
        assert calls[name] - 2 * rows * width == pytest.approx(taken, rel=0.3)


RELEASED_DEPTH, FULL_BLOCKS = 32, 4
# Widths of the language models that read the tokens.
OUT = {"3B": 2048, "7B": 3584}
MEMORY = 24 * 2**30


@pytest.fixture(scope="module", params=list(OUT))
def released(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    sizes = replace(THREE_BILLION, out=OUT[request.param], with_decoder=False)
    folder = tmp_path_factory.mktemp("full") / request.param
    return Checkpoint.open(str(write_checkpoint(folder, contents(sizes), seed=0)))


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_tower_of_full_size_is_built_for_two_gpus_with_two_profiles(released, dtype, tmp_path):
    known = RECIPE.profiles(RECIPE.read_config(released))
    profiles = [known["image"], known["video"]]
    fp32_layers = measure_fp32_layers(RECIPE, released, "padded") if dtype == "float16" else {}
    graph = export(RECIPE, released, profile=profiles[0], dtype=dtype, form="padded", fp32_layers=fp32_layers)
    RTX.build(graph, RTX.options(("sm89", "sm120"), profiles), tmp_path)
    record = Record.from_json((tmp_path / RECORD).read_text())
    gibibytes = (record.engine_bytes / 2**30, record.peak_bytes / 2**30)
    print(f"{dtype}: {record.seconds:.0f} s, engine {gibibytes[0]:.2f} GiB, peak {gibibytes[1]:.1f} GiB")
    assert fp32_layers == {}
    assert [each for each in record.findings if each.wrong] == []
    # Patches, five products of each block, two of the merger.
    assert record.layers["MATRIX_MULTIPLY"] == {dtype: 1 + 5 * RELEASED_DEPTH + 2}
    # One for each block with windows, one for each shelf of a full block.
    assert record.layers["ATTENTION_OUTPUT"] == {dtype: RELEASED_DEPTH - FULL_BLOCKS + 3 * FULL_BLOCKS}
    assert set(record.attention.values()) == {"fused"}
    assert (tmp_path / ENGINE).stat().st_size == record.engine_bytes
    assert record.peak_bytes < MEMORY
