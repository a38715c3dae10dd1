"""The proof that a bundle carries: it passes where the engine is right, and shows faults of an engine."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from PIL import Image

from tests.cli.lines import vlexport
from tests.runtime.recorded import CHECKPOINT
from vlexport import RuntimeOptions, build, load
from vlexport.backends import Engine, Options, find_backend, onnxruntime
from vlexport.bundle import Bundle
from vlexport.bundle.files import record_of
from vlexport.bundle.trust import Proved, Trust
from vlexport.checkpoint import Checkpoint
from vlexport.errors import ParityError
from vlexport.integrations.vllm.bundle_tower import BundleSettings, BundleTower, open_tower
from vlexport.parity.samples import random_items
from vlexport.runtime.encoder import Encoder, EncoderOptions, EncoderOutput
from vlexport.runtime.opening import open_engine
from vlexport.runtime.outputs import digest_of, rows_of
from vlexport.runtime.proof import CALLS, CHECK, JOB, ProofResult, prove
from vlexport.runtime.request import EncoderInput

NO_OPENVINO = find_backend("openvino").missing()
Plant = Callable[[onnx.ModelProto], None]
# What the plugin reads of a tower of vLLM.
MODEL = {"dtype": torch.float32, "device": torch.device("cpu"), "input_norm": torch.Tensor.to}
# A module that is None cannot be imported.
ALONE = """
import runpy, sys
sys.modules.update(dict.fromkeys(["torch", "vlexport", "transformers", "safetensors", "onnx"]))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="session")
def bundle(bundles: Callable[[str], Path]) -> Bundle:
    return Bundle.open(bundles("onnxruntime"))


@pytest.fixture(scope="session")
def integers(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return build(CHECKPOINT, quantize="int8", output_dir=tmp_path_factory.mktemp("integers"))


@pytest.fixture(scope="session", params=["bundle", pytest.param("integers", marks=pytest.mark.slow)])
def either(request: pytest.FixtureRequest) -> Bundle:
    """A bundle of ONNX Runtime in float32 and in int8."""
    bundle: Bundle = request.getfixturevalue(request.param)
    return bundle


@pytest.fixture
def copy(bundle: Bundle, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle.path, tmp_path / "copy"))


def checked_alone(path: Path) -> subprocess.CompletedProcess[str]:
    """Run the bundle's own program in a process that has numpy and the library alone."""
    words = (sys.executable, "-c", ALONE, path / CHECK)
    return subprocess.run(words, capture_output=True, text=True, check=False)


def problem_of(bundle: Bundle) -> str:
    with open_engine(bundle) as engine:
        return prove(bundle, engine).problem


def is_missed(faulty: Bundle) -> bool:
    """Return whether the library or the program alone does not see a fault."""
    return not problem_of(faulty) or checked_alone(faulty.path).returncode != 3


def rehashed(path: Path) -> Bundle:
    """Write the manifest of the files as they are now, and trust it."""
    manifest = Bundle.inspect(path).manifest
    assert manifest is not None
    (path / "manifest.json").write_bytes(
        replace(manifest, files={name: record_of(path, name) for name in manifest.files}).encoded()
    )
    Trust.of().record(Bundle.inspect(path).digest, "built")
    return Bundle.open(path)


def test_a_bundle_proves_itself_without_its_checkpoint(bundle: Bundle) -> None:
    names = [call.name for call in bundle.manifest.proof.calls]
    assert names[0] == "mix"
    assert len(names) > 3
    assert bundle.manifest.files[CALLS].size < 3 << 20
    found = vlexport("check", bundle.path, "--run", "--json").document["proof"]
    assert (found["calls"], found["same_bits"], found["problem"]) == (len(names), len(names), "")
    assert 0 < found["share"] < 0.26, "a bound is four times the larger error of the build"
    assert str(CHECKPOINT) not in (bundle.path / JOB).read_text()


def test_the_program_in_it_needs_numpy_and_the_library_alone(bundle: Bundle, copy: Path) -> None:
    assert len((bundle.path / CHECK).read_text().splitlines()) <= 200
    ran = checked_alone(copy)
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stderr
    assert bundle.digest in ran.stdout
    assert f"passed: {len(bundle.manifest.proof.calls)} calls, 0 outputs over a limit" in ran.stdout


@pytest.mark.parametrize("name", [CALLS, CHECK, JOB, "model.weights"])
def test_a_changed_proof_is_a_damaged_bundle(name: str, copy: Path) -> None:
    content = bytearray((copy / name).read_bytes())
    content[-2] ^= 1
    (copy / name).chmod(0o600)
    (copy / name).write_bytes(content)
    assert vlexport("check", copy, "--run").code == 5
    if name in (CALLS, "model.weights"):
        ran = checked_alone(copy)
        assert (ran.returncode, f"not as its manifest says: {name}." in ran.stdout) == (5, True)


def test_a_bound_that_is_no_number_is_refused(copy: Path) -> None:
    content = json.loads((copy / "manifest.json").read_text())
    for bound in (None, "inf", "nan"):
        content["proof"]["calls"][0]["bounds"]["embeds"]["worst_token"] = bound
        (copy / "manifest.json").write_text(json.dumps(content))
        assert "worst_token" in str(Bundle.inspect(copy).problem)


def test_it_runs_once_on_a_new_machine_and_not_at_all_on_that_of_the_build(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened() -> None:
        load(bundle.path, runtime=RuntimeOptions(prove="new")).close()

    ran = []

    def counted(bundle: Bundle, engine: Engine) -> ProofResult:
        ran.append(bundle)
        return prove(bundle, engine)

    monkeypatch.setattr("vlexport.runtime.proof.prove", counted)
    opened()
    assert not ran
    monkeypatch.setattr("vlexport.runtime.proof.processor_here", lambda: "another processor")
    opened()
    opened()
    assert len(ran) == 1
    assert any("another processor" in machine for machine in Proved.of().read(bundle.digest))


def test_a_proof_that_passed_is_told_where_it_cannot_be_recorded(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("vlexport.runtime.proof.processor_here", lambda: "another processor")
    # A folder that nobody can make, root neither.
    nowhere = Proved(folder=Path("/dev/null/proved"))
    monkeypatch.setattr(Proved, "of", classmethod(lambda _: nowhere))
    load(bundle.path, runtime=RuntimeOptions(prove="new")).close()
    assert "/dev/null/proved" in caplog.text
    assert "the proof that passed cannot be recorded" in caplog.text


def test_a_newer_library_that_passes_it_opens_the_bundle(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = rehashed(copy).manifest.target
    monkeypatch.setattr(onnxruntime.OnnxRuntime, "target", lambda _: replace(there, version="999.0"))
    refused = vlexport("check", copy)
    assert (refused.code, f"vlexport check {copy} --run" in refused.err) == (4, True), refused.err
    assert vlexport("check", copy, "--run").code == 0
    assert vlexport("check", copy).code == 0


def flipped(name: str, place: int, bit: int) -> Plant:
    def change(values: Any) -> Any:
        changed = values.copy()
        changed.reshape(-1).view(np.uint32)[place] ^= np.uint32(1 << bit)
        return changed

    return stored(name, change)


def swapped(name: str) -> Plant:
    return stored(name, lambda values: np.concatenate([values[:1], values[2:0:-1], values[3:]]))


def stored(name: str, change: Callable[[Any], Any]) -> Plant:
    def plant(model: onnx.ModelProto) -> None:
        weight = next(tensor for tensor in model.graph.initializer if tensor.name == name)
        weight.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(weight)), name))

    return plant


def attribute(operator: str, number: int, name: str, change: Callable[[float], float]) -> Plant:
    def plant(model: onnx.ModelProto) -> None:
        node = [node for node in model.graph.node if node.op_type == operator][number]
        value = next(entry for entry in node.attribute if entry.name == name)
        if value.type == onnx.AttributeProto.FLOAT:
            value.f = change(value.f)
        else:
            value.i = int(change(value.i))

    return plant


def rounded(number: int) -> Plant:
    """A kernel that gives the nearest bfloat16."""

    def plant(model: onnx.ModelProto) -> None:
        at, node = [
            (at, node)
            for at, node in enumerate(model.graph.node)
            if node.op_type in ("Gemm", "SegmentAttention")
        ][number]
        result = node.output[0]
        node.output[0] = f"{result}.exact"
        casts = (
            helper.make_node("Cast", [f"{result}.exact"], [f"{result}.bits"], to=onnx.TensorProto.BFLOAT16),
            helper.make_node("Cast", [f"{result}.bits"], [result], to=onnx.TensorProto.FLOAT),
        )
        for place, cast in enumerate(casts, start=at + 1):
            model.graph.node.insert(place, cast)

    return plant


def rolled(table: str) -> Plant:
    """Windows, frames or positions that are off by one row."""

    def plant(model: onnx.ModelProto) -> None:
        for node in model.graph.node:
            node.input[:] = [f"{name}.rolled" if name == table else name for name in node.input]
        model.graph.initializer.extend(
            numpy_helper.from_array(np.array([value]), f"{table}.{value}") for value in (0, 1, 2**31)
        )
        first, second, end = (f"{table}.{value}" for value in (0, 1, 2**31))
        for node in (
            helper.make_node("Concat", [f"{table}.after", f"{table}.first"], [f"{table}.rolled"], axis=0),
            helper.make_node("Slice", [table, second, end, first], [f"{table}.after"]),
            helper.make_node("Slice", [table, first, second, first], [f"{table}.first"]),
        ):
            model.graph.node.insert(0, node)

    return plant


def faults(model: onnx.ModelProto) -> Iterator[tuple[str, Plant]]:
    weights = [tensor for tensor in model.graph.initializer if tensor.name.endswith(("weight", "bias"))]
    drawn = np.random.default_rng(0)
    for number in range(30):
        weight = weights[drawn.integers(len(weights))]
        place, bit = int(drawn.integers(np.prod(weight.dims))), 23 + number % 8
        yield f"exponent bit {bit - 23} of {weight.name}", flipped(weight.name, place, bit)
    for weight in [weight for weight in weights if len(weight.dims) == 2][:8]:
        yield f"rows of {weight.name} swapped", swapped(weight.name)
    kinds = [node.op_type for node in model.graph.node]
    for number in range(kinds.count("SimplifiedLayerNormalization")):
        larger = attribute("SimplifiedLayerNormalization", number, "epsilon", lambda epsilon: 1000 * epsilon)
        yield f"epsilon of norm {number}", larger
    for number in range(kinds.count("SegmentAttention")):
        yield f"scale {number}", attribute("SegmentAttention", number, "scale", lambda scale: 1.001 * scale)
    yield "rotary interleaved", attribute("RotaryEmbedding", 0, "interleaved", lambda _: 1)
    yield "slope of an activation", attribute("QuickGelu", 0, "alpha", lambda alpha: 1.001 * alpha)
    for number in range(kinds.count("Gemm") + kinds.count("SegmentAttention")):
        yield f"kernel {number} in bfloat16", rounded(number)
    for table in ("order", "inverse", "frame_order", "frame_inverse", "positions"):
        yield f"{table} off by one", rolled(table)


def planted_in(path: Path, plant: Plant) -> Bundle:
    model = onnx.load(path / "model.onnx")
    plant(model)
    for file in ("model.onnx", "model.weights"):
        (path / file).unlink()
    onnx.save_model(model, path / "model.onnx", save_as_external_data=True, location="model.weights")
    return rehashed(path)


@pytest.mark.slow
def test_faults_planted_in_a_stored_engine_are_refused_by_it_and_by_the_program_alone(
    bundle: Bundle, tmp_path: Path
) -> None:
    planted = list(faults(onnx.load(bundle.path / "model.onnx")))
    missed, differing = [], []
    for number, (name, plant) in enumerate(planted):
        path = tmp_path / str(number)
        shutil.copytree(bundle.path, path)
        problem = problem_of(planted_in(path, plant))
        if not problem:
            missed.append(name)
        if number % 8 == 0 and checked_alone(path).returncode != (3 if problem else 0):
            differing.append(name)
        shutil.rmtree(path)
    assert len(planted) >= 60
    assert len(missed) <= len(planted) // 30, missed
    assert differing == []


@pytest.mark.slow
def test_scales_of_other_rows_are_refused_in_integers(integers: Bundle, tmp_path: Path) -> None:
    names = [tensor.name for tensor in onnx.load(integers.path / "model.onnx").graph.initializer]
    scales, missed = [name for name in names if name.endswith(".scale")], []
    for number, name in enumerate(scales):
        path = shutil.copytree(integers.path, tmp_path / str(number))
        if is_missed(planted_in(path, stored(name, lambda scale: np.roll(scale, 1)))):
            missed.append(name)
        shutil.rmtree(path)
    assert len(scales) >= 20
    assert missed == []


@pytest.mark.slow
@pytest.mark.skipif(NO_OPENVINO is not None, reason=str(NO_OPENVINO))
def test_scales_of_other_rows_are_refused_in_integers_of_openvino(tmp_path: Path) -> None:
    openvino = importlib.import_module("openvino")
    built = build(CHECKPOINT, "openvino", quantize="int8", output_dir=tmp_path)
    assert problem_of(built) == ""

    def scales(model: Any) -> Iterator[Any]:
        for node in model.get_ordered_ops():
            rows = [port.get_source_output().get_node() for port in node.inputs()]
            if [row.get_type_name() for row in rows] == ["Convert", "Reshape"]:
                yield rows[1].input(0).get_source_output().get_node()

    count = len(list(scales(openvino.Core().read_model(built.path / "model.xml"))))
    missed = []
    for number in range(count):
        path = shutil.copytree(built.path, tmp_path / str(number))
        model = openvino.Core().read_model(built.path / "model.xml")
        scale = list(scales(model))[number]
        other = openvino.op.Constant(np.roll(scale.data, 1))
        scale.output(0).replace(other.output(0))
        for name in ("model.xml", "model.bin"):
            (path / name).unlink()
        openvino.save_model(model, path / "model.xml", compress_to_fp16=False)
        if is_missed(rehashed(path)):
            missed.append(scale.get_friendly_name())
        shutil.rmtree(path)
    assert count >= 20
    assert missed == []


def test_a_failed_proof_names_call_output_and_bound_and_nothing_opens(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty = planted_in(copy, swapped("merger.mlp.2.weight"))
    ran = vlexport("check", copy, "--run")
    assert ran.code == 3
    assert "embeds of 'mix': relative_l2" in ran.err
    monkeypatch.setattr("vlexport.runtime.proof.processor_here", lambda: "another processor")
    with pytest.raises(ParityError, match="its proof failed on this machine"):
        load(faulty, runtime=RuntimeOptions(prove="new"))
    entry = BundleSettings(bundle=str(copy), prove="new")
    with pytest.raises(ParityError, match="its proof failed on this machine"):
        open_tower(entry, Checkpoint.open(CHECKPOINT), given_bytes=True)
    assert not any("another processor" in machine for machine in Proved.of().read(faulty.digest))


def test_the_manifest_says_that_bits_of_an_item_are_its_own(either: Bundle) -> None:
    assert either.manifest.proof.deterministic == "item"


@pytest.mark.parametrize("threads", [1, 2])
def test_an_item_has_the_same_bits_in_any_company(either: Bundle, threads: int) -> None:
    with load(either.path, options=Options(threads=threads)) as pipeline:
        session = pipeline.session
        for seed in range(8):
            mix = [
                ("image", (1, 2 * (1 + seed), 4)),
                ("video", (2, 4, 8)),
                ("image", (1, 16, 2 * (2 + seed))),
            ]
            items = random_items(session.recipe, session.config, mix, seed=seed)
            alone = [digest_of(rows_of(session.run([item])[0])) for item in items]
            for order in ([0, 1, 2], [2, 0, 1], [1, 2], [0, 2]):
                rows = session.run([items[at] for at in order])
                assert [digest_of(rows_of(each)) for each in rows] == [alone[at] for at in order]


@pytest.mark.parametrize("threads", [1, 2])
def test_every_way_to_an_item_gives_its_bits(either: Bundle, threads: int) -> None:
    mix = [("image", (1, 2, 2)), ("video", (4, 4, 6)), ("image", (1, 6, 10)), ("image", (1, 4, 2))]
    with load(either.path, options=Options(threads=threads)) as pipeline:
        session = pipeline.session
        items = random_items(session.recipe, session.config, mix, seed=0)
        alone = [session.run([item])[0].embeds for item in items]
        entries = [EncoderInput(item=item) for item in items]
        packed = torch.cat([item.patches for item in items])
        grids = [item.grid for item in items]
        counts = [len(rows) for rows in alone]
        ways = {
            "encode_items": [encoded.embeds for encoded in pipeline.encode_items(items)],
            "packed": session.run_packed(packed, grids).split(counts),
            "the tower in vLLM": BundleTower(session, MODEL | {"out_hidden_size": session.width})(
                packed, grids
            ).split(counts),
        }
        # The video is cut between frames at the smaller numbers.
        for most in (6, 12, 40):
            outcomes = Encoder(session, EncoderOptions(max_tokens=most)).encode(entries)
            ways[f"calls of {most} tokens"] = [
                outcome.encoded.embeds for outcome in outcomes if isinstance(outcome, EncoderOutput)
            ]
        for way, rows in ways.items():
            assert list(map(torch.equal, rows, alone)) == [True] * len(items), way


def test_a_collection_in_other_shards_holds_the_same_bits(either: Bundle, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    (tmp_path / "photos").mkdir()
    for at in range(7):
        picture = draw.integers(0, 256, (28 + 14 * at, 84 - 7 * at, 3), dtype=np.uint8)
        Image.fromarray(picture).save(tmp_path / f"photos/{at}.png")

    def digests(*words: object) -> list[str]:
        out = tmp_path / "-".join(map(str, words))
        ran = vlexport(
            "encode", either.path, "--image", tmp_path / "photos/*.png", "--output-dir", out, *words
        )
        assert ran.code == 0, ran.err
        lines = (out / "index.jsonl").read_text().splitlines()
        return [entry["rows_sha256"] for entry in map(json.loads, lines)]

    whole = digests("--shard-items", 7)
    assert len(set(whole)) == 7
    assert digests("--shard-items", 2) == digests("--shard-items", 3, "--threads", 2) == whole


def test_weights_are_stored_in_the_shape_that_products_take(bundle: Bundle) -> None:
    """ONNX Runtime adds up in other steps, by threads and company, where a weight is reshaped first."""
    graph = onnx.load(bundle.path / "model.onnx").graph
    stored = {tensor.name for tensor in graph.initializer}
    assert [node.name for node in graph.node if node.op_type == "Reshape" and node.input[0] in stored] == []
    products = [node for node in graph.node if node.op_type in ("Gemm", "MatMul")]
    assert len(products) > 5
    assert all(node.input[1] in stored for node in products)


# Numbers of threads, and instruction sets that the libraries are held to.
MACHINES: list[tuple[str, dict[str, str], int]] = [
    *[("onnxruntime", {}, threads) for threads in (1, 2, 3, 4)],
    *[("openvino", {}, threads) for threads in (1, 2, 3)],
    # For SSE4.1 OpenVINO 2026.4 compiles no tower ("bad combination").
    *[("openvino", {"ONEDNN_MAX_CPU_ISA": level}, 0) for level in ("AVX", "AVX2")],
    *[("eager", {"OMP_NUM_THREADS": str(threads)}, 0) for threads in (1, 2, 3)],
    *[("eager", {"ATEN_CPU_CAPABILITY": level}, 0) for level in ("default", "avx2")],
    *[("eager", {"MKL_ENABLE_INSTRUCTIONS": level}, 0) for level in ("SSE4_2", "AVX2")],
    *[("eager", {"MKL_CBWR": level}, 0) for level in ("COMPATIBLE", "SSE4_2", "AVX2")],
    ("eager", {"ONEDNN_MAX_CPU_ISA": "SSE41"}, 0),
    ("eager", {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "OMP_NUM_THREADS": "2"}, 0),
]
PROVE = """
import sys
from vlexport.backends import Options
from vlexport.bundle import Bundle
from vlexport.runtime.opening import open_engine
from vlexport.runtime.proof import prove

bundle = Bundle.open(sys.argv[1])
result = prove(bundle, open_engine(bundle, options=Options(threads=int(sys.argv[2]))))
print(result.share, result.problem)
sys.exit(bool(result.problem))
"""


@pytest.mark.full
@pytest.mark.parametrize(("backend", "environment", "threads"), MACHINES)
def test_right_machines_pass(
    bundles: Callable[[str], Path], backend: str, environment: dict[str, str], threads: int
) -> None:
    words = (sys.executable, "-c", PROVE, bundles(backend), str(threads))
    ran = subprocess.run(
        words, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
